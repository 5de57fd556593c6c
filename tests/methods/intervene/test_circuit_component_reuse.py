"""Circuits, their overlap against chance, and heads made to attend where their job says."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import headscope as hs
from headscope.core.component import head
from headscope.core.errors import NotApplicable, UsageError
from headscope.methods.intervene.circuit_component_reuse import CircuitComponentReuse, circuit, jobs, look
from headscope.model import Model
from headscope.tasks import Prompts, make

METHOD = "circuit-component-reuse"


def _form(model: Model, reverse: bool, n: int = 8) -> Prompts:
    """'a b … c d … a' → 'b' and not 'd'; the twin ends on 'c'. The other form names c d first."""
    rng = np.random.default_rng(3 + reverse)
    rows, twins, answers, foils = [], [], [], []
    for _ in range(n):
        a, b, c, d, x, y, z = rng.choice(np.arange(5, 32), 7, replace=False).tolist()
        shown = [c, d, x, y, a, b] if reverse else [a, b, x, c, d, y]
        rows.append([z, *shown, a])
        twins.append([z, *shown, c])
        answers.append([b])
        foils.append([d])
    at = torch.full((n, 1), 7)
    tokens = (torch.tensor(part) for part in (rows, answers, foils, twins))
    row, answer, foil, twin = tokens
    return Prompts("reversed" if reverse else "plain", 0, row, at, answer, foil, corrupt=twin, metric="logit_diff")


def test_two_tasks_of_one_circuit_share_its_heads(induction: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy has one way to continue a text: whatever the form, its heads are those of the circuit."""
    monkeypatch.setattr("headscope.methods.intervene.circuit_component_reuse.LEAST", 2)
    first, second = (circuit(induction, _form(induction, reverse)) for reverse in (False, True))
    assert first == second == [head(1, 2), head(1, 3)]
    seen = hs.circuits.overlap(induction, first, second)
    assert seen.shared == ("L1H2", "L1H3") and seen.expected == 1.0 and seen.p == pytest.approx(1 / 6)


def test_a_head_whose_look_is_lost_gets_it_back(induction: Model) -> None:
    """On a form with nothing to look up, the copying head names the answer once it is made to attend to it."""
    prompts = _form(induction, False)
    # L0H0 looks at the token before, which is neither
    assert jobs(induction, prompts, [head(0, 0), head(1, 2)]) == {head(1, 2): "answer"}
    lost = dataclasses.replace(prompts, tokens=torch.cat([prompts.tokens[:, :-1], prompts.tokens[:, :1]], 1))
    before = hs.sweep(induction, lost, [[]], "logit_diff").values[0]
    forced, wrong, other = hs.sweep(
        induction,
        lost,
        [look(lost, {head(1, 2): "answer"}), look(lost, {head(1, 2): "foil"}), look(lost, {head(1, 0): "answer"})],
        "logit_diff",
    ).values
    assert forced.min() > 9 and wrong.max() < -9 and abs(before).max() < 3
    np.testing.assert_allclose(other, before, rtol=0, atol=1e-9)


@pytest.mark.parametrize("model", ["worded", "with_bos"])
def test_forced_heads_attend_where_they_are_told_and_nowhere_else(model: str, request: pytest.FixtureRequest) -> None:
    loaded: Model = request.getfixturevalue(model)
    prompts = make("ioi", loaded, 4, 1)
    given = {head(1, 2): "foil", head(1, 0): "foil", head(2, 3): "answer"}
    edits = look(prompts, given)
    patterns = hs.trace(loaded, prompts, "pattern", edits)["pattern"]
    plain = hs.trace(loaded, prompts, "pattern")["pattern"]
    for row, at in enumerate(prompts.positions[:, 0].tolist()):
        for c, job in given.items():
            token = prompts.target[row] if job == "answer" else prompts.foil[row]  # type: ignore[index]
            there = (prompts.tokens[row] == token).double()
            assert there.sum() == (1 if job == "answer" else 2)
            torch.testing.assert_close(patterns[c.layer, row, c.index, at], there / there.sum(), rtol=0, atol=1e-12)
    torch.testing.assert_close(patterns[1, :, [1, 3]], plain[1, :, [1, 3]], rtol=0, atol=0)
    torch.testing.assert_close(patterns[1, :, :, :-1], plain[1, :, :, :-1], rtol=0, atol=0)


def test_edits_of_prompts_of_different_lengths(worded: Model) -> None:
    cases = [
        hs.tasks.Case("When Mary and John went to the store , John gave a book to", "Mary", "John"),
        hs.tasks.Case("Mary and John , John gave a book to", "Mary", "John"),
    ]
    from headscope.tasks.base import from_own

    prompts = from_own(worded, "mine", cases)
    assert prompts.mask is not None and not bool(prompts.mask.all())
    patterns = hs.trace(worded, prompts, "pattern", look(prompts, {head(0, 1): "answer"}))["pattern", 0]
    for row in range(2):
        there = (prompts.tokens[row] == prompts.target[row]).double()
        torch.testing.assert_close(patterns[row, 1, -1], there, rtol=0, atol=1e-12)


def test_its_edits_are_those_of_the_circuit_in_the_middle(worded: Model) -> None:
    prompts = make("coloured-objects", worded, 3, 9)
    source = make("ioi", worded, 4, 2)
    every = jobs(worded, source, [c for c in circuit(worded, source) if c.layer > 0])
    middle = list(every)[:2]
    edits = hs.intervene(worded, METHOD, prompts, seed=2, n=4, forced=2)
    assert {c for edit in edits for c in edit.components} == set(middle) and 1 <= len(edits) <= 2
    assert {c for edit in look(prompts, jobs(worded, source, middle)) for c in edit.components} == set(middle)


def test_bad_inputs_are_named(worded: Model) -> None:
    with pytest.raises(UsageError, match="forced is 0; at least one head"):
        hs.intervene(worded, METHOD, forced=0)
    with pytest.raises(NotApplicable, match="repeated-tokens has no foil"):
        circuit(worded, make("repeated-tokens", worded, 3))
    with pytest.raises(NotApplicable, match="task capitals does not name its foil"):
        hs.intervene(worded, METHOD, make("capitals", worded, 3))
    with pytest.raises(UsageError, match="fact-context has no corrupted twins"):
        circuit(worded, make("fact-context", worded, 3))
    assert CircuitComponentReuse().forced == 4
