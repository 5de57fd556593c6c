"""docs/benchmarks.md, made from the results files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, verdict

PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"

_HEAD = """# Benchmarks

Made by `python -m benchmarks` from `benchmarks/results/*.json`; do not edit. `make bench` measures again.
Ratios are of medians, with their 95 % bootstrap interval; "not decided": the interval spans the target.

| benchmark | what | measured | target | met |
|---|---|---|---|---|
"""

_MET = {True: "yes", False: "**no**", None: "not decided"}


def render(folder: Path = RESULTS) -> str:
    """The page for the results in `folder`."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    rows = [row for result in found for row in _rows(result)]
    return _HEAD + "\n".join(rows) + "\n" + "".join(_section(result) for result in found)


def _rows(result: dict[str, Any]) -> list[str]:
    rows = []
    for label, value in {**result["medians"], **result["ratio"]}.items():
        most, least = result["target"].get(label), result.get("at_least", {}).get(label)
        unit = "×" if label in result["ratio"] else f" {result['unit']}"
        low, high = result["interval"].get(label, (value, value))
        limits = [{} if x is None else {label: x} for x in (most, least)]
        met = _MET[verdict({label: (low, high)}, *limits)] if any(limits) else ""
        span = f" ({_number(low)} to {_number(high)})" if label in result["interval"] else ""
        shown = "" if most is None else f"≤ {most:g}{unit}"
        shown = shown if least is None else f"≥ {least:g}{unit}"
        rows.append(f"| {result['name']} | {label} | {_number(value)}{unit}{span} | {shown} | {met} |")
    return rows


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _section(result: dict[str, Any]) -> str:
    machine, runs = result["machine"], result["runs"]
    counts = sorted({len(values) for values in runs.values()})
    times = " or ".join(map(str, counts)) + (" runs each" if counts != [1] else " run")
    others = machine["busy_cores_of_others"]
    beside = "" if others is None else f"; meanwhile other processes kept {others:g} cores busy"
    note = f"\n\n{result['note']}" if result["note"] else ""
    threads = f"{machine['threads']} thread" + ("s" if machine["threads"] != 1 else "")
    return (
        f"\n## {result['name']}\n\n{result['what']}{note}\n\n"
        f"{result['date']}, {machine['cpu']}, {machine['cores']} cores, {threads}, "
        f"Python {machine['python']}, torch {machine['torch']}, transformers {machine['transformers']}; "
        f"medians of {times}{beside}.\n"
    )
