"""Pruning heads: their importance, what is dropped, and the checkpoint that is left."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import headscope as hs
from brute import head, hooked
from families.tiny import build
from headscope.compress import export, save, savings
from headscope.core.errors import FileError, NotApplicable, UsageError
from headscope.methods.compress.sixteen_heads import importance
from headscope.model import Model
from headscope.tasks import Prompts, make

#: families whose checkpoint can hold fewer heads, and those that cannot
REMOVING = ["llama", "llama-mha-bias", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3"]
KEEPING = ["gpt2", "gpt-neox", "gpt-j", "opt", "bloom", "phi3", "olmo2", "falcon-new"]
OPTIONS: dict[str, Any] = {"task": "repeated-tokens", "n": 4}
_models: dict[str, Model] = {}


def _model(family: str) -> Model:
    if family not in _models:
        _models[family] = hs.load(build(family))
    return _models[family]


def _loss(logits: Tensor, prompts: Prompts, row: int) -> Tensor:
    at = logits[row, prompts.positions[row]]
    return torch.nn.functional.cross_entropy(at, prompts.target[row])


def _by_gates(model: Model, prompts: Prompts) -> Tensor:
    """[layer, head]: |dL/dξ| by autograd of a factor on each head, prompt by prompt, through plain hooks."""
    gates = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
    with ExitStack() as stack:
        for layer in range(3):
            path = f"model.layers.{layer}.self_attn.o_proj"
            stack.enter_context(hooked(model, path, lambda x, g=gates[layer]: x * g.repeat_interleave(8)))
        logits = model.hf(input_ids=prompts.tokens).logits
    each = [
        torch.autograd.grad(_loss(logits, prompts, row), gates, retain_graph=True)[0] for row in range(len(prompts))
    ]
    raw = torch.stack(each).abs().mean(0)
    return raw / raw.norm(dim=1, keepdim=True)


def test_importance_is_the_gradient_of_a_factor(tiny: Model) -> None:
    prompts = make("repeated-tokens", tiny, 5, 3)
    torch.testing.assert_close(importance(tiny, prompts), _by_gates(tiny, prompts), rtol=1e-6, atol=1e-9)


def test_importance_under_edits_is_that_of_the_edited_model(tiny: Model) -> None:
    prompts = make("repeated-tokens", tiny, 5, 3)
    twin = copy.deepcopy(tiny.hf)
    with torch.no_grad():
        twin.model.layers[0].self_attn.o_proj.weight[:, head(1)] = 0
    found = importance(tiny, prompts, [hs.zero("L0H1")])
    torch.testing.assert_close(found, _by_gates(hs.load(twin), prompts), rtol=1e-6, atol=1e-9)
    assert float(found[0, 1]) == 0.0


def test_a_silent_head_has_no_importance_and_goes_first(tiny: Model) -> None:
    silent = hs.load(hs.act.bake(tiny, hs.zero("L1H2")))
    found = importance(silent, make("repeated-tokens", silent, 4, 0))
    assert float(found[1, 2]) == 0.0 and int((found == 0).sum()) == 1
    assert [str(c) for c in hs.plan(silent, "sixteen-heads", budget=0.1, **OPTIONS).dropped] == ["L1H2"]


def test_heads_are_dropped_step_by_step(tiny: Model) -> None:
    """What goes next is measured on what is left: a plain loop over the same importance."""
    prompts = make("repeated-tokens", tiny, 4, 0)
    for step, size in ((0.1, 1), (0.25, 3), (1.0, 6)):
        dropped: list[Any] = []
        while len(dropped) < 6:
            twin = hs.load(hs.act.bake(tiny, hs.zero(dropped))) if dropped else tiny
            scores = _by_gates(twin, prompts)
            left = sorted((float(scores[c.layer, c.index]), c) for c in tiny.heads() if c not in dropped)
            dropped += [c for _, c in left][: min(size, 6 - len(dropped))]
        found = hs.plan(tiny, "sixteen-heads", budget=0.5, step=step, **OPTIONS)
        assert found.dropped == sorted(dropped), step
        assert found.summary["dropped"] == 6 and found.summary["heads"] == 12


def test_everywhere_drops_the_least_important_group_of_each_layer(tiny: Model) -> None:
    groups = _by_gates(tiny, make("repeated-tokens", tiny, 4, 0)).view(3, 2, 2).sum(2)
    found = hs.plan(tiny, "sixteen-heads", budget=0.5, where="everywhere", **OPTIONS)
    worst = {layer: int(groups[layer].argmin()) for layer in range(3)}
    assert found.remove == {layer: [2 * g, 2 * g + 1] for layer, g in worst.items()}
    assert {str(c) for c in found.dropped} == {f"L{i}H{2 * g + j}" for i, g in worst.items() for j in range(2)}


def _same_loss(model: Model, plan: Any) -> None:
    prompts = make("repeated-tokens", model, 4, 0)
    for name, edits in (("loss_before", []), ("loss_after", plan.edits)):
        logits = hs.trace(model, prompts.tokens, edits=edits).logits
        assert logits is not None
        mean = torch.stack([_loss(logits, prompts, row) for row in range(4)]).mean()
        assert plan.summary[name] == pytest.approx(float(mean), abs=1e-10)


@pytest.mark.parametrize("family", REMOVING)
def test_groups_are_taken_out_for_real(family: str, tmp_path: Path) -> None:
    model = _model(family)
    plan = hs.plan(model, "sixteen-heads", budget=0.5, where="everywhere", **OPTIONS)
    tokens = make("repeated-tokens", model, 3, 9, length=12).tokens
    zeroed = hs.trace(model, tokens, edits=plan.edits).logits
    smaller = export(model, plan)
    with torch.no_grad():
        torch.testing.assert_close(smaller(input_ids=tokens).logits, zeroed, rtol=0, atol=1e-10)
    path = save(smaller, None, tmp_path / "pruned")
    again = hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    with torch.no_grad():
        # Gemma's embedding factor is no weight: float32 digits in a model made in it, float64 ones in a reloaded one
        atol = 1e-6 if "gemma" in family else 1e-10
        torch.testing.assert_close(again(input_ids=tokens).logits, zeroed, rtol=0, atol=atol)
    saved = savings(model, again)
    assert plan.summary["parameters_saved"] == saved["parameters_before"] - saved["parameters_after"] > 0
    share = 1 - saved["cache_bytes_a_token_after"] / saved["cache_bytes_a_token_before"]
    assert plan.summary["cache_share_saved"] == pytest.approx(share) and share == 0.5
    assert plan.summary["removed"] == 6 and plan.summary["zeroed"] == 0
    _same_loss(model, plan)
    loaded = hs.load(again)  # and it is a model like any other
    assert (loaded.anatomy.n_heads, loaded.anatomy.n_kv_heads) == (2, model.anatomy.n_kv_heads // 2)


@pytest.mark.parametrize("family", KEEPING)
def test_where_they_cannot_be_taken_out_they_are_zeroed(family: str, tmp_path: Path) -> None:
    model = _model(family)
    plan = hs.plan(model, "sixteen-heads", budget=0.5, where="everywhere", **OPTIONS)
    assert plan.remove == {} and len(plan.dropped) == 6
    tokens = make("repeated-tokens", model, 3, 9, length=12).tokens
    zeroed = hs.trace(model, tokens, edits=plan.edits).logits
    path = save(export(model, plan), None, tmp_path / "pruned")
    again = hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=tokens).logits, zeroed, rtol=0, atol=1e-10)
    saved = savings(model, again)
    assert saved["parameters_before"] == saved["parameters_after"] and plan.summary["parameters_saved"] == 0
    assert (plan.summary["removed"], plan.summary["zeroed"], plan.summary["cache_share_saved"]) == (0, 6, 0.0)


def test_single_heads_are_zeroed_and_the_original_stays(tiny: Model) -> None:
    before = {name: value.clone() for name, value in tiny.hf.state_dict().items()}
    plan = hs.plan(tiny, "sixteen-heads", budget=0.25, **OPTIONS)
    assert len(plan.dropped) == 3
    tokens = make("repeated-tokens", tiny, 3, 9, length=12).tokens
    with torch.no_grad():
        found = export(tiny, plan)(input_ids=tokens).logits
    torch.testing.assert_close(found, hs.trace(tiny, tokens, edits=plan.edits).logits, rtol=0, atol=1e-10)
    assert all(torch.equal(value, before[name]) for name, value in tiny.hf.state_dict().items())


def test_the_cache_of_one_shared_kv_head_is_counted_as_it_is() -> None:
    model = _model("falcon")
    bytes_before = savings(model, model.hf)["cache_bytes_a_token_before"]
    assert bytes_before == 2 * 3 * 1 * 8 * 8  # keys and values × layers × one kv head × d_head × float64


def test_a_folder_that_is_there_already_is_not_written_over(tiny: Model, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "note").write_text("mine")
    plan = hs.plan(tiny, "sixteen-heads", budget=0.5, where="everywhere", **OPTIONS)
    with pytest.raises(FileError, match="kept"):
        save(export(tiny, plan), None, tmp_path / "kept")
    assert [p.name for p in tmp_path.rglob("*")] == ["kept", "note"]


def test_bad_budgets_and_options_are_named(tiny: Model) -> None:
    for budget in (0, 1, -0.5, 1.5):
        with pytest.raises(UsageError, match=f"budget is {budget}; it is the share"):
            hs.plan(tiny, "sixteen-heads", budget=budget, **OPTIONS)
    with pytest.raises(UsageError, match=r"less than one of the 2 kv groups .* at least 0\.50"):
        hs.plan(tiny, "sixteen-heads", budget=0.3, where="everywhere", **OPTIONS)
    with pytest.raises(UsageError, match="'nowhere'; it takes anywhere or everywhere"):
        hs.plan(tiny, "sixteen-heads", budget=0.5, where="nowhere", **OPTIONS)
    for step in (0.0, -0.1, 1.1):
        with pytest.raises(UsageError, match=f"step is {step}; "):
            hs.plan(tiny, "sixteen-heads", budget=0.5, step=step, **OPTIONS)
    with pytest.raises(NotApplicable, match="plain-text is made of text"):
        hs.plan(tiny, "sixteen-heads", budget=0.5)


def test_the_only_kv_group_of_a_layer_cannot_go() -> None:
    with pytest.raises(NotApplicable, match="one kv group a layer"):
        hs.plan(_model("llama-mqa"), "sixteen-heads", budget=0.5, where="everywhere", **OPTIONS)


def test_its_check_compares_with_random_and_most_important(worded: Model) -> None:
    result = hs.check(worded, "sixteen-heads")
    figures = result["figures"]
    shown = figures["rise, least important"] < min(
        figures["rise, random (lowest of 3)"], figures["rise, most important"]
    )
    assert result["verdict"] == ("shown" if shown else "not shown")
    held_out = make("plain-text", worded, 8, 1000)
    assert figures["loss"] == pytest.approx(float(hs.sweep(worded, held_out, [[]], "loss").mean()), abs=1e-10)
    chosen = hs.plan(worded, "sixteen-heads", budget=0.2).dropped
    after = float(hs.sweep(worded, held_out, [hs.zero(chosen)], "loss").mean())
    assert figures["rise, least important"] == pytest.approx(after - figures["loss"], abs=1e-10)
