"""Carry parts of the stream forward by contextual decomposition: every activation is a part plus the rest.

The rules are those of Hsu et al. 2024: patterns and the norms' scales are those of the clean pass, biases are split, and
of an activation the rest takes what it would be alone. They are exact: part + rest is the model's own activation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headscope.core.errors import NotApplicable
from headscope.model import Model, bias_of, weight_of
from headscope.model.discover import Block, is_linear, is_norm
from headscope.model.frozen import Frozen, freeze
from headscope.trace.hooks import Capture
from headscope.trace.run import Run, trace


@dataclass(frozen=True, eq=False)
class Split:
    """`whole` [batch, pos, d], and `part` [source, batch, column, d] of it for every source, in the last columns of pos.

    In the columns before, the parts are 0.
    """

    whole: Tensor
    part: Tensor

    @property
    def same(self) -> Tensor:
        """[batch, column, d]: the whole in the columns of the parts."""
        return self.whole[:, self.whole.shape[1] - self.part.shape[2] :]

    @property
    def rest(self) -> Tensor:
        """[source, batch, column, d]: what is not the part."""
        return self.same - self.part

    def __add__(self, other: Split) -> Split:
        return Split(self.whole + other.whole, self.part + other.part)

    def joined(self, parts: Tensor | None) -> Split:
        """With more sources, which the whole holds already."""
        return self if parts is None else Split(self.whole, torch.cat([self.part, parts]))

    def linear(self, weight: Tensor, bias: Tensor | None) -> Split:
        """x @ weight + bias; the part takes |part @ weight| / (|part @ weight| + |rest @ weight|) of the bias."""
        return Split(self.whole @ weight, self.part @ weight).biased(bias)

    def norm(self, frozen: Frozen | None) -> Split:
        """Through a norm with its scale frozen, which is linear; None for no norm."""
        if frozen is None:
            return self
        made = Split(through(frozen, self.whole), through(frozen, self.part))
        return made.biased(frozen.bias if bool(frozen.bias.any()) else None)

    def biased(self, bias: Tensor | None) -> Split:
        """Plus a bias, shared out by size."""
        if bias is None:
            return self
        size = self.part.abs()
        share = size / (size + self.rest.abs()).clamp(min=torch.finfo(size.dtype).tiny)
        return Split(self.whole + bias, self.part + share * bias)

    def mixed(self, pattern: Tensor) -> Split:
        """Values [.., pos, kv_head · d_head] mixed by the clean pattern [batch, kv_head, group, query, key]."""
        kv_heads = pattern.shape[1]
        first = self.whole.shape[1] - self.part.shape[2]
        whole, part = (x.unflatten(-1, (kv_heads, -1)) for x in (self.whole, self.part))
        whole = torch.einsum("bgrqk,bkgd->bqgrd", pattern, whole)
        part = torch.einsum("bgrqk,sbkgd->sbqgrd", pattern[..., first:, first:], part)
        return Split(whole.flatten(2), part.flatten(3))

    def stabilised(self) -> Split:
        """Where part and rest have opposite signs, the larger one takes all and the other nothing."""
        rest = self.rest
        winner = torch.where(self.part.abs() > rest.abs(), self.same, 0.0)
        return Split(self.whole, torch.where(self.part * rest < 0, winner, self.part))


def through(frozen: Frozen, x: Tensor) -> Tensor:
    """x [..., pos, d_model] through a norm with the scale [..., pos] of a run's last positions, without the bias."""
    x = x - x.mean(-1, keepdim=True) if frozen.centred else x
    scale = frozen.scale[..., frozen.scale.shape[-1] - x.shape[-2] :]
    return x * (frozen.gain / scale[..., None])


def neurons(up: Split, gate: Split | None, activation: nn.Module) -> Split:
    """The neurons: the rest takes what the rest of the inputs gives by itself, the part all that this is short of.

    γ' = f(γ), β' = f(β + γ) - f(γ); gated: γ' = f(gate_γ) up_γ, β' = f(gate) up - γ'.
    """
    if gate is None:
        whole, rest = activation(up.whole), activation(up.rest)
    else:
        whole, rest = activation(gate.whole) * up.whole, activation(gate.rest) * up.rest
    return Split(whole, Split(whole, rest).rest)


