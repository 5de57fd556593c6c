"""Contextual decomposition: part and rest are the model's own activation, and the part is what it should be."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import headscope as hs
import toys
from eager import in_double
from families.tiny import DECODERS, build
from headscope.core.errors import NotApplicable, UsageError
from headscope.methods.attribute import cd_t
from headscope.model import Model, bias_of
from headscope.model.frozen import Frozen, freeze
from headscope.tasks import Prompts
from headscope.trace.decompose import Decomposition, Split, decompose, neurons

FAMILIES = [family for family in DECODERS if family not in ("opt-post-norm", "mixtral")]


def _prompts(twins: bool = True, foil: bool = True) -> Prompts:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(5, 96, (3, 9), generator=generator)
    other = tokens.clone()
    other[:, 2:5] = torch.randint(5, 96, (3, 3), generator=generator)
    at, target = torch.tensor([[8], [5], [7]]), torch.randint(5, 50, (3, 1), generator=generator)
    return Prompts("t", 0, tokens, at, target, target + 40 if foil else None, corrupt=other if twins else None)


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return {family: hs.load(in_double(build(family))) for family in FAMILIES}


# the rules, pair by pair: what the spec says, for β and γ each by itself


def _linear(pair: tuple[Tensor, Tensor], weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    beta, gamma = (x @ weight for x in pair)
    if bias is None:
        return beta, gamma
    total = beta.abs() + gamma.abs()
    return beta + bias * beta.abs() / total, gamma + bias * gamma.abs() / total


def _norm(pair: tuple[Tensor, Tensor], norm: nn.Module | None) -> tuple[Tensor, Tensor]:
    frozen = freeze(norm, pair[0] + pair[1])
    if frozen is None:
        return pair
    centre = torch.eye(len(frozen.gain)).double() - (1 / len(frozen.gain) if frozen.centred else 0.0)
    beta, gamma = (x @ centre / frozen.scale[..., None] for x in pair)
    return _linear((beta, gamma), torch.diag(frozen.gain), frozen.bias)


def _activation(block: Any) -> Any:
    where = block.block if block.mlp is block.block else block.mlp
    return next(getattr(where, n) for n in ("act_fn", "act", "activation_fn", "gelu_impl") if hasattr(where, n))


def _mlp(model: Model, i: int, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    anatomy, block = model.anatomy, model.anatomy.blocks[i]
    f, gate = _activation(block), anatomy.W_gate(i)
    up_b, up_g = _linear(pair, anatomy.W_in(i), None if block.up is None else bias_of(block.up))
    if gate is None:
        inner = f(up_b + up_g) - f(up_g), f(up_g)
    else:
        gate_b, gate_g = _linear(pair, gate, None if block.gate is None else bias_of(block.gate))
        g_g = f(gate_g)
        g_b = f(gate_b + gate_g) - g_g
        inner = (g_b + g_g) * (up_b + up_g) - g_g * up_g, g_g * up_g
    return _norm(_linear(inner, anatomy.W_out(i), bias_of(block.down)), block.post_mlp)


def _attention(model: Model, i: int, pair: tuple[Tensor, Tensor], pattern: Tensor) -> tuple[Tensor, Tensor]:
    anatomy = model.anatomy
    mixed = []
    for h in range(anatomy.n_heads):
        module, columns = anatomy.qkv_columns("v", anatomy.kv_of(h), i)
        bias = bias_of(module)
        v = _linear(pair, anatomy.W_V(i, h), None if bias is None else bias[columns])
        mixed.append([pattern[:, h] @ x for x in v])
    beta, gamma = (torch.cat(z, -1) for z in zip(*mixed, strict=True))
    W_O = torch.cat([anatomy.W_O(i, h) for h in range(anatomy.n_heads)])
    return _linear((beta, gamma), W_O, anatomy.b_O(i))


def _pairs(model: Model, run: Any, layer: int, written: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """β and γ of the stream after each layer from `layer` on, for one head of it that writes `written` [batch pos d]."""
    zero = torch.zeros_like(written)
    pair = (zero, run["resid_pre", layer])
    for i in range(layer, model.anatomy.n_layers):
        block = model.anatomy.blocks[i]
        read = _norm(pair, block.norm_attn)
        attn = _attention(model, i, read, run["pattern", i])
        if i == layer:  # nothing was relevant before it, and of the attention the head's part is
            raw = attn[0] + attn[1]
            attn = (written, raw - written)
            frozen = freeze(block.post_attn, raw)
            if frozen is not None:
                part = written - written.mean(-1, keepdim=True) if frozen.centred else written
                part = part * frozen.gain / frozen.scale[..., None]
                attn = (part, block.post_attn(raw) - part)  # type: ignore[misc]
        else:
            attn = _norm(attn, block.post_attn)
        added = (pair[0] + attn[0], pair[1] + attn[1])
        if model.anatomy.parts.parallel:
            source = read if block.norm_mlp is None else _norm(pair, block.norm_mlp)
        else:
            source = _norm(added, block.norm_mlp)
        mlp = _mlp(model, i, source)
        pair = (added[0] + mlp[0], added[1] + mlp[1])
        yield pair


def _begun(model: Model, prompts: Prompts) -> tuple[Decomposition, Tensor]:
    """A clean pass, and z minus that of the twins, [layer batch pos head d_head]."""
    found = decompose(model, prompts, ["z", "resid_post"])
    twin = hs.trace(model, prompts.corrupt, ["z"])
    return found, found.run["z"] - twin["z"]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_part_and_rest_carried_apart_are_the_models_activation(models: dict[str, Model], family: str) -> None:
    model, prompts = models[family], _prompts()
    found, change = _begun(model, prompts)
    for layer, h in ((0, 1), (1, 3), (2, 2)):
        written = change[layer][:, :, h] @ model.anatomy.W_O(layer, h)
        empty = written.new_zeros(0, 3, 7, 32)
        carried = list(found.layers(layer, empty, {layer: written[None, :, 2:]}))
        expected = list(_pairs(model, found.run, layer, written))
        assert len(carried) == len(expected) == 3 - layer
        for i, (split, (beta, gamma)) in enumerate(zip(carried, expected, strict=True), layer):
            true = found.run["resid_post", i]
            assert (split.whole - true).abs().max() < 1e-10
            assert (split.part[0] - beta[:, 2:]).abs().max() < 1e-10
            assert (split.part[0] + gamma[:, 2:] - true[:, 2:]).abs().max() < 1e-10
            assert beta[:, :2].abs().max() == 0.0 and beta[:, 2:].abs().max() > 1e-4


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_where_all_is_relevant_all_of_the_output_is(models: dict[str, Model], family: str) -> None:
    found = decompose(models[family], _prompts(), ["resid_post"])
    stream = found.run["resid_pre", 0]
    for i, split in enumerate(found.layers(0, torch.stack([stream, torch.zeros_like(stream)]), {})):
        # a share of a bias is a ratio of what may both be near 0, which turns rounding at 1e-16 into more
        assert (split.part[0] - found.run["resid_post", i]).abs().max() < 1e-6
        assert split.part[1].abs().max() < 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_closure_is_reported(models: dict[str, Model], family: str) -> None:
    found = hs.attribute(models[family], "cd-t", _prompts())
    assert found.sizes == {"prompt": 3, "layer": 3, "head": 4} and float(found.closure.max()) < 1e-12
    assert np.isfinite(found.values).all() and (np.abs(found.values[:, :2]) > 1e-8).all()


# known answers


class NoNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


def _linear_toy() -> Model:
    """A GPT-2 without norms, biases or a bend in its MLPs, whose heads spread evenly: linear in every head's output."""
    torch.manual_seed(0)
    config = hf.GPT2Config(vocab_size=40, n_embd=16, n_head=4, n_layer=3, n_positions=16, tie_word_embeddings=False)
    model = hf.GPT2LMHeadModel(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn_like(parameter))
        for block in model.transformer.h:
            block.attn.c_attn.weight[:, :32] = 0.0
            for linear in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj):
                linear.bias.zero_()
            block.ln_1, block.ln_2, block.mlp.act = NoNorm(), NoNorm(), nn.Identity()
        model.transformer.ln_f = NoNorm()
    return hs.load(model)


