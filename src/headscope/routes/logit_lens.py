"""The logit lens: what each layer's stream would predict next, if it were the last. nostalgebraist 2020."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headscope.core.errors import NotApplicable, UsageError
from headscope.draw import Figure, version
from headscope.draw.marks import visible
from headscope.model import Model
from headscope.model.discover import first_tensor
from headscope.routes.extract import check_decoder, prompt_tokens, token_id
from headscope.trace import Capture, trace

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, eq=False)
class Lens:
    """`levels`: E (the embedding) and the layers, from below; `start`: the first position that was read. `top`, `p` [level
    pos k]: ids of the best next tokens and their probabilities; `rank`, `target_p` [level pos]: place and probability of
    the target. `tokens`: those of the whole prompt; `words`: the text of each id in `top`, and of the target.
    """

    model: str
    fingerprint: str
    version: str
    prompt: str
    tokens: list[str]
    start: int
    levels: list[str]
    target_id: int
    top: Tensor
    p: Tensor
    rank: Tensor
    target_p: Tensor
    words: dict[int, str]

    @property
    def stop(self) -> int:
        """The position after the last one that was read."""
        return self.start + int(self.rank.shape[1])

    @property
    def target(self) -> str:
        """The text of the target."""
        return self.words[self.target_id]

    def _repr_html_(self) -> str:
        return figure(self)._repr_html_()

    def __repr__(self) -> str:
        return repr(figure(self))


@torch.no_grad()
def lens(
    model: Model, prompt: Any, *, target: str | int | None = None, k: int = 5, start: int = 0, stop: int | None = None
) -> Lens:
    """What each layer's stream would predict through the final norm and the unembedding, at every position of one prompt.

    `prompt`: text or token ids [pos]. `target`: the next token whose rank and probability are followed, the model's own
    prediction at the last position by default. `start`, `stop`: only these positions. The layers below were not trained to
    be read so: what they lack here they may hold in another form.

    Raises UsageError for a bad prompt, token or position, NotApplicable for models that are no decoders.
    """
    tokens = prompt_tokens(model, prompt)
    check_decoder(model, "Next tokens")
    last = model.anatomy.n_layers - 1
    run = trace(model, tokens, ["resid_pre", Capture("resid_post", [last])], logits="last")
    chosen = int(run.logits[0, -1].argmax()) if target is None else token_id(model, target)
    width = tokens.shape[1]
    streams = (run["resid_pre", i] if i <= last else run["resid_post", last] for i in range(last + 2))
    return read_lens(model, tokens[0].tolist(), streams, chosen, start, width if stop is None else stop, k)


@torch.no_grad()
def read_lens(
    model: Model, ids: list[int], streams: Iterable[Tensor], target: int, start: int, stop: int, k: int = 5
) -> Lens:
    """The lens over streams [1 pos d_model] that are there, from the embedding up."""
    if not 0 <= start < stop <= len(ids):
        raise UsageError(f"The prompt has positions 0 to {len(ids) - 1}.")
    if k < 1:
        raise UsageError(f"The lens shows at least one token a cell, but k is {k}.")
    top, p, place, target_p = [], [], [], []
    for x in streams:
        logits = unembed(model, x[0, start:stop]).float()
        best, total = logits.topk(min(k, logits.shape[-1])), logits.logsumexp(-1, keepdim=True)
        top.append(best.indices.cpu())
        p.append((best.values - total).exp().cpu())
        place.append(rank_of(logits, target).cpu())
        target_p.append((logits[:, target] - total[:, 0]).exp().cpu())
    tops = torch.stack(top)
    shown = sorted({*tops.flatten().tolist(), target})
    return Lens(
        model=model.name, fingerprint=model.fingerprint, version=version(), prompt=model.text(ids), tokens=model.words(ids), start=start,
        levels=["E", *(f"L{i}" for i in range(model.anatomy.n_layers))], target_id=target, top=tops, p=torch.stack(p),
        rank=torch.stack(place), target_p=torch.stack(target_p),
        words={i: model.word(i) for i in shown},
    )  # fmt: skip


def unembed(model: Model, x: Tensor) -> Tensor:
    """Logits [row, vocab] that the model would make of streams [row, d_model], were they the last."""
    a = model.anatomy
    if a.parts.unembed is None:
        raise NotApplicable(f"{model.name} has no unembedding to read a stream by.")
    logits: Tensor = a.parts.unembed(x if a.final_norm is None else first_tensor(a.final_norm(x)))
    cap = getattr(model.hf.config, "final_logit_softcapping", None)
    return cap * torch.tanh(logits / cap) if cap else logits


def rank_of(logits: Tensor, token: int) -> Tensor:
    """Places from 1, over the last dim."""
    return (logits > logits[..., token, None]).sum(-1) + 1


def figure(found: Lens, *, by: str = "best", limit: float | None = None) -> Figure:
    """The best token of every level and position; colours are its probability, or with `by="target"` the target's.

    Raises UsageError for another `by`.
    """
    if by not in ("best", "target"):
        raise UsageError(f"by is {by!r}; a lens is coloured by best or target.")
    values = found.p[..., 0] if by == "best" else found.target_p
    best = found.top[..., 0].tolist()
    tokens = [visible(token) for token in found.tokens[found.start : found.stop]]
    panel = {
        "title": "", "note": "", "limit": float(limit or 1.0), "values": values.tolist(),
        "words": [
            [f"{visible(found.words[i])} {100 * p:.0f}%" for i, p in zip(*row, strict=True)]
            for row in zip(best, values.tolist(), strict=True)
        ],
        "frames": [[i, j] for i, row in enumerate(best) for j, token in enumerate(row) if token == found.target_id],
    }  # fmt: skip
    data = {
        "axes": {"rows": "after layer", "columns": "at"}, "rows": found.levels, "columns": tokens, "upward": True,
        "join": " at ", "scale": "sequential", "missing": "not read", "panels": [panel],
    }  # fmt: skip
    about = {
        "model": found.model, "fingerprint": found.fingerprint, "method": "logit lens", "prompt": found.prompt,
        "target": found.target, "positions": f"{found.start} to {found.stop - 1}", "colour": f"probability of the {by}",
        "headscope": found.version,
    }  # fmt: skip
    notes = (
        "Each cell: the token that the stream there would predict next through the final norm and the unembedding, if it "
        f"were the last; its number and colour are the probability of {'it' if by == 'best' else 'the target'}. "
        f"A frame: it is the target “{visible(found.target)}”.",
        "Of the last layer it is the model's own prediction; lower layers were not trained to be read so.",
    )
    return Figure("matrix", f"Logit lens, target “{visible(found.target)}”", data, about, notes)
