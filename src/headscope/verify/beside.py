"""What is kept beside random things of its size: the comparison that proofs of routes and circuits share."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from headscope.verify.stats import Array, bootstrap_interval, sign_flip_p

#: corrected or alone, a p above this proves nothing
ALPHA = 0.05
#: of fewer prompts no sign flips can give so small a p
FEWEST = ceil(-log2(ALPHA))
NEEDED = f"at least {FEWEST} prompts are needed for p ≤ {ALPHA}"


@dataclass(frozen=True)
class Beside:
    """`most`: the best set's mean, in the metric's units, as are `low` and `high`, the interval of found minus random."""

    p: float
    low: float
    high: float
    most: float
    verdict: str
    reason: str


def left_over(share: float, randomly: float, metric: str, what: str) -> str:
    """What is kept, in words: the metric's share of the way from everything cut to the whole model."""
    return (
        f"{share:.0%} of the {metric} is left, {randomly:.0%} with {what} (0 %: every edge cut; 100 %: the whole model)"
    )


def beside_random(found: Array, controls: Array, better: float, what: str, *, seed: int = 0) -> Beside:
    """Values [prompt] against those of random sets [set, prompt]; `better`: 1 where more of the metric is, -1 where less.

    `supported` where p ≤ 0.05, the interval lies on the better side of 0 and no random set does as well; `not supported`
    where random sets do better; else, and for fewer than 5 prompts, `inconclusive`. `what`: the random sets' name.
    """
    each = controls.mean(1)
    most = float(better * (better * each).max())
    nan = float("nan")
    if len(found) < 2:
        return Beside(nan, nan, nan, most, "inconclusive", f"one prompt is no proof; {NEEDED}")
    p = sign_flip_p(better * (found - controls.mean(0)), seed=seed)
    low, high = bootstrap_interval(found, controls, seed=seed)
    below, above = sorted((better * low, better * high))
    beyond = better * (float(found.mean()) - most) > 0
    if p <= ALPHA and below > 0 and beyond:
        return Beside(p, low, high, most, "supported", f"p = {p:.2g}; beyond every set of {what}")
    if above < 0:
        return Beside(p, low, high, most, "not supported", f"p = {p:.2g}; {what} keep more")
    missing = [
        word
        for word, fails in (
            ("p is above 0.05", p > ALPHA),
            ("the interval holds 0", below <= 0),
            (f"a set of {what} does as well", not beyond),
        )
        if fails
    ]
    reason = f"p = {p:.2g}; {', '.join(missing)}" + (f"; {NEEDED}" if len(found) < FEWEST else "")
    return Beside(p, low, high, most, "inconclusive", reason)
