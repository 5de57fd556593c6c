"""What the model says about one prompt: next tokens, the logit lens, routes, what a state or a neuron promotes.

All of it is read from one pass, which is kept for the next question about the same tokens.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headscope.app import look
from headscope.core.errors import NotApplicable, UsageError
from headscope.model.frozen import freeze
from headscope.routes.extract import BIASES, check_decoder, token_id
from headscope.routes.logit_lens import rank_of, read_lens, unembed
from headscope.routes.neuronpedia import attribution_graph
from headscope.routes.walk import Goal, Walk
from headscope.trace import trace

if TYPE_CHECKING:
    from headscope.model import Model
    from headscope.routes.logit_lens import Lens
    from headscope.routes.route import Route

#: below this, routes of a long prompt have more edges than anybody can look at
LEAST_THRESHOLD = 0.005
#: a walk that takes longer than so many seconds is given up, since others wait for the model
MOST_WALK_SECONDS = 100.0
#: columns of the lens that are read at once: each costs one unembedding a layer
MOST_COLUMNS = 64


@dataclass(frozen=True)
class Question:
    """A prediction to be explained. `more`: ids of tokens that were added to the prompt one by one. `position`: where it
    is made, None for the last. `target`, `foil`: token ids; None for the model's best and the next best, -1 for no foil.
    """

    prompt: str
    more: tuple[int, ...] = ()
    position: int | None = None
    target: int | None = None
    foil: int | None = None
    threshold: float = 0.04
    biases: str = "part"

    def __post_init__(self) -> None:
        if not LEAST_THRESHOLD <= self.threshold < 1:
            raise UsageError(f"The threshold is {self.threshold:g}; this page takes {LEAST_THRESHOLD:g} up to below 1.")
        if self.biases not in BIASES:
            raise UsageError(f"biases is {self.biases!r}; it takes part, drop or heads.")


def read(model: Model, prompt: str, more: tuple[int, ...], most: int) -> Tensor:
    """Token ids [1, pos] of a prompt and the tokens added to it. Raises UsageError where it is too long."""
    ids = look.read(model, prompt, most)
    if more:
        added = torch.tensor([[token_id(model, i) for i in more]], device=ids.device)
        ids, _ = model.tokens(torch.cat([ids, added], 1))
    if ids.shape[1] > most:
        raise UsageError(f"The prompt has {ids.shape[1]} tokens; this page shows at most {most}.")
    return ids


@dataclass(eq=False)
class _Walk(Walk):
    until: float = float("inf")
    #: raises where nobody waits for the answer any more
    check: Callable[[], None] = lambda: None

    def into(self, layer: int, rows: Tensor) -> Tensor:
        self.check()
        if time.monotonic() > self.until:
            raise NotApplicable(
                f"The route was not found within {MOST_WALK_SECONDS:.0f} s; raise the threshold or take a shorter prompt."
            )
        return super().into(layer, rows)


@dataclass(eq=False)
class Seen:
    """One prompt and the pass over it. `logits`: those [vocab] of the positions that were asked about."""

    walk: _Walk
    logits: dict[int, Tensor]

    @property
    def model(self) -> Model:
        """The model."""
        return self.walk.model

    @property
    def width(self) -> int:
        """Tokens of the prompt."""
        return int(self.walk.tokens.shape[1])

    def at(self, position: int | None) -> int:
        """A position of the prompt, the last one for None."""
        found = self.width - 1 if position is None else position
        if not 0 <= found < self.width:
            raise UsageError(f"Position {position} does not exist: the prompt has positions 0 to {self.width - 1}.")
        return found

    def next(self, position: int) -> Tensor:
        """Logits [vocab] of the token after a position."""
        if position not in self.logits:
            at = torch.tensor([[position]], device=self.walk.tokens.device)
            self.logits[position] = trace(self.model, self.walk.tokens, logits=at).logits[0, 0]
        return self.logits[position]

    def goal(self, question: Question) -> Goal:
        """What is to be explained, with the model's own two best tokens where nothing else was asked for."""
        logits = self.next(self.at(question.position))
        best = logits.topk(min(2, len(logits))).indices.tolist()
        target = best[0] if question.target is None else token_id(self.model, question.target)
        foil = question.foil
        if foil is None:
            foil = next((i for i in best if i != target), None)
        elif foil == -1:
            foil = None
        else:
            foil = token_id(self.model, foil)
        return Goal(target, foil, float(logits[target] - (0.0 if foil is None else logits[foil])))

    def fresh(self, question: Question, *, neurons: int = 0) -> _Walk:
        """A walk that has not begun, over the pass that is there."""
        walk = copy.copy(self.walk)
        walk.at, walk.threshold, walk.biases = self.at(question.position), question.threshold, question.biases
        walk.edges, walk.neurons, walk.parts, walk.evaluated, walk.n_neurons = [], [], 0, 0, neurons
        walk.until = time.monotonic() + MOST_WALK_SECONDS
        return walk

    def lens(self, target: int, start: int, stop: int, k: int = 5) -> Lens:
        """As `hs.lens`, over the pass that is there, and at most MOST_COLUMNS positions."""
        run, n = self.walk.run, self.model.anatomy.n_layers

        def streams() -> Iterator[Tensor]:
            for i in range(n + 1):
                self.walk.check()
                yield run["resid_pre", i] if i < n else run["resid_post", n - 1]

        stop = stop if stop > self.width else min(stop, start + MOST_COLUMNS)
        return read_lens(self.model, self.walk.tokens[0].tolist(), streams(), target, start, stop, k)

    def state(self, node: str) -> tuple[Tensor, str | None]:
        """The stream [d_model] at a node such as L5A@3, and the node below it. Raises UsageError for another name."""
        run, anatomy = self.walk.run, self.model.anatomy
        what, _, number = node.partition("@")
        layer = what[1:].removesuffix("A")
        if not number.isdecimal() or not (what == "E" or (what[:1] == "L" and layer.isdecimal())):
            raise UsageError(f"{node!r} is no state of the stream; they are named like E@0, L5A@3 and L5@3.")
        p = self.at(int(number))
        if what == "E":
            return run["resid_pre", 0][0, p], None
        i, last = int(layer), anatomy.n_layers - 1
        if i > last:
            raise UsageError(f"{node} does not exist: this model has layers 0 to {last}.")
        below = "E" if i == 0 else f"L{i - 1}"
        split = not anatomy.parts.parallel and anatomy.blocks[i].mlp_out is not None
        if what.endswith("A"):
            if not split:
                raise UsageError(f"{node} does not exist: this model's blocks have no stream between their parts.")
            return run["resid_pre", i][0, p] + run["attn_out", i][0, p], f"{below}@{p}"
        x = run["resid_post", last][0, p] if i == last else run["resid_pre", i + 1][0, p]
        return x, f"L{i}A@{p}" if split else f"{below}@{p}"


