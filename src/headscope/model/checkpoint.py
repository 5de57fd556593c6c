"""A copy of a model to change, and its way to disk as an ordinary checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import nn

from headscope.core.errors import FileError, NotApplicable
from headscope.core.files import new_folder
from headscope.model.anatomy import weight_of
from headscope.model.load import load
from headscope.model.model import Model


def copy_of(model: Model) -> Model:
    """The same model with weights of its own. Raises NotApplicable where they are not plain floats."""
    for block in model.anatomy.blocks:
        if hasattr(block.o, "base_layer"):
            raise NotApplicable(
                f"{model.name} wears an adapter; merge it first (merge_and_unload), then change its weights."
            )
        weight_of(block.o)
    if any(p.is_meta for p in model.hf.parameters()):
        raise NotApplicable(f"{model.name} is offloaded; load it whole into memory to change its weights.")
    twin = load(copy.deepcopy(model.hf), tokenizer=model.tokenizer)
    twin.name = model.name
    return twin


def save(hf: nn.Module, tokenizer: Any, path: str | Path) -> Path:
    """Write an ordinary checkpoint folder, whole or not at all. Raises FileError where it cannot be written."""
    path = Path(path)
    try:
        with new_folder(path) as folder:
            hf.save_pretrained(folder)  # type: ignore[operator]
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
    except OSError as error:
        raise FileError(f"The model could not be written to {path} ({error.strerror or error}).") from error
    return path
