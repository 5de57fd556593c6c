"""Verdicts on models whose truth is known: planted true claims are supported, planted false ones are not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import headscope as hs
import toys
from headscope import tasks
from headscope.core.errors import UsageError
from headscope.model import Model
from headscope.scan import corrected
from headscope.verify import ROLES, Verdict, decide
from headscope.verify import verify as verify_role

# the toy has 32 positions
INDUCTION = replace(ROLES["induction"], k=1, task_options={"length": 12})
PREVIOUS = replace(ROLES["previous-token"], k=1, task_options={"length": 12})


@pytest.fixture(scope="module")
def toy() -> Model:
    return toys.induction_toy()


def test_a_true_role_is_supported(toy: Model) -> None:
    chosen = hs.top(hs.score(toy, "induction-heads-icl", length=12), 1)
    verdict = verify_role(toy, INDUCTION, chosen)
    assert verdict.components == ["L1H2"] and verdict.verdict == "supported"
    prompts = tasks.make("repeated-tokens", toy, 12, 10_000, length=12)
    plain, zeroed = (hs.trace(toy, prompts, edits=e, logits=prompts.positions).logits for e in ([], hs.zero("L1H2")))
    loss = [-x.log_softmax(-1).gather(-1, prompts.target[..., None]).mean() for x in (plain, zeroed)]
    assert verdict.clean == pytest.approx(float(loss[0])) and verdict.effect == pytest.approx(float(loss[1] - loss[0]))
    assert verdict.p == 2.0**-12 and verdict.diff_ci_low > 0
    assert max(verdict.control_effects) == verdict.control_extreme < verdict.effect


def test_controls_do_what_they_do(toy: Model) -> None:
    """The three other heads of the layer: two write nothing, the third takes some of the answer away."""
    verdict = verify_role(toy, INDUCTION, "L1H2")
    prompts = tasks.make("repeated-tokens", toy, 12, 10_000, length=12)
    anti = float(hs.sweep(toy, prompts, [hs.zero("L1H3")], "loss").mean()) - verdict.clean
    assert anti < -1e-3
    assert all(min(abs(e), abs(e - anti)) < 1e-9 for e in verdict.control_effects)
    assert {e < -1e-3 for e in verdict.control_effects} == {True, False}


def test_a_head_that_writes_nothing_is_not_supported(toy: Model) -> None:
    verdict = verify_role(toy, INDUCTION, "L1H0")
    assert verdict.effect == pytest.approx(0.0, abs=1e-9) and verdict.verdict == "not supported"
    assert "wrong side" in verdict.reason


def test_a_head_that_works_against_the_claim_is_not_supported(toy: Model) -> None:
    verdict = verify_role(toy, INDUCTION, "L1H3")
    assert verdict.effect < 0 and verdict.verdict == "not supported"


def test_the_head_that_feeds_induction_is_supported(toy: Model) -> None:
    verdict = verify_role(toy, PREVIOUS, hs.top(hs.score(toy, "previous-token", length=16), 1))
    assert verdict.components == ["L0H0"] and verdict.verdict == "supported"
    assert verdict.intervention == "mean" and verdict.control_mean == pytest.approx(0.0, abs=1e-9)


def test_the_same_seed_gives_the_same_verdict(toy: Model) -> None:
    first, again, other = (verify_role(toy, INDUCTION, "L1H2", seed=s) for s in (3, 3, 4))
    assert repr(first) == repr(again) != repr(other)


def test_a_model_at_chance_is_not_testable(tiny: Model) -> None:
    verdict = hs.verify(tiny, role="induction", components="L1H2")
    assert verdict.verdict == "not testable" and "cannot do repeated-tokens" in verdict.reason


def test_bad_claims_are_refused(toy: Model) -> None:
    for heads, message in (
        ("L7H0", "L7H0 does not exist"),
        ("L0N3", "attention heads"),
        ("L0H9,L1H1", "L0H9 does not"),
        ("L0H0,L1H1,L0H0", "L0H0 came again"),
    ):
        with pytest.raises(UsageError, match=message):
            verify_role(toy, INDUCTION, heads)
    with pytest.raises(UsageError, match="Did you mean induction"):
        hs.verify(toy, role="inductoin")
    with pytest.raises(UsageError, match="at least 5 seeds"):
        verify_role(toy, INDUCTION, n_seeds=3)


def _verdict(**changes: object) -> Verdict:
    found = Verdict(
        role="r", claim="c", method="m", intervention="zero", k=1, components=["L0H0"], metric="loss", direction=1,
        clean=4.0, effect=3.0, control_mean=0.5, control_sd=0.2, control_extreme=0.9, diff_ci_low=2.0, diff_ci_high=3.0,
        margin=0.4, p=0.01, p_raw=0.01, n_seeds=12, n_controls=20, side_effect=0.0, verdict="", reason="",
    )  # fmt: skip
    return replace(found, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "p", "verdict", "word"),
    [
        ({}, 0.01, "supported", "every control set"),
        ({"n_controls": 40}, 0.01, "supported", "97.5th"),
        ({}, 0.06, "inconclusive", "p is above 0.05"),
        ({"diff_ci_low": -0.1}, 0.01, "inconclusive", "interval holds 0"),
        ({"control_extreme": 3.5}, 0.01, "inconclusive", "a control set does as much"),
        ({"diff_ci_low": -0.2, "diff_ci_high": 0.3}, 0.5, "not supported", "margin of 0.4"),
        ({"diff_ci_low": -2.0, "diff_ci_high": -1.0, "effect": -1.0}, 1.0, "not supported", "wrong side"),
        # a claim of a fall is judged in its own direction
        ({"direction": -1, "effect": -3.0, "control_extreme": -0.9, "diff_ci_low": -3.0, "diff_ci_high": -2.0}, 0.01,
         "supported", "every control set"),
        ({"direction": -1}, 1.0, "not supported", "wrong side"),
    ],
)  # fmt: skip
def test_the_rule_of_a_verdict(changes: dict[str, object], p: float, verdict: str, word: str) -> None:
    found = decide(_verdict(**changes), p)
    assert found.verdict == verdict and word in found.reason and found.p == p and found.p_raw == 0.01


def test_a_scan_corrects_p_over_its_roles() -> None:
    verdicts = [
        _verdict(role="a", p_raw=0.03),
        _verdict(role="b", p_raw=0.02),
        _verdict(role="c", verdict="not testable"),
    ]
    a, b, c = corrected(verdicts)
    assert (a.p, b.p) == (0.04, 0.04) and a.verdict == b.verdict == "supported"
    assert c.verdict == "not testable" and c is verdicts[2]
    assert [v.verdict for v in corrected([_verdict(p_raw=0.03)] * 2)] == ["inconclusive"] * 2


@pytest.mark.real
def test_random_heads_are_no_induction_heads(smollm2: Model) -> None:
    """Random heads claimed as induction heads of the real model are not supported, the true ones are."""
    true = hs.top(hs.score(smollm2, "induction-heads-icl"), 8)
    rest = [c for c in smollm2.heads() if c not in true and c.layer > 10]
    claimed = [rest[i] for i in np.random.default_rng(0).permutation(len(rest))[:8]]
    false = hs.verify(smollm2, role="induction", components=claimed, n_controls=10)
    assert false.verdict == "not supported", false.reason
    found = hs.verify(smollm2, role="induction", components=true, n_controls=10)
    assert found.verdict == "supported", found.reason
    assert found.effect > 5 * found.control_mean and found.dose[0]["effect"] < found.dose[-1]["effect"]
