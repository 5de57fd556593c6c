"""Edits that cannot be: one sentence each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import headscope as hs
from brute import (
    some_tokens,
    state_of,
)
from headscope.core.errors import HeadscopeError, UsageError
from headscope.model import Model
from headscope.trace import Edit

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
    "patch": (lambda: hs.patch("L0H0", some_tokens(3, 5)), "do not fit"),
    "patch of one row": (lambda: hs.patch("L0H0", some_tokens(1)), "do not fit"),
    "patch of one position": (lambda: hs.patch("L0H0", some_tokens(3, 1)), "do not fit"),
    "values of a batch": (lambda: hs.add("L0RESID", torch.ones(3, 9, 32)), r"\(3, 9, 32\).*at most 2"),
    "the same twice": (lambda: hs.scale("L0H0,L0H1,L0H0", 0.5), "L0H0 came again"),
    "two sites": (lambda: hs.patch("L0KV0", some_tokens()), "several sites"),
    "edges": (lambda: hs.mask_edges("L0H0", []), "at least one"),
    "edges of neurons": (lambda: hs.mask_edges("L0N0", [(1, 0)]), "heads"),
    "edge form": (lambda: hs.mask_edges("L0H0", [(1, 0, 2)]), "pair"),  # type: ignore[list-item]
    "negative edge": (lambda: hs.mask_edges("L0H0", [(3, -1)]), "-1"),
    "edge beyond": (lambda: hs.mask_edges("L0H0", [(9, 1)]), "9"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_edits_are_usage_errors_of_one_sentence(tiny: Model, name: str) -> None:
    make, words = BAD[name]
    state = state_of(tiny)
    with pytest.raises(UsageError, match=words) as caught:
        hs.trace(tiny, some_tokens(), edits=make())
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, HeadscopeError) and state_of(tiny) == state
