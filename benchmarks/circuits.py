"""What it costs to score all edges of a model at once."""

from __future__ import annotations

import torch

import headscope as hs
from benchmarks.common import MODEL, Result, interleaved, median_ratio
from headscope.sweep import measure as value_of

PROMPTS, STEPS, PAIRS = 8, 5, 8


def passes_alone(model: object, prompts: hs.tasks.Prompts) -> None:
    """The passes that EAP-IG cannot do without: two forward, and forward and backward once a step."""
    for tokens in (prompts.tokens, prompts.corrupt):
        hs.trace(model, tokens, logits=prompts.positions)
    for _ in range(STEPS):
        run = hs.trace(model, prompts, ["resid_pre"], layers=[0], logits=prompts.positions, grad=True)
        torch.autograd.grad(value_of(prompts.metric, run.logits, prompts).sum(), [run["resid_pre", 0]])


def measure(threads: int) -> Result:
    """Time EAP-IG of all edges against its passes alone, in one process."""
    torch.set_num_threads(threads)
    model = hs.load(MODEL)
    prompts = hs.tasks.make("ioi", model, PROMPTS)
    passes, scores = f"2 forward + {STEPS} forward and backward", f"EAP-IG, {STEPS} steps, all edges"
    variants = {
        passes: lambda: passes_alone(model, prompts),
        scores: lambda: hs.circuits.eap_ig(model, prompts, steps=STEPS),
    }
    runs = interleaved(variants, PAIRS, warm_up=1)
    label = "EAP-IG / its passes"
    n_edges = hs.circuits.graph_of(model).n_edges
    what = (
        f"Scores of all {n_edges:,} edges of {MODEL} by EAP-IG with {STEPS} steps on {PROMPTS} prompts of ioi, against the "
        "forward and backward passes that it is made of, without any gradient of a weight."
    )
    return Result("circuits", what, "s", runs, {label: 2.0}, {label: median_ratio(runs, scores, passes)})
