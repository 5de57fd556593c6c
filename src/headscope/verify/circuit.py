"""Is a circuit what does the task? Cut everything else, and compare with random circuits of the same shape."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from headscope.circuits.circuit import Circuit
from headscope.circuits.controls import random_like
from headscope.circuits.quality import shares_left
from headscope.circuits.run import Progress, evaluate, sign
from headscope.core.errors import UsageError
from headscope.model import Model
from headscope.tasks import Prompts
from headscope.verify.beside import beside_random, left_over

#: what stands on cut edges, in words
STANDS = {
    "patch": "cut edges carry what the corrupted twin gives",
    "mean": "cut edges carry the mean over the prompts at each position",
    "zero": "cut edges carry nothing",
}


@dataclass(frozen=True)
class CircuitProof:
    """What became of the metric when every edge outside the circuit was cut.

    `clean`, `empty`, `circuit`: the metric's mean over the prompts as they are, with every edge cut, with all but the
    circuit's cut. `faithfulness`: (circuit - empty) / (clean - empty), a ratio of means: 1 is as good as the model.
    `random*`: the same for random circuits with as many edges from each kind of sender into each kind of receiver of each
    layer. `complement`: the same for all but the circuit. `diff_ci_*`: 95 % interval of circuit minus random over prompts
    and sets, in the metric's units; `p` by sign flips over the prompts. `choices`: the five on which such figures depend
    (Miller et al. 2024). `model`, `fingerprint`: of the model that was measured; `reason` says so where the circuit was
    found on another.
    """

    model: str
    fingerprint: str
    task: str
    metric: str
    method: str
    n_prompts: int
    n_random: int
    n_edges: int
    share: float
    clean: float
    empty: float
    circuit: float
    faithfulness: float
    random: float
    random_sd: float
    random_most: float
    complement: float
    diff_ci_low: float
    diff_ci_high: float
    p: float
    verdict: str
    reason: str
    choices: dict[str, str]

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def prove_circuit(
    model: Model,
    prompts: Prompts,
    circuit: Circuit,
    *,
    n_random: int = 20,
    seed: int = 0,
    progress: Progress | None = None,
) -> CircuitProof:
    """Cut every edge outside a circuit and see what is left of the task's metric, on prompts that did not choose it.

    The verdict is `supported` where p ≤ 0.05, the interval lies above 0 and no random circuit does as well, `not supported`
    where random circuits do better; else, and for fewer than 5 prompts, `inconclusive`. The circuit may be one found on
    another model with these edges, such as the one that this model was tuned from.

    Raises UsageError for an empty circuit and too few random ones, NotApplicable where cutting changes nothing and where
    logits are not finite.
    """
    if not circuit.edges:
        raise UsageError("The circuit is empty; there is nothing to prove.")
    if n_random < 2:
        raise UsageError(f"A proof needs at least 2 random circuits, but n_random is {n_random}.")
    graph = circuit.graph(model)
    kept, rng = graph.mask(circuit.edges), random.Random(seed)
    drawn = [random_like(graph, kept, rng) for _ in range(n_random)]
    masks = torch.stack([graph.exists, graph.exists & False, kept, graph.exists & ~kept, *drawn])
    clean, empty, found, rest, *control = evaluate(
        model, prompts, graph, masks, circuit.replacement, prompts.metric, progress=progress
    )
    controls, better = np.stack(control), sign(prompts.metric)
    each = controls.mean(1)
    seen = beside_random(found, controls, better, "random circuits", seed=seed)
    span = clean.mean() - empty.mean()
    left = shares_left(np.array([found.mean(), each.mean(), seen.most, rest.mean()]), empty, clean, prompts.metric)
    faithful, randomly, random_most, complement = (float(x) for x in left)
    figures = left_over(faithful, randomly, prompts.metric, "random circuits")
    return CircuitProof(
        model=model.name, fingerprint=model.fingerprint, task=prompts.name, metric=prompts.metric,
        method=circuit.method, n_prompts=len(prompts), n_random=n_random,
        n_edges=len(circuit), share=len(circuit) / graph.n_edges, clean=float(clean.mean()), empty=float(empty.mean()),
        circuit=float(found.mean()), faithfulness=faithful, random=randomly,
        random_sd=float(each.std(ddof=1) / abs(span)), random_most=random_most, complement=complement, diff_ci_low=seen.low,
        diff_ci_high=seen.high, p=seen.p, verdict=seen.verdict,
        reason=f"{figures}; {seen.reason}{_elsewhere(circuit, model)}",
        choices=choices(circuit.replacement),
    )  # fmt: skip


def _elsewhere(circuit: Circuit, model: Model) -> str:
    if circuit.fingerprint == model.fingerprint:
        return ""
    return f"; the circuit was found on {circuit.model if circuit.model != model.name else 'other weights'}"


def choices(replacement: str) -> dict[str, str]:
    """The five choices on which figures of circuits depend, in words."""
    return {
        "replacement": STANDS[replacement],
        "unit": "edges",
        "positions": "all positions at once",
        "cut": "all but the circuit",
        "average": "ratio of means over the prompts",
    }
