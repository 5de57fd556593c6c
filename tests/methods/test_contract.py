"""What every method must do, over everything the registry finds."""

from __future__ import annotations

import copy
import functools
import hashlib
import re
import subprocess
import sys
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor

import headscope as hs
import toys
from families.tiny import build
from headscope.core import registry
from headscope.core.errors import HeadscopeError, NotApplicable, UsageError
from headscope.core.registry import MethodSpec
from headscope.model import Model
from headscope.tasks import make

METHODS = registry.methods()  # those of installed packages, too
SCORES = [name for name, spec in METHODS.items() if spec.kind == "score"]
HEADINGS = ["What it measures", "Formula", "Options", "Does not show", "Cost", "Paper and differences"]
NEEDS = {"causal", "tokenizer", "pattern", "logits", "gradient", "tokens"}
#: on a random model, the one method that may say that there is nothing to score
MAY_DECLINE = {"retrieval-head"}


# what a listing says


@pytest.mark.parametrize("name", METHODS)
def test_the_docstring_has_its_headings_in_order(name: str) -> None:
    doc = METHODS[name].doc
    found = [line.split(":")[0] for line in doc.splitlines() if re.match(r"[A-Z][A-Za-z ]+: ", line)]
    assert [heading for heading in found if heading in HEADINGS] == HEADINGS
    parts = re.split("|".join(f"^{heading}: " for heading in HEADINGS), doc, flags=re.M)
    assert len(parts) == 7 and all(len(part.split()) >= 3 or part.strip() == "none." for part in parts[1:]), parts
    assert parts[0].strip().endswith(".") and "\n" not in parts[0].strip()


@pytest.mark.parametrize("name", METHODS)
def test_every_option_is_explained_and_has_a_default_of_its_type(name: str) -> None:
    spec = METHODS[name]
    text = spec.doc.split("Options: ")[1].split("Does not show: ")[0]
    for option in spec.options:
        assert re.search(rf"\b{option.name}\b", text), option.name
        assert {"int": int, "float": float, "str": str, "bool": bool}[option.type] is type(option.default)
    assert spec.options or text.startswith("none")


@pytest.mark.parametrize("name", METHODS)
def test_the_declaration_is_complete(name: str) -> None:
    spec = METHODS[name]
    info = spec.info
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) and spec.path.stem == name.replace("-", "_")
    for key in ("title", "claim", "higher_means", "cost"):
        assert isinstance(info[key], str) and info[key].strip() == info[key] != "", key
    assert all(isinstance(paper, str) and len(paper) > 5 for paper in info["papers"])
    claim = info["claim"]
    assert claim[0].isupper() and claim.endswith(".") and len(claim.split()) >= 6
    assert not info["title"].endswith(".") and info["title"][0].isupper()
    assert set(info.get("needs", ())) <= NEEDS and ("pattern" not in info.get("needs", ()) or "Cost: " in spec.doc)
    low, high = info.get("values_in", (-1, 1))
    assert low < high
    # what was parsed is what the class says
    made = spec.create()
    assert all(getattr(made.info, key) == value for key, value in info.items())
    assert {option.name: getattr(made, option.name) for option in spec.options} == {
        option.name: option.default for option in spec.options
    }
    with pytest.raises((AttributeError, TypeError)):
        made.anything = 1  # frozen


def test_a_listing_imports_neither_torch_nor_a_method() -> None:
    code = """
        import sys
        import headscope
        from headscope.core import registry
        print(len([spec.info["claim"] for spec in registry.methods().values()]))
        print([name for name in sys.modules if name.split(".")[0] in ("torch", "transformers", "xarray")])
        print([name for name in sys.modules if name.startswith("headscope.methods.")])
    """
    done = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=True)
    count, *rest = done.stdout.splitlines()
    assert int(count) >= len(METHODS) >= 10 and rest == ["[]", "[]"]


@pytest.mark.parametrize("name", METHODS)
def test_a_wrong_option_is_named(name: str) -> None:
    spec = METHODS[name]
    with pytest.raises(UsageError, match="'no_such_option'") as caught:
        spec.create(no_such_option=1)
    assert name in str(caught.value)
    for option in spec.options:
        wrong: Any = 3 if option.type == "str" else "three"
        with pytest.raises(UsageError) as caught:
            spec.create(**{option.name: wrong})
        assert all(word in str(caught.value) for word in (option.name, name, repr(wrong), option.type))
        assert "\n" not in str(caught.value)