def _twins(tokens: list[list[int]], other: list[list[int]], target: list[int], foil: list[int] | None) -> Prompts:
    at = torch.full((len(tokens), 1), len(tokens[0]) - 1)
    return Prompts(
        "t", 0, torch.tensor(tokens), at, torch.tensor(target)[:, None],
        None if foil is None else torch.tensor(foil)[:, None], corrupt=torch.tensor(other),
        metric="logit" if foil is None else "logit_diff",
    )  # fmt: skip


@pytest.mark.parametrize("foil", [[9, 3], None], ids=["difference", "logit"])
def test_in_a_linear_model_it_is_what_patching_finds(foil: list[int] | None) -> None:
    model = _linear_toy()
    prompts = _twins([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]], [[1, 2, 11, 4, 5], [6, 7, 12, 13, 10]], [20, 21], foil)
    found = hs.attribute(model, "cd-t", prompts)
    with torch.no_grad():
        edits = [hs.patch(c, prompts.corrupt) for c in model.heads()]
        after = hs.sweep(model, prompts, [[], *edits]).values
    np.testing.assert_allclose(found.values.reshape(2, -1), (after[:1] - after[1:]).T, rtol=0, atol=1e-12)
    assert np.abs(found.values).min() > 1e-6


def test_without_twins_a_head_is_set_against_its_mean_at_each_position() -> None:
    """Of two prompts the mean is half way, so that in a linear model half of the difference is left."""
    model = _linear_toy()
    tokens = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    prompts = _twins(tokens, tokens[::-1], [20, 21], [9, 3])
    by_twin = hs.attribute(model, "cd-t", prompts).values
    by_mean = hs.attribute(model, "cd-t", replace(prompts, corrupt=None)).values
    np.testing.assert_allclose(by_mean, by_twin / 2, rtol=0, atol=1e-12)
    with pytest.raises(UsageError, match="give two or more"):
        hs.attribute(model, "cd-t", cd_t._parts(replace(prompts, corrupt=None), 1)[0])


