"""Files are written whole or not at all, and what is not ours is left alone."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from headscope.core.errors import FileError, UsageError
from headscope.core.files import check_file, new_file, new_folder, read_json, write_json


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _make_ours(path: Path, text: str) -> None:
    with new_folder(path, marker="ours.json") as folder:
        (folder / "ours.json").write_text(text)


def test_a_file_appears_only_when_the_block_succeeds(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "a.txt"
    with new_file(path) as temporary:
        temporary.write_text("new")
        assert not path.exists() and temporary.parent == path.parent
    assert path.read_text() == "new" and _names(path.parent) == ["a.txt"]


def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    check_file(tmp_path / "new" / "A.JSON", ".html", ".json")
    assert not _names(tmp_path)  # and nothing is made
    with pytest.raises(UsageError, match=r"a\.txt must end in \.html or \.json"):
        check_file(tmp_path / "a.txt", ".html", ".json")
    (tmp_path / "b.json").mkdir()
    with pytest.raises(FileError, match="it is a folder"):
        check_file(tmp_path / "b.json", ".json")
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="Choose a folder you may write to"):
        check_file(tmp_path / "file" / "c.json")


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_a_failed_file_leaves_the_old_one(tmp_path: Path, kind: type[BaseException]) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(kind), new_file(path) as temporary:
        temporary.write_text("half")
        raise kind
    assert path.read_text() == "old" and _names(tmp_path) == ["a.txt"]


def test_a_file_has_ordinary_rights(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    write_json(tmp_path / "a.json", 1)
    rights = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "a.json")}
    assert len(rights) == 1


def test_a_folder_replaces_ours_and_empty_ones(tmp_path: Path) -> None:
    path = tmp_path / "atlas"
    path.mkdir()
    _make_ours(path, "first")
    (path / "extra").write_text("")
    _make_ours(path, "second")
    assert _names(path) == ["ours.json"] and (path / "ours.json").read_text() == "second"
    assert _names(tmp_path) == ["atlas"]


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_a_failed_folder_leaves_the_old_one(tmp_path: Path, kind: type[BaseException]) -> None:
    path = tmp_path / "atlas"
    _make_ours(path, "old")
    with pytest.raises(kind), new_folder(path, marker="ours.json") as folder:
        (folder / "ours.json").write_text("half")
        raise kind
    assert (path / "ours.json").read_text() == "old" and _names(tmp_path) == ["atlas"]


def test_a_failed_exchange_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "atlas"
    _make_ours(path, "old")
    rename, calls = os.rename, 0

    def fail_second(source: Path, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError("device gone")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail_second)
    with pytest.raises(OSError, match="device gone"):
        _make_ours(path, "new")
    assert (path / "ours.json").read_text() == "old" and _names(tmp_path) == ["atlas"]


def test_a_foreign_folder_or_file_is_refused_before_any_work(tmp_path: Path) -> None:
    foreign = tmp_path / "thesis"
    foreign.mkdir()
    (foreign / "chapter").write_text("years of work")
    (tmp_path / "file").write_text("text")
    for path in (foreign, tmp_path / "file"):
        with pytest.raises(FileError, match="not written by headscope"), new_folder(path, marker="ours.json"):
            pytest.fail("the block must not run")
    assert (foreign / "chapter").read_text() == "years of work"
    assert _names(tmp_path) == ["file", "thesis"]


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    for path in (tmp_path / "file" / "a.json", tmp_path / "file" / "deep" / "a.json"):
        with pytest.raises(FileError, match="Cannot write") as caught, new_file(path):
            pytest.fail("the block must not run")
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
        with pytest.raises(FileError, match="Cannot write"), new_folder(path, marker="m"):
            pytest.fail("the block must not run")
    with pytest.raises(FileError, match="is a folder"):
        write_json(tmp_path, {})
    assert _names(tmp_path) == ["file"]


def test_json_round_trip(tmp_path: Path) -> None:
    document = {"name": "Ġtoken – ü", "values": [1, 0.1, None, True], "nested": {"a": []}}
    write_json(tmp_path / "a.json", document)
    assert read_json(tmp_path / "a.json", "edit file") == document


def test_json_that_cannot_be_made_leaves_the_old(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", [1])
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"a": object()})
    assert json.loads((tmp_path / "a.json").read_text()) == [1] and _names(tmp_path) == ["a.json"]


@pytest.mark.parametrize("content", [b"", b'{"a": 1', b"\xff\xfe\x00", b"{'a': 1}"])
def test_damaged_json_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(FileError, match=r"The edit file .* damaged") as caught:
        read_json(path, "edit file")
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_absent_json_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"There is no edit file at .*none\.json"):
        read_json(tmp_path / "none.json", "edit file")
    with pytest.raises(FileError, match="cannot be read"):
        read_json(tmp_path, "edit file")


def test_a_link_stays_and_what_it_points_to_is_replaced(tmp_path: Path) -> None:
    for kind, target in (("old", tmp_path / "real"), ("absent", tmp_path / "later")):
        link = tmp_path / f"link-{kind}"
        link.symlink_to(target)
        if kind == "old":
            target.mkdir()
        with new_folder(link, marker="mark") as folder:
            (folder / "mark").write_text("new")
        assert link.is_symlink() and (target / "mark").read_text() == "new"
    assert _names(tmp_path) == ["later", "link-absent", "link-old", "real"]
