"""Heads whose outputs take a form on solvable prompts that they never take when the cue is gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headscope.core.errors import NotApplicable, UsageError
from headscope.core.scores import auroc, make
from headscope.methods.base import Check, Info, ScoreMethod
from headscope.sweep import attribution_patching
from headscope.sweep.patching import corrupted
from headscope.tasks import Prompts
from headscope.tasks import make as make_task
from headscope.trace import Capture, trace

if TYPE_CHECKING:
    import xarray as xr

    from headscope.model import Model

#: shuffles of the labels that the null is the mean of
SHUFFLES = 50
#: weight of the L1 penalty; a code is the feature that is most active, and active is what exceeds this
SPARSITY = 0.2
STEPS, RATE = 100, 0.01


@dataclass(frozen=True)
class DiscreteSaeCircuits(ScoreMethod):
    """Discrete sparse-autoencoder codes that only solvable prompts have.

    What it measures: how much of what a head writes at the scored position takes, on prompts with the task's cue, forms
    that it does not take on the same prompts without it (the corrupted twins).

    Formula: x[l, h, e] = (o - mean over e of o) / rms over e of ‖o‖, with o [l, h, e, d_model] the head's output on
    example e; one autoencoder f = ReLU(x W_e + b_e), x̂ = f W_d, rows of W_d of unit length, is trained over all heads and
    examples on ‖x - x̂‖² + 0.2 Σ f; the code of (l, h, e) is argmax f, or none where no feature exceeds 0.2.
    share[l, h] = distinct codes on positives and never on negatives / distinct codes; score = softmax of share over all
    heads. Coordinates: `share`; `null`, its mean over 50 shuffles (labels exchanged within random
    pairs); `p`, how often a shuffle has as much.

    Options: task, one whose corrupted twins lack the cue; n, its prompts (as many negatives); codes, the features.

    Does not show: that the head matters for the answer; earlier positions. With few examples codes are unique by chance,
    mostly in heads whose outputs differ much from prompt to prompt: compare share with null.

    Cost: 2 forward passes over n prompts, and 100 steps of a small autoencoder (seconds).

    Paper and differences: O'Neill & Bui 2024. Outputs are centred and scaled head by head, so that neither a constant
    part nor size makes the code; `none` is ours; the null is the shuffle of labels, not a threshold fitted to a circuit.
    """

    info = Info(
        title="Discrete SAE circuits",
        papers=("arXiv:2405.12522",),
        claim="Ten prompts with and ten without the cue rank the heads that patching finds well above chance, and above "
        "every shuffle of the labels.",
        higher_means="more forms of output that only solvable prompts have",
        cost="2 forward passes and a small training",
        needs=("causal", "logits", "tokenizer"),
        values_in=(0.0, 1.0),
    )

    task: str = "ioi"
    n: int = 10
    codes: int = 32

    def score(self, model: Model, *, seed: int = 0) -> xr.DataArray:
        share, null = self.shares(model, make_task(self.task, model, self.n, seed), seed=seed)
        p = (1 + (null >= share).sum(0)) / (1 + SHUFFLES)
        coordinates = {"share": share, "null": null.mean(0), "p": p.double()}
        return make(share.flatten().softmax(0).view(share.shape)).assign_coords(
            {name: (("layer", "head"), value.numpy()) for name, value in coordinates.items()}
        )

    def shares(self, model: Model, prompts: Prompts, *, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Shares [layer, head] of codes that only prompts have and not their twins, and those under shuffled labels
        [shuffle, layer, head]."""
        if self.codes < 2:
            raise UsageError(f"codes is {self.codes}; an autoencoder needs at least 2.")
        if len(prompts) < 2:
            raise NotApplicable(f"{model.name} has one usable prompt of {prompts.name}; codes need at least two.")
        outputs = torch.cat([head_outputs(model, p) for p in (prompts, corrupted(prompts))], 2)
        found = integer_codes(outputs, self.codes, seed)
        share = unique_share(found, torch.arange(2 * len(prompts)) < len(prompts))
        # a pair shares all but the cue, so its two labels may change places where the cue says nothing
        generator = torch.Generator().manual_seed(seed)
        swaps = torch.rand(SHUFFLES, len(prompts), generator=generator) < 0.5
        return share, torch.stack([unique_share(found, torch.cat([~swap, swap])) for swap in swaps])

    def check(self, model: Model, *, seed: int = 0) -> Check:
        if len(model.heads()) < 4:
            raise NotApplicable(f"{model.name} has too few heads to rank.")
        import numpy as np

        prompts = make_task(self.task, model, self.n, seed)
        share, null = self.shares(model, prompts, seed=seed)
        effect = abs(attribution_patching(model, prompts, positions="last", metric="logit_diff").effect.values)
        # the heads patching finds: the tenth with the largest effect
        k = max(1, round(effect.size / 10))
        circuit = np.zeros(effect.shape, dtype=bool)
        circuit.ravel()[np.argsort(-effect, axis=None, kind="stable")[:k]] = True
        shuffled = [auroc(one, circuit) for one in null]
        figures = {
            "AUC": auroc(share, circuit),
            "AUC of the share above shuffled labels": auroc(share - null.mean(0), circuit),
            "AUC, shuffled labels (mean)": sum(shuffled) / SHUFFLES,
            "AUC, shuffled labels (highest)": max(shuffled),
            "heads of the circuit": float(k),
        }
        shown = figures["AUC"] > max(0.7, figures["AUC, shuffled labels (highest)"])
        return Check(
            bool(shown), figures, "shown if the AUC is above 0.7 and above that of every shuffle of the labels"
        )


