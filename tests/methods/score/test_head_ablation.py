"""What losing each head costs, against plain hooks on the model's own modules."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch
from torch import Tensor

import headscope as hs
from brute import head, hooked, plain, setting
from headscope import tasks
from headscope.core.errors import UsageError
from headscope.methods.score import head_ablation
from headscope.model import Model
from headscope.tasks import Prompts

N = 4


def _losses(logits: Tensor, prompts: Prompts) -> Tensor:
    """[prompt]"""
    at = logits.gather(1, prompts.positions[..., None].expand(-1, -1, logits.shape[-1]))
    entropy = torch.nn.functional.cross_entropy(at.flatten(0, 1), prompts.target.flatten(), reduction="none")
    return entropy.view(len(prompts), -1).mean(1)


def _z(model: Model, tokens: Tensor, layer: int) -> Tensor:
    kept: list[Tensor] = []
    with hooked(model, f"model.layers.{layer}.self_attn.o_proj", lambda x: kept.append(x) or x):  # type: ignore[func-returns-value]
        plain(model, input_ids=tokens)
    return kept[0]


def _rises(model: Model, prompts: Prompts, mode: str, seed: int) -> np.ndarray:
    """[layer, head, prompt]"""
    clean = _losses(plain(model, input_ids=prompts.tokens), prompts)
    shift = int(torch.randint(1, N, (1,), generator=torch.Generator().manual_seed(seed)))
    rises = []
    for layer in range(3):
        z = _z(model, prompts.tokens, layer)
        for h in range(4):
            own = z[..., head(h)]
            new = {
                "zero": torch.zeros_like(own),
                "mean": own.mean((0, 1)).expand_as(own),
                "resample": own.roll(shift, 0),
            }
            with hooked(
                model, f"model.layers.{layer}.self_attn.o_proj", setting(head(h), lambda x, new=new[mode]: new)
            ):
                rises.append(_losses(plain(model, input_ids=prompts.tokens), prompts) - clean)
    return torch.stack(rises).view(3, 4, N).numpy()


@pytest.mark.parametrize("mode", ["zero", "mean", "resample"])
def test_equals_plain_hooks(tiny: Model, mode: str) -> None:
    found = hs.score(tiny, "head-ablation", mode=mode, n=N, seed=7)
    rises = _rises(tiny, tasks.make("repeated-tokens", tiny, N, 7), mode, 7)
    np.testing.assert_allclose(found.values, rises.mean(2), rtol=0, atol=1e-10)
    error = 1.96 * rises.std(2, ddof=1) / np.sqrt(N)
    np.testing.assert_allclose(found.ci_low, rises.mean(2) - error, rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.ci_high, rises.mean(2) + error, rtol=0, atol=1e-10)
    assert (found.n == N).all() and np.abs(rises.mean(2)).min() > 1e-6


def test_a_task_of_text(worded: Model) -> None:
    found = hs.score(worded, "head-ablation", task="ioi", n=N, seed=2)
    prompts = tasks.make("ioi", worded, N, 2)
    assert prompts.mask is None
    np.testing.assert_allclose(found.values, _rises(worded, prompts, "zero", 2).mean(2), rtol=0, atol=1e-10)


def test_the_toy_needs_its_two_heads_alone(induction: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_ablation, "make_task", functools.partial(tasks.make, length=12))
    found = hs.score(induction, "head-ablation").values
    assert found[1, 2] > 1 and found[0, 0] > 1  # the one copies, the other tells it where to look
    assert found[1, 3] < -1e-3  # of the opposite sign: better without it
    assert np.abs(np.delete(found.ravel(), [0, 6, 7])).max() == 0.0


def test_one_prompt_has_no_interval(tiny: Model) -> None:
    found = hs.score(tiny, "head-ablation", n=1)
    assert np.isfinite(found.values).all() and np.isnan(found.ci_low).all() and np.isnan(found.ci_high).all()


def test_bad_options_are_named(tiny: Model) -> None:
    with pytest.raises(UsageError, match="'delete'; it takes zero, mean or resample"):
        hs.score(tiny, "head-ablation", mode="delete")
    with pytest.raises(UsageError, match="no task 'repeated-token'"):
        hs.score(tiny, "head-ablation", task="repeated-token")
    with pytest.raises(UsageError, match="at least two rows"):
        hs.score(dataclasses.replace(tiny), "head-ablation", mode="resample", n=1)
