"""Take heads out of a model for real, where its ordinary configuration can describe what is left."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from headscope.core.component import Component
from headscope.core.errors import NotApplicable
from headscope.model.anatomy import bias_of
from headscope.model.load import load
from headscope.model.model import Model


def removable(model: Model, dropped: Iterable[Component]) -> dict[int, list[int]]:
    """Of the dropped heads, those that can be taken out: layer → query heads.

    A configuration has one number of heads for all layers, and a kv head goes only with all query heads that read it;
    so it is the same number of whole groups in every layer, as many as the layer with the fewest has. Empty where the
    model's class cannot be built with fewer heads of the same width.
    """
    anatomy = model.anatomy
    group = anatomy.n_heads // anatomy.n_kv_heads
    gone = {(c.layer, c.index) for c in dropped}
    whole = [
        [g for g in range(anatomy.n_kv_heads) if all((layer, g * group + i) in gone for i in range(group))]
        for layer in range(anatomy.n_layers)
    ]
    count = min(min(map(len, whole)), anatomy.n_kv_heads - 1)
    if count == 0:
        return {}
    chosen = {
        layer: [g * group + i for g in groups[:count] for i in range(group)] for layer, groups in enumerate(whole)
    }
    try:
        _smaller(model, count, "meta")
    except NotApplicable:
        return {}
    return chosen


@torch.no_grad()
def without(model: Model, remove: dict[int, list[int]]) -> nn.Module:
    """A new Hugging Face model without these query heads and the kv heads that only they read.

    Raises NotApplicable where `removable` would not have given them.
    """
    anatomy = model.anatomy
    group = anatomy.n_heads // anatomy.n_kv_heads
    heads = [h for layer in sorted(remove) for h in [Component("", layer, "head", i) for i in remove[layer]]]
    if {k: sorted(v) for k, v in removable(model, heads).items()} != {k: sorted(v) for k, v in remove.items()}:
        raise NotApplicable(
            f"These heads cannot be taken out of {model.name}: an ordinary checkpoint has the same number of heads in every "
            "layer, and whole groups where query heads share a kv head."
        )
    made = _smaller(model, len(next(iter(remove.values()))) // group, str(model.device)).to(model.dtype)
    names = {module: name for name, module in model.hf.named_modules()}
    state: dict[str, Tensor] = dict(model.hf.state_dict())
    for layer, block in enumerate(anatomy.blocks):
        keep = [h for h in range(anatomy.n_heads) if h not in remove[layer]]
        keep_kv = sorted({h // group for h in keep})
        for module, kept in ((block.q, keep), (block.k, keep_kv), (block.v, keep_kv)):
            columns = _columns(kept, anatomy.d_head)
            state[f"{names[module]}.weight"] = module.weight[columns]  # type: ignore[union-attr, index]
            bias = bias_of(module)
            if bias is not None:
                state[f"{names[module]}.bias"] = bias[columns]
        state[f"{names[block.o]}.weight"] = block.o.weight[:, _columns(keep, anatomy.d_head)]  # type: ignore[index]
    made.load_state_dict(state)
    made.tie_weights()
    made.generation_config = getattr(model.hf, "generation_config", None)
    return load(made).hf


def _columns(heads: list[int], d_head: int) -> Tensor:
    return torch.tensor([h * d_head + i for h in heads for i in range(d_head)])


def _smaller(model: Model, n_groups: int, device: str) -> Any:
    """A fresh model of the same class with that many groups fewer in each layer."""
    anatomy, config = model.anatomy, copy.deepcopy(model.hf.config)
    group = anatomy.n_heads // anatomy.n_kv_heads
    refused = NotApplicable(f"The class of {model.name} cannot be built with fewer heads of the same width.")
    if anatomy.blocks[0].q is None or not all(type(b.q) is nn.Linear for b in anatomy.blocks):
        raise refused
    sizes = {
        "head_dim": anatomy.d_head,
        "num_attention_heads": anatomy.n_heads - n_groups * group,
        "num_key_value_heads": anatomy.n_kv_heads - n_groups,
    }
    for name, value in sizes.items():
        if name != "head_dim" and not hasattr(config, name):
            if name == "num_attention_heads":
                raise refused
            continue
        setattr(config, name, value)
    try:
        with torch.device(device):
            made = type(model.hf)(config)
    except Exception as error:  # each class has its own way to object to sizes it cannot hold
        raise refused from error
    shapes = {name: tuple(p.shape) for name, p in made.named_parameters()}
    changed = {name for name, p in model.hf.named_parameters() if shapes.get(name) != tuple(p.shape)}
    names = {module: name for name, module in model.hf.named_modules()}
    parts = {f"{names[m]}." for b in anatomy.blocks for m in (b.q, b.k, b.v, b.o) if m is not None}
    in_parts = all(any(name.startswith(part) for part in parts) for name in changed)
    o_name = f"{names[anatomy.blocks[0].o]}.weight"
    if not in_parts or shapes.get(o_name) != (anatomy.d_model, sizes["num_attention_heads"] * anatomy.d_head):
        raise refused
    return made
