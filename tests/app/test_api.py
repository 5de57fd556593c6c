"""What the page is told: equal to what the package itself says, and every wrong request answered in one sentence."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

import headscope as hs
from app.conftest import HOSTILE, serve
from headscope.app import look
from headscope.app.session import MOST_TOKENS, Session
from headscope.core.errors import NotApplicable
from headscope.model import Model

Refused = Callable[..., None]
PROMPT = f"the store a {HOSTILE} Mary </script> John"


def matrix(response: Any) -> tuple[dict[str, Any], np.ndarray]:
    assert response.status_code == 200, response.text
    (length,) = struct.unpack("<I", response.content[:4])
    assert length % 4 == 0
    head = json.loads(response.content[4 : 4 + length])
    return head, np.frombuffer(response.content[4 + length :], head["dtype"]).reshape(head["shape"])


def finished(client: TestClient, number: int) -> dict[str, Any]:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        (job,) = [j for j in client.get("/api/jobs").json()["jobs"] if j["id"] == number]
        if job["state"] not in ("queued", "running"):
            return job
        time.sleep(0.05)
    raise AssertionError("the job did not end in 2 minutes")


class TestAtlas:
    def test_summary(self, client: TestClient, atlas: hs.Atlas) -> None:
        told = client.get("/api/atlas").json()
        assert told["model"]["fingerprint"] == atlas.model["fingerprint"]
        assert [m["id"] for m in told["methods"]] == list(atlas.scores)
        assert [v["verdict"] for v in told["verdicts"]] == ["supported", "inconclusive"]
        assert told["verdicts"][1]["side_effect"] is None, "JSON has no NaN"
        assert told["skipped"] == atlas.skipped

    @pytest.mark.parametrize("method", ["previous-token", "signed"])
    def test_scores(self, client: TestClient, atlas: hs.Atlas, method: str) -> None:
        head, values = matrix(client.get(f"/api/scores/{method}"))
        assert head["shape"] == [3, 4]
        np.testing.assert_array_equal(values, atlas.scores[method].values.astype(np.float32))

    def test_head(self, client: TestClient, atlas: hs.Atlas) -> None:
        told = client.get("/api/head/1/2").json()
        assert told["component"] == "L1H2" and told["kv_head"] == 1
        row = told["scores"][0]
        assert row["score"] == pytest.approx(float(atlas.scores[row["method"]][1, 2]))
        assert row["rank"] == float(hs.rank(atlas.scores[row["method"]])[1, 2]) and row["of"] == 12
        assert [(v["role"], v["place"]) for v in told["roles"]] == [("induction", 1)] and told["other_roles"] == [
            "sink"
        ]
        signed = client.get("/api/head/0/0").json()["scores"][2]
        assert signed["score"] is None and signed["rank"] is None and signed["of"] == 11

    def test_agreement(self, client: TestClient, atlas: hs.Atlas) -> None:
        told = client.get("/api/agreement?x=bos-sink&y=previous-token").json()
        assert told == pytest.approx(hs.agree(atlas.scores["bos-sink"], atlas.scores["previous-token"]))

    def test_attention_of_the_top_head(self, client: TestClient, atlas: hs.Atlas) -> None:
        told = {m["id"]: m["example"] for m in client.get("/api/atlas").json()["methods"]}
        assert told == {row["method"]: row["head"] for row in atlas.examples} | {"signed": None}
        for row in atlas.examples:
            head, values = matrix(client.get(f"/api/example/{row['method']}"))
            assert head["head"] == str(hs.top(atlas.scores[row["method"]], 1)[0]) and head["tokens"] == row["tokens"]
            np.testing.assert_array_equal(values, np.array(row["pattern"], np.float32))

    def test_unknown_names_are_refused(self, client: TestClient, refused: Refused) -> None:
        refused(client.get("/api/scores/previous-tokn"), 400, "previous-token")
        refused(client.get("/api/agreement?x=bos-sink"), 400, "no scores")
        refused(client.get("/api/example/signed"), 400, "no attention of the top head of 'signed'")
        refused(client.get("/api/head/3/0"), 400, "L3H0 does not exist", "3 layers of 4 heads")
        refused(client.get("/api/head/0/99"), 400, "does not exist")
        refused(client.get("/api/head/a/b"), 404)
        refused(client.get("/api/"), 404)
        refused(client.get("/nothing"), 404)


class TestModel:
    def test_pattern(self, client: TestClient, model: Model) -> None:
        head, values = matrix(client.post("/api/pattern", json={"layer": 1, "head": 2, "prompt": PROMPT}))
        assert head["tokens"] == PROMPT.split()
        run = hs.trace(model, PROMPT, ["pattern"])
        np.testing.assert_allclose(values, run["pattern", 1][0, 2].numpy(), atol=1e-3)
        assert values.dtype == np.float16

    def test_ablation_is_that_of_the_package(self, client: TestClient, model: Model) -> None:
        told = client.post("/api/ablate", json={"layer": 1, "head": 2, "prompt": PROMPT}).json()
        before = hs.trace(model, PROMPT).logits[0, -1].softmax(-1)
        after = hs.trace(model, PROMPT, edits=hs.zero("L1H2")).logits[0, -1].softmax(-1)
        words = model.tokenizer.get_vocab()
        for row in told["tokens"]:
            assert row["before"] == pytest.approx(float(before[words[row["token"]]]), rel=1e-4)
            assert row["after"] == pytest.approx(float(after[words[row["token"]]]), rel=1e-4)
        assert told["kl"] == pytest.approx(float((before * (before / after).log()).sum()), rel=1e-3)

    def test_what_a_head_writes_is_its_part_of_the_route(self, model: Model) -> None:
        """`routes` computes the same direct effects on its own way."""
        ids = look.read(model, PROMPT, 99)
        route = hs.routes(model, PROMPT, threshold=0.0)
        last = ids.shape[1] - 1
        checked = 0
        for edge in route.edges:
            if edge.kind == "head" and edge.target.endswith(f"@{last}"):
                head = hs.Component.parse(str(edge.component))
                key = int(edge.source.rpartition("@")[2])
                found = look.direct(model, head.layer, int(head.index or 0), ids, last, key)[route.target_id]
                assert float(found) == pytest.approx(edge.signed, abs=1e-5)
                checked += 1
        assert checked > 20

    def test_examples_are_where_it_writes_most(self, client: TestClient, model: Model) -> None:
        told = client.post("/api/examples", json={"layer": 1, "head": 2}).json()
        prompts = hs.tasks.make("plain-text", model, 32, 0, length=48)
        z = hs.trace(model, prompts, ["z"], logits=None)["z", 1][:, :, 2]
        size = (z @ model.anatomy.W_O(1, 2)).norm(dim=-1)[:, 1:]
        factors = [row["factor"] for row in told["examples"]]
        assert factors[0] == pytest.approx(float(size.max() / size.mean()), rel=1e-3)
        assert factors == sorted(factors, reverse=True) and len(factors) == 8 and told["texts"] == 32
        for row in told["examples"]:
            assert sum(row["attention"]) == pytest.approx(1, abs=0.01) and row["attention"][row["at"] + 1 :] == [0] * (
                47 - row["at"]
            )

    def test_keys_sum_to_the_whole(self, model: Model) -> None:
        ids = look.read(model, PROMPT, 99)
        parts = [look.direct(model, 2, 1, ids, 4, key) for key in range(5)]
        torch.testing.assert_close(torch.stack(parts).sum(0), look.direct(model, 2, 1, ids, 4))

    def test_written_and_copied_tokens_are_sorted(self, client: TestClient) -> None:
        written = client.post(
            "/api/written", json={"layer": 0, "head": 1, "prompt": PROMPT, "query": 3, "key": 2}
        ).json()
        copied = client.post("/api/copies", json={"layer": 0, "head": 1, "token": HOSTILE}).json()
        for rows in (written, copied["ov"], copied["qk"]):
            up, down = ([row["value"] for row in rows[name]] for name in ("promoted", "suppressed"))
            assert up == sorted(up, reverse=True) and down == sorted(down) and up[0] > down[0]

    @torch.no_grad()
    def test_weights_alone(self, model: Model) -> None:
        """By hand: embedding through the layer's norm, W_V W_O, the final norm's gain, the unembedding."""
        a = model.anatomy
        x = a.blocks[1].norm_attn(a.W_E[6][None])[0]
        logits = x @ a.W_V(1, 2) @ a.W_O(1, 2) * a.final_norm.weight @ a.W_U
        best = int(logits.argmax())
        found = look.copies(model, 1, 2, 6)
        assert found["ov"]["promoted"][0]["token"] == model.tokenizer.decode([best])
        scores = a.blocks[1].norm_attn(a.W_E) @ a.W_K(1, 2) @ (x @ a.W_Q(1, 2)) / a.d_head**0.5
        assert found["qk"]["promoted"][0]["value"] == pytest.approx(float(scores.max()), rel=1e-4)

    @pytest.mark.parametrize(
        ("path", "body", "words"),
        [
            ("pattern", {"layer": 9, "head": 0, "prompt": "a"}, "L9H0 does not exist"),
            ("pattern", {"layer": 0, "head": -1, "prompt": "a"}, "does not exist"),
            ("pattern", {"layer": 0, "head": 0, "prompt": ""}, "empty"),
            ("pattern", {"layer": 0, "head": 0, "prompt": "   "}, "empty"),
            ("pattern", {"layer": 0, "head": 0, "prompt": "a " * (MOST_TOKENS + 1)}, "tokens"),
            ("pattern", {"layer": 0, "head": 0, "prompt": 3}, "'prompt' in the request must be of type str"),
            ("pattern", {"layer": "0", "head": 0, "prompt": "a"}, "type int"),
            ("pattern", {"layer": True, "head": 0, "prompt": "a"}, "type int"),
            ("pattern", {"layer": 0, "prompt": "a"}, "lacks 'head'"),
            ("written", {"layer": 0, "head": 0, "prompt": "a", "query": 7}, "positions 0 to 0"),
            ("written", {"layer": 0, "head": 0, "prompt": "a", "query": 0, "key": -2}, "positions 0 to 0"),
            ("copies", {"layer": 0, "head": 0, "token": "a b"}, "must be one token"),
            ("copies", {"layer": 0, "head": 7, "token": "a"}, "does not exist"),
            ("ablate", {"layer": 0, "head": 4, "prompt": "a"}, "does not exist"),
            (
                "jobs",
                {"kind": "score", "method": "previous-token", "seed": 2**63},
                "'seed' in the request is too large",
            ),
            (
                "jobs",
                {"kind": "score", "method": "previous-token", "seed": 10**400},
                "'seed' in the request is too large",
            ),
            ("try/load", {"text": "[" * 50_000}, "The file you chose cannot be read"),
            ("try/load", {"text": "{}"}, "The file you chose is not an edit file of headscope"),
            ("jobs", {"kind": "rm"}, "no job of kind"),
            ("jobs", {"kind": "score", "method": "nothing"}, "no score method"),
            ("jobs", {"kind": "verify", "role": "nothing"}, "no role"),
            ("jobs", {"kind": "verify", "role": "sink", "heads": [3]}, "not the name of a component"),
            ("jobs", {"kind": "verify", "role": "sink", "heads": ["L99H99"]}, "L99H99 does not exist"),
            ("jobs", {"kind": "scan", "methods": "../../etc"}, "quick"),
            ("jobs/5/cancel", {}, "no job 5"),
        ],
    )
    def test_wrong_requests_are_refused(
        self, client: TestClient, refused: Refused, path: str, body: Any, words: str
    ) -> None:
        refused(client.post(f"/api/{path}", json=body), 400, words)

    def test_half_a_character_is_refused(self, client: TestClient, refused: Refused) -> None:
        text = '{"layer": 0, "head": 0, "token": "a\\ud83d"}'
        answered = client.post("/api/copies", content=text, headers={"content-type": "application/json"})
        refused(answered, 400, "half a character")

    @pytest.mark.parametrize("text", ["", "nonsense", "[1]", "3", '{"layer": ', "[" * 5000])
    def test_what_is_no_json_object_is_refused(self, client: TestClient, refused: Refused, text: str) -> None:
        refused(client.post("/api/pattern", content=text, headers={"content-type": "application/json"}), 400, "JSON")

    def test_a_slow_answer_is_given_up(
        self, session: Session, refused: Refused, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("headscope.app.asking.MOST_SECONDS", 0.05)
        session.jobs.ask("slow", lambda: time.sleep(0.5))
        refused(serve(session).post("/api/ablate", json={"layer": 0, "head": 0, "prompt": "a"}), 503, "busy with slow")

    def test_a_model_that_cannot_be_loaded_is_one_sentence(self, atlas: hs.Atlas, refused: Refused) -> None:
        def load() -> Model:
            raise NotApplicable("The model is not on this machine.")

        session = Session(name="x", load=load, atlas=atlas)
        client = serve(session)
        for _ in range(2):
            refused(client.post("/api/ablate", json={"layer": 0, "head": 0, "prompt": "a"}), 400, "not on this machine")
        assert client.get("/api/head/0/0").status_code == 200, "the atlas is shown without the model"
        session.jobs.close()

    def test_another_model_than_the_atlas_s_is_refused(self, model: Model, atlas: hs.Atlas, refused: Refused) -> None:
        other = hs.Atlas({**atlas.model, "fingerprint": "0" * 16}, 0, atlas.scores, [])
        session = Session(name="x", load=lambda: model, atlas=other)
        client = serve(session)
        refused(client.post("/api/ablate", json={"layer": 0, "head": 0, "prompt": "a"}), 400, "fingerprint", "0" * 16)
        assert client.get("/api/state").json()["state"] == "refused"
        session.jobs.close()

    def test_unforeseen_failures_are_one_sentence_too(
        self, client: TestClient, refused: Refused, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(look, "pattern", lambda *a: 1 / 0)
        refused(client.post("/api/pattern", json={"layer": 0, "head": 0, "prompt": "a"}), 500, "did not foresee")


class TestJobs:
    def test_a_scan_makes_the_atlas(self, model: Model, tmp_path: Path, refused: Refused) -> None:
        session = Session(name="tiny", load=lambda: model, out=tmp_path / "runs")
        client = serve(session)
        assert client.get("/api/state").json()["atlas"] is False
        assert client.get("/api/atlas").json() is None
        refused(client.get("/api/scores/bos-sink"), 400, "no atlas yet")
        refused(client.post("/api/jobs", json={"kind": "score", "method": "bos-sink"}), 400, "no atlas yet")
        number = client.post("/api/jobs", json={"kind": "scan", "methods": "bos-sink"}).json()["id"]
        job = finished(client, number)
        assert job["state"] == "done", job
        saved = hs.Atlas.load(job["result"]["out"])
        assert list(saved.scores) == ["bos-sink"]
        assert [m["id"] for m in client.get("/api/atlas").json()["methods"]] == ["bos-sink"]
        session.jobs.close()

    def test_questions_between_its_steps_change_nothing(self, model: Model, tmp_path: Path) -> None:
        saved = []
        for busy in (False, True):
            session = Session(name="tiny", load=lambda: model, out=tmp_path / str(busy))
            client = serve(session)
            number = client.post("/api/jobs", json={"kind": "scan", "methods": "bos-sink,previous-token"}).json()["id"]
            asked = 0
            while busy and client.get("/api/jobs").json()["jobs"][0]["state"] in ("queued", "running"):
                assert client.post("/api/ablate", json={"layer": 1, "head": 1, "prompt": PROMPT}).status_code == 200
                asked += 1
            job = finished(client, number)
            saved.append(hs.Atlas.load(job["result"]["out"]))
            session.jobs.close()
        assert asked > 0
        for method, scores in saved[0].scores.items():
            np.testing.assert_array_equal(scores.values, saved[1].scores[method].values)
        assert repr(saved[0].verdicts) == repr(saved[1].verdicts)

    def test_scores_and_verdicts_join_the_atlas(self, client: TestClient, atlas: hs.Atlas, tmp_path: Path) -> None:
        score = client.post("/api/jobs", json={"kind": "score", "method": "duplicate-token"}).json()["id"]
        verify = client.post("/api/jobs", json={"kind": "verify", "role": "sink", "heads": ["L0H1"]}).json()["id"]
        done = [finished(client, number) for number in (score, verify)]
        assert [job["state"] for job in done] == ["done", "done"], done
        told = client.get("/api/atlas").json()
        assert told["methods"][-1]["id"] == "duplicate-token" and len(told["verdicts"]) == len(atlas.verdicts) + 1
        assert done[1]["result"]["reason"] and len(list((tmp_path / "runs").iterdir())) == 2
        assert "duplicate-token" not in atlas.scores, "the atlas that was given stays as it was"

    def test_a_failed_job_keeps_its_sentence(self, atlas: hs.Atlas, tmp_path: Path) -> None:
        def load() -> Model:
            raise NotApplicable("The model is not on this machine.")

        session = Session(name="x", load=load, atlas=atlas, out=tmp_path)
        client = serve(session)
        job = finished(client, client.post("/api/jobs", json={"kind": "scan"}).json()["id"])
        assert job["state"] == "failed" and job["error"] == "The model is not on this machine."
        session.jobs.close()

    def test_choices(self, client: TestClient) -> None:
        told = client.get("/api/choices").json()
        assert "previous-token" in told["methods"] and "induction" in told["roles"]
