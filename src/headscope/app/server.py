"""The routes of the page: its files, the atlas, questions to the model, and the queue."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route

from headscope.app.asking import Busy, ask, body, field, place, session_of
from headscope.app.figure_api import FigureApi
from headscope.app.guard import Guard
from headscope.app.jobs import sentence
from headscope.app.prompt_api import PromptApi
from headscope.app.session import MOST_SECONDS, MOST_TOKENS, Session
from headscope.app.try_api import TryApi
from headscope.app.wire import as_json, as_matrix
from headscope.core.errors import HeadscopeError, UsageError
from headscope.core.registry import methods
from headscope.page import PLOT_STYLE, STATIC, files, import_map, page
from headscope.report import answers
from headscope.verify import ROLES

KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".json": "application/json"}


@cache
def policy() -> str:
    """What the browser may load: our own files, and the import map by its hash. No code in the page, no other site."""
    names = base64.b64encode(hashlib.sha256(import_map().encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'self' 'sha256-{names}'; style-src 'self' {PLOT_STYLE}; img-src 'self' "
        "data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def create(session: Session, *, hosts: set[str] | None, token: str | None = None) -> Guard:
    """The ASGI application. `hosts`: values of the Host header that it answers to; None for any, with a token."""
    prompts = PromptApi()
    views = ["/", "/head/{layer:int}/{head:int}", "/prompt", "/try", "/runs"]
    api = [
        Route("/state", _state),
        Route("/atlas", _atlas),
        Route("/scores/{method}", _scores),
        Route("/agreement", _agreement),
        Route("/example/{method}", _example),
        Route("/head/{layer:int}/{head:int}", _head),
        Route("/pattern", _pattern, methods=["POST"]),
        Route("/written", _written, methods=["POST"]),
        Route("/copies", _copies, methods=["POST"]),
        Route("/examples", _examples, methods=["POST"]),
        Route("/ablate", _ablate, methods=["POST"]),
        Route("/neuron", _neuron, methods=["POST"]),
        Route("/figure", FigureApi(prompts).answer, methods=["POST"]),
        Mount("/prompt", routes=prompts.routes()),
        Mount("/try", routes=TryApi().routes()),
        Route("/choices", _choices),
        Route("/jobs", _jobs, methods=["GET"]),
        Route("/jobs", _start, methods=["POST"]),
        Route("/jobs/{number:int}/cancel", _cancel, methods=["POST"]),
    ]
    app = Starlette(
        routes=[
            *(Route(path, _page) for path in views),
            Mount("/api", routes=api),
            Route("/static/{name:path}", _static),
        ],
        exception_handlers={HeadscopeError: _refused, HTTPException: _missing, Exception: _failed},
    )
    app.state.session = session
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


async def _static(request: Request) -> Response:
    """A file of the page. Only names that were found there are known, so no path leads out of the folder."""
    name = request.path_params["name"]
    if name not in files():
        raise HTTPException(404)
    data = (STATIC / name).read_bytes()
    etag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers={"ETag": etag})
    # by this table and not the system's, which may call a script plain text, so that browsers refuse it
    return Response(data, media_type=KINDS.get(Path(name).suffix, "text/plain"), headers={"ETag": etag})


# the atlas


async def _state(request: Request) -> Response:
    session = session_of(request)
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
    atlas = session_of(request).atlas
    return as_json(None if atlas is None else answers.summary(atlas))


async def _scores(request: Request) -> Response:
    scores = answers.scores_of(session_of(request).need_atlas(), request.path_params["method"])
    return as_matrix(scores.values, "float32")


async def _agreement(request: Request) -> Response:
    x, y = (request.query_params.get(name, "") for name in ("x", "y"))
    return as_json(answers.agreement(session_of(request).need_atlas(), x, y))


async def _example(request: Request) -> Response:
    values, about = answers.example(session_of(request).need_atlas(), request.path_params["method"])
    return as_matrix(values, "float32", **about)


async def _head(request: Request) -> Response:
    at = request.path_params
    return as_json(answers.head(session_of(request).need_atlas(), at["layer"], at["head"]))


# questions to the model


async def _pattern(request: Request) -> Response:
    given = await body(request)
    layer, head, prompt = place(given)

    def work() -> Any:
        from headscope.app import look

        model = session_of(request).model()
        ids = look.read(model, prompt, MOST_TOKENS)
        found = look.pattern(model, layer, head, ids)
        return found.float().cpu().numpy(), model.words(ids[0])

    values, tokens = await ask(request, f"Pattern of L{layer}H{head}", work)
    return as_matrix(values.astype(np.float16), "float16", tokens=tokens)


async def _written(request: Request) -> Response:
    given = await body(request)
    layer, head, prompt = place(given)
    query, key = field(given, "query", int), field(given, "key", int, None)

    def work() -> Any:
        from headscope.app import look

        model = session_of(request).model()
        return look.written(model, layer, head, look.read(model, prompt, MOST_TOKENS), query, key)

    return as_json(await ask(request, f"What L{layer}H{head} writes", work))


async def _copies(request: Request) -> Response:
    given = await body(request)
    layer, head = field(given, "layer", int), field(given, "head", int)
    token = field(given, "token", str)

    def work() -> Any:
        from headscope.app import look
        from headscope.routes.extract import token_id

        model = session_of(request).model()
        return look.copies(model, layer, head, token_id(model, token))

    return as_json(await ask(request, f"Weights of L{layer}H{head}", work))


async def _examples(request: Request) -> Response:
    given = await body(request)
    layer, head, seed = field(given, "layer", int), field(given, "head", int), field(given, "seed", int, 0)

    def work() -> Any:
        from headscope.app import look

        session = session_of(request)
        return look.examples(session.model(), layer, head, seed=seed, check=session.jobs.check)

    return as_json(await ask(request, f"Examples of L{layer}H{head}", work))


async def _ablate(request: Request) -> Response:
    given = await body(request)
    layer, head, prompt = place(given)

    def work() -> Any:
        from headscope.app import look

        model = session_of(request).model()
        return look.without(model, layer, head, look.read(model, prompt, MOST_TOKENS))

    return as_json(await ask(request, f"Without L{layer}H{head}", work))


async def _neuron(request: Request) -> Response:
    given = await body(request)
    layer, index = field(given, "layer", int), field(given, "neuron", int)

    def work() -> Any:
        from headscope.app import neuron

        return neuron.written(session_of(request).model(), layer, index)

    return as_json(await ask(request, f"Weights of L{layer}N{index}", work))


# the queue


async def _choices(request: Request) -> Response:
    return as_json(
        {"methods": [name for name, spec in methods().items() if spec.kind == "score"], "roles": list(ROLES)}
    )


async def _jobs(request: Request) -> Response:
    return as_json({"jobs": session_of(request).jobs.documents()})


async def _start(request: Request) -> Response:
    given = await body(request)
    session, kind, seed = session_of(request), field(given, "kind", str), field(given, "seed", int, 0)
    if kind == "scan":
        number = session.start_scan(field(given, "methods", str, "quick"), seed)
    elif kind == "score":
        number = session.start_score(field(given, "method", str), seed)
    elif kind == "verify":
        heads = field(given, "heads", list, None)
        number = session.start_verify(field(given, "role", str), heads, seed)
    else:
        raise UsageError(f"There is no job of kind {kind!r}; there are scan, score and verify.")
    return as_json({"id": number}, 202)


async def _cancel(request: Request) -> Response:
    return as_json(session_of(request).jobs.cancel(request.path_params["number"]).document())
