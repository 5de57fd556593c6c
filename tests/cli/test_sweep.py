"""`headscope sweep` and `headscope patch`: what plain hooks give, in one document; stopped, resumed, refused."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import transformers as hf
from torch import Tensor

import headscope as hs

Cli = Callable[..., Any]
ROWS = [
    {"prompt": "Mary and John gave w1 to", "answer": "Mary", "foil": "John", "corrupt": "w7 and John gave w1 to"},
    {"prompt": "a w2 of w3 the w4", "answer": "w5", "foil": "store", "corrupt": "a w2 w9 w3 the w4"},
]
N_HEADS, N_KV, D_HEAD, D_MLP, WIDTH = 8, 4, 4, 48, 6


def _lines(*rows: Any, name: str = "mine.jsonl") -> str:
    Path(name).write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in rows), encoding="utf-8")
    return name


class Plain:
    """The checkpoint without headscope, under plain hooks."""

    def __init__(self, folder: Path) -> None:
        self.model = hf.AutoModelForCausalLM.from_pretrained(folder)
        self.words = hf.AutoTokenizer.from_pretrained(folder)

    def ids(self, texts: list[str]) -> Tensor:
        return torch.tensor([self.words(text)["input_ids"] for text in texts])

    def places(self, over: str, layer: int, index: int, block: int = 1) -> list[tuple[Any, bool, slice]]:
        """Module, whether its output is meant, columns."""
        unit = self.model.model.layers[layer]
        whole = slice(None)
        return {
            "heads": [(unit.self_attn.o_proj, False, slice(index * D_HEAD, (index + 1) * D_HEAD))],
            "kv-heads": [
                (module, True, slice(index * D_HEAD, (index + 1) * D_HEAD))
                for module in (unit.self_attn.k_proj, unit.self_attn.v_proj)
            ],
            "neurons": [(unit.mlp.down_proj, False, slice(index, min(index + block, D_MLP)))],
            "attn": [(unit.self_attn.o_proj, True, whole)],
            "mlp": [(unit.mlp.down_proj, True, whole)],
            "resid": [(unit, False, whole)],
            "layers": [(unit.self_attn.o_proj, True, whole), (unit.mlp.down_proj, True, whole)],
        }[over]

    def logit_diffs(
        self,
        ids: Tensor,
        rows: list[dict[str, str]],
        places: list[tuple[Any, bool, slice]] = [],  # noqa: B006
        change: Callable[[Tensor], Tensor] = torch.zeros_like,
        at: int | None = None,
    ) -> Tensor:
        """[prompt]: answer minus foil at the end, while `change` applies to the places at position `at` (None: all)."""

        def changed(x: Tensor, columns: slice) -> Tensor:
            x = x.clone()
            made, where = change(x[..., columns]), slice(None) if at is None else slice(at, at + 1)
            x[:, where, columns] = made[:, where]
            return x

        with ExitStack() as stack, torch.no_grad():
            for module, output, columns in places:
                if output:
                    handle = module.register_forward_hook(lambda _m, _a, out, c=columns: changed(out, c))
                else:
                    handle = module.register_forward_pre_hook(lambda _m, a, c=columns: (changed(a[0], c), *a[1:]))
                stack.callback(handle.remove)
            logits = self.model(ids).logits[:, -1]
        right, wrong = (self.ids([row[name] for row in rows]) for name in ("answer", "foil"))
        return (logits.gather(1, right) - logits.gather(1, wrong))[:, 0]

    def seen(self, ids: Tensor, place: tuple[Any, bool, slice]) -> Tensor:
        """The plain values at a place."""
        found: list[Tensor] = []

        def see(x: Tensor) -> Tensor:
            found.append(x)
            return x

        self.logit_diffs(ids, ROWS[: len(ids)], [place], see)
        return found[0]


@pytest.fixture(scope="module")
def plain(checkpoints: Path) -> Plain:
    return Plain(checkpoints / "llama")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few edits a chunk, so that a sweep can be stopped between chunks."""
    monkeypatch.setattr(importlib.import_module("headscope.sweep.job"), "affordable_tokens", lambda *_: 40)


COUNTS = {"heads": 8, "kv-heads": 4, "neurons": 3, "attn": 1, "mlp": 1, "resid": 1, "layers": 1}
NAME = re.compile(r"L(\d+)(?:(?:H|KV|N)(\d+)|ATTN|MLP|RESID)?[^(]*?(?: at \((\d+),\))?$")


