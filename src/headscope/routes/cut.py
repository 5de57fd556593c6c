"""Routes as edits: every edge outside is cut, so that what a route leaves out can be shown not to matter."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.core.component import Component
from headscope.model import Model
from headscope.routes.route import Route
from headscope.trace import Edit, Run, add, attend, mean


@dataclass(frozen=True, eq=False)
class Kept:
    """What is left in: `heads` (layer, head, query, key), `mlps` (layer, position)."""

    heads: frozenset[tuple[int, int, int, int]]
    mlps: frozenset[tuple[int, int]]


def kept_by(route: Route) -> Kept:
    """The edges of heads and the MLPs that a route goes through."""
    heads, mlps = set(), set()
    for edge in route.edges:
        query, key = (int(name.rpartition("@")[2]) for name in (edge.target, edge.source))
        if edge.kind == "head":
            c = Component.parse(str(edge.component))
            heads.add((c.layer, int(c.index or 0), query, key))
        elif edge.kind == "mlp":
            mlps.add((Component.parse(str(edge.component)).layer, query))
    return Kept(frozenset(heads), frozenset(mlps))


def rest_of(kept: Kept, n_layers: int, n_heads: int, width: int) -> Kept:
    """All that is not kept."""
    heads = {(i, h, q, k) for i in range(n_layers) for h in range(n_heads) for q in range(width) for k in range(q + 1)}
    mlps = {(i, p) for i in range(n_layers) for p in range(width)}
    return Kept(frozenset(heads - kept.heads), frozenset(mlps - kept.mlps))


def random_like(kept: Kept, start: int, n_layers: int, n_heads: int, rng: random.Random) -> Kept:
    """A random route from the position `start` with as many edges of heads and MLPs in each layer.

    Like a route it is connected: edges end where the layers above read. Where these are too few, others make up.
    """
    edges, places = Counter(layer for layer, *_ in kept.heads), Counter(layer for layer, _ in kept.mlps)
    reached = {start}
    heads: set[tuple[int, int, int, int]] = set()
    mlps: set[tuple[int, int]] = set()
    for layer in reversed(range(n_layers)):
        inside = sorted(reached)
        at = rng.sample(inside, min(places[layer], len(inside)))
        at += rng.sample([p for p in range(start + 1) if p not in reached], places[layer] - len(at))
        mlps |= {(layer, p) for p in at}
        free = [(h, q, k) for q in inside for k in range(q + 1) for h in range(n_heads)]
        chosen = rng.sample(free, min(edges[layer], len(free)))
        if len(chosen) < edges[layer]:
            others = [
                (h, q, k) for q in range(start + 1) if q not in reached for k in range(q + 1) for h in range(n_heads)
            ]
            chosen += rng.sample(others, edges[layer] - len(chosen))
        heads |= {(layer, h, q, k) for h, q, k in chosen}
        reached |= {k for _, _, k in chosen}
    return Kept(frozenset(heads), frozenset(mlps))


@dataclass(frozen=True, eq=False)
class Means:
    """What stands for what is cut: `z` [layer, head, d_head] and `mlp_out` [layer, d_model] (None without MLPs)."""

    z: Tensor
    mlp_out: Tensor | None


def means_of(run: Run) -> Means:
    """Means over the real positions of a run but the first of each row, which is unlike all others."""
    z = run["z"]
    real = torch.ones(z.shape[1:3], dtype=torch.bool, device=z.device) if run.mask is None else run.mask.clone()
    if real.shape[1] > 1:
        real &= real.long().cumsum(1) > 1
    return Means(z[:, real].mean(1), run["mlp_out"][:, real].mean(1) if "mlp_out" in run else None)


def cut(model: Model, kept: Kept, patterns: Tensor, means: Means) -> list[Edit]:
    """Edits for one prompt that cut every edge of a head and every MLP but the kept ones.

    `patterns` [layer, head, query, key]: the prompt's own, in which heads go on looking: a route says what is moved, not
    why a head looks there. The share of a head's attention that is cut reads the head's mean output instead, and an MLP
    that is cut gives its mean. The stream itself and biases are kept.
    """
    n_layers, n_heads, width, _ = patterns.shape
    mask = torch.zeros(patterns.shape, dtype=torch.bool)
    if kept.heads:
        mask[tuple(torch.tensor(sorted(kept.heads)).T)] = True
    left = patterns * mask.to(patterns.device)
    cut_share = patterns.sum(-1) - left.sum(-1)  # [layer, head, query]
    edits = []
    for layer in range(n_layers):
        heads = [Component("", layer, "head", h) for h in range(n_heads)]
        edits.append(attend(heads, left[layer][:, None]))
        edits.append(add(heads, (cut_share[layer][..., None] * means.z[layer][:, None])[:, None]))
        off = [p for p in range(width) if (layer, p) not in kept.mlps]
        if off and means.mlp_out is not None:
            edits.append(mean(Component("", layer, "mlp", None), means.mlp_out[layer], positions=off))
    return edits
