"""Tokens as text: each by itself, and those of a text such that its characters stay whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: what a decoder gives for bytes that are no whole character
BROKEN = "�"
#: how SentencePiece writes the space in front of a token, which its decoder drops at the beginning of a text
SPACE = "▁"
#: tokens that one character may be spread over
SPREAD = 8


def word(tokenizer: Any, token: int) -> str:
    """A token by itself, with its space in front."""
    return _text(tokenizer, [token])


def words(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The tokens of a text; those that share one character show it with their number, such as 東(1/3)."""
    found: list[str] = []
    while len(found) < len(ids):
        start = len(found)
        first = text = _text(tokenizer, [ids[start]])
        n = 1
        while text.endswith(BROKEN) and n < SPREAD and start + n < len(ids):
            n += 1
            text = _text(tokenizer, ids[start : start + n])
        if n == 1 or text.endswith(BROKEN):
            found.append(first)
        else:
            found += [f"{text}({i}/{n})" for i in range(1, n + 1)]
    return found


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    text = str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
    first = str(tokenizer.convert_ids_to_tokens(int(ids[0])))
    return f" {text}" if first.startswith(SPACE) and not text.startswith(" ") else text
