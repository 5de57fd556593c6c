"""Look inside one attention product, as the model itself computes it.

While an attention module runs, `AttentionTap` sees the torch calls it makes: `scaled_dot_product_attention`, or the
matmul, softmax, matmul of eager code. So q, k, v are the ones used, whatever the family does to them before, and
without edits every call goes through untouched. Backends that hide their product (flash kernels) are not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_MATMULS = {"matmul", "__matmul__", "bmm", "baddbmm"}


def _blind(scores: Tensor) -> Tensor:
    """[…, query, 1]: queries that may look at no key; they attend to nothing, whatever a softmax makes of it."""
    return (scores <= torch.finfo(scores.dtype).min / 2).all(-1, keepdim=True)


#: what the tap calls with a site's name and its tensor; returns the tensor to go on with
Visit = Callable[[str, Tensor], Tensor]


class AttentionTap(TorchFunctionMode):
    """Calls `visit` for the sites q, k, v, attn_scores, pattern in `sites` of one attention module's forward pass.

    `edited` says whether any of them may change; if not, the model's own result is returned as it is, and `queries`
    [n] may name the only ones whose attn_scores and pattern are wanted.
    """

    def __init__(
        self, n_heads: int, n_kv_heads: int, d_head: int, sites: set[str], edited: set[str], visit: Visit,
        queries: Tensor | None = None,
    ):  # fmt: skip
        super().__init__()
        self.queries = queries
        self.n_heads, self.n_kv_heads, self.d_head = n_heads, n_kv_heads, d_head
        self.sites, self.edited, self._visit = sites, edited, visit
        self.seen = False
        self._stage = "scores"  # then "mix" after the softmax, then "done"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention" and self._stage != "done":
            return self._fused(func, *args, **kwargs)
        if name in _MATMULS and self._stage == "scores":
            return self._product(func, list(args), dict(kwargs))
        if name == "softmax" and self._stage == "scores":
            return self._softmax(func, list(args), dict(kwargs))
        if name in _MATMULS and self._stage == "mix":
            return self._mix(func, list(args), dict(kwargs))
        return func(*args, **kwargs)

    def _four(self, x: Tensor) -> Tensor:
        """[batch·head, a, b] → [batch, head, a, b]; four axes stay as they are."""
        return x if x.ndim == 4 else x.view(-1, self.n_heads, *x.shape[1:])

    def _asked(self, x: Tensor) -> Tensor:
        """[…, query, n] at the queries that are wanted."""
        return x if self.queries is None else x[..., self.queries, :]

    def _heads(self, site: str, x: Tensor) -> Tensor:
        """Visit q, k or v given as [batch, head, pos, d_head]; returns them in the same form."""
        if site not in self.sites:
            return x
        per = x.shape[1] // (self.n_heads if site == "q" else self.n_kv_heads)
        made = self._visit(site, x[:, ::per].transpose(1, 2))
        if site not in self.edited:
            return x
        return made.transpose(1, 2).repeat_interleave(per, 1)

    def _fused(
        self, func: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        self.seen, self._stage = True, "done"
        given, shape = attn_mask, query.shape
        if query.shape[1] < self.n_heads:
            # one new token: transformers lays the query heads of a kv head along the axis of positions
            query = query.reshape(shape[0], self.n_heads, 1, shape[-1])
            if attn_mask is not None and attn_mask.shape[1] > 1:
                attn_mask = attn_mask.reshape(shape[0], self.n_heads, 1, -1)
        query, key, value = self._heads("q", query), self._heads("k", key), self._heads("v", value)
        if self.sites & {"attn_scores", "pattern"}:
            full = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
            scores = self._asked(query) @ full.transpose(-1, -2) * (self.d_head**-0.5 if scale is None else scale)
            if is_causal:
                number = torch.arange(full.shape[2], device=scores.device)
                query_number = self._asked(torch.arange(query.shape[2], device=scores.device)[:, None])
                scores = scores.masked_fill(number > query_number, float("-inf"))
            if attn_mask is not None:
                attn_mask = attn_mask if attn_mask.shape[-2] == 1 else self._asked(attn_mask)
                hidden = attn_mask.dtype == torch.bool
                scores = scores.masked_fill(~attn_mask, float("-inf")) if hidden else scores + attn_mask
            if "attn_scores" in self.sites:
                scores = self._visit("attn_scores", scores)
            pattern = F.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))
            pattern = pattern.nan_to_num(0.0).to(query.dtype)  # a padding row may see nothing at all
            if "attn_scores" in self.edited:
                pattern = pattern.masked_fill(_blind(scores), 0.0)
            if "pattern" in self.sites:
                pattern = self._visit("pattern", pattern)
            if self.edited & {"attn_scores", "pattern"}:
                mixed = pattern @ value.repeat_interleave(query.shape[1] // value.shape[1], 1)
                return mixed.reshape(*shape[:-1], -1)
        return func(
            query.reshape(shape), key, value, attn_mask=given, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
            enable_gqa=enable_gqa,
        )  # fmt: skip

    def _product(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        batches = [k for k in ("batch1", "batch2") if k in kwargs]
        left, right = (kwargs[k] for k in batches) if batches else args[-2:]
        if left.ndim < 3 or left.shape[-1] != self.d_head or right.shape[-2] != self.d_head:
            return func(*args, **kwargs)
        self.seen = True
        query, key = self._heads("q", self._four(left)), self._heads("k", self._four(right).transpose(-1, -2))
        if self.edited & {"q", "k"}:
            left, right = query.reshape(left.shape), key.transpose(-1, -2).reshape(right.shape)
            if batches:
                kwargs["batch1"], kwargs["batch2"] = left, right
            else:
                args[-2:] = left, right
        return func(*args, **kwargs)

    def _softmax(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        self.seen, self._stage = True, "mix"
        if "attn_scores" in self.sites:
            scores = self._visit("attn_scores", self._asked(self._four(args[0])))
            if "attn_scores" in self.edited:
                args[0] = scores.reshape(args[0].shape)
        pattern = func(*args, **kwargs)
        if "attn_scores" in self.edited:
            pattern = pattern.masked_fill(_blind(args[0]), 0.0)
        if "pattern" in self.sites:
            # eager code often takes the softmax in float32 and casts back before the product
            made = self._visit("pattern", self._asked(self._four(pattern)).to(args[0].dtype))
            if "pattern" in self.edited:
                pattern = made.reshape(pattern.shape)
        return pattern

    def _mix(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        self._stage = "done"
        if "v" in self.sites:
            value = self._heads("v", self._four(args[1]))
            if "v" in self.edited:
                args[1] = value.reshape(args[1].shape)
        return func(*args, **kwargs)
