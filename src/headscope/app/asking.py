"""What all requests to the model share: reading the JSON, waiting for the queue, the session."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from starlette.requests import Request

from headscope.app.session import MOST_SECONDS, Session
from headscope.core.errors import HeadscopeError, UsageError

_NONE_GIVEN = object()


class Busy(HeadscopeError):
    """The model did not answer in time."""


class Gone(HeadscopeError):
    """Whoever asked has left, so that nobody reads this."""


def session_of(request: Request) -> Session:
    """What the server shows."""
    session: Session = request.app.state.session
    return session


async def ask(request: Request, title: str, work: Callable[[], Any]) -> Any:
    """Run `work` on the thread that owns the model, and wait for it for a while; it is stopped between its steps when that
    was in vain (Busy), or when whoever asked leaves (Gone). The request's body must have been read.
    """
    jobs = session_of(request).jobs
    job = jobs.ask(title, work)
    answer = asyncio.wrap_future(job.future)
    left = asyncio.create_task(_left(request))
    try:
        await asyncio.wait({answer, left}, timeout=MOST_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        if left.done():
            raise Gone("The browser asked for something else.")
        busy = jobs.busy()
        reason = f"The model is busy with {busy}" if busy else f"There was no answer in {MOST_SECONDS:.0f} s"
        raise Busy(f"{reason}; ask again later.")
    finally:
        left.cancel()
        jobs.forget(job)


async def _left(request: Request) -> None:
    """Returns when the other side hangs up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def body(request: Request) -> dict[str, Any]:
    """The JSON object of a request."""
    try:
        given = json.loads(await request.body())
    except (ValueError, RecursionError):
        raise UsageError("The request is not JSON.") from None
    if not isinstance(given, dict):
        raise UsageError("The request is not a JSON object.")
    return given


def field(given: dict[str, Any], name: str, kind: type | tuple[type, ...], default: Any = _NONE_GIVEN) -> Any:
    """One value of a request. Raises UsageError where it is missing without a default, or of another type."""
    value = given.get(name, default)
    if value is _NONE_GIVEN:
        raise UsageError(f"The request lacks {name!r}.")
    if value is default:
        return value
    if not isinstance(value, kind) or isinstance(value, bool):
        raise UsageError(f"{name!r} in the request must be of type {getattr(kind, '__name__', 'float')}.")
    if isinstance(value, str) and not _is_text(value):
        raise UsageError(f"{name!r} in the request holds half a character; was it cut inside an emoji?")
    if isinstance(value, int) and not abs(value) < 2**31:
        raise UsageError(f"{name!r} in the request is too large; it takes whole numbers up to {2**31 - 1:,}.")
    return value


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def place(given: dict[str, Any]) -> tuple[int, int, str]:
    """Layer, head and prompt."""
    return field(given, "layer", int), field(given, "head", int), field(given, "prompt", str)