@torch.no_grad()
def head_outputs(model: Model, prompts: Prompts) -> Tensor:
    """[layer, head, prompt, d_model]: what heads write at the last scored position."""
    at, anatomy = prompts.positions[:, -1].to(model.device), model.anatomy

    def written(z: Tensor, layer: int) -> Tensor:  # z [batch, pos, head, d_head]
        W_O = torch.stack([anatomy.W_O(layer, h) for h in range(anatomy.n_heads)])
        return torch.einsum("bhd,hde->hbe", z[torch.arange(len(at)), at], W_O).double().cpu()

    found: Tensor = trace(model, prompts, Capture("z", reduce=written), logits=None)["z"]
    return found


def integer_codes(outputs: Tensor, n_codes: int, seed: int) -> Tensor:
    """[layer, head, example] integer codes of outputs [layer, head, example, d]; -1 where no feature is active.

    The autoencoder sees all heads and examples at once, so that their order does not matter.
    """
    size = outputs.pow(2).sum(-1).mean(-1).sqrt()[..., None, None]
    x = (outputs - outputs.mean(2, keepdim=True)) / size.clamp(min=1e-30)
    x = x.flatten(0, 2)
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(n_codes, x.shape[1], generator=generator, dtype=x.dtype)
    decoder = (start / start.norm(dim=1, keepdim=True)).requires_grad_()
    encoder = decoder.detach().T.clone().requires_grad_()
    bias = torch.zeros(n_codes, dtype=x.dtype, requires_grad=True)
    optimiser = torch.optim.Adam([encoder, decoder, bias], lr=RATE)
    with torch.enable_grad():
        for _ in range(STEPS):
            active = (x @ encoder + bias).relu()
            error = x - active @ (decoder / decoder.norm(dim=1, keepdim=True))
            loss = (error.pow(2).sum(-1) + SPARSITY * active.sum(-1)).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    with torch.no_grad():
        most, code = (x @ encoder + bias).relu().max(-1)
    return torch.where(most > SPARSITY, code, -1).view(outputs.shape[:3])


def unique_share(codes: Tensor, positive: Tensor) -> Tensor:
    """[layer, head]: distinct codes on positives that no negative has, over all distinct codes; codes [layer, head,
    example], positive [example]."""
    seen = torch.nn.functional.one_hot(codes + 1, int(codes.max()) + 2).bool()  # [layer, head, example, code]
    on, off = seen[:, :, positive].any(2), seen[:, :, ~positive].any(2)
    return (on & ~off).sum(-1).double() / (on | off).sum(-1)