def test_the_induction_head_gives_the_answer_and_takes_the_opposite_one_along(induction: Model) -> None:
    """The twin's second token is another: the induction head writes 6 times the one code instead of the other."""
    prompts = _twins([[4, 10, 5, 6, 7, 4]], [[4, 20, 5, 6, 7, 4]], [10], [20])
    found = hs.attribute(induction, "cd-t", prompts).values[0]
    entries = np.zeros(128)
    entries[:3], entries[3] = 1.0, toys.GAIN * (1 - toys.ANTI)  # position, token, token before; what the heads wrote
    spread = math.sqrt(entries.var() + induction.hf.config.layer_norm_epsilon)
    expected = np.zeros((2, 4))
    expected[1, 2], expected[1, 3] = 2 * toys.GAIN / spread, -2 * toys.ANTI * toys.GAIN / spread
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)
    patched = hs.patching(induction, prompts, direction="noise")
    assert found.sum() == pytest.approx(patched.clean - patched.corrupt, abs=1e-9)


def test_what_acts_through_keys_alone_gives_nothing(induction: Model) -> None:
    """The twin's first token is another, so that the induction head finds nothing there. L0H0, which tells it where to
    look, acts on its pattern alone, and patterns are held; patching gives it all of the difference."""
    prompts = _twins([[4, 10, 5, 6, 7, 4]], [[9, 10, 5, 6, 7, 4]], [10], [20])
    found = hs.attribute(induction, "cd-t", prompts).values[0]
    patched = hs.patching(induction, prompts, direction="noise").effect
    assert abs(found[0]).max() < 1e-9 and float(patched[0, 0]) > 0.95
    assert found[1, 2] > 10 and found[1, 3] == pytest.approx(-toys.ANTI * found[1, 2])


