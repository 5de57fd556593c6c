"""What losing each head costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headscope.core.errors import UsageError
from headscope.core.scores import make
from headscope.methods.base import Check, Info, ScoreMethod
from headscope.sweep import clean, sweep
from headscope.tasks import make as make_task
from headscope.trace import Edit, mean, resample, trace, zero

if TYPE_CHECKING:
    import xarray as xr

    from headscope.model import Model


@dataclass(frozen=True)
class HeadAblation(ScoreMethod):
    """What losing one head costs.

    What it measures: the rise of a task's loss when one head's output is replaced, for every head.

    Formula: loss(z_h replaced) - loss(clean), mean over prompts; z_h becomes 0 (zero), its mean over the prompts'
    positions (mean), or its value in another prompt (resample). The interval is 1.96 standard errors over prompts.

    Options: mode; task and n, its prompts.

    Does not show: what heads do together: another head may stand in for the lost one.

    Cost: one forward pass a head.

    Paper and differences: Michel et al. 2019 measure task accuracy; here the loss, which moves before accuracy does.
    """

    info = Info(
        title="Ablation of each head",
        papers=("arXiv:1905.10650",),
        claim="Most heads can be lost alone: the median head's loss rise is under a tenth of the largest.",
        higher_means="losing the head costs more",
        cost="1 forward pass a head",
        needs=("logits", "causal", "tokens"),
    )

    mode: str = "zero"
    task: str = "repeated-tokens"
    n: int = 4

    def score(self, model: Model, *, seed: int = 0) -> xr.DataArray:
        if self.mode not in ("zero", "mean", "resample"):
            raise UsageError(f"mode is {self.mode!r}; it takes zero, mean or resample.")
        prompts = make_task(self.task, model, self.n, seed)
        source = None if self.mode == "zero" else trace(model, prompts, ["z"], logits=None)
        edits: list[Edit] = []
        for component in model.heads():
            if self.mode == "zero":
                edits.append(zero(component))
            else:
                edits.append(mean(component, source) if self.mode == "mean" else resample(component, source, seed))
        rise = sweep(model, prompts, edits, "loss").values - clean(model, prompts, "loss").cpu().numpy()
        shape = (model.anatomy.n_layers, model.anatomy.n_heads)
        centre = rise.mean(1).reshape(shape)
        error = (1.96 * rise.std(1, ddof=1) / np.sqrt(rise.shape[1])).reshape(shape) if self.n > 1 else np.nan
        return make(centre, ci_low=centre - error, ci_high=centre + error, n=np.array(float(rise.shape[1])))

    def tokens(self, model: Model) -> int:
        return len(model.heads()) * make_task(self.task, model, self.n, 0).tokens.numel()

    def check(self, model: Model, *, seed: int = 0) -> Check:
        values = self.score(model, seed=seed)
        figures = {"median": float(values.median()), "max": float(values.max())}
        return Check(
            figures["max"] > 0 and figures["median"] < 0.1 * figures["max"],
            figures,
            "shown if some head costs something, and the median is under a tenth of the largest",
        )
