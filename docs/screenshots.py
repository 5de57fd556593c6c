"""Pictures of the page's views, of a real atlas in a real Chromium: python docs/screenshots.py ATLAS

Writes docs/page-*.png and docs/report.png. The model named in the atlas is asked, so it must be on this machine.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import headscope as hs  # noqa: E402
from app.browser import Watched, chromium, running  # noqa: E402
from headscope.app.session import Session  # noqa: E402

PROMPT = "When Mary and John went to the store, John gave a drink to Mary. When Mary and John went to the"
SHORT = "When Mary and John went to the store, John gave a drink to"
EDITS = '[{"op":"zero","on":"L23H0-1, L23H7"},{"op":"scale","on":"L3MLP","by":0.5}]'
#: name → address, wait for this, scroll to this, width, dark
VIEWS: dict[str, tuple[str, str, str | None, int, bool]] = {
    "atlas": ("/?method=induction-heads-icl&at=L18H6", ".ranking li", None, 1280, False),
    "atlas-dark": ("/?method=induction-heads-icl&vs=bos-sink&at=L18H6", "svg.plot circle", None, 1280, True),
    "head": ("/head/18/6?examples=1", ".examples li", None, 1280, False),
    "head-prompt": (f"/head/18/6?prompt={quote(PROMPT)}&q=22&k=7&sink=0", ".pair td", "On your prompt", 1280, False),
    "prompt": (f"/prompt?prompt={quote(SHORT)}&on=L22%401%3EL23A%4013", ".heads-of td", None, 1280, False),
    "prompt-route": (f"/prompt?prompt={quote(SHORT)}&on=L23MLP%4013", ".neurons td", "Route to", 1280, True),
    "try": (f"/try?prompt={quote(SHORT)}&edits={quote(EDITS)}", ".compared td", None, 1280, False),
    "neurons": ("/?method=io-weight-cosine-neurons&at=L5N954", ".neuron td", None, 1280, False),
    "runs": ("/runs", ".panel form select", None, 1280, True),
    "phone": ("/?method=induction-heads-icl", ".ranking li", None, 390, False),
}


def main(atlas: Path) -> None:
    atlas = atlas.resolve()
    shown = hs.Atlas.load(atlas)
    session = Session(name=shown.model["name"], load=lambda: hs.load(shown.model["name"]), atlas=shown)
    with running(session) as address, chromium() as browser:
        for name, (path, wanted, heading, width, dark) in VIEWS.items():
            context = browser.new_context(
                viewport={"width": width, "height": 860}, color_scheme="dark" if dark else "light"
            )
            watched = Watched(context, address)
            page: Any = watched.open(path)
            page.locator(wanted).first.wait_for(state="attached", timeout=120_000)
            page.wait_for_load_state("networkidle")
            if heading is not None:
                page.locator("h2", has_text=heading).evaluate("e => scrollTo(0, e.getBoundingClientRect().top - 70)")
            page.wait_for_timeout(500)
            page.screenshot(path=ROOT / "docs" / f"page-{name}.png")
            if watched.problems:
                raise SystemExit(f"{name}: {'; '.join(watched.problems)}")
            context.close()
        report = Watched(browser.new_context(viewport={"width": 1280, "height": 860}), (atlas / "report.html").as_uri())
        page = report.open("#/?method=induction-heads-icl&q=22&k=7")
        page.locator(".looked button").first.wait_for()
        page.screenshot(path=ROOT / "docs" / "report.png", full_page=True)
        if report.problems:
            raise SystemExit(f"report: {'; '.join(report.problems)}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
