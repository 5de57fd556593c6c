"""What writes to the residual stream and what reads it, in order: the nodes between which a circuit has edges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from headscope.core.component import Component, components
from headscope.core.errors import NotApplicable, UsageError, nearest
from headscope.model.model import Model


@dataclass(frozen=True)
class Node:
    """`kind`: embed, head, mlp, neuron (what is written), q, k, v, mlp, neuron, logits (what is read).

    `at`: the step of the stream from which a sender stands in it, or at which a receiver reads it.
    """

    name: str
    kind: str
    layer: int
    index: int
    at: int


@dataclass(frozen=True, eq=False)
class Graph:
    """Senders and receivers in the order of the pass; masks of edges are [sender, receiver] everywhere.

    Senders: `E` (the stream entering layer 0), `L5H3`, `L5MLP`, and of an MLP the neurons split out of it, `L5N7`.
    Receivers: `L5H3.q` of a query head, `L5KV1.k` and `L5KV1.v` of a kv head, `L5MLP`, `L5N7`, and `logits`.
    An edge `L3H2->L5H1.q` is there where the sender is written before the receiver reads.
    """

    senders: tuple[Node, ...]
    receivers: tuple[Node, ...]
    heads_a_kv: int
    neurons: tuple[str, ...]

    @cached_property
    def exists(self) -> Tensor:
        """[sender, receiver] bool."""
        written = torch.tensor([node.at for node in self.senders])
        read = torch.tensor([node.at for node in self.receivers])
        return written[:, None] <= read[None, :]

    @property
    def n_edges(self) -> int:
        """How many edges there are."""
        return int(self.exists.sum())

    @cached_property
    def sender(self) -> dict[str, int]:
        """Name → number of a sender."""
        return {node.name: i for i, node in enumerate(self.senders)}

    @cached_property
    def receiver(self) -> dict[str, int]:
        """Name → number of a receiver."""
        return {node.name: i for i, node in enumerate(self.receivers)}

    @cached_property
    def inputs(self) -> list[list[int]]:
        """By which receivers each sender gets what it reads: q, k and v of a head; none for the embedding."""
        found: list[list[int]] = []
        for node in self.senders:
            if node.kind == "embed":
                found.append([])
            elif node.kind == "head":
                kv = f"L{node.layer}KV{node.index // self.heads_a_kv}"
                found.append([self.receiver[name] for name in (f"{node.name}.q", f"{kv}.k", f"{kv}.v")])
            else:
                found.append([self.receiver[node.name]])
        return found

    def edge(self, name: str) -> tuple[int, int]:
        """(sender, receiver) of an edge like `L3H2->L5H1.q`. Raises UsageError for one that is not there."""
        source, arrow, target = name.partition("->")
        if not arrow:
            raise UsageError(f"{name!r} is not an edge; write for example E->L0H1.q or L3H2->logits.")
        for given, known in ((source, self.sender), (target, self.receiver)):
            if given not in known:
                raise UsageError(f"There is no node {given!r} in this graph.{nearest(given, known)}")
        s, r = self.sender[source], self.receiver[target]
        if not bool(self.exists[s, r]):
            raise UsageError(f"There is no edge {name}: {target} reads before {source} is written.")
        return s, r

    def mask(self, edges: Iterable[str]) -> Tensor:
        """[sender, receiver] bool: True at the named edges. Raises UsageError for one that is not there."""
        found = torch.zeros(self.exists.shape, dtype=torch.bool)
        for name in edges:
            found[self.edge(name)] = True
        return found

    def names(self, mask: Tensor) -> tuple[str, ...]:
        """The edges of a mask [sender, receiver], receivers in order, then senders."""
        return tuple(
            f"{self.senders[s].name}->{self.receivers[r].name}" for r, s in mask.T.nonzero().tolist()
        )  # fmt: skip

    @cached_property
    def groups(self) -> dict[tuple[int, str], list[int]]:
        """Receivers by layer and kind, in the order of the pass."""
        found: dict[tuple[int, str], list[int]] = {}
        for i, node in enumerate(self.receivers):
            found.setdefault((node.layer, node.kind), []).append(i)
        return found


def graph_of(model: Model, neurons: str | Component | Sequence[str | Component] = ()) -> Graph:
    """The graph of a decoder; `neurons` are split out of their MLPs, as senders and as receivers.

    Raises NotApplicable for models that are no decoders with a plain stream, UsageError for a neuron that is not there.
    """
    anatomy = model.anatomy
    if not model.is_causal or anatomy.parts.norm_placement == "post" or anatomy.parts.unembed is None:
        raise NotApplicable(
            f"Circuits are found in decoders that predict a next token and whose stream is a sum; {model.name} is none."
        )
    split = _split(model, neurons)
    parallel = anatomy.parts.parallel
    senders = [Node("E", "embed", 0, 0, 0)]
    receivers = []
    for layer, block in enumerate(anatomy.blocks):
        read = 2 * layer
        after_attn = read + 2 if parallel else read + 1
        read_mlp = read if parallel else read + 1
        receivers += [Node(f"L{layer}H{h}.q", "q", layer, h, read) for h in range(anatomy.n_heads)]
        for part in ("k", "v"):
            receivers += [Node(f"L{layer}KV{g}.{part}", part, layer, g, read) for g in range(anatomy.n_kv_heads)]
        senders += [Node(f"L{layer}H{h}", "head", layer, h, after_attn) for h in range(anatomy.n_heads)]
        for index in split.get(layer, ()):
            senders.append(Node(f"L{layer}N{index}", "neuron", layer, index, read + 2))
            receivers.append(Node(f"L{layer}N{index}", "neuron", layer, index, read_mlp))
        if block.mlp_out is not None:
            senders.append(Node(f"L{layer}MLP", "mlp", layer, 0, read + 2))
            receivers.append(Node(f"L{layer}MLP", "mlp", layer, 0, read_mlp))
    receivers.append(Node("logits", "logits", anatomy.n_layers, 0, 2 * anatomy.n_layers))
    names = tuple(f"L{layer}N{index}" for layer, found in sorted(split.items()) for index in found)
    return Graph(tuple(senders), tuple(receivers), anatomy.n_heads // anatomy.n_kv_heads, names)


def named_neurons(neurons: str | Component | Sequence[str | Component]) -> tuple[Component, ...]:
    """Names of neurons to split out, read. Raises UsageError for what names none."""
    found = components(neurons) if neurons else ()
    for c in found:
        if c.kind != "neuron" or c.expert is not None or c.stack:
            raise UsageError(f"{c} is not a neuron; only neurons like L5N7 are split out of their MLP.")
    return found


def _split(model: Model, neurons: str | Component | Sequence[str | Component]) -> dict[int, list[int]]:
    anatomy = model.anatomy
    found: dict[int, set[int]] = {}
    for c in named_neurons(neurons):
        if c.layer >= anatomy.n_layers or int(c.index or 0) >= anatomy.d_mlp:
            raise UsageError(
                f"{c} does not exist: this model has {anatomy.n_layers} layers of {anatomy.d_mlp} neurons."
            )
        found.setdefault(c.layer, set()).add(int(c.index or 0))
    if found and anatomy.blocks[0].down is None:
        raise NotApplicable(f"The MLPs of {model.name} are experts or absent; no neuron can be split out of them yet.")
    return {layer: sorted(indices) for layer, indices in found.items()}


__all__ = ["Graph", "Node", "graph_of", "named_neurons"]
