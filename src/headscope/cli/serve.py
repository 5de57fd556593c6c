"""`headscope serve`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headscope.cli.common import Common, command
from headscope.cli.score import Force
from headscope.core.errors import UsageError

if TYPE_CHECKING:
    from headscope.model import Model


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "serve")(serve)


def serve(
    common: Common,
    atlas: Annotated[Path | None, typer.Argument(help="The atlas to show, as `scan` wrote it.")] = None,
    model: Annotated[
        str | None, typer.Option(help="The model to ask; the one named in the atlas, when it is needed, if left out.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="The first free one from 8642 if left out.")] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the address.")] = False,
    host: Annotated[str, typer.Option(help="Other than this machine's own address needs --token.")] = "127.0.0.1",
    token: Annotated[str | None, typer.Option(help="A secret that every request must bring.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results of jobs started in the page.")] = Path(
        "headscope-runs"
    ),
    force: Force = False,
) -> None:
    """Show an atlas, its heads and what the model does on your prompts, in a local web page. Ctrl-C ends it.

    headscope serve atlas

    headscope serve --model smollm2-135m (no atlas yet: scan from the page)
    """
    from headscope.app.launch import address, check_address, listen
    from headscope.app.launch import serve as run

    if atlas is None and model is None:
        raise UsageError("serve takes an atlas, --model, or both.")
    check_address(host, token)

    from headscope.app.session import Session
    from headscope.atlas import Atlas  # loads torch, so not before a mistyped command was refused

    shown = None if atlas is None else Atlas.load(atlas)
    name = model if model is not None else str(shown.model["name"])  # type: ignore[union-attr]

    def load() -> Model:
        return common.load(name, force=force)

    session = Session(name=name, load=load, atlas=shown, out=out)
    if model is not None:
        session.model()  # a model that was asked for by name fails here rather than in the page
    sock = listen(host, port)
    url = address(sock, host, token)

    def ready() -> None:
        document = {"url": url, "host": host, "port": sock.getsockname()[1], "model": name, "out": str(out)}
        common.show(document, lambda console: console.print(f"headscope is at {url} (Ctrl-C ends it)", soft_wrap=True))
        sys.stdout.flush()

    run(session, sock, host=host, token=token, url=url, browser=not no_browser, ready=ready)
