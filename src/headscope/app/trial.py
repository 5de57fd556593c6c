"""Edits as the page writes them, what they change on a prompt, and their way to a file and back."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headscope.core.component import Component, components
from headscope.core.errors import FileError, UsageError
from headscope.routes.extract import check_decoder, token_id
from headscope.trace import Capture, Edit, add, edited, load_edits, save_edits, scale, trace, zero
from headscope.trace.edit import check_edit

if TYPE_CHECKING:
    from headscope.model import Model

#: edits of one trial, and components of one edit
MOST_EDITS = 64
MOST_COMPONENTS = 20_000
#: tokens of a continuation, and seconds for each of the two
MOST_NEW = 64
MOST_SECONDS = 40.0
#: edit files that are held for the page
MOST_FILES = 32
CHUNK = 128
_RANGE = re.compile(r"L(\d{1,12})(?:-(\d{1,12}))?(?:(MLP|ATTN|RESID)|(H|KV|N)(?:(\d{1,12})(?:-(\d{1,12}))?|(\*)))?")
#: no activation times more than this is a number
MOST_FACTOR = 1e30


def expand(text: str, sizes: dict[str, int]) -> tuple[Component, ...]:
    """Components by name, with ranges: `L5H3, L3MLP, L5H0-4, L2-4MLP, L6H*`. Raises UsageError for what is none."""
    found: list[Component] = []
    for part in (part.strip() for part in text.upper().split(",")):
        match = _RANGE.fullmatch(part)
        if part and (match is None or not ("-" in part or "*" in part)):
            found += components(part)
        elif match is not None:
            first, last, plain, letters, low, high, every = match.groups()
            layers = _numbers(first, last, part)
            if letters is None:
                found += [Component.parse(f"L{i}{plain or ''}") for i in layers]
            else:
                units = range(sizes[letters]) if every else _numbers(low, high, part)
                if len(layers) * len(units) > MOST_COMPONENTS:
                    raise UsageError(f"{part} names more than {MOST_COMPONENTS} components; take fewer.")
                found += [Component.parse(f"L{i}{letters}{n}") for i in layers for n in units]
        if len(found) > MOST_COMPONENTS:
            raise UsageError(f"An edit takes at most {MOST_COMPONENTS} components here.")
    return components(dict.fromkeys(found))


def _numbers(first: str, last: str | None, part: str) -> range:
    low, high = int(first), int(last or first)
    if not low <= high < low + MOST_COMPONENTS:
        raise UsageError(f"{part} is not a range; write the smaller number first, such as L5H0-4.")
    return range(low, high + 1)


def collapse(given: tuple[Component, ...]) -> str:
    """The shortest text that `expand` reads as these components."""
    parts: list[str] = []
    start: Component | None = None
    before: Component | None = None
    for c in (*given, None):
        follows = (
            c is not None and before is not None and c.index is not None and before.index is not None
            and (c.kind, c.layer, c.index) == (before.kind, before.layer, before.index + 1)
        )  # fmt: skip
        if not follows:
            if start is not None and before is not None:
                parts.append(str(start) if start == before else f"{start}-{before.index}")
            start = c
        before = c
    return ", ".join(parts)


class Files:
    """Edits that were loaded from files and that the page cannot write in words; kept by the hash of their file."""

    def __init__(self) -> None:
        self._held: dict[str, list[Edit]] = {}

    def load(self, text: str) -> list[dict[str, Any]]:
        """The rows that the page shows for an edit file."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "edits.json"
            path.write_text(text, encoding="utf-8")
            try:
                found = load_edits(path)
            except FileError as error:
                why = str(error).replace(f"edit file {path}", str(path)).replace(str(path), "file you chose")
                raise FileError(why[0].upper() + why[1:] if why.startswith("The") else f"The {why}") from None
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        rows = [_row(edit, name, i) for i, edit in enumerate(found)]
        if any(row["op"] == "kept" for row in rows):
            self._held = {name: found, **self._held}
            self._held = dict(list(self._held.items())[:MOST_FILES])
        return rows

    def get(self, name: str, index: int) -> Edit:
        """An edit that was loaded. Raises UsageError where it is not here any more."""
        if name not in self._held or not 0 <= index < len(self._held[name]):
            raise UsageError("An edit of this trial came from a file that is not here any more; load the file again.")
        return self._held[name][index]


