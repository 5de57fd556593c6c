"""What a model is made of: its sizes, and its weights under the field's names.

All weights are written for row vectors: `x @ W_Q` with `W_Q [d_model, d_head]`, `z @ W_O` with `W_O [d_head, d_model]`.
Norm weights are not folded in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headscope.core.errors import ModelError, NotApplicable, UsageError
from headscope.model.discover import Block, Parts, in_out


def present(module: Any, name: str) -> Tensor | None:
    """A module's parameter, or None; a copy of it where accelerate keeps the values elsewhere (on disk, say)."""
    found = getattr(module, name, None)
    if found is not None and found.is_meta:
        from accelerate.utils import align_module_device

        with align_module_device(module):
            found = getattr(module, name).detach().clone()
    return found


def weight_of(module: Any) -> Tensor:
    """A linear layer's weight as [d_in, d_out], with the active adapters of a PEFT wrapper added."""
    base = getattr(module, "base_layer", module)
    stored: Any = present(base, "weight")
    weight = stored if type(base).__name__ == "Conv1D" else stored.T
    if not weight.is_floating_point() or weight.ndim != 2:
        raise NotApplicable(
            f"The weights of this {type(base).__name__} are quantised; weight-based methods need floats."
        )
    # what is merged stands in the base's weight already, and then nothing else is added
    if base is module or getattr(module, "merged", False) or getattr(module, "disable_adapters", False):
        return weight
    for adapter in getattr(module, "active_adapters", ()):
        if adapter not in getattr(module, "lora_A", {adapter: None}):
            continue  # this adapter leaves this layer alone
        if not hasattr(module, "get_delta_weight"):
            raise NotApplicable(
                f"The weights that the adapter {adapter} gives to this {type(base).__name__} are no sum."
            )
        delta = module.get_delta_weight(adapter)
        weight = weight + (delta if type(base).__name__ == "Conv1D" else delta.T)
    return weight


def bias_of(module: Any) -> Tensor | None:
    """A linear layer's bias [d_out], or None."""
    return present(getattr(module, "base_layer", module), "bias")


@dataclass(frozen=True, eq=False)
class Anatomy:
    """Sizes and parts of a model. Layers, heads, kv heads and neurons count from 0."""

    parts: Parts
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_model: int
    d_head: int
    d_mlp: int
    norm: str
    positions: str
    rope: dict[str, Any] | None
    causal: bool

    @property
    def blocks(self) -> list[Block]:
        """The modules of each layer."""
        return self.parts.blocks

    @property
    def final_norm(self) -> nn.Module | None:
        """The norm between the last layer and the unembedding, or None."""
        return self.parts.final_norm

    def facts(self) -> dict[str, Any]:
        """The sizes and kinds as plain data, as saved in an atlas."""
        first = self.blocks[0]
        return {
            "n_layers": self.n_layers,
            "n_heads": self.n_heads,
            "n_kv_heads": self.n_kv_heads,
            "d_model": self.d_model,
            "d_head": self.d_head,
            "d_mlp": self.d_mlp,
            "norm": self.norm,
            "norm_placement": self.parts.norm_placement,
            "parallel": self.parts.parallel,
            "positions": self.positions,
            "rope": self.rope,
            "gated_mlp": first.gate is not None or first.gate_up is not None,
            "fused_qkv": first.qkv is not None,
            "n_experts": first.n_experts,
            "biases": bias_of(first.o) is not None,
            "tied_embeddings": self.tied,
            "kind": "decoder" if self.causal else "encoder",
        }

    @property
    def tied(self) -> bool:
        """Whether embedding and unembedding share one tensor."""
        unembed = self.parts.unembed
        return unembed is not None and getattr(unembed, "weight", None) is getattr(self.parts.embed, "weight", 0)

    def kv_of(self, head: int) -> int:
        """The kv head that a query head reads."""
        return head // (self.n_heads // self.n_kv_heads)

    def qkv_columns(self, which: str, index: int, layer: int = 0) -> tuple[nn.Module, slice]:
        """The module and output columns that make head `index` of q (or kv head `index` of k or v)."""
        block, d = self.blocks[layer], self.d_head
        if block.qkv is None:
            module = getattr(block, which)
            return module, slice(index * d, (index + 1) * d)
        if block.qkv_grouped:
            r = self.n_heads // self.n_kv_heads
            group, within = divmod(index, r) if which == "q" else (index, r + (which == "v"))
            start = (group * (r + 2) + within) * d
        else:
            offset = {"q": 0, "k": self.n_heads, "v": self.n_heads + self.n_kv_heads}[which]
            start = (offset + index) * d
        return block.qkv, slice(start, start + d)

    def split_qkv(self, which: str, output: Tensor, layer: int) -> Tensor:
        """[batch, pos, columns] of the projection → [batch, pos, head or kv_head, d_head]."""
        n = self.n_heads if which == "q" else self.n_kv_heads
        columns = [self.qkv_columns(which, i, layer)[1] for i in range(n)]
        return torch.stack([output[..., c] for c in columns], -2)

    def _check(self, layer: int, index: int | None = None, n: int = 0, what: str = "head") -> None:
        if not 0 <= layer < self.n_layers:
            raise UsageError(f"Layer {layer} does not exist: this model has layers 0 to {self.n_layers - 1}.")
        if index is not None and not 0 <= index < n:
            raise UsageError(f"{what} {index} of layer {layer} does not exist: this model has {what}s 0 to {n - 1}.")

    def _project(self, which: str, layer: int, index: int) -> Tensor:
        module, columns = self.qkv_columns(which, index, layer)
        return weight_of(module)[:, columns]

    def W_Q(self, layer: int, head: int) -> Tensor:
        """[d_model, d_head] of a query head."""
        self._check(layer, head, self.n_heads)
        return self._project("q", layer, head)

    def W_K(self, layer: int, head: int) -> Tensor:
        """[d_model, d_head] of the keys that a query head reads (those of its kv head)."""
        self._check(layer, head, self.n_heads)
        return self._project("k", layer, self.kv_of(head))

    def W_V(self, layer: int, head: int) -> Tensor:
        """[d_model, d_head] of the values that a query head reads (those of its kv head)."""
        self._check(layer, head, self.n_heads)
        return self._project("v", layer, self.kv_of(head))

    def W_O(self, layer: int, head: int) -> Tensor:
        """[d_head, d_model] of a query head."""
        self._check(layer, head, self.n_heads)
        return weight_of(self.blocks[layer].o)[head * self.d_head : (head + 1) * self.d_head]

    def W_OV(self, layer: int, head: int) -> Tensor:
        """[d_model, d_model] = W_V @ W_O: what a head writes for what it reads."""
        return self.W_V(layer, head) @ self.W_O(layer, head)

    def W_QK(self, layer: int, head: int) -> Tensor:
        """[d_model, d_model] = W_Q @ W_K.T, without rotation: destination by source."""
        return self.W_Q(layer, head) @ self.W_K(layer, head).T

    def b_O(self, layer: int) -> Tensor | None:
        """Bias [d_model] of the attention's output projection, or None."""
        return bias_of(self.blocks[layer].o)

    def _dense(self, layer: int) -> Block:
        self._check(layer)
        block = self.blocks[layer]
        if block.down is None:
            what = "experts" if block.n_experts else "no MLP"
            raise NotApplicable(f"Layer {layer} has {what}; there is no single W_in or W_out to give.")
        return block

    def W_in(self, layer: int) -> Tensor:
        """[d_model, d_mlp]: input weights of the neurons (the `up` side where the MLP is gated)."""
        block = self._dense(layer)
        return weight_of(block.up) if block.up is not None else weight_of(block.gate_up)[:, self.d_mlp :]

    def W_gate(self, layer: int) -> Tensor | None:
        """[d_model, d_mlp]: gate weights of the neurons, or None where the MLP is not gated."""
        block = self._dense(layer)
        if block.gate_up is not None:
            return weight_of(block.gate_up)[:, : self.d_mlp]
        return None if block.gate is None else weight_of(block.gate)

    def W_out(self, layer: int) -> Tensor:
        """[d_mlp, d_model]: output weights of the neurons."""
        return weight_of(self._dense(layer).down)

    @property
    def W_E(self) -> Tensor:
        """[vocab, d_model]: token embedding."""
        weight = present(self.parts.embed, "weight")
        if weight is None or weight.ndim != 2:
            raise NotApplicable("This model has no token embedding.")
        return weight

    @property
    def W_U(self) -> Tensor:
        """[d_model, vocab]: unembedding."""
        if self.parts.unembed is None:
            raise NotApplicable("This model has no unembedding: it was loaded without a language-model head.")
        return weight_of(self.parts.unembed)


