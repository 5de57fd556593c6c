"""Tasks: drawn by a seed, with one right token that is where it should be, and a baseline that says who is able."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import headscope as hs
from families.tiny import build
from headscope import tasks
from headscope.core.errors import NotApplicable, UsageError
from headscope.model import Model
from headscope.tasks import Prompts
from headscope.tasks.base import Case, from_cases, from_own, unusable
from headscope.tasks.capitals import CAPITALS
from headscope.tasks.coloured_objects import COLOURS, OBJECTS
from headscope.tasks.multiple_choice import KINDS
from headscope.tasks.needle import _THINGS
from headscope.tasks.successor import SERIES
from toys import word_tokenizer, worded

#: tasks whose answer follows a text prompt
TEXT = [name for name in tasks.names() if name not in ("repeated-tokens", "needle", "plain-text")]


def _rows(prompts: Prompts) -> list[list[int]]:
    return prompts.tokens.tolist()  # type: ignore[no-any-return]


def _texts(model: Model, prompts: Prompts, tokens: Tensor | None = None) -> list[str]:
    tokens = prompts.tokens if tokens is None else tokens
    mask = torch.ones_like(tokens) if prompts.mask is None else prompts.mask
    return [model.tokenizer.decode(row[keep.bool()]) for row, keep in zip(tokens, mask, strict=True)]


def _answers(model: Model, ids: Tensor | None) -> list[str]:
    assert ids is not None and ids.shape[1] == 1
    return [model.tokenizer.decode([token]) for token in ids[:, 0].tolist()]


def test_repeated_tokens_without_a_tokenizer(tiny: Model) -> None:
    prompts = tasks.make("repeated-tokens", tiny, 5, seed=3, length=6, repeats=3)
    assert prompts.tokens.shape == (5, 18) and prompts.meta == {"start": 0, "length": 6, "repeats": 3}
    for row in _rows(prompts):
        assert row[:6] == row[6:12] == row[12:] and len(set(row[:6])) == 6
    # every token of the repeats but the first of each
    assert prompts.positions[0].tolist() == [6, 7, 8, 9, 10, 12, 13, 14, 15, 16]
    for row, at, target in zip(prompts.tokens, prompts.positions, prompts.target, strict=True):
        assert row[at + 1].tolist() == target.tolist()
    assert len({tuple(row) for row in _rows(prompts)}) == 5


def test_repeated_tokens_are_drawn_by_the_seed(tiny: Model) -> None:
    first, again, other = (_rows(tasks.make("repeated-tokens", tiny, 4, seed)) for seed in (0, 0, 1))
    assert first == again != other


def test_a_random_model_cannot_repeat(tiny: Model) -> None:
    found = tasks.baseline(tiny, tasks.make("repeated-tokens", tiny, n=24))
    assert not found.able and found.accuracy < 0.1 and "cannot do repeated-tokens" in found.reason


def test_the_baseline_counts_right_answers(tiny: Model) -> None:
    """With the model's own guesses as targets it is able, with half of them it is half right."""
    import headscope as hs

    prompts = tasks.make("repeated-tokens", tiny, 4)
    logits = hs.trace(tiny, prompts, logits=prompts.positions).logits
    guess = logits.argmax(-1)  # type: ignore[union-attr]
    right = Prompts("guess", 0, prompts.tokens, prompts.positions, guess, chance=0.2)
    found = tasks.baseline(tiny, right)
    assert (found.accuracy, found.able, found.chance) == (1.0, True, 0.2)
    half = torch.where(torch.arange(4)[:, None] < 2, guess, (guess + 1) % 96)
    assert tasks.baseline(tiny, Prompts("h", 0, prompts.tokens, prompts.positions, half)).accuracy == 0.5
    # clearly above chance means twice the chance: half right is not enough against 0.3
    assert not tasks.baseline(tiny, Prompts("h", 0, prompts.tokens, prompts.positions, half, chance=0.3)).able


