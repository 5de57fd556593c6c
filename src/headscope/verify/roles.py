"""The roles that `verify` knows: one row each. The docs print this table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headscope.core.errors import UsageError, nearest


@dataclass(frozen=True)
class Role:
    """A claim and how it is tested.

    Heads are the top `k` of `method`, chosen on prompts of one seed; on prompts of other seeds their z is replaced, by
    0 or by its mean over those prompts (`intervention`: zero or mean; the mean spares what a head adds all the time).
    A difference to random heads inside ± `margin` (a share of the clean value) counts as none.
    `direction` +1: `metric` must rise more than under random heads; -1: less (fall below). `quick`: part of
    `scan --quick`.
    """

    name: str
    claim: str
    method: str
    task: str
    metric: str
    direction: int
    k: int
    intervention: str = "zero"
    margin: float = 0.1
    quick: bool = True
    task_options: dict[str, Any] = field(default_factory=dict)


ROLES: dict[str, Role] = {
    role.name: role
    for role in (
        Role("induction", "continuing a repeated sequence needs these heads", "induction-heads-icl",
             "repeated-tokens", "loss", +1, 8),
        Role("previous-token", "continuing a repeated sequence needs these heads, which feed induction",
             "previous-token", "repeated-tokens", "loss", +1, 8, intervention="mean"),  # early heads add constants, too
        Role("duplicate-token", "continuing a repeated sequence needs these heads", "duplicate-token",
             "repeated-tokens", "loss", +1, 4, quick=False),
        Role("sink", "harmless: plain text suffers less from losing these heads than from losing others", "bos-sink",
             "plain-text", "loss", -1, 8, margin=0.02, task_options={"length": 32}),
        Role("successor", "continuing an ordered list needs these heads", "successor-heads", "successor", "loss", +1, 4,
             quick=False),
        Role("retrieval", "finding the needle needs these heads", "retrieval-head", "needle", "prob", -1, 8, quick=False,
             task_options={"length": 128}),
    )
}  # fmt: skip


def get_role(name: str) -> Role:
    """The role of that name. Raises UsageError, naming the nearest, when there is none."""
    if name not in ROLES:
        raise UsageError(f"There is no role {name!r}.{nearest(name, ROLES)}")
    return ROLES[name]
