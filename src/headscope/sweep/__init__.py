"""Many edits over the same prompts, one row an edit, the per-prompt values kept."""

from headscope.sweep.metrics import METRICS, measure
from headscope.sweep.sweep import EachHead, clean, each_head, sweep

__all__ = ["METRICS", "EachHead", "clean", "each_head", "measure", "sweep"]
