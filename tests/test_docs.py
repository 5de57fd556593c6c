"""The docs say what is so: pages are what their generator makes, the README's code runs, all names are explained."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import headscope as hs
from headscope.model import Model

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def test_generated_pages_are_up_to_date() -> None:
    build = _build()
    for name, text in build.pages(build.own_methods(), build.load_checks()).items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text, (
            f"run: python docs/build.py ({name} is stale)"
        )


def test_every_method_has_a_page_and_a_verdict() -> None:
    from headscope.core.registry import methods

    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    for name, spec in methods().items():
        if spec.module.startswith("headscope."):
            section = page.partition(f"### {name}\n")[2].partition("\n### ")[0]
            assert re.search(r"\*On smollm2-135m\*: \*\*(shown|not shown|not testable)\*\*", section), name


def test_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_declared_dependency_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    declared = [*project["dependencies"], *(d for group in project["optional-dependencies"].values() for d in group)]
    for wanted in declared:
        name = re.split(r"[<>=!~ \[]", wanted)[0]
        assert re.search(rf"^\| [^|]*\b{name}\b", page, re.M), f"{name} has no line in docs/dependencies.md"


def test_the_changelog_names_the_version() -> None:
    assert f"## [{hs.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == hs.__version__


@pytest.mark.real
def test_the_code_of_the_readme_runs(smollm2: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As printed, but that the model is loaded once for all tests and that little is verified and scanned."""
    (code,) = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    monkeypatch.chdir(tmp_path)
    verify, scan = hs.verify, hs.scan
    monkeypatch.setattr(hs, "load", lambda name: smollm2)
    monkeypatch.setattr(hs, "verify", lambda *a, **k: verify(*a, **k, n_seeds=5, n_controls=2))
    monkeypatch.setattr(hs, "scan", lambda model: scan(model, ["bos-sink"], n_seeds=5, n_controls=2))
    scope: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), scope)
    assert str(scope["heads"]).startswith("[L18H6, L17H4")
    assert scope["effect"].dims == ("edit", "prompt")  # type: ignore[attr-defined]
    assert (tmp_path / "edited" / "model.safetensors").is_file() and (tmp_path / "atlas" / "report.html").is_file()


@pytest.mark.real
def test_the_code_of_routes_and_circuits_runs(smollm2: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As printed, but on one prompt with few edges and random sets; its route is the one that the page explains."""
    page = (ROOT / "docs" / "routes-and-circuits.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    monkeypatch.chdir(tmp_path)
    make, prove, prove_circuit = hs.tasks.make, hs.prove_routes, hs.prove_circuit
    eap_ig, top_edges = hs.circuits.eap_ig, hs.circuits.top_edges
    monkeypatch.setattr(hs, "load", lambda name: smollm2)
    monkeypatch.setattr(hs.tasks, "make", lambda *a, n, seed=0: make(*a, n=1, seed=seed))
    monkeypatch.setattr(hs, "prove_routes", lambda *a: prove(*a, n_random=2))
    monkeypatch.setattr(hs, "prove_circuit", lambda *a: prove_circuit(*a, n_random=2))
    monkeypatch.setattr(hs.circuits, "eap_ig", lambda *a: eap_ig(*a, steps=2))
    monkeypatch.setattr(hs.circuits, "top_edges", lambda model, scores, n: top_edges(model, scores, 60))
    scope: dict[str, Any] = {}
    for code in blocks:
        exec(compile(code, "routes-and-circuits.md", "exec"), scope)
    route, one = scope["route"], scope["one"]
    head = next(edge for edge in route.into("L23A@4") if edge.component == "L23H4")
    assert f"L23H4 │  {head.weight:.3f} │        {head.signed:+.3f} │ ' France' (3)" in page
    assert f"{len(route.nodes)} nodes and {len(route.edges)} edges" in page
    assert f"{one.faithfulness:.0%} of the logit_diff is left" in page and f"{one.complement:.0%} is left)" in page
    assert scope["idle"].keys() >= {str(head) for head in scope["circuit"].heads()}
    assert (tmp_path / "route.html").is_file() and (tmp_path / "ioi.json").is_file()
