"""ACDC: cut edges one after the other, from the logits backwards, and leave cut what is not missed."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from headscope.circuits.circuit import Circuit, circuit_of
from headscope.circuits.run import Progress, evaluate, sign
from headscope.circuits.scores import check_time
from headscope.core.errors import UsageError
from headscope.model import Model
from headscope.model.graph import Graph, graph_of
from headscope.sweep.metrics import Metric, name_of
from headscope.tasks import Prompts

#: edges that are cut one after the other in one call; one that is missed ends the chain
CHAIN = 32


def acdc(
    model: Model,
    prompts: Prompts,
    *,
    tau: float = 0.01,
    metric: Metric = "kl",
    replace: str = "patch",
    neurons: Sequence[str] = (),
    progress: Progress | None = None,
) -> Circuit:
    """The circuit that is left when every edge is cut whose cut makes the metric worse by less than `tau`.

    Receivers are visited from the logits backwards, the latest sender first; what is cut stays cut, so that the result
    depends on this order. By default the metric is the KL divergence from the whole model. About one pass an edge: for small
    models. Conmy et al. 2023; there edges are visited in the same order.

    Raises UsageError where it would take more than an hour.
    """
    check_tau(tau)
    graph = graph_of(model, neurons)
    kept = graph.exists.clone()
    readers = {r: [s for s, inputs in enumerate(graph.inputs) if r in inputs] for r in range(len(graph.receivers))}
    start, worst = time.monotonic(), sign(metric)
    last = float(evaluate(model, prompts, graph, kept[None], replace, metric).mean())
    runs, done, total = 1, 0, graph.n_edges
    for r in reversed(range(len(graph.receivers))):
        waiting = list(reversed(graph.exists[:, r].nonzero()[:, 0].tolist()))
        done += len(waiting)
        if readers[r] and not bool(kept[readers[r]].any()):  # nothing reads what reads here
            kept[:, r] = False
            continue
        while waiting:
            chain = waiting[:CHAIN]
            values = evaluate(model, prompts, graph, _cut_in_turn(graph, kept, r, chain), replace, metric).mean(1)
            runs += len(chain)
            drops = worst * (np.array([last, *values[:-1]]) - values)
            missed = np.flatnonzero(drops >= tau)
            n = int(missed[0]) if len(missed) else len(chain)
            kept[chain[:n], r] = False
            last = float(values[n - 1]) if n else last
            waiting = waiting[n + (n < len(chain)) :]
            if runs <= 2 * CHAIN:
                check_time((time.monotonic() - start) / runs, total)
        if progress is not None:
            progress(done, total)
    return circuit_of(
        model, kept, graph, task=prompts.name, metric=name_of(metric), method=f"acdc, tau {tau:g}", replacement=replace,
        seed=prompts.seed,
    )  # fmt: skip


def check_tau(tau: float) -> None:
    """Raise UsageError for what no loss can be below."""
    if not tau >= 0:
        raise UsageError(f"tau is {tau}; an edge is let go whose loss is below it, a number from 0.")


def _cut_in_turn(graph: Graph, kept: Tensor, receiver: int, senders: list[int]) -> Tensor:
    """[len(senders), sender, receiver]: the mask without the first edge, without the first two, …"""
    masks = kept.repeat(len(senders), 1, 1)
    for i, s in enumerate(senders):
        masks[i:, s, receiver] = False
    return masks


__all__ = ["acdc"]
