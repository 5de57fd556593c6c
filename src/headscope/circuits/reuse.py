"""Do two circuits reuse the same heads, more than chance in these layers would have it?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from headscope.circuits.circuit import Circuit
from headscope.core.component import Component
from headscope.core.errors import UsageError
from headscope.model import Model


@dataclass(frozen=True)
class Overlap:
    """Heads that two circuits share. `jaccard`: shared of all in either; `share`: shared of the smaller circuit's.

    Of random heads, as many in each layer as either circuit has: `expected`, how many they share on average; `chance`,
    their mean Jaccard; `p`, the probability that they share as many. All three are exact.
    """

    shared: tuple[str, ...]
    n_a: int
    n_b: int
    jaccard: float
    share: float
    expected: float
    chance: float
    p: float


def overlap(model: Model, a: Circuit | Iterable[Component], b: Circuit | Iterable[Component]) -> Overlap:
    """How many heads two circuits share, against random heads matched by layer (component reuse, Merullo et al. 2024).

    A circuit may be given as its heads. Raises UsageError for a circuit without heads.
    """
    import numpy as np
    from scipy.stats import hypergeom

    first, second = (set(x.heads() if isinstance(x, Circuit) else x) for x in (a, b))
    if not first or not second:
        raise UsageError("A circuit without heads shares none.")
    of_a, of_b = (Counter(c.layer for c in heads) for heads in (first, second))
    distribution = np.ones(1)  # of the number that random heads share: layers are independent
    for layer in of_a.keys() & of_b.keys():
        here = hypergeom(model.anatomy.n_heads, of_a[layer], of_b[layer])
        distribution = np.convolve(distribution, here.pmf(np.arange(min(of_a[layer], of_b[layer]) + 1)))
    numbers, together, seen = np.arange(len(distribution)), len(first) + len(second), len(first & second)
    return Overlap(
        shared=tuple(str(c) for c in sorted(first & second)), n_a=len(first), n_b=len(second),
        jaccard=seen / (together - seen), share=seen / min(len(first), len(second)),
        expected=float(distribution @ numbers), chance=float(distribution @ (numbers / (together - numbers))),
        p=float(min(1.0, distribution[seen:].sum())),
    )  # fmt: skip


__all__ = ["Overlap", "overlap"]
