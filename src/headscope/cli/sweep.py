"""`headscope sweep`, `headscope patch`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headscope.cli.common import Common, Stopped, command, working
from headscope.cli.models import Name
from headscope.cli.score import Force
from headscope.core.errors import NotApplicable, UsageError, nearest

if TYPE_CHECKING:
    from rich.console import Console

    from headscope.model import Model
    from headscope.trace import Edit

Task = Annotated[
    str, typer.Option(help="ioi, capitals, repeated-tokens, … or a .jsonl file of prompt, answer, foil, corrupt.")
]
Over = Annotated[str, typer.Option(help="heads, kv-heads, neurons, attn, mlp, resid or layers.")]
Positions = Annotated[str, typer.Option(help="all together, each one, or the last.")]
Measure = Annotated[
    str | None, typer.Option("--metric", help="loss, prob, logit_diff, kl, …; the task's own if left out.")
]
Count = Annotated[int, typer.Option("--n", min=1, help="Prompts of the task.")]
Out = Annotated[Path | None, typer.Option(help="Folder for finished chunks and the result; needed to resume.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the sweep in --out.")]
Engine = Annotated[str, typer.Option(help="local, or ray (pip install 'headscope\\[ray]').")]
Top = Annotated[int, typer.Option(min=1, help="How many to print (JSON has all).")]

_EDITS = ("zero", "mean", "resample", "scale")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    command(app, "sweep")(sweep)
    command(app, "patch")(patch)


def _check_resume(out: Path | None, resume: bool) -> None:
    if resume and out is None:
        raise UsageError("--resume goes on with the sweep in a folder; name it by --out.")


@contextmanager
def _resumable(out: Path | None) -> Iterator[None]:
    """Ctrl-C says how to go on, where there is something to go on with."""
    try:
        yield
    except KeyboardInterrupt:
        if out is None or not (out / "manifest.json").exists():
            raise
        raise Stopped(f"Stopped; {out} keeps what is done, and the same command with --resume goes on.") from None


def sweep(
    common: Common,
    model: Name,
    task: Task = "ioi",
    edit: Annotated[str, typer.Option(help="zero, mean, resample, or scale=FACTOR.")] = "zero",
    over: Over = "heads",
    positions: Positions = "all",
    metric: Measure = None,
    n: Count = 8,
    block: Annotated[int, typer.Option(min=1, help="Neurons that are edited together.")] = 64,
    out: Out = None,
    resume: Resume = False,
    engine: Engine = "local",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would cost.")] = False,
    top: Top = 15,
    force: Force = False,
) -> None:
    """The same prompts under thousands of edits: how much does the metric change without each head?

    Layers and positions that an edit cannot change are run once. With --out, a stopped sweep goes on by --resume.
    """
    import headscope as hs
    from headscope.sweep import clean, make_job

    name, _, factor = edit.partition("=")
    if name not in _EDITS or (name == "scale") != bool(factor):
        raise UsageError(
            f"--edit was given {edit!r}; it takes zero, mean, resample, or scale=0.5.{nearest(name, _EDITS)}"
        )
    if positions not in ("all", "each", "last"):
        raise UsageError(f"--positions was given {positions!r}; it takes all, each or last.")
    _check_resume(out, resume)
    loaded = common.load(model, force=force)
    prompts = hs.tasks.make(task, loaded, n, common.seed)
    if metric == "logit_diff" and prompts.foil is None:
        raise UsageError(f"The metric logit_diff needs prompts with a foil, which {task} has not; take loss or prob.")
    edits = _edits(loaded, prompts, name, factor, over, positions, block, common.seed)
    if dry_run:
        cost = _cost(loaded, make_job(loaded, prompts, edits, metric))
        common.show({"model": loaded.name, **cost}, lambda console: _show_cost(console, cost))
        return
    with _resumable(out), working(f"Sweeping {over}") as steps:
        found = hs.sweep(
            loaded, prompts, edits, metric, out=out, resume=resume, engine=engine,
            progress=lambda done, total: steps(f"Sweeping {over}", done, total),
        )  # fmt: skip
    base = 0.0 if metric == "kl" else float(clean(loaded, prompts, metric).double().mean())
    rows = [_row(text, values, base) for text, values in zip(found.edit.values, found.values, strict=True)]
    rows.sort(key=lambda row: -abs(row["change"]))
    document = {
        "model": loaded.name,
        "task": prompts.name,
        "metric": found.attrs["metric"],
        "edit": edit,
        "over": over,
        "clean": base,
        "values": rows,
        "out": None if out is None else str(out),
    }
    common.show(document, lambda console: _show_rows(console, document, top))


def _edits(
    model: Model, prompts: Any, name: str, factor: str, over: str, positions: str, block: int, seed: int
) -> list[Edit]:
    from dataclasses import replace

    import headscope as hs
    from headscope.sweep import components_over
    from headscope.trace import resolve

    units: list[Any] = components_over(model, over)
    if over == "neurons":
        size = model.anatomy.d_mlp
        starts = [layer * size + i for layer in range(model.anatomy.n_layers) for i in range(0, size, block)]
        units = [units[start : min(start + block, (start // size + 1) * size)] for start in starts]
    if name == "scale":
        try:
            by = float(factor)
        except ValueError:
            by = math.nan
        if not math.isfinite(by):
            raise UsageError(f"--edit scale takes a number, but was given {factor!r}.")
        made = [hs.scale(unit, by) for unit in units]
    elif name == "zero":
        made = [hs.zero(unit) for unit in units]
    else:
        site = {"heads": "z", "attn": "attn_out", "mlp": "mlp_out", "resid": "resid_pre", "neurons": "neuron"}.get(over)
        if site is None:
            raise UsageError(f"--edit {name} goes over heads, attn, mlp, resid or neurons, not over {over}.")
        run = hs.trace(model, prompts, [site], logits=None)
        made = resolve(model, [hs.mean(u, run) if name == "mean" else hs.resample(u, run, seed) for u in units])
    if positions == "all":
        return made
    if prompts.mask is not None:
        raise NotApplicable("Prompts of different lengths have no common positions; take --positions all.")
    width = prompts.tokens.shape[1]
    return [replace(e, positions=(p,)) for e in made for p in (range(width) if positions == "each" else (width - 1,))]


def _row(text: str, values: Any, base: float) -> dict[str, Any]:
    import numpy as np

    error = 1.96 * values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else float("nan")
    mean = float(values.mean())
    return {
        "edit": str(text),
        "mean": mean,
        "change": mean - base,
        "ci_low": mean - float(error),
        "ci_high": mean + float(error),
        "values": values.tolist(),
    }


def _cost(model: Model, job: Any) -> dict[str, Any]:
    """Seconds from one timed chunk, the work from the plan."""
    import time

    from headscope.sweep.plan import free_bytes

    plan = job.plan()
    first = plan.chunks[-1]
    start = time.perf_counter()
    job.run(first)
    seconds = time.perf_counter() - start
    width = job.clean.tokens.shape[1]
    work = sum(len(job.clean.tokens) * (width - first.column) * (model.anatomy.n_layers - i) for i in first.layers)
    return {
        "edits": len(job.sets),
        "chunks": len(plan.chunks),
        "seconds": round(seconds * plan.work / max(1, work), 1),
        "share_of_plain_work": plan.work / plan.plain,
        "free_memory_bytes": free_bytes(model.device),
    }


def _show_cost(console: Console, cost: dict[str, Any]) -> None:
    console.print(
        f"{cost['edits']} edits in {cost['chunks']} chunks, {cost['share_of_plain_work']:.1%} of the work of one pass an "
        f"edit: about {cost['seconds']:.0f} s on this machine."
    )


def _show_rows(console: Console, document: dict[str, Any], top: int) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{document['metric']} on {document['task']}, clean {document['clean']:.4f}: largest changes")
    table.add_column("edit")
    for name in ("change", "mean", "95 % interval"):
        table.add_column(name, justify="right")
    for row in document["values"][:top]:
        interval = f"{row['ci_low']:.3f} … {row['ci_high']:.3f}"
        table.add_row(Text(row["edit"]), f"{row['change']:+.4f}", f"{row['mean']:.4f}", interval)
    console.print(table)
    if document["out"]:
        console.print(f"Wrote {document['out']}.", soft_wrap=True, markup=False)


def patch(
    common: Common,
    model: Name,
    clean: Annotated[str | None, typer.Option(help="A prompt whose answer comes out right.")] = None,
    corrupt: Annotated[str | None, typer.Option(help="Its twin of equal length, with another answer.")] = None,
    answer: Annotated[str | None, typer.Option(help="The clean prompt's answer, one token, such as ' Mary'.")] = None,
    foil: Annotated[str | None, typer.Option(help="The other answer, one token.")] = None,
    task: Annotated[
        str | None, typer.Option(help="A task with corrupted twins instead: ioi, capitals, a .jsonl file.")
    ] = None,
    n: Count = 8,
    over: Annotated[str, typer.Option(help="heads, attn, mlp, resid or neurons.")] = "heads",
    positions: Positions = "all",
    direction: Annotated[str, typer.Option(help="denoise: is it enough? noise: is it needed?")] = "denoise",
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Attribution patching: one backward pass instead.")
    ] = False,
    out: Out = None,
    resume: Resume = False,
    engine: Engine = "local",
    top: Top = 15,
    force: Force = False,
) -> None:
    """Which heads carry the difference between a prompt and its corrupted twin?

    1 means that exchanging the head's value restores (denoise) or destroys (noise) the whole difference, 0 nothing.
    """
    import headscope as hs
    from headscope.core.scores import to_frame
    from headscope.tasks.base import Case, from_own

    given = {"--clean": clean, "--corrupt": corrupt, "--answer": answer, "--foil": foil}
    if task is None and any(value is None for value in given.values()):
        missing = ", ".join(name for name, value in given.items() if value is None)
        raise UsageError(f"patch takes --clean, --corrupt, --answer and --foil, or --task; left out: {missing}.")
    if task is not None and any(value is not None for value in given.values()):
        raise UsageError("patch takes either --task or prompts of your own.")
    _check_resume(out, resume)
    if estimate and (out is not None or engine != "local"):
        raise UsageError("--estimate is two passes on this machine; it takes no --out, --resume or --engine.")
    loaded = common.load(model, force=force)
    if task is not None:
        prompts = hs.tasks.make(task, loaded, n, common.seed)
    else:
        case = Case(str(clean), str(answer), str(foil), str(corrupt))
        prompts = from_own(loaded, "your prompts", [case], common.seed)
    with _resumable(out), working("Patching") as steps:
        if estimate:
            found = hs.attribution_patching(loaded, prompts, over, positions=positions, direction=direction)
        else:
            found = hs.patching(
                loaded, prompts, over, positions=positions, direction=direction, out=out, resume=resume, engine=engine,
                progress=lambda done, total: steps("Patching", done, total),
            )  # fmt: skip
    frame = to_frame(found.effect).drop(columns=["ci_low", "ci_high", "n"]).rename(columns={"score": "effect"})
    rows: list[dict[str, Any]] = frame.sort_values("effect", ascending=False, kind="stable").to_dict("records")
    document = {
        "model": loaded.name,
        "task": prompts.name,
        "direction": direction,
        "estimate": estimate,
        "over": over,
        "metric": prompts.metric,
        "clean": found.clean,
        "corrupt": found.corrupt,
        "used": found.used,
        "values": rows,
    }

    def human(console: Console) -> None:
        from rich.table import Table

        table = Table(title=f"{prompts.metric}: clean {found.clean:.3f}, corrupted {found.corrupt:.3f}; {direction}")
        for name in rows[0]:
            table.add_column(name, justify="right")
        for row in rows[:top]:
            table.add_row(*(f"{value:.4f}" if name == "effect" else str(value) for name, value in row.items()))
        console.print(table)

    common.show(document, human)
