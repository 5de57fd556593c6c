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
            help="An atlas folder; the --out folder of a sweep or patching; a .json of a route or figure; or a model, with "
            "--prompt."
        ),
    ],
    method: Annotated[
        str | None, typer.Option(help="The grid of this method of the atlas; all side by side if left out.")
    ] = None,
    against: Annotated[str | None, typer.Option(help="A dot for each head: --method across, this method up.")] = None,
    role: Annotated[str | None, typer.Option(help="The dose curve that tested this role of the atlas.")] = None,
    example: Annotated[bool, typer.Option("--example", help="Attention of --method's top head in the scan.")] = False,
    prompt: Annotated[
        str | None, typer.Option(help="The model's text: its logit lens, or with --head attention.")
    ] = None,
    head: Annotated[str | None, typer.Option(help="The head of the model whose attention to draw, as L5H3.")] = None,
    no_sink: Annotated[bool, typer.Option("--no-sink", help="Of attention, leave out the first token.")] = False,
    query: Annotated[int | None, typer.Option(min=0, help="Of attention, frame the row of this position.")] = None,
    key: Annotated[int | None, typer.Option(min=0, help="Frame only where it looks at this position.")] = None,
    target: Annotated[
        str | None, typer.Option(help="Of a lens, the token to follow, such as ' Paris'; the model's own if left out.")
    ] = None,
    by: Annotated[str | None, typer.Option(help="Of a lens, whose probability is the colour: best or target.")] = None,
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

    headscope figure atlas --method induction-heads-icl --against previous-token --out scatter.pdf

    headscope figure run --out sweep.svg (the --out folder of headscope sweep or patch)

    headscope figure MODEL --head L18H6 --prompt "The cat sat. The cat" --out pattern.svg

    headscope figure MODEL --prompt "The capital of France is" --out lens.svg
    """  # fmt: skip
    from headscope.draw import THEMES
    from headscope.draw.figure import check_path

    if theme not in THEMES:
        raise UsageError(f"--theme is {theme!r}; it takes {' or '.join(THEMES)}.")
    if out is not None:
        check_path(out, overwrite=overwrite)  # before a model is loaded for it
    given = {
        "example": True if example else None,
        "method": method, "against": against, "role": role, "head": head, "prompt": prompt, "query": query, "key": key,
        "sink": False if no_sink else None, "target": target, "by": by, "limit": limit, "title": title,
    }  # fmt: skip
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
    if any((path / name).is_file() for name in ("manifest.json", "patching.json")):
        return hs.figure(hs.load_run(path), **given)
    if "prompt" not in given:
        raise UsageError(
            f"{what} is no atlas, no folder of a sweep and no .json of a route or figure; if it is a model, give --prompt, "
            "and --head (as L5H3) for attention."
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
