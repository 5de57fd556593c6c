"""A sweep as data: the same prompts, sets of edits, a metric; and how one chunk of it is run."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headscope.core.errors import UsageError
from headscope.core.scores import make
from headscope.draw import version
from headscope.model import Model
from headscope.sweep.metrics import Metric, measure, name_of
from headscope.sweep.plan import Chunk, Plan, affordable_tokens, make_plan
from headscope.trace import Edit
from headscope.trace.hooks import active
from headscope.trace.replay import Clean, check_sets, record, run_sets

if TYPE_CHECKING:
    import xarray as xr


@dataclass(eq=False)
class Job:
    """`positions` [prompt, m]: where the logits are measured. Edits have their values, not sources."""

    model: Model
    prompts: Any
    positions: Tensor
    sets: list[list[Edit]]
    metric: Metric

    @cached_property
    def clean(self) -> Clean:
        """The clean pass, run once."""
        found = record(self.model, self.prompts, self.positions)
        check_sets(found, self.sets)
        # inside an `edited` block, its edits must find the rows and positions of the prompts in every pass
        return replace(found, keys=None) if active(self.model) else found

    def plan(self) -> Plan:
        """Chunks that this machine's memory can hold. A wrong name of a metric fails here, before anything is written."""
        if isinstance(self.metric, str):
            measure(self.metric, self.clean.logits, self.prompts, self.clean.logits)
        tokens = 1 if active(self.model) else affordable_tokens(self.model, self.clean)
        return make_plan(self.model, self.clean, self.sets, self.positions, chunk_tokens=tokens)

    def run(self, chunk: Chunk) -> Tensor:
        """[set, prompt] values of one chunk; in halves where the device runs out of memory."""
        try:
            logits = run_sets(
                self.model, self.clean, [self.sets[i] for i in chunk.sets], self.positions,
                layers=list(chunk.layers), column=chunk.column,
            )  # fmt: skip
            rows = [measure(self.metric, found, self.prompts, self.clean.logits) for found in logits]
            return torch.stack(rows).double().cpu()
        except torch.OutOfMemoryError:
            if len(chunk.sets) == 1:
                raise
        middle = len(chunk.sets) // 2
        halves = [
            Chunk(chunk.sets[part], chunk.layers[part], chunk.column) for part in (slice(middle), slice(middle, None))
        ]
        return torch.cat([self.run(half) for half in halves])

    @property
    def metric_name(self) -> str:
        """The metric's name, that of a function with its module."""
        if isinstance(self.metric, str):
            return self.metric
        return f"{getattr(self.metric, '__module__', '')}.{getattr(self.metric, '__qualname__', repr(self.metric))}"

    def digest(self) -> str:
        """Hash of all that decides the values: model, prompts, edits, metric."""
        digest = hashlib.sha256()

        def add(value: Any) -> None:
            if isinstance(value, Tensor):
                value = value.detach().cpu().contiguous()
                digest.update(str((value.dtype, tuple(value.shape))).encode())
                digest.update(
                    value.view(torch.uint8).numpy().tobytes() if value.numel() and value.ndim else repr(value).encode()
                )
            else:
                digest.update(json.dumps(value, default=str).encode())

        add([self.model.fingerprint, str(self.model.dtype), self.metric_name])
        for part in ("tokens", "mask", "target", "foil"):
            add(getattr(self.prompts, part, None) if not isinstance(self.prompts, Tensor) else self.prompts)
        add(self.positions)
        for i, chosen in enumerate(self.sets):
            for e in chosen:
                add([i, e.op, [str(c) for c in e.components], e.positions, e.rows, e.part, e.edges])
                add(e.value)
        return digest.hexdigest()

    @property
    def names(self) -> list[str]:
        """Each set of edits in words."""
        return [" + ".join(map(str, chosen)) or "clean" for chosen in self.sets]

    @property
    def components(self) -> list[str]:
        """The one component that a set changes in every prompt and position; nothing for other sets."""
        found = []
        for chosen in self.sets:
            edit = chosen[0] if len(chosen) == 1 else None
            whole = edit is not None and len(edit.components) == 1 and edit.positions is None and edit.rows is None
            found.append(str(edit.components[0]) if edit is not None and whole else "")
        return found

    def origin(self) -> dict[str, Any]:
        """Where the values come from."""
        task = {} if isinstance(self.prompts, Tensor) else {"task": self.prompts.name, "seed": self.prompts.seed}
        return {
            "method": "sweep", "metric": name_of(self.metric), **task, "model": self.model.name, "fingerprint": self.model.fingerprint,
            "version": version(),
        }  # fmt: skip

    def result(self, values: Tensor) -> xr.DataArray:
        """Values [set, prompt] with what they are of."""
        clean = measure(self.metric, self.clean.logits, self.prompts, self.clean.logits).detach().double().cpu()
        return labelled(values, self.names, self.components, clean, self.origin())


def labelled(values: Any, names: list[str], components: list[str], clean: Any, origin: dict[str, Any]) -> xr.DataArray:
    """A sweep's values as an array: dims (edit, prompt), coordinates edit, component and clean."""
    found = make(values, ("edit", "prompt"), **origin)
    return found.assign_coords(edit=names, component=("edit", components), clean=("prompt", clean.tolist()))


def check_metric(metric: Metric | None, prompts: Any) -> Metric:
    """The metric, or the task's own. Raises UsageError where token ids come without a function of the logits."""
    if isinstance(prompts, Tensor) and not callable(metric):
        raise UsageError("Token ids alone have no targets; give a metric that is a function of the logits.")
    return metric or prompts.metric
