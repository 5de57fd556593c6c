"""What the model says about one head on one prompt: its pattern, what it writes, what its weights promote, what is lost
without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headscope import tasks
from headscope.core.component import head as head_component
from headscope.core.errors import UsageError
from headscope.model.frozen import Frozen, freeze
from headscope.routes.extract import check_decoder
from headscope.trace import Capture, trace, zero

if TYPE_CHECKING:
    from headscope.model import Model

#: rows of the vocabulary that are multiplied at once
CHUNK = 8192
#: texts that are read at once
BATCH = 8


def check_head(model: Model, layer: int, index: int) -> None:
    """Raise UsageError for a head that the model has not."""
    a = model.anatomy
    if not (0 <= layer < a.n_layers and 0 <= index < a.n_heads):
        raise UsageError(f"L{layer}H{index} does not exist; {model.name} has {a.n_layers} layers of {a.n_heads} heads.")


def read(model: Model, prompt: str, most: int) -> Tensor:
    """Token ids [1, pos] of a prompt. Raises UsageError where it is empty or too long."""
    if not prompt:
        raise UsageError("The prompt is empty; write a few words.")
    ids, _ = model.tokens(prompt)
    if ids.shape[1] > most:
        raise UsageError(f"The prompt has {ids.shape[1]} tokens; this page shows at most {most}.")
    return ids


@torch.no_grad()
def pattern(model: Model, layer: int, index: int, ids: Tensor) -> Tensor:
    """The head's attention [query, key] on a prompt."""
    check_head(model, layer, index)
    run = trace(model, ids, ["pattern"], layers=[layer], logits=None)
    return run["pattern", layer][0, index]


@torch.no_grad()
def direct(model: Model, layer: int, index: int, ids: Tensor, query: int, key: int | None = None) -> Tensor:
    """[vocab]: what the head's output at `query` adds to the logits directly; see `written`."""
    check_head(model, layer, index)
    check_decoder(model, "Next tokens")
    width = ids.shape[1]
    if not 0 <= query < width or (key is not None and not 0 <= key < width):
        raise UsageError(f"The prompt has positions 0 to {width - 1}.")
    a = model.anatomy
    captures = [Capture("z", [layer]), Capture("resid_post", [a.n_layers - 1])]
    if key is not None:
        captures += [Capture("v", [layer]), Capture("pattern", [layer])]
    run = trace(model, ids, captures, logits=None)
    z = run["z", layer][0, query]  # [head d_head]
    part = z[index]
    if key is not None:
        part = run["pattern", layer][0, index, query, key] * run["v", layer][0, key, model.kv_of(index)]
    out = part @ a.W_O(layer, index)  # [d_model]
    block: Any = a.blocks[layer]
    if block.post_attn is not None:
        out = _through(freeze(block.post_attn, block.o(z.reshape(1, -1))), out)
    out = _through(freeze(a.final_norm, run["resid_post", a.n_layers - 1][0, query][None]), out)
    return out @ a.W_U


def written(
    model: Model, layer: int, index: int, ids: Tensor, query: int, key: int | None, k: int = 10
) -> dict[str, Any]:
    """The tokens whose logits the head's output at `query` raises and lowers most, directly: by what it read from `key`,
    or from all keys. Logits relative to the mean over the vocabulary, with the norms' scale as in this pass.
    """
    logits = direct(model, layer, index, ids, query, key)
    return ranked(model, logits - logits.mean(), k)


