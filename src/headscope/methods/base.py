"""What a method is: one frozen dataclass in `methods/<kind>/<id>.py` with a literal `info` and the verb of its kind.

Its fields are its options. `info` is read without importing the file, so it must hold literals only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import xarray as xr

    from headscope.core.component import Component
    from headscope.model import Model
    from headscope.tasks import Prompts
    from headscope.trace import Edit


@dataclass(frozen=True)
class Info:
    """A method's declaration.

    `needs` is a subset of causal, tokenizer, pattern, logits, gradient. `claim` is the sentence its `check` tests.
    `quick` methods are part of `scan --quick`. `values_in` bounds the scores where the definition does.
    """

    title: str
    papers: tuple[str, ...]
    claim: str
    higher_means: str
    cost: str
    units: str = "head"
    needs: tuple[str, ...] = ()
    dims: tuple[str, ...] = ("layer", "head")
    quick: bool = False
    values_in: tuple[float, float] | None = None


@dataclass(frozen=True)
class Check:
    """What came of testing a method's claim on a model: `shown` is None where the model cannot test it."""

    shown: bool | None
    figures: dict[str, float]
    reason: str = ""

    @property
    def verdict(self) -> str:
        """`shown`, `not shown` or `not testable`."""
        return "not testable" if self.shown is None else "shown" if self.shown else "not shown"


@dataclass(frozen=True)
class Plan:
    """What to drop from a model: `edits` that zero all of it, `remove` (layer → query heads) what of it can be taken out.

    `summary`: what is saved, as plain data.
    """

    edits: list[Edit]
    remove: dict[int, list[int]] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def dropped(self) -> list[Component]:
        """All heads that the plan drops, whether taken out or zeroed."""
        return sorted({component for edit in self.edits for component in edit.components})


class Method(ABC):
    """Base of the four kinds."""

    info: ClassVar[Info]

    @abstractmethod
    def check(self, model: Model, *, seed: int = 0) -> Check:
        """Test the paper's claim on `model`."""


class ScoreMethod(Method):
    """Gives every head or neuron a number."""

    def tokens(self, model: Model) -> int:
        """About how many tokens `score` runs the model over, for `scan --dry-run`; 0 where only weights are read."""
        return int(getattr(self, "n", 1)) * int(getattr(self, "length", 0)) * int(getattr(self, "repeats", 1))

    @abstractmethod
    def score(self, model: Model, *, seed: int = 0) -> xr.DataArray:
        """Scores with the dims of `info.dims`."""


class AttributeMethod(Method):
    """Says how much each part contributed to given predictions."""

    @abstractmethod
    def attribute(self, model: Model, prompts: Prompts, *, seed: int = 0) -> xr.DataArray:
        """Scores of the parts of `model` for the targets of `prompts`."""


class InterveneMethod(Method):
    """Says what to change, as data."""

    @abstractmethod
    def edits(self, model: Model, prompts: Prompts | None = None, *, seed: int = 0) -> list[Edit]:
        """Edits for `trace`, `edited` or `bake`, found on `prompts` (the method's own task where none are given)."""


class CompressMethod(Method):
    """Says what to drop, as data."""

    @abstractmethod
    def plan(self, model: Model, *, budget: float, seed: int = 0) -> Plan:
        """A plan that drops the share `budget` (0..1) of the units."""
