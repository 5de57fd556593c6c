"""How numbers are written in tables."""

from __future__ import annotations

import math


def plain(value: float, style: str = ".3f") -> str:
    """A number, or a dash where nothing was measured."""
    return "–" if math.isnan(value) else format(value, style)


def signed(value: float) -> str:
    """A change."""
    return plain(value, "+.3f")