def test_unknown_tasks_and_options(tiny: Model) -> None:
    with pytest.raises(UsageError, match=r"no task 'repeated-token'.*Did you mean repeated-tokens"):
        tasks.make("repeated-token", tiny)
    with pytest.raises(UsageError, match="at least one prompt, but n is 0"):
        tasks.make("repeated-tokens", tiny, 0)
    with pytest.raises(UsageError, match="no such option: lenght"):
        tasks.make("repeated-tokens", tiny, lenght=5)
    with pytest.raises(UsageError, match="at least 2, but got 1"):
        tasks.make("repeated-tokens", tiny, length=1)
    with pytest.raises(NotApplicable, match="95 different random tokens needs as many"):
        tasks.make("repeated-tokens", tiny, length=95)


@pytest.mark.parametrize("name", [name for name in tasks.names() if name != "repeated-tokens"])
def test_text_needs_a_tokenizer(tiny: Model, name: str) -> None:
    with pytest.raises(NotApplicable, match=f"task {name} .*without a tokenizer"):
        tasks.make(name, tiny)


@pytest.mark.real
@pytest.mark.parametrize("name", tasks.names())
def test_the_seed_draws_the_prompts(smollm2: Model, name: str) -> None:
    first, again, other = (tasks.make(name, smollm2, 6, seed) for seed in (0, 0, 1))
    assert _rows(first) == _rows(again) and first.target.tolist() == again.target.tolist()
    assert first.positions.tolist() == again.positions.tolist()
    assert _rows(first) != _rows(other)
    assert len(first) == 6 and (first.name, first.seed, other.seed) == (name, 0, 1)


@pytest.mark.real
@pytest.mark.parametrize("name", tasks.names())
def test_positions_are_real_tokens_before_the_answer(smollm2: Model, name: str) -> None:
    prompts = tasks.make(name, smollm2, 6)
    assert prompts.positions.shape == prompts.target.shape
    assert int(prompts.positions.min()) >= 0 and int(prompts.positions.max()) < prompts.tokens.shape[1]
    if prompts.mask is not None:
        assert bool(prompts.mask.gather(1, prompts.positions).all())
    if prompts.foil is not None:
        assert prompts.foil.shape == prompts.target.shape and not bool((prompts.foil == prompts.target).any())
    assert 0 <= prompts.chance < 0.5


@pytest.mark.real
@pytest.mark.parametrize("name", TEXT)
def test_text_tasks_ask_for_one_token_at_the_end(smollm2: Model, name: str) -> None:
    prompts = tasks.make(name, smollm2, 6)
    cases = prompts.meta["cases"]
    assert _texts(smollm2, prompts) == [case.prompt for case in cases]
    assert _answers(smollm2, prompts.target) == [case.answer for case in cases]
    if prompts.foil is not None:
        assert _answers(smollm2, prompts.foil) == [case.foil for case in cases]
    for case, at, row in zip(cases, prompts.positions[:, 0].tolist(), prompts.tokens, strict=True):
        whole = smollm2.tokenizer(case.prompt + case.answer)["input_ids"]
        # the prompt and its answer are split into tokens as the two apart are
        assert whole[:-1] == row[len(row) - len(whole) + 1 :].tolist() and at == len(row) - 1
    if prompts.corrupt is not None:
        assert prompts.corrupt.shape == prompts.tokens.shape
        assert bool((prompts.corrupt != prompts.tokens).any(1).all())
        assert _texts(smollm2, prompts, prompts.corrupt) == [case.corrupt for case in cases]


@pytest.mark.real
def test_capitals_are_the_capitals(smollm2: Model) -> None:
    prompts = tasks.make("capitals", smollm2, 30)
    for text, answer, foil, other in zip(
        _texts(smollm2, prompts), _answers(smollm2, prompts.target), _answers(smollm2, prompts.foil),
        _texts(smollm2, prompts, prompts.corrupt), strict=True,
    ):  # fmt: skip
        (country, twin) = (t.removeprefix("The capital of ").removesuffix(" is") for t in (text, other))
        assert answer == f" {CAPITALS[country]}" and foil == f" {CAPITALS[twin]}"


