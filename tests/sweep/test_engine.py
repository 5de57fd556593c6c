"""The engine gives what one pass an edit gives, in every family, and does not run what an edit cannot change."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import headscope as hs
from families.tiny import DECODERS, FAMILIES, build
from headscope.model import Model
from headscope.sweep.metrics import measure
from headscope.sweep.plan import make_plan
from headscope.tasks import Prompts
from headscope.trace import Edit, trace
from headscope.trace.replay import record

WIDTH, BATCH = 9, 3


def _model(family: str) -> Model:
    # transformers fills the masks of these with float32's lowest number, whose sums are no numbers in float64
    return hs.load(build(family, torch.float32 if family in ("gemma2", "bloom") else torch.float64), check=False)


def _prompts(model: Model, padded: bool) -> Prompts:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(5, 96, (BATCH, WIDTH), generator=generator)
    mask = torch.ones(BATCH, WIDTH, dtype=torch.bool)
    if padded:
        mask[1, :3] = False
    positions = torch.tensor([[WIDTH - 2, WIDTH - 1]]).expand(BATCH, -1)
    target = torch.randint(5, 96, (BATCH, 2), generator=generator)
    return Prompts("t", 0, tokens, positions, target, mask=mask if padded else None)


def _edits(model: Model, prompts: Prompts, *, causal: bool) -> list[Edit | list[Edit]]:
    a = model.anatomy
    unit = torch.linspace(-1, 1, a.d_head, dtype=model.dtype)
    wide = torch.linspace(-1, 1, a.d_model, dtype=model.dtype)
    run = trace(model, prompts, ["z", "neuron", "resid_pre"] if a.blocks[0].down is not None else ["z", "resid_pre"])
    found: list[Edit | list[Edit]] = [
        [],
        *(hs.zero(head) for head in model.heads()),
        hs.scale(["L0H1", "L2H3"], 0.3),
        hs.add("L1H2", unit),
        hs.project_out("L2H0", unit),
        hs.mean("L1H0", run),
        *([hs.resample("L1H1", run, seed=3)] if prompts.mask is None else []),
        hs.zero("L1ATTN"),
        hs.zero("L2MLP"),
        hs.zero("L1"),
        hs.add("L1RESID", wide),
        hs.mask_edges("L1H1", [(5, 3), (4, None)]),
        [hs.zero("L0H0"), hs.scale("L2H2", 2.0), hs.zero("L0H0", positions=3)],
        hs.zero("L1H1", rows=[2]),
        *(hs.zero(head, positions=-1 % 5) for head in ("L0H0", "L1H3", "L2H1")),
        hs.zero("L1H0", positions=[5]),
        hs.patch("L1H2", run, positions=[4, 5]),
        hs.add("L2RESID", wide, positions=5),
        hs.scale("L1ATTN", 0.5, positions=5, rows=[0, 2]),
    ]
    if causal and a.n_kv_heads:
        found += [hs.zero("L1KV0"), hs.scale("L2KV0", 0.5, part="v"), hs.zero("L1KV0", positions=5, part="k")]
    if a.blocks[0].down is not None:
        found += [hs.zero("L1N7"), hs.patch(["L1N3", "L1N4"], run, positions=5)]
    return found


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("family", DECODERS)
def test_equals_one_pass_an_edit(family: str, padded: bool) -> None:
    model = _model(family)
    prompts = _prompts(model, padded)
    edits = _edits(model, prompts, causal=True)
    found = hs.sweep(model, prompts, edits, "loss").values
    for row, edit in zip(found, edits, strict=True):
        logits: Any = trace(model, prompts, edits=edit, logits=prompts.positions).logits
        wanted = measure("loss", logits, prompts)
        tolerance = 1e-10 if wanted.dtype == torch.float64 and family != "gpt-j" else 1e-5
        torch.testing.assert_close(
            torch.tensor(row).to(wanted.dtype), wanted, rtol=tolerance, atol=tolerance, msg=str(edit)
        )


@pytest.mark.parametrize("family", DECODERS)
def test_the_last_mlp_runs_only_where_it_is_read(family: str) -> None:
    model = _model(family)
    prompts = _prompts(model, padded=True)
    edits = [hs.zero(head) for head in model.heads()]  # none looks into the MLP
    widths: list[int] = []
    last = model.anatomy.blocks[-1]
    hook = None
    if last.down is not None and last.mlp is not last.block:
        hook = last.down.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[-2]))
    found = hs.sweep(model, prompts, edits, "loss").values
    if hook is not None:
        hook.remove()
        assert widths == [WIDTH, 2]  # the clean pass, and the positions of the metric
    for row, edit in zip(found, edits, strict=True):
        wanted = measure("loss", trace(model, prompts, edits=edit, logits=prompts.positions).logits, prompts)
        tolerance = 1e-10 if wanted.dtype == torch.float64 and family != "gpt-j" else 1e-5
        torch.testing.assert_close(torch.tensor(row).to(wanted.dtype), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in DECODERS and f != "vit"])
def test_equals_one_pass_an_edit_in_encoders(family: str) -> None:
    model = _model(family)
    prompts = _prompts(model, padded=False)
    edits = _edits(model, prompts, causal=False)
    found = hs.sweep(model, prompts, edits, "loss").values
    for row, edit in zip(found, edits, strict=True):
        wanted = measure("loss", trace(model, prompts, edits=edit, logits=prompts.positions).logits, prompts)  # type: ignore[arg-type]
        torch.testing.assert_close(torch.tensor(row), wanted, rtol=1e-10, atol=1e-10, msg=str(edit))


@pytest.mark.parametrize("family", DECODERS)
def test_decoders_go_on_from_their_cache(family: str) -> None:
    """So that an edit of one position runs one position: the saving is not lost silently in some family."""
    model = _model(family)
    prompts = _prompts(model, False)
    clean = record(model, prompts, prompts.positions)
    assert clean.keys is not None and all(k.shape[2] == WIDTH for k, _ in clean.keys)


def test_only_what_an_edit_can_change_is_run(tiny: Model) -> None:
    prompts = _prompts(tiny, False)
    ran: list[tuple[int, int, int]] = []
    hooks = [
        block.attn.register_forward_pre_hook(
            lambda _, args, kwargs, i=i: ran.append((i, *kwargs["hidden_states"].shape[:2])), with_kwargs=True
        )
        for i, block in enumerate(tiny.anatomy.blocks)
    ]
    try:
        hs.sweep(tiny, prompts, [hs.zero("L2H0"), hs.zero("L2H1")], "loss")
        assert ran[:3] == [(i, BATCH, WIDTH) for i in range(3)]  # the clean pass
        assert ran[3:] == [(2, 2 * BATCH, WIDTH)]  # both edits, together, in their layer only
        ran.clear()
        hs.sweep(tiny, prompts, [hs.zero("L1H0", positions=7)], "loss")
        assert ran[3:] == [(1, BATCH, 2), (2, BATCH, 2)]  # positions 7 and 8
        ran.clear()
        hs.sweep(tiny, prompts, [[]], "loss")
        assert ran[3:] == []
    finally:
        for hook in hooks:
            hook.remove()


def test_a_plan_fills_chunks_and_says_what_they_cost(tiny: Model) -> None:
    prompts = _prompts(tiny, False)
    clean = record(tiny, prompts, prompts.positions)
    sets = [[hs.zero(head)] for head in tiny.heads()] + [[hs.zero("L1H0", positions=6)], [hs.zero("L2H0", positions=8)]]
    plan = make_plan(tiny, clean, sets, prompts.positions, chunk_tokens=2 * BATCH * WIDTH)
    assert sorted(i for chunk in plan.chunks for i in chunk.sets) == list(range(len(sets)))
    for chunk in plan.chunks:
        layers = [tiny.heads()[i].layer if i < 12 else i - 11 for i in chunk.sets]
        assert list(chunk.layers) == layers == sorted(layers)
        assert chunk.column == {12: 6, 13: 7}.get(chunk.sets[0], 0)  # scored positions start at 7
        assert len(chunk.sets) <= 2
    whole, last = BATCH * WIDTH, BATCH * 3
    assert plan.plain == 14 * whole * 3
    assert plan.work == 4 * whole * (3 + 2 + 1) + last * 2 + BATCH * 2 * 1


@pytest.mark.parametrize("chunk_tokens", [1, 60, 10_000])
def test_chunks_of_any_size_give_the_same(tiny: Model, monkeypatch: pytest.MonkeyPatch, chunk_tokens: int) -> None:
    prompts = _prompts(tiny, True)
    edits = _edits(tiny, prompts, causal=True)
    wanted = hs.sweep(tiny, prompts, edits, "loss").values
    monkeypatch.setattr(importlib.import_module("headscope.sweep.job"), "affordable_tokens", lambda *_: chunk_tokens)
    torch.testing.assert_close(hs.sweep(tiny, prompts, edits, "loss").values, wanted, rtol=1e-10, atol=1e-10)


def test_kl_is_the_divergence_from_the_clean_run(tiny: Model) -> None:
    prompts = _prompts(tiny, False)
    found = hs.sweep(tiny, prompts, [[], hs.zero("L1H1")], "kl").values
    clean, edited = (
        trace(tiny, prompts, edits=e, logits=prompts.positions).logits.log_softmax(-1) for e in ([], hs.zero("L1H1"))
    )
    wanted = torch.nn.functional.kl_div(edited, clean, log_target=True, reduction="none").sum(-1).mean(1)
    torch.testing.assert_close(torch.tensor(found[1]), wanted, rtol=1e-9, atol=1e-12)
    assert abs(found[0]).max() < 1e-12 < found[1].min()


def test_the_model_is_restored_after_an_error(tiny: Model) -> None:
    prompts = _prompts(tiny, False)
    before = trace(tiny, prompts).logits
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in tiny.hf.modules())

    def fail(logits: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hs.sweep(tiny, prompts, [hs.zero("L2H0")], fail)
    assert not any("forward" in module.__dict__ for module in tiny.hf.modules())
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in tiny.hf.modules()) == hooks
    assert torch.equal(trace(tiny, prompts).logits, before)  # type: ignore[arg-type]
