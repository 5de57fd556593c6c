"""Information-flow routes: which edges carried a prediction, top-down and exact, from one pass."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from headscope.core.errors import NotApplicable, UsageError, nearest
from headscope.model import Model
from headscope.routes.route import Route
from headscope.routes.walk import Goal, Walk

BIASES = ("part", "drop", "heads")


@torch.no_grad()
def routes(
    model: Model,
    prompt: Any,
    *,
    target: str | int | None = None,
    foil: str | int | None = None,
    position: int = -1,
    threshold: float = 0.04,
    biases: str = "part",
    neurons: int = 0,
) -> Route:
    """How one prediction came about: the edges (residual, head × key, MLP) that carried it, from the last layer down.

    Every state of the stream is a sum of parts. A part's weight is its share of the proximity to that sum; parts whose
    share is not above `threshold` are cut, the others' weights are made to sum to 1, and the search goes on from the
    states that are left. Only those states are looked at, and of their parts only those that can matter; the result is
    that of the full definition. Weights are unsigned and say what the state is made of; `signed` says what a part adds
    to the logit of `target` (the model's own prediction by default) minus that of `foil`.

    `prompt`: text or token ids [pos]. `position`: where the prediction is made, negative from the end. `biases`: "part"
    keeps those of an attention apart, "drop" leaves them out, "heads" leaves the value bias in the heads. `neurons`: how
    many of each MLP to name. Ferrando & Voita 2024; Tufanov et al. 2024.

    Norms after a part (Gemma-2, OLMo-2) are taken with the scale they have in this pass. Parallel blocks make one sum.

    Raises UsageError for a bad prompt, token, position or threshold, NotApplicable for models that are no decoders.
    """
    check_options(threshold, biases, neurons)
    tokens = prompt_tokens(model, prompt)
    width = tokens.shape[1]
    if not isinstance(position, Integral) or not -width <= position < width:
        raise UsageError(f"Position {position} does not exist: the prompt has {width} tokens.")
    at = int(position) % width
    check_decoder(model, "Routes")
    walk = Walk(model, tokens, at, threshold, biases, neurons)
    goal = _goal(model, walk.run.logits[0, 0], target, foil)
    return walk.route(goal)


def check_options(threshold: float, biases: str, neurons: int) -> None:
    """Raise UsageError for options that no route can be read with."""
    if not isinstance(threshold, Real) or not 0 <= threshold < 1:
        raise UsageError(f"The threshold is {threshold}; it is a share, from 0 up to but not 1.")
    if biases not in BIASES:
        raise UsageError(f"biases is {biases!r}; it takes part, drop or heads.{nearest(str(biases), BIASES)}")
    if not isinstance(neurons, Integral) or neurons < 0:
        raise UsageError(f"neurons is {neurons}; it takes a whole number from 0.")


def check_decoder(model: Model, what: str) -> None:
    """Raise NotApplicable for a model that does not predict next tokens from its last stream."""
    parts = model.anatomy.parts
    if not model.is_causal or parts.unembed is None:
        raise NotApplicable(f"{what} are read in decoders that predict a next token; {model.name} is none.")
    if parts.norm_placement == "post":
        raise NotApplicable(
            f"{what} are read in streams that are sums; {model.name} normalises the stream itself after every part."
        )


def prompt_tokens(model: Model, prompt: Any) -> Tensor:
    """Token ids [1, pos] of one prompt, given as text or ids. Raises UsageError where there are several."""
    tokens, mask = model.tokens(prompt)
    if tokens.shape[0] != 1 or not bool(mask.all()):
        raise UsageError(f"This takes one prompt, but got {tokens.shape[0]}.")
    return tokens


def _goal(model: Model, logits: Tensor, target: str | int | None, foil: str | int | None) -> Goal:
    t = int(logits.argmax()) if target is None else token_id(model, target)
    f = None if foil is None else token_id(model, foil)
    if t == f:
        raise UsageError(
            f"Target and foil are both {model.word(t)!r}, so that nothing tells them apart; take another foil."
        )
    return Goal(t, f, float(logits[t] - (0.0 if f is None else logits[f])))


def token_id(model: Model, token: str | int) -> int:
    """The id of a token given as text or as an id. Raises UsageError where it is no single token."""
    if isinstance(token, Integral) and not isinstance(token, bool):
        token = int(token)
        if not 0 <= token < model.n_vocab:
            raise UsageError(f"Token {token} does not exist: {model.name} has tokens 0 to {model.n_vocab - 1}.")
        return token
    if not isinstance(token, str) or not token:
        raise UsageError(f"A token is given as text, such as ' Paris', or as its id, but this is {token!r}.")
    if model.tokenizer is None:
        raise NotApplicable(f"{model.name} was loaded without a tokenizer; give target and foil as token ids.")
    ids = model.tokenizer(token, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        pieces = model.words(ids)
        hint = "" if token.startswith(" ") else f" Mind the space in front: {' ' + token!r}."
        raise UsageError(f"{token!r} must be one token of {model.name}, but it is {pieces}.{hint}")
    return int(ids[0])
