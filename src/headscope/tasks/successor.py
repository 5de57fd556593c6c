"""The next item of an ordered list: 'Monday, Tuesday, Wednesday,' → ' Thursday'."""

from __future__ import annotations

import calendar
import string

from headscope.model import Model
from headscope.tasks.base import Case, Prompts, from_cases

_WORDS = ("one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
          "eighteen nineteen twenty")  # fmt: skip
_ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth"

#: name → (items in order, whether the last is followed by the first)
SERIES: dict[str, tuple[tuple[str, ...], bool]] = {
    "numbers": (tuple(map(str, range(1, 201))), False),
    "number words": (tuple(_WORDS.split()), False),
    "ordinals": (tuple(_ORDINALS.split()), False),
    "weekdays": (tuple(calendar.day_name), True),
    "months": (tuple(calendar.month_name[1:]), True),
    "short weekdays": (tuple(calendar.day_abbr), True),
    "short months": (tuple(calendar.month_abbr[1:]), True),
    "letters": (tuple(string.ascii_uppercase), False),
}


def make(model: Model, n: int, seed: int) -> Prompts:
    """Three items in a row, then the fourth is asked for; the foil is the item just named."""
    cases = []
    for items, cyclic in SERIES.values():
        for i in range(len(items) if cyclic else len(items) - 3):
            a, b, c, d = (items[(i + j) % len(items)] for j in range(4))
            cases.append(Case(f"{a}, {b}, {c},", f" {d}", f" {c}"))
    return from_cases(model, "successor", cases, n, seed, metric="logit_diff", chance=0.05)
