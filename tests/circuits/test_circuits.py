"""Circuits: chosen, pruned, saved, measured; their figures where the answer is known."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

import headscope as hs
from circuits.test_scores import TRUE, induction_prompts, some_prompts
from headscope import circuits
from headscope.circuits import Circuit
from headscope.circuits.controls import random_like
from headscope.circuits.run import evaluate
from headscope.core.component import Component
from headscope.core.errors import FileError, NotApplicable, UsageError
from headscope.core.files import write_json
from headscope.model import Model
from headscope.sweep import clean
from headscope.verify import prove_circuit
from headscope.verify.beside import beside_random
from toys import induction_toy


@pytest.fixture(scope="module")
def toy() -> Model:
    return induction_toy()


@pytest.fixture(scope="module")
def true(toy: Model) -> Circuit:
    """What the induction toy does its task with, found by cutting."""
    return circuits.acdc(toy, induction_prompts(), tau=1e-3)


def circuit_like(model: Model, edges: set[str], replacement: str = "patch") -> Circuit:
    graph = circuits.graph_of(model)
    return Circuit(graph.names(graph.mask(edges)), model.name, "", "toy", "logit_diff", "by hand", replacement, 0, (),
                   graph.n_edges, "0")  # fmt: skip


def test_the_true_circuit_is_all_of_the_model_and_its_complement_nothing(toy: Model, true: Circuit) -> None:
    assert set(true.edges) == TRUE and [str(c) for c in true.heads()] == ["L0H0", "L1H2", "L1H3"]
    prompts = induction_prompts(4, 11)
    rest = circuit_like(toy, set(circuits.graph_of(toy).names(circuits.graph_of(toy).exists)) - TRUE)
    without_anti = circuit_like(toy, TRUE - {"L1H3->logits"})
    f = circuits.faithfulness(toy, prompts, [true, rest, without_anti])
    assert f[0] == pytest.approx(1.0) and f[1] == pytest.approx(0.0, abs=1e-9) and f[2] > 1.01


def test_a_proof_supports_the_true_circuit_and_no_random_one(toy: Model, true: Circuit) -> None:
    prompts = induction_prompts(8, 11)
    # of 110 edges chance finds these now and then, and then it says so
    lucky = prove_circuit(toy, prompts, true, n_random=10)
    assert lucky.verdict == "inconclusive" and lucky.reason.endswith("a set of random circuits does as well")
    proof = prove_circuit(toy, prompts, true, n_random=10, seed=1)
    assert proof.verdict == "supported" and proof.faithfulness == pytest.approx(1.0)
    assert proof.random_most < 0.9 and abs(proof.complement) < 1e-9 and proof.n_edges == 5
    assert proof.clean == pytest.approx(float(clean(toy, prompts).mean())) and len(proof.choices) == 5
    graph = true.graph(toy)
    # the task's edges are not among those of another circuit of this shape
    off = random_like(graph, true.mask(toy), random.Random(3))
    wrong = circuit_like(toy, set(graph.names(off)) - TRUE)
    assert prove_circuit(toy, prompts, wrong, n_random=4).verdict != "supported"
    with pytest.raises(UsageError, match="at least 2 random"):
        prove_circuit(toy, prompts, true, n_random=1)
    with pytest.raises(UsageError, match="empty"):
        prove_circuit(toy, prompts, circuit_like(toy, set()))


def test_random_circuits_have_the_shape_of_the_given_one(tiny: Model) -> None:
    graph = circuits.graph_of(tiny, ["L1N3"])
    mask = graph.exists & (torch.rand(graph.exists.shape, generator=torch.Generator().manual_seed(0)) < 0.2)

    def shape(m: torch.Tensor) -> Counter[tuple[str, int, str]]:
        return Counter(
            (graph.senders[s].kind, graph.receivers[r].layer, graph.receivers[r].kind) for s, r in m.nonzero().tolist()
        )

    seen = set()
    for seed in range(5):
        drawn = random_like(graph, mask, random.Random(seed))
        assert shape(drawn) == shape(mask) and not bool((drawn & ~graph.exists).any())
        seen.add(graph.names(drawn))
    assert len(seen) == 5
    few = graph.mask(["L2H1->logits", "L1MLP->L2H1.q", "E->L1MLP"])
    for seed in range(20):
        drawn = random_like(graph, few, random.Random(seed))
        (into_logits,) = graph.names(drawn & graph.mask(e for e in graph.names(graph.exists) if e.endswith("->logits")))
        (query,) = [e for e in graph.names(drawn) if e.endswith(".q")]
        sender = into_logits.partition("->")[0]
        assert query.split("->")[1] == f"{sender}.q" or not sender.startswith("L2H")  # connected where it can be


def test_pruning_takes_what_leads_nowhere_and_changes_nothing(tiny: Model) -> None:
    prompts = some_prompts()
    scores = circuits.eap_ig(tiny, prompts)
    changed = 0
    for n in (10, 25, 60):
        whole = circuits.top_edges(tiny, scores, n)
        small = circuits.prune(tiny, whole)
        assert set(small.edges) <= set(whole.edges) and len(whole) == n
        changed += len(whole) - len(small)
        a, b = circuits.faithfulness(tiny, prompts, [whole, small])
        assert a == pytest.approx(b, abs=1e-9)
    assert changed > 0
    dead = circuit_like(tiny, {"E->L0H0.q", "E->L0KV1.k", "L0H2->logits", "E->L1MLP", "L1MLP->logits", "L2H0->logits",
                               "L1H0->L2KV0.v"})  # fmt: skip
    # L0H2 reads kv head 1; L0H0 is read by nobody; L1H0 reads nothing, so that L2H0 does not either
    assert set(circuits.prune(tiny, dead).edges) == {"E->L0KV1.k", "L0H2->logits", "E->L1MLP", "L1MLP->logits"}


def test_greedy_edges_lead_to_the_logits(tiny: Model) -> None:
    scores = circuits.eap_ig(tiny, some_prompts())
    for n in (1, 12, 40):
        found = circuits.greedy_edges(tiny, scores, n)
        assert len(found) == n
        graph = found.graph(tiny)
        mask, reached = graph.mask(found.edges), {len(graph.receivers) - 1}
        for _ in range(8):
            reached |= {r for s in mask[:, sorted(reached)].any(1).nonzero()[:, 0].tolist() for r in graph.inputs[s]}
        assert all(r in reached for r in mask.any(0).nonzero()[:, 0].tolist())
    best = circuits.greedy_edges(tiny, scores, 1).edges[0]
    into = abs(scores.sel(receiver="logits"))
    assert best == f"{into.sender.values[int(into.values.argmax())]}->logits"
    everything = circuits.greedy_edges(tiny, scores, circuits.graph_of(tiny).n_edges)
    assert len(everything) == everything.n_graph


def test_top_edges_rank_by_size_or_by_sign(toy: Model) -> None:
    scores = circuits.exact(toy, induction_prompts())
    assert set(circuits.top_edges(toy, scores, 5).edges) == TRUE
    helping = {e for e in TRUE if float(scores.sel(sender=e.split("->")[0], receiver=e.split("->")[1])) > 0}
    assert set(circuits.top_edges(toy, scores, len(helping), by="signed").edges) == helping != TRUE
    for n in (0, scores.size):
        with pytest.raises(UsageError, match="1 to 110 edges"):
            circuits.top_edges(toy, scores, n)
    with pytest.raises(UsageError, match="abs"):
        circuits.top_edges(toy, scores, 3, by="size")


def test_scores_of_another_model_are_refused(tiny: Model, toy: Model) -> None:
    with pytest.raises(UsageError, match="not scores of the edges"):
        circuits.top_edges(tiny, circuits.eap(toy, induction_prompts()), 3)


def test_scores_of_a_tuned_copy_are_refused_and_its_proof_says_where_the_circuit_is_from(
    toy: Model, true: Circuit
) -> None:
    copy = induction_toy()
    copy.name = "copy"
    with torch.no_grad():
        copy.hf.transformer.h[1].attn.c_proj.weight.mul_(0.9)
    prompts = induction_prompts(5, 11)
    with pytest.raises(UsageError, match=f"scores of another model .*{toy.fingerprint}.*not of copy"):
        circuits.top_edges(copy, circuits.eap(toy, prompts), 5)
    here, there = (prove_circuit(model, prompts, true, n_random=2) for model in (toy, copy))
    assert (here.model, here.fingerprint) == (toy.name, toy.fingerprint) and "found on" not in here.reason
    assert (there.model, there.fingerprint) == ("copy", copy.fingerprint)
    assert there.reason.endswith(f"; the circuit was found on {toy.name}")
    copy.name = toy.name
    assert prove_circuit(copy, prompts, true, n_random=2).reason.endswith("; the circuit was found on other weights")


@pytest.mark.parametrize(("n", "said"), [(1, True), (4, True), (5, False)])
def test_a_verdict_that_too_few_prompts_cannot_give_is_said(n: int, said: bool) -> None:
    found, controls = np.ones(n), np.zeros((3, n))
    seen = beside_random(found, controls, 1.0, "random circuits")
    assert ("at least 5 prompts are needed for p ≤ 0.05" in seen.reason) == said
    assert seen.verdict == ("inconclusive" if said else "supported")


def test_what_is_no_table_of_scores_is_refused(tiny: Model) -> None:
    scores = circuits.eap(tiny, some_prompts())
    for bad, n, words in (
        (scores, 2.5, "2.5 were asked for"),
        (scores, "5", "1 to 190 edges"),
        (scores.values, 5, r"dims \(sender, receiver\)"),
        (scores.drop_attrs(), 5, "attributes were lost"),
    ):
        for choose in (circuits.top_edges, circuits.greedy_edges):
            with pytest.raises(UsageError, match=words):
                choose(tiny, bad, n)
    with pytest.raises(UsageError, match="dims"):
        circuits.edge_auroc(scores.values, ["E->logits"])
    assert len(circuits.top_edges(tiny, scores, np.int64(5))) == 5


@pytest.mark.parametrize("least", [0.0, -1.0, float("nan"), float("inf")])
def test_no_such_share_of_a_metric_can_be_asked_for(tiny: Model, least: float) -> None:
    with pytest.raises(UsageError, match=f"A faithfulness of {least} cannot be asked for"):
        circuits.enough_edges(tiny, some_prompts(), circuits.eap(tiny, some_prompts()), least)


def test_a_perfect_ranking_has_the_best_curve(toy: Model) -> None:
    prompts = induction_prompts()
    scores = circuits.exact(toy, prompts)
    shares = (0.001, 0.01, 0.05, 0.2, 1.0)
    found = circuits.curve(toy, prompts, scores, shares=shares)
    assert found.abs[-1] == pytest.approx(1.0) and found.signed[-1] == pytest.approx(1.0)
    assert found.abs[2] == pytest.approx(1.0) and found.cmd == pytest.approx(
        float(np.trapezoid([abs(1 - f) for f in found.abs], shares))
    )
    worst = circuits.curve(toy, prompts, -abs(scores).assign_attrs(scores.attrs), shares=shares)
    assert found.cpr > 0.9 > worst.cpr and found.cmd < 0.05
    assert all(a <= b for a, b in zip(found.n_edges[0], found.n_edges[0][1:], strict=False))
    for bad in ((0.5, 0.1), (0.5, 0.5), (0.5,), (), (0.0, 1.0), (0.5, float("nan"))):
        with pytest.raises(UsageError, match=r"two or more shares .* ascending"):
            circuits.curve(toy, prompts, scores, shares=bad)


def test_the_true_circuit_is_complete_and_has_nothing_idle(toy: Model, true: Circuit) -> None:
    prompts = induction_prompts()
    found = circuits.completeness(toy, prompts, true, draws=6)
    assert found.worst < 0.1 and len(found.circuit) == 6 and min(found.model) < 0.5
    changes = circuits.minimality(toy, prompts, true, draws=2)
    assert changes.keys() == {"L0H0", "L1H2", "L1H3"} and min(changes.values()) > 0.01
    assert next(iter(changes)) in ("L0H0", "L1H2")
    idle = circuit_like(toy, TRUE | {"E->L0H1.q", "L0H1->logits"})
    assert circuits.minimality(toy, prompts, idle, draws=2)["L0H1"] == pytest.approx(0.0, abs=1e-9)
    # without the previous-token head's word to the other induction head, something is missing
    assert circuits.completeness(toy, prompts, circuit_like(toy, {"E->L1H2.q", "L1H2->logits"}), draws=4).gap > 0.3


def test_random_sets_of_nodes_are_counted_from_one_and_none(toy: Model, true: Circuit) -> None:
    prompts = induction_prompts()
    with pytest.raises(UsageError, match="completeness takes at least one"):
        circuits.completeness(toy, prompts, true, draws=0)
    with pytest.raises(UsageError, match="minimality takes 0"):
        circuits.minimality(toy, prompts, true, draws=-1)
    assert circuits.minimality(toy, prompts, true, draws=0).keys() == {"L0H0", "L1H2", "L1H3"}


def test_zero_and_mean_stand_for_what_is_cut(tiny: Model) -> None:
    """An MLP's cut edges under zero are its zeroed output, under mean its mean at each position."""
    prompts = some_prompts(4)
    graph = circuits.graph_of(tiny)
    kept = graph.exists.clone()
    kept[graph.sender["L1MLP"]] = False
    out = hs.trace(tiny, prompts, ["mlp_out"], logits=None)["mlp_out", 1]
    for how, edit in (("zero", hs.zero("L1MLP")), ("mean", hs.patch("L1MLP", out.mean(0).expand_as(out)[None]))):
        wanted = hs.sweep(tiny, prompts, [edit]).values[0]
        np.testing.assert_allclose(evaluate(tiny, prompts, graph, kept[None], how)[0], wanted, rtol=1e-9)


