"""Files by clicking, in a real browser: byte for byte what Python saves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import headscope as hs
from app.test_prompt_browser import GRAPH, LENS, PROMPT, VIEW
from headscope.model import Model
from headscope.routes.neuronpedia import attribution_graph

pytestmark = pytest.mark.browser

Open = Callable[..., Any]


def clicked(page: Any, what: str, button: str, folder: Path) -> tuple[str, bytes]:
    """The name and content of the file that a button below `Save …` gives."""
    box = page.locator("details.saves", has=page.locator(f'summary[aria-label="Save {what}"]')).first
    if box.get_attribute("open") is None:
        box.locator("summary").click()
    with page.expect_download() as download:
        box.get_by_role("button", name=button).click()
    path = folder / "file"
    download.value.save_as(path)
    return str(download.value.suggested_filename), path.read_bytes()


def saved(thing: Any, name: str, folder: Path) -> tuple[str, bytes]:
    """The same from Python."""
    path = folder / name
    thing.save(path)
    return name, path.read_bytes()


def test_the_atlas_and_a_head(view: Open, atlas: hs.Atlas, model: Model, tmp_path: Path) -> None:
    page = view("/?method=bos-sink&vs=signed")
    page.locator("summary", has_text="Save all methods").wait_for()
    shown = [
        ("all methods", ".svg", hs.figure(atlas), "methods.svg"),
        ("the scores of bos-sink", ".png", hs.figure(atlas, method="bos-sink"), "bos-sink.png"),
        (
            "the comparison",
            ".svg",
            hs.figure(atlas, method="bos-sink", against="signed"),
            "bos-sink-against-signed.svg",
        ),
        ("the proof of induction", ".pdf", hs.figure(atlas, role="induction"), "induction.pdf"),
    ]
    for what, button, figure, name in shown:
        assert clicked(page, what, button, tmp_path) == saved(figure, name, tmp_path), what
    page = view(f"/head/1/2?prompt={quote(PROMPT)}&q=4&k=2&sink=0")
    page.locator(".stack canvas.over").first.wait_for()
    wanted = hs.figure(model, head="L1H2", prompt=PROMPT, query=4, key=2, sink=False)
    assert clicked(page, "the attention", ".html", tmp_path) == saved(wanted, "L1H2.html", tmp_path)
    wanted = hs.figure(atlas, role="induction")
    assert clicked(page, "the proof of induction", ".json", tmp_path) == saved(wanted, "induction.json", tmp_path)


def test_a_prompt(view: Open, model: Model, tmp_path: Path) -> None:
    page = view(f"{VIEW}&foil=none&colour=target")
    for canvas in (GRAPH, LENS):
        page.wait_for_selector(canvas)
    route, lens = hs.routes(model, PROMPT), hs.figure(hs.lens(model, PROMPT), by="target")
    assert clicked(page, "the logit lens", ".svg", tmp_path) == saved(lens, "lens.svg", tmp_path)
    assert clicked(page, "the logit lens", ".json", tmp_path) == saved(lens, "lens.json", tmp_path)
    for ending in (".json", ".svg", ".html", ".png", ".pdf"):
        assert clicked(page, "the route", ending, tmp_path) == saved(route, f"route{ending}", tmp_path)
    graph = json.loads(clicked(page, "the route", "Neuronpedia", tmp_path)[1])
    assert graph["nodes"] == json.loads(json.dumps(attribution_graph(route)["nodes"]))


def test_without_matplotlib_the_page_says_what_to_install(
    view: Open,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = view("/?method=bos-sink", refusals=True)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    page.locator("summary", has_text="Save all methods").click()
    page.get_by_role("button", name=".png").first.click()
    page.get_by_text("pip install 'headscope[figures]'").wait_for()
