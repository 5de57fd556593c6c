"""Heads that look up what followed the last time, and copy it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headscope.core.errors import NotApplicable, UsageError
from headscope.core.scores import make
from headscope.methods.base import Check, Info, ScoreMethod
from headscope.tasks import make as make_task
from headscope.trace import Capture, trace

if TYPE_CHECKING:
    import xarray as xr

    from headscope.model import Model


@dataclass(frozen=True)
class InductionHeadsIcl(ScoreMethod):
    """Induction heads: look up what followed the last time, and copy it.

    What it measures: `prefix-matching`, the attention that a head pays to the tokens that followed earlier occurrences
    of the present token; `copying`, whether its weights raise the logit of the token it reads.

    Formula: prefix matching is the mean over positions i of the repeats of Σ_j pattern[i, j] over the j with
    token[j - 1] = token[i]; copying is Σλ / Σ|λ| over the eigenvalues λ of W_O W_U W_E W_V, in -1..1.

    Options: part (prefix-matching or copying); n rows of a random block of length tokens, repeats times.

    Does not show: that the model relies on the head (see `verify`, role induction); prefix matching without
    copying also describes anti-induction heads. Copying ignores norms and everything between the layers.

    Cost: one forward pass over n × length × repeats tokens, no pattern is kept; copying: weights only.

    Paper and differences: Olsson et al. 2022, who repeat 25 tokens 4 times; tokens are drawn without replacement in
    a block. Copying is their eigenvalue form, not the one rescaled from logits.
    """

    info = Info(
        title="Induction heads",
        papers=("arXiv:2209.11895",),
        claim="A few heads match prefixes (above 0.4) while the median head does not, and those heads copy.",
        higher_means="more attention on what followed the same token before",
        cost="1 forward pass",
        needs=("causal", "pattern", "tokens"),
        quick=True,
        values_in=(-1.0, 1.0),
    )

    part: str = "prefix-matching"
    n: int = 8
    length: int = 25
    repeats: int = 2

    def score(self, model: Model, *, seed: int = 0) -> xr.DataArray:
        if self.part == "copying":
            return make(self._copying(model))
        if self.part != "prefix-matching":
            raise UsageError(f"part is {self.part!r}; it takes prefix-matching or copying.")
        prompts = make_task("repeated-tokens", model, self.n, seed, length=self.length, repeats=self.repeats)
        first, length = prompts.meta["start"] + self.length, self.length

        def after_copies(pattern, layer):  # type: ignore[no-untyped-def]
            # the token after the copy r blocks back stands at i - r·length + 1
            total = sum(pattern.diagonal(1 - length * r, 2, 3)[..., -(self.repeats - r) * length :].sum(2)
                        for r in range(1, self.repeats))  # fmt: skip
            return (total / (pattern.shape[2] - first)).mean(0)  # [head]

        return make(trace(model, prompts, Capture("pattern", reduce=after_copies), logits=None)["pattern"])

    @staticmethod
    @torch.no_grad()
    def _copying(model: Model) -> torch.Tensor:
        anatomy = model.anatomy
        if anatomy.W_E.shape[1] != anatomy.d_model:
            raise NotApplicable(f"{model.name} widens its embeddings, so its weights alone do not say what heads copy.")
        tokens = anatomy.W_U.float() @ anatomy.W_E.float()  # [d_model, d_model], once for all heads
        rows = []
        for layer in range(anatomy.n_layers):
            row = []
            for head in range(anatomy.n_heads):
                small = anatomy.W_O(layer, head).float() @ tokens @ anatomy.W_V(layer, head).float()
                values = torch.linalg.eigvals(small)
                row.append(values.real.sum() / values.abs().sum().clamp(min=1e-30))  # a head that writes nothing has 0
            rows.append(torch.stack(row))
        return torch.stack(rows)

    def check(self, model: Model, *, seed: int = 0) -> Check:
        from headscope.core.scores import top

        matching = self.score(model, seed=seed)
        best = top(matching, 5)
        copying = self._copying(model)
        figures = {
            "max": float(matching.max()),
            "median": float(matching.median()),
            "heads above 0.4": float((matching > 0.4).sum()),
            "copying of the top 5": sum(float(copying[c.layer, c.index or 0]) for c in best) / 5,
            "copying of all": float(copying.mean()),
        }
        shown = figures["max"] > 0.4 and figures["median"] < 0.1
        shown = shown and figures["copying of the top 5"] > max(0.0, figures["copying of all"])
        return Check(shown, figures, "shown if max > 0.4, median < 0.1, and the top 5 copy more than the mean head")
