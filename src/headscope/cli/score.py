"""`headscope score`, `headscope methods`, `headscope check`."""

from __future__ import annotations

import ast
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headscope.cli.common import Common, command, working
from headscope.cli.models import Name
from headscope.core.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

Force = Annotated[bool, typer.Option("--force", help="Go on with a model that fails its self-check.")]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", metavar="NAME=VALUE", help="An option of the method; repeat for more."),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    command(app, "score")(score)
    command(app, "methods")(methods)
    command(app, "check")(check)


def options_of(given: list[str] | None) -> dict[str, Any]:
    """`["n=4", "mode=mean"]` → `{"n": 4, "mode": "mean"}`."""
    found: dict[str, Any] = {}
    for text in given or []:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"--option was given {text!r}; write NAME=VALUE, for example n=4.")
        try:
            found[name.strip().replace("-", "_")] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name.strip().replace("-", "_")] = value  # a word without quotes
    return found


def score(
    common: Common,
    model: Name,
    method: Annotated[str, typer.Argument(help="A score method that `headscope methods` lists.")],
    option: Options = None,
    top: Annotated[int, typer.Option(min=1, help="How many to print (JSON has all).")] = 10,
    force: Force = False,
) -> None:
    """Score every head or neuron with one method.

    A score says what a head looks like; whether the model relies on it is for [b]headscope verify[/b].
    """
    import headscope as hs
    from headscope.core.registry import get
    from headscope.core.scores import to_frame

    given = options_of(option)
    get(method, "score").create(**given)  # a typing mistake should not cost the loading of a model
    loaded = common.load(model, force=force)
    with working(f"Scoring {method}"):
        scores = hs.score(loaded, method, seed=common.seed, **given)
    frame = to_frame(scores).sort_values("score", ascending=False, kind="stable")
    present = [name for name in frame.columns if name == "score" or not frame[name].isna().all()]
    document = {"dims": list(scores.dims), "values": frame[present].to_dict("records"), **scores.attrs}

    def human(console: Console) -> None:
        from rich.markup import escape

        from headscope.report.terminal import score_table

        console.print(
            f"[b]{method}[/b] on {escape(loaded.name)}; higher: {scores.attrs['higher_means']}", soft_wrap=True
        )
        console.print(score_table(scores, top))

    common.show(document, human)


def methods(
    common: Common,
    method: Annotated[str | None, typer.Argument(help="Show one method in full.")] = None,
) -> None:
    """List the methods: id, what it finds, its paper, what it needs and costs."""
    from headscope.core import registry

    specs = [registry.get(method)] if method else list(registry.methods().values())
    rows = [
        {"id": s.id, "kind": s.kind, **s.info, "options": [asdict(o) for o in s.options], "doc": s.doc} for s in specs
    ]

    def human(console: Console) -> None:
        if method:
            from rich.markup import escape

            console.print(f"[b]{specs[0].id}[/b] ({specs[0].kind})\n\n{escape(specs[0].doc)}")
            return
        from rich.table import Table

        table = Table(box=None)
        for name in ("method", "kind", "finds", "paper", "costs"):
            table.add_column(name, no_wrap=name in ("method", "kind"), overflow="fold")
        for spec in specs:
            table.add_row(spec.id, spec.kind, spec.info["title"], ", ".join(spec.info["papers"]), spec.info["cost"])
        console.print(table)

    common.show(rows[0] if method else rows, human)


def check(
    common: Common,
    method: Annotated[str | None, typer.Argument(help="A method that `headscope methods` lists.")] = None,
    all_methods: Annotated[bool, typer.Option("--all", help="Check every method.")] = False,
    model: Annotated[str, typer.Option(help="The model to test the claim on.")] = "smollm2-135m",
    force: Force = False,
) -> None:
    """Test a paper's claim on a model: shown, not shown, or not testable, with the figures.

    A small model need not show what a large one does; then this says 'not shown'.
    """
    import headscope as hs
    from headscope.core import registry

    if bool(method) == all_methods:
        raise UsageError("check takes one method's id, or --all.")
    ids = list(registry.methods()) if all_methods else [registry.get(str(method)).id]
    loaded = common.load(model, force=force)
    rows = []
    with working("Checking") as steps:
        for done, name in enumerate(ids):
            steps(f"Checking {name}", done, len(ids))
            rows.append(hs.check(loaded, name, seed=common.seed))

    def human(console: Console) -> None:
        from rich.markup import escape

        colours = {"shown": "green", "not shown": "red"}
        for row in rows:
            colour = colours.get(row["verdict"], "yellow")
            what = f"in {row['seconds']} s. {escape(row['claim'])}"
            console.print(f"[b]{row['id']}[/b]: [{colour}]{row['verdict']}[/] {what}")
            for name, value in row["figures"].items():
                console.print(f"    {value:10.4g}  {name}", markup=False)
            if row["reason"]:
                console.print(f"    {row['reason']}", markup=False)

    common.show(rows if all_methods else rows[0], human)