@pytest.mark.real
def test_ioi_asks_for_the_name_that_is_not_repeated(smollm2: Model) -> None:
    prompts = tasks.make("ioi", smollm2, 12)
    orders = set()
    for text, answer, foil, other in zip(
        _texts(smollm2, prompts), _answers(smollm2, prompts.target), _answers(smollm2, prompts.foil),
        _texts(smollm2, prompts, prompts.corrupt), strict=True,
    ):  # fmt: skip
        words = text.replace(",", "").split()
        assert words.count(answer.strip()) == 1 and words.count(foil.strip()) == 2
        changed = [(a, b) for a, b in zip(words, other.replace(",", "").split(), strict=True) if a != b]
        assert len(changed) == 1 and changed[0][0] == foil.strip() and changed[0][1] not in words
        orders.add(words.index(answer.strip()) < words.index(foil.strip()))
    assert orders == {True, False}


def _scene(text: str) -> dict[str, str]:
    """Object → colour of the last scene of a text."""
    pairs = re.findall(r"an? (\w+) (\w+)", text.splitlines()[-1])
    assert len(pairs) == 3
    return {thing: colour for colour, thing in pairs}


@pytest.mark.real
def test_coloured_objects_ask_for_one_of_three(smollm2: Model) -> None:
    prompts = tasks.make("coloured-objects", smollm2, 90)
    assert prompts.mask is None and prompts.chance == 1 / 3
    places: Counter[int] = Counter()
    for text, answer, foil, other in zip(
        _texts(smollm2, prompts), _answers(smollm2, prompts.target), _answers(smollm2, prompts.foil),
        _texts(smollm2, prompts, prompts.corrupt), strict=True,
    ):  # fmt: skip
        scene, words = _scene(text), re.findall(r"\w+", text)
        asked, twin = (t.split()[-2] for t in (text, other))
        assert scene[asked] == answer.strip() and scene[twin] == foil.strip() and asked != twin
        assert text.rsplit(asked, 1) == other.rsplit(twin, 1)  # nothing else differs
        assert set(scene) <= set(OBJECTS) and set(scene.values()) <= set(COLOURS)
        # the example names neither, and its own answer is right
        assert words.count(answer.strip()) == 1 and words.count(asked) == 2
        example, *_ = text.splitlines()
        assert _scene(example.split(". ")[0])[example.split()[-3]] == example.split()[-1].strip(".")
        places[list(scene).index(asked)] += 1
    assert min(places[i] for i in range(3)) > 20


@pytest.mark.real
@pytest.mark.parametrize("random_labels", [False, True])
def test_multiple_choice_labels_one_right_option(smollm2: Model, random_labels: bool) -> None:
    prompts = tasks.make("multiple-choice", smollm2, 80, random_labels=random_labels)
    right: Counter[int] = Counter()
    for i, (text, answer, foil, other) in enumerate(zip(
        _texts(smollm2, prompts), _answers(smollm2, prompts.target), _answers(smollm2, prompts.foil),
        _texts(smollm2, prompts, prompts.corrupt), strict=True,
    )):  # fmt: skip
        kind = text.splitlines()[0].removeprefix("Which of these is ").removesuffix("?")
        options, twin = (dict(re.findall(r"\((\w)\) (\w+)", t)) for t in (text, other))
        assert [label for label, word in options.items() if word in KINDS[kind]] == [answer]
        assert [label for label, word in twin.items() if word in KINDS[kind]] == [foil] != [answer]
        assert list(options) == list(twin) and sorted(options.values()) == sorted(twin.values())
        assert random_labels or list(options) == list("ABCD")
        labels = prompts.tokens[i, prompts.meta["labels"][i]]
        assert [smollm2.tokenizer.decode([token]) for token in labels.tolist()] == list(options)
        right[list(options).index(answer)] += 1
    assert min(right[i] for i in range(4)) > 12 and prompts.chance == 1 / 4


def test_multiple_choice_needs_letters_and_options() -> None:
    few = hs.load(build("llama"), tokenizer=word_tokenizer(["A", "B", "C", "dog", "red", "car", "two"]))
    with pytest.raises(NotApplicable, match="not single tokens"):
        tasks.make("multiple-choice", few)


