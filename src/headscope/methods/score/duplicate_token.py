"""Heads that look at earlier copies of the present token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headscope.core.scores import make
from headscope.methods.base import Check, Info, ScoreMethod
from headscope.tasks import make as make_task
from headscope.trace import Capture, trace

if TYPE_CHECKING:
    import xarray as xr

    from headscope.model import Model


@dataclass(frozen=True)
class DuplicateToken(ScoreMethod):
    """Attention to earlier copies of the present token.

    What it measures: how much of its attention a head puts on earlier occurrences of the token it stands on.

    Formula: mean over the positions i of the repeats of a random block of Σ_j pattern[i, j] over all j < i with the
    same token (the sum over copies, not the largest).

    Options: n, the number of rows; length, the tokens of a block; repeats.

    Does not show: what the head does with the copy; induction heads look one position further on.

    Cost: one forward pass over n × length × repeats tokens; no pattern is kept.

    Paper and differences: Wang et al. 2022 (indirect object identification), on repeated random tokens.
    """

    info = Info(
        title="Duplicate-token heads",
        papers=("arXiv:2211.00593",),
        claim="At least one head puts much of its attention on earlier copies while the median head puts almost none.",
        higher_means="more attention on earlier copies of the token",
        cost="1 forward pass",
        needs=("pattern", "tokens"),
        quick=True,
        values_in=(0.0, 1.0),
    )

    n: int = 8
    length: int = 25
    repeats: int = 2

    def score(self, model: Model, *, seed: int = 0) -> xr.DataArray:
        prompts = make_task("repeated-tokens", model, self.n, seed, length=self.length, repeats=self.repeats)
        first, length = prompts.meta["start"] + self.length, self.length

        def on_copies(pattern, layer):  # type: ignore[no-untyped-def]
            total = sum(pattern.diagonal(-length * r, 2, 3)[..., -(self.repeats - r) * length :].sum(2)
                        for r in range(1, self.repeats))  # fmt: skip
            return (total / (pattern.shape[2] - first)).mean(0)  # [head]

        return make(trace(model, prompts, Capture("pattern", reduce=on_copies), logits=None)["pattern"])

    def check(self, model: Model, *, seed: int = 0) -> Check:
        values = self.score(model, seed=seed)
        figures = {"max": float(values.max()), "median": float(values.median())}
        return Check(figures["max"] > 0.3 and figures["median"] < 0.1, figures, "shown if max > 0.3 and median < 0.1")
