"""Find a transformer's parts from the structure of its module tree.

The blocks are the one list of equal modules that hold an attention; inside a block, the projections are told apart by
their role word (`q_proj`, `query`, `c_attn`, …) and by shape, the rest of the linear layers are the MLP. Where norms
stand is found by watching one tiny forward pass. `headscope doctor` then proves the result on the model itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headscope.core.errors import ModelError

_ROLES = {
    "q": re.compile(r"^(q|q_proj|query|q_lin|wq|query_proj)$"),
    "k": re.compile(r"^(k|k_proj|key|k_lin|wk|key_proj)$"),
    "v": re.compile(r"^(v|v_proj|value|v_lin|wv|value_proj)$"),
    "qkv": re.compile(r"^(qkv|qkv_proj|c_attn|query_key_value|Wqkv|in_proj)$"),
}
#: fused projections whose rows are grouped by kv head (q…q k v | q…q k v | …) instead of q | k | v
_GROUPED = {"query_key_value"}


@dataclass
class Block:
    """The modules of one layer. `attn` is the module whose forward computes the attention product."""

    block: nn.Module
    attn: nn.Module
    o: nn.Module
    q: nn.Module | None = None
    k: nn.Module | None = None
    v: nn.Module | None = None
    qkv: nn.Module | None = None
    qkv_grouped: bool = False
    mlp: nn.Module | None = None
    up: nn.Module | None = None
    gate: nn.Module | None = None
    gate_up: nn.Module | None = None
    down: nn.Module | None = None
    norm_attn: nn.Module | None = None
    norm_mlp: nn.Module | None = None
    post_attn: nn.Module | None = None
    post_mlp: nn.Module | None = None
    n_experts: int = 0

    @property
    def attn_out(self) -> nn.Module:
        """The module whose output is what the attention adds to the stream."""
        return self.post_attn or self.o

    @property
    def mlp_out(self) -> nn.Module | None:
        """The module whose output is what the MLP adds to the stream."""
        return self.post_mlp or self.down or self.mlp


@dataclass
class Parts:
    """All that was found: the blocks, what stands around them, and the placement of the norms."""

    blocks: list[Block]
    embed: nn.Module
    unembed: nn.Module | None
    final_norm: nn.Module | None
    #: pre (before each part), post (after each sum, as BERT), both (before, and after each part, as Gemma-2), after
    #: (only after each part, as OLMo-2)
    norm_placement: str
    parallel: bool
    #: whether the first position stays as it is when the last one changes
    causal: bool = False


def is_linear(module: nn.Module) -> bool:
    """A linear layer of any make: torch, Conv1D, quantised, or wrapped by an adapter."""
    return isinstance(module, nn.Linear) or hasattr(module, "in_features") or type(module).__name__ == "Conv1D"


def in_out(module: Any) -> tuple[int, int]:
    """Input and output width of a linear layer."""
    if type(module).__name__ == "Conv1D":
        return module.weight.shape[0], module.weight.shape[1]
    return int(module.in_features), int(module.out_features)


def linears(module: nn.Module) -> dict[str, nn.Module]:
    """The outermost linear layers below `module`, by path."""
    found: dict[str, nn.Module] = {}
    for name, child in module.named_modules():
        if name and is_linear(child) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = child
    return found


def _role(path: str) -> str | None:
    last = path.rpartition(".")[2]
    return next((role for role, pattern in _ROLES.items() if pattern.match(last)), None)


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalisation layer, by its class name."""
    return "norm" in type(module).__name__.lower() and not list(module.children())


def find_parts(hf: nn.Module, inputs: dict[str, Any]) -> Parts:
    """The parts of a Hugging Face model; `inputs` are a tiny batch for it.

    Raises ModelError when there is not exactly one stack of attention blocks, or a block cannot be told apart.
    """
    stacks = {
        name: list(module)
        for name, module in hf.named_modules()
        if isinstance(module, nn.ModuleList)
        and len({type(child) for child in module}) == 1
        and all(any(_role(path) in ("q", "qkv") for path in linears(child)) for child in module)
        and ".experts" not in name
    }
    kind = type(hf).__name__
    if not stacks:
        raise ModelError(
            f"{kind} has no list of layers with an attention whose projections can be told apart; headscope reads "
            "decoders and encoders made of ordinary attention blocks."
        )
    if len(stacks) > 1:
        raise ModelError(
            f"{kind} has several stacks ({', '.join(stacks)}); encoder-decoder and multimodal models are not supported "
            "yet. Load one tower on its own."
        )
    blocks = [_find_block(block, kind) for block in next(iter(stacks.values()))]
    embed = hf.get_input_embeddings()  # type: ignore[operator]
    unembed = hf.get_output_embeddings() if hasattr(hf, "get_output_embeddings") else None  # type: ignore[operator]
    return _watch(hf, inputs, Parts(blocks, embed, unembed, None, "pre", False))


def _find_block(block: nn.Module, kind: str) -> Block:
    found = linears(block)
    named = dict(block.named_modules())
    roles = {role: path for path in found if (role := _role(path))}
    first = roles.get("q") or roles["qkv"]
    attn_path = first.rpartition(".")[0]
    taken = set(roles.values())
    # the output projection is the remaining linear layer nearest to q, k, v in the tree (BERT keeps it beside `self`)
    scope = attn_path
    while True:
        rest = [path for path in found if path.startswith(f"{scope}.") and path not in taken]
        if rest or not scope:
            break
        scope = scope.rpartition(".")[0]
    if not rest:
        raise ModelError(f"In a layer of {kind}, no output projection was found beside {first}.")
    o_path = rest[-1]
    parts = Block(block, named[attn_path], found[o_path])
    for role, path in roles.items():
        setattr(parts, role, found[path])
    parts.qkv_grouped = "qkv" in roles and roles["qkv"].rpartition(".")[2] in _GROUPED
    remaining = {
        path: module for path, module in found.items() if path not in taken and not path.startswith(f"{scope}.")
    }
    _find_mlp(parts, block, remaining, kind)
    return parts


