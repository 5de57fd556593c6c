"""Run the same prompts under many edits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headscope.core.component import Component
from headscope.core.errors import UsageError, nearest
from headscope.model import Model
from headscope.sweep.folder import RunFolder
from headscope.sweep.job import Job, check_metric
from headscope.sweep.metrics import Metric, finite, measure
from headscope.sweep.plan import Chunk
from headscope.trace import Edit, resolve, trace
from headscope.trace.hooks import active

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
    """[prompt] values of the metric without any edit. Raises NotApplicable for logits that are not finite."""
    run = trace(model, prompts, logits=prompts.positions)
    return measure(metric or prompts.metric, finite(run.logits, prompts.name), prompts).detach()


def sweep(
    model: Model,
    prompts: Prompts | Tensor,
    edits: EachHead | Edit | Iterable[Edit | Iterable[Edit]],
    metric: Metric | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    engine: str = "local",
    progress: Callable[[int, int], None] | None = None,
) -> xr.DataArray:
    """The metric under each edit (or set of edits): dims (edit, prompt), coordinates `edit` in words, `component` where an
    edit changes one as a whole, `clean` the metric of each prompt without edits.

    `prompts`: Prompts of a task, or token ids [batch, pos] with a metric that is a function of the logits at the last
    position. `metric` defaults to the task's. `out`: a folder that finished chunks are written to, so that a sweep that
    was stopped goes on with `resume=True` and gives the same values. `engine`: local, or ray. `progress(done, total)` is
    called after every chunk of edits.

    The values are those of one pass an edit, but layers below the edited one and positions before it are run once, and
    edits go through a pass together (see `plan`). Raises UsageError for what is no edit, no metric or no engine.
    """
    if active(model) and (out is not None or engine != "local"):
        raise UsageError(
            "Inside an edited() block a sweep runs locally, without a folder; put the edits into each set."
        )
    if engine not in ("local", "ray"):
        raise UsageError(f"There is no engine {engine!r}.{nearest(engine, ['local', 'ray'])}")
    job = make_job(model, prompts, edits, metric)
    folder = None if out is None else RunFolder(out)
    plan = job.plan() if folder is None else folder.begin(job, resume=resume)
    n_prompts = len(job.positions)
    values = torch.full((len(job.sets), n_prompts), float("nan"), dtype=torch.float64)
    todo = []
    done = 0
    for number, chunk in enumerate(plan.chunks):
        kept = None if folder is None else folder.read(number, (len(chunk.sets), n_prompts))
        if kept is None:
            todo.append((number, chunk))
        else:
            values[list(chunk.sets)] = kept
            done += len(chunk.sets)
    for number, found in _results(job, todo, engine):
        chunk = plan.chunks[number]
        if folder is not None:
            folder.write(number, found)
        values[list(chunk.sets)] = found
        done += len(chunk.sets)
        if progress is not None:
            progress(done, len(job.sets))
    result = job.result(values)
    if folder is not None:
        folder.finish(result)
    return result


def make_job(
    model: Model,
    prompts: Prompts | Tensor,
    edits: EachHead | Edit | Iterable[Edit | Iterable[Edit]],
    metric: Metric | None = None,
) -> Job:
    """What `sweep` would run, as data; `job.plan()` says what it costs."""
    if isinstance(edits, EachHead):
        edits = edits.of(model)
    sets = [_set(item) for item in ([edits] if isinstance(edits, Edit) else edits)]
    if not sets:
        raise UsageError("sweep was given no edits.")
    metric = check_metric(metric, prompts)
    if isinstance(prompts, Tensor):
        prompts, _ = model.tokens(prompts)
        positions = torch.full((len(prompts), 1), prompts.shape[1] - 1)
    else:
        positions = prompts.positions
    return Job(model, prompts, positions, [resolve(model, chosen) for chosen in sets], metric)


def _results(job: Job, todo: list[tuple[int, Chunk]], engine: str) -> Iterator[tuple[int, Tensor]]:
    if engine == "local":
        for number, chunk in todo:
            yield number, job.run(chunk)
    elif todo:
        from headscope.sweep.ray_engine import run_chunks

        yield from run_chunks(job, todo)


def _set(item: Edit | Iterable[Edit]) -> list[Edit]:
    chosen = list(item) if isinstance(item, Iterable) and not isinstance(item, str) else [item]
    for edit in chosen:
        if not isinstance(edit, Edit):
            raise UsageError(f"{edit!r} is not an edit; write for example zero('L5H3').")
    return chosen
