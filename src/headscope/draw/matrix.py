"""Numbers as coloured cells: a grid of heads, an attention pattern, layers × positions; one panel or several.

Data: `axes` {rows, columns} their names; `rows`, `columns` the labels; `upward` whether the first row is at the bottom;
`join` what stands between a cell's two labels; `scale` diverging or sequential; `missing` what an empty cell means;
`panels` [{title, note, limit, values [row][column] with null where empty}]: colours go from -limit to limit. A panel may
have `words` [row][column]: a text in each cell; and `frames` [[row, column or null]]: cells, or whole rows, in a frame.
"""

from __future__ import annotations

import math
from typing import Any

from headscope.draw.marks import SIZE, Box, Drawing, Line, Mark, Picture, Words, cut, fitted, width_of, wrapped

#: with more cells than this a drawing is an image, without a value to point at in every cell
MOST = 6000
#: and with more than this its cells have no room for words
MOST_WORDS = 2500
_WORD = 8.5  # size of a cell's words
_ACROSS = 860.0  # panels stand side by side up to this width
_GAP = 26.0
_PIXELS = 2400  # across an image at most
_LABEL = 18  # letters of a row's or column's label
_SHADES = " ░▒▓█"
_TABLE = 7  # columns of words on a line of a terminal
_NEGATIVE = " .-=#"


def draw(data: dict[str, Any]) -> Drawing:
    """All panels, each with its own colour bar."""
    panels = data["panels"]
    n_cells = sum(len(panel["values"]) * len(data["columns"]) for panel in panels)
    image = n_cells > MOST
    alone = len(panels) == 1
    worded = n_cells <= MOST_WORDS and any(panel.get("words") for panel in panels)
    high, wide = (15.0, 72.0) if worded else _cell(len(data["rows"]), len(data["columns"]), alone=alone)
    left = _left(data, high)
    headings = [_heading(panel, max(left + len(data["columns"]) * wide, 150.0)) for panel in panels]
    top = max(heading.height for heading in headings)  # so that grids side by side are level
    parts = [
        _panel(data, panel, heading, (left, top, high, wide), image=image, alone=alone)
        for panel, heading in zip(panels, headings, strict=True)
    ]
    whole = Drawing(0, 0)
    if image:
        blocks = math.prod(_blocks(data))
        thinned = f" and each pixel is the largest of {blocks} cells" if blocks > 1 else ""
        whole.left_out = (
            f"{n_cells:,} cells are drawn as an image, without values to point at{thinned}; the .json has every value."
        )
    x = y = 0.0
    for part in parts:
        if x and x + part.width > _ACROSS:
            x, y = 0.0, whole.height + _GAP / 2
        whole.place(part, x, y)
        x += part.width + _GAP
    return whole


def _left(data: dict[str, Any], high: float) -> float:
    """Room for the rows' labels and name."""
    shown = data["rows"][:: _step(SIZE + 1, high)]
    return max((width_of(cut(x, _LABEL)) for x in shown), default=0.0) + 6 + (14 if data["axes"]["rows"] else 0)


def _panel(
    data: dict[str, Any], panel: dict[str, Any], found: Drawing, at: tuple[float, float, float, float], *,
    image: bool, alone: bool,
) -> Drawing:  # fmt: skip
    """The panel below its heading; `at`: left, top, and a cell's height and width."""
    values = panel["values"]
    left, top, high, wide = at
    n_rows, n_columns = len(data["rows"]), len(data["columns"])
    if len(values) != n_rows or any(len(row) != n_columns for row in values):
        raise ValueError(f"a panel is not {n_rows} × {n_columns}")
    width, height = n_columns * wide, n_rows * high
    found.width = max(found.width, left + width)
    order = range(n_rows - 1, -1, -1) if data["upward"] else range(n_rows)
    found.marks.append(Box(left - 0.5, top - 0.5, width + 1, height + 1, stroke="line"))
    place = {row: top + i * high for i, row in enumerate(order)}
    if image:
        found.marks.append(_image(panel, order, _blocks(data), (left, top, width, height)))
    else:
        found.marks += _cells(data, panel, place, left, high, wide)
        found.marks += _words(panel, place, left, high, wide) if wide > high else []
        for i, j in panel.get("frames", ()):
            x, across = (left, width) if j is None else (left + j * wide, wide)
            found.marks.append(Box(x, place[i], across, high, stroke="ink"))
    for i in range(0, n_rows, _step(SIZE + 1, high)):
        label = cut(data["rows"][i], _LABEL)
        found.marks.append(Words(left - 4, place[i] + high / 2 + 3.5, label, anchor="end"))
    if data["axes"]["rows"]:
        found.marks.append(Words(9, top + height / 2, data["axes"]["rows"], anchor="middle", turn=-90))
    bottom = _below(found, data, left, top + height, wide)
    beyond = any(abs(v) > panel["limit"] for row in values for v in row if v is not None)
    found.height = _bar(found, data["scale"], panel["limit"], (left, bottom), 6.0 if alone else 4.0, beyond=beyond)
    return found


