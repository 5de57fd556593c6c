"""The statistics against worked examples and brute force."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from headscope.core.component import head
from headscope.core.controls import matched_sets
from headscope.core.errors import UsageError
from headscope.verify.stats import bootstrap_interval, holm, sign_flip_p


def test_holm_on_a_worked_example() -> None:
    # 4 × 0.005, then max with 3 × 0.01, 2 × 0.03, 1 × 0.04
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_sign_flips_are_exact_for_few_pairs() -> None:
    difference = np.array([0.3, -0.1, 0.4, 0.2, 0.05])
    means = [np.mean(np.array(signs) * difference) for signs in product((1, -1), repeat=5)]
    assert sign_flip_p(difference) == pytest.approx(np.mean([m >= difference.mean() - 1e-12 for m in means]))
    assert sign_flip_p(np.ones(5)) == 1 / 32
    assert sign_flip_p(-np.ones(5)) == 1.0


def test_sign_flips_by_sampling_agree_with_the_exact_value() -> None:
    rng = np.random.default_rng(0)
    difference = rng.normal(0.3, 1, 14)
    exact = sign_flip_p(difference)
    padded = np.concatenate([difference, [0.0]])  # a zero changes no mean's order, but calls for sampling
    assert sign_flip_p(padded) == pytest.approx(exact, abs=0.01)


def test_sign_flips_hold_their_level_without_an_effect() -> None:
    rng = np.random.default_rng(1)
    rejected = [sign_flip_p(rng.normal(size=12)) <= 0.05 for _ in range(400)]
    assert 0.02 < np.mean(rejected) < 0.08


def test_the_bootstrap_interval_covers_the_true_difference() -> None:
    rng = np.random.default_rng(2)
    covered = 0
    for trial in range(100):
        seeds = rng.normal(size=12)  # a prompt is hard for every set alike
        effect = 1.0 + seeds + 0.3 * rng.normal(size=12)
        control = seeds + 0.3 * rng.normal(size=(20, 12)) + 0.2 * rng.normal(size=(20, 1))
        low, high = bootstrap_interval(effect, control, seed=trial, draws=400)
        covered += low < 1.0 < high
    assert covered >= 85


def test_the_bootstrap_interval_of_constants_is_a_point() -> None:
    low, high = bootstrap_interval(np.full(6, 3.0), np.full((4, 6), 1.0))
    assert (low, high) == (2.0, 2.0)


def test_controls_match_the_chosen_heads_layer_by_layer() -> None:
    chosen = [head(1, 0), head(1, 3), head(2, 2)]
    sets, borrowed = matched_sets(chosen, 4, 8, 30, seed=0)
    assert not borrowed and len(sets) == 30
    for one in sets:
        assert sorted(c.layer for c in one) == [1, 1, 2]
        assert len(set(one)) == 3 and not set(one) & set(chosen)
    assert sets == matched_sets(chosen, 4, 8, 30, seed=0)[0] != matched_sets(chosen, 4, 8, 30, seed=1)[0]
    # all free heads of a layer get their turn
    assert {c.index for one in sets for c in one if c.layer == 2} == {0, 1, 3, 4, 5, 6, 7}


def test_controls_are_borrowed_from_the_nearest_layers_and_say_so() -> None:
    chosen = [head(1, i) for i in range(3)]
    sets, borrowed = matched_sets(chosen, 4, 4, 5, seed=0)
    assert borrowed
    for one in sets:
        layers = sorted(c.layer for c in one)
        assert layers.count(1) == 1 and all(layer in (0, 1, 2) for layer in layers)
        assert not set(one) & set(chosen)


def test_too_many_heads_leave_no_controls() -> None:
    with pytest.raises(UsageError, match="at most half"):
        matched_sets([head(0, i) for i in range(4)], 2, 3, 5, seed=0)
