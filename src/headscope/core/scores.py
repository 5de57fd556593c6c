"""Scores are plain `xarray.DataArray`s with named dims; these functions make, rank, compare and tabulate them.

Dims come from layer, head, kv_head, neuron, position, query, key, direction, edit, prompt, seed. An interval and a
count, where a method has them, ride along as the coordinates `ci_low`, `ci_high` and `n`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headscope.core.component import Component
from headscope.core.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

#: dims that together with `layer` name a component
_UNITS = {"head": "head", "kv_head": "kv_head", "neuron": "neuron"}
_EXTRAS = ("ci_low", "ci_high", "n")


def make(
    values: Any,
    dims: tuple[str, ...] = ("layer", "head"),
    *,
    ci_low: Any = None,
    ci_high: Any = None,
    n: Any = None,
    **attrs: Any,
) -> xr.DataArray:
    """Scores from an array (numpy or torch) whose axes are `dims`; integer coordinates count from 0."""
    import numpy as np
    import xarray as xr

    def array(given: Any) -> Any:
        given = given.detach().cpu().double().numpy() if hasattr(given, "detach") else np.asarray(given)
        return np.broadcast_to(given, shape)

    shape = tuple(values.shape)
    if len(shape) != len(dims):
        raise UsageError(f"Scores with dims {dims} need {len(dims)} axes, but the values have shape {shape}.")
    coords: dict[str, Any] = {dim: range(size) for dim, size in zip(dims, shape, strict=True)}
    for name, extra in zip(_EXTRAS, (ci_low, ci_high, n), strict=True):
        if extra is not None:
            coords[name] = (dims, array(extra))
    return xr.DataArray(array(values).copy(), dims=dims, coords=coords, name="score", attrs=attrs)


def _unit(scores: xr.DataArray) -> str:
    for dim in _UNITS:
        if dim in scores.dims and "layer" in scores.dims and scores.ndim == 2:
            return dim
    raise UsageError(f"Ranking needs scores with dims (layer, head|kv_head|neuron), but these have {scores.dims}.")


def top(scores: xr.DataArray, k: int = 10) -> list[Component]:
    """The `k` components with the highest scores, best first; equal scores keep layer, then index order.

    Missing scores come last.
    """
    import numpy as np

    if k < 1:
        raise UsageError(f"top gives at least one component, but k is {k}.")
    unit = _unit(scores)
    values = scores.transpose("layer", unit).values
    order = np.argsort(-np.nan_to_num(values.ravel(), nan=-np.inf), kind="stable")[:k]
    stack = scores.attrs.get("stack", "")
    return [Component(stack, int(i // values.shape[1]), _UNITS[unit], int(i % values.shape[1])) for i in order]  # type: ignore[arg-type]


def rank(scores: xr.DataArray) -> xr.DataArray:
    """Ranks from 1 (highest); equal scores share the mean rank, missing scores have none."""
    from scipy.stats import rankdata

    return scores.copy(data=rankdata(-scores.values.ravel(), nan_policy="omit").reshape(scores.shape))


def auroc(values: Any, truth: Any) -> float:
    """Area under the ROC curve: how often one of the true items has a higher value than one of the others; ties half.

    `values`, `truth` (bool): the same shape; items without a value (NaN) are left out. Raises UsageError where all are
    true, or none.
    """
    import numpy as np
    from scipy.stats import rankdata

    values, truth = np.asarray(values, dtype=float).ravel(), np.asarray(truth, dtype=bool).ravel()
    there = ~np.isnan(values)
    values, truth = values[there], truth[there]
    n_true, n_false = int(truth.sum()), int((~truth).sum())
    if not n_true or not n_false:
        raise UsageError("An AUROC compares true items with others, but all are of one kind.")
    return float((rankdata(values)[truth].sum() - n_true * (n_true + 1) / 2) / (n_true * n_false))


def infinite_at(scores: xr.DataArray) -> str | None:
    """Where scores are infinite, which no figure and no page can show (NaN is what was not measured); None: nowhere."""
    import numpy as np

    found = np.argwhere(np.isinf(scores.values))
    return ", ".join(f"{dim} {i}" for dim, i in zip(scores.dims, found[0], strict=True)) if len(found) else None


def agree(a: xr.DataArray, b: xr.DataArray, k: int = 10) -> dict[str, float]:
    """Spearman correlation of two scores over the `n` components that both score, and the overlap of their top `k`."""
    import numpy as np
    from scipy.stats import spearmanr

    if a.shape != b.shape or a.dims != b.dims:
        raise UsageError(f"Only scores of equal dims compare, but these have {dict(a.sizes)} and {dict(b.sizes)}.")
    both = ~np.isnan(a.values + b.values)
    n = int(both.sum())
    # what is the same everywhere has no order
    ordered = n > 1 and bool(np.ptp(a.values[both]) > 0 and np.ptp(b.values[both]) > 0)
    result = spearmanr(a.values[both], b.values[both]) if ordered else None
    size = min(k, n)
    shared = set(top(a.where(both), size)) & set(top(b.where(both), size)) if n else set()
    overlap = len(shared) / size if n else float("nan")
    nan = float("nan")
    rho, p = (nan, nan) if result is None else (float(result.statistic), float(result.pvalue))
    return {"spearman": rho, "p": p, "n": n, "overlap_top": overlap}


def to_frame(scores: xr.DataArray) -> pd.DataFrame:
    """Long form: one row a component, columns the dims, then score, ci_low, ci_high, n (absent ones are missing)."""
    import numpy as np

    frame = scores.to_dataframe(name="score").reset_index()
    for name in _EXTRAS:
        if name not in frame:
            frame[name] = np.nan
    return frame[[*map(str, scores.dims), "score", *_EXTRAS]]


def from_frame(frame: pd.DataFrame, **attrs: Any) -> xr.DataArray:
    """The reverse of `to_frame`; the order of the rows does not matter, absent rows are missing scores.

    Raises UsageError for a table without scores, or with two of one component.
    """
    import numpy as np

    dims = tuple(str(column) for column in frame.columns if column not in ("score", *_EXTRAS))
    if "score" not in frame or not dims or frame.empty:
        raise UsageError(f"A table of scores has a column score and one a dim, but this one has {list(frame.columns)}.")
    if frame.duplicated(list(dims)).any():
        raise UsageError(f"A table of scores names a component twice (columns {', '.join(dims)}).")
    index = tuple(frame[dim].to_numpy(dtype=int) for dim in dims)
    shape = tuple(int(numbers.max()) + 1 for numbers in index)

    def filled(name: str) -> Any:
        array = np.full(shape, np.nan)
        array[index] = frame[name]
        return array

    extras = {name: filled(name) for name in _EXTRAS if name in frame and not frame[name].isna().all()}
    return make(filled("score"), dims, **extras, **attrs)
