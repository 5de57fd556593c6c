"""One pass: capture sites, apply edits."""

from headscope.trace.again import Calls, recording
from headscope.trace.doctor import doctor, load_checked
from headscope.trace.edit import (
    Edit,
    add,
    attend,
    gate,
    load_edits,
    mask_edges,
    mean,
    patch,
    project_out,
    resample,
    save_edits,
    scale,
    zero,
)
from headscope.trace.hooks import SITES, Capture
from headscope.trace.run import Run, edited, resolve, trace

__all__ = [
    "SITES",
    "Calls",
    "Capture",
    "Edit",
    "Run",
    "add",
    "attend",
    "doctor",
    "edited",
    "gate",
    "load_checked",
    "load_edits",
    "mask_edges",
    "mean",
    "patch",
    "project_out",
    "recording",
    "resample",
    "resolve",
    "save_edits",
    "scale",
    "trace",
    "zero",
]
