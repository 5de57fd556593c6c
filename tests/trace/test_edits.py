"""Every edit equals a plain hook on the model's own module, at the places it names and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import headscope as hs
from brute import (
    D_HEAD,
    DOWN1,
    O1,
    Change,
    head,
    hooked,
    padded_prompts,
    plain,
    setting,
    some_tokens,
    some_vector,
    state_of,
)
from families.tiny import build
from headscope.core.errors import UsageError
from headscope.model import Model
from headscope.trace import Edit

EXACT = {"rtol": 0.0, "atol": 1e-12}


def _read(model: Model, path: str, tokens: Tensor) -> Tensor:
    """What the module at `path` reads."""
    kept: list[Tensor] = []
    with hooked(model, path, lambda x: kept.append(x) or x):  # type: ignore[func-returns-value]
        plain(model, input_ids=tokens)
    return kept[0]


def _same(model: Model, edits: Any, path: str, change: Change, *, output: bool = False) -> None:
    tokens = some_tokens()
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
    "add": (lambda c, **w: hs.add(c, some_vector(D_HEAD), **w), lambda x: x + some_vector(D_HEAD)),
    "mean": (lambda c, **w: hs.mean(c, some_vector(D_HEAD), **w), lambda x: some_vector(D_HEAD).expand_as(x)),
    "project_out": (
        lambda c, **w: hs.project_out(c, some_vector(D_HEAD), **w),
        lambda x: _along(x, some_vector(D_HEAD)),
    ),
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
    both = hs.trace(tiny, some_tokens(), edits=hs.scale("L1KV0", 3.0)).logits
    parts = [hs.scale("L1KV0", 3.0, part="k"), hs.scale("L1KV0", 3.0, part="v")]
    torch.testing.assert_close(both, hs.trace(tiny, some_tokens(), edits=parts).logits, rtol=0, atol=0)
    assert not torch.equal(both, hs.trace(tiny, some_tokens(), edits=parts[0]).logits)
    assert not torch.equal(both, hs.trace(tiny, some_tokens(), edits=parts[1]).logits)


def test_edits_of_neurons(tiny: Model) -> None:
    _same(tiny, hs.zero("L1N7"), DOWN1, setting(slice(7, 8), torch.zeros_like))
    _same(tiny, hs.scale("L1N47", 3.0, positions=2), DOWN1, setting(slice(47, 48), lambda x: 3 * x, positions=2))
    _same(tiny, hs.add("L1N0", torch.tensor(2.5)), DOWN1, setting(slice(0, 1), lambda x: x + 2.5))
    _same(tiny, hs.mean("L1N3", torch.tensor([0.5])), DOWN1, setting(slice(3, 4), lambda x: torch.full_like(x, 0.5)))


def test_edits_of_attention_mlp_layer_and_stream(tiny: Model) -> None:
    v, whole = some_vector(32), slice(None)
    mlp = "model.layers.1.mlp.down_proj"
    _same(tiny, hs.add("L1ATTN", v, positions=5), O1, setting(whole, lambda x: x + v, positions=5), output=True)
    _same(tiny, hs.project_out("L1MLP", v), mlp, setting(whole, lambda x: _along(x, v)), output=True)
    # the stream into layer 2 is what layer 1 returns
    _same(tiny, hs.add("L2RESID", v, rows=1), "model.layers.1", setting(whole, lambda x: x + v, rows=1), output=True)
    tokens = some_tokens()
    both = [hs.zero("L1ATTN"), hs.zero("L1MLP")]
    torch.testing.assert_close(
        hs.trace(tiny, tokens, edits=hs.zero("L1")).logits, hs.trace(tiny, tokens, edits=both).logits, rtol=0, atol=0
    )
    run = hs.trace(tiny, tokens, ["resid_pre"], edits=hs.zero("L1"))
    torch.testing.assert_close(run["resid_pre", 2], run["resid_pre", 1], rtol=0, atol=0)


def test_one_value_a_component(tiny: Model) -> None:
    vectors = torch.stack([some_vector(D_HEAD, 1), some_vector(D_HEAD, 2)])
    together = hs.trace(tiny, some_tokens(), edits=hs.add(["L1H2", "L2H0"], vectors)).logits
    apart = [hs.add("L1H2", vectors[0]), hs.add("L2H0", vectors[1])]
    torch.testing.assert_close(together, hs.trace(tiny, some_tokens(), edits=apart).logits, rtol=0, atol=0)
    gates = torch.tensor([0.2, 0.7])
    together = hs.trace(tiny, some_tokens(), edits=hs.gate("L1H2,L2H0", gates)).logits
    apart = [hs.scale("L1H2", float(gates[0])), hs.scale("L2H0", float(gates[1]))]
    torch.testing.assert_close(together, hs.trace(tiny, some_tokens(), edits=apart).logits, **EXACT)


def test_edits_of_one_place_apply_in_order(tiny: Model) -> None:
    v = some_vector(D_HEAD)
    _same(tiny, [hs.scale("L1H2", 2.0), hs.add("L1H2", v)], O1, setting(head(2), lambda x: 2 * x + v))
    _same(tiny, [hs.add("L1H2", v), hs.scale("L1H2", 2.0)], O1, setting(head(2), lambda x: 2 * (x + v)))


def test_project_out_leaves_nothing_along_the_direction(tiny: Model) -> None:
    direction = 5 * some_vector(D_HEAD)
    edit = hs.project_out(["L1H2", "L1H3"], direction)
    before = hs.trace(tiny, some_tokens(), ["z"])["z", 1]
    after = hs.trace(tiny, some_tokens(), ["z"], edit)["z", 1]
    assert (after[..., 2:, :] @ direction).abs().max() < 1e-12
    assert (before[..., 2:, :] @ direction).abs().max() > 0.1
    other = some_vector(D_HEAD, 9)
    other = other - (other @ direction) / (direction @ direction) * direction
    torch.testing.assert_close(after @ other, before @ other, **EXACT)
    torch.testing.assert_close(after[..., :2, :], before[..., :2, :], rtol=0, atol=0)


# values taken from another run


def test_patch_takes_the_same_rows_and_positions(tiny: Model) -> None:
    source = some_tokens(seed=8)
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
    edits = [hs.patch(c, some_tokens()) for c in ("L0H1", "L2N3", "L1MLP", "L2ATTN", "L1RESID")]
    edits.append(hs.patch("L2KV1", some_tokens(), part="v"))
    torch.testing.assert_close(
        hs.trace(tiny, some_tokens(), edits=edits).logits, plain(tiny, input_ids=some_tokens()), **EXACT
    )


@pytest.mark.parametrize("seed", range(4))
def test_resample_takes_another_row(tiny: Model, seed: int) -> None:
    tokens = some_tokens(4)
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
    tokens = some_tokens(6)
    drawn = {hs.resolve(tiny, hs.resample("L1H2", tokens, seed))[0].value.sum(0)[0].sum().item() for seed in range(12)}
    assert len(drawn) > 1
    with pytest.raises(UsageError, match="at least two rows"):
        hs.trace(tiny, tokens, edits=hs.resample("L1H2", tokens[:1]))


def test_mean_ignores_padding(tiny: Model) -> None:
    prompts = padded_prompts()
    assert prompts.mask is not None
    z = torch.cat([
        _read(tiny, O1, prompts.tokens[:1])[0, :, head(2)], _read(tiny, O1, prompts.tokens[1:, 4:])[0, :, head(2)],
    ])  # fmt: skip
    (edit,) = hs.resolve(tiny, hs.mean("L1H2", prompts))
    torch.testing.assert_close(edit.value, z.mean(0)[None], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("position", [0, 3, 4])
def test_padding_is_never_a_position(tiny: Model, position: int) -> None:
    """Position p of a left-padded row is its p-th real token."""
    prompts = padded_prompts()
    before = hs.trace(tiny, prompts, ["z"])["z", 1]
    after = hs.trace(tiny, prompts, ["z"], hs.zero("L1H2", positions=position))["z", 1]
    changed = (before != after).any(-1).nonzero().tolist()
    assert changed == [[0, position, 2], [1, 4 + position, 2]]
    everywhere = hs.trace(tiny, prompts, ["z"], hs.add("L1H2", some_vector(D_HEAD)))["z", 1]
    changed = (before != everywhere).any(-1)[..., 2]
    assert prompts.mask is not None and torch.equal(changed, prompts.mask)


def test_a_position_that_only_the_longer_row_has(tiny: Model) -> None:
    before = hs.trace(tiny, padded_prompts(), ["z"])["z", 1]
    after = hs.trace(tiny, padded_prompts(), ["z"], hs.zero("L1H2", positions=6))["z", 1]
    assert (before != after).any(-1).nonzero().tolist() == [[0, 6, 2]]


def test_a_positional_attention_mask_is_padding_too(tiny: Model) -> None:
    prompts = padded_prompts()
    assert prompts.mask is not None
    by_name = {"input_ids": prompts.tokens, "attention_mask": prompts.mask.long(), "use_cache": False}
    with hs.edited(tiny, hs.zero("L1H2", positions=0)) as hf, torch.no_grad():
        named = hf(**by_name).logits
        positional = hf(prompts.tokens, prompts.mask.long(), use_cache=False).logits
    torch.testing.assert_close(positional, named, rtol=0, atol=0)


# attention edges


def test_masked_edges_equal_a_masked_softmax(tiny: Model) -> None:
    tokens = some_tokens()
    pattern = hs.trace(tiny, tokens, ["pattern"])["pattern", 1]
    expected = pattern.clone()
    expected[:, 2, 5, 3] = expected[:, 2, 5, 1] = 0
    expected[:, 2, :, 2][:, 3:] = 0  # from everywhere to 2, where 2 is not all there is
    expected = expected / expected.sum(-1, keepdim=True)
    edges = [(5, 3), (5, 1), *((q, 2) for q in range(3, 9))]
    found = hs.trace(tiny, tokens, ["pattern"], hs.mask_edges("L1H2", edges))["pattern", 1]
    torch.testing.assert_close(found, expected, **EXACT)


def test_masked_edges_with_wildcards_rows_and_padding(tiny: Model) -> None:
    tokens = some_tokens()
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
    prompts = padded_prompts()
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
        run = hs.trace(model, some_tokens(), ["pattern", "z"], hs.mask_edges("L1H2", edges))
        before = hs.trace(model, some_tokens(), ["pattern"])["pattern", 1]
        assert torch.count_nonzero(run["pattern", 1][:, 2, query]) == 0
        assert torch.count_nonzero(run["z", 1][:, query, 2]) == 0
        assert torch.isfinite(run.logits).all()
        torch.testing.assert_close(run["pattern", 1][:, [0, 1, 3]], before[:, [0, 1, 3]], rtol=0, atol=0)


def test_rows_of_other_lengths_are_not_resampled(tiny: Model) -> None:
    with pytest.raises(UsageError, match="padded otherwise"):
        hs.trace(tiny, padded_prompts(), edits=hs.resample("L1H2", padded_prompts()))


# leaving the model as it was


ALL_SITES = ["L0H0", "L1N3", "L2MLP", "L1ATTN", "L1RESID", "L0KV1", "L2"]


def test_edited_restores_everything(tiny: Model) -> None:
    tokens = some_tokens()
    before, state = plain(tiny, input_ids=tokens), state_of(tiny)
    weights = {name: value.clone() for name, value in tiny.hf.state_dict().items()}
    with hs.edited(tiny, [hs.zero(ALL_SITES), hs.mask_edges("L0H1", [(3, 1)])]) as hf:
        assert hf is tiny.hf
        assert not torch.allclose(plain(tiny, input_ids=tokens), before)
    assert state_of(tiny) == state
    torch.testing.assert_close(plain(tiny, input_ids=tokens), before, rtol=0, atol=0)
    assert all(torch.equal(value, weights[name]) for name, value in tiny.hf.state_dict().items())


def test_edited_restores_everything_after_an_error(tiny: Model) -> None:
    before, state = plain(tiny, input_ids=some_tokens()), state_of(tiny)
    with pytest.raises(ZeroDivisionError), hs.edited(tiny, hs.zero(ALL_SITES)):
        1 / 0  # noqa: B018
    assert state_of(tiny) == state

    def fail(_: Any, args: Any) -> None:
        raise ZeroDivisionError

    handle = tiny.hf.get_submodule(O1).register_forward_pre_hook(fail)  # inside the attention, the tap is open
    try:
        with pytest.raises(ZeroDivisionError), hs.edited(tiny, hs.zero([*ALL_SITES, "L1KV1"])):
            plain(tiny, input_ids=some_tokens())
    finally:
        handle.remove()
    assert state_of(tiny) == state
    torch.testing.assert_close(plain(tiny, input_ids=some_tokens()), before, rtol=0, atol=0)


def test_edited_restores_everything_after_ctrl_c(tiny: Model) -> None:
    state = state_of(tiny)

    def stop(_: Any, args: Any) -> None:
        raise KeyboardInterrupt

    handle = tiny.hf.get_submodule(O1).register_forward_pre_hook(stop)
    try:
        with pytest.raises(KeyboardInterrupt), hs.edited(tiny, hs.zero("L1KV1")):
            plain(tiny, input_ids=some_tokens())
    finally:
        handle.remove()
    assert state_of(tiny) == state and "generate" not in tiny.hf.__dict__


def test_another_thread_does_not_see_the_edits(tiny: Model) -> None:
    with hs.edited(tiny, hs.zero("L1H2")), ThreadPoolExecutor() as pool:
        refused = pool.submit(hs.trace, tiny, some_tokens()).exception()
    assert isinstance(refused, UsageError) and "another thread" in str(refused)
    with ThreadPoolExecutor() as pool:
        found = pool.submit(hs.trace, tiny, some_tokens()).result().logits
    torch.testing.assert_close(found, plain(tiny, input_ids=some_tokens()), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_is_edited_all_the_same() -> None:
    edit = hs.zero("L1H2")
    expected = hs.trace(hs.load(build("llama")), some_tokens(), edits=edit).logits
    hf = build("llama")
    wrapped, inside = hs.load(torch.compile(hf, backend="eager")), hs.load(hf)
    assert wrapped.hf is hf
    hf.compile(backend="eager")
    plain(inside, input_ids=some_tokens())
    compiled = hf._compiled_call_impl
    torch.testing.assert_close(hs.trace(inside, some_tokens(), edits=edit).logits, expected, rtol=0, atol=0)
    assert hf._compiled_call_impl is compiled


def test_a_hook_of_the_user_stays(tiny: Model) -> None:
    calls: list[int] = []
    handle = tiny.hf.get_submodule(O1).register_forward_pre_hook(lambda _, args: calls.append(args[0].shape[1]))
    try:
        with hs.edited(tiny, hs.zero("L1H2")):
            plain(tiny, input_ids=some_tokens())
        plain(tiny, input_ids=some_tokens(width=4))
    finally:
        handle.remove()
    assert calls == [9, 4]


def test_edits_nest(tiny: Model) -> None:
    a, b = hs.zero(["L0H0", "L1KV1"]), hs.scale(["L2H1", "L1KV0"], 0.5)
    state = state_of(tiny)
    with hs.edited(tiny, a), hs.edited(tiny, b):
        nested = plain(tiny, input_ids=some_tokens())
    with hs.edited(tiny, a):
        traced = hs.trace(tiny, some_tokens(), edits=b).logits
    together = hs.trace(tiny, some_tokens(), edits=[a, b]).logits
    torch.testing.assert_close(nested, together, **EXACT)
    torch.testing.assert_close(traced, together, **EXACT)
    assert state_of(tiny) == state
