"""Run a method by its id: check what it needs, run it, label the result."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from headscope.core.errors import HeadscopeError, NotApplicable, UsageError
from headscope.core.registry import MethodSpec, get
from headscope.core.scores import infinite_at
from headscope.model import Model

if TYPE_CHECKING:
    import xarray as xr

    from headscope.methods.base import Plan
    from headscope.tasks import Prompts
    from headscope.trace import Edit

_LACKS = {
    "causal": ("is_causal", "it needs a decoder, and this model attends in both directions"),
    "tokenizer": ("tokenizer", "it needs a tokenizer, and this model was loaded without one"),
}


def missing(model: Model, spec: MethodSpec) -> str | None:
    """Why a method does not apply to a model, or None if it does."""
    for need in spec.info.get("needs", ()):
        if need in _LACKS and not getattr(model, _LACKS[need][0]):
            return f"{spec.id} does not apply to {model.name}: {_LACKS[need][1]}."
        if need in ("logits", "gradient") and model.anatomy.parts.unembed is None:
            return f"{spec.id} does not apply to {model.name}: it needs a language-model head, and this model has none."
        if need == "tokens" and getattr(model.hf, "main_input_name", "input_ids") != "input_ids":
            return f"{spec.id} does not apply to {model.name}: it needs token ids, and this model reads images."
    return None


def _ready(model: Model, method_id: str, kind: str, options: dict[str, Any]) -> tuple[MethodSpec, Any]:
    spec = get(method_id, kind)
    method = spec.create(**options)
    if why := missing(model, spec):
        raise NotApplicable(why)
    return spec, method


def _label(result: xr.DataArray, model: Model, spec: MethodSpec, method: Any, seed: int) -> xr.DataArray:
    import headscope

    if tuple(result.dims) != tuple(spec.info.get("dims", ("layer", "head"))):
        raise HeadscopeError(f"{spec.id} declares dims {spec.info.get('dims')} but gave {tuple(result.dims)}.")
    result.attrs = {
        "method": spec.id,
        "paper": ", ".join(spec.info["papers"]),
        "model": model.name,
        "fingerprint": model.fingerprint,
        "seed": seed,
        "units": spec.info.get("units", "head"),
        "higher_means": spec.info["higher_means"],
        "options": asdict(method),
        "version": headscope.__version__,
        **result.attrs,
    }
    return result


def score(model: Model, method_id: str, *, seed: int = 0, **options: Any) -> xr.DataArray:
    """Scores of a method of kind score; `options` are its fields. Same seed, same values.

    Raises UsageError for an unknown method or option, NotApplicable where the model lacks what the method needs.
    """
    spec, method = _ready(model, method_id, "score", options)
    found = method.score(model, seed=seed)
    if place := infinite_at(found):
        raise NotApplicable(f"The scores of {method_id} on {model.name} are infinite at {place}.")
    return _label(found, model, spec, method, seed)


def attribute(model: Model, method_id: str, prompts: Prompts, *, seed: int = 0, **options: Any) -> xr.DataArray:
    """Contributions by a method of kind attribute to the targets of `prompts`."""
    spec, method = _ready(model, method_id, "attribute", options)
    return _label(method.attribute(model, prompts, seed=seed), model, spec, method, seed)


def intervene(
    model: Model, method_id: str, prompts: Prompts | None = None, *, seed: int = 0, **options: Any
) -> list[Edit]:
    """Edits found by a method of kind intervene on `prompts` (its own task where none are given)."""
    _, method = _ready(model, method_id, "intervene", options)
    return method.edits(model, prompts, seed=seed)


def plan(model: Model, method_id: str, *, budget: float, seed: int = 0, **options: Any) -> Plan:
    """What a method of kind compress would drop; `budget` is the share of heads, above 0 and below 1.

    Carry it out with `compress.export(model, plan)`.
    """
    if not 0 < budget < 1:
        raise UsageError(f"budget is {budget}; it is the share of heads to drop, above 0 and below 1.")
    _, method = _ready(model, method_id, "compress", options)
    return method.plan(model, budget=budget, seed=seed)


def check(model: Model, method_id: str, *, seed: int = 0) -> dict[str, Any]:
    """Test a method's claim on a model: {id, paper, claim, verdict, figures, reason, seconds}."""
    spec = get(method_id)
    start = time.perf_counter()
    why = missing(model, spec)
    if why:
        verdict, figures, reason = "not testable", {}, why
    else:
        try:
            found = spec.create().check(model, seed=seed)
            verdict, figures, reason = found.verdict, found.figures, found.reason
        except NotApplicable as error:
            verdict, figures, reason = "not testable", {}, str(error)
    return {
        "id": spec.id,
        "paper": ", ".join(spec.info["papers"]),
        "claim": spec.info["claim"],
        "verdict": verdict,
        "figures": {name: float(value) for name, value in figures.items()},
        "reason": reason,
        "seconds": round(time.perf_counter() - start, 2),
    }
