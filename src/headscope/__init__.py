"""headscope: which attention heads and MLP neurons do what, does that cause the behaviour, what can I do with it.

Names are loaded on first use, so that `import headscope` stays light.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

#: public name → (module, name in it; None for the module itself)
_PUBLIC: dict[str, tuple[str, str | None]] = {
    "Atlas": ("headscope.atlas", "Atlas"),
    "Capture": ("headscope.trace", "Capture"),
    "Component": ("headscope.core.component", "Component"),
    "HeadscopeError": ("headscope.core.errors", "HeadscopeError"),
    "act": ("headscope.act", None),
    "add": ("headscope.trace", "add"),
    "agree": ("headscope.core.scores", "agree"),
    "attend": ("headscope.trace", "attend"),
    "attribute": ("headscope.methods.run", "attribute"),
    "attribution_patching": ("headscope.sweep", "attribution_patching"),
    "check": ("headscope.methods.run", "check"),
    "circuits": ("headscope.circuits", None),
    "compress": ("headscope.compress", None),
    "compare": ("headscope.atlas", "compare"),
    "doctor": ("headscope.trace", "doctor"),
    "each_head": ("headscope.sweep", "each_head"),
    "edited": ("headscope.trace", "edited"),
    "figure": ("headscope.figures", "figure"),
    "gate": ("headscope.trace", "gate"),
    "lens": ("headscope.routes", "lens"),
    "load": ("headscope.trace", "load_checked"),
    "load_edits": ("headscope.trace", "load_edits"),
    "load_run": ("headscope.sweep", "load_run"),
    "mask_edges": ("headscope.trace", "mask_edges"),
    "intervene": ("headscope.methods.run", "intervene"),
    "mean": ("headscope.trace", "mean"),
    "patch": ("headscope.trace", "patch"),
    "patching": ("headscope.sweep", "patching"),
    "plan": ("headscope.methods.run", "plan"),
    "project_out": ("headscope.trace", "project_out"),
    "prove_circuit": ("headscope.verify", "prove_circuit"),
    "prove_routes": ("headscope.verify", "prove_routes"),
    "rank": ("headscope.core.scores", "rank"),
    "resample": ("headscope.trace", "resample"),
    "resolve": ("headscope.trace", "resolve"),
    "routes": ("headscope.routes", "routes"),
    "save_edits": ("headscope.trace", "save_edits"),
    "scale": ("headscope.trace", "scale"),
    "scan": ("headscope.scan", "scan"),
    "score": ("headscope.methods.run", "score"),
    "sweep": ("headscope.sweep", "sweep"),
    "tasks": ("headscope.tasks", None),
    "top": ("headscope.core.scores", "top"),
    "trace": ("headscope.trace", "trace"),
    "verify": ("headscope.verify", "verify"),
    "zero": ("headscope.trace", "zero"),
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'headscope' has no attribute {name!r}")
    module, attribute = _PUBLIC[name]
    loaded = importlib.import_module(module)
    value = loaded if attribute is None else getattr(loaded, attribute)
    globals()[name] = value
    return value


class _Package(ModuleType):
    """Importing `headscope.trace` would bind that module to the name of the public function; the function wins."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and _PUBLIC.get(name, ("", None))[1]):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return __all__


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext headscope`: scores, which are plain arrays, show themselves as figures."""
    importlib.import_module("headscope.report.notebook").load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext headscope`."""
    importlib.import_module("headscope.report.notebook").unload(shell)


if TYPE_CHECKING:
    from headscope import act, circuits, compress, tasks
    from headscope.atlas import Atlas, compare
    from headscope.core.component import Component
    from headscope.core.errors import HeadscopeError
    from headscope.core.scores import agree, rank, top
    from headscope.figures import figure
    from headscope.methods.run import attribute, check, intervene, plan, score
    from headscope.routes import lens, routes
    from headscope.scan import scan
    from headscope.sweep import attribution_patching, each_head, load_run, patching, sweep
    from headscope.trace import (
        Capture,
        add,
        attend,
        doctor,
        edited,
        gate,
        load_edits,
        mask_edges,
        mean,
        patch,
        project_out,
        resample,
        resolve,
        save_edits,
        scale,
        trace,
        zero,
    )
    from headscope.trace import load_checked as load
    from headscope.verify import prove_circuit, prove_routes, verify  # type: ignore[no-redef]
