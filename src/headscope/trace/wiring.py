"""Passes in which single edges are cut: a receiver reads the stream with some senders' parts exchanged.

What a receiver v reads is the stream plus, over its cut edges u→v, what stands for u minus what u gives in this very
pass. All else is the model's own computation. Several circuits go through one pass, one after the other along the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headscope.core.errors import UsageError
from headscope.model import Model, bias_of, weight_of
from headscope.model.discover import first_tensor
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
    batch, width = _shape(tokens)
    everything = list(range(len(graph.senders)))
    kept = torch.empty(len(everything), batch, width, model.anatomy.d_model, dtype=model.dtype, device=model.device)

    def keep(places: list[int], values: Tensor) -> None:
        kept[places] = values.view(len(places), batch, width, -1)

    working = Pass(model, _Senders(model, graph, everything, keep).captures(), [])
    with working.installed(), narrowed(model, mask, None):
        model.hf(**kwargs)
    return kept


@torch.no_grad()
def rewired(
    model: Model,
    inputs: Any,
    graph: Graph,
    cut: Tensor,
    replacement: Tensor | None,
    positions: Tensor,
    *,
    keep: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Logits [circuit, batch, m, vocab] at `positions` [batch, m] with the edges of `cut` [circuit, sender, receiver] cut.

    `replacement` [sender, batch, pos, d_model] stands for a sender on its cut edges (1 in place of batch or pos: the same
    for all); None: nothing does, as if it wrote zeros. `keep`: give what the senders wrote in these passes as well,
    [circuit, sender, batch, pos, d_model]. One pass over circuit × batch rows; where nothing is cut, nothing is touched.
    """
    tokens, mask, kwargs = prepare(model, inputs)
    batch, width = _shape(tokens)
    n_circuits = len(cut)
    cut = cut.cpu() & graph.exists
    kwargs = {name: x.repeat(n_circuits, 1) if isinstance(x, Tensor) else x for name, x in kwargs.items()}
    mask = None if mask is None else mask.repeat(n_circuits, 1)
    wires = _Wires(model, graph, cut, replacement, (n_circuits, batch, width), keep)
    working = Pass(model, wires.captures(), [])
    with working.installed(), wires.installed(), narrowed(model, mask, positions.repeat(n_circuits, 1)):
        logits = model.hf(**kwargs).logits
    given = wires.given if keep else None
    return logits.view(n_circuits, batch, *logits.shape[1:]), given


def _shape(tokens: Tensor | None) -> tuple[int, int]:
    if tokens is None:
        raise UsageError("Circuits take Prompts or token ids [batch, pos].")
    return tokens.shape[0], tokens.shape[1]


class _Senders:
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
        weight = weight_of(block.o).unflatten(0, (anatomy.n_heads, anatomy.d_head))[heads]
        made = torch.bmm(z[..., heads, :].flatten(0, 1).transpose(0, 1), weight)  # [head, batch·pos, d_model]
        if block.post_attn is not None:
            bias = bias_of(block.o)
            made = made if bias is None else made + bias / anatomy.n_heads
            made = _through(freeze(block.post_attn, made.sum(0)), made)[[h for h, _ in chosen]]
        self.keep([place for _, place in chosen], made)

    def _split(self, activation: Tensor, layer: int) -> None:
        block, which = self.model.anatomy.blocks[layer], self.split[layer]
        weight = self.model.anatomy.W_out(layer)
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


