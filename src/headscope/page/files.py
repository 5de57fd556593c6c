"""Which files the front end has."""

from __future__ import annotations

from functools import cache
from pathlib import Path

STATIC = Path(__file__).parent / "static"
#: modules that load when they are needed: the libraries for charts
LAZY = {"lib/plot.js"}


@cache
def page() -> str:
    """The one HTML file, which all addresses of views show; it names all modules, so that they load at once."""
    modules = sorted(name for name in files() if name.startswith(("lib/", "views/")))
    links = [f'<link rel="modulepreload" href="/static/{module}">' for module in modules if module not in LAZY]
    return (STATIC / "index.html").read_text(encoding="utf-8").replace("<!-- modules -->", "\n".join(links))


@cache
def files() -> frozenset[str]:
    """Names of all files, relative to `STATIC`."""
    return frozenset(path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file())
