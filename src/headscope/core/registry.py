"""Methods are found, not listed: the file `methods/<kind>/<id>.py` is the method `<id>` of that kind.

The listing parses each file without importing it, so it costs milliseconds. Outside packages take part through the
entry-point group `headscope.methods`, whose value names a package with the same folders.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from headscope.core.errors import HeadscopeError, UsageError, nearest

KINDS = {
    "score": "ScoreMethod",
    "attribute": "AttributeMethod",
    "intervene": "InterveneMethod",
    "compress": "CompressMethod",
}
GROUP = "headscope.methods"


@dataclass(frozen=True)
class Option:
    """One field of a method: its name, its type as written, and its default."""

    name: str
    type: str
    default: Any


@dataclass(frozen=True)
class MethodSpec:
    """A method as read from its source, before it is imported."""

    id: str
    kind: str
    module: str
    class_name: str
    info: dict[str, Any]
    doc: str
    options: tuple[Option, ...]
    path: Path

    def create(self, **options: Any) -> Any:
        """Import the method and make it with these options.

        Raises UsageError for an option it does not have or a value of another type.
        """
        known = {option.name: option for option in self.options}
        for name, value in options.items():
            if name not in known:
                hint = nearest(name, known) or " It has no options."
                raise UsageError(f"The method {self.id} has no option {name!r}.{hint}")
            default = known[name].default
            wanted = float if isinstance(default, float) else type(default)
            fits = isinstance(value, (int, float)) if wanted is float else isinstance(value, wanted)
            if default is not None and (not fits or (isinstance(value, bool) and wanted is not bool)):
                kind = known[name].type
                raise UsageError(
                    f"The option {name} of {self.id} was given {value!r}; it takes {kind}, such as {default!r}."
                )
        return getattr(importlib.import_module(self.module), self.class_name)(**options)


def get(method_id: str, kind: str | None = None) -> MethodSpec:
    """The method of that id. Raises UsageError, naming the nearest ones, when there is none (of that kind)."""
    found = {name: spec for name, spec in methods().items() if kind in (None, spec.kind)}
    if method_id not in found:
        what = f"{kind} method" if kind else "method"
        raise UsageError(f"There is no {what} {method_id!r}.{nearest(method_id, found)}")
    return found[method_id]


@functools.cache
def methods() -> dict[str, MethodSpec]:
    """All methods by id, sorted: the built-in ones and those of installed packages."""
    found: dict[str, MethodSpec] = {}
    for package in ("headscope.methods", *(entry.value for entry in entry_points(group=GROUP))):
        for spec in _scan(package):
            if spec.id in found:
                raise HeadscopeError(f"Two methods are called {spec.id}: {found[spec.id].path} and {spec.path}.")
            found[spec.id] = spec
    return dict(sorted(found.items()))


def _scan(package: str) -> Iterator[MethodSpec]:
    located = importlib.util.find_spec(package)
    if located is None or not located.submodule_search_locations:
        raise HeadscopeError(f"The package {package} that registers methods cannot be found; is it still installed?")
    for folder in located.submodule_search_locations:
        for kind, base in KINDS.items():
            for path in sorted(Path(folder, kind).glob("[a-z]*.py")):
                yield _read(path, kind, base, f"{package}.{kind}.{path.stem}")


def _read(path: Path, kind: str, base: str, module: str) -> MethodSpec:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except SyntaxError as error:
        raise HeadscopeError(f"{path}, line {error.lineno}: this is not valid Python ({error.msg}).") from None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(getattr(b, "id", getattr(b, "attr", "")) == base for b in node.bases):
            break
    else:
        raise HeadscopeError(f"{path} holds no class derived from {base}; a {kind} method needs one.")
    info: dict[str, Any] | None = None
    options = []
    for statement in node.body:
        try:
            if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", "") == "info":
                call = statement.value
                if call.args or not all(k.arg for k in call.keywords):  # type: ignore[attr-defined]
                    raise ValueError("positional values and ** have no names to list them by")
                info = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg}  # type: ignore[attr-defined]
            elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
                options.append(
                    Option(statement.target.id, ast.unparse(statement.annotation), ast.literal_eval(statement.value))
                )
        except (ValueError, AttributeError):
            raise HeadscopeError(
                f"{path}, line {statement.lineno}: `info` and defaults must be named literals."
            ) from None
    if info is None:
        raise HeadscopeError(f"{path} has no `info = Info(…)`; every method declares itself with one.")
    doc = ast.get_docstring(node) or ""
    return MethodSpec(path.stem.replace("_", "-"), kind, module, node.name, info, doc, tuple(options), path)
