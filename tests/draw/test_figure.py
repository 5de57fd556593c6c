"""Figures: the cells that are drawn are the numbers, in every format, with where they come from."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import re
import struct
import xml.etree.ElementTree as ET
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headscope as hs
from headscope.core.errors import FileError, HeadscopeError, UsageError
from headscope.core.scores import make
from headscope.draw import ENDINGS, Figure
from headscope.draw.marks import visible, wrapped
from headscope.draw.svg import png
from headscope.model import Model
from headscope.sweep import Patching
from headscope.verify import Verdict

VALUES = np.array([[0.0, 1.0, -2.0], [math.nan, 0.5, 2.0]])
HOSTILE = "<img src=x onerror=alert(1)>\"' & $x$ \x1b[31m\u202e\ud800</title></svg><script>alert(2)</script>"
SVG = "{http://www.w3.org/2000/svg}"


def scores(values: Any = VALUES, dims: tuple[str, ...] = ("layer", "head"), **more: Any) -> Any:
    attrs = {"method": "bos-sink", "model": "toy", "fingerprint": "abc123", "seed": 7, "options": {"n": 4}} | more
    return make(np.asarray(values), dims, higher_means="more of it", version="0.1.0", **attrs)


def verdict(**changes: Any) -> Verdict:
    given: dict[str, Any] = {
        "role": "induction", "claim": "It matters", "method": "induction-heads-icl", "intervention": "zero", "k": 2,
        "components": ["L1H2", "L0H0"], "metric": "loss", "direction": 1, "clean": 1.0, "effect": 3.0,
        "control_mean": 0.5, "control_sd": 0.1, "control_extreme": 0.7, "diff_ci_low": 2.0, "diff_ci_high": 3.0,
        "margin": 0.1, "p": 0.01, "p_raw": 0.01, "n_seeds": 8, "n_controls": 3, "side_effect": 0.0,
        "verdict": "supported", "reason": "it does", "control_effects": [0.4, 0.5, 0.6],
        "dose": [{"k": 1.0, "effect": 1.0, "control_mean": 0.25}, {"k": 2.0, "effect": 3.0, "control_mean": 0.5}],
    }  # fmt: skip
    return Verdict(**(given | changes))


def cells(svg: str) -> dict[str, dict[str, str]]:
    """Hint → attributes of a rectangle, with those of the group it stands in."""
    found = {}
    for group in ET.fromstring(svg).iter(f"{SVG}g"):
        for box in group.iter(f"{SVG}rect"):
            title = box.find(f"{SVG}title")
            if title is not None:
                found[str(title.text)] = {**group.attrib, **box.attrib}
    return found


def test_the_cells_are_the_numbers() -> None:
    found = cells(hs.figure(scores()).svg())
    assert set(found) == {"L0H0: 0", "L0H1: 1", "L0H2: -2", "L1H0: not measured", "L1H1: 0.5", "L1H2: 2"}
    up, down = found["L1H2: 2"], found["L0H2: -2"]
    assert up["fill"] != down["fill"] and (up.get("fill-opacity"), down.get("fill-opacity")) == (None, None)
    assert found["L0H0: 0"]["fill-opacity"] == "0.000"
    assert found["L0H1: 1"]["fill"] == up["fill"] and found["L0H1: 1"]["fill-opacity"] == "0.500"
    # columns are heads, and the last layer is at the top
    assert float(up["x"]) == float(down["x"]) > float(found["L0H1: 1"]["x"]) > float(found["L0H0: 0"]["x"])
    assert float(up["y"]) < float(down["y"]) and found["L1H1: 0.5"]["y"] == up["y"]


def test_a_limit_makes_figures_comparable() -> None:
    found = cells(hs.figure(scores(), limit=4).svg())
    assert found["L1H2: 2"]["fill-opacity"] == "0.500" and found["L0H2: -2"]["fill-opacity"] == "0.500"
    assert hs.figure(scores(), limit=1).data["panels"][0]["limit"] == 1.0
    assert ">≥1</text>" in hs.figure(scores(), limit=1).svg() and ">≥" not in hs.figure(scores(), limit=2).svg()
    with pytest.raises(UsageError, match="limit is -1"):
        hs.figure(scores(), limit=-1)


@pytest.mark.parametrize(
    ("shape", "dims", "panels"),
    [((3,), ("layer",), 1), ((2, 5), ("layer", "position"), 1), ((2, 3, 4), ("layer", "head", "position"), 2),
     ((4, 2), ("edit", "prompt"), 1)],
)  # fmt: skip
def test_other_dims(shape: tuple[int, ...], dims: tuple[str, ...], panels: int) -> None:
    values = np.arange(math.prod(shape), dtype=float).reshape(shape) - 2
    figure = hs.figure(scores(values, dims))
    drawn = [p["values"] for p in figure.data["panels"]]
    assert len(drawn) == panels and np.array_equal(np.array(drawn).reshape(shape), values)
    assert {p["limit"] for p in figure.data["panels"]} == {float(abs(values).max())}
    assert len(ET.fromstring(figure.svg()).findall(f".//{SVG}title")) == values.size + 1


def test_the_layer_is_the_row_whichever_way_scores_lie() -> None:
    assert hs.figure(scores().T).data == hs.figure(scores()).data


@pytest.mark.parametrize(
    "wrong",
    [scores(np.zeros((50, 2, 2)), ("layer", "head", "position")), scores(np.zeros((2,) * 4), ("a", "b", "c", "d")),
     scores(np.zeros((0, 3)))],
)  # fmt: skip
def test_what_cannot_be_drawn_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"one to three dims.*choose a part"):
        hs.figure(wrong)


def test_unknown_things_and_names_are_refused() -> None:
    with pytest.raises(UsageError, match="no figure of a dict"):
        hs.figure({})
    with pytest.raises(UsageError, match="DataArray takes no role"):
        hs.figure(scores(), role="induction")
    atlas = hs.Atlas({"name": "toy", "fingerprint": "f", "anatomy": {}}, 0, {"bos-sink": scores()}, [verdict()])
    with pytest.raises(UsageError, match="no scores of 'bos'"):
        hs.figure(atlas, method="bos")
    with pytest.raises(UsageError, match="no role 'sunk'"):
        hs.figure(atlas, role="sunk")
    with pytest.raises(UsageError, match="one of the two"):
        hs.figure(atlas, method="bos-sink", role="induction")


def test_json_holds_every_number_and_is_drawn_again_the_same(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(3, 4))
    values[1, 2] = np.nan
    first = hs.figure(scores(values))
    again = Figure.load(first.save(tmp_path / "f.json"))
    np.testing.assert_array_equal(np.array(again.data["panels"][0]["values"], dtype=float), values)
    assert again.svg() == first.svg() and again.provenance == first.provenance and again.notes == first.notes
    (tmp_path / "f.json").write_text(json.dumps({**first.document(), "format_version": 9}))
    with pytest.raises(FileError, match="format 9"):
        Figure.load(tmp_path / "f.json")
    (tmp_path / "f.json").write_text(json.dumps({**first.document(), "data": {"panels": 3}}))
    with pytest.raises(FileError, match="damaged"):
        Figure.load(tmp_path / "f.json")


def _origin(path: Path) -> dict[str, Any]:
    """The provenance that a file carries."""
    text = ""
    if path.suffix == ".json":
        return json.loads(path.read_text())["provenance"]
    if path.suffix in (".svg", ".html"):
        (text,) = re.findall("<metadata>(.*?)</metadata>", path.read_text(encoding="utf-8"))
        text = html.unescape(text)
    elif path.suffix == ".png":
        from PIL import Image

        text = Image.open(path).text["headscope"]  # type: ignore[attr-defined]
    else:
        import pypdf

        text = pypdf.PdfReader(path).metadata["/Keywords"]  # type: ignore[index]
    return json.loads(text)


def figures(tiny: Model) -> dict[str, Figure]:
    tokens = torch.arange(3, 9)[None]
    return {
        "scores": hs.figure(scores()),
        "dose": hs.figure(verdict()),
        "route": hs.figure(hs.routes(tiny, tokens)),
        "pattern": hs.figure(hs.trace(tiny, tokens, ["pattern"], logits=None), head="L1H2"),
        "patching": hs.figure(Patching(scores(np.ones((2, 3)), ("layer", "position")), 2.0, 1.0, 1.0)),
    }


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_figure_saves_to_every_format_with_where_it_comes_from(tiny: Model, tmp_path: Path, ending: str) -> None:
    for name, figure in figures(tiny).items():
        path = figure.save(tmp_path / f"{name}{ending}")
        assert path.stat().st_size > 500
        origin = _origin(path)
        assert origin == json.loads(json.dumps(figure.provenance)) and origin["headscope"] == hs.__version__
        assert {"model", "fingerprint"} <= origin.keys() or name == "dose"
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [ending] * 5  # no temporary name is left


def test_sizes_and_text_of_paper_formats(tmp_path: Path) -> None:
    import pypdf
    from PIL import Image

    figure = hs.figure(scores(), title="A title of π and 5 $ or $ more")
    drawing = figure.drawing()
    image = Image.open(figure.save(tmp_path / "f.png"))
    assert image.size == (2 * drawing.width, 2 * drawing.height)
    page = pypdf.PdfReader(figure.save(tmp_path / "f.pdf")).pages[0]
    assert [float(x) for x in page.mediabox[2:]] == pytest.approx([0.75 * drawing.width, 0.75 * drawing.height])
    said = page.extract_text()
    assert "A title of π and 5 $ or $ more" in said and "L1" in said and "fingerprint abc123" in said
    svg = figure.save(tmp_path / "f.svg").read_text(encoding="utf-8")
    assert ">A title of π and 5 $ or $ more</text>" in svg and "fingerprint abc123" in svg


def test_png_colours_are_those_of_the_svg(tmp_path: Path) -> None:
    from PIL import Image

    figure = hs.figure(scores())
    boxes = cells(figure.svg())
    for theme in ("light", "dark"):
        image = Image.open(figure.save(tmp_path / f"{theme}.png", theme=theme)).convert("RGB")
        colours = {}
        for hint, box in boxes.items():
            middle = [int(2 * (float(box[a]) + float(box[b]) / 2)) for a, b in (("x", "width"), ("y", "height"))]
            colours[hint] = image.getpixel((middle[0], middle[1]))
        ground = image.getpixel((1, 1))
        assert colours["L0H0: 0"] == ground
        blue, red = colours["L1H2: 2"], colours["L0H2: -2"]
        assert blue[2] > blue[0] and red[0] > red[2]
        half = [(a + b) / 2 for a, b in zip(ground, blue, strict=True)]
        assert all(abs(x - y) < 3 for x, y in zip(colours["L0H1: 1"], half, strict=True))


def test_a_file_that_exists_stays_unless_told(tmp_path: Path) -> None:
    figure = hs.figure(scores())
    for ending in ENDINGS:
        path = tmp_path / f"mine{ending}"
        path.write_text("precious")
        with pytest.raises(FileError, match="exists already"):
            figure.save(path)
        assert path.read_text() == "precious"
        figure.save(path, overwrite=True)
        assert path.read_bytes() != b"precious"
    with pytest.raises(UsageError, match=r"saved as \.html, \.svg, \.png, \.pdf or \.json, not as f\.gif"):
        figure.save(tmp_path / "f.gif")
    with pytest.raises(UsageError, match="light or dark"):
        figure.save(tmp_path / "f.svg", theme="blue")
    assert not (tmp_path / "f.svg").exists()


def test_a_failed_drawing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import headscope.draw.paper as paper

    def fails(*_: Any) -> None:
        raise RuntimeError("no ink")

    path = tmp_path / "f.png"
    path.write_text("precious")
    monkeypatch.setattr(paper, "write", fails)
    with pytest.raises(RuntimeError):
        hs.figure(scores()).save(path, overwrite=True)
    assert path.read_text() == "precious" and list(tmp_path.iterdir()) == [path]


def test_without_matplotlib_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    for ending in (".png", ".pdf"):
        with pytest.raises(HeadscopeError, match=r"pip install 'headscope\[figures\]'"):
            hs.figure(scores()).save(tmp_path / f"f{ending}")
    assert hs.figure(scores()).save(tmp_path / "f.svg").exists()


def test_nothing_from_outside_becomes_markup(tmp_path: Path) -> None:
    tokens = [HOSTILE, " the\n", "你好", ""]
    from headscope.trace.show import of_pattern

    pattern = of_pattern(torch.eye(4).tolist(), tokens, "L0H0", {"model": HOSTILE, "prompt": "".join(tokens)})
    for figure in (
        pattern,
        hs.figure(scores(model=HOSTILE, method=HOSTILE)),
        hs.figure(verdict(role=HOSTILE, reason=HOSTILE)),
    ):
        for ending in (".svg", ".html"):
            text = figure.save(tmp_path / f"f{ending}", overwrite=True).read_text(encoding="utf-8")
            assert "<script" not in text and "<img" not in text and not re.search(r"<[^>]* on\w+=", text)
            assert "\x1b" not in text and "\u202e" not in text
            if ending == ".svg":
                kinds = {element.tag.removeprefix(SVG) for element in ET.fromstring(text).iter()}
                assert kinds <= {"svg", "g", "rect", "text", "title", "desc", "metadata", "polyline", "circle"}
        for ending in (".png", ".pdf", ".json"):
            figure.save(tmp_path / f"f{ending}", overwrite=True)
        assert "\x1b" not in repr(figure) and "\u202e" not in repr(figure)


def test_many_cells_become_an_image_that_says_so(tmp_path: Path) -> None:
    values = np.zeros((30, 900))
    values[3, 450], values[20, 10] = 5.0, -5.0
    figure = hs.figure(scores(values))
    svg = figure.svg()
    assert svg.count("<rect") < 60 and svg.count("<image") == 1 and "27,000 cells are drawn as an image" in svg
    for ending in (".png", ".pdf", ".html"):
        figure.save(tmp_path / f"f{ending}")
    assert "L3H450 5" in repr(figure)


def test_an_image_wider_than_its_pixels_keeps_the_largest() -> None:
    values = np.zeros((2, 10_000))
    values[1, 7777] = -3.0
    picture = next(m for m in hs.figure(scores(values)).drawing().marks if hasattr(m, "values"))
    assert min(min(row) for row in picture.values) == -1.0 and len(picture.values[0]) <= 2400
    assert "largest of 5 cells" in hs.figure(scores(values)).drawing().left_out


def test_png_pixels_are_what_was_asked() -> None:
    data = png([b"\x01\x02\x03\x04" * 2])
    assert struct.unpack(">II", data[16:24]) == (2, 1)
    assert zlib.decompress(data[41 : data.index(b"IEND") - 8]) == b"\0" + b"\x01\x02\x03\x04" * 2


def test_a_dose_curve_shows_every_control() -> None:
    svg = hs.figure(verdict()).svg()
    hints = re.findall("<circle[^>]*><title>(.*?)</title>", svg)
    assert [h for h in hints if h.startswith("chosen")] == ["chosen heads, 1: +1", "chosen heads, 2: +3"]
    assert [h for h in hints if h.startswith("random set")] == [
        f"random set {i}: +{e:g}" for i, e in ((1, 0.4), (2, 0.5), (3, 0.6))
    ]
    nan = float("nan")
    untested = hs.figure(verdict(verdict="not testable", reason="at chance", dose=[], control_effects=[], effect=nan))
    assert "nothing was measured" in untested.svg() and "at chance" in untested._repr_html_()


def test_a_pattern_has_its_tokens_and_no_future(tiny: Model) -> None:
    tokens = torch.arange(3, 9)[None]
    run = hs.trace(tiny, tokens, ["pattern"], logits=None)
    figure = hs.figure(run, head="L2H3")
    wanted = run["pattern", 2][0, 3]
    assert hs.figure(run, head="L2H3", limit=0.5).data["panels"][0] == {**figure.data["panels"][0], "limit": 0.5}
    drawn = figure.data["panels"][0]["values"]
    for q in range(6):
        assert drawn[q][: q + 1] == [float(v) for v in wanted[q, : q + 1].float()]
        assert drawn[q][q + 1 :] == [None] * (5 - q)
    assert (
        figure.data["rows"] == [f"#{i}" for i in range(3, 9)] and figure.provenance["fingerprint"] == tiny.fingerprint
    )
    for wrong, words in (({"head": "L2H9"}, "has 4 heads"), ({"head": "L1"}, "a head's"), ({}, "name it"),
                         ({"head": "L2H1", "row": 3}, "Row 3 does not exist")):  # fmt: skip
        with pytest.raises(UsageError, match=words):
            hs.figure(run, **wrong)


def test_padding_is_no_token_of_a_pattern() -> None:
    import toys

    model = toys.worded(bos=True)
    word = model.tokenizer.decode([5])
    run = hs.trace(model, [word, f"{word} {word} {word}"], ["pattern"], logits=None)
    lengths = [len(hs.figure(run, head="L0H0", row=row).data["rows"]) for row in (0, 1)]
    assert lengths == [int(n) for n in run.mask.sum(1)] and lengths[0] < lengths[1]


def test_text_stands_in_for_a_figure() -> None:
    said = repr(hs.figure(scores()))
    assert said.splitlines()[0] == "bos-sink" and " L1 │?░█│" in f" {said}".replace("\n", "\n ") and "L0 │ ▒#│" in said
    assert "model toy" in said and "largest: L0H2 -2, L1H2 2" in said
    table = repr(hs.figure(verdict()))
    assert "+3" in table and "3 random set: +0.4 … +0.6" in table


def test_what_is_invisible_is_shown() -> None:
    assert visible(" a\n\t\x00") == "·a↵⇥␀" and visible("") == "∅" and visible("\ud800\u202e") == "�⊘"
    assert all(len(line) < 40 for line in wrapped("x" * 500, 100))


def test_a_sweep_and_a_verdict_are_told_their_model(tiny: Model) -> None:
    tokens = torch.arange(3, 11).reshape(2, 4)
    effects = hs.sweep(tiny, tokens, [hs.zero("L0H1"), hs.zero("L2H3")], metric=lambda logits: logits[:, -1, 5])
    figure = hs.figure(effects, model=tiny)
    assert len(figure.data["rows"]) == 2 and "L2H3" in figure.data["rows"][1] and figure.data["columns"] == ["0", "1"]
    known = {"model": tiny.name, "fingerprint": tiny.fingerprint}
    assert known.items() <= figure.provenance.items()
    assert known.items() <= hs.figure(verdict(), model=tiny).provenance.items()
    # what scores say of themselves stays
    assert hs.figure(scores(), model=tiny).provenance["model"] == "toy"


def test_a_title_of_ones_own(tmp_path: Path) -> None:
    figure = hs.figure(dataclasses.replace(hs.figure(verdict())), title="Mine")
    assert figure.title == "Mine" and repr(figure).startswith("Mine")
