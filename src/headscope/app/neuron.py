"""What the model says about one neuron: which tokens its output weights raise and lower."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from headscope.app.look import ranked
from headscope.core.errors import NotApplicable, UsageError
from headscope.model.frozen import freeze
from headscope.routes.extract import check_decoder

if TYPE_CHECKING:
    from headscope.model import Model


@torch.no_grad()
def written(model: Model, layer: int, index: int, k: int = 8) -> dict[str, Any]:
    """By the weights alone: its row of W_out through the final norm's gain and the unembedding, in logits for an
    activation of 1, relative to the mean over the vocabulary. Scales of norms, which depend on the prompt, are left out.
    """
    a = model.anatomy
    if not (0 <= layer < a.n_layers and 0 <= index < a.d_mlp):
        raise UsageError(
            f"L{layer}N{index} does not exist; {model.name} has {a.n_layers} layers of {a.d_mlp} neurons, counted from 0."
        )
    check_decoder(model, "Next tokens")
    if a.blocks[layer].down is None:
        raise NotApplicable(f"The MLPs of {model.name} are experts, whose neurons have no weights of their own here.")
    out = a.W_out(layer)[index]
    for norm in (a.blocks[layer].post_mlp, a.final_norm):
        frozen = freeze(norm, torch.linspace(-1, 1, a.d_model, dtype=out.dtype, device=out.device)[None])
        if frozen is not None:
            out = (out - out.mean() if frozen.centred else out) * frozen.gain
    logits = out @ a.W_U
    return ranked(model, logits - logits.mean(), k)
