"""Gradients at what each receiver reads, against autograd on the stream itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import headscope as hs
from circuits.test_wiring import FAMILIES, LAST, WIDTH, far, neurons_of, twins
from families.tiny import build
from headscope.core.errors import UsageError
from headscope.model import Model
from headscope.model.graph import Graph, graph_of
from headscope.trace.gradients import add_gradients
from headscope.trace.senders import written
from headscope.trace.wiring import rewired


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return {family: hs.load(build(family), check=False) for family in FAMILIES}


def score(logits: Tensor) -> Tensor:
    return logits[:, 0, 7] - logits[:, 0, 11] + 0.1 * logits[:, 0].log_softmax(-1)[:, 3]


def gradients(model: Model, graph: Graph, tokens: Tensor, **options: object) -> Tensor:
    total = torch.zeros(len(graph.receivers), *tokens.shape, model.anatomy.d_model, dtype=model.dtype)
    add_gradients(total, model, tokens, graph, LAST, score, **options)
    return total


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("split", [False, True])
def test_a_layers_gradients_add_up_to_the_streams(models: dict[str, Model], family: str, split: bool) -> None:
    """What enters a layer reaches the metric by its attention, its MLP, or past them."""
    model, (tokens, _) = models[family], twins()
    graph = graph_of(model, neurons_of(model) if split else ())
    found = gradients(model, graph, tokens)
    parallel = model.anatomy.parts.parallel
    sites = ["resid_pre", "resid_post"] + ([] if parallel else ["resid_mid"])
    run = hs.trace(model, tokens, sites, logits=LAST, grad=True)
    layers = range(model.anatomy.n_layers)
    values = [run[site, i] for site in sites for i in layers]
    at = dict(zip([(s, i) for s in sites for i in layers], torch.autograd.grad(score(run.logits).sum(), values),
                  strict=True))  # fmt: skip
    kinds = [node.kind for node in graph.receivers]
    for layer in layers:
        here = [i for i, node in enumerate(graph.receivers) if node.layer == layer]
        attn = sum(found[i] for i in here if kinds[i] in "qkv")
        mlp = sum(found[i] for i in here if kinds[i] in ("mlp", "neuron"))
        pre, post = at["resid_pre", layer], at["resid_post", layer]
        if parallel:
            assert far(attn + mlp, pre - post) < 1e-6
        else:
            mid = at["resid_mid", layer]
            assert far(attn, pre - mid) < 1e-6 and far(mlp, mid - post) < 1e-6
    assert far(found[-1], at["resid_post", layers[-1]]) < 1e-10


@pytest.mark.parametrize("family", FAMILIES)
def test_they_say_what_a_small_change_of_an_edge_does(models: dict[str, Model], family: str) -> None:
    """Moving one edge's part of the stream a little moves the metric by gradient × movement."""
    model, (tokens, corrupt) = models[family], twins()
    graph = graph_of(model, neurons_of(model))
    found, now = gradients(model, graph, tokens), written(model, tokens, graph)
    moved = 1e-2 * (written(model, corrupt, graph) - now)  # less would drown in norms that compute in float32
    edges = ["E->L0H1.q", "L0H2->L1KV0.k", "L0H0->L2KV0.v", "L0H3->L1H1.q", "E->L1MLP", "L1H2->logits"]
    edges += ["L0N3->L1N7", "E->L1N0", "L0N3->L1MLP", "L0MLP->L2MLP"] if graph.neurons else []
    cut = torch.stack([graph.mask([e]) for e in edges])
    up, _ = rewired(model, tokens, graph, cut, now + moved, LAST)
    down, _ = rewired(model, tokens, graph, cut, now - moved, LAST)
    for i, edge in enumerate(edges):
        s, r = graph.edge(edge)
        seen = (score(up[i]) - score(down[i])) / 2
        wanted = (found[r] * moved[s]).sum((1, 2))
        assert float((seen - wanted).abs().max()) < 1e-2 * float(wanted.abs().max()) + 1e-6, edge


def test_another_start_is_another_prompt(tiny: Model) -> None:
    """From the embedded twin it is the twin's gradient, and the model is left as it was."""
    graph, (tokens, corrupt) = graph_of(tiny), twins()
    start = written(tiny, corrupt, graph)[0]
    assert far(gradients(tiny, graph, tokens, start=start), gradients(tiny, graph, corrupt)) < 1e-10
    assert all(p.grad is None and p.requires_grad for p in tiny.hf.parameters())
    twice = gradients(tiny, graph, tokens, weight=2.0)
    assert far(twice, 2 * gradients(tiny, graph, tokens)) < 1e-12
    total = torch.zeros(len(graph.receivers), 3, WIDTH, 32, dtype=torch.float64)
    with pytest.raises(UsageError, match="no gradient"):
        add_gradients(total, tiny, tokens, graph, LAST, lambda logits: (logits[:, 0].argmax(-1) == 3).double())
