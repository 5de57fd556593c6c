"""`headscope edit show`, `headscope edit bake`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headscope.cli.common import Common, command, working
from headscope.cli.models import Name
from headscope.cli.score import Force

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(no_args_is_help=True, help="Edit files: look into one, bake one into an ordinary checkpoint.")
File = Annotated[Path, typer.Argument(help="A file that hs.save_edits wrote.")]


@command(app, "show")
def show(common: Common, file: File) -> None:
    """Say what an edit file changes."""
    from headscope.trace import load_edits

    edits = load_edits(file)
    rows = [
        {
            "op": e.op,
            "components": [str(c) for c in e.components],
            "positions": e.positions,
            "rows": e.rows,
            "text": str(e),
        }
        for e in edits
    ]

    def human(console: Console) -> None:
        for row in rows:
            console.print(row["text"], markup=False, soft_wrap=True)

    common.show({"file": str(file), "edits": rows}, human)


@command(app, "bake")
def bake(
    common: Common,
    model: Name,
    file: File,
    out: Annotated[Path, typer.Option(help="Folder of the new checkpoint; it must not exist.")],
    force: Force = False,
) -> None:
    """Write edits into a copy of the weights: an ordinary checkpoint that plain transformers loads."""
    import headscope as hs
    from headscope.core.files import check_folder
    from headscope.trace import load_edits

    edits = load_edits(file)
    check_folder(out)
    loaded = common.load(model, force=force)
    with working("Baking"):
        hs.act.save(hs.act.bake(loaded, edits), loaded.tokenizer, out)
    common.show(
        {"model": loaded.name, "edits": [str(e) for e in edits], "out": str(out)},
        lambda console: console.print(f"Wrote {out}.", soft_wrap=True, markup=False),
    )
