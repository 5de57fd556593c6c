"""A route as a figure."""

from __future__ import annotations

from headscope.draw import Figure
from headscope.draw.marks import visible
from headscope.routes.route import Route


def figure(route: Route) -> Figure:
    """The graph, with what is needed to read it."""
    goal = f"Route to “{visible(route.target)}”"
    if route.foil is not None:
        goal += f" rather than “{visible(route.foil)}”"
    best = ", ".join(f"{head} {weight:.2f}" for head, weight in list(route.heads().items())[:8]) or "none"
    provenance = {
        "model": route.model, "fingerprint": route.fingerprint, "method": "information-flow routes",
        "prompt": route.prompt, "position": route.position, "target": route.target, "foil": route.foil,
        "logit": round(route.logit, 3), "threshold": route.threshold, "biases": route.biases,
        "headscope": route.version,
    }  # fmt: skip
    notes = (
        f"Heads by weight: {best}.",
        f"Each column is a token, each row a layer. Edges with a share of at most {route.threshold:g} are cut. Heads that "
        "look from the same state at the same token are one edge, as wide as all of them.",
        "Shares say what a state is made of, not what would happen without it: headscope routes --prove tests that.",
    )
    return Figure("route", goal, route.document(), provenance, notes)
