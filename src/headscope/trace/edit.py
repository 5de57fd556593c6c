"""Edits are values: what to do, to which components, where. They batch, save, replay and bake."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headscope.core.component import Component, components
from headscope.core.errors import FileError, UsageError, nearest
from headscope.core.files import read_document, write_json

#: the site at which a component of a kind is edited; `layer` skips both of its parts
SITE = {
    "head": ("z",), "kv_head": ("k", "v"), "neuron": ("neuron",), "attn": ("attn_out",), "mlp": ("mlp_out",),
    "resid": ("resid_pre",), "layer": ("attn_out", "mlp_out"),
}  # fmt: skip
FORMAT = 1
OPS = ("zero", "scale", "gate", "add", "mean", "resample", "patch", "project_out", "mask_edges", "attend")
#: operations whose values are those of a whole run: [component, batch, pos, unit]
RECORDED = ("patch", "resample", "attend")

Components = Component | str | Iterable[Component | str]


@dataclass(frozen=True, eq=False)
class Edit:
    """One change.

    `op`: zero, scale, gate, add, mean, resample, patch, project_out, mask_edges, attend. `value`: a number or a tensor
    broadcastable to [component, unit], except patch and resample: [component, batch, pos, unit] (add takes that as well),
    and attend: [component, batch, query, key]. `source`: where
    mean, resample and patch take their values from until they are resolved. `positions`: prompt positions (padding
    is never one), the word "generated", or None for all. `rows`: batch rows, or None for all. `part`: k, v or kv,
    for kv heads. `edges`: (query, key) pairs, for mask_edges; None in a pair stands for every position.
    `mask` [batch, pos]: real positions of the source of patch and resample, None where it has no padding.
    """

    op: str
    components: tuple[Component, ...]
    value: Any = None
    source: Any = None
    positions: tuple[int, ...] | str | None = None
    rows: tuple[int, ...] | None = None
    part: str = "kv"
    edges: tuple[tuple[int | None, int | None], ...] = ()
    seed: int = 0
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise UsageError(f"There is no edit {self.op!r}.{nearest(self.op, OPS)}")
        for component in self.components:
            if component.kind not in SITE or component.stack or component.expert is not None:
                raise UsageError(
                    f"{component} cannot be edited yet; edits take heads, kv heads, neurons, MLPs, layers."
                )
        if isinstance(self.positions, str) and self.positions != "generated":
            raise UsageError(
                f"positions is {self.positions!r}; it takes prompt positions, 'generated', or None for all."
            )
        if self.part not in ("k", "v", "kv"):
            raise UsageError(f"part is {self.part!r}; a kv head's part is k, v or kv.")
        for name, numbers in (("positions", self.positions), ("rows", self.rows)):
            if isinstance(numbers, tuple) and (not numbers or min(numbers) < 0):
                raise UsageError(f"{name} is {numbers}; {name} count from 0, and there is at least one.")
        if repeated := sorted({str(c) for c in self.components if self.components.count(c) > 1}):
            raise UsageError(f"An edit names each component once, but {', '.join(repeated)} came again.")
        value, n = self.value, len(self.components)
        if isinstance(value, Tensor) and value.ndim > self.axes:
            raise UsageError(
                f"'{self}' was given values of shape {tuple(value.shape)}; they have at most {self.axes} axes, "
                + ("[component, batch, pos, unit]." if self.axes == 4 else "[component, unit].")
            )
        if isinstance(value, Tensor) and value.ndim == self.axes and value.shape[0] not in (1, n):
            raise UsageError(f"'{self}' was given values of shape {tuple(value.shape)}, but has {n} components.")

    @property
    def axes(self) -> int:
        """Axes of a value with one entry a component; one of fewer axes is shared by all."""
        whole = self.op == "add" and isinstance(self.value, Tensor) and self.value.ndim == 4
        return 4 if self.op in RECORDED or whole else 2

    def sites(self, component: Component) -> tuple[str, ...]:
        """The sites of `trace` at which this edit changes the component."""
        if self.op == "mask_edges":
            return ("attn_scores",)
        if self.op == "attend":
            return ("pattern",)
        if component.kind == "kv_head":
            return tuple(self.part)
        return SITE[component.kind]

    def __str__(self) -> str:
        where = "" if self.positions is None else f" at {self.positions}"
        value = f" {self.value:g}" if isinstance(self.value, (int, float)) else ""
        names = [str(c) for c in self.components]
        shown = ",".join(names if len(names) <= 8 else [*names[:7], f"… {len(names)} in all"])
        return f"{self.op} {shown}{value}{where}"


def _make(op: str, given: Components, value: Any = None, **where: Any) -> Edit:
    for name in ("positions", "rows"):
        numbers = where.get(name)
        if numbers is None or (name == "positions" and isinstance(numbers, str)):
            continue
        try:
            where[name] = tuple(map(operator.index, [numbers] if isinstance(numbers, int) else numbers))
        except TypeError:
            raise UsageError(f"{name} is {numbers!r}; it takes a whole number or several.") from None
    return Edit(op, components(given), value, **where)


def zero(given: Components, **where: Any) -> Edit:
    """Set to 0. `where`: positions=, rows=, part= as in `Edit`."""
    return _make("zero", given, **where)


def scale(given: Components, factor: float, **where: Any) -> Edit:
    """Multiply by `factor`."""
    if not isinstance(factor, (int, float)):
        raise UsageError(f"scale takes a number, but got {type(factor).__name__}; gate takes a tensor.")
    return _make("scale", given, float(factor), **where)


def gate(given: Components, gates: Tensor, **where: Any) -> Edit:
    """Multiply by learnable `gates` ([component] or one number as a tensor); gradients reach them."""
    chosen = components(given)
    if gates.ndim == 1 and gates.numel() not in (1, len(chosen)):
        raise UsageError(f"gate was given {gates.numel()} gates for {len(chosen)} components; give one each, or one.")
    return _make("gate", chosen, gates.reshape(-1, 1), **where)


def add(given: Components, vector: Tensor, **where: Any) -> Edit:
    """Add `vector` ([unit], [component, unit] or [component, batch, pos, unit]): unit is d_head for a head, d_model for
    attn, mlp, resid."""
    return _make("add", given, vector, **where)


def project_out(given: Components, direction: Tensor, **where: Any) -> Edit:
    """Remove the part along `direction` ([unit], need not be of unit length)."""
    if direction.ndim != 1 or float(direction.norm()) == 0.0:
        raise UsageError("project_out takes one direction that is not zero, as a tensor [unit].")
    return _make("project_out", given, direction, **where)


def mean(given: Components, source: Any, **where: Any) -> Edit:
    """Replace by the mean over the real positions of `source` (a Run, prompts, text, or a tensor [component, unit])."""
    return _from("mean", given, source, **where)


def resample(given: Components, source: Any, seed: int = 0, **where: Any) -> Edit:
    """Replace by the values of another row of `source`, drawn by `seed`, at the same positions."""
    return _from("resample", given, source, seed=seed, **where)


def patch(given: Components, source: Any, **where: Any) -> Edit:
    """Replace by the values of `source` at the same rows and positions (activation patching)."""
    return _from("patch", given, source, **where)


def mask_edges(given: Components, edges: Iterable[tuple[int | None, int | None]], **where: Any) -> Edit:
    """Forbid heads to attend along (query, key) pairs, before the softmax; None stands for every position."""
    pairs = tuple(map(tuple, edges))
    edit = _make("mask_edges", given, edges=pairs, **where)
    if not pairs or any(component.kind != "head" for component in edit.components):
        raise UsageError("mask_edges takes heads and at least one (query, key) pair.")
    for pair in pairs:
        if len(pair) != 2 or any(i is not None and (not isinstance(i, int) or i < 0) for i in pair):
            raise UsageError(f"{pair} is not a (query, key) pair of positions from 0; None stands for every position.")
    return edit


def attend(given: Components, pattern: Tensor | Any, **where: Any) -> Edit:
    """Make heads look where `pattern` says: weights [query, key] or [component, batch, query, key] in place of the
    softmax's (they need not sum to 1), or prompts or a run whose own patterns to take."""
    edit = _from("attend", given, pattern, **where)
    if any(component.kind != "head" for component in edit.components):
        raise UsageError("attend takes heads, which have a pattern; name them like L5H3.")
    return edit


