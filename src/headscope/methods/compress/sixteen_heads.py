"""Prune the heads that the loss would miss least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headscope.core.component import Component, head
from headscope.core.errors import NotApplicable, UsageError
from headscope.methods.base import Check, CompressMethod, Info, Plan
from headscope.model import bias_of
from headscope.model.surgery import removable
from headscope.sweep import clean, measure, sweep
from headscope.tasks import Prompts
from headscope.tasks import make as make_task
from headscope.trace import Edit, trace, zero

if TYPE_CHECKING:
    from headscope.model import Model


@dataclass(frozen=True)
class SixteenHeads(CompressMethod):
    """Head pruning by importance |∂L/∂ξ|.

    What it measures: to first order, how much the loss of each prompt would move if a head's output were scaled.

    Formula: I[l, h] = mean over prompts of |Σ_{pos, d} z · ∂L/∂z|, which is |∂L/∂ξ| at ξ = 1 for z ← ξ z, the absolute
    value taken per prompt; normalised by the L2 norm over the heads of a layer. The least important heads are dropped
    `step` of all heads at a time, importance being measured again on what is left.

    Options: task and n, the prompts; step; where: `anywhere` drops single heads, which then are zeroed unless whole
    groups of every layer happen to go; `everywhere` drops the same number of whole kv groups in every layer, which an
    ordinary checkpoint can hold, so that they are taken out for real.

    Does not show: what the pruned model does on other texts than these.

    Cost: a forward and a backward pass a step.

    Paper and differences: Michel et al. 2019. With `everywhere`, a group's importance is the sum over its query heads,
    and layers do not compete.
    """

    info = Info(
        title="Pruning heads by importance",
        papers=("arXiv:1905.10650",),
        claim="Pruning the 20 % least important heads raises the loss less than pruning 20 % at random or the most "
        "important ones.",
        higher_means="the loss depends more on the head",
        cost="1 forward and backward pass a step",
        needs=("causal", "logits", "gradient"),
    )

    task: str = "plain-text"
    n: int = 8
    step: float = 0.1
    where: str = "anywhere"

    def plan(self, model: Model, *, budget: float, seed: int = 0) -> Plan:
        if self.where not in ("anywhere", "everywhere"):
            raise UsageError(f"where is {self.where!r}; it takes anywhere or everywhere.")
        if not 0 < self.step <= 1:
            raise UsageError(f"step is {self.step}; it is a share of all heads, above 0 and at most 1.")
        prompts = make_task(self.task, model, self.n, seed)
        choose = self._anywhere if self.where == "anywhere" else self._everywhere
        dropped = choose(model, prompts, budget)
        remove = removable(model, dropped)
        return Plan([zero(dropped)], remove, self._summary(model, prompts, dropped, remove))

    def _anywhere(self, model: Model, prompts: Prompts, budget: float) -> list[Component]:
        heads = model.heads()
        wanted = max(1, round(budget * len(heads)))
        dropped: list[Component] = []
        while len(dropped) < wanted:
            scores = importance(model, prompts, [zero(dropped)] if dropped else [])
            left = sorted((c for c in heads if c not in dropped), key=lambda c: float(scores[c.layer, c.index or 0]))
            dropped += left[: min(wanted - len(dropped), max(1, round(self.step * len(heads))))]
        return sorted(dropped)

    def _everywhere(self, model: Model, prompts: Prompts, budget: float) -> list[Component]:
        a = model.anatomy
        count = int(budget * a.n_kv_heads + 1e-9)
        if a.n_kv_heads == 1:
            raise NotApplicable(f"{model.name} has one kv group a layer, which cannot go; drop heads where='anywhere'.")
        if count < 1:
            raise UsageError(
                f"A budget of {budget:g} is less than one of the {a.n_kv_heads} kv groups of a layer; give at least "
                f"{1 / a.n_kv_heads:.2f}, or where='anywhere'."
            )
        group = a.n_heads // a.n_kv_heads
        scores = importance(model, prompts).view(a.n_layers, a.n_kv_heads, group).sum(2)
        worst = scores.argsort(stable=True, dim=1)[:, :count]
        return sorted(
            head(layer, int(g) * group + i) for layer in range(a.n_layers) for g in worst[layer] for i in range(group)
        )

    @staticmethod
    def _summary(
        model: Model, prompts: Prompts, dropped: list[Component], remove: dict[int, list[int]]
    ) -> dict[str, Any]:
        a = model.anatomy
        removed = sum(map(len, remove.values()))
        group = a.n_heads // a.n_kv_heads
        q, k, v = (
            a.d_head * (part is not None and bias_of(part) is not None)
            for part in (a.blocks[0].q, a.blocks[0].k, a.blocks[0].v)
        )
        each = a.d_model * a.d_head * 2  # the head's W_Q and W_O, or the W_K and W_V of its group
        return {
            "heads": len(model.heads()),
            "dropped": len(dropped),
            "removed": removed,
            "zeroed": len(dropped) - removed,
            "parameters_saved": removed * (each + q) + removed // group * (each + k + v),
            "cache_share_saved": removed / len(model.heads()),
            "loss_before": float(clean(model, prompts, "loss").mean()),
            "loss_after": float(sweep(model, prompts, [zero(dropped)], "loss").mean()),
        }

    def check(self, model: Model, *, seed: int = 0) -> Check:
        heads = model.heads()
        chosen = self.plan(model, budget=0.2, seed=seed).dropped
        scores = importance(model, make_task(self.task, model, self.n, seed))
        most = sorted(heads, key=lambda c: -float(scores[c.layer, c.index or 0]))[: len(chosen)]
        generator = torch.Generator().manual_seed(seed)
        random = [[heads[i] for i in torch.randperm(len(heads), generator=generator)[: len(chosen)]] for _ in range(3)]
        held_out = make_task(self.task, model, self.n, seed + 1000)
        before = float(clean(model, held_out, "loss").mean())
        losses = (
            sweep(model, held_out, [[zero(s)] for s in (chosen, most, *random)], "loss").mean("prompt").values - before
        )
        figures = {
            "loss": before,
            "rise, least important": float(losses[0]),
            "rise, random (lowest of 3)": float(losses[2:].min()),
            "rise, most important": float(losses[1]),
        }
        return Check(
            bool(losses[0] < min(losses[1:])), figures, "shown if the least important cost least, on held-out text"
        )


def importance(model: Model, prompts: Prompts, edits: list[Edit] | None = None) -> Tensor:
    """[layer, head]: mean over prompts of |∂L/∂ξ|, each layer normalised to length 1."""
    run = trace(model, prompts, ["z"], edits or [], logits=prompts.positions, grad=True)
    loss = measure("loss", run.logits, prompts)
    kept = [run["z", layer] for layer in range(model.anatomy.n_layers)]
    gradients = torch.autograd.grad(loss.sum(), kept)
    raw = torch.stack([(z * g).sum((1, 3)).abs().mean(0) for z, g in zip(kept, gradients, strict=True)]).detach()
    return raw / raw.norm(dim=1, keepdim=True).clamp(min=1e-30)
