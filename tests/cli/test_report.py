"""The report: one file without network or scripts, in which everything from outside is text."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import headscope as hs


class Page(HTMLParser):
    """Elements with their attributes, and the text inside each kind of element."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in ("meta", "br"):
            self.open.append(tag)
            self.text.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        # <rect …><title>…</title></rect>: everything that is opened is closed, in order
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.text[tag][-1] += data


def _harmless(page: Page) -> None:
    assert page.open == []
    assert not {"script", "iframe", "img", "link", "object", "embed", "form", "a", "base", "foreignobject"} & set(
        page.tags
    )
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href", "srcdoc")]
    assert not re.search(r"https?://|//[a-z]|@import|url\(", page.source)
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'; img-src data:") in page.attributes


def test_a_report_shows_the_values(scanned: tuple[Path, Any]) -> None:
    out, document = scanned
    page = Page(out / "report.html")
    _harmless(page)
    assert "prefers-color-scheme:dark" in page.source and ("charset", "utf-8") in page.attributes
    rows = page.text["tr"][1:]
    assert len(rows) == len(document["roles"])
    for row, verdict in zip(rows, document["roles"], strict=True):
        assert verdict["role"] in row and verdict["verdict"] in row and verdict["reason"] in row
        if verdict["effect"] is not None:
            assert f"{verdict['effect']:+.3f}" in row and ", ".join(verdict["components"]) in row
    assert "nan" not in re.sub(r"<style>.*?</style>", "", page.source, flags=re.S)
    atlas = hs.Atlas.load(out)
    for method, scores in atlas.scores.items():
        assert method in page.text["text"]
        for layer in range(3):
            for h in range(8):
                assert f"L{layer}H{h}: {float(scores[layer, h]):.4g}" in page.text["title"]


def test_names_and_tokens_are_text(cli: Callable[..., Any], hostile: Path) -> None:
    done = cli("scan", hostile, "--out", "atlas", "--n-seeds", 5, "--n-controls", 2, "--json").json("scan")
    assert done["model"]["name"] == str(hostile)
    page = Page(Path("atlas/report.html"))
    _harmless(page)
    name, word = str(hostile), "<script>alert('1')</script>\"onload=\"x"
    assert page.text["h1"] == [f"Heads of {name}"] and page.text["title"][0] == f"headscope: {name}"
    assert f"{word[:17]}…" in page.text["text"] and any(title.startswith(f"{word} → ") for title in page.text["title"])
    cell = hs.Atlas.load("atlas")._repr_html_()
    assert "<script" not in cell and "&lt;script&gt;alert(1)&lt;/script&gt;" in cell


def test_the_terminal_takes_any_name(cli: Callable[..., Any], hostile: Path) -> None:
    done = cli("doctor", hostile)
    assert done.status == 0 and str(hostile) in done.out
    assert "L0H0" in cli("score", hostile, "bos-sink", "--top", 24).out
    out = "at[bold]las [/x] é"
    done = cli("scan", hostile, "--methods", "bos-sink", "--out", out, "--n-seeds", 5, "--n-controls", 2)
    assert done.status == 0 and f"Wrote {out} in" in done.out


def test_missing_scores_leave_a_gap(scanned: tuple[Path, Any], tmp_path: Path) -> None:
    atlas = hs.Atlas.load(scanned[0])
    atlas.scores["bos-sink"][1, 2] = float("nan")
    page = Page(atlas.save(tmp_path / "atlas") / "report.html")
    assert "nan" not in page.source.split("</style>")[1]
    again = hs.Atlas.load(tmp_path / "atlas")
    assert again.scores["bos-sink"].isnull().sum() == 1 and again.scores["bos-sink"].equals(atlas.scores["bos-sink"])
