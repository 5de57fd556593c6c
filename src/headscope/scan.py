"""The main job: score every head, verify the roles, and give an Atlas."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from headscope.atlas import Atlas
from headscope.core.errors import NotApplicable
from headscope.core.registry import get, methods
from headscope.core.scores import make as to_scores
from headscope.core.scores import top
from headscope.methods.run import missing, score
from headscope.model import Model
from headscope.model.sketch import head_sketch
from headscope.tasks import make
from headscope.trace import trace
from headscope.verify import ROLES, Verdict, decide, holm, n_heads_of, n_runs, verify

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


def chosen_roles(wanted: str | Sequence[str]) -> list[str]:
    """The roles that a scan tests: those of the chosen methods, without the slow ones in a quick scan."""
    ids = chosen_methods(wanted)
    return [name for name, role in ROLES.items() if role.method in ids and (wanted != "quick" or role.quick)]


def left_out(wanted: str | Sequence[str]) -> list[str]:
    """The score methods and roles that a quick scan leaves to a full one."""
    if wanted != "quick":
        return []
    methods_left = [name for name in chosen_methods("all") if name not in chosen_methods("quick")]
    return methods_left + [f"role {name}" for name in ROLES if name not in chosen_roles("quick")]


def estimate(
    model: Model, wanted: str | Sequence[str] = "quick", *, n_seeds: int = 12, n_controls: int = 20
) -> dict[str, Any]:
    """What a scan would cost here: {seconds, memory_bytes, steps: [{what, tokens, seconds}]}.

    Seconds come from one timed pass and the number of tokens that each step runs; memory is the weights, one layer's
    patterns and the widest activations.
    """
    weights = sum(p.numel() * p.element_size() for p in model.hf.parameters())
    try:
        prompts = make("repeated-tokens", model, n_seeds, 0)
    except NotApplicable:  # a model of images, say, on which no method runs
        return {"seconds": 0.0, "memory_bytes": weights, "steps": []}
    tokens = prompts.tokens.numel()
    trace(model, prompts, logits=prompts.positions)
    start = time.perf_counter()
    trace(model, prompts, logits=prompts.positions)
    each = (time.perf_counter() - start) / tokens
    steps = []
    for method in chosen_methods(wanted):
        if missing(model, get(method)) is None:
            with suppress(NotApplicable):  # the scan itself says why
                steps.append({"what": f"score {method}", "tokens": get(method).create().tokens(model)})
    for role in chosen_roles(wanted):
        if missing(model, get(ROLES[role].method)) is None:
            row = ROLES[role]
            with suppress(NotApplicable):
                held_out = make(row.task, model, n_seeds, 0, **row.task_options)
                steps.append(
                    {
                        "what": f"verify {role}",
                        "tokens": held_out.tokens.numel() * n_runs(n_heads_of(model, row), n_controls),
                    }
                )
    steps = [{**step, "seconds": round(step["tokens"] * each, 1)} for step in steps]
    a = model.anatomy
    width = int(prompts.tokens.shape[1])
    work = n_seeds * width * (a.n_heads * width + 4 * a.d_mlp + 8 * a.d_model + model.n_vocab) * model.dtype.itemsize
    return {"seconds": round(sum(s["seconds"] for s in steps), 1), "memory_bytes": weights + work, "steps": steps}


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
    for role in chosen_roles(methods):
        if ROLES[role].method not in found:
            skipped[f"role {role}"] = f"The role {role} was not tested: its heads are chosen by {ROLES[role].method}."
            continue
        heads = top(found[ROLES[role].method], n_heads_of(model, ROLES[role]))
        verdicts.append(
            verify(
                model, role, heads, seed=seed, n_seeds=n_seeds, n_controls=n_controls,
                progress=lambda step, steps, role=role: tell(f"verify {role}", step, steps),  # type: ignore[misc]
            )
        )  # fmt: skip
    tell("attention of the top heads", 0, 0)
    facts = {"name": model.name, "fingerprint": model.fingerprint, "anatomy": model.anatomy.facts()}
    return Atlas(facts, seed, found, corrected(verdicts), skipped, _examples(model, found), _weights(model))


def corrected(verdicts: list[Verdict]) -> list[Verdict]:
    """The verdicts decided again with p corrected over all roles that were tested."""
    tested = [v for v in verdicts if v.verdict != "not testable"]
    p = dict(zip([v.role for v in tested], holm([v.p_raw for v in tested]), strict=True))
    return [decide(v, p[v.role]) if v.role in p else v for v in verdicts]


def _weights(model: Model) -> Any:
    """The sketch of each head's weights as (layer, head, probe), or None where they are quantised."""
    try:
        return to_scores(head_sketch(model).flatten(2), ("layer", "head", "probe"))
    except NotApplicable:
        return None


def _examples(model: Model, scores: dict[str, Any]) -> list[dict[str, Any]]:
    """The attention of every method's top head on a real prompt."""
    if model.tokenizer is None:
        return []
    text = "When Mary and John went to the store, John gave a drink to Mary. When Mary and John went to the"
    tokens, _ = model.tokens(text)
    shown = model.words(tokens[0])
    rows = []
    for method, values in scores.items():
        if tuple(values.dims) != ("layer", "head"):
            continue
        best = top(values, 1)[0]
        try:
            run = trace(model, tokens, ["pattern"], layers=[best.layer], logits=None)
        except NotApplicable:  # an attention backend that hides its pattern
            return []
        pattern = run["pattern", best.layer][0, best.index]
        rounded = [[round(float(x), 4) for x in row] for row in pattern]
        rows.append({"head": str(best), "method": method, "tokens": shown, "pattern": rounded})
    return rows
