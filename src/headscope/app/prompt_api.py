"""The requests of the view of one prompt, under /api/prompt/."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headscope.app.asking import ask, body, field, session_of
from headscope.app.session import MOST_TOKENS
from headscope.app.wire import as_json
from headscope.core.errors import UsageError

if TYPE_CHECKING:
    from headscope.app.jobs import Tell
    from headscope.app.prompt import Desk, Question, Seen
    from headscope.app.session import Session

#: random routes that a proof compares with
N_RANDOM = 20


class PromptApi:
    """`desk` keeps the last pass, and is made when the first prompt is read (it needs torch)."""

    def __init__(self) -> None:
        self._desk: Desk | None = None

    def routes(self) -> list[Route]:
        """What the server mounts."""
        answers: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "look": self._look, "lens": self._lens, "route": self._route, "state": self._state,
            "neurons": self._neurons, "token": self._token, "neuronpedia": self._neuronpedia, "prove": self._prove,
        }  # fmt: skip
        return [Route(f"/{name}", answer, methods=["POST"]) for name, answer in answers.items()]

    def _see(self, session: Session, question: Question) -> Seen:
        from headscope.app import prompt

        self._desk = self._desk or prompt.Desk(session.jobs.check)
        model = session.model()
        return self._desk.see(model, prompt.read(model, question.prompt, question.more, MOST_TOKENS))

    async def about(
        self, request: Request, title: str, given: dict[str, Any], work: Callable[[Seen, Question], Any]
    ) -> Any:
        """What `work` says about the prediction that a request names."""
        question, session = _question(given), session_of(request)
        return await ask(request, title, lambda: work(self._see(session, question), question))

    async def _about(
        self, request: Request, title: str, given: dict[str, Any], work: Callable[[Seen, Question], Any]
    ) -> Response:
        return as_json(await self.about(request, title, given, work))

    async def _look(self, request: Request) -> Response:
        from headscope.app import prompt

        return await self._about(request, "Next tokens", await body(request), prompt.predicted)

    async def _lens(self, request: Request) -> Response:
        from headscope.app import prompt

        given = await body(request)
        start, stop = field(given, "start", int), field(given, "stop", int)
        return await self._about(request, "Logit lens", given, lambda seen, q: prompt.lens(seen, q, start, stop))

    async def _route(self, request: Request) -> Response:
        from headscope.app import prompt

        return await self._about(
            request, "Route", await body(request), lambda seen, q: prompt.drawn(prompt.route(seen, q))
        )

    async def _state(self, request: Request) -> Response:
        from headscope.app import prompt

        given = await body(request)
        node = field(given, "node", str)
        return await self._about(request, f"Stream at {node}", given, lambda seen, q: prompt.state(seen, q, node))

    async def _neurons(self, request: Request) -> Response:
        from headscope.app import prompt

        given = await body(request)
        layer, at = field(given, "layer", int), field(given, "at", int)
        return await self._about(
            request, f"Neurons of L{layer}MLP", given, lambda seen, q: prompt.neurons(seen, q, layer, at)
        )

    async def _token(self, request: Request) -> Response:
        given = await body(request)
        text, session = field(given, "text", str), session_of(request)

        def work() -> dict[str, Any]:
            from headscope.routes.extract import token_id

            model = session.model()
            found = token_id(model, text)
            return {"id": found, "token": model.word(found)}

        return as_json(await ask(request, "Token", work))

    async def _neuronpedia(self, request: Request) -> Response:
        from headscope.app import prompt

        given = await body(request)
        return await self._about(
            request, "Save the route", given, lambda seen, q: prompt.neuronpedia(prompt.route(seen, q))
        )

    async def _prove(self, request: Request) -> Response:
        """A job: it cuts everything but the route, and everything but each of the random ones."""
        given = await body(request)
        question, session = _question(given), session_of(request)

        def work(tell: Tell) -> dict[str, Any]:
            from headscope.app import prompt
            from headscope.core.files import write_json
            from headscope.verify import prompt_of, prove_routes

            tell("loading the model", 0, 0)
            seen = self._see(session, question)
            tell("finding the route", 0, 0)
            found = prompt.route(seen, question)
            tell(f"cutting all but it, and all but {N_RANDOM} random ones", 0, 0)
            proof = prove_routes(
                seen.model, prompt_of(found), threshold=question.threshold, n_random=N_RANDOM
            ).document()
            path = session.keep(job.id, "proof", lambda path: write_json(path / "proof.json", proof))
            return {"view": _address(question), "question": asdict(question), "proof": proof, "out": path,
                    "verdict": proof["verdict"], "reason": proof["reason"]}  # fmt: skip

        job = session.jobs.submit("prove", "Prove a route", work)
        return as_json({"id": job.id}, 202)


def _question(given: dict[str, Any]) -> Question:
    from headscope.app.prompt import Question

    more = field(given, "more", list, [])
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in more):
        raise UsageError("'more' in the request must be a list of token ids.")
    return Question(
        field(given, "prompt", str), tuple(more), field(given, "position", int, None), field(given, "target", int, None),
        field(given, "foil", int, None), float(field(given, "threshold", (int, float), 0.04)),
        field(given, "biases", str, "part"),
    )  # fmt: skip


def _address(q: Question) -> str:
    """The view of a question; see page/static/views/prompt.js."""
    foil = "none" if q.foil == -1 else q.foil
    named = {
        "prompt": q.prompt, "more": ".".join(map(str, q.more)) or None, "pos": q.position, "target": q.target, "foil": foil,
        "threshold": None if q.threshold == 0.04 else f"{q.threshold:g}", "biases": None if q.biases == "part" else q.biases,
    }  # fmt: skip
    return "/prompt?" + urlencode({name: value for name, value in named.items() if value is not None})
