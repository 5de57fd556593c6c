"""The package's front door: light to open, every name behind it, and functions that stay functions."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import FunctionType, ModuleType

import pytest

import headscope as hs

HEAVY = {"torch", "transformers", "pandas", "xarray", "typer", "rich", "numpy", "scipy"}


def _fresh(code: str) -> str:
    """What a new interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_loads_nothing_heavy() -> None:
    assert _fresh(f"import sys, headscope; print(sorted({HEAVY!r} & set(sys.modules)))") == "[]"


def test_components_and_errors_need_nothing_heavy() -> None:
    code = f"""
import sys, headscope as hs
assert str(hs.Component.parse("L5H3")) == "L5H3" and issubclass(hs.HeadscopeError, Exception)
print(sorted({HEAVY!r} & set(sys.modules)))
"""
    assert _fresh(code) == "[]"


@pytest.mark.parametrize("name", hs.__all__)
def test_every_public_name_can_be_reached(name: str) -> None:
    value = getattr(hs, name)
    if isinstance(value, ModuleType):
        assert value.__name__ == f"headscope.{name}"
    elif name != "__version__":
        module, attribute = hs._PUBLIC[name]
        assert value is getattr(importlib.import_module(module), str(attribute))
        assert value.__doc__
    assert name in dir(hs)


def test_a_star_import_brings_them_all() -> None:
    scope: dict[str, object] = {}
    exec("from headscope import *", scope)
    assert set(hs.__all__) <= set(scope)


def test_a_function_stays_one_after_its_module_is_imported() -> None:
    names = ["trace", "sweep", "verify", "scan"]
    code = f"""
import importlib, types, headscope
for name in {names}:
    importlib.import_module("headscope." + name)
    assert isinstance(getattr(headscope, name), types.FunctionType), name
from headscope import trace, sweep, verify, scan
import headscope.trace, headscope.scan
for value in (trace, sweep, verify, scan, headscope.trace, headscope.scan):
    assert isinstance(value, types.FunctionType), value
print("fine")
"""
    assert _fresh(code) == "fine"
    assert all(isinstance(getattr(hs, name), FunctionType) for name in names)


def test_modules_that_are_public_stay_modules() -> None:
    code = """
import headscope, headscope.tasks.base
from headscope import tasks
assert tasks is headscope.tasks and "capitals" in headscope.tasks.names()
import headscope.core.component
assert headscope.core.component.Component is headscope.Component
print("fine")
"""
    assert _fresh(code) == "fine"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'headscope' has no attribute 'trase'"):
        hs.trase  # noqa: B018
    assert not hasattr(hs, "__wrapped__")
    with pytest.raises(ImportError, match="trase"):
        exec("from headscope import trase")
