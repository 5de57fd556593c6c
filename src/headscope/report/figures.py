"""Figures of an atlas: all its methods, one of them, or the proof of a role."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headscope.core.errors import UsageError, nearest
from headscope.draw import Figure, version
from headscope.draw.scores import figure as of_scores
from headscope.draw.scores import labels, meaning, panels_of

if TYPE_CHECKING:
    from headscope.atlas import Atlas


def of_atlas(atlas: Atlas, *, method: str | None = None, role: str | None = None, limit: float | None = None) -> Figure:
    """All methods side by side, one of them, or the dose curve of a role. Raises UsageError for one it does not have."""
    about = {"model": atlas.model["name"], "fingerprint": atlas.model["fingerprint"]}
    if method is not None and role is not None:
        raise UsageError("A figure shows a method or a role; give one of the two.")
    if role is not None:
        from headscope.verify.show import curve

        tested = {v.role: v for v in atlas.verdicts}
        if role not in tested:
            raise UsageError(f"The atlas has no role {role!r}.{nearest(role, tested)}")
        return curve(tested[role], about={**about, "seed": atlas.seed})
    if method is not None:
        if method not in atlas.scores:
            raise UsageError(f"The atlas has no scores of {method!r}.{nearest(method, atlas.scores)}")
        return of_scores(atlas.scores[method], limit=limit)
    return _all_methods(atlas, about, limit)


def _all_methods(atlas: Atlas, about: dict[str, Any], limit: float | None) -> Figure:
    grids = {name: s for name, s in atlas.scores.items() if tuple(map(str, s.dims)) == ("layer", "head")}
    if not grids:
        raise UsageError("The atlas has no method that scores heads; give method, one of those it has."
                         + nearest("", atlas.scores))  # fmt: skip
    first = next(iter(grids.values()))
    same = {name: s for name, s in grids.items() if s.shape == first.shape}
    data = {
        "axes": {"rows": "layer", "columns": "head"}, "rows": labels(first, "layer"), "columns": labels(first, "head"),
        "upward": True, "join": "", "scale": "diverging", "missing": "not measured",
        "panels": [
            panel
            for name, scores in same.items()
            for panel in panels_of(scores, limit, name, meaning(scores))
        ],
    }  # fmt: skip
    notes = (
        "Each panel has a scale of its own: blue is positive, red negative, no colour 0. The line below a name says what "
        "a higher score means. A score alone is not a role: only an intervention shows that.",
    )
    about = {**about, "methods": ", ".join(same), "seed": atlas.seed, "headscope": version()}
    return Figure("matrix", f"Heads of {atlas.model['name']}", data, about, notes)
