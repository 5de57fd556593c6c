"""`headscope routes`: one document that fits its schema, files that open anywhere, refusals in one sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headscope as hs
from headscope.routes import Route

Cli = Callable[..., Any]
PROMPT = "the store of Mary and John"


def test_a_route_fits_its_schema_and_is_what_python_gives(cli: Cli, checkpoints: Path, tmp_path: Path) -> None:
    given = ("routes", checkpoints / "llama", PROMPT, "--target", "Mary", "--foil", "John", "--neurons", 2)
    found = cli(*given, "--out", "route.json", "--json").json("routes")
    route = hs.routes(hs.load(str(checkpoints / "llama")), PROMPT, target="Mary", foil="John", neurons=2)
    assert found == json.loads(json.dumps(route.document()))
    assert Route.load(tmp_path / "route.json").document() == route.document()
    assert len(found["neurons"]) == 2 * sum(node["kind"] == "mlp" for node in found["nodes"])
    sums: dict[str, float] = {}
    for edge in found["edges"]:
        sums[edge["target"]] = sums.get(edge["target"], 0.0) + edge["weight"]
    assert all(abs(total - 1) < 1e-9 for total in sums.values())


def test_a_proof_fits_its_schema(cli: Cli, checkpoints: Path, tmp_path: Path) -> None:
    given = ("routes", checkpoints / "llama")
    one = cli(*given, PROMPT, "--prove", "--n-random", 2, "--json").json("routes")
    assert one["proof"]["verdict"] == "inconclusive" and one["proof"]["p"] is None
    cases = [{"prompt": f"the {w} of Mary to", "answer": "John", "foil": "store"} for w in ("w1", "w2", "w3")]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, cases)))
    found = cli(*given, "--task", "own.jsonl", "--n-random", 2, "--json").json("routes-proof")
    assert found["proof"]["task"] == "own" and found["proof"]["n_prompts"] == 3 and found["proof"]["p"] > 0
    said = cli(*given, "--task", "own.jsonl", "--n-random", 2)
    assert said.out.startswith(found["proof"]["verdict"]) and "3 prompts" in said.out


def test_drawings_escape_every_token_and_need_no_network(cli: Cli, hostile: Path, tmp_path: Path) -> None:
    done = cli("routes", hostile, "the <b>x</b> of", "--html", "route.html", "--neuronpedia", "graph.json")
    assert done.status == 0, done.err
    cli("routes", hostile, "the <b>x</b> of", "--html", "route.svg")
    for name in ("route.html", "route.svg"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert "<script" not in text and "<b>x" not in text and 'onload="' not in text
        assert "&lt;script&gt;" in text and not re.findall(r"(?:src|href)=", text)
    graph = json.loads((tmp_path / "graph.json").read_text())
    ids = {node["node_id"] for node in graph["nodes"]}
    assert {link[end] for link in graph["links"] for end in ("source", "target")} <= ids and len(ids) == len(
        graph["nodes"]
    )
    sums: dict[str, float] = {}
    for link in graph["links"]:
        sums[link["target"]] = sums.get(link["target"], 0.0) + link["weight"]
    assert all(abs(total - 1) < 1e-9 for total in sums.values())
    needed = {"node_id", "feature", "layer", "ctx_idx", "feature_type", "jsNodeId", "clerp"}
    assert all(needed <= node.keys() for node in graph["nodes"])
    assert {"slug", "scan", "prompt_tokens", "prompt"} <= graph["metadata"].keys() and "qParams" in graph


def test_the_terminal_names_heads_and_neurons(cli: Cli, checkpoints: Path) -> None:
    done = cli("routes", checkpoints / "llama", PROMPT, "--threshold", 0.01, "--neurons", 1, "--top", 3)
    assert done.status == 0 and re.search(r"L\dH\d", done.out) and re.search(r"L\dN\d+ at L\dMLP@\d", done.out)
    assert "had to be looked at" in done.out and "--prove" in done.out
    high = cli("routes", checkpoints / "llama", PROMPT, "--threshold", 0.99)
    assert "No head has a share above 0.99" in high.out


def test_the_route_that_is_proved_is_the_one_that_is_printed(cli: Cli, checkpoints: Path) -> None:
    given = ("routes", checkpoints / "llama", PROMPT, "--target", "Mary", "--prove", "--n-random", 2, "--json")
    for biases in ("part", "drop", "heads"):
        found = cli(*given, "--biases", biases).json("routes")
        kept = {(e["source"], e["target"], e["component"]) for e in found["edges"] if e["kind"] in ("head", "mlp")}
        assert found["proof"]["biases"] == biases and found["proof"]["n_edges"] == len(kept)
        assert found["proof"]["metric"] == "prob"


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("takes a prompt, or --task", ["@llama"]),
        ("takes a prompt, or --task", ["@llama", PROMPT, "--task", "ioi"]),
        ("--html is for the route of a prompt", ["@llama", "--task", "ioi", "--html", "x.html"]),
        ("--position is for", ["@llama", "--task", "ioi", "--position", "3"]),
        ("--prove is for", ["@llama", "--task", "ioi", "--prove"]),
        ("takes part, drop or heads", ["@llama", "--task", "ioi", "--biases", "foo"]),
        ("are both", ["@llama", PROMPT, "--target", "Mary", "--foil", "Mary"]),
        ("must end in .html or .svg", ["@llama", PROMPT, "--html", "x.pdf"]),
        ("must be one token", ["@llama", PROMPT, "--target", "Mary John"]),
        ("Position 40 does not exist", ["@llama", PROMPT, "--position", "40"]),
        ("threshold is 2", ["@llama", PROMPT, "--threshold", "2"]),
        ("takes part, drop or heads", ["@llama", PROMPT, "--biases", "none"]),
    ],
)
def test_refusals(refuse: Callable[..., None], words: str, arguments: list[str]) -> None:
    refuse(2, words, "routes", *arguments)


def test_what_has_no_next_token_is_refused(refuse: Callable[..., None]) -> None:
    refuse(1, "is none", "routes", "@bert", PROMPT)
