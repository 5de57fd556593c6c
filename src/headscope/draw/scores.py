"""Scores, which are plain labelled arrays, as a figure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from headscope.core.errors import UsageError
from headscope.core.scores import infinite_at
from headscope.draw.figure import Figure, version
from headscope.draw.marks import visible

if TYPE_CHECKING:
    import xarray as xr

#: the letter before a number, so that two labels make a component's name
_LETTERS = {"layer": "L", "head": "H", "kv_head": "KV", "neuron": "N", "cross_head": "X", "expert": "E"}
#: more than these side by side are no figure any more
MOST_PANELS = 40
#: attributes of scores that say where they come from, in the order of the small print
_ORIGIN = (
    "model",
    "fingerprint",
    "method",
    "paper",
    "task",
    "over",
    "positions",
    "direction",
    "metric",
    "clean",
    "edit",
    "options",
    "seed",
)


def figure(
    scores: xr.DataArray, *, limit: float | None = None, notes: tuple[str, ...] = (), title: str | None = None
) -> Figure:
    """One panel for one or two dims; for three, one for each entry of the first; of neurons a density; of a sweep, what
    its edits change. `limit`: colours go from -limit to limit; the largest size of a score if left out. Raises UsageError for scores of
    other dims.
    """
    if scores.dims == ("edit", "prompt") and "clean" in scores.coords and bool(scores["clean"].notnull().all()):
        from headscope.draw import sweeps

        return sweeps.figure(scores, limit=limit)
    _check(scores)
    if set(scores.dims) == {"layer", "neuron"}:
        from headscope.draw import neurons

        return neurons.figure(scores, limit=limit, notes=notes, title=title)
    if scores.dims[-1] == "layer" and scores.ndim == 2:
        scores = scores.transpose()
    attrs = scores.attrs
    panels = panels_of(scores, limit, note=meaning(scores) if scores.ndim < 3 else "")
    rows, columns = _last_two(scores)
    named = rows == "layer" and columns in _LETTERS
    data = {
        "axes": {"rows": rows, "columns": columns},
        "rows": labels(scores, rows), "columns": labels(scores, columns),
        "upward": rows == "layer", "join": "" if named or not rows else ", ", "scale": "diverging",
        "missing": "not measured", "panels": panels,
    }  # fmt: skip
    words = attrs.get("higher_means")
    own = f"Blue is positive{f' ({words})' if words else ''}, red negative, no colour 0."
    name = title or str(attrs.get("method") or scores.name or "scores")
    return Figure("matrix", name, data, origin(attrs), (own, *notes))


def panels_of(
    scores: xr.DataArray, limit: float | None = None, title: str = "", note: str = ""
) -> list[dict[str, Any]]:
    """The panels of one array, on one scale."""
    _check(scores)
    values = scores.values
    largest = max((abs(v) for v in values.ravel().tolist() if math.isfinite(v)), default=0.0)
    if values.ndim == 3:
        dim = str(scores.dims[0])
        titles = [f"{title} {dim} {label}".strip() for label in labels(scores, dim)]
    else:
        titles, values = [title], values.reshape(1, *((1,) if values.ndim == 1 else ()), *values.shape)
    return [
        {
            "title": name, "note": note, "limit": float(limit or largest or 1.0),
            "values": [[v if math.isfinite(v) else None for v in row] for row in panel.tolist()],
        }
        for name, panel in zip(titles, values, strict=True)
    ]  # fmt: skip


def _check(scores: xr.DataArray) -> None:
    if not 1 <= scores.ndim <= 3 or 0 in scores.shape or (scores.ndim == 3 and scores.shape[0] > MOST_PANELS):
        raise UsageError(
            f"A figure shows scores of one to three dims and at most {MOST_PANELS} panels, but these have "
            f"{dict(scores.sizes)}; choose a part, such as scores.isel({scores.dims[0] if scores.dims else 'layer'}=0)."
        )
    if scores.dtype.kind not in "fiub":
        raise UsageError(f"A figure shows numbers, but these scores are of type {scores.dtype}.")
    if place := infinite_at(scores):
        raise UsageError(
            f"A figure shows numbers, but these scores are infinite at {place}; take NaN for what is missing."
        )


def _last_two(scores: xr.DataArray) -> tuple[str, str]:
    return ("" if scores.ndim == 1 else str(scores.dims[-2])), str(scores.dims[-1])


def labels(scores: xr.DataArray, dim: str) -> list[str]:
    """What the entries of a dim are called; one empty label for a dim that is not there."""
    if not dim:
        return [""]
    stack = f"{scores.attrs['stack']}." if dim == "layer" and scores.attrs.get("stack") else ""
    entries = scores.coords[dim].values.tolist() if dim in scores.coords else range(scores.sizes[dim])
    return [visible(f"{stack}{_LETTERS.get(dim, '')}{entry}").replace("·", " ") for entry in entries]


def origin(attrs: dict[Any, Any]) -> dict[str, Any]:
    """The attributes that say where scores come from."""
    found = {name: attrs[name] for name in _ORIGIN if attrs.get(name) not in (None, "")}
    return {**found, "headscope": attrs.get("version", version())}


def meaning(scores: xr.DataArray) -> str:
    """What a higher score means, as the line below a grid's name."""
    words = scores.attrs.get("higher_means")
    return f"higher: {words}" if words else ""


def is_ours(scores: Any) -> bool:
    """Whether an array is scores that headscope made, by its attributes."""
    return {"method", "fingerprint"} <= set(scores.attrs)
