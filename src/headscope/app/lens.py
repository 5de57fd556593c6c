"""The logit lens: what each layer's stream would predict next, if it were the last."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headscope.app.look import check_decoder, words
from headscope.core.errors import UsageError
from headscope.model.discover import first_tensor
from headscope.trace import trace

if TYPE_CHECKING:
    from headscope.model import Model

#: positions of one table: each costs an unembedding in every layer
WIDTH = 24


@torch.no_grad()
def lens(model: Model, ids: Tensor, first: int | None = None, k: int = 10) -> dict[str, Any]:
    """The best next token of every layer at up to WIDTH positions from `first` (the last ones by default), and the model's
    own best `k`. Rows: {layer, tokens, probs} from layer 0 up; the last one is the model's own prediction.
    """
    check_decoder(model)
    width = ids.shape[1]
    start = max(0, width - WIDTH) if first is None else first
    if not 0 <= start < width:
        raise UsageError(f"The prompt has positions 0 to {width - 1}.")
    at = torch.arange(start, min(width, start + WIDTH))
    n = model.anatomy.n_layers
    run = trace(model, ids, ["resid_post"], logits=at[None].to(model.device))
    final = run.logits[0].float().softmax(-1)  # [pos vocab]
    rows = [_best(model, layer, _unembed(model, run["resid_post", layer][0, at])) for layer in range(n - 1)]
    rows.append(_best(model, n - 1, final))
    best = final.topk(k)
    return {
        "tokens": words(model, ids[0]),
        "first": start,
        "rows": rows,
        "next": [
            [{"token": t, "p": float(p)} for t, p in zip(words(model, i), v, strict=True)]
            for i, v in zip(best.indices, best.values, strict=True)
        ],
    }


def _best(model: Model, layer: int, probs: Tensor) -> dict[str, Any]:
    found = probs.max(-1)
    return {"layer": layer, "tokens": words(model, found.indices), "probs": [float(p) for p in found.values]}


def _unembed(model: Model, x: Tensor) -> Tensor:
    """Next-token probabilities [pos vocab] of a stream, as the model makes them of its last one."""
    a = model.anatomy
    logits = a.parts.unembed(x if a.final_norm is None else first_tensor(a.final_norm(x)))  # type: ignore[misc]
    cap = getattr(model.hf.config, "final_logit_softcapping", None)
    return (cap * torch.tanh(logits / cap) if cap else logits).float().softmax(-1)
