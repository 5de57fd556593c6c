"""What an edit costs in a sweep, against one pass an edit and against other tools."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import headscope as hs
from benchmarks.common import MODEL, Result, interleaved, median_ratio
from benchmarks.peers.client import Peers
from headscope.core.scores import agree
from headscope.sweep import make_job
from headscope.trace import Edit

Head = tuple[int, int]
Values = list[list[float]]


def metric(logits: Tensor) -> Tensor:
    """Log-probability of one token at the last position."""
    return logits[:, -1].log_softmax(-1)[:, 1000]


def random_tokens(model: hs.Model, batch: int, length: int) -> Tensor:
    """[batch, length] token ids, the same in every run."""
    return torch.randint(1000, model.n_vocab, (batch, length), generator=torch.Generator().manual_seed(0))


def every(model: hs.Model, step: int) -> list[Head]:
    """Every `step`-th head, from the middle of the first step on: as many low as high layers."""
    n = model.anatomy.n_heads
    return [divmod(i, n) for i in range(step // 2, model.anatomy.n_layers * n, step)]


def of_layers(model: hs.Model, layers: Iterable[int]) -> list[Head]:
    """All heads of some layers."""
    return [(layer, head) for layer in layers for head in range(model.anatomy.n_heads)]


def zero(head: Head, position: int | None = None) -> Edit:
    """The edit that all tools here make."""
    return hs.zero(f"L{head[0]}H{head[1]}", **({} if position is None else {"positions": position}))


@torch.no_grad()
def loop(
    model: hs.Model, tokens: Tensor, heads: Sequence[Head], position: int | None = None, **kwargs: Any
) -> list[list[float]]:
    """What one writes by hand: a hook and a pass for each head."""
    d_head, values = model.anatomy.d_head, []
    at = slice(None) if position is None else position
    for layer, head in heads:

        def change(_: Any, args: tuple[Tensor, ...], start: int = head * d_head) -> tuple[Tensor]:
            x = args[0].clone()
            x[:, at, start : start + d_head] = 0
            return (x,)

        handle = model.anatomy.blocks[layer].o.register_forward_pre_hook(change)
        try:
            values.append(metric(model.hf(input_ids=tokens, use_cache=False, **kwargs).logits).tolist())
        finally:
            handle.remove()
    return values


def swept(model: hs.Model, tokens: Tensor, edits: Sequence[Edit]) -> Values:
    """The same by a sweep."""
    values: Values = hs.sweep(model, tokens, edits, metric).values.tolist()
    return values


class Timings:
    """Seconds an edit of variants that run in turn, and how far their values are apart."""

    def __init__(self) -> None:
        self.runs: dict[str, list[float]] = {}
        self.ratio: dict[str, tuple[float, float, float]] = {}
        self.apart: dict[str, float] = {}

    def add(self, rounds: int, variants: Mapping[str, tuple[int, Callable[[], object]]]) -> None:
        """Time variants, each with the number of edits that it makes."""
        found = interleaved({label: call for label, (_, call) in variants.items()}, rounds, warm_up=0)
        self.runs |= {label: [x / variants[label][0] for x in seconds] for label, seconds in found.items()}

    def faster(self, ours: str, others: Iterable[str]) -> list[str]:
        """How many times longer the others take; the labels of these ratios."""
        labels = {f"{other} / {ours}": other for other in others}
        self.ratio |= {label: median_ratio(self.runs, other, ours) for label, other in labels.items()}
        return list(labels)

    def compare(self, label: str, values: Values, reference: Values) -> None:
        """Keep the largest difference of two sets of values."""
        self.apart[label] = float((torch.tensor(values) - torch.tensor(reference)).abs().max())

    @property
    def note(self) -> str:
        """The differences in words."""
        return ", ".join(f"{label} {value:.1e}" for label, value in self.apart.items())


def measure(threads: int) -> list[Result]:
    """The sweep of all heads, its growth with the prompts' length, and the estimate by one backward pass."""
    torch.set_num_threads(threads)
    model = hs.load(MODEL)
    peers = Peers(threads)
    try:
        found = _heads(model, peers)
    finally:
        peers.close()
    return [found, _attribution(model), _growth(model), _more_edits(model)]


