"""`headscope figure`: every kind to every format, what Python gives, and refusals before work is done."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headscope as hs
from headscope.draw import ENDINGS, Figure

Cli = Callable[..., Any]
PROMPT = "the store of Mary and John"


@pytest.mark.parametrize("given", [(), ("--method", "bos-sink"), ("--role", "sink")], ids=["all", "method", "role"])
def test_an_atlas(cli: Cli, scanned: tuple[Path, Any], given: tuple[str, ...]) -> None:
    found = cli("figure", scanned[0], *given, "--json").json("figure")
    atlas = hs.Atlas.load(scanned[0])
    wanted = hs.figure(atlas, **({given[0][2:]: given[1]} if given else {}))
    assert found == {**wanted.document(), "out": None}
    assert found["provenance"]["model"] == atlas.model["name"]
    for ending in ENDINGS:
        done = cli("figure", scanned[0], *given, "--out", f"f{ending}")
        assert done.status == 0 and done.out == f"Wrote f{ending}.\n" and Path(f"f{ending}").stat().st_size > 500
    drawn = Path("f.svg").read_text(encoding="utf-8")
    cli("figure", "f.json", "--out", "again.svg")
    assert Path("again.svg").read_text(encoding="utf-8") == drawn == wanted.svg()


def test_a_head_on_a_prompt(cli: Cli, checkpoints: Path) -> None:
    given = ("figure", checkpoints / "llama", "--head", "L1H5", "--prompt", PROMPT)
    found = cli(*given, "--title", "Mine", "--json", "--out", "f.svg").json("figure")
    run = hs.trace(hs.load(str(checkpoints / "llama")), PROMPT, ["pattern"], logits=None)
    assert found["title"] == "Mine" and found["out"] == "f.svg" and found["provenance"]["prompt"] == PROMPT
    last = found["data"]["panels"][0]["values"][-1]
    assert last == pytest.approx(run["pattern", 1][0, 5, -1].tolist()) and found["data"]["rows"][0] == "the"
    assert "│" in cli(*given).out


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
        (2, "give --head", ["@llama"]),
        (2, "give --head", ["nowhere", "--head", "L0H0"]),
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
