"""Every figure of the page is the file that Python writes; what nobody waits for stops between its steps."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

import headscope as hs
from app.conftest import HOST, HOSTILE, serve, verdict
from headscope.app import look
from headscope.app.server import create
from headscope.app.session import Session
from headscope.draw import ENDINGS
from headscope.model import Model
from headscope.routes.walk import Walk

Refused = Callable[..., None]
PROMPT = f"the store a {HOSTILE} Mary </script> John"
ATTENTION = {"of": "attention", "layer": 1, "head": 2, "prompt": PROMPT}


def content(told: dict[str, str]) -> bytes:
    return base64.b64decode(told["base64"]) if "base64" in told else told["text"].encode()


def asked(client: TestClient, **body: Any) -> dict[str, str]:
    response = client.post("/api/figure", json=body)
    assert response.status_code == 200, response.text
    found: dict[str, str] = response.json()
    return found


def in_python(model: Model, atlas: hs.Atlas) -> list[tuple[dict[str, Any], str, Any]]:
    """What the page asks, the file's name, and what Python draws."""
    best = hs.trace(model, PROMPT).logits[0, -1].topk(2).indices.tolist()
    return [
        ({"of": "methods"}, "methods", hs.figure(atlas)),
        ({"of": "scores", "method": "signed"}, "signed", hs.figure(atlas, method="signed")),
        ({"of": "scores", "method": "bos-sink", "against": "signed"}, "bos-sink-against-signed",
         hs.figure(atlas, method="bos-sink", against="signed")),
        ({"of": "role", "role": "induction", "heads": ["L1H2", "L2H3"]}, "induction", hs.figure(atlas, role="induction")),
        ({"of": "example", "method": "bos-sink", "query": 3, "sink": 0}, "bos-sink-at-work",
         hs.figure(atlas, method="bos-sink", example=True, query=3, sink=False)),
        (ATTENTION, "L1H2", hs.figure(model, head="L1H2", prompt=PROMPT)),
        ({**ATTENTION, "query": 4, "key": 2, "sink": 0}, "L1H2",
         hs.figure(model, head="L1H2", prompt=PROMPT, query=4, key=2, sink=False)),
        ({"of": "lens", "prompt": PROMPT, "target": 6, "by": "target"}, "lens",
         hs.figure(hs.lens(model, PROMPT, target="Mary"), by="target")),
        ({"of": "lens", "prompt": PROMPT, "start": 2, "stop": 5}, "lens",
         hs.figure(hs.lens(model, PROMPT, start=2, stop=5))),
        ({"of": "route", "prompt": PROMPT}, "route", hs.routes(model, PROMPT, target=best[0], foil=best[1])),
    ]  # fmt: skip


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_figure_is_the_file_that_python_writes(
    client: TestClient, model: Model, atlas: hs.Atlas, tmp_path: Path, ending: str
) -> None:
    for i, (body, name, drawn) in enumerate(in_python(model, atlas)):
        told = asked(client, **body, format=ending[1:])
        path = tmp_path / f"{i}{ending}"
        drawn.save(path)
        assert told["name"] == name + ending
        assert content(told) == path.read_bytes(), body
        if ending == ".svg":
            assert HOSTILE not in told["text"] and "<script" not in told["text"]
    if ending == ".svg":
        assert "&lt;img/src=x/onerror=alert(1)&gt;" in asked(client, **ATTENTION, format="svg")["text"]


def test_the_numbers_are_those_of_the_atlas_and_the_run(client: TestClient, model: Model, atlas: hs.Atlas) -> None:
    document = json.loads(asked(client, of="scores", method="signed", format="json")["text"])
    values = np.array(document["data"]["panels"][0]["values"], dtype=float)
    np.testing.assert_array_equal(values, atlas.scores["signed"].values)
    assert document["provenance"]["fingerprint"] == model.fingerprint
    document = json.loads(asked(client, **ATTENTION, format="json")["text"])
    pattern = hs.trace(model, PROMPT, ["pattern"])["pattern", 1][0, 2]
    assert document["data"]["panels"][0]["values"][-1] == pattern[-1].tolist()
    assert {"model", "fingerprint", "prompt", "head", "headscope"} <= document["provenance"].keys()