def _heads(model: hs.Model, peers: Peers) -> Result:
    timings = Timings()
    at_least: dict[str, float] = {}
    target: dict[str, float] = {}
    for batch, length, rounds, step, factors in (
        (4, 64, 3, 54, {"hook loop": 2.5, "one logit": 1.8, "TransformerLens": 2.5, "nnsight batched": 2.0}),
        (1, 16, 5, 10, {"hook loop": 6.0, "TransformerLens": 6.0, "nnsight": 6.0, "nnsight batched": 2.0}),
    ):
        efficiency = _all_positions(model, peers, timings, batch, length, rounds, every(model, step))
        wanted = {f"{batch}×{length} {name} / {batch}×{length} headscope": x for name, x in factors.items()}
        at_least |= {label: x for label, x in wanted.items() if label in timings.ratio}
        if length == 64:
            target[efficiency] = 1.2
    at_least |= _some_positions(model, timings)
    what = (
        f"Seconds an edit while every one of the {model.anatomy.n_layers * model.anatomy.n_heads} heads of {MODEL} "
        "(float32, sdpa) is zeroed in turn and the log-probability of a token at the last position is read: one call of "
        "`sweep` against a hook and a pass for each head, with all logits or only the last (one logit), and against other "
        "tools as their documentation does it. All take the same random tokens and use no cache. 'last' zeroes a head at "
        "the last position only, 'each' at one position after the other. 'headscope / least work' is the time against "
        "that of the token·layers which the plan leaves, at the speed of a plain pass (one logit) over the batch size "
        "that is best for it."
    )
    note = (
        "headscope sweeps all heads; one-by-one variants run every 54th head (1×16: every 10th), also for "
        "'last' and 'each', and nnsight batched has these heads as invokes of one pass. 'each' sweeps all heads of layers "
        "5, 14 and 24 at positions 7, 23, 39 and 55, which is the mean work. Largest difference of the values from the "
        f"hook loop's: {timings.note}. {peers.note}"
    )
    return Result("sweep", what, "s", timings.runs, target, timings.ratio, note, at_least)