@pytest.mark.parametrize(
    ("over", "edit", "positions"),
    [
        *((over, "zero", "all") for over in COUNTS),
        *(("heads", edit, "all") for edit in ("mean", "resample", "scale=0.5", "scale=-2")),
        *(("heads", "zero", positions) for positions in ("each", "last")),
        ("neurons", "mean", "all"), ("neurons", "resample", "last"), ("mlp", "resample", "all"), ("attn", "mean", "each"),
        ("resid", "mean", "last"), ("kv-heads", "scale=0.5", "last"), ("layers", "scale=0.5", "each"),
    ],
)  # fmt: skip
def test_values_are_those_of_plain_hooks(
    cli: Cli, checkpoints: Path, plain: Plain, over: str, edit: str, positions: str
) -> None:
    given = ["--task", _lines(*ROWS), "--over", over, "--edit", edit, "--positions", positions, "--block", 20]
    found = cli("sweep", checkpoints / "llama", *given, "--json").json("sweep")
    assert {key: found[key] for key in ("task", "metric", "edit", "over", "out")} == {
        "task": "mine", "metric": "logit_diff", "edit": edit, "over": over, "out": None,
    }  # fmt: skip
    ids = plain.ids([row["prompt"] for row in ROWS])
    clean = plain.logit_diffs(ids, ROWS)
    assert found["clean"] == pytest.approx(float(clean.mean()), abs=1e-5)
    assert len(found["values"]) == 3 * COUNTS[over] * (WIDTH if positions == "each" else 1)
    assert len({row["edit"] for row in found["values"]}) == len(found["values"])
    sizes = [abs(row["change"]) for row in found["values"]]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 1e-3
    for row in found["values"]:
        match = NAME.search(row["edit"])
        assert match is not None and row["edit"].split()[0] == edit.split("=")[0], row["edit"]
        layer, index = int(match[1]), int(match[2] or 0)
        assert (match[3] is None) == (positions == "all") and (positions != "last" or match[3] == str(WIDTH - 1))
        places = plain.places(over, layer, index, 20)
        change: Callable[[Tensor], Tensor] = torch.zeros_like
        if edit.startswith("scale"):
            factor = float(edit.split("=")[1])
            change = lambda x, factor=factor: factor * x  # noqa: E731
        elif edit in ("mean", "resample"):
            values = plain.seen(ids, places[0])
            new = values.flip(0) if edit == "resample" else values.mean((0, 1)).expand_as(values)
            change = lambda x, new=new: new  # noqa: E731
        wanted = plain.logit_diffs(ids, ROWS, places, change, None if match[3] is None else int(match[3]))
        torch.testing.assert_close(torch.tensor(row["values"]), wanted, rtol=0, atol=2e-5, msg=row["edit"])
        assert row["mean"] == pytest.approx(sum(row["values"]) / 2) and row["change"] == row["mean"] - found["clean"]
        assert row["ci_low"] <= row["mean"] <= row["ci_high"]


def test_metrics_and_tasks(cli: Cli, checkpoints: Path) -> None:
    model = hs.load(str(checkpoints / "llama"))
    prompts = hs.tasks.make("repeated-tokens", model, 3, 5)
    for metric in ("loss", "prob", "kl"):
        given = ("--task", "repeated-tokens", "--n", 3, "--seed", 5, "--metric", metric)
        found = cli("sweep", checkpoints / "llama", *given, "--json").json("sweep")
        wanted = hs.sweep(model, prompts, hs.each_head(hs.zero), metric)
        rows = {row["edit"]: row["values"] for row in found["values"]}
        assert found["metric"] == metric and (found["clean"] == 0) == (metric == "kl")
        for name, values in zip(wanted.edit.values, wanted.values, strict=True):
            assert rows[str(name)] == pytest.approx(values.tolist(), abs=1e-6)
    one = cli("sweep", checkpoints / "llama", "--task", "repeated-tokens", "--n", 1, "--json").json("sweep")
    assert {row["ci_low"] for row in one["values"]} == {None}


def test_the_seed_draws_the_other_row(cli: Cli, checkpoints: Path) -> None:
    rows = [{"prompt": f"the w{i} of w{2 * i}", "answer": "w5", "foil": "w6"} for i in range(7)]
    given = ("sweep", checkpoints / "llama", "--task", _lines(*rows), "--edit", "resample", "--json")
    first, again, *others = (cli(*given, "--seed", seed).json("sweep") for seed in (0, 0, 1, 2, 3))
    assert first["values"] == again["values"] and any(other["values"] != first["values"] for other in others)


