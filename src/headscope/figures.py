"""`figure`: anything that headscope found, as a figure that shows and saves itself."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from headscope.core.component import Component
from headscope.core.errors import UsageError
from headscope.draw import Figure

if TYPE_CHECKING:
    from headscope.model import Model
    from headscope.trace import Run


def figure(
    thing: Any,
    *,
    method: str | None = None,
    role: str | None = None,
    head: Component | str | None = None,
    prompt: str | None = None,
    row: int = 0,
    limit: float | None = None,
    model: Model | None = None,
    title: str | None = None,
) -> Figure:
    """A figure of an atlas (all its methods, one `method`, or the proof of a `role`), scores, a verdict, a route, a
    patching, a run (the attention of a `head` on a `row` of the batch), or of a model (a `head`'s attention on a
    `prompt`). It shows itself in a notebook; `save` writes .html, .svg, .png, .pdf and .json.

    `limit` has the strongest colour: scores go from -limit to limit, attention from 0 to limit. `model`: what a verdict
    or a sweep was made with, as they do not say it themselves. Raises UsageError for what cannot be drawn.
    """
    import xarray as xr

    from headscope.atlas import Atlas
    from headscope.draw.scores import figure as of_scores
    from headscope.model import Model
    from headscope.routes import Route
    from headscope.sweep import Patching
    from headscope.trace import Run
    from headscope.verify import Verdict

    if limit is not None and not 0 < limit < math.inf:
        raise UsageError(f"limit is {limit}; it is the value of the strongest colour, a number above 0.")
    asked = {"method": method, "role": role, "head": head, "prompt": prompt, "limit": limit}
    given = {name for name, value in asked.items() if value is not None}
    takes: list[tuple[type, set[str]]] = [
        (Atlas, {"method", "role", "limit"}), (xr.DataArray, {"limit"}), (Patching, {"limit"}), (Verdict, set()),
        (Route, set()), (Run, {"head", "limit"}), (Model, {"head", "prompt", "limit"}), (Figure, set()),
    ]  # fmt: skip
    for kind, known in takes:
        if isinstance(thing, kind):
            if extra := given - known:
                raise UsageError(f"A figure of {_a(kind)} takes no {' or '.join(sorted(extra))}.")
            break
    else:
        raise UsageError(
            f"There is no figure of {_a(type(thing))}; give an Atlas, scores, a Verdict, a Route, a Patching, a Run or a Model."
        )
    found: Figure
    if isinstance(thing, Atlas):
        from headscope.report.figures import of_atlas

        found = of_atlas(thing, method=method, role=role, limit=limit)
    elif isinstance(thing, xr.DataArray):
        found = of_scores(thing, limit=limit)
    elif isinstance(thing, Patching):
        notes = (f"1 is the whole difference between clean ({thing.clean:.4g}) and corrupted ({thing.corrupt:.4g}).",)
        found = of_scores(thing.effect, limit=limit, notes=notes)
    elif isinstance(thing, Verdict):
        from headscope.verify.show import curve

        found = curve(thing)
    elif isinstance(thing, Route):
        from headscope.routes.draw import figure as of_route

        found = of_route(thing)
    elif isinstance(thing, Run):
        found = _of_run(thing, head, row, limit)
    elif isinstance(thing, Model):
        found = _of_model(thing, head, prompt, limit)
    else:
        found = cast(Figure, thing)
    if model is not None:
        found = replace(found, provenance={"model": model.name, "fingerprint": model.fingerprint, **found.provenance})
    return found if title is None else replace(found, title=title)


def _a(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'AEIOUaeiou' else 'a'} {kind.__name__}"


def _of_run(run: Run, head: Component | str | None, row: int, limit: float | None) -> Figure:
    from headscope.trace.show import pattern

    if head is None:
        raise UsageError("A figure of a Run shows a head's attention; name it, such as head='L5H3'.")
    return pattern(run, head, row=row, limit=limit)


def _of_model(model: Model, head: Component | str | None, prompt: str | None, limit: float | None) -> Figure:
    import torch

    from headscope.trace import trace
    from headscope.trace.show import pattern

    if head is None or prompt is None:
        raise UsageError(
            "A figure of a Model shows a head's attention on a prompt; give head, such as L5H3, and prompt."
        )
    chosen = head if isinstance(head, Component) else Component.parse(head)
    if chosen not in model.heads():
        a = model.anatomy
        raise UsageError(f"{chosen} is no head of {model.name}, which has {a.n_layers} layers of {a.n_heads} heads, counted from 0.")  # fmt: skip
    with torch.no_grad():
        run = trace(model, prompt, ["pattern"], layers=[chosen.layer], logits=None)
    return pattern(run, chosen, prompt=prompt, model=model, limit=limit)
