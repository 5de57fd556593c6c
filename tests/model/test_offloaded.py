"""A model that accelerate has spread over memory and disk works unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model

import headscope as hs
from families.tiny import build
from headscope.core.errors import NotApplicable
from headscope.model import Model


@pytest.fixture
def spread(tmp_path: Path) -> Model:
    """The tiny Llama with two of its layers on disk."""
    whole = {
        name: "cpu" for name in ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    }
    places = {**whole, "model.layers.1": "disk", "model.layers.2": "disk"}
    hf = dispatch_model(build("llama"), device_map=places, main_device="cpu", offload_dir=str(tmp_path))
    assert hf.model.layers[1].self_attn.o_proj.weight.is_meta
    return hs.load(hf)


def test_everything_is_as_in_memory(spread: Model, tiny: Model) -> None:
    assert hs.doctor(spread)["ok"] and spread.fingerprint == tiny.fingerprint
    assert torch.equal(spread.anatomy.W_OV(2, 3), tiny.anatomy.W_OV(2, 3))
    tokens = torch.randint(5, 96, (2, 9), generator=torch.Generator().manual_seed(0))
    sites = ["z", "pattern", "neuron", "resid_post"]
    ours, wanted = (hs.trace(m, tokens, sites, edits=hs.zero("L1H2")) for m in (spread, tiny))
    assert torch.equal(ours.logits, wanted.logits)
    assert all(torch.equal(ours[site], wanted[site]) for site in sites)


def test_sweeps_run_on_it(spread: Model, tiny: Model) -> None:
    tokens = torch.randint(5, 96, (2, 9), generator=torch.Generator().manual_seed(1))
    edits = [*map(hs.zero, tiny.heads()), hs.zero("L2H1", positions=7)]
    ours, wanted = (
        hs.sweep(m, tokens, edits, lambda logits: logits[:, -1].log_softmax(-1)[:, 9]).values for m in (spread, tiny)
    )
    assert abs(ours - wanted).max() < 1e-12
    assert spread.hf.model.layers[1].self_attn.o_proj.weight.is_meta  # nothing was left in memory


def test_its_weights_are_not_changed(spread: Model) -> None:
    with pytest.raises(NotApplicable, match="is offloaded; load it whole"):
        hs.act.bake(spread, hs.zero("L1H1"))
