"""Path patching: what a sender tells some receivers directly, or with the MLPs in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from headscope.circuits.run import Progress, clean_logits, evaluate, row_bytes, rows_of, sign
from headscope.core.component import Component
from headscope.core.errors import UsageError, nearest
from headscope.core.scores import make
from headscope.model import Model
from headscope.model.graph import Graph, graph_of
from headscope.sweep import clean, finite, measure
from headscope.sweep.metrics import Metric, name_of
from headscope.sweep.patching import corrupted
from headscope.tasks import Prompts
from headscope.trace.senders import written
from headscope.trace.wiring import rewired

if TYPE_CHECKING:
    import xarray as xr

MLPS = ("frozen", "recomputed")
#: a pass keeps what every sender writes twice over
BYTES = 2**28


def path_patching(
    model: Model,
    prompts: Prompts,
    senders: str | Component | Sequence[str | Component],
    receivers: str | Component | Sequence[str | Component],
    *,
    mlps: str = "frozen",
    metric: Metric | None = None,
    progress: Progress | None = None,
) -> xr.DataArray:
    """What the metric loses when receivers are told by a sender what it says in the corrupted twin; dims (sender, prompt).

    `senders`: such as `L3H2`, `L5MLP`, `E`, each on its own. `receivers`: such as `L5H1.q`, `L5KV0.v`, `L7MLP`, `logits`,
    all together. `mlps`: "frozen", only the direct edges; "recomputed", MLPs between pass on what changes while all heads
    keep what they say in the clean run (two passes a sender). Wang et al. 2022; Goldowsky-Dill et al. 2023.

    Raises UsageError for a node that is not there, or a sender that is written after all receivers read.
    """
    if mlps not in MLPS:
        raise UsageError(f"mlps is {mlps!r}; it takes frozen or recomputed.{nearest(mlps, MLPS)}")
    metric = metric or prompts.metric
    graph = graph_of(model)
    sources, targets = _numbers(senders, graph.sender), _numbers(receivers, graph.receiver)
    told = [graph.receivers[r].name for r in targets]
    for s in sources:
        if not bool(graph.exists[s, targets].any()):
            raise UsageError(f"{graph.senders[s].name} is written after {', '.join(told)} read.")
    if mlps == "frozen":
        kept = graph.exists.repeat(len(sources), 1, 1)
        for i, s in enumerate(sources):
            kept[i, s, targets] = False
        values = evaluate(model, prompts, graph, kept, "patch", metric, progress=progress)
    else:
        values = _recomputed(model, prompts, graph, sources, targets, metric, progress)
    base = np.zeros(len(prompts)) if metric == "kl" else clean(model, prompts, metric).double().cpu().numpy()
    made = make(
        sign(metric) * (base - values), ("sender", "prompt"), method="path-patching", task=prompts.name, mlps=mlps,
        metric=name_of(metric), receivers=told,
    )  # fmt: skip
    return made.assign_coords(sender=[graph.senders[s].name for s in sources])


def _numbers(nodes: str | Component | Sequence[str | Component], known: Mapping[str, int]) -> list[int]:
    names = [str(node) for node in ([nodes] if isinstance(nodes, str | Component) else nodes)]
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"There is no node {unknown[0]!r} in this graph.{nearest(unknown[0], known)}")
    if not names:
        raise UsageError("Path patching takes at least one sender and one receiver.")
    return [known[name] for name in names]


def _recomputed(
    model: Model, prompts: Prompts, graph: Graph, sources: list[int], targets: list[int], metric: Metric,
    progress: Progress | None,
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:  # fmt: skip
    found = np.empty((len(sources), len(prompts)))
    heads = [i for i, node in enumerate(graph.senders) if node.kind == "head"]
    into = torch.zeros_like(graph.exists)
    into[:, targets] = True
    for rows, part in rows_of(prompts, max(1, BYTES // row_bytes(model, graph, prompts))):
        here, there = written(model, part, graph), written(model, corrupted(part), graph)
        at = clean_logits(model, part, metric)
        for i, s in enumerate(sources):
            said = here.clone()
            said[s] = there[s]
            said = _with_mlps(model, part, graph, said, [*heads, s])
            logits, _ = rewired(model, part, graph, into[None], said, part.positions)
            found[i, rows] = measure(metric, finite(logits[0], part.name), part, at).double().cpu().numpy()
            if progress is not None:
                progress(i + 1, len(sources))
    return found


def _with_mlps(model: Model, prompts: Prompts, graph: Graph, said: Tensor, fixed: list[int]) -> Tensor:
    """What is said when the senders `fixed` keep to it and the others are computed from there."""
    cut = torch.zeros_like(graph.exists)
    cut[fixed] = True
    _, given = rewired(model, prompts, graph, cut[None], said, prompts.positions, keep=True)
    assert given is not None  # asked for
    computed = given[0]
    computed[fixed] = said[fixed]
    return computed


__all__ = ["path_patching"]
