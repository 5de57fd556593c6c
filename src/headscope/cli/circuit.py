"""`headscope circuit`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headscope.cli.common import Common, Steps, command, working
from headscope.cli.models import Name
from headscope.cli.score import Force
from headscope.core.errors import NotApplicable, UsageError, nearest

if TYPE_CHECKING:
    import xarray as xr
    from rich.console import Console

    from headscope.circuits import Circuit, Curve
    from headscope.model import Model
    from headscope.tasks import Prompts
    from headscope.verify import CircuitProof

METHODS = ("eap-ig", "eap", "exact", "acdc")
#: how many edges, where neither a number nor a faithfulness is asked for
EDGES = 200


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "circuit")(circuit)


def circuit(
    common: Common,
    model: Name,
    task: Annotated[
        str, typer.Option(help="What the circuit is for: ioi, capitals, a .jsonl file with twins.")
    ] = "ioi",
    method: Annotated[
        str, typer.Option(help="How edges are scored: eap-ig, eap; one pass an edge, for small models: exact, acdc.")
    ] = "eap-ig",
    n: Annotated[
        int,
        typer.Option(
            "--n", min=2, help="Prompts that choose the circuit, and others that prove it, 5 at least (of a file: all)."
        ),
    ] = 8,
    edges: Annotated[int | None, typer.Option(min=1, help="Edges to keep; 200 if left out.")] = None,
    faithfulness: Annotated[
        float | None, typer.Option(help="Keep as few edges as leave this share of the model's metric, such as 0.8.")
    ] = None,
    by: Annotated[str, typer.Option(help="abs: what matters most either way; signed: what helps most.")] = "abs",
    replace: Annotated[str, typer.Option(help="What stands on cut edges: patch (the twin's), mean, zero.")] = "patch",
    steps: Annotated[int, typer.Option(min=1, help="Steps of eap-ig.")] = 5,
    tau: Annotated[
        float, typer.Option(help="acdc lets an edge go that is missed by less than this (KL, nats).")
    ] = 0.01,
    neurons: Annotated[str | None, typer.Option(help="Neurons to split out of their MLPs: L5N7,L6N12.")] = None,
    n_random: Annotated[int, typer.Option("--n-random", min=2, help="Random circuits to compare with.")] = 20,
    out: Annotated[Path | None, typer.Option(help="Write the circuit to this .json file, to load it again.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many edges to print (JSON has all of the circuit).")] = 12,
    force: Force = False,
) -> None:
    """Which edges between heads and MLPs do a task? Find them, cut all others, compare with random circuits.

    headscope circuit MODEL --task ioi --edges 200 --out circuit.json
    """
    import headscope as hs

    _check_method(method)
    if edges is not None and faithfulness is not None:
        raise UsageError("--edges and --faithfulness both say how large the circuit is; give one of them.")
    if method == "acdc" and (edges is not None or faithfulness is not None):
        raise UsageError("acdc takes --tau, which says how large its circuit is, instead of --edges or --faithfulness.")
    split = _check_options(task, method, faithfulness, by, replace, tau, neurons, out)
    loaded = common.load(model, force=force)
    prompts, others = _splits(loaded, task, n, common.seed)
    able = hs.tasks.baseline(loaded, prompts)
    scores, curve = None, None
    with working("Scoring edges") as shown:
        if method == "acdc":
            found = hs.circuits.acdc(
                loaded, prompts, tau=tau, replace=replace, neurons=split, progress=_on(shown, "Cutting edges")
            )
        else:
            options: dict[str, Any] = {"steps": steps} if method == "eap-ig" else {}
            score = getattr(hs.circuits, method.replace("-", "_"))
            scores = score(
                loaded, prompts, replace=replace, neurons=split, progress=_on(shown, "Scoring edges"), **options
            )
            found = _chosen(loaded, prompts, scores, edges, faithfulness, by, _on(shown, "Choosing edges"))
            curve = hs.circuits.curve(loaded, others, scores, progress=_on(shown, "Measuring sizes"))
        chosen, found = len(found), hs.circuits.prune(loaded, found)
        if not len(found):
            more = "a smaller --tau" if method == "acdc" else "more of them by --edges or --faithfulness"
            raise NotApplicable(
                f"None of the {chosen} edges that were chosen leads from the embedding to the logits; ask for {more}."
            )
        proof = hs.prove_circuit(
            loaded, others, found, n_random=n_random, seed=common.seed, progress=_on(shown, "Proving the circuit")
        )
    if out is not None:
        found.save(out)
    values = None if scores is None else _values(found, scores)
    document = {
        "model": loaded.name,
        "task": prompts.name,
        "method": method,
        "baseline": asdict(able),
        "circuit": found.document(),
        "led_nowhere": chosen - len(found),
        "heads": [str(head) for head in found.heads()],
        "values": None if values is None else [{"edge": edge, "score": score} for edge, score in values],
        "proof": proof.document(),
        "curve": None if curve is None else asdict(curve),
        "out": None if out is None else str(out),
    }

    def human(console: Console) -> None:
        if not able.able:
            console.print(f"Mind that {able.reason}.", soft_wrap=True, markup=False)
        _show(console, found, chosen - len(found), values, proof, curve, top)
        if out is not None:
            console.print(f"Wrote {out}.", soft_wrap=True, markup=False)

    common.show(document, human)


def _check_method(method: str) -> None:
    """Refuse what finds no edges, and say where a method of another kind is run."""
    from headscope.core import registry

    if method in METHODS:
        return
    if (spec := registry.methods().get(method)) is None:
        raise UsageError(f"There is no method {method!r} of edges.{nearest(method, METHODS)}")
    runs = f"`headscope score MODEL {method}`" if spec.kind == "score" else f"`headscope check {method}`"
    call = "plan" if spec.kind == "compress" else spec.kind
    raise UsageError(
        f"{method} is no method of edges (those are {', '.join(METHODS)}); run it by {runs}, or in Python by "
        f"hs.{call}(model, {method!r}, …)."
    )


def _check_options(
    task: str, method: str, faithfulness: float | None, by: str, replace: str, tau: float, neurons: str | None,
    out: Path | None,
) -> tuple[str, ...]:  # fmt: skip
    """The neurons. A mistyped option should not cost the loading of a model, nor a bad path the whole circuit."""
    from headscope.circuits.circuit import check_by
    from headscope.circuits.quality import check_least
    from headscope.circuits.run import check_replace
    from headscope.circuits.scores import check_way
    from headscope.circuits.stepwise import check_tau
    from headscope.core.files import check_file
    from headscope.model.graph import named_neurons
    from headscope.tasks import check_name

    check_name(task)
    check_by(by)
    check_replace(replace)
    check_tau(tau)
    if method == "eap-ig":
        check_way(replace)
    if faithfulness is not None:
        check_least(faithfulness)
    if out is not None:
        check_file(out, ".json")
    return () if neurons is None else tuple(map(str, named_neurons(neurons)))


def _on(shown: Steps, what: str) -> Any:
    return lambda done, total: shown(what, done, total)


def _splits(model: Model, task: str, n: int, seed: int) -> tuple[Prompts, Prompts]:
    """Prompts that choose the circuit, and others that prove it: halves of a file's."""
    from headscope.circuits.run import rows_of
    from headscope.tasks import make
    from headscope.verify.verify import HELD_OUT

    if not task.endswith(".jsonl"):
        return make(task, model, n, seed), make(task, model, n, seed + HELD_OUT)
    whole = make(task, model)
    if len(whole) < 4:
        raise UsageError(
            f"{task} has {len(whole)} prompts; half of them choose the circuit and half prove it: give 4 or more."
        )
    half = len(whole) // 2
    (_, first), (_, second), *_ = rows_of(whole, half)
    return first, second


