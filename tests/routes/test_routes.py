"""Routes: the lazy search gives what the full definition gives, and the full definition is a sum of parts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headscope as hs
from brute import some_tokens
from families.tiny import DECODERS, build
from headscope.core.errors import FileError, NotApplicable, UsageError
from headscope.model import Model
from headscope.routes import Route
from headscope.routes.neuronpedia import attribution_graph
from headscope.routes.proximity import EPSILON, proximity
from headscope.routes.route import check_sums
from routes import dense
from toys import GAIN, induction_toy

WIDTH = 7
FAMILIES = [name for name in DECODERS if name != "opt-post-norm"]


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return {family: hs.load(build(family), check=False) for family in FAMILIES}


def as_dict(route: Route) -> dict[dense.Key, float]:
    return {(e.source, e.target, e.component or e.kind): e.weight for e in route.edges}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("threshold", [0.0, 0.02, 0.1])
def test_the_lazy_search_finds_what_the_full_definition_finds(
    models: dict[str, Model], family: str, threshold: float
) -> None:
    tokens = some_tokens(1, WIDTH)
    wanted = dense.edges(models[family], tokens, WIDTH - 2, threshold)
    found = as_dict(hs.routes(models[family], tokens, position=WIDTH - 2, threshold=threshold))
    assert found.keys() == wanted.keys()
    assert max(abs(found[key] - wanted[key]) for key in wanted) < 1e-7


@pytest.mark.parametrize("family", ["gpt2", "opt", "qwen2", "llama-mha-bias", "falcon-alibi", "gpt-j"])
@pytest.mark.parametrize("biases", ["part", "drop", "heads"])
def test_biases_go_where_they_are_wanted(models: dict[str, Model], family: str, biases: str) -> None:
    tokens = some_tokens(1, WIDTH)
    wanted = dense.edges(models[family], tokens, WIDTH - 1, 0.02, biases)
    found = as_dict(hs.routes(models[family], tokens, threshold=0.02, biases=biases))
    assert found.keys() == wanted.keys()
    assert max(abs(found[key] - wanted[key]) for key in wanted) < 1e-7
    if biases == "drop":
        assert not any(what == "bias" for _, _, what in found)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_add_up_to_what_they_are_parts_of(models: dict[str, Model], family: str) -> None:
    model, tokens = models[family], some_tokens(1, WIDTH)
    run = hs.trace(model, tokens, ["resid_pre", "attn_out"], logits=None)
    for layer in range(model.anatomy.n_layers):
        parts = dense.attention_parts(model, tokens, layer, 5)
        total = run["resid_pre", layer][0, 5] + run["attn_out", layer][0, 5]
        error = (torch.stack(list(parts.values())).sum(0) - total).abs().max().detach()
        assert float(error) < 1e-10 * float(total.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_into_a_node_sum_to_one_and_all_lead_to_the_start(models: dict[str, Model], family: str) -> None:
    route = hs.routes(models[family], some_tokens(1, WIDTH), threshold=0.05)
    assert max(abs(total - 1) for total in check_sums(route.edges).values()) < 1e-12
    ids = {node.id for node in route.nodes}
    assert {e.source for e in route.edges} | {e.target for e in route.edges} == ids
    assert ids - {e.source for e in route.edges} == {route.start}
    leaves = ids - {e.target for e in route.edges}
    assert all(node.kind in ("embed", "bias") for node in route.nodes if node.id in leaves)


def test_the_rule_has_its_closed_forms() -> None:
    y = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    norm = float(y.abs().sum())
    for a, wanted in ((0.3, 0.3), (1.0, 1.0), (1.6, 0.4)):
        assert float(proximity(y, a * y)) == pytest.approx(wanted * norm)
    assert float(proximity(y, 2 * y)) == float(proximity(y, -y)) == EPSILON  # overshooting, opposing: unseen
    part = torch.where(torch.arange(50) < 20, y, 0.0)
    assert float(proximity(y, part)) == pytest.approx(float(part.abs().sum()))


def test_few_parts_are_looked_at(models: dict[str, Model]) -> None:
    tokens = some_tokens(1, 40)
    route = hs.routes(models["llama"], tokens, threshold=0.1)
    assert route.evaluated < 0.3 * route.parts
    assert as_dict(route).keys() == dense.edges(models["llama"], tokens, 39, 0.1).keys()


def test_tokens_after_the_prediction_change_nothing(models: dict[str, Model]) -> None:
    tokens = some_tokens(1, 12)
    for family in ("llama", "gpt2", "gemma2"):
        whole = as_dict(hs.routes(models[family], tokens, position=6))
        short = as_dict(hs.routes(models[family], tokens[:, :7]))
        assert whole.keys() == short.keys()
        assert max(abs(whole[key] - short[key]) for key in short) < 1e-9


def test_an_induction_model_shows_its_circuit() -> None:
    """The head that looks at the previous token feeds the induction head, which writes the answer."""
    model, tokens = induction_toy(), torch.tensor([[3, 9, 14, 21, 5, 9]])
    with torch.no_grad():  # without the head of the opposite sign
        model.hf.transformer.h[1].attn.c_proj.weight[96:] = 0.0
    # its value bias only undoes the norm, so it belongs to the heads
    route = hs.routes(model, tokens, foil=5, threshold=0.05, biases="heads")
    assert route.target_id == 14
    by = {(e.source, e.target, e.component): e for e in route.edges if e.kind == "head"}
    induction = by["L0@2", "L1A@5", "L1H2"]
    # its 6 of one coordinate beside the state's own position and token, and the code of the token before
    assert induction.weight == pytest.approx(6 / 9, rel=1e-4)
    assert induction.signed == pytest.approx(GAIN * _readout(model, tokens), rel=1e-4)
    assert by["E@1", "L0A@2", "L0H0"].weight == pytest.approx(1 / 3, rel=1e-4)
    assert route.heads().keys() == {"L0H0", "L1H2"}


def test_the_rule_does_not_see_what_another_head_half_undoes() -> None:
    """A head that writes 6 where another takes 3 away overshoots the sum by as much as it brings: unseen, as stated."""
    route = hs.routes(induction_toy(), torch.tensor([[3, 9, 14, 21, 5, 9]]), threshold=0.05, biases="heads")
    assert "L1H2" not in route.heads()


def _readout(model: Model, tokens: torch.Tensor) -> float:
    """What a unit of a token's code adds to its logit through the final norm (its own mean taken out)."""
    last = hs.trace(model, tokens, ["resid_post"], layers=[1], logits=None)["resid_post", 1][0, -1]
    return float(1 / last.var(unbiased=False).add(model.hf.config.layer_norm_epsilon).sqrt())


