"""The hand-made models, built once."""

from __future__ import annotations

import pytest

import headscope as hs
import toys
from eager import eager
from headscope.model import Model


@pytest.fixture(scope="session")
def induction() -> Model:
    return toys.induction_toy()


@pytest.fixture(scope="session")
def worded() -> Model:
    """A random Llama with a tokenizer of words, no BOS."""
    return toys.worded()


@pytest.fixture(scope="session")
def with_bos() -> Model:
    """The same with a BOS, under eager attention."""
    made = toys.worded(bos=True)
    return hs.load(eager(made.hf), tokenizer=made.tokenizer)


@pytest.fixture(scope="session", params=["bos", "gpt2"])
def random_model(request: pytest.FixtureRequest, with_bos: Model) -> Model:
    """Two random models under eager attention: Llama with kv groups and a BOS, GPT-2 without a tokenizer."""
    from families.tiny import build

    return with_bos if request.param == "bos" else hs.load(eager(build("gpt2")))
