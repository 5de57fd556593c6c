"""The cosine of a neuron's input and output weights: known by construction, and computed again in every family."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import headscope as hs
from families.tiny import FAMILIES, build
from headscope.core.errors import NotApplicable
from headscope.methods.score import io_weight_cosine_neurons as method

ID = "io-weight-cosine-neurons"


def test_weights_set_by_hand_give_their_cosines_and_classes() -> None:
    model = hs.load(build("llama"), check=False)
    a = model.anatomy
    axis = torch.eye(32, dtype=torch.float64)
    # w_in, w_gate, w_out of neurons 0 … 6, as they are after the norm's gain
    neurons = [(0, 0, 0), (0, 1, 0), (0, 1, 1), (0, 1, 2), (0, 0, -1), (0, 1, -1)]
    with torch.no_grad():
        gain = a.blocks[1].norm_mlp.weight
        for n, (w_in, w_gate, w_out) in enumerate(neurons):
            a.W_in(1)[:, n] = axis[w_in] / gain
            a.W_gate(1)[:, n] = axis[w_gate] / gain  # type: ignore[index]
            a.W_out(1)[n] = -3 * axis[0] if w_out < 0 else 3 * axis[w_out]
        a.W_out(1)[6] = 0
    found = hs.score(model, ID)[1]
    np.testing.assert_allclose(found[:7], [1, 1, 0, 0, -1, -1, 0], atol=1e-9)
    np.testing.assert_allclose(found.gate_out[:7], [1, 0, 1, 0, -1, 0, 0], atol=1e-9)
    np.testing.assert_allclose(found.gate_in[:6], [1, 0, 0, 0, 1, 0], atol=1e-9)
    assert found["class"][:7].values.tolist() == [
        "enrichment", "conditional enrichment", "proportional change", "orthogonal output", "depletion",
        "conditional depletion", "orthogonal output",
    ]  # fmt: skip


def test_a_gain_that_turns_the_direction_is_folded_in() -> None:
    """w_in = (1, 1) and w_out = (1, -1) are orthogonal as stored; a gain of (2, 1) makes them (2, 1) and (1, -1)."""
    model = hs.load(build("llama"), check=False)
    with torch.no_grad():
        model.anatomy.blocks[0].norm_mlp.weight[:2] = torch.tensor([2.0, 1.0])  # type: ignore[index, union-attr]
        model.anatomy.W_in(0)[:, 3] = torch.tensor([1.0, 1.0] + [0.0] * 30)
        model.anatomy.W_out(0)[3] = torch.tensor([1.0, -1.0] + [0.0] * 30)
    assert float(hs.score(model, ID)[0, 3]) == pytest.approx(1 / np.sqrt(10))


def _gain(norm: torch.nn.Module | None) -> Tensor:
    if norm is None:
        return torch.ones(32, dtype=torch.float64)
    return 1 + norm.weight if "Gemma" in type(norm).__name__ else norm.weight  # type: ignore[operator, return-value]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "mixtral"])
def test_every_family_equals_the_cosines_of_its_modules_weights(family: str) -> None:
    """Read from the modules by their own names, not by ours."""
    model = hs.load(build(family), check=False)
    layer = model.anatomy.blocks[2].block
    mlp = getattr(layer, "mlp", None)
    post = {"gemma2", "gemma3", "olmo2"}
    with torch.no_grad():
        if hasattr(mlp, "gate_up_proj"):
            gate, up = mlp.gate_up_proj.weight.chunk(2)
            down = mlp.down_proj.weight.T
        elif hasattr(mlp, "gate_proj"):
            gate, up, down = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight.T
        else:
            gate, up, down = None, *_plain(family, layer)
        norms = {"gemma2": "pre_feedforward_layernorm", "gemma3": "pre_feedforward_layernorm"}
        if gate is not None:
            before = None if family == "olmo2" else getattr(layer, norms.get(family, "post_attention_layernorm"))
            after = layer.post_feedforward_layernorm if family in post else None
            up, gate, down = up * _gain(before), gate * _gain(before), down * _gain(after)
        elif family not in ("bert", "roberta", "distilbert", "opt-post-norm"):
            up = up * _gain(_layer_norm(family, layer))
            up, down = (w - w.mean(-1, keepdim=True) for w in (up, down))
        found = hs.score(model, ID)
        cosine = torch.nn.functional.cosine_similarity  # to 1e-6, as Gemma's norms compute in float32
        np.testing.assert_allclose(found[2], cosine(up, down), atol=1e-6)
        if gate is None:
            assert "gate_out" not in found.coords
            strong = set(np.unique(found["class"].values[np.abs(found.values) > 0.5]))
            assert strong <= {"enrichment", "depletion"}
        else:
            np.testing.assert_allclose(found.gate_out[2], cosine(gate, down), atol=1e-6)
            np.testing.assert_allclose(found.gate_in[2], cosine(gate, up), atol=1e-6)


def _plain(family: str, layer: torch.nn.Module) -> tuple[Tensor, Tensor]:
    """Input and output weights [neuron d_model] of an MLP without a gate."""
    names = {
        "gpt2": ("mlp.c_fc", "mlp.c_proj"), "gpt-j": ("mlp.fc_in", "mlp.fc_out"), "opt": ("fc1", "fc2"),
        "opt-post-norm": ("fc1", "fc2"), "bert": ("intermediate.dense", "output.dense"),
        "roberta": ("intermediate.dense", "output.dense"), "distilbert": ("ffn.lin1", "ffn.lin2"),
    }  # fmt: skip
    if family == "vit":
        names["vit"] = next(
            pair
            for pair in (("intermediate.dense", "output.dense"), ("mlp.fc1", "mlp.fc2"))
            if any(name == pair[0] for name, _ in layer.named_modules())
        )
    up, down = names.get(family, ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"))
    W_in, W_out = layer.get_submodule(up).weight, layer.get_submodule(down).weight
    return (W_in.T, W_out) if family == "gpt2" else (W_in, W_out.T)  # type: ignore[operator, return-value]


def _layer_norm(family: str, layer: torch.nn.Module) -> torch.nn.Module:
    names = {
        "gpt2": "ln_2", "gpt-j": "ln_1", "opt": "final_layer_norm", "vit": "layernorm_after", "falcon": "input_layernorm",
        "falcon-new": "ln_mlp",
    }  # fmt: skip
    return layer.get_submodule(names.get(family, "post_attention_layernorm"))


def test_experts_are_refused_in_one_sentence() -> None:
    with pytest.raises(NotApplicable, match="its MLPs are experts"):
        hs.score(hs.load(build("mixtral"), check=False), ID)


def test_chunks_and_half_precision_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = hs.score(hs.load(build("phi3"), check=False), ID)
    monkeypatch.setattr(method, "CHUNK", 7)
    assert np.array_equal(hs.score(hs.load(build("phi3"), check=False), ID).values, whole.values)
    half = hs.score(hs.load(build("phi3").bfloat16(), check=False), ID)
    np.testing.assert_allclose(half, whole, atol=0.02)


def test_the_claim_is_shown_where_early_neurons_add_and_late_ones_take_away() -> None:
    model = hs.load(build("llama"), check=False)
    assert hs.check(model, ID)["verdict"] == "not shown", "random weights have no such order"
    with torch.no_grad():
        for layer, sign in ((0, 1), (1, -1), (2, -1)):
            gain = model.anatomy.blocks[layer].norm_mlp.weight  # type: ignore[union-attr]
            model.anatomy.W_out(layer).copy_(sign * (model.anatomy.W_in(layer).T * gain))  # type: ignore[operator]
    result = hs.check(model, ID)
    assert result["verdict"] == "shown"
    assert result["figures"]["mean of the first half"] == pytest.approx(1)
    assert result["figures"]["mean of the second half"] == pytest.approx(-1)


def test_the_claim_needs_two_layers() -> None:
    inner = build("llama")
    inner.model.layers = inner.model.layers[:1]
    inner.config.num_hidden_layers = 1
    result = hs.check(hs.load(inner, check=False), ID)
    assert result["verdict"] == "not testable" and "has one layer" in result["reason"]
