"""Write edits into the weights, so that an ordinary checkpoint computes what the edited model did."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from headscope.core.component import Component
from headscope.core.errors import NotApplicable, UsageError
from headscope.model import Model, bias_of, load, weight_of
from headscope.model.checkpoint import copy_of
from headscope.trace import Edit, resolve
from headscope.trace.edit import check_edit
from headscope.trace.hooks import active

#: edits that are the same at every position and so can be weights
_OPS = ("zero", "scale", "add", "mean", "project_out")


@torch.no_grad()
def bake(model: Model, edits: Edit | Iterable[Edit]) -> nn.Module:
    """A copy of the Hugging Face model with `edits` written into its weights; `model` stays as it is.

    zero, scale, add, mean and project_out of heads and neurons, and zero and scale of v of kv heads, of attention, MLP
    and whole layers become weights; a constant becomes a bias of the output projection. Raises UsageError for what no
    weight can hold: edits at some positions or rows, patches, masked edges.
    """
    if active(model):
        raise UsageError("bake copies the model with the edits in force; leave the edited() block first.")
    anatomy = model.anatomy
    sizes = {name: getattr(anatomy, name) for name in ("n_layers", "n_heads", "n_kv_heads", "d_mlp")}
    edits = resolve(model, edits)
    for edit in edits:
        check_edit(edit, sizes)
        _check_bakeable(edit)
    twin = copy_of(model)
    needs_bias = {
        site for edit in edits if edit.op in ("add", "mean") for c in edit.components for site in edit.sites(c)
    }
    twin = _with_biases(twin, needs_bias)
    units: dict[tuple[Component, str], list[tuple[Edit, int]]] = {}
    others: list[tuple[Edit, Component, str]] = []
    for edit in edits:
        for i, component in enumerate(edit.components):
            for site in edit.sites(component):
                if site in ("z", "neuron"):
                    units.setdefault((component, site), []).append((edit, i))
                else:
                    others.append((edit, component, site))
    # as in a pass: what heads and neurons give comes before the sums it goes into
    for (component, site), changes in units.items():
        _write_unit(twin, component, site, changes)
    for edit, component, site in others:
        _write(twin, edit, component, site)
    return twin.hf


def _check_bakeable(edit: Edit) -> None:
    if edit.op not in _OPS:
        raise UsageError(f"The edit '{edit}' cannot be baked: weights can hold {', '.join(_OPS)}.")
    if edit.positions is not None or edit.rows is not None or edit.axes == 4:
        raise UsageError(f"The edit '{edit}' cannot be baked: weights act at every position and in every row alike.")


def _write_unit(twin: Model, c: Component, site: str, changes: list[tuple[Edit, int]]) -> None:
    """Write all edits of a head or neuron, in order: x → A x + constant, with A in its output rows [unit, d_model]."""
    anatomy, block, index = twin.anatomy, twin.anatomy.blocks[c.layer], c.index or 0
    if site == "z":
        rows, bias = anatomy.W_O(c.layer, index), bias_of(block.o)
    else:
        rows, bias = anatomy.W_out(c.layer)[index : index + 1], bias_of(block.down)
    given = rows.clone()
    constant = torch.zeros_like(rows[:, 0])
    for edit, i in changes:
        if edit.op in ("zero", "mean"):
            rows.zero_()
            constant.zero_()
        if edit.op == "scale":
            rows.mul_(edit.value)
            constant.mul_(edit.value)
        elif edit.op == "project_out":
            direction = _value(edit, i, constant)
            direction = direction / direction.norm()
            rows.sub_(torch.outer(direction, direction @ rows))
            constant.sub_(constant @ direction * direction)
        elif edit.op in ("add", "mean"):
            constant.add_(_value(edit, i, constant))
    if bias is not None:
        bias.add_(constant @ given)


def _value(edit: Edit, i: int, like: Tensor) -> Tensor:
    """[unit]: the edit's value for its component number i."""
    value = edit.value.to(like.device, like.dtype)
    value = value[i if value.shape[0] > 1 else 0] if value.ndim >= 2 else value
    try:
        return value.expand_as(like)
    except RuntimeError:
        raise UsageError(
            f"The edit '{edit}' has values of shape {tuple(value.shape)}, which do not fit {tuple(like.shape)}."
        ) from None


def _write(twin: Model, edit: Edit, c: Component, site: str) -> None:
    anatomy, block = twin.anatomy, twin.anatomy.blocks[c.layer]
    if site in ("k", "v"):
        if site == "k" and _has_k_norm(block.attn):
            raise UsageError(
                f"The edit '{edit}' cannot be baked: a norm after the keys would undo it; edit part='v' instead."
            )
        module, columns = anatomy.qkv_columns(site, c.index or 0, c.layer)
        bias = bias_of(module)
        _scale_all(edit, [weight_of(module)[:, columns], None if bias is None else bias[columns]])
    elif site == "attn_out":
        _scale_block(edit, block.o, block.post_attn)
    elif site == "mlp_out":
        if block.down is None:
            raise NotApplicable(f"Layer {c.layer} has experts; edits of their sum cannot be baked.")
        _scale_block(edit, block.down, block.post_mlp)
    else:
        raise UsageError(f"The edit '{edit}' cannot be baked: no weight stands at {site}.")


def _scale_all(edit: Edit, tensors: list[Tensor | None]) -> None:
    if edit.op not in ("zero", "scale"):
        raise UsageError(f"The edit '{edit}' cannot be baked there; weights can hold zero and scale of it.")
    for tensor in tensors:
        if tensor is not None:
            tensor.mul_(0.0 if edit.op == "zero" else edit.value)


def _scale_block(edit: Edit, projection: nn.Module, post: nn.Module | None) -> None:
    if post is not None and edit.op == "scale":
        raise UsageError(f"The edit '{edit}' cannot be baked: a norm follows, which undoes a factor before it.")
    _scale_all(edit, [projection.weight, bias_of(projection), bias_of(post) if post is not None else None])  # type: ignore[list-item]


def _has_k_norm(attn: nn.Module) -> bool:
    return any("norm" in name and "k" in name for name, _ in attn.named_children())


def _with_biases(twin: Model, sites: set[str]) -> Model:
    """The model with output biases where constants must go; some families have them behind a switch of their config."""
    wanted = {"z": ("attention_bias", "o"), "neuron": ("mlp_bias", "down")}
    missing = [
        switch for site, (switch, part) in wanted.items()
        if site in sites and bias_of(getattr(twin.anatomy.blocks[0], part)) is None
    ]  # fmt: skip
    if not missing:
        return twin
    config = twin.hf.config
    if any(getattr(config, switch, None) is not False for switch in missing):
        raise UsageError(
            f"A constant cannot be baked into {twin.name}: its output projections have no bias. Zero or scale instead."
        )
    config = copy.deepcopy(config)
    for switch in missing:
        setattr(config, switch, True)
    made = type(twin.hf)(config).to(twin.device, twin.dtype)
    absent = made.load_state_dict(twin.hf.state_dict(), strict=False).missing_keys
    for name, parameter in made.named_parameters():
        if name in absent and name.endswith("bias"):
            parameter.zero_()
    made.tie_weights()
    made.generation_config = getattr(twin.hf, "generation_config", None)
    bigger = load(made, tokenizer=twin.tokenizer)
    bigger.name = twin.name
    if any(
        bias_of(getattr(bigger.anatomy.blocks[0], part)) is None for site, (_, part) in wanted.items() if site in sites
    ):
        raise UsageError(
            f"A constant cannot be baked into {twin.name}: its output projections have no bias. Zero or scale instead."
        )
    return bigger
