"""Tokens as text: whole characters, and the space in front that decoders drop at the beginning of a text."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import headscope as hs
from headscope.model import Model
from headscope.model.words import word, words


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("The capital of France is", ["The", " capital", " of", " France", " is"]),
        ("hi 😀 x", ["hi", " 😀(1/2)", " 😀(2/2)", " x"]),
        ("京", ["京(1/2)", "京(2/2)"]),
        ("", []),
    ],
)
def test_characters_stay_whole(smollm2: Model, text: str, wanted: list[str]) -> None:
    ids = smollm2.tokenizer(text)["input_ids"]
    assert smollm2.words(ids) == wanted
    assert smollm2.text(ids) == text


def test_a_lone_part_of_a_character_is_no_character(smollm2: Model) -> None:
    assert smollm2.words(smollm2.tokenizer("京")["input_ids"][:1]) == ["\ufffd"]


def test_a_route_keeps_its_text(smollm2: Model) -> None:
    route = hs.routes(smollm2, "東京は", threshold=0.2)
    assert route.prompt == "東京は" and route.tokens[0] == "東(1/2)"


def test_words_that_carry_their_space_keep_it() -> None:
    """As SentencePiece has it: a decoder drops the first space of a text, which here is each token's own."""
    pieces = ["<unk>", "▁a", "▁The", "▁capital", "s", "<0xE4>", "<0xBA>", "<0xAC>"]
    inner = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    assert made.decode([2]) == "The"  # what is lost by itself
    assert word(made, 3) == " capital" and word(made, 4) == "s"
    assert words(made, [2, 3, 4, 5, 6, 7]) == [" The", " capital", "s", "京(1/3)", "京(2/3)", "京(3/3)"]


def test_without_a_tokenizer_tokens_have_numbers(smollm2: Model) -> None:
    bare = hs.load(smollm2.hf, check=False)
    assert bare.words([3, 4]) == ["#3", "#4"] and bare.word(7) == "#7" and bare.text([1, 2]) == "#1 #2"
