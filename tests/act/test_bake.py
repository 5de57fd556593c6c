"""Edits written into weights: an ordinary checkpoint computes what the edited model did."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import headscope as hs
from eager import eager, in_double
from families.tiny import build
from headscope.core.errors import FileError, HeadscopeError, NotApplicable, UsageError
from headscope.model import Model
from headscope.trace import Edit

FAMILIES = ["llama", "gpt2", "qwen3", "gemma2", "opt", "gpt-neox", "phi3", "falcon"]
#: families whose output projections have a bias, or a switch of their configuration for one
HEAD_BIAS = ["llama", "gpt2", "qwen3", "gemma2", "opt", "gpt-neox"]
NEURON_BIAS = ["llama", "gpt2", "opt", "gpt-neox"]
#: families with a norm after the attention and the MLP, which undoes factors
POST_NORM = ["gemma2"]
KEY_NORM = ["qwen3"]


@functools.cache
def _model(family: str) -> Model:
    return hs.load(in_double(build(family)))


def _tokens() -> Tensor:
    return torch.randint(5, 96, (3, 9), generator=torch.Generator().manual_seed(1))


def _plain(module: Any) -> Tensor:
    with torch.no_grad():
        return module(input_ids=_tokens()).logits  # type: ignore[no-any-return]


def _vector(size: int, seed: int = 3) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _d_head(family: str) -> int:
    return _model(family).anatomy.d_head


def _last_kv(family: str) -> str:
    return f"L1KV{_model(family).anatomy.n_kv_heads - 1}"


Make = Callable[[str], Edit | list[Edit]]
#: name → (the families that can hold it, the edits)
BAKEABLE: dict[str, tuple[list[str], Make]] = {
    "zero heads": (FAMILIES, lambda f: hs.zero(["L0H1", "L2H3"])),
    "scale a head": (FAMILIES, lambda f: hs.scale("L1H2", -1.5)),
    "project out of heads": (FAMILIES, lambda f: hs.project_out(["L1H2", "L2H0"], _vector(_d_head(f)))),
    "add to heads": (HEAD_BIAS, lambda f: hs.add(["L1H2", "L1H0"], _vector(2 * _d_head(f)).view(2, -1))),
    "mean of heads": (HEAD_BIAS, lambda f: hs.mean(["L1H2", "L0H0"], _tokens().flip(1))),
    "one mean for several": (HEAD_BIAS, lambda f: hs.mean(["L1H2", "L0H0"], _vector(_d_head(f)))),
    "zero and scale neurons": (FAMILIES, lambda f: [hs.zero("L0N3,L2N0"), hs.scale("L1N7", 3.0)]),
    "add to a neuron": (NEURON_BIAS, lambda f: hs.add("L1N7", torch.tensor([2.5], dtype=torch.float64))),
    "mean of neurons": (NEURON_BIAS, lambda f: hs.mean("L1N7,L0N0", _tokens().flip(1))),
    "heads and neurons": (NEURON_BIAS, lambda f: [hs.add("L1H2", _vector(_d_head(f))), hs.mean("L1N7", _tokens())]),
    "project out of a neuron": (FAMILIES, lambda f: hs.project_out("L1N7", torch.tensor([-2.0], dtype=torch.float64))),
    "zero values": (FAMILIES, lambda f: hs.zero(_last_kv(f), part="v")),
    "scale values": (FAMILIES, lambda f: hs.scale(_last_kv(f), 2.5, part="v")),
    "scale keys": ([f for f in FAMILIES if f not in KEY_NORM], lambda f: hs.scale(_last_kv(f), 0.5, part="k")),
    "zero keys and values": ([f for f in FAMILIES if f not in KEY_NORM], lambda f: hs.zero("L1KV0")),
    "zero the attention": (FAMILIES, lambda f: hs.zero("L1ATTN")),
    "zero the MLP": (FAMILIES, lambda f: hs.zero("L1MLP")),
    "zero a layer": (FAMILIES, lambda f: hs.zero("L1")),
    "scale a layer": ([f for f in FAMILIES if f not in POST_NORM], lambda f: hs.scale("L2", 0.5)),
    "several in order": (HEAD_BIAS, lambda f: [hs.scale("L1H2", 2.0), hs.add("L1H2", _vector(_d_head(f)))]),
    "the other order": (HEAD_BIAS, lambda f: [hs.add("L1H2", _vector(_d_head(f))), hs.scale("L1H2", 2.0)]),
    "add, then project out": (
        HEAD_BIAS,
        lambda f: [hs.add("L1H2", _vector(_d_head(f))), hs.project_out("L1H2", _vector(_d_head(f), 4))],
    ),
    "set, then zero": (HEAD_BIAS, lambda f: [hs.mean("L1H2", _vector(_d_head(f))), hs.zero("L1H2")]),
    "zero, then set": (HEAD_BIAS, lambda f: [hs.zero("L1H2"), hs.mean("L1H2", _vector(_d_head(f)))]),
    "add twice": (HEAD_BIAS, lambda f: [hs.add("L1H2", _vector(_d_head(f))), hs.add("L1H2", _vector(_d_head(f), 4))]),
    "add to a neuron, then zero the MLP": (
        NEURON_BIAS,
        lambda f: [hs.add("L1N7", torch.tensor([2.5], dtype=torch.float64)), hs.zero("L1MLP")],
    ),
    "zero the attention, then add to a head": (HEAD_BIAS, lambda f: [hs.zero("L1ATTN"), hs.add("L1H2", _vector(_d_head(f)))]),
}  # fmt: skip
CASES = [(name, family) for name, (families, _) in BAKEABLE.items() for family in families]


@pytest.mark.parametrize(("name", "family"), CASES)
def test_a_baked_model_computes_what_the_edits_do(name: str, family: str) -> None:
    model = _model(family)
    before = {key: value.clone() for key, value in model.hf.state_dict().items()}
    logits = _plain(model.hf)
    edits = BAKEABLE[name][1](family)
    expected = hs.trace(model, _tokens(), edits=edits).logits
    baked = in_double(hs.act.bake(model, edits))
    torch.testing.assert_close(_plain(baked), expected, rtol=0, atol=1e-9)
    assert not torch.allclose(logits, _plain(baked), atol=1e-6)
    after = model.hf.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[key], value) for key, value in before.items())
    assert torch.equal(_plain(model.hf), logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_is_an_ordinary_checkpoint(family: str, tmp_path: Path) -> None:
    model = _model(family)
    edits: list[Edit] = [hs.scale("L0H1", -2.0), hs.zero("L1N7"), hs.scale(_last_kv(family), 0.5, part="v")]
    edits += [hs.add("L1H2", _vector(_d_head(family)))] if family in HEAD_BIAS else []
    edits += [hs.mean("L2N0", _tokens())] if family in NEURON_BIAS else []
    baked = hs.act.bake(model, edits)
    expected = _plain(in_double(baked))
    path = hs.act.save(baked, None, tmp_path / "edited")
    again = in_double(hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64))
    # Gemma's embedding factor is no weight: float32 digits in a model made in it, float64 ones in a reloaded one
    torch.testing.assert_close(_plain(again), expected, rtol=0, atol=1e-6 if family == "gemma2" else 1e-10)
    reloaded = hs.load(path)
    assert reloaded.fingerprint == hs.load(baked).fingerprint != model.fingerprint


def test_the_tokenizer_goes_along_and_text_is_generated(worded_tiny: Model, tmp_path: Path) -> None:
    edits = [hs.scale("L2H1", 5.0), hs.add("L1H2", _vector(8))]
    path = hs.act.save(hs.act.bake(worded_tiny, edits), worded_tiny.tokenizer, tmp_path / "edited")
    again = hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    inputs = hf.AutoTokenizer.from_pretrained(path)("When Mary and John went to the", return_tensors="pt")
    inputs.pop("token_type_ids", None)
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    made = again.generate(**inputs, **settings)
    with hs.edited(worded_tiny, edits) as edited:
        assert torch.equal(made, edited.generate(**inputs, **settings))
    assert not torch.equal(made, worded_tiny.hf.generate(**inputs, **settings))


@pytest.fixture(scope="module")
def worded_tiny() -> Model:
    import toys

    return toys.worded()


def test_a_switch_keeps_the_attention_backend() -> None:
    model = hs.load(eager(build("llama")))
    baked: Any = hs.act.bake(model, hs.add("L1H2", _vector(8)))
    assert baked.config._attn_implementation == "eager" and baked.config.attention_bias is True
    assert model.hf.config.attention_bias is False
    new = set(baked.state_dict()) - set(model.hf.state_dict())
    assert new == {f"model.layers.{i}.self_attn.{p}_proj.bias" for i in range(3) for p in "qkvo"}
    filled = {name for name in new if torch.count_nonzero(baked.state_dict()[name])}
    assert filled == {"model.layers.1.self_attn.o_proj.bias"}


def test_no_edits_give_the_same_model() -> None:
    assert torch.equal(_plain(hs.act.bake(_model("llama"), [])), _plain(_model("llama").hf))


REFUSED: dict[str, tuple[str, Make, str]] = {
    "a position": ("llama", lambda f: hs.zero("L1H2", positions=3), "every position"),
    "generated": ("llama", lambda f: hs.zero("L1H2", positions="generated"), "every position"),
    "a row": ("llama", lambda f: hs.zero("L1H2", rows=0), "every row"),
    "patch": ("llama", lambda f: hs.patch("L1H2", _tokens()), "weights can hold"),
    "resample": ("llama", lambda f: hs.resample("L1H2", _tokens()), "weights can hold"),
    "mask_edges": ("llama", lambda f: hs.mask_edges("L1H2", [(1, 0)]), "weights can hold"),
    "gate": ("llama", lambda f: hs.gate("L1H2", torch.tensor(0.5)), "weights can hold"),
    "scaled keys under a norm": ("qwen3", lambda f: hs.scale("L1KV0", 2.0, part="k"), "part='v'"),
    "keys and values under a norm": ("qwen3", lambda f: hs.scale("L1KV0", 2.0), "part='v'"),
    "a sum under a norm": ("gemma2", lambda f: hs.scale("L1ATTN", 2.0), "a norm follows"),
    "a constant without a bias": ("phi3", lambda f: hs.add("L1H2", _vector(8)), "no bias"),
    "a mean without a bias": ("falcon", lambda f: hs.mean("L1H2", _tokens()), "no bias"),
    "a neuron without a bias": ("qwen3", lambda f: hs.add("L1N2", torch.ones(1)), "no bias"),
    "a neuron without a bias, a head with one": (
        "gemma2", lambda f: [hs.add("L1H2", _vector(16)), hs.mean("L1N2", _tokens())], "no bias",
    ),
    "a constant in values": ("llama", lambda f: hs.add("L1KV0", _vector(8), part="v"), "zero and scale"),
    "a constant in a sum": ("llama", lambda f: hs.add("L1ATTN", _vector(32)), "zero and scale"),
    "a direction of a sum": ("llama", lambda f: hs.project_out("L1MLP", _vector(32)), "zero and scale"),
    "the stream": ("llama", lambda f: hs.zero("L1RESID"), "no weight stands at resid_pre"),
    "a layer too far": ("llama", lambda f: hs.zero("L3H0"), "L3H0 does not exist"),
    "a head too far": ("llama", lambda f: hs.zero("L0H4"), "L0H4 does not exist"),
    "a vector of another size": ("gpt2", lambda f: hs.add("L1H2", _vector(5)), r"\(5,\)"),
    "a direction of another size": ("gpt2", lambda f: hs.project_out("L1H2", _vector(5)), r"\(5,\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_weight_can_hold_is_one_sentence(name: str) -> None:
    family, make, words = REFUSED[name]
    model = _model(family)
    logits = _plain(model.hf)
    with pytest.raises(UsageError, match=words) as caught:
        hs.act.bake(model, make(family))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    assert torch.equal(_plain(model.hf), logits)


def test_the_sum_of_experts_is_not_applicable() -> None:
    model = _model("mixtral")
    with pytest.raises(NotApplicable, match="experts"):
        hs.act.bake(model, hs.zero("L1MLP"))
    expected = hs.trace(model, _tokens(), edits=hs.zero("L1H2")).logits
    torch.testing.assert_close(_plain(hs.act.bake(model, hs.zero("L1H2"))), expected, rtol=0, atol=1e-9)


def test_edits_in_force_are_not_copied_along() -> None:
    model = _model("llama")
    with hs.edited(model, hs.zero("L1H2")), pytest.raises(UsageError, match=r"edited\(\) block"):
        hs.act.bake(model, hs.zero("L0H1"))


def test_saving_onto_a_folder_is_refused_and_leaves_it(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "note").write_text("keep me")
    with pytest.raises(FileError, match="mine") as caught:
        hs.act.save(hs.act.bake(_model("llama"), hs.zero("L1H2")), None, folder)
    assert isinstance(caught.value, HeadscopeError) and "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.rglob("*")] == ["mine", "note"] and (folder / "note").read_text() == "keep me"


def test_a_save_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    baked: Any = hs.act.bake(_model("llama"), hs.zero("L1H2"))

    def fail(folder: Path) -> None:
        (Path(folder) / "half").write_text("x")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(baked, "save_pretrained", fail)
    with pytest.raises(FileError, match="No space left"):
        hs.act.save(baked, None, tmp_path / "edited")
    assert list(tmp_path.iterdir()) == []