def test_the_terminal_shows_the_largest_changes(cli: Cli, checkpoints: Path) -> None:
    given = ("sweep", checkpoints / "llama", "--task", _lines(*ROWS))
    found = cli(*given, "--json").json("sweep")["values"]
    done = cli(*given, "--top", 4, "--out", "run")
    assert done.status == 0 and re.findall(r"zero L\d+H\d+", done.out) == [row["edit"] for row in found[:4]]
    assert "Wrote run." in done.out
    assert cli("sweep", checkpoints / "llama", "--task", "mine.jsonl", "--dry-run").out.startswith("24 edits in ")
    pair = cli("patch", checkpoints / "llama", "--task", "mine.jsonl", "--top", 2)
    assert pair.status == 0 and "logit_diff: clean" in pair.out and len(re.findall(r"-?\d\.\d{4}\b", pair.out)) == 2


def test_a_sweep_in_a_folder(cli: Cli, fits: Any, tree: Any, checkpoints: Path, small: None) -> None:
    given = ("sweep", checkpoints / "llama", "--task", _lines(*ROWS), "--json")
    bare = cli(*given).json("sweep")
    found = cli(*given, "--out", "deep/run").json("sweep")
    assert found == {**bare, "out": "deep/run"}
    manifest = json.loads(Path("deep/run/manifest.json").read_text(encoding="utf-8"))
    fits(manifest, "sweep-manifest")
    assert len(manifest["edits"]) == 24 and len(manifest["chunks"]) >= 3
    chunks = [f"chunks/{i:05d}.safetensors" for i in range(len(manifest["chunks"]))]
    assert set(tree(Path("deep/run"))) == {"manifest.json", "sweep.parquet", "chunks", *chunks}
    frame = pd.read_parquet("deep/run/sweep.parquet")
    assert list(frame.columns) == ["edit", "component", "prompt", "value", "clean"]
    assert len(frame) == 48
    page = (Path(__file__).parents[2] / "docs" / "schemas" / "README.md").read_text(encoding="utf-8")
    rows = page.split("## The folder of a sweep")[1].split("##")[0]
    assert re.findall(r"^\| `(\w+)`", rows, re.MULTILINE) == list(frame.columns)
    for row in found["values"]:
        assert frame[frame.edit == row["edit"]].value.tolist() == row["values"]
    before = tree(Path("deep"))
    assert cli(*given, "--out", "deep/run", "--resume").json("sweep") == found
    cli(*given, "--out", "deep/run").refused(2, "holds a sweep already", "--resume")
    for other in (("--edit", "mean"), ("--over", "attn"), ("--metric", "prob"), ("--positions", "last")):
        cli(*given, "--out", "deep/run", "--resume", *other).refused(2, "holds another sweep")
    after = tree(Path("deep"))
    assert {k: v for k, v in after.items() if "parquet" not in k} == {
        k: v for k, v in before.items() if "parquet" not in k
    }
    # with --resume, a folder that is not there yet is made
    assert cli(*given, "--out", "new", "--resume").json("sweep")["values"] == found["values"]


def test_a_dry_run_writes_nothing(cli: Cli, checkpoints: Path, tmp_path: Path) -> None:
    for options in ((), ("--positions", "each"), ("--over", "neurons", "--block", 1), ("--over", "layers")):
        given = ("--task", "repeated-tokens", "--n", 2, "--out", "run", *options)
        cost = cli("sweep", checkpoints / "llama", *given, "--dry-run", "--json").json("sweep-dry-run")
        assert cost["share_of_plain_work"] < 1 and cost["free_memory_bytes"] > 0
        assert (
            cost["edits"]
            == {"": 24, "--positions": 24 * 40, "--over": 3 * 48 if 1 in options else 3}[options[0] if options else ""]
        )
    assert list(tmp_path.iterdir()) == []


