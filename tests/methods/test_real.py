"""On the real 135M model: the heads that are there, and the numbers that plain transformers gives for them."""

from __future__ import annotations

import numpy as np
import pytest

import headscope as hs
from eager import patterns
from headscope.model import Model
from headscope.tasks import Prompts, make

pytestmark = pytest.mark.real


def test_previous_token_heads(smollm2: Model) -> None:
    found = hs.score(smollm2, "previous-token")
    assert str(hs.top(found, 1)[0]) == "L16H0"
    assert float(found.max()) > 0.8 and float(found.median()) < 0.1


def test_induction_heads(smollm2: Model) -> None:
    found = hs.score(smollm2, "induction-heads-icl")
    best = [str(c) for c in hs.top(found, 5)]
    assert {"L18H6", "L17H4"} <= set(best), best
    assert float(found[18, 6]) > 0.6 and float(found[17, 4]) > 0.6 and float(found.median()) < 0.1


def test_the_induction_claim_is_shown(smollm2: Model) -> None:
    result = hs.check(smollm2, "induction-heads-icl")
    assert result["verdict"] == "shown", result
    assert result["figures"]["copying of the top 5"] > result["figures"]["copying of all"]


def test_sink_heads(smollm2: Model) -> None:
    found = hs.score(smollm2, "bos-sink")
    assert float(found.max()) > 0.9 and float(found.median()) > 0.3  # most heads rest there


def test_no_successor_heads(smollm2: Model) -> None:
    result = hs.check(smollm2, "successor-heads")
    assert result["verdict"] == "not shown", result
    assert 0 < result["figures"]["top"] < 1


def test_early_neurons_add_to_what_they_read_and_late_ones_take_it_away(smollm2: Model) -> None:
    found = hs.score(smollm2, "io-weight-cosine-neurons")
    means = found.mean("neuron").values
    assert int(means.argmax()) == 5 and means[5] > 0.3 and int(means.argmin()) == 29 and means[29] < -0.2
    kinds = found["class"].values
    kept = np.char.endswith(kinds.astype(str), "enrichment"), np.char.endswith(kinds.astype(str), "depletion")
    assert (kept[0].sum(1) > kept[1].sum(1))[1:17].all() and (kept[1].sum(1) > kept[0].sum(1))[17:].all()
    result = hs.check(smollm2, "io-weight-cosine-neurons")
    assert result["verdict"] == "shown" and abs(result["figures"]["shuffled, highest of 20"]) < 0.01


@pytest.mark.parametrize("name", ["previous-token", "induction-heads-icl", "duplicate-token", "bos-sink"])
def test_scores_equal_those_of_eager_attentions(smollm2: Model, name: str) -> None:
    options = {"n": 2, "length": 20}
    found = hs.score(smollm2, name, seed=4, **options).values
    task = "plain-text" if name == "bos-sink" else "repeated-tokens"
    tokens = make(task, smollm2, 2, 4, length=20).tokens
    start = len(smollm2.prefix)
    if name == "previous-token":
        pattern = patterns(smollm2, tokens[:, :-20])
        expected = pattern.diagonal(-1, 3, 4)[..., 1:].mean((1, 3))
    elif name == "bos-sink":
        expected = patterns(smollm2, tokens)[..., 8:, 0].mean((1, 3))
    else:
        back = 19 if name == "induction-heads-icl" else 20
        expected = patterns(smollm2, tokens).diagonal(-back, 3, 4)[..., -20:].mean((1, 3))
    assert tokens.shape[1] == (20 if task == "plain-text" else start + 40)
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def ioi(smollm2: Model) -> Prompts:
    return make("ioi", smollm2, 6, 0)


def test_attributions_add_up(smollm2: Model, ioi: Prompts) -> None:
    found = hs.attribute(smollm2, "dla", ioi)
    total = found.sum(("layer", "head", "position")) + found.mlp.sum("layer") + found.constant
    direct = hs.sweep(smollm2, ioi, [[]], "logit_diff").values[0]
    np.testing.assert_allclose(total, direct, rtol=0, atol=1e-3)
    np.testing.assert_allclose(found.logit, direct, rtol=0, atol=1e-3)
    assert float(direct.mean()) > 0  # the model can do it


def test_the_attribution_claim_is_shown(smollm2: Model) -> None:
    result = hs.check(smollm2, "dla")
    assert result["figures"]["largest error of the sum"] < 1e-3
    assert result["verdict"] == ("shown" if result["figures"]["share of the top 10 heads"] > 0.5 else "not shown")


def test_contextual_decomposition_closes_and_finds_the_name_movers(smollm2: Model, ioi: Prompts) -> None:
    found = hs.attribute(smollm2, "cd-t", ioi)
    assert float(found.closure.max()) < 1e-4 and np.isfinite(found.values).all()
    best = {str(c) for c in hs.top(found.mean("prompt"), 3)}
    assert {"L23H3", "L29H1"} <= best, best
    assert found.attrs["passes"] < 0.5 * 270


def test_the_contextual_decomposition_claim_has_a_verdict(smollm2: Model) -> None:
    result = hs.check(smollm2, "cd-t")
    figures = result["figures"]
    more = figures["their mean"] > figures["random heads, highest mean of 10"]
    assert figures["passes"] < figures["passes of patching"]
    assert figures["restored in the twins by the top 5%"] > figures["restored by random heads, highest of 10"]
    assert result["verdict"] == ("shown" if more else "not shown"), result


def test_pruned_groups_are_gone_from_the_checkpoint(smollm2: Model) -> None:
    """A third of the heads of every layer, taken out: what is left computes what zeroing them does."""
    import torch

    plan = hs.plan(smollm2, "sixteen-heads", budget=0.34, where="everywhere", task="repeated-tokens", n=2)
    smaller = hs.compress.export(smollm2, plan)
    tokens = make("repeated-tokens", smollm2, 1, 3, length=10).tokens
    zeroed = hs.trace(smollm2, tokens, edits=plan.edits).logits
    with torch.no_grad():
        torch.testing.assert_close(smaller(input_ids=tokens).logits, zeroed, rtol=0, atol=2e-3)
    saved = hs.compress.savings(smollm2, smaller)
    assert plan.summary["parameters_saved"] == saved["parameters_before"] - saved["parameters_after"]
    assert plan.summary["parameters_saved"] == 30 * 576 * 64 * (3 + 1 + 1 + 3) and plan.summary["removed"] == 90
