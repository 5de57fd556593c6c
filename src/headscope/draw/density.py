"""Many numbers by row as a density, such as the scores of each layer's neurons.

Data: `axes` {rows, columns} their names; `rows` the labels, the first at the bottom; `edges` of the bins, 0 among them;
`counts` [row][bin]; `medians` [row], null where nothing was measured; `highest`, `lowest` {name, row, value, x}: those
that stand out, and where they are drawn; `n` how many were measured.
"""

from __future__ import annotations

import math
from typing import Any

from headscope.draw.curves import number, ticks
from headscope.draw.marks import Box, Dot, Drawing, Line, Mark, Picture, Words, width_of

_WIDTH, _HEIGHT = 520.0, 480.0
_HIGHEST = 18.0  # of a row
_MOST = 6000  # with more bins than this a drawing is an image
_FAINT = 0.1  # of a bin that holds one
_NAMED = 5
_SHADES = " ░▒▓█"
_ACROSS = 60  # letters of a terminal


def draw(data: dict[str, Any]) -> Drawing:
    """Rows of bins, deeper the more they hold (by logarithm), blue above 0 and red below; medians; those that stand out."""
    edges, counts = data["edges"], data["counts"]
    if any(len(row) != len(edges) - 1 for row in counts) or len(counts) != len(data["rows"]):
        raise ValueError(f"the counts are not {len(data['rows'])} × {len(edges) - 1}")
    high = min(_HIGHEST, _HEIGHT / max(1, len(counts)))
    height = high * len(counts)
    left = max(width_of(label) for label in data["rows"]) + 24
    found = Drawing(left + _WIDTH + 16, height + 62)

    def at(x: float, row: float) -> tuple[float, float]:
        return left + _WIDTH * (x - edges[0]) / (edges[-1] - edges[0]), 4 + height * (1 - row / len(counts))

    found.marks += _bins(data, at, high, left)
    found.marks.append(Box(left - 0.5, 3.5, _WIDTH + 1, height + 1, stroke="line"))
    zero = at(0, 0)[0]
    found.marks.append(Line(((zero, 4), (zero, 4 + height)), stroke="soft"))
    found.marks += _medians(data, at)
    for row in (*data["highest"], *data["lowest"]):
        across, up = at(row["x"], row["row"] + 0.5)
        found.marks.append(Dot(across, up, 1.8, "ink", hint=f"{row['name']}: {row['value']:.4g}"))
    every = max(1, math.ceil(11 / high))
    for i in range(0, len(counts), every):
        found.marks.append(Words(left - 4, at(0, i + 0.5)[1] + 3.5, data["rows"][i], anchor="end"))
    found.marks.append(Words(9, 4 + height / 2, data["axes"]["rows"], anchor="middle", turn=-90))
    for tick in ticks(edges[0], edges[-1]):
        if edges[0] <= tick <= edges[-1]:
            x = at(tick, 0)[0]
            found.marks.append(Line(((x, 4 + height), (x, 8 + height)), stroke="soft"))
            found.marks.append(Words(x, height + 19, number(tick), anchor="middle"))
    found.marks.append(Words(left + _WIDTH / 2, height + 33, data["axes"]["columns"], anchor="middle"))
    found.marks.append(Words(left, height + 50, _key(data)))
    found.width = max(found.width, left + width_of(_key(data)))
    found.left_out = f"{data['n']:,} {data['axes']['of']} are counted in {len(edges) - 1} bins a {data['axes']['rows']}, not drawn singly."
    return found


def _key(data: dict[str, Any]) -> str:
    most = max((count for row in data["counts"] for count in row), default=0)
    return f"colour: 1 to {most:,} in a bin, by logarithm; line: median; dots: the {_NAMED} highest and lowest"


def _depths(data: dict[str, Any]) -> list[list[float]]:
    """[row][bin] in -1…1: the sign is that of the bin, the size grows with the count."""
    most = max((count for row in data["counts"] for count in row), default=0)
    unit = (1 - _FAINT) / (math.log(most) or 1.0) if most > 1 else 0.0
    signs = [-1.0 if edge < 0 else 1.0 for edge in data["edges"][:-1]]
    return [
        [sign * (_FAINT + unit * math.log(count)) if count else 0.0 for sign, count in zip(signs, row, strict=True)]
        for row in data["counts"]
    ]


def _bins(data: dict[str, Any], at: Any, high: float, left: float) -> list[Mark]:
    depths, edges = _depths(data), data["edges"]
    if len(depths) * (len(edges) - 1) > _MOST:
        return [Picture(left, 4, _WIDTH, high * len(depths), tuple(map(tuple, reversed(depths))))]
    wide = _WIDTH / (len(edges) - 1)
    gap = 0.5 if high >= 6 else 0.0
    by_colour: dict[str, list[Mark]] = {"up": [], "down": []}
    for i, row in enumerate(depths):
        for j, depth in enumerate(row):
            if depth:
                hint = f"{data['rows'][i]}, {edges[j]:.3g} to {edges[j + 1]:.3g}: {data['counts'][i][j]:,}"
                x, y = at(edges[j], i + 1)
                colour = "up" if depth > 0 else "down"
                by_colour[colour].append(Box(x, y + gap, wide, high - 2 * gap, colour, abs(depth), hint=hint))
    return [*by_colour["up"], *by_colour["down"]]


def _medians(data: dict[str, Any], at: Any) -> list[Mark]:
    marks: list[Mark] = []
    run: list[tuple[float, float]] = []
    for i, median in enumerate([*data["medians"], None]):
        if median is not None:
            run.append(at(median, i + 0.5))
            continue
        if len(run) > 1:
            marks.append(Line(tuple(run), stroke="ink", width=1.4))
        run = []
    return marks


def text(data: dict[str, Any]) -> str:
    """For a terminal: shades, a row a line, and those that stand out by name."""
    depths = _depths(data)
    bins = len(data["edges"]) - 1
    size = math.ceil(bins / _ACROSS)
    most = max(map(len, data["rows"]), default=0)
    lines = []
    for i in range(len(depths) - 1, -1, -1):
        cells = [max(map(abs, depths[i][j : j + size])) for j in range(0, bins, size)]
        shades = "".join(_SHADES[min(4, math.ceil(4 * cell))] for cell in cells)
        median = "" if data["medians"][i] is None else f"  median {data['medians'][i]:+.3f}"
        lines.append(f"{data['rows'][i]:>{most}} │{shades}│{median}")
    lines.append(f"{'':>{most}}  {number(data['edges'][0])} … {number(data['edges'][-1])} {data['axes']['columns']}")
    for what in ("highest", "lowest"):
        lines.append(f"{what}: " + ", ".join(f"{row['name']} {row['value']:.4g}" for row in data[what]))
    return "\n".join(lines)
