"""Indirect object identification: 'When Mary and John went to the store, John gave a drink to' → ' Mary'."""

from __future__ import annotations

import random

from headscope.model import Model
from headscope.tasks.base import Case, Prompts, from_cases

_NAMES = ("Mary", "John", "Tom", "James", "Sarah", "Anna", "Paul", "Mark", "Emma", "David", "Laura", "Peter", "Alice",
          "Robert", "Susan", "Kate")  # fmt: skip
_PLACES = (("store", "drink"), ("park", "ball"), ("office", "book"), ("school", "pen"), ("house", "gift"))


def make(model: Model, n: int, seed: int) -> Prompts:
    """Both orders (ABBA, BABA); the foil is the subject, and the corrupted twin names a third person instead."""
    rng = random.Random(seed)
    cases = []
    for i in range(4 * n):
        a, b, c = rng.sample(_NAMES, 3)
        place, thing = rng.choice(_PLACES)
        first, second = (a, b) if i % 2 else (b, a)

        def text(subject: str, first: str = first, second: str = second, place: str = place, thing: str = thing) -> str:
            return f"When {first} and {second} went to the {place}, {subject} gave a {thing} to"

        cases.append(Case(text(b), f" {a}", f" {b}", text(c)))
    return from_cases(model, "ioi", cases, n, seed, metric="logit_diff", chance=0.5 / len(_NAMES))
