"""What every benchmark shares: the result, the machine, paired timings."""

from __future__ import annotations

import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MODEL = "smollm2-135m"


@dataclass
class Result:
    """One benchmark's figures; `target` names the largest allowed value of a ratio or a median, `at_least` the smallest."""

    name: str
    what: str
    unit: str
    runs: dict[str, list[float]]
    target: dict[str, float]
    ratio: dict[str, tuple[float, float, float]] = field(default_factory=dict)  # with its interval
    note: str = ""
    at_least: dict[str, float] = field(default_factory=dict)

    def document(self, machine: dict[str, Any]) -> dict[str, Any]:
        """What is written to the results file."""
        medians = {label: statistics.median(values) for label, values in self.runs.items()}
        spans = {label: (value, value) for label, value in medians.items()}
        spans |= {label: (low, high) for label, (_, low, high) in self.ratio.items()}
        return {
            "name": self.name,
            "what": self.what,
            "machine": machine,
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "unit": self.unit,
            "runs": {label: [round(value, 4) for value in values] for label, values in self.runs.items()},
            "medians": {label: round(value, 4) for label, value in medians.items()},
            "ratio": {label: round(value, 4) for label, (value, _, _) in self.ratio.items()},
            "interval": {label: [round(low, 4), round(high, 4)] for label, (_, low, high) in self.ratio.items()},
            "target": self.target,
            "at_least": self.at_least,
            "met": verdict(spans, self.target, self.at_least),
            "note": self.note,
        }


def machine(threads: int) -> dict[str, Any]:
    """The facts that a figure depends on."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": threads,
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


class Others:
    """How many cores other processes kept busy since it was made: a figure taken beside them says less."""

    def __init__(self) -> None:
        self._start = self._now()

    def cores(self) -> float | None:
        """Mean number of cores, None where the system does not tell."""
        if self._start is None or (now := self._now()) is None:
            return None
        wall, busy, own = (b - a for a, b in zip(self._start, now, strict=True))
        return round(max(0.0, busy - own) / wall, 2)

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        try:
            first = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()
        except OSError:
            return None
        user, nice, system, _idle, _wait, irq, softirq = (int(x) for x in first[1:8])
        own = os.times()
        ticks = os.sysconf("SC_CLK_TCK")
        return time.monotonic(), (user + nice + system + irq + softirq) / ticks, sum(own[:4])


def interleaved(variants: dict[str, Callable[[], object]], pairs: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Seconds of each variant, run in turn and in reverse turn (ABBA), so that a drift of the machine hits all alike."""
    for _ in range(warm_up):
        for run in variants.values():
            run()
    seconds: dict[str, list[float]] = {label: [] for label in variants}
    order = list(variants)
    for i in range(pairs):
        for label in order if i % 2 == 0 else order[::-1]:
            start = time.perf_counter()
            variants[label]()
            seconds[label].append(time.perf_counter() - start)
    return seconds


def verdict(
    spans: dict[str, tuple[float, float]], target: dict[str, float], at_least: dict[str, float] | None = None
) -> bool | None:
    """True if all targets are met, False if one is missed, None where an interval spans its target."""
    above = at_least or {}
    if any(spans[label][0] > limit for label, limit in target.items()):
        return False
    if any(spans[label][1] < limit for label, limit in above.items()):
        return False
    below = all(spans[label][1] <= limit for label, limit in target.items())
    return True if below and all(spans[label][0] >= limit for label, limit in above.items()) else None


def median_ratio(runs: dict[str, list[float]], label: str, reference: str) -> tuple[float, float, float]:
    """Median of one variant over the median of another, with its 95 % bootstrap interval over the rounds."""
    above, below = runs[label], runs[reference]
    rng = random.Random(0)
    draws = []
    for _ in range(2000):
        rounds = rng.choices(range(len(above)), k=len(above))
        draws.append(statistics.median(above[i] for i in rounds) / statistics.median(below[i] for i in rounds))
    draws.sort()
    return statistics.median(above) / statistics.median(below), draws[49], draws[-50]


def timed(command: list[str], threads: int) -> float:
    """Wall seconds of a command as a process of its own. Raises CalledProcessError if it fails."""
    start = time.perf_counter()
    subprocess.run(
        command, cwd=ROOT, env=environment(threads), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    return time.perf_counter() - start


def environment(threads: int) -> dict[str, str]:
    """The environment of a measured process."""
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}


def script() -> str:
    """The `headscope` command of the running environment."""
    return str(Path(sys.executable).parent / "headscope")
