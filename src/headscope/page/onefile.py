"""The page as one HTML file, which needs neither a server nor a network.

It holds the page's own modules, unchanged but for how they name one another: a browser resolves no relative name in a
module that comes from a data: URL, so they are named in the import map. Questions to a server are answered from the file.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import posixpath
import re
from functools import cache
from html import escape
from typing import Any
from urllib.parse import quote

from headscope.page.files import PLOT_STYLE, STATIC, files, import_map, index
from headscope.page.wire import finite

ENTRY = "report.js"
#: what another module is called in ours: from "./ui.js", import "../vendor/d3.js", import("./plot.js")
SPECIFIER = re.compile(r'\b(from |import |import\()"(\.[^"]+)"')
STYLES = re.compile(r'<link rel="stylesheet" href="/static/([^"]+)">')
#: ASCII that may stand in a data: URL as it is
PLAIN = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) not in '%#"<')


def one_file(title: str, answers: dict[str, Any], matrices: dict[str, bytes], fallback: str) -> str:
    """The HTML. `answers`: what a GET of an address gives; `matrices`: the same, as `wire.matrix` makes them.

    `fallback`: HTML for readers without JavaScript; whoever makes it escapes what is in it.
    """
    packed = {name: base64.b64encode(data).decode() for name, data in matrices.items()}
    text = json.dumps(finite({"documents": answers, "matrices": packed}), separators=(",", ":"), allow_nan=False)
    carried = base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
    body = f'<div id="app"></div>\n<noscript>{fallback}</noscript>\n<script type="text/plain" id="answers">{carried}</script>'
    # Scripts and styles are told from what somebody may have smuggled in by this word. It is a digest of all that the
    # file shows, so that whoever chose a name or a token in it could not know it, and the same atlas gives the same file.
    nonce = hashlib.sha256(f"{title}\0{_modules()}\0{_style()}\0{body}".encode()).hexdigest()
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}' {PLOT_STYLE}; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    icon = "data:image/svg+xml," + quote(_read("icon.svg"))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta http-equiv="Content-Security-Policy" content="script-src 'unsafe-inline' data:">
<meta name="viewport" content="width=device-width,initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<link rel="icon" href="{icon}" type="image/svg+xml">
<style nonce="{nonce}">{_style()}</style>
<script nonce="{nonce}" type="importmap">{_modules()}</script>
<script nonce="{nonce}" type="module">import "{ENTRY}";</script>
</head>
<body>
{body}
</body>
</html>
"""


@cache
def _modules() -> str:
    """The import map: every module that the entry needs, under its name in `STATIC`, and the libraries under theirs."""
    libraries = {
        name: address.removeprefix("/static/") for name, address in json.loads(import_map())["imports"].items()
    }
    found = {name: _data(_read(file)) for name, file in libraries.items()}
    wanted = [ENTRY]
    while wanted:
        module = wanted.pop()
        if module not in found:
            text, others = _renamed(module)
            found[module] = _data(text)
            wanted += others
    return json.dumps({"imports": dict(sorted(found.items()))}, separators=(",", ":"))


def _renamed(module: str) -> tuple[str, list[str]]:
    """A module's text with the others called by their names in `STATIC`, and those names."""
    others: list[str] = []

    def name(match: re.Match[str]) -> str:
        others.append(posixpath.normpath(posixpath.join(posixpath.dirname(module), match[2])))
        if others[-1] not in files():
            raise FileNotFoundError(f"{module} imports {match[2]}, which the page does not have.")
        return f'{match[1]}"{others[-1]}"'

    # libraries are published files without relative names
    text = _read(module)
    return (text if module.startswith("vendor/") else SPECIFIER.sub(name, text)), others


@cache
def _style() -> str:
    return "".join(map(_read, STYLES.findall(index())))


def _data(module: str) -> str:
    return "data:text/javascript," + quote(module, safe=PLAIN)


def _read(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")
