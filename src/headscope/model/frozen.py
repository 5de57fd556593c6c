"""Norms with their scale frozen: a linear map, so that what enters a sum can be told apart after it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headscope.model.discover import first_tensor


@dataclass(frozen=True, eq=False)
class Frozen:
    """`norm(x) = (x - mean(x) if centred) ⊙ gain / scale + bias`, with the scale of one input kept.

    gain, bias [d_model]; scale broadcastable to the input without its last dim.
    """

    gain: Tensor
    bias: Tensor
    scale: Tensor
    centred: bool

    def pull(self, direction: Tensor) -> Tensor:
        """The direction g' with `x · g' = (norm(x) - bias) · direction` for the frozen scale; [..., d_model]."""
        pulled = direction * self.gain / self.scale[..., None]
        return pulled - pulled.mean(-1, keepdim=True) if self.centred else pulled

    def through(self, parts: Tensor, rows: Tensor | None = None) -> Tensor:
        """Parts [n, d_model] of what the norm reads, as parts of what it gives (its bias is one more).

        `rows` [n]: which input's scale each part takes; part i takes that of input i by default.
        """
        parts = parts - parts.mean(-1, keepdim=True) if self.centred else parts
        scale = self.scale if rows is None else self.scale[rows]
        return parts * self.gain / scale[..., None]

    def to(self, dtype: torch.dtype) -> Frozen:
        """The same in another dtype."""
        return Frozen(self.gain.to(dtype), self.bias.to(dtype), self.scale.to(dtype), self.centred)


def freeze(norm: nn.Module | None, x: Tensor) -> Frozen | None:
    """The norm as it acts on `x` [..., d_model], read from what it does rather than from its class.

    Works for LayerNorm and RMSNorm of any make (also those whose gain is 1 + weight).
    """
    if norm is None:
        return None

    def apply(v: Tensor) -> Tensor:
        return first_tensor(norm.forward(v))  # hooks on the norm would take this for the model's own pass

    bias = apply(torch.zeros_like(x[..., :1, :]).reshape(-1, x.shape[-1])[:1])[0]
    # ±1, balanced, and far above any epsilon: both kinds of norm divide it by its own size
    probe = torch.ones_like(bias)
    probe[1::2] = -1.0
    probe = probe - probe.mean()
    probe = probe / probe.pow(2).mean().sqrt()
    large = 1e4 * probe
    gain = (apply(large[None])[0] - bias) / probe
    shifted = apply((large + 1e4)[None])[0]
    centred = bool(torch.allclose(shifted, gain * probe + bias, rtol=1e-2, atol=1e-3 * float(gain.abs().max())))
    inner = (x - x.mean(-1, keepdim=True) if centred else x) * gain
    out = apply(x) - bias
    scale = inner.pow(2).sum(-1) / (inner * out).sum(-1)
    return Frozen(gain, bias, scale, centred)
