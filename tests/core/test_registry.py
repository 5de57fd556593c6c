"""Methods are found from their files: what a listing says, what it costs, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from headscope.core import registry
from headscope.core.errors import HeadscopeError, UsageError

GOOD = """
    from dataclasses import dataclass
    from headscope.methods.base import Info, ScoreMethod

    @dataclass(frozen=True)
    class Made(ScoreMethod):
        '''A made-up method.'''

        info = Info(title="Made", papers=("arXiv:0",), claim="c", higher_means="h", cost="none")
        n: int = 4
        share: float = 0.5
        mode: str = "zero"
        deep: bool = False
        limit: int | None = None

        def score(self, model, *, seed=0):
            return None

        def check(self, model, *, seed=0):
            return None
"""

Add = Callable[[str, str], Path]


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Add]:
    """Adds a file to an installed package `outside_methods` that takes part through the entry point."""
    package = tmp_path / "outside_methods"
    for folder in (package, *(package / kind for kind in registry.KINDS)):
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    info = tmp_path / "outside_methods-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-methods\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[headscope.methods]\noutside = outside_methods\n")
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, source: str) -> Path:
        path = package / name
        path.write_text(dedent(source).lstrip())
        registry.methods.cache_clear()
        return path

    yield write
    registry.methods.cache_clear()
    for name in [name for name in sys.modules if name.startswith("outside_methods")]:
        del sys.modules[name]


def test_id_kind_and_options_come_from_the_file(add: Add) -> None:
    path = add("score/made_up.py", GOOD)
    spec = registry.get("made-up", "score")
    assert (spec.id, spec.kind, spec.class_name, spec.path) == ("made-up", "score", "Made", path)
    assert spec.info["papers"] == ("arXiv:0",) and spec.doc == "A made-up method."
    assert [(o.name, o.type, o.default) for o in spec.options] == [
        ("n", "int", 4), ("share", "float", 0.5), ("mode", "str", "zero"), ("deep", "bool", False),
        ("limit", "int | None", None),
    ]  # fmt: skip
    assert list(registry.methods()) == sorted(registry.methods())


def test_create_makes_the_method_with_its_options(add: Add) -> None:
    add("score/made_up.py", GOOD)
    made = registry.get("made-up").create(n=2, share=1, deep=True, limit=7)
    assert (made.n, made.share, made.mode, made.deep, made.limit) == (2, 1, "zero", True, 7)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n": "4"}, ["n of made-up", "'4'", "int"]),
        ({"n": 4.5}, ["n of made-up", "4.5"]),
        ({"n": True}, ["n of made-up", "True"]),
        ({"share": "half"}, ["share of made-up", "'half'", "float"]),
        ({"share": True}, ["share of made-up", "True"]),
        ({"mode": 3}, ["mode of made-up", "str", "'zero'"]),
        ({"deep": 1}, ["deep of made-up", "bool"]),
        ({"mdoe": "zero"}, ["no option 'mdoe'", "mode"]),
    ],
)
def test_options_of_another_name_or_type_are_refused(add: Add, options: dict[str, object], words: list[str]) -> None:
    add("score/made_up.py", GOOD)
    with pytest.raises(UsageError) as caught:
        registry.get("made-up").create(**options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_an_unknown_method_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"no method 'inducton-heads-icl'.*Did you mean induction-heads-icl"):
        registry.get("inducton-heads-icl")
    with pytest.raises(UsageError, match=r"no compress method 'bos-sink'"):
        registry.get("bos-sink", "compress")


def test_two_methods_of_one_id_are_refused(add: Add) -> None:
    first = add("score/made_up.py", GOOD)
    second = add("attribute/made_up.py", GOOD.replace("ScoreMethod", "AttributeMethod"))
    with pytest.raises(HeadscopeError, match="Two methods are called made-up") as caught:
        registry.methods()
    assert str(first) in str(caught.value) and str(second) in str(caught.value)


def test_an_outside_method_cannot_take_a_built_in_id(add: Add) -> None:
    add("score/bos_sink.py", GOOD)
    with pytest.raises(HeadscopeError, match="Two methods are called bos-sink"):
        registry.methods()


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ('title="Made"', "title=TITLE", 8),
        ('("arXiv:0",)', 'tuple(["arXiv:0"])', 8),
        ("n: int = 4", "n: int = 2 + TWO", 9),
        ("share: float = 0.5", "share: float = field(default=0.5)", 10),
        ('info = Info(title="Made"', 'info = INFO; spare = Info(title="Made"', 8),
        ('Info(title="Made",', 'Info("Made",', 8),
        ('Info(title="Made",', "Info(**COMMON,", 8),
    ],
)
def test_a_declaration_that_is_not_literal_is_refused_with_its_line(add: Add, old: str, new: str, line: int) -> None:
    assert old in GOOD
    path = add("score/made_up.py", GOOD.replace(old, new))
    with pytest.raises(HeadscopeError, match="literals") as caught:
        registry.methods()
    assert f"{path}, line {line}:" in str(caught.value)


def test_a_file_without_its_class_or_info_is_refused(add: Add) -> None:
    path = add("score/made_up.py", GOOD.replace("ScoreMethod", "AttributeMethod"))
    with pytest.raises(HeadscopeError, match="no class derived from ScoreMethod") as caught:
        registry.methods()
    assert str(path) in str(caught.value)
    path = add("score/made_up.py", GOOD.replace("info = Info", "about = Info"))
    with pytest.raises(HeadscopeError, match="no `info = Info") as caught:
        registry.methods()
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_python_is_refused_with_its_line(add: Add) -> None:
    path = add("score/made_up.py", "x = 1\ndef (:\n")
    with pytest.raises(HeadscopeError, match="line 2") as caught:
        registry.methods()
    assert str(path) in str(caught.value)


def test_a_package_that_is_gone_is_named(add: Add, tmp_path: Path) -> None:
    add("score/made_up.py", GOOD)
    (tmp_path / "outside_methods").rename(tmp_path / "elsewhere")
    with pytest.raises(HeadscopeError, match="outside_methods"):
        registry.methods()


def test_listing_imports_nothing_heavy() -> None:
    code = """
        import sys
        from headscope.core import registry
        found = registry.methods()
        assert "bos-sink" in found and found["bos-sink"].info["claim"]
        print(sorted({"torch", "xarray", "transformers", "pandas", "numpy"} & set(sys.modules)))
        print([name for name in sys.modules if name.startswith("headscope.methods.score.")])
    """
    done = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "[]"]
