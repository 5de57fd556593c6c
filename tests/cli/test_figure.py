"""`headscope figure`: every kind to every format, what Python gives, and refusals before work is done."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headscope as hs
from cli.conftest import check
from headscope.draw import ENDINGS, Figure

Cli = Callable[..., Any]
PROMPT = "the store of Mary and John"


@pytest.mark.parametrize(
    "given",
    [(), ("--method", "bos-sink"), ("--role", "sink"), ("--method", "bos-sink", "--against", "previous-token")],
    ids=["all", "method", "role", "scatter"],
)
def test_an_atlas(cli: Cli, scanned: tuple[Path, Any], given: tuple[str, ...]) -> None:
    found = cli("figure", scanned[0], *given, "--json").json("figure")
    atlas = hs.Atlas.load(scanned[0])
    options = {name[2:]: value for name, value in zip(given[::2], given[1::2], strict=True)}
    wanted = hs.figure(atlas, **options)
    assert found == {**wanted.document(), "out": None}
    assert found["provenance"]["model"] == atlas.model["name"]
    for ending in ENDINGS:
        done = cli("figure", scanned[0], *given, "--out", f"f{ending}")
        assert done.status == 0 and done.out == f"Wrote f{ending}.\n" and Path(f"f{ending}").stat().st_size > 500
    drawn = Path("f.svg").read_text(encoding="utf-8")
    cli("figure", "f.json", "--out", "again.svg")
    assert Path("again.svg").read_text(encoding="utf-8") == drawn == wanted.svg()


def test_a_top_head_at_work(cli: Cli, scanned: tuple[Path, Any]) -> None:
    found = cli("figure", scanned[0], "--method", "bos-sink", "--example", "--no-sink", "--json").json("figure")
    wanted = hs.figure(hs.Atlas.load(scanned[0]), method="bos-sink", example=True, sink=False)
    assert found == {**wanted.document(), "out": None} and found["provenance"]["without"] == "the first token"


def test_a_head_on_a_prompt(cli: Cli, checkpoints: Path) -> None:
    given = ("figure", checkpoints / "llama", "--head", "L1H5", "--prompt", PROMPT)
    found = cli(*given, "--title", "Mine", "--json", "--out", "f.svg").json("figure")
    run = hs.trace(hs.load(str(checkpoints / "llama")), PROMPT, ["pattern"], logits=None)
    assert found["title"] == "Mine" and found["out"] == "f.svg" and found["provenance"]["prompt"] == PROMPT
    last = found["data"]["panels"][0]["values"][-1]
    assert last == pytest.approx(run["pattern", 1][0, 5, -1].tolist()) and found["data"]["rows"][0] == "the"
    assert "│" in cli(*given).out


def test_the_lens_of_a_prompt(cli: Cli, checkpoints: Path) -> None:
    given = ("figure", checkpoints / "llama", "--prompt", PROMPT, "--target", "John", "--by", "target")
    found = cli(*given, "--json", "--out", "f.svg").json("figure")
    model = hs.load(str(checkpoints / "llama"))
    logits = hs.trace(model, PROMPT).logits[0].softmax(-1)
    (panel,) = found["data"]["panels"]
    assert found["data"]["columns"] == PROMPT.split() and found["provenance"]["target"] == "John"
    john = model.tokenizer.get_vocab()["John"]
    assert panel["values"][-1] == pytest.approx(logits[:, john].tolist(), rel=1e-4), "the last layer is the model's own"
    best = [model.tokenizer.decode([i]) for i in logits.argmax(-1).tolist()]
    assert [word.rpartition(" ")[0] for word in panel["words"][-1]] == best
    assert best[-1][:6] in cli(*given).out


def test_what_a_sweep_wrote(cli: Cli, checkpoints: Path) -> None:
    done = cli("sweep", checkpoints / "llama", "--task", "repeated-tokens", "--n", "3", "--out", "run", "--json")
    swept = {row["edit"]: row["change"] for row in done.json("sweep")["values"]}
    found = cli("figure", "run", "--json", "--out", "f.svg").json("figure")
    (panel,) = found["data"]["panels"]
    assert found["data"]["axes"] == {"rows": "layer", "columns": "head"}
    for i, row in enumerate(panel["values"]):
        assert row == pytest.approx([swept[f"zero L{i}H{j}"] for j in range(len(row))], abs=1e-9)
    model = hs.load(str(checkpoints / "llama"))
    origin = {"model": model.name, "fingerprint": model.fingerprint, "task": "repeated-tokens", "metric": "loss"}
    assert origin.items() <= found["provenance"].items() and found["provenance"]["edit"] == "zero"


def test_what_a_patching_wrote(cli: Cli, checkpoints: Path) -> None:
    options = ("--task", "ioi", "--n", "3", "--positions", "last", "--out", "run")
    done = cli("patch", checkpoints / "llama", *options, "--json").json("patch")
    found = cli("figure", "run", "--json").json("figure")
    (panel,) = found["data"]["panels"]
    for row in done["values"]:
        assert panel["values"][row["layer"]][row["head"]] == pytest.approx(row["effect"])
    assert found["provenance"]["direction"] == "denoise" and "clean" in found["notes"][1]
    check(json.loads(Path("run/patching.json").read_text()), "patching-file")
    check(json.loads(Path("run/manifest.json").read_text()), "sweep-manifest")
    Path("run/sweep.parquet").unlink()
    Path("run/patching.json").unlink()
    cli("figure", "run").refused(1, "not finished", "--resume")


def test_a_route_file_and_the_routes_command_draw_the_same(cli: Cli, checkpoints: Path) -> None:
    cli("routes", checkpoints / "llama", PROMPT, "--out", "route.json", "--html", "a.svg")
    assert cli("figure", "route.json", "--out", "b.svg").status == 0
    assert Path("a.svg").read_bytes() == Path("b.svg").read_bytes()
    found = cli("figure", "route.json", "--json").json("figure")
    assert found["data"] == json.loads(Path("route.json").read_text())


def test_names_and_tokens_are_text(cli: Cli, hostile: Path) -> None:
    for ending in (".svg", ".html", ".pdf", ".png"):
        done = cli("figure", hostile, "--head", "L0H0", "--prompt", "the <b>x</b> of", "--out", f"f{ending}")
        assert done.status == 0, done.err
    for ending in (".svg", ".html"):
        text = Path(f"f{ending}").read_text(encoding="utf-8")
        assert "<script" not in text and "<b>x" not in text and "&lt;script&gt;" in text


def test_a_file_stays_unless_told(cli: Cli, scanned: tuple[Path, Any]) -> None:
    Path("f.svg").write_text("precious")
    cli("figure", scanned[0], "--out", "f.svg").refused(1, "exists already", "--overwrite")
    assert Path("f.svg").read_text() == "precious"
    assert cli("figure", scanned[0], "--out", "f.svg", "--overwrite", "--theme", "dark").status == 0
    assert "#14181f" in Path("f.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("status", "words", "arguments"),
    [
        (2, "give --prompt", ["@llama"]),
        (2, "give --prompt", ["nowhere", "--head", "L0H0"]),
        (2, "takes no target", ["@llama", "--head", "L0H0", "--prompt", PROMPT, "--target", " a"]),
        (2, "takes no query", ["@llama", "--prompt", PROMPT, "--query", "1"]),
        (2, "saved as .html", ["@llama", "--out", "f.gif"]),
        (2, "--theme is 'pink'", ["@llama", "--theme", "pink"]),
        (2, "no head of", ["@llama", "--head", "L9H0", "--prompt", PROMPT]),
        (2, "Model takes no role", ["@llama", "--head", "L0H0", "--prompt", PROMPT, "--role", "sink"]),
        (1, "There is no route or figure at", ["missing.json"]),
        (1, "neither a route nor a figure", ["@llama/config.json"]),
    ],
)
def test_refusals(refuse: Callable[..., None], status: int, words: str, arguments: list[str]) -> None:
    refuse(status, words, "figure", *arguments)


def test_an_atlas_without_it_is_refused(cli: Cli, scanned: tuple[Path, Any]) -> None:
    cli("figure", scanned[0], "--method", "bos-snk").refused(2, "bos-sink")
    cli("figure", scanned[0], "--role", "sinc").refused(2, "sink")
    assert isinstance(hs.figure(hs.Atlas.load(scanned[0])), Figure)
