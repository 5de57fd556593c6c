"""Tokens as text: each by itself, and those of a text such that its characters stay whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: what a decoder gives for bytes that are no whole character
BROKEN = "�"
#: tokens that one character may be spread over
SPREAD = 8


def word(tokenizer: Any, token: int) -> str:
    """A token by itself, with the space in front that some decoders drop at the beginning of a text."""
    return _after(tokenizer, [token])


def words(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The tokens of a text; those that share one character show it with their number, such as 東(1/3)."""
    found: list[str] = []
    while len(found) < len(ids):
        start = len(found)
        first = text = _after(tokenizer, [ids[start]])
        n = 1
        while text.endswith(BROKEN) and n < SPREAD and start + n < len(ids):
            n += 1
            text = _after(tokenizer, ids[start : start + n])
        if n == 1 or text.endswith(BROKEN):
            found.append(first)
        else:
            found += [f"{text}({i}/{n})" for i in range(1, n + 1)]
    return found


def _after(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of tokens in the middle of a text."""
    before = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer.decode([*before, *ids], clean_up_tokenization_spaces=False)
    return str(whole[len(tokenizer.decode(before, clean_up_tokenization_spaces=False)) :])
