"""Figures of what the views show: the lens, two methods against each other, sweeps, a head's attention as it is looked at."""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import headscope as hs
from app.conftest import HOSTILE, tokenizer
from draw.test_figure import _origin, cells, scores, verdict
from families.tiny import build
from headscope.core.errors import FileError, UsageError
from headscope.draw import ENDINGS, Figure
from headscope.model import Model
from headscope.sweep import Patching

PROMPT = f"the store a {HOSTILE} Mary </script> John"


@pytest.fixture(scope="module")
def worded() -> Model:
    return hs.load(build("llama", torch.float32), tokenizer=tokenizer())


def two_methods() -> hs.Atlas:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(3, 4)), rng.normal(size=(3, 4))
    y[1, 2] = math.nan
    model = {"name": HOSTILE, "fingerprint": "abc123", "anatomy": {}}
    return hs.Atlas(model, 3, {"a": scores(x, method="a"), "b": scores(y, method="b")}, [verdict()])


def test_a_scatter_is_the_two_scores() -> None:
    atlas = two_methods()
    figure = hs.figure(atlas, method="a", against="b")
    points = figure.data["points"]
    names = [f"L{i}H{j}" for i in range(3) for j in range(4) if (i, j) != (1, 2)]
    assert points["name"] == names, "a head that one method does not score is no point"
    for name, x, y in zip(names, points["x"], points["y"], strict=True):
        at = int(name[1]), int(name[3])
        assert (x, y) == (atlas.scores["a"].values[at], atlas.scores["b"].values[at])
    agreement = hs.agree(atlas.scores["a"], atlas.scores["b"])
    assert f"{agreement['spearman']:.2f} over 11" in figure.notes[0]
    assert figure.provenance == {
        "model": HOSTILE, "fingerprint": "abc123", "method": "a", "against": "b",
        "spearman": round(agreement["spearman"], 4), "seed": 3, "headscope": hs.__version__,
    }  # fmt: skip
    dots = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"[^>]*><title>(L\dH\d): ', figure.svg())
    by_x = [name for _, _, name in sorted(dots, key=lambda dot: float(dot[0]))]
    by_y = [name for _, _, name in sorted(dots, key=lambda dot: -float(dot[1]))]
    assert by_x == [name for _, name in sorted(zip(points["x"], names, strict=True))], "to the right is more"
    assert by_y == [name for _, name in sorted(zip(points["y"], names, strict=True))], "up is more"