def read_anatomy(hf: Any, parts: Parts) -> Anatomy:
    """Sizes from shapes; only the number of heads is taken from the configuration.

    Raises ModelError when layers differ in shape or the sizes contradict each other.
    """
    first = parts.blocks[0]
    config = getattr(first.attn, "config", None) or hf.config
    n_heads = getattr(config, "num_attention_heads", None) or getattr(config, "n_heads", None)
    if not n_heads:
        raise ModelError(f"The configuration of {type(hf).__name__} does not say its number of attention heads.")
    d_z, d_model = in_out(first.o)
    d_head = d_z // n_heads
    k_width = in_out(first.k)[1] if first.k is not None else (in_out(first.qkv)[1] - d_z) // 2
    if d_z % n_heads or k_width % d_head or n_heads % (k_width // d_head):
        raise ModelError(f"{type(hf).__name__}: {n_heads} heads do not fit projections of widths {d_z} and {k_width}.")
    if len({(in_out(b.o), b.n_experts, b.down and in_out(b.down)) for b in parts.blocks}) > 1:
        raise ModelError(f"The layers of {type(hf).__name__} differ in shape; such models are not supported yet.")
    d_mlp = in_out(first.down)[0] if first.down is not None else int(getattr(config, "intermediate_size", 0) or 0)
    norm_module = first.norm_attn or first.post_attn
    norm = "none" if norm_module is None else "rms" if "rms" in type(norm_module).__name__.lower() else "layer"
    rope = getattr(config, "rope_parameters", None) or (
        {"rope_theta": config.rope_theta} if getattr(config, "rope_theta", None) else None
    )
    alibi = bool(getattr(config, "alibi", False)) or config.model_type == "bloom"
    rotary = rope is not None or getattr(config, "rotary_dim", None) or getattr(config, "rotary_pct", None)
    positions = "alibi" if alibi else "rope" if rotary else "learned"
    is_decoder = getattr(first.attn, "is_causal", None)
    causal = bool(is_decoder) if is_decoder is not None else parts.causal
    return Anatomy(
        parts, len(parts.blocks), n_heads, k_width // d_head, d_model, d_head, d_mlp, norm, positions,
        dict(rope) if rope and positions == "rope" else None, causal,
    )  # fmt: skip
