"""Points of two measures, such as a head's scores by two methods. Data: `x`, `y` their names; `points` {name, x, y}."""

from __future__ import annotations

from typing import Any

from headscope.draw.curves import number, ticks
from headscope.draw.marks import Dot, Drawing, Line, Words, cut, width_of

_SIDE = 340.0
_NAMED = 4  # points with the highest x, and with the highest y, that get their name


def draw(data: dict[str, Any]) -> Drawing:
    """Axes with their zero lines, a dot for each point, names at the highest ones."""
    points = data["points"]
    names, xs, ys = points["name"], points["x"], points["y"]
    if not names:
        return Drawing(200, 24, [Words(0, 14, "no point has both", fill="ink")])
    across, up = ticks(min(0.0, *xs), max(0.0, *xs)), ticks(min(0.0, *ys), max(0.0, *ys))
    left = max(width_of(number(tick)) for tick in up) + 24
    found = Drawing(left + _SIDE + 30, _SIDE + 48)

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            left + _SIDE * (x - across[0]) / ((across[-1] - across[0]) or 1.0),
            10 + _SIDE * (up[-1] - y) / ((up[-1] - up[0]) or 1.0),
        )

    for tick in up:
        y = at(0, tick)[1]
        found.marks.append(Line(((left, y), (left + _SIDE, y)), stroke="soft" if tick == 0 else "line"))
        found.marks.append(Words(left - 4, y + 3.5, number(tick), anchor="end"))
    for tick in across:
        x = at(tick, 0)[0]
        found.marks.append(Line(((x, 10), (x, 10 + _SIDE)), stroke="soft" if tick == 0 else "line"))
        found.marks.append(Words(x, _SIDE + 24, number(tick), anchor="middle"))
    found.marks.append(Words(left + _SIDE / 2, _SIDE + 42, cut(data["x"], 60), anchor="middle"))
    found.marks.append(Words(9, 10 + _SIDE / 2, cut(data["y"], 60), anchor="middle", turn=-90))
    for name, x, y in zip(names, xs, ys, strict=True):
        hint = f"{name}: {data['x']} {x:.4g}, {data['y']} {y:.4g}"
        found.marks.append(Dot(*at(x, y), 3, "up", 0.6, hint=hint))
    for i in _highest(xs, ys):
        x, y = at(xs[i], ys[i])
        inside = x + 6 + width_of(names[i]) < left + _SIDE + 28
        found.marks.append(Words(x + (6 if inside else -6), y - 4, names[i], anchor="start" if inside else "end"))
    return found


def _highest(xs: list[float], ys: list[float]) -> list[int]:
    best = [sorted(range(len(xs)), key=lambda i, v=values: -v[i])[:_NAMED] for values in (xs, ys)]  # type: ignore[misc]
    return sorted({*best[0], *best[1]})


def text(data: dict[str, Any]) -> str:
    """For a terminal: the points that are highest in either."""
    points = data["points"]
    rows = [(points["name"][i], points["x"][i], points["y"][i]) for i in _highest(points["x"], points["y"])]
    lines = [f"{len(points['name'])} points; the highest in either:"]
    return "\n".join(lines + [f"{name:>8}  {data['x']} {x:.4g}  {data['y']} {y:.4g}" for name, x, y in rows])
