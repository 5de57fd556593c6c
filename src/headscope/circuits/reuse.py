"""Do two circuits reuse the same heads, more than chance in these layers would have it?"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from headscope.circuits.circuit import Circuit
from headscope.core.component import Component, head
from headscope.core.errors import UsageError
from headscope.model import Model


@dataclass(frozen=True)
class Overlap:
    """Heads that two circuits share. `jaccard`: shared of all in either; `share`: shared of the smaller circuit's.

    `chance`: the mean Jaccard of random heads, as many in each layer as either circuit has; `p`: how often these share as
    many, one-sided.
    """

    shared: tuple[str, ...]
    n_a: int
    n_b: int
    jaccard: float
    share: float
    chance: float
    p: float


def overlap(model: Model, a: Circuit, b: Circuit, *, draws: int = 10_000, seed: int = 0) -> Overlap:
    """How many heads two circuits share, against random heads matched by layer (component reuse, Merullo et al. 2024).

    Raises UsageError for a circuit without heads.
    """
    first, second = set(a.heads()), set(b.heads())
    if not first or not second:
        raise UsageError("A circuit without heads shares none.")
    n_heads, rng = model.anatomy.n_heads, random.Random(seed)
    seen = len(first & second)
    random_shares = []
    at_least = 0
    for _ in range(draws):
        x, y = _drawn(first, n_heads, rng), _drawn(second, n_heads, rng)
        random_shares.append(len(x & y) / len(x | y))
        at_least += len(x & y) >= seen
    return Overlap(
        shared=tuple(str(c) for c in sorted(first & second)), n_a=len(first), n_b=len(second),
        jaccard=seen / len(first | second), share=seen / min(len(first), len(second)),
        chance=sum(random_shares) / draws, p=(1 + at_least) / (1 + draws),
    )  # fmt: skip


def _drawn(heads: set[Component], n_heads: int, rng: random.Random) -> set[Component]:
    """Random heads, as many in each layer."""
    counts = Counter(c.layer for c in heads)
    return {head(layer, h) for layer, n in sorted(counts.items()) for h in rng.sample(range(n_heads), n)}


__all__ = ["Overlap", "overlap"]
