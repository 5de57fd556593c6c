"""An atlas as the page reads it: the whole in a few kilobytes, a method as a matrix, a head with all that is known of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from headscope.core.errors import UsageError, nearest
from headscope.core.registry import methods
from headscope.core.scores import agree, rank

if TYPE_CHECKING:
    import xarray as xr

    from headscope.atlas import Atlas


def summary(atlas: Atlas) -> dict[str, Any]:
    """Model, methods and verdicts, without the scores themselves."""
    return {
        "model": atlas.model,
        "seed": atlas.seed,
        "methods": [_method(name, scores) for name, scores in atlas.scores.items()],
        "verdicts": [asdict(v) for v in atlas.verdicts],
        "skipped": atlas.skipped,
    }


def _method(name: str, scores: xr.DataArray) -> dict[str, Any]:
    spec = methods().get(name)  # a method that is not installed here still has its scores
    values = scores.values[~np.isnan(scores.values)]
    return {
        "id": name,
        "title": spec.info["title"] if spec else name,
        "doc": spec.doc if spec else "",
        "dims": list(map(str, scores.dims)),
        "shape": list(scores.shape),
        "higher_means": scores.attrs.get("higher_means", ""),
        "paper": scores.attrs.get("paper", ""),
        "options": scores.attrs.get("options", {}),
        "low": float(values.min()) if len(values) else None,
        "high": float(values.max()) if len(values) else None,
    }


def scores_of(atlas: Atlas, name: str) -> xr.DataArray:
    """A method's scores. Raises UsageError where the atlas has none."""
    if name not in atlas.scores:
        raise UsageError(f"The atlas has no scores of {name!r}.{nearest(name, atlas.scores)}")
    return atlas.scores[name]


def agreement(atlas: Atlas, x: str, y: str) -> dict[str, float]:
    """How far two methods agree on which heads come first."""
    return agree(scores_of(atlas, x), scores_of(atlas, y))


def head(atlas: Atlas, layer: int, index: int) -> dict[str, Any]:
    """All that the atlas says about a head: scores with ranks, and the roles that it was tested for."""
    facts = atlas.model["anatomy"]
    if not (0 <= layer < facts["n_layers"] and 0 <= index < facts["n_heads"]):
        raise UsageError(
            f"L{layer}H{index} does not exist; {atlas.model['name']} has {facts['n_layers']} layers of "
            f"{facts['n_heads']} heads, counted from 0."
        )
    name = f"L{layer}H{index}"
    rows = []
    for method, scores in atlas.scores.items():
        if tuple(scores.dims) != ("layer", "head"):
            continue
        at = (layer, index)
        values = scores.values
        row = {
            "method": method,
            "score": float(values[at]),
            "rank": float(rank(scores).values[at]),
            "of": int((~np.isnan(values)).sum()),
            "low": float(np.nanmin(values)),
            "high": float(np.nanmax(values)),
            "higher_means": scores.attrs.get("higher_means", ""),
        }
        for extra in ("ci_low", "ci_high"):
            row[extra] = float(scores.coords[extra].values[at]) if extra in scores.coords else None
        rows.append(row)
    return {
        "component": name,
        "kv_head": index // (facts["n_heads"] // facts["n_kv_heads"]),
        "scores": rows,
        "roles": [{**asdict(v), "place": v.components.index(name) + 1} for v in atlas.verdicts if name in v.components],
        "other_roles": [v.role for v in atlas.verdicts if name not in v.components],
    }
