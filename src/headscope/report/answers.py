"""What the page asks about an atlas: the whole in a few kilobytes, a method as a matrix, a head with all that is known of it.

A server answers one question at a time; a saved report carries the answers to all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
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
        "methods": [_method(atlas, name) for name in atlas.scores],
        "verdicts": [asdict(v) for v in atlas.verdicts],
        "skipped": atlas.skipped,
    }


def _method(atlas: Atlas, name: str) -> dict[str, Any]:
    scores = atlas.scores[name]
    spec = methods().get(name)  # a method that is not installed here still has its scores
    low, high = _range(scores)
    return {
        "id": name,
        "title": spec.info["title"] if spec else name,
        "doc": spec.doc if spec else "",
        "dims": list(map(str, scores.dims)),
        "shape": list(scores.shape),
        "higher_means": scores.attrs.get("higher_means", ""),
        "paper": scores.attrs.get("paper", ""),
        "options": scores.attrs.get("options", {}),
        "low": low,
        "high": high,
        "example": next((row["head"] for row in atlas.examples if row["method"] == name), None),
    }


def _range(scores: xr.DataArray) -> tuple[float | None, float | None]:
    values = scores.values[~np.isnan(scores.values)]
    return (float(values.min()), float(values.max())) if len(values) else (None, None)


def of_heads(atlas: Atlas) -> list[str]:
    """The methods that score every head."""
    facts = atlas.model["anatomy"]
    wanted = [("layer", facts["n_layers"]), ("head", facts["n_heads"])]
    return [name for name, scores in atlas.scores.items() if list(scores.sizes.items()) == wanted]


def alike(atlas: Atlas) -> dict[str, list[str]]:
    """The methods that score heads or neurons, each with the others that score the same ones."""
    shapes = {
        name: tuple(scores.sizes.items())
        for name, scores in atlas.scores.items()
        if tuple(map(str, scores.dims)) in (("layer", "head"), ("layer", "neuron"))
    }
    return {x: [y for y, other in shapes.items() if y != x and other == shape] for x, shape in shapes.items()}


def scores_of(atlas: Atlas, name: str) -> xr.DataArray:
    """A method's scores. Raises UsageError where the atlas has none."""
    if name not in atlas.scores:
        raise UsageError(f"The atlas has no scores of {name!r}.{nearest(name, atlas.scores)}")
    return atlas.scores[name]


def agreement(atlas: Atlas, x: str, y: str) -> dict[str, float]:
    """How far two methods agree on which heads come first."""
    return agree(scores_of(atlas, x), scores_of(atlas, y))


def example(atlas: Atlas, method: str) -> tuple[np.ndarray, dict[str, Any]]:
    """The attention [query, key] of a method's top head on the prompt of the scan, with that head and the tokens.

    Raises UsageError where the atlas has none.
    """
    known = {row["method"]: row for row in atlas.examples}
    if method not in known:
        raise UsageError(f"The atlas has no attention of the top head of {method!r}.{nearest(method, known)}")
    row = known[method]
    return np.array(row["pattern"]), {"head": row["head"], "tokens": row["tokens"]}


def head(atlas: Atlas, layer: int, index: int) -> dict[str, Any]:
    """All that the atlas says about a head: scores with ranks, and the roles that it was tested for."""
    facts = atlas.model["anatomy"]
    if not (0 <= layer < facts["n_layers"] and 0 <= index < facts["n_heads"]):
        raise UsageError(
            f"L{layer}H{index} does not exist; {atlas.model['name']} has {facts['n_layers']} layers of "
            f"{facts['n_heads']} heads, counted from 0."
        )
    return _head(atlas, _tables(atlas), layer, index)


def heads(atlas: Atlas) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Layer, index and what the atlas says, for every head."""
    tables = _tables(atlas)
    for layer, index in np.ndindex(atlas.model["anatomy"]["n_layers"], atlas.model["anatomy"]["n_heads"]):
        yield layer, index, _head(atlas, tables, layer, index)


#: of a method: what is the same for all heads, and arrays [layer, head] of what is not
_Table = tuple[dict[str, Any], dict[str, "np.ndarray | None"]]


def _tables(atlas: Atlas) -> list[_Table]:
    found = []
    for method in of_heads(atlas):
        scores = atlas.scores[method]
        low, high = _range(scores)
        same = {"method": method, "of": int((~np.isnan(scores.values)).sum()), "low": low, "high": high,
                "higher_means": scores.attrs.get("higher_means", "")}  # fmt: skip
        own = {name: scores.coords[name].values if name in scores.coords else None for name in ("ci_low", "ci_high")}
        found.append((same, {"score": scores.values, "rank": rank(scores).values, **own}))
    return found


def _head(atlas: Atlas, tables: list[_Table], layer: int, index: int) -> dict[str, Any]:
    facts = atlas.model["anatomy"]
    name = f"L{layer}H{index}"
    return {
        "component": name,
        "kv_head": index // (facts["n_heads"] // facts["n_kv_heads"]),
        "scores": [
            {**same, **{key: None if values is None else float(values[layer, index]) for key, values in own.items()}}
            for same, own in tables
        ],
        "roles": [{**asdict(v), "place": v.components.index(name) + 1} for v in atlas.verdicts if name in v.components],
        "other_roles": [v.role for v in atlas.verdicts if name not in v.components],
    }
