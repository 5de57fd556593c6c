"""The requests of the view of edits, under /api/try/."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headscope.app.asking import ask, body, field, session_of
from headscope.app.session import MOST_TOKENS
from headscope.app.wire import as_json

if TYPE_CHECKING:
    from headscope.app.trial import Files


class TryApi:
    """`files` holds what was loaded, for as long as the server runs."""

    def __init__(self) -> None:
        self._made: Files | None = None

    def routes(self) -> list[Route]:
        """What the server mounts."""
        answers = {"compare": self._compare, "continue": self._continue, "save": self._save, "load": self._load}
        return [Route(f"/{name}", answer, methods=["POST"]) for name, answer in answers.items()]

    @property
    def _files(self) -> Files:
        from headscope.app.trial import Files

        self._made = self._made or Files()
        return self._made

    async def _compare(self, request: Request) -> Response:
        given = await body(request)
        prompt, rows, session = field(given, "prompt", str), field(given, "edits", list), session_of(request)

        def work() -> Any:
            from headscope.app import look, trial

            model = session.model()
            ids = look.read(model, prompt, MOST_TOKENS)
            return trial.compare(model, ids, trial.build(model, rows, ids, self._files))

        return as_json(await ask(request, "Try edits", work))

    async def _continue(self, request: Request) -> Response:
        given = await body(request)
        prompt, rows, session = field(given, "prompt", str), field(given, "edits", list), session_of(request)
        n = field(given, "n", int, 20)

        def work() -> Any:
            from headscope.app import look, trial

            model = session.model()
            ids = look.read(model, prompt, MOST_TOKENS)
            return trial.continued(model, ids, trial.build(model, rows, ids, self._files), n, session.jobs.check)

        return as_json(await ask(request, "Go on with edits", work))

    async def _save(self, request: Request) -> Response:
        given = await body(request)
        prompt, rows, session = field(given, "prompt", str, ""), field(given, "edits", list), session_of(request)

        def work() -> Any:
            from headscope.app import look, trial

            model = session.model()
            ids = look.read(model, prompt, MOST_TOKENS) if prompt else None
            return trial.as_file(trial.build(model, rows, ids, self._files))

        return as_json(await ask(request, "Save edits", work))

    async def _load(self, request: Request) -> Response:
        given = await body(request)
        text = field(given, "text", str)
        return as_json(await ask(request, "Load edits", lambda: {"edits": self._files.load(text)}))
