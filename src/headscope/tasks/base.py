"""What a task gives: prompts whose right answer is known, and whether the model can do them at all."""

from __future__ import annotations

import importlib
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headscope.core.errors import NotApplicable, UsageError, nearest
from headscope.sweep import clean

if TYPE_CHECKING:
    from headscope.model import Model


@dataclass(frozen=True, eq=False)
class Prompts:
    """Prompts of a task.

    `tokens` [prompt, pos]; `positions` [prompt, m]: where the next token is scored; `target`, `foil` [prompt, m]: the
    right and the wrong next token there; `mask` [prompt, pos]: True at real tokens (None: all are); `corrupt`
    [prompt, pos]: the same prompts with the deciding token changed; `metric`: the task's own; `chance`: accuracy of a
    guess; `meta`: what else a method may need.
    """

    name: str
    seed: int
    tokens: Tensor
    positions: Tensor
    target: Tensor
    foil: Tensor | None = None
    mask: Tensor | None = None
    corrupt: Tensor | None = None
    metric: str = "loss"
    chance: float = 0.0
    meta: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    def scored(self) -> dict[int, list[int]]:
        """The last scored position, counted among a prompt's real tokens as edits count them → the prompts it is of."""
        mask = torch.ones_like(self.tokens) if self.mask is None else self.mask.long()
        at = (mask.cumsum(1) - 1).gather(1, self.positions[:, -1:].to(mask.device))[:, 0].tolist()
        return {position: [row for row, p in enumerate(at) if p == position] for position in sorted(set(at))}

    def row(self, i: int) -> Prompts:
        """One prompt alone, without padding."""
        real = (
            torch.ones_like(self.tokens[i]).bool() if self.mask is None else self.mask[i].bool().to(self.tokens.device)
        )
        first = int(real.long().argmax())
        pick = slice(i, i + 1)
        return replace(
            self, tokens=self.tokens[pick, real], positions=self.positions[pick] - first, target=self.target[pick],
            foil=None if self.foil is None else self.foil[pick], mask=None,
            corrupt=None if self.corrupt is None else self.corrupt[pick, real],
        )  # fmt: skip


@dataclass(frozen=True)
class Baseline:
    """How well the unedited model does: `able` says whether its accuracy is clearly above chance."""

    accuracy: float
    chance: float
    able: bool
    reason: str


def names() -> list[str]:
    """The tasks: one module of this package each."""
    folder = Path(__file__).parent
    return sorted(p.stem.replace("_", "-") for p in folder.glob("[a-z]*.py") if p.stem not in ("base",))


def check_name(name: str) -> None:
    """Raise UsageError for a task that is not there, or a `.jsonl` file that is not."""
    if name.endswith(".jsonl"):
        if not Path(name).is_file():
            raise UsageError(f"The task file {name} cannot be read (there is none).")
    elif name not in names():
        raise UsageError(f"There is no task {name!r}.{nearest(name, names())}")


def make(name: str, model: Model, n: int = 12, seed: int = 0, **options: Any) -> Prompts:
    """`n` prompts of the task `name`, drawn by `seed`; or all of a `.jsonl` file. Options are those of the task's `make`."""
    if name.endswith(".jsonl"):
        return from_jsonl(name, model, seed)
    check_name(name)
    if n < 1:
        raise UsageError(f"A task needs at least one prompt, but n is {n}.")
    module = importlib.import_module(f"headscope.tasks.{name.replace('-', '_')}")
    try:
        prompts = module.make(model, n, seed, **options)
    except TypeError as error:
        if options and "unexpected keyword" in str(error):
            raise UsageError(f"The task {name} has no such option: {', '.join(options)}.") from None
        raise
    check_length(model, prompts.tokens, f"The task {name}")
    return prompts


def check_length(model: Model, tokens: Tensor, what: str) -> None:
    """Raise NotApplicable where the model does not read so many tokens."""
    if model.max_positions and tokens.shape[1] > model.max_positions:
        raise NotApplicable(
            f"{what} takes {tokens.shape[1]} tokens here, but {model.name} reads at most {model.max_positions}."
        )


def baseline(model: Model, prompts: Prompts) -> Baseline:
    """Accuracy of the plain model at the scored positions, against chance."""
    accuracy = float(clean(model, prompts, "accuracy").mean())
    floor = max(2 * prompts.chance, prompts.chance + 0.1)
    able = accuracy >= floor
    word = "can" if able else "cannot"
    reason = (
        f"the model {word} do {prompts.name}: accuracy {accuracy:.2f}, needed {floor:.2f}, chance {prompts.chance:.2f}"
    )
    return Baseline(accuracy, prompts.chance, able, reason)


