"""A few numbers that change when a head's own weights do, small enough to keep in an atlas."""

from __future__ import annotations

import torch
from torch import Tensor

from headscope.model.model import Model

#: what each row of a sketch looks at; keys and values are those of the head's kv head
MATRICES = ("W_Q", "W_K", "W_V", "W_O")


@torch.no_grad()
def head_sketch(model: Model, probes: int = 4) -> Tensor:
    """[layer, head, matrix, probe]: each matrix seen through seeded random vectors (uᵀ W w).

    Any change of a head's weights changes its numbers, except on a set of measure zero. Raises NotApplicable for
    quantised weights.
    """
    anatomy = model.anatomy
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(probes, anatomy.d_model, generator=generator, dtype=torch.float64) / anatomy.d_model**0.5
    slim = torch.randn(probes, anatomy.d_head, generator=generator, dtype=torch.float64)
    found = torch.empty(anatomy.n_layers, anatomy.n_heads, len(MATRICES), probes, dtype=torch.float64)
    for layer in range(anatomy.n_layers):
        for head in range(anatomy.n_heads):
            for i, name in enumerate(MATRICES):
                weight = getattr(anatomy, name)(layer, head).detach().cpu().double()
                left, right = (slim, wide) if name == "W_O" else (wide, slim)
                found[layer, head, i] = torch.einsum("pi,ij,pj->p", left, weight, right)
    return found
