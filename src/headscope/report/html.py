"""One HTML file that opens anywhere: no network, no scripts, light and dark, every token escaped."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Any

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
td.n{text-align:right;font-variant-numeric:tabular-nums}.scroll{overflow-x:auto}
.v{border-radius:4px;padding:.1rem .45rem;border:1px solid var(--line);white-space:nowrap}.supported{background:rgba(var(--on),.25)}
.not-supported{background:rgba(var(--off),.25)}.grids{display:flex;flex-wrap:wrap;gap:1.6rem}figure{margin:0}
figcaption{font-size:.85rem;color:var(--soft);margin-bottom:.3rem}svg text{fill:var(--soft);font:10px system-ui,sans-serif}
svg .c{fill:rgb(var(--on))}svg .x{fill:rgb(var(--off))}svg .f{fill:none;stroke:var(--line)}
.grids figure{max-width:100%}.s figcaption{min-height:6.3em}td:last-child{min-width:15rem}.grids .s{width:205px}.l{fill:none;stroke-width:1.2}svg .l.c,svg .l.x{fill:none}.l.c{stroke:rgb(var(--on))}
.l.x{stroke:rgb(var(--off))}
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
        f'<div class="grids">{"".join(_grid(i, s) for i, s in atlas.scores.items() if s.ndim == 2)}</div>',
        "<h2>Top heads at work</h2><p>Attention of each method's top head on a real prompt: rows look at columns.</p>",
        f'<div class="grids">{"".join(map(_pattern, atlas.examples))}</div>',
        f"<h2>Not run</h2><ul>{skipped}</ul>" if skipped else "",
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
        f'content="{policy}"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>headscope: {name}</title><style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
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
            f'<td class="n">{signed(v.side_effect)}</td><td>{_dose(v)}</td>'
            f"<td>{escape(', '.join(v.components))}<br><small>{escape(v.reason)}</small></td></tr>"
        )  # fmt: skip
    head = (
        "<th>Role</th><th>Verdict</th><th>Effect</th><th>Random heads</th><th>Difference, 95 %</th><th>p (Holm)</th>"
        "<th>Plain text</th><th>Dose</th><th>Heads and reason</th>"
    )
    return (
        "<p>Effect: change of the metric on held-out prompts when the heads' output is replaced by 0 or its mean. Random "
        "heads: the same, for sets matched in size and layer (mean ± sd). Plain text: change of the loss there. Dose: the "
        "top k heads (blue) against random ones (red).</p>"
        f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'
    )


def _dose(v: Verdict) -> str:
    if len(v.dose) < 2:
        return ""
    values = [0.0, *(row[key] for row in v.dose for key in ("effect", "control_mean"))]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    most = v.dose[-1]["k"]

    def curve(key: str, style: str) -> str:
        points = [(8 + 100 * row["k"] / most, 48 - 40 * (row[key] - low) / span) for row in v.dose]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dots = "".join(
            f'<circle class="{style}" r="3" cx="{x:.1f}" cy="{y:.1f}">'
            f"<title>k = {row['k']:.0f}: {signed(row[key])}</title></circle>"
            for row, (x, y) in zip(v.dose, points, strict=True)
        )
        return f'<polyline class="l {style}" points="{line}"/>{dots}'

    zero = 48 - 40 * (0 - low) / span
    return (
        f'<svg width="120" height="56" role="img" aria-label="dose curve"><line x1="4" x2="114" y1="{zero:.1f}" '
        f'y2="{zero:.1f}" stroke="var(--line)"/>{curve("control_mean", "x")}{curve("effect", "c")}</svg>'
    )


def _grid(method: str, scores: xr.DataArray) -> str:
    values = scores.values
    n_layers, n_units = values.shape
    largest = max((float(abs(v)) for v in values.flat if not math.isnan(v)), default=0.0) or 1.0
    cell = max(6, min(14, 320 // max(n_layers, n_units)))
    cells = []
    for layer in range(n_layers):
        for h in range(n_units):
            value = float(values[layer, h])
            if math.isnan(value):
                continue
            style = "c" if value >= 0 else "x"
            cells.append(
                f'<rect class="{style}" x="{24 + h * cell}" y="{(n_layers - 1 - layer) * cell}" width="{cell - 1}" '
                f'height="{cell - 1}" fill-opacity="{abs(value) / largest:.3f}"><title>L{layer}H{h}: {value:.4f}</title></rect>'
            )
    ticks = "".join(
        f'<text x="0" y="{(n_layers - 1 - layer) * cell + cell - 2}">L{layer}</text>' for layer in range(0, n_layers, 5)
    )
    width, height = 24 + n_units * cell, n_layers * cell
    meaning = escape(str(scores.attrs.get("higher_means", "")))
    return (
        f"<figure class='s'><figcaption><b>{escape(method)}</b><br>darkest = {largest:.3g}<br>{meaning}</figcaption>"
        f'<svg width="{width}" height="{height}" role="img" aria-label="{escape(method)}">{ticks}'
        f'<rect class="f" x="24" y="0" width="{n_units * cell}" height="{height}"/>{"".join(cells)}</svg></figure>'
    )


def _pattern(example: dict[str, Any]) -> str:
    tokens = [escape(token) for token in example["tokens"]]
    n, cell = len(tokens), 12
    cells = "".join(
        f'<rect class="c" x="{90 + k * cell}" y="{q * cell}" width="{cell - 1}" height="{cell - 1}" '
        f'fill-opacity="{example["pattern"][q][k]:.3f}"><title>{tokens[q]} → {tokens[k]}: '
        f"{example['pattern'][q][k]:.3f}</title></rect>"
        for q in range(n)
        for k in range(n)
        if example["pattern"][q][k] >= 0.005
    )
    labels = "".join(f'<text x="86" y="{q * cell + 9}" text-anchor="end">{tokens[q]}</text>' for q in range(n))
    foot = "".join(
        f'<text transform="translate({93 + k * cell},{n * cell + 6}) rotate(60)">{tokens[k]}</text>' for k in range(n)
    )
    caption = f"<b>{escape(example['head'])}</b>, top of {escape(example['method'])}"
    return (
        f'<figure><figcaption>{caption}</figcaption><svg width="{110 + n * cell}" height="{n * cell + 60}" role="img">'
        f'<rect class="f" x="90" y="0" width="{n * cell}" height="{n * cell}"/>{labels}{foot}{cells}</svg></figure>'
    )
