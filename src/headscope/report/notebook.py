"""What a notebook shows: an atlas as its verdicts and grids, and, after `%load_ext headscope`, scores as figures."""

from __future__ import annotations

import secrets
from html import escape
from typing import TYPE_CHECKING, Any

from headscope.draw.marks import plain
from headscope.draw.scores import figure as of_scores
from headscope.draw.scores import is_ours
from headscope.draw.svg import STYLE

if TYPE_CHECKING:
    import xarray as xr

    from headscope.atlas import Atlas


def atlas_html(atlas: Atlas) -> str:
    """The roles with their verdicts, a grid for every method that scores heads and a density for one that scores neurons;
    `report.html` in the atlas's folder has more.
    """
    from headscope.core.errors import UsageError
    from headscope.report.figures import of_atlas
    from headscope.report.numbers import signed

    rows = "".join(
        f"<tr><td>{escape(v.role)}</td><td>{escape(v.verdict)}</td><td>{signed(v.effect)}</td>"
        f"<td>{signed(v.control_mean)}</td><td>{escape(' '.join(v.components) or v.reason)}</td></tr>"
        for v in atlas.verdicts
    )
    table = (
        f"<table><tr><th>role</th><th>verdict</th><th>effect</th><th>random heads</th><th>heads</th></tr>{rows}</table>"
        if rows
        else "<small>No role was tested.</small>"
    )
    neurons = [name for name, scores in atlas.scores.items() if scores.dims == ("layer", "neuron")]
    shown = []
    for method in [None, *neurons]:
        try:
            shown.append(of_atlas(atlas, method=method)._repr_html_())
        except UsageError as error:
            if method is not None or not neurons:  # an atlas of neurons alone has no grids
                shown.append(f"<small>{escape(str(error))}</small>")
    return (
        f'<div class="headscope" id="headscope-{secrets.token_hex(6)}"><style>{STYLE}</style>'
        f"<b>Atlas of {escape(plain(str(atlas.model['name'])))}</b>{table}{''.join(shown)}</div>"
    )


def scores_html(scores: xr.DataArray) -> str:
    """Our scores as a figure; any other array as xarray shows it."""
    from headscope.core.errors import UsageError

    if is_ours(scores):
        try:
            return of_scores(scores)._repr_html_()
        except UsageError:  # of dims that no figure has
            pass
    return scores._repr_html_()


def load(shell: Any) -> None:
    """Let arrays that are our scores show themselves as figures in this session."""
    import xarray as xr

    shell.display_formatter.formatters["text/html"].for_type(xr.DataArray, scores_html)


def unload(shell: Any) -> None:
    """Undo `load`."""
    import xarray as xr

    shell.display_formatter.formatters["text/html"].pop(xr.DataArray, None)