class _Wires:
    """The hooks of one pass with edges cut."""

    def __init__(
        self,
        model: Model,
        graph: Graph,
        cut: Tensor,
        replacement: Tensor | None,
        shape: tuple[int, int, int],
        keep: bool,
    ) -> None:
        self.model, self.graph, self.shape = model, graph, shape
        n_circuits, batch, width = shape
        self.chosen = list(range(len(graph.senders))) if keep else cut.any(0).any(1).nonzero()[:, 0].tolist()
        self.cut = cut[:, self.chosen].to(model.device)
        self.active = set(cut.any(0).any(0).nonzero()[:, 0].tolist())
        self.steps = torch.tensor([graph.senders[i].at for i in self.chosen])
        sizes = (n_circuits, len(self.chosen), batch * width, model.anatomy.d_model)
        # what is exchanged: its replacement minus what it gives here
        self.moved = torch.empty(sizes, dtype=model.dtype, device=model.device)
        self.given = self.moved.new_empty(n_circuits, len(self.chosen), batch, width, sizes[-1]) if keep else None
        self.replacement = replacement
        self.stream: dict[nn.Module, Tensor] = {}
        self.fed: dict[int, Tensor] = {}

    def captures(self) -> list[Capture]:
        """What the pass must read."""
        return _Senders(self.model, self.graph, self.chosen, self._keep).captures()

    def _keep(self, places: list[int], values: Tensor) -> None:
        n_circuits, batch, width = self.shape
        values = values.view(len(places), n_circuits, batch, width, -1).transpose(0, 1)
        if self.given is not None:
            self.given[:, places] = values
        moved = -values
        if self.replacement is not None:
            moved = moved + self.replacement[[self.chosen[i] for i in places]].to(values)
        self.moved[:, places] = moved.flatten(2, 3)

    def _exchanged(self, receivers: list[int]) -> Tensor:
        """[circuit, receiver, batch·pos, d_model]: what is added to the stream for receivers that read at one step."""
        n = int((self.steps <= self.graph.receivers[receivers[0]].at).sum())
        mask = self.cut[:, :n, receivers].transpose(1, 2).to(self.moved.dtype)
        found = torch.bmm(mask, self.moved[:, :n].flatten(2))
        return found.view(len(mask), len(receivers), *self.moved.shape[2:])

    def _read(self, norm: nn.Module | None, x: Tensor, receivers: list[int]) -> Tensor:
        """[circuit, receiver, batch·pos, d_model]: what receivers read, normalised; `x`: the stream in this pass."""
        x = x.view(len(self.cut), 1, *self.moved.shape[2:]) + self._exchanged(receivers)
        return x if norm is None else first_tensor(norm.forward(x))  # its hooks would take this for the stream

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Hooks on the modules that read while the block runs."""
        self.handles: list[Any] = []
        try:
            for layer in range(self.model.anatomy.n_layers):
                self._hook_layer(layer)
            if len(self.graph.receivers) - 1 in self.active:
                last = self.model.anatomy.blocks[-1].block
                self.handles.append(last.register_forward_hook(self._logits))
            yield
        finally:
            for handle in self.handles:
                handle.remove()

    def _hook_layer(self, layer: int) -> None:
        anatomy, block = self.model.anatomy, self.model.anatomy.blocks[layer]
        receivers = [i for i in self.active if self.graph.receivers[i].layer == layer]
        by_module: dict[nn.Module, list[tuple[int, slice]]] = {}
        for i in sorted(receivers):
            node = self.graph.receivers[i]
            for module, columns in columns_of(self.model, node.kind, layer, node.index):
                by_module.setdefault(module, []).append((i, columns))
        norm_mlp = mlp_norm(self.model, layer)
        for norm in {block.norm_attn, norm_mlp} - {None} if receivers else ():
            self.handles.append(norm.register_forward_pre_hook(self._note))  # type: ignore[union-attr]
        mlp = [i for i in receivers if self.graph.receivers[i].kind == "mlp"]
        if mlp:
            self.fed.pop(layer, None)
            for module in mlp_readers(self.model, layer):
                self.handles.append(module.register_forward_pre_hook(self._feeding(mlp, layer, norm_mlp)))
        for module, found in by_module.items():
            is_attn = any(self.graph.receivers[i].kind in "qkv" for i, _ in found)
            norm = block.norm_attn if is_attn else norm_mlp
            self.handles.append(module.register_forward_hook(self._projecting(found, norm, anatomy.d_model)))

    def _note(self, norm: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.stream[norm] = args[0]

    def _feeding(self, receivers: list[int], layer: int, norm: nn.Module | None) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Any, ...]:
            if layer not in self.fed:  # up and gate read the same
                x = args[0] if norm is None else self.stream[norm]
                if norm is None:  # neurons of their own read it once more
                    self.stream[self.model.anatomy.blocks[layer].block] = x
                self.fed[layer] = self._read(norm, x, receivers).view(args[0].shape)
            return (self.fed[layer], *args[1:])

        return hook

    def _projecting(self, found: list[tuple[int, slice]], norm: nn.Module | None, d_model: int) -> Any:
        receivers = list(dict.fromkeys(i for i, _ in found))
        layer = self.graph.receivers[receivers[0]].layer

        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if norm is not None:
                x = self.stream[norm]
            else:
                x = self.stream.get(self.model.anatomy.blocks[layer].block, args[0])
            read = self._read(norm, x, receivers)
            weight, bias = weight_of(module), bias_of(module)
            made = output.clone().view(len(self.cut), -1, output.shape[-1])
            for width in {c.stop - c.start for _, c in found}:
                some = [(i, c) for i, c in found if c.stop - c.start == width]
                stacked = torch.stack([weight[:, c] for _, c in some])
                values = torch.matmul(read[:, [receivers.index(i) for i, _ in some]], stacked)
                for n, (_, c) in enumerate(some):
                    made[..., c] = values[:, n] if bias is None else values[:, n] + bias[c]
            return made.view(output.shape)

        return hook

    def _logits(self, _: nn.Module, args: Any, output: Any) -> Any:
        x = first_tensor(output)
        moved = self._exchanged([len(self.graph.receivers) - 1])
        made = x + moved.reshape(x.shape)
        return made if isinstance(output, Tensor) else (made, *output[1:])


def columns_of(model: Model, kind: str, layer: int, index: int) -> list[tuple[nn.Module, slice]]:
    """The modules and output columns by which a receiver of kind q, k, v or neuron reads; none for the others."""
    anatomy, block = model.anatomy, model.anatomy.blocks[layer]
    if kind in ("q", "k", "v"):
        return [anatomy.qkv_columns(kind, index, layer)]
    if kind != "neuron":
        return []
    if block.gate_up is not None:
        return [(block.gate_up, slice(at, at + 1)) for at in (index, anatomy.d_mlp + index)]
    return [(module, slice(index, index + 1)) for module in (block.gate, block.up) if module is not None]


def mlp_readers(model: Model, layer: int) -> list[nn.Module]:
    """The modules by which an MLP reads its normalised input."""
    block = model.anatomy.blocks[layer]
    found = [module for module in (block.gate_up, block.gate, block.up) if module is not None]
    return found or ([block.mlp] if block.mlp is not None else [])


def mlp_norm(model: Model, layer: int) -> nn.Module | None:
    """The norm before an MLP: its own, or in parallel blocks that of the attention where it has none."""
    block = model.anatomy.blocks[layer]
    return block.norm_mlp or (block.norm_attn if model.anatomy.parts.parallel else None)