@dataclass(eq=False)
class Decomposition:
    """What a clean pass gave, and the rules by which parts of its stream are carried on.

    `run` holds resid_pre, pattern and the other sites asked for. `activations`: of each layer's MLP. `stable`: stabilise
    the stream after every addition.
    """

    model: Model
    run: Run
    activations: dict[int, nn.Module] = field(default_factory=dict)
    stable: bool = False

    def layers(self, layer: int, parts: Tensor, joining: Mapping[int, Tensor]) -> Iterator[Split]:
        """The stream after each layer from `layer` on.

        `parts` [source, batch, column, d_model]: sources that the stream holds before it. `joining`: layer → what
        further sources write with the attention there (before any norm after it), in the same form.
        """
        stream = Split(self.run["resid_pre", layer], parts)
        for i in range(layer, self.model.anatomy.n_layers):
            stream = self._layer(i, stream, joining.get(i))
            yield stream

    def _layer(self, i: int, stream: Split, writing: Tensor | None) -> Split:
        block = self.model.anatomy.blocks[i]
        read = stream.norm(freeze(block.norm_attn, stream.whole))
        attn = self._attention(i, read)
        if block.post_attn is not None:
            frozen = freeze(block.post_attn, attn.whole)
            attn = attn.norm(frozen)
            writing = None if writing is None or frozen is None else through(frozen, writing)
        if self.model.anatomy.parts.parallel:
            if block.norm_mlp is not None:
                read = stream.norm(freeze(block.norm_mlp, stream.whole))
            return self._stream((stream + attn + self._mlp(i, read)).joined(writing))
        stream = self._stream((stream + attn).joined(writing))
        if block.down is None:
            return stream
        return self._stream(stream + self._mlp(i, stream.norm(freeze(block.norm_mlp, stream.whole))))

    def _stream(self, stream: Split) -> Split:
        return stream.stabilised() if self.stable else stream

    def _attention(self, i: int, read: Split) -> Split:
        anatomy, block = self.model.anatomy, self.model.anatomy.blocks[i]
        columns = [anatomy.qkv_columns("v", kv, i) for kv in range(anatomy.n_kv_heads)]
        module, width = columns[0][0], anatomy.d_head * anatomy.n_kv_heads
        weight, bias = weight_of(module), bias_of(module)
        if weight.shape[1] > width:  # fused with q and k
            weight = torch.cat([weight[:, c] for _, c in columns], 1)
            bias = None if bias is None else torch.cat([bias[c] for _, c in columns])
        pattern = self.run["pattern", i].unflatten(1, (anatomy.n_kv_heads, -1))
        return read.linear(weight, bias).mixed(pattern).linear(weight_of(block.o), bias_of(block.o))

    def _mlp(self, i: int, read: Split) -> Split:
        anatomy, block = self.model.anatomy, self.model.anatomy.blocks[i]
        W_gate, (b_gate, b_up) = anatomy.W_gate(i), _biases(block, anatomy.d_mlp)
        gate = None if W_gate is None else read.linear(W_gate, b_gate)
        inner = neurons(read.linear(anatomy.W_in(i), b_up), gate, self.activations[i])
        out = inner.linear(anatomy.W_out(i), bias_of(block.down))
        return out.norm(freeze(block.post_mlp, out.whole))


def _biases(block: Block, d_mlp: int) -> tuple[Tensor | None, Tensor | None]:
    """Biases of the gate and up sides of an MLP."""
    if block.gate_up is None:
        return (None if block.gate is None else bias_of(block.gate)), bias_of(block.up)
    bias = bias_of(block.gate_up)
    return (None, None) if bias is None else (bias[:d_mlp], bias[d_mlp:])


def decompose(
    model: Model, inputs: Any, sites: list[str], *, logits: Tensor | None = None, stable: bool = False
) -> Decomposition:
    """A clean pass over `inputs` that keeps what parts of its stream can be carried on with, and `sites`.

    Raises NotApplicable for norms after every sum, for experts, and where the MLP's activation cannot be told.
    """
    anatomy = model.anatomy
    if anatomy.parts.norm_placement == "post":
        raise NotApplicable(f"{model.name} normalises after every sum; parts of its stream cannot be carried on yet.")
    if anatomy.blocks[0].n_experts:
        raise NotApplicable(f"{model.name} has experts; parts of its stream cannot be carried through them yet.")
    last = anatomy.n_layers - 1
    captures = [*map(Capture, ("resid_pre", "pattern", *sites)), Capture("resid_post", [last])]
    with _activations(model) as found:
        run = trace(model, inputs, captures, logits=logits)
    if any(block.down is not None and i not in found for i, block in enumerate(anatomy.blocks)):
        raise NotApplicable(f"The activation of {model.name}'s MLPs is no module of its own, so it cannot be told.")
    return Decomposition(model, run, found, stable)


@contextmanager
def _activations(model: Model) -> Iterator[dict[int, nn.Module]]:
    """While the block runs, find the activation of each layer's MLP: layer → module.

    It is the module that is given the very tensor that the gate's projection (or the only one) just made, whatever either
    is called. `Decomposition` computes with it; whoever takes its results compares them with the model's own stream.
    """
    found: dict[int, nn.Module] = {}
    made: dict[int, int] = {}  # layer → address of what the projection made
    handles: list[Any] = []

    def watch(layer: int, block: Block) -> None:
        projection = block.gate_up or block.gate or block.up

        def note(_: nn.Module, args: Any, output: Tensor) -> None:
            made[layer] = output.data_ptr()

        def compare(module: nn.Module, args: Any) -> None:
            if not args or not isinstance(args[0], Tensor) or args[0].shape[-1] != model.anatomy.d_mlp:
                return
            if args[0].data_ptr() == made.get(layer):
                found.setdefault(layer, module)

        if projection is None:
            return
        handles.append(projection.register_forward_hook(note))
        for module in block.block.modules():
            if not list(module.children()) and not is_linear(module) and not is_norm(module):
                handles.append(module.register_forward_pre_hook(compare))

    try:
        for layer, block in enumerate(model.anatomy.blocks):
            watch(layer, block)
        yield found
    finally:
        for handle in handles:
            handle.remove()