def _from(op: str, given: Components, source: Any, **where: Any) -> Edit:
    if isinstance(source, Tensor) and source.is_floating_point():
        return _make(op, given, source, **where)
    return _make(op, given, source=source, **where)


def check_edit(edit: Edit, sizes: dict[str, int]) -> None:
    """Raise UsageError for a component that a model of these sizes does not have."""
    count = {"head": "n_heads", "kv_head": "n_kv_heads", "neuron": "d_mlp"}
    for c in edit.components:
        if c.layer >= sizes["n_layers"]:
            raise UsageError(f"{c} does not exist: this model has layers 0 to {sizes['n_layers'] - 1}.")
        if c.kind in count and c.index is not None and c.index >= sizes[count[c.kind]]:
            raise UsageError(f"{c} does not exist: a layer of this model has {sizes[count[c.kind]]} {c.kind}s.")


def save_edits(edits: Edit | list[Edit], path: str | Path) -> None:
    """Write edits as JSON. Raises UsageError for edits whose values still wait for a source."""
    edits = [edits] if isinstance(edits, Edit) else edits
    rows = []
    for edit in edits:
        if edit.source is not None:
            raise UsageError(f"The edit '{edit}' takes its values from a run; resolve(model, edits) makes it savable.")
        tensor = edit.value if isinstance(edit.value, Tensor) else None
        rows.append(
            {
                "op": edit.op,
                "components": [str(c) for c in edit.components],
                "value": edit.value if tensor is None else tensor.detach().tolist(),
                "dtype": None if tensor is None else str(tensor.dtype).removeprefix("torch."),
                "positions": edit.positions,
                "rows": edit.rows,
                "part": edit.part,
                "edges": edit.edges,
                "mask": None if edit.mask is None else edit.mask.int().tolist(),
            }
        )
    write_json(path, {"format": "headscope-edits", "format_version": FORMAT, "edits": rows})