def test_labels_are_found_behind_padding_and_a_bos() -> None:
    model = worded(bos=True)
    prompts = tasks.make("multiple-choice", model, 6)
    for row, at in zip(prompts.tokens, prompts.meta["labels"], strict=True):
        assert [model.tokenizer.decode([token]) for token in row[at].tolist()] == list("ABCD")


@pytest.mark.real
def test_successors_follow(smollm2: Model) -> None:
    prompts = tasks.make("successor", smollm2, 20)
    series = [items for items, _ in SERIES.values()]
    for text, answer in zip(_texts(smollm2, prompts), _answers(smollm2, prompts.target), strict=True):
        shown = [*text.rstrip(",").split(", "), answer.strip()]
        starts = [(items, items.index(shown[0])) for items in series if shown[0] in items]  # May is a month twice
        assert shown in [[items[(start + i) % len(items)] for i in range(4)] for items, start in starts]


@pytest.mark.real
def test_the_needle_holds_the_answer_and_nothing_else_does(smollm2: Model) -> None:
    prompts = tasks.make("needle", smollm2, 8, length=128)
    assert prompts.tokens.shape == (8, 128) and bool((prompts.positions == 127).all())
    at = torch.tensor(prompts.meta["needle"])[:, None]
    assert torch.equal(prompts.tokens.gather(1, at), prompts.target)
    assert bool(((prompts.tokens == prompts.target).sum(1) == 1).all())
    for row, needle, answer in zip(prompts.tokens, at[:, 0].tolist(), _answers(smollm2, prompts.target), strict=True):
        question = smollm2.tokenizer.decode(row[-10:])
        assert smollm2.tokenizer.decode(row[: needle + 1]).endswith(question[question.index(" The") :] + answer)
        assert answer.strip() in _THINGS
    assert len({int(x) for x in at}) > 4
    with pytest.raises(NotApplicable, match="more than 24 tokens"):
        tasks.make("needle", smollm2, 1, length=24)


@pytest.mark.real
def test_repeated_tokens_are_ordinary_ones(smollm2: Model) -> None:
    prompts = tasks.make("repeated-tokens", smollm2, 4, length=15)
    start = prompts.meta["start"]
    assert start == len(smollm2.prefix)
    assert torch.equal(prompts.tokens[:, start : start + 15], prompts.tokens[:, start + 15 :])
    assert not set(smollm2.tokenizer.all_special_ids) & set(prompts.tokens.flatten().tolist())


@pytest.mark.real
def test_plain_text_scores_every_next_token(smollm2: Model) -> None:
    prompts = tasks.make("plain-text", smollm2, 4, length=32)
    assert prompts.tokens.shape == (4, 32)
    assert torch.equal(prompts.target, prompts.tokens[:, 1:]) and prompts.positions[2].tolist() == list(range(31))
    assert all(text[0].isupper() and " the " in text for text in _texts(smollm2, prompts))


@pytest.mark.real
@pytest.mark.parametrize("name", ["capitals", "ioi", "needle", "repeated-tokens"])
def test_the_real_model_is_able(smollm2: Model, name: str) -> None:
    found = tasks.baseline(smollm2, tasks.make(name, smollm2, 12))
    assert found.able and f"can do {name}" in found.reason, found.reason


@pytest.mark.real
@pytest.mark.parametrize("name", ["coloured-objects", "multiple-choice"])
def test_what_the_real_model_only_half_knows_is_called_so(smollm2: Model, name: str) -> None:
    found = tasks.baseline(smollm2, tasks.make(name, smollm2, 24))
    assert not found.able and f"cannot do {name}" in found.reason, found.reason


