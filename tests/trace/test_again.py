"""One layer looked into once more: the values of the first pass, and only the queries that are asked for."""

from __future__ import annotations

import pytest
import torch

import headscope as hs
from brute import some_tokens
from families.tiny import DECODERS, build
from headscope.trace import Capture, recording


@pytest.mark.parametrize("attn", ["as loaded", "eager"])
@pytest.mark.parametrize("family", DECODERS)
def test_some_queries_of_a_layer_are_rows_of_its_pattern(family: str, attn: str) -> None:
    model = hs.load(build(family), check=False)
    if attn == "eager":
        model.hf.set_attn_implementation(attn)
    tokens, queries = some_tokens(2, 9), torch.tensor([1, 4, 8])
    with recording(model) as calls:
        run = hs.trace(model, tokens, ["resid_pre", "attn_scores", "pattern", "k"])
    for layer in range(model.anatomy.n_layers):
        stream = run["resid_pre", layer]
        found = calls.again(layer, stream, map(Capture, ["pattern", "attn_scores", "k"]), queries)
        for site in ("pattern", "attn_scores"):
            torch.testing.assert_close(found[site], run[site, layer][..., queries, :], rtol=0, atol=1e-12)
        assert found["k"].equal(run["k", layer])
        # what comes after the attention is there too where it is asked for
        whole = calls.again(layer, stream, map(Capture, ["pattern", "resid_post"]))
        assert whole["pattern"].equal(run["pattern", layer])
        if layer + 1 < model.anatomy.n_layers:
            torch.testing.assert_close(whole["resid_post"], run["resid_pre", layer + 1], rtol=0, atol=0)
    assert not model.anatomy.blocks[0].attn._forward_hooks and not model.anatomy.blocks[0].attn._forward_pre_hooks
