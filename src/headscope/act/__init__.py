"""Act on a model: write edits into its weights."""

from headscope.act.bake import bake
from headscope.model.checkpoint import save

__all__ = ["bake", "save"]
