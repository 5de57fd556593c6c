"""Run only what an edit can change: the layers from the edited one on, and the positions from the edited one on.

The model's own forward runs as always. Many sets of edits go through one pass, one after the other along the batch; a
set joins at the first layer that it touches, with what the layer below gave in a clean pass, and earlier positions stand
in the key-value cache with their clean keys and values. So whatever stands around the layers (embeddings, masks, final
norm, scaling of logits) is the model's own in every family.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headscope.core.errors import NotApplicable, UsageError
from headscope.model import Model
from headscope.model.discover import first_tensor, uncompiled
from headscope.trace.edit import Edit
from headscope.trace.hooks import Pass
from headscope.trace.run import arguments, call_arguments, narrowed, prepare


@dataclass(eq=False)
class Clean:
    """What one clean pass gave.

    `outputs`: of each layer, as the layer gives it (a tensor or a tuple). `keys`: of each layer keys and values
    [batch, kv_head, pos, d_head], or None where the model cannot go on from them. `logits` [batch, m, vocab] at the
    positions asked for. `sizes`: the first axis of what the first layer is given, by place or name.
    """

    tokens: Tensor
    mask: Tensor | None
    outputs: list[Any]
    keys: list[tuple[Tensor, Tensor]] | None
    logits: Tensor
    sizes: dict[int | str, Any]

    @property
    def pads(self) -> Tensor:
        """[batch]: number of padding columns on the left."""
        if self.mask is None:
            return torch.zeros(len(self.tokens), dtype=torch.long)
        return self.mask.long().argmax(1).cpu()


@torch.no_grad()
def record(model: Model, inputs: Any, positions: Tensor) -> Clean:
    """A clean pass over `inputs` that keeps what edited passes start from; `positions` [batch, m] as in `trace`."""
    tokens, mask, kwargs = prepare(model, inputs)
    if tokens is None:
        raise UsageError("Sweeps take Prompts or token ids [batch, pos].")
    outputs: list[Any] = []
    hooks = [
        part.block.register_forward_hook(lambda _, args, output: outputs.append(output))
        for part in model.anatomy.blocks
    ]
    sizes: dict[int | str, Any] = {}

    def measure(_: Any, args: Any, kwargs: Any) -> None:
        sizes.update({key: _size(x) for key, x in [*enumerate(args), *kwargs.items()]})

    hooks.append(model.anatomy.blocks[0].block.register_forward_pre_hook(measure, with_kwargs=True))
    name = _cache_name(model) if model.is_causal else None
    if name is not None:
        from transformers.cache_utils import DynamicCache

        # without a configuration it keeps every position, also of layers that look back through a window only
        kwargs = {**kwargs, name: DynamicCache(), "use_cache": True}
    try:
        with narrowed(model, mask, positions), uncompiled(model.hf):
            output = model.hf(**kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    if getattr(output, "logits", None) is None:
        raise NotApplicable(f"{model.name} gives no logits; sweeps need a language-model head.")
    padded = None if mask is None or bool(mask.all()) else mask
    keys = None if name is None else _keys(kwargs[name], tokens.shape[1], len(outputs))
    return Clean(tokens, padded, outputs, keys, output.logits, sizes)


def _cache_name(model: Model) -> str | None:
    return next((name for name in ("past_key_values", "cache") if name in arguments(model)), None)


def _keys(cache: Any, width: int, n_layers: int) -> list[tuple[Tensor, Tensor]] | None:
    """The cache's tensors, or None where it does not hold every position of every layer."""
    layers = getattr(cache, "layers", None)
    if layers is None or len(layers) != n_layers:
        return None
    found = [(layer.keys, layer.values) for layer in layers]
    whole = all(isinstance(k, Tensor) and k.ndim == 4 and k.shape[2] == width for k, _ in found)
    return found if whole else None


def first_layer(model: Model, edits: Iterable[Edit]) -> int:
    """The lowest layer that the edits touch; the number of layers where there are none."""
    return min((c.layer for edit in edits for c in edit.components), default=model.anatomy.n_layers)


