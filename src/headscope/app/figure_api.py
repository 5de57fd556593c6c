"""One request for every figure: what a view shows, as the file that Python and the command line would write."""

from __future__ import annotations

import base64
import re
import tempfile
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from headscope.app.asking import ask, body, field, place, session_of
from headscope.app.session import MOST_TOKENS
from headscope.app.wire import as_json
from headscope.core.errors import UsageError, nearest
from headscope.draw import ENDINGS
from headscope.draw.figure import check_path

if TYPE_CHECKING:
    from headscope.app.prompt_api import PromptApi

#: matplotlib keeps its settings for the whole process, so one file is drawn at a time
_PEN = threading.Lock()


class FigureApi:
    """Figures of the atlas are made at once, those that ask the model on its thread; drawing keeps neither waiting."""

    def __init__(self, prompts: PromptApi) -> None:
        self._prompts = prompts
        self._kinds: dict[str, Callable[[Request, dict[str, Any]], Awaitable[tuple[str, Any]]]] = {
            "methods": self._methods, "scores": self._scores, "role": self._role, "example": self._example,
            "attention": self._attention, "lens": self._lens, "route": self._route,
        }  # fmt: skip

    async def answer(self, request: Request) -> Response:
        """`of`: which figure; `format`: one of the endings without its dot; the rest is that figure's own."""
        given = await body(request)
        kind, form = field(given, "of", str), field(given, "format", str)
        if kind not in self._kinds:
            raise UsageError(f"There is no figure of {kind!r}.{nearest(kind, self._kinds)}")
        if f".{form}" not in ENDINGS:
            raise UsageError(f"There is no format {form!r}; a figure is saved as {', '.join(e[1:] for e in ENDINGS)}.")
        check_path(f"figure.{form}", overwrite=True)  # before the model is asked: png and pdf need matplotlib
        name, thing = await self._kinds[kind](request, given)
        return as_json(await run_in_threadpool(as_file, thing, f"{name}.{form}"))

    async def _methods(self, request: Request, given: dict[str, Any]) -> tuple[str, Any]:
        from headscope.figures import figure

        return "methods", figure(session_of(request).need_atlas())

    async def _scores(self, request: Request, given: dict[str, Any]) -> tuple[str, Any]:
        from headscope.figures import figure

        method, against = field(given, "method", str), field(given, "against", str, None)
        found = figure(session_of(request).need_atlas(), method=method, against=against)
        return method if against is None else f"{method}-against-{against}", found

    async def _role(self, request: Request, given: dict[str, Any]) -> tuple[str, Any]:
        """The last test of a role; of the one with these heads, where they are named."""
        from headscope.report.figures import of_atlas, of_verdict

        atlas, role, heads = (
            session_of(request).need_atlas(),
            field(given, "role", str),
            field(given, "heads", list, None),
        )
        tested = [v for v in atlas.verdicts if v.role == role and heads in (None, v.components)]
        if heads is not None and not tested:
            raise UsageError(f"The atlas has no test of {role!r} with these heads.")
        return role, of_verdict(atlas, tested[-1]) if tested else of_atlas(atlas, role=role)

    async def _example(self, request: Request, given: dict[str, Any]) -> tuple[str, Any]:
        from headscope.figures import figure

        method = field(given, "method", str)
        found = figure(session_of(request).need_atlas(), method=method, example=True, **_looked(given))
        return f"{method}-at-work", found

    async def _attention(self, request: Request, given: dict[str, Any]) -> tuple[str, Any]:
        (layer, head, prompt), looked = place(given), _looked(given)

        def work() -> Any:
            from headscope.app import look
            from headscope.figures import figure

            model = session_of(request).model()
            look.check_head(model, layer, head)
            look.read(model, prompt, MOST_TOKENS)
            return figure(model, head=f"L{layer}H{head}", prompt=prompt, **looked)

        return f"L{layer}H{head}", await ask(request, f"Figure of L{layer}H{head}", work)

    async def _lens(self, request: Request, given: dict[str, Any]) -> tuple[str, Any]:
        start, stop = field(given, "start", int, 0), field(given, "stop", int, None)
        by = field(given, "by", str, "best")

        def work(seen: Any, question: Any) -> Any:
            from headscope.routes.logit_lens import figure

            end = seen.width if stop is None else stop
            return figure(seen.lens(seen.goal(question).target, start, end), by=by)

        return "lens", await self._prompts.about(request, "Figure of the lens", given, work)

    async def _route(self, request: Request, given: dict[str, Any]) -> tuple[str, Any]:
        from headscope.app import prompt

        return "route", await self._prompts.about(request, "Figure of the route", given, prompt.route)


def _looked(given: dict[str, Any]) -> dict[str, Any]:
    """How attention is looked at: the locked query and key, and `sink` 0 where the first token is left out."""
    sink = field(given, "sink", int, None)
    known = {name: field(given, name, int, None) for name in ("query", "key")}
    return {**known, "sink": False if sink == 0 else None}


def as_file(thing: Any, name: str) -> dict[str, str]:
    """What a Figure or a Route saves: a name and its text, or for png and pdf its bytes in base64."""
    name = re.sub(r"[^\w.-]+", "-", name)  # an atlas may call a method anything
    with _PEN, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"figure{Path(name).suffix}"
        thing.save(path)
        if path.suffix in (".png", ".pdf"):
            return {"name": name, "base64": base64.b64encode(path.read_bytes()).decode()}
        return {"name": name, "text": path.read_text(encoding="utf-8")}
