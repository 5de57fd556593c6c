"""A drawing as SVG: real text, no scripts, nothing to load; each mark wears its light colour, so that a viewer that
knows no style sheets shows it rightly too.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterable
from html import escape
from itertools import groupby

from headscope.draw.marks import PALETTES, Box, Dot, Drawing, Line, Mark, Picture, Words, plain

FONT = "DejaVu Sans, Verdana, system-ui, sans-serif"
#: on a ground whose colour is not known, these can be seen on both
_MIDDLE = {"up": "#3f7fe0", "down": "#d9534f"}


def _variables(theme: str) -> str:
    return "".join(f"--hs-{name}:{value};" for name, value in PALETTES[theme].items())


def _selected(*hosts: str) -> str:
    return ",".join(f"{host} .headscope" for host in hosts)


# a notebook's own theme wins over that of the system: JupyterLab, VS Code, Colab and pages of docs say it in these ways
STYLE = (
    f".headscope{{{_variables('light')}}}"
    f"@media(prefers-color-scheme:dark){{.headscope{{{_variables('dark')}}}}}"
    + _selected('[data-jp-theme-light="true"]', "body.vscode-light", '[data-theme="light"]', 'html[theme="light"]')
    + f"{{{_variables('light')}}}"
    + _selected('[data-jp-theme-light="false"]', "body.vscode-dark", '[data-theme="dark"]', 'html[theme="dark"]')
    + f"{{{_variables('dark')}}}"
    + ".headscope{background:var(--hs-back);color:var(--hs-ink);font:13px/1.5 system-ui,sans-serif;margin:0;padding:.5rem;"
    "overflow-x:auto}.headscope figcaption,.headscope small{color:var(--hs-soft)}"
    # the caption begins where the drawing's text does; a wide drawing shrinks a little before it scrolls
    ".headscope figcaption{margin:0 12px;max-width:72rem}.headscope>svg{max-width:max(100%,760px);height:auto}"
    ".headscope table{border-collapse:collapse;color:inherit}.headscope th,.headscope td{padding:.2rem .6rem;"
    "text-align:left;border-bottom:1px solid var(--hs-line);background:none;vertical-align:top}"
    + "".join(
        f".headscope .hs-f-{name}{{fill:var(--hs-{name})}}.headscope .hs-s-{name}{{stroke:var(--hs-{name})}}"
        for name in PALETTES["light"]
    )
)


def svg(drawing: Drawing, label: str, *, theme: str | None = "light", metadata: str = "", desc: str = "") -> str:
    """The drawing; `theme` None leaves the colours to `STYLE`, for a drawing that stands in a page."""
    colours = PALETTES[theme or "light"]
    pen = _Pen(colours, themed=theme is None)
    ground = Box(0, 0, drawing.width, drawing.height, fill="back")
    about = "".join(
        f"<{tag}>{_text(text)}</{tag}>"
        for tag, text in (("title", label), ("desc", desc), ("metadata", metadata))
        if text
    )
    space = ' xmlns="http://www.w3.org/2000/svg"' if theme else ""  # inside a page the parser knows it
    return (
        f'<svg{space} width="{_n(drawing.width)}" height="{_n(drawing.height)}" viewBox="0 0 {_n(drawing.width)} '
        f'{_n(drawing.height)}" role="img" font-family="{FONT}">{about}{"".join(pen.all([ground, *drawing.marks]))}</svg>'
    )


def _text(text: str) -> str:
    return escape(plain(text))


def _n(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


class _Pen:
    """Writes marks. Neighbours of one colour share a group, which makes a grid a third shorter."""

    def __init__(self, colours: dict[str, str], *, themed: bool) -> None:
        self.colours, self.themed = colours, themed

    def all(self, marks: Iterable[Mark]) -> Iterable[str]:
        for key, group in groupby(marks, lambda mark: (getattr(mark, "fill", None), getattr(mark, "stroke", None))):
            yield f"<g{self._paint(*key)}>{''.join(map(self._mark, group))}</g>"

    def _paint(self, fill: str | None, stroke: str | None) -> str:
        text = f' fill="{self.colours[fill] if fill else "none"}"'
        text += f' stroke="{self.colours[stroke]}"' if stroke else ""
        names = " ".join(f"hs-{kind}-{name}" for kind, name in (("f", fill), ("s", stroke)) if name)
        return f'{text} class="{names}"' if self.themed and names else text

    def _mark(self, mark: Mark) -> str:
        if isinstance(mark, Words):
            return self._words(mark)
        if isinstance(mark, Picture):
            return self._picture(mark)
        if isinstance(mark, Box):
            seen = "" if mark.opacity == 1 else f' fill-opacity="{mark.opacity:.3f}"'
            tag = "rect"
            shape = f'x="{_n(mark.x)}" y="{_n(mark.y)}" width="{_n(mark.width)}" height="{_n(mark.height)}"{seen}'
        elif isinstance(mark, Dot):
            seen = "" if mark.opacity == 1 else f' fill-opacity="{mark.opacity:.3f}"'
            tag, shape = "circle", f'cx="{_n(mark.x)}" cy="{_n(mark.y)}" r="{_n(mark.radius)}"{seen}'
        else:
            tag, shape = "polyline", self._line(mark)
        hint = f"<title>{_text(mark.hint)}</title>" if mark.hint else ""
        return f"<{tag} {shape}>{hint}</{tag}>" if hint else f"<{tag} {shape}/>"

    def _line(self, mark: Line) -> str:
        points = " ".join(f"{_n(x)},{_n(y)}" for x, y in mark.points)
        dashed = ' stroke-dasharray="4 3"' if mark.dashed else ""
        seen = "" if mark.opacity == 1 else f' stroke-opacity="{mark.opacity:.2f}"'
        return f'points="{points}" stroke-width="{_n(mark.width)}"{dashed}{seen}'

    def _words(self, mark: Words) -> str:
        place = f'x="{_n(mark.x)}" y="{_n(mark.y)}"'
        if mark.turn:
            place = f'transform="translate({_n(mark.x)},{_n(mark.y)}) rotate({_n(mark.turn)})"'
        anchor = "" if mark.anchor == "start" else f' text-anchor="{mark.anchor}"'
        bold = ' font-weight="bold"' if mark.bold else ""
        return f'<text {place} font-size="{_n(mark.size)}"{anchor}{bold}>{_text(mark.text)}</text>'

    def _picture(self, mark: Picture) -> str:
        data = base64.b64encode(png(pixels(mark, self.colours | (_MIDDLE if self.themed else {})))).decode()
        return (
            f'<image x="{_n(mark.x)}" y="{_n(mark.y)}" width="{_n(mark.width)}" height="{_n(mark.height)}" '
            f'preserveAspectRatio="none" style="image-rendering:pixelated" href="data:image/png;base64,{data}"/>'
        )


def pixels(mark: Picture, colours: dict[str, str]) -> list[bytes]:
    """RGBA rows: the colour tells the sign, its opacity the size."""
    up, down, none = (bytes.fromhex(colours[name][1:]) for name in ("up", "down", "line"))
    rows = []
    for values in mark.values:
        row = bytearray()
        for value in values:
            if value != value:
                row += none + b"\x78"
            else:
                row += (up if value >= 0 else down) + bytes([round(255 * min(1.0, abs(value)))])
        rows.append(bytes(row))
    return rows


def png(rows: list[bytes]) -> bytes:
    """RGBA rows as a PNG file."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", len(rows[0]) // 4, len(rows), 8, 6, 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + row for row in rows), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