def _find_mlp(parts: Block, block: nn.Module, remaining: dict[str, nn.Module], kind: str) -> None:
    for name, module in block.named_modules():
        stacked = [p for p in module.parameters(recurse=False) if p.ndim == 3]
        listed = isinstance(module, nn.ModuleList) and "expert" in name
        if stacked or listed:
            parts.n_experts = len(module) if listed else stacked[0].shape[0]
            parts.mlp = block.get_submodule(name.partition(".")[0])
            return
    if not remaining:
        return
    *into, (down_path, down) = remaining.items()
    d_mlp = in_out(down)[0]
    parts.down = down
    parts.mlp = block.get_submodule(down_path.rpartition(".")[0])
    for path, module in into:
        last = path.rpartition(".")[2]
        if in_out(module)[1] == 2 * d_mlp:
            parts.gate_up = module
        elif "gate" in last or last in ("w1", "wi_0"):
            parts.gate = module
        elif in_out(module)[1] == d_mlp:
            parts.up = module
        else:
            raise ModelError(f"In a layer of {kind}, the role of the linear layer {path} could not be told.")
    if parts.up is None and parts.gate_up is None:
        raise ModelError(f"In a layer of {kind}, no input projection of the MLP was found beside {down_path}.")


@contextmanager
def uncompiled(hf: nn.Module) -> Iterator[None]:
    """While the block runs, modules that `module.compile()` was called on run as written, so that hooks are heard."""
    compiled = {m: m._compiled_call_impl for m in hf.modules() if getattr(m, "_compiled_call_impl", None) is not None}
    try:
        for module in compiled:
            module._compiled_call_impl = None
        yield
    finally:
        for module, call in compiled.items():
            module._compiled_call_impl = call


def first_tensor(output: Any) -> Tensor:
    """The hidden state of a module's output (a tensor, or the first of a tuple)."""
    return output if isinstance(output, Tensor) else output[0]


def _is_causal(hf: nn.Module, inputs: dict[str, Any], last: nn.Module, before: Tensor) -> bool:
    """Whether no position sees a later one: the last layer gives the same for the first when the last token changes."""
    ids = inputs.get("input_ids")
    if ids is None or ids.shape[1] < 2:
        return False
    found: list[Tensor] = []
    hook = last.register_forward_hook(lambda _, args, output: found.append(first_tensor(output)))
    other = ids.clone()
    other[:, -1] = ids[:, 0] if int(ids[0, -1]) != int(ids[0, 0]) else ids[:, 0] - 1
    try:
        with torch.no_grad(), uncompiled(hf):
            hf(**{**inputs, "input_ids": other})
    finally:
        hook.remove()
    return bool(torch.allclose(found[0][:, 0], before[:, 0], rtol=1e-4, atol=1e-6))


def _watch(hf: nn.Module, inputs: dict[str, Any], parts: Parts) -> Parts:
    """One forward pass that records which tensor every norm reads, to say where the norms stand."""
    # (module, input, output); the tensors are kept so that an address names one tensor for the whole pass
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
        if given is not None:
            seen[module] = (given, first_tensor(output))

    norms = [module for module in hf.modules() if is_norm(module)]
    watched = {*norms}
    for part in parts.blocks:
        watched |= {m for m in (part.block, part.o, part.down, part.mlp) if m is not None}
    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in watched]
    try:
        with torch.no_grad(), uncompiled(hf):
            hf(**inputs)
    finally:
        for hook in hooks:
            hook.remove()

    def same(a: Tensor, b: Tensor) -> bool:
        return a.data_ptr() == b.data_ptr() and a.numel() == b.numel()

    last = parts.blocks[-1].block
    parts.causal = _is_causal(hf, inputs, last, seen[last][1])
    inside = {module for part in parts.blocks for module in part.block.modules()}
    outside = [m for m in norms if m in seen and m not in inside and same(seen[m][0], seen[last][1])]
    parts.final_norm = outside[0] if outside else None
    for part in parts.blocks:
        pre, post = seen[part.block]
        mlp_module = part.down or part.mlp
        inner = set(part.attn.modules())  # norms of q and k
        for norm in (m for m in part.block.modules() if m in seen and is_norm(m) and m not in inner):
            given, made = seen[norm]
            if same(given, pre):
                if part.norm_attn is None:
                    part.norm_attn = norm
                else:
                    part.norm_mlp = norm
            elif same(given, seen[part.o][1]):
                part.post_attn = norm
            elif mlp_module in seen and same(given, seen[mlp_module][1]):
                part.post_mlp = norm
            elif same(made, post):
                part.norm_attn, part.norm_mlp, parts.norm_placement = part.norm_mlp, norm, "post"
            else:
                part.norm_mlp = norm
    first = parts.blocks[0]
    if parts.norm_placement != "post" and first.post_attn is not None:
        parts.norm_placement = "both" if first.norm_attn is not None else "after"
    if parts.norm_placement == "pre" and first.mlp_out is not None:
        pre, _ = seen[first.block]
        reads_mid = first.norm_mlp is not None and not same(seen[first.norm_mlp][0], pre)
        parts.parallel = not reads_mid
    return parts
