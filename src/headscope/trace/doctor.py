"""Prove on a given model that what we see is what it computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headscope.core.errors import ModelError, NotApplicable
from headscope.model import Model, bias_of, load, probe_inputs, weight_of
from headscope.trace.hooks import Capture, Pass
from headscope.trace.run import Run, trace

#: largest max|Δ| / max|reference| that passes, by dtype
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}

_PLAIN = ["resid_pre", "z", "attn_out", "mlp_out", "resid_post"]


def load_checked(source: Any, *, check: bool = True, **options: Any) -> Model:
    """`model.load`, then the self-check; a model that fails is refused unless `check=False`.

    Options are those of `headscope.model.load`: tokenizer, dtype, device, attn, revision, trust_remote_code.
    """
    model = load(source, **options)
    if check:
        result = doctor(model)
        failed = [c["name"] for c in result["checks"] if c["status"] == "failed"]
        if not result["ok"]:
            why = (
                "logits differ from the plain model" if not result["bit_identical"] else f"failed: {', '.join(failed)}"
            )
            raise ModelError(
                f"{model.name} did not pass its self-check ({why}), so what headscope reads may not be what it computes. "
                "See `headscope doctor`; check=False (--force) loads it all the same."
            )
    return model


@torch.no_grad()
def doctor(model: Model) -> dict[str, Any]:
    """Check a model on a short random input: {ok, bit_identical, checks: [{name, max_rel_error, status}], unverified}.

    An error is max|Δ| / max|reference| over all layers, under the attention backend the model was loaded with.
    """
    inputs = probe_inputs(model.hf, length=12)
    anatomy, first = model.anatomy, model.anatomy.blocks[0]
    causal_extra = {"use_cache": False} if model.is_causal else {}
    plain = model.hf(**inputs, **causal_extra)
    sites = [site for site in _PLAIN if not (site == "mlp_out" and first.mlp_out is None)]
    run = trace(model, {**inputs, **causal_extra}, sites)
    with Pass(model, [Capture(site) for site in sites], []).installed():
        again = model.hf(**inputs, **causal_extra)
    checks: list[dict[str, Any]] = []
    unverified: list[str] = []
    identical = torch.equal(plain[0], again[0])

    def check(name: str, pairs: list[tuple[Tensor, Tensor]], floor: float = 0.0) -> None:
        # tensor by tensor: Python's max passes over a NaN
        errors = [(a - b).abs().max().double() / b.abs().max().double().clamp(min=1e-30) for a, b in pairs]
        error = float(torch.stack([e.cpu() for e in errors]).max())
        good = error <= max(floor, TOLERANCE.get(model.dtype, 1e-2))
        checks.append({"name": name, "max_rel_error": error, "status": "passed" if good else "failed"})

    def attempt(name: str, make: Any, floor: float = 0.0) -> None:
        try:
            check(name, make(), floor)
        except NotApplicable as error:
            unverified.append(f"{name}: {error}")
        except RuntimeError:  # shapes that do not fit: this model computes something else
            checks.append({"name": name, "max_rel_error": float("inf"), "status": "failed"})

    layers = range(anatomy.n_layers)
    attempt("embed + attn_out + mlp_out = residual", lambda: _sums(model, run, sites))
    attempt("sum of heads + bias = attn_out", lambda: [_heads(model, run, layer) for layer in layers])
    attempt("pattern @ v = z", lambda: _mix(model, inputs, run))
    # many families take the softmax in float32 whatever the model's dtype
    attempt("pattern rows sum to 1", lambda: _rows(model, inputs), floor=1e-6)
    attempt("x @ W_V + bias = v", lambda: _values(model, inputs))
    if first.down is not None:
        attempt("neuron @ W_out + bias = mlp_out", lambda: _neurons(model, inputs))
    else:
        unverified.append("neurons: the MLPs are experts or absent")
    ok = identical and all(c["status"] == "passed" for c in checks)
    return {"ok": ok, "bit_identical": identical, "checks": checks, "unverified": unverified}


def _sums(model: Model, run: Run, sites: list[str]) -> list[tuple[Tensor, Tensor]]:
    """Over the whole stream where norms leave it alone, block by block where they come after each sum (BERT)."""
    blocks, post = model.anatomy.blocks, model.anatomy.parts.norm_placement == "post"
    pairs = []
    total = run["resid_pre", 0]
    for layer, block in enumerate(blocks):
        attn_out = run["attn_out", layer]
        mlp_out = run["mlp_out", layer] if "mlp_out" in sites else 0
        if post:
            mid = block.norm_attn(run["resid_pre", layer] + attn_out)  # type: ignore[misc]
            pairs.append((block.norm_mlp(mid + mlp_out), run["resid_post", layer]))  # type: ignore[misc]
        else:
            total = total + attn_out + mlp_out
            pairs.append((total, run["resid_post", layer]))
    return pairs


def _heads(model: Model, run: Run, layer: int) -> tuple[Tensor, Tensor]:
    anatomy, block = model.anatomy, model.anatomy.blocks[layer]
    z = run["z", layer]
    total = sum(z[..., h, :] @ anatomy.W_O(layer, h) for h in range(anatomy.n_heads))
    bias = anatomy.b_O(layer)
    total = total if bias is None else total + bias
    total = block.post_attn(total) if block.post_attn is not None else total
    return total, run["attn_out", layer]


def _mix(model: Model, inputs: dict[str, Any], run: Run) -> list[tuple[Tensor, Tensor]]:
    inner = trace(model, inputs, ["pattern", "v", "z"], logits=None)
    r = model.anatomy.n_heads // model.anatomy.n_kv_heads
    return [
        (torch.einsum("bhqk,bkhd->bqhd", inner["pattern", i], inner["v", i].repeat_interleave(r, 2)), run["z", i])
        for i in range(model.anatomy.n_layers)
    ]


def _rows(model: Model, inputs: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    sums = trace(model, inputs, [Capture("pattern", reduce=lambda x, _: x.sum(-1))], logits=None)["pattern"]
    return [(sums, torch.ones_like(sums))]


def _values(model: Model, inputs: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """The weights under the names W_V are those that make v, with the block's own normalised input."""
    anatomy = model.anatomy
    read: dict[int, Tensor] = {}
    hooks = []
    for layer in range(anatomy.n_layers):
        module = anatomy.qkv_columns("v", 0, layer)[0]
        hooks.append(module.register_forward_pre_hook(lambda _, args, layer=layer: read.__setitem__(layer, args[0])))
    try:
        run = trace(model, inputs, ["v"], logits=None)
    finally:
        for hook in hooks:
            hook.remove()
    pairs = []
    for layer in range(anatomy.n_layers):
        made = []
        for g in range(anatomy.n_kv_heads):
            module, columns = anatomy.qkv_columns("v", g, layer)
            bias = bias_of(module)
            made.append(F.linear(read[layer], weight_of(module)[:, columns].T, None if bias is None else bias[columns]))
        reference = run["v", layer]
        pairs.append((torch.stack(made, -2).view_as(reference).detach(), reference))
    return pairs


def _neurons(model: Model, inputs: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    run = trace(model, inputs, ["neuron", "mlp_out"], logits=None)
    pairs = []
    for layer, block in enumerate(model.anatomy.blocks):
        out = run["neuron", layer] @ model.anatomy.W_out(layer)
        bias = bias_of(block.down)
        out = out if bias is None else out + bias
        out = block.post_mlp(out) if block.post_mlp is not None else out
        pairs.append((out, run["mlp_out", layer]))
    return pairs
