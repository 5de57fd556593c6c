"""Which files the front end has."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

STATIC = Path(__file__).parent / "static"
#: modules that load when they are needed: the libraries for charts
LAZY = {"lib/plot.js"}
IMPORT_MAP = re.compile(r'<script type="importmap">(.*?)</script>', re.DOTALL)
#: the hash of the style sheet of a few rules that Observable Plot puts into every chart of class "plot"
PLOT_STYLE = "'sha256-+TfQir1nvDucAdvE6XUQBt4ayUjpAWkbw2kCdSfekHM='"


@cache
def index() -> str:
    """The one HTML file, before the modules are named in it."""
    return (STATIC / "index.html").read_text(encoding="utf-8")


@cache
def page() -> str:
    """The one HTML file, which all addresses of views show; it names all modules, so that they load at once."""
    modules = sorted(name for name in files() if name.startswith(("lib/", "views/")))
    links = [f'<link rel="modulepreload" href="/static/{module}">' for module in modules if module not in LAZY]
    return index().replace("<!-- modules -->", "\n".join(links))


@cache
def import_map() -> str:
    """Which file a library's name stands for, as JSON."""
    found = IMPORT_MAP.search(index())
    assert found is not None
    return found[1]


@cache
def files() -> frozenset[str]:
    """Names of all files, relative to `STATIC`."""
    return frozenset(path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file())
