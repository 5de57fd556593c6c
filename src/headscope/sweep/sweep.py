"""Run the same prompts under many edits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headscope.core.component import Component
from headscope.core.errors import UsageError
from headscope.core.scores import make
from headscope.model import Model
from headscope.sweep.metrics import Metric, measure
from headscope.trace import Edit, resolve, trace
from headscope.trace.replay import first_layer, record, skipping

if TYPE_CHECKING:
    import xarray as xr

    from headscope.tasks import Prompts


@dataclass(frozen=True)
class EachHead:
    """One edit a head, made by `edit(component)` once the model is known."""

    edit: Callable[[Component], Edit]

    def of(self, model: Model) -> list[Edit]:
        """The edits, layer by layer."""
        return [self.edit(component) for component in model.heads()]


def each_head(edit: Callable[[Component], Edit]) -> EachHead:
    """One edit for every attention head: `sweep(model, prompts, each_head(zero))`."""
    return EachHead(edit)


def clean(model: Model, prompts: Prompts, metric: Metric | None = None) -> Tensor:
    """[prompt] values of the metric without any edit."""
    return _one(model, prompts, [], metric or prompts.metric)


def sweep(
    model: Model,
    prompts: Prompts | Tensor,
    edits: EachHead | Edit | Iterable[Edit | Iterable[Edit]],
    metric: Metric | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> xr.DataArray:
    """The metric under each edit (or set of edits): dims (edit, prompt), coordinate `edit` in words.

    `prompts`: Prompts of a task, or token ids [batch, pos] with a metric that is a function of the logits at the last
    position. `metric` defaults to the task's. `progress(done, total)` is called after every edit. Layers below the
    lowest edited one run once for all edits.
    """
    if isinstance(edits, EachHead):
        edits = edits.of(model)
    sets = [_set(item) for item in ([edits] if isinstance(edits, Edit) else edits)]
    if not sets:
        raise UsageError("sweep was given no edits.")
    sets = [resolve(model, chosen) for chosen in sets]
    recorded = record(model, prompts) if len(sets) > 1 else []
    rows = []
    for done, chosen in enumerate(sets, 1):
        with skipping(model, recorded, first_layer(model, chosen) if recorded else 0):
            rows.append(_one(model, prompts, chosen, metric))
        if progress is not None:
            progress(done, len(sets))
    names = [" + ".join(map(str, chosen)) or "clean" for chosen in sets]
    name = metric if isinstance(metric, str) else getattr(metric, "__name__", None) or getattr(prompts, "metric", "")
    result = make(torch.stack(rows), ("edit", "prompt"), metric=str(name))
    return result.assign_coords(edit=names)


def _set(item: Edit | Iterable[Edit]) -> list[Edit]:
    chosen = list(item) if isinstance(item, Iterable) and not isinstance(item, str) else [item]
    for edit in chosen:
        if not isinstance(edit, Edit):
            raise UsageError(f"{edit!r} is not an edit; write for example zero('L5H3').")
    return chosen


def _one(model: Model, prompts: Any, edits: list[Edit], metric: Metric | None) -> Tensor:
    if isinstance(prompts, Tensor):
        if not callable(metric):
            raise UsageError("Token ids alone have no targets; give a metric that is a function of the logits.")
        run = trace(model, prompts, edits=edits, logits="last")
        return measure(metric, run.logits, prompts)  # type: ignore[arg-type]
    run = trace(model, prompts, edits=edits, logits=prompts.positions)
    return measure(metric or prompts.metric, run.logits, prompts).detach()  # type: ignore[arg-type]
