"""`trace`: one forward pass that captures and edits; `edited`: the same edits on the model's own methods."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from headscope.core.errors import UsageError
from headscope.model import Model
from headscope.trace.edit import RECORDED, Edit
from headscope.trace.hooks import SITES, Capture, Pass


@dataclass(eq=False)
class Run:
    """What a pass gave: `run["z", 3]` is one layer's tensor, `run["z"]` all of them stacked [layer, …].

    `logits` [batch, pos, vocab] has the positions asked for. `tokens` and `mask` [batch, pos] are None for inputs
    that are not token ids. It shows itself in a notebook: the tokens, and what was captured with its dims.
    """

    stored: dict[str, dict[int, Any]]
    logits: Any  # a Tensor, or None where no logits were asked for
    tokens: Tensor | None
    mask: Tensor | None
    # weak: a run that is kept must not keep the weights of a model that is not
    _model: ref[Model] | None = field(default=None, repr=False)

    @property
    def source(self) -> Model | None:
        """The model of this run, as long as it is loaded."""
        return None if self._model is None else self._model()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": None}

    def __getitem__(self, key: str | tuple[str, int]) -> Any:
        site, layer = (key, None) if isinstance(key, str) else key
        if site not in self.stored:
            raise UsageError(
                f"{site!r} was not captured in this run; captured are: {', '.join(self.stored) or 'none'}."
            )
        layers = self.stored[site]
        if layer is not None:
            if layer not in layers:
                raise UsageError(f"{site} was captured in layers {sorted(layers)}, not in layer {layer}.")
            return layers[layer]
        values = [layers[i] for i in sorted(layers)]
        return torch.stack(values) if all(isinstance(value, Tensor) for value in values) else values

    def __repr__(self) -> str:
        sites = ", ".join(f"{site} of {len(layers)} layers" for site, layers in self.stored.items())
        shape = None if self.logits is None else tuple(self.logits.shape)
        return f"Run({sites or 'nothing captured'}; logits {shape})"

    def _repr_html_(self) -> str:
        from headscope.trace.show import table

        return table(self)

    def __contains__(self, site: str) -> bool:
        return site in self.stored


def trace(
    model: Model,
    inputs: Any,
    capture: str | Capture | Iterable[str | Capture] = (),
    edits: Edit | Iterable[Edit] = (),
    *,
    layers: Iterable[int] | None = None,
    logits: str | Tensor | None = "all",
    grad: bool = False,
) -> Run:
    """Run the model once over `inputs`, keep what `capture` names, change what `edits` say.

    `inputs`: text, a list of texts, token ids [batch, pos], Prompts, or keyword arguments of the Hugging Face model.
    `layers` restricts the sites given as plain names. `logits`: "all", "last" (each row's last real token), positions
    [batch, m], or None. `grad=True` keeps the graph, so that gradients reach captures and gates.
    """
    given = [capture] if isinstance(capture, (str, Capture)) else list(capture)
    layers = None if layers is None else tuple(layers)
    captures = [Capture(item, layers) if isinstance(item, str) else item for item in given]
    tokens, mask, kwargs = prepare(model, inputs)
    edits = resolve(model, edits)
    working = Pass(model, captures, edits, grad)
    with working.installed(), torch.set_grad_enabled(grad), narrowed(model, mask, logits):
        output = model.hf(**kwargs)
    found = getattr(output, "logits", None)
    return Run(working.stored, found if logits is not None else None, tokens, mask, ref(model))


@contextmanager
def edited(model: Model, edits: Edit | Iterable[Edit]) -> Iterator[Any]:
    """The Hugging Face model with the edits in force: `with edited(model, zero("L5H3")) as hf: hf.generate(...)`.

    Everything is restored on exit, also after an error.
    """
    with Pass(model, [], resolve(model, edits)).installed():
        yield model.hf


def prepare(model: Model, inputs: Any) -> tuple[Tensor | None, Tensor | None, dict[str, Any]]:
    """Token ids, mask, and the keyword arguments to call the Hugging Face model with."""
    if model.hf.training:
        raise UsageError(
            f"{model.name} is in training mode, where dropout makes every pass another one; call model.hf.eval() first."
        )
    if isinstance(inputs, Mapping):  # also what a tokenizer gives
        ids, given = inputs.get("input_ids"), inputs.get("attention_mask")
        if not isinstance(ids, Tensor):
            if "input_ids" in inputs:
                raise UsageError(
                    "input_ids must be a tensor [batch, pos]; call the tokenizer with return_tensors='pt'."
                )
            return None, None, dict(inputs)
        if not isinstance(given, Tensor) or given.shape != ids.shape:
            given = torch.ones_like(ids)
        return ids, given.bool(), dict(inputs)
    if hasattr(inputs, "positions") and hasattr(inputs, "tokens"):
        tokens, mask = model.tokens(inputs.tokens)
        mask = mask if inputs.mask is None else inputs.mask.to(mask.device).bool()
    else:
        tokens, mask = model.tokens(inputs)
    return tokens, mask, call_arguments(model, tokens, mask)


def call_arguments(model: Model, tokens: Tensor, mask: Tensor | None, column: int = 0) -> dict[str, Any]:
    """What to call the Hugging Face model with for tokens [batch, pos] from `column` on, earlier ones being in a cache.

    The mask goes to the model only where there is padding; with it go the positions, which most decoders would
    otherwise count through the padding.
    """
    known = arguments(model)
    kwargs: dict[str, Any] = {"input_ids": tokens[:, column:]}
    if mask is not None and not bool(mask.all()):
        kwargs["attention_mask"] = mask.long()
        if model.is_causal and "position_ids" in known:
            kwargs["position_ids"] = (mask.long().cumsum(1) - 1).clamp(min=0)[:, column:]
    if "use_cache" in known:
        kwargs["use_cache"] = column > 0
    return kwargs


def arguments(model: Model) -> set[str]:
    """What the Hugging Face model's forward takes."""
    import inspect

    # the forward of an adapter's wrapper hands on what it does not name
    hf = (
        model.hf.get_base_model()
        if hasattr(model.hf, "peft_config") and hasattr(model.hf, "get_base_model")
        else model.hf
    )
    return set(inspect.signature(hf.forward).parameters)


@contextmanager
def narrowed(model: Model, mask: Tensor | None, logits: str | Tensor | None) -> Iterator[None]:
    """Let the unembedding see only the positions asked for: it is a fifth of a small model's work."""
    unembed = model.anatomy.parts.unembed
    if not (logits is None or isinstance(logits, Tensor) or logits in ("all", "last")):
        raise UsageError(f"logits is {logits!r}; it takes 'all', 'last', positions [batch, m], or None.")
    if isinstance(logits, Tensor) and mask is not None:
        batch, width = mask.shape
        if logits.ndim != 2 or len(logits) != batch or not bool(((logits >= 0) & (logits < width)).all()):
            raise UsageError(f"logits takes positions [{batch}, m] from 0 to {width - 1}, but got {logits.tolist()}.")
    if unembed is None or (isinstance(logits, str) and logits == "all"):
        yield
        return

    def narrow(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        hidden = args[0]
        if logits is None:
            return (hidden[:, :0],)
        if isinstance(logits, str):
            last = hidden.shape[1] - 1
            at = torch.full((hidden.shape[0], 1), last) if mask is None else _last(mask)
        else:
            at = logits
        return (hidden.gather(1, at.to(hidden.device)[:, :, None].expand(-1, -1, hidden.shape[-1])),)

    handle = unembed.register_forward_pre_hook(narrow)
    try:
        yield
    finally:
        handle.remove()


def _last(mask: Tensor) -> Tensor:
    """[batch, 1]: index of each row's last real token."""
    return (mask.long() * torch.arange(mask.shape[1], device=mask.device)).argmax(1, keepdim=True)


def resolve(model: Model, edits: Edit | Iterable[Edit]) -> list[Edit]:
    """Edits with the values of mean, resample and patch filled in from their sources, ready to save or bake."""
    edits = [edits] if isinstance(edits, Edit) else list(edits)
    return [edit if edit.source is None else _resolve(model, edit) for edit in edits]


def _resolve(model: Model, edit: Edit) -> Edit:
    sites = {site for component in edit.components for site in edit.sites(component)}
    if len(sites) > 1:
        raise UsageError(
            f"The edit '{edit}' would need values of several sites ({', '.join(sorted(sites))}); split it."
        )
    (site,) = sites
    run = edit.source
    if not isinstance(run, Run):
        run = trace(model, run, [Capture(site, sorted({c.layer for c in edit.components}))], logits=None)
    values = []
    mask = run.mask
    for component in edit.components:
        x = run[site, component.layer]
        x = x[:, component.index] if site == "pattern" else x[..., component.index, :] if x.ndim == 4 else x
        x = x[..., component.index, None] if site == "neuron" else x
        if edit.op == "mean":
            real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if run.mask is None else run.mask
            x = x[real].mean(0)
        elif edit.op == "resample":
            if x.shape[0] < 2:
                raise UsageError("resample needs a source of at least two rows.")
            generator = torch.Generator().manual_seed(edit.seed)
            shift = int(torch.randint(1, x.shape[0], (1,), generator=generator))
            x = x.roll(shift, 0)
            mask = None if run.mask is None else run.mask.roll(shift, 0)
        values.append(x)
    kept = mask if edit.op in RECORDED and mask is not None and not bool(mask.all()) else None
    return replace(edit, value=torch.stack(values), source=None, mask=kept)


__all__ = ["SITES", "Run", "edited", "prepare", "resolve", "trace"]