def _cell(n_rows: int, n_columns: int, *, alone: bool) -> tuple[float, float]:
    """Height and width: square, unless one side would then be a hair."""
    room, most = (460.0, 22.0) if alone else (230.0, 12.0)
    high, wide = (min(most, room / max(1, n)) for n in (n_rows, n_columns))
    if max(high, wide) < 4 * min(high, wide):
        high = wide = min(high, wide)
    return high, wide


def _heading(panel: dict[str, Any], width: float) -> Drawing:
    found = Drawing(0, 0)
    for text, fill in ((panel["title"], "ink"), (panel["note"], "soft")):
        for line in wrapped(cut(text, 110), width) if text else []:
            found.height += SIZE * 1.3
            found.width = max(found.width, width_of(line))
            found.marks.append(Words(0, found.height, line, fill=fill, bold=fill == "ink"))
    found.height += 7 if found.marks else 2
    return found


def _cells(
    data: dict[str, Any], panel: dict[str, Any], place: dict[int, float], left: float, high: float, wide: float
) -> list[Mark]:
    limit, words = panel["limit"] or 1.0, panel.get("words")
    inset = 0.5 if min(high, wide) >= 6 else 0.0
    by_colour: dict[str, list[Mark]] = {"up": [], "down": [], "line": []}
    for i, row in enumerate(panel["values"]):
        for j, value in enumerate(row):
            name = f"{data['rows'][i]}{data['join']}{data['columns'][j]}" + (f" {words[i][j]}" if words else "")
            box = (left + j * wide + inset, place[i] + inset, wide - 2 * inset, high - 2 * inset)
            if value is None:
                hint = "" if data["missing"] == "masked" else f"{name}: {data['missing']}"
                by_colour["line"].append(Box(*box, fill="line", opacity=0.45, hint=hint))
                continue
            colour = "up" if value >= 0 else "down"
            opacity = min(1.0, abs(value) / limit)
            by_colour[colour].append(Box(*box, fill=colour, opacity=opacity, hint=f"{name}: {value:.4g}"))
    return [mark for marks in by_colour.values() for mark in marks]


def _words(panel: dict[str, Any], place: dict[int, float], left: float, high: float, wide: float) -> list[Mark]:
    found: list[Mark] = []
    for i, row in enumerate(panel.get("words", ())):
        for j, word in enumerate(row):
            strong = abs(panel["values"][i][j] or 0.0) > 0.8 * (panel["limit"] or 1.0)
            fill = "back" if strong else "ink"
            found.append(
                Words(left + j * wide + 3, place[i] + high - 4, fitted(word, wide - 4, _WORD), size=_WORD, fill=fill)
            )
    return found


def _blocks(data: dict[str, Any]) -> tuple[int, int]:
    """How many rows and columns of cells one pixel of an image stands for."""
    return math.ceil(len(data["rows"]) / _PIXELS), math.ceil(len(data["columns"]) / _PIXELS)


def _image(
    panel: dict[str, Any], order: range, blocks: tuple[int, int], place: tuple[float, float, float, float]
) -> Picture:
    limit = panel["limit"] or 1.0
    rows = [[math.nan if v is None else v / limit for v in panel["values"][i]] for i in order]
    # more cells than pixels: the largest of its neighbours stands for them, so that nothing large is lost
    block_y, block_x = blocks
    if block_y > 1 or block_x > 1:
        rows = [
            [_largest([v for row in rows[y : y + block_y] for v in row[x : x + block_x]]) for x in range(0, len(rows[0]), block_x)]
            for y in range(0, len(rows), block_y)
        ]  # fmt: skip
    return Picture(*place, tuple(map(tuple, rows)))


def _largest(values: list[float]) -> float:
    return max((v for v in values if v == v), key=abs, default=math.nan)


def _step(room: float, cell: float) -> int:
    """Every how many cells a label fits."""
    needed = max(1, math.ceil(room / cell))
    size = 10 ** (len(str(needed)) - 1)
    return next(step * size for step in (1, 2, 5, 10) if step * size >= needed)


