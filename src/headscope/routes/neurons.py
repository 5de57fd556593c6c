"""Which neurons an MLP's part of the stream comes from, those of experts too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headscope.core.errors import NotApplicable
from headscope.model import Model, bias_of
from headscope.model.frozen import Frozen, freeze
from headscope.routes.proximity import EPSILON, ROUND, proximity

_CANNOT = "The neurons of {} cannot be named"


@dataclass(frozen=True, eq=False)
class Written:
    """What one MLP wrote at one position: `activation` [n], `W_out` [n, d_model], `constant` [d_model] (biases).

    `norm`: the norm after the MLP as it acts there. `layer`, `experts`: for the neurons' names; experts in the order in
    which their neurons stand, none where the MLP has no experts.
    """

    activation: Tensor
    W_out: Tensor
    constant: Tensor
    norm: Frozen | None
    layer: int
    experts: tuple[int, ...] = ()

    def vectors(self, which: Tensor) -> Tensor:
        """[n, d_model] what some neurons add to the stream."""
        vectors = self.activation[which, None] * self.W_out[which]
        return vectors if self.norm is None else self.norm.through(vectors)

    def names(self, number: int) -> str:
        """A neuron's name, such as L5N7, or L5E2N7 for one of expert 2."""
        if not self.experts:
            return f"L{self.layer}N{number}"
        slot, n = divmod(number, len(self.activation) // len(self.experts))
        return f"L{self.layer}E{self.experts[slot]}N{n}"


def nearest(y: Tensor, rest: Tensor, written: Written, k: int) -> list[tuple[int, float]]:
    """The k neurons with the largest shares of the sum `y` [d_model], whose other parts are `rest` and the biases."""
    sign = torch.where(y < 0, -1.0, 1.0).to(y.dtype)
    pulled = sign if written.norm is None else written.norm.pull(sign)
    share = torch.full_like(written.activation, EPSILON)
    # a part brings no more than its sign allows, so that the others count as EPSILON without being looked at
    (open_,) = torch.where(written.activation * (written.W_out @ pulled.reshape(-1)) > EPSILON)
    for some in open_.split(max(1, ROUND // len(y))):
        share[some] = proximity(y, written.vectors(some))
    total = share.sum() + proximity(y, torch.stack([rest, written.constant])).sum()
    value, best = share.topk(min(k, len(share)))
    return list(zip(best.tolist(), (value / total).tolist(), strict=True))


def neurons_of(
    model: Model, layer: int, look: dict[str, Any], which: Tensor, mlp_out: Tensor, dtype: torch.dtype
) -> list[Written]:
    """What the MLP of a layer wrote, `mlp_out` [row, d_model], at the positions `which` of those that were looked at.

    Raises NotApplicable where the neurons cannot be told apart.
    """
    block = model.anatomy.blocks[layer]
    if "routed" in look:
        found = _of_experts(layer, look, which, dtype)
        made = torch.stack([w.activation @ w.W_out for w in found])
        if float((made - mlp_out).abs().max()) > 1e-2 * float(mlp_out.abs().max()):
            raise NotApplicable(f"{_CANNOT.format(model.name)}: its experts are not all that writes in layer {layer}.")
        return found
    activation, W_out, bias = look["neuron"][which], model.anatomy.W_out(layer).to(dtype), bias_of(block.down)
    constant = torch.zeros_like(W_out[0]) if bias is None else bias.to(dtype)
    if block.post_mlp is None:
        return [Written(row, W_out, constant, None, layer) for row in activation]
    frozen = freeze(block.post_mlp, (activation @ W_out + constant).to(model.dtype))
    assert frozen is not None  # there is a norm
    found = []
    for i, row in enumerate(activation):
        norm = Frozen(frozen.gain, frozen.bias, frozen.scale[i : i + 1], frozen.centred).to(dtype)
        found.append(Written(row, W_out, norm.through(constant[None])[0] + norm.bias, norm, layer))
    return found


@contextmanager
def routing(model: Model, layer: int) -> Iterator[dict[str, Any]]:
    """While the block runs, note which experts of a layer each position goes to: `hidden` [pos, d_model], `index` and
    `weight` [pos, slot], and the `module`.

    Raises NotApplicable where the experts are not of the fused kind (transformers 5).
    """
    mlp, d_model = model.anatomy.blocks[layer].mlp, model.anatomy.d_model
    fused = [
        module
        for module in ([] if mlp is None else mlp.modules())
        for down in [getattr(module, "down_proj", None)]
        if isinstance(down, Tensor) and down.ndim == 3 and down.shape[1] == d_model and hasattr(module, "act_fn")
    ]
    if len(fused) != 1:
        raise NotApplicable(f"{_CANNOT.format(model.name)}: layer {layer} has experts of another make, or no MLP.")
    routed: dict[str, Any] = {"module": fused[0]}

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        routed.update(zip(("hidden", "index", "weight"), (*args, *kwargs.values()), strict=False))

    handle = fused[0].register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield routed
    finally:
        handle.remove()


def _of_experts(layer: int, look: dict[str, Any], which: Tensor, dtype: torch.dtype) -> list[Written]:
    routed, rows = look["routed"], look["rows"][which]
    module = routed["module"]
    found = []
    for position in rows.tolist():
        x = routed["hidden"][position]
        activations, weights, experts = [], [], routed["index"][position].tolist()
        for expert, weight in zip(experts, routed["weight"][position], strict=True):
            gate, up = (module.gate_up_proj[expert] @ x).chunk(2)
            activations.append((weight * module.act_fn(gate) * up).to(dtype))
            weights.append(module.down_proj[expert].T.to(dtype))
        activation, W_out = torch.cat(activations), torch.cat(weights)
        found.append(Written(activation, W_out, torch.zeros_like(W_out[0]), None, layer, tuple(experts)))
    return found
