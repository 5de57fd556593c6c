"""Run the same prompts under many edits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headscope.core.component import Component
from headscope.core.errors import UsageError
from headscope.core.scores import make
from headscope.model import Model
from headscope.sweep.metrics import Metric, measure
from headscope.sweep.plan import make_plan
from headscope.trace import Edit, resolve, trace
from headscope.trace.replay import check_sets, record, run_sets

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
    run = trace(model, prompts, logits=prompts.positions)
    return measure(metric or prompts.metric, run.logits, prompts).detach()  # type: ignore[arg-type]


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
    position. `metric` defaults to the task's. `progress(done, total)` is called after every chunk of edits.

    The values are those of one pass an edit, but layers below the edited one and positions before it are run once, and
    edits go through a pass together (see `plan`). Raises UsageError for what is no edit or no metric.
    """
    if isinstance(edits, EachHead):
        edits = edits.of(model)
    sets = [_set(item) for item in ([edits] if isinstance(edits, Edit) else edits)]
    if not sets:
        raise UsageError("sweep was given no edits.")
    if isinstance(prompts, Tensor):
        if not callable(metric):
            raise UsageError("Token ids alone have no targets; give a metric that is a function of the logits.")
        tokens, _ = model.tokens(prompts)
        positions = torch.full((len(tokens), 1), tokens.shape[1] - 1)
    else:
        positions = prompts.positions
        metric = metric or prompts.metric
    sets = [resolve(model, chosen) for chosen in sets]
    before = record(model, prompts, positions)
    check_sets(before, sets)
    plan = make_plan(model, before, sets, positions)
    rows: list[Tensor | None] = [None] * len(sets)
    done = 0
    for chunk in plan.chunks:
        chosen = [sets[i] for i in chunk.sets]
        logits = run_sets(model, before, chosen, positions, layers=list(chunk.layers), column=chunk.column)
        for i, found in zip(chunk.sets, logits, strict=True):
            rows[i] = measure(metric, found, prompts, before.logits)
        done += len(chunk.sets)
        if progress is not None:
            progress(done, len(sets))
    names = [" + ".join(map(str, chosen)) or "clean" for chosen in sets]
    name = metric if isinstance(metric, str) else getattr(metric, "__name__", None) or getattr(prompts, "metric", "")
    result = make(torch.stack(rows), ("edit", "prompt"), metric=str(name))  # type: ignore[arg-type]
    return result.assign_coords(edit=names)


def _set(item: Edit | Iterable[Edit]) -> list[Edit]:
    chosen = list(item) if isinstance(item, Iterable) and not isinstance(item, str) else [item]
    for edit in chosen:
        if not isinstance(edit, Edit):
            raise UsageError(f"{edit!r} is not an edit; write for example zero('L5H3').")
    return chosen
