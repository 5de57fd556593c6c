"""Multiple choice: 'Which of these is a fruit?', four labelled options, 'Answer: (' → 'B'."""

from __future__ import annotations

import random
import string
from dataclasses import replace

from headscope.core.errors import NotApplicable
from headscope.model import Model
from headscope.tasks.base import Case, Prompts, from_cases, needs_tokenizer, one_token

KINDS = {
    "an animal": ("dog", "cat", "horse", "cow", "lion", "tiger", "rabbit", "bear"),
    "a fruit": ("apple", "banana", "lemon", "peach", "cherry", "grape", "pear"),
    "a colour": ("red", "blue", "green", "yellow", "black", "white", "purple", "pink"),
    "a country": ("France", "Italy", "Spain", "China", "Japan", "India", "Egypt", "Brazil"),
    "a number": ("three", "seven", "five", "nine", "two", "eight", "four", "six"),
    "a vehicle": ("car", "bus", "train", "truck", "boat", "bicycle", "plane", "ship"),
}
LETTERS = "ABCD"


def make(model: Model, n: int, seed: int, *, random_labels: bool = False) -> Prompts:
    """Each label is right as often as the others; the foil is the label of another option, and in the corrupted twin
    the contents of the two are exchanged.

    `random_labels` names the options by random letters instead of A to D. `meta`: `labels` [prompt][option], the
    positions of the options' letters.
    """
    needs_tokenizer(model, "multiple-choice")
    rng = random.Random(seed)
    known = {kind: [w for w in words if one_token(model, f" {w}") is not None] for kind, words in KINDS.items()}
    kinds = [kind for kind, words in known.items() if words]
    letters = [letter for letter in string.ascii_uppercase if one_token(model, letter) is not None]
    if len(kinds) < len(LETTERS) or not set(LETTERS) <= set(letters):
        raise NotApplicable(
            f"The options or letters of multiple-choice are not single tokens for {model.name}, so it cannot be made."
        )
    cases = []
    for i in range(4 * n):
        chosen = rng.sample(kinds, len(LETTERS))
        words = [rng.choice(known[kind]) for kind in chosen]
        labels = rng.sample(letters, len(LETTERS)) if random_labels else list(LETTERS)
        right = i % len(LETTERS)
        wrong = (right + rng.randrange(1, len(LETTERS))) % len(LETTERS)
        twin = list(words)
        twin[right], twin[wrong] = words[wrong], words[right]
        asked = chosen[right]
        cases.append(Case(_text(asked, labels, words), labels[right], labels[wrong], _text(asked, labels, twin)))
    prompts = from_cases(
        model, "multiple-choice", cases, n, seed, metric="logit_diff", chance=1 / len(LETTERS)
    )  # fmt: skip
    width = prompts.tokens.shape[1]
    return replace(prompts, meta={**prompts.meta, "labels": [_labels(model, c, width) for c in prompts.meta["cases"]]})


def _text(asked: str, labels: list[str], words: list[str]) -> str:
    options = "\n".join(f"({label}) {word}" for label, word in zip(labels, words, strict=True))
    return f"Which of these is {asked}?\n{options}\nAnswer: ("


def _labels(model: Model, case: Case, width: int) -> list[int]:
    """Where the letters of the options stand in a row padded on the left to `width` tokens."""
    ids = model.tokenizer(case.prompt)["input_ids"]
    lines = case.prompt.splitlines(keepends=True)
    ends = [len("".join(lines[:k])) + len("(A") for k in range(1, 1 + len(LETTERS))]
    return [width - len(ids) + len(model.tokenizer(case.prompt[:end])["input_ids"]) - 1 for end in ends]
