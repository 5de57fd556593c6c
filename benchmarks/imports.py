"""How long one waits for the package before anything happens."""

from __future__ import annotations

import sys

from benchmarks.common import Result, interleaved, script, timed

COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import headscope": [sys.executable, "-c", "import headscope"],
    "headscope --help": [script(), "--help"],
}


def measure(threads: int) -> Result:
    """Whole processes, start of Python included."""
    variants = {label: lambda command=command: timed(command, threads) for label, command in COMMANDS.items()}
    runs = interleaved(variants, 9)
    target = {"import headscope": 0.3, "headscope --help": 1.0}
    what = "Wall time of whole processes; nothing is subtracted, the bare start of Python stands beside them."
    return Result("import", what, "s", runs, target)
