"""Tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headscope.report.numbers import plain, signed

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr
    from rich.table import Table

    from headscope.verify import Verdict

_COLOURS = {"supported": "green", "not supported": "red"}


def score_table(scores: xr.DataArray, k: int = 10) -> Table:
    """The top `k` components."""
    from rich.table import Table

    from headscope.core.scores import top

    table = Table()
    table.add_column("component")
    table.add_column("score", justify="right")
    for component in top(scores, k):
        table.add_row(str(component), f"{float(scores[component.layer, component.index]):.4f}")
    return table


def verdict_table(verdicts: list[Verdict]) -> Table:
    """One row a role."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="Roles, tested against matched random heads", title_justify="left")
    for name in ("role", "verdict"):
        table.add_column(name, no_wrap=True)
    table.add_column("heads")
    for name in ("effect", "random", "p"):
        table.add_column(name, justify="right")
    for v in verdicts:
        colour = _COLOURS.get(v.verdict, "yellow")
        table.add_row(
            escape(v.role), f"[{colour}]{v.verdict}[/]", " ".join(v.components) or escape(v.reason),
            signed(v.effect), f"{signed(v.control_mean)} ± {plain(v.control_sd)}", plain(v.p, ".2g"),
        )  # fmt: skip
    return table


def change_table(changes: pd.DataFrame) -> Table:
    """Rows of `compare`."""
    from rich.table import Table

    table = Table(title="Heads that changed, edited ones first", title_justify="left")
    for name in ("component", "own weights", "changed most in"):
        table.add_column(name, no_wrap=name == "component", overflow="fold")
    for name in ("before", "after", "change (sd)"):
        table.add_column(name, justify="right")
    for row in changes.itertuples():
        weights = (
            f"changed by {row.weights:.0%}" if row.edited else "the same" if row.weights == 0 else "nearly the same"
        )
        table.add_row(
            row.component, weights, row.method, f"{row.before:.4f}", f"{row.after:.4f}", f"{row.change:.2f}"
        )  # fmt: skip
    return table


def neuron_changes(changes: pd.DataFrame) -> Table:
    """Rows of `compare` about neurons."""
    from rich.table import Table

    table = Table(title="Neurons that changed most", title_justify="left")
    for name in ("component", "changed most in"):
        table.add_column(name, no_wrap=name == "component", overflow="fold")
    for name in ("before", "after", "change (sd)"):
        table.add_column(name, justify="right")
    for row in changes.itertuples():
        table.add_row(row.component, row.method, f"{row.before:.4f}", f"{row.after:.4f}", f"{row.change:.2f}")
    return table


def role_changes(roles: list[dict[str, str | None]]) -> list[str]:
    """A line for every role that was tested in either atlas."""
    return [
        f"role {row['role']}: {row['before'] or 'not tested'}"
        + (" in both" if row["before"] == row["after"] else f" → {row['after'] or 'not tested'}")
        for row in roles
    ]
