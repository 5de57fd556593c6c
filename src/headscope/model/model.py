"""A loaded model: the untouched Hugging Face module, its tokenizer and its anatomy."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from headscope.core.component import Component, head
from headscope.core.errors import NotApplicable, UsageError
from headscope.model.anatomy import Anatomy, present
from headscope.model.words import word, words


@dataclass(eq=False)
class Model:
    """`hf` is the Hugging Face module as it is; nothing in it is changed or copied."""

    hf: Any  # an nn.Module; its other attributes differ from family to family
    tokenizer: Any
    anatomy: Anatomy
    name: str

    @property
    def device(self) -> torch.device:
        """Where the embedding lives, which is where tokens must be sent."""
        embed: Any = self.anatomy.parts.embed
        device = next(embed.parameters()).device
        return torch.device(embed._hf_hook.execution_device) if device.type == "meta" else device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embedding."""
        return next(self.anatomy.parts.embed.parameters()).dtype

    @property
    def is_causal(self) -> bool:
        """Whether positions attend only to earlier ones."""
        return self.anatomy.causal

    @property
    def n_vocab(self) -> int:
        """Rows of the token embedding."""
        return int(self.anatomy.W_E.shape[0])

    @property
    def max_positions(self) -> int | None:
        """The longest input the configuration allows, or None where it sets no limit."""
        if self.anatomy.positions == "alibi":
            return None
        return getattr(self.hf.config, "max_position_embeddings", None)

    def heads(self) -> list[Component]:
        """All attention heads, layer by layer."""
        return [head(layer, h) for layer in range(self.anatomy.n_layers) for h in range(self.anatomy.n_heads)]

    def kv_of(self, index: int) -> int:
        """The kv head that query head `index` reads."""
        return self.anatomy.kv_of(index)

    @property
    def fingerprint(self) -> str:
        """Hash of the configuration and of the weights' names, shapes and a sample of their values, as they are now."""
        digest = hashlib.sha256()
        config = self.hf.config.to_dict()
        # where it was loaded from and by which version says nothing about what the model computes
        ignore = {
            "_name_or_path",
            "architectures",
            "transformers_version",
            "dtype",
            "torch_dtype",
            "_attn_implementation",
        }
        kept = {name: value for name, value in config.items() if name not in ignore}
        # sorted at every depth: a configuration read from a file has its keys in another order
        digest.update(json.dumps(kept, sort_keys=True, default=repr).encode())
        for name, weight in sorted(self.hf.state_dict().items()):
            if weight.is_meta:
                owner, _, last = name.rpartition(".")
                weight = present(self.hf.get_submodule(owner), last)
            flat = weight.detach().reshape(-1)
            # steps of a large prime, so that no row or column is always passed over
            places = (torch.arange(min(flat.numel(), 256)) * 2_654_435_761) % max(1, flat.numel())
            sample = flat[places.to(flat.device)].to("cpu", torch.float32)
            digest.update(f"{name}{tuple(weight.shape)}".encode() + sample.numpy().tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def prefix(self) -> list[int]:
        """The ids that the tokenizer puts in front of every text by itself (a BOS), often none."""
        if self.tokenizer is None:
            return []
        with_special = self.tokenizer("a")["input_ids"]
        plain = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        return list(with_special[: with_special.index(plain[0])]) if plain and plain[0] in with_special else []

    def tokens(self, texts: Any) -> tuple[Tensor, Tensor]:
        """Token ids [batch, pos] and a mask [batch, pos] that is True at real tokens, of a text, a list of texts, or ids
        ([pos] or [batch, pos], as a tensor, an array or lists).

        Shorter texts are padded on the left in decoders, on the right in encoders. Ids are taken as they are.
        Raises UsageError for an empty or too long prompt, NotApplicable for text without a tokenizer.
        """
        texts = _read(texts)
        if isinstance(texts, Tensor):
            if texts.ndim > 2:
                raise UsageError(f"Token ids are a tensor [batch, pos], but these have shape {tuple(texts.shape)}.")
            ids = texts if texts.ndim == 2 else texts.reshape(1, -1)
            rows = None
        else:
            if self.tokenizer is None:
                raise NotApplicable(f"{self.name} was loaded without a tokenizer; give token ids [batch, pos] instead.")
            rows = [self.tokenizer(text)["input_ids"] for text in texts]
            if min(map(len, rows)) == 0:
                raise UsageError("A prompt is empty; it needs at least one token.")
            width = max(map(len, rows))
            ids = torch.zeros(len(rows), width, dtype=torch.long)
        if ids.shape[0] == 0 or ids.shape[1] == 0:
            raise UsageError("A prompt is empty; it needs at least one token.")
        if self.max_positions and ids.shape[1] > self.max_positions:
            raise UsageError(f"A prompt has {ids.shape[1]} tokens, but {self.name} reads at most {self.max_positions}.")
        mask = torch.ones(ids.shape, dtype=torch.bool)
        if rows is not None:
            for i, row in enumerate(rows):
                gap = ids.shape[1] - len(row)
                real = slice(gap, None) if self.is_causal else slice(0, len(row))
                mask[i] = False
                mask[i, real] = True
                ids[i, real] = torch.tensor(row)
        elif ids.is_floating_point() or int(ids.min()) < 0 or int(ids.max()) >= self.n_vocab:
            raise UsageError(f"Token ids must be whole numbers from 0 to {self.n_vocab - 1}.")
        return ids.to(self.device), mask.to(self.device)

    def words(self, ids: Iterable[int]) -> list[str]:
        """Each token of a text as text, `#5` without a tokenizer; those that share one character are numbered."""
        numbers = [int(i) for i in ids]
        return [f"#{i}" for i in numbers] if self.tokenizer is None else words(self.tokenizer, numbers)

    def word(self, token: int) -> str:
        """One token of the vocabulary as text, `#5` without a tokenizer."""
        return f"#{token}" if self.tokenizer is None else word(self.tokenizer, int(token))

    def text(self, ids: Iterable[int]) -> str:
        """Tokens as one text."""
        numbers = [int(i) for i in ids]
        if self.tokenizer is None:
            return " ".join(f"#{i}" for i in numbers)
        return str(self.tokenizer.decode(numbers, clean_up_tokenization_spaces=False))

    def __repr__(self) -> str:
        a = self.anatomy
        return f"Model({self.name}: {a.n_layers} layers × {a.n_heads} heads, d_model {a.d_model}, {self.fingerprint})"


def _read(given: Any) -> list[str] | Tensor:
    """A prompt as texts, or as whatever numbers it holds."""
    if isinstance(given, Tensor):
        return given
    texts = [given] if isinstance(given, str) else given
    if isinstance(texts, (list, tuple)) and texts and all(isinstance(text, str) for text in texts):
        return list(texts)
    try:
        found = torch.as_tensor(given)
        if found.dtype != torch.bool:
            return found
    except (TypeError, ValueError, RuntimeError):
        pass
    raise UsageError("A prompt must be text, a list of texts, or token ids [batch, pos], all rows of one length.")
