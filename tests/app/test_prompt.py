"""Prompt and Try: what the page is told equals what the package gives, and wrong requests are one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

import headscope as hs
from app.conftest import HOSTILE, serve
from app.test_api import finished
from families.tiny import build
from headscope.app import prompt as page
from headscope.app import trial
from headscope.app.session import MOST_TOKENS, Session
from headscope.model import Model
from headscope.routes.neuronpedia import attribution_graph
from headscope.verify import prompt_of

Refused = Callable[..., None]
PROMPT = f"the store a {HOSTILE} Mary </script> John"


@pytest.fixture
def ask(client: TestClient) -> Callable[..., dict[str, Any]]:
    def answer(path: str, **body: Any) -> dict[str, Any]:
        response = client.post(f"/api/{path}", json=body)
        assert response.status_code in (200, 202), response.text
        found: dict[str, Any] = response.json()
        return found

    return answer


def ids_of(model: Model, text: str = PROMPT) -> list[int]:
    return model.tokens(text)[0][0].tolist()


class TestPrompt:
    def test_next_tokens(self, ask: Any, model: Model) -> None:
        told = ask("prompt/look", prompt=PROMPT, position=4)
        probs = hs.trace(model, PROMPT).logits[0, 4].softmax(-1)
        best = probs.topk(20)
        assert told["tokens"] == PROMPT.split() and told["position"] == 4 and told["layers"] == 3
        assert [row["id"] for row in told["next"]] == best.indices.tolist()
        assert [row["p"] for row in told["next"]] == pytest.approx(best.values.tolist(), rel=1e-4)
        assert [told["target"]["id"], told["foil"]["id"]] == best.indices[:2].tolist(), "the model's top two"
        assert told["foil"]["rank"] == 2

    def test_tokens_are_added_one_by_one(self, ask: Any, model: Model) -> None:
        more = [7, 2, 9]
        told = ask("prompt/look", prompt=PROMPT, more=more)
        ids = torch.tensor([ids_of(model) + more])
        assert told["tokens"][-3:] == ["John", HOSTILE, "&amp;"] and told["position"] == 9
        expected = hs.trace(model, ids, logits="last").logits[0, 0].softmax(-1)
        assert told["next"][0]["p"] == pytest.approx(float(expected.max()), rel=1e-4)
        assert told["text"].startswith(PROMPT) and HOSTILE in told["text"][len(PROMPT) :]

    @pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "olmo2", "gpt-j", "opt", "falcon", "gpt-neox"])
    def test_the_lens_is_the_final_norm_and_the_unembedding(self, family: str) -> None:
        """Of every layer's stream; of the last one it is the model's own prediction."""
        model = hs.load(build(family, torch.float32))
        ids = torch.arange(5, 13)[None]
        run = hs.trace(model, ids, ["resid_post", "resid_pre"])
        seen = page.Desk().see(model, ids)
        question = page.Question("", target=7)
        told = page.lens(seen, question, 2, 8)
        own = run.logits[0, 2:].softmax(-1)
        last = 3 * 6  # positions of the levels below: E, L0, L1 … of three layers
        assert told["levels"] == ["E", "L0", "L1", "L2"] and len(told["rank"]) == 4 * 6
        assert told["top"][last * 5 :: 5] == own.argmax(-1).tolist()
        assert told["p"][last * 5 :: 5] == pytest.approx(own.max(-1).values.tolist(), rel=1e-3)
        assert told["target_p"][last:] == pytest.approx(own[:, 7].tolist(), rel=1e-3)
        a = model.anatomy
        for level, x in enumerate([run["resid_pre", 0], *(run["resid_post", i] for i in range(3))]):
            with torch.no_grad():
                logits = a.parts.unembed(x[0, 5] if a.final_norm is None else a.final_norm(x[0, 5:6])[0])
            place = level * 6 + 3
            assert told["top"][place * 5] == int(logits.argmax())
            assert told["rank"][place] == 1 + int((logits > logits[7]).sum())

    def test_the_lens_has_at_most_so_many_columns(self, ask: Any) -> None:
        told = ask("prompt/lens", prompt="the store a Mary " * 60, start=100, stop=240)
        assert (told["start"], told["stop"]) == (100, 100 + page.MOST_COLUMNS)
        assert set(map(str, told["top"])) <= set(told["words"])

    @pytest.mark.parametrize(
        "asked", [{}, {"position": 4, "threshold": 0.02}, {"foil": -1, "biases": "drop"}, {"target": 2, "foil": 6}]
    )
    def test_the_route_is_that_of_the_package(self, ask: Any, model: Model, asked: dict[str, Any]) -> None:
        ask("prompt/look", prompt=PROMPT)  # so that a kept pass is walked again
        told = ask("prompt/route", prompt=PROMPT, **asked)
        best = hs.trace(model, PROMPT).logits[0, asked.get("position", 6)].topk(2).indices.tolist()
        target = asked.get("target", best[0])
        foil = {None: best[1], -1: None}.get(asked.get("foil"), asked.get("foil"))
        given = {name: asked[name] for name in ("position", "threshold", "biases") if name in asked}
        route = hs.routes(model, PROMPT, target=target, foil=foil, **given).document()
        assert told["nodes"] == route["nodes"] and told["parts"] == route["parts"]
        assert (told["target_id"], told["foil_id"], told["threshold"]) == (target, foil, given.get("threshold", 0.04))
        for mine, other in zip(told["edges"], route["edges"], strict=True):
            assert mine == pytest.approx(other, abs=1e-9)

    def test_neurons_are_those_of_the_route(self, ask: Any, model: Model) -> None:
        route = hs.routes(model, PROMPT, threshold=0.01, neurons=4, foil=5)
        node = next(n for n in route.nodes if n.kind == "mlp")
        told = ask("prompt/neurons", prompt=PROMPT, threshold=0.01, foil=5, layer=node.layer, at=node.position)[
            "neurons"
        ]
        expected = [n for n in route.neurons if n.node == node.id]
        assert [row["component"] for row in told[:4]] == [n.component for n in expected]
        for row, neuron in zip(told, expected, strict=False):
            assert row["weight"] == pytest.approx(neuron.weight, rel=1e-4)
            assert row["signed"] == pytest.approx(neuron.signed, rel=1e-3, abs=1e-6)
            words = {t["token"]: t["value"] for t in row["promoted"]}
            assert list(words.values()) == sorted(words.values(), reverse=True)

    @pytest.mark.parametrize("family", ["llama", "gpt-j", "olmo2"])
    def test_states_are_those_of_the_pass(self, family: str) -> None:
        model = hs.load(build(family, torch.float32))
        run = hs.trace(model, torch.arange(5, 13)[None], ["resid_pre", "resid_post", "attn_out"])
        seen = page.Desk().see(model, torch.arange(5, 13)[None])
        for node in page.route(seen, page.Question("", threshold=0.02)).nodes:
            if node.kind in ("mlp", "bias"):
                continue
            x, below = seen.state(node.id)
            if node.kind == "embed":
                expected = run["resid_pre", 0]
            elif node.kind == "post":
                expected = run["resid_post", node.layer]
            else:
                expected = run["resid_pre", node.layer] + run["attn_out", node.layer]
            torch.testing.assert_close(x, expected[0, node.position])
            assert (below is None) == (node.kind == "embed")

    def test_a_state_and_what_changed_in_it(self, ask: Any, model: Model) -> None:
        told = ask("prompt/state", prompt=PROMPT, node="L2@6", target=2)
        logits = hs.trace(model, PROMPT).logits[0, 6]
        assert [row["id"] for row in told["top"]] == logits.topk(12).indices.tolist()
        assert told["below"] == "L2A@6" and told["target"]["rank"] == 1 + int((logits > logits[2]).sum())
        under = ask("prompt/state", prompt=PROMPT, node="L2A@6", target=2)
        assert told["target"]["below"] == under["target"]["rank"]
        assert ask("prompt/state", prompt=PROMPT, node="E@0")["promoted"] == []

    def test_a_route_for_neuronpedia(self, ask: Any, model: Model) -> None:
        told = ask("prompt/neuronpedia", prompt=PROMPT, foil=-1)
        assert json.loads(told["text"]) == json.loads(json.dumps(attribution_graph(hs.routes(model, PROMPT))))
        assert told["name"] == "route.neuronpedia.json"

    def test_a_proof_is_a_job(self, ask: Any, client: TestClient, model: Model, tmp_path: Path) -> None:
        number = ask("prompt/prove", prompt=PROMPT, position=5, target=2, foil=7)["id"]
        job = finished(client, number)
        assert job["state"] == "done", job
        route = hs.routes(model, PROMPT, position=5, target=2, foil=7)
        proof = hs.prove_routes(model, prompt_of(route)).document()
        assert job["result"]["proof"]["faithfulness"] == pytest.approx(proof["faithfulness"], rel=1e-4)
        assert job["result"]["verdict"] == "inconclusive" and "random routes" in job["result"]["reason"]
        assert (
            job["result"]["view"].startswith("/prompt?prompt=the+store") and "target=2&foil=7" in job["result"]["view"]
        )
        assert json.loads((Path(job["result"]["out"]) / "proof.json").read_text())["n_random"] == 20

    @pytest.mark.parametrize(
        ("path", "body", "words"),
        [
            ("look", {"prompt": ""}, "empty"),
            ("look", {"prompt": "a " * (MOST_TOKENS + 1)}, "tokens"),
            ("look", {"prompt": "a " * MOST_TOKENS, "more": [1]}, f"{MOST_TOKENS + 1} tokens"),
            ("look", {"prompt": "a", "more": [96]}, "Token 96 does not exist"),
            ("look", {"prompt": "a", "more": ["a"]}, "list of token ids"),
            ("look", {"prompt": "a", "position": 1}, "Position 1 does not exist"),
            ("look", {"prompt": "a", "target": -7}, "Token -7"),
            ("look", {"prompt": "a", "target": "a"}, "type int"),
            ("lens", {"prompt": "a", "start": 0, "stop": 2}, "positions 0 to 0"),
            ("lens", {"prompt": "a", "start": 1, "stop": 1}, "positions 0 to 0"),
            ("lens", {"prompt": "a", "start": 0}, "lacks 'stop'"),
            ("route", {"prompt": "a", "threshold": 0}, "0.005 up to"),
            ("route", {"prompt": "a", "threshold": 1.5}, "below 1"),
            ("route", {"prompt": "a", "threshold": "x"}, "type float"),
            ("route", {"prompt": "a", "biases": "some"}, "part, drop or heads"),
            ("state", {"prompt": "a", "node": "L9@0"}, "layers 0 to 2"),
            ("state", {"prompt": "a", "node": HOSTILE}, "no state"),
            ("state", {"prompt": "a", "node": "L1@4"}, "Position 4"),
            ("state", {"prompt": "a", "node": "L0MLP@0"}, "no state"),
            ("neurons", {"prompt": "a", "layer": 3, "at": 0}, "layers 0 to 2"),
            ("neurons", {"prompt": "a", "layer": 0, "at": 0, "threshold": 0.99}, "not on the route"),
            ("token", {"text": "two words"}, "must be one token"),
            ("prove", {"prompt": "a", "threshold": -1}, "0.005 up to"),
        ],
    )
    def test_wrong_requests_are_refused(
        self, client: TestClient, refused: Refused, path: str, body: Any, words: str
    ) -> None:
        refused(client.post(f"/api/prompt/{path}", json=body), 400, words)

    def test_a_walk_that_takes_too_long_is_given_up(
        self, client: TestClient, refused: Refused, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(page, "MOST_WALK_SECONDS", -1.0)
        refused(client.post("/api/prompt/route", json={"prompt": PROMPT}), 400, "raise the threshold")

    def test_an_encoder_has_no_next_token(self, refused: Refused) -> None:
        model = hs.load(build("bert", torch.float32))
        session = Session(name="bert", load=lambda: model)
        refused(serve(session).post("/api/prompt/look", json={"prompt": "a"}), 400, "tokenizer")
        with pytest.raises(hs.HeadscopeError, match="decoders"):
            page.Desk().see(model, torch.arange(5, 9)[None])
        session.jobs.close()


ROWS: list[dict[str, Any]] = [
    {"op": "zero", "on": "L1H2"},
    {"op": "scale", "on": "L0H0-1, L2MLP", "by": 0.25, "at": 3},
    {"op": "zero", "on": "L0N3", "off": True},
]


class TestTry:
    def test_before_and_after_are_those_of_the_package(self, ask: Any, model: Model) -> None:
        told = ask("try/compare", prompt=PROMPT, edits=ROWS)
        edits = [hs.zero("L1H2"), hs.scale("L0H0,L0H1,L2MLP", 0.25, positions=3)]
        assert told["edits"] == [str(e) for e in edits]
        ids = torch.tensor(ids_of(model))
        vocabulary = model.tokenizer.get_vocab()
        for side, some in (("before", []), ("after", edits)):
            logits = hs.trace(model, PROMPT, edits=some).logits[0]
            probs = logits[-1].softmax(-1)
            assert told["loss"][side] == pytest.approx(
                float(torch.nn.functional.cross_entropy(logits[:-1], ids[1:])), rel=1e-5
            )
            for row in told["tokens"]:
                assert row[side] == pytest.approx(float(probs[vocabulary[row["token"]]]), rel=1e-4)
        changes = [abs(row["after"] - row["before"]) for row in told["tokens"]]
        assert changes == sorted(changes, reverse=True) and told["kl"] > 0

    def test_no_edit_changes_nothing(self, ask: Any) -> None:
        told = ask("try/compare", prompt=PROMPT, edits=[])
        assert told["kl"] == 0 and told["loss"]["before"] == told["loss"]["after"]
        assert ask("try/compare", prompt="the", edits=[])["loss"] is None

    def test_steering(self, model: Model) -> None:
        ids = model.tokens(PROMPT)[0]
        row = {"op": "steer", "layer": 2, "strength": -2.0, "plus": "the store Mary", "minus": "a"}
        (edit,) = trial.build(model, [row], ids, trial.Files())
        x = [hs.trace(model, text, ["resid_pre"])["resid_pre", 2][0, -1] for text in ("the store Mary", "a")]
        torch.testing.assert_close(edit.value, -2.0 * (x[0] - x[1]))
        assert str(edit.components[0]) == "L2RESID"
        toward = {"op": "steer", "layer": 2, "strength": 3.0, "token": 6}
        before = hs.trace(model, PROMPT).logits[0, -1].softmax(-1)[6]
        after = trial.compare(model, ids, trial.build(model, [toward], ids, trial.Files()))
        (mary,) = [r for r in after["tokens"] if r["token"] == "Mary"]
        assert mary["before"] == pytest.approx(float(before), rel=1e-4) and mary["after"] > mary["before"]

    def test_it_goes_on_as_generate_does(self, ask: Any, model: Model) -> None:
        told = ask("try/continue", prompt=PROMPT, edits=ROWS[:1], n=5)
        ids = torch.tensor([ids_of(model)])
        for side, some in (("before", []), ("after", [hs.zero("L1H2")])):
            with hs.edited(model, some) as hf:
                out = hf.generate(input_ids=ids, max_new_tokens=5, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
            assert told[side] == [model.tokenizer.decode([i]) for i in out.tolist()]

    def test_saved_edits_are_read_by_the_package_and_the_page(self, ask: Any, model: Model, tmp_path: Path) -> None:
        rows = [*ROWS[:2], {"op": "steer", "layer": 1, "strength": 0.5, "token": 6}]
        saved = ask("try/save", prompt=PROMPT, edits=rows)
        path = tmp_path / saved["name"]
        path.write_text(saved["text"])
        loaded = hs.load_edits(path)
        assert [e.op for e in loaded] == ["zero", "scale", "add"]
        back = ask("try/load", text=saved["text"])["edits"]
        assert back[:2] == [{"op": "zero", "on": "L1H2"}, {"op": "scale", "on": "L0H0-1, L2MLP", "by": 0.25, "at": 3}]
        assert back[2]["op"] == "kept" and back[2]["says"] == str(loaded[2])
        before, after = (ask("try/compare", prompt=PROMPT, edits=some) for some in (rows, back))
        assert before["edits"] == after["edits"] and before["kl"] == pytest.approx(after["kl"])
        assert ask("try/save", edits=back)["text"] == saved["text"]

    @pytest.mark.parametrize(
        ("text", "names"),
        [
            ("L5H3", "L5H3"),
            ("l5h3, L0MLP,L7N1021", "L5H3 L0MLP L7N1021"),
            ("L1H0-2", "L1H0 L1H1 L1H2"),
            ("L0-1H1", "L0H1 L1H1"),
            ("L1-2MLP", "L1MLP L2MLP"),
            ("L0H*", "L0H0 L0H1 L0H2 L0H3"),
            ("L0KV*", "L0KV0 L0KV1"),
            ("L0-1", "L0 L1"),
            ("L0H1, L0H1-2", "L0H1 L0H2"),
        ],
    )
    def test_components_by_name_and_range(self, text: str, names: str) -> None:
        sizes = {"H": 4, "KV": 2, "N": 48}
        found = trial.expand(text, sizes)
        assert " ".join(map(str, found)) == names
        assert trial.expand(trial.collapse(found), sizes) == found

    @pytest.mark.parametrize(
        ("path", "body", "words"),
        [
            ("compare", {"prompt": "", "edits": []}, "empty"),
            ("compare", {"prompt": "a", "edits": [{"op": "zero", "on": ""}]}, "No component"),
            ("compare", {"prompt": "a", "edits": [{"op": "zero", "on": HOSTILE}]}, "not the name"),
            ("compare", {"prompt": "a", "edits": [{"op": "zero", "on": "L9H0"}]}, "layers 0 to 2"),
            ("compare", {"prompt": "a", "edits": [{"op": "zero", "on": "L0H3-9"}]}, "4 heads"),
            ("compare", {"prompt": "a", "edits": [{"op": "zero", "on": "L0H3-1"}]}, "smaller number first"),
            ("compare", {"prompt": "a", "edits": [{"op": "zero", "on": "L0-9999999999H0"}]}, "not a range"),
            ("compare", {"prompt": "a", "edits": [{"op": "zero", "on": "L0-9999N0-9999"}]}, "more than"),
            ("compare", {"prompt": "a", "edits": [{"op": "zero", "on": "L0H0", "at": 1}]}, "1 tokens"),
            ("compare", {"prompt": "a", "edits": [{"op": "zero", "on": "L0H0", "at": -1}]}, "count from 0"),
            ("compare", {"prompt": "a", "edits": [{"op": "zero", "on": "L0H0", "at": "x"}]}, "whole number"),
            ("compare", {"prompt": "a", "edits": [{"op": "scale", "on": "L0H0"}]}, "must be a number"),
            ("compare", {"prompt": "a", "edits": [{"op": "steer", "layer": 7, "strength": 1}]}, "0 to 2"),
            ("compare", {"prompt": "a", "edits": [{"op": "steer", "layer": 1, "strength": 1}]}, "two prompts"),
            ("compare", {"prompt": "a", "edits": [{"op": "explode"}]}, "no edit 'explode'"),
            ("compare", {"prompt": "a", "edits": [{"op": "kept", "file": "x", "index": 0}]}, "load the file again"),
            ("compare", {"prompt": "a", "edits": [3]}, "object"),
            ("compare", {"prompt": "a", "edits": [{}] * 65}, "at most 64"),
            ("continue", {"prompt": "a", "edits": [], "n": 1000}, "1 to 64"),
            ("save", {"edits": []}, "no edit to save"),
            ("load", {"text": "nonsense"}, "not a JSON file"),
            ("load", {"text": "{}"}, "not an edit file"),
            ("load", {"text": '{"format": "headscope-edits", "format_version": 1, "edits": [3]}'}, "damaged"),
        ],
    )
    def test_wrong_requests_are_refused(
        self, client: TestClient, refused: Refused, path: str, body: Any, words: str
    ) -> None:
        refused(client.post(f"/api/try/{path}", json=body), 400, words)
