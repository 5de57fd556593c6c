"""Direct logit attribution: the parts add up, and each part is what it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import headscope as hs
from eager import in_double, patterns
from families.tiny import DECODERS, build
from headscope.core.errors import NotApplicable
from headscope.model import Model
from headscope.tasks import Prompts

FAMILIES = [family for family in DECODERS if family != "opt-post-norm"]


def _prompts(foil: bool = True, positions: tuple[tuple[int, ...], ...] = ((8,), (5,), (0,))) -> Prompts:
    generator = torch.Generator().manual_seed(3)
    at = torch.tensor(positions)
    return Prompts(
        "t", 0, torch.randint(5, 96, (3, 9), generator=generator), at, torch.randint(5, 50, at.shape, generator=generator),
        torch.randint(50, 96, at.shape, generator=generator) if foil else None,
    )  # fmt: skip


def _logits(model: Model, prompts: Prompts, family: str) -> np.ndarray:
    """[prompt]: the answer's logit minus the foil's, by the plain model; before Gemma-2's soft cap."""
    with torch.no_grad():
        logits = model.hf(input_ids=prompts.tokens).logits
    if family == "gemma2":
        cap = model.hf.config.final_logit_softcapping
        logits = cap * torch.atanh(logits / cap)
    rows = torch.arange(3)[:, None]
    found = logits[rows, prompts.positions, prompts.target]
    if prompts.foil is not None:
        found = found - logits[rows, prompts.positions, prompts.foil]
    return found.mean(1).numpy()  # type: ignore[no-any-return]


