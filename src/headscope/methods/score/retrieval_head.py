"""Heads that copy the needle out of a haystack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headscope.core.errors import NotApplicable
from headscope.core.scores import make, top
from headscope.methods.base import Check, Info, ScoreMethod
from headscope.sweep import sweep
from headscope.tasks import Prompts
from headscope.tasks import make as make_task
from headscope.trace import Capture, trace, zero

if TYPE_CHECKING:
    import xarray as xr

    from headscope.model import Model


@dataclass(frozen=True)
class RetrievalHead(ScoreMethod):
    """Heads that copy the needle out of a haystack.

    What it measures: how often the token a head attends to most is the needle's answer, just when it is produced.

    Formula: over the trials that the model solves, the share in which argmax_j pattern[last, j] is the position of
    the answer inside the needle. The answer is one token, so a trial is one decode step.

    Options: n trials; length, tokens of a prompt; skip_bos leaves position 0 out of the argmax, since resting there
    hides what else a head looks at.

    Does not show: retrieval that is not literal; that the model relies on the head (see `verify`, role retrieval).

    Cost: one forward pass over n × length tokens; of each pattern only the last row is used.

    Paper and differences: Wu et al. 2024 score every token of a longer needle over contexts of 1K to 50K tokens;
    a small model needs short contexts and a needle whose answer is one token.
    """

    info = Info(
        title="Retrieval heads",
        papers=("arXiv:2404.15574",),
        claim="Few heads score above 0.1, and zeroing the top 3 % lowers the answer's probability more than random heads.",
        higher_means="more often the needle's answer is where the head looks most",
        cost="1 forward pass",
        needs=("causal", "pattern", "logits", "tokenizer"),
        quick=True,
        values_in=(0.0, 1.0),
    )

    n: int = 24
    length: int = 160
    skip_bos: bool = True

    def score(self, model: Model, *, seed: int = 0) -> xr.DataArray:
        return self._score(model, make_task("needle", model, self.n, seed, length=self.length))

    def _score(self, model: Model, prompts: Prompts) -> xr.DataArray:
        needle = torch.tensor(prompts.meta["needle"])
        first = 1 if self.skip_bos else 0

        def hits(pattern, layer):  # type: ignore[no-untyped-def]
            looked = pattern[:, :, -1, first:].argmax(-1).cpu() + first  # [batch, head]
            return looked == needle[:, None]

        run = trace(model, prompts, Capture("pattern", reduce=hits), logits=prompts.positions)
        logits: torch.Tensor = run.logits
        solved = (logits[:, 0].argmax(-1).cpu() == prompts.target[:, 0].cpu()).nonzero()[:, 0]
        if len(solved) < 3:
            raise NotApplicable(
                f"{model.name} solved {len(solved)} of {len(prompts)} needle trials; retrieval cannot be scored."
            )
        return make(run["pattern"][:, solved].double().mean(1), n=torch.tensor(float(len(solved))))

    def check(self, model: Model, *, seed: int = 0) -> Check:
        scores = self.score(model, seed=seed)
        k = max(1, round(0.03 * scores.size))
        chosen = top(scores, k)
        held_out = make_task("needle", model, 8, seed + 1000, length=self.length)
        generator = torch.Generator().manual_seed(seed)
        others = [c for c in model.heads() if c not in chosen]
        sets = [chosen] + [[others[i] for i in torch.randperm(len(others), generator=generator)[:k]] for _ in range(3)]
        clean, masked, *random = sweep(model, held_out, [[], *([zero(s)] for s in sets)], "prob").mean("prompt").values
        figures = {
            "share of heads above 0.1": float((scores > 0.1).mean()),
            "probability": float(clean),
            "probability, top heads zeroed": float(masked),
            "probability, random heads zeroed (lowest)": float(min(random)),
        }
        shown = figures["share of heads above 0.1"] < 0.15 and masked < 0.5 * clean and masked < min(random)
        return Check(
            bool(shown), figures, f"top {k} heads; shown if sparse, and the probability halves below every random set"
        )
