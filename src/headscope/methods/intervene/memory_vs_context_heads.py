"""Scale one head, so that a model follows its context rather than its memory, or the other way round."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headscope.core.component import Component
from headscope.core.errors import NotApplicable, UsageError
from headscope.core.scores import top
from headscope.methods.attribute.dla import Dla
from headscope.methods.base import Check, Info, InterveneMethod
from headscope.sweep import clean, sweep
from headscope.tasks import Prompts
from headscope.tasks import make as make_task
from headscope.trace import Edit, scale

if TYPE_CHECKING:
    from headscope.model import Model

#: factors tried on the development prompts; 1 leaves the head as it is
FACTORS = (-6.0, -4.0, -2.0, -1.0, 0.0, 2.0, 4.0, 6.0)


@dataclass(frozen=True)
class MemoryVsContextHeads(InterveneMethod):
    """Fact against context: one head's factor decides which wins.

    What it measures: on prompts that state something false, which head's direct contribution favours the stated answer
    (a context head) or the remembered one (a memory head), and the factor of that head that moves the answers most.

    Formula: Δ[l, h] = DLA of the head to the stated answer minus that to the remembered one, at the last position, mean
    over prompts. Of the `candidates` heads with the largest |Δ|, the one head and factor γ in -6..6 whose z ← γ z gives
    the side of `favour` the most wins (logit of its answer above the other's); ties go to the larger logit difference,
    then to the smaller γ.

    Options: favour, context or memory; candidates.

    Does not show: that other texts are answered as before; look at the side effect on plain text.

    Cost: one forward pass, and 8 a candidate.

    Paper and differences: Yu, Merullo & Pavlick 2023, who take the head with the largest Δ and search γ; here a few
    heads are tried, as the frozen norm makes Δ approximate. All positions are scaled, so that the edit can be baked.
    """

    info = Info(
        title="Memory against context heads",
        papers=("arXiv:2310.15910",),
        claim="Scaling one attributed head moves the rate of in-context answers both ways on held-out countries, by more "
        "than the same factors on other heads of its layer.",
        higher_means="the head favours the context",
        cost="1 forward pass, then 8 a candidate head",
        needs=("causal", "pattern", "logits", "tokenizer"),
    )

    favour: str = "context"
    candidates: int = 4

    def edits(self, model: Model, prompts: Prompts | None = None, *, seed: int = 0) -> list[Edit]:
        if self.favour not in ("context", "memory"):
            raise UsageError(f"favour is {self.favour!r}; it takes context or memory.")
        if prompts is None:
            prompts = make_task("fact-context", model, 16, seed)
        if prompts.foil is None:
            raise NotApplicable(
                "memory-vs-context-heads needs prompts with an answer from the context and a foil from memory."
            )
        delta = Dla().attribute(model, prompts, seed=seed).sum("position").mean("prompt")  # [layer, head]
        tried = [scale(head, factor) for head in top(abs(delta), self.candidates) for factor in FACTORS]
        difference = sweep(model, prompts, tried, "logit_diff").values  # [edit, prompt]
        if self.favour == "memory":
            difference = -difference
        wins = (difference > 0).mean(1)
        best = max(range(len(tried)), key=lambda i: (wins[i], difference[i].mean(), -abs(float(tried[i].value))))
        return [tried[best]]

    def check(self, model: Model, *, seed: int = 0) -> Check:
        if model.anatomy.n_heads < 2:
            raise NotApplicable(
                f"{model.name} has one head a layer, so there are no others of the layer to compare with."
            )
        every = make_task("fact-context", model, 38, seed)
        half = len(every) // 2
        if half < 6:
            raise NotApplicable(
                f"Only {len(every)} capitals are one token for {model.name}; the claim needs more prompts."
            )
        known, held_out = part(every, slice(0, half)), part(every, slice(half, None))
        context = replace(self, favour="context").edits(model, known, seed=seed)[0]
        memory = replace(self, favour="memory").edits(model, known, seed=seed)[0]
        both = (context, memory)
        # the same factor on the other heads of the same layer: how much of it is this head, how much any head there
        others = [[h for h in model.heads() if h.layer == c.layer and h != c][:5] for e in both for c in e.components]
        plan = [*both, *(scale(h, float(e.value)) for e, heads in zip(both, others, strict=True) for h in heads)]
        rates = (sweep(model, held_out, plan, "logit_diff").values > 0).mean(1)
        base = float((clean(model, held_out, "logit_diff") > 0).double().mean())
        n = len(others[0])
        up, down = rates[2 : 2 + n] - base, rates[2 + n :] - base
        figures = {
            "context rate": base,
            f"context rate, {_name(context)}": float(rates[0]),
            f"context rate, {_name(memory)}": float(rates[1]),
            "largest rise, other heads of the layer": float(up.max()),
            "largest fall, other heads of the layer": float(down.min()),
        }
        shown = rates[0] - base > max(0.1, up.max()) and rates[1] - base < min(-0.1, down.min())
        return Check(
            bool(shown), figures, "shown if both move the rate by over 0.1 and more than every other head tried"
        )


def _name(edit: Edit) -> str:
    head: Component = edit.components[0]
    return f"{head} × {edit.value:g}"


def part(prompts: Prompts, rows: slice) -> Prompts:
    """Some of the prompts."""
    cut = {
        name: value[rows]
        for name in ("tokens", "positions", "target", "foil", "mask", "corrupt")
        if (value := getattr(prompts, name)) is not None
    }
    return replace(prompts, **cut, meta={"cases": prompts.meta["cases"][rows]})
