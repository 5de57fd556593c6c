"""Make heads of one task's circuit do their job on another task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headscope.circuits.reuse import overlap
from headscope.core.component import Component, components
from headscope.core.controls import matched_sets
from headscope.core.errors import NotApplicable, UsageError
from headscope.methods.base import Check, Info, InterveneMethod
from headscope.sweep import attribution_patching, clean, sweep
from headscope.sweep.patching import corrupted, patches
from headscope.tasks import Prompts
from headscope.tasks import make as make_task
from headscope.trace import Capture, Edit, attend, trace

if TYPE_CHECKING:
    from headscope.model import Model

#: share of all heads that is called a circuit, how many heads it has at least (where these are not over half of all), and
#: how many times as many the estimate lets through to exact patching
SHARE, LEAST, SCREEN = 0.1, 4, 2
#: a head that pays less attention than this to answer and foil has no job at the scored position
LOOKS = 0.1
HELD_OUT = 1000


@dataclass(frozen=True)
class CircuitComponentReuse(InterveneMethod):
    """Reuse of one task's heads in another, and its repair by attention.

    What it measures: which heads carry the task `source`, and which of them, in the middle layers, look at the answer or
    at the foil there; the edits make these look at the same on other prompts.

    Formula: the circuit of a task is the tenth of all heads (at least 4) with the largest |denoising effect| on the
    logit difference (the 2 k heads with the largest estimate are patched exactly). Forced are, of the source circuit's
    heads in the middle half of the layers, the `forced` with the largest effect; the job of each is answer or foil,
    whichever token it attends to more from the scored position of the source prompts (heads that pay both under 0.1 are
    passed over). Edit: the head's pattern row at the scored position is set to 1 / m at the m positions of the prompt
    that hold the answer's (or foil's) token, 0 elsewhere.

    Options: source and target, tasks with foil and corrupted twins; n prompts of each; forced heads.

    Does not show: an honest way to a better model: the edit is told which token is right. It tests what later heads
    make of it.

    Cost: for the circuit 2 forward passes, 1 backward, and a fifth of the heads' passes over n prompts.

    Paper and differences: Merullo, Eickhoff & Pavlick 2024, who path-patch GPT-2 Medium by hand, and set inhibition heads
    and a negative mover by roles known from IOI; here roles are read from attention, and overlap is held against its exact
    distribution for random circuits with as many heads in each layer.
    """

    info = Info(
        title="Circuit component reuse",
        papers=("arXiv:2310.08744",),
        claim="The circuits of two copying tasks share more heads than layer-matched random ones, and making a few "
        "middle heads attend as in the first task improves the second on held-out prompts more than random heads.",
        higher_means="the head carries both tasks",
        cost="2 forward passes, 1 backward, then a fifth of the heads' passes",
        needs=("causal", "pattern", "logits", "gradient", "tokenizer"),
    )

    source: str = "ioi"
    target: str = "coloured-objects"
    n: int = 16
    forced: int = 4

    def edits(self, model: Model, prompts: Prompts | None = None, *, seed: int = 0) -> list[Edit]:
        if prompts is None:
            prompts = make_task(self.target, model, self.n, seed)
        source = make_task(self.source, model, self.n, seed)
        return look(prompts, self._jobs(model, source, circuit(model, source)))

    def _jobs(self, model: Model, source: Prompts, heads: list[Component]) -> dict[Component, str]:
        """The heads to force, and what each looks at in the source task."""
        if self.forced < 1:
            raise UsageError(f"forced is {self.forced}; at least one head must be forced.")
        quarter = model.anatomy.n_layers / 4
        middle = [c for c in heads if quarter <= c.layer < model.anatomy.n_layers - quarter]
        found = jobs(model, source, middle)
        if not found:
            raise NotApplicable(
                f"No head of the circuit of {self.source} in the middle layers of {model.name} looks at answer or foil."
            )
        return dict(list(found.items())[: self.forced])

    def check(self, model: Model, *, seed: int = 0) -> Check:
        source, target = (make_task(name, model, self.n, seed) for name in (self.source, self.target))
        first, second = circuit(model, source), circuit(model, target)
        if len(first) < 2:
            raise NotApplicable(f"{model.name} has too few heads to compare circuits.")
        seen = overlap(model, first, second)
        chosen = self._jobs(model, source, first)
        # random heads of the same layers take over the same jobs
        sets, _ = matched_sets(first, model.anatomy.n_layers, model.anatomy.n_heads, 8, seed)
        others = [_same_jobs(chosen, heads) for heads in sets]
        held_out = make_task(self.target, model, 3 * self.n, HELD_OUT + seed)
        plan = [[], *(look(held_out, given) for given in (chosen, *others))]
        difference = sweep(model, held_out, plan, "logit_diff").mean("prompt").values
        accuracy = sweep(model, held_out, plan, "accuracy").mean("prompt").values
        figures = {
            "heads of a circuit": float(len(first)),
            "shared heads": float(len(seen.shared)),
            "shared heads of random circuits (mean)": seen.expected,
            "p of the overlap": seen.p,
            "heads forced": float(len(chosen)),
            "accuracy": float(accuracy[0]),
            "accuracy, heads forced": float(accuracy[1]),
            "accuracy, random heads forced (highest)": float(accuracy[2:].max()),
            "logit difference": float(difference[0]),
            "logit difference, heads forced": float(difference[1]),
            "logit difference, random heads forced (highest)": float(difference[2:].max()),
        }
        shown = seen.p < 0.01 and difference[1] > max(difference[0], difference[2:].max()) and accuracy[1] > accuracy[0]
        return Check(
            bool(shown),
            figures,
            "shown if p < 0.01, and accuracy and logit difference rise, the latter above every random set",
        )


def circuit(model: Model, prompts: Prompts) -> list[Component]:
    """The tenth of all heads (at least 4) with the largest |denoising effect| on the logit difference, largest first."""
    units, metric = model.heads(), "logit_diff"
    if prompts.foil is None:
        raise NotApplicable(f"The task {prompts.name} has no foil, so a circuit of it cannot be found by patching.")
    size = max(1, round(SHARE * len(units)), min(LEAST, len(units) // 2))
    estimate = abs(attribution_patching(model, prompts, metric=metric).effect.values).ravel()
    screened = (-estimate).argsort(kind="stable")[: SCREEN * size]
    twin = corrupted(prompts)
    edits = patches(model, twin, prompts, "heads", "all")
    low = clean(model, twin, metric).double().cpu().numpy()
    effect = abs((sweep(model, twin, [edits[i] for i in screened], metric).values - low).mean(1))
    return [units[screened[i]] for i in (-effect).argsort(kind="stable")[:size]]


def jobs(model: Model, prompts: Prompts, heads: list[Component]) -> dict[Component, str]:
    """Of the heads that look at the answer or the foil of `prompts` from their scored position: at which of them more."""
    if not heads:
        return {}
    at = prompts.positions[:, -1]
    places = {job: _holding(prompts, job) for job in ("answer", "foil")}

    def attention(pattern: Tensor, layer: int) -> Tensor:  # pattern [batch head query key] → [job, head]
        rows = pattern[torch.arange(len(at)), :, at]  # [batch, head, key]
        return torch.stack([(rows * mask.to(rows.device)[:, None]).sum(-1).mean(0) for mask in places.values()])

    run = trace(model, prompts, Capture("pattern", sorted({c.layer for c in heads}), attention), logits=None)
    paid = {c: run["pattern", c.layer][:, c.index or 0] for c in heads}
    return {c: list(places)[int(x.argmax())] for c, x in paid.items() if x.max() > LOOKS}


def look(prompts: Prompts, given: dict[Component, str]) -> list[Edit]:
    """Edits, for these prompts, that make each head attend to the answer or the foil from the scored position only."""
    at, width = prompts.positions[:, -1], prompts.tokens.shape[1]
    edits = []
    for job in sorted(set(given.values())):
        heads = components(c for c, wanted in given.items() if wanted == job)
        places = _holding(prompts, job).double()
        weights = places / places.sum(1, keepdim=True)
        pattern = torch.zeros(1, len(at), width, width)
        pattern[0, torch.arange(len(at)), at] = weights.to(pattern)
        padded = {} if prompts.mask is None else {"mask": prompts.mask}
        edits += [
            attend(heads, pattern, positions=[position], rows=rows, **padded)
            for position, rows in prompts.scored().items()
        ]
    return edits


def _holding(prompts: Prompts, job: str) -> Tensor:
    """[prompt, pos]: the positions before the scored one that hold the token of the answer or of the foil."""
    ids = prompts.target if job == "answer" else prompts.foil
    if ids is None:
        raise NotApplicable(f"The task {prompts.name} has no foil, which heads are to be made to attend to.")
    at = prompts.positions[:, -1:].to(prompts.tokens.device)
    before = torch.arange(prompts.tokens.shape[1], device=prompts.tokens.device) <= at
    found = (prompts.tokens == ids[:, -1:].to(prompts.tokens.device)) & before
    if not bool(found.any(1).all()):
        raise NotApplicable(f"A prompt of the task {prompts.name} does not name its {job}, so no head can look there.")
    return found


def _same_jobs(chosen: dict[Component, str], heads: list[Component]) -> dict[Component, str]:
    """The jobs of the chosen heads, given to others of (nearly) the same layers."""
    free, taken = list(heads), {}
    for c, job in chosen.items():
        nearest = min(free, key=lambda other: abs(other.layer - c.layer))
        free.remove(nearest)
        taken[nearest] = job
    return taken
