"""Heads that look at the token just before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headscope.core.errors import UsageError
from headscope.core.scores import make
from headscope.methods.base import Check, Info, ScoreMethod
from headscope.tasks.repeated_tokens import random_rows
from headscope.trace import Capture, trace

if TYPE_CHECKING:
    import xarray as xr

    from headscope.model import Model


@dataclass(frozen=True)
class PreviousToken(ScoreMethod):
    """Attention to the token just before.

    What it measures: how much of its attention a head puts on the previous position.

    Formula: mean over rows and positions i of pattern[i, i - offset], on random tokens, where no word can be the reason.
    Position 0 is left out as a source, since it is where unused attention rests.

    Options: n, the number of random rows; length, their tokens; offset, 1 for the previous token.

    Does not show: that the head carries the previous token's content anywhere; `verify` tests what removing it does.

    Cost: one forward pass over n × length tokens; no pattern is kept.

    Paper and differences: Elhage et al. 2021, Olsson et al. 2022, who use natural text; random tokens rule out
    heads that are only local.
    """

    info = Info(
        title="Previous-token heads",
        papers=("arXiv:2209.11895",),
        claim="At least one head puts most of its attention on the previous token while the median head puts almost none.",
        higher_means="more attention on the previous token",
        cost="1 forward pass",
        needs=("pattern", "tokens"),
        quick=True,
        values_in=(0.0, 1.0),
    )

    n: int = 8
    length: int = 50
    offset: int = 1

    def score(self, model: Model, *, seed: int = 0) -> xr.DataArray:
        if abs(self.offset) > self.length - 2:
            raise UsageError(f"offset is {self.offset}; rows of {self.length} tokens take at most {self.length - 2}.")
        tokens = random_rows(model, self.n, seed, self.length)
        k = self.offset

        def mean_at_offset(pattern, layer):  # type: ignore[no-untyped-def]
            return pattern.diagonal(-k, 2, 3)[..., 1:].mean((0, 2))  # [batch head query key] → [head]

        return make(trace(model, tokens, Capture("pattern", reduce=mean_at_offset), logits=None)["pattern"])

    def check(self, model: Model, *, seed: int = 0) -> Check:
        values = self.score(model, seed=seed)
        figures = {"max": float(values.max()), "median": float(values.median())}
        return Check(figures["max"] > 0.5 and figures["median"] < 0.1, figures, "shown if max > 0.5 and median < 0.1")
