"""Scores of neurons as a density: every neuron is counted once, where it belongs, in every format."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headscope as hs
from headscope.core.errors import FileError, UsageError
from headscope.core.scores import make
from headscope.draw import ENDINGS, Figure
from headscope.draw.neurons import bins


def scores(values: Any, **attrs: Any) -> Any:
    given = {"method": "m", "model": "toy", "fingerprint": "abc123", "seed": 7, "higher_means": "more of it"} | attrs
    return make(np.asarray(values, dtype=float), ("layer", "neuron"), **given)


@pytest.fixture(scope="module")
def many() -> np.ndarray:
    values = np.random.default_rng(0).normal(0.05, 0.2, (5, 700))
    values[3, 11], values[1, 4], values[0, 0] = 2.0, -1.5, math.nan
    return values


def test_counts_are_those_of_brute_force(many: np.ndarray) -> None:
    data = hs.figure(scores(many)).data
    edges = data["edges"]
    assert 0 in edges and edges[0] < -1.49 and edges[-1] > 1.99 and data["rows"] == ["L0", "L1", "L2", "L3", "L4"]
    for layer in range(5):
        expected = [0] * (len(edges) - 1)
        for value in many[layer]:
            if not math.isnan(value):
                expected[max(i for i in range(len(expected)) if edges[i] <= value)] += 1
        assert data["counts"][layer] == expected
    assert data["n"] == sum(map(sum, data["counts"])) == 3499
    assert data["medians"] == pytest.approx(np.nanmedian(many, 1).tolist())
    assert (data["highest"][0]["name"], data["lowest"][0]["name"]) == ("L3N11", "L1N4")
    assert len(data["highest"]) == len(data["lowest"]) == 5


def test_a_limit_puts_what_lies_beyond_into_the_last_bins(many: np.ndarray) -> None:
    figure = hs.figure(scores(many), limit=0.3)
    edges, counts = figure.data["edges"], np.array(figure.data["counts"])
    assert (edges[0], edges[-1]) == pytest.approx((-0.3, 0.3)) and counts.sum() == 3499
    assert counts[:, -1].sum() >= (many > 0.3).sum() and counts[:, 0].sum() >= (many < -0.3).sum()
    assert figure.data["highest"][0]["value"] == 2.0 and figure.data["highest"][0]["x"] == pytest.approx(0.3)
    assert "beyond" in figure.notes[0]


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1.0, -0.25), (-0.3, 0.7), (0.0, 0.0), (5.0, 5.0)])
def test_bins_are_equal_hold_everything_and_none_has_both_signs(low: float, high: float) -> None:
    edges = bins(low, high)
    np.testing.assert_allclose(np.diff(edges), edges[1] - edges[0])
    assert edges[0] <= low + 1e-9 and edges[-1] >= high - 1e-9 and 0.0 in edges and len(edges) <= 122


def test_boxes_are_deeper_where_more_are_and_named(many: np.ndarray) -> None:
    figure = hs.figure(scores([[0.1, 0.1, 0.1, 1.0], [-1.0, 0.5, 0.5, -1.0]]))
    svg = figure.svg()
    depths = {title: float(opacity or 1) for opacity, title in re.findall(
        r'<rect [^>]*?(?:fill-opacity="([\d.]+)")?><title>(L[^<]*)</title>', svg)}  # fmt: skip
    by_count = {int(title.rpartition(" ")[2]): depth for title, depth in depths.items()}
    assert len(depths) == 4 and by_count[3] > by_count[2] > by_count[1] > 0
    assert {"L0N3: 1", "L1N0: -1"} <= set(re.findall(r"<title>(L\dN\d: [^<]*)</title>", svg))
    assert "<image" not in svg and "8 neurons are counted in 120 bins a layer" in svg
    big = hs.figure(scores(np.tile(many, (12, 1)))).svg()
    assert big.count("<image") == 1 and "41,988 neurons" in big


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_format_holds_where_it_comes_from(many: np.ndarray, tmp_path: Path, ending: str) -> None:
    figure = hs.figure(scores(many))
    path = figure.save(tmp_path / f"f{ending}")
    assert path.stat().st_size > 2000
    if ending == ".json":
        again = Figure.load(path)
        assert again.data == figure.data and again.svg() == figure.svg() and again.kind == "density"
        document = json.loads(path.read_text(encoding="utf-8"))
        document["data"]["counts"] = document["data"]["counts"][:3]
        path.write_text(json.dumps(document), encoding="utf-8")
        with pytest.raises(FileError, match="damaged"):
            Figure.load(path)
    elif ending in (".svg", ".html"):
        assert "abc123" in path.read_text(encoding="utf-8")


def test_in_a_terminal_a_line_a_layer_and_names(many: np.ndarray) -> None:
    lines = repr(hs.figure(scores(many))).splitlines()
    assert [line.split(" │")[0].strip() for line in lines[1:6]] == ["L4", "L3", "L2", "L1", "L0"]
    assert any(line.startswith("highest: L3N11 2,") for line in lines)
    assert any(line.startswith("lowest: L1N4 -1.5,") for line in lines)


def test_an_atlas_gives_it_by_method_and_what_has_no_figure_is_refused(many: np.ndarray) -> None:
    model = {"name": "toy", "fingerprint": "abc123", "anatomy": {}}
    atlas = hs.Atlas(model, 0, {"m": scores(many), "again": scores(many)}, [])
    assert hs.figure(atlas, method="m").data == hs.figure(scores(many).transpose()).data
    wide = scores(np.tile(many, (1, 2)))
    atlas = hs.Atlas(model, 0, {"m": wide, "again": wide, "heads": make(many[:, :4], ("layer", "head"))}, [])
    with pytest.raises(UsageError, match=r"room for 5,000 components, and m scores 7,000; hs\.agree"):
        hs.figure(atlas, method="m", against="again")
    assert hs.figure(atlas).notes[-1].startswith("Not shown: m, again;")
    with pytest.raises(UsageError, match="none was measured"):
        hs.figure(scores([[math.nan, math.nan]]))
