"""The main job: score every head, verify the roles, and give an Atlas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headscope.atlas import Atlas
from headscope.core.errors import NotApplicable
from headscope.core.registry import get, methods
from headscope.core.scores import top
from headscope.methods.run import missing, score
from headscope.model import Model
from headscope.trace import trace
from headscope.verify import ROLES, Verdict, decide, holm, verify

#: tells what is being done: (what, step, steps)
Progress = Callable[[str, int, int], None]


def chosen_methods(wanted: str | Sequence[str] = "quick") -> list[str]:
    """The score methods that `quick`, `all` or a list of ids names. Raises UsageError for an unknown one."""
    known = [name for name, spec in methods().items() if spec.kind == "score"]
    if wanted == "all":
        return known
    if wanted == "quick":
        return [name for name in known if get(name).info.get("quick")]
    names = wanted.split(",") if isinstance(wanted, str) else list(wanted)
    return [get(name.strip(), "score").id for name in names]


def chosen_roles(model: Model, wanted: str | Sequence[str]) -> list[str]:
    """The roles that a scan tests: those of the chosen methods, without the slow ones in a quick scan."""
    ids = chosen_methods(wanted)
    return [name for name, role in ROLES.items() if role.method in ids and (wanted != "quick" or role.quick)]


def scan(
    model: Model,
    methods: str | Sequence[str] = "quick",
    *,
    seed: int = 0,
    n_seeds: int = 12,
    n_controls: int = 20,
    progress: Progress | None = None,
) -> Atlas:
    """Run the methods, verify the roles whose heads they choose, correct p over the roles (Holm), collect an Atlas.

    `methods`: "quick", "all", or ids. A method or role that does not apply to the model is recorded with the reason.
    Same seed, same values.
    """
    tell = progress or (lambda what, step, steps: None)
    found: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    ids = chosen_methods(methods)
    for step, method in enumerate(ids):
        tell(f"score {method}", step, len(ids))
        why = missing(model, get(method))
        try:
            if why:
                raise NotApplicable(why)
            found[method] = score(model, method, seed=seed)
        except NotApplicable as error:
            skipped[method] = str(error)
    verdicts = []
    for role in chosen_roles(model, methods):
        if ROLES[role].method not in found:
            continue
        heads = top(found[ROLES[role].method], ROLES[role].k)
        verdicts.append(
            verify(
                model, role, heads, seed=seed, n_seeds=n_seeds, n_controls=n_controls,
                progress=lambda step, steps, role=role: tell(f"verify {role}", step, steps),  # type: ignore[misc]
            )
        )  # fmt: skip
    facts = {"name": model.name, "fingerprint": model.fingerprint, "anatomy": model.anatomy.facts()}
    return Atlas(facts, seed, found, corrected(verdicts), skipped, _examples(model, found, seed))


def corrected(verdicts: list[Verdict]) -> list[Verdict]:
    """The verdicts decided again with p corrected over all roles that were tested."""
    tested = [v for v in verdicts if v.verdict != "not testable"]
    p = dict(zip([v.role for v in tested], holm([v.p_raw for v in tested]), strict=True))
    return [decide(v, p[v.role]) if v.role in p else v for v in verdicts]


def _examples(model: Model, scores: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    """The top head's attention for every method, on a real prompt."""
    if model.tokenizer is None or not scores:
        return []
    text = "When Mary and John went to the store, John gave a drink to Mary. When Mary and John went to the"
    tokens, _ = model.tokens(text)
    shown = [model.tokenizer.decode([int(i)]) for i in tokens[0]]
    rows = []
    for method, values in scores.items():
        if tuple(values.dims) != ("layer", "head"):
            continue
        best = top(values, 1)[0]
        pattern = trace(model, tokens, ["pattern"], layers=[best.layer], logits=None)["pattern", best.layer][0, best.index]
        rounded = [[round(float(x), 4) for x in row] for row in pattern]
        rows.append({"head": str(best), "method": method, "tokens": shown, "pattern": rounded})
    return rows


__all__ = ["chosen_methods", "chosen_roles", "corrected", "scan"]
