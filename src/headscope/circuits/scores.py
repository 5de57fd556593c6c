"""How much each edge helps a task: by gradients for all edges at once, or exactly, one edge at a time.

A score is what the metric loses, mean over the prompts, when the edge is cut: above 0 the edge helps the task (of loss,
rank and kl, less is better), below 0 it hurts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headscope.circuits.run import (
    PASS_BYTES,
    Progress,
    clean_logits,
    evaluate,
    mean_written,
    replacement,
    row_bytes,
    rows_of,
    sign,
)
from headscope.core.errors import UsageError
from headscope.core.scores import make
from headscope.model import Model
from headscope.model.graph import Graph, graph_of
from headscope.sweep import clean, finite, measure
from headscope.sweep.metrics import Metric, name_of
from headscope.tasks import Prompts
from headscope.trace.gradients import add_gradients
from headscope.trace.senders import written

if TYPE_CHECKING:
    import xarray as xr

#: longest that `exact` may take, seconds
PATIENCE = 3600.0
#: edges whose passes are timed first
TRIAL = 32


def eap(
    model: Model,
    prompts: Prompts,
    *,
    replace: str = "patch",
    metric: Metric | None = None,
    neurons: Sequence[str] = (),
    progress: Progress | None = None,
) -> xr.DataArray:
    """Edge attribution patching: (z_clean - z_replaced) · ∂m/∂(what the receiver reads) in the clean run.

    Dims (sender, receiver), coordinates their names, NaN where there is no edge. Two forward passes and one backward. It
    misses saturated attention and what cancels. Syed, Rager & Conmy 2023.

    Raises UsageError for a task without corrupted twins, a metric without a gradient, or kl, whose gradient is 0 in the clean
    run; NotApplicable for models that are no decoders, and for logits that are not finite.
    """
    if (metric or prompts.metric) == "kl":
        raise UsageError(
            "The gradient of kl is 0 in the clean run, so that eap finds nothing; take eap_ig, exact or acdc."
        )
    return _by_gradients(model, prompts, "eap", [1.0], replace, metric, neurons, progress)


def eap_ig(
    model: Model,
    prompts: Prompts,
    *,
    steps: int = 5,
    replace: str = "patch",
    metric: Metric | None = None,
    neurons: Sequence[str] = (),
    progress: Progress | None = None,
) -> xr.DataArray:
    """Edge attribution patching with integrated gradients over the inputs: as `eap`, but with the mean gradient over runs
    whose embeddings are corrupted + k/steps (clean - corrupted), k = 0 … steps - 1.

    With replace="mean" the way starts at the mean embedding. Hanna, Pezzelle & Belinkov 2024.

    Raises as `eap`, and UsageError for no steps or replace="zero", from which there is no way to a prompt.
    """
    if steps < 1:
        raise UsageError(f"steps is {steps}; integrated gradients take at least one.")
    check_way(replace)
    along = [k / steps for k in range(steps)]
    return _by_gradients(model, prompts, "eap-ig", along, replace, metric, neurons, progress, steps=steps)


def check_way(replace: str) -> None:
    """Raise UsageError for a replacement from which no way leads to a prompt."""
    if replace == "zero":
        raise UsageError(
            "Integrated gradients go from other embeddings to the prompt's; take replace='patch' or 'mean'."
        )


def _by_gradients(
    model: Model, prompts: Prompts, method: str, along: list[float], replace: str, metric: Metric | None,
    neurons: Sequence[str], progress: Progress | None, **attrs: Any,
) -> xr.DataArray:  # fmt: skip
    metric = metric or prompts.metric
    graph = graph_of(model, neurons)
    groups = list(graph.groups.values())
    before = [int(graph.exists[:, found[0]].sum()) for found in groups]
    dtype = model.dtype if model.dtype.itemsize >= 4 else torch.float32
    total = torch.zeros(graph.exists.shape, dtype=torch.float64)
    means = mean_written(model, prompts, graph) if replace == "mean" else None
    each = row_bytes(model, graph, prompts) * (2 * len(graph.senders) + len(graph.receivers)) // len(graph.senders)
    parts = list(rows_of(prompts, max(1, PASS_BYTES // each)))
    for number, (_, part) in enumerate(parts):
        stands = replacement(model, part, graph, replace, means)
        moved = written(model, part, graph)
        # a copy: the senders' parts are about to become differences
        here = moved[0].clone()
        there = here if stands is None else stands[0].expand_as(here).clone()
        moved = moved if stands is None else moved.sub_(stands)
        if part.mask is not None:
            moved[:, ~part.mask.to(moved.device)] = 0.0
        clean_at = clean_logits(model, part, metric)
        gradient = torch.zeros(len(graph.receivers), *moved.shape[1:], dtype=dtype, device=model.device)
        for k, share in enumerate(along):
            start = None if share == 1.0 else there + share * (here - there)
            add_gradients(
                gradient, model, part, graph, part.positions,
                lambda logits, part=part, clean_at=clean_at: measure(  # type: ignore[misc]
                    metric, finite(logits, part.name), part, clean_at
                ),
                start=start, weight=1 / len(along),
            )  # fmt: skip
            if progress is not None:
                progress(number * len(along) + k + 1, len(parts) * len(along))
        for found, n in zip(groups, before, strict=True):
            product = moved[:n].flatten(1).to(dtype) @ gradient[found[0] : found[-1] + 1].flatten(1).T
            total[:n, found[0] : found[-1] + 1] += product.double().cpu()
    values = sign(metric) * total / len(prompts)
    return _scores(model, graph, values.numpy(), prompts, method, replace, metric, **attrs)


def exact(
    model: Model,
    prompts: Prompts,
    *,
    edges: Iterable[str] | None = None,
    replace: str = "patch",
    metric: Metric | None = None,
    neurons: Sequence[str] = (),
    progress: Progress | None = None,
) -> xr.DataArray:
    """What the metric loses when one edge is cut, for each of `edges` (all by default): one pass an edge.

    Dims as `eap`, NaN where nothing was cut. For small models: raises UsageError where it would take more than an hour. Of a
    large one give some edges, such as the best of another method, to see how far that can be trusted.
    """
    metric = metric or prompts.metric
    graph = graph_of(model, neurons)
    chosen = graph.exists if edges is None else graph.mask(edges)
    places = chosen.nonzero().numpy()
    if not len(places):
        raise UsageError("exact was given no edges to cut.")
    base = np.zeros(len(prompts)) if metric == "kl" else clean(model, prompts, metric).double().cpu().numpy()
    found = np.full(graph.exists.shape, np.nan)
    start, step = time.monotonic(), TRIAL
    for at in range(0, len(places), step):
        some = places[at : at + step]
        kept = graph.exists.repeat(len(some), 1, 1)
        kept[range(len(some)), some[:, 0], some[:, 1]] = False
        values = evaluate(model, prompts, graph, kept, replace, metric)
        found[some[:, 0], some[:, 1]] = sign(metric) * (base - values).mean(1)
        if at == 0:
            check_time((time.monotonic() - start) / len(some), len(places))
        if progress is not None:
            progress(min(at + step, len(places)), len(places))
    return _scores(model, graph, found, prompts, "exact", replace, metric)


def check_time(seconds: float, n_edges: int) -> None:
    """Raise UsageError where cutting all edges at so many seconds each would take too long."""
    if seconds * n_edges > PATIENCE:
        raise UsageError(
            f"Cutting each of {n_edges:,} edges would take about {seconds * n_edges / 3600:.1f} hours here, which is for "
            "small models; take the estimate eap-ig (in Python eap_ig, whose best edges exact cuts alone by edges=…)."
        )


def _scores(
    model: Model, graph: Graph, values: Any, prompts: Prompts, method: str, replace: str, metric: Metric, **attrs: Any
) -> xr.DataArray:
    values = np.where(graph.exists.numpy(), values, np.nan)
    made = make(
        values, ("sender", "receiver"), method=method, model=model.name, fingerprint=model.fingerprint, task=prompts.name,
        metric=name_of(metric), seed=prompts.seed,
        replacement=replace, neurons=list(graph.neurons), n_prompts=len(prompts), higher_means="helps the task", **attrs,
    )  # fmt: skip
    return made.assign_coords(
        sender=[node.name for node in graph.senders], receiver=[node.name for node in graph.receivers]
    )


__all__ = ["eap", "eap_ig", "exact"]
