"""How near each head brings the states that a prediction is read from, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from headscope.core.component import Component, head
from headscope.core.errors import UsageError
from headscope.core.scores import make
from headscope.methods.base import AttributeMethod, Check, Info
from headscope.routes import Walk, routes
from headscope.sweep import clean, sweep
from headscope.tasks import make as make_task
from headscope.trace import zero

if TYPE_CHECKING:
    import xarray as xr

    from headscope.model import Model
    from headscope.tasks import Prompts


@dataclass(frozen=True)
class LmTt(AttributeMethod):
    """Shares of heads in the stream at the predicting position, nothing cut.

    What it measures: at the position that predicts, how much of the stream after each attention is due to each head.

    Formula: with prox as in `information-flow-routes`, c[prompt, layer, head] = Σ_key prox(α[key] v[key] W_O, y) over the
    prox of all parts of y = the stream after the attention. Value biases are left out of the heads and are no part, as in
    the tool. Coordinates: `residual` (prompt, layer), the share of the stream below, and `mlp` (prompt, layer), that of
    the MLP in the stream after it. `residual` + Σ_head c = 1 (parallel blocks: + `mlp`).

    Options: most: how many of a prompt's scored positions are read, the last ones (mean).

    Does not show: suppression, which the rule counts as nothing; any effect of taking a head away.

    Cost: one forward pass a prompt and the attention of each layer once more.

    Paper and differences: Tufanov et al. 2024 (the LM Transparency Tool). Parallel blocks, norms after parts and experts
    are handled; keys after the query are no parts. Its graph and its neurons are `hs.routes(…, neurons=20)`.
    """

    most: int = 1

    info = Info(
        title="LM Transparency Tool",
        papers=("arXiv:2404.07004",),
        claim="Shares sum to 1, the thresholded graph holds few of the edges, and zeroing the heads in it hurts the prediction "
        "more than zeroing as many heads of the same layers outside it.",
        higher_means="a larger share of the stream at the predicting position",
        cost="1.5 forward passes a prompt",
        needs=("causal", "pattern", "logits", "tokens"),
        dims=("prompt", "layer", "head"),
    )

    @torch.no_grad()
    def attribute(self, model: Model, prompts: Prompts, *, seed: int = 0) -> xr.DataArray:
        if self.most < 1:
            raise UsageError(f"most is {self.most}; at least one position of a prompt is read.")
        anatomy, n = model.anatomy, len(prompts)
        values = np.zeros((n, anatomy.n_layers, anatomy.n_heads))
        residual, mlp = np.zeros((n, anatomy.n_layers)), np.zeros((n, anatomy.n_layers))
        for i in range(n):
            one = prompts.row(i)
            places = one.positions[0].tolist()[-self.most :]
            for at in places:
                walk = Walk(model, one.tokens, at, 0.0, "drop", 0)
                walk.aim(int(one.target[0, -1]), None)
                for layer in range(anatomy.n_layers):
                    walk.into(layer, torch.tensor([at], device=one.tokens.device))
                for edge in walk.edges:
                    layer = int("".join(x for x in edge.target.partition("@")[0][1:] if x.isdigit()))
                    if edge.kind == "head":
                        values[i, layer, Component.parse(str(edge.component)).index] += edge.weight / len(places)
                    elif edge.kind == "mlp":
                        mlp[i, layer] += edge.weight / len(places)
                    elif edge.kind == "residual" and not edge.source.startswith(f"L{layer}A"):
                        residual[i, layer] += edge.weight / len(places)
        coords = {"residual": (("prompt", "layer"), residual), "mlp": (("prompt", "layer"), mlp)}
        return make(values, self.info.dims).assign_coords(coords)

    def check(self, model: Model, *, seed: int = 0) -> Check:
        prompts = make_task("ioi", model, 8, seed)
        found = self.attribute(model, prompts, seed=seed)
        total = found.sum("head") + found.residual + (found.mlp if model.anatomy.parts.parallel else 0)
        rng = np.random.default_rng(seed)
        inside, outside, kept = [], [], []
        for i in range(len(prompts)):
            one = prompts.row(i)
            route = routes(model, one.tokens, target=int(one.target[0, 0]), position=int(one.positions[0, 0]))
            kept.append(sum(e.kind == "head" for e in route.edges) / max(1, route.parts))
            # the heaviest of each layer, as many others of that layer beside them
            chosen, others = [], []
            for layer in range(model.anatomy.n_layers):
                here = {c.index for c in map(Component.parse, route.heads()) if c.layer == layer}
                rest = [h for h in range(model.anatomy.n_heads) if h not in here]
                k = min(len(here), len(rest))
                chosen += [c for c in map(Component.parse, route.heads()) if c.layer == layer][:k]
                others += [head(layer, int(h)) for h in rng.choice(rest, k, replace=False)] if k else []
            if not chosen:
                continue
            values = sweep(model, one, [zero(chosen), zero(others)], one.metric).values[:, 0]
            before = float(clean(model, one, one.metric).mean())
            inside.append(before - values[0])
            outside.append(before - values[1])
        if not inside:
            return Check(None, {}, "no layer has heads both in and outside the graphs")
        figures = {
            "largest error of the sum of shares": float(abs(total - 1).max()),
            "share of the edges in the graph": float(np.mean(kept)),
            "lost logit difference, heads in the graph": float(np.mean(inside)),
            "lost logit difference, heads outside": float(np.mean(outside)),
        }
        shown = (
            figures["largest error of the sum of shares"] < 1e-6
            and figures["share of the edges in the graph"] < 0.1
            and np.mean(inside) > np.mean(outside)
        )
        return Check(
            bool(shown), figures, "shown if shares sum to 1, under 10 % of edges are kept, and more is lost inside"
        )
