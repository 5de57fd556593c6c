"""How much each head, by each token it read, adds directly to a logit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headscope.core.errors import NotApplicable
from headscope.core.scores import make
from headscope.methods.base import AttributeMethod, Check, Info
from headscope.model import bias_of
from headscope.model.frozen import freeze
from headscope.tasks import make as make_task
from headscope.trace import Capture, trace

if TYPE_CHECKING:
    import xarray as xr

    from headscope.model import Model
    from headscope.tasks import Prompts


@dataclass(frozen=True)
class Dla(AttributeMethod):
    """Direct logit attribution, the final norm's scale frozen.

    What it measures: the part of the answer's logit (minus the foil's, where there is one) that each head adds by
    itself, split by the token whose value it read.

    Formula: with g = W_U[:, answer] - W_U[:, foil] pulled through the final norm at its run value (gain ⊙ g / s, centred
    for LayerNorm), a[prompt, l, h, k] = pattern[q, k] · v[k] W_O[l, h] · g at the scored position q. Norms after the
    attention (Gemma-2, OLMo-2) are frozen likewise. Coordinates hold the rest: `mlp` (prompt, layer), `constant`
    (prompt: embedding and biases) and `logit` (prompt), which equals the sum of all parts. Values are in logits; over
    several scored positions of a prompt, their mean. A soft cap on the logits comes after what is attributed.

    Options: none.

    Does not show: what a head does through later layers; a head with no direct effect may still matter.

    Cost: one forward pass; of each pattern only the scored rows are kept.

    Paper and differences: nostalgebraist 2020, Elhage et al. 2021, Wang et al. 2022; split by source position as in
    Ferrando & Voita 2024.
    """

    info = Info(
        title="Direct logit attribution",
        papers=("transformer-circuits.pub/2021/framework",),
        claim="The parts add up to the logit difference exactly, and ten heads hold most of what the heads add.",
        higher_means="adds more to the answer's logit",
        cost="1 forward pass",
        needs=("causal", "pattern", "logits", "tokens"),
        dims=("prompt", "layer", "head", "position"),
    )

    @torch.no_grad()
    def attribute(self, model: Model, prompts: Prompts, *, seed: int = 0) -> xr.DataArray:
        anatomy, at = model.anatomy, prompts.positions.to(model.device)
        placement = anatomy.parts.norm_placement
        if placement == "post":
            raise NotApplicable(f"{model.name} normalises after every sum, so its parts do not add up to its logits.")

        def rows(x: Tensor, layer: int) -> Tensor:  # [batch, pos, d] → [batch, m, d]
            return x.gather(1, at[:, :, None].expand(-1, -1, x.shape[-1]))

        def pattern_rows(x: Tensor, layer: int) -> Tensor:  # [batch, head, query, key] → [batch, head, m, key]
            return x.gather(2, at[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1]))

        def head_rows(z: Tensor, layer: int) -> Tensor:
            return rows(z.flatten(2), layer).unflatten(2, z.shape[2:])

        last = anatomy.n_layers - 1
        captures = [
            Capture("v"),
            Capture("z", reduce=head_rows),
            Capture("pattern", reduce=pattern_rows),
            Capture("resid_pre", [0], rows),
            Capture("resid_post", [last], rows),
        ]
        has_mlp = anatomy.blocks[0].mlp_out is not None
        captures += [Capture("mlp_out", reduce=rows)] if has_mlp else []
        run = trace(model, prompts, captures, logits=at)
        target = prompts.target.to(model.device)
        unembed = anatomy.W_U.T  # [vocab, d_model]
        direction = unembed[target]
        bias = bias_of(anatomy.parts.unembed)
        constant = torch.zeros_like(direction[..., 0]) if bias is None else bias[target]
        if prompts.foil is not None:
            foil = prompts.foil.to(model.device)
            direction = direction - unembed[foil]
            constant = constant if bias is None else constant - bias[foil]
        final = freeze(anatomy.final_norm, run["resid_post", last])
        if final is not None:
            constant = constant + direction @ final.bias
            direction = final.pull(direction)  # [batch, m, d_model], in the residual stream
        constant = constant + (run["resid_pre", 0] * direction).sum(-1)
        heads, mlps = [], []
        group = anatomy.n_heads // anatomy.n_kv_heads
        for layer in range(anatomy.n_layers):
            W_O = torch.stack([anatomy.W_O(layer, h) for h in range(anatomy.n_heads)])  # [head, d_head, d_model]
            inner, b_O = direction, anatomy.b_O(layer)
            post = anatomy.blocks[layer].post_attn
            if post is not None:
                summed = torch.einsum("bmhd,hde->bme", run["z", layer], W_O)
                frozen = freeze(post, summed if b_O is None else summed + b_O)
                constant = constant + direction @ frozen.bias  # type: ignore[union-attr]
                inner = frozen.pull(direction)  # type: ignore[union-attr]
            if b_O is not None:
                constant = constant + inner @ b_O
            read = torch.einsum("hde,bme->bmhd", W_O, inner)
            v = run["v", layer].repeat_interleave(group, 2)  # [batch, key, head, d_head]
            heads.append(torch.einsum("bhmk,bkhd,bmhd->bhk", run["pattern", layer], v, read) / at.shape[1])
            added = run["mlp_out", layer] if has_mlp else torch.zeros_like(direction)
            mlps.append((added * direction).sum(-1).mean(1))
        result = make(torch.stack(heads, 1), self.info.dims)
        return result.assign_coords(
            mlp=(("prompt", "layer"), torch.stack(mlps, 1).double().cpu().numpy()),
            constant=("prompt", constant.mean(1).double().cpu().numpy()),
            logit=("prompt", _logit(model, run, prompts)),
        )

    def check(self, model: Model, *, seed: int = 0) -> Check:
        if len(model.heads()) <= 10:
            raise NotApplicable(f"{model.name} has no more than ten heads, which hold all that heads add.")
        found = self.attribute(model, make_task("ioi", model, 12, seed))
        total = found.sum(("layer", "head", "position")) + found.mlp.sum("layer") + found.constant
        by_head = found.sum("position").mean("prompt").values.ravel()
        positive = sorted(by_head[by_head > 0], reverse=True)
        figures = {
            "logit difference": float(found.logit.mean()),
            "largest error of the sum": float(abs(total - found.logit).max()),
            "share of the top 10 heads": float(sum(positive[:10]) / max(sum(positive), 1e-30)),
        }
        shown = figures["largest error of the sum"] < 1e-3 and figures["share of the top 10 heads"] > 0.5
        return Check(bool(shown), figures, "shown if the sum is off by less than 0.001 and ten heads hold over half")


def _logit(model: Model, run, prompts: Prompts):  # type: ignore[no-untyped-def]
    """[prompt]: the answer's logit (minus the foil's) before any soft cap, mean over the scored positions."""
    hidden = run["resid_post", model.anatomy.n_layers - 1]
    norm = model.anatomy.final_norm
    logits = model.anatomy.parts.unembed(hidden if norm is None else norm(hidden))  # type: ignore[misc]
    value = logits.gather(-1, prompts.target.to(logits.device)[..., None])
    if prompts.foil is not None:
        value = value - logits.gather(-1, prompts.foil.to(logits.device)[..., None])
    return value[..., 0].mean(1).double().cpu().numpy()
