"""A saved report in a real browser, from its file: the page's views without a server, and nothing that it should not do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import headscope as hs
from app.browser import Watched, chromium
from app.conftest import HOSTILE

pytestmark = pytest.mark.browser

Open = Callable[..., Any]
MARKUP = "</script><!--<script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def report(atlas: hs.Atlas, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The atlas with markup wherever somebody else's words can stand."""
    tokens = [HOSTILE, MARKUP, "the", " store"]
    pattern = [[1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.5, 0.0], [0.1, 0.7, 0.2, 0.0]]
    examples = [{"head": "L2H1", "method": "previous-token", "tokens": tokens, "pattern": pattern}]
    hostile = hs.Atlas({**atlas.model, "name": f"tiny {MARKUP}"}, 0, atlas.scores, atlas.verdicts,
                       {"role x": f"Not tested: {MARKUP}"}, examples)  # fmt: skip
    return hostile.save(tmp_path_factory.mktemp("report") / "atlas") / "report.html"


@pytest.fixture
def view(browser: Any, report: Path) -> Iterator[Open]:
    """Open the file in a new page; at the end nothing may have gone wrong, and nobody may have been asked."""
    opened: list[Watched] = []

    def make_page(address: str = "", *, width: int = 1280, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        opened.append(Watched(context, report.as_uri()))
        return opened[-1].open(address)

    yield make_page
    for watched in opened:
        assert watched.problems == []
        assert watched.page.evaluate("document.querySelectorAll('img, iframe, main script').length") == 0
        watched.page.context.close()


def test_the_atlas_view(view: Open, report: Path, atlas: hs.Atlas) -> None:
    page = view("#/?method=bos-sink")
    assert page.locator("h1").inner_text() == f"Heads of tiny {MARKUP}" and MARKUP in page.title()
    assert page.locator("nav.top > a").all_inner_texts() == ["headscope", "Atlas"]
    before = page.locator("canvas").first.screenshot()
    page.select_option("#method", "previous-token")
    best = [str(c) for c in hs.top(atlas.scores["previous-token"], 12)]
    page.locator(".ranking li a", has_text=best[0]).first.wait_for()
    assert page.url == f"{report.as_uri()}#/?method=previous-token"
    assert page.locator(".ranking li a").all_inner_texts() == best
    assert page.locator("canvas").first.screenshot() != before
    page.select_option("#vs", "bos-sink")
    page.wait_for_selector("svg.plot circle")
    agreed = hs.agree(atlas.scores["bos-sink"], atlas.scores["previous-token"])["spearman"]
    assert f"{agreed:.2f}" in page.get_by_text("Rank correlation").inner_text().replace("−", "-")
    roles = page.locator("table.roles tbody tr").all_inner_texts()
    assert "✓ supported" in roles[0] and HOSTILE in roles[0] and f"Not tested: {MARKUP}" in page.inner_text("main")


def test_heads_by_link_address_and_key(view: Open, report: Path, atlas: hs.Atlas) -> None:
    page = view()
    first = page.locator(".ranking li a").first
    name, href = first.inner_text(), first.get_attribute("href")
    assert href == "#/head/" + name[1:].replace("H", "/"), "so that it opens in a new tab, too"
    first.click()
    page.locator("h1", has_text=name).wait_for()
    page.go_back()
    page.wait_for_selector("#method")
    page.evaluate("location.hash = '#/head/1/2'")
    page.wait_for_selector(".role svg.plot >> nth=1")
    rank = hs.rank(atlas.scores["bos-sink"])[1, 2].item()
    assert f"{rank:.0f} of 12" in " ".join(page.locator("table.scores tbody tr").first.inner_text().split())
    assert "+3.000 loss" in page.locator(".role").inner_text()
    page.keyboard.press("ArrowUp")
    page.locator("h1", has_text="L2H2").wait_for()
    page.reload()
    page.locator("h1", has_text="L2H2").wait_for()
    assert page.get_by_text("headscope serve ATLAS").count() == 1, "what needs the model is named once"
    assert page.locator("main form").count() == 0
    page.evaluate("location.hash = '#/head/9/9'")
    page.get_by_text("This saved report has nothing at this address.").wait_for()
    page.evaluate("location.hash = '#//elsewhere/'")
    page.get_by_text("There is no view at this address.").wait_for()


def test_attention_of_the_top_head(view: Open) -> None:
    page = view("#/?method=previous-token&q=3&k=1")
    page.wait_for_selector(".looked")
    assert page.locator(".looked button").all_inner_texts() == [HOSTILE, MARKUP.replace(" ", "·"), "the", "·store"]
    said = page.locator("section", has_text="At work").locator(".read").inner_text()
    assert "·store" in said and "0.7000" in said and "most of its row" in said
    page.locator(".looked button").nth(2).click()
    assert page.url.endswith("q=2") and page.locator(".looked button").nth(2).get_attribute("title") == "2: 0.5000"
    page.get_by_role("link", name="L2H1").last.click()
    page.locator("h1", has_text="L2H1").wait_for()
    page.wait_for_selector(".looked")


def test_dark_and_narrow(view: Open) -> None:
    for address in ("", "#/?vs=signed", "#/head/1/2"):
        page = view(address, width=390, color_scheme="dark")
        page.wait_for_selector(".panel")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert sum(map(int, re.findall(r"\d+", dark))) < 120


def test_without_scripts_it_says_the_main_thing(view: Open, atlas: hs.Atlas) -> None:
    page = view(java_script_enabled=False)
    assert page.locator("h1").inner_text() == f"Heads of tiny {MARKUP}"
    rows = page.locator("tr").all_inner_texts()
    assert "supported" in rows[1] and HOSTILE in rows[1] and "+3.000" in rows[1] and "L1H2, L2H3" in rows[1]
    assert f"previous-token: {hs.top(atlas.scores['previous-token'], 1)[0]} " in page.inner_text("main")


def test_what_was_smuggled_in_does_not_run(browser: Any, report: Path, tmp_path: Path) -> None:
    """Were anything not escaped, the browser would still not run it: it does not carry the file's word."""
    evil = (
        "<script>document.title='EVIL'</script><script type=module>document.title='EVIL'</script>"
        "<script src=\"data:text/javascript,document.title='EVIL'\"></script><img src=x onerror=\"document.title='EVIL'\">"
        "<script type=module src=\"data:text/javascript,import'http://127.0.0.1:9/x.js';\"></script>"
        "<style>body{display:none}</style><script src=http://127.0.0.1:9/y.js></script>"
    )
    whole = report.read_text("utf-8")
    path = tmp_path / "tampered.html"
    path.write_text(whole.replace('<div id="app">', evil + '<div id="app">'), encoding="utf-8")
    watched = Watched(browser.new_context(), path.as_uri())
    page = watched.open("")
    page.wait_for_selector(".ranking li")
    assert page.title().startswith("Atlas") and page.locator("h1").is_visible()
    refused = [text for text in watched.problems if "Content Security Policy" in text]
    assert len(refused) >= 7 and not any("dialog" in text for text in watched.problems), watched.problems
    page.context.close()
