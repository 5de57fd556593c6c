"""`headscope figure`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headscope.cli.common import Common, command, working
from headscope.cli.score import Force
from headscope.core.errors import FileError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from headscope.draw import Figure


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "figure")(figure)


def figure(
    common: Common,
    what: Annotated[
        str,
        typer.Argument(
            help="An atlas folder; a .json file of a route or of a figure; or a model, with --head and --prompt."
        ),
    ],
    method: Annotated[
        str | None, typer.Option(help="The grid of this method of the atlas; all side by side if left out.")
    ] = None,
    role: Annotated[str | None, typer.Option(help="The dose curve that tested this role of the atlas.")] = None,
    head: Annotated[str | None, typer.Option(help="The head of the model whose attention to draw, as L5H3.")] = None,
    prompt: Annotated[str | None, typer.Option(help="The text on which the head attends.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="A .svg, .pdf, .png, .html or .json file; printed as text if left out.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    theme: Annotated[str, typer.Option(help="light or dark; an .html has both.")] = "light",
    limit: Annotated[
        float | None,
        typer.Option(help="The value of the strongest colour: the largest score, or 1 of attention, if left out."),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Your own title.")] = None,
    force: Force = False,
) -> None:
    """Draw a figure for a paper, a page or the terminal; every file says where its numbers come from.

    headscope figure atlas --method induction-heads-icl --out grid.pdf

    headscope figure atlas --role induction --out dose.svg

    headscope figure route.json --out route.png

    headscope figure MODEL --head L18H6 --prompt "The cat sat. The cat" --out pattern.svg
    """  # fmt: skip
    from headscope.draw import THEMES
    from headscope.draw.figure import check_path

    if theme not in THEMES:
        raise UsageError(f"--theme is {theme!r}; it takes {' or '.join(THEMES)}.")
    if out is not None:
        check_path(out, overwrite=overwrite)  # before a model is loaded for it
    given = {"method": method, "role": role, "head": head, "prompt": prompt, "limit": limit, "title": title}
    found = _made(common, what, {name: value for name, value in given.items() if value is not None}, force=force)
    if out is not None:
        found.save(out, overwrite=overwrite, theme=theme)
    document = {**found.document(), "out": None if out is None else str(out)}

    def human(console: Console) -> None:
        console.print(repr(found) if out is None else f"Wrote {out}.", soft_wrap=True, markup=False)

    common.show(document, human)


def _made(common: Common, what: str, given: dict[str, Any], *, force: bool) -> Figure:
    import headscope as hs

    path = Path(what)
    if (path / "atlas.json").is_file():
        return hs.figure(hs.Atlas.load(path), **given)
    if path.suffix == ".json":
        return hs.figure(_read(path), **given)
    if "head" not in given or "prompt" not in given:
        raise UsageError(
            f"{what} is no atlas and no .json of a route or figure; if it is a model, give --head (as L5H3) and --prompt."
        )
    model = common.load(what, force=force)
    with working("Running the prompt"):
        return hs.figure(model, **given)


def _read(path: Path) -> Any:
    from headscope.core.files import read_json
    from headscope.draw import Figure
    from headscope.routes import Route

    document = read_json(path, "route or figure")
    kind = document.get("format") if isinstance(document, dict) else None
    if kind not in ("headscope-route", "headscope-figure"):
        raise FileError(f"{path} is neither a route nor a figure of headscope.")
    return Route.load(path) if kind == "headscope-route" else Figure.load(path)
