"""What each head gives the answer's logit through all later layers, their patterns held."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headscope.core.component import Component, head
from headscope.core.errors import NotApplicable, UsageError
from headscope.core.scores import make, top
from headscope.methods.base import AttributeMethod, Check, Info
from headscope.model.frozen import freeze
from headscope.sweep import clean, make_job, sweep
from headscope.sweep.patching import corrupted, patches
from headscope.sweep.plan import CHUNK_TOKENS, free_bytes
from headscope.tasks import baseline
from headscope.tasks import make as make_task
from headscope.trace import Capture, Edit, patch, resolve, trace
from headscope.trace.decompose import Decomposition, decompose

if TYPE_CHECKING:
    import xarray as xr

    from headscope.model import Model
    from headscope.tasks import Prompts

#: bytes that the patterns of all layers may take; prompts beyond go into another pass
PATTERN_BYTES = 512 * 2**20
#: a part this many times longer than the activation that it is a part of says nothing any more
RUNAWAY = 100.0
#: how many of the heads the check keeps, and how many random sets it sets against them
SHARES, RANDOM = (0.05, 0.1, 0.2), 10


@dataclass(frozen=True)
class CdT(AttributeMethod):
    """Contextual decomposition: a head's part of every later activation, carried to the logit.

    What it measures: how much of the answer's logit (minus the foil's, where there is one) comes from a head, directly
    and through the values of later heads and all later MLPs, while later heads attend as they did.

    Formula: each activation is x = β + γ. A source head starts with β = (z - z') W_O[l, h] [batch pos d_model], z' its
    value in the corrupted twin, or where the task has none its mean over the prompts at that position; γ = x - β. Then,
    with the patterns A and norm scales s of the clean pass: linear β W + b ⊙ |βW| / (|βW| + |γW|); sums by component;
    norm β ⊙ gain / s (centred for LayerNorm; its bias shared as above); attention A (β W_V); activation γ ← f(γ),
    β ← f(β + γ) - f(γ); gated γ ← f(gate_γ) up_γ, β ← f(gate) up - γ; norms after a part likewise.
    score[prompt, l, h] = β · g at the scored position (the mean of several), g = W_U[:, answer] - W_U[:, foil] pulled
    through the final norm. The coordinate `closure` (prompt) is the error of β + γ against the model's stream after its
    last layer: the largest ‖error‖ / ‖x‖ of a token.

    Options: stabilise: after every addition to the stream, where β and γ differ in sign, give their sum to the larger
    one and nothing to the other. Large parts then no longer cancel, but not even linear layers are linear in β any more:
    parts of several sources do not add up to that of all of them, and those of small sources grow.

    Does not show: what a head does to the patterns of later heads. One that acts through queries or keys alone (a
    previous-token head that feeds an induction head) gets 0, so that the top heads alone may fail at the task: those
    that tell them where to look need not be among them. Where two large opposite parts make a small activation (the
    value of an attention sink, say), gated MLPs may multiply both: a score whose β outgrew the activation a hundredfold
    is missing (NaN).

    Cost: 2 forward passes, and for each head the layers above it once, without queries and keys, at the tokens from the
    first one that differs in the twin on. The attribute `passes` says how many forward passes that makes.

    Paper and differences: Hsu et al. 2024, for BERT and GPT-2; RMSNorm and gated MLPs follow from its rules. The
    paper's rules include the stabiliser, and it searches backwards from target heads; here every head is a source and the
    logit the target.
    """

    info = Info(
        title="Contextual decomposition (CD-T)",
        papers=("arXiv:2407.00886",),
        claim="The 5 to 20 % of the heads that CD-T ranks first keep more of the logit difference than random heads of the "
        "same layers, for fewer passes than patching every head.",
        higher_means="gives more to the answer's logit",
        cost="2 forward passes and half of one a head",
        needs=("causal", "pattern", "logits", "tokens"),
        dims=("prompt", "layer", "head"),
    )

    stabilise: bool = False

    @torch.no_grad()
    def attribute(self, model: Model, prompts: Prompts, *, seed: int = 0) -> xr.DataArray:
        a, width = model.anatomy, prompts.tokens.shape[1]
        each = a.n_layers * a.n_heads * width**2 * model.dtype.itemsize
        mean = _mean(model, prompts) if prompts.corrupt is None else None
        some = _parts(prompts, max(1, PATTERN_BYTES // each))
        found = [_relevance(model, part, mean, self.stabilise) for part in some]
        scores, closure, passes = zip(*found, strict=True)
        result = make(torch.cat(scores), self.info.dims, passes=2 + sum(passes) / len(prompts))
        return result.assign_coords(closure=("prompt", torch.cat(closure).double().cpu().numpy()))

    def check(self, model: Model, *, seed: int = 0) -> Check:
        prompts, held_out = (make_task("ioi", model, 12, s) for s in (seed, seed + 1000))
        able = baseline(model, held_out)
        if not able.able:
            return Check(None, {}, able.reason)
        found = self.attribute(model, prompts, seed=seed)
        ranked = top(found.mean("prompt"), len(model.heads()))
        twin = corrupted(held_out)
        here, there = (trace(model, p, ["z"], logits=None) for p in (held_out, twin))

        def alone(kept: list[Component]) -> list[Edit]:
            return resolve(model, patch([c for c in ranked if c not in kept], there))

        sets = []
        for share in SHARES:
            chosen = ranked[: max(1, round(share * len(ranked)))]
            sets += [chosen, *_same_layers(chosen, model.anatomy.n_heads, RANDOM, seed)]
        high, low = (float(clean(model, p).mean()) for p in (held_out, twin))
        values = sweep(model, held_out, [alone(kept) for kept in sets]).mean("prompt").values
        kept = ((values - low) / (high - low)).reshape(len(SHARES), 1 + RANDOM)
        back = [resolve(model, patch(heads, here)) for heads in sets[: 1 + RANDOM]]
        restored = (sweep(model, twin, back).mean("prompt").values - low) / (high - low)
        plan = make_job(model, prompts, patches(model, prompts, corrupted(prompts), "heads", "all")).plan()
        figures = {f"kept by the top {share:.0%}": float(row[0]) for share, row in zip(SHARES, kept, strict=True)}
        figures |= {
            "their mean": float(kept[:, 0].mean()),
            f"random heads, highest mean of {RANDOM}": float(kept[:, 1:].mean(0).max()),
            "random heads, mean": float(kept[:, 1:].mean()),
            f"restored in the twins by the top {SHARES[0]:.0%}": float(restored[0]),
            f"restored by random heads, highest of {RANDOM}": float(restored[1:].max()),
            "passes": found.attrs["passes"],
            "passes of patching": 2 + plan.work / (prompts.tokens.numel() * model.anatomy.n_layers),
        }
        more = kept[:, 0].mean() > kept[:, 1:].mean(0).max()
        shown = more and figures["passes"] < figures["passes of patching"]
        reason = f"shown if they keep more than each of {RANDOM} random sets on held-out prompts, all other heads as in their twins"
        return Check(bool(shown), figures, reason)


def _mean(model: Model, prompts: Prompts) -> Tensor:
    """[layer, pos, head, d_head]: mean output of every head over the prompts, for each position among real tokens."""
    if len(prompts) < 2:
        raise UsageError("cd-t sets a head against its mean over the prompts; give two or more, or prompts with twins.")
    mask, index = (x.to(model.device) for x in (_mask(prompts), _index(prompts)))

    def mean(z: Tensor, layer: int) -> Tensor:  # [batch, pos, head, d_head] → [pos, head, d_head]
        total = z.new_zeros(z.shape[1:]).index_add(0, index[mask], z[mask])
        return total / index[mask].bincount(minlength=z.shape[1]).clamp(min=1)[:, None, None]

    return trace(model, prompts, [Capture("z", reduce=mean)], logits=None)["z"]


def _index(prompts: Prompts) -> Tensor:
    """[prompt, pos]: position among the real tokens."""
    return (_mask(prompts).long().cumsum(1) - 1).clamp(min=0)


def _mask(prompts: Prompts) -> Tensor:
    return torch.ones_like(prompts.tokens, dtype=torch.bool) if prompts.mask is None else prompts.mask.bool()


def _parts(prompts: Prompts, rows: int) -> list[Prompts]:
    """The prompts, at most `rows` at a time."""

    def cut(start: int) -> Prompts:
        given = {n: getattr(prompts, n) for n in ("tokens", "positions", "target", "foil", "mask", "corrupt")}
        some: dict[str, Any] = {n: None if x is None else x[start : start + rows] for n, x in given.items()}
        return replace(prompts, **some)

    return [cut(start) for start in range(0, len(prompts), rows)]


def _relevance(model: Model, prompts: Prompts, mean: Tensor | None, stable: bool) -> tuple[Tensor, Tensor, float]:
    """Scores [prompt, layer, head], closure [prompt], and how many passes over one prompt the propagation makes."""
    a, heads, width = model.anatomy, model.heads(), prompts.tokens.shape[1]
    clean_run = decompose(model, prompts, ["z"], logits=prompts.positions, stable=stable)
    other = None if mean is not None else trace(model, corrupted(prompts), ["z"], logits=None)
    first = 0 if mean is not None else _first_difference(prompts)
    real = _mask(prompts)[:, first:].to(model.device)
    pull, index = _direction(model, prompts, clean_run), prompts.positions.to(model.device) - first
    limit = RUNAWAY * clean_run.run["resid_post", a.n_layers - 1].norm(dim=-1).gather(1, index + first)  # [batch, m]
    n, batch, columns = len(heads), len(prompts), width - first

    def written(layer: int, indices: list[int]) -> Tensor:
        """[head, batch, column, d_model]: β of some heads."""
        base = other["z", layer] if mean is None else mean[layer][_index(prompts).to(mean.device)]  # type: ignore[index]
        beta = (clean_run.run["z", layer] - base)[:, first:, indices] * real[..., None, None]
        return torch.einsum("bphd,hde->hbpe", beta, torch.stack([a.W_O(layer, h) for h in indices]))

    scores, closure, passes = [], pull.new_zeros(batch), 0.0
    size = max(1, _affordable_tokens(model) // (batch * columns))
    for start in range(0, n, size):
        some = heads[start : start + size]
        joining = {
            layer: written(layer, [c.index or 0 for c in group]) for layer, group in groupby(some, lambda c: c.layer)
        }
        begin = some[0].layer
        none = pull.new_zeros(0, batch, columns, a.d_model)
        for stream in clean_run.layers(begin, none, joining):
            final = stream
        if start == 0:
            closure = _closure(model, prompts, clean_run, final.whole)
        read = final.part.gather(2, index.clamp(min=0)[None, ..., None].expand(len(some), -1, -1, a.d_model))
        score = ((read * pull).sum(-1) * (index >= 0)).mean(-1)
        scores.append(score.where((read.norm(dim=-1) < limit).all(-1), torch.nan))
        layers = a.n_layers - begin + sum(a.n_layers - c.layer for c in some) * columns / width
        passes += batch * layers / a.n_layers
    return torch.cat(scores).T.unflatten(1, (a.n_layers, a.n_heads)), closure, passes


def _first_difference(prompts: Prompts) -> int:
    """The first column in which a prompt and its twin differ: before it, the twins' activations are the same."""
    (columns,) = torch.where(prompts.tokens.ne(corrupted(prompts).tokens).any(0))
    return int(columns[0]) if len(columns) else prompts.tokens.shape[1] - 1


def _affordable_tokens(model: Model) -> int:
    """Tokens that the parts of a chunk may have: what products run well at, or what a quarter of the memory holds."""
    each = model.dtype.itemsize * (6 * model.anatomy.d_model + 6 * model.anatomy.d_mlp)
    return min(CHUNK_TOKENS, free_bytes(model.device) // 4 // each)


def _direction(model: Model, prompts: Prompts, clean_run: Decomposition) -> Tensor:
    """[prompt, m, d_model]: what a unit of the last layer's stream gives the logit (difference), the norm frozen."""
    unembed = model.anatomy.W_U.T  # [vocab, d_model]
    direction = unembed[prompts.target.to(model.device)]
    if prompts.foil is not None:
        direction = direction - unembed[prompts.foil.to(model.device)]
    stream = clean_run.run["resid_post", model.anatomy.n_layers - 1]
    at = prompts.positions.to(model.device)[..., None].expand(-1, -1, stream.shape[-1])
    frozen = freeze(model.anatomy.final_norm, stream.gather(1, at))
    return direction if frozen is None else frozen.pull(direction)


def _closure(model: Model, prompts: Prompts, clean_run: Decomposition, carried: Tensor) -> Tensor:
    """[prompt]: how far the carried stream is from the model's. Raises NotApplicable where it is another one."""
    stream = clean_run.run["resid_post", model.anatomy.n_layers - 1]
    error = (carried - stream).norm(dim=-1) / stream.norm(dim=-1)
    worst = error.masked_fill(~_mask(prompts).to(error.device), 0.0).amax(1)
    # norms often compute in float32 whatever the model's dtype
    limit = max(torch.finfo(stream.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5
    if not bool((worst < limit).all()):
        raise NotApplicable(
            f"The layers of {model.name} do more than attention, norms and MLPs as headscope knows them: carried by those "
            f"rules, its stream is off by {float(worst.max()):.0%}."
        )
    return worst


def _same_layers(chosen: list[Component], n_heads: int, n_sets: int, seed: int) -> list[list[Component]]:
    """Random sets with as many heads in each layer, not the chosen ones where others are left."""
    rng = random.Random(seed)

    def draw(layer: int, count: int) -> list[Component]:
        others = [c for h in range(n_heads) if (c := head(layer, h)) not in chosen]
        return rng.sample(others if len(others) >= count else [head(layer, h) for h in range(n_heads)], count)

    counts = sorted(Counter(c.layer for c in chosen).items())
    return [[c for layer, count in counts for c in draw(layer, count)] for _ in range(n_sets)]
