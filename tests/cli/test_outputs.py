"""Every --json output is one document that fits its schema; commands do what they say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pandas as pd
import pytest
import torch
import transformers as hf
import typer

import headscope as hs
from headscope.cli.app import app

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"
COMMON = ("--json", "--seed", "--device", "--dtype", "--threads")
LITTLE = ("--n-seeds", 5, "--n-controls", 2)
Cli = Callable[..., Any]


def _commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(_commands(typer.main.get_command(app)))


def test_all_commands_are_known() -> None:
    names = {" ".join(path) for path in COMMANDS}
    assert names >= {"scan", "score", "verify", "compare", "doctor", "methods", "check", "models list", "models get",
                     "edit show", "edit bake", "sweep", "patch", "routes", "figure"}  # fmt: skip


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_takes_the_common_options_and_explains_itself(cli: Cli, path: tuple[str, ...]) -> None:
    command = COMMANDS[path]
    assert {option for p in command.params for option in p.opts} >= set(COMMON)
    done = cli(*path, "--help")
    assert done.status == 0 and done.err == ""
    shown = re.sub(r"[^\w<>{}\[\].,-]+", " ", done.out)
    for option in COMMON:
        assert option in shown
    for parameter in command.params:
        if not parameter.opts[0].startswith("-"):
            assert (parameter.metavar or parameter.name).upper() in shown.upper()
            assert " ".join(re.findall(r"\w+", parameter.help)[:2]) in " ".join(re.findall(r"\w+", done.out))


@pytest.mark.parametrize("path", [(), ("models",), ("edit",)], ids=lambda path: " ".join(path) or "headscope")
def test_a_group_lists_its_commands(cli: Cli, path: tuple[str, ...]) -> None:
    done = cli(*path, "--help")
    inside = {command[len(path)] for command in COMMANDS if command[: len(path)] == path}
    assert done.status == 0 and all(name in done.out for name in inside)


@pytest.mark.parametrize("path", sorted(SCHEMAS.glob("*.schema.json")), ids=lambda path: path.name.split(".")[0])
def test_schemas_are_sound_and_listed(path: Path) -> None:
    rules = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(rules)
    assert rules["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert re.fullmatch(rf"headscope/{path.name.split('.')[0]}/\d+", rules["$id"])
    assert rules["title"] and rules["description"].endswith(".")
    assert f"({path.name})" in (SCHEMAS / "README.md").read_text(encoding="utf-8")


def test_doctor(cli: Cli, checkpoints: Path) -> None:
    found = cli("doctor", checkpoints / "llama", "--json", "--threads", 1).json("doctor")
    assert found["ok"] and found["bit_identical"] and {c["status"] for c in found["checks"]} == {"passed"}


def test_methods(cli: Cli) -> None:
    rows = cli("methods", "--json").json("methods")
    assert len(rows) >= 9 and len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        assert cli("methods", row["id"], "--json").json("method") == row


def test_models(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSCOPE_CACHE", str(tmp_path))
    (row,) = [r for r in cli("models", "list", "--json").json("models-list") if r["name"] == "smollm2-135m"]
    assert row["path"] is None
    assert cli("models", "--json").json("models-list") == cli("models", "list", "--json").json("models-list")
    folder = tmp_path / "models" / f"smollm2-135m-{row['version']}"
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    got = cli("models", "get", "smollm2-135m", "--json").json("models-get")
    assert got == {"name": "smollm2-135m", "path": str(folder)}


@pytest.mark.parametrize("method", ["bos-sink", "previous-token", "head-ablation"])
def test_scores_are_sorted_and_cover_all_heads(cli: Cli, checkpoints: Path, method: str) -> None:
    found = cli("score", checkpoints / "llama", method, "--json", "--seed", 1).json("score")
    values = [row["score"] for row in found["values"]]
    assert values == sorted(values, reverse=True) and found["seed"] == 1 and found["method"] == method
    heads = {(row["layer"], row["head"]) for row in found["values"]}
    assert heads == {(layer, h) for layer in range(3) for h in range(8)} and len(values) == 24


def test_score_is_what_python_gives(cli: Cli, checkpoints: Path) -> None:
    found = cli("score", checkpoints / "llama", "previous-token", "-o", "n=2", "--seed", 5, "--json").json("score")
    scores = hs.score(hs.load(str(checkpoints / "llama")), "previous-token", seed=5, n=2)
    assert found["options"] == scores.attrs["options"] and found["options"]["n"] == 2
    assert all(row["score"] == float(scores[row["layer"], row["head"]]) for row in found["values"])


def test_the_terminal_shows_the_best(cli: Cli, checkpoints: Path) -> None:
    done = cli("score", checkpoints / "llama", "previous-token", "--top", 3)
    best = cli("score", checkpoints / "llama", "previous-token", "--json").json("score")["values"]
    shown = re.findall(r"L\d+H\d+", done.out)
    assert done.status == 0 and shown == [f"L{row['layer']}H{row['head']}" for row in best[:3]]


def test_verify(cli: Cli, checkpoints: Path) -> None:
    chosen = cli("verify", checkpoints / "llama", "sink", "--heads", "L1H5,L0H2", *LITTLE, "--json").json("verify")
    assert chosen["components"] == ["L1H5", "L0H2"] and chosen["k"] == 2 and chosen["effect"] is not None
    assert chosen["n_seeds"] == 5 and len(chosen["control_effects"]) == chosen["n_controls"] == 2
    top = cli("verify", checkpoints / "llama", "sink", *LITTLE, "--json").json("verify")
    assert len(top["components"]) == top["k"] == 8
    unable = cli("verify", checkpoints / "llama", "induction", "--json").json("verify")
    assert unable["verdict"] == "not testable" and unable["effect"] is None and "accuracy" in unable["reason"]


def test_check(cli: Cli, checkpoints: Path) -> None:
    model = ("--model", checkpoints / "llama")
    rows = cli("check", "--all", *model, "--json").json("check-all")
    assert {row["id"] for row in rows} == {row["id"] for row in cli("methods", "--json").json("methods")}
    row = cli("check", "previous-token", *model, "--json").json("check")
    (same,) = [r for r in rows if r["id"] == "previous-token"]
    assert {**row, "seconds": 0} == {**same, "seconds": 0}


def test_a_scan_writes_the_atlas(fits: Callable[..., None], scanned: tuple[Path, Any]) -> None:
    out, document = scanned
    atlas = json.loads((out / "atlas.json").read_text(encoding="utf-8"))
    fits(atlas, "atlas")
    assert atlas["model"] == document["model"] and atlas["seed"] == 3 and document["out"] == str(out)
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    scores = {row["file"] for row in atlas["results"]}
    assert files == scores | {"atlas.json", "verdicts.parquet", "weights.parquet", "report.html"} and len(scores) >= 4
    assert [path.name for path in out.parent.iterdir()] == ["atlas"]
    tested = {row["role"]: row for row in document["roles"]}
    assert tested["sink"]["effect"] is not None and tested["induction"]["verdict"] == "not testable"


def test_tables_are_as_documented(scanned: tuple[Path, Any]) -> None:
    out, document = scanned
    page = (SCHEMAS / "README.md").read_text(encoding="utf-8")
    for path in (out / "scores").iterdir():
        frame = pd.read_parquet(path)
        unit, n = ("neuron", 3 * 48) if "neuron" in frame else ("head", 24)
        assert list(frame.columns) == ["layer", unit, "score", "ci_low", "ci_high", "n"] and len(frame) == n
        assert [str(kind) for kind in frame.dtypes] == ["int64"] * 2 + ["float64"] * 4
    verdicts = pd.read_parquet(out / "verdicts.parquet")
    rows = page.split("`verdicts.parquet`")[1].split("`weights.parquet`")[0]
    documented = [
        name
        for line in rows.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    ]
    assert documented == list(verdicts.columns)
    assert list(verdicts["role"]) == [row["role"] for row in document["roles"]]
    assert [json.loads(text) for text in verdicts["components"]] == [row["components"] for row in document["roles"]]
    weights = pd.read_parquet(out / "weights.parquet")
    assert list(weights.columns) == ["layer", "head", "probe", "score", "ci_low", "ci_high", "n"]
    assert len(weights) == 24 * 16


def test_one_seed_gives_one_atlas(cli: Cli, checkpoints: Path, scanned: tuple[Path, Any], tmp_path: Path) -> None:
    out, document = scanned
    again = cli("scan", checkpoints / "llama", "--out", tmp_path / "a", "--seed", 3, "--json").json("scan")
    assert again["roles"] == document["roles"] and again["skipped"] == document["skipped"]
    for path in [*(out / "scores").iterdir(), out / "verdicts.parquet", out / "weights.parquet"]:
        other = pd.read_parquet(tmp_path / "a" / path.relative_to(out))
        pd.testing.assert_frame_equal(pd.read_parquet(path), other, check_exact=True)
    last = cli("scan", checkpoints / "llama", "--out", tmp_path / "a", "--seed", 4, *LITTLE, "--json").json("scan")
    assert last["roles"] != document["roles"] and hs.Atlas.load(tmp_path / "a").seed == 4


def test_a_scan_of_chosen_methods(cli: Cli, checkpoints: Path) -> None:
    few = cli("scan", checkpoints / "llama", "--methods", "bos-sink,duplicate-token", *LITTLE, "--json").json("scan")
    assert sorted(p.stem for p in Path("atlas/scores").iterdir()) == ["bos-sink", "duplicate-token"]
    assert {row["role"] for row in few["roles"]} == {"sink", "duplicate-token"} and few["left_to_full"] == []


def test_a_dry_run_writes_nothing(cli: Cli, checkpoints: Path, tmp_path: Path) -> None:
    for model in ("llama", "short", "bert"):
        cost = cli("scan", checkpoints / model, "--dry-run", "--out", "deep/atlas", "--json").json("scan-dry-run")
        assert cost["memory_bytes"] > 0 and (cost["steps"] or model == "short")
    assert "verify sink" in [
        step["what"] for step in cli("scan", checkpoints / "llama", "--dry-run", "--json").json("scan-dry-run")["steps"]
    ]
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_apply_is_left_out_with_the_reason(cli: Cli, checkpoints: Path) -> None:
    short = cli("scan", checkpoints / "short", "--out", "short", *LITTLE, "--json").json("scan")
    assert all("reads at most 32" in short["skipped"][name] for name in ("duplicate-token", "previous-token"))
    assert "tokenizer" in short["skipped"]["bos-sink"]
    encoder = cli("scan", checkpoints / "bert", "--out", "bert", *LITTLE, "--json").json("scan")
    assert "attends in both directions" in encoder["skipped"]["induction-heads-icl"]
    assert "Not run:" in cli("scan", checkpoints / "short", "--out", "short", *LITTLE).out


def test_a_model_of_few_heads_is_tested_with_fewer(cli: Cli, checkpoints: Path, tmp_path: Path) -> None:
    few = hf.AutoModelForCausalLM.from_pretrained(checkpoints / "llama", num_hidden_layers=1)
    few.save_pretrained(tmp_path / "few")
    hf.AutoTokenizer.from_pretrained(checkpoints / "llama").save_pretrained(tmp_path / "few")
    (row,) = cli("scan", "few", "--methods", "bos-sink", *LITTLE, "--json").json("scan")["roles"]
    assert row["k"] == len(row["components"]) == 4 and row["effect"] is not None


@pytest.mark.parametrize("part", ["o_proj", "q_proj"])
def test_compare_names_the_edited_head_first(cli: Cli, checkpoints: Path, edited_copy: Any, part: str) -> None:
    for name, model in (("a", checkpoints / "llama"), ("b", edited_copy(part))):
        cli("scan", model, "--out", name, "--methods", "previous-token,bos-sink", *LITTLE, "--json").json("scan")
    found = cli("compare", "a", "b", "--json").json("compare")
    assert [row["component"] for row in found["changed"] if row["edited"]] == ["L1H5"]
    assert found["changed"][0]["component"] == "L1H5" and len(found["changed"]) == 24
    assert re.search(r"L\d+H\d+", cli("compare", "a", "b").out)[0] == "L1H5"
    same = cli("compare", "a", "a", "--json").json("compare")
    assert not any(row["edited"] or row["change"] or row["weights"] for row in same["changed"])


def test_edits_are_shown_and_baked(cli: Cli, fits: Callable[..., None], checkpoints: Path) -> None:
    edits = [hs.zero("L1H5"), hs.scale(["L0H1", "L2H3"], 0.5), hs.zero("L2N7"), hs.add("L0H0", torch.ones(4))]
    hs.save_edits(edits, "edits.json")
    fits(json.loads(Path("edits.json").read_text()), "edits")
    shown = cli("edit", "show", "edits.json", "--json").json("edit-show")
    assert [(row["op"], row["components"]) for row in shown["edits"][:2]] == [
        ("zero", ["L1H5"]),
        ("scale", ["L0H1", "L2H3"]),
    ]
    assert all(str(edit) in cli("edit", "show", "edits.json").out for edit in edits)
    done = cli("edit", "bake", checkpoints / "llama", "edits.json", "--out", "new/baked", "--json").json("edit-bake")
    assert done["out"] == "new/baked" and [p.name for p in Path("new").iterdir()] == ["baked"]
    plain = hf.AutoModelForCausalLM.from_pretrained("new/baked")
    ids = torch.arange(3, 23).reshape(2, 10)
    model = hs.load(str(checkpoints / "llama"))
    with torch.no_grad(), hs.edited(model, edits):
        wanted = model.hf(ids).logits
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, wanted, rtol=1e-4, atol=1e-4)
        assert (model.hf(ids).logits - wanted).abs().max() > 0.01
    assert hf.AutoTokenizer.from_pretrained("new/baked")("the")["input_ids"] == [3]


def test_edits_of_some_positions_are_shown(cli: Cli) -> None:
    edits = [hs.zero("L0H1", positions=[0, 3], rows=[1]), hs.zero("L1KV0", part="v"), hs.scale("L2MLP", 2.0, positions="generated"),
             hs.mask_edges("L0H1", [(3, None)])]  # fmt: skip
    hs.save_edits(edits, "edits.json")
    rows = cli("edit", "show", "edits.json", "--json").json("edit-show")["edits"]
    assert [row["positions"] for row in rows] == [[0, 3], None, "generated", None] and rows[0]["rows"] == [1]


def test_in_a_process_of_its_own(checkpoints: Path) -> None:
    command = [sys.executable, "-c", "from headscope.cli import main; main()", "score", checkpoints / "llama"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "previous-token", "--json"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0 and len(json.loads(done.stdout)["values"]) == 24
    assert all(line.endswith(" …") for line in done.stderr.splitlines()), done.stderr


def test_a_terminal_of_few_letters_gets_others_and_json_stays_whole() -> None:
    script = "import headscope.cli; headscope.cli.main()"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    for options in ([], ["--json"]):
        done = subprocess.run(
            [sys.executable, "-c", script, "methods", *options], capture_output=True, env=environment, check=False
        )
        assert done.returncode == 0 and done.stdout.isascii() and not done.stderr, done.stderr
    assert any(not text.isascii() for row in json.loads(done.stdout) for text in row.values() if isinstance(text, str))
