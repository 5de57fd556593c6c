"""What a real notebook shows: inert HTML with a text beside it, several on a page, tokens as text."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headscope as hs
from headscope.core.scores import make
from headscope.draw.svg import STYLE
from headscope.model import Model
from headscope.report.notebook import scores_html

WORD = "<img src=x onerror=alert(1)>"

SETUP = f"""
import sys; sys.path[:0] = {[str(Path(__file__).parents[1])]!r}
import torch, toys, headscope as hs
torch.set_num_threads(1)
model = toys.worded(bos=True)
class Marked:
    "A tokenizer whose words are markup."
    def __init__(self, inner): self.inner = inner
    def __call__(self, *given, **more): return self.inner(*given, **more)
    def __getattr__(self, name): return getattr(self.inner, name)
    def decode(self, ids, *given, **more): return {WORD!r} + self.inner.decode(ids, *given, **more)
tokens = torch.arange(3, 9)[None]
route = hs.routes(model, tokens)
scores = hs.score(model, "previous-token")
atlas = hs.scan(model, ["previous-token"], n_seeds=5, n_controls=2)
model.tokenizer = Marked(model.tokenizer)
run = hs.trace(model, tokens, ["pattern", "z"])
"""
SHOWN = ["atlas", "run", "route", "atlas.verdicts[0]", "hs.figure(scores)", "hs.figure(run, head='L0H1')", "scores"]


class Elements(HTMLParser):
    """Every element with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("br", "meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def _inert(html: str) -> list[tuple[str, dict[str, str | None]]]:
    page = Elements(html)
    assert page.open == []
    tags = {tag for tag, _ in page.found}
    assert not tags & {"script", "iframe", "img", "link", "object", "embed", "form", "a", "base", "foreignobject"}
    for _, attributes in page.found:
        for name, value in attributes.items():
            assert not name.startswith("on") and name not in ("src", "srcdoc", "xlink:href")
            assert name != "href" or str(value).startswith("data:image/png;")
    assert not re.search(r"https?://|@import|url\(", html)
    return page.found


@pytest.fixture(scope="module")
def cells() -> dict[str, Any]:
    """Runs a notebook; what each of its cells shows, by mime type."""
    import nbclient
    import nbformat

    codes = [SETUP, *SHOWN, "%load_ext headscope", "scores", "scores.copy(data=scores.values).drop_attrs()"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in codes])
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    shown = [next((out.data for out in reversed(cell.outputs) if "data" in out), None) for cell in notebook.cells]
    return {**dict(zip(SHOWN, shown[1:], strict=False)), "with extension": shown[-2], "foreign": shown[-1]}


@pytest.mark.slow
def test_everything_shows_itself_as_html_with_a_text_beside_it(cells: dict[str, Any]) -> None:
    ids = []
    for name in [*SHOWN[:-1], "with extension"]:
        data = cells[name]
        assert len(data["text/plain"]) > 20, name
        elements = _inert(data["text/html"])
        ids += [str(attributes["id"]) for _, attributes in elements if "id" in attributes]
    assert len(ids) == len(set(ids)) >= len(SHOWN)
    assert all(re.fullmatch(r"headscope-\w{12}", name) for name in ids)


@pytest.mark.slow
def test_tokens_are_text(cells: dict[str, Any]) -> None:
    for name in ("run", "hs.figure(run, head='L0H1')"):
        html = cells[name]["text/html"]
        assert "&lt;img·src=x" in html and "<img" not in html


@pytest.mark.slow
def test_a_run_says_what_was_captured(cells: dict[str, Any]) -> None:
    html = cells["run"]["text/html"]
    assert re.search(r"<td>pattern</td><td>[^<]+</td><td>batch 1 × head \d+ × query 6 × key 6</td><td>float", html)
    assert re.search(r"<td>logits</td><td></td><td>batch 1 × pos 6 × vocab \d+</td>", html)


@pytest.mark.slow
def test_arrays_are_figures_only_after_the_extension_and_only_ours(cells: dict[str, Any]) -> None:
    assert "xr-wrap" in cells["scores"]["text/html"] and "xr-wrap" in cells["foreign"]["text/html"]
    assert "xr-wrap" not in cells["with extension"]["text/html"]
    assert "<title>L0H0: " in cells["with extension"]["text/html"]
    assert "xarray" in cells["with extension"]["text/plain"]


def test_the_extension_comes_and_goes() -> None:
    import xarray as xr

    class Shell:
        class display_formatter:
            class Html(dict[type, Callable[..., str]]):
                for_type = dict.__setitem__

            formatters = {"text/html": Html()}  # noqa: RUF012

    html = Shell.display_formatter.formatters["text/html"]
    hs.load_ipython_extension(Shell)
    assert html == {xr.DataArray: scores_html}
    hs.unload_ipython_extension(Shell)
    hs.unload_ipython_extension(Shell)
    assert html == {}


def test_scores_of_dims_without_a_figure_are_shown_by_xarray() -> None:
    odd = make(np.zeros((2, 2, 2, 2)), ("layer", "head", "query", "key"), method="m", fingerprint="f")
    assert "xr-wrap" in scores_html(odd)


def test_dark_and_light_follow_the_notebook_and_the_system() -> None:
    for rule in (
        "@media(prefers-color-scheme:dark)",
        'data-jp-theme-light="false"',
        "body.vscode-dark",
        'html[theme="dark"]',
    ):
        assert rule in STYLE
    html = hs.figure(make(np.eye(2), method="m", fingerprint="f"))._repr_html_()
    # where style sheets are stripped, the light colours stand in the marks themselves
    assert 'fill="#2563c3" class="hs-f-up"' in html and ".hs-f-up{fill:var(--hs-up)}" in html


def test_a_run_keeps_no_model_alive_and_can_be_sent(tmp_path: Path) -> None:
    import copy
    import gc

    from families.tiny import build

    model = hs.load(build("llama"))
    run = hs.trace(model, torch.arange(4, 8)[None], ["z"], logits=None)
    assert run.source is model and "llama" in run._repr_html_().lower()
    torch.save(run, tmp_path / "run.pt")
    again = torch.load(tmp_path / "run.pt", weights_only=False)
    assert again.source is None and torch.equal(again["z"], run["z"])
    assert copy.copy(run)["z"].shape == run["z"].shape
    del model
    gc.collect()
    assert run.source is None and "#4" in run._repr_html_() and "Run of a·model" in run._repr_html_()


def test_long_batches_are_cut(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("headscope.trace.show"), "_TOKENS", 50)
    run = hs.trace(tiny, torch.randint(3, 96, (12, 64)), ["resid_pre"], layers=[1], logits="last")
    html = run._repr_html_()
    assert html.count("<code>") == 8 * 50 and "and 4 more rows" in html and "and 14 more" in html
    assert "<td>resid_pre</td><td>1</td><td>batch 12 × pos 64 × d_model 32</td>" in html
