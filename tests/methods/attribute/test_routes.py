"""The two methods that read routes: one adds up a route's edges, the other cuts nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import headscope as hs
from families.tiny import DECODERS, build
from headscope.core.errors import UsageError
from headscope.model import Model
from headscope.tasks import Prompts
from routes import dense

FAMILIES = [name for name in DECODERS if name != "opt-post-norm"]


def _prompts() -> Prompts:
    tokens = torch.randint(5, 96, (2, 7), generator=torch.Generator().manual_seed(4))
    at = torch.tensor([[4, 6], [3, 5]])
    return Prompts("t", 0, tokens, at, at + 20, at + 30)


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return {family: hs.load(build(family), check=False) for family in FAMILIES}


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt-j", "gemma2"])
def test_a_head_scores_what_its_edges_weigh(models: dict[str, Model], family: str) -> None:
    prompts, model = _prompts(), models[family]
    found = hs.attribute(model, "information-flow-routes", prompts)
    for i in range(2):
        heads, mlps = np.zeros((3, 4)), np.zeros(3)
        for at in prompts.positions[i].tolist():
            for (_, _, what), weight in dense.edges(model, prompts.tokens[i : i + 1], at, 0.04).items():
                if "MLP" in what:
                    mlps[int(what[1])] += weight / 2
                elif what.startswith("L"):
                    heads[int(what[1]), int(what[3])] += weight / 2
        np.testing.assert_allclose(found.values[i], heads, atol=1e-6)
        np.testing.assert_allclose(found.mlp.values[i], mlps, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_shares_with_nothing_cut_are_those_of_the_rule(models: dict[str, Model], family: str) -> None:
    prompts, model = _prompts(), models[family]
    found = hs.attribute(model, "lm-tt", prompts)
    total = found.sum("head") + found.residual + (found.mlp if model.anatomy.parts.parallel else 0)
    np.testing.assert_allclose(total, 1.0, atol=1e-12)
    tokens, at = prompts.tokens[1:], 5
    for layer in range(3):
        parts: dict[Any, Any] = dense.attention_parts(model, tokens, layer, at, "drop")
        run = hs.trace(model, tokens, ["resid_pre", "attn_out", "mlp_out"], layers=[layer], logits=None)
        pre, attn, mlp = (run[site, layer][0, at] for site in ("resid_pre", "attn_out", "mlp_out"))
        y = pre + attn
        if model.anatomy.parts.parallel:
            y, parts = y + mlp, {**parts, "mlp": mlp}
        value = {key: dense.prox(y, part) for key, part in parts.items()}
        for h in range(4):
            mine = sum(x for key, x in value.items() if key[1] == f"L{layer}H{h}")
            assert float(found[1, layer, h]) == pytest.approx(mine / sum(value.values()), abs=1e-6)


def test_bad_options_are_refused(models: dict[str, Model]) -> None:
    with pytest.raises(UsageError, match="at least one position"):
        hs.attribute(models["llama"], "lm-tt", _prompts(), most=0)
    with pytest.raises(UsageError, match="at least one position"):
        hs.attribute(models["llama"], "information-flow-routes", _prompts(), most=0)
