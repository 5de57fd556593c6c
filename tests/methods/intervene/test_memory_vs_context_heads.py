"""The head and factor that decide between context and memory, against a search by plain hooks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import headscope as hs
from brute import head, hooked, plain, setting
from headscope.core.errors import NotApplicable, UsageError
from headscope.methods.intervene.memory_vs_context_heads import FACTORS, part
from headscope.model import Model
from headscope.tasks import Prompts, make


@pytest.fixture(scope="module")
def prompts(worded: Model) -> Prompts:
    made = make("fact-context", worded, 7, 3)
    assert made.mask is None and made.foil is not None
    return made


def _difference(model: Model, prompts: Prompts) -> Tensor:
    """[prompt]: the stated answer's logit minus the remembered one's, by the plain model."""
    logits = plain(model, input_ids=prompts.tokens)[:, -1]
    return (logits.gather(1, prompts.target) - logits.gather(1, prompts.foil))[:, 0]  # type: ignore[arg-type]


def _search(model: Model, prompts: Prompts, heads: list[tuple[int, int]], sign: int) -> tuple[int, int, float]:
    found = []
    for layer, h in heads:
        for factor in FACTORS:
            change = setting(head(h), lambda x, factor=factor: factor * x)
            with hooked(model, f"model.layers.{layer}.self_attn.o_proj", change):
                difference = sign * _difference(model, prompts)
            wins = int((difference > 0).sum())
            found.append((wins, float(difference.mean()), -abs(factor), (layer, h, factor)))
    return max(found, key=lambda row: row[:3])[3]


def _deltas(model: Model, prompts: Prompts) -> dict[tuple[int, int], float]:
    """Direct contribution to the logit difference at the last position, mean over prompts."""
    hf = model.hf
    stream: list[Tensor] = []
    with hooked(model, "model.norm", lambda x: stream.append(x[:, -1]) or x):  # type: ignore[func-returns-value]
        plain(model, input_ids=prompts.tokens)
    with torch.no_grad():
        wanted = (hf.lm_head.weight[prompts.target] - hf.lm_head.weight[prompts.foil])[:, 0] * hf.model.norm.weight
        wanted = wanted / (stream[0].pow(2).mean(-1, keepdim=True) + hf.config.rms_norm_eps).sqrt()
    found = {}
    for layer in range(3):
        kept: list[Tensor] = []
        path = f"model.layers.{layer}.self_attn.o_proj"
        with hooked(model, path, lambda x, kept=kept: kept.append(x[:, -1]) or x):  # type: ignore[misc]
            plain(model, input_ids=prompts.tokens)
        weight = hf.get_submodule(path).weight.detach()
        for h in range(4):
            found[layer, h] = float((kept[0][:, head(h)] @ weight[:, head(h)].T * wanted).sum(-1).mean())
    return found


@pytest.mark.parametrize("favour", ["context", "memory"])
@pytest.mark.parametrize("candidates", [1, 3, 12])
def test_equals_a_search_by_plain_hooks(worded: Model, prompts: Prompts, favour: str, candidates: int) -> None:
    deltas = _deltas(worded, prompts)
    heads = sorted(deltas, key=lambda at: -abs(deltas[at]))[:candidates]
    layer, h, factor = _search(worded, prompts, heads, 1 if favour == "context" else -1)
    (edit,) = hs.intervene(worded, "memory-vs-context-heads", prompts, favour=favour, candidates=candidates)
    assert (str(edit), edit.value) == (str(hs.scale(f"L{layer}H{h}", factor)), factor)
    assert edit.positions is None and edit.rows is None  # so that it can be baked


def test_heads_of_either_sign_are_tried(worded: Model, prompts: Prompts) -> None:
    """With answer and foil exchanged every contribution changes its sign, and the same head is the largest."""
    turned = dataclasses.replace(prompts, target=prompts.foil, foil=prompts.target)
    heads = [
        hs.intervene(worded, "memory-vs-context-heads", given, candidates=1)[0].components
        for given in (prompts, turned)
    ]
    assert heads[0] == heads[1]


def test_the_edit_moves_the_answers_as_asked(worded: Model, prompts: Prompts) -> None:
    before = _difference(worded, prompts)
    for favour, sign in (("context", 1), ("memory", -1)):
        edits = hs.intervene(worded, "memory-vs-context-heads", prompts, favour=favour, candidates=12)
        baked = hs.load(hs.act.bake(worded, edits), tokenizer=worded.tokenizer)
        after = _difference(baked, prompts)
        assert sign * float((after - before).mean()) > 0
        assert (sign * after > 0).sum() >= (sign * before > 0).sum()


def test_without_prompts_its_own_task_is_used(worded: Model) -> None:
    own = make("fact-context", worded, 16, 5)
    (given,) = hs.intervene(worded, "memory-vs-context-heads", own)
    (found,) = hs.intervene(worded, "memory-vs-context-heads", seed=5)
    assert (str(found), found.value) == (str(given), given.value)


def test_a_part_of_the_prompts_keeps_what_belongs_together(worded: Model, prompts: Prompts) -> None:
    cut = part(prompts, slice(2, 5))
    assert len(cut) == 3 and cut.meta["cases"] == prompts.meta["cases"][2:5]
    expected = _difference(worded, prompts)[2:5]
    torch.testing.assert_close(_difference(worded, cut), expected, rtol=0, atol=1e-12)


def test_its_check_holds_out_countries(worded: Model) -> None:
    result = hs.check(worded, "memory-vs-context-heads")
    assert result["verdict"] in ("shown", "not shown")  # a random model knows neither, but can be tested
    assert all(-1 <= value <= 1 for value in result["figures"].values()) and len(result["figures"]) == 5


def test_bad_inputs_are_named(worded: Model, prompts: Prompts) -> None:
    with pytest.raises(UsageError, match="favour is 'facts'; it takes context or memory"):
        hs.intervene(worded, "memory-vs-context-heads", prompts, favour="facts")
    with pytest.raises(NotApplicable, match="foil from memory"):
        hs.intervene(worded, "memory-vs-context-heads", dataclasses.replace(prompts, foil=None))
