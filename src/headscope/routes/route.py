"""A route: the graph of what made one prediction, as plain data that displays and saves itself."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headscope.core.errors import FileError, UsageError
from headscope.core.files import read_document, write_json

FORMAT = 1


@dataclass(frozen=True)
class Node:
    """A state of the stream, or what adds to it, at a position.

    `id`, the same in every run: `E@3` the embedding, `L5A@3` the stream after layer 5's attention, `L5MLP@3`, `L5@3` the
    stream after layer 5, `L5B@3` the biases of layer 5's attention. `kind`: embed, mid, mlp, post, bias.
    """

    id: str
    kind: str
    layer: int | None
    position: int
    token: str


@dataclass(frozen=True)
class Edge:
    """`weight`: the share of `target` that comes by this edge; those into a node sum to 1. `kind`: residual, head, mlp,
    input (what an MLP reads), bias; `component`: the head or MLP, or None.

    `signed`: what the part adds to the target's logit minus the foil's if the final norm read it where it is written,
    with the scale it has there; at the route's own position this is its direct effect (before the cap of the logits,
    where a model has one).
    """

    source: str
    target: str
    kind: str
    component: str | None
    weight: float
    signed: float


@dataclass(frozen=True)
class Neuron:
    """A neuron's share of the stream after its MLP, and what it adds to the target's logit minus the foil's."""

    node: str
    component: str
    weight: float
    signed: float
    activation: float


@dataclass(frozen=True, eq=False)
class Route:
    """How one prediction came about: from `start`, edges backwards to the embedded tokens.

    `parts`, `evaluated`: edges of heads that reached nodes have, and how many of them had to be looked at.
    """

    model: str
    fingerprint: str
    version: str
    prompt: str
    tokens: list[str]
    token_ids: list[int]
    position: int
    target: str
    foil: str | None
    target_id: int
    foil_id: int | None
    logit: float
    threshold: float
    biases: str
    nodes: list[Node]
    edges: list[Edge]
    neurons: list[Neuron]
    parts: int
    evaluated: int

    @property
    def start(self) -> str:
        """The node that is explained: the stream after the last layer."""
        return self.nodes[0].id

    def into(self, node: str) -> list[Edge]:
        """The edges into a node, the heaviest first. Raises UsageError for a node that the route has not."""
        if node not in {n.id for n in self.nodes}:
            raise UsageError(f"The route has no node {node!r}; nodes are named like {self.start}.")
        return sorted((e for e in self.edges if e.target == node), key=lambda e: -e.weight)

    def heads(self) -> dict[str, float]:
        """The weight of each head's edges, added up over the route; heads not in it are left out."""
        found: dict[str, float] = defaultdict(float)
        for edge in self.edges:
            if edge.kind == "head" and edge.component is not None:
                found[edge.component] += edge.weight
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def document(self) -> dict[str, Any]:
        """As plain data: what `--json` prints and `save` writes."""
        return {"format": "headscope-route", "format_version": FORMAT, **asdict(self)}

    def save(self, path: str | Path) -> None:
        """Write as JSON (`.json`) for `load`, as a page that opens anywhere (`.html`), or as a drawing (`.svg`, `.png`,
        `.pdf`). A file that exists is replaced.

        Raises UsageError for another ending.
        """
        from headscope.routes.draw import figure

        path = Path(path)
        if path.suffix == ".json":
            write_json(path, self.document())
        else:
            figure(self).save(path, overwrite=True)

    @classmethod
    def load(cls, path: str | Path) -> Route:
        """Read what `save` wrote as JSON. Raises FileError where it is damaged or of a newer version."""
        document = read_document(path, "route", "route", FORMAT)
        given = {key: value for key, value in document.items() if not key.startswith("format")}
        try:
            kinds: dict[str, Any] = {"nodes": Node, "edges": Edge, "neurons": Neuron}
            read: dict[str, Any] = {k: [kinds[k](**row) for row in v] if k in kinds else v for k, v in given.items()}
            found = cls(**read)
            _check(found)
            return found
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise FileError(f"The route {path} is damaged ({error}).") from None

    def _repr_html_(self) -> str:
        from headscope.routes.draw import figure

        return figure(self)._repr_html_()

    def __repr__(self) -> str:
        what = self.target if self.foil is None else f"{self.target!r} rather than {self.foil!r}"
        best = ", ".join(f"{head} {weight:.2f}" for head, weight in list(self.heads().items())[:6])
        return f"Route to {what!s}: {len(self.nodes)} nodes, {len(self.edges)} edges; heads {best or 'none'}"


def check_sums(edges: Iterable[Edge]) -> dict[str, float]:
    """The sum of the weights into each node that has any: 1, but for rounding."""
    sums: dict[str, float] = defaultdict(float)
    for edge in edges:
        sums[edge.target] += edge.weight
    return dict(sums)


def _check(route: Route) -> None:
    """Raise ValueError or TypeError where a route does not hang together."""
    texts = [route.model, route.prompt, route.target, *route.tokens, *(e.kind for e in route.edges)]
    names = {node.id for node in route.nodes}
    numbers = [x for e in route.edges for x in (e.weight, e.signed)]
    numbers += [x for n in route.neurons for x in (n.weight, n.signed, n.activation)]
    places = [route.position, *(node.position for node in route.nodes)]
    if not all(isinstance(text, str) for text in texts) or len(route.tokens) != len(route.token_ids):
        raise ValueError("its texts are not texts")
    if not all(math.isfinite(x) for x in [route.logit, route.threshold, *numbers]):
        raise ValueError("a number is not finite")
    if not names or len(names) < len(route.nodes) or not all(0 <= p < len(route.tokens) for p in places):
        raise ValueError("its nodes are not those of its tokens")
    if missing := [e for e in route.edges if e.source not in names or e.target not in names]:
        raise ValueError(f"{missing[0].source} → {missing[0].target} has no such node")