def test_one_role_tested_twice(model: Model, atlas: hs.Atlas) -> None:
    again = verdict("induction", ["L1H2"], "inconclusive", model="mine", fingerprint="f00", seed=9, version="0.0.9")
    both = hs.Atlas(atlas.model, atlas.seed, atlas.scores, [*atlas.verdicts, again])
    session = Session(name="tiny", load=lambda: model, atlas=both)
    client = serve(session)
    for heads, title in ((["L1H2", "L2H3"], "supported"), (["L1H2"], "inconclusive"), (None, "inconclusive")):
        found = json.loads(asked(client, of="role", role="induction", heads=heads, format="json")["text"])
        assert found["title"] == f"induction: {title}"
    assert found["provenance"]["model"] == "mine" and found["provenance"]["seed"] == 9
    session.jobs.close()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"of": "lense"}, "Did you mean lens"),
        ({"of": "methods", "format": "gif"}, "no format 'gif'"),
        ({"of": "methods", "format": None}, "type str"),
        ({"of": "scores", "method": "bos-snk"}, "bos-sink"),
        ({"of": "scores", "method": "bos-sink", "against": "x"}, "no scores of 'x'"),
        ({"of": "role", "role": "sinc"}, "sink"),
        ({"of": "role", "role": "sink", "heads": ["L0H0"]}, "no test of 'sink'"),
        ({"of": "example", "method": "signed"}, "no attention of the top head"),
        ({"of": "example", "method": "bos-sink", "query": 99}, "positions 0 to"),
        ({**ATTENTION, "head": 9}, "does not exist"),
        ({**ATTENTION, "prompt": ""}, "empty"),
        ({**ATTENTION, "query": 7}, "positions 0 to 6"),
        ({"of": "lens", "prompt": PROMPT, "by": "worst"}, "best or target"),
        ({"of": "lens", "prompt": PROMPT, "start": 7}, "positions 0 to 6"),
        ({"of": "route", "prompt": PROMPT, "threshold": 2}, "below 1"),
    ],
)
def test_wrong_requests_are_refused(client: TestClient, refused: Refused, body: dict[str, Any], words: str) -> None:
    refused(client.post("/api/figure", json={"format": "svg", **body}), 400, words)


def test_without_matplotlib_one_sentence(client: TestClient, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    for form in ("png", "pdf"):
        refused(client.post("/api/figure", json={**ATTENTION, "format": form}), 400, "pip install 'headscope[figures]'")
    assert "<svg" in asked(client, **ATTENTION, format="svg")["text"]


def test_a_name_of_an_atlas_leads_nowhere(model: Model, atlas: hs.Atlas) -> None:
    scores = {"../../x <b>": atlas.scores["bos-sink"]}
    session = Session(name="tiny", load=lambda: model, atlas=hs.Atlas(atlas.model, 0, scores, []))
    told = asked(serve(session), of="scores", method="../../x <b>", format="svg")
    assert told["name"] == "..-..-x-b-.svg"
    session.jobs.close()


class Asker:
    """One request straight to the application, whose sender hangs up when `leave` is called."""

    def __init__(self, session: Session, path: str, body: dict[str, Any]):
        self.app = create(session, hosts={HOST})
        self.scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "scheme": "http", "http_version": "1.1", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8642),
            "headers": [(b"host", HOST.encode()), (b"content-type", b"application/json")],
        }  # fmt: skip
        self.messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        self.gone = threading.Event()

    def leave(self) -> None:
        self.gone.set()

    def run(self) -> None:
        async def receive() -> Any:
            if self.messages:
                return self.messages.pop()
            while not self.gone.is_set():
                await asyncio.sleep(0.005)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        asyncio.run(self.app(self.scope, receive, send))


def steps_until_left(
    session: Session, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, path: str, body: dict[str, Any]
) -> int:
    """How often `owner.name` is called when the sender hangs up during the first call."""
    asker, inner, calls = Asker(session, path, body), getattr(owner, name), []

    def counted(*given: Any, **options: Any) -> Any:
        calls.append(name)
        if len(calls) == 1:
            asker.leave()
            end = time.monotonic() + 20
            while not session.jobs._current.stop:  # type: ignore[union-attr]
                assert time.monotonic() < end, "the server did not notice that nobody waits"
                time.sleep(0.002)
        return inner(*given, **options)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, counted)
        asker.run()
        assert session.jobs.ask("next", lambda: "answered").future.result(20) == "answered"
    return len(calls)


def test_a_route_that_nobody_waits_for_stops_at_the_next_layer(
    session: Session, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": PROMPT, "threshold": 0.005}
    for path, asked_for in (("/api/prompt/route", body), ("/api/figure", {**body, "of": "route", "format": "svg"})):
        assert steps_until_left(session, monkeypatch, Walk, "into", path, asked_for) == 1, "of three layers"
    assert client.post("/api/prompt/route", json=body).status_code == 200, "the next one is answered"


def test_examples_that_nobody_waits_for_stop_at_the_next_batch(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"layer": 1, "head": 2}
    assert steps_until_left(session, monkeypatch, look, "trace", "/api/examples", body) == 1, "of four batches"


def test_a_lens_and_a_continuation_stop_too(session: Session, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    from headscope.routes import logit_lens

    body = {"prompt": PROMPT, "start": 0, "stop": 7}
    assert steps_until_left(session, monkeypatch, logit_lens, "unembed", "/api/prompt/lens", body) == 1, (
        "of four levels"
    )
    body = {"prompt": PROMPT, "edits": [], "n": 9}
    assert steps_until_left(session, monkeypatch, model.hf, "forward", "/api/try/continue", body) == 1, "of 18 tokens"
    assert not any(part._forward_hooks for part in model.hf.modules()), "the model is left as it was"


def test_what_is_waited_for_takes_all_its_steps(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    inner = look.trace
    monkeypatch.setattr(look, "trace", lambda *a, **o: calls.append(1) or inner(*a, **o))
    assert client.post("/api/examples", json={"layer": 1, "head": 2}).status_code == 200
    assert len(calls) == 4
