"""A sweep gives what one trace an edit gives, measured as the metric's name says."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

import headscope as hs
from headscope.core.errors import UsageError
from headscope.model import Model
from headscope.sweep import METRICS, clean, measure
from headscope.tasks import Prompts

LOGITS = torch.tensor([[[2.0, 0.0, 1.0, 1.0], [0.0, 5.0, 1.0, 3.0]], [[0.0, 0.0, 0.0, 4.0], [1.0, 2.0, 3.0, 4.0]]])
TARGET = torch.tensor([[0, 2], [1, 3]])
FOIL = torch.tensor([[1, 3], [3, 0]])


def _prompts(metric: str = "loss", *, foil: bool = True, padded: bool = False) -> Prompts:
    generator = torch.Generator().manual_seed(0)
    tokens, target, wrong = (torch.randint(5, 96, shape, generator=generator) for shape in ((3, 8), (3, 2), (3, 2)))
    positions = torch.tensor([[3, 7], [5, 6], [7, 4]])
    mask = torch.ones(3, 8, dtype=torch.bool)
    mask[1, :3] = False
    return Prompts(
        "t", 0, tokens, positions, target, foil=wrong if foil else None, mask=mask if padded else None, metric=metric
    )


def _hand(metric: str, logits: Tensor, target: Tensor, foil: Tensor) -> list[float]:
    """The metric by plain arithmetic over Python numbers."""
    values = []
    for row, (rights, wrongs) in enumerate(zip(target.tolist(), foil.tolist(), strict=True)):
        parts = []
        for at, (right, wrong) in enumerate(zip(rights, wrongs, strict=True)):
            x = logits[row, at].tolist()
            prob = math.exp(x[right]) / sum(map(math.exp, x))
            parts.append(
                {
                    "prob": prob,
                    "loss": -math.log(prob),
                    "accuracy": float(x[right] == max(x)),
                    "rank": float(sum(other > x[right] for other in x)),
                    "logit": x[right],
                    "logit_diff": x[right] - x[wrong],
                }[metric]
            )
        values.append(sum(parts) / len(parts))
    return values


@pytest.mark.parametrize("metric", METRICS)
def test_named_metrics_by_hand(metric: str) -> None:
    prompts = Prompts("t", 0, TARGET, TARGET, TARGET, foil=FOIL)
    found = measure(metric, LOGITS.double(), prompts)
    assert found.tolist() == pytest.approx(_hand(metric, LOGITS, TARGET, FOIL), abs=1e-12)


def test_known_values() -> None:
    """A few worked out on paper, so that the hand computation is not the only witness."""
    prompts = Prompts("t", 0, TARGET, TARGET, TARGET, foil=FOIL)
    assert measure("accuracy", LOGITS, prompts).tolist() == [0.5, 0.5]
    assert measure("rank", LOGITS, prompts).tolist() == [1.0, 0.5]  # ranks 0 and 2; 1 and 0
    assert measure("logit_diff", LOGITS, prompts).tolist() == [0.0, -0.5]  # 2 and -2; -4 and 3
    assert measure("logit", LOGITS, prompts).tolist() == [1.5, 2.0]


def test_half_precision_is_measured_in_float32() -> None:
    prompts = Prompts("t", 0, TARGET, TARGET, TARGET, foil=FOIL)
    for metric in METRICS:
        found = measure(metric, LOGITS.bfloat16(), prompts)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, measure(metric, LOGITS, prompts), rtol=0, atol=0)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("padded", [False, True])
def test_rows_equal_one_trace_each(tiny: Model, metric: str, padded: bool) -> None:
    prompts = _prompts(padded=padded)
    edits: list[Any] = [
        hs.zero("L0H1"), hs.scale("L0H3", 2.0, positions=[2]), hs.zero("L1MLP"), [hs.zero("L0H0"), hs.zero("L1N3")],
        hs.mean("L1H1", prompts), hs.patch("L2H0", replace(prompts, tokens=prompts.tokens.flip(1))), hs.zero("L1KV1"), hs.zero("L2"), [],
        hs.mask_edges("L1H0", [(None, 0)], positions=range(1, 5)), hs.add("L1RESID", torch.ones(32), rows=[1]),
    ]  # fmt: skip
    found = hs.sweep(tiny, prompts, edits, metric)
    assert found.dims == ("edit", "prompt") and found.shape == (11, 3)
    assert prompts.foil is not None
    for row, edit in zip(found.values, edits, strict=True):
        everything = hs.trace(tiny, prompts, edits=edit).logits
        assert everything is not None
        at = everything.gather(1, prompts.positions[:, :, None].expand(-1, -1, 96))
        np.testing.assert_allclose(row, _hand(metric, at, prompts.target, prompts.foil), rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.values[8], clean(tiny, prompts, metric).numpy(), rtol=0, atol=1e-10)
    if metric in ("loss", "prob", "logit"):
        assert (abs(found.values - found.values[8]).max(1) > 1e-6).tolist() == [i != 8 for i in range(11)]


def test_edits_are_named_in_words(tiny: Model) -> None:
    edits = [hs.zero("L0H1"), [hs.zero("L0H0"), hs.scale("L1N3", 0.5, positions=[1])], []]
    found = hs.sweep(tiny, _prompts(), edits, "prob")
    assert list(found.edit.values) == ["zero L0H1", "zero L0H0 + scale L1N3 0.5 at (1,)", "clean"]
    assert found.attrs["metric"] == "prob"


def test_each_head_goes_layer_by_layer(tiny: Model) -> None:
    found = hs.sweep(tiny, _prompts(), hs.each_head(hs.zero), "loss")
    assert list(found.edit.values) == [f"zero L{layer}H{h}" for layer in range(3) for h in range(4)]
    for i in (0, 5, 11):
        one = hs.sweep(tiny, _prompts(), [hs.zero(f"L{i // 4}H{i % 4}")], "loss")
        np.testing.assert_allclose(found.values[i], one.values[0], rtol=0, atol=1e-10)
    halved = hs.sweep(tiny, _prompts(), hs.each_head(lambda head: hs.scale(head, 0.5)), "loss")
    assert list(halved.edit.values)[5] == "scale L1H1 0.5"


def test_a_function_measures_the_logits_at_the_positions(tiny: Model) -> None:
    prompts, shapes = _prompts(), []

    def spread(logits: Tensor) -> Tensor:
        shapes.append(tuple(logits.shape))
        return logits[:, -1].std(-1)

    found = hs.sweep(tiny, prompts, [hs.zero("L0H1")], spread)
    assert set(shapes) == {(3, 2, 96)} and found.attrs["metric"] == "spread"
    everything = hs.trace(tiny, prompts, edits=hs.zero("L0H1")).logits
    expected = torch.stack([everything[row, int(prompts.positions[row, -1])].std() for row in range(3)])  # type: ignore[index]
    np.testing.assert_allclose(found.values[0], expected.numpy(), rtol=0, atol=1e-10)


def test_token_ids_are_measured_at_the_last_position(tiny: Model) -> None:
    tokens = _prompts().tokens
    found = hs.sweep(tiny, tokens, [hs.zero("L0H1"), hs.zero("L2MLP")], lambda logits: logits[:, -1, 7])
    for row, edit in zip(found.values, (hs.zero("L0H1"), hs.zero("L2MLP")), strict=True):
        expected = hs.trace(tiny, tokens, edits=edit).logits[:, -1, 7]  # type: ignore[index]
        np.testing.assert_allclose(row, expected.numpy(), rtol=0, atol=1e-10)


def test_the_task_names_the_metric(tiny: Model) -> None:
    prompts = _prompts("logit_diff")
    found = hs.sweep(tiny, prompts, [hs.zero("L0H1")])
    np.testing.assert_array_equal(found.values, hs.sweep(tiny, prompts, [hs.zero("L0H1")], "logit_diff").values)
    assert found.attrs["metric"] == "logit_diff"


def test_one_edit_is_a_sweep_of_one(tiny: Model) -> None:
    alone = hs.sweep(tiny, _prompts(), hs.zero("L0H1"))
    np.testing.assert_array_equal(alone.values, hs.sweep(tiny, _prompts(), [hs.zero("L0H1")]).values)


def test_progress_counts_the_edits(tiny: Model) -> None:
    calls: list[tuple[int, int]] = []
    hs.sweep(tiny, _prompts(), [hs.zero("L0H1")] * 3, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (3, 3) and calls == sorted(calls)


@pytest.mark.parametrize(
    "outer",
    [hs.zero("L2H1", rows=[1]), hs.scale("L2H1", -3.0, positions=[4]), hs.mask_edges("L2H1", [(4, 2)]), hs.zero("L1")],
    ids=str,
)
def test_a_sweep_under_edits_keeps_their_rows_and_positions(tiny: Model, outer: Any) -> None:
    prompts = _prompts()
    edits = [hs.zero("L1H0", positions=[3]), hs.zero("L1H1", positions=[3]), hs.zero("L0H1")]
    with hs.edited(tiny, outer):
        found = hs.sweep(tiny, prompts, edits)
        each = [hs.trace(tiny, prompts, edits=edit, logits=prompts.positions).logits for edit in edits]
    for row, logits in zip(found.values, each, strict=True):
        assert logits is not None
        np.testing.assert_allclose(row, measure("loss", logits, prompts).numpy(), rtol=0, atol=1e-10)


def test_a_bias_of_as_many_heads_as_rows_stays_whole() -> None:
    torch.manual_seed(0)
    config = transformers.MptConfig(vocab_size=96, d_model=32, n_layers=3, n_heads=4, max_seq_len=64)
    model = hs.load(transformers.MptForCausalLM(config).eval())
    tokens = torch.randint(5, 96, (1, 8))
    edits = [hs.zero("L0H0"), hs.zero("L1H1"), hs.zero("L2H2"), hs.zero("L2H3")]
    found = hs.sweep(model, tokens, edits, lambda logits: logits[:, -1, 7])
    for row, edit in zip(found.values, edits, strict=True):
        expected = hs.trace(model, tokens, edits=edit).logits[:, -1, 7]  # type: ignore[index]
        np.testing.assert_allclose(row, expected.numpy(), rtol=0, atol=1e-5)


def test_nothing_is_left_behind(tiny: Model) -> None:
    before = hs.trace(tiny, _prompts()).logits
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in tiny.hf.modules())
    hs.sweep(tiny, _prompts(), hs.each_head(hs.zero))
    assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in tiny.hf.modules())
    torch.testing.assert_close(hs.trace(tiny, _prompts()).logits, before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"edits": []}, "no edits"),
        ({"edits": [hs.zero("L9H0")]}, "L9H0"),
        ({"edits": [hs.zero("L0H0", positions=[8])]}, "8"),
        ({"edits": ["L0H0"]}, "'L0H0'"),
        ({"edits": [[hs.zero("L0H0"), 5]]}, "5"),
        ({"metric": "los"}, r"no metric 'los'.*loss"),
        ({"metric": lambda logits: logits[:, -1]}, r"one value a prompt, \[3\], but gave \(3, 96\)"),
        ({"metric": lambda logits: logits.mean()}, r"\[3\]"),
        ({"metric": lambda logits: 1.0}, "one value a prompt"),
        ({"metric": "logit_diff", "prompts": _prompts(foil=False)}, "foil"),
        ({"prompts": _prompts().tokens}, "function of the logits"),
        ({"prompts": _prompts().tokens, "metric": "loss"}, "function of the logits"),
    ],
)
def test_bad_sweeps_are_usage_errors(tiny: Model, change: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"prompts": _prompts(), "edits": [hs.zero("L0H1")], **change}
    with pytest.raises(UsageError, match=words):
        hs.sweep(tiny, **given)
