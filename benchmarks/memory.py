"""How much memory a score takes beside a plain forward pass. Run as a module, it is one measured process."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.common import MODEL, ROOT, Result, environment, median_ratio

LENGTH, REPEATS, RUNS = 512, 2, 3


def measure(threads: int) -> Result:
    """Peak extra memory of each variant, every run in a fresh process."""
    runs: dict[str, list[float]] = {label: [] for label in ("score", "plain", "plain without cache")}
    for _ in range(RUNS):
        for label in runs:
            command = [sys.executable, "-m", "benchmarks.memory", label, str(threads)]
            done = subprocess.run(command, cwd=ROOT, env=environment(threads), check=True, capture_output=True)
            runs[label].append(json.loads(done.stdout))
    ratio = {f"score / {label}": median_ratio(runs, "score", label) for label in ("plain", "plain without cache")}
    what = (
        f"Peak memory above that of the loaded {MODEL} while induction-heads-icl is scored on 1×{LENGTH * REPEATS} tokens, "
        "against the plain transformers pass over the same tokens (all logits, with and without its key-value cache)."
    )
    return Result("memory", what, "MiB", runs, {"score / plain": 1.3}, ratio)


def peak(call: Callable[[], object]) -> float:
    """MiB by which the resident memory rose at most during the call."""
    status = Path("/proc/self/status")
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # sets the peak back to the present value
    except OSError:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        call()
        unit = 2**20 if sys.platform == "darwin" else 2**10
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / unit
    before = _field(status, "VmRSS")
    call()
    return (_field(status, "VmHWM") - before) / 2**10


def _field(status: Path, name: str) -> int:
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(name))


def _child(label: str, threads: int) -> None:
    import torch

    import headscope as hs

    torch.set_num_threads(threads)
    model = hs.load(MODEL)
    tokens = hs.tasks.make("repeated-tokens", model, n=1, length=LENGTH, repeats=REPEATS).tokens

    def score() -> object:
        return hs.score(model, "induction-heads-icl", n=1, length=LENGTH, repeats=REPEATS)

    @torch.no_grad()
    def plain() -> object:
        return model.hf(input_ids=tokens)

    @torch.no_grad()
    def bare() -> object:
        return model.hf(input_ids=tokens, use_cache=False)

    print(json.dumps(peak({"score": score, "plain": plain, "plain without cache": bare}[label])))


if __name__ == "__main__":
    _child(sys.argv[1], int(sys.argv[2]))