def _file(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


@pytest.mark.real
def test_a_task_from_lines(smollm2: Model, tmp_path: Path) -> None:
    full = {
        "prompt": "The capital of France is",
        "answer": " Paris",
        "foil": " Rome",
        "corrupt": "The capital of Italy is",
    }
    short = {"prompt": "Monday, Tuesday,", "answer": " Wednesday", "foil": " Monday", "corrupt": "Monday, Friday,"}
    prompts = tasks.from_jsonl(_file(tmp_path / "mine.jsonl", full, "", short, "  "), smollm2)
    assert (prompts.name, len(prompts), prompts.metric) == ("mine", 2, "logit_diff")
    found = dict(zip(_texts(smollm2, prompts), _answers(smollm2, prompts.target), strict=True))
    assert found == {full["prompt"]: " Paris", short["prompt"]: " Wednesday"}
    assert prompts.corrupt is not None
    plain = tasks.from_jsonl(_file(tmp_path / "b.jsonl", {"prompt": "2, 3,", "answer": " Paris"}, full), smollm2)
    assert plain.metric == "loss" and plain.foil is None and plain.corrupt is None


@pytest.mark.real
@pytest.mark.parametrize(
    "row",
    ["not json", "[1]", "3", '"text"', "null", '{"prompt": "a"}', '{"answer": "a"}', '{"prompt": 5, "answer": " a"}',
     '{"prompt": "a", "answer": null}', '{"prompt": "a", "answer": " b", "foil": 3}',
     '{"prompt": "a", "answer": " b", "corrupt": []}', '{"prompt": "", "answer": " b"}'],
)  # fmt: skip
def test_a_bad_line_is_named(smollm2: Model, tmp_path: Path, row: str) -> None:
    path = _file(tmp_path / "mine.jsonl", {"prompt": "The capital of France is", "answer": " Paris"}, "", row)
    with pytest.raises(UsageError, match="line 3") as caught:
        tasks.from_jsonl(path, smollm2)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.real
def test_bad_files_are_named(smollm2: Model, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.jsonl cannot be read"):
        tasks.from_jsonl(tmp_path / "none.jsonl", smollm2)
    with pytest.raises(UsageError, match="no prompts"):
        tasks.from_jsonl(_file(tmp_path / "empty.jsonl", ""), smollm2)
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot be read"):
        tasks.from_jsonl(tmp_path / "binary.jsonl", smollm2)


@pytest.mark.real
def test_cases_that_cannot_be_used_are_dropped(smollm2: Model) -> None:
    good = Case("The capital of France is", " Paris", " Rome", "The capital of Italy is")
    cases = [
        good,
        Case("The capital of France is", " antidisestablishmentarianism", " Rome", "The capital of Italy is"),
        Case("The capital of France is", " Paris", " antidisestablishmentarianism", "The capital of Italy is"),
        Case("The capital of France is", " Paris", " Rome", "The capital of all of Italy is"),
    ]
    prompts = from_cases(smollm2, "t", cases, 4, 0, metric="logit_diff", chance=0.0)
    assert prompts.meta["cases"] == [good]


def _row(case: Case, **changes: object) -> dict[str, object]:
    return {"prompt": case.prompt, "answer": case.answer, "foil": case.foil, "corrupt": case.corrupt, **changes}


OWN = [
    Case("The capital of France is", "Paris", "Rome", "The capital of Italy is"),
    Case("Q : What is the capital of Peru ? A :", "Lima", "Madrid", "Q : What is the capital of Spain ? A :"),
    Case("The capital of Egypt is", "Cairo", "Oslo", "The capital of Norway is"),
]
UNUSABLE = [
    (replace(OWN[0], answer="Paris Rome"), "its answer 'Paris Rome' is not one token for LlamaForCausalLM"),
    (replace(OWN[0], answer=""), "its answer '' is not one token"),
    (replace(OWN[0], answer="xyzzy"), "its answer 'xyzzy' is not one token"),
    (replace(OWN[0], foil="Rome ,"), "its foil 'Rome ,' is not one token"),
    (replace(OWN[0], corrupt="The capital of all Italy is"), "it has 5 tokens and its corrupted twin 6"),
]


@pytest.fixture(scope="module")
def words() -> Model:
    """A random model that knows the words of the tasks."""
    return worded()


def test_own_prompts_stay_in_their_order(words: Model, tmp_path: Path) -> None:
    prompts = from_own(words, "mine", OWN, seed=3)
    assert (prompts.name, prompts.seed, prompts.metric, prompts.chance) == ("mine", 3, "logit_diff", 0.0)
    assert prompts.meta["cases"] == OWN and prompts.mask is not None and prompts.corrupt is not None
    assert _texts(words, prompts) == [case.prompt for case in OWN]
    assert _texts(words, prompts, prompts.corrupt) == [case.corrupt for case in OWN]
    assert _answers(words, prompts.target) == [case.answer for case in OWN]
    assert _answers(words, prompts.foil) == [case.foil for case in OWN]
    last = [max(i for i, real in enumerate(row) if real) for row in prompts.mask.tolist()]
    assert prompts.positions.tolist() == [[i] for i in last]
    # `make` takes a file for a task, all of it whatever n is
    found = tasks.make(str(_file(tmp_path / "mine.jsonl", *map(_row, OWN))), words, 1, 3)
    assert _rows(found) == _rows(prompts) and found.meta["cases"] == OWN and found.name == "mine"
    assert found.corrupt is not None and torch.equal(found.corrupt, prompts.corrupt)


def test_without_foils_or_twins(words: Model, tmp_path: Path) -> None:
    short = {"prompt": "The capital of France is", "answer": "Paris"}
    for rows in ([short], [short, _row(OWN[2])], [{**short, "foil": None, "corrupt": None}]):
        found = tasks.make(str(_file(tmp_path / "plain.jsonl", *rows)), words)
        assert len(found) == len(rows) and found.metric == "loss"
        assert found.foil is None and found.corrupt is None and found.mask is None


@pytest.mark.parametrize(("case", "reason"), UNUSABLE, ids=[reason for _, reason in UNUSABLE])
def test_own_prompts_that_cannot_be_used(words: Model, tmp_path: Path, case: Case, reason: str) -> None:
    assert (unusable(words, case) or "").startswith(reason) and unusable(words, OWN[0]) is None
    with pytest.raises(UsageError, match=f"Prompt 2 of mine, 'The capital of France is', cannot be used: {reason}"):
        from_own(words, "mine", [OWN[2], case])
    if case.answer:
        path = _file(tmp_path / "mine.jsonl", _row(OWN[2]), "", "", _row(case))
        with pytest.raises(UsageError, match=f"line 4: the prompt cannot be used: {reason}") as caught:
            tasks.make(str(path), words)
        assert str(path) in str(caught.value)


def test_a_file_may_hold_any_letters(words: Model, tmp_path: Path) -> None:
    """Some editors start a file with a mark, and end its lines as Windows does; a text may hold a line separator."""
    row = json.dumps(_row(OWN[0], prompt="The\u2028capital of France is"), ensure_ascii=False)
    (tmp_path / "mine.jsonl").write_bytes(f"\ufeff{row}\r\n{json.dumps(_row(OWN[2]))}\r\n".encode())
    found = tasks.make(str(tmp_path / "mine.jsonl"), words)
    assert _texts(words, found) == [OWN[0].prompt, OWN[2].prompt]


def test_own_prompts_need_text_and_room(words: Model, tiny: Model, tmp_path: Path) -> None:
    path = _file(tmp_path / "mine.jsonl", _row(OWN[0]))
    for make in (lambda: tasks.make(str(path), tiny), lambda: from_own(tiny, "mine", OWN)):
        with pytest.raises(NotApplicable, match=r"task mine .*without a tokenizer"):
            make()
    with pytest.raises(UsageError, match=r"513 tokens.*at most 512"):
        tasks.make(str(_file(tmp_path / "long.jsonl", {"prompt": "the " * 513, "answer": "Paris"})), words)
    with pytest.raises(UsageError, match=r"none\.jsonl cannot be read"):
        tasks.make(str(tmp_path / "none.jsonl"), words)
    with pytest.raises(UsageError, match="has no prompts"):
        tasks.make(str(_file(tmp_path / "empty.jsonl", "", " ")), words)
