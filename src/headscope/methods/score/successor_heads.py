"""Heads that turn an item of an ordered list into the next one, from the weights alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headscope.core.errors import NotApplicable
from headscope.core.scores import make, top
from headscope.methods.base import Check, Info, ScoreMethod
from headscope.tasks.base import one_token
from headscope.tasks.successor import SERIES
from headscope.trace import Capture, patch, trace, zero

if TYPE_CHECKING:
    import xarray as xr

    from headscope.model import Model


@dataclass(frozen=True)
class SuccessorHeads(ScoreMethod):
    """Successor heads: Monday in, Tuesday out.

    What it measures: for how many items of ordered lists (numbers, days, months, letters, …) a head that reads the
    item raises its successor above all other items of the list.

    Formula: e_t = MLP_0(norm(W_E[t])) [d_model]; ℓ = e_t W_V W_O W_U [vocab]; the item counts if the largest ℓ among the
    items of its list is that of its successor; the score is the share over all items.

    Options: whole_vocabulary asks for the largest of all tokens, which is stricter.

    Does not show: that the head attends to items at all, or that the model relies on it (see `verify`, role successor).

    Cost: weights only, one [d_model, vocab] product a head for a hundred items.

    Paper and differences: Gould et al. 2024. Items are kept if they and their successors are one token with a leading
    space. The MLP's own norm comes before it, as in the model; the attention's norm is left out, as in the paper.
    """

    info = Info(
        title="Successor heads",
        papers=("arXiv:2312.09230",),
        claim="One head scores far above the median head (by 0.3) and above itself when the lists are shuffled.",
        higher_means="more items are turned into their successors",
        cost="weights only",
        needs=("causal", "logits", "tokenizer"),
        values_in=(0.0, 1.0),
    )

    whole_vocabulary: bool = False

    def score(self, model: Model, *, seed: int = 0) -> xr.DataArray:
        lists = [(items, cyclic) for items, cyclic in SERIES.values()]
        return make(self._score(model, lists))

    @torch.no_grad()
    def _score(self, model: Model, lists: list[tuple[tuple[str, ...], bool]]) -> torch.Tensor:
        anatomy = model.anatomy
        pairs = []  # (token, its successor's place in the list, the list's tokens)
        for items, cyclic in lists:
            ids = [one_token(model, f" {item}") for item in items]
            known = [i for i in ids if i is not None]
            for i, token in enumerate(ids):
                following = ids[(i + 1) % len(ids)] if cyclic or i + 1 < len(ids) else None
                if token is not None and following is not None and len(known) > 2:
                    pairs.append((token, following, known))
        if not pairs:
            raise NotApplicable(f"No item of the ordered lists is one token for {model.name}.")
        embedded = _first_mlp(model, torch.tensor([token for token, _, _ in pairs], device=model.device))
        unembed = anatomy.W_U.to(embedded.dtype)
        rows = []
        for layer in range(anatomy.n_layers):
            for h in range(anatomy.n_heads):
                written = embedded @ anatomy.W_V(layer, h).float() @ anatomy.W_O(layer, h).float()  # [item, d_model]
                hits = 0
                logits = written @ unembed if self.whole_vocabulary else None
                for i, (_, following, known) in enumerate(pairs):
                    if logits is not None:
                        hits += _is_largest(logits[i], following)
                    else:
                        hits += _is_largest(written[i] @ unembed[:, known], known.index(following))
                rows.append(hits / len(pairs))
        return torch.tensor(rows, dtype=torch.float64).view(anatomy.n_layers, anatomy.n_heads)

    def check(self, model: Model, *, seed: int = 0) -> Check:
        scores = self.score(model, seed=seed)
        best = top(scores, 1)[0]
        rng = random.Random(seed)
        lists = [(tuple(rng.sample(items, len(items))), cyclic) for items, cyclic in SERIES.values()]
        shuffled = self._score(model, lists)
        figures = {
            "top": float(scores.max()),
            "median": float(scores.median()),
            "top head on shuffled lists": float(shuffled[best.layer, best.index or 0]),
        }
        apart = figures["top"] - max(figures["median"], figures["top head on shuffled lists"])
        return Check(apart > 0.3, figures, f"top head {best}; shown if it stands 0.3 above both")


def _is_largest(logits: torch.Tensor, at: int) -> bool:
    """Whether the logit at a place is above all others; a head that writes nothing raises none."""
    return int(logits.argmax()) == at and int((logits == logits[at]).sum()) == 1


def _first_mlp(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    """[item, d_model] in float32: what the first MLP adds when it reads bare embeddings, with the attention silent."""
    bare = model.anatomy.W_E[tokens][:, None]  # each item is a prompt of its own
    if bare.shape[-1] != model.anatomy.d_model:
        raise NotApplicable(f"{model.name} widens its embeddings, so its first MLP cannot read them bare.")
    edits = [patch("L0RESID", bare), zero("L0ATTN")]
    return trace(model, tokens[:, None], Capture("mlp_out", [0]), edits, logits=None)["mlp_out", 0][:, 0].float()
