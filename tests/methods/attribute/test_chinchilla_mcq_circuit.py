"""Output nodes of multiple choice, and letter heads in few dimensions, on a model whose heads are known."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

import headscope as hs
import toys
from headscope.core.component import Component, head
from headscope.core.errors import NotApplicable, UsageError
from headscope.methods.attribute.chinchilla_mcq_circuit import (
    Subspace,
    compressed,
    letter_heads,
    output_nodes,
    recovered,
    subspaces,
)
from headscope.model import Model
from headscope.tasks import Prompts, make
from headscope.tasks.base import from_own

METHOD = "chinchilla-mcq-circuit"
NAMES = [head(2, 0), head(2, 1)]


@pytest.fixture(scope="module")
def toy() -> Model:
    return toys.choice_toy()


@pytest.fixture(scope="module")
def prompts(toy: Model) -> Prompts:
    return make("multiple-choice", toy, 32, 0)


def _accuracy(model: Model, prompts: Prompts, spaces: list[Subspace]) -> tuple[float, float]:
    plain, small = hs.sweep(model, prompts, [[], compressed(model, prompts, spaces)], "accuracy").mean("prompt").values
    return float(plain), float(small)


def test_the_nodes_that_name_the_letter_recover_the_difference(toy: Model, prompts: Prompts) -> None:
    found = hs.attribute(toy, METHOD, prompts, nodes=2)
    assert found.attrs["output_nodes"] == ["L2H0", "L2H1"] and found.attrs["recovered"] == pytest.approx(1, abs=1e-6)
    by_head = found.mean("prompt").values
    assert by_head[2, 0] == pytest.approx(2 * by_head[2, 1], rel=1e-6) and abs(by_head[:2]).max() < 1e-6
    one, other, before = recovered(toy, prompts, [NAMES[:1], NAMES[1:], [head(1, 0)]])
    assert one + other == pytest.approx(1, abs=1e-3) and one > 0.6 and before > 0.99
    assert recovered(toy, prompts, [[head(2, 5), head(0, 1)]])[0] == pytest.approx(0, abs=1e-9)


def test_contributions_are_those_of_direct_logit_attribution(worded: Model) -> None:
    prompts = make("ioi", worded, 4)
    found, dla = hs.attribute(worded, METHOD, prompts), hs.attribute(worded, "dla", prompts)
    np.testing.assert_allclose(found.values, dla.sum("position").values, rtol=0, atol=1e-12)
    np.testing.assert_allclose(
        (found.sum(("layer", "head")) + found.mlp.sum("layer") + found.constant).values, found.logit, atol=1e-6
    )
    values = [*found.mean("prompt").values.ravel(), *found.mlp.mean("prompt").values]
    nodes = output_nodes(found, 15)
    assert len(set(nodes)) == 15 and sum(c.kind == "mlp" for c in nodes) == 3
    first = Component.parse(found.attrs["output_nodes"][0])
    part = found.mlp if first.kind == "mlp" else found.sel(head=first.index)
    assert float(part.sel(layer=first.layer).mean()) == pytest.approx(max(values))


def test_everything_at_the_scored_position_recovers_everything(worded: Model) -> None:
    prompts = make("ioi", worded, 4)
    mlps = [Component("", layer, "mlp") for layer in range(3)]
    assert recovered(worded, prompts, [[*worded.heads(), *mlps]]) == [pytest.approx(1, abs=1e-9)]


def test_letter_heads_look_at_the_right_label(toy: Model, prompts: Prompts) -> None:
    assert letter_heads(toy, prompts, toy.heads()) == NAMES
    assert letter_heads(toy, prompts, []) == []


def test_three_dimensions_hold_four_labels_and_two_do_not(toy: Model, prompts: Prompts) -> None:
    held_out = make("multiple-choice", toy, 32, 7)
    assert _accuracy(toy, held_out, subspaces(toy, prompts, NAMES, 3)) == (1.0, 1.0)
    assert _accuracy(toy, held_out, subspaces(toy, prompts, NAMES, 1))[1] < 0.6


def test_under_random_labels_the_number_of_the_option_is_not_enough(toy: Model, prompts: Prompts) -> None:
    random = make("multiple-choice", toy, 32, 7, random_labels=True)
    plain, small = _accuracy(toy, random, subspaces(toy, prompts, NAMES, 3))
    assert plain == 1.0 and small < 0.5
    result = hs.check(toy, METHOD)
    assert result["verdict"] == "shown" and result["figures"]["accuracy kept, A to D"] == 1.0, result


def test_a_head_that_knows_no_letters_fails_with_or_without_compression() -> None:
    """Its keys are the numbers of A to D alone: random labels cannot be told apart by it at all."""
    toy = toys.choice_toy(letter=0.0)
    prompts = make("multiple-choice", toy, 32, 0)
    assert hs.tasks.baseline(toy, prompts).accuracy == 1.0
    assert hs.tasks.baseline(toy, make("multiple-choice", toy, 32, 0, random_labels=True)).accuracy < 0.5


def _whole(c: Component, size: int) -> Subspace:
    mean = torch.randn(size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return Subspace(c, dict.fromkeys("qkv", mean), dict.fromkeys("qkv", torch.eye(size, dtype=torch.float64)))


def test_all_dimensions_change_nothing(worded: Model) -> None:
    prompts = make("multiple-choice", worded, 4)
    before = hs.trace(worded, prompts, "z")
    spaces = [_whole(c, worded.anatomy.d_head) for c in (head(1, 2), head(1, 3), head(2, 0))]
    after = hs.trace(worded, prompts, "z", compressed(worded, prompts, spaces))
    torch.testing.assert_close(after["z"], before["z"], rtol=0, atol=1e-9)
    torch.testing.assert_close(after.logits, before.logits, rtol=0, atol=1e-9)


@pytest.mark.parametrize("index", [0, 3])
def test_a_compressed_head_is_attention_over_changed_queries_keys_and_values(worded: Model, index: int) -> None:
    prompts = make("multiple-choice", worded, 8)
    (space,) = subspaces(worded, prompts, [head(1, index)], 2)
    run = hs.trace(worded, prompts, ["q", "k", "v", "attn_scores"], layers=[1])
    written = hs.trace(worded, prompts, "z", compressed(worded, prompts, [space]))["z", 1]
    kv, scale = index // 2, worded.anatomy.d_head**-0.5

    def small(site: str, x: Tensor) -> Tensor:
        basis, mean = space.basis[site], space.mean[site]
        assert basis.shape == (8, 2)
        return (x - mean) @ (basis @ basis.T) + mean

    for row, labels in enumerate(prompts.meta["labels"]):
        q, k, v = run["q", 1][row, -1, index], run["k", 1][row, :, kv].clone(), run["v", 1][row, :, kv].clone()
        scores = run["attn_scores", 1][row, index, -1].clone()
        scores[labels] = scale * small("k", k[labels]) @ small("q", q)
        v[labels] = small("v", v[labels])
        torch.testing.assert_close(written[row, -1, index], scores.softmax(0) @ v, rtol=0, atol=1e-6)
    other = hs.trace(worded, prompts, "z")["z", 1]
    torch.testing.assert_close(written[:, :-1], other[:, :-1], rtol=0, atol=0)


def test_padded_prompts_are_patched_at_their_own_last_position(worded: Model) -> None:
    cases = [
        hs.tasks.Case("When Mary and John went to the store , John gave a book to", "Mary", "John",
                      "When Mary and John went to the store , Mary gave a book to"),
        hs.tasks.Case("Mary and John , John gave a book to", "Mary", "John", "Mary and John , Mary gave a book to"),
    ]  # fmt: skip
    both = from_own(worded, "mine", cases)
    assert both.scored() == {8: [1], 13: [0]}
    chosen = [head(2, 1), Component("", 1, "mlp")]
    alone = [from_own(worded, "mine", [case]) for case in cases]
    (together,) = recovered(worded, both, [chosen])
    twins = [dataclasses.replace(p, tokens=p.corrupt, corrupt=p.tokens) for p in alone]
    gaps = [
        float((hs.sweep(worded, p, [[]]) - hs.sweep(worded, t, [[]])).sum()) for p, t in zip(alone, twins, strict=True)
    ]
    parts = [recovered(worded, p, [chosen])[0] * gap for p, gap in zip(alone, gaps, strict=True)]
    assert together == pytest.approx(sum(parts) / sum(gaps), abs=1e-6)


def test_bad_inputs_are_named(worded: Model, toy: Model, prompts: Prompts) -> None:
    with pytest.raises(UsageError, match="nodes is 0 and rank is 3; both are at least 1"):
        hs.attribute(worded, METHOD, make("ioi", worded, 2), nodes=0)
    with pytest.raises(NotApplicable, match="ioi does not say where its labels stand"):
        letter_heads(worded, make("ioi", worded, 2), [head(0, 0)])
    few = make("multiple-choice", toy, 2, 0)
    with pytest.raises(NotApplicable, match="Not every label is right once"):
        subspaces(toy, few, NAMES, 3)
    with pytest.raises(NotApplicable, match="does not have its answer as one of its labels"):
        subspaces(toy, dataclasses.replace(prompts, target=prompts.target * 0), NAMES, 3)
    same = dataclasses.replace(prompts, corrupt=prompts.tokens)
    with pytest.raises(NotApplicable, match="logit difference is the same"):
        recovered(toy, same, [NAMES])
    assert hs.check(worded, METHOD)["verdict"] == "not testable"
