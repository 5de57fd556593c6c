"""Induction heads: where they look, and whether they copy."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import headscope as hs
from eager import patterns
from headscope.core.errors import UsageError
from headscope.model import Model
from headscope.tasks import baseline, make


@pytest.mark.parametrize(("length", "repeats"), [(12, 2), (10, 3), (6, 5)])
def test_known_heads_match_prefixes(induction: Model, length: int, repeats: int) -> None:
    found = hs.score(induction, "induction-heads-icl", length=length, repeats=repeats)
    assert found.values[1, 2] == pytest.approx(1.0, abs=1e-12)
    assert found.values[1, 3] == pytest.approx(1.0, abs=1e-12)  # the opposite sign looks the same
    assert (found.values[0, :3] < 1e-12).all()
    uniform = [(i // length) / (i + 1) for i in range(length, repeats * length)]
    assert found.values[0, 3] == pytest.approx(np.mean(uniform), abs=1e-12)
    assert [str(c) for c in hs.top(found, 2)] == ["L1H2", "L1H3"]


def test_copying_and_its_opposite(induction: Model) -> None:
    found = hs.score(induction, "induction-heads-icl", part="copying").values
    assert found[1, 2] == pytest.approx(1.0, abs=1e-6) and found[1, 3] == pytest.approx(-1.0, abs=1e-6)
    others = np.delete(found.ravel(), [6, 7])
    assert (others == 0).all()  # heads that write nothing neither copy nor do the opposite


def test_without_its_previous_token_head_the_match_is_lost(induction: Model) -> None:
    hf = copy.deepcopy(induction.hf)
    with torch.no_grad():
        hf.transformer.h[0].attn.c_proj.weight.zero_()
    found = hs.score(hs.load(hf), "induction-heads-icl", length=12).values
    # it spreads over positions 1 … i (position 0 is shut)
    assert found[1, 2] == pytest.approx(np.mean([1 / i for i in range(13, 24)] + [1 / 12]), rel=0.02)


def test_the_toy_continues_what_it_saw(induction: Model) -> None:
    prompts = make("repeated-tokens", induction, 6, 1, length=12)
    assert baseline(induction, prompts).accuracy == 1.0
    lost = hs.sweep(induction, prompts, [hs.zero("L1H2"), hs.zero("L0H0"), hs.zero("L1H3")], "accuracy").values
    assert lost[0].max() < 0.2 and lost[1].max() < 0.2 and lost[2].min() == 1.0


@pytest.mark.parametrize(("length", "repeats"), [(7, 2), (5, 4), (2, 3)])
def test_matching_equals_the_eager_attentions(random_model: Model, length: int, repeats: int) -> None:
    found = hs.score(random_model, "induction-heads-icl", n=2, length=length, repeats=repeats, seed=3)
    tokens = make("repeated-tokens", random_model, 2, 3, length=length, repeats=repeats).tokens
    pattern = patterns(random_model, tokens)
    first = len(random_model.prefix) + length
    total = torch.zeros(pattern.shape[0], pattern.shape[2], dtype=torch.float64)
    for row in range(2):
        for i in range(first, tokens.shape[1]):
            for j in range(1, i + 1):
                if tokens[row, j - 1] == tokens[row, i]:
                    total += pattern[:, row, :, i, j]
    expected = total / (2 * (tokens.shape[1] - first))
    np.testing.assert_allclose(found.values, expected.numpy(), rtol=0, atol=1e-12)


def test_copying_equals_the_eigenvalues_of_the_whole_circuit(random_model: Model) -> None:
    found = hs.score(random_model, "induction-heads-icl", part="copying").values
    a = random_model.anatomy
    for layer in range(a.n_layers):
        for head in range(a.n_heads):
            with torch.no_grad():
                whole = a.W_E @ a.W_V(layer, head) @ a.W_O(layer, head) @ a.W_U  # [vocab, vocab]
            values = torch.linalg.eigvals(whole)
            expected = float(values.real.sum() / values.abs().sum())
            assert found[layer, head] == pytest.approx(expected, abs=1e-3)
    assert np.abs(found).max() <= 1


def test_an_unknown_part_is_refused(induction: Model) -> None:
    with pytest.raises(UsageError, match="'matching'; it takes prefix-matching or copying"):
        hs.score(induction, "induction-heads-icl", part="matching")
