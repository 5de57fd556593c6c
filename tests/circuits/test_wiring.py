"""Cut edges against what must come out: the corrupted run, ordinary patches, and a computation by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import headscope as hs
from brute import some_tokens, state_of
from families.tiny import DECODERS, build
from headscope.core.errors import NotApplicable, UsageError
from headscope.model import Model
from headscope.model.graph import Graph, graph_of
from headscope.trace.senders import written
from headscope.trace.wiring import _Wires, rewired

WIDTH = 7
FAMILIES = [name for name in DECODERS if name != "opt-post-norm"]
LAST = torch.full((3, 1), WIDTH - 1)


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return {family: hs.load(build(family), check=False) for family in FAMILIES}


def twins() -> tuple[Tensor, Tensor]:
    return some_tokens(3, WIDTH), some_tokens(3, WIDTH, seed=1)


def far(a: Any, b: Any) -> float:
    """max|Δ| / max|reference|."""
    return float((a - b).abs().max() / b.abs().max())


def neurons_of(model: Model) -> tuple[str, ...]:
    return () if model.anatomy.blocks[0].down is None else ("L0N3", "L1N0", "L1N7")


def plain(model: Model, tokens: Tensor, edits: Any = ()) -> Tensor:
    return hs.trace(model, tokens, edits=edits, logits=LAST).logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("split", [False, True])
def test_senders_add_up_to_the_stream_but_for_biases(models: dict[str, Model], family: str, split: bool) -> None:
    """The difference of two runs has no biases in it."""
    model = models[family]
    graph = graph_of(model, neurons_of(model) if split else ())
    moved = [hs.trace(model, t, ["resid_post"], logits=None)["resid_post", 2] for t in twins()]
    found = [written(model, t, graph).sum(0) for t in twins()]
    # norms that compute in float32 whatever they are given do not add up better than that
    rounded = model.anatomy.blocks[0].post_attn is not None
    assert far(found[1] - found[0], moved[1] - moved[0]) < (1e-6 if rounded else 1e-10)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("split", [False, True])
def test_with_every_edge_cut_it_is_the_corrupted_run(models: dict[str, Model], family: str, split: bool) -> None:
    model = models[family]
    graph = graph_of(model, neurons_of(model) if split else ())
    clean, corrupt = twins()
    nothing = torch.zeros_like(graph.exists)
    cut = torch.stack([graph.exists, nothing])
    logits, _ = rewired(model, clean, graph, cut, written(model, corrupt, graph), LAST)
    assert far(logits[0], plain(model, corrupt)) < 1e-10
    assert far(logits[1], plain(model, clean)) < 1e-10
    alone, _ = rewired(model, clean, graph, nothing[None], written(model, corrupt, graph), LAST)
    assert torch.equal(alone[0], plain(model, clean))


@pytest.mark.parametrize("family", FAMILIES)
def test_all_edges_of_a_sender_are_its_patch(models: dict[str, Model], family: str) -> None:
    model = models[family]
    graph = graph_of(model, neurons_of(model))
    clean, corrupt = twins()
    names = [n.name for n in graph.senders if n.kind in ("neuron", "head") and n.layer == 1]
    if model.anatomy.blocks[0].post_attn is not None:  # an ordinary patch moves the scale of the norm after it
        names = []
    whole = graph_of(model)
    names += ["L0MLP", "L2MLP"] if whole.sender.get("L0MLP") else []
    for name in names:
        here = whole if name.endswith("MLP") else graph
        cut = torch.zeros_like(here.exists)
        cut[here.sender[name]] = here.exists[here.sender[name]]
        logits, _ = rewired(model, clean, here, cut[None], written(model, corrupt, here), LAST)
        assert far(logits[0], plain(model, clean, hs.patch(name, corrupt))) < 1e-10, name
        logits, _ = rewired(model, clean, here, cut[None], None, LAST)
        if model.anatomy.blocks[0].post_mlp is None:
            assert far(logits[0], plain(model, clean, hs.zero(name))) < 1e-10, name


def by_hand(model: Model, graph: Graph, clean: Tensor, corrupt: Tensor, edge: str) -> Tensor:
    """One edge of the tiny Llama cut with plain hooks: the receiver's columns computed anew from its own stream."""
    source, _, target = edge.partition("->")
    moved = (written(model, corrupt, graph) - written(model, clean, graph))[graph.sender[source]]
    hf, layer = model.hf.model, int(target[1]) if target != "logits" else 2
    streams: dict[str, Tensor] = {}
    handles = []

    def note(name: str) -> Any:
        return lambda _, args: streams.__setitem__(name, args[0])

    block = hf.layers[layer]
    handles.append(block.input_layernorm.register_forward_pre_hook(note("pre")))
    handles.append(block.post_attention_layernorm.register_forward_pre_hook(note("mid")))
    if target == "logits":
        handles.append(hf.norm.register_forward_pre_hook(lambda _, args: (args[0] + moved,)))
    elif target.endswith("MLP"):
        handles.append(
            block.mlp.register_forward_pre_hook(
                lambda _, args: (block.post_attention_layernorm.forward(streams["mid"] + moved),)
            )
        )
    else:
        module = getattr(block.self_attn, f"{target[-1]}_proj")
        number = int(target[target.index("H" if target[-1] == "q" else "V") + 1 : -2])

        def change(_: Any, args: Any, output: Tensor) -> Tensor:
            output = output.clone()
            columns = slice(8 * number, 8 * number + 8)
            read = block.input_layernorm.forward(streams["pre"] + moved)
            output[..., columns] = (read @ module.weight.T)[..., columns]
            return output

        handles.append(module.register_forward_hook(change))
    try:
        return model.hf(clean).logits[:, -1:].detach()
    finally:
        for handle in handles:
            handle.remove()


