"""`headscope circuit`: what Python gives, in one document; refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headscope as hs
from headscope.circuits import Circuit

Cli = Callable[..., Any]
NAMES = ("Mary", "John", "w1", "w2", "w3", "w4")


@pytest.fixture
def mine() -> str:
    """Eight prompts of three names; the twin has another first name."""
    rows = [
        {"prompt": f"{a} and {b} gave {c} to", "answer": a, "foil": b, "corrupt": f"w9 and {b} gave {c} to"}
        for i in range(8)
        for a, b, c in [(NAMES[i % 6], NAMES[(i + 1 + i // 6) % 6], f"w{20 + i}")]
    ]
    Path("mine.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return "mine.jsonl"


def test_a_circuit_is_found_proved_and_written(
    cli: Cli, fits: Callable[..., None], checkpoints: Path, mine: str
) -> None:
    command = ("circuit", checkpoints / "llama", "--task", mine, "--edges", 30, "--n-random", 4, "--dtype", "float32")
    found = cli(*command, "--out", "circuit.json", "--json").json("circuit")
    file = json.loads(Path("circuit.json").read_text(encoding="utf-8"))
    fits(file, "circuit-file")
    assert file == found["circuit"] and found["out"] == "circuit.json" and 0 < len(file["edges"]) <= 30
    model, circuit = hs.load(str(checkpoints / "llama")), Circuit.load("circuit.json")
    whole = hs.tasks.make(mine, model)
    from headscope.circuits.run import rows_of

    (_, first), (_, second) = rows_of(whole, 4)
    scores = hs.circuits.eap_ig(model, first)
    assert circuit == hs.circuits.prune(model, hs.circuits.top_edges(model, scores, 30))
    values = {row["edge"]: row["score"] for row in found["values"]}
    assert set(values) == set(circuit.edges) and list(map(abs, values.values())) == sorted(
        map(abs, values.values()), reverse=True
    )
    assert hs.prove_circuit(model, second, circuit, n_random=4).document() == found["proof"]
    assert len(found["curve"]["k"]) == 10 and found["curve"]["abs"][-1] == pytest.approx(1.0, abs=1e-4)
    pruned = 30 - len(file["edges"])
    assert found["led_nowhere"] == pruned > 0
    shown = cli(*command).out
    assert f"{pruned} more led nowhere" in shown
    assert found["proof"]["verdict"] in shown and "4 random circuits" in shown
    for choice in found["proof"]["choices"].values():
        assert choice in re.sub(r"\s+", " ", shown)


@pytest.mark.parametrize("method", ["eap", "exact", "acdc"])
@pytest.mark.parametrize("replace", ["patch", "zero"])
def test_every_method_and_replacement(cli: Cli, checkpoints: Path, mine: str, method: str, replace: str) -> None:
    size = ("--tau", 0.001) if method == "acdc" else ("--faithfulness", 0.5, "--by", "signed")
    found = cli(
        "circuit", checkpoints / "llama", "--task", mine, "--method", method, "--replace", replace, *size,
        "--n-random", 2, "--neurons", "L1N3", "--json",
    ).json("circuit")  # fmt: skip
    assert found["circuit"]["replacement"] == replace and found["circuit"]["neurons"] == ["L1N3"]
    assert (found["values"] is None) == (found["curve"] is None) == (method == "acdc")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--method", "cd-t"), ("`headscope check cd-t`", "hs.attribute(model, 'cd-t', …)")),
        (("--method", "bos-sink"), ("`headscope score MODEL bos-sink`", "hs.score(")),
        (("--by", "size"), "by is 'size'"),
        (("--replace", "noise"), "patch, mean or zero"),
        (("--replace", "zero"), "replace='patch' or 'mean'"),
        (("--neurons", "L1H3"), "L1H3 is not a neuron"),
        (("--neurons", "x"), "'x' is not the name of a component"),
        (("--faithfulness", "nan"), "share of the model's metric above 0"),
        (("--method", "acdc", "--tau", "nan"), "a number from 0"),
        (("--task", "oii"), "no task 'oii'"),
        (("--task", "gone.jsonl"), "gone.jsonl cannot be read"),
        (("--out", "circuit.txt"), "must end in .json"),
        (("--n", "1"), "greater than or equal to 2"),
    ],
)
def test_bad_options_are_refused_before_a_model_is_looked_for(
    refuse: Callable[..., None], options: tuple[str, ...], words: str | tuple[str, ...]
) -> None:
    refuse(2, words, "circuit", "no/such-model", *options)


def test_a_path_that_cannot_be_written_costs_no_model(refuse: Callable[..., None]) -> None:
    Path("file").write_text("", encoding="utf-8")
    Path("folder.json").mkdir()
    refuse(1, "Choose a folder you may write to", "circuit", "no/such-model", "--out", "file/circuit.json")
    refuse(1, "it is a folder", "circuit", "no/such-model", "--out", "folder.json")


def test_edges_that_lead_nowhere_are_no_circuit(refuse: Callable[..., None], mine: str) -> None:
    words = ("None of the 1 edges", "ask for more of them by --edges")
    refuse(1, words, "circuit", "@llama", "--task", mine, "--edges", 1)


def test_refusals(refuse: Callable[..., None], cli: Cli, checkpoints: Path, mine: str) -> None:
    refuse(2, ("no method 'eap-gi'", "eap-ig"), "circuit", "@llama", "--method", "eap-gi")
    refuse(2, "give one of them", "circuit", "@llama", "--edges", 3, "--faithfulness", 0.5)
    refuse(2, "acdc takes --tau", "circuit", "@llama", "--method", "acdc", "--edges", 3)
    refuse(2, "corrupted twins", "circuit", "@llama", "--task", "repeated-tokens")
    refuse(2, "1 to", "circuit", "@llama", "--task", mine, "--edges", 10**6)
    refuse(2, "L9N1 does not exist", "circuit", "@llama", "--task", mine, "--neurons", "L9N1")
    lines = Path(mine).read_text(encoding="utf-8").splitlines()[:3]
    Path("few.jsonl").write_text("\n".join(lines), encoding="utf-8")
    refuse(2, "give 4 or more", "circuit", "@llama", "--task", "few.jsonl")
