"""Facts that the model must know: 'The capital of France is' → ' Paris'."""

from __future__ import annotations

from headscope.model import Model
from headscope.tasks.base import Case, Prompts, from_cases

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "England": "London", "Japan": "Tokyo",
    "China": "Beijing", "Russia": "Moscow", "Greece": "Athens", "Egypt": "Cairo", "Austria": "Vienna", "Poland": "Warsaw",
    "Portugal": "Lisbon", "Ireland": "Dublin", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki",
    "Denmark": "Copenhagen", "Belgium": "Brussels", "Hungary": "Budapest", "Turkey": "Ankara", "Iran": "Tehran",
    "Iraq": "Baghdad", "Syria": "Damascus", "Lebanon": "Beirut", "Cuba": "Havana", "Peru": "Lima", "Chile": "Santiago",
    "Canada": "Ottawa", "Kenya": "Nairobi", "Thailand": "Bangkok", "Vietnam": "Hanoi", "Ukraine": "Kiev",
    "Scotland": "Edinburgh", "Wales": "Cardiff", "Cyprus": "Nicosia", "Qatar": "Doha", "Israel": "Jerusalem",
}  # fmt: skip


def make(model: Model, n: int, seed: int) -> Prompts:
    """The foil is the capital of another country, whose name stands in the corrupted twin."""
    items = list(CAPITALS.items())
    cases = []
    for i, (country, capital) in enumerate(items):
        other, wrong = items[(i + 7) % len(items)]
        cases.append(Case(f"The capital of {country} is", f" {capital}", f" {wrong}", f"The capital of {other} is"))
    return from_cases(model, "capitals", cases, n, seed, metric="logit_diff", chance=1 / len(items))