def test_one_edge_is_what_plain_hooks_give(tiny: Model) -> None:
    graph = graph_of(tiny)
    clean, corrupt = twins()
    edges = ["E->L0H1.q", "E->logits", "L0H2->L0MLP", "L0MLP->L1KV1.k", "L0H3->L2KV0.v", "L1H0->L2H3.q", "L1H1->L1MLP",
             "L2MLP->logits", "L1MLP->L2MLP"]  # fmt: skip
    logits, _ = rewired(
        tiny, clean, graph, torch.stack([graph.mask([e]) for e in edges]), written(tiny, corrupt, graph), LAST
    )
    for i, edge in enumerate(edges):
        wanted = by_hand(tiny, graph, clean, corrupt, edge)
        assert far(logits[i], wanted) < 1e-10, edge
        assert far(logits[i], plain(tiny, clean)) > 1e-6


def test_circuits_in_one_pass_do_not_meet(models: dict[str, Model]) -> None:
    generator = torch.Generator().manual_seed(0)
    for family in ("llama", "gemma2", "falcon", "mixtral"):
        model = models[family]
        graph, (clean, corrupt) = graph_of(model, neurons_of(model)), twins()
        stands = written(model, corrupt, graph)
        cut = (
            torch.rand(4, *graph.exists.shape, generator=generator) < torch.tensor([0.1, 0.3, 0.6, 0.9])[:, None, None]
        )
        together, given = rewired(model, clean, graph, cut, stands, LAST, keep=True)
        for i in range(4):
            alone, once = rewired(model, clean, graph, cut[i : i + 1], stands, LAST, keep=True)
            assert far(together[i], alone[0]) < 1e-10
            assert given is not None and once is not None and far(given[i], once[0]) < 1e-10


def test_padding_is_left_alone(tiny: Model) -> None:
    """A padded prompt gives what it gives alone."""
    clean, corrupt = twins()
    graph = graph_of(tiny)
    mask = torch.ones(3, WIDTH, dtype=torch.bool)
    mask[1, :3] = False
    cut = torch.rand(graph.exists.shape, generator=torch.Generator().manual_seed(1))[None] < 0.5
    given = [hs.tasks.Prompts("t", 0, t, LAST, LAST, mask=mask) for t in (clean, corrupt)]
    padded, _ = rewired(tiny, given[0], graph, cut, written(tiny, given[1], graph), LAST)
    short, _ = rewired(
        tiny, clean[1:2, 3:], graph, cut, written(tiny, corrupt[1:2, 3:], graph), torch.tensor([[WIDTH - 4]])
    )
    assert far(padded[0, 1], short[0, 0]) < 1e-10


