"""Where a route's states and edges stand: tokens from left to right, layers from the bottom up. As on the local page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

Point = tuple[float, float]
#: left, top, right, bottom
Area = tuple[float, float, float, float]

#: room for the names of layers
LEFT = 34.0
#: of columns and layers together, unless there are very many; a page of 1280 pixels has it
_WIDTH, _HEIGHT = 1176.0, 780.0
#: how high in its layer a state lies, and how far beside its column
_LIFT = {"embed": 0.0, "bias": 0.28, "mid": 0.5, "mlp": 0.76, "post": 1.0}
_ASIDE = {"mlp": 0.26, "bias": -0.26}
_STEPS = 12  # pieces of a curve
_CELL = 20.0  # side of a cell in which what is taken is looked up


@dataclass(frozen=True)
class Way:
    """All edges of one kind between two states: heads that look at the same token would lie on one another.

    `parts`: the edges, the heaviest first.
    """

    source: str
    target: str
    kind: str
    parts: tuple[dict[str, Any], ...]

    @property
    def weight(self) -> float:
        return float(sum(part["weight"] for part in self.parts))

    @property
    def signed(self) -> float:
        return float(sum(part["signed"] for part in self.parts))

    @property
    def name(self) -> str:
        """Its heaviest head, and how many more."""
        more = len(self.parts) - 1
        return str(self.parts[0]["component"]) + (f" +{more}" if more else "")


def ways(edges: Iterable[dict[str, Any]]) -> list[Way]:
    """The stream itself first and the heaviest last, which is the order in which they are painted."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for edge in edges:
        found[edge["source"], edge["target"], edge["kind"]].append(edge)
    made = [Way(*key, tuple(sorted(parts, key=lambda part: -part["weight"]))) for key, parts in found.items()]
    return sorted(made, key=lambda way: (way.kind != "residual", way.weight))


class Layout:
    """`column`, `row`: pixels from one token and one layer to the next; `bottom`: the y of the embedded tokens."""

    def __init__(self, nodes: list[dict[str, Any]]) -> None:
        self.nodes = {node["id"]: node for node in nodes}
        self.columns = sorted({node["position"] for node in nodes})
        self.layers = 1 + max((node["layer"] for node in nodes if node["layer"] is not None), default=0)
        self.column = max(2.0, min(240.0, (_WIDTH - LEFT) / len(self.columns)))
        self.row = max(9.0, min(26.0, _HEIGHT / self.layers))
        self.width = LEFT + len(self.columns) * self.column
        self.bottom = 8 + self.layers * self.row
        self.x = {p: LEFT + (i + 0.5) * self.column for i, p in enumerate(self.columns)}

    def place(self, name: str) -> Point:
        """Of a state."""
        node = self.nodes[name]
        level = 0.0 if node["layer"] is None else node["layer"] + _LIFT[node["kind"]]
        aside = _ASIDE.get(node["kind"], 0.0) * min(self.column, 60.0)
        return self.x[node["position"]] + aside, self.bottom - level * self.row

    def line(self, way: Way) -> tuple[Point, ...]:
        """Straight where a way goes up within its own token, bent aside for a head that looks at its own token."""
        (x0, y0), (x1, y1) = self.place(way.source), self.place(way.target)
        own = self.nodes[way.source]["position"] == self.nodes[way.target]["position"]
        if own and way.kind != "head":
            return ((x0, y0), (x1, y1))
        aside = -0.3 * min(self.column, 60.0) if own else 0.0
        points = []
        for i in range(_STEPS + 1):
            t = i / _STEPS
            a, b, c, d = (1 - t) ** 3, 3 * (1 - t) ** 2 * t, 3 * (1 - t) * t * t, t**3
            points.append(((a + b) * x0 + (c + d) * x1 + (b + c) * aside, a * y0 + (b + c) * (y0 + y1) / 2 + d * y1))
        return tuple(points)


def crosses(one: Area, other: Area) -> bool:
    """Whether two areas share more than a border."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


class Room:
    """What is taken of a drawing, so that names touch neither a state nor one another."""

    def __init__(self, within: Area) -> None:
        self.within = within
        self._taken: dict[tuple[int, int], list[Area]] = defaultdict(list)  # by cell: routes have many thousand states

    def take(self, area: Area) -> None:
        for cell in _cells(area):
            self._taken[cell].append(area)

    def on(self, line: tuple[Point, ...], width: float, height: float) -> Area | None:
        """Where a name of this size stands on a curve, the middle first; None if nowhere.

        Beside a curve that comes back to its own token, whose states it would cover.
        """
        beside = -width / 2 - 1 if line[0][0] == line[-1][0] else 0.0
        for step in sorted(range(2, _STEPS - 1), key=lambda step: abs(step - _STEPS / 2)):
            x, y = line[step][0] + beside, line[step][1]
            area = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
            if self._free(area):
                return area
        return None

    def _free(self, area: Area) -> bool:
        left, top, right, bottom = self.within
        inside = left <= area[0] and area[2] <= right and top <= area[1] and area[3] <= bottom
        return inside and not any(crosses(area, other) for cell in _cells(area) for other in self._taken[cell])


def _cells(area: Area) -> Iterable[tuple[int, int]]:
    left, top, right, bottom = (int(x // _CELL) for x in area)
    return product(range(left, right + 1), range(top, bottom + 1))
