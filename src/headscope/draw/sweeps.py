"""A sweep as a figure: what each edit changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headscope.core.component import Component
from headscope.core.scores import make
from headscope.draw import scores
from headscope.draw.figure import Figure

if TYPE_CHECKING:
    import xarray as xr

#: kind of a component → the dim that counts it in a layer
_DIMS = {"head": "head", "kv_head": "kv_head", "neuron": "neuron", "attn": "", "mlp": "", "resid": "", "layer": ""}


def figure(effects: xr.DataArray, *, limit: float | None = None) -> Figure:
    """The change from the metric without edits: of each component, mean over the prompts, where every one of a kind was
    edited alone; else of each edit and prompt.
    """
    change = effects - effects["clean"]
    changed = make(change.values, ("edit", "prompt")).assign_coords(edit=effects.edit.values)
    grid = _grid(effects, change.mean("prompt"))
    ops = {str(text).split()[0] for text in effects.edit.values}
    edit = ops.pop() if len(ops) == 1 else ""
    origin = {**effects.attrs, "edit": edit, "clean": float(effects["clean"].mean())}
    metric = str(effects.attrs.get("metric", "the metric")).replace("_", " ")
    note = f"Change of {metric} from {origin['clean']:.4g} without edits" + (
        f", mean over {effects.sizes['prompt']} prompts." if grid is not None else ", of each prompt."
    )
    shown = (changed if grid is None else grid).assign_attrs(origin)
    return scores.figure(shown, limit=limit, notes=(note,), title=f"Change of {metric}" + (f": {edit}" if edit else ""))


def _grid(effects: xr.DataArray, mean: xr.DataArray) -> xr.DataArray | None:
    """[layer, index] or [layer] where the edits are those of all components of one kind, or None."""
    import numpy as np

    names = effects["component"].values.tolist()
    if not all(names):
        return None
    found = [Component.parse(name) for name in names]
    kinds = {component.kind for component in found}
    kind = kinds.pop()
    if kinds or kind not in _DIMS or any(component.stack for component in found):
        return None
    places = [(component.layer, component.index or 0) for component in found]
    shape = tuple(max(place[axis] for place in places) + 1 for axis in (0, 1))
    if len(set(places)) != len(places) or len(places) != shape[0] * shape[1]:
        return None
    values = np.empty(shape)
    values[tuple(zip(*places, strict=True))] = mean.values
    dim = _DIMS[kind]
    return make(values, ("layer", dim)) if dim else make(values[:, 0], ("layer",))
