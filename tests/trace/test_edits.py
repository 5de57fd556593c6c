"""Every edit equals a plain hook on the model's own module, at the places it names and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import headscope as hs
from brute import D_HEAD, head, hooked, plain, setting
from families.tiny import build
from headscope.core.errors import HeadscopeError, UsageError
from headscope.model import Model
from headscope.tasks import Prompts
from headscope.trace import Edit

Change = Callable[[Tensor], Tensor]
O1, DOWN1 = "model.layers.1.self_attn.o_proj", "model.layers.1.mlp.down_proj"
EXACT = {"rtol": 0.0, "atol": 1e-12}


def _tokens(batch: int = 3, width: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(5, 96, (batch, width), generator=torch.Generator().manual_seed(seed))


def _vector(size: int, seed: int = 3) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _read(model: Model, path: str, tokens: Tensor) -> Tensor:
    """What the module at `path` reads."""
    kept: list[Tensor] = []
    with hooked(model, path, lambda x: kept.append(x) or x):  # type: ignore[func-returns-value]
        plain(model, input_ids=tokens)
    return kept[0]


def _same(model: Model, edits: Any, path: str, change: Change, *, output: bool = False) -> None:
    tokens = _tokens()
    found = hs.trace(model, tokens, edits=edits).logits
    with hooked(model, path, change, output=output):
        expected = plain(model, input_ids=tokens)
    torch.testing.assert_close(found, expected, **EXACT)
    assert not torch.allclose(found, plain(model, input_ids=tokens), atol=1e-6)


# what each operation does


def _along(x: Tensor, direction: Tensor) -> Tensor:
    unit = direction / direction.norm()
    return x - torch.einsum("bpd,d,e->bpe", x, unit, unit)


OPERATIONS: dict[str, tuple[Callable[..., Edit], Change]] = {
    "zero": (hs.zero, torch.zeros_like),
    "scale": (lambda c, **w: hs.scale(c, -1.5, **w), lambda x: -1.5 * x),
    "gate": (lambda c, **w: hs.gate(c, torch.tensor([0.3]), **w), lambda x: torch.tensor(0.3).double() * x),
    "add": (lambda c, **w: hs.add(c, _vector(D_HEAD), **w), lambda x: x + _vector(D_HEAD)),
    "mean": (lambda c, **w: hs.mean(c, _vector(D_HEAD), **w), lambda x: _vector(D_HEAD).expand_as(x)),
    "project_out": (lambda c, **w: hs.project_out(c, _vector(D_HEAD), **w), lambda x: _along(x, _vector(D_HEAD))),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_edit_of_a_head(tiny: Model, name: str) -> None:
    edit, change = OPERATIONS[name]
    _same(tiny, edit("L1H2"), O1, setting(head(2), change))


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_edit_at_positions_and_rows(tiny: Model, name: str) -> None:
    edit, change = OPERATIONS[name]
    _same(tiny, edit("L1H2", positions=4), O1, setting(head(2), change, positions=4))
    _same(tiny, edit("L1H2", positions=[0, 8], rows=(2, 0)), O1, setting(head(2), change, [0, 2], [0, 8]))
    _same(tiny, edit("L1H2", rows=torch.tensor([1])), O1, setting(head(2), change, rows=1))


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_edit_of_the_values_of_a_kv_head(tiny: Model, name: str) -> None:
    edit, change = OPERATIONS[name]
    _same(
        tiny, edit("L1KV1", part="v", positions=range(2, 6)), "model.layers.1.self_attn.v_proj",
        setting(head(1), change, positions=[2, 3, 4, 5]), output=True,
    )  # fmt: skip


def test_an_edit_of_the_keys_of_a_kv_head(tiny: Model) -> None:
    """Zero and scale commute with the rotation, so the unrotated projection is the same place."""
    path = "model.layers.1.self_attn.k_proj"
    _same(
        tiny,
        hs.zero("L1KV0", part="k", positions=3),
        path,
        setting(head(0), torch.zeros_like, positions=3),
        output=True,
    )
    _same(tiny, hs.scale("L1KV1", 2.0, part="k"), path, setting(head(1), lambda x: 2 * x), output=True)


def test_a_kv_head_is_both_keys_and_values_unless_said(tiny: Model) -> None:
    both = hs.trace(tiny, _tokens(), edits=hs.scale("L1KV0", 3.0)).logits
    parts = [hs.scale("L1KV0", 3.0, part="k"), hs.scale("L1KV0", 3.0, part="v")]
    torch.testing.assert_close(both, hs.trace(tiny, _tokens(), edits=parts).logits, rtol=0, atol=0)
    assert not torch.equal(both, hs.trace(tiny, _tokens(), edits=parts[0]).logits)
    assert not torch.equal(both, hs.trace(tiny, _tokens(), edits=parts[1]).logits)


def test_edits_of_neurons(tiny: Model) -> None:
    _same(tiny, hs.zero("L1N7"), DOWN1, setting(slice(7, 8), torch.zeros_like))
    _same(tiny, hs.scale("L1N47", 3.0, positions=2), DOWN1, setting(slice(47, 48), lambda x: 3 * x, positions=2))
    _same(tiny, hs.add("L1N0", torch.tensor(2.5)), DOWN1, setting(slice(0, 1), lambda x: x + 2.5))
    _same(tiny, hs.mean("L1N3", torch.tensor([0.5])), DOWN1, setting(slice(3, 4), lambda x: torch.full_like(x, 0.5)))


def test_edits_of_attention_mlp_layer_and_stream(tiny: Model) -> None:
    v, whole = _vector(32), slice(None)
    mlp = "model.layers.1.mlp.down_proj"
    _same(tiny, hs.add("L1ATTN", v, positions=5), O1, setting(whole, lambda x: x + v, positions=5), output=True)
    _same(tiny, hs.project_out("L1MLP", v), mlp, setting(whole, lambda x: _along(x, v)), output=True)
    # the stream into layer 2 is what layer 1 returns
    _same(tiny, hs.add("L2RESID", v, rows=1), "model.layers.1", setting(whole, lambda x: x + v, rows=1), output=True)
    tokens = _tokens()
    both = [hs.zero("L1ATTN"), hs.zero("L1MLP")]
    torch.testing.assert_close(
        hs.trace(tiny, tokens, edits=hs.zero("L1")).logits, hs.trace(tiny, tokens, edits=both).logits, rtol=0, atol=0
    )
    run = hs.trace(tiny, tokens, ["resid_pre"], edits=hs.zero("L1"))
    torch.testing.assert_close(run["resid_pre", 2], run["resid_pre", 1], rtol=0, atol=0)


def test_one_value_a_component(tiny: Model) -> None:
    vectors = torch.stack([_vector(D_HEAD, 1), _vector(D_HEAD, 2)])
    together = hs.trace(tiny, _tokens(), edits=hs.add(["L1H2", "L2H0"], vectors)).logits
    apart = [hs.add("L1H2", vectors[0]), hs.add("L2H0", vectors[1])]
    torch.testing.assert_close(together, hs.trace(tiny, _tokens(), edits=apart).logits, rtol=0, atol=0)
    gates = torch.tensor([0.2, 0.7])
    together = hs.trace(tiny, _tokens(), edits=hs.gate("L1H2,L2H0", gates)).logits
    apart = [hs.scale("L1H2", float(gates[0])), hs.scale("L2H0", float(gates[1]))]
    torch.testing.assert_close(together, hs.trace(tiny, _tokens(), edits=apart).logits, **EXACT)


def test_edits_of_one_place_apply_in_order(tiny: Model) -> None:
    v = _vector(D_HEAD)
    _same(tiny, [hs.scale("L1H2", 2.0), hs.add("L1H2", v)], O1, setting(head(2), lambda x: 2 * x + v))
    _same(tiny, [hs.add("L1H2", v), hs.scale("L1H2", 2.0)], O1, setting(head(2), lambda x: 2 * (x + v)))


def test_project_out_leaves_nothing_along_the_direction(tiny: Model) -> None:
    direction = 5 * _vector(D_HEAD)
    edit = hs.project_out(["L1H2", "L1H3"], direction)
    before = hs.trace(tiny, _tokens(), ["z"])["z", 1]
    after = hs.trace(tiny, _tokens(), ["z"], edit)["z", 1]
    assert (after[..., 2:, :] @ direction).abs().max() < 1e-12
    assert (before[..., 2:, :] @ direction).abs().max() > 0.1
    other = _vector(D_HEAD, 9)
    other = other - (other @ direction) / (direction @ direction) * direction
    torch.testing.assert_close(after @ other, before @ other, **EXACT)
    torch.testing.assert_close(after[..., :2, :], before[..., :2, :], rtol=0, atol=0)


# values taken from another run


def test_patch_takes_the_same_rows_and_positions(tiny: Model) -> None:
    source = _tokens(seed=8)
    z = _read(tiny, O1, source)
    _same(tiny, hs.patch("L1H2", source), O1, setting(head(2), lambda x: z[..., head(2)]))
    run = hs.trace(tiny, source, ["z"])
    _same(
        tiny, hs.patch("L1H2", run, positions=[3], rows=[2]), O1,
        setting(head(2), lambda x: z[..., head(2)], rows=2, positions=3),
    )  # fmt: skip
    neuron = _read(tiny, DOWN1, source)
    _same(tiny, hs.patch("L1N5", source), DOWN1, setting(slice(5, 6), lambda x: neuron[..., 5:6]))


def test_patching_a_run_into_itself_changes_nothing(tiny: Model) -> None:
    edits = [hs.patch(c, _tokens()) for c in ("L0H1", "L2N3", "L1MLP", "L2ATTN", "L1RESID")]
    edits.append(hs.patch("L2KV1", _tokens(), part="v"))
    torch.testing.assert_close(hs.trace(tiny, _tokens(), edits=edits).logits, plain(tiny, input_ids=_tokens()), **EXACT)


@pytest.mark.parametrize("seed", range(4))
def test_resample_takes_another_row(tiny: Model, seed: int) -> None:
    tokens = _tokens(4)
    edit = hs.resample("L1H2", tokens, seed)
    z = _read(tiny, O1, tokens)[..., head(2)]
    made = hs.trace(tiny, tokens, ["z"], edit)["z", 1][..., 2, :]
    sources = []
    for row in range(4):
        (found,) = [i for i in range(4) if torch.equal(made[row], z[i])]
        assert found != row
        sources.append(found)
    assert sorted(sources) == [0, 1, 2, 3]
    again = hs.trace(tiny, tokens, ["z"], hs.resample("L1H2", tokens, seed))["z", 1][..., 2, :]
    torch.testing.assert_close(again, made, rtol=0, atol=0)


def test_resample_draws_by_seed(tiny: Model) -> None:
    tokens = _tokens(6)
    drawn = {hs.resolve(tiny, hs.resample("L1H2", tokens, seed))[0].value.sum(0)[0].sum().item() for seed in range(12)}
    assert len(drawn) > 1
    with pytest.raises(UsageError, match="at least two rows"):
        hs.trace(tiny, tokens, edits=hs.resample("L1H2", tokens[:1]))


def _padded() -> Prompts:
    tokens = _tokens(2)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, :4] = False
    at = torch.full((2, 1), 8)
    return Prompts(name="t", seed=0, tokens=tokens, positions=at, target=tokens[:, -1:], mask=mask)


def test_mean_ignores_padding(tiny: Model) -> None:
    prompts = _padded()
    assert prompts.mask is not None
    z = torch.cat([
        _read(tiny, O1, prompts.tokens[:1])[0, :, head(2)], _read(tiny, O1, prompts.tokens[1:, 4:])[0, :, head(2)],
    ])  # fmt: skip
    (edit,) = hs.resolve(tiny, hs.mean("L1H2", prompts))
    torch.testing.assert_close(edit.value, z.mean(0)[None], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("position", [0, 3, 4])
def test_padding_is_never_a_position(tiny: Model, position: int) -> None:
    """Position p of a left-padded row is its p-th real token."""
    prompts = _padded()
    before = hs.trace(tiny, prompts, ["z"])["z", 1]
    after = hs.trace(tiny, prompts, ["z"], hs.zero("L1H2", positions=position))["z", 1]
    changed = (before != after).any(-1).nonzero().tolist()
    assert changed == [[0, position, 2], [1, 4 + position, 2]]
    everywhere = hs.trace(tiny, prompts, ["z"], hs.add("L1H2", _vector(D_HEAD)))["z", 1]
    changed = (before != everywhere).any(-1)[..., 2]
    assert prompts.mask is not None and torch.equal(changed, prompts.mask)


def test_a_position_that_only_the_longer_row_has(tiny: Model) -> None:
    before = hs.trace(tiny, _padded(), ["z"])["z", 1]
    after = hs.trace(tiny, _padded(), ["z"], hs.zero("L1H2", positions=6))["z", 1]
    assert (before != after).any(-1).nonzero().tolist() == [[0, 6, 2]]


def test_a_positional_attention_mask_is_padding_too(tiny: Model) -> None:
    prompts = _padded()
    assert prompts.mask is not None
    by_name = {"input_ids": prompts.tokens, "attention_mask": prompts.mask.long(), "use_cache": False}
    with hs.edited(tiny, hs.zero("L1H2", positions=0)) as hf, torch.no_grad():
        named = hf(**by_name).logits
        positional = hf(prompts.tokens, prompts.mask.long(), use_cache=False).logits
    torch.testing.assert_close(positional, named, rtol=0, atol=0)


# attention edges


def test_masked_edges_equal_a_masked_softmax(tiny: Model) -> None:
    tokens = _tokens()
    pattern = hs.trace(tiny, tokens, ["pattern"])["pattern", 1]
    expected = pattern.clone()
    expected[:, 2, 5, 3] = expected[:, 2, 5, 1] = 0
    expected[:, 2, :, 2][:, 3:] = 0  # from everywhere to 2, where 2 is not all there is
    expected = expected / expected.sum(-1, keepdim=True)
    edges = [(5, 3), (5, 1), *((q, 2) for q in range(3, 9))]
    found = hs.trace(tiny, tokens, ["pattern"], hs.mask_edges("L1H2", edges))["pattern", 1]
    torch.testing.assert_close(found, expected, **EXACT)


def test_masked_edges_with_wildcards_rows_and_padding(tiny: Model) -> None:
    tokens = _tokens()
    edit = hs.mask_edges("L1H2", [(None, 0)], positions=range(1, 9), rows=[1])
    found = hs.trace(tiny, tokens, ["pattern"], edit)["pattern", 1]
    before = hs.trace(tiny, tokens, ["pattern"])["pattern", 1]
    assert found[1, 2, 1:, 0].abs().max() == 0
    for other in (
        found[[0, 2]] - before[[0, 2]],
        found[1, [0, 1, 3]] - before[1, [0, 1, 3]],
        found[1, 2, 0] - before[1, 2, 0],
    ):
        assert torch.count_nonzero(other) == 0
    prompts = _padded()
    found = hs.trace(tiny, prompts, ["pattern"], hs.mask_edges("L1H2", [(3, 0)]))["pattern", 1]
    before = hs.trace(tiny, prompts, ["pattern"])["pattern", 1]
    real = prompts.mask[:, None, :, None].expand_as(found)  # type: ignore[index]
    gone = ((found == 0) & (before > 0) & real).nonzero().tolist()
    assert gone == [[0, 2, 3, 0], [1, 2, 7, 4]]


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_a_query_without_any_key_attends_to_nothing(attn: str) -> None:
    hf = build("llama", torch.float32)
    hf.set_attn_implementation(attn)
    model = hs.load(hf)
    for edges, query in ([(None, 0)], 0), ([(4, None)], 4):
        run = hs.trace(model, _tokens(), ["pattern", "z"], hs.mask_edges("L1H2", edges))
        before = hs.trace(model, _tokens(), ["pattern"])["pattern", 1]
        assert torch.count_nonzero(run["pattern", 1][:, 2, query]) == 0
        assert torch.count_nonzero(run["z", 1][:, query, 2]) == 0
        assert torch.isfinite(run.logits).all()
        torch.testing.assert_close(run["pattern", 1][:, [0, 1, 3]], before[:, [0, 1, 3]], rtol=0, atol=0)


def test_rows_of_other_lengths_are_not_resampled(tiny: Model) -> None:
    with pytest.raises(UsageError, match="padded otherwise"):
        hs.trace(tiny, _padded(), edits=hs.resample("L1H2", _padded()))


# leaving the model as it was


def _state(model: Model) -> tuple[int, list[Any]]:
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.hf.modules())
    return hooks, torch.overrides._get_current_function_mode_stack()


ALL_SITES = ["L0H0", "L1N3", "L2MLP", "L1ATTN", "L1RESID", "L0KV1", "L2"]


def test_edited_restores_everything(tiny: Model) -> None:
    tokens = _tokens()
    before, state = plain(tiny, input_ids=tokens), _state(tiny)
    weights = {name: value.clone() for name, value in tiny.hf.state_dict().items()}
    with hs.edited(tiny, [hs.zero(ALL_SITES), hs.mask_edges("L0H1", [(3, 1)])]) as hf:
        assert hf is tiny.hf
        assert not torch.allclose(plain(tiny, input_ids=tokens), before)
    assert _state(tiny) == state
    torch.testing.assert_close(plain(tiny, input_ids=tokens), before, rtol=0, atol=0)
    assert all(torch.equal(value, weights[name]) for name, value in tiny.hf.state_dict().items())


def test_edited_restores_everything_after_an_error(tiny: Model) -> None:
    before, state = plain(tiny, input_ids=_tokens()), _state(tiny)
    with pytest.raises(ZeroDivisionError), hs.edited(tiny, hs.zero(ALL_SITES)):
        1 / 0  # noqa: B018
    assert _state(tiny) == state

    def fail(_: Any, args: Any) -> None:
        raise ZeroDivisionError

    handle = tiny.hf.get_submodule(O1).register_forward_pre_hook(fail)  # inside the attention, the tap is open
    try:
        with pytest.raises(ZeroDivisionError), hs.edited(tiny, hs.zero([*ALL_SITES, "L1KV1"])):
            plain(tiny, input_ids=_tokens())
    finally:
        handle.remove()
    assert _state(tiny) == state
    torch.testing.assert_close(plain(tiny, input_ids=_tokens()), before, rtol=0, atol=0)


def test_edited_restores_everything_after_ctrl_c(tiny: Model) -> None:
    state = _state(tiny)

    def stop(_: Any, args: Any) -> None:
        raise KeyboardInterrupt

    handle = tiny.hf.get_submodule(O1).register_forward_pre_hook(stop)
    try:
        with pytest.raises(KeyboardInterrupt), hs.edited(tiny, hs.zero("L1KV1")):
            plain(tiny, input_ids=_tokens())
    finally:
        handle.remove()
    assert _state(tiny) == state and "generate" not in tiny.hf.__dict__


def test_another_thread_does_not_see_the_edits(tiny: Model) -> None:
    with hs.edited(tiny, hs.zero("L1H2")), ThreadPoolExecutor() as pool:
        refused = pool.submit(hs.trace, tiny, _tokens()).exception()
    assert isinstance(refused, UsageError) and "another thread" in str(refused)
    with ThreadPoolExecutor() as pool:
        found = pool.submit(hs.trace, tiny, _tokens()).result().logits
    torch.testing.assert_close(found, plain(tiny, input_ids=_tokens()), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_is_edited_all_the_same() -> None:
    edit = hs.zero("L1H2")
    expected = hs.trace(hs.load(build("llama")), _tokens(), edits=edit).logits
    hf = build("llama")
    wrapped, inside = hs.load(torch.compile(hf, backend="eager")), hs.load(hf)
    assert wrapped.hf is hf
    hf.compile(backend="eager")
    plain(inside, input_ids=_tokens())
    compiled = hf._compiled_call_impl
    torch.testing.assert_close(hs.trace(inside, _tokens(), edits=edit).logits, expected, rtol=0, atol=0)
    assert hf._compiled_call_impl is compiled


def test_a_hook_of_the_user_stays(tiny: Model) -> None:
    calls: list[int] = []
    handle = tiny.hf.get_submodule(O1).register_forward_pre_hook(lambda _, args: calls.append(args[0].shape[1]))
    try:
        with hs.edited(tiny, hs.zero("L1H2")):
            plain(tiny, input_ids=_tokens())
        plain(tiny, input_ids=_tokens(width=4))
    finally:
        handle.remove()
    assert calls == [9, 4]


def test_edits_nest(tiny: Model) -> None:
    a, b = hs.zero(["L0H0", "L1KV1"]), hs.scale(["L2H1", "L1KV0"], 0.5)
    state = _state(tiny)
    with hs.edited(tiny, a), hs.edited(tiny, b):
        nested = plain(tiny, input_ids=_tokens())
    with hs.edited(tiny, a):
        traced = hs.trace(tiny, _tokens(), edits=b).logits
    together = hs.trace(tiny, _tokens(), edits=[a, b]).logits
    torch.testing.assert_close(nested, together, **EXACT)
    torch.testing.assert_close(traced, together, **EXACT)
    assert _state(tiny) == state


# generation


def _generate(model: Model, edits: Any, *, cache: bool, padded: bool = False) -> tuple[Tensor, Tensor]:
    """Eight greedy tokens and the logits they come from, [step, batch, vocab].

    The logits are read at the unembedding, since generate() gives them in float32.
    """
    prompts = _padded()
    assert prompts.mask is not None
    kwargs: dict[str, Any] = {"attention_mask": prompts.mask.long()} if padded else {}
    edits = hs.resolve(model, edits)  # may run the model, before anything is counted
    logits: list[Tensor] = []
    widths: list[int] = []
    hooks = [
        model.hf.get_submodule("lm_head").register_forward_hook(lambda _, args, out: logits.append(out[:, -1])),
        model.hf.get_submodule("model.layers.0.mlp").register_forward_hook(
            lambda _, a, out: widths.append(out.shape[1])
        ),
    ]
    try:
        with hs.edited(model, edits):
            ids = model.hf.generate(  # type: ignore[operator]
                input_ids=prompts.tokens,
                use_cache=cache,
                max_new_tokens=8,
                do_sample=False,
                eos_token_id=None,
                **kwargs,
            )
    finally:
        for hook in hooks:
            hook.remove()
    assert widths == ([9] + [1] * 7 if cache else list(range(9, 17)))
    return ids, torch.stack(logits)


def _equal(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert found[1].dtype == expected[1].dtype == torch.float64
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-9)
    assert torch.equal(found[0], expected[0])


EDITS = {
    "head": hs.zero(["L1H2", "L0H3"]),
    "head at positions": hs.scale("L1H2", 3.0, positions=[2, 4]),
    "row": hs.zero("L1H2", rows=[1]),
    "neuron": hs.add("L1N7", torch.tensor(4.0)),
    "stream": hs.add("L1RESID", _vector(32)),
    "layer": hs.zero("L1"),
    "values": hs.zero("L1KV1", part="v"),
    "keys": hs.scale("L1KV0", -2.0, part="k"),
    "keys and values at positions": hs.zero("L1KV1", positions=[1, 2, 3]),
    "values of a row": hs.add("L1KV1", _vector(D_HEAD), part="v", rows=[0]),
    "edges": hs.mask_edges("L1H2", [(None, 1), (4, 2)], positions=None),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", EDITS)
def test_generation_with_a_cache_equals_recomputation(tiny: Model, name: str, padded: bool) -> None:
    found = _generate(tiny, EDITS[name], cache=True, padded=padded)
    _equal(found, _generate(tiny, EDITS[name], cache=False, padded=padded))
    assert not torch.allclose(found[1], _generate(tiny, [], cache=True, padded=padded)[1])


@pytest.mark.parametrize(
    ("edit", "path", "columns", "output"),
    [
        (hs.zero("L1H2", positions="generated"), O1, head(2), False),
        (hs.zero("L1N7", positions="generated"), DOWN1, slice(7, 8), False),
        (hs.zero("L1KV1", part="v", positions="generated"), "model.layers.1.self_attn.v_proj", head(1), True),
    ],
    ids=["head", "neuron", "values"],
)
@pytest.mark.parametrize("padded", [False, True])
def test_generated_positions_only(
    tiny: Model, edit: Edit, path: str, columns: slice, output: bool, padded: bool
) -> None:
    found = _generate(tiny, edit, cache=True, padded=padded)
    with hooked(tiny, path, setting(columns, torch.zeros_like, positions=slice(9, None)), output=output):
        expected = _generate(tiny, [], cache=False, padded=padded)
    _equal(found, expected)
    untouched = _generate(tiny, [], cache=True, padded=padded)
    torch.testing.assert_close(found[1][0], untouched[1][0], rtol=0, atol=0)  # the first new token is the prompt's
    assert not torch.allclose(found[1], untouched[1])


@pytest.mark.parametrize("site", ["q", "k", "v", "attn_scores", "pattern", "z"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_cached_step_is_seen_as_in_a_whole_pass(tiny: Model, site: str, padded: bool) -> None:
    prompts = _padded()
    assert prompts.mask is not None
    mask = prompts.mask if padded else torch.ones_like(prompts.mask)
    whole = Prompts(
        name="t", seed=0, tokens=prompts.tokens, positions=prompts.positions, target=prompts.target, mask=mask
    )
    position_ids = (mask.long().cumsum(1) - 1).clamp(min=0)
    shared = {"attention_mask": mask[:, :8].long(), "position_ids": position_ids[:, :8]} if padded else {}
    with torch.no_grad():
        cache = tiny.hf(input_ids=prompts.tokens[:, :8], use_cache=True, **shared).past_key_values
    shared = {"attention_mask": mask.long(), "position_ids": position_ids[:, 8:]} if padded else {}
    step = hs.trace(tiny, {"input_ids": prompts.tokens[:, 8:], "past_key_values": cache, **shared}, [site])[site, 1]
    expected = hs.trace(tiny, whole, [site])[site, 1]
    if site in ("attn_scores", "pattern"):
        expected = expected[:, :, 8:]
    elif site in ("q", "z"):
        expected = expected[:, 8:]
    real = mask if site in ("k", "v") else torch.ones(2, 1, dtype=torch.bool)
    if site not in ("attn_scores", "pattern"):
        step, expected = step[real], expected[real]
    torch.testing.assert_close(step, expected, rtol=1e-9, atol=1e-10)


def test_generated_positions_are_the_same_however_they_are_generated(tiny: Model) -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    edit = hs.zero(["L0H0", "L1H0", "L1H2", "L2H1"], positions="generated")
    with hs.edited(tiny, edit) as hf:
        expected = hf.generate(_tokens(1), **options)
        for other in ({"use_cache": False}, {"prompt_lookup_num_tokens": 2}, {"assistant_model": build("llama")}):
            assert torch.equal(hf.generate(_tokens(1), **options, **other), expected), other
    assert not torch.equal(tiny.hf.generate(_tokens(1), **options), expected)


def test_beams_belong_to_the_row_of_their_prompt(tiny: Model) -> None:
    options = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    heads = ["L0H0", "L1H0", "L1H1", "L1H2"]
    before = tiny.hf.generate(_tokens(), **options)
    with hs.edited(tiny, hs.scale(heads, -9.0)) as hf:
        everywhere = hf.generate(_tokens(), **options)
    with hs.edited(tiny, hs.scale(heads, -9.0, rows=[1])) as hf:
        found = hf.generate(_tokens(), **options)
    assert torch.equal(found[[0, 2]], before[[0, 2]]) and torch.equal(found[1], everywhere[1])
    assert not torch.equal(found[1], before[1])


def test_generated_leaves_a_plain_pass_alone(tiny: Model) -> None:
    found = hs.trace(tiny, _tokens(), edits=hs.zero("L1H2", positions="generated")).logits
    torch.testing.assert_close(found, plain(tiny, input_ids=_tokens()), rtol=0, atol=0)


def test_a_patched_prompt_goes_on_generating(tiny: Model) -> None:
    source = _tokens(2, seed=8)
    for component, part, path, columns in (
        ("L1H2", "kv", O1, head(2)), ("L1KV1", "v", "model.layers.1.self_attn.v_proj", head(1)),
    ):  # fmt: skip
        edit = hs.patch(component, source, positions=range(9), part=part)
        (recorded,) = hs.resolve(tiny, edit)

        def change(x: Tensor, columns: slice = columns, value: Tensor = recorded.value[0]) -> Tensor:
            x[:, :9, columns] = value
            return x

        found = _generate(tiny, edit, cache=True)
        with hooked(tiny, path, change, output=part == "v"):
            _equal(found, _generate(tiny, [], cache=False))
        assert not torch.allclose(found[1], _generate(tiny, [], cache=True)[1])
    with pytest.raises(UsageError, match="shape"):
        _generate(tiny, hs.patch("L1H2", source), cache=True)


# edits as files


def test_saved_edits_come_back_the_same(tiny: Model, tmp_path: Any) -> None:
    source = _tokens(seed=8)
    edits = [
        hs.zero(["L1H2", "L0N3"], positions=[1, 2], rows=[0]),
        hs.scale("L2KV1", 1 / 3, part="v"),
        hs.gate("L1H0,L1H1", torch.tensor([0.1, 0.9], requires_grad=True)),
        hs.add("L1RESID", _vector(32) / 3),
        hs.project_out("L2H3", _vector(D_HEAD)),
        hs.mask_edges("L0H1", [(None, 2), (5, 3)]),
        *hs.resolve(
            tiny, [hs.mean("L2H1", source), hs.resample("L2H2", source, seed=5), hs.patch("L2N4", source, rows=1)]
        ),
    ]
    path = tmp_path / "edits.json"
    hs.save_edits(edits, path)
    loaded = hs.load_edits(path)
    assert [str(e) for e in loaded] == [str(e) for e in edits]
    for name in ("op", "components", "positions", "rows", "part", "edges"):
        assert [getattr(e, name) for e in loaded] == [getattr(e, name) for e in edits]
    for a, b in zip(loaded, edits, strict=True):
        if isinstance(b.value, Tensor):
            assert a.value.dtype == b.value.dtype
            torch.testing.assert_close(a.value, b.value.detach(), rtol=0, atol=0)
        else:
            assert a.value == b.value
    found = hs.trace(tiny, _tokens(), edits=loaded).logits
    torch.testing.assert_close(found, hs.trace(tiny, _tokens(), edits=edits).logits, rtol=0, atol=0)
    hs.save_edits(hs.zero("L1H2", positions="generated"), path)
    assert hs.load_edits(path)[0].positions == "generated"


def test_half_precision_values_come_back_exactly(tmp_path: Any) -> None:
    value = _vector(D_HEAD).bfloat16()
    hs.save_edits(hs.add("L0H0", value), tmp_path / "e.json")
    loaded = hs.load_edits(tmp_path / "e.json")[0].value
    assert loaded.dtype == torch.bfloat16 and torch.equal(loaded, value)


def test_an_edit_that_waits_for_its_source_is_not_saved(tiny: Model, tmp_path: Any) -> None:
    with pytest.raises(UsageError, match="resolve"):
        hs.save_edits(hs.mean("L1H2", _tokens()), tmp_path / "e.json")
    assert list(tmp_path.iterdir()) == []


def _damage(tmp_path: Any, old: str, new: str) -> Any:
    path = tmp_path / "e.json"
    hs.save_edits([hs.scale("L1H2", 2.0, positions=[3])], path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return path


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"edits": [', '"edits": [5, '), ('"op"', '"po"'), ('"scale"', '"frobnicate"'), ('"L1H2"', '"L1G2"'),
        ('"part": "kv"', '"part": "q"'), ('"edges": []', '"edges": [[1]]'), ('"value": 2.0', '"value": "two"'),
        ('"dtype": null', '"dtype": "Tensor"'), ('"dtype": null', '"dtype": 5'), ('"positions"', '"where"'), ("{", "[{"),
        ('"edits": [', '"edits": "", "x": ['),
    ],
)  # fmt: skip
def test_a_damaged_edit_file_is_one_sentence(tmp_path: Any, old: str, new: str) -> None:
    from headscope.core.errors import FileError

    path = _damage(tmp_path, old, new)
    with pytest.raises(FileError) as caught:
        hs.load_edits(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_newer_or_foreign_edit_file_says_so(tmp_path: Any) -> None:
    from headscope.core.errors import FileError

    with pytest.raises(FileError, match="edit format 99"):
        hs.load_edits(_damage(tmp_path, '"format_version": 1', '"format_version": 99'))
    with pytest.raises(FileError, match="not an edit file"):
        hs.load_edits(_damage(tmp_path, "headscope-edits", "recipe"))
    with pytest.raises(FileError, match="no edit file"):
        hs.load_edits(tmp_path / "none.json")


# what is refused

BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "layer": (lambda: hs.zero("L3H0"), "L3H0 .*layers 0 to 2"),
    "head": (lambda: hs.zero("L0H4"), "L0H4 .*4 heads"),
    "kv head": (lambda: hs.zero("L0KV2"), "L0KV2 .*2 kv_heads"),
    "neuron": (lambda: hs.zero("L0N48"), "L0N48"),
    "stack": (lambda: hs.zero("enc.L0H0"), "enc.L0H0"),
    "expert": (lambda: hs.zero("L0E1N2"), "L0E1N2"),
    "name": (lambda: hs.zero("L0G0"), "L0G0"),
    "nothing": (lambda: hs.zero([]), "No component"),
    "position word": (lambda: hs.zero("L0H0", positions="last"), "'last'"),
    "negative position": (lambda: hs.zero("L0H0", positions=-1), "-1"),
    "position type": (lambda: hs.zero("L0H0", positions=1.5), "1.5"),
    "position list": (lambda: hs.zero("L0H0", positions=["a"]), "'a'"),
    "no position": (lambda: hs.zero("L0H0", positions=[]), "positions"),
    "position beyond": (lambda: hs.zero("L0H0", positions=[2, 9]), "9"),
    "negative row": (lambda: hs.zero("L0H0", rows=-2), "-2"),
    "row type": (lambda: hs.zero("L0H0", rows="first"), "first"),
    "no row": (lambda: hs.zero("L0H0", rows=[]), "rows"),
    "row beyond": (lambda: hs.zero("L0H0", rows=[3]), "Row 3"),
    "part": (lambda: hs.zero("L0KV0", part="q"), "'q'"),
    "operation": (lambda: Edit("frobnicate", hs.zero("L0H0").components), "frobnicate"),
    "scale": (lambda: hs.scale("L0H0", torch.tensor(1.0)), "Tensor"),
    "gates": (lambda: hs.gate("L0H0,L0H1", torch.ones(3)), "3 gates for 2"),
    "direction": (lambda: hs.project_out("L0H0", torch.zeros(8)), "not zero"),
    "direction size": (lambda: hs.project_out("L0H0", torch.ones(5)), r"\(5,\)"),
    "vector": (lambda: hs.add("L0H0", torch.ones(5)), r"\(5,\)"),
    "vectors for neurons": (lambda: hs.add("L0N0,L0N1", torch.ones(2)), r"\(2,\)"),
    "one vector too few": (lambda: hs.add("L0H0,L0H1,L0H2", torch.ones(2, 8)), r"\(2, 8\)"),
    "patch": (lambda: hs.patch("L0H0", _tokens(3, 5)), "do not fit"),
    "patch of one row": (lambda: hs.patch("L0H0", _tokens(1)), "do not fit"),
    "patch of one position": (lambda: hs.patch("L0H0", _tokens(3, 1)), "do not fit"),
    "values of a batch": (lambda: hs.add("L0RESID", torch.ones(3, 9, 32)), r"\(3, 9, 32\).*at most 2"),
    "the same twice": (lambda: hs.scale("L0H0,L0H1,L0H0", 0.5), "L0H0 came again"),
    "two sites": (lambda: hs.patch("L0KV0", _tokens()), "several sites"),
    "edges": (lambda: hs.mask_edges("L0H0", []), "at least one"),
    "edges of neurons": (lambda: hs.mask_edges("L0N0", [(1, 0)]), "heads"),
    "edge form": (lambda: hs.mask_edges("L0H0", [(1, 0, 2)]), "pair"),  # type: ignore[list-item]
    "negative edge": (lambda: hs.mask_edges("L0H0", [(3, -1)]), "-1"),
    "edge beyond": (lambda: hs.mask_edges("L0H0", [(9, 1)]), "9"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_edits_are_usage_errors_of_one_sentence(tiny: Model, name: str) -> None:
    make, words = BAD[name]
    state = _state(tiny)
    with pytest.raises(UsageError, match=words) as caught:
        hs.trace(tiny, _tokens(), edits=make())
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, HeadscopeError) and _state(tiny) == state
