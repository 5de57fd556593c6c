"""Attention to earlier copies of the present token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import headscope as hs
from eager import patterns
from headscope.model import Model
from headscope.tasks import make


@pytest.mark.parametrize(("length", "repeats"), [(12, 2), (10, 3), (6, 5)])
def test_known_heads(induction: Model, length: int, repeats: int) -> None:
    found = hs.score(induction, "duplicate-token", length=length, repeats=repeats).values
    # the head shares its attention among all copies and the token itself: r of r + 1 in the r-th repeat
    assert found[0, 1] == pytest.approx(np.mean([r / (r + 1) for r in range(1, repeats)]), abs=1e-12)
    uniform = [(i // length) / (i + 1) for i in range(length, repeats * length)]
    assert found[0, 3] == pytest.approx(np.mean(uniform), abs=1e-12)
    assert found[1, 2] < 1e-12  # one further on: the stripe of induction
    if length > 2:
        assert found[0, 0] < 1e-12


@pytest.mark.parametrize(("length", "repeats"), [(7, 2), (5, 4)])
def test_equals_the_eager_attentions(random_model: Model, length: int, repeats: int) -> None:
    found = hs.score(random_model, "duplicate-token", n=3, length=length, repeats=repeats, seed=2)
    tokens = make("repeated-tokens", random_model, 3, 2, length=length, repeats=repeats).tokens
    pattern = patterns(random_model, tokens)
    copies = (tokens[:, :, None] == tokens[:, None, :]) & torch.ones(tokens.shape[1], tokens.shape[1]).tril(-1).bool()
    seen = (pattern * copies[None, :, None]).sum(-1)  # [layer, batch, head, query]
    expected = seen[..., len(random_model.prefix) + length :].mean((1, 3))
    np.testing.assert_allclose(found.values, expected.numpy(), rtol=0, atol=1e-12)
