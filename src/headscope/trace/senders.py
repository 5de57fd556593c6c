"""What each sender of a graph adds to the stream in a pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headscope.core.errors import UsageError
from headscope.model import Model, bias_of, weight_of
from headscope.model.frozen import Frozen, freeze
from headscope.model.graph import Graph
from headscope.trace.hooks import Capture, Pass
from headscope.trace.run import narrowed, prepare


@torch.no_grad()
def written(model: Model, inputs: Any, graph: Graph) -> Tensor:
    """[sender, batch, pos, d_model]: what each sender adds to the stream.

    A norm after the attention or the MLP (Gemma-2, OLMo-2) is taken with the scale that it has in this pass, and a bias
    before it is shared by the heads; other biases are nobody's.
    """
    tokens, mask, kwargs = prepare(model, inputs)
    batch, width = shape_of(tokens)
    everything = list(range(len(graph.senders)))
    kept = torch.empty(
        len(everything), batch, width, model.anatomy.d_model, dtype=wide(model.dtype), device=model.device
    )

    def keep(places: list[int], values: Tensor) -> None:
        kept[places] = values.view(len(places), batch, width, -1).to(kept.dtype)

    working = Pass(model, Senders(model, graph, everything, keep).captures(), [])
    with working.installed(), narrowed(model, mask, None):
        model.hf(**kwargs)
    return kept


def shape_of(tokens: Tensor | None) -> tuple[int, int]:
    if tokens is None:
        raise UsageError("Circuits take Prompts or token ids [batch, pos].")
    return tokens.shape[0], tokens.shape[1]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which parts of the stream are added up: rounded to half precision, they would not be its sum."""
    return torch.promote_types(dtype, torch.float32)


class Senders:
    """Splits what a pass computes into what each sender writes; `keep(places in chosen, values [sender, …, d_model])`."""

    def __init__(
        self, model: Model, graph: Graph, chosen: list[int], keep: Callable[[list[int], Tensor], None]
    ) -> None:
        self.model, self.keep = model, keep
        self.at: dict[tuple[str, int], list[tuple[int, int]]] = {}  # (kind, layer) → (index, place in chosen)
        for place, i in enumerate(chosen):
            node = graph.senders[i]
            self.at.setdefault((node.kind, node.layer), []).append((node.index, place))
        self.split = {n.layer: [m.index for m in graph.senders if m.kind == "neuron" and m.layer == n.layer]
                      for n in graph.senders if n.kind == "neuron"}  # fmt: skip
        self.neurons: Tensor | None = None  # [neuron, …, d_model] of the layer at hand

    def captures(self) -> list[Capture]:
        """What a pass must read."""

        def layers(*kinds: str) -> list[int]:
            return sorted({layer for kind, layer in self.at if kind in kinds})

        found = []
        if ("embed", 0) in self.at:
            found.append(Capture("resid_pre", [0], self._embed))
        found.append(Capture("z", layers("head"), self._heads))
        found.append(Capture("neuron", [i for i in layers("neuron", "mlp") if i in self.split], self._split))
        found.append(Capture("mlp_out", layers("mlp"), self._mlp))
        return [capture for capture in found if capture.layers]

    def _embed(self, x: Tensor, layer: int) -> None:
        self.keep([self.at["embed", 0][0][1]], x[None])

    def _heads(self, z: Tensor, layer: int) -> None:
        anatomy, block = self.model.anatomy, self.model.anatomy.blocks[layer]
        chosen = self.at["head", layer]
        # the scale of a norm after the attention is that of all heads together
        heads = [h for h, _ in chosen] if block.post_attn is None else list(range(anatomy.n_heads))
        z = z.to(wide(z.dtype))
        weight = weight_of(block.o).to(z.dtype).unflatten(0, (anatomy.n_heads, anatomy.d_head))[heads]
        made = torch.bmm(z[..., heads, :].flatten(0, 1).transpose(0, 1), weight)  # [head, batch·pos, d_model]
        if block.post_attn is not None:
            bias = bias_of(block.o)
            made = made if bias is None else made + bias / anatomy.n_heads
            made = _through(freeze(block.post_attn, made.sum(0)), made)[[h for h, _ in chosen]]
        self.keep([place for _, place in chosen], made)

    def _split(self, activation: Tensor, layer: int) -> None:
        block, which = self.model.anatomy.blocks[layer], self.split[layer]
        activation = activation.to(wide(activation.dtype))
        weight = self.model.anatomy.W_out(layer).to(activation.dtype)
        made = activation[..., which].movedim(-1, 0)[..., None] * weight[which][:, None, None]
        if block.post_mlp is not None:
            whole, bias = activation @ weight, bias_of(block.down)
            made = _through(freeze(block.post_mlp, whole if bias is None else whole + bias), made)
        self.neurons = made.sum(0)
        if found := self.at.get(("neuron", layer)):
            self.keep([place for _, place in found], made[[which.index(i) for i, _ in found]])

    def _mlp(self, x: Tensor, layer: int) -> None:
        rest = x - self.neurons if layer in self.split and self.neurons is not None else x
        self.keep([self.at["mlp", layer][0][1]], rest[None])


def _through(norm: Frozen | None, parts: Tensor) -> Tensor:
    """Parts [part, …, d_model] of what a norm reads as parts of what it gives."""
    if norm is None:
        return parts
    parts = parts - parts.mean(-1, keepdim=True) if norm.centred else parts
    return parts * norm.gain / norm.scale[..., None]
