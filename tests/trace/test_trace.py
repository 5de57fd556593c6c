"""What a pass captures is what the Hugging Face model computes, at the layers and positions asked for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import headscope as hs
from brute import D_HEAD, hooked, plain
from families.tiny import build
from headscope.core.errors import NotApplicable, UsageError
from headscope.model import Model
from headscope.tasks import Prompts
from headscope.trace import Capture

CLOSE = {"rtol": 0.0, "atol": 1e-9}


def _tokens(batch: int = 2, width: int = 7, seed: int = 1) -> Tensor:
    return torch.randint(5, 96, (batch, width), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def smooth() -> Model:
    """A model that computes in float64 all through; the norms and the eager softmax of a Llama go by float32."""
    return hs.load(build("gpt2"))


def test_streams_are_the_hidden_states(tiny: Model) -> None:
    with torch.no_grad():
        outputs = tiny.hf(input_ids=_tokens(), output_hidden_states=True)
    run = hs.trace(tiny, _tokens(), ["resid_pre", "resid_post"])
    torch.testing.assert_close(run["resid_pre"], torch.stack(outputs.hidden_states[:3]), rtol=0, atol=0)
    torch.testing.assert_close(run["resid_post"][:2], torch.stack(outputs.hidden_states[1:3]), rtol=0, atol=0)
    final = tiny.anatomy.final_norm(run["resid_post", 2])  # type: ignore[misc]
    torch.testing.assert_close(final, outputs.hidden_states[3], rtol=0, atol=0)
    torch.testing.assert_close(run.logits, outputs.logits, rtol=0, atol=0)


def test_patterns_are_the_attentions_of_an_eager_copy(smooth: Model, tiny: Model) -> None:
    for model, error in ((smooth, 1e-9), (tiny, 1e-6)):
        eager = copy.deepcopy(model.hf)
        eager.set_attn_implementation("eager")  # type: ignore[operator]
        with torch.no_grad():
            attentions = torch.stack(eager(input_ids=_tokens(), output_attentions=True).attentions)
        run = hs.trace(model, _tokens(), ["pattern", "attn_scores"])
        torch.testing.assert_close(run["pattern"], attentions, rtol=0, atol=error)
        torch.testing.assert_close(run["attn_scores"].softmax(-1), run["pattern"], **CLOSE)
        with_eager = hs.trace(hs.load(eager), _tokens(), ["pattern"])["pattern"]
        torch.testing.assert_close(with_eager, attentions, rtol=0, atol=0)


def test_sites_add_up(tiny: Model) -> None:
    run = hs.trace(tiny, _tokens(), ["resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post", "head_out", "z"])
    torch.testing.assert_close(run["resid_mid"], run["resid_pre"] + run["attn_out"], **CLOSE)
    torch.testing.assert_close(run["resid_post"], run["resid_mid"] + run["mlp_out"], **CLOSE)
    torch.testing.assert_close(run["head_out"].sum(3), run["attn_out"], **CLOSE)


@pytest.mark.parametrize(
    ("site", "path"),
    [("z", "self_attn.o_proj"), ("neuron", "mlp.down_proj")],
)
def test_inputs_of_projections(tiny: Model, site: str, path: str) -> None:
    for layer in range(3):
        kept: list[Tensor] = []
        with hooked(tiny, f"model.layers.{layer}.{path}", lambda x, kept=kept: kept.append(x) or x):  # type: ignore[misc]
            plain(tiny, input_ids=_tokens())
        found = hs.trace(tiny, _tokens(), [site])[site, layer]
        torch.testing.assert_close(found.flatten(2), kept[0], rtol=0, atol=0)


def test_queries_keys_and_values_are_the_projections(tiny: Model) -> None:
    run = hs.trace(tiny, _tokens(), ["q_pre", "k_pre", "q", "k", "v", "pattern", "z"])
    for site, path in (("q_pre", "q_proj"), ("k_pre", "k_proj"), ("v", "v_proj")):
        kept: list[Tensor] = []
        with hooked(tiny, f"model.layers.1.self_attn.{path}", lambda x, kept=kept: kept.append(x) or x, output=True):  # type: ignore[misc]
            plain(tiny, input_ids=_tokens())
        torch.testing.assert_close(run[site, 1].flatten(2), kept[0], rtol=0, atol=0)
    # a rotation keeps lengths, and turns nothing at position 0
    for site in ("q", "k"):
        torch.testing.assert_close(run[site].norm(dim=-1), run[f"{site}_pre"].norm(dim=-1), rtol=1e-6, atol=0)
        torch.testing.assert_close(run[site][:, :, 0], run[f"{site}_pre"][:, :, 0], **CLOSE)
    scores = torch.einsum("lbqhd,lbkhd->lbhqk", run["q"], run["k"].repeat_interleave(2, 3)) * D_HEAD**-0.5
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    torch.testing.assert_close(scores.masked_fill(~causal, -torch.inf).softmax(-1), run["pattern"], **CLOSE)
    mixed = torch.einsum("lbhqk,lbkhd->lbqhd", run["pattern"], run["v"].repeat_interleave(2, 3))
    torch.testing.assert_close(mixed, run["z"], **CLOSE)


def _prompts() -> Prompts:
    tokens = _tokens()
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, :3] = False
    return Prompts("t", 0, tokens, torch.full((2, 1), 6), tokens[:, -1:], mask=mask)


def test_logits_at_positions_are_slices_of_all(tiny: Model) -> None:
    everything = hs.trace(tiny, _tokens()).logits
    assert everything is not None
    torch.testing.assert_close(hs.trace(tiny, _tokens(), logits="last").logits, everything[:, -1:], **CLOSE)
    at = torch.tensor([[0, 4, 4], [6, 1, 2]])
    found = hs.trace(tiny, _tokens(), logits=at).logits
    torch.testing.assert_close(found, torch.stack([everything[0, [0, 4, 4]], everything[1, [6, 1, 2]]]), **CLOSE)
    assert hs.trace(tiny, _tokens(), ["z"], logits=None).logits is None
    padded = hs.trace(tiny, _prompts()).logits
    torch.testing.assert_close(hs.trace(tiny, _prompts(), logits="last").logits, padded[:, -1:], **CLOSE)  # type: ignore[index]


def test_last_is_the_last_real_token_of_right_padding(tiny: Model) -> None:
    prompts = _prompts()
    mask = prompts.mask.flip(1)  # type: ignore[union-attr]
    padded = Prompts("t", 0, prompts.tokens, prompts.positions, prompts.target, mask=mask)
    found = hs.trace(tiny, padded, logits="last").logits
    alone = hs.trace(tiny, prompts.tokens[1:, :4]).logits
    torch.testing.assert_close(found[1:], alone[:, -1:], **CLOSE)  # type: ignore[index]


def test_the_unembedding_sees_only_the_positions_asked_for(tiny: Model) -> None:
    widths: list[int] = []
    handle = tiny.anatomy.parts.unembed.register_forward_hook(lambda _, args, out: widths.append(args[0].shape[1]))  # type: ignore[union-attr]
    try:
        hs.trace(tiny, _tokens(), logits="last")
        hs.trace(tiny, _tokens(), logits=torch.tensor([[1, 2], [3, 4]]))
        hs.trace(tiny, _tokens(), logits=None)
        hs.trace(tiny, _tokens())
    finally:
        handle.remove()
    assert widths == [1, 2, 0, 7]


def test_reduce_sees_each_layer_once_and_nothing_else_is_kept(tiny: Model) -> None:
    seen: list[tuple[int, tuple[int, ...]]] = []

    def largest(x: Tensor, layer: int) -> Tensor:
        seen.append((layer, tuple(x.shape)))
        return x.amax((0, 2, 3))

    run = hs.trace(tiny, _tokens(), Capture("pattern", reduce=largest), logits=None)
    assert seen == [(layer, (2, 4, 7, 7)) for layer in range(3)]
    assert set(run.stored) == {"pattern"}
    full = hs.trace(tiny, _tokens(), "pattern")["pattern"]
    torch.testing.assert_close(run["pattern"], full.amax((1, 3, 4)), rtol=0, atol=0)
    assert "pattern" in run and "z" not in run


def test_layers_restrict_what_is_kept(tiny: Model) -> None:
    run = hs.trace(tiny, _tokens(), ["z", Capture("v", [0])], layers=(layer for layer in (2, 1)))
    assert {site: sorted(found) for site, found in run.stored.items()} == {"z": [1, 2], "v": [0]}
    everything = hs.trace(tiny, _tokens(), ["z"])
    torch.testing.assert_close(run["z"], everything["z"][1:], rtol=0, atol=0)
    with pytest.raises(UsageError, match=r"layers \[1, 2\], not in layer 0"):
        run["z", 0]
    with pytest.raises(UsageError, match="'k' was not captured"):
        run["k"]


def test_captures_do_not_change_with_later_passes(tiny: Model) -> None:
    run = hs.trace(tiny, _tokens(), ["attn_out", "resid_pre", "z"])
    kept = {site: run[site].clone() for site in run.stored}
    hs.trace(tiny, _tokens(seed=5), ["attn_out", "resid_pre", "z"], edits=hs.zero("L0"))
    assert all(torch.equal(run[site], value) for site, value in kept.items())


def test_the_gradient_of_a_gate(smooth: Model) -> None:
    """It equals the finite difference of the loss and the inner product of z with its own gradient."""
    tokens, heads = _tokens(), [f"L1H{h}" for h in range(4)]

    def loss(logits: Tensor | None) -> Tensor:
        assert logits is not None
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    gates = torch.ones(4, dtype=torch.float64, requires_grad=True)
    (by_gate,) = torch.autograd.grad(
        loss(hs.trace(smooth, tokens, edits=hs.gate(heads, gates), grad=True).logits), gates
    )
    run = hs.trace(smooth, tokens, ["z"], grad=True)
    (by_z,) = torch.autograd.grad(loss(run.logits), run["z", 1])
    torch.testing.assert_close(by_gate, (run["z", 1] * by_z).sum((0, 1, 3)), rtol=1e-9, atol=1e-12)
    step = 1e-5
    for i in range(4):
        up, down = (
            loss(hs.trace(smooth, tokens, edits=hs.scale(heads[i], 1 + sign * step)).logits) for sign in (1, -1)
        )
        assert float(by_gate[i]) == pytest.approx(float((up - down) / (2 * step)), abs=1e-6)
    assert by_gate.abs().min() > 1e-4


WHERE = {
    "resid_pre": "L1RESID", "resid_post": "L2RESID", "attn_out": "L1ATTN", "resid_mid": "L1ATTN", "mlp_out": "L1MLP",
    "z": "L1H2", "v": "L1KV2", "k": "L1KV2", "neuron": "L1N5", "q": None, "q_pre": None, "k_pre": None, "pattern": None,
    "attn_scores": None,
}  # fmt: skip


@pytest.mark.parametrize("site", WHERE)
def test_gradients_reach_every_site(smooth: Model, tiny: Model, site: str) -> None:
    """Against the finite difference along a direction, where an edit can go there."""
    generator = torch.Generator().manual_seed(0)
    for model in (smooth, tiny):
        run = hs.trace(model, _tokens(), [site], layers=[1], grad=True)
        (found,) = torch.autograd.grad(run.logits[0, -1, 7], run[site, 1])  # type: ignore[index]
        assert float(found[0].abs().max()) > 0
        assert torch.count_nonzero(found[1]) == 0  # the other row has no part in it
        torch.testing.assert_close(run.logits, hs.trace(model, _tokens()).logits, rtol=0, atol=1e-6)
    if WHERE[site] is None:
        return
    run = hs.trace(smooth, _tokens(), [site], layers=[1], grad=True)
    (found,) = torch.autograd.grad(run.logits[0, -1, 7], run[site, 1])  # type: ignore[index]
    found = found[..., 2, :] if found.ndim == 4 else found
    found = found[..., 5:6] if site == "neuron" else found
    direction = torch.randn(found.shape[-1], generator=generator, dtype=torch.float64)
    part = {"part": site} if site in ("k", "v") else {}
    up, down = (
        hs.trace(smooth, _tokens(), edits=hs.add(WHERE[site], sign * 1e-5 * direction, **part)).logits[0, -1, 7]  # type: ignore[arg-type, index]
        for sign in (1, -1)
    )
    assert float((found @ direction).sum()) == pytest.approx(float((up - down) / 2e-5), abs=1e-6)


def test_no_graph_unless_asked(tiny: Model) -> None:
    run = hs.trace(tiny, _tokens(), ["z"])
    assert not run["z", 0].requires_grad and not run.logits.requires_grad  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("inputs", "options", "words"),
    [
        (_tokens(), {"capture": "zz"}, r"no site 'zz'.*z"),
        (_tokens(), {"capture": ["patern"]}, "Did you mean pattern"),
        (_tokens(), {"capture": ["z"], "layers": [3]}, "Layer 3 .*layers 0 to 2"),
        (_tokens(), {"capture": [Capture("z", [-1])]}, "Layer -1"),
        (_tokens(), {"logits": "first"}, "'first'"),
        (_tokens(), {"logits": 3}, "logits is 3"),
        (_tokens(), {"logits": torch.tensor([[7], [0]])}, "positions"),
        (_tokens(), {"logits": torch.tensor([[-1], [0]])}, "positions"),
        (_tokens(), {"logits": torch.tensor([1])}, "positions"),
        (torch.zeros(1, 0, dtype=torch.long), {}, "empty"),
        (torch.zeros(0, 4, dtype=torch.long), {}, "empty"),
        (torch.full((1, 65), 5), {}, "65 tokens.* at most 64"),
        (torch.tensor([[5, 96]]), {}, "0 to 95"),
        (torch.tensor([[5, -1]]), {}, "0 to 95"),
        (torch.tensor([[5.0, 6.0]]), {}, "whole numbers"),
        (torch.full((1, 2, 3), 5), {}, r"\[batch, pos\]"),
    ],
)  # fmt: skip
def test_bad_requests_are_usage_errors(tiny: Model, inputs: Tensor, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        hs.trace(tiny, inputs, **options)
    assert "\n" not in str(caught.value)
    torch.testing.assert_close(hs.trace(tiny, _tokens()).logits, plain(tiny, input_ids=_tokens()), rtol=0, atol=0)


def test_text_needs_a_tokenizer(tiny: Model) -> None:
    with pytest.raises(NotApplicable, match="without a tokenizer"):
        hs.trace(tiny, "The capital of France is")


def test_one_row_of_ids_is_a_batch_of_one(tiny: Model) -> None:
    ids = _tokens()[0]
    torch.testing.assert_close(hs.trace(tiny, ids).logits, hs.trace(tiny, ids[None]).logits, rtol=0, atol=0)


@pytest.mark.real
def test_texts_of_other_lengths_are_read_as_alone(smollm2: Model) -> None:
    texts = ["The capital of France is", "Hello"]
    together = hs.trace(smollm2, texts, logits="last").logits
    for row, text in enumerate(texts):
        alone = hs.trace(smollm2, text, logits="last").logits
        torch.testing.assert_close(together[row], alone[0], rtol=1e-3, atol=1e-3)  # type: ignore[index]
    assert smollm2.tokenizer.decode(int(together[0, -1].argmax())) == " Paris"  # type: ignore[index]
    for nothing in ("", [], ["fine", ""]):
        with pytest.raises(UsageError, match="prompt"):
            hs.trace(smollm2, nothing)
    with pytest.raises(UsageError, match="at most"):
        hs.trace(smollm2, "word " * 9000)


def test_what_a_tokenizer_gives_is_read_with_its_mask(smollm2: Model) -> None:
    tokenizer = copy.deepcopy(smollm2.tokenizer)
    tokenizer.padding_side = "right"
    texts = ["The capital of France is", "Paris"]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    run = hs.trace(smollm2, batch, logits="last")
    for row, text in enumerate(texts):
        alone = hs.trace(smollm2, text, logits="last").logits
        torch.testing.assert_close(run.logits[row], alone[0], rtol=1e-4, atol=1e-3)  # type: ignore[index]
    assert run.mask is not None and run.mask.sum().item() == batch["attention_mask"].sum().item()
    run = hs.trace(smollm2, dict(batch), logits="last")
    assert run.mask is not None
    with pytest.raises(UsageError, match="return_tensors"):
        hs.trace(smollm2, tokenizer(texts))


def test_a_model_in_training_mode_is_refused() -> None:
    model = hs.load(build("gpt2"))
    model.hf.train()
    with pytest.raises(UsageError, match="training mode"):
        hs.trace(model, _tokens())
