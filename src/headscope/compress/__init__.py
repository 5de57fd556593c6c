"""Make a model smaller by a plan, as an ordinary checkpoint."""

from headscope.compress.export import export, savings
from headscope.model.checkpoint import save

__all__ = ["export", "save", "savings"]
