"""A literal needle in a haystack: one sentence among many that alone holds the answer."""

from __future__ import annotations

import random

import torch

from headscope.core.errors import NotApplicable
from headscope.model import Model
from headscope.tasks.base import Prompts, needs_tokenizer, one_token
from headscope.tasks.plain_text import sentences

_NAMES = ("Anna", "Peter", "Sarah", "David", "Laura", "Mark", "Emma", "Paul", "Julia", "Thomas", "Maria", "James")
_THINGS = ("banana", "violin", "lemon", "guitar", "camera", "pencil", "candle", "ladder", "helmet", "basket", "carrot",
           "hammer", "blanket", "piano", "kettle", "mirror", "pillow", "wallet", "bicycle", "trumpet")  # fmt: skip


def make(model: Model, n: int, seed: int, *, length: int = 192) -> Prompts:
    """Prompts of `length` tokens: text, 'The secret object that NAME hid is a THING.' at a random depth, text, and
    'The secret object that NAME hid is a'. The answer is the single token ' THING'.

    `meta`: `needle` [prompt], the position of the answer inside the needle. Built in token space, so it is exact.
    """
    needs_tokenizer(model, "needle")
    rng = random.Random(seed)

    def ids(text: str) -> list[int]:
        return list(model.tokenizer(text, add_special_tokens=False)["input_ids"])

    things = [word for word in _THINGS if one_token(model, f" {word}") is not None]
    if len(things) < 2:
        raise NotApplicable(f"No needle word is one token for {model.name}; the task needle cannot be made.")
    texts = sentences()
    rows, answers, needles = [], [], []
    for _ in range(n):
        name, thing = rng.choice(_NAMES), rng.choice(things)
        statement = ids(f" The secret object that {name} hid is a")
        answer = one_token(model, f" {thing}")
        needle = [*statement, answer, *ids(".")]
        room = length - len(model.prefix) - len(needle) - len(statement)
        if room < 8:
            raise NotApplicable(f"needle needs prompts of more than {length} tokens for {model.name}.")
        hay: list[int] = []
        while len(hay) < room:
            hay += ids(" " + rng.choice(texts))
        hay = hay[:room]
        depth = rng.randrange(4, room - 4)
        rows.append([*model.prefix, *hay[:depth], *needle, *hay[depth:], *statement])
        needles.append(len(model.prefix) + depth + len(statement))
        answers.append([answer])
    tokens = torch.tensor(rows)
    return Prompts(
        "needle", seed, tokens, torch.full((n, 1), length - 1), torch.tensor(answers),
        chance=1 / len(things), meta={"needle": needles},
    )  # fmt: skip
