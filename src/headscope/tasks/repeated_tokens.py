"""A block of random tokens, repeated: the second time, each token can only be known by looking the first one up."""

from __future__ import annotations

import torch
from torch import Tensor

from headscope.core.errors import NotApplicable, UsageError
from headscope.model import Model
from headscope.tasks.base import Prompts, check_length


def make(model: Model, n: int, seed: int, *, length: int = 20, repeats: int = 2) -> Prompts:
    """Blocks of `length` distinct ids, `repeats` times, after the BOS that the tokenizer would add (if any).

    Scored are all tokens of the repeats but the first of each block, which nothing foretells the first time.
    `meta`: `start` (where the first block begins), `length`, `repeats`. Needs no tokenizer.
    """
    if length < 2 or repeats < 2:
        raise UsageError(f"repeated-tokens needs length and repeats of at least 2, but got {length} and {repeats}.")
    tokens = random_rows(model, n, seed, length)
    start = tokens.shape[1] - length
    tokens = torch.cat([tokens, tokens[:, start:].repeat(1, repeats - 1)], 1)
    scored = torch.tensor([start + r * length + i for r in range(1, repeats) for i in range(length - 1)])
    positions = scored.expand(n, -1)
    target = tokens.gather(1, positions + 1)
    meta = {"start": start, "length": length, "repeats": repeats}
    return Prompts("repeated-tokens", seed, tokens, positions, target, meta=meta)


def random_rows(model: Model, n: int, seed: int, length: int) -> Tensor:
    """Ids [n, start + length]: what the tokenizer puts in front (if anything), then distinct random tokens."""
    special = set(model.tokenizer.all_special_ids) if model.tokenizer is not None else set()
    # the first ids of most vocabularies are control tokens, bytes and digits
    low = 1000 if model.n_vocab > 10_000 else min(5, model.n_vocab // 4)
    allowed = torch.tensor([i for i in range(low, model.n_vocab) if i not in special])
    if len(allowed) < length:
        raise NotApplicable(
            f"A row of {length} different random tokens needs as many ids; this model has {len(allowed)}."
        )
    generator = torch.Generator().manual_seed(seed)
    rows = [allowed[torch.randperm(len(allowed), generator=generator)[:length]] for _ in range(n)]
    prefix = torch.tensor(model.prefix, dtype=torch.long).expand(n, -1)
    tokens = torch.cat([prefix, torch.stack(rows)], 1)
    check_length(model, tokens, "A row of random tokens")
    return tokens