def test_signs_add_up_to_the_logit_difference(models: dict[str, Model]) -> None:
    """With nothing cut, what enters the last state adds up to the logit, but for the constant of the final norm."""
    for family in ("llama", "gpt2", "gpt-j", "gemma"):
        model, tokens = models[family], some_tokens(1, WIDTH)
        route = hs.routes(model, tokens, target=7, foil=11, threshold=0.0)
        into = sum(e.signed for e in route.into(route.start))
        if not model.anatomy.parts.parallel:
            mid = sum(e.signed for e in route.into(f"L2A@{WIDTH - 1}"))
            residual = next(e.signed for e in route.into(route.start) if e.kind == "residual")
            assert mid == pytest.approx(residual)
        W_U = model.anatomy.W_U
        norm_bias = getattr(model.anatomy.final_norm, "bias", None)
        constant = 0.0 if norm_bias is None else float((norm_bias @ (W_U[:, 7] - W_U[:, 11])).detach())
        bias = getattr(model.anatomy.parts.unembed, "bias", None)
        constant += 0.0 if bias is None else float((bias[7] - bias[11]).detach())
        assert into + constant == pytest.approx(route.logit, rel=1e-4), family


def test_neurons_have_their_exact_share(models: dict[str, Model]) -> None:
    for family in ("llama", "gpt2", "gemma2"):
        model, tokens = models[family], some_tokens(1, WIDTH)
        n = model.anatomy.d_mlp
        route = hs.routes(model, tokens, neurons=n)
        run = hs.trace(model, tokens, ["neuron", "mlp_out", "resid_post"], logits=None)
        node = next(x for x in route.nodes if x.kind == "mlp" and x.position == WIDTH - 1)
        layer, i = int(node.layer or 0), node.position
        y, mlp = run["resid_post", layer][0, i], run["mlp_out", layer][0, i]
        parts = run["neuron", layer][0, i, :, None] * model.anatomy.W_out(layer)
        down = model.anatomy.blocks[layer].down
        constant = down.bias if getattr(down, "bias", None) is not None else torch.zeros_like(y)
        if model.anatomy.blocks[layer].post_mlp is not None:
            through = mlp / (parts.sum(0) + constant)
            parts, constant = parts * through, constant * through
        value = torch.tensor([dense.prox(y, p) for p in (*parts, y - mlp, constant)])
        found = {x.component: x.weight for x in route.neurons if x.node == node.id}
        wanted = {f"L{layer}N{k}": float(value[k] / value.sum()) for k in range(n)}
        assert found.keys() == wanted.keys()
        assert max(abs(found[k] - wanted[k]) for k in wanted) < 1e-8, family


def test_neurons_of_experts_have_their_exact_share(models: dict[str, Model]) -> None:
    """Each is its expert's share of the token times its activation times its row of W_down."""
    model, tokens = models["mixtral"], some_tokens(1, WIDTH)
    route = hs.routes(model, tokens, neurons=10_000)
    mlp = model.hf.model.layers[2].mlp
    seen: list[torch.Tensor] = []
    hook = mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    run = hs.trace(model, tokens, ["mlp_out", "resid_post"], layers=[2], logits=None)
    hook.remove()
    x, y = seen[0][0, -1], run["resid_post", 2][0, -1]
    score = (mlp.gate.weight @ x).softmax(-1)
    chosen = score.topk(2).indices.tolist()
    parts: dict[str, torch.Tensor] = {}
    for e in chosen:
        gate, up = (mlp.experts.gate_up_proj[e] @ x).chunk(2)
        a = score[e] / score[chosen].sum() * torch.nn.functional.silu(gate) * up
        parts |= {f"L2E{e}N{n}": a[n] * mlp.experts.down_proj[e][:, n] for n in range(len(a))}
    assert torch.allclose(torch.stack(list(parts.values())).sum(0), run["mlp_out", 2][0, -1], rtol=1e-6)
    value = {name: dense.prox(y, part) for name, part in parts.items()}
    total = sum(value.values()) + dense.prox(y, y - run["mlp_out", 2][0, -1]) + EPSILON
    found = {n.component: n.weight for n in route.neurons if n.node == f"L2MLP@{WIDTH - 1}"}
    assert found.keys() == value.keys()
    assert max(abs(found[name] - value[name] / total) for name in value) < 1e-6


