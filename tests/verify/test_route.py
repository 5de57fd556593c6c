"""Cutting what a route leaves out: exact at both ends, fair to its random controls, and it tells right from wrong."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

import headscope as hs
from brute import some_tokens
from families.tiny import DECODERS, build
from headscope.core.component import Component
from headscope.core.errors import NotApplicable, UsageError
from headscope.model import Model
from headscope.routes.cut import Kept, cut, kept_by, means_of, random_like, rest_of
from headscope.tasks import Prompts
from toys import induction_toy

WIDTH = 7
NOTHING = Kept(frozenset(), frozenset())


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return {family: hs.load(build(family), check=False) for family in DECODERS}


@pytest.mark.parametrize("family", DECODERS)
def test_a_head_that_attends_as_it_does_changes_nothing(models: dict[str, Model], family: str) -> None:
    model, tokens = models[family], some_tokens(2, WIDTH)
    run = hs.trace(model, tokens, ["pattern"])
    edited = hs.trace(model, tokens, edits=[hs.attend(["L1H1", "L1H2", "L2H0"], run)])
    assert torch.allclose(edited.logits, run.logits, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("family", DECODERS)
def test_a_head_that_attends_to_one_key_gives_its_value(models: dict[str, Model], family: str) -> None:
    model, tokens = models[family], some_tokens(2, WIDTH)
    to_third = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    to_third[:, 2] = 1.0
    run = hs.trace(model, tokens, ["z", "v"], hs.attend("L1H3", to_third, positions=[4, 6]), layers=[1])
    plain = hs.trace(model, tokens, ["z"], layers=[1])
    value = run["v", 1][:, 2, model.kv_of(3)]
    for p in range(WIDTH):
        wanted = value if p in (4, 6) else plain["z", 1][:, p, 3]
        assert torch.allclose(run["z", 1][:, p, 3], wanted, rtol=1e-6, atol=1e-9)
    assert torch.allclose(run["z", 1][:, :, :3], plain["z", 1][:, :, :3], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("family", [name for name in DECODERS if name != "opt-post-norm"])
def test_with_all_kept_nothing_changes_and_with_none_all_is_mean(models: dict[str, Model], family: str) -> None:
    model, tokens = models[family], some_tokens(1, WIDTH)
    run = hs.trace(model, tokens, ["pattern", "z", "mlp_out"])
    means = means_of(hs.trace(model, some_tokens(3, WIDTH, seed=5), ["z", "mlp_out"], logits=None))
    everything = rest_of(NOTHING, 3, 4, WIDTH)
    kept = hs.trace(model, tokens, edits=cut(model, everything, run["pattern"][:, 0], means))
    assert torch.allclose(kept.logits, run.logits, rtol=1e-5, atol=1e-6)
    edits = [hs.mean(Component("", i, "mlp", None), means.mlp_out[i]) for i in range(3)]  # type: ignore[index]
    edits += [hs.mean(f"L{i}H{h}", means.z[i, h]) for i in range(3) for h in range(4)]
    ablated = hs.trace(model, tokens, edits=edits)
    none = hs.trace(model, tokens, edits=cut(model, NOTHING, run["pattern"][:, 0], means))
    assert torch.allclose(none.logits, ablated.logits, rtol=1e-5, atol=1e-6)


def test_a_part_that_is_cut_reads_the_mean(models: dict[str, Model]) -> None:
    """z of a head with some edges kept: their attention times the values, and the mean for the rest of it."""
    model, tokens = models["llama"], some_tokens(1, WIDTH)
    patterns = hs.trace(model, tokens, ["pattern"], logits=None)["pattern"][:, 0]
    means = means_of(hs.trace(model, some_tokens(3, WIDTH, seed=5), ["z", "mlp_out"], logits=None))
    kept = Kept(frozenset({(1, 2, 5, 0), (1, 2, 5, 3)}), frozenset({(0, 5)}))
    run = hs.trace(model, tokens, ["z", "v", "mlp_out"], cut(model, kept, patterns, means))
    alpha, v = patterns[1, 2, 5], run["v", 1][0, :, model.kv_of(2)]
    wanted = alpha[0] * v[0] + alpha[3] * v[3] + (1 - alpha[0] - alpha[3]) * means.z[1, 2]
    assert torch.allclose(run["z", 1][0, 5, 2], wanted, rtol=1e-9)
    assert torch.allclose(run["mlp_out", 0][0, 4], means.mlp_out[0])  # type: ignore[index]
    assert not torch.allclose(run["mlp_out", 0][0, 5], means.mlp_out[0])  # type: ignore[index]


def test_random_routes_match_in_size_and_are_connected(models: dict[str, Model]) -> None:
    route = hs.routes(models["llama"], some_tokens(1, 12), threshold=0.03)
    kept = kept_by(route)
    found = {random_like(kept, 11, 3, 4, random.Random(seed)) for seed in range(5)}
    assert len(found) == 5
    for other in found:
        assert Counter(x[0] for x in other.heads) == Counter(x[0] for x in kept.heads)
        assert Counter(x[0] for x in other.mlps) == Counter(x[0] for x in kept.mlps)
        reached = {11}
        for layer in (2, 1, 0):
            here = [(q, k) for i, _, q, k in other.heads if i == layer]
            assert all(q in reached and k <= q for q, k in here)
            reached |= {k for _, k in here}


def _repeats(n: int = 6) -> Prompts:
    """Prompts whose next token is what followed the last one before; the foil did not."""
    rows = [random.Random(i).sample(range(1, 32), 7) for i in range(n)]
    tokens = torch.tensor([[*row[:6], row[2]] for row in rows])
    target, foil = torch.tensor([[row[3]] for row in rows]), torch.tensor([[row[4]] for row in rows])
    return Prompts("repeats", 0, tokens, torch.full((n, 1), 6), target, foil, metric="logit_diff")


def _without_opposite() -> Model:
    model = induction_toy()
    with torch.no_grad():
        model.hf.transformer.h[1].attn.c_proj.weight[96:] = 0.0
    return model


def test_the_route_of_an_induction_model_is_proved() -> None:
    proof = hs.prove_routes(_without_opposite(), _repeats(), n_random=10)
    assert proof.verdict == "supported", proof.reason
    assert proof.faithfulness == pytest.approx(1.0, abs=0.05)
    assert proof.random < 0.3 and proof.random_most < proof.faithfulness
    assert proof.complement < 0.3


def test_a_route_that_leaves_out_what_matters_is_not_supported() -> None:
    """With so high a threshold only the stream itself is kept, which is as good as random routes of nothing."""
    proof = hs.prove_routes(_without_opposite(), _repeats(), threshold=0.95, n_random=5)
    assert proof.verdict != "supported"
    assert proof.faithfulness == pytest.approx(proof.random, abs=0.05)


def test_one_prompt_is_no_proof_and_padding_is_none_of_the_prompt() -> None:
    model, prompts = _without_opposite(), _repeats(3)
    single = hs.prove_routes(model, prompts.row(0), n_random=3)
    assert single.verdict == "inconclusive" and "one prompt" in single.reason
    pads = torch.zeros(3, 2, dtype=torch.long)
    mask = torch.cat([pads.bool(), torch.ones_like(prompts.tokens).bool()], 1)
    padded = replace(prompts, tokens=torch.cat([pads, prompts.tokens], 1), mask=mask, positions=prompts.positions + 2)
    assert torch.equal(padded.row(1).tokens, prompts.tokens[1:2])
    assert int(padded.row(1).positions) == 6


def test_a_loss_counts_as_better_when_it_is_lower() -> None:
    prompts = replace(_repeats(), metric="loss", foil=None)
    proof = hs.prove_routes(_without_opposite(), prompts, n_random=8)
    assert proof.verdict == "supported" and proof.route < proof.empty
    assert proof.diff_ci_high < 0


def test_bad_proofs_are_refused() -> None:
    model, prompts = _without_opposite(), _repeats(2)
    with pytest.raises(UsageError, match="several positions"):
        hs.prove_routes(model, replace(prompts, positions=torch.tensor([[5, 6]] * 2)))
    with pytest.raises(UsageError, match="at least 2 random routes"):
        hs.prove_routes(model, prompts, n_random=1)
    with pytest.raises(UsageError, match="takes heads"):
        hs.attend("L0MLP", torch.ones(2, 2))
    with pytest.raises(UsageError, match="cannot be baked"):
        hs.act.bake(model, hs.attend("L0H0", torch.eye(4, dtype=torch.float64)))


def test_biases_are_those_of_the_proved_route() -> None:
    model = hs.load(build("gpt2"), check=False)
    prompts = replace(_repeats(1), tokens=_repeats(1).tokens % 20)
    sizes = {}
    for biases in ("part", "drop", "heads"):
        at, target, foil = (int(x) for x in (prompts.positions, prompts.target, prompts.foil))
        route = hs.routes(model, prompts.tokens, target=target, foil=foil, position=at, biases=biases)
        kept = {(e.source, e.target, e.component) for e in route.edges if e.kind in ("head", "mlp")}
        sizes[biases] = hs.prove_routes(model, prompts, biases=biases, n_random=2).n_edges
        assert sizes[biases] == len(kept)
    assert len(set(sizes.values())) > 1


def test_logits_that_are_not_finite_prove_nothing() -> None:
    model = hs.load(build("llama"), check=False)
    with torch.no_grad():
        model.hf.model.layers[1].mlp.down_proj.weight[0, 0] = float("inf")
    tokens = some_tokens(2, WIDTH)
    last = torch.full((2, 1), WIDTH - 1)
    with pytest.raises(NotApplicable, match="logits are not finite on toy"):
        hs.prove_routes(model, Prompts("toy", 0, tokens, last, tokens[:, :1]), n_random=2)