def test_a_scatter_needs_two_methods() -> None:
    atlas = two_methods()
    for wrong, words in (
        ({"method": "a", "against": "c"}, "no scores of 'c'"), ({"against": "b"}, "second method"),
        ({"method": "a", "against": "b", "limit": 2}, "no limit"), ({"role": "induction", "against": "b"}, "second"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=words):
            hs.figure(atlas, **wrong)


def test_the_lens_is_what_the_streams_would_say(worded: Model) -> None:
    found = hs.lens(worded, PROMPT, target="Mary")
    run = hs.trace(worded, PROMPT, ["resid_pre", "resid_post"])
    a = worded.anatomy
    with torch.no_grad():
        streams = [run["resid_pre", 0], *(run["resid_post", i] for i in range(3))]
        logits = torch.stack([a.parts.unembed(a.final_norm(x[0])) for x in streams])  # [level pos vocab]
    torch.testing.assert_close(logits[-1], run.logits[0])
    probs = logits.softmax(-1)
    assert found.levels == ["E", "L0", "L1", "L2"] and found.tokens == PROMPT.split()
    torch.testing.assert_close(found.top, logits.topk(5).indices)
    torch.testing.assert_close(found.p, probs.topk(5).values)
    torch.testing.assert_close(found.target_p, probs[..., 6])
    assert torch.equal(found.rank, 1 + (logits > logits[..., 6:7]).sum(-1))
    assert hs.lens(worded, PROMPT).target_id == int(run.logits[0, -1].argmax())
    part = hs.lens(worded, worded.tokens(PROMPT)[0][0], target=6, start=2, stop=5)
    assert (part.start, part.stop) == (2, 5) and torch.equal(part.top, found.top[:, 2:5])


def test_the_figure_of_a_lens(worded: Model) -> None:
    found = hs.lens(worded, PROMPT, target=HOSTILE)
    figure = hs.figure(found)
    (panel,) = figure.data["panels"]
    assert panel["values"] == found.p[..., 0].tolist()
    best = found.top[..., 0].tolist()
    for row, ids, ps in zip(panel["words"], best, panel["values"], strict=True):
        assert row == [f"{found.words[i]} {100 * p:.0f}%" for i, p in zip(ids, ps, strict=True)]
    assert panel["frames"] == [[i, j] for i in range(4) for j in range(7) if best[i][j] == 2]
    assert hs.figure(found, by="target").data["panels"][0]["values"] == found.target_p.tolist()
    assert hs.figure(worded, prompt=PROMPT, target=HOSTILE).document() == figure.document()
    assert figure.provenance["prompt"] == " ".join(PROMPT.split()) and figure.provenance["target"] == HOSTILE
    assert f"L2 │ {found.words[best[3][0]][:12]}" in repr(figure)
    with pytest.raises(UsageError, match="best or target"):
        hs.figure(found, by="worst")
    with pytest.raises(UsageError, match="positions 0 to 6"):
        hs.lens(worded, PROMPT, start=7)


def test_attention_as_it_is_looked_at(worded: Model) -> None:
    run = hs.trace(worded, PROMPT, ["pattern"], logits=None)
    before = run["pattern", 1].clone()
    figure = hs.figure(worded, head="L1H2", prompt=PROMPT, sink=False, query=4, key=2)
    (panel,) = figure.data["panels"]
    wanted = before[0, 1 + 1]
    assert panel["limit"] == float(wanted[:, 1:].max()) and panel["frames"] == [[4, 2]]
    assert [row[0] for row in panel["values"]] == [None] * 7
    assert panel["values"][4][1:5] == wanted[4, 1:5].tolist()
    known = {"without": "the first token", "query": 4, "key": 2, "head": "L1H2", "prompt": PROMPT}
    assert known.items() <= figure.provenance.items()
    frames = [box for box in re.findall("<rect[^>]*>", figure.svg()) if 'height="22"' in box and 'width="22"' in box]
    assert len(frames) == 1, "the cell's frame is as large as the cell"
    assert hs.figure(run, head="L1H2", query=3).data["panels"][0]["frames"] == [[3, None]]
    assert torch.equal(run["pattern", 1], before), "what is left out of the figure stays in the run"
    hs.figure(run, head="L1H2", sink=False)
    assert torch.equal(run["pattern", 1], before)
    for wrong, words in (
        ({"key": 1}, "give query"),
        ({"query": 7}, "positions 0 to 6"),
        ({"by": "best"}, "takes no by"),
    ):
        with pytest.raises(UsageError, match=words):
            hs.figure(worded, head="L1H2", prompt=PROMPT, **wrong)


def test_the_example_of_an_atlas() -> None:
    atlas = two_methods()
    pattern = [[1.0, 0.0], [0.75, 0.25]]
    atlas.examples = [{"head": "L1H0", "method": "a", "tokens": ["x", HOSTILE], "pattern": pattern}]
    figure = hs.figure(atlas, method="a", example=True, query=1)
    (panel,) = figure.data["panels"]
    assert panel["values"] == [[1.0, None], [0.75, 0.25]] and panel["frames"] == [[1, None]]
    assert hs.figure(atlas, method="a", example=True, sink=False).data["panels"][0]["limit"] == 0.25
    known = {
        "model": HOSTILE,
        "fingerprint": "abc123",
        "method": "a",
        "head": "L1H0",
        "prompt": f"x{HOSTILE}",
        "seed": 3,
    }
    assert known.items() <= figure.provenance.items()
    for wrong, words in (({"example": True}, "give method"), ({"method": "b", "example": True}, "no attention of"),
                         ({"method": "a", "query": 1}, "of attention")):  # fmt: skip
        with pytest.raises(UsageError, match=words):
            hs.figure(atlas, **wrong)


def test_a_sweep_over_all_heads_is_a_grid_of_changes(tiny: Model, tmp_path: Path) -> None:
    prompts = hs.tasks.make("repeated-tokens", tiny, 4, 0)
    found = hs.sweep(tiny, prompts, hs.each_head(hs.zero), "loss", out=tmp_path / "run")
    loss = hs.trace(tiny, prompts, logits=prompts.positions).logits.log_softmax(-1)
    clean = -loss.gather(-1, prompts.target[..., None])[..., 0].mean(1)
    np.testing.assert_allclose(found.clean.values, clean.numpy(), rtol=1e-6)
    figure = hs.figure(found)
    (panel,) = figure.data["panels"]
    change = (found.values - found.clean.values).mean(1).reshape(3, 4)
    np.testing.assert_allclose(np.array(panel["values"]), change)
    assert figure.title == "Change of loss: zero" and "mean over 4 prompts" in figure.notes[1]
    known = {
        "model": tiny.name, "fingerprint": tiny.fingerprint, "method": "sweep", "task": "repeated-tokens", "seed": 0,
        "metric": "loss", "edit": "zero", "headscope": hs.__version__,
    }  # fmt: skip
    assert known.items() <= figure.provenance.items()
    again = hs.load_run(tmp_path / "run")
    assert isinstance(again, type(found)) and again.identical(found) and again.attrs == found.attrs
    some = hs.sweep(tiny, prompts, [hs.zero("L0H1"), hs.scale("L1H0,L2H3", 0.5)], "loss")
    rows = hs.figure(some)
    assert rows.data["rows"] == ["zero L0H1", "scale L1H0,L2H3 0.5"] and some.component.values.tolist() == ["L0H1", ""]
    np.testing.assert_allclose(np.array(rows.data["panels"][0]["values"]), some.values - some.clean.values)


def test_what_was_written_before_is_read(tiny: Model, tmp_path: Path) -> None:
    prompts = hs.tasks.make("repeated-tokens", tiny, 2, 0)
    found = hs.sweep(tiny, prompts, [hs.zero("L0H1")], "loss", out=tmp_path / "run")
    table, manifest = tmp_path / "run" / "sweep.parquet", tmp_path / "run" / "manifest.json"
    pd.read_parquet(table)[["edit", "prompt", "value"]].to_parquet(table)
    document = json.loads(manifest.read_text())
    del document["origin"]
    manifest.write_text(json.dumps(document))
    again = hs.load_run(tmp_path / "run")
    np.testing.assert_array_equal(again.values, found.values)  # type: ignore[union-attr]
    assert hs.figure(again).provenance["fingerprint"] == tiny.fingerprint
    size = {"n_layers": 3, "n_heads": 4, "n_kv_heads": 4, "d_model": 32}
    atlas = hs.Atlas({"name": "toy", "fingerprint": "f", "anatomy": size}, 5, {}, [verdict()])
    place = atlas.save(tmp_path / "atlas")
    frame = pd.read_parquet(place / "verdicts.parquet").drop(columns=["model", "fingerprint", "seed", "version"])
    frame.to_parquet(place / "verdicts.parquet")
    told = json.loads((place / "atlas.json").read_text())
    told["files"]["verdicts.parquet"] = hashlib.sha256((place / "verdicts.parquet").read_bytes()).hexdigest()
    (place / "atlas.json").write_text(json.dumps(told))
    (old,) = hs.Atlas.load(place).verdicts
    assert (old.model, old.fingerprint, old.seed, old.version) == ("toy", "f", 5, hs.__version__)


def test_a_patching_is_read_again(tiny: Model, tmp_path: Path) -> None:
    first = Patching(scores(np.arange(6.0).reshape(2, 3), ("layer", "position"), method="patching"), 2.0, 1.0, 0.5)
    first.save(tmp_path / "run")
    again = hs.load_run(tmp_path / "run")
    assert isinstance(again, Patching) and (again.clean, again.corrupt, again.used) == (2.0, 1.0, 0.5)
    assert hs.figure(again).document() == hs.figure(first).document()
    (tmp_path / "run" / "patching.parquet").write_text("no table")
    with pytest.raises(FileError, match="damaged"):
        hs.load_run(tmp_path / "run")
    with pytest.raises(FileError, match="no sweep at"):
        hs.load_run(tmp_path)


def test_a_verdict_says_what_it_was_tested_on() -> None:
    own = {"model": "mine", "fingerprint": "f00", "seed": 4, "version": "0.0.9"}
    figure = hs.figure(verdict(**own))
    assert {"model": "mine", "fingerprint": "f00", "seed": 4, "headscope": "0.0.9"}.items() <= figure.provenance.items()
    atlas = two_methods()
    assert hs.figure(atlas, role="induction").provenance["model"] == HOSTILE
    atlas.verdicts = [verdict(**own)]
    assert hs.figure(atlas, role="induction").document() == figure.document(), "its own word counts"


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_format_with_hostile_text(worded: Model, tmp_path: Path, ending: str) -> None:
    figures: dict[str, Figure] = {
        "scatter": hs.figure(two_methods(), method="a", against="b"), "lens": hs.figure(worded, prompt=PROMPT),
        "attention": hs.figure(worded, head="L1H2", prompt=PROMPT, query=6),
    }  # fmt: skip
    for name, figure in figures.items():
        path = figure.save(tmp_path / f"{name}{ending}")
        origin: dict[str, Any] = _origin(path)
        assert origin == figure.provenance and {"model", "fingerprint", "headscope"} <= origin.keys()
        if ending in (".svg", ".html"):
            text = path.read_text(encoding="utf-8")
            assert HOSTILE not in text and "&lt;img/src=x" in text and "<script" not in text
        if ending == ".json":
            assert Figure.load(path).svg() == figure.svg()
    assert len(cells(figures["lens"].svg())) == 4 * 7


@pytest.mark.parametrize("ending", [".json", ".svg"])
def test_a_method_that_orders_nothing_is_drawn_without_a_correlation(tmp_path: Path, ending: str) -> None:
    atlas = two_methods()
    atlas.scores["a"] = atlas.scores["a"] * 0
    figure = hs.figure(atlas, method="a", against="b")
    assert "(Spearman) – over" in figure.notes[0] and figure.provenance["spearman"] is None
    figure.save(tmp_path / f"x{ending}")
    assert not re.search(r"\bnan\b", (tmp_path / f"x{ending}").read_text(encoding="utf-8").lower())
