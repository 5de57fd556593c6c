"""What it costs to look at every layer's z."""

from __future__ import annotations

import torch

import headscope as hs
from benchmarks.common import MODEL, Result, interleaved, median_ratio

SHAPES = ((1, 512), (8, 128))
PAIRS = 16


def measure(threads: int) -> Result:
    """Time traced, plain and eager forward passes over the same tokens in one process."""
    torch.set_num_threads(threads)
    model, eager = hs.load(MODEL), hs.load(MODEL, attn="eager")
    runs: dict[str, list[float]] = {}
    ratio: dict[str, tuple[float, float, float]] = {}
    for batch, length in SHAPES:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(1000, model.n_vocab, (batch, length), generator=generator)
        shape = f"{batch}×{length}"

        # the plain pass gets what trace also saves itself: no graph, no cache
        @torch.no_grad()
        def plain(module: torch.nn.Module = model.hf, tokens: torch.Tensor = tokens) -> None:
            module(input_ids=tokens, use_cache=False)

        variants = {
            f"{shape} plain": plain,
            f"{shape} z captured": lambda tokens=tokens: hs.trace(model, tokens, "z"),
            f"{shape} eager": lambda plain=plain: plain(eager.hf),
        }
        found = interleaved(variants, PAIRS)
        runs |= found
        for label in ("z captured", "eager"):
            ratio[f"{shape} {label} / plain"] = median_ratio(found, f"{shape} {label}", f"{shape} plain")
    target = {label: 1.05 for label in ratio if "captured" in label}
    what = (
        f"Forward pass of {MODEL} with z of all layers captured against the plain transformers pass (both sdpa, all "
        "logits, no cache); eager attention, which tools that read every pattern fall back to, for comparison."
    )
    return Result("trace", what, "s", runs, target, ratio)
