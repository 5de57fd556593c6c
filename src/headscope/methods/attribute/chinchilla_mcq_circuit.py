"""The heads and MLPs that name the letter of a multiple choice, and how little of its queries and keys a letter head needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headscope.core.component import Component
from headscope.core.controls import matched_sets
from headscope.core.errors import NotApplicable, UsageError
from headscope.methods.attribute.dla import Dla
from headscope.methods.base import AttributeMethod, Check, Info
from headscope.sweep import clean, sweep
from headscope.sweep.patching import FLOOR, corrupted
from headscope.tasks import Prompts, baseline
from headscope.tasks import make as make_task
from headscope.trace import Capture, Edit, patch, resolve, trace

if TYPE_CHECKING:
    import xarray as xr

    from headscope.model import Model

HELD_OUT = 1000
#: a letter head pays at least this attention to the right label, and more than to any other
LOOKS = 0.1


@dataclass(frozen=True)
class ChinchillaMcqCircuit(AttributeMethod):
    """Output nodes of multiple choice, and their letter heads in few dimensions.

    What it measures: the direct contribution of each head (and MLP) to the answer's logit against the foil's, whether the
    few largest of them carry the answer, and whether the heads among them that look at the right label need more than
    'the Nth label' of their queries, keys and values.

    Formula: a[prompt, l, h] is `dla` summed over source positions; output nodes are the `nodes` heads and MLPs with the
    largest mean (attribute `output_nodes`); `recovered` = (m_patched - m_corrupt) / (m_clean - m_corrupt) with their clean
    outputs put into the corrupted prompts at the scored position, m the logit difference. Compression (`subspaces`,
    `compressed`): q, k and v [label, d_head], each the mean over prompts whose answer (q) or label (k, v) is the Nth, minus
    their mean; the first `rank` right singular vectors P; q' = q̄ + (q - q̄) P Pᵀ at the scored position, k' and v' likewise
    at the labels; the head's z there is recomputed with them.

    Options: nodes, how many; rank, dimensions kept.

    Does not show: how the model finds which option is right; effects of a head through later ones.

    Cost: one forward pass, and two for what is recovered.

    Paper and differences: Lieberum et al. 2023 on Chinchilla 70B. Queries, keys and values are compressed on one clean run,
    so a compressed head does not see what others have changed.
    """

    info = Info(
        title="Multiple-choice output nodes",
        papers=("arXiv:2307.09458",),
        claim="Patching the nodes with the largest logit attribution recovers most of the logit difference; three dimensions "
        "of the letter heads' queries, keys and values keep the accuracy, but not under random labels.",
        higher_means="adds more to the answer's logit",
        cost="1 forward pass, and 2 for what is recovered",
        needs=("causal", "pattern", "logits", "tokens"),
        dims=("prompt", "layer", "head"),
    )

    nodes: int = 10
    rank: int = 3

    def attribute(self, model: Model, prompts: Prompts, *, seed: int = 0) -> xr.DataArray:
        if self.nodes < 1 or self.rank < 1:
            raise UsageError(f"nodes is {self.nodes} and rank is {self.rank}; both are at least 1.")
        found = Dla().attribute(model, prompts, seed=seed).sum("position")
        chosen = output_nodes(found, self.nodes)
        found.attrs["output_nodes"] = [str(c) for c in chosen]
        if prompts.corrupt is not None and prompts.foil is not None:
            (found.attrs["recovered"],) = recovered(model, prompts, [chosen])
        return found

    def check(self, model: Model, *, seed: int = 0) -> Check:
        prompts = make_task("multiple-choice", model, 32, seed)
        base = baseline(model, prompts)
        if not base.able:
            raise NotApplicable(f"The claim cannot be tested on {model.name}: {base.reason}.")
        nodes = output_nodes(self.attribute(model, prompts, seed=seed), self.nodes)
        heads = [c for c in nodes if c.kind == "head"]
        sizes = (model.anatomy.n_layers, model.anatomy.n_heads)
        others = matched_sets(heads, *sizes, 5, seed)[0] if heads and 2 * len(heads) <= len(model.heads()) else []
        share, *rest = recovered(model, prompts, [nodes, *others])
        letters = letter_heads(model, prompts, heads)
        figures = {"recovered": share, "recovered, random heads (highest)": max(rest, default=0.0)}
        figures["letter heads"] = float(len(letters))
        kept = {}
        for name, random_labels in (("A to D", False), ("random labels", True)):
            held_out = make_task("multiple-choice", model, 32, HELD_OUT + seed, random_labels=random_labels)
            sets: list[list[Edit]] = [[]]
            if letters:
                sets.append(compressed(model, held_out, subspaces(model, prompts, letters, self.rank)))
            plain, *small = sweep(model, held_out, sets, "accuracy").mean("prompt").values
            kept[name] = float(small[0] / max(plain, 1e-9)) if small else 0.0
            figures |= {f"accuracy, {name}": float(plain), f"accuracy kept, {name}": kept[name]}
        shown = share > max(0.5, *rest, 0.0) and kept["A to D"] > 0.9 and kept["random labels"] < 0.8 * kept["A to D"]
        return Check(
            bool(shown),
            figures,
            "shown if over half is recovered, over 0.9 of the accuracy is kept with A to D, and a fifth less under random labels",
        )


def output_nodes(attribution: xr.DataArray, n: int) -> list[Component]:
    """The `n` heads and MLPs with the largest mean contribution, largest first."""
    mean, mlps = attribution.mean("prompt"), attribution.mlp.mean("prompt")
    values = {Component("", int(i), "mlp"): float(mlps[i]) for i in attribution["layer"].values}
    for layer in attribution["layer"].values:
        values |= {Component("", int(layer), "head", int(h)): float(mean[layer, h]) for h in attribution["head"].values}
    return sorted(values, key=lambda c: -values[c])[:n]


def recovered(model: Model, prompts: Prompts, sets: list[list[Component]]) -> list[float]:
    """The share of the logit difference that comes back when each set has its clean outputs in the corrupted prompts, at
    the scored position."""
    twin = corrupted(prompts)
    sites = [Capture("z"), *([Capture("mlp_out")] if any(c.kind == "mlp" for s in sets for c in s) else [])]
    run = trace(model, prompts, sites, logits=None)
    good, bad = (float(clean(model, p, "logit_diff").double().mean()) for p in (prompts, twin))
    if abs(good - bad) < FLOOR:
        raise NotApplicable("The logit difference is the same on the clean and the corrupted prompts.")
    edits = [
        [
            patch(part, run, positions=[position], rows=rows)
            for part in ([c for c in nodes if c.kind == kind] for kind in ("head", "mlp"))
            if part
            for position, rows in prompts.scored().items()
        ]
        for nodes in sets
    ]
    values = sweep(model, twin, [resolve(model, one) for one in edits], "logit_diff").mean("prompt").values
    return [float(value) for value in (values - bad) / (good - bad)]


def letter_heads(model: Model, prompts: Prompts, heads: list[Component]) -> list[Component]:
    """Those of the heads that look, from the scored position, at the right label, and more than at any other."""
    if not heads:
        return []
    labels, right = _labels(prompts)
    at = prompts.positions[:, -1]

    def attention(pattern: Tensor, layer: int) -> Tensor:  # → [head, label], the right one first
        rows = pattern[torch.arange(len(at)), :, at].cpu()  # [batch, head, key]
        rows = rows.gather(2, labels[:, None].expand(-1, rows.shape[1], -1))
        on = rows.gather(2, right[:, None, None].expand(-1, rows.shape[1], 1)).mean(0)[:, 0]
        off = (rows.sum(2).mean(0) - on) / (labels.shape[1] - 1)
        return torch.stack([on, off], 1)

    run = trace(model, prompts, Capture("pattern", sorted({c.layer for c in heads}), attention), logits=None)
    looks = {c: run["pattern", c.layer][c.index] for c in heads}
    return [c for c, (on, off) in looks.items() if on > LOOKS and on > off]


@dataclass(frozen=True, eq=False)
class Subspace:
    """Of one head: means [d_head] and bases [d_head, rank] of what differs between labels, by site (q, k, v)."""

    head: Component
    mean: dict[str, Tensor]
    basis: dict[str, Tensor]

    def project(self, site: str, x: Tensor) -> Tensor:
        """x [..., d_head] with only the part kept that tells labels apart."""
        mean, basis = self.mean[site].to(x), self.basis[site].to(x)
        return mean + (x - mean) @ basis @ basis.T


def subspaces(model: Model, prompts: Prompts, heads: list[Component], rank: int) -> list[Subspace]:
    """The `rank` directions in which the heads' queries, keys and values differ most between the labels, mean over
    prompts."""
    labels, right = _labels(prompts)
    n = labels.shape[1]
    if set(right.tolist()) != set(range(n)):
        raise NotApplicable("Not every label is right once, so queries for them cannot be compared; take more prompts.")
    found = []
    for head, read in _read(model, prompts, heads, labels).items():
        by_label = {
            "q": torch.stack([read.q[right == i].mean(0) for i in range(n)]),
            "k": read.k.mean(0),
            "v": read.v.mean(0),
        }  # [label, d_head]
        mean = {site: x.mean(0) for site, x in by_label.items()}
        basis = {
            site: torch.linalg.svd(x - mean[site], full_matrices=False).Vh[:rank].T for site, x in by_label.items()
        }
        found.append(Subspace(head, mean, basis))
    return found


def compressed(model: Model, prompts: Prompts, spaces: list[Subspace]) -> list[Edit]:
    """Edits, for these prompts, that give each head the output it has with its query, and the keys and values of the
    labels, in its subspace."""
    labels, _ = _labels(prompts)
    heads = [space.head for space in spaces]
    written = []
    for space, read in zip(spaces, _read(model, prompts, heads, labels).values(), strict=True):
        q, k, v = (space.project(site, getattr(read, site)) for site in ("q", "k", "v"))
        # softmax of changed scores: the old weights times exp(change), normalised anew
        change = read.scale * (_products(q, k) - _products(read.q, read.k))
        highest = change.amax(1, keepdim=True).clamp(min=0)  # the other scores change by 0
        raised, kept = read.weights * (change - highest).exp(), (-highest).exp()
        total = raised.sum(1, keepdim=True) + kept * (1 - read.weights.sum(1, keepdim=True))
        written.append((_mixed(raised, v) + kept * read.rest) / total)
    whole = torch.stack(written)[:, :, None].expand(-1, -1, prompts.tokens.shape[1], -1)
    padded = {} if prompts.mask is None else {"mask": prompts.mask}
    return [
        patch(heads, whole, positions=[position], rows=rows, **padded) for position, rows in prompts.scored().items()
    ]


@dataclass(frozen=True, eq=False)
class _Read:
    """What a head does at the scored position: its query [batch, d_head], the labels' keys and values [batch, label,
    d_head] and weights [batch, label], what it reads elsewhere [batch, d_head], and what q·k is multiplied by."""

    q: Tensor
    k: Tensor
    v: Tensor
    weights: Tensor
    rest: Tensor
    scale: Tensor


@torch.no_grad()
def _read(model: Model, prompts: Prompts, heads: list[Component], labels: Tensor) -> dict[Component, _Read]:
    layers = sorted({c.layer for c in heads})
    run = trace(
        model, prompts, [Capture(site, layers) for site in ("q", "k", "v", "z", "attn_scores", "pattern")], logits=None
    )
    row, at = torch.arange(len(prompts)), prompts.positions[:, -1]
    found = {}
    for c in heads:
        index, kv = c.index or 0, model.kv_of(c.index or 0)
        q = run["q", c.layer][row, at, index]
        k, v = (run[site, c.layer][row[:, None], labels, kv] for site in ("k", "v"))
        scores, weights = (
            run[site, c.layer][row, index, at].gather(1, labels.to(model.device)) for site in ("attn_scores", "pattern")
        )
        x, y = (part - part.mean(0) for part in (_products(q, k), scores))  # a bias of each position aside
        scale = (x * y).sum() / x.pow(2).sum().clamp(min=1e-30)
        rest = run["z", c.layer][row, at, index] - _mixed(weights, v)
        found[c] = _Read(q, k, v, weights, rest, scale)
    return found


def _products(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bd,bnd->bn", q, k)


def _mixed(weights: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bn,bnd->bd", weights, v)


def _labels(prompts: Prompts) -> tuple[Tensor, Tensor]:
    """Positions of the labels [prompt, label], and which of them is right [prompt]."""
    if "labels" not in prompts.meta:
        raise NotApplicable(f"The task {prompts.name} does not say where its labels stand; take multiple-choice.")
    labels = torch.tensor(prompts.meta["labels"])
    same = prompts.tokens.cpu().gather(1, labels) == prompts.target[:, -1:].cpu()
    if not bool((same.sum(1) == 1).all()):
        raise NotApplicable(f"A prompt of {prompts.name} does not have its answer as one of its labels.")
    return labels, same.long().argmax(1)
