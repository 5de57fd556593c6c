"""Successor heads, from the weights alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from torch import Tensor

import headscope as hs
import toys
from families.tiny import build
from headscope.core.errors import NotApplicable
from headscope.methods.score import successor_heads
from headscope.model import Model
from headscope.tasks.successor import SERIES


@pytest.fixture(scope="module")
def toy() -> Model:
    return toys.successor_toy()


def test_the_successor_head_scores_1_and_the_others_0(toy: Model) -> None:
    assert hs.score(toy, "successor-heads").values.tolist() == [[1.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("step", [2, 3, -1])
def test_a_wrong_step_scores_0(step: int) -> None:
    assert hs.score(toys.successor_toy(step), "successor-heads").values.tolist() == [[0.0, 0.0, 0.0, 0.0]]


def test_among_all_tokens_two_successors_of_one_word_tie(toy: Model) -> None:
    """May is followed by June in one list and by Jun in the other: neither is above all other tokens."""
    pairs = sum(len(items) - (not cyclic) for items, cyclic in SERIES.values())
    found = hs.score(toy, "successor-heads", whole_vocabulary=True).values
    assert found[0, 0] == pytest.approx(1 - 2 / pairs, abs=1e-12) and (found[0, 1:] == 0).all()


def test_its_check_asks_for_more_than_order_at_random(toy: Model) -> None:
    result = hs.check(toy, "successor-heads")
    assert result["verdict"] == "shown" and result["reason"].startswith("top head L0H0")
    assert result["figures"]["top"] == 1.0 and result["figures"]["top head on shuffled lists"] < 0.2
    assert hs.check(toys.successor_toy(2), "successor-heads")["verdict"] == "not shown"


def test_equals_the_formula(worded: Model) -> None:
    """e = MLP_0(norm(W_E[t])), the largest of e W_V W_O W_U among the items of the list; plain modules only."""
    layer = worded.hf.model.layers[0]
    hits, total = np.zeros((3, 4)), 0
    with torch.no_grad():
        for items, cyclic in SERIES.values():
            ids = [worded.tokenizer(f" {item}")["input_ids"] for item in items]
            assert all(len(i) == 1 for i in ids)
            tokens = torch.tensor(ids)[:, 0]
            read = layer.mlp(layer.post_attention_layernorm(worded.hf.model.embed_tokens(tokens)))
            count = len(items) if cyclic else len(items) - 1
            total += count
            for i in range(3):
                attn = worded.hf.model.layers[i].self_attn
                for h in range(4):
                    value = read @ attn.v_proj.weight[8 * (h // 2) : 8 * (h // 2 + 1)].T
                    logits = worded.hf.lm_head(value @ attn.o_proj.weight[:, 8 * h : 8 * (h + 1)].T)[:, tokens]
                    right = logits.argmax(-1) == (torch.arange(len(items)) + 1) % len(items)
                    hits[i, h] += int(right[:count].sum())
    np.testing.assert_allclose(hs.score(worded, "successor-heads").values, hits / total, rtol=0, atol=1e-12)


#: family → the modules that make layer 0's MLP out of a stream
FIRST: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "gpt2": lambda m, x: m.transformer.h[0].mlp(m.transformer.h[0].ln_2(x)),
    "gpt-j": lambda m, x: m.transformer.h[0].mlp(m.transformer.h[0].ln_1(x)),
    "opt": lambda m, x: _opt(m.model.decoder.layers[0], x),
    "gpt-neox": lambda m, x: m.gpt_neox.layers[0].mlp(m.gpt_neox.layers[0].post_attention_layernorm(x)),
    "falcon": lambda m, x: m.transformer.h[0].mlp(m.transformer.h[0].input_layernorm(x)),
    "bloom": lambda m, x: m.transformer.h[0].mlp(m.transformer.h[0].post_attention_layernorm(x), torch.zeros_like(x)),
    "phi3": lambda m, x: m.model.layers[0].mlp(m.model.layers[0].post_attention_layernorm(x)),
    "gemma2": lambda m, x: _gemma(m.model.layers[0], x),
    "olmo2": lambda m, x: m.model.layers[0].post_feedforward_layernorm(m.model.layers[0].mlp(x)),
    "mixtral": lambda m, x: m.model.layers[0].mlp(m.model.layers[0].post_attention_layernorm(x)),
}


def _opt(layer: Any, x: Tensor) -> Tensor:
    return layer.fc2(layer.fc1(layer.final_layer_norm(x)).relu())  # type: ignore[no-any-return]


def _gemma(layer: Any, x: Tensor) -> Tensor:
    return layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", FIRST)
def test_items_are_read_through_the_first_mlp_of_every_family(family: str) -> None:
    model = hs.load(build(family))
    tokens = torch.tensor([11, 12, 40])
    with torch.no_grad():
        expected = FIRST[family](model.hf, model.anatomy.W_E[tokens][None])
    expected = (expected if isinstance(expected, Tensor) else expected[0]).reshape(3, 32)
    torch.testing.assert_close(successor_heads._first_mlp(model, tokens).double(), expected, rtol=1e-5, atol=1e-5)


def test_widened_embeddings_are_not_applicable() -> None:
    model = hs.load(build("opt-post-norm"), tokenizer=toys.word_tokenizer(["A", "B", "C", "D"]))
    with pytest.raises(NotApplicable, match="widens its embeddings"):
        hs.score(model, "successor-heads")


def test_a_tokenizer_without_the_items_is_not_applicable() -> None:
    model = hs.load(build("llama"), tokenizer=toys.word_tokenizer(["A", "B"]))
    model.tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    with pytest.raises(NotApplicable, match="No item of the ordered lists"):
        hs.score(model, "successor-heads")