@pytest.mark.parametrize("family", ["gpt-neox", "gpt-j", "falcon", "falcon-new", "llama", "gpt2"])
@torch.no_grad()
def test_in_the_last_layer_it_is_the_direct_attribution_of_the_difference(family: str) -> None:
    model, prompts = hs.load(in_double(build(family))), _prompts()
    if not model.anatomy.parts.parallel:
        model.anatomy.W_out(2).zero_()  # else the last MLP reads the head as well
    found = hs.attribute(model, "cd-t", prompts).values[:, 2]
    run, twin = (hs.trace(model, tokens, ["z", "resid_post"]) for tokens in (prompts.tokens, prompts.corrupt))
    rows, at = torch.arange(3), prompts.positions[:, 0]
    direction = (model.anatomy.W_U[:, prompts.target[:, 0]] - model.anatomy.W_U[:, prompts.foil[:, 0]]).T  # type: ignore[index]
    frozen: Frozen | None = freeze(model.anatomy.final_norm, run["resid_post", 2][rows, at])
    assert frozen is not None
    change = (run["z", 2] - twin["z", 2])[rows, at]  # [prompt head d_head]
    for h in range(4):
        direct = (change[:, h] @ model.anatomy.W_O(2, h) * frozen.pull(direction)).sum(-1)
        np.testing.assert_allclose(found[:, h], direct, rtol=0, atol=1e-10)


def test_the_gated_mlp_by_hand() -> None:
    def split(part: float, rest: float) -> Split:
        return Split(torch.tensor([[[part + rest]]]).double(), torch.tensor([[[[part]]]]).double())

    def silu(x: float) -> float:
        return x / (1 + math.exp(-x))

    made = neurons(split(2.0, -0.5), split(1.0, 0.5), nn.SiLU())
    assert made.whole.item() == pytest.approx(silu(1.5) * 1.5)
    assert made.part.item() == pytest.approx(silu(1.5) * 1.5 - silu(0.5) * -0.5)
    plain = neurons(split(2.0, -0.5), None, nn.SiLU())
    assert plain.part.item() == pytest.approx(silu(1.5) - silu(-0.5))


def test_the_stabiliser_gives_all_to_the_larger_of_two_signs() -> None:
    part = torch.tensor([3.0, -1.0, 1.0, 0.0])
    whole = part + torch.tensor([-1.0, 4.0, 2.0, 5.0])
    made = Split(whole[None, None], part[None, None, None]).stabilised()
    assert made.part.flatten().tolist() == [2.0, 0.0, 1.0, 0.0]


def test_the_stabiliser_changes_scores_but_not_the_sum(models: dict[str, Model]) -> None:
    plain, stable = (hs.attribute(models["llama"], "cd-t", _prompts(), stabilise=on) for on in (False, True))
    assert float(stable.closure.max()) < 1e-12 and np.abs(plain.values - stable.values).max() > 1e-3


# what must always hold


