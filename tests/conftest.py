"""Shared models: a tiny random one, and the pretrained one, loaded once."""

from __future__ import annotations

import pytest
import torch

import headscope as hs
from families.tiny import build
from headscope.model import Model, packaged

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny() -> Model:
    """A random Llama in float64: 3 layers, 4 heads, 2 kv heads, d_model 32, 96 tokens, no tokenizer."""
    return hs.load(build("llama"))


@pytest.fixture(scope="session")
def smollm2() -> Model:
    """The real 135M model; a test that uses it is marked `real`."""
    if packaged.path_of("smollm2-135m") is None:
        pytest.skip("run: headscope models get smollm2-135m")
    return hs.load("smollm2-135m")
