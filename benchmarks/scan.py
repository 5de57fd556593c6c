"""The main job, as a user starts it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.common import MODEL, Result, script, timed


def measure(threads: int) -> Result:
    """One quick scan in a process of its own, from start to the written atlas."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "atlas"
        command = [script(), "scan", MODEL, "--quick", "--out", str(out), "--threads", str(threads)]
        seconds = timed(command, threads)
        if not (out / "atlas.json").is_file():
            raise RuntimeError("the scan left no atlas.json")
    what = f"Wall time of `headscope scan {MODEL} --quick`: load, score, verify, write the atlas and its report."
    return Result("scan", what, "s", {"scan --quick": [seconds]}, {"scan --quick": 240.0})