def _total(found: Any) -> np.ndarray:
    return (found.sum(("layer", "head", "position")) + found.mlp.sum("layer") + found.constant).values  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return {family: hs.load(in_double(build(family))) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("foil", [True, False], ids=["difference", "logit"])
def test_the_parts_add_up_to_the_logit(models: dict[str, Model], family: str, foil: bool) -> None:
    model, prompts = models[family], _prompts(foil)
    found = hs.attribute(model, "dla", prompts)
    expected = _logits(model, prompts, family)
    np.testing.assert_allclose(_total(found), expected, rtol=0, atol=1e-9)
    np.testing.assert_allclose(found.logit, expected, rtol=0, atol=1e-9)
    assert found.sizes == {"prompt": 3, "layer": 3, "head": 4, "position": 9}
    assert np.abs(found.values[0]).max(-1).min() > 1e-6  # every head has a part


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2"])
def test_norms_that_round_to_float32_round_the_sum_no_more(family: str) -> None:
    model, prompts = hs.load(build(family)), _prompts()
    found = hs.attribute(model, "dla", prompts)
    np.testing.assert_allclose(_total(found), _logits(model, prompts, family), rtol=1e-6, atol=1e-5)


def test_several_scored_positions_give_their_mean(models: dict[str, Model]) -> None:
    prompts = _prompts(True, ((8, 2), (5, 6), (0, 1)))
    found = hs.attribute(models["llama"], "dla", prompts)
    np.testing.assert_allclose(_total(found), _logits(models["llama"], prompts, "llama"), rtol=0, atol=1e-9)
    each = []
    for i in range(2):
        cut = slice(i, i + 1)
        one = Prompts("t", 0, prompts.tokens, prompts.positions[:, cut], prompts.target[:, cut], prompts.foil[:, cut])  # type: ignore[index]
        each.append(hs.attribute(models["llama"], "dla", one).values)
    np.testing.assert_allclose(found.values, (each[0] + each[1]) / 2, rtol=0, atol=1e-12)


def test_nothing_comes_from_tokens_not_yet_read(models: dict[str, Model]) -> None:
    found = hs.attribute(models["gpt2"], "dla", _prompts()).values
    assert np.abs(found[1, ..., 6:]).max() == 0.0 and np.abs(found[2, ..., 1:]).max() == 0.0
    assert np.abs(found[1, ..., :6]).min() > 0.0


def _pulled(model: Model, prompts: Prompts, resid: Tensor, family: str) -> Tensor:
    """[prompt, d_model]: what a unit of the stream adds to the logit difference, by the norm's written formula."""
    hf = model.hf
    norm, unembed, eps = {
        "llama": lambda: (hf.model.norm, hf.lm_head, hf.config.rms_norm_eps),
        "gpt2": lambda: (hf.transformer.ln_f, hf.lm_head, hf.config.layer_norm_epsilon),
        "gpt-neox": lambda: (hf.gpt_neox.final_layer_norm, hf.lm_head, hf.config.layer_norm_eps),
    }[family]()
    with torch.no_grad():
        direction = (unembed.weight[prompts.target] - unembed.weight[prompts.foil])[:, 0] * norm.weight
        if family == "llama":
            return direction / (resid.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        direction = direction / (resid.var(-1, unbiased=False, keepdim=True) + eps).sqrt()
        return direction - direction.mean(-1, keepdim=True)


def _last(x: Tensor, prompts: Prompts) -> Tensor:
    return x[torch.arange(len(prompts)), prompts.positions[:, 0]]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt-neox"])
def test_each_part_is_z_times_its_output_weights_along_the_direction(models: dict[str, Model], family: str) -> None:
    model, prompts = models[family], _prompts()
    found = hs.attribute(model, "dla", prompts)
    run = hs.trace(model, prompts, ["z", "mlp_out", "resid_post", "v"])
    along = _pulled(model, prompts, _last(run["resid_post", 2], prompts), family)
    hf_patterns = patterns(model, prompts.tokens)
    for layer in range(3):
        mlp = (_last(run["mlp_out", layer], prompts) * along).sum(-1)
        np.testing.assert_allclose(found.mlp[:, layer], mlp, rtol=0, atol=1e-10)
        for h in range(4):
            with torch.no_grad():
                read = along @ model.anatomy.W_O(layer, h).T  # [prompt, d_head]
            whole = (_last(run["z", layer][..., h, :], prompts) * read).sum(-1)
            np.testing.assert_allclose(found[:, layer, h].sum("position"), whole, rtol=0, atol=1e-10)
            rows = _last(hf_patterns[layer, :, h], prompts)  # [prompt, key]; float32 inside Llama's eager softmax
            v = run["v", layer][:, :, h // (4 // model.anatomy.n_kv_heads)]
            by_source = rows * torch.einsum("bkd,bd->bk", v, read)
            np.testing.assert_allclose(found[:, layer, h], by_source, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt-neox"])
def test_losing_a_last_head_on_its_direct_path_costs_its_part(models: dict[str, Model], family: str) -> None:
    """The last MLP and the final norm's scale stay as they were: the logit moves by minus the part, exactly."""
    model, prompts = models[family], _prompts()
    found = hs.attribute(model, "dla", prompts).sum("position")
    clean = _last(hs.trace(model, prompts, ["resid_post"], layers=[2])["resid_post", 2], prompts)
    along = _pulled(model, prompts, clean, family)
    for h in range(4):
        edits = [hs.zero(f"L2H{h}"), hs.patch("L2MLP", prompts)]
        after = _last(hs.trace(model, prompts, ["resid_post"], edits, layers=[2])["resid_post", 2], prompts)
        moved = ((after - clean) * along).sum(-1)
        np.testing.assert_allclose(moved, -found.values[:, 2, h], rtol=0, atol=1e-10)


def test_padding_changes_nothing(worded: Model) -> None:
    """A shorter row, padded on the left, has the parts it has alone, moved to its own columns."""
    texts = ["When Mary and John went to the store ,", "The capital of"]
    tokens, mask = worded.tokens(texts)
    at, target = torch.full((2, 1), tokens.shape[1] - 1), torch.tensor([[7], [9]])
    both = hs.attribute(worded, "dla", Prompts("t", 0, tokens, at, target, target + 1, mask=mask))
    short = worded.tokens(texts[1:])[0]
    alone = hs.attribute(worded, "dla", Prompts("t", 0, short, torch.tensor([[2]]), target[1:], target[1:] + 1))
    np.testing.assert_allclose(both.values[1, ..., -3:], alone.values[0], rtol=0, atol=1e-10)
    assert np.abs(both.values[1, ..., :-3]).max() == 0.0


def test_the_induction_head_holds_the_answer_and_its_opposite_half_of_it(induction: Model) -> None:
    prompts = hs.tasks.make("repeated-tokens", induction, 4, 0, length=12)
    last = Prompts("t", 0, prompts.tokens, prompts.positions[:, -1:], prompts.target[:, -1:])
    found = hs.attribute(induction, "dla", last)
    np.testing.assert_allclose(_total(found), found.logit, rtol=0, atol=1e-9)
    copied = found.values[:, 1, 2]
    assert (copied.argmax(-1) == 11).all()  # the source is where the answer stood
    np.testing.assert_allclose(found.values[:, 1, 3], -0.5 * copied, rtol=0, atol=1e-12)
    assert np.abs(found.values[:, 0]).max() < 0.1 * copied.max()  # centring alone


def test_norms_after_every_sum_are_refused() -> None:
    model = hs.load(build("opt-post-norm"))
    with pytest.raises(NotApplicable, match="normalises after every sum"):
        hs.attribute(model, "dla", _prompts())
