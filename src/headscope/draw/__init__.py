"""Figures: a drawing is a few marks as plain data, and every format is made from those."""

from headscope.draw.figure import ENDINGS, THEMES, Figure, version

__all__ = ["ENDINGS", "THEMES", "Figure", "version"]
