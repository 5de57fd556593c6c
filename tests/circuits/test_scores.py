"""Scores of edges where the answer is known: by construction, by linearity, and by cutting one at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import headscope as hs
from circuits.test_wiring import FAMILIES
from families.tiny import build
from headscope import circuits
from headscope.core.errors import NotApplicable, UsageError
from headscope.model import Model
from headscope.sweep import finite
from headscope.tasks import Prompts
from toys import induction_toy

#: clean `a b … a`, corrupted `x b … a`: only the previous-token head sees the change, and tells both induction heads
TRUE = {"E->L0KV0.v", "L0H0->L1KV2.k", "L0H0->L1KV3.k", "L1H2->logits", "L1H3->logits"}


def prompts_of(clean: Tensor, corrupt: Tensor, target: Tensor, foil: Tensor, **more: object) -> Prompts:
    at = torch.full((len(clean), 1), clean.shape[1] - 1)
    return Prompts("toy", 0, clean, at, target[:, None], foil[:, None], corrupt=corrupt, metric="logit_diff", **more)


def induction_prompts(n: int = 6, width: int = 9) -> Prompts:
    generator = torch.Generator().manual_seed(0)
    clean = torch.stack([1 + torch.randperm(30, generator=generator)[:width] for _ in range(n)])
    others = torch.tensor([[t for t in range(1, 32) if t not in row] for row in clean.tolist()])
    corrupt = clean.clone()
    clean[:, -1] = clean[:, 3]
    corrupt[:, -1] = clean[:, 3]
    corrupt[:, 3] = others[:, 0]
    return prompts_of(clean, corrupt, clean[:, 4], others[:, 1])


def softened(by: float) -> Model:
    """The induction toy with heads that look less sharply: a saturated softmax has no gradient."""
    model = induction_toy()
    with torch.no_grad():
        for block in model.hf.transformer.h:
            block.attn.c_attn.weight[:, :128] /= by
            block.attn.c_attn.bias[:128] /= by
    return model


def some_prompts(n: int = 3, width: int = 7, **more: object) -> Prompts:
    generator = torch.Generator().manual_seed(2)
    clean, corrupt = (torch.randint(5, 96, (n, width), generator=generator) for _ in range(2))
    return prompts_of(clean, corrupt, clean[:, 1], clean[:, 2], **more)


def test_exact_finds_the_induction_circuit_and_nothing_else() -> None:
    model = induction_toy()
    scores = circuits.exact(model, induction_prompts())
    found = {
        f"{s}->{r}"
        for s in scores.sender.values
        for r in scores.receiver.values
        if abs(float(np.nan_to_num(scores.sel(sender=s, receiver=r)))) > 1e-6
    }
    assert found == TRUE
    assert circuits.edge_auroc(scores, TRUE) == 1.0
    # one helps, the other takes part of it away again
    assert (
        float(scores.sel(sender="L1H2", receiver="logits"))
        > 1
        > 0
        > float(scores.sel(sender="L1H3", receiver="logits"))
    )


def test_gradients_find_it_where_the_softmax_is_not_saturated() -> None:
    prompts = induction_prompts()
    soft = softened(15.0)
    assert circuits.edge_auroc(circuits.exact(soft, prompts), TRUE) >= 0.95
    assert circuits.edge_auroc(circuits.eap_ig(soft, prompts), TRUE) >= 0.95
    # saturated, the plain gradient at the keys is nothing, and the exact cut is everything
    plain = circuits.eap(induction_toy(), prompts)
    assert abs(float(plain.sel(sender="L0H0", receiver="L1KV2.k"))) < 1e-9


def test_gradients_find_it_among_noise() -> None:
    """The softened toy with every weight disturbed, so that each edge does a little."""
    model = softened(15.0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.hf.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    prompts = induction_prompts()
    exact, ig = circuits.exact(model, prompts), circuits.eap_ig(model, prompts)
    assert int((abs(exact) > 1e-6).sum()) > 60
    assert circuits.edge_auroc(exact, TRUE) >= 0.95 and circuits.edge_auroc(ig, TRUE) >= 0.95


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["eap", "eap_ig"])
def test_edges_into_the_logits_add_up_to_the_direct_effect(family: str, method: str) -> None:
    """A score is difference · gradient: over all senders, that of the whole stream at the end."""
    model = hs.load(build(family), check=False)
    prompts = some_prompts()
    found = getattr(circuits, method)(model, prompts, **({"steps": 3} if method == "eap_ig" else {}))
    ends = [hs.trace(model, t, ["resid_post"], layers=[2], logits=None)["resid_post", 2]
            for t in (prompts.tokens, prompts.corrupt)]  # fmt: skip
    steps = [1.0] if method == "eap" else [0.0, 1 / 3, 2 / 3]
    starts = [hs.trace(model, t, ["resid_pre"], layers=[0], logits=None)["resid_pre", 0]
              for t in (prompts.tokens, prompts.corrupt)]  # fmt: skip
    gradient = torch.zeros_like(ends[0])
    for k in steps:
        edit = hs.patch("L0RESID", (starts[1] + k * (starts[0] - starts[1]))[None])
        run = hs.trace(model, prompts, ["resid_post"], edit, layers=[2], logits=prompts.positions, grad=True)
        value = run.logits[:, 0].gather(1, prompts.target) - run.logits[:, 0].gather(1, prompts.foil)
        gradient += torch.autograd.grad(value.sum(), run["resid_post", 2])[0] / len(steps)
    wanted = float(((ends[0] - ends[1]) * gradient).sum()) / len(prompts)
    assert float(found.sel(receiver="logits").sum()) == pytest.approx(wanted, rel=1e-5)


def linear() -> Model:
    """Attention in which every position looks at all before it evenly, no norms, no MLPs: linear in the embeddings."""
    model = hs.load(build("gpt2"), check=False)
    with torch.no_grad():
        for block in model.hf.transformer.h:
            block.attn.c_attn.weight[:, :64] = 0.0
            block.attn.c_attn.bias[:64] = 0.0
            block.mlp.c_proj.weight.zero_()
            block.ln_1 = block.ln_2 = torch.nn.Identity()
    model.hf.transformer.ln_f = torch.nn.Identity()
    return hs.load(model.hf, check=False)


def test_in_a_linear_model_gradients_are_exact() -> None:
    model, prompts = linear(), some_prompts()
    wanted = circuits.exact(model, prompts)
    assert float(abs(wanted).max()) > 1e-3
    for found in (circuits.eap(model, prompts), circuits.eap_ig(model, prompts, steps=2)):
        np.testing.assert_allclose(found.values, wanted.values, rtol=1e-8, atol=1e-10)


def test_gradients_agree_with_cutting_on_a_random_model(tiny: Model) -> None:
    prompts = some_prompts(8)
    wanted = circuits.exact(tiny, prompts, neurons=["L1N3"])
    there = ~np.isnan(wanted.values)
    for method, least in (("eap", 0.7), ("eap_ig", 0.8)):
        found = getattr(circuits, method)(tiny, prompts, neurons=["L1N3"])
        assert (np.isnan(found.values) == ~there).all()
        assert np.corrcoef(found.values[there], wanted.values[there])[0, 1] > least, method


def test_the_sign_says_whether_an_edge_helps(tiny: Model) -> None:
    """Of loss, less is better: an edge that lifts the loss when cut has a score above 0."""
    prompts = replace(some_prompts(), metric="loss")
    scores = circuits.exact(tiny, prompts, edges=["E->logits", "L2H1->logits", "L0MLP->L1MLP"])
    assert int(scores.notnull().sum()) == 3
    graph = circuits.graph_of(tiny)
    from headscope.circuits.run import evaluate

    for edge in ("E->logits", "L2H1->logits"):
        kept = torch.stack([graph.exists, graph.exists & ~graph.mask([edge])])
        before, after = evaluate(tiny, prompts, graph, kept).mean(1)
        s, r = edge.split("->")
        assert float(scores.sel(sender=s, receiver=r)) == pytest.approx(after - before)
    kl = circuits.exact(tiny, prompts, edges=["E->logits"], metric="kl")
    assert float(kl.sel(sender="E", receiver="logits")) > 0
    assert circuits.eap_ig(tiny, prompts, metric="kl").attrs["metric"] == "kl"


def test_padding_changes_nothing(tiny: Model) -> None:
    """Prompts padded on the left have the scores they have alone."""
    short = some_prompts(2, 5)
    pad = torch.full((2, 3), 9)
    mask = torch.cat([torch.zeros(2, 3), torch.ones(2, 5)], 1).bool()
    long = replace(
        short, tokens=torch.cat([pad, short.tokens], 1), corrupt=torch.cat([pad, short.corrupt], 1),
        positions=short.positions + 3, mask=mask,
    )  # fmt: skip
    for method in (circuits.eap, circuits.eap_ig, circuits.exact):
        np.testing.assert_allclose(method(tiny, long).values, method(tiny, short).values, rtol=1e-5, atol=1e-9)
    with pytest.raises(UsageError, match="different lengths"):
        circuits.eap(tiny, long, replace="mean")


def test_prompts_in_parts_give_what_they_give_together(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, edges = some_prompts(5), ["E->logits", "L0H1->L1KV0.k", "L1MLP->L2H3.q"]

    def both(how: str) -> list[np.ndarray]:
        return [circuits.eap_ig(tiny, prompts, replace=how, steps=2).values,
                circuits.exact(tiny, prompts, replace=how, edges=edges).values]  # fmt: skip

    found = {how: both(how) for how in ("patch", "mean")}
    monkeypatch.setattr("headscope.circuits.run.PASS_BYTES", 1)
    monkeypatch.setattr("headscope.circuits.scores.PASS_BYTES", 1)
    for how, wanted in found.items():
        for a, b in zip(both(how), wanted, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-9)


def test_half_precision_scores_are_scores(tiny: Model) -> None:
    half = hs.load(build("llama", torch.bfloat16), check=False)
    prompts, whole = some_prompts(), hs.load(build("llama", torch.float32), check=False)
    a, b = circuits.eap(half, prompts).values, circuits.eap(whole, prompts).values
    there = ~np.isnan(a)
    assert np.corrcoef(a[there], b[there])[0, 1] > 0.95


def test_acdc_keeps_the_induction_circuit_and_nothing_else() -> None:
    found = circuits.acdc(induction_toy(), induction_prompts(), tau=1e-3, metric="logit_diff")
    assert set(found.edges) == TRUE - {"L1H3->logits", "L0H0->L1KV3.k"}  # without what hurts, it is done no worse
    by_kl = circuits.acdc(induction_toy(), induction_prompts(), tau=1e-3)
    assert set(by_kl.edges) == TRUE and by_kl.metric == "kl"


def test_acdc_in_chains_is_acdc_one_by_one(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = some_prompts()
    many = circuits.acdc(tiny, prompts, tau=0.02)
    monkeypatch.setattr("headscope.circuits.stepwise.CHAIN", 1)
    assert circuits.acdc(tiny, prompts, tau=0.02).edges == many.edges
    assert 0 < len(many) < many.n_graph


def test_kl_has_no_gradient_in_the_clean_run(tiny: Model) -> None:
    for prompts, metric in ((some_prompts(), "kl"), (replace(some_prompts(), metric="kl"), None)):
        with pytest.raises(UsageError, match="take eap_ig, exact or acdc"):
            circuits.eap(tiny, prompts, metric=metric)


@pytest.mark.parametrize("method", ["eap", "eap_ig", "exact", "acdc", "path_patching"])
def test_logits_that_are_not_finite_are_refused(method: str) -> None:
    broken = hs.load(build("llama"), check=False)
    with torch.no_grad():
        broken.hf.model.layers[1].mlp.down_proj.weight[0, 0] = float("inf")
    nodes = (["L0H1"], ["logits"]) if method == "path_patching" else ()
    with pytest.raises(NotApplicable, match="logits are not finite on toy"):
        getattr(circuits, method)(broken, some_prompts(), *nodes)


def test_minus_infinity_rules_tokens_out_and_is_no_error() -> None:
    logits = torch.zeros(1, 1, 3)
    logits[..., 2] = -torch.inf
    assert finite(logits, "toy") is logits
    for bad in (torch.inf, torch.nan):
        with pytest.raises(NotApplicable, match="not finite on toy"):
            finite(torch.tensor([[[0.0, bad]]]), "toy")


@pytest.mark.parametrize("tau", [-1.0, float("nan")])
def test_no_loss_is_below_such_a_tau(tiny: Model, tau: float) -> None:
    with pytest.raises(UsageError, match="a number from 0"):
        circuits.acdc(tiny, some_prompts(), tau=tau)


def test_what_cannot_be_scored_is_refused_in_words(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = some_prompts()
    with pytest.raises(UsageError, match="no corrupted twins"):
        circuits.eap(tiny, replace(prompts, corrupt=None))
    with pytest.raises(UsageError, match="each must be as long as its prompt"):
        circuits.eap(tiny, replace(prompts, corrupt=prompts.tokens[:, 1:]))
    with pytest.raises(UsageError, match="no gradient"):
        circuits.eap_ig(tiny, prompts, metric="accuracy")
    with pytest.raises(UsageError, match="at least one"):
        circuits.eap_ig(tiny, prompts, steps=0)
    with pytest.raises(UsageError, match="replace='patch'"):
        circuits.eap_ig(tiny, prompts, replace="zero")
    with pytest.raises(UsageError, match="patch, mean or zero"):
        circuits.eap(tiny, prompts, replace="swap")
    with pytest.raises(NotApplicable, match="is none"):
        circuits.eap(hs.load(build("bert"), check=False), prompts)
    monkeypatch.setattr("headscope.circuits.scores.PATIENCE", 0.0)
    with pytest.raises(UsageError, match=r"each of 190 edges would take about 0\.0 hours here, .*eap-ig \(in Python"):
        circuits.exact(tiny, prompts)
