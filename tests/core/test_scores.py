"""Scores: made, ranked, compared and written as a table, with missing values, ties and intervals."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr

import headscope as hs
from headscope.core.errors import UsageError
from headscope.core.scores import agree, from_frame, infinite_at, make, rank, to_frame, top

NAN = float("nan")


def _random(seed: int = 0, layers: int = 3, heads: int = 4) -> xr.DataArray:
    return make(np.random.default_rng(seed).normal(size=(layers, heads)))


def test_make_from_torch_and_numpy_gives_the_same_values() -> None:
    values = torch.arange(6, dtype=torch.float32, requires_grad=True).reshape(2, 3)
    scores = make(values, ci_low=values - 1, ci_high=values + 1, n=np.array(7.0), method="m", units="nat")
    xr.testing.assert_identical(
        scores,
        make(
            np.arange(6.0).reshape(2, 3), ci_low=np.arange(6.0).reshape(2, 3) - 1,
            ci_high=np.arange(6.0).reshape(2, 3) + 1, n=np.full((2, 3), 7.0), method="m", units="nat",
        ),
    )  # fmt: skip
    assert scores.attrs == {"method": "m", "units": "nat"}
    assert scores.sel(layer=1, head=2).item() == 5.0 and scores.n.sel(layer=0, head=1).item() == 7.0


def test_make_copies_its_values() -> None:
    values = np.zeros((2, 2))
    scores = make(values)
    values[0, 0] = 5
    assert scores[0, 0] == 0
    scores[0, 1] = 3  # and they can be written to
    assert scores.sum() == 3


def test_make_refuses_other_axes() -> None:
    with pytest.raises(UsageError, match=r"need 2 axes, .*\(2, 3, 4\)"):
        make(np.zeros((2, 3, 4)))


def test_top_is_best_first_with_ties_in_order_and_missing_last() -> None:
    scores = make(np.array([[1.0, NAN, 5.0], [5.0, -2.0, 1.0]]))
    assert [str(c) for c in top(scores, 6)] == ["L0H2", "L1H0", "L0H0", "L1H2", "L1H1", "L0H1"]
    assert [str(c) for c in top(scores, 1)] == ["L0H2"]
    assert top(scores.transpose("head", "layer"), 3) == top(scores, 3)
    assert len(top(scores, 100)) == 6


def test_top_names_units_and_stack() -> None:
    values = np.array([[0.0, 2.0], [1.0, 3.0]])
    assert [str(c) for c in top(make(values, ("layer", "neuron")), 2)] == ["L1N1", "L0N1"]
    assert [str(c) for c in top(make(values, ("layer", "kv_head"), stack="dec"), 1)] == ["dec.L1KV1"]


@pytest.mark.parametrize("dims", [("edit", "prompt"), ("layer", "position"), ("seed", "head")])
def test_top_needs_components(dims: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="dims"):
        top(make(np.zeros((2, 2)), dims))


@pytest.mark.parametrize("k", [0, -1])
def test_top_needs_a_positive_count(k: int) -> None:
    with pytest.raises(UsageError, match=str(k)):
        top(_random(), k)


def test_rank_shares_the_mean_among_ties() -> None:
    scores = make(np.array([[3.0, 1.0], [3.0, 7.0]]), method="m")
    np.testing.assert_array_equal(rank(scores).values, [[2.5, 4.0], [2.5, 1.0]])
    assert rank(scores).dims == scores.dims


def test_rank_leaves_missing_scores_out() -> None:
    np.testing.assert_array_equal(rank(make(np.array([[3.0, NAN], [1.0, 7.0]]))).values, [[2.0, NAN], [3.0, 1.0]])


def test_agree_against_a_hand_computation() -> None:
    a = make(np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    b = make(np.array([[1.0, 2.0, 3.0], [4.0, 6.0, 5.0]]))
    found = agree(a, b, k=1)
    assert found["spearman"] == pytest.approx(1 - 6 * 2 / (6 * 35))  # 1 - 6 Σd² / n(n² - 1)
    assert found["overlap_top"] == 0.0 and found["n"] == 6
    assert agree(a, b, k=2)["overlap_top"] == 1.0
    assert agree(a, -a)["spearman"] == pytest.approx(-1.0)
    assert agree(a, a, k=100)["overlap_top"] == 1.0


def test_agree_compares_what_both_have() -> None:
    a = make(np.array([[1.0, NAN, 3.0], [4.0, 5.0, 6.0]]))
    b = make(np.array([[2.0, 9.0, 1.0], [NAN, 5.0, 6.0]]))
    found = agree(a, b, k=2)
    assert found["n"] == 4
    assert found["spearman"] == pytest.approx(0.8)  # ranks 1 2 3 4 against 2 1 3 4
    assert found["overlap_top"] == 1.0  # the 9.0 has no partner


@pytest.mark.filterwarnings("error")
def test_what_is_the_same_everywhere_has_no_order() -> None:
    a = make(np.array([[1.0, 2.0], [3.0, 4.0]]))
    for flat in (a * 0, a * NAN, a.where(a == 1)):
        assert np.isnan(agree(a, flat)["spearman"])


def test_infinite_scores_are_named_and_refused() -> None:
    values = np.array([[1.0, NAN, 3.0], [4.0, -np.inf, np.inf]])
    assert infinite_at(make(values)) == "layer 1, head 1" and infinite_at(make(values[:1])) is None
    with pytest.raises(UsageError, match="infinite at layer 1, head 1"):
        hs.figure(make(values))
    with pytest.raises(UsageError, match="scores of mine are infinite at layer 1, head 1"):
        hs.Atlas({"name": "x", "fingerprint": "y", "anatomy": {}}, 0, {"mine": make(values)}, [])


def test_agree_refuses_other_shapes() -> None:
    with pytest.raises(UsageError, match="equal dims"):
        agree(_random(), _random(heads=3))
    with pytest.raises(UsageError, match="equal dims"):
        agree(_random(), _random().transpose("head", "layer"))


@pytest.mark.parametrize("extras", [(), ("ci_low", "ci_high"), ("ci_low", "ci_high", "n")])
@pytest.mark.parametrize("missing", [False, True])
def test_frame_round_trip(extras: tuple[str, ...], missing: bool) -> None:
    scores = _random(1)
    if missing:
        scores[1, 2] = NAN
    parts = {name: scores.values + i for i, name in enumerate(extras)}
    scores = make(scores.values, **parts, method="m")
    frame = to_frame(scores)
    assert list(frame.columns) == ["layer", "head", "score", "ci_low", "ci_high", "n"]
    row = frame[(frame.layer == 2) & (frame["head"] == 1)].iloc[0]
    assert row.score == scores.sel(layer=2, head=1).item()
    assert all(frame[name].isna().all() for name in ("ci_low", "ci_high", "n") if name not in extras)
    xr.testing.assert_identical(from_frame(frame, method="m"), scores)


@pytest.mark.parametrize("dims", [("neuron",), ("layer", "head"), ("seed", "layer", "head")])
def test_frame_round_trip_in_any_number_of_dims(dims: tuple[str, ...]) -> None:
    scores = make(np.random.default_rng(2).normal(size=(2, 3, 4)[-len(dims) :]), dims)
    xr.testing.assert_identical(from_frame(to_frame(scores)), scores)


def test_row_order_of_a_frame_does_not_matter() -> None:
    scores = make(_random().values, ci_low=_random(1).values, ci_high=_random(2).values)
    frame = to_frame(scores).sort_values("score", ascending=False)
    xr.testing.assert_identical(from_frame(frame), scores)


def test_absent_rows_of_a_frame_are_missing_scores() -> None:
    scores = _random()
    scores[0, 1] = NAN
    xr.testing.assert_identical(from_frame(to_frame(scores).dropna(subset="score")), scores)


def test_a_frame_of_something_else_is_refused() -> None:
    with pytest.raises(UsageError, match="score"):
        from_frame(pd.DataFrame({"layer": [0], "head": [0]}))
    twice = to_frame(_random())
    with pytest.raises(UsageError, match="twice"):
        from_frame(pd.concat([twice, twice]))


def test_auroc_counts_pairs() -> None:
    """Of the 2 x 3 pairs of a true and another item, 4 are in order, 1 is tied, 1 is not."""
    from headscope.core.scores import auroc

    values = np.array([0.9, 0.4, 0.4, 0.2, 0.6])
    truth = np.array([True, True, False, False, False])
    pairs = [1.0 if a > b else 0.5 if a == b else 0.0 for a in values[truth] for b in values[~truth]]
    assert auroc(values, truth) == pytest.approx(sum(pairs) / 6) == pytest.approx(4.5 / 6)
    assert auroc([1, 2, float("nan")], [False, True, True]) == 1.0
    with pytest.raises(UsageError, match="all are of one kind"):
        auroc([1, 2], [True, True])
