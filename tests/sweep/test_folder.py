"""A sweep that is stopped at any moment goes on where it was and gives the same values, bit for bit."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import headscope as hs
from headscope import tasks
from headscope.core.errors import FileError, UsageError
from headscope.model import Model
from headscope.sweep import folder as folders

SCRIPT = """
import sys, time, torch
sys.path[:0] = {paths!r}
torch.set_num_threads(1)
import headscope as hs
from families.tiny import build
from headscope import tasks

model = hs.load(build("llama"))
prompts = tasks.make("repeated-tokens", model, 4, 0)
hs.sweep(model, prompts, hs.each_head(hs.zero), "loss", out={out!r}, resume=True,
         progress=lambda done, total: (print(done, flush=True), time.sleep({pause})))
"""


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("headscope.sweep.job"), "affordable_tokens", lambda *_: 320)


def _values(model: Model, **options: object) -> np.ndarray:
    prompts = tasks.make("repeated-tokens", model, 4, 0)
    return hs.sweep(model, prompts, hs.each_head(hs.zero), "loss", **options).values  # type: ignore[arg-type]


def test_the_folder_holds_the_result(tiny: Model, tmp_path: Path) -> None:
    found = _values(tiny, out=tmp_path / "run")
    np.testing.assert_array_equal(found, _values(tiny))
    frame = pd.read_parquet(tmp_path / "run" / "sweep.parquet")
    np.testing.assert_array_equal(frame.value.values.reshape(12, 4), found)
    assert frame.edit[4] == "zero L0H1" and list(frame.prompt[:4]) == [0, 1, 2, 3]
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert sorted(i for chunk in manifest["chunks"] for i in chunk["sets"]) == list(range(12))
    assert len(manifest["chunks"]) == len(list((tmp_path / "run" / "chunks").iterdir())) == 6


def test_a_stopped_sweep_goes_on_and_runs_no_chunk_twice(tiny: Model, tmp_path: Path) -> None:
    wanted = _values(tiny)

    def stop(done: int, total: int) -> None:
        if done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _values(tiny, out=tmp_path / "run", progress=stop)
    assert len(list((tmp_path / "run" / "chunks").glob("*.safetensors"))) == 3
    steps: list[int] = []
    found = _values(tiny, out=tmp_path / "run", resume=True, progress=lambda done, total: steps.append(done))
    assert steps == [8, 10, 12]
    np.testing.assert_array_equal(found, wanted)


def test_chunks_stay_as_first_planned(tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        _values(tiny, out=tmp_path / "run", progress=lambda done, total: 1 // 0)
    before = (tmp_path / "run" / "manifest.json").read_bytes()
    monkeypatch.setattr(importlib.import_module("headscope.sweep.job"), "affordable_tokens", lambda *_: 10_000)
    np.testing.assert_array_equal(_values(tiny, out=tmp_path / "run", resume=True), _values(tiny))
    assert (tmp_path / "run" / "manifest.json").read_bytes() == before


@pytest.mark.slow
def test_a_killed_sweep_loses_at_most_the_running_chunk(tiny: Model, tmp_path: Path) -> None:
    """kill -9, three times, then the end: the same values as in one go."""
    out = tmp_path / "run"
    root = Path(__file__).parent.parent
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    monkey = "import importlib; importlib.import_module('headscope.sweep.job').affordable_tokens = lambda *_: 320\n"

    def start(pause: float) -> subprocess.Popen[str]:
        script = SCRIPT.format(paths=[str(root)], out=str(out), pause=pause)
        head, _, tail = script.partition("model = ")
        return subprocess.Popen(
            [sys.executable, "-c", f"{head}{monkey}model = {tail}"], stdout=subprocess.PIPE, text=True, env=environment
        )

    seen = 0
    for _ in range(3):
        process = start(pause=30)
        line = process.stdout.readline()  # type: ignore[union-attr]
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert int(line) > seen, "finished chunks were run again"
        seen = int(line)
    assert start(pause=0).wait(timeout=120) == 0
    frame = pd.read_parquet(out / "sweep.parquet")
    np.testing.assert_array_equal(frame.value.values.reshape(12, 4), _values(tiny))
    assert not [p for p in out.rglob(".*")], "a half-written file was left"


def test_another_sweep_does_not_resume_this_one(tiny: Model, tmp_path: Path) -> None:
    _values(tiny, out=tmp_path / "run")
    prompts = tasks.make("repeated-tokens", tiny, 4, 0)
    with pytest.raises(UsageError, match="holds a sweep already; go on with it by --resume"):
        _values(tiny, out=tmp_path / "run")
    others = [
        (prompts, hs.each_head(hs.zero), "prob"),
        (prompts, [hs.zero(h) for h in tiny.heads()[:-1]], "loss"),
        (prompts, [hs.scale(h, 0.5) for h in tiny.heads()], "loss"),
        (tasks.make("repeated-tokens", tiny, 4, 1), hs.each_head(hs.zero), "loss"),
    ]
    for given, edits, metric in others:
        with pytest.raises(UsageError, match="holds another sweep"):
            hs.sweep(tiny, given, edits, metric, out=tmp_path / "run", resume=True)  # type: ignore[arg-type]


def test_what_is_not_ours_or_damaged_is_named(tiny: Model, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    with pytest.raises(FileError, match="holds no sweep"):
        _values(tiny, out=tmp_path / "mine")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep me"
    _values(tiny, out=tmp_path / "run")
    chunk = tmp_path / "run" / "chunks" / "00001.safetensors"
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[:-9])
    with pytest.raises(FileError, match=r"00001.safetensors is damaged .* delete it"):
        _values(tiny, out=tmp_path / "run", resume=True)
    chunk.unlink()
    np.testing.assert_array_equal(_values(tiny, out=tmp_path / "run", resume=True), _values(tiny))
    assert chunk.read_bytes() == whole
    manifest = tmp_path / "run" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(f'"format_version": {folders.FORMAT}', '"format_version": 99'))
    with pytest.raises(FileError, match="sweep format 99"):
        _values(tiny, out=tmp_path / "run", resume=True)
    manifest.write_text("{")
    with pytest.raises(FileError, match="cannot be read"):
        _values(tiny, out=tmp_path / "run", resume=True)


def test_a_chunk_that_does_not_fit_runs_in_halves(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("headscope.sweep.job")
    wanted = _values(tiny)
    run, sizes = module.run_sets, []

    def small(model: Model, clean: object, sets: list[object], *args: object, **options: object) -> torch.Tensor:
        sizes.append(len(sets))
        if len(sets) > 1:
            raise torch.OutOfMemoryError("no room")
        return run(model, clean, sets, *args, **options)

    monkeypatch.setattr(module, "run_sets", small)
    np.testing.assert_allclose(_values(tiny), wanted, rtol=1e-12)
    assert sizes == [2, 1, 1] * 6


def test_an_unknown_engine_is_named(tiny: Model) -> None:
    with pytest.raises(UsageError, match=r"no engine 'rai'.*ray"):
        _values(tiny, engine="rai")
