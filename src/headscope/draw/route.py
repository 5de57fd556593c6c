"""A route: tokens from left to right, layers from the bottom up. Data: the document of a route."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from headscope.draw.marks import Box, Dot, Drawing, Line, Mark, Words, cut, visible, width_of

_COLUMN, _ROW, _LEFT = 46.0, 26.0, 34.0
#: how high in its layer a state lies, and how far beside its column
_LIFT = {"embed": 0.0, "mid": 0.5, "mlp": 0.75, "bias": 0.25, "post": 1.0}
_ASIDE = {"mlp": 9.0, "bias": -9.0}


def draw(data: dict[str, Any]) -> Drawing:
    """Dots are states of the stream, squares MLPs; blue adds to the target, red takes away, thicker is more."""
    nodes = {node["id"]: node for node in data["nodes"]}
    columns = sorted({node["position"] for node in nodes.values()})
    x_of = {p: _LEFT + (i + 0.5) * _COLUMN for i, p in enumerate(columns)}
    layers = max((node["layer"] for node in nodes.values() if node["layer"] is not None), default=0) + 1
    bottom = 8 + layers * _ROW

    def place(name: str) -> tuple[float, float]:
        node = nodes[name]
        level = 0.0 if node["layer"] is None else node["layer"] + _LIFT[node["kind"]]
        return x_of[node["position"]] + _ASIDE.get(node["kind"], 0.0), bottom - level * _ROW

    most = max((abs(e["signed"]) for e in data["edges"] if e["kind"] != "residual"), default=0.0) or 1.0
    marks: list[Mark] = [
        Words(_LEFT - 6, bottom - (i + 1) * _ROW + 4, f"L{i}", anchor="end")
        for i in range(0, layers, 1 if layers < 60 else 5)
    ]
    marks += [_edge(edge, place(edge["source"]), place(edge["target"]), most) for edge in data["edges"]]
    marks += [_node(node, place(node["id"]), node["id"] == data["nodes"][0]["id"]) for node in nodes.values()]
    words = [cut(visible(data["tokens"][p]), 18) for p in columns]
    marks += [Words(x_of[p] - 2, bottom + 14, word, turn=45) for p, word in zip(columns, words, strict=True)]
    room = max((0.71 * width_of(word) for word in words), default=0.0)
    found = Drawing(_LEFT + len(columns) * _COLUMN + room, bottom + room + 20, marks)
    gone = len(data["tokens"]) - len(columns)
    if gone:
        found.left_out = f"{gone} tokens are not on the route and not drawn."
    return found


def _edge(edge: dict[str, Any], source: tuple[float, float], target: tuple[float, float], most: float) -> Line:
    style = "soft" if edge["kind"] in ("residual", "input", "bias") else "up" if edge["signed"] >= 0 else "down"
    strong = 0.15 + 0.85 * min(1.0, edge["weight"] / 0.5)
    thick = 1.0 if style == "soft" else 1.0 + 2.5 * min(1.0, abs(edge["signed"]) / most)
    what = edge["component"] or edge["kind"]
    hint = (
        f"{what}: {edge['source']} → {edge['target']}, weight {edge['weight']:.3f}, target − foil {edge['signed']:+.3f}"
    )
    return Line((source, target), style, thick, strong, hint=hint)


def _node(node: dict[str, Any], place: tuple[float, float], start: bool) -> Mark:
    x, y = place
    hint = f"{node['id']} {visible(node['token'])}"
    if node["kind"] == "mlp":
        return Box(x - 3, y - 3, 6, 6, fill="back", stroke="ink", hint=hint)
    fill = "up" if start else "soft" if node["kind"] == "bias" else "ink"
    return Dot(x, y, 4 if start else 2.2, fill, hint=hint)


def text(data: dict[str, Any]) -> str:
    """For a terminal: the heaviest edges of heads."""
    heads: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for edge in data["edges"]:
        if edge["kind"] == "head":
            heads[edge["component"]][0] += edge["weight"]
            heads[edge["component"]][1] += edge["signed"]
    lines = [f"{len(data['nodes'])} nodes, {len(data['edges'])} edges"]
    for name, (weight, signed) in sorted(heads.items(), key=lambda item: -item[1][0])[:8]:
        lines.append(f"{name:>8}  weight {weight:.3f}  target − foil {signed:+.3f}")
    return "\n".join(lines)
