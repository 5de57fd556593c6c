"""Attention that rests on the first token."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import headscope as hs
import toys
from eager import patterns
from headscope.core.errors import NotApplicable, UsageError
from headscope.model import Model
from headscope.tasks import make


@pytest.fixture(scope="module")
def reading(induction: Model) -> Model:
    """The induction toy with a tokenizer of 31 words, none of which plain text needs."""
    return dataclasses.replace(induction, tokenizer=toys.word_tokenizer([f"word{i}" for i in range(31)]))


@pytest.mark.parametrize("skip", [0, 3, 8])
def test_known_heads(reading: Model, skip: int) -> None:
    found = hs.score(reading, "bos-sink", length=20, skip=skip, n=2).values
    assert found[0, 2] == pytest.approx(1.0, abs=1e-12)
    uniform = np.mean([1 / (i + 1) for i in range(skip, 20)])
    assert found[0, 3] == pytest.approx(uniform, abs=1e-12)
    # positions 0 and 1 of the previous-token head look at position 0
    assert found[0, 0] == pytest.approx(sum(i >= skip for i in (0, 1)) / (20 - skip), abs=1e-12)


@pytest.mark.parametrize("fixture", ["worded", "with_bos"])
def test_equals_the_eager_attentions(fixture: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(fixture)
    found = hs.score(model, "bos-sink", n=3, length=24, skip=5, seed=1)
    tokens = make("plain-text", model, 3, 1, length=24).tokens
    assert tokens.shape == (3, 24) and (tokens[:, 0] == tokens[0, 0]).all() == bool(model.prefix)
    expected = patterns(model, tokens)[:, :, :, 5:, 0].mean((1, 3))
    # the copy under eager attention takes its softmax in float32
    np.testing.assert_allclose(found.values, expected.numpy(), rtol=0, atol=1e-12 if model.prefix else 1e-6)


@pytest.mark.parametrize("skip", [-1, 24, 30])
def test_a_skip_beyond_the_rows_is_refused(worded: Model, skip: int) -> None:
    with pytest.raises(UsageError, match=f"skip is {skip}; .*0 to 23"):
        hs.score(worded, "bos-sink", length=24, skip=skip)


def test_its_check_compares_lengths(worded: Model) -> None:
    result = hs.check(worded, "bos-sink")
    short, long = (hs.score(worded, "bos-sink", n=n, length=k, seed=s) for n, k, s in ((8, 64, 0), (2, 256, 1)))
    assert result["figures"]["rank correlation of lengths"] == pytest.approx(hs.agree(short, long)["spearman"])
    assert result["figures"]["max"] == float(short.max())
    assert result["verdict"] == ("shown" if result["figures"]["rank correlation of lengths"] > 0.9 else "not shown")


def test_without_a_tokenizer_it_does_not_apply(tiny: Model) -> None:
    with pytest.raises(NotApplicable, match=r"bos-sink does not apply .*tokenizer"):
        hs.score(tiny, "bos-sink")
