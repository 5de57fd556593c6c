"""Coloured objects, after one worked example: 'I see a red pen, a blue book and a green cup. The book is' → ' blue'."""

from __future__ import annotations

import random

from headscope.model import Model
from headscope.tasks.base import Case, Prompts, from_cases

COLOURS = ("red", "blue", "green", "yellow", "black", "white", "orange", "brown", "purple", "pink", "gray", "gold",
           "silver")  # fmt: skip
OBJECTS = ("pen", "book", "cup", "ball", "box", "hat", "key", "shirt", "ring", "bag", "chair", "lamp", "car", "coin",
           "knife", "plate", "shoe", "phone")  # fmt: skip
SHOWN = 3


def make(model: Model, n: int, seed: int) -> Prompts:
    """Three objects are shown, and one is asked for, each place as often as the others; the foil is the colour of another
    one, which the corrupted twin asks for.

    The example before has other objects and colours. A guess among the three colours shown is right once in three.
    """
    rng = random.Random(seed)
    cases = []
    for i in range(4 * n):
        colours, objects = rng.sample(COLOURS, 2 * SHOWN), rng.sample(OBJECTS, 2 * SHOWN)
        example, first = rng.randrange(SHOWN), i % SHOWN
        second = (first + rng.randrange(1, SHOWN)) % SHOWN
        seen = _scene(colours[SHOWN:], objects[SHOWN:])
        shown = f"{seen} The {objects[SHOWN + example]} is {colours[SHOWN + example]}.\n{_scene(colours, objects)}"
        text, twin = (f"{shown} The {objects[j]} is" for j in (first, second))
        cases.append(Case(text, f" {colours[first]}", f" {colours[second]}", twin))
    return from_cases(model, "coloured-objects", cases, n, seed, metric="logit_diff", chance=1 / SHOWN)


def _scene(colours: list[str], objects: list[str]) -> str:
    a, b, c = (
        f"{'an' if colour[0] in 'aeiou' else 'a'} {colour} {thing}"
        for colour, thing in zip(colours[:SHOWN], objects[:SHOWN], strict=True)
    )
    return f"I see {a}, {b} and {c}."
