"""`headscope routes`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headscope.cli.common import Common, command, working
from headscope.cli.models import Name
from headscope.cli.score import Force
from headscope.core.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from headscope.routes import Route
    from headscope.verify import RouteProof


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "routes")(routes)


def routes(
    common: Common,
    model: Name,
    prompt: Annotated[str | None, typer.Argument(help="The text before the prediction.")] = None,
    target: Annotated[
        str | None, typer.Option(help="The next token to explain, such as ' Paris'; the model's own if left out.")
    ] = None,
    foil: Annotated[str | None, typer.Option(help="Why not this one instead? Signs are target minus foil.")] = None,
    position: Annotated[int, typer.Option(help="Where the prediction is made; negative from the end.")] = -1,
    threshold: Annotated[float, typer.Option(help="Parts with at most this share of a state are cut.")] = 0.04,
    biases: Annotated[str, typer.Option(help="part: on their own; drop: left out; heads: in the heads.")] = "part",
    neurons: Annotated[int, typer.Option(min=0, help="Neurons to name for each MLP on the route.")] = 0,
    html: Annotated[Path | None, typer.Option(help="Write the drawing to this .html or .svg file.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the route to this .json file, to load it again.")] = None,
    neuronpedia: Annotated[
        Path | None, typer.Option(help="Write the route as an attribution graph that Neuronpedia reads.")
    ] = None,
    prove: Annotated[bool, typer.Option("--prove", help="Cut everything else and compare with random routes.")] = False,
    task: Annotated[
        str | None, typer.Option(help="Prove the routes of a task's prompts: ioi, capitals, a .jsonl file.")
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Prompts of the task.")] = 12,
    n_random: Annotated[int, typer.Option("--n-random", min=2, help="Random routes for each prompt.")] = 20,
    top: Annotated[int, typer.Option(min=1, help="How many heads to print (JSON has all edges).")] = 12,
    force: Force = False,
) -> None:
    """How did this one prediction come about? The edges that carried it, from the last layer down.

    headscope routes MODEL "The capital of France is" --target " Paris" --html route.html

    headscope routes MODEL --task ioi (is a task's route what carries its predictions?)
    """
    import headscope as hs
    from headscope.core.files import check_file
    from headscope.routes.extract import check_options
    from headscope.verify import prompt_of

    if (prompt is None) == (task is None):
        raise UsageError("routes takes a prompt, or --task to prove the routes of a task's prompts.")
    of_prompt = {
        "--html": html, "--out": out, "--neuronpedia": neuronpedia, "--target": target, "--foil": foil,
        "--position": position if position != -1 else None, "--neurons": neurons or None, "--prove": prove or None,
    }  # fmt: skip
    if task is not None and (extra := [name for name, x in of_prompt.items() if x is not None]):
        raise UsageError(f"{extra[0]} is for the route of a prompt; --task proves the routes of a task's prompts.")
    for path, endings in ((html, (".html", ".svg")), (out, (".json",)), (neuronpedia, (".json",))):
        if path is not None:
            check_file(path, *endings)
    check_options(threshold, biases, neurons)
    loaded = common.load(model, force=force)
    if task is not None:
        with working("Proving routes") as steps:
            found = hs.prove_routes(
                loaded, hs.tasks.make(task, loaded, n, common.seed), threshold=threshold, biases=biases,
                n_random=n_random, seed=common.seed, progress=lambda done, total: steps("Proving routes", done, total),
            )  # fmt: skip
        document = {"model": loaded.name, "proof": found.document()}
        common.show(document, lambda console: _show_proof(console, found))
        return
    with working("Finding the route"):
        route = hs.routes(
            loaded, prompt, target=target, foil=foil, position=position, threshold=threshold, biases=biases,
            neurons=neurons,
        )  # fmt: skip
    proof = None
    if prove:
        with working("Proving the route"):
            proof = hs.prove_routes(
                loaded, prompt_of(route), threshold=threshold, biases=biases, n_random=n_random, seed=common.seed
            )
    written = []
    if html is not None:
        route.save(html)
        written.append(html)
    if out is not None:
        route.save(out)
        written.append(out)
    if neuronpedia is not None:
        from headscope.core.files import write_json
        from headscope.routes.neuronpedia import attribution_graph

        write_json(neuronpedia, attribution_graph(route))
        written.append(neuronpedia)
    document = route.document()
    if proof is not None:
        document["proof"] = proof.document()

    def human(console: Console) -> None:
        _show(console, route, top, proved=proof is not None)
        for word in filter(None, (target, foil)):
            if (
                not word.startswith(" ")
                and len(loaded.tokenizer(f" {word}", add_special_tokens=False)["input_ids"]) == 1
            ):
                console.print(
                    f"Mind the space in front: {' ' + word!r} is another token.", soft_wrap=True, markup=False
                )
        if proof is not None:
            _show_proof(console, proof)
        for path in written:
            console.print(f"Wrote {path}.", soft_wrap=True, markup=False)

    common.show(document, human)


def _show(console: Console, route: Route, top: int, *, proved: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    rather = "" if route.foil is None else f" rather than {route.foil!r}"
    console.print(
        Text(f"{route.model}: {route.target!r}{rather} after {route.prompt!r}, logit {route.logit:+.3f}"),
        soft_wrap=True,
    )
    console.print(
        f"{len(route.nodes)} nodes and {len(route.edges)} edges; of the {route.parts:,} edges of heads into them "
        f"{route.evaluated / max(1, route.parts):.2%} had to be looked at."
    )
    table = Table(title=f"the heaviest edges of heads (share above {route.threshold:g})")
    signed = f"to the logit of {route.target!r}" if route.foil is None else "target − foil"
    for name in ("head", "weight", signed, "reads", "at"):
        table.add_column(Text(name), justify="right" if name in ("weight", signed) else "left")
    edges = [e for e in route.edges if e.kind == "head"]
    for edge in sorted(edges, key=lambda e: -e.weight)[:top]:
        key, query = (int(x.rpartition("@")[2]) for x in (edge.source, edge.target))
        table.add_row(
            str(edge.component), f"{edge.weight:.3f}", f"{edge.signed:+.3f}", Text(f"{route.tokens[key]!r} ({key})"),
            Text(f"{route.tokens[query]!r} ({query})"),
        )  # fmt: skip
    if edges:
        console.print(table)
    else:
        console.print(f"No head has a share above {route.threshold:g} of any state on the route.")
    for neuron in sorted(route.neurons, key=lambda x: -x.weight)[:top]:
        console.print(f"{neuron.component} at {neuron.node}: weight {neuron.weight:.3f}, {neuron.signed:+.3f}")
    if not proved:
        console.print(
            "Weights say what a state is made of, not what happens without it: --prove tests that.", soft_wrap=True
        )


def _show_proof(console: Console, proof: RouteProof) -> None:
    console.print(
        f"{proof.verdict}: {proof.reason} ({proof.n_prompts} prompt{'' if proof.n_prompts == 1 else 's'}, {proof.n_random} random routes each, "
        f"{proof.n_edges:.0f} edges or {proof.share:.2%} kept; without the route {proof.complement:.0%} is left).",
        soft_wrap=True,
        markup=False,
    )
