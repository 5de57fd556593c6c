"""A route: tokens from left to right, layers from the bottom up. Data: the document of a route."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from headscope.draw.marks import SIZE, Box, Dot, Drawing, Line, Mark, Words, cut, visible, width_of, wrapped
from headscope.draw.route_layout import LEFT, Layout, Room, Way, ways

_NAME = 9.0  # size of the names of heads
_NAMED = 40  # names at most; more would hide what they name
_TRIED = 400  # ways of heads that a name is tried on
_PALE = 0.7  # opacity of what adds next to nothing: a contrast of 3 to 1 with either ground
_TOKEN = 18  # letters of a token
_LEAST = 560.0  # width that a legend takes


def draw(data: dict[str, Any]) -> Drawing:
    """Width is the share of the state above, colour what a part adds to the target; grey is the stream itself."""
    layout, edges = Layout(data["nodes"]), ways(data["edges"])
    most = signed_limit(data["edges"])
    start = data["nodes"][0]["id"]
    # dots of states that the stream only passes by would hide the edges
    busy = {name for way in edges if way.kind != "residual" for name in (way.source, way.target)} | {start}
    nodes = [node for node in data["nodes"] if node["id"] in busy or node["kind"] == "embed"]
    found = Drawing(max(layout.width, _LEAST), 0, _layers(layout))
    found.marks += [_edge(data, layout, way, most) for way in edges]
    found.marks += [_node(data, layout, node, large=node["id"] == start) for node in nodes]
    named = _names(found, layout, [way for way in reversed(edges) if way.kind == "head"], nodes)
    _tokens(found, data, layout)
    _legend(found, data, edges, most, named)
    gone = len(data["tokens"]) - len(layout.columns)
    if gone:
        found.left_out = f"{gone} tokens are not on the route and not drawn."
    return found


def signed_limit(edges: list[dict[str, Any]]) -> float:
    """Both ends of the colours: most edges within, so that a few huge ones (often at the first token) pale no others."""
    sizes = sorted(abs(e["signed"]) for e in edges if e["kind"] not in ("residual", "input"))
    return float((sizes[math.floor(0.97 * (len(sizes) - 1))] or sizes[-1] or 1.0) if sizes else 1.0)


def towards(data: dict[str, Any]) -> str:
    """What `signed` adds to, in words."""
    target = f"“{cut(visible(data['target']), _TOKEN)}”"
    return target if data["foil"] is None else f"{target} rather than “{cut(visible(data['foil']), _TOKEN)}”"


def _layers(layout: Layout) -> list[Mark]:
    """Every other layer on a band, and their names where there is room."""
    tops = [layout.bottom - (i + 1) * layout.row for i in range(layout.layers)]
    across = layout.width - LEFT
    marks: list[Mark] = [Box(LEFT, y, across, layout.row, fill="line", opacity=0.3) for y in tops[::2]]
    every = math.ceil((SIZE + 2) / layout.row)
    marks += [
        Words(LEFT - 6, tops[i] + layout.row / 2 + 3.5, f"L{i}", anchor="end") for i in range(0, len(tops), every)
    ]
    return marks


def _thickness(kind: str, weight: float, column: float) -> float:
    """Where columns are close, thick lines would be one field."""
    growth = {"residual": 3.0, "input": 0.0}.get(kind, 9.0)
    return (1 + growth * min(1.0, weight)) * max(0.2, min(1.0, column / 20))


def _strength(signed: float, most: float) -> float:
    return _PALE + (1 - _PALE) * min(1.0, abs(signed) / most)


def _edge(data: dict[str, Any], layout: Layout, way: Way, most: float) -> Line:
    line, width = layout.line(way), _thickness(way.kind, way.weight, layout.column)
    if way.kind in ("residual", "input"):
        what = "the stream itself" if way.kind == "residual" else "what the MLP reads"
        share = f", {_percent(way.weight)} of that state" if way.kind == "residual" else ""
        return Line(line, "soft", width, 0.4, hint=f"{way.source} → {way.target}: {what}{share}")
    goal = towards(data)
    parts = [f"{part['component'] or way.kind} {_says(part['weight'], part['signed'], goal)}" for part in way.parts]
    source, target = (layout.nodes[name] for name in (way.source, way.target))
    place = f"{way.source} {_word(source)} → {way.target} {_word(target)}"
    down = way.signed < 0
    hint = f"{place}: {'; '.join(parts)}"
    return Line(line, "down" if down else "up", width, _strength(way.signed, most), dashed=down, hint=hint)


def _says(weight: float, signed: float, goal: str) -> str:
    return f"{_percent(weight)} of that state, {signed:+.3f} towards {goal}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _word(node: dict[str, Any]) -> str:
    return f"“{cut(visible(node['token']), _TOKEN)}”"


def _node(data: dict[str, Any], layout: Layout, node: dict[str, Any], *, large: bool) -> Mark:
    x, y = layout.place(node["id"])
    size = max(0.7, min(2.6, 0.16 * layout.column)) * (1.7 if large else 1.0)
    hint = f"{node['id']} {_word(node)}" + (f": what is explained, towards {towards(data)}" if large else "")
    if node["kind"] == "mlp":
        return Box(x - size, y - size, 2 * size, 2 * size, fill="back", stroke="ink", hint=hint)
    return Dot(x, y, size, "soft" if node["kind"] == "bias" else "ink", hint=hint)


def _names(found: Drawing, layout: Layout, heads: list[Way], nodes: list[dict[str, Any]]) -> int:
    """The names of the heaviest ways of heads, where there is room; gives how many."""
    room = Room((LEFT, 0.0, layout.width, layout.bottom))
    for x, y in (layout.place(node["id"]) for node in nodes):
        room.take((x - 4, y - 4, x + 4, y + 4))
    named = 0
    for way in heads[:_TRIED]:
        area = room.on(layout.line(way), width_of(way.name, _NAME) + 3, _NAME + 2)
        if area is None:
            continue
        room.take(area)
        left, top, right, bottom = area
        found.marks.append(Box(left, top, right - left, bottom - top, fill="back", opacity=0.8))
        found.marks.append(Words((left + right) / 2, bottom - 2.5, way.name, size=_NAME, fill="ink", anchor="middle"))
        named += 1
        if named == _NAMED:
            break
    return named


def _tokens(found: Drawing, data: dict[str, Any], layout: Layout) -> None:
    """The words below their columns, aslant where they are long; the position that is explained is bold."""
    words = {p: cut(visible(data["tokens"][p]), _TOKEN) for p in layout.columns}
    longest = max(map(width_of, words.values()))
    level = longest + 6 <= layout.column
    every = 1 if level else math.ceil((SIZE + 2) / layout.column)
    for i, (p, word) in enumerate(words.items()):
        at = p == data["position"]
        if i % every and not at:
            continue
        fill, x = "ink" if at else "soft", layout.x[p]
        if level:
            found.marks.append(Words(x, layout.bottom + 16, word, fill=fill, anchor="middle", bold=at))
        else:
            found.marks.append(Words(x - 2, layout.bottom + 14, word, fill=fill, turn=45, bold=at))
            found.width = max(found.width, x + 0.71 * width_of(word) + 4)
    found.height = layout.bottom + (24 if level else 0.71 * longest + 24)


def _legend(found: Drawing, data: dict[str, Any], edges: list[Way], most: float, named: int) -> None:
    """What widths, colours and marks mean, each with a piece of it."""
    beyond = any(abs(way.signed) > most for way in edges if way.kind not in ("residual", "input"))
    reach = ("≤ " if beyond else "", "≥ " if beyond else "")
    pieces: list[tuple[str, list[tuple[str, float, float]]]] = []  # words, and (stroke, width, opacity) before them
    for words, steps in ((f"{reach[0]}−{most:.2g}", (-1.0, -0.4, -0.05)), (f"{reach[1]}+{most:.2g}", (0.05, 0.4, 1.0))):
        strokes = [("up" if step > 0 else "down", 3.0, _strength(step, 1.0)) for step in steps]
        pieces.append((words, strokes))
    heading = f"Colour: what a part adds to the logit of {_logits(data)}; red, dashed: against it."
    _row(found, pieces, heading)
    shares = [(f"{100 * share:.0f} %", [("up", _thickness("head", share, 20.0), 1.0)]) for share in (0.05, 0.25, 1.0)]
    _row(found, shares, "Width: share of the state above.")
    grey = [("", [("soft", _thickness("residual", 0.5, 20.0), 0.4)])]
    _row(found, grey, "The stream itself, or what an MLP reads. Dots: states of the stream. Squares: MLPs.")
    n_heads = sum(way.kind == "head" for way in edges)
    more = "; +1: one more head from and to the same states" if any(len(way.parts) > 1 for way in edges) else ""
    says = f"{named} of {n_heads} edges of heads are named, the largest shares first, where a name has room{more}."
    _row(found, [], says)


def _logits(data: dict[str, Any]) -> str:
    target = f"“{cut(visible(data['target']), _TOKEN)}”"
    return target if data["foil"] is None else f"{target} minus that of “{cut(visible(data['foil']), _TOKEN)}”"


def _row(found: Drawing, pieces: list[tuple[str, list[tuple[str, float, float]]]], says: str) -> None:
    x, y = 0.0, found.height + SIZE
    for words, strokes in pieces:
        for stroke, width, opacity in strokes:
            piece = ((x, y - 3.5), (x + 24, y - 3.5))
            found.marks.append(Line(piece, stroke, width, opacity, dashed=stroke == "down"))
            x += 24
        if words:
            found.marks.append(Words(x + 4, y, words))
            x += width_of(words) + 4
        x += 10
    for line in wrapped(says, found.width - x):
        found.marks.append(Words(x, y, line))
        y += SIZE * 1.4
    found.height = y - SIZE * 0.4


def text(data: dict[str, Any]) -> str:
    """For a terminal: the heaviest edges of heads."""
    heads: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for edge in data["edges"]:
        if edge["kind"] == "head":
            heads[edge["component"]][0] += edge["weight"]
            heads[edge["component"]][1] += edge["signed"]
    lines = [f"{len(data['nodes'])} nodes, {len(data['edges'])} edges"]
    for name, (weight, signed) in sorted(heads.items(), key=lambda item: -item[1][0])[:8]:
        lines.append(f"{name:>8}  weight {weight:.3f}  {signed:+.3f} towards {towards(data)}")
    return "\n".join(lines)