def test_auroc_is_the_share_of_pairs_in_order(tiny: Model) -> None:
    scores = circuits.eap(tiny, some_prompts())
    edges = ["E->logits", "L0H1->L1KV0.k", "L1MLP->L2H3.q", "L2H2->L2MLP"]
    values = np.abs(scores.values)
    inside = [values[circuits.graph_of(tiny).edge(e)] for e in edges]
    outside = sorted(set(values[~np.isnan(values)]) - set(inside))
    wanted = np.mean([(x > y) + 0.5 * (x == y) for x in inside for y in outside])
    assert circuits.edge_auroc(scores, edges) == pytest.approx(float(wanted))
    flat = scores.copy(data=np.where(np.isnan(scores.values), np.nan, 1.0))
    assert circuits.edge_auroc(flat, edges) == 0.5
    with pytest.raises(UsageError, match="no edge L9H9"):
        circuits.edge_auroc(scores, ["L9H9->logits"])


def test_heads_shared_by_chance_are_told_from_reuse(tiny: Model) -> None:
    def of(*heads: str) -> Circuit:
        return circuit_like(tiny, {f"{h}->logits" for h in heads})

    same = circuits.overlap(tiny, of("L0H1", "L1H2", "L2H0"), of("L0H1", "L1H2", "L2H0"))
    assert same.jaccard == same.share == 1.0 and same.p == pytest.approx(1 / 64)
    apart = circuits.overlap(tiny, of("L0H1", "L1H2"), of("L0H0", "L1H3", "L2H0"))
    assert apart.shared == () and apart.p == 1.0 and apart.n_b == 3
    # all heads of a layer are shared by whoever takes all of them
    full = of(*(f"L1H{h}" for h in range(4)))
    assert circuits.overlap(tiny, full, full).p == 1.0
    # in layers that only one of them uses nothing can be shared
    assert circuits.overlap(tiny, of("L0H0"), of("L1H0")).expected == 0.0
    with pytest.raises(UsageError, match="without heads"):
        circuits.overlap(tiny, of("L0H1"), circuit_like(tiny, {"E->logits"}))


