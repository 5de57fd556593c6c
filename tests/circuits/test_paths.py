"""Path patching against what the toy does by construction, and against plain edits."""

from __future__ import annotations

import numpy as np
import pytest

import headscope as hs
from circuits.test_scores import induction_prompts, some_prompts
from headscope import circuits
from headscope.core.component import Component
from headscope.core.errors import UsageError
from headscope.model import Model
from headscope.sweep import clean
from headscope.sweep.patching import corrupted
from toys import induction_toy


def test_the_previous_token_head_speaks_to_the_keys_of_the_induction_heads() -> None:
    model, prompts = induction_toy(), induction_prompts()
    for mlps in ("frozen", "recomputed"):  # the toy's MLPs write nothing
        effect = {
            to: circuits.path_patching(model, prompts, ["L0H0"], to, mlps=mlps).mean("prompt").item()
            for to in (("L1KV2.k", "L1KV3.k"), ("L1H2.q",), ("L1KV2.v",), ("logits",))
        }
        # all that the twin changes, but for what heads that look everywhere see of the other token
        whole = float((clean(model, prompts) - clean(model, corrupted(prompts))).mean())
        assert effect["L1KV2.k", "L1KV3.k"] == pytest.approx(whole, rel=0.05)
        assert [effect[to] for to in (("L1H2.q",), ("L1KV2.v",), ("logits",))] == pytest.approx([0, 0, 0], abs=1e-9)


def test_frozen_paths_are_cut_edges(tiny: Model) -> None:
    prompts = some_prompts()
    found = circuits.path_patching(tiny, prompts, ["L0H2", "L1MLP", "E"], ["L2H1.q"])
    wanted = circuits.exact(tiny, prompts, edges=[f"{s}->L2H1.q" for s in ("L0H2", "L1MLP", "E")])
    assert list(found.sender.values) == ["L0H2", "L1MLP", "E"]
    for s in ("L0H2", "L1MLP", "E"):
        assert float(found.sel(sender=s).mean()) == pytest.approx(float(wanted.sel(sender=s, receiver="L2H1.q")))


def test_recomputed_paths_into_the_logits_are_a_patch_with_all_other_heads_held(tiny: Model) -> None:
    """Of a sender's ways to the logits, those by heads are shut when these keep to what they said."""
    prompts = some_prompts()
    heads = [str(c) for c in tiny.heads()]
    for sender in ("L0H2", "L1MLP"):
        others = [h for h in heads if h != sender]
        edits = [hs.patch(sender, prompts.corrupt), hs.patch(others, prompts.tokens)]
        wanted = clean(tiny, prompts).numpy() - hs.sweep(tiny, prompts, [edits]).values[0]
        found = circuits.path_patching(tiny, prompts, [sender], ["logits"], mlps="recomputed")
        np.testing.assert_allclose(found.values[0], wanted, rtol=1e-9)
        direct = circuits.path_patching(tiny, prompts, [sender], ["logits"])
        assert abs(found.values - direct.values).max() > 1e-4


def test_recomputed_paths_into_a_query_go_by_the_mlps(tiny: Model) -> None:
    """By hand: the query of one head from a run in which only MLPs pass the change on, set into a clean run."""
    import torch

    prompts = some_prompts()
    heads = [str(c) for c in tiny.heads() if str(c) != "L0H2"]
    held = [hs.patch("L0H2", prompts.corrupt), hs.patch(heads, prompts.tokens)]
    stream = hs.trace(tiny, prompts, ["resid_pre"], held, layers=[2], logits=None)["resid_pre", 2]
    layer = tiny.hf.model.layers[2]
    with torch.no_grad():
        query = layer.self_attn.q_proj(layer.input_layernorm(stream))[..., 8:16]

    def change(_: object, args: object, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[..., 8:16] = query
        return output

    handle = layer.self_attn.q_proj.register_forward_hook(change)
    try:
        after = clean(tiny, prompts).numpy()
    finally:
        handle.remove()
    found = circuits.path_patching(tiny, prompts, ["L0H2"], ["L2H1.q"], mlps="recomputed")
    np.testing.assert_allclose(found.values[0], clean(tiny, prompts).numpy() - after, rtol=1e-8, atol=1e-12)
    assert abs(found.values).max() > 1e-5


def test_components_name_nodes_as_text_does(tiny: Model) -> None:
    prompts, mlp, query = some_prompts(), Component.parse("L1MLP"), "L2H1.q"
    wanted = circuits.path_patching(tiny, prompts, ["L1MLP"], ["L2MLP"])
    for senders, receivers in (
        (mlp, Component.parse("L2MLP")),
        ([mlp], [Component.parse("L2MLP")]),
        ("L1MLP", "L2MLP"),
    ):
        found = circuits.path_patching(tiny, prompts, senders, receivers)
        np.testing.assert_array_equal(found.values, wanted.values)
        assert found.attrs["receivers"] == ["L2MLP"] and list(found.sender.values) == ["L1MLP"]
    with pytest.raises(UsageError, match=r"no node 'L2H1'.*L2H1\.q"):  # a head has three inputs
        circuits.path_patching(tiny, prompts, mlp, Component.parse("L2H1"))
    assert circuits.path_patching(tiny, prompts, mlp, query).attrs["receivers"] == [query]


def test_what_has_no_path_is_refused(tiny: Model) -> None:
    prompts = some_prompts()
    with pytest.raises(UsageError, match="L2H0 is written after L1MLP read"):
        circuits.path_patching(tiny, prompts, ["L2H0"], ["L1MLP"])
    with pytest.raises(UsageError, match="no node 'L2H0'"):
        circuits.path_patching(tiny, prompts, ["L0H0"], ["L2H0"])
    with pytest.raises(UsageError, match="frozen or recomputed"):
        circuits.path_patching(tiny, prompts, ["L0H0"], ["logits"], mlps="patched")
    with pytest.raises(UsageError, match="at least one sender"):
        circuits.path_patching(tiny, prompts, [], ["logits"])
