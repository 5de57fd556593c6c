"""What plain transformers itself gives: attentions of its eager code, and nothing of ours."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from headscope.model import Model


def patterns(model: Model, tokens: Tensor) -> Tensor:
    """[layer, batch, head, query, key] by `output_attentions` of a copy that runs eager code."""
    twin: Any = copy.deepcopy(model.hf)
    twin.set_attn_implementation("eager")
    with torch.no_grad():
        return torch.stack(twin(input_ids=tokens, output_attentions=True, use_cache=False).attentions)


def eager(hf: Any) -> Any:
    """The model with eager attention, whose products our captures then see as they are."""
    hf.set_attn_implementation("eager")
    return hf


def in_double(hf: Any) -> Any:
    """The model with RMS norms in float64: those of transformers round to float32 inside, whatever the model's dtype."""
    for module in hf.modules():
        if "RMSNorm" in type(module).__name__:
            gain = (module.weight + (1.0 if "Gemma" in type(module).__name__ else 0.0)).detach()
            eps = getattr(module, "variance_epsilon", None) or module.eps
            module.forward = lambda x, gain=gain, eps=eps: x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain
    return hf
