"""Is a route what carried the prediction? Cut everything else, and compare with random routes of the same size."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from headscope.circuits.quality import shares_left
from headscope.circuits.run import sign
from headscope.core.errors import UsageError
from headscope.model import Model
from headscope.routes import Route, routes
from headscope.routes.cut import Kept, Means, cut, kept_by, means_of, random_like, rest_of
from headscope.sweep import clean, sweep
from headscope.tasks import Prompts, make
from headscope.trace import trace
from headscope.verify.beside import beside_random, left_over
from headscope.verify.verify import HELD_OUT

#: memory that the edits of one sweep may take
EDITS_BYTES = 2**29


@dataclass(frozen=True)
class RouteProof:
    """What became of the metric when every edge outside the routes was cut.

    `clean`, `empty`: the metric's mean over the prompts as they are, and with every edge cut. `faithfulness`: (route -
    empty) / (clean - empty), a ratio of means: 1 is as good as the model. `random_*`: the same for random routes with as
    many edges in each layer, mean over the prompts of each set. `complement`: the same for all but the route. `diff_ci_*`:
    95 % interval of route minus random over prompts and sets, in the metric's units; `p` by sign flips over the prompts.
    `n_edges`: head edges and MLPs of a route, mean; `share`: of all there are.
    """

    task: str
    metric: str
    threshold: float
    biases: str
    n_prompts: int
    n_random: int
    n_edges: float
    share: float
    clean: float
    empty: float
    route: float
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

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def prompt_of(route: Route) -> Prompts:
    """A route's prompt as a task of one: what `prove_routes` needs to test that route. Without a foil, the target's
    probability is what is left or lost."""
    foil = None if route.foil_id is None else torch.tensor([[route.foil_id]])
    return Prompts(
        "your prompt", 0, torch.tensor([route.token_ids]), torch.tensor([[route.position]]),
        torch.tensor([[route.target_id]]), foil, metric="prob" if foil is None else "logit_diff",
    )  # fmt: skip


def prove_routes(
    model: Model,
    prompts: Prompts,
    *,
    threshold: float = 0.04,
    biases: str = "part",
    n_random: int = 20,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> RouteProof:
    """Cut every edge outside each prompt's route and see what is left of the task's metric.

    Patterns stay as they were; the share of a head's attention that is cut reads its mean output on plain text (on the
    prompts, where there is no tokenizer), an MLP that is cut gives its mean. Each prompt's `n_random` random routes have
    as many edges in each layer as its own. The verdict is `supported` where p ≤ 0.05, the interval lies above 0 and no
    set of random routes does as well; a single prompt has no p, and its verdict is `inconclusive`.

    `threshold` and `biases` as in `routes`. Raises UsageError for prompts scored at several positions and too few random
    routes.
    """
    if not isinstance(prompts, Prompts):
        raise UsageError("prove_routes takes Prompts: a task's (hs.tasks.make), or those of one route (prompt_of).")
    if prompts.positions.shape[1] != 1:
        raise UsageError(
            f"Routes explain one prediction a prompt, but {prompts.name} scores several positions of each."
        )
    if n_random < 2:
        raise UsageError(f"A proof needs at least 2 random routes, but n_random is {n_random}.")
    before = clean(model, prompts, prompts.metric).double().cpu().numpy()  # first: broken logits cost no routes
    means = _means(model, prompts)
    anatomy, n = model.anatomy, len(prompts)
    values = np.empty((n, 3 + n_random))
    sizes, shares = [], []
    for i in range(n):
        one = prompts.row(i)
        at, target = int(one.positions[0, 0]), int(one.target[0, 0])
        foil = None if one.foil is None else int(one.foil[0, 0])
        route = routes(model, one.tokens, target=target, foil=foil, position=at, threshold=threshold, biases=biases)
        kept, width = kept_by(route), one.tokens.shape[1]
        rng = random.Random(f"{seed} {i}")
        drawn = [random_like(kept, at, anatomy.n_layers, anatomy.n_heads, rng) for _ in range(n_random)]
        nothing = Kept(frozenset(), frozenset())
        rest = rest_of(kept, anatomy.n_layers, anatomy.n_heads, width)
        values[i] = _measure(model, one, [kept, nothing, rest, *drawn], means)
        sizes.append(len(kept.heads) + len(kept.mlps))
        shares.append(sizes[-1] / (sizes[-1] + len(rest.heads) + len(rest.mlps)))
        if progress is not None:
            progress(i + 1, n)
    return _proof(prompts, threshold, biases, before, values, float(np.mean(sizes)), float(np.mean(shares)), seed)


def _means(model: Model, prompts: Prompts) -> Means:
    sites = ["z"] + (["mlp_out"] if model.anatomy.blocks[0].mlp_out is not None else [])
    source = prompts if model.tokenizer is None else make("plain-text", model, 4, HELD_OUT)
    return means_of(trace(model, source, sites, logits=None))


def _measure(model: Model, one: Prompts, sets: list[Kept], means: Means) -> np.ndarray[Any, Any]:
    patterns = trace(model, one, ["pattern"], logits=None)["pattern"][:, 0]
    group = max(1, EDITS_BYTES // (patterns.numel() * patterns.itemsize))
    found = [
        sweep(model, one, [cut(model, kept, patterns, means) for kept in sets[i : i + group]], one.metric).values[:, 0]
        for i in range(0, len(sets), group)
    ]
    return np.concatenate(found)


def _proof(
    prompts: Prompts, threshold: float, biases: str, before: np.ndarray[Any, Any], values: np.ndarray[Any, Any], size: float,
    share: float, seed: int,
) -> RouteProof:  # fmt: skip
    route, empty, rest, control = values[:, 0], values[:, 1], values[:, 2], values[:, 3:].T
    better = sign(prompts.metric)
    each = control.mean(1)
    seen = beside_random(route, control, better, "random routes", seed=seed)
    left = shares_left(np.array([route.mean(), each.mean(), seen.most, rest.mean()]), empty, before, prompts.metric)
    faithful, randomly, random_most, complement = (float(x) for x in left)
    span = before.mean() - empty.mean()
    figures = left_over(faithful, randomly, prompts.metric, "random routes")
    return RouteProof(
        task=prompts.name, metric=prompts.metric, threshold=threshold, biases=biases, n_prompts=len(route), n_random=len(control),
        n_edges=size, share=share, clean=float(before.mean()), empty=float(empty.mean()), route=float(route.mean()),
        faithfulness=faithful, random=randomly, random_sd=float(each.std(ddof=1) / abs(span)),
        random_most=random_most, complement=complement, diff_ci_low=seen.low, diff_ci_high=seen.high, p=seen.p,
        verdict=seen.verdict, reason=f"{figures}; {seen.reason}",
    )  # fmt: skip
