"""Heads that rest on the first token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headscope.core.errors import NotApplicable, UsageError
from headscope.core.scores import agree, make
from headscope.methods.base import Check, Info, ScoreMethod
from headscope.tasks import make as make_task
from headscope.trace import Capture, trace

if TYPE_CHECKING:
    import xarray as xr

    from headscope.model import Model


@dataclass(frozen=True)
class BosSink(ScoreMethod):
    """Attention that rests on the first token.

    What it measures: how much of its attention a head puts on position 0 (the BOS, or the first word where the
    tokenizer adds none).

    Formula: mean over rows and positions i ≥ skip of pattern[i, 0].

    Options: n rows of length tokens of plain text; skip, the first positions, where the mass is trivially high.

    Does not show: that the head does nothing; a head may rest on most tokens and matter on a few. `verify` tests
    whether removing the heads is harmless.

    Cost: one forward pass over n × length tokens; no pattern is kept.

    Paper and differences: Sok et al. 2026 average from position 0; here the first `skip` positions are left out.
    """

    info = Info(
        title="BOS-sink heads",
        papers=("Sok et al. 2026, Garbage attention: BOS sink heads",),
        claim="The ranking of heads by attention on the first token is stable over lengths (rank correlation > 0.9).",
        higher_means="more attention on position 0",
        cost="1 forward pass",
        needs=("causal", "pattern", "tokenizer"),
        quick=True,
        values_in=(0.0, 1.0),
    )

    n: int = 8
    length: int = 64
    skip: int = 8

    def score(self, model: Model, *, seed: int = 0) -> xr.DataArray:
        if not 0 <= self.skip < self.length:
            raise UsageError(f"skip is {self.skip}; rows of {self.length} tokens take 0 to {self.length - 1}.")
        prompts = make_task("plain-text", model, self.n, seed, length=self.length)

        def on_first(pattern, layer):  # type: ignore[no-untyped-def]
            return pattern[:, :, self.skip :, 0].mean((0, 2))  # [head]

        return make(trace(model, prompts, Capture("pattern", reduce=on_first), logits=None)["pattern"])

    def check(self, model: Model, *, seed: int = 0) -> Check:
        if len(model.heads()) < 3:
            raise NotApplicable(f"{model.name} has {len(model.heads())} heads, too few to compare rankings of them.")
        short = self.score(model, seed=seed)
        long = BosSink(n=2, length=4 * self.length).score(model, seed=seed + 1)
        figures = {
            "rank correlation of lengths": agree(short, long)["spearman"],
            "median": float(short.median()),
            "max": float(short.max()),
        }
        return Check(
            figures["rank correlation of lengths"] > 0.9, figures, f"{self.length} against {4 * self.length} tokens"
        )