def first_column(clean: Clean, edits: Iterable[Edit]) -> int:
    """The first column of the batch that the edits touch, 0 where they touch all."""
    width = clean.tokens.shape[1]
    columns = [width - 1]
    for edit in edits:
        if not isinstance(edit.positions, tuple):
            return 0
        pads = clean.pads[list(edit.rows)] if edit.rows is not None else clean.pads
        columns.append(min(edit.positions) + int(pads.min()))
    return min(columns)


def check_sets(clean: Clean, sets: Iterable[list[Edit]]) -> None:
    """Raise UsageError for positions and rows that the prompts do not have, as a plain pass would."""
    length = clean.tokens.shape[1] - int(clean.pads.min())
    for edit in (edit for edits in sets for edit in edits):
        if isinstance(edit.positions, tuple) and max(edit.positions) >= length:
            raise UsageError(f"Position {max(edit.positions)} does not exist: the longest prompt has {length} tokens.")
        if edit.rows is not None and max(edit.rows) >= len(clean.tokens):
            raise UsageError(f"Row {max(edit.rows)} does not exist: the batch has {len(clean.tokens)} rows.")


@torch.no_grad()
def run_sets(
    model: Model, clean: Clean, sets: list[list[Edit]], positions: Tensor, *, layers: list[int], column: int
) -> Tensor:
    """Logits [set, batch, m, vocab] at `positions` under each set of edits, in one pass.

    `layers`: the first layer that each set touches, in ascending order; a set joins the batch there. Columns before
    `column` are taken from the clean pass: no edit may touch them, and no position may stand before it.
    """
    copies, batch = len(sets), len(clean.tokens)
    if clean.keys is None:
        column = 0
    working = Pass(
        model, [], [edit for edits in sets for edit in edits],
        slots=[i for i, edits in enumerate(sets) for _ in edits], rows_a_slot=batch,
    )  # fmt: skip
    working.where.replayed = clean.tokens.shape[1]
    given = call_arguments(model, clean.tokens, clean.mask, column)
    kwargs = {name: _tile(x, copies) if isinstance(x, Tensor) else x for name, x in given.items()}
    # sets that take part in each layer, and after the last one
    joined = [bisect_right(layers, i) for i in range(model.anatomy.n_layers + 1)]
    if column:
        kwargs[str(_cache_name(model))] = _cache(clean, column)
    at = _tile(positions.to(clean.tokens.device) - column, copies)
    with ExitStack() as stack:
        stack.enter_context(working.installed())
        stack.enter_context(_joining(model, clean, working, column, joined))
        stack.enter_context(_last_mlp(model, clean, working, at))
        stack.enter_context(narrowed(model, None, at))
        logits = model.hf(**kwargs).logits
    return logits.unflatten(0, (copies, batch))


def _tile(x: Tensor, copies: int) -> Tensor:
    return x.repeat(copies, *([1] * (x.ndim - 1)))


def _cache(clean: Clean, column: int) -> Any:
    from transformers.cache_utils import DynamicCache, DynamicLayer

    class Shared(DynamicLayer):
        """Clean keys and values of one batch, which every set of edits goes on from; none are kept."""

        def __init__(self, keys: Tensor, values: Tensor) -> None:
            super().__init__()
            self.clean, self.is_initialized = (keys, values), True
            self.dtype, self.device, self.length = keys.dtype, keys.device, keys.shape[2]

        def get_seq_length(self) -> int:
            return self.length

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            self.length += key_states.shape[2]
            return self._after(self.clean[0], key_states), self._after(self.clean[1], value_states)

        @staticmethod
        def _after(old: Tensor, new: Tensor) -> Tensor:
            new = new.unflatten(0, (-1, len(old)))
            return torch.cat([old.expand(len(new), *old.shape), new], 3).flatten(0, 1)

    cache = DynamicCache()
    cache.layers.extend(Shared(k[:, :, :column], v[:, :, :column]) for k, v in clean.keys or ())
    return cache