def test_few_or_many_kept_edges_are_one_computation(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Circuits of any density, by their cut edges or by the others, beside each other in one pass and alone."""
    graph, (clean, corrupt) = graph_of(tiny), twins()
    stands = written(tiny, corrupt, graph)
    share = torch.tensor([0.0, 0.02, 0.1, 0.5, 0.9, 0.98, 1.0])[:, None, None]
    cut = torch.rand(7, *graph.exists.shape, generator=torch.Generator().manual_seed(4)) < share
    found, _ = rewired(tiny, clean, graph, cut, stands, LAST)

    def by_the_cut(self: _Wires, at: int, receivers: list[int]) -> Tensor:
        n = int((self.steps <= at).sum())
        mask = self.cut[:, :n, receivers].transpose(1, 2).double()
        return torch.bmm(mask, self.moved[:, :n].flatten(2)).unflatten(2, self.moved.shape[2:])

    monkeypatch.setattr(_Wires, "_exchange", by_the_cut)
    wanted, _ = rewired(tiny, clean, graph, cut, stands, LAST)
    assert far(found, wanted) < 1e-10


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "falcon"])
def test_half_precision_is_as_near_as_it_can_be(family: str) -> None:
    """Parts are added up in float32, so that with every edge cut only the model's own rounding is left."""
    model = hs.load(build(family, torch.bfloat16), check=False)
    graph, (clean, corrupt) = graph_of(model), twins()
    logits, _ = rewired(model, clean, graph, graph.exists[None], written(model, corrupt, graph), LAST)
    assert far(logits[0].float(), plain(model, corrupt).float()) < 0.05
    assert far(plain(model, clean).float(), plain(model, corrupt).float()) > 0.5


def test_inside_an_edited_block_the_edits_hold(tiny: Model) -> None:
    """The circuit is then one of the edited model."""
    graph, (clean, corrupt) = graph_of(tiny), twins()
    edits = [hs.zero("L1H2"), hs.scale("L0MLP", 0.5)]
    nothing = torch.zeros_like(graph.exists)
    with hs.edited(tiny, edits):
        stands = written(tiny, corrupt, graph)
        found, _ = rewired(tiny, clean, graph, torch.stack([graph.exists, nothing]), stands, LAST)
    assert float(stands[graph.sender["L1H2"]].abs().max()) == 0.0
    assert far(found[0], plain(tiny, corrupt, edits)) < 1e-10 and far(found[1], plain(tiny, clean, edits)) < 1e-10


def test_no_trace_is_left(tiny: Model) -> None:
    before, (clean, corrupt) = state_of(tiny), twins()
    graph = graph_of(tiny)
    rewired(tiny, clean, graph, graph.exists[None], written(tiny, corrupt, graph), LAST)
    with pytest.raises(RuntimeError):  # a replacement of other prompts
        rewired(tiny, clean, graph, graph.exists[None], written(tiny, corrupt[:2], graph), LAST)
    assert state_of(tiny) == before


def test_the_graph_has_the_edges_that_the_order_allows(models: dict[str, Model]) -> None:
    graph = graph_of(models["llama"], ["L1N5"])
    assert graph.names(graph.mask(["L0H2->L1H1.q", "E->logits"])) == ("L0H2->L1H1.q", "E->logits")
    assert bool(graph.exists[graph.edge("L1H0->L1N5")]) and bool(graph.exists[graph.edge("L1N5->L2KV1.k")])
    with pytest.raises(UsageError, match=r"L1H1\.q reads before L1H0 is written"):
        graph.edge("L1H0->L1H1.q")
    with pytest.raises(UsageError, match="no node 'L9H0'"):
        graph.edge("L9H0->logits")
    parallel = graph_of(models["gpt-j"])
    with pytest.raises(UsageError, match="L0MLP reads before L0H0"):
        parallel.edge("L0H0->L0MLP")
    # senders before a layer times what it reads: q, k, v and the MLP, whose layer's heads come first
    a = models["llama"].anatomy
    wanted = sum((1 + 5 * i) * (a.n_heads + 2 * a.n_kv_heads) + (1 + 5 * i + 4) for i in range(3)) + 16
    assert graph_of(models["llama"]).n_edges == wanted
    with pytest.raises(NotApplicable, match="is none"):
        graph_of(hs.load(build("opt-post-norm"), check=False))
    with pytest.raises(UsageError, match="3 layers of 48 neurons"):
        graph_of(models["llama"], "L1N48")
    with pytest.raises(NotApplicable, match="experts or absent"):
        graph_of(models["mixtral"], "L1N4")
