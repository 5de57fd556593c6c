"""Random heads matched in size and layer to the chosen ones."""

from __future__ import annotations

import random
from collections import Counter

from headscope.core.component import Component, head
from headscope.core.errors import UsageError


def matched_sets(
    chosen: list[Component], n_layers: int, n_heads: int, n_sets: int, seed: int
) -> tuple[list[list[Component]], bool]:
    """`n_sets` random sets with the same number of heads in each layer, none of them chosen.

    Where a layer has too few left, the nearest layers give theirs; the second value says whether that happened.
    """
    if len(chosen) * 2 > n_layers * n_heads:
        raise UsageError(
            f"{len(chosen)} heads leave too few others for random controls; verify at most half of all heads."
        )
    rng = random.Random(seed)
    borrowed = False
    sets = []
    for _ in range(n_sets):
        taken = set(chosen)
        picked = []
        for layer, count in sorted(Counter(c.layer for c in chosen).items()):
            for distance in range(n_layers):
                near = {layer - distance, layer + distance} & set(range(n_layers))
                free = [head(i, h) for i in sorted(near) for h in range(n_heads) if head(i, h) not in taken]
                take = rng.sample(free, min(count, len(free)))
                borrowed |= distance > 0 and bool(take)
                picked += take
                taken |= set(take)
                count -= len(take)
                if not count:
                    break
        sets.append(sorted(picked))
    return sets, borrowed
