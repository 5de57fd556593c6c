"""Plain hooks on the tiny Llama's own modules: what every edit must equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from headscope.model import Model
from headscope.tasks import Prompts

Change = Callable[[Tensor], Tensor]
D_HEAD = 8
#: paths of two projections of layer 1
O1, DOWN1 = "model.layers.1.self_attn.o_proj", "model.layers.1.mlp.down_proj"


@contextmanager
def hooked(model: Model, path: str, change: Change, *, output: bool = False) -> Iterator[None]:
    """While the block runs, the input (or output) of the module at `path` is what `change` makes of a copy of it."""
    module = model.hf.get_submodule(path)

    def before(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (change(args[0].clone()), *args[1:])

    def after(_: Any, args: Any, made: Tensor) -> Tensor:
        return change(made.clone())

    handle = module.register_forward_hook(after) if output else module.register_forward_pre_hook(before)
    try:
        yield
    finally:
        handle.remove()


def plain(model: Model, **kwargs: Any) -> Tensor:
    """Logits of the Hugging Face module as it is."""
    with torch.no_grad():
        return model.hf(**kwargs).logits  # type: ignore[no-any-return]


def head(index: int) -> slice:
    """Columns of a head in a projection's input or output."""
    return slice(index * D_HEAD, (index + 1) * D_HEAD)


def setting(columns: slice, make: Change, rows: Any = slice(None), positions: Any = slice(None)) -> Change:
    """A change of some columns of [batch, pos, columns], at some rows and positions."""

    def change(x: Tensor) -> Tensor:
        made = make(x[..., columns])
        keep = torch.zeros(x.shape[:2], dtype=torch.bool)
        block = torch.zeros_like(keep)
        block[:, positions] = True
        keep[rows] = block[rows]
        x[..., columns] = torch.where(keep[..., None], made, x[..., columns])
        return x

    return change


def some_tokens(batch: int = 3, width: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(5, 96, (batch, width), generator=torch.Generator().manual_seed(seed))


def some_vector(size: int, seed: int = 3) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def padded_prompts() -> Prompts:
    tokens = some_tokens(2)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, :4] = False
    at = torch.full((2, 1), 8)
    return Prompts(name="t", seed=0, tokens=tokens, positions=at, target=tokens[:, -1:], mask=mask)


def state_of(model: Model) -> tuple[int, list[Any]]:
    """Hooks on the model, and modes of torch: what an edit must leave as it was."""
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.hf.modules())
    return hooks, torch.overrides._get_current_function_mode_stack()
