"""One HTML file that opens anywhere: no network, no scripts, light and dark, every token escaped."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Any

from headscope.draw import curves, matrix
from headscope.draw.marks import visible
from headscope.draw.scores import figure as of_scores
from headscope.draw.scores import meaning, panels_of
from headscope.draw.svg import STYLE, svg
from headscope.trace.show import of_pattern
from headscope.verify.show import curve

if TYPE_CHECKING:
    import xarray as xr

    from headscope.atlas import Atlas
    from headscope.verify import Verdict

_STYLE = """
:root{--bg:#fff;--ink:#1d2430;--soft:#5d6878;--line:#d9dee6;--on:37,99,195;--off:190,60,60}
@media(prefers-color-scheme:dark){:root{--bg:#14181f;--ink:#e6eaf0;--soft:#98a3b3;--line:#323a47;--on:110,168,255;--off:255,130,120}}
body{background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,sans-serif;max-width:1180px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.15rem;margin:2rem 0 .6rem}p,small{color:var(--soft)}
table{border-collapse:collapse;width:100%}td,th{padding:.35rem .6rem;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums}.scroll{overflow-x:auto}td:last-child{min-width:15rem}
.v{border-radius:4px;padding:.1rem .45rem;border:1px solid var(--line);white-space:nowrap}.supported{background:rgba(var(--on),.25)}
.not-supported{background:rgba(var(--off),.25)}.grids{display:flex;flex-wrap:wrap;gap:1.6rem}figure{margin:0;max-width:100%}
td svg{width:230px;height:auto}
"""


def render(atlas: Atlas) -> str:
    """The whole page."""
    facts = atlas.model["anatomy"]
    name = escape(str(atlas.model["name"]))
    size = f"{facts['n_layers']} layers × {facts['n_heads']} heads, {facts['n_kv_heads']} kv heads, d_model {facts['d_model']}"
    skipped = "".join(f"<li>{escape(why)}</li>" for why in atlas.skipped.values())
    parts = [
        f"<h1>Heads of {name}</h1><p>{size} · fingerprint {escape(atlas.model['fingerprint'])} · seed {atlas.seed}</p>",
        "<h2>Roles, tested</h2>",
        _verdicts(atlas.verdicts),
        "<h2>Scores</h2><p>Columns are heads, rows are layers, the last one at the top. Hover for values. A score alone is not a "
        "role: only the table above was tested by intervention.</p>",
        f'<div class="headscope grids">{"".join(_grid(i, s) for i, s in atlas.scores.items() if s.ndim == 2)}</div>',
        "<h2>Top heads at work</h2><p>Attention of each method's top head on a real prompt: rows look at columns.</p>",
        f'<div class="headscope grids">{"".join(map(_pattern, atlas.examples))}</div>',
        f"<h2>Not run</h2><ul>{skipped}</ul>" if skipped else "",
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
        f'content="{policy}"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>headscope: {name}</title><style>{_STYLE}{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def plain(value: float, style: str = ".3f") -> str:
    """A number, or a dash where nothing was measured."""
    return "–" if math.isnan(value) else format(value, style)


def signed(value: float) -> str:
    """A change."""
    return plain(value, "+.3f")


def _verdicts(verdicts: list[Verdict]) -> str:
    if not verdicts:
        return "<p>No role was tested in this scan.</p>"
    rows = []
    for v in verdicts:
        kind = "not-supported" if v.verdict == "not supported" else v.verdict.split()[0]
        rows.append(
            f'<tr><td><b>{escape(v.role)}</b><br><small>{escape(v.claim)}</small></td>'
            f'<td><span class="v {kind}">{escape(v.verdict)}</span></td>'
            f'<td class="n">{signed(v.effect)}<br><small>{escape(v.metric)}, {escape(v.intervention)}</small></td>'
            f'<td class="n">{signed(v.control_mean)} ± {plain(v.control_sd)}</td>'
            f'<td class="n">{signed(v.diff_ci_low)} … {signed(v.diff_ci_high)}</td><td class="n">{plain(v.p, ".2g")}</td>'
            f'<td class="n">{signed(v.side_effect)}</td><td class="headscope">{_dose(v)}</td>'
            f"<td>{escape(', '.join(v.components))}<br><small>{escape(v.reason)}</small></td></tr>"
        )  # fmt: skip
    head = (
        "<th>Role</th><th>Verdict</th><th>Effect</th><th>Random heads</th><th>Difference, 95 %</th><th>p (Holm)</th>"
        "<th>Plain text</th><th>Dose</th><th>Heads and reason</th>"
    )
    return (
        "<p>Effect: change of the metric on held-out prompts when the heads' output is replaced by 0 or its mean. Random "
        "heads: the same, for sets matched in size and layer (mean ± sd). Plain text: change of the loss there. Dose: the "
        "top k heads (blue) against random ones (grey); the small dots are the random sets.</p>"
        f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'
    )


def _dose(v: Verdict) -> str:
    if len(v.dose) < 2:
        return ""
    return svg(curves.draw(curve(v).data), f"dose curve of {v.role}", theme=None)


def _grid(method: str, scores: xr.DataArray) -> str:
    data = {**of_scores(scores).data, "panels": panels_of(scores, title=method, note=meaning(scores))}
    return f"<figure>{svg(matrix.draw(data), method, theme=None)}</figure>"


def _pattern(example: dict[str, Any]) -> str:
    found = of_pattern(example["pattern"], [visible(token) for token in example["tokens"]], example["head"], {})
    title = f"Attention of {example['head']}, top of {example['method']}"
    data = {**found.data, "panels": [{**panel, "title": title} for panel in found.data["panels"]]}
    return f"<figure>{svg(matrix.draw(data), title, theme=None)}</figure>"