def _patched(plain: Plain, rows: list[dict[str, str]], direction: str, layer: int, head: int) -> float:
    clean, twin = (plain.ids([row[name] for row in rows]) for name in ("prompt", "corrupt"))
    base, source = (twin, clean) if direction == "denoise" else (clean, twin)
    places = plain.places("heads", layer, head)
    new = plain.seen(source, places[0])
    top, low = (plain.logit_diffs(ids, rows).mean() for ids in (clean, twin))
    moved = plain.logit_diffs(base, rows, places, lambda x: new).mean()
    return float((moved - low if direction == "denoise" else top - moved) / (top - low))


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_patch_is_what_plain_hooks_give(cli: Cli, checkpoints: Path, plain: Plain, direction: str) -> None:
    given = ("patch", checkpoints / "llama", "--direction", direction, "--json")
    one = ROWS[0]
    own = ("--clean", one["prompt"], "--corrupt", one["corrupt"], "--answer", " Mary", "--foil", " John")
    for rows, options in (([one], own), (ROWS, ("--task", _lines(*ROWS)))):
        found = cli(*given, *options).json("patch")
        assert found["task"] == ("mine" if len(rows) == 2 else "your prompts")
        assert (found["direction"], found["estimate"], found["over"]) == (direction, False, "heads")
        assert found["used"] == 1 and found["metric"] == "logit_diff"
        for name, what in (("clean", "prompt"), ("corrupt", "corrupt")):
            values = plain.logit_diffs(plain.ids([row[what] for row in rows]), rows)
            assert found[name] == pytest.approx(float(values.mean()), abs=1e-5)
        effects = [row["effect"] for row in found["values"]]
        assert len(effects) == 24 and effects == sorted(effects, reverse=True)
        scale = abs(found["clean"] - found["corrupt"])
        for row in found["values"]:
            wanted = _patched(plain, rows, direction, row["layer"], row["head"])
            assert row["effect"] == pytest.approx(wanted, abs=2e-5 / scale)


@pytest.mark.parametrize("over", ["heads", "attn", "mlp", "resid", "neurons"])
@pytest.mark.parametrize("positions", ["all", "each", "last"])
def test_patch_over_and_positions(cli: Cli, checkpoints: Path, over: str, positions: str) -> None:
    model = hs.load(str(checkpoints / "llama"))
    prompts = hs.tasks.make(_lines(*ROWS), model)
    given = ("patch", checkpoints / "llama", "--task", "mine.jsonl", "--over", over, "--positions", positions, "--json")
    for estimate in (False, True):
        found = cli(*given, *(["--estimate"] if estimate else [])).json("patch")
        method = hs.attribution_patching if estimate else hs.patching
        wanted = method(model, prompts, over, positions=positions).effect
        assert found["estimate"] is estimate and len(found["values"]) == wanted.size
        for row in found["values"]:
            assert set(row) == {*wanted.dims, "effect"}
            assert row["effect"] == pytest.approx(float(wanted.sel({d: row[d] for d in wanted.dims})), abs=1e-5)


def test_patch_in_a_folder(cli: Cli, fits: Any, checkpoints: Path) -> None:
    given = ("patch", checkpoints / "llama", "--task", _lines(*ROWS), "--json", "--out", "run")
    found = cli(*given).json("patch")
    fits(json.loads(Path("run/manifest.json").read_text(encoding="utf-8")), "sweep-manifest")
    assert cli(*given, "--resume").json("patch") == found
    cli(*given).refused(2, "holds a sweep already")
    cli(*given, "--resume", "--direction", "noise").refused(2, "holds another sweep")


