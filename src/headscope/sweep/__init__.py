"""Many edits over the same prompts, one row an edit, the per-prompt values kept."""

from headscope.sweep.metrics import METRICS, finite, measure
from headscope.sweep.patching import OVER, Patching, attribution_patching, components_over, load_run, patching
from headscope.sweep.sweep import EachHead, clean, each_head, make_job, sweep

__all__ = [
    "METRICS",
    "OVER",
    "EachHead",
    "Patching",
    "attribution_patching",
    "clean",
    "components_over",
    "each_head",
    "finite",
    "load_run",
    "make_job",
    "measure",
    "patching",
    "sweep",
]