def _row(edit: Edit, name: str, index: int) -> dict[str, Any]:
    one = edit.positions if isinstance(edit.positions, tuple) else ()
    simple = edit.op in ("zero", "scale") and edit.rows is None and edit.part == "kv"
    if not simple or isinstance(edit.positions, str) or len(one) > 1:
        return {"op": "kept", "file": name, "index": index, "says": str(edit)}
    row: dict[str, Any] = {"op": edit.op, "on": collapse(edit.components)}
    if edit.op == "scale":
        row["by"] = edit.value
    if one:
        row["at"] = one[0]
    return row


def build(model: Model, rows: list[Any], ids: Tensor | None, files: Files) -> list[Edit]:
    """The edits that the page's rows describe; rows with `off` are left out. `ids`: the prompt [1, pos], for strengths."""
    if len(rows) > MOST_EDITS:
        raise UsageError(f"A trial takes at most {MOST_EDITS} edits.")
    a = model.anatomy
    sizes = {"n_layers": a.n_layers, "n_heads": a.n_heads, "n_kv_heads": a.n_kv_heads, "d_mlp": a.d_mlp}
    letters = {"H": a.n_heads, "KV": a.n_kv_heads, "N": a.d_mlp}
    found = []
    for row in rows:
        if not isinstance(row, dict):
            raise UsageError("An edit in the request must be an object.")
        if row.get("off"):
            continue
        op, at = row.get("op"), row.get("at")
        if at is not None and (not isinstance(at, int) or isinstance(at, bool)):
            raise UsageError("An edit's position must be a whole number, or left out for all positions.")
        where: dict[str, Any] = {} if at is None else {"positions": at}
        if op == "zero":
            edit = zero(expand(str(row.get("on", "")), letters), **where)
        elif op == "scale":
            edit = scale(expand(str(row.get("on", "")), letters), _number(row, "by"), **where)
        elif op == "steer":
            edit = _steer(model, row, ids, where)
        elif op == "kept":
            edit = files.get(str(row.get("file")), row["index"] if isinstance(row.get("index"), int) else -1)
        else:
            raise UsageError(f"There is no edit {op!r} here; there are zero, scale and steer.")
        check_edit(edit, sizes)
        if ids is not None and at is not None and at >= ids.shape[1]:
            raise UsageError(
                f"The edit '{edit}' is at a position that the prompt has not; it has {ids.shape[1]} tokens."
            )
        found.append(edit)
    return found


def _number(row: dict[str, Any], name: str) -> float:
    value = row.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < MOST_FACTOR:
        raise UsageError(f"{name!r} of an edit must be a number.")
    return float(value)


@torch.no_grad()
def _steer(model: Model, row: dict[str, Any], ids: Tensor | None, where: dict[str, Any]) -> Edit:
    """Add a direction to the stream that enters a layer: the difference of two prompts' streams there at their last
    tokens times the strength, or towards a token's row of the unembedding; there a strength of 1 is as long as the
    stream is at that layer on the prompt (without its first token, which often is a sink).
    """
    layer, strength, a = row.get("layer"), _number(row, "strength"), model.anatomy
    if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < a.n_layers:
        raise UsageError(f"A steered layer is a whole number from 0 to {a.n_layers - 1}, but got {layer!r}.")

    def stream(tokens: Any) -> Tensor:
        found: Tensor = trace(model, tokens, [Capture("resid_pre", [layer])], logits=None)["resid_pre", layer][0]
        return found

    if "token" in row:
        if ids is None:
            raise UsageError("Steering towards a token needs a prompt, which says how long the stream is.")
        check_decoder(model, "Next tokens")
        direction = a.W_U[:, token_id(model, row["token"] if isinstance(row["token"], (int, str)) else -1)]
        x = stream(ids)
        long = x[min(1, len(x) - 1) :].norm(dim=-1).mean()
        vector = strength * long * direction / direction.norm()
    else:
        plus, minus = row.get("plus"), row.get("minus")
        if not (isinstance(plus, str) and isinstance(minus, str) and plus and minus):
            raise UsageError("Steering takes a token, or two prompts whose difference is added.")
        vector = strength * (stream(plus)[-1] - stream(minus)[-1])
    return add(f"L{layer}RESID", vector.clone(), **where)