@pytest.mark.parametrize("command", ["sweep", "patch"])
def test_a_stopped_sweep_says_how_to_go_on(
    cli: Cli, checkpoints: Path, small: None, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    from headscope.sweep.job import Job

    given = (command, checkpoints / "llama", "--task", _lines(*ROWS), "--json")
    whole = cli(*given).json(command)
    run, ran = Job.run, []

    def interrupted(self: Job, chunk: Any) -> Tensor:
        ran.append(chunk)
        if len(ran) == 3:
            raise KeyboardInterrupt
        return run(self, chunk)

    monkeypatch.setattr(Job, "run", interrupted)
    stopped = cli(*given, "--out", "run")
    assert stopped.status == 130 and stopped.out == ""
    assert (
        stopped.err.splitlines()[-1] == "Stopped; run keeps what is done, and the same command with --resume goes on."
    )
    assert len(list(Path("run/chunks").iterdir())) == 2 and not Path("run/sweep.parquet").exists()
    found = cli(*given, "--out", "run", "--resume").json(command)
    assert found == ({**whole, "out": "run"} if command == "sweep" else whole)
    assert len(set(map(id, ran))) == len(ran) == 1 + len(json.loads(Path("run/manifest.json").read_text())["chunks"])
    # without a folder there is nothing to go on with
    ran.clear()
    lost = cli(*given)
    assert lost.status == 130 and lost.err.splitlines()[-1] == "Stopped; nothing was written."


def test_a_sweep_stopped_before_it_began(cli: Cli, checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("headscope.sweep.sweep"), "make_job", stop)
    done = cli("sweep", checkpoints / "llama", "--task", _lines(*ROWS), "--out", "run")
    assert done.status == 130 and done.err.splitlines()[-1] == "Stopped; nothing was written."
    assert not Path("run").exists()


@pytest.mark.slow
def test_ctrl_c_in_a_process(cli: Cli, checkpoints: Path, small: None) -> None:
    script = """
import importlib, time
job = importlib.import_module("headscope.sweep.job")
job.affordable_tokens = lambda *_: 40
run = job.Job.run
job.Job.run = lambda self, chunk: (time.sleep(0.3), run(self, chunk))[1]
from headscope.cli import main
main()
"""
    given = ["sweep", str(checkpoints / "llama"), "--task", _lines(*ROWS), "--out", "run", "--json", "--threads", "1"]
    process = subprocess.Popen(
        [sys.executable, "-c", script, *given], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    while process.poll() is None and not Path("run/chunks/00000.safetensors").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130 and out == "", err
    assert err.splitlines()[-1] == "Stopped; run keeps what is done, and the same command with --resume goes on."
    assert "Traceback" not in err and not [path for path in Path("run").rglob(".*")]
    assert not Path("run/sweep.parquet").exists()
    rest = cli(*given, "--resume").json("sweep")
    assert rest == {**cli(*given[:4], "--json").json("sweep"), "out": "run"}


OWN = ["--clean", "Mary w1", "--corrupt", "John w1", "--answer", "w2", "--foil", "w3"]


def _own(**changes: str | None) -> list[str]:
    given = {**dict(zip(OWN[::2], OWN[1::2], strict=True)), **{f"--{name}": value for name, value in changes.items()}}
    return [part for name, value in given.items() if value is not None for part in (name, value)]


REPEATED = ("--task", "repeated-tokens", "--n", 2)


@pytest.mark.parametrize(
    ("status", "words", "arguments"),
    [
        (2, ("--edit was given 'zeor'", "Did you mean zero?"), ("sweep", "@llama", "--edit", "zeor")),
        (2, "--edit was given 'scale'", ("sweep", "@llama", "--edit", "scale")),
        (2, "--edit was given 'zero=1'", ("sweep", "@llama", "--edit", "zero=1")),
        (2, "takes a number, but was given 'abc'", ("sweep", "@llama", *REPEATED, "--edit", "scale=abc")),
        (2, "takes a number, but was given 'nan'", ("sweep", "@llama", *REPEATED, "--edit", "scale=nan")),
        (2, ("nothing called 'head'", "heads"), ("sweep", "@llama", *REPEATED, "--over", "head", "--out", "new")),
        (2, "it takes all, each or last", ("sweep", "@llama", "--positions", "first")),
        (2, ("no metric 'los'", "loss"), ("sweep", "@llama", *REPEATED, "--metric", "los", "--out", "new")),
        (2, "no metric 'los'", ("sweep", "@llama", *REPEATED, "--metric", "los", "--dry-run")),
        (2, "needs prompts with a foil", ("sweep", "@llama", *REPEATED, "--metric", "logit_diff", "--out", "new")),
        (2, ("no task 'iio'", "ioi"), ("sweep", "@llama", "--task", "iio")),
        (2, ("no engine 'rai'", "ray"), ("sweep", "@llama", *REPEATED, "--engine", "rai", "--out", "new")),
        (2, "name it by --out", ("sweep", "@llama", "--resume")),
        (2, "--n", ("sweep", "@llama", "--n", 0)),
        (2, "--block", ("sweep", "@llama", "--block", 0)),
        (2, "not over layers", ("sweep", "@llama", *REPEATED, "--edit", "mean", "--over", "layers")),
        (2, "not over kv-heads", ("sweep", "@llama", *REPEATED, "--edit", "resample", "--over", "kv-heads")),
        (2, "at least two rows", ("sweep", "@llama", "--task", "repeated-tokens", "--n", 1, "--edit", "resample")),
        (2, "none.jsonl cannot be read", ("sweep", "@llama", "--task", "none.jsonl")),
        (1, "tokenizer", ("sweep", "@short", "--task", "ioi")),
        (1, "reads at most 32", ("sweep", "@short", *REPEATED)),
        (2, "left out: --clean, --corrupt, --answer, --foil", ("patch", "@llama")),
        (2, "left out: --foil", ("patch", "@llama", *_own(foil=None))),
        (2, "either --task or prompts of your own", ("patch", "@llama", *OWN, "--task", "ioi")),
        (2, ("'Mary w1'", "2 tokens and its corrupted twin 3"), ("patch", "@llama", *_own(corrupt="John w1 w2"))),
        (2, ("answer 'w2 w3' is not one token", "leading space"), ("patch", "@llama", *_own(answer="w2 w3"))),
        (2, "foil 'nonsense' is not one token", ("patch", "@llama", *_own(foil="nonsense"))),
        (2, "cannot be used", ("patch", "@llama", *_own(answer=""))),
        (2, "reads at most", ("patch", "@llama", *_own(clean="w1 " * 300, corrupt="w2 " * 300))),
        (1, "nothing to explain", ("patch", "@llama", *_own(corrupt="Mary w1"))),
        (1, "nothing to explain", ("patch", "@llama", *_own(corrupt="Mary w1"), "--estimate")),
        (1, "without a tokenizer", ("patch", "@short", *OWN)),
        (2, "nothing called 'head'", ("patch", "@llama", *OWN, "--over", "head")),
        (2, "kv-heads have two", ("patch", "@llama", *OWN, "--over", "kv-heads")),
        (2, "it takes all, each or last", ("patch", "@llama", *OWN, "--positions", "0")),
        (2, "denoise or noise", ("patch", "@llama", *OWN, "--direction", "both")),
        (2, "no engine 'rai'", ("patch", "@llama", *OWN, "--engine", "rai", "--out", "new")),
        (2, "name it by --out", ("patch", "@llama", *OWN, "--resume")),
        (2, "--estimate", ("patch", "@llama", *OWN, "--estimate", "--out", "new")),
        (2, "repeated-tokens has no corrupted twins", ("patch", "@llama", *REPEATED)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_sentence(refuse: Any, status: int, words: str | tuple[str, ...], arguments: tuple[Any, ...]) -> None:
    refuse(status, words, *arguments, "--json")


@pytest.mark.parametrize("command", ["sweep", "patch"])
@pytest.mark.parametrize(
    ("words", "row"),
    [
        ("expected a JSON object", "{"),
        ("expected a JSON object", {"prompt": "w1"}),
        ("expected a JSON object", {**ROWS[0], "foil": 3}),
        ("answer 'w1 w2' is not one token", {**ROWS[0], "answer": "w1 w2"}),
        ("foil 'nonsense' is not one token", {**ROWS[0], "foil": "nonsense"}),
        ("6 tokens and its corrupted twin 5", {**ROWS[0], "corrupt": "and John gave w1 to"}),
    ],
)
def test_a_bad_line_is_named(refuse: Any, command: str, words: str, row: Any) -> None:
    _lines(ROWS[0], "", row, ROWS[1])
    refuse(2, ("mine.jsonl, line 3: ", words), command, "@llama", "--task", "mine.jsonl", "--json")


def test_files_that_cannot_be_patched(refuse: Any) -> None:
    _lines(ROWS[0], {name: ROWS[1][name] for name in ("prompt", "answer", "foil")})
    refuse(2, "mine has no corrupted twins", "patch", "@llama", "--task", "mine.jsonl")
    _lines(ROWS[0], {**ROWS[1], "prompt": "a w2", "corrupt": "a w3"})
    refuse(1, "no common positions", "sweep", "@llama", "--task", "mine.jsonl", "--positions", "each", "--out", "new")
    refuse(2, "no common positions", "patch", "@llama", "--task", "mine.jsonl", "--positions", "last")
    _lines("")
    refuse(2, "has no prompts", "patch", "@llama", "--task", "mine.jsonl")


@pytest.mark.parametrize("command", ["sweep", "patch"])
def test_places_that_cannot_be_written(refuse: Any, command: str) -> None:
    given = (command, "@llama", "--task", _lines(*ROWS), "--json", "--out")
    Path("file").write_text("text")
    Path("thesis").mkdir()
    Path("thesis/chapter").write_text("years of work")
    refuse(1, ("Cannot write", "file/run"), *given, "file/run")
    refuse(1, "choose another place", *given, "file")
    refuse(1, "choose another place", *given, "thesis")
    Path("other").mkdir()
    Path("other/manifest.json").write_text('{"format": "another"}')
    refuse(1, "not the manifest of a sweep", *given, "other", "--resume")
    Path("other/manifest.json").write_text("{")
    refuse(1, "cannot be read", *given, "other", "--resume")