def load_edits(path: str | Path) -> list[Edit]:
    """Read a file written by `save_edits`. Raises FileError when it is damaged or newer."""
    document = read_document(path, "edit file", "edits", FORMAT)
    try:
        if not isinstance(document["edits"], list):
            raise TypeError("edits is not a list")
        return [_load(row) for row in document["edits"]]
    except (KeyError, TypeError, ValueError, AttributeError, UsageError) as error:
        raise FileError(f"The edit file {path} is damaged ({error!r}).") from None


def _load(row: dict[str, Any]) -> Edit:
    value = row["value"]
    if row["dtype"] is not None:
        dtype = getattr(torch, row["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{row['dtype']} is not a dtype")
        value = torch.tensor(value, dtype=dtype)
    elif value is not None:
        value = float(value)
    where = {name: row[name] for name in ("positions", "rows", "part")}
    edges = tuple((q, k) for q, k in row["edges"])
    if row.get("mask") is not None:
        where["mask"] = torch.tensor(row["mask"]).bool()
    edit = _make(row["op"], row["components"], value, edges=edges, **where)
    kinds: dict[str, type] = {"scale": float, "zero": type(None), "mask_edges": type(None)}
    if not isinstance(value, kinds.get(edit.op, Tensor)):
        raise TypeError(f"{edit.op} has a value of another kind")
    return edit