@pytest.mark.parametrize(
    ("other", "shared"),
    [(["L0H0", "L0H1", "L1H0"], 3), (["L0H1", "L0H2", "L1H0"], 2), (["L0H2", "L0H3", "L1H1"], 0)],
)
def test_an_overlap_by_chance_counted_by_hand(tiny: Model, other: list[str], shared: int) -> None:
    """Two layers of four heads: 2 and 1 of each circuit, all random circuits counted."""
    counts = np.zeros(4)
    for pair in combinations(range(4), 2):
        for one in range(4):
            counts[len({0, 1} & set(pair)) + (one == 0)] += 1
    counts /= counts.sum()
    found = circuits.overlap(
        tiny, *([Component.parse(h) for h in heads] for heads in (["L0H0", "L0H1", "L1H0"], other))
    )
    assert len(found.shared) == shared
    assert found.expected == pytest.approx(counts @ np.arange(4), abs=1e-12)
    assert found.chance == pytest.approx(counts @ (np.arange(4) / (6 - np.arange(4))), abs=1e-12)
    assert found.p == pytest.approx(counts[shared:].sum(), abs=1e-12)


def test_a_circuit_is_saved_and_read_again(tiny: Model, tmp_path: Path) -> None:
    circuit = circuits.top_edges(tiny, circuits.eap(tiny, some_prompts(), neurons=["L1N3"]), 20)
    circuit.save(tmp_path / "circuit.json")
    again = Circuit.load(tmp_path / "circuit.json")
    assert again == circuit and torch.equal(again.mask(tiny), circuit.mask(tiny)) and "20 of" in repr(again)
    assert set(circuit.nodes()) >= {e.split("->")[1] for e in circuit.edges}
    write_json(tmp_path / "new.json", {"format": "headscope-circuit", "format_version": 7})
    with pytest.raises(FileError, match="format 7"):
        Circuit.load(tmp_path / "new.json")
    write_json(tmp_path / "other.json", {"format": "headscope-circuit", "format_version": 1, "edges": []})
    with pytest.raises(FileError, match="damaged"):
        Circuit.load(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("edges", "E->L0H1.q", "edges is no list"),
        ("edges", ["E->L0H1.q", 5], "edges is no list"),
        ("edges", ["L0H1"], "'L0H1' is no edge"),
        ("neurons", "L1N3", "neurons is no list"),
        ("replacement", "foo", "replacement is 'foo', not patch, mean or zero"),
        ("model", 5, "model is no text"),
        ("seed", "0", "seed is no whole number"),
        ("n_graph", True, "n_graph is no whole number"),
        ("more", 1, "more is unknown"),
        ("task", None, "task is no text"),
    ],
)
def test_a_damaged_circuit_is_not_read(tiny: Model, tmp_path: Path, field: str, value: object, words: str) -> None:
    write_json(tmp_path / "bad.json", circuit_like(tiny, {"E->L0H1.q"}).document() | {field: value})
    with pytest.raises(FileError, match=f"damaged: {words}"):
        Circuit.load(tmp_path / "bad.json")


def test_a_circuit_is_saved_under_the_ending_of_its_kind(tiny: Model, tmp_path: Path) -> None:
    circuit = circuit_like(tiny, {"E->logits"})
    with pytest.raises(UsageError, match=r"must end in \.json"):
        circuit.save(tmp_path / "c.txt")
    assert not list(tmp_path.iterdir())
    circuit.save(tmp_path / "C.JSON")
    assert Circuit.load(tmp_path / "C.JSON") == circuit


def test_where_nothing_changes_there_is_nothing_to_explain(tiny: Model) -> None:
    from dataclasses import replace

    prompts = some_prompts()
    with pytest.raises(NotApplicable, match="nothing to explain"):
        circuits.faithfulness(tiny, replace(prompts, corrupt=prompts.tokens), circuit_like(tiny, {"E->logits"}))
    with pytest.raises(UsageError, match="one replacement"):
        circuits.faithfulness(tiny, prompts, [circuit_like(tiny, {"E->logits"}),
                                              circuit_like(tiny, {"E->logits"}, "zero")])  # fmt: skip
