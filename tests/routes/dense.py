"""Routes by the full definition: every part of every sum, one at a time. The oracle of the lazy search."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from headscope.model import Model, bias_of
from headscope.routes.proximity import EPSILON
from headscope.trace import trace

Key = tuple[str, str, str]


def prox(y: Tensor, part: Tensor) -> float:
    return max(float((y.abs().sum() - (y - part).abs().sum()).detach()), EPSILON)


def shares(y: Tensor, parts: dict[tuple[str, str], Tensor], threshold: float) -> dict[tuple[str, str], float]:
    """(source, kind or component) → weight of what survives."""
    value = {key: prox(y, part) for key, part in parts.items()}
    total = sum(value.values())
    kept = {key: x for key, x in value.items() if x / total > threshold}
    if not kept:
        best = max(value.values())
        kept = {key: x for key, x in value.items() if x == best}
    return {key: x / sum(kept.values()) for key, x in kept.items()}


def edges(model: Model, tokens: Tensor, at: int, threshold: float, biases: str = "part") -> dict[Key, float]:
    """(source, target, component or kind) → weight, from the state after the last layer at position `at`."""
    found: dict[Key, float] = {}
    waiting, seen = deque([(model.anatomy.n_layers - 1, at)]), set()
    while waiting:
        layer, i = waiting.popleft()
        if layer < 0 or (layer, i) in seen:
            continue
        seen.add((layer, i))
        for (source, target, what), weight in _into(model, tokens, layer, i, threshold, biases).items():
            found[source, target, what] = weight
            name, _, position = source.partition("@")
            if name == f"L{layer - 1}":
                waiting.append((layer - 1, int(position)))
    return found


def attention_parts(
    model: Model, tokens: Tensor, layer: int, i: int, biases: str = "part"
) -> dict[tuple[str, str], Tensor]:
    """(source, component or kind) → vector [d_model] of what the attention and the residual bring to position i."""
    anatomy, block = model.anatomy, model.anatomy.blocks[layer]
    run = trace(model, tokens, ["resid_pre", "attn_out", "pattern", "v", "z"], layers=[layer], logits=None)
    below = "E" if layer == 0 else f"L{layer - 1}"
    through: Tensor | float = 1.0
    if block.post_attn is not None:  # all such norms here are a factor a coordinate
        made = block.o(run["z", layer].flatten(2))
        through = (run["attn_out", layer] / made)[0, i]
    parts = {(f"{below}@{i}", "residual"): run["resid_pre", layer][0, i]}
    module = anatomy.qkv_columns("v", 0, layer)[0]
    constant = torch.zeros(anatomy.d_model, dtype=model.dtype)
    for h in range(anatomy.n_heads):
        g = anatomy.kv_of(h)
        b_V = bias_of(module if block.qkv is not None else anatomy.qkv_columns("v", g, layer)[0])
        b_V = torch.zeros(anatomy.d_head) if b_V is None else b_V[anatomy.qkv_columns("v", g, layer)[1]]
        for j in range(i + 1):
            alpha, v = run["pattern", layer][0, h, i, j], run["v", layer][0, j, g]
            v = v if biases == "heads" else v - b_V
            parts[f"{below}@{j}", f"L{layer}H{h}"] = alpha * (v @ anatomy.W_O(layer, h)) * through
            if biases == "part":
                constant = constant + alpha * (b_V.to(v.dtype) @ anatomy.W_O(layer, h))
    if bias_of(block.o) is not None:
        constant = constant + bias_of(block.o)
    if biases != "drop" and bool(constant.any()):
        parts[f"L{layer}B@{i}", "bias"] = constant * through
    return parts


def _into(model: Model, tokens: Tensor, layer: int, i: int, threshold: float, biases: str) -> dict[Key, float]:
    parts = attention_parts(model, tokens, layer, i, biases)
    run = trace(model, tokens, ["resid_pre", "attn_out", "mlp_out"], layers=[layer], logits=None)
    pre, attn, mlp = (run[site, layer][0, i] for site in ("resid_pre", "attn_out", "mlp_out"))
    below = "E" if layer == 0 else f"L{layer - 1}"
    out: dict[Key, float] = {}
    top, mid = f"L{layer}@{i}", f"L{layer}A@{i}"
    mlp_part = (f"L{layer}MLP@{i}", f"L{layer}MLP")
    if model.anatomy.parts.parallel:
        mid, reads = top, f"{below}@{i}"
        kept = shares(pre + attn + mlp, {**parts, mlp_part: mlp}, threshold)
    else:
        reads = mid
        after = shares(pre + attn + mlp, {(mid, "residual"): pre + attn, mlp_part: mlp}, threshold)
        out |= {(source, top, what): weight for (source, what), weight in after.items()}
        kept = shares(pre + attn, parts, threshold)
    out |= {(source, mid, what): weight for (source, what), weight in kept.items()}
    if (*mlp_part[:1], top, mlp_part[1]) in out:
        out[reads, mlp_part[0], "input"] = 1.0
    return out