def _all_positions(
    model: hs.Model, peers: Peers, timings: Timings, batch: int, length: int, rounds: int, sample: list[Head]
) -> str:
    """Zero heads at all positions; the label of the ratio to the least work."""
    tokens, heads = random_tokens(model, batch, length), of_layers(model, range(model.anatomy.n_layers))
    shape, n, edits = f"{batch}×{length}", len(sample), [zero(head) for head in heads]
    ours = f"{shape} headscope"
    by_one: dict[str, Callable[[], Values]] = {
        "hook loop": lambda: loop(model, tokens, sample),
        "one logit": lambda: loop(model, tokens, sample, logits_to_keep=1),
        **{tool: lambda tool=tool: peers.run(tool, tokens, sample) for tool in peers.tools},  # type: ignore[misc]
    }
    others = {f"{shape} {name}": (n, call) for name, call in by_one.items()}
    # a plain pass over several copies of the prompts at once: the most that the machine gives
    copies = [x // tokens.numel() for x in (256, 512, 1024, 2048)]
    tiled = {f"{shape} plain, {x} at once": tokens.repeat(x, 1) for x in copies}
    plain = {label: (len(x) // batch, lambda x=x: loop_free(model, x)) for label, x in tiled.items()}
    found = {label: call() for label, (_, call) in others.items()}  # warms up as well
    reference = found[f"{shape} hook loop"]
    for label, values in found.items():
        timings.compare(label, values, reference)
    timings.compare(ours, swept(model, tokens, [zero(head) for head in sample]), reference)
    timings.add(rounds, {ours: (len(edits), lambda: swept(model, tokens, edits)), **others, **plain})
    timings.faster(ours, others)
    best = min(plain, key=lambda label: statistics.median(timings.runs[label]))
    plan = make_job(model, tokens, edits, metric).plan()
    label = f"{ours} / least work"
    share = plan.work / plan.plain
    value, low, high = median_ratio(timings.runs, ours, best)
    timings.ratio[label] = (value / share, low / share, high / share)
    return label


@torch.no_grad()
def loop_free(model: hs.Model, tokens: Tensor) -> None:
    """One plain pass with the logits of the last position."""
    model.hf(input_ids=tokens, use_cache=False, logits_to_keep=1)


def _some_positions(model: hs.Model, timings: Timings) -> dict[str, float]:
    tokens, sample = random_tokens(model, 4, 64), every(model, 54)
    heads = of_layers(model, range(model.anatomy.n_layers))
    last = [zero(head, 63) for head in heads]
    each = [zero(head, p) for head in of_layers(model, (5, 14, 24)) for p in (7, 23, 39, 55)]
    for name, position in (("last", 63), ("each", 23)):
        ours = swept(model, tokens, [zero(head, position) for head in sample])
        timings.compare(f"4×64 {name} headscope", ours, loop(model, tokens, sample, position))
    variants = {
        "4×64 last headscope": (len(last), lambda: swept(model, tokens, last)),
        "4×64 last hook loop": (len(sample), lambda: loop(model, tokens, sample, 63)),
        "4×64 each headscope": (len(each), lambda: swept(model, tokens, each)),
        "4×64 each hook loop": (len(sample), lambda: loop(model, tokens, sample, 23)),
    }
    timings.add(3, variants)
    (label_last,) = timings.faster("4×64 last headscope", ["4×64 last hook loop"])
    (label_each,) = timings.faster("4×64 each headscope", ["4×64 each hook loop"])
    return {label_last: 40.0, label_each: 4.0}


def _attribution(model: hs.Model) -> Result:
    prompts = hs.tasks.make("ioi", model, n=8, seed=0)

    @torch.no_grad()
    def plain() -> object:
        return model.hf(input_ids=prompts.tokens, use_cache=False)

    variants = {"attribution patching": lambda: hs.attribution_patching(model, prompts), "plain": plain}
    runs = interleaved(variants, 9)
    label = "attribution patching / plain"
    exact, estimate = hs.patching(model, prompts), hs.attribution_patching(model, prompts)
    found = agree(estimate.effect, exact.effect)
    what = (
        f"Attribution patching of all heads of {MODEL} on {len(prompts.tokens)} ioi pairs of {prompts.tokens.shape[1]} "
        "tokens, in plain forward passes over the clean prompts (all logits, no cache)."
    )
    note = (
        f"Against the exact sweep over the same pairs: rank correlation {found['spearman']:.2f} over {found['n']:.0f} "
        f"heads, {10 * found['overlap_top']:.0f} of the top 10 shared."
    )
    return Result("sweep-attribution", what, "s", runs, {label: 3.5}, {label: median_ratio(runs, *variants)}, note)


def _growth(model: hs.Model) -> Result:
    timings = Timings()
    few, part = every(model, 27), of_layers(model, range(2, model.anatomy.n_layers, 5))
    for length, rounds, heads in ((64, 3, part), (256, 2, part), (1024, 2, few), (2048, 2, few)):
        tokens, edits = random_tokens(model, 1, length), [zero(head) for head in heads]
        sample = every(model, 90)
        swept(model, tokens, edits[:1])
        ours, other = f"1×{length} headscope", f"1×{length} hook loop"
        variants = {
            ours: (len(edits), lambda tokens=tokens, edits=edits: swept(model, tokens, edits)),
            other: (len(sample), lambda tokens=tokens, sample=sample: loop(model, tokens, sample)),
        }
        timings.add(rounds, variants)
        timings.faster(ours, [other])
    what = (
        "Seconds a head, zeroed at all positions as in `sweep`, as one prompt grows: headscope for all heads of every "
        "fifth layer (from 1×1024 on: every 27th head), the loop of hooks for three heads, from which it does not depend."
    )
    return Result("sweep-growth", what, "s", timings.runs, {}, timings.ratio)


def _more_edits(model: hs.Model) -> Result:
    tokens, timings, apart = random_tokens(model, 4, 64), Timings(), []
    labels = {}
    for step in (270, 54, 18, 6):
        edits = [zero(head) for head in every(model, step)]
        labels[f"{len(edits)} edits"] = edits
        apart.append(f"{len(edits)}: {_flops(model, tokens, edits):.3f}")
    variants = {label: (len(edits), lambda edits=edits: swept(model, tokens, edits)) for label, edits in labels.items()}
    timings.add(3, variants)
    *fewer, most = variants
    timings.faster(most, fewer)
    what = "Seconds an edit as the edits of one sweep (heads of all layers zeroed, 4×64 tokens, as in `sweep`) grow in number."
    note = (
        "Multiplications and additions, counted by torch while the sweep runs, over those of the cost model "
        f"(docs/scaling.md), by the number of edits: {', '.join(apart)}."
    )
    return Result("sweep-edits", what, "s", timings.runs, {}, timings.ratio, note)


def _flops(model: hs.Model, tokens: Tensor, edits: Sequence[Edit]) -> float:
    """Counted over modelled operations: token·layers of the plan and of the clean pass, unembedding where it is read."""
    with FlopCounterMode(display=False) as counted:
        swept(model, tokens, edits)
    plan = make_job(model, tokens, edits, metric).plan()
    of_a_layer = sum(p.numel() for p in model.anatomy.blocks[0].block.parameters())
    unembedded = tokens.shape[0] * (1 + len(edits))
    layers = plan.work + tokens.numel() * model.anatomy.n_layers
    return counted.get_total_flops() / (2 * (layers * of_a_layer + unembedded * model.n_vocab * model.anatomy.d_model))