@torch.no_grad()
def examples(
    model: Model, layer: int, index: int, *, seed: int = 0, n: int = 32, length: int = 48, k: int = 8,
    check: Callable[[], None] = lambda: None,
) -> dict[str, Any]:  # fmt: skip
    """Where on plain text the head writes most: the positions with the longest output z·W_O, one a text at most.

    `factor`: that length over its mean. The first position is left out, where sinks keep what they do not use. `check` is
    called before every batch of texts, and may stop it all.
    """
    check_head(model, layer, index)
    prompts = tasks.make("plain-text", model, n, seed, length=length)
    patterns, sizes = [], []
    for tokens in prompts.tokens.split(BATCH):
        check()
        run = trace(model, tokens, ["z", "pattern"], layers=[layer], logits=None)
        patterns.append(run["pattern", layer][:, index])
        sizes.append((run["z", layer][:, :, index] @ model.anatomy.W_O(layer, index)).norm(dim=-1)[:, 1:].float())
    pattern, size = torch.cat(patterns), torch.cat(sizes)  # [prompt query key], [prompt pos - 1]
    best = size.max(-1)
    rows = []
    for row in best.values.topk(min(k, len(size))).indices.tolist():
        at = int(best.indices[row]) + 1
        rows.append(
            {
                "tokens": model.words(prompts.tokens[row]),
                "text": model.text(prompts.tokens[row, len(model.prefix) :]),
                "at": at,
                "factor": float(best.values[row] / size.mean()),
                "attention": [round(float(x), 4) for x in pattern[row, at]],
            }
        )
    return {"examples": rows, "texts": len(size), "length": length}


@torch.no_grad()
def copies(model: Model, layer: int, index: int, token: int, k: int = 10) -> dict[str, Any]:
    """By the weights alone: what the head would write for a token it attends to (OV), and which tokens that token would
    look for (QK, no rotation, no biases).
    """
    check_head(model, layer, index)
    check_decoder(model, "Next tokens")
    a = model.anatomy
    stream = trace(model, torch.tensor([[token]], device=model.device), ["resid_pre"], layers=[0], logits=None)
    x = stream["resid_pre", 0][0, -1]  # [d_model]
    norm: Any = a.blocks[layer].norm_attn

    def before(rows: Tensor) -> Tensor:
        return rows if norm is None else norm(rows)

    x = before(x[None])[0]
    out = x @ a.W_V(layer, index) @ a.W_O(layer, index)
    final = freeze(a.final_norm, out[None])
    if final is not None:
        out = (out - out.mean() if final.centred else out) * final.gain
    wanted = x @ a.W_Q(layer, index) @ a.W_K(layer, index).T / a.d_head**0.5  # [d_model]
    rows = [before(part) @ wanted for part in a.W_E.split(CHUNK)]
    logits = out @ a.W_U
    return {"ov": ranked(model, logits - logits.mean(), k), "qk": ranked(model, torch.cat(rows), k)}


@torch.no_grad()
def without(model: Model, layer: int, index: int, ids: Tensor, k: int = 10) -> dict[str, Any]:
    """The next token's probabilities with and without the head's output, and KL(with ‖ without) in nats."""
    check_head(model, layer, index)
    check_decoder(model, "Next tokens")
    before = _last(model, ids, [])
    after = _last(model, ids, [zero(head_component(layer, index))])
    moved = (after.exp() - before.exp()).abs()
    shown = list(dict.fromkeys([*before.topk(k).indices.tolist(), *moved.topk(k // 2).indices.tolist()]))
    shown.sort(key=lambda i: -float(before[i]))
    rows = [{"token": model.word(i), "before": float(before[i].exp()), "after": float(after[i].exp())} for i in shown]
    return {"tokens": rows, "kl": max(0.0, float((before.exp() * (before - after)).sum()))}


def _last(model: Model, ids: Tensor, edits: Any) -> Tensor:
    """Log-probabilities [vocab] of the next token."""
    return trace(model, ids, edits=edits, logits="last").logits[0, -1].float().log_softmax(-1)


def _through(norm: Frozen | None, x: Tensor) -> Tensor:
    if norm is None:
        return x
    return ((x - x.mean(-1, keepdim=True) if norm.centred else x) * norm.gain / norm.scale[..., None]).reshape(-1)


def ranked(model: Model, values: Tensor, k: int) -> dict[str, Any]:
    """The tokens of the k highest and the k lowest of values [vocab], with these."""
    if model.tokenizer is not None:
        values = values[: len(model.tokenizer)]  # rows past it are padding that no text contains
    values = values.float()
    found = {}
    for name, largest in (("promoted", True), ("suppressed", False)):
        best = values.topk(min(k, len(values)), largest=largest)
        rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        found[name] = [{"token": model.word(i), "value": value} for i, value in rows]
    return found
