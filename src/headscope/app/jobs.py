"""One thing at a time on the model: a queue with progress, time left, cancel, and results that stay.

Two things at once would put their hooks on the same model. Questions that a view asks (`ask`) go before jobs that
somebody started (`submit`), and are also answered between the steps of a running one, so that a page can be used while a
scan runs. Finished jobs stay until the process ends, and are written as soon as they are done.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from headscope.core.errors import HeadscopeError, UsageError

#: tells how far it is: (what, step, steps)
Tell = Callable[[str, int, int], None]
#: more waiting jobs than this are refused
MOST_WAITING = 16


class Cancelled(HeadscopeError):
    """The user cancelled the job."""


@dataclass
class Job:
    """`state`: queued, running, done, failed or cancelled. `error`: one sentence. `out`: where the result was written."""

    id: int
    kind: str
    title: str
    work: Callable[[Tell], dict[str, Any]]
    state: str = "queued"
    what: str = ""
    step: int = 0
    steps: int = 0
    started: float | None = None
    ended: float | None = None
    result: dict[str, Any] | None = None
    error: str | None = None
    stop: bool = False
    future: Future[Any] = field(default_factory=Future)
    #: when the present part of the job began, for the time left
    since: float = 0.0

    def document(self) -> dict[str, Any]:
        """What the page is told."""
        now = time.monotonic()
        seconds = None if self.started is None else round((self.ended or now) - self.started, 1)
        left = None
        if self.state == "running" and 0 < self.step < self.steps:
            left = round((now - self.since) / self.step * (self.steps - self.step), 1)
        return {
            "id": self.id,
            "kind": self.kind,
            "title": self.title,
            "state": self.state,
            "what": self.what,
            "step": self.step,
            "steps": self.steps,
            "seconds": seconds,
            "seconds_left": left,
            "error": self.error,
            "result": self.result,
        }


class Jobs:
    """The queue and the one thread that works it off. `free()` says whether the model can be asked between two steps."""

    def __init__(self, free: Callable[[], bool] = lambda: True) -> None:
        self._free = free
        self._all: list[Job] = []
        self._asked: deque[Job] = deque()
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._current: Job | None = None  # the question that is answered within it, or itself
        self._closed = False
        self._number = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name="headscope-jobs", daemon=True)
        self._thread.start()

    def submit(self, kind: str, title: str, work: Callable[[Tell], dict[str, Any]]) -> Job:
        """Put a job at the end of the queue. Raises UsageError where too many wait already."""
        with self._changed:
            if len(self._waiting) >= MOST_WAITING:
                raise UsageError(f"{MOST_WAITING} jobs are waiting already; cancel one or wait for one to finish.")
            job = self._new(kind, title, work)
            self._all.append(job)
            self._waiting.append(job)
            self._changed.notify()
        return job

    def ask(self, title: str, work: Callable[[], Any]) -> Job:
        """Put a short question before the waiting jobs; its answer is the job's `future`."""
        with self._changed:
            job = self._new("question", title, lambda tell: work())
            self._asked.append(job)
            self._changed.notify()
        return job

    def cancel(self, number: int) -> Job:
        """Take a job out of the queue, or stop it at its next step. Raises UsageError for an unknown one."""
        with self._changed:
            job = self.get(number)
            job.stop = True
            if job in self._waiting:
                self._waiting.remove(job)
                self._end(job, "cancelled")
        return job

    def forget(self, job: Job) -> None:
        """Nobody waits for this question's answer any more."""
        with self._changed:
            job.stop = True
            if job in self._asked:
                self._asked.remove(job)
                job.future.cancel()

    def check(self) -> None:
        """What takes long calls this between its steps. Raises Cancelled where nobody waits for it any more."""
        if self._current is not None and self._current.stop:
            raise Cancelled("Nobody waits for this any more.")

    def get(self, number: int) -> Job:
        """The job of that number."""
        for job in self._all:
            if job.id == number:
                return job
        raise UsageError(f"There is no job {number}; it may be of an earlier run of headscope serve.")

    def documents(self) -> list[dict[str, Any]]:
        """All jobs, the newest first."""
        with self._changed:
            return [job.document() for job in reversed(self._all)]

    def busy(self) -> str:
        """What the model is busy with, in words, or nothing."""
        job = self._running
        if job is None:
            return ""
        left = job.document()["seconds_left"]
        return f"{job.title} ({job.what})" + (f", about {left:.0f} s left of this step" if left else "")

    def close(self) -> None:
        """Stop the running job at its next step, start no other."""
        with self._changed:
            self._closed = True
            if self._running is not None:
                self._running.stop = True
            self._changed.notify()

    def _new(self, kind: str, title: str, work: Callable[[Tell], Any]) -> Job:
        self._number += 1
        return Job(self._number, kind, title, work)

    def _end(self, job: Job, state: str) -> None:
        job.state, job.ended = state, time.monotonic()

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not (self._asked or self._waiting or self._closed):
                    self._changed.wait()
                if self._closed:
                    return
                job = (self._asked or self._waiting).popleft()
                job.state, job.started, job.what = "running", time.monotonic(), job.title
                self._running = job
            try:
                if job.future.set_running_or_notify_cancel():
                    self._run(job)
            finally:
                with self._changed:
                    self._running = None

    def _run(self, job: Job) -> None:
        def tell(what: str, step: int, steps: int) -> None:
            if job.stop:
                raise Cancelled("The job was cancelled.")
            if what != job.what:
                job.since = time.monotonic()
            job.what, job.step, job.steps = what, step, steps
            if job.kind != "question":
                job.since += self._answer_questions()  # which is no part of the time that a step takes

        job.since = time.monotonic()
        outer, self._current = self._current, job
        try:
            answer = job.work(tell)
        except Cancelled:
            self._end(job, "cancelled")
            job.future.set_result(None)
        except BaseException as error:
            job.error = sentence(error)
            self._end(job, "failed")
            job.future.set_exception(error)
            job.future.exception()  # a job that nobody awaits is no unhandled error
        else:
            if job.kind != "question":
                job.result = answer
            self._end(job, "done")
            job.future.set_result(answer)
        finally:
            self._current = outer

    def _answer_questions(self) -> float:
        """Between two steps of a job. Returns the seconds that it took."""
        start = time.monotonic()
        while self._asked and self._free():
            with self._changed:
                if not self._asked:
                    break
                asked = self._asked.popleft()
            asked.state = "running"
            if asked.future.set_running_or_notify_cancel():
                self._run(asked)
        return time.monotonic() - start


def sentence(error: BaseException) -> str:
    """What went wrong, in one sentence for the user."""
    if isinstance(error, HeadscopeError):
        return " ".join(str(error).split())
    reason = (str(error).strip().splitlines() or [""])[0][:300]
    return f"Something went wrong that headscope did not foresee ({type(error).__name__}: {reason})."
