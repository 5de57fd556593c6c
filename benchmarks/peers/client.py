"""The process in which the other tools wait for their turn."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.common import MODEL, ROOT, environment
from headscope.model.packaged import path_of

PYTHON = ROOT / ".venv-peers" / "bin" / "python"


class Peers:
    """`tools`: names of those that are there; `note`: their versions, and why others are not there."""

    def __init__(self, threads: int) -> None:
        self.tools: list[str] = []
        self._process: subprocess.Popen[str] | None = None
        if not PYTHON.exists():
            self.note = "TransformerLens and nnsight were not measured: `make bench-peers` had not been run."
            return
        self._process = subprocess.Popen(
            [str(PYTHON), str(Path(__file__).parent / "serve.py"), str(path_of(MODEL)), str(threads)],
            env=environment(threads), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        ready = self._answer()
        self.tools = ready["tools"]
        there = ", ".join(f"{name} {number}" for name, number in ready["versions"].items())
        absent = "".join(f" {name} could not be measured ({why})." for name, why in ready["missing"].items())
        self.note = f"Other tools, in a process of their own that takes its turn: {there or 'none'}.{absent}"

    def run(self, tool: str, tokens: Tensor, heads: Sequence[tuple[int, int]]) -> list[list[float]]:
        """[head][prompt] values of the metric with each head zeroed."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps({"tool": tool, "tokens": tokens.tolist(), "heads": heads}) + "\n")
        self._process.stdin.flush()
        values: list[list[float]] = self._answer()
        return values

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()

    def _answer(self) -> Any:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("The other tools' process ended; run benchmarks/peers/serve.py by hand to see why.")
        return json.loads(line)
