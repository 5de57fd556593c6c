"""Tiny checkpoints on disk, and the command line in this process."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers

from families.tiny import build
from headscope.cli import _run

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), "a key stands twice"
    return dict(pairs)


def _no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


@dataclass(frozen=True)
class Done:
    """What a command did."""

    status: int
    out: str
    err: str

    def json(self, schema: str) -> Any:
        """The one document on standard output, which fits its schema."""
        assert self.status == 0, self.err
        assert self.out.count("\n") == 1 and self.out.endswith("\n")
        document = json.loads(self.out, parse_constant=_no_constant, object_pairs_hook=_unique)
        check(document, schema)
        return document

    def refused(self, status: int, *words: str) -> None:
        """One sentence for the user, after lines that say what was being done; nothing on standard output."""
        lines = self.err.splitlines()
        assert self.status == status and self.out == "", self
        assert lines[-1].startswith("Error: ") and len(lines[-1]) > 20, self.err
        assert all(line.endswith(" …") for line in lines[:-1]), self.err
        assert "did not foresee" not in self.err and "Traceback" not in self.err
        for word in words:
            assert word in lines[-1], lines[-1]


def check(document: Any, schema: str) -> None:
    """Hold a document to docs/schemas/<schema>.schema.json."""
    rules = json.loads((SCHEMAS / f"{schema}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(rules, format_checker=jsonschema.FormatChecker()).validate(document)


def run(*arguments: Any) -> Done:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = _run([str(a) for a in arguments])
    return Done(status, out.getvalue(), err.getvalue())


@pytest.fixture(scope="session")
def cli() -> Callable[..., Done]:
    return run


@pytest.fixture(scope="session")
def fits() -> Callable[[Any, str], None]:
    return check


def _tree(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in folder.rglob("*")
    }


@pytest.fixture(scope="session")
def tree() -> Callable[[Path], dict[str, str]]:
    """All that lies in a folder, with hashes."""
    return _tree


@pytest.fixture
def refuse(checkpoints: Path, tmp_path: Path) -> Callable[..., None]:
    """Run a command, in which @name stands for a checkpoint, and see that it is refused and writes nothing."""

    def check_refusal(status: int, words: str | tuple[str, ...], *arguments: Any) -> None:
        before = _tree(tmp_path)
        done = run(*(str(a).replace("@", f"{checkpoints}/") for a in arguments))
        done.refused(status, *([words] if isinstance(words, str) else words))
        assert _tree(tmp_path) == before

    return check_refusal


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test in a folder of its own, with no model hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def tokenizer(unknown: str = "<unk>") -> Any:
    """96 words, one token each; all other words are unknown."""
    special = ["<pad>", unknown, "<s>"]
    words = [*special, "the", "a", "of", "to", "and", "Mary", "John", "store", "gave", "drink"]
    words += [f"w{i}" for i in range(96 - len(words))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=unknown))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=unknown, pad_token="<pad>", bos_token="<s>")


def llama() -> Any:
    """3 layers × 8 heads; it expects an unknown word next, so it is good at plain text, of which it knows no word."""
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=256, pad_token_id=0, bos_token_id=2, eos_token_id=None,
    )  # fmt: skip
    model = hf.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        model.model.embed_tokens.weight[:, 0] += 1.0
        model.lm_head.weight[1, 0] += 2.0
    return model


def write(model: Any, folder: Path, words: Any = None) -> Path:
    """Save a checkpoint."""
    model.save_pretrained(folder)
    (tokenizer() if words is None else words).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders llama, bert, t5 (not supported), short (4 heads a layer, 32 positions, no tokenizer)."""
    folder = tmp_path_factory.mktemp("checkpoints")
    write(llama(), folder / "llama")
    write(build("bert", torch.float32), folder / "bert")
    short = build("llama", torch.float32)
    short.config.max_position_embeddings = 32
    short.save_pretrained(folder / "short")
    t5 = hf.T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    hf.T5ForConditionalGeneration(t5).save_pretrained(folder / "t5")
    return folder


@pytest.fixture(scope="session")
def edited_copy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with the llama whose head L1H5 lost a part: its columns of `o_proj` or its rows of `q_proj`."""

    def make(part: str) -> Path:
        model = llama()
        attention, unit = model.model.layers[1].self_attn, slice(5 * 4, 6 * 4)
        with torch.no_grad():
            if part == "o_proj":
                attention.o_proj.weight[:, unit] = 0
            else:
                attention.q_proj.weight[unit] = 0
        return write(model, tmp_path_factory.mktemp(part) / "llama")

    return make


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose name and unknown word are markup."""
    word = "<script>alert('1')</script>\"onload=\"x"
    name = "<script>alert(1)</script>' onmouseover=\"x"
    return write(llama(), tmp_path_factory.mktemp("hostile") / name, tokenizer(word))


@pytest.fixture(scope="session")
def scanned(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """An atlas of the llama, and the document that the scan printed."""
    out = tmp_path_factory.mktemp("scanned") / "atlas"
    return out, run("scan", checkpoints / "llama", "--out", out, "--seed", 3, "--json").json("scan")
