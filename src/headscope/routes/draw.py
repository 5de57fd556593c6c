"""A route as a drawing: tokens from left to right, layers from the bottom up; no scripts, every token escaped."""

from __future__ import annotations

from html import escape

from headscope.routes.route import Edge, Route

_STYLE = """
.route{--bg:#fff;--ink:#1d2430;--soft:#5d6878;--line:#d9dee6;--up:#2563c3;--down:#be3c3c;background:var(--bg);color:var(--ink);
font:14px/1.5 system-ui,sans-serif;overflow-x:auto;padding:.5rem}
@media(prefers-color-scheme:dark){.route{--bg:#14181f;--ink:#e6eaf0;--soft:#98a3b3;--line:#323a47;--up:#6ea8ff;--down:#ff8278}}
.route text{fill:var(--soft);font:11px system-ui,sans-serif}.route .u{stroke:var(--up);fill:none}.route .d{stroke:var(--down);fill:none}
.route .r{stroke:var(--soft);fill:none}.route .n{fill:var(--ink)}.route .m{fill:var(--bg);stroke:var(--ink)}
.route .b{fill:var(--soft)}.route .s{fill:var(--up)}.route p{margin:.2rem 0;color:var(--soft)}.route p b{color:var(--ink)}
"""
_COLUMN, _ROW, _LEFT, _TOP = 46, 26, 44, 26


def shown(token: str) -> str:
    """A token with its white space made visible, escaped."""
    return escape(token.replace(" ", "·").replace("\n", "↵").replace("\t", "⇥")) or "∅"


def svg(route: Route) -> str:
    """The drawing alone."""
    columns = sorted({node.position for node in route.nodes})
    x_of = {p: _LEFT + i * _COLUMN + _COLUMN // 2 for i, p in enumerate(columns)}
    layers = max((node.layer for node in route.nodes if node.layer is not None), default=0) + 1
    bottom = _TOP + layers * _ROW
    lift = {"embed": 0.0, "mid": 0.5, "mlp": 0.75, "bias": 0.25, "post": 1.0}

    def place(name: str) -> tuple[float, float]:
        node = nodes[name]
        level = 0.0 if node.layer is None else node.layer + lift[node.kind]
        aside = 9 if node.kind == "mlp" else -9 if node.kind == "bias" else 0
        return x_of[node.position] + aside, bottom - level * _ROW

    nodes = {node.id: node for node in route.nodes}
    most = max((abs(edge.signed) for edge in route.edges if edge.kind != "residual"), default=0.0) or 1.0
    lines = "".join(_line(edge, place(edge.source), place(edge.target), most) for edge in route.edges)
    dots = []
    for node in route.nodes:
        x, y = place(node.id)
        hint = f"<title>{escape(node.id)} {shown(node.token)}</title>"
        if node.kind == "mlp":
            dots.append(f'<rect class="m" x="{x - 3}" y="{y - 3:.1f}" width="6" height="6">{hint}</rect>')
        else:
            style = "s" if node.id == route.start else "b" if node.kind == "bias" else "n"
            dots.append(
                f'<circle class="{style}" cx="{x}" cy="{y:.1f}" r="{4 if style == "s" else 2.2}">{hint}</circle>'
            )
    labels = "".join(
        f'<text transform="translate({x_of[p] + 3},{bottom + 12}) rotate(45)">{shown(route.tokens[p])}</text>'
        for p in columns
    )
    ticks = "".join(f'<text x="2" y="{bottom - (i + 1) * _ROW + 4}">L{i}</text>' for i in range(layers))
    width, height = _LEFT + len(columns) * _COLUMN + 60, bottom + 90
    goal = escape(_goal(route))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="route" width="{width}" height="{height}" role="img" '
        f'aria-label="{goal}"><style>{_STYLE}</style>{ticks}{labels}{lines}{"".join(dots)}</svg>'
    )


def _line(edge: Edge, source: tuple[float, float], target: tuple[float, float], most: float) -> str:
    style = "r" if edge.kind in ("residual", "input", "bias") else "u" if edge.signed >= 0 else "d"
    strong = 0.15 + 0.85 * min(1.0, edge.weight / 0.5)
    thick = 1.0 if style == "r" else 1.0 + 2.5 * min(1.0, abs(edge.signed) / most)
    what = edge.component or edge.kind
    hint = f"{what}: {edge.source} → {edge.target}, weight {edge.weight:.3f}, target − foil {edge.signed:+.3f}"
    (x1, y1), (x2, y2) = source, target
    return (
        f'<line class="{style}" x1="{x1}" y1="{y1:.1f}" x2="{x2}" y2="{y2:.1f}" stroke-width="{thick:.1f}" '
        f'stroke-opacity="{strong:.2f}"><title>{escape(hint)}</title></line>'
    )


def _goal(route: Route) -> str:
    goal = f"Route to “{route.target}”"
    return goal if route.foil is None else f"{goal} rather than “{route.foil}”"


def figure(route: Route) -> str:
    """The drawing with what is needed to read it, to stand in a notebook."""
    best = ", ".join(f"{head} {weight:.2f}" for head, weight in list(route.heads().items())[:8]) or "none"
    left_out = len(route.tokens) - len({node.position for node in route.nodes})
    gone = f" {left_out} tokens are not on the route and not drawn." if left_out else ""
    return (
        f'<div class="route"><style>{_STYLE}</style><p><b>{escape(_goal(route))}</b> after '
        f"“{shown(route.prompt)}”, {escape(route.model)}, logit {route.logit:+.3f}</p>{svg(route)}"
        f"<p>Heads by weight: {escape(best)}.</p><p>Each column is a token, each row a layer; dots are the stream, squares MLPs. "
        f"Darker: a larger share of the state above. Blue adds to the target{'' if route.foil is None else ' minus the foil'}, "
        f"red takes away, thicker is more; grey is the stream itself. Hover for values. Edges with a share of at most "
        f"{route.threshold:g} are cut.{gone} Weights say what a state is made of, not what would happen without it: "
        f"<code>headscope routes --prove</code> tests that.</p></div>"
    )


def page(route: Route) -> str:
    """One HTML file that opens anywhere."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
        f'content="{policy}"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(_goal(route))}</title></head><body>{figure(route)}</body></html>\n"
    )
