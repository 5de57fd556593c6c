"""Names of parts: every form reads back as it was written, sorts, and a wrong one is named in the error."""

from __future__ import annotations

import random

import pytest

import headscope as hs
from headscope.core.component import Component, components, head
from headscope.core.errors import UsageError

FORMS = {
    "L5H3": Component("", 5, "head", 3),
    "L5KV1": Component("", 5, "kv_head", 1),
    "L7N1021": Component("", 7, "neuron", 1021),
    "L3MLP": Component("", 3, "mlp"),
    "L3ATTN": Component("", 3, "attn"),
    "L3": Component("", 3, "layer"),
    "L3RESID": Component("", 3, "resid"),
    "L5E2N7": Component("", 5, "neuron", 7, expert=2),
    "enc.L5H3": Component("enc", 5, "head", 3),
    "dec.L0H1": Component("dec", 0, "head", 1),
    "dec.L0X2": Component("dec", 0, "cross_head", 2),
    "vision.L2H0": Component("vision", 2, "head", 0),
    "text.L12MLP": Component("text", 12, "mlp"),
}


@pytest.mark.parametrize("text", FORMS)
def test_every_form_round_trips(text: str) -> None:
    parsed = Component.parse(text)
    assert parsed == FORMS[text]
    assert str(parsed) == repr(parsed) == text
    assert {parsed: 1}[FORMS[text]] == 1
    assert Component.parse(f"  {text}\n") == parsed


@pytest.mark.parametrize(
    "text", ["", "H3", "L5H", "LH3", "l5h3", "L5H3x", "L-1H3", "L5 H3", "L5E2", "L5E2H3", "L5K1", "L3MLP2", "enc:L5H3",
             "ENC.L5H3", "L5H3,L5H4", ".L5H3", "L5H3.5"]
)  # fmt: skip
def test_an_unreadable_name_is_in_the_error(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Component.parse(text)
    assert repr(text) in str(caught.value) and "L5H3" in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("given", [5, None, ["L5H3"], 1.5])
def test_what_is_not_text_is_a_usage_error(given: object) -> None:
    with pytest.raises(UsageError, match="not the name of a component"):
        Component.parse(given)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="component"):
        components([given])  # type: ignore[list-item]


def test_impossible_components_are_refused() -> None:
    with pytest.raises(UsageError, match="'haed' is not a kind"):
        Component("", 0, "haed", 1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="'head' was given index None"):
        Component("", 0, "head")
    with pytest.raises(UsageError, match="'mlp' was given index 2"):
        Component("", 0, "mlp", 2)
    with pytest.raises(UsageError, match="layer -1"):
        head(-1, 0)
    with pytest.raises(UsageError, match="-2"):
        head(0, -2)
    with pytest.raises(UsageError, match="expert"):
        Component("", 0, "head", 1, expert=2)
    with pytest.raises(UsageError, match="expert"):
        Component("", 0, "neuron", 1, expert=-2)


def test_order_is_stack_layer_kind_index() -> None:
    # kinds sort by their names: attn, head, kv_head, layer, mlp, neuron
    expected = ["L0H9", "L2ATTN", "L2H1", "L2H2", "L2H10", "L2", "L2MLP", "L2N7", "L2E0N7", "L2E2N7", "L2N8", "L10H0",
                "dec.L0H0", "enc.L0H0"]  # fmt: skip
    shuffled = [Component.parse(text) for text in expected]
    random.Random(0).shuffle(shuffled)
    assert [str(c) for c in sorted(shuffled)] == expected
    assert Component.parse("L2H10") > Component.parse("L2H2") >= Component.parse("L2H2")


def test_lists_comma_text_and_single_ones() -> None:
    five = head(5, 3)
    assert components("L5H3") == components(five) == components([five]) == (five,)
    assert components(" L5H3, L1MLP ,") == (five, Component("", 1, "mlp"))
    assert components(text for text in ("L1MLP", "L5H3")) == (Component("", 1, "mlp"), five)
    assert components(("L5H3", five)) == (five, five)
    for nothing in ("", " , ", []):
        with pytest.raises(UsageError, match="No component was named"):
            components(nothing)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="'L5G3'"):
        components("L5H3,L5G3")
    with pytest.raises(UsageError, match="5"):
        components(5)  # type: ignore[arg-type]


def test_frozen_and_public() -> None:
    with pytest.raises(AttributeError):
        head(1, 2).layer = 3  # type: ignore[misc]
    assert hs.Component.parse("L1H2") == head(1, 2) != head(1, 2, "enc")
