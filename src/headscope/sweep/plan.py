"""Which edits run together, from which layer and position on, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headscope.model import Model
from headscope.trace import Edit
from headscope.trace.replay import Clean, first_column, first_layer

#: chunks grow to about this many tokens: enough for a matrix product to run at full speed, little enough to fit caches
CHUNK_TOKENS = 2048
#: until a chunk has this many tokens, it takes in edits of the next layer, though it then runs a layer more for them
MERGE_TOKENS = 512
#: bytes that the logits of a chunk may take
LOGITS_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Chunk:
    """Sets of edits (by their place in the plan) that run in one pass from layer `below` and column `column` on."""

    sets: tuple[int, ...]
    below: int
    column: int


@dataclass(frozen=True)
class Plan:
    """Chunks in the order in which they run. `work` is in token·layers, `plain` that of one pass an edit."""

    chunks: tuple[Chunk, ...]
    work: int
    plain: int


def make_plan(
    model: Model, clean: Clean, sets: Sequence[list[Edit]], first_position: int, n_positions: int,
    *, chunk_tokens: int = CHUNK_TOKENS,
) -> Plan:  # fmt: skip
    """Chunks for `sets`, every one of which may touch columns from its own first on; logits are wanted at `n_positions`
    columns, the first of which is `first_position`.
    """
    batch, width = clean.tokens.shape
    n_layers = model.anatomy.n_layers

    def key(i: int) -> tuple[int, int, int]:
        column = min(first_column(clean, sets[i]), first_position) if clean.keys is not None else 0
        return column, first_layer(model, sets[i]), i

    row_bytes = batch * n_positions * model.n_vocab * model.dtype.itemsize
    most = max(1, LOGITS_BYTES // row_bytes)
    chunks: list[Chunk] = []
    current: list[int] = []
    work = 0

    def close(column: int, below: int) -> None:
        nonlocal work
        chunks.append(Chunk(tuple(current), below, column))
        work += len(current) * batch * (width - column) * (n_layers - below)
        current.clear()

    at = (0, 0)
    for column, layer, i in sorted(map(key, range(len(sets)))):
        tokens = batch * (width - column)
        full = len(current) >= most or (len(current) + 1) * tokens > chunk_tokens
        apart = column != at[0] or (layer != at[1] and len(current) * tokens >= MERGE_TOKENS)
        if current and (full or apart):
            close(*at)
        if not current:
            at = (column, layer)
        current.append(i)
    if current:
        close(*at)
    return Plan(tuple(chunks), work, len(sets) * batch * width * n_layers)