def _chosen(
    model: Model, prompts: Prompts, scores: xr.DataArray, edges: int | None, least: float | None, by: str, progress: Any
) -> Circuit:
    from headscope.circuits import enough_edges, graph_of, top_edges

    if least is not None:
        return enough_edges(model, prompts, scores, least, by=by, progress=progress)
    if edges is None:
        edges = min(EDGES, graph_of(model, scores.attrs["neurons"]).n_edges)
    return top_edges(model, scores, edges, by=by)


def _values(found: Circuit, scores: xr.DataArray) -> list[tuple[str, float]]:
    """Edges of the circuit with their scores, the largest first."""
    pairs = [(edge, edge.split("->")) for edge in found.edges]
    values = [(edge, float(scores.sel(sender=source, receiver=target))) for edge, (source, target) in pairs]
    return sorted(values, key=lambda row: -abs(row[1]))


def _show(
    console: Console,
    found: Circuit,
    led_nowhere: int,
    values: list[tuple[str, float]] | None,
    proof: CircuitProof,
    curve: Curve | None,
    top: int,
) -> None:
    from rich.table import Table

    pruned = f"; {led_nowhere} more led nowhere" if led_nowhere else ""
    console.print(
        f"{found.model}, {found.task}: {len(found)} of {found.n_graph:,} edges ({proof.share:.2%}{pruned}), "
        f"{len(found.heads())} heads, by {found.method}.",
        soft_wrap=True, markup=False,
    )  # fmt: skip
    table = Table(title=f"{proof.metric} on {proof.n_prompts} other prompts")
    for name in ("kept", proof.metric, "share of the model's"):
        table.add_column(name, justify="left" if name == "kept" else "right")
    span = proof.clean - proof.empty

    def row(name: str, share: float, note: str = "") -> None:
        table.add_row(name, f"{proof.empty + share * span:+.3f}", f"{share:.1%}{note}")

    row("everything", 1.0)
    row("the circuit", proof.faithfulness)
    row(f"{proof.n_random} random circuits", proof.random, f" ± {proof.random_sd:.1%}")
    row("  the best of them", proof.random_most)
    row("all but the circuit", proof.complement)
    row("nothing", 0.0)
    console.print(table)
    console.print(
        f"{proof.verdict}: {proof.reason}; circuit minus random {proof.diff_ci_low:+.3g} to {proof.diff_ci_high:+.3g}.",
        soft_wrap=True, markup=False,
    )  # fmt: skip
    if curve is not None:
        console.print(f"Over all sizes: CPR {curve.cpr:.3f} (higher is better), CMD {curve.cmd:.3f} (0 is best).")
    console.print(f"Measured: {'; '.join(proof.choices.values())}.", soft_wrap=True, markup=False)
    if values is not None:
        edges = Table(title="largest edges (above 0: helps the task)")
        edges.add_column("edge")
        edges.add_column("score", justify="right")
        for edge, score in values[:top]:
            edges.add_row(edge, f"{score:+.4f}")
        console.print(edges)
