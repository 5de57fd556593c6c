"""How good a circuit is: what is left of the metric, over sizes, and whether anything is missing or idle.

Faithfulness is f(C) = (m(C) - m(∅)) / (m(M) - m(∅)), a ratio of means over the prompts: 1 is as good as the model; it may
exceed 1 or be below 0. ∅ keeps no edge, M keeps all. Take prompts that did not choose the circuit.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, inf, log
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from headscope.circuits.circuit import BY, Circuit, check_scores, pruned, top_edges, values_of
from headscope.circuits.run import Progress, Values, evaluate
from headscope.core.errors import NotApplicable, UsageError
from headscope.core.scores import auroc
from headscope.model import Model
from headscope.model.graph import Graph
from headscope.sweep.metrics import Metric
from headscope.tasks import Prompts

if TYPE_CHECKING:
    import xarray as xr

#: shares of the edges at which a curve is measured (MIB)
SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


def shares_left(values: Any, empty: Values, whole: Values, metric: Any = "metric") -> Any:
    """f of metric means, given the values [prompt] of the empty circuit and of the model."""
    span = whole.mean() - empty.mean()
    if abs(span) < 1e-6:
        raise NotApplicable(f"The {metric} is the same with every edge cut, so there is nothing to explain.")
    return (values - empty.mean()) / span


def faithfulness(
    model: Model, prompts: Prompts, circuits: Circuit | Sequence[Circuit], *, metric: Metric | None = None,
    progress: Progress | None = None,
) -> list[float]:  # fmt: skip
    """f of each circuit, under its own replacement (all circuits have one). Raises NotApplicable where cutting every edge
    changes nothing."""
    circuits = [circuits] if isinstance(circuits, Circuit) else list(circuits)
    graph, replace = _one(model, circuits)
    masks = torch.stack([graph.exists, graph.exists & False, *(graph.mask(c.edges) for c in circuits)])
    whole, empty, *found = evaluate(model, prompts, graph, masks, replace, metric, progress=progress)
    return [float(x) for x in shares_left(np.array([v.mean() for v in found]), empty, whole, metric or prompts.metric)]


def _one(model: Model, circuits: Sequence[Circuit]) -> tuple[Graph, str]:
    """The graph and the replacement that all circuits have. Raises UsageError where they differ."""
    if not circuits or len({(c.replacement, c.neurons) for c in circuits}) > 1:
        raise UsageError("Circuits are measured together where they have one replacement and the same split neurons.")
    return circuits[0].graph(model), circuits[0].replacement


def check_least(least: float) -> None:
    """Raise UsageError for what is no share of a metric to ask for."""
    if not 0 < least < inf:
        raise UsageError(
            f"A faithfulness of {least} cannot be asked for; it is a share of the model's metric above 0, such as 0.8 (the "
            "empty circuit has 0)."
        )


@dataclass(frozen=True)
class Curve:
    """f of the circuits that keep the best share k of the edges, ranked by |score| (`abs`) and by score (`signed`).

    `cpr` = ∫ f dk under the signed ranking, higher is better: rewards doing the task. `cmd` = ∫ |1 - f| dk under the other,
    0 is best: rewards being like the model. Trapezoids in k from 0.001 to 1, so that a perfect ranking has a CPR of 0.999.
    `n_edges`: what is left of each circuit (abs, signed) when edges that lead nowhere are taken away.
    """

    k: tuple[float, ...]
    abs: tuple[float, ...]
    signed: tuple[float, ...]
    n_edges: tuple[tuple[int, ...], tuple[int, ...]]
    cpr: float
    cmd: float


def curve(
    model: Model, prompts: Prompts, scores: xr.DataArray, *, shares: Sequence[float] = SHARES,
    metric: Metric | None = None, progress: Progress | None = None,
) -> Curve:  # fmt: skip
    """Faithfulness over circuit sizes, CPR and CMD (Mueller et al. 2025, MIB), under the replacement of the scores."""
    shares = [float(k) for k in shares]
    if len(shares) < 2 or not all(0 < a < b <= 1 for a, b in pairwise(shares)):
        raise UsageError("A curve takes two or more shares of the edges, above 0, at most 1, and ascending.")
    masks = []
    for by in BY:
        graph, values = values_of(model, scores, by)
        order = torch.from_numpy(np.argsort(-values.ravel(), kind="stable").copy())
        for k in shares:
            mask = torch.zeros(values.size, dtype=torch.bool)
            mask[order[: max(1, round(k * graph.n_edges))]] = True
            masks.append(pruned(graph, mask.view(values.shape)))
    ends = [graph.exists, graph.exists & False]
    replace = scores.attrs["replacement"]
    whole, empty, *found = evaluate(
        model, prompts, graph, torch.stack(ends + masks), replace, metric, progress=progress
    )
    f = shares_left(np.array([v.mean() for v in found]), empty, whole, metric or prompts.metric)
    by_size, by_sign = f[: len(shares)], f[len(shares) :]
    counts = [int(mask.sum()) for mask in masks]
    return Curve(
        k=tuple(shares), abs=tuple(map(float, by_size)), signed=tuple(map(float, by_sign)),
        n_edges=(tuple(counts[: len(shares)]), tuple(counts[len(shares) :])),
        cpr=float(np.trapezoid(by_sign, shares)), cmd=float(np.trapezoid(np.abs(1 - by_size), shares)),
    )  # fmt: skip


def enough_edges(
    model: Model, prompts: Prompts, scores: xr.DataArray, least: float, *, by: str = "abs", metric: Metric | None = None,
    progress: Progress | None = None,
) -> Circuit:  # fmt: skip
    """The smallest circuit of best edges that is as faithful as `least`, over sizes that grow by a quarter each time.

    Raises NotApplicable where none is, UsageError for a faithfulness that is not above 0.
    """
    check_least(least)
    n_edges = values_of(model, scores, by)[0].n_edges
    sizes = sorted({min(n_edges, int(1.25**i)) for i in range(1 + ceil(log(n_edges) / log(1.25)))})
    found = [top_edges(model, scores, n, by=by) for n in sizes]
    left = faithfulness(model, prompts, found, metric=metric, progress=progress)
    for circuit, f in zip(found, left, strict=True):
        if f >= least:
            return circuit
    raise NotApplicable(f"No circuit of these scores is as faithful as {least:g}; the best has {max(left):.2f}.")


def _without(graph: Graph, mask: Tensor, nodes: Iterable[int]) -> Tensor:
    """A mask without what some senders give."""
    mask = mask.clone()
    mask[list(nodes)] = False
    return mask


def _senders(graph: Graph, mask: Tensor) -> list[int]:
    return [i for i in mask.any(1).nonzero()[:, 0].tolist() if graph.senders[i].kind != "embed"]


@dataclass(frozen=True)
class Completeness:
    """`circuit`, `model`: f of the circuit and of the model without each random set of nodes; `gap`: the mean of their
    absolute difference, small where the circuit holds all that matters; `worst`: the largest."""

    circuit: tuple[float, ...]
    model: tuple[float, ...]
    gap: float
    worst: float


def completeness(
    model: Model, prompts: Prompts, circuit: Circuit, *, draws: int = 10, seed: int = 0, metric: Metric | None = None,
    progress: Progress | None = None,
) -> Completeness:  # fmt: skip
    """|f(C without K) - f(M without K)| for random sets K of the circuit's heads, MLPs and neurons (Wang et al. 2022).

    Each set's size is drawn evenly from 1 to all, then its nodes; all that these give is cut.
    """
    if draws < 1:
        raise UsageError(f"draws is {draws}; completeness takes at least one random set of nodes.")
    graph = circuit.graph(model)
    kept = graph.mask(circuit.edges)
    nodes, rng = _nodes(graph, kept), random.Random(seed)
    sets = [rng.sample(nodes, rng.randint(1, len(nodes))) for _ in range(draws)]
    masks = [_without(graph, m, s) for s in sets for m in (kept, graph.exists)]
    ends = [graph.exists, graph.exists & False]
    found = evaluate(model, prompts, graph, torch.stack(ends + masks), circuit.replacement, metric, progress=progress)
    f = shares_left(found[2:].mean(1), found[1], found[0], metric or prompts.metric)
    gaps = np.abs(f[::2] - f[1::2])
    return Completeness(tuple(map(float, f[::2])), tuple(map(float, f[1::2])), float(gaps.mean()), float(gaps.max()))


def minimality(
    model: Model, prompts: Prompts, circuit: Circuit, *, draws: int = 3, seed: int = 0, metric: Metric | None = None,
    progress: Progress | None = None,
) -> dict[str, float]:  # fmt: skip
    """For each head, MLP and neuron of the circuit the largest |f(C without K and v) - f(C without K)| over the empty set K
    and `draws` random ones (the same for all nodes, sizes as in `completeness`): near 0, it is idle (Wang et al. 2022).

    (1 + draws) × (1 + nodes) circuits; sorted, the idlest last.
    """
    if draws < 0:
        raise UsageError(f"draws is {draws}; minimality takes 0 random sets of nodes (only the empty one) or more.")
    graph = circuit.graph(model)
    kept = graph.mask(circuit.edges)
    nodes, rng = _nodes(graph, kept), random.Random(seed)
    sets: list[list[int]] = [[], *(rng.sample(nodes, rng.randint(1, len(nodes))) for _ in range(draws))]
    masks = [_without(graph, kept, [*chosen, *more]) for chosen in sets for more in [[], *([v] for v in nodes)]]
    ends = [graph.exists, graph.exists & False]
    found = evaluate(model, prompts, graph, torch.stack(ends + masks), circuit.replacement, metric, progress=progress)
    f = shares_left(found[2:].mean(1), found[1], found[0], metric or prompts.metric).reshape(len(sets), -1)
    changes = np.abs(f[:, 1:] - f[:, :1]).max(0)
    rows = {graph.senders[v].name: float(c) for v, c in zip(nodes, changes, strict=True)}
    return dict(sorted(rows.items(), key=lambda row: -row[1]))


def _nodes(graph: Graph, kept: Tensor) -> list[int]:
    nodes = _senders(graph, kept)
    if not nodes:
        raise UsageError("The circuit has no head, MLP or neuron that gives anything.")
    return nodes


def edge_auroc(scores: xr.DataArray, truth: Iterable[str] | xr.DataArray, *, by: str = "abs") -> float:
    """How well scores tell the edges of a known circuit from the others: the probability that one of them stands higher,
    ties half. `truth`: the names of its edges, or a boolean array of the same dims."""
    check_scores(scores, by)
    values = np.abs(scores.values) if by == "abs" else scores.values
    if hasattr(truth, "dims"):
        known = np.asarray(truth.values, dtype=bool)  # type: ignore[union-attr]
    else:
        known = np.zeros(values.shape, dtype=bool)
        senders, receivers = list(scores["sender"].values), list(scores["receiver"].values)
        for name in truth:
            source, _, target = str(name).partition("->")
            if source not in senders or target not in receivers:
                raise UsageError(f"The scores have no edge {name}.")
            known[senders.index(source), receivers.index(target)] = True
    return auroc(values, known)


__all__ = ["Completeness", "Curve", "completeness", "curve", "edge_auroc", "enough_edges", "faithfulness", "minimality"]
