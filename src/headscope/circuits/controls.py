"""Random circuits of the same shape, for comparison."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from headscope.model.graph import Graph


def random_like(graph: Graph, mask: Tensor, rng: random.Random) -> Tensor:
    """A random circuit [sender, receiver] with as many edges into each kind of receiver (q, k, v, MLP, neuron, logits) of
    each layer.

    Like a circuit it is connected: edges end at what its later layers read. Where there are too few of these, others make
    up. Edges of the given circuit may be among them.
    """
    drawn = torch.zeros_like(mask)
    readers: dict[int, list[int]] = {}
    for s, inputs in enumerate(graph.inputs):
        for r in inputs:
            readers.setdefault(r, []).append(s)
    for group in reversed(graph.groups().values()):
        n = int(mask[:, group].sum())
        if not n:
            continue
        n_before = int(graph.exists[:, group[0]].sum())  # all that come before one of them come before all
        used = [r for r in group if r not in readers or bool(drawn[readers[r]].any())]
        inside = [(s, r) for r in used for s in range(n_before)]
        chosen = rng.sample(inside, min(n, len(inside)))
        if len(chosen) < n:
            others = [(s, r) for r in sorted(set(group) - set(used)) for s in range(n_before)]
            chosen += rng.sample(others, n - len(chosen))
        for s, r in chosen:
            drawn[s, r] = True
    return drawn


__all__ = ["random_like"]
