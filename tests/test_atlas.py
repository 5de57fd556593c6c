"""Atlases keep what a scan found, and comparing two of them names what changed."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import headscope as hs
import toys
from headscope.core.errors import UsageError
from headscope.model import Model
from onefile import carried


@pytest.fixture(scope="module")
def toy() -> Model:
    return toys.worded(bos=True)


@pytest.fixture(scope="module")
def atlas(toy: Model) -> hs.Atlas:
    return hs.scan(toy, ["previous-token", "induction-heads-icl", "bos-sink"], n_seeds=5, n_controls=3)


def test_a_saved_atlas_loads_as_it_was(atlas: hs.Atlas, tmp_path: Path) -> None:
    atlas.save(tmp_path / "a")
    again = hs.Atlas.load(tmp_path / "a")
    assert again.model == atlas.model and again.seed == atlas.seed and again.skipped == atlas.skipped
    assert repr(again.verdicts) == repr(atlas.verdicts) and again.examples == atlas.examples
    assert list(again.scores) == list(atlas.scores)
    for method, scores in atlas.scores.items():
        assert again.scores[method].identical(scores), method
    np.testing.assert_array_equal(again.weights.values, atlas.weights.values)
    documents, matrices = carried(tmp_path / "a" / "report.html")
    heads = [address for address in documents if address.startswith("/api/head/")]
    assert len(heads) == atlas.scores["bos-sink"].size
    for method, scores in atlas.scores.items():
        np.testing.assert_array_equal(matrices[f"/api/scores/{method}"][1], scores.values.astype(np.float32))


def test_the_tables_can_be_read_without_us(atlas: hs.Atlas, tmp_path: Path) -> None:
    atlas.save(tmp_path / "a")
    frame = pd.read_parquet(tmp_path / "a" / "scores" / "bos-sink.parquet")
    assert list(frame.columns) == ["layer", "head", "score", "ci_low", "ci_high", "n"]
    row = frame[(frame.layer == 1) & (frame["head"] == 2)].iloc[0]
    assert row.score == float(atlas.scores["bos-sink"][1, 2])


def test_the_same_seed_gives_the_same_atlas(toy: Model, atlas: hs.Atlas) -> None:
    again = hs.scan(toy, ["previous-token", "induction-heads-icl", "bos-sink"], n_seeds=5, n_controls=3)
    assert all(again.scores[m].identical(atlas.scores[m]) for m in atlas.scores)
    assert repr(again.verdicts) == repr(atlas.verdicts)


def test_what_does_not_apply_is_recorded_with_its_reason() -> None:
    from families.tiny import build

    found = hs.scan(hs.load(build("bert")), "quick", n_seeds=5, n_controls=3)
    assert "attends in both directions" in found.skipped["induction-heads-icl"]
    assert "previous-token" in found.scores and found.examples == []
    assert all(v.verdict == "not testable" for v in found.verdicts)


def _changed(model: Model, change: str) -> Model:
    twin = hs.load(copy.deepcopy(model.hf), tokenizer=model.tokenizer)
    with torch.no_grad():
        if change == "output":
            twin.anatomy.W_O(1, 2).zero_()
        elif change == "query":
            twin.anatomy.W_Q(1, 1).mul_(0.5)
        elif change == "all":
            for p in twin.hf.parameters():
                p.add_(1e-3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0), dtype=p.dtype))
            twin.anatomy.W_Q(2, 3).add_(1.0)
    return twin


@pytest.mark.parametrize(("change", "first"), [("output", "L1H2"), ("query", "L1H1"), ("all", "L2H3")])
def test_compare_names_the_edited_heads_first(toy: Model, atlas: hs.Atlas, change: str, first: str) -> None:
    after = hs.scan(_changed(toy, change), list(atlas.scores), n_seeds=5, n_controls=3)
    found = hs.compare(atlas, after).heads
    assert found.component[0] == first and found.edited.sum() == 1
    assert len(found) == found.component.nunique() == atlas.scores["bos-sink"].size
    rest = found[~found.edited].change.values
    assert (np.diff(rest) <= 0).all() and (found.weights[0] > found.weights[1:]).all()


def test_an_atlas_does_not_differ_from_itself(atlas: hs.Atlas) -> None:
    found = hs.compare(atlas, atlas)
    assert (found.heads.change == 0).all() and not found.heads.edited.any()
    assert all(row["before"] == row["after"] for row in found.roles)


def test_a_notebook_shows_neurons_as_a_density(toy: Model) -> None:
    found = hs.scan(toy, ["previous-token", "io-weight-cosine-neurons"], n_seeds=5, n_controls=3)
    shown = found._repr_html_()
    assert shown.count("<svg") == 2 and "144 neurons are counted" in shown and "in a bin, by logarithm" in shown
    assert hs.scan(toy, "io-weight-cosine-neurons")._repr_html_().count("<svg") == 1


def test_compare_names_the_neurons_that_changed(toy: Model) -> None:
    method = "io-weight-cosine-neurons"
    before = hs.scan(toy, method)
    twin = hs.load(copy.deepcopy(toy.hf), tokenizer=toy.tokenizer)
    with torch.no_grad():
        twin.anatomy.W_out(1)[7] *= -1.0
        twin.anatomy.W_out(2)[5] *= 3.0  # of another length, but the same direction
    found = hs.compare(before, hs.scan(twin, method))
    row = found.neurons.iloc[0]
    assert row.component == "L1N7" and row.after == pytest.approx(-row.before) and row.method == method
    assert row.change == pytest.approx(abs(2 * row.before) / float(before.scores[method].std()))
    assert (found.neurons.change[1:] < 1e-5).all() and len(found.heads) == 0
    assert len(hs.compare(before, before).neurons) == 0


def test_atlases_of_other_models_do_not_compare(atlas: hs.Atlas) -> None:
    from families.tiny import build

    other = hs.scan(hs.load(build("gpt2")), ["previous-token"], n_seeds=5, n_controls=3)
    other.model = {**other.model, "anatomy": {**other.model["anatomy"], "n_heads": 7}}
    with pytest.raises(UsageError, match=r"× 4 and 3 × 7 heads"):
        hs.compare(atlas, other)
    with pytest.raises(UsageError, match="share no method"):
        hs.compare(atlas, hs.Atlas(atlas.model, 0, {}, []))


def test_a_notebook_shows_verdicts_and_scores(atlas: hs.Atlas) -> None:
    shown = atlas._repr_html_()
    assert "previous-token" in shown and "<script" not in shown and "<iframe" not in shown
    assert all(f"<td>{v.role}</td><td>{v.verdict}</td>" in shown for v in atlas.verdicts)
    assert shown.count("<title>L") == sum(scores.size for scores in atlas.scores.values())