def test_a_route_is_saved_and_read_again(models: dict[str, Model], tmp_path: Path) -> None:
    route = hs.routes(models["llama"], some_tokens(1, WIDTH), neurons=2)
    route.save(tmp_path / "route.json")
    assert dataclasses.asdict(Route.load(tmp_path / "route.json")) == dataclasses.asdict(route)
    (tmp_path / "route.json").write_text(json.dumps({"format": "headscope-route", "format_version": 9}))
    with pytest.raises(FileError, match="format 9"):
        Route.load(tmp_path / "route.json")
    with pytest.raises(UsageError, match=r"\.html, \.svg, \.png, \.pdf or \.json"):
        route.save(tmp_path / "route.gif")


def test_bad_input_is_refused_in_words(models: dict[str, Model]) -> None:
    model, tokens = models["llama"], some_tokens(1, WIDTH)
    with pytest.raises(UsageError, match="Position 9 does not exist"):
        hs.routes(model, tokens, position=9)
    with pytest.raises(UsageError, match="threshold is 1"):
        hs.routes(model, tokens, threshold=1)
    with pytest.raises(UsageError, match="one prompt, but got 2"):
        hs.routes(model, some_tokens(2, WIDTH))
    with pytest.raises(UsageError, match="tokens 0 to 95"):
        hs.routes(model, tokens, target=96)
    with pytest.raises(NotApplicable, match="without a tokenizer"):
        hs.routes(model, tokens, target=" Paris")
    with pytest.raises(NotApplicable, match="is none"):
        hs.routes(hs.load(build("bert"), check=False), tokens)


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("does not exist: the prompt has 7", {"position": 2.5}),
        ("does not exist: the prompt has 7", {"position": None}),
        ("does not exist: the prompt has 7", {"position": -8}),
        ("it is a share", {"threshold": None}),
        ("it is a share", {"threshold": float("nan")}),
        ("a whole number from 0", {"neurons": 1.5}),
        ("takes part, drop or heads", {"biases": 3}),
        ("this is True", {"target": True}),
        ("this is ''", {"target": ""}),
        ("are both", {"target": 3, "foil": 3}),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(models: dict[str, Model], words: str, given: Any) -> None:
    with pytest.raises(UsageError, match=words):
        hs.routes(models["llama"], some_tokens(1, WIDTH), **given)


def test_ids_come_as_they_come(models: dict[str, Model]) -> None:
    tokens = some_tokens(1, WIDTH)
    wanted = hs.routes(models["llama"], tokens, target=3).document()
    for given in (tokens[0], tokens.tolist(), tokens[0].tolist(), tokens.numpy(), list(tokens[0].numpy())):
        assert hs.routes(models["llama"], given, target=np.int64(3)).document() == wanted
    for given in ([True, False], None, {}, [[1, 2], [3]], [1.5, 2.5], []):
        with pytest.raises(UsageError):
            hs.routes(models["llama"], given)


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("nodes are not those", {"nodes": []}),
        ("has no such node", {"edges": [{"source": "L9@1", "target": "L1@1", "kind": "mlp", "component": "L1MLP",
                                         "weight": 1.0, "signed": 0.0}]}),
        ("is damaged", {"logit": "high"}),
        ("is damaged", {"tokens": None}),
        ("texts are not texts", {"model": None}),
        ("texts are not texts", {"tokens": ["a"]}),
        ("nodes are not those", {"position": 99}),
    ],
)  # fmt: skip
def test_a_damaged_route_is_not_read(models: dict[str, Model], tmp_path: Path, words: str, change: Any) -> None:
    document = hs.routes(models["llama"], some_tokens(1, WIDTH)).document() | change
    (tmp_path / "route.json").write_text(json.dumps(document))
    with pytest.raises(FileError, match=words):
        Route.load(tmp_path / "route.json")


def test_graphs_of_other_questions_have_other_names(models: dict[str, Model]) -> None:
    ids = some_tokens(1, WIDTH)
    found = [hs.routes(models["llama"], ids, target=t, threshold=x) for t, x in ((3, 0.04), (4, 0.04), (3, 0.1))]
    found.append(hs.routes(models["llama"], ids.flip(1), target=3))
    slugs = [attribution_graph(route)["metadata"]["slug"] for route in [*found, found[0]]]
    assert len(set(slugs)) == 4 and slugs[0] == slugs[-1]
