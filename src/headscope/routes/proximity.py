"""How much of a sum is due to each of its parts, and which parts matter, without looking at all of them.

For a sum y and a part f, prox(f, y) = max(‖y‖₁ - ‖y - f‖₁, ε); a part's share is its prox over that of all parts, and a
part survives where its share is above the threshold. Ferrando & Voita 2024, Tufanov et al. 2024.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

#: what a part that does not bring the sum nearer counts as
EPSILON = 1e-5
#: numbers that one round of exact evaluations may hold
ROUND = 2**24


def proximity(y: Tensor, part: Tensor) -> Tensor:
    """[...] prox of parts [..., d_model] to sums [..., d_model]."""
    return (y.abs().sum(-1) - (y - part).abs().sum(-1)).clamp(min=EPSILON)


@dataclass(frozen=True, eq=False)
class Survivors:
    """Parts above the threshold: `fixed` [row, part] their weights (0 where cut), and for those of the many parts `rows`,
    `parts`, `weights`. The weights of a row sum to 1. `evaluated`: how many of the many parts were looked at."""

    fixed: Tensor
    rows: Tensor
    parts: Tensor
    weights: Tensor
    evaluated: int


def survivors(
    y: Tensor, fixed: Tensor, bound: Tensor, exact: Callable[[Tensor, Tensor], Tensor], threshold: float
) -> Survivors:
    """The parts of each row's sum whose share is above the threshold, as if all had been looked at.

    `y` [row, d_model]; `fixed` [row, part, d_model]: parts that are looked at anyway; `bound` [row, many]: at least the
    prox of each of the many other parts, -inf where a row has no such part; `exact(rows, parts)`: the vectors
    [n, d_model] of some of them.

    A share's denominator is the prox of all parts. What has been looked at bounds it from below, the bounds of the rest
    from above; parts are looked at by falling bound until no part's fate hangs on where between it lies. Where none is
    above the threshold, the nearest part survives.
    """
    value = proximity(y[:, None], fixed)
    there = bound > -torch.inf
    gain = (bound - EPSILON).clamp(min=0.0)
    gain[~there] = 0.0
    open_ = there.clone()
    best = value.amax(1)
    low = value.sum(1) + EPSILON * there.sum(1)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    size = 4
    while True:
        high = low + gain.sum(1)
        undecided = ((value > threshold * low[:, None]) & (value <= threshold * high[:, None])).any(1)
        for rows, _, x in found:
            hangs = (x > threshold * low[rows]) & (x <= threshold * high[rows])
            undecided[rows[hangs]] = True
        candidate = open_ & (gain + EPSILON > threshold * low[:, None])
        wanted = candidate | (open_ & (gain > 0) & undecided[:, None])
        # a sum of very many small parts: where none survives, the nearest stands for it
        lost = best <= threshold * low
        wanted |= open_ & lost[:, None] & (gain + EPSILON > best[:, None])
        rows = wanted.any(1).nonzero()[:, 0]
        if not len(rows):
            break
        k = max(1, min(size, bound.shape[1], ROUND // (len(rows) * y.shape[1])))
        _, parts = gain[rows].masked_fill(~wanted[rows], -1.0).topk(k, 1)
        chosen = wanted[rows].gather(1, parts)
        at, parts = rows[:, None].expand(-1, k)[chosen], parts[chosen]
        x = proximity(y[at], exact(at, parts))
        low.index_add_(0, at, x - EPSILON)
        best.scatter_reduce_(0, at, x, "amax")
        gain[at, parts] = 0.0
        open_[at, parts] = False
        found.append((at, parts, x))
        size *= 2
    none = torch.zeros(0, dtype=torch.long, device=y.device)
    rows, parts, x = (
        (torch.cat(column) for column in zip(*found, strict=True)) if found else (none, none, y.new_zeros(0))
    )
    bar = threshold * low
    lost = best <= bar
    kept = (value > bar[:, None]) | (lost[:, None] & (value == best[:, None]))
    alive = (x > bar[rows]) | (lost[rows] & (x == best[rows]))
    value, rows, parts, x = value * kept, rows[alive], parts[alive], x[alive]
    total = value.sum(1).index_add(0, rows, x)
    evaluated = sum(len(at) for at, _, _ in found)
    order = torch.argsort(rows * bound.shape[1] + parts)
    return Survivors(value / total[:, None], rows[order], parts[order], (x / total[rows])[order], evaluated)