class Desk:
    """The last prompt that was looked at; only the thread of the queue may use it. `check` is called between the steps of
    what takes long, and may stop it.
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self._seen: Seen | None = None
        self._check = check

    @torch.no_grad()
    def see(self, model: Model, ids: Tensor) -> Seen:
        """The pass over these tokens, which may be there already."""
        check_decoder(model, "Next tokens")
        seen = self._seen
        if seen is None or seen.model is not model or not torch.equal(seen.walk.tokens, ids):
            self._seen = None  # its memory is free for the next one
            walk = _Walk(model, ids, ids.shape[1] - 1, 0.04, "part", 0, check=self._check)
            self._seen = seen = Seen(walk, {walk.at: walk.run.logits[0, 0]})
        return seen


@torch.no_grad()
def predicted(seen: Seen, question: Question, k: int = 20) -> dict[str, Any]:
    """The tokens, what comes next with which probability, and the target and foil that are meant."""
    at, goal = seen.at(question.position), seen.goal(question)
    logits = seen.next(at).float()
    probs = logits.softmax(-1)
    best = probs.topk(min(k, len(probs)))

    def row(i: int) -> dict[str, Any]:
        return {
            "id": i, "token": seen.model.word(i), "p": float(probs[i]), "rank": int(rank_of(logits, i)),
        }  # fmt: skip

    more = seen.walk.tokens[0, seen.width - len(question.more) :]
    return {
        "tokens": seen.model.words(seen.walk.tokens[0]),
        "text": question.prompt + (seen.model.text(more) if question.more else ""),
        "position": at,
        "next": [row(i) for i in best.indices.tolist()],
        "target": row(goal.target),
        "foil": None if goal.foil is None else row(goal.foil),
        "difference": goal.logit,
        "layers": seen.model.anatomy.n_layers,
    }


@torch.no_grad()
def lens(seen: Seen, question: Question, start: int, stop: int, k: int = 5) -> dict[str, Any]:
    """What each layer would say next at positions `start` to `stop`, if its stream were the last.

    `levels`: E and the layers, from below; `top` and `p` [level × pos × k], `rank` and `target_p` [level × pos] of the
    target, as flat lists; `words`: the text of each id.
    """
    found = seen.lens(seen.goal(question).target, start, stop, k)
    flat = {name: getattr(found, name).flatten().tolist() for name in ("top", "p", "rank", "target_p")}
    return {
        "start": start, "stop": found.stop, "k": found.top.shape[-1], "levels": found.levels, "target": found.target_id,
        "words": found.words, **flat,
    }  # fmt: skip


@torch.no_grad()
def route(seen: Seen, question: Question) -> Route:
    """As `hs.routes`, over the pass that is there."""
    return seen.fresh(question).route(seen.goal(question))


def drawn(found: Route) -> dict[str, Any]:
    """A route as the page draws it: its document without what the page knows already."""
    document = found.document()
    return {key: document[key] for key in document if key not in ("token_ids", "prompt")}


@torch.no_grad()
def state(seen: Seen, question: Question, node: str, k: int = 12) -> dict[str, Any]:
    """The best next tokens at a state of the stream with their ranks in the state below it, and what came in between."""
    model = seen.model
    x, below = seen.state(node)
    goal = seen.goal(question)
    here = unembed(model, x[None])[0].float()
    probs = here.softmax(-1)
    under = None if below is None else unembed(model, seen.state(below)[0][None])[0].float()

    def row(i: int) -> dict[str, Any]:
        return {
            "id": i, "token": model.word(i), "p": float(probs[i]), "rank": int(rank_of(here, i)),
            "below": None if under is None else int(rank_of(under, i)),
        }  # fmt: skip

    changed: dict[str, Any] = {"promoted": [], "suppressed": []}
    if below is not None:
        changed = _direct(seen, (x - seen.state(below)[0])[None], int(node.rpartition("@")[2]))[0]
    return {
        "node": node, "below": below, "top": [row(i) for i in probs.topk(min(k, len(probs))).indices.tolist()],
        "target": row(goal.target), "foil": None if goal.foil is None else row(goal.foil), **changed,
    }  # fmt: skip


@torch.no_grad()
def neurons(seen: Seen, question: Question, layer: int, position: int, k: int = 12) -> dict[str, Any]:
    """The neurons with the largest shares of what an MLP wrote at a position, as `hs.routes(neurons=k)` has them, and the
    tokens that each raises and lowers directly.
    """
    model = seen.model
    if not 0 <= layer < model.anatomy.n_layers:
        raise UsageError(f"L{layer}MLP does not exist: this model has layers 0 to {model.anatomy.n_layers - 1}.")
    walk, goal = seen.fresh(question, neurons=k), seen.goal(question)
    walk.aim(goal.target, goal.foil)
    walk.into(layer, torch.tensor([seen.at(position)], device=walk.tokens.device))
    if not walk.neurons:
        raise UsageError(f"L{layer}MLP@{position} is not on the route at a threshold of {question.threshold:g}.")
    rows: list[dict[str, Any]] = [
        {"component": n.component, "weight": n.weight, "signed": n.signed, "activation": n.activation}
        for n in walk.neurons
    ]
    block = model.anatomy.blocks[layer]
    if block.down is not None and block.post_mlp is None:  # otherwise a neuron's own row is not what it writes
        index = [int(n.component.rpartition("N")[2]) for n in walk.neurons]
        activation = torch.tensor([n.activation for n in walk.neurons], device=model.device, dtype=model.dtype)
        vectors = activation[:, None] * model.anatomy.W_out(layer)[index]
        for row, tokens in zip(rows, _direct(seen, vectors, position, 4), strict=True):
            row |= tokens
    return {"node": f"L{layer}MLP@{position}", "neurons": rows}


def _direct(seen: Seen, vectors: Tensor, position: int, k: int = 8) -> list[dict[str, Any]]:
    """The tokens whose logits vectors [n, d_model] in the stream at a position raise and lower most, relative to the mean
    over the vocabulary, with the final norm's scale as it is there.
    """
    model = seen.model
    a = model.anatomy
    frozen = freeze(a.final_norm, seen.walk.run["resid_post", a.n_layers - 1][0, position][None])
    if frozen is not None:
        vectors = frozen.through(vectors, torch.zeros(len(vectors), dtype=torch.long, device=vectors.device))
    logits = (vectors @ a.W_U).float()
    return [look.ranked(model, values, k) for values in logits - logits.mean(-1, keepdim=True)]


def neuronpedia(found: Route) -> dict[str, str]:
    """A route as a file that Neuronpedia reads."""
    text = json.dumps(attribution_graph(found), indent=1, ensure_ascii=False)
    return {"name": "route.neuronpedia.json", "text": text}