@torch.no_grad()
def compare(model: Model, ids: Tensor, edits: list[Edit], k: int = 12) -> dict[str, Any]:
    """The next token's probabilities and the mean loss on the prompt's own tokens, without and with the edits; the tokens
    that change most come first.
    """
    check_decoder(model, "Next tokens")
    sides = []
    for some in ([], edits):
        logits = trace(model, ids, edits=some).logits[0]
        sides.append((logits[-1].float().log_softmax(-1), _loss(logits, ids[0])))
        del logits  # of long prompts and large vocabularies it is large
    (before, loss_before), (after, loss_after) = sides
    change = after.exp() - before.exp()
    best = [x.topk(min(k, len(x))).indices.tolist() for x in (change.abs(), before, after)]
    best[0] = [i for i in best[0] if float(change[i])]
    shown = sorted(
        dict.fromkeys(i for group in best for i in group), key=lambda i: (-abs(float(change[i])), -float(before[i]))
    )
    rows = [{"token": model.word(i), "before": float(before[i].exp()), "after": float(after[i].exp())} for i in shown]
    return {
        "tokens": rows,
        "kl": max(0.0, float((before.exp() * (before - after)).sum())),
        "loss": None if loss_before is None else {"before": loss_before, "after": loss_after},
        "words": model.words(ids[0]),
        "edits": [str(edit) for edit in edits],
    }


def _loss(logits: Tensor, ids: Tensor) -> float | None:
    """Mean nats a token after the first, or None for a prompt of one token."""
    if len(ids) < 2:
        return None
    total = 0.0
    for start in range(0, len(ids) - 1, CHUNK):
        some = logits[start : min(start + CHUNK, len(ids) - 1)].float()
        right = ids[start + 1 : start + 1 + len(some), None].to(some.device)
        total += float((some.logsumexp(-1) - some.gather(1, right)[:, 0]).sum())
    return total / (len(ids) - 1)


@torch.no_grad()
def continued(
    model: Model, ids: Tensor, edits: list[Edit], n: int, check: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """How the model itself goes on, always with its best token, without and with the edits. `check` is called after every
    token, and may stop it all.
    """
    check_decoder(model, "Next tokens")
    if not 1 <= n <= MOST_NEW:
        raise UsageError(f"A continuation has 1 to {MOST_NEW} tokens here, but {n} were asked for.")
    if model.max_positions and ids.shape[1] + n > model.max_positions:
        raise UsageError(
            f"{model.name} reads at most {model.max_positions} tokens; take a shorter prompt or fewer new ones."
        )

    def goes_on(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        check()
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    found: dict[str, Any] = {}
    for name, some in (("before", []), ("after", edits)):
        with edited(model, some) as hf:
            out = hf.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False, num_beams=1,
                max_time=MOST_SECONDS, pad_token_id=_padding(model), return_dict_in_generate=False,
                stopping_criteria=[goes_on],
            )  # fmt: skip
        found[name] = model.words(out[0, ids.shape[1] :])
    return found


def _padding(model: Model) -> int:
    config = model.hf.config
    for value in (config.pad_token_id, config.eos_token_id):
        if isinstance(value, int):
            return value
    return 0


def as_file(edits: list[Edit]) -> dict[str, str]:
    """Edits as a file that `hs.load_edits` and `headscope edit` read."""
    if not edits:
        raise UsageError("There is no edit to save; add one first.")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "edits.json"
        save_edits(edits, path)
        return {"name": path.name, "text": json.dumps(json.loads(path.read_text(encoding="utf-8")))}
