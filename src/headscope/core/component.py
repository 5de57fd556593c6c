"""Names for the parts of a transformer: `L5H3`, `L5KV1`, `L7N1021`, `L3MLP`, `L3ATTN`, `L3`, `L3RESID`, `L5E2N7`.

A prefix names the stack where a model has several: `enc.L5H3`, `dec.L0H1`, `vision.L2H0`; `dec.L0X2` is a
cross-attention head.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import total_ordering
from typing import Any, Literal

from headscope.core.errors import UsageError

Kind = Literal["head", "cross_head", "kv_head", "neuron", "attn", "mlp", "layer", "resid"]

#: letters between the layer and the index, in the text form
_INDEXED: dict[str, Kind] = {"H": "head", "X": "cross_head", "KV": "kv_head", "N": "neuron"}
_PLAIN: dict[str, Kind] = {"ATTN": "attn", "MLP": "mlp", "RESID": "resid", "": "layer"}
_LETTERS = {kind: letters for letters, kind in (_INDEXED | _PLAIN).items()}
_TEXT = re.compile(
    r"^(?:(?P<stack>[a-z][a-z0-9_]*)\.)?L(?P<layer>\d+)"
    r"(?:(?P<plain>ATTN|MLP|RESID)|(?:E(?P<expert>\d+)(?=N))?(?P<letters>KV|H|X|N)(?P<index>\d+))?$"
)
_EXAMPLES = "L5H3 (head), L5KV1 (kv head), L7N1021 (neuron), L3MLP, L3ATTN, L3 (layer), L3RESID or enc.L5H3"


@total_ordering
@dataclass(frozen=True)
class Component:
    """One part of a model: hashable, ordered by stack, layer, kind, index and expert (none comes first).

    `layer`, `index` and `expert` count from 0. `index` is None for a whole attention block, MLP, layer or the
    residual stream entering a layer (`resid`).
    """

    stack: str
    layer: int
    kind: Kind
    index: int | None = None
    expert: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in _LETTERS:
            raise UsageError(f"{self.kind!r} is not a kind of component; known are {', '.join(_LETTERS)}.")
        if (self.index is None) != (self.kind in _PLAIN.values()):
            raise UsageError(f"A component of kind {self.kind!r} was given index {self.index}; see {_EXAMPLES}.")
        if self.layer < 0 or (self.index is not None and self.index < 0):
            raise UsageError(f"A component's layer and index count from 0, but got layer {self.layer}, {self.index}.")
        if self.expert is not None and (self.kind != "neuron" or self.expert < 0):
            raise UsageError(f"Only a neuron belongs to an expert, counted from 0, but {self.kind} got {self.expert}.")

    def __lt__(self, other: Any) -> bool:
        if not isinstance(other, Component):
            return NotImplemented
        return self._key < other._key

    @property
    def _key(self) -> tuple[str, int, str, int, int]:
        # None does not compare with a number
        index, expert = (-1 if number is None else number for number in (self.index, self.expert))
        return self.stack, self.layer, self.kind, index, expert

    def __str__(self) -> str:
        prefix = f"{self.stack}." if self.stack else ""
        expert = "" if self.expert is None else f"E{self.expert}"
        index = "" if self.index is None else str(self.index)
        return f"{prefix}L{self.layer}{expert}{_LETTERS[self.kind]}{index}"

    __repr__ = __str__

    @classmethod
    def parse(cls, text: str) -> Component:
        """Read the text form; `Component.parse(str(c)) == c`.

        Raises UsageError when the text is not a component's name.
        """
        found = _TEXT.match(text.strip()) if isinstance(text, str) else None
        if not found:
            raise UsageError(f"{text!r} is not the name of a component; write for example {_EXAMPLES}.")
        part = found.groupdict()
        kind = _INDEXED[part["letters"]] if part["letters"] else _PLAIN[part["plain"] or ""]
        number = {key: None if part[key] is None else int(part[key]) for key in ("index", "expert")}
        return cls(part["stack"] or "", int(part["layer"]), kind, number["index"], number["expert"])


def head(layer: int, index: int, stack: str = "") -> Component:
    """The attention head `L{layer}H{index}`."""
    return Component(stack, layer, "head", index)


def components(given: Component | str | Iterable[Component | str]) -> tuple[Component, ...]:
    """One component, its text form (several with commas), or an iterable of either, as a tuple in the given order.

    Raises UsageError when one cannot be read or nothing is named.
    """
    if isinstance(given, Component):
        return (given,)
    if isinstance(given, str):
        given = [part for part in given.split(",") if part.strip()]
    if not isinstance(given, Iterable):
        given = [given]  # fails below, and names it
    found = tuple(item if isinstance(item, Component) else Component.parse(item) for item in given)
    if not found:
        raise UsageError(f"No component was named; write for example {_EXAMPLES}.")
    return found
