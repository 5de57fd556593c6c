"""Writing so that nothing is ever half-written: a temporary name beside the target, then one rename."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headscope.core.errors import FileError, UsageError


@contextmanager
def new_file(path: str | Path) -> Iterator[Path]:
    """A temporary path to write to; renamed onto `path` if the block succeeds, removed if it does not."""
    path = Path(os.path.realpath(path))  # a link stays, and what it points to is replaced
    check_file(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp makes a private file; give it the rights an ordinary new file would have
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_file(path: str | Path, *endings: str) -> None:
    """Raise FileError where `new_file` could not write, UsageError for a name without one of the endings (if any are
    given): before the work is done whose result it is to hold."""
    path = Path(path)
    if endings and path.suffix.lower() not in endings:
        raise UsageError(f"{path} must end in {' or '.join(endings)}.")
    path = Path(os.path.realpath(path))
    _check_writable(path)
    if path.is_dir():
        raise FileError(f"Cannot write {path}: it is a folder. Give the name of a file.")


def check_folder(path: str | Path, *, marker: str | None = None) -> None:
    """Raise FileError where `new_folder` could not write."""
    path = Path(path)
    _check_writable(path)
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if marker is None:
        raise FileError(f"{path} exists already; choose another place.")
    if not (path / marker).is_file():
        raise FileError(f"{path} exists and was not written by headscope (it has no {marker}); choose another place.")


@contextmanager
def new_folder(path: str | Path, *, marker: str | None = None) -> Iterator[Path]:
    """A temporary folder to fill; it takes the place of `path` if the block succeeds.

    An existing folder is replaced only if it is empty or holds the file `marker`, which says that we wrote it.
    """
    path = Path(os.path.realpath(path))  # a link stays, and what it points to is replaced
    check_folder(path, marker=marker)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    old = temporary.with_name(temporary.name + ".old")
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)
        if path.exists():
            os.rename(path, old)
        os.rename(temporary, path)
    finally:
        if old.exists() and not path.exists():  # stopped between the two renames
            os.rename(old, path)
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def write_json(path: str | Path, document: Any) -> None:
    """Write one JSON document atomically."""
    with new_file(path) as temporary:
        temporary.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: str | Path, what: str) -> Any:
    """Read a JSON document; `what` names the file's role in the error."""
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileError(f"There is no {what} at {path}.") from None
    except (OSError, UnicodeError, json.JSONDecodeError, RecursionError) as error:
        raise FileError(f"The {what} {path} cannot be read ({error}); it is damaged or not a JSON file.") from None


def read_document(path: str | Path, what: str, name: str, version: int) -> dict[str, Any]:
    """One of our own JSON documents, which says that it is a `headscope-{name}` of that format version; `what` names it in
    the error. Raises FileError for anything else."""
    document = read_json(path, what)
    if not isinstance(document, dict) or document.get("format") != f"headscope-{name}":
        raise FileError(f"{path} is not {'an' if what[0] in 'aeiou' else 'a'} {what} of headscope.")
    if document.get("format_version") != version:
        raise FileError(f"{path} has {what} format {document.get('format_version')}; this version reads {version}.")
    return document


def _check_writable(path: Path) -> None:
    parent = path.parent
    try:
        while not parent.exists():  # nothing is made before there is something to write
            parent = parent.parent
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise FileError(f"Cannot write {path}: {error.strerror or error}. Choose a folder you may write to.") from None
