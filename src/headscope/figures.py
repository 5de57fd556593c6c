"""`figure`: anything that headscope found, as a figure that shows and saves itself."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from headscope.core.component import Component
from headscope.core.errors import UsageError
from headscope.draw import Figure
from headscope.draw.scores import figure as of_scores

if TYPE_CHECKING:
    from headscope.model import Model


#: what may be said of each kind of thing, by its class, so that none is imported for nothing
_TAKES = {
    "Atlas": {"method", "against", "role", "example", "sink", "query", "key", "limit"}, "DataArray": {"limit"}, "Patching": {"limit"}, "Verdict": set(),
    "Route": set(), "Lens": {"by", "limit"}, "Run": {"head", "sink", "query", "key", "limit"},
    "Model": {"head", "prompt", "sink", "query", "key", "target", "by", "limit"}, "Figure": set(),
}  # fmt: skip
_OURS = ("headscope", "xarray")


def figure(
    thing: Any,
    *,
    method: str | None = None,
    against: str | None = None,
    role: str | None = None,
    example: bool | None = None,
    head: Component | str | None = None,
    prompt: Any = None,
    row: int = 0,
    sink: bool | None = None,
    query: int | None = None,
    key: int | None = None,
    target: str | int | None = None,
    by: str | None = None,
    limit: float | None = None,
    model: Model | None = None,
    title: str | None = None,
) -> Figure:
    """A figure of an atlas (all its methods, one `method`, one `against` another, the `example` of a
    method's top head, or the proof of a `role`), scores, a
    sweep, a patching, a verdict, a route, a lens, a run (the attention of a `head` on a `row` of the batch), or of a model
    on a `prompt`: a `head`'s attention, or without one the logit lens. It shows itself in a notebook; `save` writes .html,
    .svg, .png, .pdf and .json.

    `limit` has the strongest colour: scores go from -limit to limit, attention and probabilities from 0 to limit. Of
    attention, `sink=False` leaves out the first token, and `query` and `key` put a row or a cell into a frame. Of a lens,
    `target` is the token that is followed, and `by` whose probability is the colour: "best" or "target". `model`: what
    a result of an older version was made with, which does not say it. Raises UsageError for what cannot be drawn.
    """
    if limit is not None and not 0 < limit < math.inf:
        raise UsageError(f"limit is {limit}; it is the value of the strongest colour, a number above 0.")
    asked = {
        "method": method, "against": against, "role": role, "example": example, "head": head, "prompt": prompt, "sink": sink, "query": query,
        "key": key, "target": target, "by": by, "limit": limit,
    }  # fmt: skip
    given = {name: value for name, value in asked.items() if value is not None}
    kind = next(
        (c.__name__ for c in type(thing).__mro__ if c.__name__ in _TAKES and c.__module__.split(".")[0] in _OURS), None
    )
    if kind is None:
        raise UsageError(
            f"There is no figure of {_a(type(thing).__name__)}; give an Atlas, scores, a sweep, a Patching, a Verdict, a "
            "Route, a Lens, a Run or a Model."
        )
    if extra := given.keys() - _TAKES[kind]:
        raise UsageError(f"A figure of {_a(kind)} takes no {' or '.join(sorted(extra))}.")
    found = _made(kind, thing, given, row)
    if model is not None:
        found = replace(found, provenance={"model": model.name, "fingerprint": model.fingerprint, **found.provenance})
    return found if title is None else replace(found, title=title)


def _made(kind: str, thing: Any, given: dict[str, Any], row: int) -> Figure:
    if kind == "Atlas":
        from headscope.report.figures import of_atlas

        return of_atlas(thing, **given)
    if kind == "DataArray":
        return of_scores(thing, **given)
    if kind == "Patching":
        notes = (f"1 is the whole difference between clean ({thing.clean:.4g}) and corrupted ({thing.corrupt:.4g}).",)
        return of_scores(thing.effect, **given, notes=notes)
    if kind == "Verdict":
        from headscope.verify.show import curve

        return curve(thing)
    if kind == "Route":
        from headscope.routes.draw import figure as of_route

        return of_route(thing)
    if kind == "Lens":
        from headscope.routes.logit_lens import figure as of_lens

        return of_lens(thing, **given)
    if kind == "Run":
        from headscope.trace.show import pattern

        if "head" not in given:
            raise UsageError("A figure of a Run shows a head's attention; name it, such as head='L5H3'.")
        return pattern(thing, **given, row=row)
    return _of_model(thing, **given) if kind == "Model" else cast(Figure, thing)


def _of_model(model: Model, prompt: Any = None, head: Component | str | None = None, **given: Any) -> Figure:
    if prompt is None:
        raise UsageError(
            "A figure of a Model shows a head's attention on a prompt, or the prompt's logit lens; give prompt, and for "
            "attention head, such as L5H3."
        )
    wrong = {"target", "by"} if head is not None else {"sink", "query", "key"}
    if extra := given.keys() & wrong:
        what = "a head's attention" if head is not None else "a logit lens (head was not given)"
        raise UsageError(f"A figure of {what} takes no {' or '.join(sorted(extra))}.")
    return _lens(model, prompt, **given) if head is None else _pattern(model, prompt, head, **given)


def _lens(model: Model, prompt: Any, target: str | int | None = None, **given: Any) -> Figure:
    from headscope.routes.logit_lens import figure as of_lens
    from headscope.routes.logit_lens import lens

    return of_lens(lens(model, prompt, target=target), **given)


def _pattern(model: Model, prompt: Any, head: Component | str, **given: Any) -> Figure:
    import torch

    from headscope.trace import trace
    from headscope.trace.show import pattern

    chosen = head if isinstance(head, Component) else Component.parse(head)
    if chosen not in model.heads():
        a = model.anatomy
        raise UsageError(f"{chosen} is no head of {model.name}, which has {a.n_layers} layers of {a.n_heads} heads, counted from 0.")  # fmt: skip
    with torch.no_grad():
        run = trace(model, prompt, ["pattern"], layers=[chosen.layer], logits=None)
    return pattern(run, chosen, model=model, prompt=prompt if isinstance(prompt, str) else None, **given)


def _a(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
