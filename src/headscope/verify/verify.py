"""No score is called a role until an intervention shows it, against matched random heads, over paired seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headscope.core.component import Component, components
from headscope.core.controls import matched_sets
from headscope.core.errors import NotApplicable, UsageError
from headscope.core.scores import top
from headscope.draw import version
from headscope.methods.run import score
from headscope.model import Model
from headscope.sweep import clean, sweep
from headscope.tasks import Prompts, baseline, make
from headscope.trace import Edit, mean, trace, zero
from headscope.verify.beside import ALPHA
from headscope.verify.roles import Role, get_role
from headscope.verify.stats import bootstrap_interval, sign_flip_p

#: with this many control sets, their 97.5th percentile is the bar instead of their extreme
MANY = 40
#: seeds of the held-out prompts start here, so that they never meet those the heads were chosen on
HELD_OUT = 10_000
#: for the dose curve, a few random sets cut to each size are enough
CURVE_SETS = 3
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Verdict:
    """What was tested and what came of it.

    `effect`, `control_*`: change of the metric from the clean run, mean over seeds. `diff_ci_*`: interval of effect
    minus control, `margin` what counts as no difference. `p` is corrected where several roles were tested together, `p_raw` is not. `dose`: rows {k, effect,
    control_mean}. `side_effect`: change of plain-text loss under the chosen heads (NaN where not measured). `model`,
    `fingerprint`, `seed`, `version`: what it was tested on and with; empty in files that did not say so yet.
    """

    role: str
    claim: str
    method: str
    intervention: str
    k: int
    components: list[str]
    metric: str
    direction: int
    clean: float
    effect: float
    control_mean: float
    control_sd: float
    control_extreme: float
    diff_ci_low: float
    diff_ci_high: float
    margin: float
    p: float
    p_raw: float
    n_seeds: int
    n_controls: int
    side_effect: float
    verdict: str
    reason: str
    dose: list[dict[str, float]] = field(default_factory=list)
    control_effects: list[float] = field(default_factory=list)
    model: str = ""
    fingerprint: str = ""
    seed: int | None = None
    version: str = ""

    def _repr_html_(self) -> str:
        from headscope.verify.show import curve

        return curve(self)._repr_html_()


def decide(v: Verdict, p: float) -> Verdict:
    """The verdict under a corrected p, with its reason in words."""
    sign = v.direction
    low, high = sorted((sign * v.diff_ci_low, sign * v.diff_ci_high))
    beyond = sign * v.effect > sign * v.control_extreme
    figures = f"effect {v.effect:+.3g} against {v.control_mean:+.3g} under random heads, p = {p:.2g}"
    if p <= ALPHA and low > 0 and beyond:
        return replace(v, p=p, verdict="supported", reason=f"{figures}; beyond {_beyond(v)}")
    if high < v.margin:
        where = "on the wrong side of the controls" if high < 0 else f"no larger than the margin of {v.margin:.2g}"
        return replace(v, p=p, verdict="not supported", reason=f"{figures}; the difference is {where}")
    few = v.p_raw <= 2.0**-v.n_seeds * 1.001 and p > ALPHA
    missing = [
        word
        for word, fails in (("p is above 0.05" + (f", which {v.n_seeds} prompts cannot get under here; take more" if few else ""), p > ALPHA), ("the interval holds 0", low <= 0), ("a control set does as much", not beyond))
        if fails
    ]  # fmt: skip
    return replace(v, p=p, verdict="inconclusive", reason=f"{figures}; {', '.join(missing)}")


def _beyond(v: Verdict) -> str:
    return "the 97.5th percentile of the control sets" if v.n_controls >= MANY else "every control set"


def verify(
    model: Model,
    role: str | Role,
    components: Component | str | Iterable[Component | str] | None = None,
    *,
    seed: int = 0,
    n_seeds: int = 12,
    n_controls: int = 20,
    progress: Progress | None = None,
) -> Verdict:
    """Test a role on held-out prompts: the chosen heads' z is replaced (as the role says, mostly by 0), and so is that of
    `n_controls` matched random sets.

    `components`: the heads claimed to have the role; without them, the top k of the role's method. Prompts are paired:
    the same `n_seeds` prompts under every set. Raises UsageError for an unknown role or components that are not heads.
    """
    if n_seeds < 5 or n_controls < 2:
        raise UsageError(f"verify needs at least 5 seeds and 2 control sets, but got {n_seeds} and {n_controls}.")
    row = role if isinstance(role, Role) else get_role(role)
    try:
        chosen = _chosen(model, row, components, seed)
        prompts = make(row.task, model, n_seeds, HELD_OUT + seed, **row.task_options)
        base = baseline(model, prompts)
    except NotApplicable as error:
        return _untestable(model, row, seed, str(error))
    if not base.able:
        return _untestable(model, row, seed, base.reason)
    anatomy = model.anatomy
    controls, borrowed = matched_sets(chosen, anatomy.n_layers, anatomy.n_heads, n_controls, seed)
    sizes = _doses(len(chosen))
    doses = [(size, chosen[:size]) for size in sizes]
    few = [(size, sets[:size]) for size in sizes for sets in _shuffled(controls[:CURVE_SETS], seed)]
    plan = [chosen, *controls, *(s for _, s in doses), *(s for _, s in few)]
    before = clean(model, prompts, row.metric).double().cpu().numpy()
    edits = _edits(model, row, prompts, plan)
    values = sweep(model, prompts, edits, row.metric, progress=progress).values - before
    effect, control = values[0], values[1 : 1 + n_controls]
    rest = values[1 + n_controls :].mean(1)
    dose = [
        {
            "k": float(size),
            "effect": float(rest[i]),
            "control_mean": float(np.mean([rest[len(doses) + j] for j, (s, _) in enumerate(few) if s == size])),
        }
        for i, (size, _) in enumerate(doses)
    ]
    dose.append({"k": float(len(chosen)), "effect": float(effect.mean()), "control_mean": float(control.mean())})
    means = row.direction * control.mean(1)
    extreme = float(row.direction * (np.quantile(means, 0.975) if n_controls >= MANY else means.max()))
    p = sign_flip_p(row.direction * (effect - control.mean(0)), seed=seed)
    low, high = bootstrap_interval(effect, control, seed=seed)
    found = Verdict(
        role=row.name, claim=row.claim, method=row.method, intervention=row.intervention, k=len(chosen), components=[str(c) for c in chosen], metric=row.metric,
        direction=row.direction, clean=float(before.mean()), effect=float(effect.mean()),
        control_mean=float(control.mean()), control_sd=float(control.mean(1).std(ddof=1)), control_extreme=extreme,
        diff_ci_low=low, diff_ci_high=high, margin=row.margin * abs(float(before.mean())), p=p, p_raw=p, n_seeds=len(before), n_controls=n_controls,
        side_effect=_side_effect(model, row, chosen, seed), verdict="", reason="", dose=dose,
        control_effects=[float(value) for value in control.mean(1)], **_origin(model, seed),
    )  # fmt: skip
    found = decide(found, p)
    if borrowed:
        found = replace(found, reason=f"{found.reason}; some controls come from the nearest layers")
    return found


def _edits(model: Model, row: Role, prompts: Prompts, sets: list[list[Component]]) -> list[Edit]:
    """The role's intervention on each set of heads."""
    if row.intervention == "zero":
        return [zero(heads) for heads in sets]
    run = trace(model, prompts, ["z"], logits=None)
    return [mean(heads, run) for heads in sets]


