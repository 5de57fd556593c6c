"""How much of a prediction's route goes through each head."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from headscope.core.component import Component
from headscope.core.errors import UsageError
from headscope.core.scores import auroc, make
from headscope.methods.base import AttributeMethod, Check, Info
from headscope.routes import Route, routes
from headscope.routes.cut import Kept, cut, kept_by, means_of, random_like
from headscope.sweep import sweep
from headscope.tasks import make as make_task
from headscope.trace import trace

if TYPE_CHECKING:
    import xarray as xr

    from headscope.model import Model
    from headscope.tasks import Prompts


@dataclass(frozen=True)
class InformationFlowRoutes(AttributeMethod):
    """Heads by the weight of their edges on the routes to the answers.

    What it measures: through which heads the parts of a prediction came, all the way down from the last layer.

    Formula: every state y of the stream is a sum of parts f (the state below, each head × key, the MLP, biases);
    prox = max(‖y‖₁ - ‖y - f‖₁, ε), a part's share is its prox over that of all, parts with a share of at most τ are cut
    and the rest made to sum to 1; the search goes on from the states that are left. A head's score [prompt, layer, head]
    is the sum of its edges' weights over the route, the mean over the explained positions. The coordinate `mlp`
    [prompt, layer] is the same for MLPs, `edges` [prompt] the number of edges.

    Options: threshold (τ); most: how many of a prompt's scored positions are explained, the last ones.

    Does not show: suppression (a part that opposes or overshoots the sum counts as nothing), why heads look where they
    look, nor what happens without a head: `hs.prove_routes` cuts all but the route for that.

    Cost: one forward pass a prompt and the attention of each layer once more; of the head edges a few percent are looked at.

    Paper and differences: Ferrando & Voita 2024. Future keys are no parts; biases are a part of their own; where nothing
    is above τ the nearest part is kept.
    """

    threshold: float = 0.04
    most: int = 2

    info = Info(
        title="Information-flow routes",
        papers=("arXiv:2403.00824",),
        claim="On repeated text the routes go through the known induction and previous-token heads, and what is on a route "
        "keeps the prediction better than random routes of the same size.",
        higher_means="more of the route goes through it",
        cost="1.5 forward passes a prompt",
        needs=("causal", "pattern", "logits", "tokens"),
        dims=("prompt", "layer", "head"),
    )

    @torch.no_grad()
    def attribute(self, model: Model, prompts: Prompts, *, seed: int = 0) -> xr.DataArray:
        if self.most < 1:
            raise UsageError(f"most is {self.most}; at least one position of a prompt is explained.")
        anatomy, n = model.anatomy, len(prompts)
        heads = np.zeros((n, anatomy.n_layers, anatomy.n_heads))
        mlps, edges = np.zeros((n, anatomy.n_layers)), np.zeros(n)
        for i in range(n):
            found = self._routes(model, prompts.row(i))
            for route in found:
                edges[i] += len(route.edges) / len(found)
                for edge in route.edges:
                    if edge.kind in ("head", "mlp"):
                        c = Component.parse(str(edge.component))
                        if edge.kind == "head":
                            heads[i, c.layer, c.index] += edge.weight / len(found)
                        else:
                            mlps[i, c.layer] += edge.weight / len(found)
        return make(heads, self.info.dims).assign_coords(mlp=(("prompt", "layer"), mlps), edges=("prompt", edges))

    def _routes(self, model: Model, one: Prompts) -> list[Route]:
        foils = [None] * one.positions.shape[1] if one.foil is None else one.foil[0].tolist()
        places = list(zip(one.positions[0].tolist(), one.target[0].tolist(), foils, strict=True))
        return [
            routes(model, one.tokens, target=target, foil=foil, position=at, threshold=self.threshold)
            for at, target, foil in places[-self.most :]
        ]

    def check(self, model: Model, *, seed: int = 0) -> Check:
        from headscope.methods.run import score

        text = make_task("repeated-tokens", model, 4, seed, length=24)
        explained = replace(self, most=8)
        weight = explained.attribute(model, text, seed=seed).mean("prompt").values.ravel()
        figures, rng = {}, np.random.default_rng(seed)
        k = min(10, len(weight) // 4)
        if k < 1:
            return Check(None, {}, f"{model.name} has too few heads to tell the best from others")
        for method in ("induction-heads-icl", "previous-token"):
            known = score(model, method, seed=seed).values.ravel()
            best = np.isin(np.arange(len(known)), np.argsort(known, kind="stable")[-k:])
            found = auroc(weight, best)
            null = [auroc(weight, rng.permutation(best)) for _ in range(2000)]
            figures[f"AUROC of the {k} best heads of {method}"] = found
            figures[f"p of that, {method}"] = float((1 + sum(x >= found for x in null)) / 2001)
        figures |= _kept(model, make_task("ioi", model, 6, seed), self.threshold, seed)
        apart = all(value < 0.05 for name, value in figures.items() if name.startswith("p of"))
        shown = apart and figures["logit difference, route"] > figures["logit difference, best random route"]
        return Check(
            bool(shown), figures,
            "shown if both kinds of heads weigh more than others (p < 0.05 by permutation) and the routes keep more of the "
            "logit difference than any of 5 random sets",
        )  # fmt: skip


def _kept(model: Model, prompts: Prompts, threshold: float, seed: int) -> dict[str, float]:
    """The logit difference with all but the routes cut, and with all but random routes."""
    anatomy, values = model.anatomy, []
    sites = ["z"] + (["mlp_out"] if anatomy.blocks[0].mlp_out is not None else [])
    means = means_of(trace(model, make_task("plain-text", model, 4, seed + 1), sites, logits=None))
    for i in range(len(prompts)):
        one = prompts.row(i)
        at = int(one.positions[0, -1])
        kept = kept_by(routes(model, one.tokens, target=int(one.target[0, -1]), position=at, threshold=threshold))
        rng = random.Random(f"{seed} {i}")
        drawn = [random_like(kept, at, anatomy.n_layers, anatomy.n_heads, rng) for _ in range(5)]
        patterns = trace(model, one, ["pattern"], logits=None)["pattern"][:, 0]
        sets = [kept, Kept(frozenset(), frozenset()), *drawn]
        values.append(sweep(model, one, [cut(model, k, patterns, means) for k in sets], one.metric).values[:, 0])
    route, nothing, *drawn_means = np.mean(values, 0).tolist()
    return {
        "logit difference, route": route,
        "logit difference, nothing kept": nothing,
        "logit difference, best random route": max(drawn_means),
    }
