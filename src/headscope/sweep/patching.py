"""Activation patching between clean prompts and their corrupted twins, and its cheap estimate by one backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headscope.core.component import Component
from headscope.core.errors import FileError, NotApplicable, UsageError, nearest
from headscope.core.files import new_file, read_document, write_json
from headscope.core.scores import from_frame, make, to_frame
from headscope.draw import version
from headscope.model import Model
from headscope.sweep.folder import load_sweep
from headscope.sweep.metrics import Metric, measure, name_of
from headscope.sweep.sweep import clean, sweep
from headscope.trace import Capture, Edit, patch, resolve, trace
from headscope.trace.edit import SITE

if TYPE_CHECKING:
    import xarray as xr

    from headscope.tasks import Prompts

#: what a sweep goes over: name → (dims of the units, components of a model in that order)
OVER: dict[str, tuple[tuple[str, ...], Callable[[Model], list[Component]]]] = {
    "heads": (("layer", "head"), lambda m: m.heads()),
    "kv-heads": (("layer", "kv_head"), lambda m: _each(m, "kv_head", m.anatomy.n_kv_heads)),
    "neurons": (("layer", "neuron"), lambda m: _each(m, "neuron", m.anatomy.d_mlp)),
    "attn": (("layer",), lambda m: _each(m, "attn")),
    "mlp": (("layer",), lambda m: _each(m, "mlp")),
    "resid": (("layer",), lambda m: _each(m, "resid")),
    "layers": (("layer",), lambda m: _each(m, "layer")),
}
#: pairs whose metric differs by less than this between clean and corrupted say nothing and are left out
FLOOR = 1e-3
FORMAT = 1


def _each(model: Model, kind: Any, n: int | None = None) -> list[Component]:
    layers = range(model.anatomy.n_layers)
    return [Component("", layer, kind, i) for layer in layers for i in (range(n) if n is not None else (None,))]


def components_over(model: Model, over: str) -> list[Component]:
    """All components of a kind: heads, kv-heads, neurons, attn, mlp, resid or layers. Raises UsageError for another,
    NotApplicable where the model has none."""
    if over not in OVER:
        raise UsageError(f"There is nothing called {over!r} to go over.{nearest(over, OVER)}")
    found = OVER[over][1](model)
    if not found:
        raise NotApplicable(f"{model.name} has no {over} that headscope can edit.")
    return found


@dataclass(frozen=True, eq=False)
class Patching:
    """`effect`: dims (layer, head, …) and position where asked for: 0 changes nothing, 1 is the whole difference between
    the two prompts (a ratio of means over the pairs; it may leave 0..1). `clean`, `corrupt`: the metric's mean there.
    `used`: the share of pairs whose metric differs at all.
    """

    effect: xr.DataArray
    clean: float
    corrupt: float
    used: float

    def save(self, path: str | Path) -> None:
        """Write `patching.json` and `patching.parquet` into a folder."""
        path = Path(path)
        with new_file(path / "patching.parquet") as temporary:
            to_frame(self.effect).to_parquet(temporary, index=False)
        known = {"clean": self.clean, "corrupt": self.corrupt, "used": self.used, "origin": self.effect.attrs}
        write_json(path / "patching.json", {"format": "headscope-patching", "format_version": FORMAT, **known})

    @classmethod
    def load(cls, path: str | Path) -> Patching:
        """Read what `save` wrote. Raises FileError where it is damaged or of another version."""
        import pandas as pd

        path = Path(path)
        document = read_document(path / "patching.json", "patching", "patching", FORMAT)
        try:
            effect = from_frame(pd.read_parquet(path / "patching.parquet"), **document["origin"])
            return cls(effect, document["clean"], document["corrupt"], document["used"])
        except (KeyError, TypeError, ValueError, OSError, UsageError) as error:
            raise FileError(f"The patching {path} is damaged ({error!r}).") from None

    def _repr_html_(self) -> str:
        from headscope.draw.scores import figure

        return figure(self.effect)._repr_html_()


def patching(
    model: Model,
    prompts: Prompts,
    over: str = "heads",
    *,
    positions: str = "all",
    direction: str = "denoise",
    metric: Metric | None = None,
    **options: Any,
) -> Patching:
    """Exchange each component's value between clean prompts and their corrupted twins, at all positions together, at
    each one (`positions="each"`) or at the last.

    denoise: corrupted prompts with the clean value, (m_patched - m_corrupt) / (m_clean - m_corrupt): is it enough?
    noise: clean prompts with the corrupted value, (m_clean - m_patched) / (m_clean - m_corrupt): is it needed?
    Options are those of `sweep`: out (which gets the result as well, for `load_run`), resume, engine, progress.
    Heimersheim & Nanda 2024.

    Raises UsageError for a task without corrupted twins, NotApplicable where clean and corrupted do not differ.
    """
    twin = corrupted(prompts)
    base, source = (twin, prompts) if direction == "denoise" else (prompts, twin)
    edits = patches(model, base, source, over, positions, direction)
    metric = metric or prompts.metric
    good, bad = (clean(model, p, metric).double().cpu().numpy() for p in (prompts, twin))
    used = abs(good - bad) > FLOOR
    if not used.any():
        raise NotApplicable(
            "The metric is the same on the clean and the corrupted prompts, so there is nothing to explain."
        )
    values = sweep(model, base, edits, metric, **options).values[:, used].mean(1)
    top, low = good[used].mean(), bad[used].mean()
    how = {"method": "activation patching", "direction": direction, "metric": name_of(metric)}
    effect = (values - low if direction == "denoise" else top - values) / (top - low)
    shaped = _shaped(model, effect, over, positions, prompts, **how)
    found = Patching(shaped, float(top), float(low), float(used.mean()))
    if options.get("out") is not None:
        found.save(options["out"])
    return found


def load_run(path: str | Path) -> xr.DataArray | Patching:
    """What `sweep` or `patching` wrote with `out`. Raises FileError where there is none, or none that is finished."""
    return Patching.load(path) if (Path(path) / "patching.json").is_file() else load_sweep(path)


def attribution_patching(
    model: Model, prompts: Prompts, over: str = "heads", *, positions: str = "all", direction: str = "denoise",
    metric: Metric | None = None,
) -> Patching:  # fmt: skip
    """What `patching` would give to first order, for all components at once: (a_source - a_base) · ∂m/∂a at the base.

    Two forward passes and one backward; a screen, not a result: it misses saturated attention and what cancels. Compare
    with the exact sweep by `agree`. Nanda 2023.
    """
    twin = corrupted(prompts)
    base, source = (twin, prompts) if direction == "denoise" else (prompts, twin)
    _check(model, base, over, positions, direction)
    metric = metric or prompts.metric
    kind = components_over(model, over)[0].kind
    (site,) = SITE[kind]
    there = trace(model, source, [site], logits=prompts.positions)
    here = trace(model, base, [site], logits=prompts.positions, grad=True)
    good, bad = (
        measure(metric, r.logits, prompts) for r in ((there, here) if direction == "denoise" else (here, there))
    )
    used = ((good - bad).abs() > FLOOR).detach()
    if not bool(used.any()):
        raise NotApplicable(
            "The metric is the same on the clean and the corrupted prompts, so there is nothing to explain."
        )
    value = (bad if direction == "denoise" else good).sum()
    if not value.requires_grad:
        raise UsageError(
            f"The metric {name_of(metric)} has no gradient; take logit_diff, loss, prob or logit, or patch exactly."
        )
    layers = range(model.anatomy.n_layers)
    gradients = torch.autograd.grad(value, [here[site, layer] for layer in layers])
    moved = torch.stack([(there[site, i] - here[site, i].detach()) * gradients[i] for i in layers])
    moved = moved if kind == "neuron" else moved.sum(-1)  # [layer batch pos …]
    per = moved[:, used].mean(1)
    per = per.sum(1) if positions == "all" else per[:, -1] if positions == "last" else per.moveaxis(1, -1)
    top, low = (float(x.detach()[used].mean()) for x in (good, bad))
    how = {"method": "attribution patching", "direction": direction, "metric": name_of(metric)}
    effect = per.double().cpu().numpy() * (1 if direction == "denoise" else -1) / (top - low)
    return Patching(_shaped(model, effect, over, positions, prompts, **how), top, low, float(used.double().mean()))


def corrupted(prompts: Prompts) -> Prompts:
    """The corrupted twins as prompts, scored as the clean ones. Raises UsageError where the task has none."""
    if prompts.corrupt is None:
        raise UsageError(
            f"The task {prompts.name} has no corrupted twins of equal length; take ioi or capitals, or give `corrupt`."
        )
    return replace(prompts, tokens=prompts.corrupt, corrupt=prompts.tokens)


def patches(
    model: Model, base: Prompts, source: Prompts, over: str, positions: str, direction: str = "denoise"
) -> list[Edit]:
    """One edit a component (and position): its value in `source`, for prompts `base`."""
    units = _check(model, base, over, positions, direction)
    run = trace(model, source, [Capture(SITE[units[0].kind][0])], logits=None)
    width = base.tokens.shape[1]
    at: list[tuple[int, ...] | None] = [None]
    if positions == "last":
        at = [(width - 1,)]
    elif positions == "each":
        at = [(p,) for p in range(width)]
    # the edits of a component share its one tensor
    return [replace(edit, positions=where) for edit in resolve(model, [patch(c, run) for c in units]) for where in at]


def _check(model: Model, base: Prompts, over: str, positions: str, direction: str) -> list[Component]:
    """The components to patch. Raises UsageError for what cannot be patched."""
    if positions not in ("all", "each", "last"):
        raise UsageError(f"positions is {positions!r}; it takes all, each or last.")
    if direction not in ("denoise", "noise"):
        raise UsageError(f"direction is {direction!r}; it takes denoise or noise.")
    if base.mask is not None and positions != "all":
        raise UsageError("Prompts of different lengths have no common positions; take prompts of equal length.")
    units = components_over(model, over)
    if len(SITE[units[0].kind]) > 1:
        raise UsageError(
            f"Patching exchanges one tensor a component, and {over} have two; take heads, attn, mlp or resid."
        )
    return units


def _shaped(model: Model, effect: Any, over: str, positions: str, prompts: Prompts, **how: str) -> xr.DataArray:
    dims = OVER[over][0]
    last = components_over(model, over)[-1]
    shape = [last.layer + 1, *([(last.index or 0) + 1] if len(dims) > 1 else [])]
    if positions == "each":
        dims, shape = (*dims, "position"), [*shape, prompts.tokens.shape[1]]
    known = {"model": model.name, "fingerprint": model.fingerprint, "version": version()}
    return make(
        np.asarray(effect).reshape(shape), dims, task=prompts.name, seed=prompts.seed, over=over, positions=positions,
        **how, **known,
    )  # fmt: skip


__all__ = [
    "OVER", "Patching", "attribution_patching", "components_over", "corrupted", "load_run", "patches", "patching",
]  # fmt: skip
