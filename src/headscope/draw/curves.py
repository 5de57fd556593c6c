"""Curves over few numbers, such as a dose: how much the metric changes with how many heads, against random ones.

Data: `x`, `y` their names; `series` [{name, style (up, soft), x, y}]; `points` {name, x, y}: single measurements, each
a control set.
"""

from __future__ import annotations

import math
from typing import Any

from headscope.draw.marks import SIZE, Dot, Drawing, Line, Mark, Words, width_of

_WIDTH, _HEIGHT = 330.0, 190.0
_JITTER = 5.0


def draw(data: dict[str, Any]) -> Drawing:
    """Axes, zero line, curves with dots, the single measurements beside the last dot, and a legend above."""
    series, points = data["series"], data["points"]
    xs = sorted({x for row in series for x in row["x"]})
    ys = [0.0, *(y for row in series for y in row["y"]), *points["y"]]
    if not xs:
        return Drawing(200, 24, [Words(0, 14, "nothing was measured", fill="ink")])
    levels = ticks(min(ys), max(ys))
    low, high = min(min(ys), levels[0]), max(max(ys), levels[-1])
    left = max(width_of(number(tick)) for tick in levels) + 24
    found = Drawing(left + _WIDTH + 24, 0)
    top = _legend(found, data) + 14

    def at(x: float, y: float) -> tuple[float, float]:
        across = 0.5 if len(xs) == 1 else (x - xs[0]) / (xs[-1] - xs[0])
        return left + 14 + across * (_WIDTH - 28), top + _HEIGHT * (high - y) / ((high - low) or 1.0)

    for tick in levels:
        y = at(xs[0], tick)[1]
        found.marks.append(Line(((left, y), (left + _WIDTH, y)), stroke="soft" if tick == 0 else "line"))
        found.marks.append(Words(left - 4, y + 3.5, number(tick), anchor="end"))
    for x in xs:
        found.marks.append(Words(at(x, 0)[0], top + _HEIGHT + 14, f"{x:g}", anchor="middle"))
    found.marks.append(Words(left + _WIDTH / 2, top + _HEIGHT + 30, data["x"], anchor="middle"))
    found.marks.append(Words(9, top + _HEIGHT / 2, data["y"], anchor="middle", turn=-90))
    for i, (x, y) in enumerate(zip(points["x"], points["y"], strict=True)):
        across, up = at(x, y)
        aside = _JITTER * ((i % 5) / 2 - 1)  # or they would lie on one another
        found.marks.append(Dot(across + aside, up, 2, "soft", 0.45, hint=f"{points['name']} {i + 1}: {y:+.4g}"))
    for row in series:
        found.marks += _curve(row, [at(x, y) for x, y in zip(row["x"], row["y"], strict=True)])
    found.height = top + _HEIGHT + 36
    return found


def _curve(row: dict[str, Any], places: list[tuple[float, float]]) -> list[Mark]:
    marks: list[Mark] = []
    if len(places) > 1:
        marks.append(Line(tuple(places), stroke=row["style"], width=1.8, dashed=row["style"] == "soft"))
    for (across, up), x, y in zip(places, row["x"], row["y"], strict=True):
        marks.append(Dot(across, up, 3.4, row["style"], hint=f"{row['name']}, {x:g}: {y:+.4g}"))
    return marks


def _legend(found: Drawing, data: dict[str, Any]) -> float:
    x, y = 0.0, 10.0
    entries: list[tuple[str, str, bool]] = [(row["name"], row["style"], True) for row in data["series"]]
    if data["points"]["y"]:
        entries.append((data["points"]["name"], "soft", False))
    for name, style, line in entries:
        if line:
            found.marks.append(Line(((x, y - 3.5), (x + 16, y - 3.5)), stroke=style, width=1.8, dashed=style == "soft"))
        found.marks.append(Dot(x + 8, y - 3.5, 3.4 if line else 2, style, 1 if line else 0.45))
        found.marks.append(Words(x + 21, y, name, fill="ink"))
        x += 21 + width_of(name) + 14
        if x > _WIDTH * 0.9:
            x, y = 0.0, y + SIZE * 1.5
    return y if x else y - SIZE * 1.5


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from at most `low` to at least `high`."""
    span = (high - low) or 1.0
    rough = span / 4
    size = 10 ** math.floor(math.log10(rough))
    step = next(m * size for m in (1, 2, 5, 10) if m * size >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def number(value: float) -> str:
    """As it stands at an axis."""
    return "0" if value == 0 else f"{value:.4g}".replace("-", "−")


def text(data: dict[str, Any]) -> str:
    """For a terminal: a table."""
    series = data["series"]
    xs = sorted({x for row in series for x in row["x"]})
    if not xs:
        return "nothing was measured"
    heads = [data["x"], *(row["name"] for row in series)]
    lines = ["  ".join(heads)]
    for x in xs:
        cells = [f"{x:g}".rjust(len(heads[0]))]
        for row, head in zip(series, heads[1:], strict=True):
            value = dict(zip(row["x"], row["y"], strict=True)).get(x)
            cells.append(("–" if value is None else f"{value:+.4g}").rjust(len(head)))
        lines.append("  ".join(cells))
    if data["points"]["y"]:
        values = data["points"]["y"]
        lines.append(f"{len(values)} {data['points']['name']}: {min(values):+.4g} … {max(values):+.4g}")
    return "\n".join(lines)
