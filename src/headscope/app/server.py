"""The routes of the page: its files, the atlas, questions to the model, and the queue."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import mimetypes
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from headscope.app import summary
from headscope.app.guard import Guard
from headscope.app.jobs import sentence
from headscope.app.session import MOST_SECONDS, MOST_TOKENS, Session
from headscope.app.wire import as_json, as_matrix
from headscope.core.errors import HeadscopeError, UsageError
from headscope.core.registry import methods
from headscope.verify import ROLES

STATIC = Path(__file__).parent / "static"
IMPORT_MAP = re.compile(r'<script type="importmap">(.*?)</script>', re.DOTALL)
#: the style sheet of a few rules that Observable Plot puts into every chart of class "plot"
PLOT_STYLE = "sha256-+TfQir1nvDucAdvE6XUQBt4ayUjpAWkbw2kCdSfekHM="


class Busy(HeadscopeError):
    """The model did not answer in time."""


@cache
def page() -> str:
    """The one HTML file, which all addresses of views show."""
    return (STATIC / "index.html").read_text(encoding="utf-8")


@cache
def policy() -> str:
    """What the browser may load: our own files, and the import map by its hash. No code in the page, no other site."""
    found = IMPORT_MAP.search(page())
    assert found is not None
    import_map = base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'self' 'sha256-{import_map}'; style-src 'self' '{PLOT_STYLE}'; img-src 'self' "
        "data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def create(session: Session, *, hosts: set[str] | None, token: str | None = None) -> Guard:
    """The ASGI application. `hosts`: values of the Host header that it answers to; None for any, with a token."""
    views = ["/", "/head/{layer:int}/{head:int}", "/prompt", "/runs"]
    api = [
        Route("/state", _state),
        Route("/atlas", _atlas),
        Route("/scores/{method}", _scores),
        Route("/agreement", _agreement),
        Route("/head/{layer:int}/{head:int}", _head),
        Route("/pattern", _pattern, methods=["POST"]),
        Route("/written", _written, methods=["POST"]),
        Route("/copies", _copies, methods=["POST"]),
        Route("/ablate", _ablate, methods=["POST"]),
        Route("/choices", _choices),
        Route("/jobs", _jobs, methods=["GET"]),
        Route("/jobs", _start, methods=["POST"]),
        Route("/jobs/{number:int}/cancel", _cancel, methods=["POST"]),
    ]
    app = Starlette(
        routes=[
            *(Route(path, _page) for path in views),
            Mount("/api", routes=api),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        exception_handlers={HeadscopeError: _refused, HTTPException: _missing, Exception: _failed},
    )
    app.state.session = session
    # some systems call it plain text, and then the browser refuses to run it
    mimetypes.add_type("text/javascript", ".js")
    # around everything, so that an answer to an unforeseen error passes it as well
    return Guard(app, hosts=hosts, token=token, policy=policy())


async def _page(request: Request) -> Response:
    return HTMLResponse(page())


async def _refused(request: Request, error: Exception) -> Response:
    return as_json({"error": sentence(error)}, 503 if isinstance(error, Busy) else 400)


async def _missing(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    text = "There is nothing at this address." if status == 404 else "This address does not take such a request."
    return as_json({"error": text}, status)


async def _failed(request: Request, error: Exception) -> Response:
    return as_json({"error": sentence(error)}, 500)


def _session(request: Request) -> Session:
    session: Session = request.app.state.session
    return session


# the atlas


async def _state(request: Request) -> Response:
    session = _session(request)
    return as_json(
        {
            "model": session.name,
            "state": session.state,
            "refused": session.refused,
            "atlas": session.atlas is not None,
            "out": None if session.out is None else str(session.out),
            "limits": {"tokens": MOST_TOKENS, "seconds": MOST_SECONDS},
        }
    )


async def _atlas(request: Request) -> Response:
    return as_json(summary.summary(_session(request).need_atlas()))


async def _scores(request: Request) -> Response:
    scores = summary.scores_of(_session(request).need_atlas(), request.path_params["method"])
    return as_matrix(scores.values, "float32")


async def _agreement(request: Request) -> Response:
    x, y = (request.query_params.get(name, "") for name in ("x", "y"))
    return as_json(summary.agreement(_session(request).need_atlas(), x, y))


async def _head(request: Request) -> Response:
    place = request.path_params
    return as_json(summary.head(_session(request).need_atlas(), place["layer"], place["head"]))


# questions to the model


async def _ask(request: Request, title: str, work: Callable[[], Any]) -> Any:
    """Run `work` on the thread that owns the model, and wait for it for a while."""
    jobs = _session(request).jobs
    job = jobs.ask(title, work)
    try:
        return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(job.future)), MOST_SECONDS)
    except TimeoutError:
        busy = jobs.busy()
        reason = f"The model is busy with {busy}" if busy else f"There was no answer in {MOST_SECONDS:.0f} s"
        raise Busy(f"{reason}; ask again later.") from None
    finally:
        jobs.forget(job)


async def _pattern(request: Request) -> Response:
    given = await _body(request)
    layer, head, prompt = _place(given)

    def work() -> Any:
        from headscope.app import look

        model = _session(request).model()
        ids = look.read(model, prompt, MOST_TOKENS)
        found = look.pattern(model, layer, head, ids)
        return found.float().cpu().numpy(), look.words(model, ids[0])

    values, tokens = await _ask(request, f"Pattern of L{layer}H{head}", work)
    return as_matrix(values.astype(np.float16), "float16", tokens=tokens)


async def _written(request: Request) -> Response:
    given = await _body(request)
    layer, head, prompt = _place(given)
    query, key = _get(given, "query", int), _get(given, "key", int, None)

    def work() -> Any:
        from headscope.app import look

        model = _session(request).model()
        return look.written(model, layer, head, look.read(model, prompt, MOST_TOKENS), query, key)

    return as_json(await _ask(request, f"What L{layer}H{head} writes", work))


async def _copies(request: Request) -> Response:
    given = await _body(request)
    layer, head = _get(given, "layer", int), _get(given, "head", int)
    token = _get(given, "token", str)

    def work() -> Any:
        from headscope.app import look
        from headscope.routes.extract import token_id

        model = _session(request).model()
        return look.copies(model, layer, head, token_id(model, token))

    return as_json(await _ask(request, f"Weights of L{layer}H{head}", work))


async def _ablate(request: Request) -> Response:
    given = await _body(request)
    layer, head, prompt = _place(given)

    def work() -> Any:
        from headscope.app import look

        model = _session(request).model()
        return look.without(model, layer, head, look.read(model, prompt, MOST_TOKENS))

    return as_json(await _ask(request, f"Without L{layer}H{head}", work))


# the queue


async def _choices(request: Request) -> Response:
    return as_json(
        {"methods": [name for name, spec in methods().items() if spec.kind == "score"], "roles": list(ROLES)}
    )


async def _jobs(request: Request) -> Response:
    return as_json({"jobs": _session(request).jobs.documents()})


async def _start(request: Request) -> Response:
    given = await _body(request)
    session, kind, seed = _session(request), _get(given, "kind", str), _get(given, "seed", int, 0)
    if kind == "scan":
        number = session.start_scan(_get(given, "methods", str, "quick"), seed)
    elif kind == "score":
        number = session.start_score(_get(given, "method", str), seed)
    elif kind == "verify":
        heads = _get(given, "heads", list, None)
        number = session.start_verify(_get(given, "role", str), heads, seed)
    else:
        raise UsageError(f"There is no job of kind {kind!r}; there are scan, score and verify.")
    return as_json({"id": number}, 202)


async def _cancel(request: Request) -> Response:
    return as_json(_session(request).jobs.cancel(request.path_params["number"]).document())


# reading a request

_NONE_GIVEN = object()


async def _body(request: Request) -> dict[str, Any]:
    try:
        given = json.loads(await request.body())
    except (ValueError, RecursionError):
        raise UsageError("The request is not JSON.") from None
    if not isinstance(given, dict):
        raise UsageError("The request is not a JSON object.")
    return given


def _get(given: dict[str, Any], name: str, kind: type, default: Any = _NONE_GIVEN) -> Any:
    value = given.get(name, default)
    if value is _NONE_GIVEN:
        raise UsageError(f"The request lacks {name!r}.")
    if value is default:
        return value
    if not isinstance(value, kind) or isinstance(value, bool):
        raise UsageError(f"{name!r} in the request must be of type {kind.__name__}.")
    return value


def _place(given: dict[str, Any]) -> tuple[int, int, str]:
    return _get(given, "layer", int), _get(given, "head", int), _get(given, "prompt", str)
