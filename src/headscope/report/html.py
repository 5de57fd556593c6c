"""The report of an atlas: the page's own views in one HTML file that opens anywhere."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from headscope.core.scores import top
from headscope.draw.marks import plain as text
from headscope.page import one_file
from headscope.page.wire import matrix
from headscope.report import answers
from headscope.report.numbers import plain, signed

if TYPE_CHECKING:
    from headscope.atlas import Atlas
    from headscope.verify import Verdict

TOP = 5


def render(atlas: Atlas) -> str:
    """The whole file: every answer that the views of an atlas and of a head ask for, and the main things in plain HTML."""
    name = str(atlas.model["name"])
    alike = answers.alike(atlas)
    documents: dict[str, Any] = {
        "/api/state": {"model": name, "atlas": True},
        "/api/atlas": answers.summary(atlas),
        **{f"/api/head/{layer}/{index}": about for layer, index, about in answers.heads(atlas)},
        **{
            f"/api/agreement?x={x}&y={y}": answers.agreement(atlas, x, y) for x, others in alike.items() for y in others
        },
    }
    matrices = {f"/api/scores/{method}": matrix(atlas.scores[method].values, "float32") for method in alike}
    for row in atlas.examples:
        values, about = answers.example(atlas, row["method"])
        matrices[f"/api/example/{row['method']}"] = matrix(values, "float32", **about)
    return one_file(text(f"headscope: {name}"), documents, matrices, _plain(atlas))


def _plain(atlas: Atlas) -> str:
    """Verdicts, and the heads or neurons that each method puts first, as HTML without scripts, everything from outside escaped."""
    rows = "".join(map(_verdict, atlas.verdicts))
    columns = ("Role", "Verdict", "Effect", "Random heads", "Difference, 95 %", "p", "Heads and reason")
    best = "".join(
        f"<li>{escape(name)}: {', '.join(f'{c} {plain(float(scores[c.layer, c.index]))}' for c in top(scores, TOP))}</li>"
        for name, scores in ((name, atlas.scores[name]) for name in answers.alike(atlas))
    )
    skipped = "".join(f"<li>{_escaped(why)}</li>" for why in atlas.skipped.values())
    return (
        f"<main><h1>Heads of {_escaped(atlas.model['name'])}</h1>"
        "<p>These are the main results. With JavaScript, this file shows every head; it needs no network.</p>"
        "<h2>Roles, tested by intervention</h2>"
        + (
            f'<div class="scroll"><table class="roles"><tr>{"".join(f"<th>{c}</th>" for c in columns)}</tr>{rows}</table></div>'
            if rows
            else "<p>No role was tested in this scan.</p>"
        )
        + f"<h2>The highest by each method</h2><p>A score alone is not a role.</p><ul>{best}</ul>"
        + (f"<h2>Not run</h2><ul>{skipped}</ul>" if skipped else "")
        + "</main>"
    )


def _verdict(v: Verdict) -> str:
    return (
        f"<tr><td><b>{_escaped(v.role)}</b><br>{_escaped(v.claim)}</td><td class='n'>{_escaped(v.verdict)}</td>"
        f"<td class='n'>{signed(v.effect)}<br>{_escaped(v.metric)}, {_escaped(v.intervention)}</td>"
        f"<td class='n'>{signed(v.control_mean)} ± {plain(v.control_sd)}</td>"
        f"<td class='n'>{signed(v.diff_ci_low)} … {signed(v.diff_ci_high)}</td><td class='n'>{plain(v.p, '.2g')}</td>"
        f"<td class='heads'>{_escaped(', '.join(v.components))}<br>{_escaped(v.reason)}</td></tr>"
    )


def _escaped(value: object) -> str:
    return escape(text(str(value)))
