"""`headscope scan`, `headscope verify`, `headscope compare`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headscope.cli.common import Common, command, working
from headscope.cli.models import Name
from headscope.cli.score import Force
from headscope.core.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from headscope.verify import Verdict

Seeds = Annotated[int, typer.Option("--n-seeds", min=5, help="Held-out prompts, paired over all sets of heads.")]
Controls = Annotated[int, typer.Option("--n-controls", min=2, help="Random sets of heads to compare with.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    command(app, "scan")(scan)
    command(app, "verify")(verify)
    command(app, "compare")(compare)


def scan(
    common: Common,
    model: Name,
    out: Annotated[Path, typer.Option(help="Folder of the atlas; one that headscope wrote is replaced.")] = Path(
        "atlas"
    ),
    methods: Annotated[str | None, typer.Option(help="Ids with commas, or 'all'.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The cheap methods and roles (the default on a CPU).")] = False,
    full: Annotated[bool, typer.Option("--full", help="All methods and roles.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would cost in time and memory.")] = False,
    n_seeds: Seeds = 12,
    n_controls: Controls = 20,
    force: Force = False,
) -> None:
    """Score every head, verify the roles by intervention, write the atlas and its report.html.

    The atlas is written whole at the end, or not at all.
    """
    import time

    import headscope as hs
    from headscope.core.files import check_folder
    from headscope.scan import chosen_methods, estimate, left_out

    if sum((methods is not None, quick, full)) > 1:
        raise UsageError("scan takes one of --methods, --quick and --full.")
    if methods is not None:
        chosen_methods(methods)  # a mistyped id should not cost the loading of a model
    if not dry_run:
        check_folder(out, marker="atlas.json")  # nor should a folder that cannot be written cost the whole scan
    loaded = common.load(model, force=force)
    wanted = (
        methods if methods is not None else ("all" if full or (not quick and loaded.device.type != "cpu") else "quick")
    )
    if dry_run:
        cost = estimate(loaded, wanted, n_seeds=n_seeds, n_controls=n_controls)
        common.show({"model": loaded.name, **cost}, lambda console: _show_cost(console, cost))
        return
    start = time.perf_counter()
    with working("Scanning") as steps:
        atlas = hs.scan(loaded, wanted, seed=common.seed, n_seeds=n_seeds, n_controls=n_controls, progress=steps)
    atlas.save(out)
    seconds = round(time.perf_counter() - start, 1)
    left = left_out(wanted)
    document = {
        "model": atlas.model,
        "roles": [asdict(v) for v in atlas.verdicts],
        "out": str(out),
        "skipped": atlas.skipped,
        "left_to_full": left,
        "seconds": seconds,
    }

    def human(console: Console) -> None:
        from headscope.report.terminal import verdict_table

        console.print(verdict_table(atlas.verdicts))
        for v in atlas.verdicts:
            console.print(f"{v.role}, {v.verdict}: {v.claim} ({v.reason})", markup=False, soft_wrap=True)
        for why in atlas.skipped.values():
            console.print(f"Not run: {why}", markup=False)
        if left:
            console.print(f"Left to --full: {', '.join(left)}.")
        console.print(
            f"Wrote {out} in {seconds:.0f} s; open {out / 'report.html'} in a browser.", soft_wrap=True, markup=False
        )

    common.show(document, human)


def _show_cost(console: Console, cost: dict[str, Any]) -> None:
    for row in cost["steps"]:
        console.print(f"  {row['seconds']:7.1f} s  {row['what']}")
    memory = cost["memory_bytes"] / 1e9
    console.print(f"About {cost['seconds']:.0f} s and {memory:.1f} GB of memory on this machine.")


def verify(
    common: Common,
    model: Name,
    role: Annotated[str, typer.Argument(help="induction, previous-token, sink, …")],
    heads: Annotated[
        str | None, typer.Option(help="Claimed heads, as L5H3,L8H1; the top of the role's method if left out.")
    ] = None,
    n_seeds: Seeds = 12,
    n_controls: Controls = 20,
    force: Force = False,
) -> None:
    """Test whether heads have a role: replace their output on held-out prompts, against matched random heads."""
    from headscope.core.component import components
    from headscope.verify import get_role
    from headscope.verify import verify as verify_role

    get_role(role)
    chosen = components(heads) if heads is not None else None
    loaded = common.load(model, force=force)
    with working(f"Verifying {role}") as steps:
        verdict = verify_role(
            loaded, role, chosen, seed=common.seed, n_seeds=n_seeds, n_controls=n_controls,
            progress=lambda done, total: steps(f"Verifying {role}", done, total),
        )  # fmt: skip
    common.show(asdict(verdict), lambda console: _show_verdict(console, verdict))


def _show_verdict(console: Console, verdict: Verdict) -> None:
    from headscope.report.terminal import verdict_table

    console.print(verdict_table([verdict]))
    console.print(f"{verdict.claim}: {verdict.reason}", markup=False)


def compare(
    common: Common,
    before: Annotated[Path, typer.Argument(metavar="ATLAS", help="An atlas that `scan` wrote.")],
    after: Annotated[Path, typer.Argument(metavar="ATLAS", help="Another one, of a model with the same heads.")],
    top: Annotated[int, typer.Option(min=1, help="How many heads to print (JSON has all).")] = 15,
) -> None:
    """Which heads changed between two atlases: first those whose own weights changed, by how much they behave otherwise."""
    from headscope.atlas import Atlas
    from headscope.atlas import compare as difference

    found = difference(Atlas.load(before), Atlas.load(after))
    document = {
        "before": str(before),
        "after": str(after),
        "changed": found.heads.to_dict("records"),
        "neurons": found.neurons.to_dict("records"),
        "roles": found.roles,
        "notes": found.notes,
    }

    def human(console: Console) -> None:
        from headscope.report.terminal import change_table, neuron_changes, role_changes

        changed = found.heads[found.heads.edited | (found.heads.change > 0)]
        console.print(change_table(changed.head(top)) if len(changed) else "No head changed.")
        if len(found.neurons):
            console.print(neuron_changes(found.neurons.head(top)))
        for line in [*role_changes(found.roles), *found.notes]:
            console.print(line, markup=False)

    common.show(document, human)