# what a score does


@functools.cache
def _bert() -> Model:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    config = hf.BertConfig(**sizes, num_attention_heads=4, max_position_embeddings=128)
    return hs.load(hf.BertForMaskedLM(config).double())


def _state(model: Model) -> tuple[str, int, int]:
    """A digest of all weights and buffers, the number of hooks, and the number of modes that watch torch's calls."""
    digest = hashlib.sha256()
    for name, value in [*model.hf.named_parameters(), *model.hf.named_buffers()]:
        digest.update(name.encode() + value.detach().numpy().tobytes())
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = sum(len(getattr(module, kind)) for module in model.hf.modules() for kind in kinds)
    return digest.hexdigest(), hooks, len(torch.overrides._get_current_function_mode_stack())


def _needs(spec: MethodSpec) -> set[str]:
    return set(spec.info.get("needs", ()))


def _sizes(model: Model, name: str) -> dict[str, int]:
    """Of the scores that a method declares."""
    units = {"layer": 3, "head": 4, "neuron": model.anatomy.d_mlp}
    return {dim: units[dim] for dim in METHODS[name].info.get("dims", ("layer", "head"))}


def _score(model: Model, name: str, **options: Any) -> Any:
    """The scores, or the sentence that says why there are none."""
    try:
        return hs.score(model, name, **options)
    except NotApplicable as error:
        sentence = str(error)
        assert sentence.endswith(".") and "\n" not in sentence and (name in sentence or model.name in sentence)
        return sentence


@pytest.fixture(scope="module", params=["decoder", "encoder"])
def model(request: pytest.FixtureRequest, worded: Model) -> Model:
    return worded if request.param == "decoder" else _bert()


@pytest.mark.parametrize("name", SCORES)
def test_a_score_is_what_it_declares(model: Model, name: str) -> None:
    spec = METHODS[name]
    found = _score(model, name, seed=3)
    if isinstance(found, str):
        needed = _needs(spec) & {"causal", "tokenizer"}
        assert (needed and not model.is_causal) or (model.is_causal and name in MAY_DECLINE), found
        return
    assert model.is_causal or "causal" not in _needs(spec)
    assert found.dims == tuple(spec.info.get("dims", ("layer", "head")))
    sizes = {"layer": 3, "head": 4, "kv_head": 2, "neuron": 48}
    assert all(size == sizes[str(dim)] for dim, size in found.sizes.items())
    assert all(found[dim].values.tolist() == list(range(size)) for dim, size in found.sizes.items())
    assert found.dtype == np.float64 and np.isfinite(found.values).all()
    if spec.info.get("values_in"):
        low, high = spec.info["values_in"]
        assert found.values.min() >= low - 1e-9 and found.values.max() <= high + 1e-9
    expected = {
        "method": name, "paper": ", ".join(spec.info["papers"]), "model": model.name, "fingerprint": model.fingerprint,
        "seed": 3, "units": spec.info.get("units", "head"), "higher_means": spec.info["higher_means"],
        "version": hs.__version__, "options": {option.name: option.default for option in spec.options},
    }  # fmt: skip
    assert {key: found.attrs[key] for key in expected} == expected
    if "ci_low" in found.coords:
        assert (found.ci_low <= found).all() and (found <= found.ci_high).all()


@pytest.mark.parametrize("name", SCORES)
def test_same_seed_same_scores_whatever_went_before(model: Model, name: str) -> None:
    first = _score(model, name, seed=5)
    torch.manual_seed(123)
    np.random.seed(7)
    _score(model, name, seed=6)
    again = _score(model, name, seed=5)
    if isinstance(first, str):
        assert first == again
    else:
        assert np.array_equal(first.values, again.values)


@pytest.mark.parametrize("name", SCORES)
def test_a_score_leaves_everything_as_it_was(model: Model, name: str) -> None:
    before, rng, grad = _state(model), torch.get_rng_state(), torch.is_grad_enabled()
    _score(model, name, seed=1)
    assert _state(model) == before
    assert torch.equal(torch.get_rng_state(), rng) and torch.is_grad_enabled() == grad
    assert not model.hf.training and all(parameter.grad is None for parameter in model.hf.parameters())


