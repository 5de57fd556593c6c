"""The statistics of a verdict: a paired bootstrap, sign flips over paired seeds, Holm's correction."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def bootstrap_interval(effect: Array, control: Array, *, seed: int = 0, draws: int = 4000) -> tuple[float, float]:
    """95 % interval of mean(effect) - mean(control), drawing seeds and control sets anew, seeds paired.

    `effect` [seed], `control` [set, seed].
    """
    rng = np.random.default_rng(seed)
    n_sets, n_seeds = control.shape
    seeds = rng.integers(n_seeds, size=(draws, n_seeds))
    sets = rng.integers(n_sets, size=(draws, n_sets))
    means = np.array([effect[s].mean() - control[np.ix_(k, s)].mean() for s, k in zip(seeds, sets, strict=True)])
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def sign_flip_p(difference: Array, *, seed: int = 0, draws: int = 20_000) -> float:
    """One-sided p that the mean of paired differences [seed] is above 0: the share of sign patterns whose mean is at
    least the one seen. All 2^n patterns up to 14 pairs, else `draws` random ones and the one seen.
    """
    n = len(difference)
    seen = difference.mean()
    if n <= 14:
        bits = (np.arange(2**n)[:, None] >> np.arange(n)) & 1
        means = ((1 - 2 * bits) * difference).mean(1)
        return float((means >= seen - 1e-12).mean())
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=(draws, n))
    return float((1 + ((signs * difference).mean(1) >= seen - 1e-12).sum()) / (draws + 1))


def holm(p: list[float]) -> list[float]:
    """Holm's step-down correction, in the order given."""
    order = np.argsort(p, kind="stable")
    corrected = np.empty(len(p))
    running = 0.0
    for step, i in enumerate(order):
        running = max(running, min(1.0, (len(p) - step) * p[i]))
        corrected[i] = running
    return [float(value) for value in corrected]
