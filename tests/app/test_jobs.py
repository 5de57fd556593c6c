"""One thing at a time, in order; questions first; cancel and failure leave the queue working."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from headscope.app.jobs import MOST_WAITING, Jobs, Tell
from headscope.core.errors import NotApplicable, UsageError


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    made = Jobs()
    yield made
    made.close()


def held(go: threading.Event, started: threading.Event | None = None) -> Callable[[Tell], dict[str, int]]:
    """Work that takes steps until it is let go."""

    def work(tell: Tell) -> dict[str, int]:
        step = 0
        while not go.is_set():
            tell("holding", step, 1000)
            if started is not None:
                started.set()
            step += 1
            time.sleep(0.002)
        return {"steps": step}

    return work


def until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end, "nothing happened for 20 s"
        time.sleep(0.005)


def test_jobs_run_one_after_another_and_keep_their_results(jobs: Jobs) -> None:
    running, most = [], []

    def work(number: int) -> Callable[[Tell], dict[str, int]]:
        def inner(tell: Tell) -> dict[str, int]:
            running.append(number)
            most.append(len(running))
            time.sleep(0.01)
            running.remove(number)
            return {"number": number}

        return inner

    made = [jobs.submit("test", f"job {i}", work(i)) for i in range(5)]
    until(lambda: all(job.state == "done" for job in made))
    assert max(most) == 1
    assert [job.result for job in made] == [{"number": i} for i in range(5)]
    assert [d["title"] for d in jobs.documents()] == [f"job {i}" for i in reversed(range(5))]


def test_a_question_goes_before_waiting_jobs(jobs: Jobs) -> None:
    go, started = threading.Event(), threading.Event()
    order: list[str] = []
    first = jobs.submit("test", "first", held(go, started))
    until(lambda: first.step > 2)
    last = jobs.submit("test", "second", lambda tell: order.append("job") or {})
    asked = jobs.ask("question", lambda: order.append("question"))
    assert "first" in jobs.busy() and "s left" in jobs.busy()
    assert asked.future.result(20) is None and first.state == "running", "answered between two steps"
    go.set()
    until(lambda: last.state == "done")
    assert order == ["question", "job"] and len(jobs.documents()) == 2, "questions are not listed"


def test_a_question_waits_while_the_model_is_not_free() -> None:
    free = threading.Event()
    jobs = Jobs(free.is_set)
    go, started = threading.Event(), threading.Event()
    first = jobs.submit("test", "first", held(go, started))
    started.wait(20)
    asked = jobs.ask("question", lambda: 5)
    step = first.step
    until(lambda: first.step > step + 3)
    assert not asked.future.done()
    free.set()
    assert asked.future.result(20) == 5
    go.set()
    jobs.close()


def test_a_failing_question_leaves_the_job_alone(jobs: Jobs) -> None:
    go, started = threading.Event(), threading.Event()
    first = jobs.submit("test", "first", held(go, started))
    started.wait(20)
    asked = jobs.ask("question", lambda: 1 // 0)
    assert isinstance(asked.future.exception(20), ZeroDivisionError)
    go.set()
    until(lambda: first.state == "done")


def test_progress_and_time_left_are_told(jobs: Jobs) -> None:
    go, started = threading.Event(), threading.Event()
    job = jobs.submit("test", "long", held(go, started))
    started.wait(20)
    until(lambda: job.step > 2)
    told = job.document()
    assert told["state"] == "running" and told["what"] == "holding" and told["steps"] == 1000
    assert told["seconds_left"] > 0 and told["seconds"] >= 0
    go.set()
    until(lambda: job.state == "done")
    assert job.document()["seconds_left"] is None


def test_a_running_and_a_waiting_job_are_cancelled(jobs: Jobs) -> None:
    go, started = threading.Event(), threading.Event()
    first = jobs.submit("test", "first", held(go, started))
    second = jobs.submit("test", "second", held(go))
    third = jobs.submit("test", "third", lambda tell: {"fine": True})
    started.wait(20)
    jobs.cancel(second.id)
    assert second.state == "cancelled"
    jobs.cancel(first.id)
    until(lambda: third.state == "done")
    assert first.state == "cancelled" and first.result is None and first.error is None
    jobs.cancel(third.id)
    assert third.state == "done", "what is done stays done"
    with pytest.raises(UsageError, match="no job 99"):
        jobs.cancel(99)


def test_a_failed_job_says_why_in_one_sentence(jobs: Jobs) -> None:
    def unforeseen(tell: Tell) -> dict[str, int]:
        raise ValueError("first line\nsecond line")

    def refused(tell: Tell) -> dict[str, int]:
        raise NotApplicable("This model\nhas no such thing.")

    bad, known = jobs.submit("test", "bad", unforeseen), jobs.submit("test", "known", refused)
    after = jobs.submit("test", "after", lambda tell: {})
    until(lambda: after.state == "done")
    assert bad.state == known.state == "failed"
    assert bad.error is not None and "ValueError: first line" in bad.error and "\n" not in bad.error
    assert known.error == "This model has no such thing."


def test_a_question_nobody_waits_for_is_not_run(jobs: Jobs) -> None:
    go, started = threading.Event(), threading.Event()
    jobs.submit("test", "first", lambda tell: started.set() or {"fine": go.wait(20)})  # tells nothing in between
    started.wait(20)
    ran: list[int] = []
    asked = jobs.ask("question", lambda: ran.append(1))
    asked.future.cancel()
    jobs.forget(asked)
    last = jobs.submit("test", "last", lambda tell: {})
    go.set()
    until(lambda: last.state == "done")
    assert ran == []


def test_too_many_jobs_are_refused(jobs: Jobs) -> None:
    go, started = threading.Event(), threading.Event()
    jobs.submit("test", "first", held(go, started))
    started.wait(20)
    for i in range(MOST_WAITING):
        jobs.submit("test", f"job {i}", held(go))
    with pytest.raises(UsageError, match="waiting already"):
        jobs.submit("test", "one more", held(go))
    go.set()


def test_closing_stops_what_runs() -> None:
    jobs = Jobs()
    started = threading.Event()
    job = jobs.submit("test", "first", held(threading.Event(), started))
    second = jobs.submit("test", "second", lambda tell: {})
    started.wait(20)
    jobs.close()
    jobs._thread.join(20)
    assert not jobs._thread.is_alive() and job.state == "cancelled" and second.state == "queued"
