"""Scores of neurons, of which there are too many for a grid, as a density."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from headscope.core.errors import UsageError
from headscope.core.scores import top
from headscope.draw.figure import Figure
from headscope.draw.scores import labels, origin

if TYPE_CHECKING:
    import xarray as xr

#: bins from one end of the scores to the other
_BINS = 120
_NAMED = 5


def figure(
    scores: xr.DataArray, *, limit: float | None = None, notes: tuple[str, ...] = (), title: str | None = None
) -> Figure:
    """A row a layer, scores from left to right. `limit`: from -limit to limit, with what lies beyond in the last bins; from
    the lowest to the highest if left out.
    """
    import numpy as np

    scores = scores.transpose("layer", "neuron")
    values = scores.values
    there = np.isfinite(values)
    if not there.any():
        raise UsageError("A figure of neurons shows their scores, but none was measured.")
    ends = (-limit, limit) if limit else (float(values[there].min()), float(values[there].max()))
    edges = bins(*ends)
    counts = [
        np.histogram(row[fine].clip(edges[0], edges[-1]), edges)[0].tolist()
        for row, fine in zip(values, there, strict=True)
    ]
    data: dict[str, Any] = {
        "axes": {"rows": "layer", "columns": "score", "of": "neurons"}, "rows": labels(scores, "layer"), "edges": edges,
        "counts": counts, "n": int(there.sum()),
        "medians": [float(np.median(row[fine])) if fine.any() else None for row, fine in zip(values, there, strict=True)],
        "highest": _ends(scores, 1, edges), "lowest": _ends(scores, -1, edges),
    }  # fmt: skip
    own = f"Higher: {scores.attrs['higher_means']}." if scores.attrs.get("higher_means") else ""
    beyond = " The outermost bins hold all that lies beyond." if limit and abs(values[there]).max() > limit else ""
    note = f"Each row is a layer; blue is above 0, red below, deeper where more neurons are.{beyond} {own}".strip()
    name = title or str(scores.attrs.get("method") or scores.name or "scores")
    return Figure("density", name, data, origin(scores.attrs), (note, *notes))


def bins(low: float, high: float) -> list[float]:
    """Edges of equal bins that hold everything from low to high; 0 is one of them, so that no bin has both signs."""
    low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        low, high = -1.0, 1.0
    width = (high - low) / _BINS
    return [i * width for i in range(math.floor(low / width + 1e-9), math.ceil(high / width - 1e-9) + 1)]


def _ends(scores: xr.DataArray, sign: int, edges: list[float]) -> list[dict[str, Any]]:
    signed = sign * scores
    n = min(_NAMED, int(signed.notnull().sum()))
    found = []
    for component in top(signed, n):
        value = float(scores.values[component.layer, component.index])
        if math.isfinite(value):
            shown = min(max(value, edges[0]), edges[-1])
            found.append({"name": str(component), "row": component.layer, "value": value, "x": shown})
    return found
