"""Patching finds the heads of a model whose parts are known; its estimate is the derivative of what patching does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import headscope as hs
from families.tiny import build
from headscope import tasks
from headscope.core.errors import NotApplicable, UsageError
from headscope.model import Model
from headscope.sweep import measure
from headscope.sweep.patching import OVER, components_over, corrupted
from headscope.tasks import Prompts
from headscope.trace.edit import SITE
from toys import induction_toy

A, B, OTHER, FOIL = 5, 9, 7, 20
WIDTH = 7
DIRECTIONS = ["denoise", "noise"]


@pytest.fixture(scope="module")
def toy() -> Model:
    return induction_toy()


@pytest.fixture(scope="module")
def gpt2() -> Model:
    """A random GPT-2 in float64: 3 layers, 4 heads."""
    return hs.load(build("gpt2"))


def _induction(*rows: tuple[list[int], list[int]]) -> Prompts:
    """Prompts … A B … A, in which B comes next, and twins whose first A is another token."""
    rows = rows or (([3, A, B, 11, 12, 13, A], [3, OTHER, B, 11, 12, 13, A]),)
    tokens, twins = (torch.tensor([row[i] for row in rows]) for i in (0, 1))
    one = torch.ones(len(rows), 1, dtype=torch.long)
    return Prompts(
        "induction", 0, tokens, one * (tokens.shape[1] - 1), one * B, one * FOIL, corrupt=twins, metric="logit_diff"
    )


def _random(n: int = 3, width: int = 6, *, equal: int = 0) -> Prompts:
    """Random pairs that differ in two tokens, the last `equal` of them in none."""
    generator = torch.Generator().manual_seed(4)
    tokens, targets = (torch.randint(5, 96, shape, generator=generator) for shape in ((n, width), (n, 4)))
    twins = tokens.clone()
    twins[: n - equal, 1:3] = 5 + (twins[: n - equal, 1:3] + 11) % 91
    at = torch.tensor([[width - 2, width - 1]]).expand(n, -1)
    return Prompts("random", 0, tokens, at, targets[:, :2], targets[:, 2:], corrupt=twins, metric="logit_diff")


def _metric(model: Model, prompts: Prompts, edits: Any = ()) -> np.ndarray:
    logits = hs.trace(model, prompts, edits=edits, logits=prompts.positions).logits
    return measure(prompts.metric, logits, prompts).double().numpy()  # type: ignore[arg-type]


def _ends(prompts: Prompts, direction: str) -> tuple[Prompts, Prompts]:
    """The prompts that are changed, and those whose values they get."""
    twin = corrupted(prompts)
    return (twin, prompts) if direction == "denoise" else (prompts, twin)


def _loop(model: Model, prompts: Prompts, over: str, positions: str, direction: str) -> np.ndarray:
    """The effects by one trace each."""
    base, source = _ends(prompts, direction)
    width = prompts.tokens.shape[1]
    at: dict[str, list[Any]] = {"all": [None], "last": [[width - 1]], "each": [[p] for p in range(width)]}
    top, low = _metric(model, prompts).mean(), _metric(model, corrupted(prompts)).mean()
    found = []
    for component in components_over(model, over):
        for where in at[positions]:
            patched = _metric(model, base, hs.patch(component, source, positions=where)).mean()
            found.append((patched - low if direction == "denoise" else top - patched) / (top - low))
    return np.array(found)


def test_the_head_that_writes_the_token_before_restores_everything(toy: Model) -> None:
    found = hs.patching(toy, _induction(), positions="each")
    assert found.effect.dims == ("layer", "head", "position") and found.effect.shape == (2, 4, WIDTH)
    assert found.used == 1.0 and found.clean > found.corrupt + 5
    effect = found.effect.values.copy()
    assert abs(effect[0, 0, 2] - 1) < 1e-9
    assert effect[1, 2, 6] > 1.05 and effect[1, 3, 6] < -0.05
    effect[0, 0, 2] = effect[1, 2, 6] = effect[1, 3, 6] = 0
    assert abs(effect).max() < 1e-9


def test_noise_finds_the_same_heads(toy: Model) -> None:
    effect = hs.patching(toy, _induction(), positions="each", direction="noise").effect.values
    found = {tuple(map(int, at)) for at in np.argwhere(abs(effect) > 1e-9)}
    assert found == {(0, 0, 2), (1, 2, 6), (1, 3, 6)}
    assert effect[0, 0, 2] > 0.95 and effect[1, 2, 6] > 1.05 and effect[1, 3, 6] < -0.05


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_two_heads_that_answer_together_are_the_whole_difference(toy: Model, direction: str) -> None:
    prompts = _induction()
    base, source = _ends(prompts, direction)
    edits = [[hs.patch(head, source, positions=6) for head in ("L1H2", "L1H3")], [], hs.patch("L1H2", source)]
    both, neither, one = hs.sweep(toy, base, edits).values[:, 0]
    top, low = _metric(toy, prompts)[0], _metric(toy, corrupted(prompts))[0]
    before, after = (low, top) if direction == "denoise" else (top, low)
    assert abs(both - after) < 1e-9 and abs(neither - before) < 1e-9
    assert (one - before) / (after - before) > 1.05


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_whole_stream_is_the_whole_difference(toy: Model, direction: str) -> None:
    found = hs.patching(toy, _induction(), "resid", direction=direction).effect
    assert found.dims == ("layer",)
    np.testing.assert_allclose(found.values, [1, 1], rtol=0, atol=1e-9)
    where = hs.patching(toy, _induction(), "resid", positions="each", direction=direction).effect.values
    # the token itself carries it into layer 0; in layer 1 it has moved on to B
    assert abs(where[0, 1] - 1) < 1e-9 and abs(np.delete(where[0], 1)).max() < 1e-9
    assert where[1, 2] > 0.95 and abs(np.delete(where[1], [1, 2])).max() < 1e-9


def test_positions_all_and_last(toy: Model) -> None:
    everywhere = hs.patching(toy, _induction()).effect
    assert everywhere.dims == ("layer", "head") and abs(float(everywhere[0, 0]) - 1) < 1e-9
    last = hs.patching(toy, _induction(), positions="last").effect
    np.testing.assert_allclose(last.values[1], everywhere.values[1], rtol=0, atol=1e-9)
    assert abs(last.values[0]).max() < 1e-9


def test_several_pairs_give_the_ratio_of_means(toy: Model) -> None:
    first = ([3, A, B, 11, 12, 13, A], [3, OTHER, B, 11, 12, 13, A])
    # B followed A twice, and once more in the twin
    second = ([A, B, 4, A, B, 13, A], [A, B, 4, OTHER, B, 13, A])
    third = ([B, A, B, B, B, 13, A], [B, OTHER, B, B, B, 13, A])
    prompts = _induction(first, second, third)
    base, source = _ends(prompts, "denoise")
    patched = _metric(toy, base, hs.patch("L1H2", source))
    top, low = _metric(toy, prompts), _metric(toy, base)
    assert len(prompts) == 3 and (abs(top - low) > 0.1).sum() >= 2
    kept = abs(top - low) > 1e-3
    of_means = (patched - low)[kept].mean() / (top - low)[kept].mean()
    mean_of = ((patched - low)[kept] / (top - low)[kept]).mean()
    found = hs.patching(toy, prompts)
    assert abs(float(found.effect[1, 2]) - of_means) < 1e-12 and abs(of_means - mean_of) > 1e-3
    assert found.clean == pytest.approx(top[kept].mean(), abs=1e-12) and found.used == kept.mean()


@pytest.mark.parametrize("method", [hs.patching, hs.attribution_patching])
def test_pairs_without_a_difference_are_left_out(gpt2: Model, method: Any) -> None:
    prompts = _random(4, equal=1)
    three = replace(prompts, **{
        name: getattr(prompts, name)[:3] for name in ("tokens", "positions", "target", "foil", "corrupt")
    })  # fmt: skip
    for direction in DIRECTIONS:
        found, wanted = (method(gpt2, p, direction=direction) for p in (prompts, three))
        assert (found.used, wanted.used) == (0.75, 1.0)
        np.testing.assert_allclose(found.effect.values, wanted.effect.values, rtol=0, atol=1e-10)
        assert found.clean == pytest.approx(wanted.clean, abs=1e-12)
        assert found.corrupt == pytest.approx(wanted.corrupt, abs=1e-12)
    with pytest.raises(NotApplicable, match="same on the clean and the corrupted prompts"):
        method(gpt2, _random(2, equal=2))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("positions", ["all", "each", "last"])
@pytest.mark.parametrize("over", ["heads", "attn", "mlp", "resid", "neurons"])
def test_equals_one_trace_each(tiny: Model, over: str, positions: str, direction: str) -> None:
    prompts = _random(2, 4 if over != "neurons" else 3)
    found = hs.patching(tiny, prompts, over, positions=positions, direction=direction)
    sizes = {"layer": 3, "head": 4, "neuron": 48, "position": prompts.tokens.shape[1]}
    dims = (*OVER[over][0], *(["position"] if positions == "each" else []))
    assert found.effect.dims == dims and found.effect.shape == tuple(sizes[dim] for dim in dims)
    wanted = _loop(tiny, prompts, over, positions, direction)
    np.testing.assert_allclose(found.effect.values.ravel(), wanted, rtol=0, atol=1e-10)
    assert found.clean == pytest.approx(_metric(tiny, prompts).mean(), abs=1e-12)
    assert found.corrupt == pytest.approx(_metric(tiny, corrupted(prompts)).mean(), abs=1e-12)


def test_another_metric_and_the_options_of_a_sweep(tiny: Model, tmp_path: Any) -> None:
    prompts, steps = _random(), []
    loss = hs.patching(
        tiny, prompts, metric="loss", out=tmp_path / "run", progress=lambda done, total: steps.append((done, total))
    )
    wanted = _loop(tiny, replace(prompts, metric="loss"), "heads", "all", "denoise")
    np.testing.assert_allclose(loss.effect.values.ravel(), wanted, rtol=0, atol=1e-10)
    assert steps[-1] == (12, 12)
    again = hs.patching(tiny, prompts, metric="loss", out=tmp_path / "run", resume=True)
    np.testing.assert_array_equal(again.effect.values, loss.effect.values)
    with pytest.raises(UsageError, match="another sweep"):
        hs.patching(tiny, prompts, metric="loss", direction="noise", out=tmp_path / "run", resume=True)


@pytest.mark.parametrize("method", [hs.patching, hs.attribution_patching])
def test_prompts_of_different_lengths(tiny: Model, method: Any) -> None:
    prompts = _random()
    assert prompts.corrupt is not None
    mask = torch.ones_like(prompts.tokens, dtype=torch.bool)
    mask[1, :1] = False
    padded = replace(prompts, mask=mask)
    found = method(tiny, padded)
    junk = torch.full_like(prompts.tokens[:, :1], 8)
    changed = [torch.where(mask, ids, junk) for ids in (prompts.tokens, prompts.corrupt)]
    other = method(tiny, replace(padded, tokens=changed[0], corrupt=changed[1]))
    np.testing.assert_allclose(found.effect.values, other.effect.values, rtol=0, atol=1e-10)
    for positions in ("each", "last"):
        with pytest.raises(UsageError, match="different lengths have no common positions"):
            method(tiny, padded, positions=positions)


@pytest.mark.parametrize("method", [hs.patching, hs.attribution_patching])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompts": replace(_random(), corrupt=None)}, "random has no corrupted twins"),
        ({"over": "head"}, "nothing called 'head' to go over.*heads"),
        ({"over": "kv-heads"}, "kv-heads have two"),
        ({"over": "layers"}, "layers have two"),
        ({"positions": "first"}, "positions is 'first'; it takes all, each or last"),
        ({"direction": "both"}, "direction is 'both'; it takes denoise or noise"),
        ({"metric": "logits"}, "no metric 'logits'.*logit"),
        ({"metric": "kl"}, "kl compares with a clean run"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_bad_requests_are_usage_errors(tiny: Model, method: Any, change: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        method(tiny, **{"prompts": _random(), **change})


def _share(logits: torch.Tensor) -> torch.Tensor:
    return (logits > 0).double().mean((1, 2))


@pytest.mark.parametrize(("metric", "name"), [("rank", "rank"), (_share, "_share")])
def test_an_estimate_needs_a_gradient(tiny: Model, metric: Any, name: str) -> None:
    with pytest.raises(UsageError, match=f"metric .*{name}.* has no gradient; take logit_diff"):
        hs.attribution_patching(tiny, _random(), metric=metric)
    assert hs.patching(tiny, _random(), metric=metric).used > 0


def test_what_a_model_has_not_is_named(tiny: Model) -> None:
    model = replace(tiny, anatomy=replace(tiny.anatomy, d_mlp=0))
    for method in (hs.patching, hs.attribution_patching):
        with pytest.raises(NotApplicable, match="no neurons"):
            method(model, _random(), "neurons")


def _derivative(model: Model, prompts: Prompts, over: str, positions: str, direction: str) -> np.ndarray:
    """The effect of a step from the base's values towards the source's, by two traces each."""
    base, source = _ends(prompts, direction)
    width, step = prompts.tokens.shape[1], 1e-4
    at: dict[str, list[Any]] = {"all": [None], "last": [[width - 1]], "each": [[p] for p in range(width)]}
    units = components_over(model, over)
    (site,) = SITE[units[0].kind]
    here, there = hs.trace(model, base, site), hs.trace(model, source, site)
    top, low = _metric(model, prompts).mean(), _metric(model, corrupted(prompts)).mean()

    def of(run: Any, component: Any) -> torch.Tensor:
        x: torch.Tensor = run[site, component.layer]
        if component.kind == "neuron":
            return x[..., component.index, None]
        return x if component.index is None else x[:, :, component.index]

    found = []
    for component in units:
        was, to = of(here, component), of(there, component)
        for where in at[positions]:
            up, down = (
                _metric(model, base, hs.patch(component, (was + e * (to - was))[None], positions=where)).mean()
                for e in (step, -step)
            )
            found.append((up - down) / (2 * step) / (top - low) * (1 if direction == "denoise" else -1))
    return np.array(found)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("over", "positions"),
    [("heads", "all"), ("heads", "each"), ("heads", "last"), ("attn", "all"), ("attn", "each"), ("mlp", "all"),
     ("mlp", "last"), ("resid", "each"), ("neurons", "all")],
)  # fmt: skip
def test_the_estimate_is_the_derivative(gpt2: Model, over: str, positions: str, direction: str) -> None:
    prompts = _random(2, 5)
    found = hs.attribution_patching(gpt2, prompts, over, positions=positions, direction=direction)
    exact = hs.patching(gpt2, prompts, over, positions=positions, direction=direction)
    assert found.effect.dims == exact.effect.dims and found.effect.shape == exact.effect.shape
    assert (found.used, found.clean, found.corrupt) == pytest.approx((exact.used, exact.clean, exact.corrupt))
    wanted = _derivative(gpt2, prompts, over, positions, direction)
    np.testing.assert_allclose(found.effect.values.ravel(), wanted, rtol=0, atol=1e-6)
    assert abs(wanted).max() > 1e-2


def test_an_estimate_leaves_no_gradients_behind(gpt2: Model) -> None:
    hs.attribution_patching(gpt2, _random())
    assert all(parameter.grad is None for parameter in gpt2.hf.parameters())


@pytest.mark.real
def test_the_estimate_agrees_with_the_sweep_on_the_real_model(smollm2: Model) -> None:
    prompts = tasks.make("ioi", smollm2, 4)
    exact, guess = hs.patching(smollm2, prompts), hs.attribution_patching(smollm2, prompts)
    found = hs.agree(exact.effect, guess.effect)
    assert found["spearman"] > 0.9 and found["overlap_top"] >= 0.8
    assert hs.top(exact.effect, 1)[0] in hs.top(guess.effect, 5)
