"""A false statement against what the model knows: 'The capital of Poland is London. … The capital of Poland is'."""

from __future__ import annotations

import random

from headscope.model import Model
from headscope.tasks.base import Case, Prompts, from_cases
from headscope.tasks.capitals import CAPITALS


def make(model: Model, n: int, seed: int) -> Prompts:
    """Every prompt states a wrong capital and then asks; the answer is the stated city, the foil the true one.

    Each country comes once, so that prompts can be split into those a head is chosen on and those it is tested on.
    """
    rng = random.Random(seed)
    countries = list(CAPITALS)
    cases = []
    for country in countries:
        true = CAPITALS[country]
        stated = rng.choice([city for city in CAPITALS.values() if city != true])
        prompt = (
            f"The capital of {country} is {stated}. Q: What is the capital of {country}? A: The capital of {country} is"
        )
        cases.append(Case(prompt, f" {stated}", f" {true}"))
    return from_cases(model, "fact-context", cases, n, seed, metric="logit_diff", chance=1 / len(CAPITALS))
