"""A run as a table of what was captured, and one head's attention in it as a figure."""

from __future__ import annotations

import secrets
from html import escape
from typing import TYPE_CHECKING, Any

from torch import Tensor

from headscope.core.component import Component
from headscope.core.errors import UsageError
from headscope.draw import Figure, version
from headscope.draw.marks import visible
from headscope.draw.svg import STYLE

if TYPE_CHECKING:
    from headscope.model import Model
    from headscope.trace.run import Run

_HIDDEN = "batch pos d_model"
#: the dims of a site's tensor in one layer
DIMS = {
    "resid_pre": _HIDDEN, "resid_mid": _HIDDEN, "resid_post": _HIDDEN, "attn_out": _HIDDEN, "mlp_out": _HIDDEN,
    "q": "batch pos head d_head", "k": "batch pos kv_head d_head", "v": "batch pos kv_head d_head",
    "q_pre": "batch pos head d_head", "k_pre": "batch pos kv_head d_head",
    "attn_scores": "batch head query key", "pattern": "batch head query key", "z": "batch pos head d_head",
    "head_out": "batch pos head d_model", "neuron": "batch pos d_mlp",
}  # fmt: skip
#: rows of tokens, and tokens in a row, that a table shows
_ROWS, _TOKENS = 8, 200


def words(run: Run, row: int) -> list[str]:
    """The tokens of a row of the batch, without padding; their ids where the model or its tokenizer is gone."""
    ids = _ids(run, row)
    return [f"#{i}" for i in ids] if run.source is None else run.source.words(ids)


def _ids(run: Run, row: int) -> list[int]:
    if run.tokens is None:
        return []
    ids = run.tokens[row]
    return list((ids if run.mask is None else ids[run.mask[row]]).tolist())


def table(run: Run) -> str:
    """The run as HTML: the tokens, and each site with its layers, dims and shape."""
    model = run.source
    rows = [_row(site, layers) for site, layers in run.stored.items()]
    if run.logits is not None:
        rows.append(("logits", "", _shape(run.logits, "batch pos vocab"), _dtype(run.logits)))
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    n_rows = 0 if run.tokens is None else len(run.tokens)
    texts = "".join(f"<div>{_line(words(run, row))}</div>" for row in range(min(n_rows, _ROWS)))
    if n_rows > _ROWS:
        texts += f"<small>… and {n_rows - _ROWS} more rows</small>"
    name = "a model" if model is None else model.name
    return (
        f'<div class="headscope" id="headscope-{secrets.token_hex(6)}"><style>{STYLE}</style>'
        f"<b>Run of {escape(visible(name))}</b>{texts}<table><tr><th>site</th><th>layers</th><th>one layer</th>"
        f"<th>type</th></tr>{body}</table></div>"
    )


def _row(site: str, layers: dict[int, Any]) -> tuple[str, str, str, str]:
    first = next(iter(layers.values()), None)
    numbers = sorted(layers)
    whole = len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1))
    where = f"{numbers[0]}–{numbers[-1]}" if whole else ", ".join(map(str, numbers))
    return site, where, _shape(first, DIMS.get(site, "")), _dtype(first)


def _shape(value: Any, dims: str) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    names = dims.split()
    if len(names) != value.ndim:  # reduced inside the pass
        return " × ".join(map(str, value.shape)) or "one number"
    return " × ".join(f"{name} {size}" for name, size in zip(names, value.shape, strict=True))


def _dtype(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else ""


def _line(tokens: list[str]) -> str:
    shown = " ".join(f"<code>{escape(visible(token))}</code>" for token in tokens[:_TOKENS])
    return shown + (f" … and {len(tokens) - _TOKENS} more" if len(tokens) > _TOKENS else "")


def pattern(
    run: Run,
    head: Component | str,
    *,
    row: int = 0,
    prompt: str | None = None,
    model: Model | None = None,
    limit: float | None = None,
    sink: bool = True,
    query: int | None = None,
    key: int | None = None,
) -> Figure:
    """A head's attention on a row of the batch: rows look at columns. `sink=False` leaves out the first token, and colours
    go to the largest weight of the others. `query`, `key`: a row, or a cell of it, in a frame.

    Raises UsageError where the run has no pattern of that head, or no such row.
    """
    chosen = head if isinstance(head, Component) else Component.parse(head)
    if chosen.kind != "head":
        raise UsageError(f"An attention pattern is a head's, such as L5H3; {chosen} is none.")
    found = run["pattern", chosen.layer]
    if not isinstance(found, Tensor) or found.ndim != 4:
        raise UsageError("The run's patterns were reduced inside the pass; capture 'pattern' without a reduction.")
    if not 0 <= (chosen.index or 0) < found.shape[1]:
        raise UsageError(f"{chosen} does not exist: layer {chosen.layer} has {found.shape[1]} heads, counted from 0.")
    if not 0 <= row < len(found):
        raise UsageError(f"Row {row} does not exist: the run has {len(found)}, counted from 0.")
    values = found[row, chosen.index].detach().float().cpu()
    if run.mask is not None:
        real = run.mask[row].cpu()
        values = values[real][:, real]
    source = model if model is not None else run.source
    tokens = [visible(token) for token in words(run, row)] or [str(i) for i in range(len(values))]
    text = prompt if prompt is not None else "" if source is None else source.text(_ids(run, row))
    about: dict[str, Any] = {} if source is None else {"model": source.name, "fingerprint": source.fingerprint}
    about |= {"head": str(chosen), "prompt": text}
    return of_pattern(values.tolist(), tokens, str(chosen), about, limit, sink=sink, query=query, key=key)


def of_pattern(
    values: list[list[float]],
    tokens: list[str],
    head: str,
    about: dict[str, Any],
    limit: float | None = None,
    *,
    sink: bool = True,
    query: int | None = None,
    key: int | None = None,
) -> Figure:
    """A pattern [query][key] with its tokens; `about` says where it comes from, the rest is as in `pattern`.

    Raises UsageError for a query or key that the prompt has not.
    """
    n = len(values)
    if query is None and key is not None:
        raise UsageError("A key is framed in the row of its query; give query as well.")
    framed = {name: at for name, at in (("query", query), ("key", key)) if at is not None}
    for name, at in framed.items():
        if not 0 <= at < n:
            raise UsageError(f"The {name} {at} does not exist: the prompt has positions 0 to {n - 1}.")
    # a decoder's triangle of what cannot be attended to is told from attention that happens to be 0
    causal = n > 1 and all(values[q][k] == 0 for q in range(n) for k in range(q + 1, n))
    shown = [[None if causal and k > q else float(v) for k, v in enumerate(row)] for q, row in enumerate(values)]
    if not sink:  # the first token, which many heads look at when they have nothing to do
        shown = [[None, *row[1:]] for row in shown]
        limit = limit or max((v for row in shown for v in row if v is not None), default=0.0)
    panel = {"title": "", "note": "", "limit": float(limit or 1.0), "values": shown}
    data = {
        "axes": {"rows": "attends from", "columns": "to"}, "rows": tokens, "columns": tokens, "upward": False,
        "join": " → ", "scale": "sequential", "missing": "masked",
        "panels": [panel if query is None else {**panel, "frames": [[query, key]]}],
    }  # fmt: skip
    whole = "its cells add up to 1" if sink else "its cells and its weight on the first token add up to 1"
    notes = (f"Each row is a token that attends, and {whole}; grey cells lie in its future.",)
    left = {} if sink else {"without": "the first token"}
    return Figure("matrix", f"Attention of {head}", data, {**about, **left, **framed, "headscope": version()}, notes)
