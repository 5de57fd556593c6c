"""The report: one file that holds all it shows, in which everything from outside is text."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headscope as hs
from onefile import carried


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
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)
            self.text.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        # everything that is opened is closed, in order
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.text[tag][-1] += data


def _closed(page: Page) -> None:
    """Nothing runs or loads but the scripts that the file was made with, which carry its word; nothing is an address."""
    assert page.open == []
    assert not {"iframe", "img", "object", "embed", "form", "a", "base", "foreignobject"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "srcdoc")]
    assert all(value.startswith("data:image/svg+xml,") for name, value in page.attributes if name == "href")
    (nonce,) = {value for name, value in page.attributes if name == "nonce"}
    assert [name for name, _ in page.attributes].count("nonce") == 3 and page.tags.count("script") == 3
    assert len(re.findall("</script", page.source, re.I)) == 3
    policies = [value for name, value in page.attributes if name == "content" and "-src" in value]
    assert policies[0].startswith(f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}' ")
    assert policies[1] == "script-src 'unsafe-inline' data:", (
        "in force together with the first: no script from elsewhere"
    )


def test_a_report_carries_the_values(scanned: tuple[Path, Any]) -> None:
    out, document = scanned
    page = Page(out / "report.html")
    _closed(page)
    rows = page.text["tr"][1:]
    assert len(rows) == len(document["roles"])
    for row, verdict in zip(rows, document["roles"], strict=True):
        assert verdict["role"] in row and verdict["verdict"] in row and verdict["reason"] in row
        if verdict["effect"] is not None:
            assert f"{verdict['effect']:+.3f}" in row and ", ".join(verdict["components"]) in row
    atlas = hs.Atlas.load(out)
    documents, matrices = carried(out / "report.html")
    best = {text.split(":")[0]: text for text in page.text["li"]}
    for method, scores in atlas.scores.items():
        np.testing.assert_array_equal(matrices[f"/api/scores/{method}"][1], scores.values.astype(np.float32))
        first = hs.top(scores, 1)[0]
        assert f"{first} {float(scores[first.layer, first.index]):.3f}" in best[method]
        for layer, h in np.ndindex(scores.shape) if "head" in scores.dims else ():
            (row,) = (r for r in documents[f"/api/head/{layer}/{h}"]["scores"] if r["method"] == method)
            assert row["score"] == float(scores[layer, h]) and row["rank"] == float(hs.rank(scores)[layer, h])
    for x, y in itertools.permutations([m for m, scores in atlas.scores.items() if "head" in scores.dims], 2):
        told = documents[f"/api/agreement?x={x}&y={y}"]
        assert told == pytest.approx(hs.agree(atlas.scores[x], atlas.scores[y]), nan_ok=True)
    for row in atlas.examples:
        head, values = matrices[f"/api/example/{row['method']}"]
        assert (head["head"], head["tokens"]) == (row["head"], row["tokens"])
        np.testing.assert_array_equal(values, np.array(row["pattern"], np.float32))


def test_the_same_atlas_gives_the_same_file(scanned: tuple[Path, Any], tmp_path: Path) -> None:
    atlas = hs.Atlas.load(scanned[0])
    written = (scanned[0] / "report.html").read_bytes()
    assert (atlas.save(tmp_path / "again") / "report.html").read_bytes() == written
    atlas.model = {**atlas.model, "name": "another"}
    pages = [Page(path / "report.html") for path in (scanned[0], atlas.save(tmp_path / "other"))]
    words = [{value for name, value in page.attributes if name == "nonce"} for page in pages]
    assert words[0] != words[1], "what stands in the file decides its word, so nothing in it can know it"


def test_names_and_tokens_are_text(cli: Callable[..., Any], hostile: Path) -> None:
    done = cli("scan", hostile, "--out", "atlas", "--n-seeds", 5, "--n-controls", 2, "--json").json("scan")
    assert done["model"]["name"] == str(hostile)
    page = Page(Path("atlas/report.html"))
    _closed(page)
    name, word = str(hostile), "<script>alert('1')</script>\"onload=\"x"
    assert page.text["h1"] == [f"Heads of {name}"] and page.text["title"][0] == f"headscope: {name}"
    documents, matrices = carried(Path("atlas/report.html"))
    assert documents["/api/state"]["model"] == name
    assert word in matrices["/api/example/bos-sink"][0]["tokens"]
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
    atlas.save(tmp_path / "atlas")
    documents, _ = carried(tmp_path / "atlas" / "report.html")
    (row,) = (r for r in documents["/api/head/1/2"]["scores"] if r["method"] == "bos-sink")
    assert row["score"] is None and row["rank"] is None and row["of"] == 23
    again = hs.Atlas.load(tmp_path / "atlas")
    assert again.scores["bos-sink"].isnull().sum() == 1 and again.scores["bos-sink"].equals(atlas.scores["bos-sink"])
