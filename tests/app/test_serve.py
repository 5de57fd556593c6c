"""The command: refused in one sentence where it cannot start, and ended cleanly by Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

import headscope as hs
from app.conftest import tokenizer
from families.tiny import build

SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "serve.schema.json"


def command(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
    line = [sys.executable, "-c", "from headscope.cli import main; main()", "serve", *map(str, arguments)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options)


@pytest.fixture(scope="module")
def saved(atlas: hs.Atlas, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The atlas on disk."""
    return atlas.save(tmp_path_factory.mktemp("saved") / "atlas")


def test_it_serves_until_ctrl_c(saved: Path, tmp_path: Path) -> None:
    running = command(saved, "--no-browser", "--json", cwd=tmp_path)
    try:
        assert running.stdout is not None
        document = json.loads(running.stdout.readline())
        jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8"))).validate(document)
        with urllib.request.urlopen(f"{document['url']}api/atlas", timeout=30) as answer:
            assert json.load(answer)["model"]["name"] == "tiny <b>bold</b>"
        # the model of that name is on no machine: said in one sentence, while the atlas is shown
        ask = urllib.request.Request(f"{document['url']}api/ablate", b'{"layer":0,"head":0,"prompt":"a"}',
                                     {"content-type": "application/json"})  # fmt: skip
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(ask, timeout=60)
        assert "could not be loaded" in json.load(refused.value)["error"]
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=30)
        assert running.returncode == 0 and out == "", (out, err)
        assert "Traceback" not in err and "Loading" in err
    finally:
        running.kill()
    assert not list(tmp_path.iterdir()), "nothing is written where no job ended"


def test_a_killed_server_loses_no_finished_result(tmp_path: Path) -> None:
    build("llama", torch.float32).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    running = command("--model", tmp_path / "model", "--out", tmp_path / "runs", "--no-browser", "--json")
    try:
        assert running.stdout is not None
        url = json.loads(running.stdout.readline())["url"]
        body = b'{"kind": "scan", "methods": "bos-sink", "seed": 5}'
        start = urllib.request.Request(f"{url}api/jobs", body, {"content-type": "application/json"})
        urllib.request.urlopen(start, timeout=30).close()
        state = "queued"
        end = time.monotonic() + 120
        while state in ("queued", "running") and time.monotonic() < end:
            time.sleep(0.2)
            with urllib.request.urlopen(f"{url}api/jobs", timeout=30) as answer:
                (job,) = json.load(answer)["jobs"]
            state = job["state"]
        assert state == "done", job
    finally:
        running.kill()
        running.communicate(timeout=30)
    found = hs.Atlas.load(tmp_path / "runs" / "atlas-1")
    assert list(found.scores) == ["bos-sink"] and found.seed == 5


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("an atlas, --model, or both", []),
        ("give --token", ["@", "--host", "0.0.0.0"]),
        ("--token takes at least 16", ["@", "--token", "short"]),
        ("There is no atlas", ["nowhere"]),
        ("not a port", ["@", "--port", "99999"]),
        ("could not be loaded", ["@", "--model", "nowhere/nothing"]),
    ],
)
def test_what_cannot_be_served_is_refused(saved: Path, tmp_path: Path, words: str, arguments: list[str]) -> None:
    given = [str(saved) if a == "@" else a for a in arguments]
    out, err = command(*given, "--no-browser", cwd=tmp_path).communicate(timeout=60)
    assert out == "" and err.splitlines()[-1].startswith("Error: ") and words in err and "Traceback" not in err


def test_another_model_than_the_atlas_s_is_refused_at_once(saved: Path, tmp_path: Path) -> None:
    other = build("llama-mqa", torch.float32)
    other.save_pretrained(tmp_path / "other")
    running = command(saved, "--model", tmp_path / "other", "--no-browser", cwd=tmp_path)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 1 and "fingerprint" in err and out == ""
