"""A route's drawing: width is the share, colour and dashes the sign, the largest edges of heads are named."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headscope as hs
from draw.test_figure import HOSTILE, SVG
from headscope.draw import ENDINGS
from headscope.draw.marks import PALETTES, Drawing, Line, Words, width_of
from headscope.draw.paper import write
from headscope.draw.route import _PALE, signed_limit
from headscope.draw.route_layout import crosses
from headscope.routes import Route
from headscope.routes.route import Edge, Node

#: source, target, kind, component, weight, signed
EDGES = (
    ("L0@2", "L1A@2", "residual", None, 0.5, 9.0),
    ("L0@0", "L1A@2", "head", "L1H1", 0.3, 2.0),
    ("L0@0", "L1A@2", "head", "L1H0", 0.1, -0.5),
    ("L0@1", "L1A@2", "head", "L1H3", 0.1, -1.0),
    ("L1A@2", "L1@2", "residual", None, 0.8, 9.0),
    ("L1MLP@2", "L1@2", "mlp", "L1MLP", 0.2, -0.2),
    ("L1A@2", "L1MLP@2", "input", None, 1.0, 0.0),
    ("E@2", "L0@2", "head", "L0H2", 1.0, 0.5),
    ("E@0", "L0@0", "residual", None, 1.0, 0.0),
    ("E@1", "L0@1", "residual", None, 1.0, 0.0),
)
KINDS = {"E": "embed", "A": "mid", "MLP": "mlp", "": "post"}


def route(
    edges: Any = EDGES, *, start: str = "L1@2", tokens: tuple[str, ...] = ("The", " only", " cat"), **changes: Any
) -> Route:
    names = dict.fromkeys([start, *(name for edge in edges for name in edge[:2])])
    nodes = []
    for name in names:
        layer, kind, position = re.fullmatch(r"(?:L(\d+))?(E|A|MLP|)@(\d+)", name).groups()  # type: ignore[union-attr]
        at = int(position)
        nodes.append(Node(name, KINDS[kind], None if layer is None else int(layer), at, tokens[at]))
    given: dict[str, Any] = {
        "model": "toy", "fingerprint": "abc123", "version": hs.__version__, "prompt": "".join(tokens), "tokens": list(tokens),
        "token_ids": list(range(len(tokens))), "position": 2, "target": " sat", "foil": None, "target_id": 5, "foil_id": None,
        "logit": 3.0, "threshold": 0.04, "biases": "part", "nodes": nodes, "edges": [Edge(*edge) for edge in edges],
        "neurons": [], "parts": 9, "evaluated": 9,
    }  # fmt: skip
    return Route(**(given | changes))


def lines(found: Route) -> dict[str, dict[str, str]]:
    """The way that the hint begins with → attributes of its line, with those of the group it stands in."""
    lines = {}
    for group in ET.fromstring(hs.figure(found).svg()).iter(f"{SVG}g"):
        for line in group.iter(f"{SVG}polyline"):
            title = line.find(f"{SVG}title")
            if title is not None:
                source, _, target = re.findall(r"\S+@\d+|→", str(title.text))[:3]
                lines[f"{source} {target}"] = {**group.attrib, **line.attrib, "hint": str(title.text)}
    return lines


def named(found: Route) -> list[str]:
    return [mark.text for mark in names(found)]


def names(found: Route) -> list[Words]:
    marks = hs.figure(found).drawing().marks
    return [mark for mark in marks if isinstance(mark, Words) and re.fullmatch(r"L\d+H\d+( \+\d+)?", mark.text)]


def test_width_is_the_share_and_red_is_dashed() -> None:
    found = lines(route())
    assert len(found) == 9, "two heads from and to the same states are one line"
    width = {name: float(line["stroke-width"]) for name, line in found.items()}
    assert width["L0@0 L1A@2"] == 1 + 9 * 0.4 and width["L0@1 L1A@2"] == 1 + 9 * 0.1
    assert width["L1MLP@2 L1@2"] == 1 + 9 * 0.2 and width["E@2 L0@2"] == 10
    assert width["L0@2 L1A@2"] == 1 + 3 * 0.5 and width["L1A@2 L1MLP@2"] == 1
    down = {"L0@1 L1A@2", "L1MLP@2 L1@2"}
    assert {name for name, line in found.items() if "stroke-dasharray" in line} == down
    blue, red, grey = (found[name]["stroke"] for name in ("L0@0 L1A@2", "L0@1 L1A@2", "L0@2 L1A@2"))
    assert (
        len({blue, red, grey}) == 3 and found["L1MLP@2 L1@2"]["stroke"] == red and found["E@2 L0@2"]["stroke"] == blue
    )
    # the limit is the second largest of five single parts, 1.0; what is near 0 is paler, not gone
    assert signed_limit(route().document()["edges"]) == 1.0
    assert "stroke-opacity" not in found["L0@0 L1A@2"] and "stroke-opacity" not in found["L0@1 L1A@2"]
    assert found["E@2 L0@2"]["stroke-opacity"] == "0.85" and found["L1MLP@2 L1@2"]["stroke-opacity"] == "0.76"


@pytest.mark.parametrize("theme", PALETTES)
@pytest.mark.parametrize("name", ["up", "down"])
def test_the_palest_edge_is_seen_on_either_ground(theme: str, name: str) -> None:
    def light(colour: list[float]) -> float:
        """Relative luminance (WCAG 2)."""
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in colour]
        return float(np.dot([0.2126, 0.7152, 0.0722], linear))

    back, ink = ([x / 255 for x in bytes.fromhex(PALETTES[theme][key][1:])] for key in ("back", name))
    palest = [_PALE * x + (1 - _PALE) * y for x, y in zip(ink, back, strict=True)]
    dark, bright = sorted((light(back), light(palest)))
    assert (bright + 0.05) / (dark + 0.05) >= 3


def test_heads_are_named_and_hints_say_the_numbers() -> None:
    assert named(route()) == ["L0H2", "L1H1 +1", "L1H3"], "the largest shares first"
    svg = hs.figure(route()).svg()
    assert "3 of 3 edges of heads are named" in svg and "+1: one more head" in svg
    hint = lines(route())["L0@0 L1A@2"]["hint"]
    assert hint == (
        "L0@0 “The” → L1A@2 “·cat”: L1H1 30.0 % of that state, +2.000 towards “·sat”; "
        "L1H0 10.0 % of that state, -0.500 towards “·sat”"
    )


def test_words_name_the_foil_only_where_there_is_one() -> None:
    alone, beside = hs.figure(route()), hs.figure(route(foil=" ran", foil_id=6))
    for text in (alone.svg(), alone.html(), repr(alone)):
        assert (
            "foil" not in text.replace('"foil": null', "").replace("&quot;foil&quot;: null", "") and "minus" not in text
        )
    assert "adds to the logit of “·sat”; red" in alone.svg() and "+2.000 towards “·sat”" in repr(alone)
    assert "adds to the logit of “·sat” minus that of “·ran”" in beside.svg()
    assert "towards “·sat” rather than “·ran”" in beside.svg() and "towards “·sat” rather than “·ran”" in repr(beside)


@pytest.mark.parametrize("n", [2, 7, 40, 300])
def test_names_never_overlap_and_columns_fill_a_page(n: int) -> None:
    """In each of three layers the last token reads every token, by three heads each."""
    tokens = tuple(f" t{i}" for i in range(n))
    edges = [
        (f"L{layer - 1}@{i}", f"L{layer}A@{n - 1}", "head", f"L{layer}H{head}", (head + 1) / (6 * n), 1.0 - head)
        for layer in (1, 2, 3) for i in range(n) for head in range(3)
    ]  # fmt: skip
    made = route(edges, start=f"L3A@{n - 1}", tokens=tokens, position=n - 1)
    areas = [
        (w.x - width_of(w.text, w.size) / 2, w.y - w.size, w.x + width_of(w.text, w.size) / 2, w.y + 2)
        for w in names(made)
    ]
    assert not any(crosses(a, b) for a, b in combinations(areas, 2))
    drawing = hs.figure(made).drawing()
    assert all(a[0] > 0 and a[2] < drawing.width for a in areas)
    assert 3 <= len(areas) <= 40 and f"{len(areas)} of {3 * n} edges of heads are named" in hs.figure(made).svg()
    assert drawing.width <= 1264, "a window of 1280 pixels needs no scrolling"
    assert n == 2 or drawing.width > 1100


def test_dashes_of_a_thick_line_are_as_long_on_paper(tmp_path: Path) -> None:
    from PIL import Image

    line = Line(((10, 10), (115, 10)), "down", width=10, dashed=True)
    about = dict.fromkeys(("title", "about", "json", "software"), "")
    write(Drawing(125, 20, [line]), tmp_path / "line.png", ".png", "light", about)
    image = Image.open(tmp_path / "line.png").convert("RGB")
    red = [image.getpixel((x, 20))[1] < 160 for x in range(image.size[0])]
    assert sum(not a and b for a, b in pairwise(red)) == 15, "105 pixels, a dash every 7 as in the SVG"


def test_tokens_stay_text_in_every_format(tmp_path: Path) -> None:
    found = route(tokens=("The", HOSTILE, " cat"), target=HOSTILE, foil=HOSTILE[::-1], model=HOSTILE)
    for ending in ENDINGS:
        path = hs.figure(found).save(tmp_path / f"a{ending}")
        assert path.read_bytes() == hs.figure(found).save(tmp_path / f"b{ending}").read_bytes()
        if ending in (".svg", ".html"):
            text = path.read_text(encoding="utf-8")
            assert "<script" not in text and "<img" not in text and "\x1b" not in text and "\u202e" not in text
            assert not re.search(r"<[^>]* on\w+=", text)
