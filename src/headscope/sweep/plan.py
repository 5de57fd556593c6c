"""Which edits run together, from which layer and position on, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from headscope.model import Model
from headscope.trace import Edit
from headscope.trace.replay import Clean, first_column, first_layer

#: chunks grow to about this many tokens: enough for a matrix product to run at full speed, little enough to fit caches
CHUNK_TOKENS = 2048
#: bytes that the logits of a chunk may take
LOGITS_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Chunk:
    """Sets of edits (by their place in the plan) that go through one pass, each from its own of the ascending `layers`
    on, all from `column` on."""

    sets: tuple[int, ...]
    layers: tuple[int, ...]
    column: int


@dataclass(frozen=True)
class Plan:
    """Chunks in the order in which they run. `work` is in token·layers, `plain` that of one pass an edit."""

    chunks: tuple[Chunk, ...]
    work: int
    plain: int


def make_plan(
    model: Model, clean: Clean, sets: Sequence[list[Edit]], positions: Tensor, *, chunk_tokens: int = CHUNK_TOKENS
) -> Plan:
    """Chunks for `sets`; logits are wanted at the columns `positions` [batch, m]."""
    batch, width = clean.tokens.shape
    n_layers = model.anatomy.n_layers
    scored = int(positions.min())
    row_bytes = batch * positions.shape[1] * model.n_vocab * model.dtype.itemsize
    most = max(1, LOGITS_BYTES // row_bytes)

    def key(i: int) -> tuple[int, int, int]:
        column = min(first_column(clean, sets[i]), scored) if clean.keys is not None else 0
        return column, first_layer(model, sets[i]), i

    chunks: list[Chunk] = []
    for column, found in groupby(sorted(map(key, range(len(sets)))), lambda k: k[0]):
        ordered = list(found)
        size = max(1, min(most, chunk_tokens // (batch * (width - column))))
        for start in range(0, len(ordered), size):
            part = ordered[start : start + size]
            chunks.append(Chunk(tuple(i for _, _, i in part), tuple(layer for _, layer, _ in part), column))
    work = sum(batch * (width - c.column) * (n_layers - layer) for c in chunks for layer in c.layers)
    return Plan(tuple(chunks), work, len(sets) * batch * width * n_layers)


def affordable_tokens(model: Model, clean: Clean) -> int:
    """Tokens that a chunk may have here: CHUNK_TOKENS, or fewer where a quarter of the free memory holds no more."""
    a, size = model.anatomy, model.dtype.itemsize
    width = clean.tokens.shape[1]
    # one layer at a time: a few copies of the stream and of the neurons, scores of all heads, and every layer's keys
    each = size * (12 * a.d_model + 6 * a.d_mlp + 3 * a.n_heads * width)
    each += size * 4 * a.n_layers * a.n_kv_heads * a.d_head
    return max(1, min(CHUNK_TOKENS, free_bytes(model.device) // 4 // each))


def free_bytes(device: torch.device) -> int:
    """Memory that can still be had on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # elsewhere than on Linux: what a small machine has
        return 4 * 2**30