@contextmanager
def _last_mlp(model: Model, clean: Clean, working: Pass, at: Tensor) -> Iterator[None]:
    """While the block runs, the last layer's MLP computes only the columns `at` [rows, m]: no others are read after it.

    Not where edits look into that MLP, or where the model is not known to mix positions in its attention alone.
    """
    last = model.anatomy.n_layers - 1
    part = model.anatomy.blocks[last]
    inside = any(c.layer == last and c.kind in ("neuron", "mlp", "layer") for e in working.edits for c in e.components)
    if part.mlp is None or part.mlp is part.block or clean.keys is None or inside:
        yield
        return
    module, width = part.mlp, clean.tokens.shape[1]
    forward, before = module.forward, module.__dict__.get("forward")

    def run(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else next(iter(kwargs.values()))
        if x.ndim != 3 or x.shape[1] != width or x.shape[1] <= at.shape[1]:
            return forward(*args, **kwargs)
        index = at[: len(x), :, None].expand(-1, -1, x.shape[2])

        def few(value: Any) -> Any:
            return value.gather(1, index) if isinstance(value, Tensor) and value.shape == x.shape else value

        found = forward(*map(few, args), **{key: few(value) for key, value in kwargs.items()})
        whole = torch.zeros_like(x).scatter_(1, index, first_tensor(found))
        return (whole, *found[1:]) if isinstance(found, tuple) else whole

    module.forward = run
    try:
        yield
    finally:
        if before is None:
            module.__dict__.pop("forward", None)
        else:
            module.forward = before


@contextmanager
def _joining(model: Model, clean: Clean, working: Pass, column: int, joined: list[int]) -> Iterator[None]:
    """While the block runs, every layer computes the sets that have joined, and lets in those that join after it with
    what it gave them in the clean pass; each instance is restored on exit."""
    blocks = [part.block for part in model.anatomy.blocks]
    before = [block.__dict__.get("forward") for block in blocks]
    try:
        for i, block in enumerate(blocks):
            block.forward = _partial(block.forward, working, clean, i, column, joined[i], joined[i + 1])
        yield
    finally:
        for block, old in zip(blocks, before, strict=True):
            if old is None:
                block.__dict__.pop("forward", None)
            else:
                block.forward = old


def _partial(forward: Any, working: Pass, clean: Clean, layer: int, column: int, now: int, then: int) -> Any:
    """A layer's forward for the first `now` sets of the batch; `then` of them go on."""
    batch, output, sizes = working.rows_a_slot, clean.outputs[layer], clean.sizes
    recorded = first_tensor(output)[:, column:]

    def run(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        total, rows = hidden.shape[0], now * batch
        whole = working.where.shape
        made, rest = hidden, output[1:] if isinstance(output, tuple) else ()
        if now:
            working.where.shape = (rows, whole[1])
            places = [_rows(x, rows, total, sizes.get(i)) for i, x in enumerate(args)]
            found = forward(*places, **{k: _rows(x, rows, total, sizes.get(k)) for k, x in kwargs.items()})
            working.where.shape = whole
            if rows == total:
                return found
            made, rest = first_tensor(found), found[1:] if isinstance(found, tuple) else ()
        full = recorded.new_empty((total, *recorded.shape[1:]))
        full[:rows] = made[:rows]
        full[rows : then * batch] = _tile(recorded, then - now)
        return (full, *rest) if isinstance(output, tuple) else full

    return run


def _size(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(_size, x))
    return x.shape[0] if isinstance(x, Tensor) and x.ndim else None


def _rows(x: Any, rows: int, total: int, size: Any) -> Any:
    """The part of an argument that belongs to the first rows of the batch; heads may be folded into its first axis.

    What has the same first axis for a batch of another `size` has none for the batch (a bias [head, …], say).
    """
    if isinstance(x, tuple):
        sizes = size if isinstance(size, tuple) and len(size) == len(x) else [None] * len(x)
        return tuple(_rows(item, rows, total, s) for item, s in zip(x, sizes, strict=True))
    if isinstance(x, Tensor) and x.ndim > 1 and x.shape[0] not in (1, size) and x.shape[0] % total == 0:
        return x[: rows * (x.shape[0] // total)]
    return x
