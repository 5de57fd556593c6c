"""The one mechanism that owns hooks: everything is read and changed here, and gone on exit."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import repeat
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from headscope.core.component import Component
from headscope.core.errors import NotApplicable, UsageError, nearest
from headscope.model import Model
from headscope.model.discover import first_tensor, uncompiled
from headscope.trace.attention import AttentionTap
from headscope.trace.edit import Edit, check_edit

#: site → dims
SITES = {
    "resid_pre": "batch pos d_model",
    "q_pre": "batch pos head d_head",
    "k_pre": "batch pos kv_head d_head",
    "q": "batch pos head d_head",
    "k": "batch pos kv_head d_head",
    "v": "batch pos kv_head d_head",
    "attn_scores": "batch head query key",
    "pattern": "batch head query key",
    "z": "batch pos head d_head",
    "head_out": "batch pos head d_model",
    "attn_out": "batch pos d_model",
    "resid_mid": "batch pos d_model",
    "neuron": "batch pos d_mlp",
    "mlp_out": "batch pos d_model",
    "resid_post": "batch pos d_model",
}
_ACTIVE: WeakKeyDictionary[nn.Module, list[Pass]] = WeakKeyDictionary()
_LOCK = threading.Lock()
#: what attention makes while it runs, before anything of it is written
INSIDE = {"q", "k", "v", "attn_scores", "pattern"}


@dataclass(frozen=True)
class Capture:
    """A site to keep. `layers`: which (all by default). `reduce(tensor, layer)`: what to keep instead of the tensor,
    run inside the pass, so that nothing larger than one layer's tensor ever lives."""

    site: str
    layers: Iterable[int] | None = None
    reduce: Callable[[Tensor, int], Any] | None = None


