"""Every view in a real browser: what is shown, keys, address, dark mode, hostile tokens, size, speed; no console error."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

import headscope as hs
from app.browser import Watched, running
from app.conftest import HOSTILE, verdict
from headscope.app.session import Session
from headscope.core.scores import make
from headscope.model import Model

pytestmark = pytest.mark.browser

Open = Callable[..., Any]
PROMPT = f"the store a {HOSTILE} Mary </script> John"
HEAD = f"/head/1/2?prompt={quote(PROMPT)}"
#: what is hovered or locked in the first grid, in words
READ = ".read >> nth=0"


def query(page: Any) -> dict[str, str]:
    return dict(page.evaluate("[...new URLSearchParams(location.search)]"))


def grid(page: Any) -> Any:
    return page.locator("canvas.over").first


class TestAtlas:
    def test_it_shows_scores_and_roles(self, view: Open, atlas: hs.Atlas) -> None:
        page = view("/?method=bos-sink")
        assert page.locator("h1").inner_text() == "Heads of tiny <b>bold</b>"
        assert page.title().startswith("Atlas")
        best = hs.top(atlas.scores["bos-sink"], 15)
        assert page.locator(".ranking li a").all_inner_texts() == [str(c) for c in best]
        roles = page.locator("table.roles tbody tr").all_inner_texts()
        assert len(roles) == 2 and "✓ supported" in roles[0] and HOSTILE in roles[0] and "? inconclusive" in roles[1]
        assert "The role x was not tested." in page.locator("main").inner_text()

    def test_first_paint(self, view: Open, capsys: pytest.CaptureFixture[str]) -> None:
        page = view("/")
        painted = page.evaluate("performance.getEntriesByName('atlas-painted')[0].startTime")
        with capsys.disabled():
            print(f"\nfirst paint of a 3 × 4 atlas: {painted:.0f} ms")
        assert painted > 0

    def test_hover_previews_click_locks_escape_releases(self, view: Open) -> None:
        page = view("/")
        box = grid(page).bounding_box()
        page.mouse.move(box["x"] + 60, box["y"] + 30)
        hovered = page.locator(READ).inner_text()
        assert re.match(r"L\dH\d +[−\d.]+", hovered)
        page.mouse.click(box["x"] + 60, box["y"] + 30)
        assert query(page)["at"] == hovered.split()[0]
        page.mouse.move(5, 5)
        assert page.locator(READ).inner_text() == hovered, "what is locked stays"
        page.reload()
        page.wait_for_selector("canvas.over")
        assert page.locator(READ).inner_text() == hovered, "the address holds it"
        page.keyboard.press("Escape")
        assert "at" not in query(page) and "Hover" in page.locator(READ).inner_text()
        page.go_back()
        assert page.locator(READ).inner_text() == hovered

    def test_the_grid_by_keyboard(self, view: Open) -> None:
        page = view("/")
        grid(page).focus()
        for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowLeft"):
            page.keyboard.press(key)
        assert page.locator(READ).inner_text().startswith("L1H1")
        page.keyboard.press(" ")
        assert query(page)["at"] == "L1H1"
        page.keyboard.press("Enter")
        page.wait_for_selector(".head-title")
        assert page.url.endswith("/head/1/1")

    def test_methods_by_key_and_back(self, view: Open, atlas: hs.Atlas) -> None:
        page = view("/?method=nosuch")
        proved = next(v for v in atlas.verdicts if v.verdict == "supported")
        assert page.locator("#method").input_value() == proved.method == "previous-token"
        assert "This atlas has no scores of nosuch." in page.inner_text("main")
        page.keyboard.press("[")
        page.keyboard.press("]")
        page.keyboard.press("]")
        assert query(page)["method"] == "signed"
        page.locator(".scale", has_text="0 in the middle").wait_for()
        page.go_back()
        assert page.locator("#method").input_value() == "previous-token"

    def test_two_methods_compared(self, view: Open, atlas: hs.Atlas) -> None:
        page = view("/?method=bos-sink")
        page.select_option("#vs", "previous-token")
        page.wait_for_selector("svg.plot")
        agreed = hs.agree(atlas.scores["bos-sink"], atlas.scores["previous-token"])
        said = page.get_by_text("Rank correlation").inner_text().replace("−", "-")
        assert f"{agreed['spearman']:.2f}" in said and "12 heads" in said
        assert page.locator(".compare canvas.over").count() == 2 and page.locator("svg.plot circle").count() == 12
        page.mouse.move(*centre(page, "canvas.over"))
        assert len({text.split()[0] for text in page.locator(".compare .read").all_inner_texts()}) == 1, (
            "both show the same head"
        )

    def test_filter_by_verdict_and_role(self, view: Open) -> None:
        page = view("/")
        page.select_option("#show", "supported")
        assert page.locator(".count").inner_text() == "2 of 12 heads"
        assert set(page.locator(".ranking li a").all_inner_texts()) == {"L1H2", "L2H3"}
        page.select_option("#show", "role:sink")
        assert query(page)["show"] == "role:sink" and page.locator(".ranking li a").all_inner_texts() == ["L0H1"]


def centre(page: Any, selector: str) -> tuple[float, float]:
    box = page.locator(selector).first.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


class TestFrame:
    def test_search(self, view: Open) -> None:
        page = view("/")
        page.keyboard.press("/")
        page.keyboard.type("L9H9")
        page.keyboard.press("Enter")
        assert "3 layers of 4 heads" in page.locator(".hint").inner_text()
        page.keyboard.press("Escape")
        page.keyboard.press("/")
        page.locator(".search input").fill("l2 h3")
        page.keyboard.press("Enter")
        page.wait_for_selector(".head-title")
        assert page.url.endswith("/head/2/3")
        page.locator(".search input").fill("induction")
        page.keyboard.press("Enter")
        page.wait_for_selector("#method")
        assert query(page) == {"method": "previous-token", "show": "role:induction"}
        page.locator(".search input").fill(HOSTILE)
        page.keyboard.press("Enter")
        assert "Write a head" in page.locator(".hint").inner_text()

    def test_keys_are_listed_and_typing_is_not_taken_for_keys(self, view: Open) -> None:
        page = view("/")
        page.keyboard.press("?")
        assert page.locator("dialog").is_visible()
        listed = page.locator("dialog dt").all_inner_texts()
        assert {"?", "/", "d", "[", "]", "Esc"} <= set(listed)
        page.keyboard.press("Escape")
        assert not page.locator("dialog").is_visible()
        page.locator(".search input").focus()
        page.keyboard.type("d?]")
        assert page.locator(".search input").input_value() == "d?]" and not page.locator("dialog").is_visible()

    def test_dark_and_light(self, view: Open) -> None:
        background = "getComputedStyle(document.body).backgroundColor"
        page = view("/", color_scheme="dark")
        dark = page.evaluate(background)
        assert sum(map(int, re.findall(r"\d+", dark))) < 120
        page.keyboard.press("d")
        light = page.evaluate(background)
        assert sum(map(int, re.findall(r"\d+", light))) > 600
        page.reload()
        page.wait_for_selector("canvas.over")
        assert page.evaluate(background) == light, "the choice is kept"
        page.get_by_text("auto", exact=True).click()
        assert page.evaluate(background) == dark
        page.emulate_media(color_scheme="light")
        assert page.evaluate(background) == light, "it follows the system"

    @pytest.mark.parametrize("path", ["/", "/?vs=signed", HEAD, f"/prompt?prompt={quote(PROMPT)}", "/runs"])
    @pytest.mark.parametrize("width", [390, 1280])
    def test_nothing_is_wider_than_the_window(self, view: Open, path: str, width: int) -> None:
        page = view(path, width=width)
        assert page.evaluate("document.documentElement.scrollWidth") <= width

    def test_focus_can_be_seen_and_goes_everywhere(self, view: Open) -> None:
        page = view("/")
        reached = set()
        for _ in range(40):
            page.keyboard.press("Tab")
            kind, outline = page.evaluate(
                "[document.activeElement.tagName, getComputedStyle(document.activeElement).outlineStyle]"
            )
            reached.add(kind)
            assert outline != "none" or kind == "BODY", kind
        assert reached >= {"A", "INPUT", "BUTTON", "SELECT", "CANVAS"}

    def test_an_address_without_a_view(self, view: Open) -> None:
        page = view("/head/7/0", refusals=True)
        assert "L7H0 does not exist" in page.locator("main").inner_text()

    def test_a_server_that_ended(self, browser: Any, session: Session) -> None:
        with running(session) as address:
            page = Watched(browser.new_context(), address).open("/")
        page.select_option("#method", "signed")
        page.wait_for_selector(".failure")
        assert "is it still running?" in page.locator(".failure").first.inner_text()
        page.context.close()


class TestHead:
    def test_scores_and_proof(self, view: Open, atlas: hs.Atlas) -> None:
        page = view("/head/1/2")
        rows = page.locator("table.scores tbody tr").all_inner_texts()
        rank = hs.rank(atlas.scores["bos-sink"])[1, 2].item()
        assert len(rows) == 3 and f"{rank:.0f} of 12" in " ".join(rows[0].split())
        role = page.locator(".role").inner_text()
        assert "induction" in role and "+3.000 loss" in role and "number 1 by previous-token" in role
        page.wait_for_selector(".role svg.plot >> nth=1")
        assert page.locator(".role svg.plot").count() == 2

    def test_an_untested_head_is_called_untested(self, view: Open) -> None:
        page = view("/head/2/0")
        assert "Untested" in page.locator("main").inner_text()

    def test_heads_by_keyboard(self, view: Open) -> None:
        page = view(HEAD)
        for key, place in (
            ("ArrowRight", "/head/1/3"),
            ("ArrowUp", "/head/2/3"),
            ("ArrowUp", "/head/2/3"),
            ("ArrowLeft", "/head/2/2"),
        ):
            page.keyboard.press(key)
            page.wait_for_url(f"**{place}?*")
        assert query(page)["prompt"] == PROMPT, "the prompt goes along"
        page.go_back()
        page.locator("h1", has_text="L2H3").wait_for()

    def test_the_pattern_of_a_hostile_prompt(self, view: Open, model: Model) -> None:
        value = hs.trace(model, PROMPT, ["pattern"])["pattern", 1][0, 2, 6, 3].item()  # before the server has the model
        page = view("/head/1/2")
        page.locator("textarea").fill(PROMPT)
        page.keyboard.press("Control+Enter")
        page.wait_for_selector(".looked")
        assert query(page) == {"prompt": PROMPT}
        assert page.locator(".looked button").all_inner_texts() == PROMPT.split()
        page.locator("canvas.over").focus()
        for _ in range(3):
            page.keyboard.press("ArrowLeft")
        page.keyboard.press(" ")
        assert query(page) == {"prompt": PROMPT, "q": "6", "k": "3"}
        said = page.locator(READ).inner_text()
        assert HOSTILE in said and f"{value:.3f}"[:4] in said
        page.get_by_text(f", read from {HOSTILE}").wait_for()
        page.reload()
        page.wait_for_selector(".looked")
        assert HOSTILE in page.locator(READ).inner_text(), "what is locked is in the address"
        page.locator("h1").click()
        page.keyboard.press("Escape")
        assert query(page) == {"prompt": PROMPT}

    def test_the_sink_can_be_left_out(self, view: Open) -> None:
        page = view(HEAD)
        page.wait_for_selector(".looked")
        before = page.locator("canvas").first.screenshot()
        page.get_by_label("without the first token").check()
        assert query(page)["sink"] == "0" and page.locator("canvas").first.screenshot() != before
        page.keyboard.press("ArrowRight")
        page.wait_for_url("**/head/1/3?*")
        assert query(page)["sink"] == "0"

    def test_switching_it_off(self, view: Open, model: Model) -> None:
        before = hs.trace(model, PROMPT).logits[0, -1].softmax(-1).max().item()
        page = view(HEAD)
        page.get_by_role("button", name="Switch it off now").click()
        page.wait_for_selector(".ablate")
        assert f"{100 * before:.2f} %" in page.locator(".ablate tbody tr").first.inner_text()

    def test_its_weights_on_a_hostile_token(self, view: Open) -> None:
        page = view(f"/head/0/1?token={quote(HOSTILE)}")
        page.wait_for_selector(".pair.four")
        assert page.locator(".pair.four table").count() == 4

    def test_examples(self, view: Open) -> None:
        page = view("/head/0/1")
        page.get_by_role("button", name="Look for examples").click()
        page.locator(".examples li").nth(7).wait_for()
        assert page.locator(".examples .query").count() == 8 and query(page) == {"examples": "1"}
        page.locator(".examples a").first.click()
        page.wait_for_selector(".looked")
        assert "prompt" in query(page) and "q" in query(page)

    def test_a_refusal_is_one_sentence(self, view: Open) -> None:
        page = view("/head/0/1", refusals=True)
        page.get_by_label("One token").fill("the store")
        with page.expect_response(lambda r: "copies" in r.url):
            page.keyboard.press("Enter")
        assert "must be one token" in page.locator(".failure").inner_text()

    def test_a_thousand_tokens(self, view: Open, capsys: pytest.CaptureFixture[str]) -> None:
        prompt = "the store a Mary John " * 205  # 1025 tokens
        page = view(f"/head/1/2?prompt={quote(prompt)}")
        page.wait_for_selector(".looked button >> nth=1024")
        times = hover_times(page)
        with capsys.disabled():
            print(f"\nhover at 1025 tokens: median {np.median(times):.1f} ms, slowest {max(times):.1f} ms")
        assert "looks at" in page.locator(READ).inner_text()


def hover_times(page: Any) -> list[float]:
    """Milliseconds from a movement of the pointer over the first grid until the words below it have changed."""
    return page.evaluate("""async () => {
      const canvas = document.querySelector("canvas.over"), area = canvas.getBoundingClientRect();
      const read = document.querySelector(".read"), times = [];
      for (let i = 0; i < 60; i++) {
        const old = read.textContent, start = performance.now();
        canvas.dispatchEvent(new PointerEvent("pointermove", {bubbles: true,
          clientX: area.left + area.width * (0.3 + (0.037 * i) % 0.6), clientY: area.top + area.height * (0.2 + (0.053 * i) % 0.6)}));
        while (read.textContent === old && performance.now() - start < 1000) await new Promise((next) => setTimeout(next));
        times.push(performance.now() - start);
      }
      return times;
    }""")


class TestRuns:
    def test_two_tabs_see_the_same_job(self, view: Open, session: Session) -> None:
        go = threading.Event()

        def work(tell: Any) -> dict[str, str]:
            step = 0
            while not go.wait(0.01):
                step += 1
                tell("holding", min(step, 99), 100)
            return {"view": "/"}

        first, second = view("/runs"), view("/")
        session.jobs.submit("test", f"Hold {HOSTILE}", work)
        session.jobs.submit("test", "Another", work)
        for page in (first, second):
            page.get_by_role("status").get_by_text(f"Hold {HOSTILE}").wait_for(timeout=15000)
            page.get_by_text("1 waiting").wait_for()
        first.locator(".jobs li", has_text="Another").get_by_role("button", name="Cancel").click()
        first.locator(".jobs .cancelled").wait_for()
        go.set()
        first.locator(".jobs .done").wait_for()
        first.goto("about:blank")
        second.goto(second.url.split("?")[0] + "runs")
        second.locator(".jobs .done").wait_for()

    def test_a_scan_from_the_page(self, browser: Any, model: Model, tmp_path: Path, view: Open) -> None:
        session = Session(name="tiny", load=lambda: model, out=tmp_path / "runs")
        with running(session) as address:
            page = view("/", base=address)
            assert "No atlas of tiny yet" in page.locator("main").inner_text()
            page.get_by_role("button", name="Start").click()
            page.wait_for_selector("canvas.over", timeout=120_000)
            page.goto(f"{address}/runs")
            page.locator(".jobs .done").wait_for()
            assert str(tmp_path) in page.locator(".jobs").inner_text()
            session.jobs.close()

    def test_a_method_is_scored_from_the_page(self, view: Open) -> None:
        page = view("/runs")
        form = page.locator("form", has_text="Score")
        assert form.locator("select").input_value()
        form.locator("select").select_option("duplicate-token")
        form.get_by_role("button").click()
        page.locator(".jobs .done").wait_for(timeout=60000)
        page.locator(".jobs").get_by_role("link", name="show").click()
        page.locator(".ranking li").nth(11).wait_for()
        assert (
            query(page) == {"method": "duplicate-token"} and page.locator("#method").input_value() == "duplicate-token"
        )

    def test_a_head_is_tested_from_its_page(self, view: Open, session: Session) -> None:
        page = view("/head/2/0")
        page.get_by_label("Test L2H0 alone for").select_option("sink")
        page.locator(".test").get_by_role("button").click()
        page.locator(".test .verdict").wait_for(timeout=60000)
        (job,) = session.jobs.documents()
        assert job["title"] == "Verify sink (L2H0)" and job["result"]["reason"] in page.locator(".test").inner_text()

    def test_a_failed_job_says_why(self, view: Open, session: Session) -> None:
        def work(tell: Any) -> dict[str, str]:
            raise ValueError(HOSTILE)

        page = view("/")
        session.jobs.submit("test", "Bad", work)
        page.locator(".status .failure").wait_for(timeout=15000)
        assert f"ValueError: {HOSTILE}" in page.locator(".status").inner_text()
        page.locator(".status").get_by_role("button", name="Close").click()
        assert page.locator(".status .failure").count() == 0


def test_a_big_model_stays_fluid(browser: Any, model: Model, view: Open, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    facts = {**model.anatomy.facts(), "n_layers": 64, "n_heads": 64}
    scores = {name: make(rng.normal(size=(64, 64)), higher_means="more") for name in ("a", "b")}
    heads = [f"L{i}H{j}" for i in range(0, 64, 3) for j in range(0, 64, 5)]
    atlas = hs.Atlas(
        {"name": "big", "fingerprint": "x", "anatomy": facts}, 0, scores, [verdict("induction", heads, "supported")]
    )
    session = Session(name="big", load=lambda: model, atlas=atlas)
    with running(session) as address:
        page = view("/?method=a&vs=b", base=address)
        painted = page.evaluate("performance.getEntriesByName('atlas-painted')[0].startTime")
        page.wait_for_selector("svg.plot circle >> nth=4000", state="attached")
        times = hover_times(page)
        with capsys.disabled():
            print(f"\n64 × 64 heads, two methods: first paint {painted:.0f} ms, hover median {np.median(times):.1f} ms, "
                  f"slowest {max(times):.1f} ms")  # fmt: skip
    session.jobs.close()