def one_token(model: Model, text: str) -> int | None:
    """The id of a text that is one token, and not the one for unknown words; else None."""
    ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    known = len(ids) == 1 and ids[0] != getattr(model.tokenizer, "unk_token_id", None)
    return int(ids[0]) if known else None


def needs_tokenizer(model: Model, task: str) -> None:
    """Raise NotApplicable where the model has no tokenizer."""
    if model.tokenizer is None:
        raise NotApplicable(f"The task {task} is made of text, and {model.name} was loaded without a tokenizer.")


@dataclass(frozen=True)
class Case:
    """One text prompt with its answer, and where there are any its foil and corrupted twin."""

    prompt: str
    answer: str
    foil: str | None = None
    corrupt: str | None = None


def from_cases(model: Model, name: str, cases: list[Case], n: int, seed: int, *, metric: str, chance: float) -> Prompts:
    """`n` prompts with one answer token at the last position, drawn by `seed` from the usable cases.

    Not usable is a case whose answer or foil is not one token, or whose corrupted twin has another length.
    """
    needs_tokenizer(model, name)
    cases = list(cases)
    random.Random(seed).shuffle(cases)
    kept: list[Case] = []
    for case in cases:
        if unusable(model, case) is None:
            kept.append(case)
        if len(kept) == n:
            break
    if not kept:
        raise NotApplicable(f"No prompt of the task {name} has an answer that is one token for {model.name}.")
    return _prompts(model, name, kept, seed, metric, chance)


def from_own(model: Model, name: str, cases: list[Case], seed: int = 0) -> Prompts:
    """A user's own prompts, all of them in their order. Raises UsageError naming one that cannot be used, and why."""
    needs_tokenizer(model, name)
    for number, case in enumerate(cases, 1):
        if reason := unusable(model, case):
            raise UsageError(f"Prompt {number} of {name}, {case.prompt[-40:]!r}, cannot be used: {reason}.")
    return _prompts(model, name, cases, seed, "logit_diff", 0.0)


def unusable(model: Model, case: Case) -> str | None:
    """Why a case cannot be a prompt of this model, or None."""
    for what, text in (("answer", case.answer), ("foil", case.foil)):
        if text is not None and one_token(model, text) is None:
            return f"its {what} {text!r} is not one token for {model.name} (mind the leading space)"
    if case.corrupt is not None:
        a, b = (len(model.tokenizer(text)["input_ids"]) for text in (case.prompt, case.corrupt))
        if a != b:
            return f"it has {a} tokens and its corrupted twin {b}; they must have equal length"
    return None


def _prompts(model: Model, name: str, kept: list[Case], seed: int, metric: str, chance: float) -> Prompts:
    tokens, mask = model.tokens([case.prompt for case in kept])
    last = (mask.long() * torch.arange(mask.shape[1], device=mask.device)).argmax(1, keepdim=True)
    corrupt = None
    if all(case.corrupt is not None for case in kept):
        corrupt = model.tokens([str(case.corrupt) for case in kept])[0]
    has_foil = all(case.foil is not None for case in kept)

    def ids(texts: list[str]) -> Tensor:
        return torch.tensor([[one_token(model, text)] for text in texts], device=tokens.device)

    return Prompts(
        name=name,
        seed=seed,
        tokens=tokens,
        positions=last,
        target=ids([case.answer for case in kept]),
        foil=ids([str(case.foil) for case in kept]) if has_foil else None,
        mask=None if bool(mask.all()) else mask,
        corrupt=corrupt,
        metric=metric if has_foil or metric != "logit_diff" else "loss",
        chance=chance,
        meta={"cases": kept},
    )


def from_jsonl(path: str | Path, model: Model, seed: int = 0) -> Prompts:
    """A task from a file of JSON lines: `prompt`, `answer`, optional `foil`, `corrupt`.

    Raises UsageError naming the line that cannot be read or used.
    """
    import json

    needs_tokenizer(model, Path(path).stem)
    cases = []
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")  # a text may hold other ends of lines
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The task file {path} cannot be read ({error}).") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            case = Case(row["prompt"], row["answer"], row.get("foil"), row.get("corrupt"))
            texts = [case.prompt, case.answer, *(text for text in (case.foil, case.corrupt) if text is not None)]
            if not all(isinstance(text, str) and text for text in texts):
                raise TypeError("not text")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(f"{path}, line {number}: expected a JSON object of texts `prompt` and `answer`.") from None
        if reason := unusable(model, case):
            raise UsageError(f"{path}, line {number}: the prompt cannot be used: {reason}.")
        cases.append(case)
    if not cases:
        raise UsageError(f"The task file {path} has no prompts.")
    return from_own(model, Path(path).stem, cases, seed)
