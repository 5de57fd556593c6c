"""Figures of an atlas: all its methods, one of them, one against another, or the proof of a role."""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING, Any

import numpy as np

from headscope.core.errors import UsageError, nearest
from headscope.core.scores import agree
from headscope.draw import Figure, version
from headscope.draw.marks import visible
from headscope.draw.scores import figure as of_scores
from headscope.draw.scores import labels, meaning, panels_of
from headscope.report.answers import example as example_of
from headscope.report.numbers import plain
from headscope.trace.show import of_pattern

if TYPE_CHECKING:
    from headscope.atlas import Atlas
    from headscope.verify import Verdict


#: more dots than this cover one another
_MOST_DOTS = 5000


def of_atlas(
    atlas: Atlas,
    *,
    method: str | None = None,
    against: str | None = None,
    role: str | None = None,
    example: bool = False,
    limit: float | None = None,
    **looked: Any,
) -> Figure:
    """All methods side by side, one of them, one `against` another, a method's `example` (its top head at work), or the
    dose curve of a role (of its last test, where there are several). `looked`: how attention is looked at, see `pattern`.
    Raises UsageError for one it does not have.
    """
    if example:
        if method is None or role is not None or against is not None:
            raise UsageError("example shows the top head of a method at work; give method, and no role or against.")
        return _example(atlas, method, limit, **looked)
    if looked:
        raise UsageError(f"{' and '.join(sorted(looked))} are of attention; an atlas has that of a method's example.")
    if method is not None and role is not None:
        raise UsageError("A figure shows a method or a role; give one of the two.")
    if against is not None and (method is None or limit is not None):
        raise UsageError("against is a second method beside method, and takes no limit.")
    if role is not None:
        tested = {v.role: v for v in atlas.verdicts}
        if role not in tested:
            raise UsageError(f"The atlas has no role {role!r}.{nearest(role, tested)}")
        return of_verdict(atlas, tested[role])
    if method is None:
        return _all_methods(atlas, limit)
    for name in (method, against):
        if name is not None and name not in atlas.scores:
            raise UsageError(f"The atlas has no scores of {name!r}.{nearest(name, atlas.scores)}")
    return of_scores(atlas.scores[method], limit=limit) if against is None else _compared(atlas, method, against)


def of_verdict(atlas: Atlas, verdict: Verdict) -> Figure:
    """The dose curve of one of its verdicts."""
    from headscope.verify.show import curve

    return curve(verdict, about={**_about(atlas), "seed": atlas.seed})


def _example(atlas: Atlas, method: str, limit: float | None, **looked: Any) -> Figure:
    """The attention of a method's top head on the prompt of the scan."""
    values, found = example_of(atlas, method)
    about = {
        **_about(atlas), "method": method, "head": found["head"], "prompt": "".join(found["tokens"]), "seed": atlas.seed,
    }  # fmt: skip
    return of_pattern(values.tolist(), [visible(t) for t in found["tokens"]], found["head"], about, limit, **looked)


def _about(atlas: Atlas) -> dict[str, Any]:
    return {"model": atlas.model["name"], "fingerprint": atlas.model["fingerprint"]}


def _compared(atlas: Atlas, x: str, y: str) -> Figure:
    """A dot for each component that both methods score."""
    xs, ys = atlas.scores[x], atlas.scores[y]
    agreement = agree(xs, ys)
    if xs.ndim != 2:
        raise UsageError(f"{x} scores by {', '.join(map(str, xs.dims))}; only scores of components compare.")
    if xs.size > _MOST_DOTS:
        raise UsageError(
            f"A scatter has room for {_MOST_DOTS:,} components, and {x} scores {xs.size:,}; hs.agree compares them by numbers."
        )
    rows, columns = labels(xs, str(xs.dims[0])), labels(xs, str(xs.dims[1]))
    both = [(i, j) for i, j in np.ndindex(*xs.shape) if not np.isnan(xs.values[i, j] + ys.values[i, j])]
    points = {
        "name": [rows[i] + columns[j] for i, j in both],
        "x": [float(xs.values[at]) for at in both], "y": [float(ys.values[at]) for at in both],
    }  # fmt: skip
    rho = agreement["spearman"]
    notes = (
        f"Rank correlation (Spearman) {plain(rho, '.2f')} over {agreement['n']:,}; of the top 10 of each, "
        f"{plain(10 * agreement['overlap_top'], '.0f')} are shared.",
        *(f"{name}: {meaning(scores)}." for name, scores in ((x, xs), (y, ys)) if meaning(scores)),
    )
    about = {
        **_about(atlas), "method": x, "against": y, "spearman": None if isnan(rho) else round(rho, 4), "seed": atlas.seed,
        "headscope": version(),
    }  # fmt: skip
    return Figure("scatter", f"{x} against {y}", {"x": x, "y": y, "points": points}, about, notes)


def _all_methods(atlas: Atlas, limit: float | None) -> Figure:
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
    notes: tuple[str, ...] = (
        "Each panel has a scale of its own: blue is positive, red negative, no colour 0. The line below a name says what "
        "a higher score means. A score alone is not a role: only an intervention shows that.",
    )
    if others := [name for name in atlas.scores if name not in same]:
        notes = (*notes, f"Not shown: {', '.join(others)}; each is a figure of its own (method).")
    about = {**_about(atlas), "methods": ", ".join(same), "seed": atlas.seed, "headscope": version()}
    return Figure("matrix", f"Heads of {atlas.model['name']}", data, about, notes)
