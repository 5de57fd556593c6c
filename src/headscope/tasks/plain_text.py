"""Plain technical English: the reference pages of the standard library's `pydoc_data.topics`."""

from __future__ import annotations

import random
import re

import torch

from headscope.model import Model
from headscope.tasks.base import Prompts, needs_tokenizer


def sentences() -> list[str]:
    """Paragraphs of running text, without tables and code."""
    from pydoc_data import topics

    found = []
    for _, page in sorted(topics.topics.items()):
        for paragraph in page.split("\n\n"):
            text = " ".join(paragraph.split())
            if len(text) > 150 and text[0].isupper() and re.search(r"[a-z]\.$", text) and "::=" not in text:
                found.append(text)
    return found


def make(model: Model, n: int, seed: int, *, length: int = 64) -> Prompts:
    """`n` pieces of `length` tokens, each from the start of a paragraph; every next token is scored."""
    needs_tokenizer(model, "plain-text")
    texts = sentences()
    random.Random(seed).shuffle(texts)
    rows: list[list[int]] = []
    pool = iter(texts)
    while len(rows) < n:
        text = next(pool, None)
        if text is None:
            break
        ids = model.tokenizer(text)["input_ids"]
        while len(ids) < length and (more := next(pool, None)) is not None:
            ids = ids + model.tokenizer(" " + more, add_special_tokens=False)["input_ids"]
        rows.append(ids[:length])
    tokens = torch.tensor([row for row in rows if len(row) == length])
    positions = torch.arange(length - 1).expand(len(tokens), -1)
    return Prompts("plain-text", seed, tokens, positions, tokens[:, 1:])
