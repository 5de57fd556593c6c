"""A drawing as PNG or PDF, with matplotlib as the pen: it needs no display and no system library, and its PDF text is
text."""

from __future__ import annotations

import warnings
from itertools import groupby
from pathlib import Path
from typing import Any

from headscope.core.errors import HeadscopeError
from headscope.draw.marks import PALETTES, Box, Dot, Drawing, Line, Mark, Picture, Words, plain
from headscope.draw.svg import pixels

#: pixels of a PNG to one of the drawing
SCALE = 2
_POINT = 72 / 96  # of a CSS pixel
#: asked in this order for letters that matplotlib's own font has not, where the machine has them
_FONTS = (
    "DejaVu Sans", "Noto Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans Devanagari", "Noto Sans Arabic", "PingFang SC",
    "Hiragino Sans", "Microsoft YaHei", "Yu Gothic", "Arial Unicode MS", "WenQuanYi Zen Hei", "Noto Emoji", "Segoe UI Symbol",
)  # fmt: skip


def check_installed(ending: str) -> None:
    """Raise HeadscopeError where what a format needs is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise HeadscopeError(
            f"Writing {ending} needs matplotlib, which is not installed: pip install 'headscope[figures]'. "
            ".svg, .html and .json need nothing more."
        ) from None


def write(drawing: Drawing, path: Path, ending: str, theme: str, metadata: dict[str, str]) -> None:
    """Draw into a file. `metadata`: title, about, json, software."""
    check_installed(ending)
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_pdf import FigureCanvasPdf
    from matplotlib.figure import Figure
    from matplotlib.font_manager import get_font_names

    known = set(get_font_names())
    # the reader's own style file must not change what a figure looks like; 42 keeps the text as text
    settings = {**matplotlib.rcParamsDefault, "pdf.fonttype": 42, "font.family": [f for f in _FONTS if f in known]}
    settings.pop("backend", None)
    settings = {key: value for key, value in settings.items() if not key.startswith(("backend", "toolbar"))}
    settings["lines.scale_dashes"] = False  # as in an SVG: a short thick line would else be a single dash
    with warnings.catch_warnings(), matplotlib.rc_context(settings):
        warnings.filterwarnings("ignore", message=r".*[gG]lyph.*")  # a letter of no installed font is drawn as a box
        colours = PALETTES[theme]
        figure = Figure(figsize=(drawing.width / 96, drawing.height / 96), facecolor=colours["back"])
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        order = 0
        for cell, marks in groupby(drawing.marks, _is_cell):
            order += 1
            if cell:
                _cells(axes, [mark for mark in marks if isinstance(mark, Box)], colours, order)
                continue
            for mark in marks:
                order += 1
                _draw(axes, mark, colours, order)
        axes.set_xlim(0, drawing.width)
        axes.set_ylim(drawing.height, 0)
        if ending == ".png":
            FigureCanvasAgg(figure)
            kept: dict[str, Any] = {
                "Title": metadata["title"], "Description": metadata["about"], "Software": metadata["software"],
                "headscope": metadata["json"],
            }  # fmt: skip
            figure.savefig(path, format="png", dpi=96 * SCALE, metadata=kept)
        else:
            FigureCanvasPdf(figure)
            kept = {
                "Title": metadata["title"], "Subject": metadata["about"], "Keywords": metadata["json"],
                "Creator": metadata["software"], "CreationDate": None,
            }  # fmt: skip
            figure.savefig(path, format="pdf", metadata=kept)


def _is_cell(mark: Mark) -> bool:
    return isinstance(mark, Box) and mark.fill is not None and mark.stroke is None


def _cells(axes: Any, boxes: list[Box], colours: dict[str, str], order: int) -> None:
    """Rectangles without an edge, thousands at once."""
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgba

    corners = [
        [(b.x, b.y), (b.x + b.width, b.y), (b.x + b.width, b.y + b.height), (b.x, b.y + b.height)] for b in boxes
    ]
    faces = [to_rgba(colours[str(b.fill)], b.opacity) for b in boxes]
    axes.add_collection(PolyCollection(corners, facecolors=faces, edgecolors="none", linewidths=0, zorder=order))


def _draw(axes: Any, mark: Mark, colours: dict[str, str], order: int) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Circle, Rectangle

    if isinstance(mark, Words):
        axes.text(
            mark.x, mark.y, plain(mark.text), fontsize=mark.size * _POINT, color=colours[mark.fill], rotation=-mark.turn,
            rotation_mode="anchor", va="baseline", ha={"start": "left", "middle": "center", "end": "right"}[mark.anchor],
            weight="bold" if mark.bold else "normal", zorder=order, parse_math=False,
        )  # fmt: skip
    elif isinstance(mark, Picture):
        import numpy as np

        image = np.frombuffer(b"".join(pixels(mark, colours)), np.uint8).reshape(len(mark.values), -1, 4)
        extent = (mark.x, mark.x + mark.width, mark.y + mark.height, mark.y)
        axes.imshow(image, extent=extent, interpolation="nearest", aspect="auto", zorder=order)
    elif isinstance(mark, Line):
        x, y = zip(*mark.points, strict=True)
        axes.add_line(
            Line2D(
                x, y, color=colours[mark.stroke], alpha=mark.opacity, linewidth=mark.width * _POINT, zorder=order,
                linestyle=(0, (4 * _POINT, 3 * _POINT)) if mark.dashed else "-", solid_capstyle="butt",
            )
        )  # fmt: skip
    else:
        edge = colours[mark.stroke] if isinstance(mark, Box) and mark.stroke else "none"
        face = "none" if mark.fill is None else (colours[mark.fill], mark.opacity)
        style: dict[str, Any] = {
            "facecolor": face,
            "edgecolor": edge,
            "linewidth": _POINT if edge != "none" else 0,
            "zorder": order,
        }
        if isinstance(mark, Dot):
            axes.add_patch(Circle((mark.x, mark.y), mark.radius, **style))
        else:
            axes.add_patch(Rectangle((mark.x, mark.y), mark.width, mark.height, **style))
