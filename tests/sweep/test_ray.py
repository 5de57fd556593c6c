"""Chunks as tasks of a real local Ray cluster: the same values, also when a worker is killed."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import headscope as hs
from headscope import tasks
from headscope.core.errors import HeadscopeError
from headscope.model import Model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("headscope.sweep.job"), "affordable_tokens", lambda *_: 320)


def test_two_workers_give_the_same_values(cluster: None, tiny: Model, tmp_path: Path) -> None:
    prompts = tasks.make("repeated-tokens", tiny, 4, 0)
    wanted = hs.sweep(tiny, prompts, hs.each_head(hs.zero), "loss").values
    steps: list[int] = []
    found = hs.sweep(
        tiny, prompts, hs.each_head(hs.zero), "loss", engine="ray", out=tmp_path / "run",
        progress=lambda done, total: steps.append(done),
    ).values  # fmt: skip
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)
    assert steps == [2, 4, 6, 8, 10, 12]
    # what one engine began, another one ends
    (tmp_path / "run" / "chunks" / "00002.safetensors").unlink()
    again = hs.sweep(tiny, prompts, hs.each_head(hs.zero), "loss", out=tmp_path / "run", resume=True).values
    np.testing.assert_allclose(again, wanted, rtol=0, atol=1e-12)


def test_a_killed_worker_is_replaced(cluster: None, tiny: Model, tmp_path: Path) -> None:
    marker = str(tmp_path / "killed")

    def deadly(logits: torch.Tensor) -> torch.Tensor:
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return logits[:, -1].log_softmax(-1)[:, 7]
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    tokens = torch.randint(5, 96, (3, 12), generator=torch.Generator().manual_seed(0))
    found = hs.sweep(tiny, tokens, hs.each_head(hs.zero), deadly, engine="ray").values
    assert os.path.exists(marker)
    np.testing.assert_allclose(found, hs.sweep(tiny, tokens, hs.each_head(hs.zero), deadly).values, rtol=0, atol=1e-12)


def test_a_model_that_gave_its_hidden_states_before(cluster: None) -> None:
    """transformers leaves hooks behind on it that cannot be sent to another process."""
    from families.tiny import build

    model = hs.load(build("llama"))
    tokens = torch.randint(5, 96, (3, 12), generator=torch.Generator().manual_seed(0))
    model.hf(tokens, output_hidden_states=True, output_attentions=True)

    def metric(logits: torch.Tensor) -> torch.Tensor:
        return logits[:, -1, 7]

    found = hs.sweep(model, tokens, hs.each_head(hs.zero), metric, engine="ray").values
    np.testing.assert_allclose(found, hs.sweep(model, tokens, hs.each_head(hs.zero), metric).values, rtol=0, atol=1e-12)


def test_an_error_in_a_worker_is_the_users_error(cluster: None, tiny: Model) -> None:
    tokens = torch.randint(5, 96, (3, 12))
    with pytest.raises(HeadscopeError, match="one value a prompt"):
        hs.sweep(tiny, tokens, [hs.zero("L1H1")], lambda logits: logits, engine="ray")