def _below(found: Drawing, data: dict[str, Any], left: float, y: float, wide: float) -> float:
    """Labels of the columns, turned where they are long; gives the y below them."""
    labels = [cut(label, _LABEL) for label in data["columns"]]
    longest = max(map(width_of, labels), default=0.0)
    level = longest <= 26
    step = _step(longest + 4 if level else SIZE + 1, wide)
    for j in range(0, len(labels), step):
        x = left + (j + 0.5) * wide
        if level:
            found.marks.append(Words(x, y + 12, labels[j], anchor="middle"))
        else:
            found.marks.append(Words(x - 3, y + 10, labels[j], turn=45))
            found.width = max(found.width, x + 0.71 * width_of(labels[j]) + 4)
    y += 16 if level else 0.71 * longest + 16
    if data["axes"]["columns"]:
        found.marks.append(Words(left + wide * len(labels) / 2, y + 9, data["axes"]["columns"], anchor="middle"))
        y += 13
    return y


def _bar(found: Drawing, scale: str, limit: float, at: tuple[float, float], step: float, *, beyond: bool) -> float:
    """What the colours mean: from -limit through 0, which has no colour, to limit, and `beyond` where values are."""
    low = -10 if scale == "diverging" else 0
    start = f"{'≤' if beyond else ''}−{limit:.3g}" if low else "0"
    end = f"{'≥' if beyond else ''}{limit:.3g}"
    left, y = at[0], at[1] + 6
    x = max(left, width_of(start) + 4)
    found.marks.append(Words(x - 4, y + 8, start, anchor="end"))
    for i in range(low, 10):
        middle = (i + 0.5) / 10
        colour = "up" if middle > 0 else "down"
        found.marks.append(Box(x + (i - low) * step, y, step, 9, fill=colour, opacity=abs(middle)))
    width = (10 - low) * step
    found.marks.append(Box(x, y, width, 9, stroke="line"))
    if low:
        found.marks.append(Line(((x + width / 2, y - 1), (x + width / 2, y + 11)), stroke="soft"))
    found.marks.append(Words(x + width + 4, y + 8, end))
    found.width = max(found.width, x + width + 4 + width_of(end))
    return y + 14


def text(data: dict[str, Any]) -> str:
    """For a terminal: shades where they fit, and the largest cells by name."""
    lines = []
    for panel in data["panels"][:4]:
        if len(data["panels"]) > 1:
            lines.append(panel["title"])
        if panel.get("words"):
            lines += _table(data, panel)
        elif len(data["rows"]) <= 48 and len(data["columns"]) <= 100:
            lines += _shades(data, panel)
        best = sorted(_named(data, panel), key=lambda item: -abs(item[1]))[:5]
        lines.append("largest: " + (", ".join(f"{name} {value:.4g}" for name, value in best) or "none"))
    if len(data["panels"]) > 4:
        lines.append(f"… and {len(data['panels']) - 4} more: " + ", ".join(p["title"] for p in data["panels"][4:]))
    return "\n".join(lines)


def _table(data: dict[str, Any], panel: dict[str, Any]) -> list[str]:
    """The last columns with their words, as many as fit a line."""
    shown = list(range(len(data["columns"])))[-_TABLE:]
    order = range(len(data["rows"]) - 1, -1, -1) if data["upward"] else range(len(data["rows"]))
    most = max(map(len, data["rows"]), default=0)
    lines = [
        f"{data['rows'][i]:>{most}} │ " + " ".join(f"{cut(panel['words'][i][j], 15):<15}" for j in shown) for i in order
    ]
    return [*lines, f"{'':>{most}}   " + " ".join(f"{cut(data['columns'][j], 15):<15}" for j in shown)]


def _named(data: dict[str, Any], panel: dict[str, Any]) -> list[tuple[str, float]]:
    return [
        (f"{data['rows'][i]}{data['join']}{data['columns'][j]}", value)
        for i, row in enumerate(panel["values"])
        for j, value in enumerate(row)
        if value is not None
    ]


def _shades(data: dict[str, Any], panel: dict[str, Any]) -> list[str]:
    limit = panel["limit"] or 1.0
    labels = [cut(label, _LABEL) for label in data["rows"]]
    most = max(map(len, labels), default=0)
    order = range(len(labels) - 1, -1, -1) if data["upward"] else range(len(labels))
    none = "·" if data["missing"] == "masked" else "?"
    lines = []
    for i in order:
        cells = "".join(
            none if v is None else (_SHADES if v >= 0 else _NEGATIVE)[min(4, math.ceil(4 * min(1.0, abs(v) / limit) - 0.5))]
            for v in panel["values"][i]
        )  # fmt: skip
        lines.append(f"{labels[i]:>{most}} │{cells}│")
    negative = any(v is not None and v < 0 for row in panel["values"] for v in row)
    missing = any(v is None for row in panel["values"] for v in row)
    key = (
        f"█ {limit:.3g}"
        + (f", # −{limit:.3g}" if negative else "")
        + (f", {none} {data['missing']}" if missing else "")
    )
    span = f"{data['columns'][0]} … {data['columns'][-1]}" if data["columns"] else ""
    return [*lines, f"{'':>{most}}  {span}   {key}"]
