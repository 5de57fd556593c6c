"""A circuit: the edges that are kept, as plain data that saves itself; and how one is chosen from scores of edges."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from headscope.circuits.run import REPLACE
from headscope.core.component import Component
from headscope.core.errors import FileError, UsageError
from headscope.core.files import check_file, read_document, write_json
from headscope.model import Model
from headscope.model.graph import Graph, graph_of

if TYPE_CHECKING:
    import xarray as xr

FORMAT = 1
BY = ("abs", "signed")
#: how edges are written
EDGE = re.compile(r"(E|L\d+(H\d+|MLP|N\d+))->(logits|L\d+(H\d+\.q|KV\d+\.[kv]|MLP|N\d+))")
#: what scores of edges must say of themselves
KNOWN = ("task", "metric", "method", "replacement", "seed", "fingerprint")


@dataclass(frozen=True)
class Circuit:
    """Edges like `L3H2->L5H1.q`, receivers in the order of the pass; all others carry what `replacement` says.

    `task`, `metric`, `method`, `seed`: what chose them. `neurons`: those split out of their MLPs. `n_graph`: how many edges
    the model has.
    """

    edges: tuple[str, ...]
    model: str
    fingerprint: str
    task: str
    metric: str
    method: str
    replacement: str
    seed: int
    neurons: tuple[str, ...]
    n_graph: int
    version: str

    def __len__(self) -> int:
        return len(self.edges)

    def graph(self, model: Model) -> Graph:
        """The graph whose edges these are."""
        return graph_of(model, self.neurons)

    def mask(self, model: Model) -> Tensor:
        """[sender, receiver] bool. Raises UsageError for a model that has not these edges."""
        return self.graph(model).mask(self.edges)

    def nodes(self) -> tuple[str, ...]:
        """Every sender and receiver of an edge, in order of the edges."""
        return tuple(dict.fromkeys(name for edge in self.edges for name in edge.split("->")))

    def heads(self) -> list[Component]:
        """The attention heads whose output is used."""
        senders = {edge.partition("->")[0] for edge in self.edges} - {"E"}
        return sorted(c for c in map(Component.parse, senders) if c.kind == "head")

    def document(self) -> dict[str, Any]:
        """As plain data: what `save` writes."""
        given = {key: list(x) if isinstance(x, tuple) else x for key, x in asdict(self).items()}
        return {"format": "headscope-circuit", "format_version": FORMAT, **given}

    def save(self, path: str | Path) -> None:
        """Write as JSON; the path must end in .json."""
        check_file(path, ".json")
        write_json(path, self.document())

    @classmethod
    def load(cls, path: str | Path) -> Circuit:
        """Read what `save` wrote. Raises FileError where it is damaged or of a newer version."""
        document = read_document(path, "circuit", "circuit", FORMAT)
        given = {key: x for key, x in document.items() if not key.startswith("format")}
        if wrong := _wrong(given):
            raise FileError(f"The circuit {path} is damaged: {wrong}.")
        read: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in given.items()}
        return cls(**read)

    def __repr__(self) -> str:
        return f"Circuit({len(self)} of {self.n_graph} edges, {len(self.heads())} heads; {self.task} by {self.method})"


def _wrong(given: dict[str, Any]) -> str | None:
    """What is wrong with the fields of a circuit that was read."""
    types = {field.name: field.type for field in fields(Circuit)}
    if odd := sorted(types.keys() ^ given.keys()):
        return f"{odd[0]} is {'missing' if odd[0] in types else 'unknown'}"
    for name, x in given.items():
        # a bool is an int
        if types[name] == "int" and (not isinstance(x, int) or isinstance(x, bool)):
            return f"{name} is no whole number"
        if types[name] == "str" and not isinstance(x, str):
            return f"{name} is no text"
        if types[name] == "tuple[str, ...]" and not (isinstance(x, list) and all(isinstance(y, str) for y in x)):
            return f"{name} is no list of names"
    if odd := [edge for edge in given["edges"] if not EDGE.fullmatch(edge)]:
        return f"{odd[0]!r} is no edge"
    if given["replacement"] not in REPLACE:
        return f"replacement is {given['replacement']!r}, not {', '.join(REPLACE[:-1])} or {REPLACE[-1]}"
    return None


def circuit_of(model: Model, mask: Tensor, graph: Graph, **what: Any) -> Circuit:
    """The circuit of the edges in a mask [sender, receiver]; `what`: task, metric, method, replacement, seed."""
    from headscope import __version__

    return Circuit(
        edges=graph.names(mask & graph.exists), model=model.name, fingerprint=model.fingerprint, neurons=graph.neurons,
        n_graph=graph.n_edges, version=__version__, **what,
    )  # fmt: skip


def _from_scores(model: Model, graph: Graph, mask: Tensor, scores: xr.DataArray, way: str) -> Circuit:
    known = scores.attrs
    return circuit_of(
        model, mask, graph, task=known["task"], metric=known["metric"], method=f"{known['method']}, {way}",
        replacement=known["replacement"], seed=known["seed"],
    )  # fmt: skip


def check_by(by: str) -> None:
    """Raise UsageError for what edges are not ranked by."""
    if by not in BY:
        raise UsageError(f"by is {by!r}; edges are ranked by the size of their score (abs) or by the score (signed).")


def check_scores(scores: xr.DataArray, by: str) -> None:
    """Raise UsageError for what is no table of scores of edges, and for what they are not ranked by."""
    check_by(by)
    if getattr(scores, "dims", None) != ("sender", "receiver"):
        raise UsageError(
            f"Scores of edges have dims (sender, receiver), as eap_ig gives them, not {type(scores).__name__} with "
            f"{getattr(scores, 'dims', 'none')}."
        )


def values_of(model: Model, scores: xr.DataArray, by: str = "abs") -> tuple[Graph, np.ndarray[Any, Any]]:
    """The graph of scores, and by what an edge is the better [sender, receiver], -inf where there is none: the size of its
    score, or the score. Raises UsageError for scores of another model."""
    check_scores(scores, by)
    if missing := [name for name in KNOWN if name not in scores.attrs]:
        raise UsageError(
            f"These scores do not say their {missing[0]}: their attributes were lost on the way; put them back by "
            "scores.assign_attrs(original.attrs)."
        )
    graph = graph_of(model, scores.attrs.get("neurons", ()))
    names = ([n.name for n in graph.senders], [n.name for n in graph.receivers])
    if any(list(scores[dim].values) != known for dim, known in zip(("sender", "receiver"), names, strict=True)):
        raise UsageError(f"These are not scores of the edges of {model.name}; take those of eap_ig, eap or exact.")
    if scores.attrs["fingerprint"] != model.fingerprint:
        raise UsageError(
            f"These are scores of another model ({scores.attrs.get('model')}, {scores.attrs['fingerprint']}), not of "
            f"{model.name}, {model.fingerprint}; score the edges of this one."
        )
    values = np.abs(scores.values) if by == "abs" else scores.values
    return graph, np.where(np.isnan(values), -np.inf, values)


def top_edges(model: Model, scores: xr.DataArray, n: int, *, by: str = "abs") -> Circuit:
    """The circuit of the `n` best edges; equal scores keep the order of senders, then receivers.

    `by`: "abs" takes what matters most either way, and is like the model; "signed" takes what helps most, and may do the
    task better than the model.
    """
    graph, values = values_of(model, scores, by)
    order = np.argsort(-values.ravel(), kind="stable")[: _count(n, graph)]
    mask = torch.zeros(values.size, dtype=torch.bool)
    mask[torch.from_numpy(order.copy())] = True
    return _from_scores(model, graph, mask.view(values.shape), scores, f"top by {by}")


def greedy_edges(model: Model, scores: xr.DataArray, n: int, *, by: str = "abs") -> Circuit:
    """The circuit of `n` edges grown from the logits: each time the best edge into what the circuit reads already."""
    graph, values = values_of(model, scores, by)
    mask = torch.zeros(values.shape, dtype=torch.bool)
    waiting: list[tuple[float, int, int]] = []
    seen: set[int] = set()

    def reach(receivers: Iterable[int]) -> None:
        for r in set(receivers) - seen:
            seen.add(r)
            for s in np.flatnonzero(np.isfinite(values[:, r])).tolist():
                heapq.heappush(waiting, (-float(values[s, r]), s, r))

    reach([len(graph.receivers) - 1])
    for _ in range(_count(n, graph)):
        if not waiting:
            break
        _, s, r = heapq.heappop(waiting)
        mask[s, r] = True
        reach(graph.inputs[s])
    return _from_scores(model, graph, mask, scores, f"greedy by {by}")


def _count(n: int, graph: Graph) -> int:
    if not isinstance(n, Integral) or not 1 <= n <= graph.n_edges:
        raise UsageError(f"A circuit has 1 to {graph.n_edges:,} edges here, but {n} were asked for.")
    return int(n)


def prune(model: Model, circuit: Circuit) -> Circuit:
    """The circuit without edges that lead nowhere: those of senders that read nothing in it (but the embedding), and those
    into heads and MLPs that nothing in it reads.

    Where corrupted twins are what replaces, this changes no result: such a node gives what stands for it anyway.
    """
    graph = circuit.graph(model)
    mask = pruned(graph, graph.mask(circuit.edges))
    return replace(circuit, edges=graph.names(mask))


def pruned(graph: Graph, mask: Tensor) -> Tensor:
    """A mask [sender, receiver] without edges that lead nowhere."""
    mask = mask.clone()
    readers: dict[int, list[int]] = {}
    for s, receivers in enumerate(graph.inputs):
        for r in receivers:
            readers.setdefault(r, []).append(s)
    while True:
        before = int(mask.sum())
        for s, receivers in enumerate(graph.inputs):
            if receivers and not bool(mask[:, receivers].any()):
                mask[s] = False
        for r, senders in readers.items():
            if not bool(mask[senders].any()):
                mask[:, r] = False
        if int(mask.sum()) == before:
            return mask


__all__ = ["Circuit", "greedy_edges", "prune", "top_edges"]
