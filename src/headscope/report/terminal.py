"""Tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xarray as xr
    from rich.table import Table

    from headscope.verify import Verdict

_COLOURS = {"supported": "green", "not supported": "red"}


def score_table(scores: xr.DataArray, k: int = 10) -> Table:
    """The top `k` components."""
    from rich.table import Table

    from headscope.core.scores import top

    table = Table(title=f"{scores.attrs.get('method', 'scores')} · {scores.attrs.get('higher_means', '')}")
    table.add_column("component")
    table.add_column("score", justify="right")
    for component in top(scores, k):
        table.add_row(str(component), f"{float(scores[component.layer, component.index]):.4f}")
    return table


def verdict_table(verdicts: list[Verdict]) -> Table:
    """One row a role."""
    from rich.table import Table

    table = Table(title="Roles, tested against matched random heads")
    for name in ("role", "verdict", "heads"):
        table.add_column(name)
    for name in ("effect", "random", "p"):
        table.add_column(name, justify="right")
    for v in verdicts:
        colour = _COLOURS.get(v.verdict, "yellow")
        table.add_row(
            v.role, f"[{colour}]{v.verdict}[/]", " ".join(v.components) or v.reason,
            f"{v.effect:+.3f}", f"{v.control_mean:+.3f}", f"{v.p:.2g}",
        )  # fmt: skip
    return table
