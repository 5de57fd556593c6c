"""Edits as files."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import headscope as hs
from brute import (
    D_HEAD,
    some_tokens,
    some_vector,
)
from headscope.core.errors import UsageError
from headscope.model import Model


def test_saved_edits_come_back_the_same(tiny: Model, tmp_path: Any) -> None:
    source = some_tokens(seed=8)
    edits = [
        hs.zero(["L1H2", "L0N3"], positions=[1, 2], rows=[0]),
        hs.scale("L2KV1", 1 / 3, part="v"),
        hs.gate("L1H0,L1H1", torch.tensor([0.1, 0.9], requires_grad=True)),
        hs.add("L1RESID", some_vector(32) / 3),
        hs.project_out("L2H3", some_vector(D_HEAD)),
        hs.mask_edges("L0H1", [(None, 2), (5, 3)]),
        *hs.resolve(
            tiny, [hs.mean("L2H1", source), hs.resample("L2H2", source, seed=5), hs.patch("L2N4", source, rows=1)]
        ),
    ]
    path = tmp_path / "edits.json"
    hs.save_edits(edits, path)
    loaded = hs.load_edits(path)
    assert [str(e) for e in loaded] == [str(e) for e in edits]
    for name in ("op", "components", "positions", "rows", "part", "edges"):
        assert [getattr(e, name) for e in loaded] == [getattr(e, name) for e in edits]
    for a, b in zip(loaded, edits, strict=True):
        if isinstance(b.value, Tensor):
            assert a.value.dtype == b.value.dtype
            torch.testing.assert_close(a.value, b.value.detach(), rtol=0, atol=0)
        else:
            assert a.value == b.value
    found = hs.trace(tiny, some_tokens(), edits=loaded).logits
    torch.testing.assert_close(found, hs.trace(tiny, some_tokens(), edits=edits).logits, rtol=0, atol=0)
    hs.save_edits(hs.zero("L1H2", positions="generated"), path)
    assert hs.load_edits(path)[0].positions == "generated"


def test_half_precision_values_come_back_exactly(tmp_path: Any) -> None:
    value = some_vector(D_HEAD).bfloat16()
    hs.save_edits(hs.add("L0H0", value), tmp_path / "e.json")
    loaded = hs.load_edits(tmp_path / "e.json")[0].value
    assert loaded.dtype == torch.bfloat16 and torch.equal(loaded, value)


def test_an_edit_that_waits_for_its_source_is_not_saved(tiny: Model, tmp_path: Any) -> None:
    with pytest.raises(UsageError, match="resolve"):
        hs.save_edits(hs.mean("L1H2", some_tokens()), tmp_path / "e.json")
    assert list(tmp_path.iterdir()) == []


def _damage(tmp_path: Any, old: str, new: str) -> Any:
    path = tmp_path / "e.json"
    hs.save_edits([hs.scale("L1H2", 2.0, positions=[3])], path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return path


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"edits": [', '"edits": [5, '), ('"op"', '"po"'), ('"scale"', '"frobnicate"'), ('"L1H2"', '"L1G2"'),
        ('"part": "kv"', '"part": "q"'), ('"edges": []', '"edges": [[1]]'), ('"value": 2.0', '"value": "two"'),
        ('"dtype": null', '"dtype": "Tensor"'), ('"dtype": null', '"dtype": 5'), ('"positions"', '"where"'), ("{", "[{"),
        ('"edits": [', '"edits": "", "x": ['),
    ],
)  # fmt: skip
def test_a_damaged_edit_file_is_one_sentence(tmp_path: Any, old: str, new: str) -> None:
    from headscope.core.errors import FileError

    path = _damage(tmp_path, old, new)
    with pytest.raises(FileError) as caught:
        hs.load_edits(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_newer_or_foreign_edit_file_says_so(tmp_path: Any) -> None:
    from headscope.core.errors import FileError

    with pytest.raises(FileError, match="edit file format 99"):
        hs.load_edits(_damage(tmp_path, '"format_version": 1', '"format_version": 99'))
    with pytest.raises(FileError, match="not an edit file"):
        hs.load_edits(_damage(tmp_path, "headscope-edits", "recipe"))
    with pytest.raises(FileError, match="no edit file"):
        hs.load_edits(tmp_path / "none.json")