@pytest.mark.parametrize("name", SCORES)
def test_an_encoder_gets_a_score_or_a_sentence(name: str) -> None:
    if "causal" in _needs(METHODS[name]):
        with pytest.raises(NotApplicable, match="in both directions") as caught:
            hs.score(_bert(), name)
        assert name in str(caught.value) and str(caught.value).count(". ") == 0
        result = hs.check(_bert(), name)
        assert (result["verdict"], result["reason"]) == ("not testable", str(caught.value))
    else:
        assert hs.score(_bert(), name).sizes == _sizes(_bert(), name)
        assert hs.check(_bert(), name)["verdict"] in ("shown", "not shown")


@pytest.mark.parametrize("name", [name for name in METHODS if "tokenizer" in METHODS[name].info.get("needs", ())])
def test_without_a_tokenizer_a_sentence(tiny: Model, name: str) -> None:
    verb: dict[str, Any] = {"score": hs.score, "intervene": hs.intervene}
    with pytest.raises(NotApplicable, match="loaded without one") as caught:
        verb[METHODS[name].kind](tiny, name)
    assert name in str(caught.value)


def _swapped(model: Model) -> Model:
    """A copy with the two kv groups of layer 1 (kv heads 0 and 1, query heads 01 and 23) in the other order, and each
    neuron in the place of the next.
    """
    twin = copy.deepcopy(model.hf)
    attn, mlp = twin.model.layers[1].self_attn, twin.model.layers[1].mlp
    with torch.no_grad():
        for part in (attn.q_proj, attn.k_proj, attn.v_proj):
            part.weight.copy_(part.weight.roll(part.weight.shape[0] // 2, 0))
        attn.o_proj.weight.copy_(attn.o_proj.weight.roll(16, 1))
        for part in (mlp.gate_proj, mlp.up_proj):
            part.weight.copy_(part.weight.roll(1, 0))
        mlp.down_proj.weight.copy_(mlp.down_proj.weight.roll(1, 1))
    return hs.load(twin, tokenizer=model.tokenizer)


@pytest.mark.parametrize("name", SCORES)
def test_units_in_another_order_have_their_scores_in_that_order(worded: Model, name: str) -> None:
    twin = _swapped(worded)
    before, after = _score(worded, name, seed=2), _score(twin, name, seed=2)
    if isinstance(before, str):
        assert name in MAY_DECLINE and before == after
        return
    expected = before.values.copy()
    expected[1] = np.roll(expected[1], 1 if "neuron" in before.dims else 2)
    np.testing.assert_allclose(after.values, expected, rtol=0, atol=1e-6 if name == "induction-heads-icl" else 1e-9)
    assert not np.allclose(before.values[1], expected[1], atol=1e-12)
    assert before.attrs["fingerprint"] != after.attrs["fingerprint"]


def test_copying_follows_the_order_of_heads_too(worded: Model) -> None:
    before, after = (hs.score(m, "induction-heads-icl", part="copying").values for m in (worded, _swapped(worded)))
    np.testing.assert_allclose(after[1], before[1][[2, 3, 0, 1]], rtol=0, atol=1e-3)


@pytest.mark.parametrize("family", ["gpt2", "bloom", "mixtral", "gemma2", "opt-post-norm", "falcon"])
@pytest.mark.parametrize("name", SCORES)
def test_other_families_get_scores_or_a_sentence(family: str, name: str) -> None:
    found = _score(_family(family), name)
    if isinstance(found, str):
        assert name in (*MAY_DECLINE, "previous-token", "bos-sink", "discrete-sae-circuits") or (name, family) in (
            ("successor-heads", "opt-post-norm"), ("io-weight-cosine-neurons", "mixtral"),
        ), found  # fmt: skip
    else:
        assert found.sizes == _sizes(_family(family), name) and np.isfinite(found.values).all()


@pytest.mark.parametrize("family", ["gpt2", "bloom", "mixtral", "gemma2", "opt-post-norm", "falcon", "vit", "bert"])
def test_every_check_has_a_verdict_in_words(family: str) -> None:
    model = hs.load(build(family)) if family in ("vit", "bert") else _family(family)
    for name in METHODS:
        result = hs.check(model, name)
        assert result["id"] == name and result["claim"] == METHODS[name].info["claim"]
        assert result["verdict"] in ("shown", "not shown", "not testable") and len(result["reason"].split()) > 3
        assert bool(result["figures"]) == (result["verdict"] != "not testable")
        assert all(np.isfinite(value) for value in result["figures"].values()), (name, result["figures"])


def test_a_model_of_one_head_has_verdicts_in_words_too() -> None:
    model = toys.worded(num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=1)
    for name in METHODS:
        result = hs.check(model, name)
        assert all(np.isfinite(value) for value in result["figures"].values()), (name, result["figures"])
        assert bool(result["figures"]) == (result["verdict"] != "not testable") and result["verdict"] != "shown", result


@functools.cache
def _family(family: str) -> Model:
    """With a tokenizer of 95 words, and a context of 64 tokens in most."""
    return hs.load(
        build(family), tokenizer=toys.word_tokenizer([*toys.ITEMS[:40], *toys.ITEMS[-26:], "the", "of", "is"])
    )


# the other kinds


@pytest.mark.parametrize("name", [name for name, spec in METHODS.items() if spec.kind == "attribute"])
def test_an_attribution_is_what_it_declares(worded: Model, name: str) -> None:
    prompts = make("ioi", worded, 4, 0)
    before, rng = _state(worded), torch.get_rng_state()
    found = hs.attribute(worded, name, prompts, seed=3)
    assert _state(worded) == before and torch.equal(torch.get_rng_state(), rng)
    assert found.dims == METHODS[name].info["dims"] and np.isfinite(found.values).all()
    sizes = {"prompt": 4, "layer": 3, "head": 4, "position": prompts.tokens.shape[1]}
    assert dict(found.sizes) == {dim: sizes[str(dim)] for dim in found.dims}
    assert found.attrs["fingerprint"] == worded.fingerprint and found.attrs["method"] == name
    torch.manual_seed(9)
    assert np.array_equal(found.values, hs.attribute(worded, name, prompts, seed=3).values)


@pytest.mark.parametrize("name", [name for name, spec in METHODS.items() if spec.kind in ("intervene", "compress")])
def test_edits_and_plans_are_data_and_leave_the_model(worded: Model, name: str, tmp_path: Any) -> None:
    prompts = make("ioi", worded, 2, 0)

    def run() -> list[Any]:
        if METHODS[name].kind == "intervene":
            return hs.intervene(worded, name, prompts, seed=3)
        return hs.plan(worded, name, budget=0.25, seed=3).edits

    before, rng = _state(worded), torch.get_rng_state()
    edits = run()
    assert _state(worded) == before and torch.equal(torch.get_rng_state(), rng)
    assert not any(parameter.grad is not None for parameter in worded.hf.parameters())
    torch.manual_seed(123)
    hs.save_edits(edits, tmp_path / "edits.json")
    hs.save_edits(run(), tmp_path / "again.json")
    assert (tmp_path / "edits.json").read_bytes() == (tmp_path / "again.json").read_bytes()
    expected = _logits(worded, prompts.tokens, edits)
    assert torch.equal(_logits(worded, prompts.tokens, hs.load_edits(tmp_path / "edits.json")), expected)
    if any(edit.positions is not None for edit in edits):
        with pytest.raises(UsageError, match="cannot be baked"):
            hs.act.bake(worded, edits)
        return
    with torch.no_grad():
        baked = hs.act.bake(worded, edits)(input_ids=prompts.tokens).logits
    torch.testing.assert_close(baked, expected, rtol=0, atol=1e-6)


def _logits(model: Model, tokens: Tensor, edits: Any) -> Tensor:
    found = hs.trace(model, tokens, edits=edits).logits
    assert isinstance(found, Tensor)
    return found


def test_an_unknown_method_or_one_of_another_kind_is_named(worded: Model) -> None:
    with pytest.raises(UsageError, match=r"no score method 'induction-head'.*induction-heads-icl"):
        hs.score(worded, "induction-head")
    with pytest.raises(HeadscopeError, match="no score method 'dla'"):
        hs.score(worded, "dla")
    with pytest.raises(UsageError, match="no option 'lenght'"):
        hs.score(worded, "induction-heads-icl", lenght=5)
