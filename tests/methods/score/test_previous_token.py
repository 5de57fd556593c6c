"""Attention to the token just before."""

from __future__ import annotations

import numpy as np
import pytest

import headscope as hs
from eager import patterns
from headscope.core.errors import UsageError
from headscope.model import Model
from headscope.tasks import make


def test_known_heads(induction: Model) -> None:
    found = hs.score(induction, "previous-token", length=15).values
    assert found[0, 0] == pytest.approx(1.0, abs=1e-12)
    assert found[0, 1] < 1e-12 and found[0, 2] < 1e-12  # on itself, on position 0
    assert found[0, 3] == pytest.approx(np.mean([1 / (i + 1) for i in range(2, 15)]), abs=1e-12)
    # without a repeat, the induction head spreads over all but position 0
    assert found[1, 2] == pytest.approx(np.mean([1 / i for i in range(2, 15)]), abs=1e-12)


def test_another_offset(induction: Model) -> None:
    found = hs.score(induction, "previous-token", length=15, offset=2).values
    assert found[0, 0] < 1e-12
    assert found[0, 3] == pytest.approx(np.mean([1 / (i + 1) for i in range(3, 15)]), abs=1e-12)
    assert hs.score(induction, "previous-token", length=15, offset=0).values[0, 1] == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("offset", [1, 3])
def test_equals_the_eager_attentions(random_model: Model, offset: int) -> None:
    found = hs.score(random_model, "previous-token", n=3, length=9, offset=offset, seed=5)
    tokens = make("repeated-tokens", random_model, 3, 5, length=9).tokens[:, :-9]
    pattern = patterns(random_model, tokens)
    expected = sum(pattern[..., i, i - offset] for i in range(offset + 1, tokens.shape[1]))
    expected = expected.mean(1) / (tokens.shape[1] - offset - 1)  # type: ignore[union-attr]
    np.testing.assert_allclose(found.values, expected.numpy(), rtol=0, atol=1e-12)
    assert tokens.shape[1] == 9 + len(random_model.prefix)


@pytest.mark.parametrize("offset", [8, -8, 50])
def test_an_offset_beyond_the_rows_is_refused(induction: Model, offset: int) -> None:
    with pytest.raises(UsageError, match=f"offset is {offset}; .*at most 7"):
        hs.score(induction, "previous-token", length=9, offset=offset)