@pytest.mark.parametrize("twins", [True, False])
def test_chunks_change_nothing(models: dict[str, Model], twins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = _prompts(twins)
    at_once = hs.attribute(models["gemma2"], "cd-t", prompts)
    monkeypatch.setattr(cd_t, "CHUNK_TOKENS", 70)
    some = hs.attribute(models["gemma2"], "cd-t", prompts)
    monkeypatch.setattr(cd_t, "PATTERN_BYTES", 1)
    one_by_one = hs.attribute(models["gemma2"], "cd-t", prompts)
    for found in (some, one_by_one):
        np.testing.assert_allclose(found.values, at_once.values, rtol=0, atol=1e-12)
        assert found.attrs["passes"] > at_once.attrs["passes"] > 2


def test_a_head_without_output_weights_gives_nothing() -> None:
    model = hs.load(in_double(build("qwen2")))
    with torch.no_grad():
        model.anatomy.W_O(1, 2).zero_()
    found = hs.attribute(model, "cd-t", _prompts()).values
    assert np.abs(found[:, 1, 2]).max() < 1e-12 and (np.abs(found) > 1e-8).sum() == found.size - 3


def test_nothing_is_given_before_the_twins_differ(models: dict[str, Model]) -> None:
    prompts = replace(_prompts(), positions=torch.tensor([[8], [1], [7]]))
    found = hs.attribute(models["gpt2"], "cd-t", prompts).values
    assert np.abs(found[1]).max() == 0.0 and np.abs(found[0]).min() > 0.0
    same = hs.attribute(models["gpt2"], "cd-t", replace(prompts, corrupt=prompts.tokens))
    assert np.abs(same.values).max() == 0.0


def test_several_scored_positions_give_their_mean(models: dict[str, Model]) -> None:
    prompts = _prompts()
    both = replace(
        prompts, positions=torch.tensor([[8, 4], [5, 3], [7, 6]]), target=prompts.target.repeat(1, 2),
        foil=prompts.foil.repeat(1, 2),  # type: ignore[union-attr]
    )  # fmt: skip
    each = [replace(prompts, positions=both.positions[:, i : i + 1]) for i in range(2)]
    found, *single = (hs.attribute(models["olmo2"], "cd-t", p).values for p in (both, *each))
    np.testing.assert_allclose(found, (single[0] + single[1]) / 2, rtol=0, atol=1e-12)


def test_padding_changes_nothing(worded: Model) -> None:
    """Prompts padded on the left, with twins or set against the mean of their positions, have the scores they have alone."""
    texts = ["When Mary and John went to the store ,", "The capital of"]
    tokens, mask = worded.tokens(texts)
    other = tokens.clone()
    other[:, -2] = tokens[:, -2] + 5
    at, target = torch.full((2, 1), tokens.shape[1] - 1), torch.tensor([[7], [9]])
    both = hs.attribute(worded, "cd-t", Prompts("t", 0, tokens, at, target, target + 1, mask=mask, corrupt=other))
    short = Prompts(
        "t", 0, tokens[1:, -3:], torch.tensor([[2]]), target[1:], target[1:] + 1, corrupt=other[1:, -3:]
    )  # fmt: skip
    np.testing.assert_allclose(both.values[1], hs.attribute(worded, "cd-t", short).values[0], rtol=0, atol=1e-10)
    wide = Prompts("t", 0, tokens[[1, 1]], at, target, target + 1, mask=mask[[1, 1]])
    wide.tokens[1, -1] += 1
    narrow = replace(wide, tokens=wide.tokens[:, -3:], positions=torch.full((2, 1), 2), mask=None)
    padded, alone = (hs.attribute(worded, "cd-t", p).values for p in (wide, narrow))
    np.testing.assert_allclose(padded, alone, rtol=0, atol=1e-10)
    assert np.abs(alone).max() > 1e-6


def test_a_part_that_ran_away_is_missing(models: dict[str, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cd_t, "RUNAWAY", 0.0)
    assert np.isnan(hs.attribute(models["llama"], "cd-t", _prompts()).values).all()


@pytest.mark.parametrize(
    ("family", "why"), [("opt-post-norm", "normalises after every sum"), ("mixtral", "has experts")]
)
def test_other_architectures_are_refused_in_a_sentence(family: str, why: str) -> None:
    with pytest.raises(NotApplicable, match=why) as caught:
        hs.attribute(hs.load(build(family)), "cd-t", _prompts())
    assert str(caught.value).endswith(".") and str(caught.value).count(". ") == 0


def test_an_activation_that_is_no_module_is_refused() -> None:
    model = hs.load(build("llama"))
    mlp = model.hf.model.layers[1].mlp
    mlp.forward = lambda x: mlp.down_proj(nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    with pytest.raises(NotApplicable, match="no module of its own"):
        hs.attribute(model, "cd-t", _prompts())


def test_layers_that_do_something_else_are_refused() -> None:
    model = hs.load(build("llama"))
    mlp = model.hf.model.layers[1].mlp
    mlp.forward = lambda x: mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x).tanh())
    with pytest.raises(NotApplicable, match="do more than attention, norms and MLPs"):
        hs.attribute(model, "cd-t", _prompts())
