"""The metric of a task under circuits: what is kept is the model's own, all other edges carry something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace as changed
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headscope.core.errors import UsageError, nearest
from headscope.model import Model
from headscope.model.graph import Graph
from headscope.sweep import finite, measure
from headscope.sweep.metrics import Metric
from headscope.sweep.patching import corrupted
from headscope.tasks import Prompts
from headscope.trace import trace
from headscope.trace.senders import written
from headscope.trace.wiring import rewired

#: what stands on a cut edge: the sender's part in the prompt's corrupted twin, its mean over the prompts at each
#: position, or nothing
REPLACE = ("patch", "mean", "zero")
#: bytes that the senders' parts of one pass may take
PASS_BYTES = 2**29
#: tokens of one pass: enough for a matrix product to run at full speed
PASS_TOKENS = 4096
Progress = Callable[[int, int], None]
Values = NDArray[np.float64]


def sign(metric: Metric) -> float:
    """1 where more of the metric is better, -1 where less is. All scores of edges are for the better: a score above 0
    says that the edge helps, and that the task is done worse when it is cut."""
    return -1.0 if metric in ("loss", "rank", "kl") else 1.0


def evaluate(
    model: Model,
    prompts: Prompts,
    graph: Graph,
    kept: Tensor,
    replace: str = "patch",
    metric: Metric | None = None,
    *,
    progress: Progress | None = None,
) -> Values:
    """[circuit, prompt] values of the metric with the edges of `kept` [circuit, sender, receiver] left and all others cut.

    Raises NotApplicable where the logits are not finite then.
    """
    metric = metric or prompts.metric
    cut = graph.exists & ~kept.cpu()
    found = np.empty((len(kept), len(prompts)))
    means = mean_written(model, prompts, graph) if replace == "mean" else None
    each = row_bytes(model, graph, prompts)
    done, parts = 0, list(rows_of(prompts, max(1, PASS_BYTES // each)))
    for rows, part in parts:
        stands = replacement(model, part, graph, replace, means)
        clean = clean_logits(model, part, metric)
        size = max(1, min(PASS_BYTES // (each * len(part)), PASS_TOKENS // part.tokens.numel()))
        for start in range(0, len(cut), size):
            some = slice(start, start + size)
            logits, _ = rewired(model, part, graph, cut[some], stands, part.positions)
            for i, one in enumerate(finite(logits, prompts.name), start):
                found[i, rows] = measure(metric, one, part, clean).double().cpu().numpy()
            done += len(logits)
            if progress is not None:
                progress(done, len(cut) * len(parts))
    return found


def check_replace(replace: str) -> None:
    """Raise UsageError for what is no replacement of cut edges."""
    if replace not in REPLACE:
        raise UsageError(f"replace is {replace!r}; it takes patch, mean or zero.{nearest(replace, REPLACE)}")


def replacement(
    model: Model, prompts: Prompts, graph: Graph, replace: str, means: Tensor | None = None
) -> Tensor | None:
    """What stands for each sender on its cut edges, as `rewired` takes it. Raises UsageError for another way, for a task
    without corrupted twins to patch from, and for means over prompts of different lengths."""
    check_replace(replace)
    if replace == "patch":
        twins = corrupted(prompts)
        if twins.tokens.shape != prompts.tokens.shape:
            raise UsageError(
                f"The corrupted twins of {prompts.name} have shape {tuple(twins.tokens.shape)}, the prompts "
                f"{tuple(prompts.tokens.shape)}; each must be as long as its prompt."
            )
        return written(model, twins, graph)
    if replace == "mean":
        return mean_written(model, prompts, graph) if means is None else means
    return None


def mean_written(model: Model, prompts: Prompts, graph: Graph) -> Tensor:
    """[sender, 1, pos, d_model]: the mean over the prompts of what each sender writes at each position."""
    if prompts.mask is not None:
        raise UsageError(
            f"The prompts of {prompts.name} have different lengths, so that their positions have no means; take "
            "replace='patch' or 'zero', or prompts of equal length."
        )
    rows = max(1, PASS_BYTES // row_bytes(model, graph, prompts))
    total = sum(written(model, part, graph).sum(1, keepdim=True) for _, part in rows_of(prompts, rows))
    return total / len(prompts)  # type: ignore[return-value]


def clean_logits(model: Model, prompts: Prompts, metric: Metric) -> Tensor | None:
    """The logits that kl compares with; None for all other metrics."""
    if metric != "kl":
        return None
    return finite(trace(model, prompts, logits=prompts.positions).logits, prompts.name)


def row_bytes(model: Model, graph: Graph, prompts: Prompts) -> int:
    """Bytes that one prompt's senders take, and what its receivers of one layer read."""
    a = model.anatomy
    vectors = len(graph.senders) + 3 * (a.n_heads + 2 * a.n_kv_heads)
    return vectors * int(prompts.tokens.shape[1]) * a.d_model * model.dtype.itemsize


def rows_of(prompts: Prompts, size: int) -> Iterator[tuple[slice, Prompts]]:
    """The prompts in parts of at most `size`."""
    names = ("tokens", "positions", "target", "foil", "mask", "corrupt")
    for start in range(0, len(prompts), size):
        rows = slice(start, min(start + size, len(prompts)))
        given = {name: getattr(prompts, name) for name in names}
        part: dict[str, Any] = {name: None if x is None else x[rows] for name, x in given.items()}
        yield rows, changed(prompts, **part)
