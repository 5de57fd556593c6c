"""Routes of the real 135M model: the full definition's edges, and a proof."""

from __future__ import annotations

import pytest
import torch

import headscope as hs
from headscope.model import Model
from headscope.routes.route import check_sums
from routes import dense

pytestmark = pytest.mark.real


def test_the_capital_of_france(smollm2: Model) -> None:
    """One head of layer 23 carries France to the last position, and it is what tells Paris from London."""
    route = hs.routes(smollm2, "The capital of France is", target=" Paris", foil=" London")
    logits = smollm2.hf(**smollm2.tokenizer("The capital of France is", return_tensors="pt")).logits[0, -1]
    assert route.logit == pytest.approx(float(logits[route.target_id] - logits[route.foil_id]), abs=1e-4)
    most = max((e for e in route.edges if e.kind == "head"), key=lambda e: e.signed)
    assert (most.component, most.source, most.target) == ("L23H4", "L22@3", "L23A@4")
    assert max(abs(total - 1) for total in check_sums(route.edges).values()) < 1e-12
    assert route.evaluated < 0.1 * route.parts


def test_the_lazy_search_finds_what_the_full_definition_finds(smollm2: Model) -> None:
    tokens = smollm2.tokens("The capital of France is")[0]
    with torch.no_grad():
        wanted = dense.edges(smollm2, tokens, 4, 0.04)
    route = hs.routes(smollm2, tokens)
    found = {(e.source, e.target, e.component or e.kind): e.weight for e in route.edges}
    assert found.keys() == wanted.keys()
    assert max(abs(found[key] - wanted[key]) for key in wanted) < 1e-4


def test_routes_keep_what_random_ones_lose(smollm2: Model) -> None:
    proof = hs.prove_routes(smollm2, hs.tasks.make("ioi", smollm2, 5), n_random=3)
    assert proof.verdict == "supported", proof.reason
    assert proof.faithfulness > 0.7 > 0.3 > proof.random_most and proof.share < 0.01
    assert abs(proof.complement) < 0.4
