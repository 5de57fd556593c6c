"""The example in CONTRIBUTING.md works as printed, from an outside package."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import headscope as hs
from headscope.core import registry
from headscope.model import Model

PAGE = Path(__file__).parent.parent / "CONTRIBUTING.md"


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package `toy_heads` that holds the page's method and names itself in the entry-point group."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    package = tmp_path / "toy_heads"
    (package / "score").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "score" / "__init__.py").touch()
    (package / "score" / "write_norm.py").write_text(blocks[0], encoding="utf-8")
    info = tmp_path / "toy_heads-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-heads\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[headscope.methods]\ntoy-heads = toy_heads\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry.methods.cache_clear()
    yield
    registry.methods.cache_clear()
    for name in [name for name in sys.modules if name.startswith("toy_heads")]:
        del sys.modules[name]


def test_the_method_is_listed_without_being_imported(outside: None) -> None:
    spec = registry.get("write-norm")
    assert spec.kind == "score" and [option.name for option in spec.options] == ["n", "length"]
    assert spec.info["needs"] == ("causal", "logits")
    assert "toy_heads.score.write_norm" not in sys.modules


def test_the_method_scores_and_the_printed_test_holds(outside: None, tiny: Model) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    before = {name: weight.clone() for name, weight in tiny.hf.state_dict().items()}
    scope: dict[str, object] = {}
    exec(compile(blocks[1], str(PAGE), "exec"), scope)
    scope["test_a_head_without_output_weights_writes_nothing"](tiny)  # type: ignore[operator]
    assert all(torch.equal(weight, before[name]) for name, weight in tiny.hf.state_dict().items())
    scores = hs.score(tiny, "write-norm", n=2, length=8)
    assert scores.dims == ("layer", "head") and scores.attrs["options"] == {"n": 2, "length": 8}


def test_its_claim_is_tested(outside: None, tiny: Model) -> None:
    assert hs.check(tiny, "write-norm")["verdict"] in ("shown", "not shown")
