"""A verdict's dose curve: the chosen heads against matched random ones."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from headscope.draw import Figure, version

if TYPE_CHECKING:
    from headscope.verify.verify import Verdict


def curve(v: Verdict, *, about: dict[str, Any] | None = None) -> Figure:
    """`about`: what is known of where it comes from, such as model and fingerprint, where the verdict does not say it."""
    dose = [row for row in v.dose if math.isfinite(row["effect"] + row["control_mean"])]
    ks = [row["k"] for row in dose]
    effects = [e for e in v.control_effects if math.isfinite(e)]
    how = "set to 0" if v.intervention == "zero" else "set to their mean"
    series = [
        {"name": name, "style": style, "x": ks, "y": [row[key] for row in dose]}
        for name, style, key in (("random heads, mean", "soft", "control_mean"), ("chosen heads", "up", "effect"))
    ] if ks else []  # fmt: skip
    data = {
        "x": f"heads {how}", "y": f"change of {v.metric.replace('_', ' ')}", "series": series,
        "points": {"name": "random set", "x": [float(v.k)] * len(effects) if ks else [], "y": effects if ks else []},
    }  # fmt: skip
    own = {"model": v.model, "fingerprint": v.fingerprint, "seed": v.seed}
    provenance = {
        **(about or {}), **{name: value for name, value in own.items() if value not in ("", None)}, "role": v.role, "method": v.method, "intervention": v.intervention, "metric": v.metric,
        "heads": ", ".join(v.components), "prompts": v.n_seeds, "random sets": v.n_controls,
        "headscope": v.version or version(),
    }  # fmt: skip
    notes = (f"{v.claim}.".replace("..", "."), f"{v.verdict}: {v.reason}.")
    return Figure("curves", f"{v.role}: {v.verdict}", data, provenance, notes)
