"""One layer of a finished pass once more, to look into it without keeping all layers' insides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headscope.model import Model
from headscope.trace.hooks import INSIDE, Capture, Pass


class _Seen(Exception):
    """Everything that was asked of a layer has been seen."""


def _stop(*_: Any) -> None:
    raise _Seen


@dataclass(eq=False)
class Calls:
    """What each layer was called with in one pass: masks, positions and the like; not the stream itself."""

    model: Model
    made: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    @torch.no_grad()
    def again(
        self, layer: int, resid_pre: Tensor, captures: Iterable[Capture], queries: Tensor | None = None
    ) -> dict[str, Any]:
        """What `captures` keep of a layer, site → value, for the stream [batch, pos, d_model] that it was given.

        `queries` [n]: the only ones whose attn_scores and pattern are formed, all by default.
        """
        working = Pass(self.model, list(captures), [], queries=queries)
        working.where.note((resid_pre.shape[0], resid_pre.shape[1]))
        args, kwargs = self.made[layer]
        if "hidden_states" in kwargs:
            kwargs = {**kwargs, "hidden_states": resid_pre}
        else:
            args = (resid_pre, *args[1:])
        part = self.model.anatomy.blocks[layer]
        with working.installed(), ExitStack() as stack:
            if {capture.site for capture in working.captures} <= INSIDE:
                handle = part.attn.register_forward_hook(_stop)
                stack.callback(handle.remove)
                stack.enter_context(suppress(_Seen))
            part.block(*args, **kwargs)
        return {site: layers[layer] for site, layers in working.stored.items()}


@contextmanager
def recording(model: Model) -> Iterator[Calls]:
    """While the block runs, note what a pass calls each layer with."""
    calls = Calls(model)

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # some layers add to the stream in place: what stands there after the pass is not what they were given
        kept = {key: None if key == "hidden_states" else value for key, value in kwargs.items()}
        calls.made.append(((None, *args[1:]) if args else (), kept))

    handles = [part.block.register_forward_pre_hook(note, with_kwargs=True) for part in model.anatomy.blocks]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
