"""Neurons on the page: what is told of them, computed again, and the density in a real browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headscope as hs
from app.browser import Watched, chromium, running
from app.conftest import serve
from headscope.app.session import Session
from headscope.core.scores import make
from headscope.model import Model

METHOD = "io-weight-cosine-neurons"
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def wide() -> np.ndarray:
    """[layer neuron]: 3 × 2000, more than are drawn singly; the highest and the lowest stand alone."""
    values = np.random.default_rng(0).normal(0.0, 0.1, (3, 2000)).astype(np.float32)
    values[1, 123], values[2, 7] = 0.9, -0.8
    values[0, 5] = np.nan
    return values


@pytest.fixture
def of_neurons(model: Model, atlas: hs.Atlas, wide: np.ndarray, tmp_path: Path) -> Iterator[Session]:
    """An atlas with the neurons of the tiny model, and with many made up."""
    many = make(wide, ("layer", "neuron"), method="wide", higher_means="more")
    scores = {**atlas.scores, METHOD: hs.score(model, METHOD), "wide": many}
    made = Session(name="tiny", load=lambda: model, atlas=replace(atlas, scores=scores), out=tmp_path / "runs")
    yield made
    made.jobs.close()


def test_what_a_neuron_writes_is_its_row_through_gain_and_unembedding(
    of_neurons: Session, model: Model, refused: Callable[..., None]
) -> None:
    client = serve(of_neurons)
    told = client.post("/api/neuron", json={"layer": 1, "neuron": 5}).json()
    inner = model.hf
    with torch.no_grad():
        row = inner.model.layers[1].mlp.down_proj.weight[:, 5] * inner.model.norm.weight
        logits = inner.lm_head.weight @ row
    logits = logits - logits.mean()
    words = model.tokenizer.convert_ids_to_tokens(range(96))
    for name, sign in (("promoted", 1), ("suppressed", -1)):
        order = (sign * logits).argsort(descending=True)[:8].tolist()
        assert [row["token"] for row in told[name]] == [words[i] for i in order]
        assert [row["value"] for row in told[name]] == pytest.approx(logits[order].tolist(), abs=1e-5)
    refused(client.post("/api/neuron", json={"layer": 1, "neuron": 48}), 400, "L1N48 does not exist", "48 neurons")
    refused(client.post("/api/neuron", json={"layer": 1}), 400, "neuron")


@pytest.fixture
def view(of_neurons: Session) -> Iterator[Open]:
    opened: list[Watched] = []
    with running(of_neurons) as address, chromium() as browser:

        def make_page(path: str, width: int = 1280, **options: Any) -> Any:
            context = browser.new_context(viewport={"width": width, "height": 900}, **options)
            opened.append(Watched(context, address))
            return opened[-1].open(path)

        yield make_page
        assert [watched.problems for watched in opened] == [[] for _ in opened]


def query(page: Any) -> dict[str, str]:
    return dict(page.evaluate("[...new URLSearchParams(location.search)]"))


def sight(page: Any) -> str:
    return str(page.locator(".sight").inner_text())


def place(page: Any, wide: np.ndarray, layer: int, score: float) -> tuple[float, float]:
    """Where a score of a layer is on the screen, with all in sight: 34 pixels at the left are for names, 34 below."""
    box = page.locator(".density canvas.over").bounding_box()
    low, high = float(np.nanmin(wide)), float(np.nanmax(wide))
    room = 0.02 * (high - low)
    across = (score - (low - room)) / (high - low + 2 * room)
    return box["x"] + 34 + across * (box["width"] - 38), box["y"] + (box["height"] - 34) * (1 - (layer + 0.5) / 3)


@pytest.mark.browser
def test_a_density_is_hovered_zoomed_locked_and_kept_in_the_address(view: Open, wide: np.ndarray) -> None:
    page = view("/?method=wide")
    assert "5,999 of 6,000 neurons" in sight(page) and "density" in sight(page)
    assert page.locator("h1").inner_text().startswith("Neurons of")
    assert page.locator("#method optgroup").evaluate_all("all => all.map((g) => g.label)") == ["heads", "neurons"]
    assert "does not draw" not in page.locator("main").inner_text()
    named = page.locator(".ranking li a").all_inner_texts()
    order = np.argsort(-np.nan_to_num(wide.ravel(), nan=-9.0), kind="stable")[:15]
    assert named[:15] == [f"L{i // 2000}N{i % 2000}" for i in order] and named[0] == "L1N123" and named[15] == "L2N7"
    filled = page.evaluate(
        "(() => { const c = document.querySelector('.density canvas'); const d = c.getContext('2d')"
        ".getImageData(40, 0, c.width - 40, c.height - 40).data; let blue = 0, red = 0;"
        "for (let i = 0; i < d.length; i += 4) { if (d[i + 2] > d[i] + 40) blue++; if (d[i] > d[i + 2] + 40) red++; }"
        "return [blue, red]; })()"
    )
    assert min(filled) > 2000, "both signs are painted"
    # hover: the neuron of the layer whose score is closest
    page.mouse.move(*place(page, wide, 1, 0.88))
    assert page.locator(".read").inner_text().split() == ["L1N123", "0.9000"]
    page.mouse.move(*place(page, wide, 2, -0.75))
    assert page.locator(".read").inner_text().split() == ["L2N7", "−0.8000"]
    # the wheel zooms there until single neurons are left, and the address says so
    x, y = place(page, wide, 1, 0.9)
    page.mouse.move(x, y)
    for _ in range(4):
        page.mouse.wheel(0, -400)
    page.wait_for_url("**zoom=**")
    x0, x1, y0, y1 = map(float, query(page)["zoom"].split(","))
    seen = wide[int(y0) : int(np.ceil(y1))]
    assert x0 < 0.9 < x1 and x1 - x0 < 0.2 and y0 < 1.5 < y1 < 2.1
    assert sight(page).startswith(f"{int(((seen >= x0) & (seen <= x1)).sum())} of") and "each a dot" in sight(page)
    before, zoomed = sight(page), query(page)["zoom"]
    page.reload()
    page.wait_for_selector(".sight")
    assert sight(page) == before and query(page)["zoom"] == zoomed
    # a double click shows all again; a click locks
    page.mouse.dblclick(x, y)
    page.wait_for_url(lambda url: "zoom=" not in url)
    assert "5,999 of 6,000" in sight(page) and "at" not in query(page)
    page.mouse.click(*place(page, wide, 2, -0.75))
    assert query(page)["at"] == "L2N7"
    assert "rank 5,999 of 5,999" in page.locator(".neuron").inner_text()
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    assert page.locator(".neuron").count() == 0 and "at" not in query(page)


@pytest.mark.browser
def test_keys_search_and_what_the_neuron_writes(view: Open, model: Model) -> None:
    page = view(f"/?method={METHOD}", width=390, color_scheme="dark")
    scores = hs.score(model, METHOD).values.astype(np.float32)
    assert "144 of 144 neurons in sight, each a dot" in sight(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.fill("input[type=search]", "l1 n5")
    page.keyboard.press("Enter")
    page.wait_for_selector(".neuron table.tokens")
    assert query(page) == {"method": METHOD, "at": "L1N5"}
    order = np.argsort(scores[1], kind="stable")
    at = int(np.flatnonzero(order == 5)[0])
    page.locator(".density canvas.over").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".density .read").inner_text().split()[0] == f"L1N{order[at + 1]}"
    page.keyboard.press("ArrowUp")
    above = int(np.abs(scores[2] - scores[1, order[at + 1]]).argmin())
    assert page.locator(".density .read").inner_text().split()[0] == f"L2N{above}"
    page.keyboard.press("+")
    page.wait_for_url("**zoom=**")
    assert f"L2N{above}" in page.locator(".density .read").inner_text()
    page.keyboard.press("Enter")
    assert query(page)["at"] == f"L2N{above}"
    assert f"L2N{above}" in (page.locator(".neuron a").get_attribute("href") or "")
    page.fill("input[type=search]", "L9N0")
    page.locator("input[type=search]").press("Enter")
    assert "3 layers of 48 neurons" in page.locator(".hint").inner_text()
    page.locator(".neuron a").click()
    page.wait_for_selector(".trial li")
    assert page.locator(".trial .on").input_value() == f"L2N{above}"
