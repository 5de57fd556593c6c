"""Passes in which single edges are cut: a receiver reads the stream with some senders' parts exchanged.

What a receiver v reads is the stream plus, over its cut edges u→v, what stands for u minus what u gives in this very
pass. All else is the model's own computation. Several circuits go through one pass, one after the other along the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headscope.model import Model, bias_of, weight_of
from headscope.model.discover import first_tensor
from headscope.model.graph import Graph
from headscope.trace.hooks import Capture, Pass
from headscope.trace.run import narrowed, prepare
from headscope.trace.senders import Senders, shape_of, wide


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
    batch, width = shape_of(tokens)
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
        d_model = model.anatomy.d_model
        # what is exchanged, [circuit, sender, batch·pos, d_model]: its replacement minus what it gives here
        self.moved = torch.empty(
            n_circuits, len(self.chosen), batch * width, d_model, dtype=wide(model.dtype), device=model.device
        )
        self.given = self.moved.new_empty(n_circuits, len(self.chosen), batch, width, d_model) if keep else None
        # all that the first `summed` senders exchange
        self.total, self.summed = self.moved.new_zeros(n_circuits, batch * width, d_model), 0
        self.step: tuple[int, list[int], Tensor] | None = None
        self.replacement = replacement
        self.stream: dict[nn.Module, Tensor] = {}
        self.fed: dict[int, Tensor] = {}

    def captures(self) -> list[Capture]:
        """What the pass must read."""
        return Senders(self.model, self.graph, self.chosen, self._keep).captures()

    def _keep(self, places: list[int], values: Tensor) -> None:
        n_circuits, batch, width = self.shape
        values = values.to(self.moved.dtype).view(len(places), n_circuits, batch, width, -1).transpose(0, 1)
        if self.given is not None:
            self.given[:, places] = values
        moved = -values
        if self.replacement is not None:
            moved = moved + self.replacement[[self.chosen[i] for i in places]].to(moved)
        self.moved[:, places] = moved.flatten(2, 3)

    def _exchanged(self, receivers: list[int]) -> Tensor:
        """[circuit, receiver, batch·pos, d_model]: what is added to the stream for receivers that read at one step."""
        at = self.graph.receivers[receivers[0]].at
        if self.step is None or self.step[0] != at:
            together = sorted(i for i in self.active if self.graph.receivers[i].at == at)
            self.step = at, together, self._exchange(at, together)
        _, together, found = self.step
        first = together.index(receivers[0])
        if together[first : first + len(receivers)] == receivers:
            return found[:, first : first + len(receivers)]
        return found[:, [together.index(i) for i in receivers]]

    def _exchange(self, at: int, receivers: list[int]) -> Tensor:
        """The same for all receivers of a step, circuit by circuit: the sum over the senders that are cut, or where fewer are
        kept, the sum over all minus that over the kept."""
        n = int((self.steps <= at).sum())
        cut = self.cut[:, :n, receivers]
        found = self.moved.new_empty(len(cut), len(receivers), *self.moved.shape[2:])
        for i, mask in enumerate(cut):
            some, others = (m.any(1).nonzero()[:, 0] for m in (mask, ~mask))
            # to pick senders out costs as much as to go through three times as many
            if 3 * len(others) < min(n, 3 * len(some)):
                self._sum_up(n)
                found[i] = self.total[i] - self._mixed(i, ~mask, others)
            else:
                found[i] = self._mixed(i, mask, some if 3 * len(some) < n else slice(0, n))
        return found

    def _sum_up(self, n: int) -> None:
        if self.summed < n:
            self.total += self.moved[:, self.summed : n].sum(1)
            self.summed = n

    def _mixed(self, circuit: int, mask: Tensor, senders: Tensor | slice) -> Tensor:
        """[receiver, batch·pos, d_model]: the sum over those of some senders that a mask [sender, receiver] names."""
        moved = self.moved[circuit, senders]
        return (mask[senders].T.to(moved.dtype) @ moved.flatten(1)).unflatten(1, moved.shape[1:])

    def _read(self, norm: nn.Module | None, x: Tensor, receivers: list[int]) -> Tensor:
        """[circuit, receiver, batch·pos, d_model]: what receivers read, normalised; `x`: the stream in this pass."""
        made = (x.view(len(self.cut), 1, *self.moved.shape[2:]) + self._exchanged(receivers)).to(x.dtype)
        return made if norm is None else first_tensor(norm.forward(made))  # its hooks would take this for the stream

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
        made = (x + moved.reshape(x.shape)).to(x.dtype)
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
