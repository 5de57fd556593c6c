"""Run only the layers that an edit can change: those below it give back what they gave in the clean pass.

The model's own forward runs as always; only its lower layers answer from memory. So whatever stands around the layers
(embeddings, masks, final norm, scaling of logits) is the model's own in every family.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from headscope.model import Model
from headscope.trace.edit import Edit
from headscope.trace.run import prepare


def record(model: Model, inputs: Any) -> list[Any]:
    """What each layer gives in a clean pass over `inputs`, as the layer gives it (a tensor or a tuple)."""
    outputs: list[Any] = []
    hooks = [
        part.block.register_forward_hook(lambda _, args, output: outputs.append(output))
        for part in model.anatomy.blocks
    ]
    unembed = model.anatomy.parts.unembed
    if unembed is not None:  # no logits are wanted here
        hooks.append(unembed.register_forward_pre_hook(lambda _, args: (args[0][:, :0],)))
    try:
        with torch.no_grad():
            model.hf(**prepare(model, inputs)[2])
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


def first_layer(model: Model, edits: Iterable[Edit]) -> int:
    """The lowest layer that the edits touch; the number of layers where there are none."""
    return min((c.layer for edit in edits for c in edit.components), default=model.anatomy.n_layers)


@contextmanager
def skipping(model: Model, recorded: list[Any], below: int) -> Iterator[None]:
    """While the block runs, layers under `below` answer from memory; each instance is restored on exit.

    Only for the inputs that were recorded, and for edits in layers from `below` on.
    """
    blocks = [part.block for part in model.anatomy.blocks[:below]]
    before = [block.__dict__.get("forward") for block in blocks]
    try:
        for block, output in zip(blocks, recorded, strict=False):
            block.forward = lambda *args, _output=output, **kwargs: _fresh(_output)
        yield
    finally:
        for block, old in zip(blocks, before, strict=True):
            if old is None:
                del block.__dict__["forward"]
            else:
                block.forward = old


def _fresh(output: Any) -> Any:
    """A copy, so that a layer that works in place on its input leaves the memory as it was."""
    return output.clone() if isinstance(output, Tensor) else (output[0].clone(), *output[1:])