def _doses(k: int) -> list[int]:
    return [size for size in (1, 2, 4, 8, 16) if size < k]


def n_runs(k: int, n_controls: int) -> int:
    """Forward passes over the prompts that verifying `k` heads takes (side effect aside)."""
    return 2 + 1 + n_controls + (1 + min(CURVE_SETS, n_controls)) * len(_doses(k))


def n_heads_of(model: Model, row: Role) -> int:
    """The role's k, or half of all heads where the model has fewer than 2k: as many must be left for the controls."""
    return max(1, min(row.k, len(model.heads()) // 2))


def _chosen(model: Model, row: Role, given: Any, seed: int) -> list[Component]:
    if given is None:
        return top(score(model, row.method, seed=seed), n_heads_of(model, row))
    chosen = list(components(given))
    if any(c.kind != "head" for c in chosen):
        raise UsageError("verify tests attention heads; name them like L5H3.")
    if repeated := sorted({str(c) for c in chosen if chosen.count(c) > 1}):
        raise UsageError(f"verify takes each head once, but {', '.join(repeated)} came again.")
    known = set(model.heads())
    if unknown := [str(c) for c in chosen if c not in known]:
        raise UsageError(f"{', '.join(unknown)} does not exist in {model.name}, which has {model.anatomy.n_layers} layers "
                         f"of {model.anatomy.n_heads} heads, counted from 0.")  # fmt: skip
    return chosen


def _shuffled(sets: list[list[Component]], seed: int) -> list[list[Component]]:
    import random

    rng = random.Random(seed)
    return [rng.sample(s, len(s)) for s in sets]


def _side_effect(model: Model, row: Role, chosen: list[Component], seed: int) -> float:
    if row.task == "plain-text" or model.tokenizer is None:
        return float("nan")
    text = make("plain-text", model, 4, HELD_OUT + seed)
    return float(
        sweep(model, text, _edits(model, row, text, [chosen]), "loss").mean()
        - clean(model, text, "loss").double().mean().item()
    )


def _origin(model: Model, seed: int) -> dict[str, Any]:
    return {"model": model.name, "fingerprint": model.fingerprint, "seed": seed, "version": version()}


def _untestable(model: Model, row: Role, seed: int, reason: str) -> Verdict:
    nan = float("nan")
    return Verdict(
        role=row.name, claim=row.claim, method=row.method, intervention=row.intervention, k=row.k, components=[], metric=row.metric, direction=row.direction, clean=nan,
        effect=nan, control_mean=nan, control_sd=nan, control_extreme=nan, diff_ci_low=nan, diff_ci_high=nan, margin=nan, p=nan,
        p_raw=nan, n_seeds=0, n_controls=0, side_effect=nan, verdict="not testable", reason=reason,
        **_origin(model, seed),
    )  # fmt: skip