@dataclass
class Where:
    """Which token of the running batch is which: real or padding, its prompt position, prompt or generated."""

    mask: Tensor | None = None
    offset: int = 0
    shape: tuple[int, int] = (0, 0)
    #: columns of the prompt: those of the last pass that began a sequence
    prompt: int = 0
    #: columns of a prompt whose first ones stand in a cache already, 0 where a cache means that tokens are generated
    replayed: int = 0
    #: rows and columns of the prompts that generate() was given while it runs; beams and samples repeat the rows
    asked: tuple[int, int] | None = None

    @property
    def copies(self) -> int:
        """Rows of the batch for each row of the prompts."""
        return max(1, self.shape[0] // self.asked[0]) if self.asked else 1

    def note(self, shape: tuple[int, int]) -> None:
        """A pass begins over `shape` new tokens."""
        self.shape = shape
        if self.replayed:
            self.prompt = self.replayed
        elif self.asked:
            self.prompt = self.asked[1]
        elif self.offset == 0:
            self.prompt = shape[1]
        elif not 0 < self.prompt <= self.offset:
            self.prompt = self.offset

    def of(self, rows: slice) -> Where:
        """The same for some rows of the batch."""
        mask = None if self.mask is None else self.mask[rows]
        return replace(self, mask=mask, shape=(rows.stop - rows.start, self.shape[1]))

    def columns(self, width: int | None = None) -> Tensor:
        """[width]: numbers of the columns up to the last new token, those of this pass unless a cache has more."""
        width = self.shape[1] if width is None else width
        total = self.offset + self.shape[1]
        # a cache of fixed size is longer than what it holds
        return torch.arange(max(0, total - width), max(total, width))

    def index(self, width: int | None = None) -> Tensor:
        """[batch, width]: position among the real tokens of its row, -1 at padding."""
        batch, columns = self.shape[0], self.columns(width)
        if self.mask is None:
            total = self.offset + self.shape[1]
            return columns.masked_fill(columns >= total, -1).expand(batch, -1)
        counted = (self.mask.long().cumsum(1) - 1).masked_fill(~self.mask.bool(), -1)
        counted = torch.nn.functional.pad(counted, (0, max(0, int(columns[-1]) + 1 - counted.shape[1])), value=-1)
        return counted[:, columns.to(counted.device)].expand(batch, -1)

    def check(self, number: int, index: Tensor) -> None:
        """Raise UsageError for a position past the end of every prompt."""
        if self.offset == 0 and number > int(index.max()):
            raise UsageError(f"Position {number} does not exist: the longest prompt has {int(index.max()) + 1} tokens.")

    def select(self, edit: Edit, device: torch.device, width: int | None = None) -> Tensor:
        """[batch, width]: where the edit applies."""
        index = self.index(width)
        if isinstance(edit.positions, tuple):
            self.check(max(edit.positions), index)
        index = index.to(device)
        in_prompt = (self.columns(width) < self.prompt).to(device)
        chosen = index >= 0
        if edit.positions == "generated":
            chosen = chosen & ~in_prompt
        elif edit.positions is not None:
            chosen = chosen & torch.isin(index, torch.tensor(edit.positions, device=device)) & in_prompt
        if edit.rows is not None:
            rows = torch.zeros(index.shape[0], dtype=torch.bool, device=device)
            if max(edit.rows) >= index.shape[0] // self.copies:
                raise UsageError(
                    f"Row {max(edit.rows)} does not exist: the batch has {index.shape[0] // self.copies} rows."
                )
            for row in edit.rows:
                rows[row * self.copies : (row + 1) * self.copies] = True
            chosen = chosen & rows[:, None]
        return chosen

    def fits(self, edit: Edit, value: Tensor, chosen: Tensor) -> None:
        """Raise UsageError where the values of a run [batch, pos, unit] are not those of the same rows and positions."""
        if value.shape[:2] != chosen.shape:
            raise UsageError(
                f"The edit '{edit}' has values of shape {tuple(value.shape)}, which do not fit {tuple(chosen.shape)} "
                "rows and positions; take a source of as many rows and positions as the prompts."
            )
        if self.mask is None and edit.mask is None:
            return
        mask = None if edit.mask is None else edit.mask.repeat_interleave(self.copies, 0)
        source = Where(mask, self.offset, self.shape)
        other = source.index(chosen.shape[1]).to(chosen.device) != self.index(chosen.shape[1]).to(chosen.device)
        if bool((other & chosen).any()):
            raise UsageError(
                f"The edit '{edit}' has values of a source that is padded otherwise than the prompts, so that its positions "
                "are not theirs; take prompts of the same lengths."
            )

    def aligned(self, value: Tensor, chosen: Tensor) -> Tensor:
        """A prompt's values [..., pos, unit] laid over the columns of `chosen` in a pass that goes on from a cache.

        Values that `chosen` needs but the prompt has not got are left out, so that the shapes do not fit.
        """
        columns, length = self.columns(chosen.shape[1]), value.shape[-2]
        if (self.offset == 0 and not self.asked) or bool(chosen[:, (columns >= length).to(chosen.device)].any()):
            return value
        value = value[..., columns[columns < length].to(value.device), :]
        return torch.nn.functional.pad(value, (0, 0, 0, len(columns) - value.shape[-2]))


@dataclass
class Pass:
    """What one or more forward passes read and change; `stored[site][layer]` holds what was captured.

    `slots`: for several sets of edits in one pass, which the batch holds one after the other, the set of each edit; a
    set then sees its own `rows_a_slot` rows as if they were the whole batch. `queries` [n]: without edits, the only ones
    whose attn_scores and pattern are formed.
    """

    model: Model
    captures: list[Capture]
    edits: list[Edit]
    grad: bool = False
    stored: dict[str, dict[int, Any]] = field(default_factory=dict)
    where: Where = field(default_factory=Where)
    slots: list[int] | None = None
    rows_a_slot: int = 0
    queries: Tensor | None = None
    thread: int = field(default_factory=threading.get_ident)

    def __post_init__(self) -> None:
        anatomy = self.model.anatomy
        sizes = {name: getattr(anatomy, name) for name in ("n_layers", "n_heads", "n_kv_heads", "d_mlp")}
        self._reads: dict[tuple[str, int], list[Capture]] = {}
        self._blocks: dict[str, Tensor] = {}
        self._changes: dict[tuple[str, int], list[tuple[Edit, Component, int, int | None]]] = {}
        for capture in self.captures:
            if capture.site not in SITES:
                raise UsageError(f"There is no site {capture.site!r} to capture.{nearest(capture.site, SITES)}")
            if capture.site == "resid_mid" and anatomy.parts.parallel:
                raise NotApplicable(
                    "This model adds attention and MLP in parallel; there is no resid_mid in its blocks."
                )
            for layer in range(anatomy.n_layers) if capture.layers is None else capture.layers:
                if not 0 <= layer < anatomy.n_layers:
                    raise UsageError(
                        f"Layer {layer} does not exist: this model has layers 0 to {anatomy.n_layers - 1}."
                    )
                self._reads.setdefault((capture.site, layer), []).append(capture)
        for edit, slot in zip(self.edits, self.slots or repeat(None, len(self.edits)), strict=True):
            if edit.source is not None:
                raise UsageError(f"The edit '{edit}' still waits for its source; call resolve(model, edits) first.")
            check_edit(edit, sizes)
            for i, component in enumerate(edit.components):
                for site in edit.sites(component):
                    self._changes.setdefault((site, component.layer), []).append((edit, component, i, slot))
        if any(site == "neuron" for site, _ in {**self._reads, **self._changes}) and anatomy.blocks[0].down is None:
            raise NotApplicable(
                "This model's MLPs are experts or absent; their neurons cannot be captured or edited yet."
            )

    def _wants(self, site: str, layer: int) -> bool:
        return (site, layer) in self._reads or (site, layer) in self._changes

    def _visit(self, site: str, layer: int, x: Tensor) -> Tensor:
        """Change a tensor as the edits say, then keep what the captures want; returns the tensor to go on with."""
        if (site, layer) in self._changes:
            x = self._apply(site, x, self._changes[site, layer])
        for capture in self._reads.get((site, layer), ()):
            kept: Any = x if self.grad else x.detach()
            if capture.reduce is not None:
                kept = capture.reduce(kept, layer)
            elif not self.grad:
                kept = self._copy(site, layer, kept)
            self.stored.setdefault(site, {})[layer] = kept
        return x

    def _copy(self, site: str, layer: int, x: Tensor) -> Tensor:
        """A copy in one block of memory for all layers of the site.

        A copy, because some blocks add in place afterwards. One block, because the tensors themselves, kept alive
        between a layer's short-lived ones, make the allocator return and fault in the same memory in every layer.
        """
        if layer in self.stored.get(site, ()):  # a second forward pass must not overwrite what the first one gave
            return x.clone()
        layers = [at for name, at in self._reads if name == site]
        block = self._blocks.get(site)
        if block is None:
            block = self._blocks[site] = x.new_empty((len(layers), *x.shape))
        if block.shape[1:] != x.shape or block.dtype != x.dtype or block.device != x.device:
            return x.clone()
        return block[layers.index(layer)].copy_(x)

    def _apply(self, site: str, whole: Tensor, changes: list[tuple[Edit, Component, int, int | None]]) -> Tensor:
        whole = whole.clone()
        for edit, component, i, slot in changes:
            x, where = whole, self.where
            if slot is not None:
                rows = slice(slot * self.rows_a_slot, (slot + 1) * self.rows_a_slot)
                x, where = whole[rows], where.of(rows)
            if edit.op == "mask_edges":
                self._mask(x, edit, component, where)
                continue
            # keys and values of a cache reach further back than this pass; the cache holds them unedited
            chosen = where.select(edit, x.device, x.shape[2 if site == "pattern" else 1])
            value = edit.value
            if isinstance(value, Tensor):
                value = value[i if value.shape[0] > 1 else 0] if value.ndim >= edit.axes else value
                value = value.to(x.device, x.dtype)
                if edit.axes == 4:
                    whole_run = edit.value.ndim == edit.axes
                    value = where.aligned(value.repeat_interleave(where.copies, 0) if whole_run else value, chosen)
                    if whole_run:
                        where.fits(edit, value, chosen)
            index: tuple[Any, ...] = (..., component.index, slice(None)) if x.ndim == 4 else (...,)
            if site == "pattern":
                index = (slice(None), component.index)
            if site == "neuron":
                index = (..., slice(component.index, component.index + 1))  # type: ignore[operator]
            unit = x[index].clone()  # autograd keeps it, and x changes under it
            x[index] = torch.where(chosen[..., None], _changed(edit, unit, value), unit)
        return whole

    @staticmethod
    def _mask(scores: Tensor, edit: Edit, component: Component, where: Where) -> None:
        query = where.select(edit, scores.device)  # [batch, query]
        from_index = where.index().to(scores.device)
        to_index = where.index(scores.shape[-1]).to(scores.device)
        for q, k in edit.edges:
            for number in (q, k):
                where.check(number or 0, from_index)
            rows = query if q is None else query & (from_index == q)
            keys = torch.ones_like(to_index, dtype=torch.bool) if k is None else to_index == k
            hit = rows[:, :, None] & keys[:, None, :]
            scores[:, component.index] = scores[:, component.index].masked_fill(hit, torch.finfo(scores.dtype).min)

    @contextmanager
    def installed(self) -> Iterator[Pass]:
        """Hooks on the model while the block runs, and none of them after it."""
        self._handles: list[Any] = []
        self._taps: list[AttentionTap] = []
        hf = self.model.hf
        generate = hf.__dict__.get("generate")
        _enter(self)
        try:
            if hasattr(hf, "generate"):
                hf.generate = self._noting(hf.generate)
            for layer in range(self.model.anatomy.n_layers):
                self._hook_layer(layer)
            first = self.model.anatomy.blocks[0].block
            self._handles.append(first.register_forward_pre_hook(self._note_shape, with_kwargs=True, prepend=True))
            self._handles.append(self.model.hf.register_forward_pre_hook(self._note_batch, with_kwargs=True))
            with uncompiled(hf):
                yield self
        finally:
            for handle in self._handles:
                handle.remove()
            for tap in reversed(self._taps):  # still open where the pass was stopped by Ctrl-C
                tap.__exit__(None, None, None)
            self._taps.clear()
            if generate is not None:
                hf.generate = generate
            else:
                hf.__dict__.pop("generate", None)
            with _LOCK:
                _ACTIVE[hf] = [other for other in _ACTIVE[hf] if other is not self]

    def _noting(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """`generate` that says which rows and columns it was given: later passes alone do not tell."""

        @wraps(generate)
        def noting(*args: Any, **kwargs: Any) -> Any:
            names = ("inputs", "input_ids", "inputs_embeds")
            given = args[0] if args else next((kwargs[n] for n in names if kwargs.get(n) is not None), None)
            self.where.asked = (
                (given.shape[0], given.shape[1]) if isinstance(given, Tensor) and given.ndim > 1 else None
            )
            try:
                return generate(*args, **kwargs)
            finally:
                self.where.asked = None

        return noting

    def _note_batch(self, hf: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if len(args) > 1:  # a mask or cache may be among them
            kwargs = inspect.signature(hf.forward).bind_partial(*args, **kwargs).arguments
        mask = kwargs.get("attention_mask")
        self.where.mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        past = [value for value in kwargs.values() if hasattr(value, "get_seq_length")]
        self.where.offset = int(past[0].get_seq_length()) if past else 0

    def _note_shape(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        self.where.note((hidden.shape[0], hidden.shape[1]))

    def _hook_layer(self, layer: int) -> None:
        anatomy, block = self.model.anatomy, self.model.anatomy.blocks[layer]
        shape_z = (anatomy.n_heads, anatomy.d_head)
        pre, post = self._on_input, self._on_output
        mid_needed = self._wants("resid_mid", layer) and anatomy.parts.norm_placement != "post"
        if self._wants("resid_pre", layer) or mid_needed or (self.grad and layer == 0):
            pre(block.block, layer, ["resid_pre"])
        if self._wants("z", layer) or self._wants("head_out", layer):
            pre(block.o, layer, ["z"], shape_z)
        if self._wants("neuron", layer):
            pre(block.down, layer, ["neuron"])
        if self._wants("attn_out", layer) or mid_needed:
            post(block.attn_out, layer, "attn_out")
        if self._wants("resid_mid", layer) and not mid_needed:
            post(block.norm_attn, layer, "resid_mid")
        if self._wants("mlp_out", layer):
            if block.mlp_out is None:
                raise NotApplicable(f"Layer {layer} has no MLP.")
            post(block.mlp_out, layer, "mlp_out")
        if self._wants("resid_post", layer):
            post(block.block, layer, "resid_post")
        for which in ("q", "k"):
            if self._wants(f"{which}_pre", layer):
                self._on_projection(which, layer)
        if inside := {site for site in INSIDE if self._wants(site, layer)}:
            self._tap(layer, inside)

    def _on_input(
        self, module: nn.Module | None, layer: int, sites: list[str], split: tuple[int, int] | None = None
    ) -> None:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            named = not args
            x = kwargs["hidden_states"] if named else args[0]
            if self.grad and layer == 0 and sites == ["resid_pre"] and not x.requires_grad:
                x = x.detach().requires_grad_()
            shaped = x.view(*self.where.shape, *split) if split else x.view(*self.where.shape, -1)
            made = shaped
            for site in sites:
                made = self._visit(site, layer, made)
            if sites == ["z"] and self._wants("head_out", layer):
                self._visit("head_out", layer, self._head_out(made, layer))
            if sites == ["resid_pre"]:
                self._resid_pre = made
            if made is shaped and not self.grad:
                return None
            made = made.reshape(x.shape)
            return (args, {**kwargs, "hidden_states": made}) if named else ((made, *args[1:]), kwargs)

        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))  # type: ignore[union-attr]

    def _head_out(self, z: Tensor, layer: int) -> Tensor:
        anatomy = self.model.anatomy
        weights = torch.stack([anatomy.W_O(layer, h) for h in range(anatomy.n_heads)])
        return torch.einsum("bphd,hdm->bphm", z, weights)

    def _on_output(self, module: nn.Module | None, layer: int, site: str) -> None:
        mid = (
            site == "attn_out" and self._wants("resid_mid", layer) and self.model.anatomy.parts.norm_placement != "post"
        )

        def hook(_: nn.Module, args: Any, output: Any) -> Any:
            x = first_tensor(output)
            shaped = x.view(*self.where.shape, -1)
            made = self._visit(site, layer, shaped)
            if mid:
                changed = self._visit("resid_mid", layer, self._resid_pre + made)
                if self.grad or ("resid_mid", layer) in self._changes:
                    made = changed - self._resid_pre
            if made is shaped and not self.grad:
                return None
            made = made.reshape(x.shape)
            return made if isinstance(output, Tensor) else (made, *output[1:])

        self._handles.append(module.register_forward_hook(hook))  # type: ignore[union-attr]

    def _on_projection(self, which: str, layer: int) -> None:
        anatomy = self.model.anatomy
        module = anatomy.qkv_columns(which, 0, layer)[0]

        def hook(_: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            made = self._visit(
                f"{which}_pre", layer, anatomy.split_qkv(which, output.view(*self.where.shape, -1), layer)
            )
            if not self.grad:
                return None
            output = output.clone()
            for i in range(made.shape[2]):
                output[..., anatomy.qkv_columns(which, i, layer)[1]] = made[:, :, i].reshape(*output.shape[:-1], -1)
            return output

        self._handles.append(module.register_forward_hook(hook))

    def _tap(self, layer: int, sites: set[str]) -> None:
        anatomy, module = self.model.anatomy, self.model.anatomy.blocks[layer].attn
        # where gradients are wanted, the model must go on with the very tensor that was kept
        edited = {site for site in sites if self.grad or (site, layer) in self._changes}

        def enter(_: nn.Module, args: Any) -> None:
            tap = AttentionTap(
                anatomy.n_heads, anatomy.n_kv_heads, anatomy.d_head, sites, edited,
                lambda site, x: self._visit(site, layer, x), self.queries,
            )  # fmt: skip
            self._taps.append(tap)
            tap.__enter__()

        def leave(_: nn.Module, args: Any, output: Any) -> None:
            tap = self._taps.pop()
            tap.__exit__(None, None, None)
            if not tap.seen and output is not None:
                backend = getattr(self.model.hf.config, "_attn_implementation", "this one")
                raise NotApplicable(
                    f"The attention backend {backend!r} hides its {', '.join(sorted(sites))}; "
                    "load the model with attn='sdpa' or attn='eager'."
                )

        self._handles.append(module.register_forward_pre_hook(enter))
        self._handles.append(module.register_forward_hook(leave, always_call=True))


def _enter(working: Pass) -> None:
    """Note that a pass is at work. Raises UsageError where another thread's is: hooks are a model's, not a thread's."""
    with _LOCK:
        others = _ACTIVE.setdefault(working.model.hf, [])
        if any(other.thread != working.thread for other in others):
            raise UsageError(
                f"{working.model.name} is being traced or edited in another thread, and edits there would show here. "
                "Take turns, or load the model once a thread."
            )
        others.append(working)


def active(model: Model) -> list[Pass]:
    """The passes whose hooks are on the model now, those of `edited` blocks among them."""
    return list(_ACTIVE.get(model.hf, ()))


def _changed(edit: Edit, unit: Tensor, value: Any) -> Tensor:
    """The new value of one component's tensor [batch, pos, unit]."""
    if edit.op == "zero":
        return torch.zeros_like(unit)
    if edit.op in ("scale", "gate"):
        return unit * value
    try:
        if edit.op == "project_out":
            direction = value / value.norm()
            return unit - (unit @ direction)[..., None] * direction
        value = value.expand_as(unit) if isinstance(value, Tensor) else value
        return unit + value if edit.op == "add" else value
    except RuntimeError:
        shape = tuple(value.shape)
        raise UsageError(
            f"The edit '{edit}' has values of shape {shape}, which do not fit {tuple(unit.shape)}."
        ) from None
