"""Gradients with respect to what each receiver of a graph reads, q, k and v of every head on their own, from one pass.

Autograd gives the gradient at the projections' outputs; from there it is taken back through the columns of one head and
through the norm's exact Jacobian. No gradient of a weight is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headscope.core.errors import UsageError
from headscope.model import Model, weight_of
from headscope.model.discover import first_tensor
from headscope.model.frozen import Frozen, freeze
from headscope.model.graph import Graph
from headscope.trace.edit import patch
from headscope.trace.hooks import Pass
from headscope.trace.run import narrowed, prepare
from headscope.trace.wiring import columns_of, mlp_norm, mlp_readers


def add_gradients(
    total: Tensor,
    model: Model,
    inputs: Any,
    graph: Graph,
    positions: Tensor,
    score: Callable[[Tensor], Tensor],
    *,
    start: Tensor | None = None,
    weight: float = 1.0,
) -> Tensor:
    """Add `weight` × ∂(Σ score)/∂(what each receiver reads) to `total` [receiver, batch, pos, d_model], in place.

    `score(logits [batch, m, vocab])` gives [batch] values, which are returned. `start` [batch, pos, d_model]: what layer 0
    is given instead of the embedded tokens. Raises UsageError where the score has no gradient.
    """
    _, mask, kwargs = prepare(model, inputs)
    padding = None if mask is None or bool(mask.all()) else mask
    edits = [] if start is None else [patch("L0RESID", start[None], mask=padding)]
    reads = _Reads(model, graph)
    with Pass(model, [], edits, grad=True).installed(), reads.installed(), torch.enable_grad():
        with narrowed(model, mask, positions):
            values = score(model.hf(**kwargs).logits)
        if not values.requires_grad:
            raise UsageError(
                "The metric has no gradient; take logit_diff, logit, prob or loss, or cut the edges one by one."
            )
        kept = list(reads.kept.values())
        reads.found = dict(zip(reads.kept, torch.autograd.grad(values.sum(), kept), strict=True))
    reads.add(total.flatten(1, 2), weight)
    return values.detach()


class _Reads:
    """Keeps the tensors whose gradients are wanted, and the stream at each norm."""

    def __init__(self, model: Model, graph: Graph) -> None:
        self.model, self.graph = model, graph
        self.kept: dict[tuple[str, nn.Module], Tensor] = {}
        self.found: dict[tuple[str, nn.Module], Tensor] = {}
        self.stream: dict[nn.Module, Tensor] = {}
        self.norms: dict[nn.Module, tuple[Tensor, Frozen]] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Hooks on the modules that read while the block runs."""
        anatomy = self.model.anatomy
        handles: list[Any] = []
        try:
            for layer, block in enumerate(anatomy.blocks):
                norms = {block.norm_attn, mlp_norm(self.model, layer)} - {None}
                handles += [norm.register_forward_pre_hook(self._note) for norm in norms]  # type: ignore[union-attr]
                projections = {block.q, block.k, block.v, block.qkv} - {None}
                readers = mlp_readers(self.model, layer)
                if any(node.kind == "neuron" and node.layer == layer for node in self.graph.receivers):
                    projections |= set(readers)
                handles += [module.register_forward_hook(self._made) for module in projections]  # type: ignore[union-attr]
                handles += [module.register_forward_pre_hook(self._given) for module in readers]
            handles.append(anatomy.blocks[-1].block.register_forward_hook(self._made))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, norm: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.stream[norm] = args[0].detach()

    def _made(self, module: nn.Module, args: Any, output: Any) -> None:
        self.kept["output", module] = first_tensor(output)

    def _given(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Any, ...]:
        x = args[0].view_as(args[0])  # a tensor of its own: others may read the same
        self.kept["input", module] = x
        return (x, *args[1:])

    @torch.no_grad()
    def add(self, total: Tensor, weight: float) -> None:
        """Add the gradients to `total` [receiver, batch·pos, d_model]."""
        total[-1].add_(self.found["output", self.model.anatomy.blocks[-1].block].flatten(0, 1), alpha=weight)
        for (layer, kind), receivers in self.graph.groups.items():
            block = self.model.anatomy.blocks[min(layer, len(self.model.anatomy.blocks) - 1)]
            norm = mlp_norm(self.model, layer) if kind in ("mlp", "neuron") else block.norm_attn
            if kind in ("q", "k", "v", "neuron"):
                total[receivers[0] : receivers[-1] + 1].add_(self._columns(receivers, norm), alpha=weight)
            elif kind == "mlp":
                gradient = sum(self.found["input", module] for module in mlp_readers(self.model, layer))
                rows = self._back(norm, gradient.reshape(total.shape[1:])[None])  # type: ignore[union-attr]
                split = self.graph.groups.get((layer, "neuron"))
                if split:  # what is added for neurons stands for them alone
                    rows = rows - self._columns(split, norm).sum(0)
                total[receivers[0]].add_(rows[0], alpha=weight)

    def _columns(self, receivers: list[int], norm: nn.Module | None) -> Tensor:
        """[receiver, batch·pos, d_model]: gradients of receivers of one layer and kind, taken back to the stream."""
        made: Tensor | None = None
        nodes = [self.graph.receivers[i] for i in receivers]
        by_node = [columns_of(self.model, node.kind, node.layer, node.index) for node in nodes]
        for found in zip(*by_node, strict=True):  # one after the other the modules by which each reads
            module = found[0][0]
            gradient, weights = self.found["output", module], weight_of(module).detach()
            gradient = gradient.reshape(-1, gradient.shape[-1])
            stacked = torch.stack([gradient[:, c] for _, c in found])
            part = torch.bmm(stacked, torch.stack([weights[:, c].T for _, c in found]))
            made = part if made is None else made + part
        assert made is not None  # every receiver of these kinds reads by a module
        return self._back(norm, made)

    def _back(self, norm: nn.Module | None, cotangent: Tensor) -> Tensor:
        """What a gradient [receiver, batch·pos, d_model] at a norm's output is at its input, the stream of this pass."""
        if norm is None:
            return cotangent
        x, frozen = self._norm(norm, cotangent.shape[-1])
        gained = cotangent * frozen.gain
        scale = frozen.scale[:, None]
        along = torch.einsum("rpd,pd->rp", gained, x)[..., None] / (x.shape[-1] * scale**2)
        made = (gained - along * x) / scale
        return made - made.mean(-1, keepdim=True) if frozen.centred else made

    def _norm(self, norm: nn.Module, d_model: int) -> tuple[Tensor, Frozen]:
        """A norm as it acts in this pass, and what it reads [batch·pos, d_model], without its mean where that is taken."""
        if norm not in self.norms:
            x = self.stream[norm].reshape(-1, d_model)
            frozen = freeze(norm, x)
            assert frozen is not None  # there is a norm
            self.norms[norm] = (x - x.mean(-1, keepdim=True) if frozen.centred else x), frozen
        return self.norms[norm]
