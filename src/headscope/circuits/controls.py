"""Random circuits of the same shape, for comparison."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from headscope.model.graph import Graph


def random_like(graph: Graph, mask: Tensor, rng: random.Random) -> Tensor:
    """A random circuit [sender, receiver] with as many edges from each kind of sender (embedding, head, MLP, neuron) into
    each kind of receiver (q, k, v, MLP, neuron, logits) of each layer.

    Like a circuit it is connected: edges end at what its later layers read. Where there are too few of these, others make
    up. Edges of the given circuit may be among them.
    """
    drawn, exists = torch.zeros_like(mask), graph.exists.tolist()
    readers: dict[int, list[int]] = {}
    for s, inputs in enumerate(graph.inputs):
        for r in inputs:
            readers.setdefault(r, []).append(s)
    kinds: dict[str, list[int]] = {}
    for s, node in enumerate(graph.senders):
        kinds.setdefault(node.kind, []).append(s)
    for group in reversed(graph.groups.values()):
        used = [r for r in group if r not in readers or bool(drawn[readers[r]].any())]
        others = sorted(set(group) - set(used))
        for senders in kinds.values():
            n = int(mask[senders][:, group].sum())
            if not n:
                continue
            inside = [(s, r) for r in used for s in senders if exists[s][r]]
            chosen = rng.sample(inside, min(n, len(inside)))
            if len(chosen) < n:
                rest = [(s, r) for r in others for s in senders if exists[s][r]]
                chosen += rng.sample(rest, n - len(chosen))
            for s, r in chosen:
                drawn[s, r] = True
    return drawn


__all__ = ["random_like"]
