"""What cannot be done is refused in one sentence, with the right status, and nothing is written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headscope as hs

Cli = Callable[..., Any]


@pytest.mark.parametrize(
    ("status", "words", "arguments"),
    [
        (2, "No such command 'scam'", "scam @llama"),
        (2, "No such command 'shoe'", "edit shoe"),
        (2, ("MODEL", "headscope scan --help"), "scan"),
        (2, "method", "score @llama"),
        (2, "role", "verify @llama"),
        (2, ("ATLAS", "headscope compare --help"), "compare a"),
        (2, ("--out", "headscope edit bake --help"), "edit bake @llama edits.json"),
        (2, "No such option", "scan @llama --outt x"),
        (2, "requires an argument", "scan @llama --out"),
        (2, "unexpected extra argument", "doctor @llama @bert"),
        (2, ("--seed", "integer"), "score @llama bos-sink --seed one"),
        (2, "--seed", "score @llama bos-sink --seed -1"),
        (2, "--seed", f"score @llama bos-sink --seed {2**70}"),
        (2, "--threads", "score @llama bos-sink --threads 0"),
        (2, "--n-seeds", "scan @llama --n-seeds 1"),
        (2, "--n-controls", "verify @llama sink --n-controls 1"),
        (2, ("--quick", "--full"), "scan @llama --quick --full"),
        (2, "--methods", "scan @llama --methods bos-sink --full"),
        (2, "no score method ''", "scan @llama --methods="),
        (2, ("no score method 'bos-snk'", "Did you mean bos-sink?"), "score @llama bos-snk"),
        (2, "no score method 'dla'", "score @llama dla"),
        (2, "Did you mean previous-token", "scan @llama --methods bos-sink,previous-tokens"),
        (2, ("no role 'inducton'", "Did you mean induction"), "verify @llama inducton"),
        (2, "no method 'nope'", "methods nope"),
        (2, "no method 'nope'", "check nope --model @llama"),
        (2, "no packaged model 'nope'", "models get nope"),
        (2, "no option 'lenght'", "score @llama bos-sink -o lenght=4"),
        (2, ("option n of bos-sink", "int"), "score @llama bos-sink -o n=many"),
        (2, "NAME=VALUE", "score @llama bos-sink -o n"),
        (2, "at least one prompt", "score @llama bos-sink -o n=0"),
        (2, "prefix-matching or copying", "score @llama induction-heads-icl -o part=both"),
        (2, "'nowhere'", "doctor @llama --device nowhere"),
        (2, "'int8' is not a dtype", "doctor @llama --dtype int8"),
        (2, "'flaot32' is not a dtype", "scan @llama --dtype flaot32"),
        (2, "L9H9 does not exist", "verify @llama sink --heads L9H9"),
        (2, "attention heads", "verify @llama sink --heads L0N1"),
        (2, "No component was named", "verify @llama sink --heads="),
        (2, "L0H0 came again", "verify @llama sink --heads L0H0,L0H0"),
        (2, "'head5' is not the name", "verify @llama sink --heads head5"),
        (2, "one method's id, or --all", "check"),
        (2, "one method's id, or --all", "check bos-sink --all"),
        (1, "'nobody/no-such-model' could not be loaded", "scan nobody/no-such-model --out new/atlas"),
        (1, "could not be loaded", "doctor nobody/no-such-model"),
        (1, "no GGUF file", "doctor none.gguf"),
        (1, "no config.json", "scan . --out new/atlas"),
        (1, "T5ForConditionalGeneration is not supported yet", "scan @t5 --out new/atlas"),
        (1, "it needs a decoder", "score @bert induction-heads-icl"),
        (1, "it needs a tokenizer", "score @short bos-sink"),
        (1, "reads at most 32", "score @short duplicate-token"),
        (1, "no atlas at a", "compare a b"),
        (1, "no edit file at none.json", "edit show none.json"),
        (1, "no edit file at none.json", "edit bake @llama none.json --out new"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else "",
)  # fmt: skip
def test_one_sentence(refuse: Any, status: int, words: str | tuple[str, ...], arguments: str) -> None:
    refuse(status, words, *arguments.split(), *([] if arguments.startswith("scam") else ["--json"] * (status == 1)))


def test_a_damaged_model_is_named(refuse: Any, checkpoints: Path) -> None:
    shutil.copytree(checkpoints / "llama", "model")
    weights = Path("model/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    refuse(1, "'model' could not be loaded", "scan", "model", "--out", "new/atlas")
    Path("model/config.json").write_text("{")
    refuse(1, "'model' could not be loaded", "doctor", "model")


@pytest.mark.parametrize("command", [("scan", "@llama"), ("edit", "bake", "@llama", "edits.json")], ids=" ".join)
def test_places_that_cannot_be_written(refuse: Any, command: tuple[str, ...]) -> None:
    hs.save_edits(hs.zero("L0H1"), "edits.json")
    Path("file").write_text("text")
    Path("thesis").mkdir()
    Path("thesis/chapter").write_text("years of work")
    refuse(1, "Cannot write file/atlas", *command, "--out", "file/atlas")
    refuse(1, "Cannot write file/deep/atlas", *command, "--out", "file/deep/atlas")
    refuse(1, "choose another place", *command, "--out", "thesis")
    refuse(1, "choose another place", *command, "--out", "file")


def _cut(atlas: Path) -> None:
    path = atlas / "scores" / "bos-sink.parquet"
    path.write_bytes(path.read_bytes()[:-100])


def _change(atlas: Path) -> None:
    path = atlas / "verdicts.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _rewrite(**changes: Any) -> Callable[[Path], None]:
    def apply(atlas: Path) -> None:
        document = json.loads((atlas / "atlas.json").read_text())
        document = {key: value for key, value in {**document, **changes}.items() if value is not None}
        (atlas / "atlas.json").write_text(json.dumps(document))

    return apply


def _text(text: str) -> Callable[[Path], None]:
    return lambda atlas: (atlas / "atlas.json").write_text(text) and None  # type: ignore[func-returns-value]


DAMAGE: dict[str, tuple[str, Callable[[Path], None]]] = {
    "cut table": ("bos-sink.parquet is not the file that was written", _cut),
    "changed table": ("verdicts.parquet is not the file that was written", _change),
    "lost table": ("weights.parquet is missing", lambda atlas: (atlas / "weights.parquet").unlink()),
    "lost scores": ("parquet is missing", lambda atlas: shutil.rmtree(atlas / "scores")),
    "no atlas.json": ("no atlas at", lambda atlas: (atlas / "atlas.json").unlink()),
    "half a document": ("cannot be read", _text('{"format_version": 1, "results": [')),
    "another document": ("is not an atlas", _text("[]")),
    "newer": ("upgrade headscope", _rewrite(format_version=2)),
    "no model": ("is damaged", _rewrite(model=None)),
    "other model": ("is damaged", _rewrite(model={"name": "x"})),
    "no files": ("is damaged", _rewrite(files=[])),
    "results of another kind": ("is damaged", _rewrite(results={"a": 1})),
    "no examples": ("is damaged", _rewrite(examples=None)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_atlases(refuse: Any, scanned: tuple[Path, Any], damage: str) -> None:
    words, apply = DAMAGE[damage]
    shutil.copytree(scanned[0], "damaged")
    apply(Path("damaged"))
    refuse(1, ("damaged", words), "compare", scanned[0], "damaged", "--json")
    refuse(1, ("damaged", words), "compare", "damaged", scanned[0])


def test_atlases_that_do_not_compare(cli: Cli, refuse: Any, checkpoints: Path, scanned: tuple[Path, Any]) -> None:
    little = ("--n-seeds", 5, "--n-controls", 2)
    cli("scan", checkpoints / "bert", "--out", "bert", *little, "--json").json("scan")
    refuse(2, ("3 × 8 and 3 × 4 heads", "only models with the same heads compare"), "compare", scanned[0], "bert")
    for method in ("bos-sink", "duplicate-token"):
        cli("scan", checkpoints / "llama", "--out", method, "--methods", method, *little, "--json").json("scan")
    refuse(2, "share no method", "compare", "bos-sink", "duplicate-token")


def _edit(**changes: Any) -> str:
    row = {"op": "zero", "components": ["L0H1"], "value": None, "dtype": None, "positions": None, "rows": None}
    row = {**row, "part": "kv", "edges": [], **changes}
    return json.dumps({"format": "headscope-edits", "format_version": 1, "edits": [row]})


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("cannot be read", '{"format": "headscope-edits", "edits": ['),
        ("is not an edit file", "[]"),
        ("is not an edit file", '{"format": "other"}'),
        ("has edit file format 2", '{"format": "headscope-edits", "format_version": 2, "edits": []}'),
        ("is damaged", '{"format": "headscope-edits", "format_version": 1}'),
        ("is damaged", '{"format": "headscope-edits", "format_version": 1, "edits": [{"op": "zero"}]}'),
        ("no edit 'drop'", _edit(op="drop")),
        ("another kind", _edit(op="scale")),
        ("another kind", _edit(op="add", value=1.0)),
        ("another kind", _edit(value=1.0)),
        ("No component", _edit(components=[])),
        ("not the name of a component", _edit(components=["head5"])),
        ("is not a dtype", _edit(op="add", value=[1.0], dtype="Tensor")),
        ("count from 0", _edit(positions=[-1])),
    ],
)
def test_damaged_edit_files(refuse: Any, words: str, text: str) -> None:
    Path("edits.json").write_text(text)
    refuse(1, words, "edit", "show", "edits.json", "--json")
    refuse(1, words, "edit", "bake", "@llama", "edits.json", "--out", "new")


@pytest.mark.parametrize(
    ("words", "edit"),
    [
        ("L7H0 does not exist", hs.zero("L7H0")),
        ("L0H8 does not exist", hs.zero("L0H8")),
        ("cannot be baked", hs.zero("L0H1", positions=[2])),
        ("cannot be baked", hs.mask_edges("L0H1", [(1, 0)])),
    ],
    ids=str,
)
def test_edits_that_cannot_be_baked(refuse: Any, words: str, edit: Any) -> None:
    hs.save_edits(edit, "edits.json")
    refuse(2, words, "edit", "bake", "@llama", "edits.json", "--out", "new/baked", "--json")


def test_a_failed_scan_leaves_the_earlier_atlas(cli: Cli, tree: Any, scanned: tuple[Path, Any], tmp_path: Path,
                                                checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    shutil.copytree(scanned[0], "atlas")
    before = tree(tmp_path)
    monkeypatch.setattr("headscope.report.html.render", lambda atlas: 1 / 0)
    done = cli("scan", checkpoints / "llama", "--methods", "bos-sink", "--n-seeds", 5, "--n-controls", 2)
    assert done.status == 1 and done.out == "" and "did not foresee (ZeroDivisionError" in done.err.splitlines()[-1]
    assert tree(tmp_path) == before


@pytest.mark.parametrize("earlier", [True, False], ids=["an earlier atlas", "no earlier atlas"])
def test_ctrl_c_leaves_no_trace(
    tree: Any, checkpoints: Path, scanned: tuple[Path, Any], tmp_path: Path, earlier: bool
) -> None:
    if earlier:
        shutil.copytree(scanned[0], "atlas")
    before = tree(tmp_path)
    command = [sys.executable, "-c", "from headscope.cli import main; main()", "scan", checkpoints / "llama"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--methods", "bos-sink", "--n-controls", "5000", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if line == "verify sink …\n":
            process.send_signal(signal.SIGINT)
            break
    out, rest = process.communicate()
    assert process.returncode == 130 and out == "", "".join(said) + rest
    assert rest.splitlines()[-1] == "Stopped; nothing was written." and "Traceback" not in rest
    assert all(line.endswith(" …") for line in rest.splitlines()[:-1])
    assert tree(tmp_path) == before
