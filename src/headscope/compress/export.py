"""Carry out a plan: take heads out where an ordinary checkpoint can hold what is left, zero the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headscope.core.errors import UsageError
from headscope.methods.base import Plan
from headscope.model import Model, load
from headscope.model.checkpoint import copy_of
from headscope.model.surgery import without
from headscope.trace.hooks import active


@torch.no_grad()
def export(model: Model, plan: Plan) -> nn.Module:
    """A new Hugging Face model that the plan's heads are gone from; `model` stays as it is.

    Heads in `plan.remove` are taken out; the others have the rows of their output projection set to 0.
    """
    if active(model):
        raise UsageError("export copies the model with the edits in force; leave the edited() block first.")
    twin = copy_of(model)
    for component in plan.dropped:
        twin.anatomy.W_O(component.layer, component.index or 0).zero_()
    return without(twin, plan.remove) if plan.remove else twin.hf


def savings(model: Model, smaller: nn.Module) -> dict[str, Any]:
    """What a smaller model saves: parameters, and bytes that one token keeps in the cache."""

    def cache(hf: Any) -> int:
        a = load(hf).anatomy
        return int(2 * a.n_layers * a.n_kv_heads * a.d_head * next(hf.parameters()).element_size())

    def parameters(hf: nn.Module) -> int:
        return sum(p.numel() for p in hf.parameters())

    return {
        "parameters_before": parameters(model.hf),
        "parameters_after": parameters(smaller),
        "cache_bytes_a_token_before": cache(model.hf),
        "cache_bytes_a_token_after": cache(smaller),
    }
