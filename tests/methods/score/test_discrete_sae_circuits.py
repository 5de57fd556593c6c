"""Codes of the discrete autoencoder: planted clusters, the heads of a hand-made circuit, and what chance gives."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

import headscope as hs
from headscope.core.errors import UsageError
from headscope.core.scores import auroc
from headscope.methods.score.discrete_sae_circuits import (
    DiscreteSaeCircuits,
    head_outputs,
    integer_codes,
    unique_share,
)
from headscope.model import Model
from headscope.tasks import Prompts, make

POSITIVE = torch.arange(20) < 10


def _clusters(seed: int, switching: tuple[int, ...] = (2, 5)) -> Tensor:
    """[1, 8 heads, 20 examples, 32]: noise around one centre a head; `switching` heads have another one on positives."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(8, 2, 32, generator=generator, dtype=torch.float64)
    outputs = centres[:, :1].repeat(1, 20, 1)
    for h in switching:
        outputs[h, POSITIVE] = centres[h, 1]
    return (outputs + 0.1 * torch.randn(outputs.shape, generator=generator, dtype=torch.float64))[None]


@pytest.mark.parametrize("seed", range(4))
def test_only_heads_that_switch_with_the_label_have_codes_of_their_own(seed: int) -> None:
    outputs = _clusters(seed)
    share = unique_share(integer_codes(outputs, 32, seed), POSITIVE)
    assert share.tolist() == [[0, 0, 0.5, 0, 0, 0.5, 0, 0]]
    # neither the size of a head's output nor what it always adds says anything
    sizes = torch.tensor([0.01, 1, 3, 100, 1, 0.2, 7, 1], dtype=torch.float64)[None, :, None, None]
    assert torch.equal(unique_share(integer_codes(sizes * outputs, 32, seed), POSITIVE), share)
    constant = torch.tensor([0.0, 0.2, 0, 0, -0.1, 0, 0.1, 0], dtype=torch.float64)[None, :, None, None]
    moved = unique_share(integer_codes(outputs + constant, 32, seed), POSITIVE)
    assert torch.equal(moved > 0, share > 0)


def test_the_order_of_heads_and_examples_does_not_matter() -> None:
    outputs = _clusters(0)
    heads, examples = (torch.randperm(size, generator=torch.Generator().manual_seed(1)) for size in (8, 20))
    codes = integer_codes(outputs, 16, 3)
    assert torch.equal(integer_codes(outputs[:, heads][:, :, examples], 16, 3), codes[:, heads][:, :, examples])
    assert not torch.equal(integer_codes(outputs, 16, 4), codes)


def test_a_share_counted_by_hand() -> None:
    codes = torch.tensor([[[3, 4, 3, 3, 5, -1], [0, 0, 1, 1, 0, 1], [2, 2, 2, 2, 2, 2], [-1, 1, 0, -1, -1, -1]]])
    positive = torch.tensor([True, True, True, False, False, False])
    # 4 of {-1, 3, 4, 5}; none of {0, 1}; none; 0 and 1 of {-1, 0, 1}
    assert unique_share(codes, positive).tolist() == [[1 / 4, 0, 0, 2 / 3]]


def _with_twins(model: Model, seed: int) -> Prompts:
    """Ten repeated blocks; in the twins other tokens come first, so that there is nothing to repeat."""
    prompts = make("repeated-tokens", model, 10, seed, length=8)
    generator = torch.Generator().manual_seed(seed)
    twins = prompts.tokens.clone()
    for row in twins:
        others = torch.tensor([token for token in range(32) if token not in row.tolist()])
        row[:8] = others[torch.randperm(len(others), generator=generator)[:8]]
    return dataclasses.replace(
        prompts, corrupt=twins, positions=prompts.positions[:, -1:], target=prompts.target[:, -1:]
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_heads_of_a_hand_made_circuit_are_ranked_as_ablation_ranks_them(induction: Model, seed: int) -> None:
    prompts = _with_twins(induction, seed)
    share, null = DiscreteSaeCircuits().shares(induction, prompts, seed=seed)
    # the two heads that write at the last position when, and only when, there is something to continue
    circuit = np.zeros((2, 4), dtype=bool)
    circuit[1, 2:] = True
    assert auroc(share, circuit) == 1.0 and not share.numpy()[~circuit].any()
    assert (share.numpy()[circuit] > 0.5).all()
    assert max(float(null[:, 1, h].mean() / share[1, h]) for h in (2, 3)) < 0.7
    assert bool((null[:, 1, 2] < share[1, 2]).double().mean() > 0.95)
    # ablation finds them too, and the head of another position that they rely on
    clean = hs.sweep(induction, prompts, [[]], "logit").values[0]
    effect = np.abs(hs.sweep(induction, prompts, hs.each_head(hs.zero), "logit").values - clean).mean(1)
    assert auroc(effect.reshape(2, 4), circuit) > 0.9


def test_scores_are_the_softmax_of_shares(worded: Model) -> None:
    found = hs.score(worded, "discrete-sae-circuits", n=4, codes=8)
    expected = np.exp(found.share.values) / np.exp(found.share.values).sum()
    np.testing.assert_allclose(found.values, expected, rtol=0, atol=1e-12)
    assert ((found.share >= 0) & (found.share <= 1) & (found.p > 0) & (found.p <= 1)).all()


def test_outputs_are_those_of_the_scored_position(worded: Model) -> None:
    prompts = make("ioi", worded, 3)
    found, whole = head_outputs(worded, prompts), hs.trace(worded, prompts, "head_out")["head_out"]
    for i, at in enumerate(prompts.positions[:, -1].tolist()):
        torch.testing.assert_close(found[:, :, i], whole[:, i, at], rtol=0, atol=1e-12)


def test_bad_inputs_are_named(worded: Model) -> None:
    with pytest.raises(UsageError, match="codes is 1; an autoencoder needs at least 2"):
        hs.score(worded, "discrete-sae-circuits", codes=1)
    with pytest.raises(UsageError, match="successor has no corrupted twins"):
        hs.score(worded, "discrete-sae-circuits", task="successor")
