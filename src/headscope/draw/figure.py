"""A figure: what is drawn, as numbers, with what is needed to know where they come from. It shows and saves itself."""

from __future__ import annotations

import importlib
import json
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from headscope.core.errors import FileError, UsageError, nearest
from headscope.core.files import new_file, read_document
from headscope.draw import curves, density, matrix, route, scatter
from headscope.draw.marks import PALETTES, Drawing, Words, cut, plain, wrapped
from headscope.draw.svg import STYLE, svg

FORMAT = 1
ENDINGS = (".html", ".svg", ".png", ".pdf", ".json")
THEMES = tuple(PALETTES)
#: kind → (data to drawing, data to text)
KINDS: dict[str, tuple[Callable[[dict[str, Any]], Drawing], Callable[[dict[str, Any]], str]]] = {
    "matrix": (matrix.draw, matrix.text),
    "curves": (curves.draw, curves.text),
    "route": (route.draw, route.text),
    "scatter": (scatter.draw, scatter.text),
    "density": (density.draw, density.text),
}
_QUOTED = ("prompt", "target", "foil")
_MARGIN, _TITLE, _PRINT = 12.0, 13.0, 8.5


@dataclass(frozen=True, eq=False)
class Figure:
    """`kind`: matrix, curves, scatter, density or route, each with `data` of its own form, all of it plain: JSON holds it.

    `provenance`: model, fingerprint, method or prompt, parameters, version; every format carries it. `notes`: how to
    read the figure, shown below it on a page.
    """

    kind: str
    title: str
    data: dict[str, Any]
    provenance: dict[str, Any]
    notes: tuple[str, ...] = ()

    def drawing(self) -> Drawing:
        """Title, figure, and its provenance in small print."""
        body = KINDS[self.kind][0](self.data)
        width = max(body.width + 2 * _MARGIN, 360.0)
        whole = Drawing(width, _MARGIN)
        for line in wrapped(cut(plain(self.title), 200), width - 2 * _MARGIN, _TITLE):
            whole.height += _TITLE * 1.25
            whole.marks.append(Words(_MARGIN, whole.height - 3, line, size=_TITLE, fill="ink", bold=True))
        whole.place(body, _MARGIN, whole.height + 8)
        small = [*([body.left_out] if body.left_out else []), self.small_print()]
        whole.height += 6
        for text in small:
            for line in wrapped(text, width - 2 * _MARGIN, _PRINT):
                whole.height += _PRINT * 1.35
                whole.marks.append(Words(_MARGIN, whole.height, line, size=_PRINT))
        whole.width, whole.height = math.ceil(width), math.ceil(whole.height + _MARGIN)
        return whole

    def small_print(self) -> str:
        """The provenance on one line."""
        parts = []
        for name, value in self.provenance.items():
            if isinstance(value, dict):
                value = ", ".join(f"{key}={item}" for key, item in value.items())
            if value not in (None, "", []):
                text = cut(plain(str(value)), 160)
                parts.append(f"{name} “{text}”" if name in _QUOTED else f"{name} {text}")
        return " · ".join(parts)

    def document(self) -> dict[str, Any]:
        """As plain data: what a `.json` holds."""
        return {
            "format": "headscope-figure", "format_version": FORMAT, "kind": self.kind, "title": self.title,
            "notes": list(self.notes), "provenance": json.loads(self._origin()), "data": self.data,
        }  # fmt: skip

    def svg(self, theme: str = "light") -> str:
        """As a file of its own."""
        return svg(
            self.drawing(), self.title, theme=theme, metadata=self._origin(), desc=" ".join(self.notes)
        )  # fmt: skip

    def html(self) -> str:
        """As a page of its own that opens anywhere."""
        policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
        return (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
            f'content="{policy}"><meta name="viewport" content="width=device-width,initial-scale=1">'
            f'<title>{escape(plain(self.title))}</title><style>body{{margin:0}}html{{color-scheme:light dark}}'
            f"@media(prefers-color-scheme:dark){{body{{background:{PALETTES['dark']['back']}}}}}</style></head>"
            f"<body>{self._element('figure')}</body></html>\n"
        )  # fmt: skip

    def save(self, path: str | Path, *, overwrite: bool = False, theme: str = "light") -> Path:
        """Write as `.html`, `.svg`, `.png`, `.pdf` or `.json`, by the ending; the file appears whole or not at all.

        `theme`: light or dark (an `.html` has both). Raises UsageError for another ending or theme, FileError where the
        file exists and `overwrite` is not said, HeadscopeError where what a format needs is not installed.
        """
        path = check_path(path, overwrite=overwrite)
        if theme not in THEMES:
            raise UsageError(f"theme is {theme!r}; it takes {' or '.join(THEMES)}.{nearest(theme, THEMES)}")
        ending = path.suffix.lower()
        with new_file(path) as temporary:
            if ending in (".png", ".pdf"):
                from headscope.draw.paper import write

                write(self.drawing(), temporary, ending, theme, self._metadata())
            else:
                text = (
                    self.html() if ending == ".html" else self.svg(theme) if ending == ".svg"
                    else json.dumps(self.document(), allow_nan=False) + "\n"
                )  # fmt: skip
                temporary.write_text(text, encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Figure:
        """Read what `save` wrote as `.json`. Raises FileError where it is damaged or of another version."""
        document = read_document(path, "figure", "figure", FORMAT)
        try:
            found = cls(
                document["kind"], document["title"], document["data"], document["provenance"], tuple(document["notes"])
            )
            found.drawing()
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise FileError(f"The figure {path} is damaged ({error!r}).") from None
        return found

    def _origin(self) -> str:
        return json.dumps(self.provenance, default=str)  # options may hold what JSON does not know

    def _metadata(self) -> dict[str, str]:
        return {
            "title": plain(self.title),
            "about": self.small_print(),
            "json": self._origin(),
            "software": f"headscope {version()}",
        }

    def _element(self, ident: str) -> str:
        notes = "".join(f"<div>{escape(plain(note))}</div>" for note in self.notes)
        return (
            f'<figure class="headscope" id="{ident}"><style>{STYLE}</style>'
            f"{svg(self.drawing(), self.title, theme=None, metadata=self._origin())}"
            f"<figcaption>{notes}</figcaption></figure>"
        )

    def _repr_html_(self) -> str:
        return self._element(f"headscope-{secrets.token_hex(6)}")

    def __repr__(self) -> str:
        body = "\n".join(map(plain, KINDS[self.kind][1](self.data).split("\n")))
        return f"{plain(self.title)}\n{body}\n{self.small_print()}"


def version() -> str:
    """Of headscope. By name, as an import would tie all layers above this one into one knot for a type checker."""
    return str(importlib.import_module("headscope").__version__)


def check_path(path: str | Path, *, overwrite: bool) -> Path:
    """A path that a figure can be written to, before the work is done. Raises UsageError, FileError or HeadscopeError."""
    path = Path(path)
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        raise UsageError(f"A figure is saved as {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}, not as {path.name}.")
    if path.exists() and not overwrite:
        raise FileError(f"{path} exists already; choose another name, or allow it with overwrite (--overwrite).")
    if ending in (".png", ".pdf"):
        from headscope.draw.paper import check_installed

        check_installed(ending)
    return path
