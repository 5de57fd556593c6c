"""Edits while tokens are generated, with and without a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import headscope as hs
from brute import (
    D_HEAD,
    DOWN1,
    O1,
    head,
    hooked,
    padded_prompts,
    plain,
    setting,
    some_tokens,
    some_vector,
)
from families.tiny import build
from headscope.core.errors import UsageError
from headscope.model import Model
from headscope.tasks import Prompts
from headscope.trace import Edit


def _generate(model: Model, edits: Any, *, cache: bool, padded: bool = False) -> tuple[Tensor, Tensor]:
    """Eight greedy tokens and the logits they come from, [step, batch, vocab].

    The logits are read at the unembedding, since generate() gives them in float32.
    """
    prompts = padded_prompts()
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
    "stream": hs.add("L1RESID", some_vector(32)),
    "layer": hs.zero("L1"),
    "values": hs.zero("L1KV1", part="v"),
    "keys": hs.scale("L1KV0", -2.0, part="k"),
    "keys and values at positions": hs.zero("L1KV1", positions=[1, 2, 3]),
    "values of a row": hs.add("L1KV1", some_vector(D_HEAD), part="v", rows=[0]),
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
    prompts = padded_prompts()
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
        expected = hf.generate(some_tokens(1), **options)
        for other in ({"use_cache": False}, {"prompt_lookup_num_tokens": 2}, {"assistant_model": build("llama")}):
            assert torch.equal(hf.generate(some_tokens(1), **options, **other), expected), other
    assert not torch.equal(tiny.hf.generate(some_tokens(1), **options), expected)


def test_beams_belong_to_the_row_of_their_prompt(tiny: Model) -> None:
    options = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    heads = ["L0H0", "L1H0", "L1H1", "L1H2"]
    before = tiny.hf.generate(some_tokens(), **options)
    with hs.edited(tiny, hs.scale(heads, -9.0)) as hf:
        everywhere = hf.generate(some_tokens(), **options)
    with hs.edited(tiny, hs.scale(heads, -9.0, rows=[1])) as hf:
        found = hf.generate(some_tokens(), **options)
    assert torch.equal(found[[0, 2]], before[[0, 2]]) and torch.equal(found[1], everywhere[1])
    assert not torch.equal(found[1], before[1])


def test_generated_leaves_a_plain_pass_alone(tiny: Model) -> None:
    found = hs.trace(tiny, some_tokens(), edits=hs.zero("L1H2", positions="generated")).logits
    torch.testing.assert_close(found, plain(tiny, input_ids=some_tokens()), rtol=0, atol=0)


def test_a_patched_prompt_goes_on_generating(tiny: Model) -> None:
    source = some_tokens(2, seed=8)
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
