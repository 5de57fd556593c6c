"""Prompt and Try in a real browser: keys, address, dark mode, hostile tokens, 1024 tokens; no console error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

import headscope as hs
from app.conftest import HOSTILE
from headscope.model import Model

pytestmark = pytest.mark.browser

Open = Callable[..., Any]
PROMPT = f"the store a {HOSTILE} Mary </script> John"
VIEW = f"/prompt?prompt={quote(PROMPT)}"
GRAPH = ".route-graph canvas.over"
LENS = ".lens-table canvas.over"


def query(page: Any) -> dict[str, str]:
    return dict(page.evaluate("[...new URLSearchParams(location.search)]"))


def read(page: Any, box: str) -> str:
    return str(page.locator(f"{box} .read").inner_text())


def hover_times(page: Any, box: str) -> list[float]:
    """Milliseconds from a movement of the pointer until the overlay has been drawn and the words below it have changed,
    over those movements that reach something else than the one before.
    """
    return page.evaluate(
        """async (box) => {
      const canvas = document.querySelector(box + " canvas.over"), area = canvas.getBoundingClientRect();
      const read = document.querySelector(box + " .read"), times = [];
      for (let i = 0; i < 400 && times.length < 60; i++) {
        const old = read.textContent, start = performance.now();
        canvas.dispatchEvent(new PointerEvent("pointermove", {bubbles: true,
          clientX: area.left + area.width * (0.1 + 0.85 * ((i * 0.137) % 1)), clientY: area.top + area.height * (0.05 + 0.8 * ((i * 0.291) % 1))}));
        while (read.textContent === old && performance.now() - start < 100) await new Promise((next) => setTimeout(next));
        if (read.textContent !== old) times.push(performance.now() - start);
      }
      return times;
    }""",
        box,
    )


class TestPrompt:
    def test_what_comes_next_and_why(self, view: Open, model: Model) -> None:
        probs = hs.trace(model, PROMPT).logits[0, -1].softmax(-1)
        best = probs.topk(2).indices.tolist()
        route = hs.routes(model, PROMPT, target=best[0], foil=best[1])
        page = view("/prompt")
        page.locator("textarea").fill(PROMPT)
        page.keyboard.press("Control+Enter")
        page.wait_for_selector(GRAPH)
        page.wait_for_selector(LENS)
        assert query(page) == {"prompt": PROMPT}
        assert page.locator(".tokens-row button").all_inner_texts() == PROMPT.split()
        assert f"{100 * probs.max().item():.2f} %" in page.locator(".next-tokens tbody tr").first.inner_text()
        heads = sum(e.kind == "head" for e in route.edges)
        assert f"{heads} of {route.parts:,} edges" in page.locator(".counts").inner_text()
        assert f"to {route.target} rather than {route.foil}" in " ".join(
            page.locator("h2", has_text="Route").inner_text().split()
        )

    def test_target_and_foil(self, view: Open, model: Model) -> None:
        page = view(VIEW)
        row = page.locator(".next-tokens tbody tr").nth(3)
        row.get_by_role("button", name="target").click()
        page.wait_for_function("() => document.querySelectorAll('.next-tokens tr')[4].querySelector('.on')")
        third = hs.trace(model, PROMPT).logits[0, -1].topk(4).indices.tolist()[3]
        assert query(page)["target"] == str(third)
        page.get_by_label("Another token").fill(HOSTILE)
        page.get_by_role("button", name="as foil").click()
        page.get_by_text(f"rather than {HOSTILE}").first.wait_for()
        assert query(page)["foil"] == "2"
        page.get_by_role("button", name="no foil").click()
        page.wait_for_function("() => !document.querySelector('.panel h2 + p').innerText.includes('rather than')")
        assert query(page)["foil"] == "none"
        page.get_by_label("Another token").fill("two words")
        watched_refusal(page)

    def test_positions_by_key_and_address(self, view: Open) -> None:
        page = view(f"{VIEW}&pos=4&target=2")
        assert page.locator(".tokens-row .query").inner_text() == "Mary"
        page.locator("h1").click()
        page.keyboard.press("ArrowLeft")
        page.locator(".next h2", has_text=HOSTILE).wait_for()
        assert query(page) == {"prompt": PROMPT, "pos": "3"}, "the target belonged to another prediction"
        page.go_back()
        page.locator(".next h2", has_text="Mary").wait_for()
        page.locator(".tokens-row button").nth(6).click()
        page.locator(".next h2", has_text="John").wait_for()
        assert query(page) == {"prompt": PROMPT}

    def test_generation_step_by_step(self, view: Open, model: Model) -> None:
        page = view(VIEW)
        added = []
        ids = model.tokens(PROMPT)[0]
        for n in (1, 2, 3):
            added.append(int(hs.trace(model, ids).logits[0, -1].argmax()))
            ids = ids.new_tensor([[*ids[0].tolist(), added[-1]]])
            page.locator("h1").click()
            page.keyboard.press("n")
            page.get_by_text(f"{7 + n} tokens;").wait_for()
            assert query(page)["more"] == ".".join(map(str, added))
        assert page.locator(".tokens-row .added").count() == 3
        page.go_back()
        page.get_by_text("9 tokens;").wait_for()
        page.get_by_role("button", name="Take it back").click()
        page.get_by_text("8 tokens;").wait_for()
        page.locator(".next-tokens tbody tr").nth(5).get_by_role("button", name="add").click()
        page.get_by_text("9 tokens;").wait_for()
        page.reload()
        page.get_by_text("9 tokens;").wait_for()

    def test_the_graph_by_pointer_and_keys(self, view: Open) -> None:
        page = view(VIEW)
        page.wait_for_selector(GRAPH)
        hover_times(page, ".route-graph")
        page.locator(GRAPH).focus()
        for key in ("ArrowDown", "ArrowDown", "ArrowUp"):
            page.keyboard.press(key)
        node = read(page, ".route-graph").split()[0]
        assert re.fullmatch(r"(L\d(A|MLP)?|E)@6", node)
        page.keyboard.press("]")
        assert re.search(r"[\d.]+ % of that state|the MLP read", read(page, ".route-graph"))
        page.keyboard.press(" ")
        locked = query(page)["on"]
        assert ">" in locked or "=" in locked
        page.locator("h1").click()
        page.keyboard.press("Escape")
        assert "on" not in query(page)
        page.go_back()
        page.locator(".detail h3").wait_for()
        page.reload()
        page.locator(".detail h3").wait_for()
        assert query(page)["on"] == locked, "what is locked is in the address"

    def test_zoom_moves_and_fits(self, view: Open) -> None:
        page = view(VIEW)
        page.wait_for_selector(GRAPH)
        page.locator(GRAPH).scroll_into_view_if_needed()
        # of the middle only: labels are drawn apart
        pixels = """(() => { const part = document.createElement('canvas');
          part.getContext('2d').drawImage(document.querySelector('.route-graph canvas'), -60, -30);
          return part.toDataURL(); })()"""
        at_first = page.evaluate(pixels)
        box = page.locator(GRAPH).bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 120)
        before = page.evaluate("scrollY")
        page.mouse.wheel(0, -300)
        page.wait_for_function(f"() => {pixels} !== {json.dumps(at_first)}")
        assert page.evaluate("scrollY") == before, "the wheel zooms and does not scroll"
        zoomed = page.evaluate(pixels)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] / 2 + 90, box["y"] + 150, steps=4)
        page.mouse.up()
        page.wait_for_function(f"() => {pixels} !== {json.dumps(zoomed)}")
        assert "on" not in query(page), "dragging locks nothing"
        page.get_by_role("button", name="fit").click()
        page.wait_for_function(f"() => {pixels} === {json.dumps(at_first)}")

    def test_a_wide_route_is_squeezed(self, view: Open) -> None:
        page = view(f"/prompt?prompt={quote('the store a Mary John ' * 24)}&threshold=0.005")
        page.wait_for_selector(GRAPH, timeout=120_000)
        pixels = "document.querySelector('.route-graph canvas').toDataURL()"
        at_first = page.evaluate(pixels)
        page.get_by_role("button", name="fit").click()
        page.wait_for_function(f"() => {pixels} !== {json.dumps(at_first)}")
        page.get_by_role("button", name="wide").click()
        page.wait_for_function(f"() => {pixels} === {json.dumps(at_first)}")

    def test_an_edge_shows_its_heads(self, view: Open, model: Model) -> None:
        best = hs.trace(model, PROMPT).logits[0, -1].topk(2).indices.tolist()
        route = hs.routes(model, PROMPT, target=best[0], foil=best[1])
        edge = max((e for e in route.edges if e.kind == "head"), key=lambda e: e.weight)
        same = [e for e in route.edges if e.kind == "head" and (e.source, e.target) == (edge.source, edge.target)]
        page = view(VIEW)
        page.locator(".route .tall tbody tr").first.get_by_role("button").click()
        page.wait_for_selector(".heads-of")
        assert query(page)["on"] == f"{edge.source}>{edge.target}"
        rows = page.locator(".heads-of tbody tr").all_inner_texts()
        assert len(rows) == len(same) and f"{100 * edge.weight:.2f} %" in rows[0]
        page.locator(".heads-of a").first.click()
        page.wait_for_selector(".head-title")
        assert page.locator("h1").inner_text() == edge.component and query(page)["prompt"] == PROMPT

    def test_an_mlp_and_a_state(self, view: Open, model: Model) -> None:
        mlp = next(n for n in hs.routes(model, PROMPT).nodes if n.kind == "mlp")
        page = view(f"{VIEW}&on={quote(mlp.id)}")
        page.wait_for_selector(".neurons")
        assert re.search(rf"L{mlp.layer}N\d+", page.locator(".neurons").inner_text())
        page.goto(page.url.replace(quote(mlp.id), "L2%406"))
        page.get_by_text("against L2A").wait_for()
        assert page.locator(".detail tr.told").count() >= 1, "the target is marked"
        page.goto(page.url.replace("L2%406", "L9%406"))
        page.get_by_text("is not on the route").wait_for()

    def test_the_threshold_asks_the_server(self, view: Open, model: Model) -> None:
        best = hs.trace(model, PROMPT).logits[0, -1].topk(2).indices.tolist()
        route = hs.routes(model, PROMPT, target=best[0], foil=best[1], threshold=0.01)
        page = view(VIEW)
        page.wait_for_selector(GRAPH)
        page.get_by_label("Threshold").fill("30")
        heads = sum(e.kind == "head" for e in route.edges)
        page.get_by_text(re.compile(f"^{heads} of {route.parts:,} edges")).wait_for()
        assert query(page)["threshold"] == "0.01"

    def test_the_lens(self, view: Open, model: Model) -> None:
        page = view(VIEW)
        page.wait_for_selector(LENS)
        page.locator(LENS).focus()
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowRight")
        probs = hs.trace(model, PROMPT).logits[0, 6].softmax(-1)
        said = read(page, ".lens-table")
        assert said.startswith("L2 after John 6") and f"{100 * float(probs.max()):.2f} %" in said
        page.keyboard.press(" ")
        assert query(page)["cell"] == "3@6"
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("Enter")
        page.locator(".next h2", has_text="</script>").wait_for()
        page.locator("h1").click()
        page.keyboard.press("Escape")
        assert "cell" not in query(page)

    def test_a_proof(self, view: Open) -> None:
        page = view(VIEW)
        page.get_by_role("button", name="Prove it").click()
        page.locator(".proved").wait_for(timeout=60_000)
        said = page.locator(".proved").inner_text()
        assert "With all but this route cut" in said and "20 random routes" in said and "no proof of a rule" in said
        page.reload()
        page.locator(".proved").wait_for()

    def test_a_thousand_tokens(self, view: Open, capsys: pytest.CaptureFixture[str]) -> None:
        prompt = "the store a Mary John " * 205  # 1025 tokens
        page = view(f"/prompt?prompt={quote(prompt)}&threshold=0.005")
        page.wait_for_selector(".tokens-row button >> nth=1024")
        page.wait_for_selector(GRAPH, timeout=120_000)
        page.wait_for_selector(LENS, timeout=120_000)
        assert "not reached and not drawn" in page.locator(".counts").inner_text()
        said = page.locator(".panel", has_text="Logit lens").inner_text()
        assert re.search(r"positions \d+ to 1024 of 1025", said)
        figures = []
        for box in (".route-graph", ".lens-table"):
            times = hover_times(page, box)
            assert len(times) > 10
            figures.append(f"{box[1:]} median {np.median(times):.1f} ms, slowest {max(times):.1f} ms")
        with capsys.disabled():
            print(f"\nhover at 1025 tokens: {'; '.join(figures)}; {page.locator('.counts').inner_text()}")
        page.get_by_role("button", name="earlier").click()
        page.get_by_text(re.compile(r"positions \d+ to 10[01]\d of 1025")).wait_for()

    def test_a_large_route(self, view: Open, capsys: pytest.CaptureFixture[str]) -> None:
        page = view(f"/prompt?prompt={quote('the store a Mary John ' * 24)}&threshold=0.005")
        page.wait_for_selector(GRAPH, timeout=120_000)
        times = hover_times(page, ".route-graph")
        with capsys.disabled():
            print(f"\nhover over a route of {page.locator('.counts').inner_text()}: "
                  f"median {np.median(times):.1f} ms, slowest {max(times):.1f} ms")  # fmt: skip
        assert len(times) > 10

    def test_a_refusal_is_one_sentence(self, view: Open) -> None:
        page = view(f"{VIEW}&pos=99", refusals=True)
        page.wait_for_selector(".failure")
        assert "Position 99 does not exist" in page.locator(".failure").first.inner_text()


def watched_refusal(page: Any) -> None:
    """Nothing is asked before the button is pressed."""
    assert page.locator(".failure").count() == 0


EDITS = quote('[{"op":"zero","on":"L1H2"},{"op":"scale","on":"L2MLP","by":0.5,"at":3}]')
TRY = f"/try?prompt={quote(PROMPT)}&edits={EDITS}"


class TestTry:
    def test_edits_are_built_and_compared(self, view: Open, model: Model) -> None:
        page = view("/try")
        page.locator("textarea").fill(PROMPT)
        page.keyboard.press("Control+Enter")
        page.get_by_text("No edit is in force").wait_for()
        page.get_by_role("button", name="Switch off").click()
        page.get_by_label("Components").fill("L1H2")
        page.keyboard.press("Enter")
        page.get_by_text("The prediction moves by").wait_for()
        assert json.loads(query(page)["edits"]) == [{"op": "zero", "on": "L1H2"}]
        after = hs.trace(model, PROMPT, edits=hs.zero("L1H2")).logits[0, -1].softmax(-1)
        row = page.locator(".compared tbody tr").first
        token = row.locator("code").inner_text()
        assert f"{100 * float(after[model.tokenizer.get_vocab()[token]]):.2f} %" in row.inner_text()
        page.get_by_label("In force").uncheck()
        page.get_by_text("zero L1H2").wait_for(state="detached")
        page.go_back()
        page.get_by_text("zero L1H2").wait_for()

    def test_scale_by_slider(self, view: Open) -> None:
        page = view(TRY)
        page.get_by_text("scale L2MLP 0.5 at (3,)").wait_for()
        page.get_by_label("Factor", exact=True).fill("2")
        page.get_by_text("scale L2MLP 2 at (3,)").wait_for()
        assert json.loads(query(page)["edits"])[1]["by"] == 2
        page.get_by_label("Position; empty for all").nth(1).fill("")
        page.keyboard.press("Tab")
        page.get_by_text(re.compile("scale L2MLP 2$")).wait_for()

    def test_steering(self, view: Open) -> None:
        page = view(f"/try?prompt={quote(PROMPT)}")
        page.locator("h1").click()
        page.keyboard.press("v")
        page.get_by_label("Token", exact=True).fill(HOSTILE)
        page.keyboard.press("Enter")
        page.get_by_text("add L0RESID").wait_for()
        page.get_by_label("Direction").select_option("difference")
        page.get_by_label("Prompt to come from").fill("the store")
        page.keyboard.press("Tab")
        page.get_by_label("Prompt to go to").fill("a Mary")
        page.keyboard.press("Tab")
        page.get_by_text("add L0RESID").wait_for()
        (row,) = json.loads(query(page)["edits"])
        assert row == {"op": "steer", "layer": 0, "strength": 1, "plus": "a Mary", "minus": "the store"}

    def test_it_goes_on(self, view: Open, model: Model) -> None:
        page = view(TRY)
        page.get_by_role("button", name="Go on").click()
        page.wait_for_selector(".sides")
        ids = model.tokens(PROMPT)[0]
        with hs.edited(model, [hs.zero("L1H2"), hs.scale("L2MLP", 0.5, positions=3)]) as hf:
            out = hf.generate(input_ids=ids, max_new_tokens=20, do_sample=False, pad_token_id=0)[0, 7:]
        words = [model.tokenizer.decode([i]) for i in out.tolist()]
        assert page.locator(".continuation").nth(1).locator("span").all_inner_texts() == words

    def test_save_and_load(self, view: Open, tmp_path: Path) -> None:
        page = view(TRY)
        with page.expect_download() as download:
            page.get_by_role("button", name="Save the edits").click()
        path = tmp_path / "edits.json"
        download.value.save_as(path)
        assert [str(e) for e in hs.load_edits(path)] == ["zero L1H2", "scale L2MLP 0.5 at (3,)"]
        other = view(f"/try?prompt={quote(PROMPT)}")
        other.get_by_label("Load edits from a file").set_input_files(path)
        other.get_by_text("scale L2MLP 0.5 at (3,)").wait_for()
        assert json.loads(query(other)["edits"]) == json.loads(query(page)["edits"])

    def test_wrong_components_and_files(self, view: Open, tmp_path: Path) -> None:
        page = view(f"/try?prompt={quote(PROMPT)}", refusals=True)
        page.get_by_role("button", name="Switch off").click()
        page.get_by_label("Components").fill(HOSTILE)
        page.keyboard.press("Enter")
        page.get_by_text("is not the name of a component").wait_for()
        (tmp_path / "no.json").write_text("{}")
        page.get_by_label("Load edits from a file").set_input_files(tmp_path / "no.json")
        page.get_by_text("is not an edit file").wait_for()

    def test_an_address_cut_short_shows_no_edit(self, view: Open) -> None:
        page = view(f"/try?prompt={quote(PROMPT)}&edits=%5B%7B")
        page.get_by_text("No edit is in force").wait_for()


@pytest.mark.parametrize("path", [f"{VIEW}&on=L2MLP%406&cell=1%405", TRY, "/prompt", "/try"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_nothing_is_wider_than_the_window(view: Open, path: str, width: int, scheme: str) -> None:
    page = view(path, width=width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    lightness = sum(map(int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))))
    assert (lightness < 120) == (scheme == "dark")


def test_focus_can_be_seen_and_goes_everywhere(view: Open) -> None:
    page = view(VIEW)
    page.wait_for_selector(GRAPH)
    page.wait_for_selector(LENS)
    canvases = 0
    for _ in range(160):
        page.keyboard.press("Tab")
        kind, outline = page.evaluate(
            "[document.activeElement.tagName, getComputedStyle(document.activeElement).outlineStyle]"
        )
        canvases += kind == "CANVAS"
        assert outline != "none" or kind == "BODY", kind
    assert canvases >= 2
