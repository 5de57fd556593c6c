"""Metrics of the logits at the prompts' positions; one value a prompt, the mean over its positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from headscope.core.errors import NotApplicable, UsageError, nearest

Metric = str | Callable[[Tensor], Tensor]


def _of(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.gather(-1, ids[..., None])[..., 0]


def _loss(logits: Tensor, target: Tensor, foil: Tensor | None) -> Tensor:
    return -_of(logits.log_softmax(-1), target)


def _prob(logits: Tensor, target: Tensor, foil: Tensor | None) -> Tensor:
    return _of(logits.softmax(-1), target)


def _accuracy(logits: Tensor, target: Tensor, foil: Tensor | None) -> Tensor:
    return (logits.argmax(-1) == target).to(logits.dtype)


def _rank(logits: Tensor, target: Tensor, foil: Tensor | None) -> Tensor:
    return (logits > _of(logits, target)[..., None]).sum(-1).to(logits.dtype)


def _logit(logits: Tensor, target: Tensor, foil: Tensor | None) -> Tensor:
    return _of(logits, target)


def _logit_diff(logits: Tensor, target: Tensor, foil: Tensor | None) -> Tensor:
    if foil is None:
        raise UsageError("The metric logit_diff needs prompts with a foil; use loss, prob or accuracy.")
    return _of(logits, target) - _of(logits, foil)


#: name → function of (logits [batch, m, vocab], target [batch, m], foil [batch, m] or None) → [batch, m]
METRICS: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "loss": _loss, "prob": _prob, "accuracy": _accuracy, "rank": _rank, "logit": _logit, "logit_diff": _logit_diff,
}  # fmt: skip


def name_of(metric: Metric) -> str:
    """What results call a metric."""
    return metric if isinstance(metric, str) else getattr(metric, "__name__", "a function")


def finite(logits: Tensor, task: str) -> Tensor:
    """The logits. Raises NotApplicable where one is NaN or +inf: nothing follows from a metric of these. (-inf is how some
    models rule tokens out.)"""
    if not bool((logits < math.inf).all()):
        raise NotApplicable(
            f"The model's logits are not finite on {task}; load it in float32, or see `headscope doctor` for broken weights."
        )
    return logits


def measure(metric: Metric, logits: Tensor, prompts: Any, clean: Tensor | None = None) -> Tensor:
    """[batch] values of a metric: a name of METRICS, `kl` (of the edited from the `clean` logits), or a function of the
    logits [batch, m, vocab].

    Half-precision logits are measured in float32.
    """
    if logits.dtype.itemsize < 4:
        logits = logits.float()
    if callable(metric):
        value = metric(logits)
        if not isinstance(value, Tensor) or tuple(value.shape) != (logits.shape[0],):
            gave = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise UsageError(f"A metric must give one value a prompt, [{logits.shape[0]}], but gave {gave}.")
        return value
    if metric == "kl":
        if clean is None:
            raise UsageError("The metric kl compares with a clean run; it is for sweeps.")
        was, now = clean.to(logits.dtype).log_softmax(-1), logits.log_softmax(-1)
        return (was.exp() * (was - now)).sum(-1).mean(1)
    if metric not in METRICS:
        raise UsageError(f"There is no metric {metric!r}.{nearest(metric, [*METRICS, 'kl'])}")
    target = prompts.target.to(logits.device)
    foil = None if prompts.foil is None else prompts.foil.to(logits.device)
    return METRICS[metric](logits, target, foil).mean(1)
