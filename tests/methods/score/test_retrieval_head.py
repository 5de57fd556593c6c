"""Heads that look at the needle's answer just when it is produced."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

import headscope as hs
import toys
from eager import patterns
from headscope.core.errors import NotApplicable
from headscope.methods.score import retrieval_head
from headscope.model import Model
from headscope.tasks import Prompts, make

Patch = pytest.MonkeyPatch


def _on(monkeypatch: Patch, prompts: Prompts) -> None:
    monkeypatch.setattr(retrieval_head, "make_task", lambda *args, **options: prompts)


def _copying(model: Model, at: list[int]) -> Prompts:
    """Rows that end where a block of 12 tokens has begun again; row r's answer stands at position at[r]."""
    blocks = make("repeated-tokens", model, len(at), 4, length=12).tokens
    end = 12 + 7  # the token at position 6 was just repeated, so that at position 7 follows
    answers = torch.tensor([[int(blocks[row, position])] for row, position in enumerate(at)])
    return Prompts("t", 0, blocks[:, :end], torch.full((len(at), 1), end - 1), answers, meta={"needle": at}, chance=0.1)


@pytest.fixture(scope="module")
def copier(induction: Model) -> Model:
    return dataclasses.replace(induction, tokenizer=toys.word_tokenizer([f"word{i}" for i in range(31)]))


def test_the_copying_head_has_it_all(copier: Model, monkeypatch: Patch) -> None:
    _on(monkeypatch, _copying(copier, [7, 7, 7, 7]))
    found = hs.score(copier, "retrieval-head")
    expected = np.zeros((2, 4))
    expected[1, 2:] = 1.0  # both signs look there
    assert np.array_equal(found.values, expected)
    assert (found.n == 4).all()


def test_trials_that_fail_do_not_count(copier: Model, monkeypatch: Patch) -> None:
    _on(monkeypatch, _copying(copier, [7, 2, 7, 9, 7]))
    found = hs.score(copier, "retrieval-head")
    assert (found.n == 3).all() and found.values[1, 2] == 1.0
    _on(monkeypatch, _copying(copier, [7, 2, 7, 9]))
    with pytest.raises(NotApplicable, match="solved 2 of 4 needle trials"):
        hs.score(copier, "retrieval-head")


def test_a_scrambled_needle_scores_nothing(copier: Model, monkeypatch: Patch) -> None:
    prompts = _copying(copier, [7, 7, 7, 7])
    _on(monkeypatch, dataclasses.replace(prompts, meta={"needle": [4, 5, 11, 12]}))
    assert (hs.score(copier, "retrieval-head").values == 0).all()


def test_position_0_is_passed_over(copier: Model, monkeypatch: Patch) -> None:
    """The head that rests on position 0 has its second choice counted, unless asked not to."""
    prompts = _copying(copier, [7, 7, 7])
    _on(monkeypatch, dataclasses.replace(prompts, meta={"needle": [0, 0, 0]}))
    assert hs.score(copier, "retrieval-head").values[0, 2] == 0.0
    assert hs.score(copier, "retrieval-head", skip_bos=False).values[0, 2] == 1.0


def test_equals_the_eager_attentions(with_bos: Model, monkeypatch: Patch) -> None:
    """A random model answers nothing; so its own answers are taken for the right ones, in all rows but two."""
    prompts = make("needle", with_bos, 8, 1, length=96)
    pattern = patterns(with_bos, prompts.tokens)[..., -1, :]  # [layer, batch, head, key]
    with torch.no_grad():
        own = with_bos.hf(input_ids=prompts.tokens).logits[:, -1].argmax(-1)
    target = own.clone()
    target[[1, 5]] += 1
    needle = pattern[1, :, 2, 1:].argmax(-1) + 1  # where L1H2 looks
    needle[3] = 40
    changed: Any = dataclasses.replace(prompts, target=target[:, None], meta={"needle": needle.tolist()})
    _on(monkeypatch, changed)
    found = hs.score(with_bos, "retrieval-head")
    hits = (pattern[..., 1:].argmax(-1) + 1 == needle[None, :, None]).double()
    expected = hits[:, target == own].mean(1)
    np.testing.assert_allclose(found.values, expected.numpy(), rtol=0, atol=0)
    assert found.values[1, 2] == (6 - 1) / 6 or found.values[1, 2] == 1.0


def test_a_model_that_finds_nothing_is_not_scored(worded: Model) -> None:
    with pytest.raises(NotApplicable, match=r"solved . of 24 needle trials; retrieval cannot be scored"):
        hs.score(worded, "retrieval-head")
    result = hs.check(worded, "retrieval-head")
    assert result["verdict"] == "not testable" and "needle trials" in result["reason"]
