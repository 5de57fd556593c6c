"""What all commands share: their common options, loading, progress, and how a result is printed."""

from __future__ import annotations

import inspect
import json
import math
import sys
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headscope.core.errors import HeadscopeError

if TYPE_CHECKING:
    from rich.console import Console

    from headscope.model import Model


class Stopped(HeadscopeError):
    """Ctrl-C in a command that has written something: the sentence says what."""

    exit_code = 130


@dataclass(frozen=True)
class Common:
    """The options that every command takes."""

    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Draws prompts and controls; the same seed gives the same values.")
    ] = 0
    device: Annotated[
        str | None, typer.Option(help="Where the model runs: cpu, cuda, cuda:1, mps; auto spreads it.")
    ] = None
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; the checkpoint's own if left out.")
    ] = None
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; all cores if left out.")] = None

    def load(self, model: str, *, force: bool = False, **options: Any) -> Model:
        """Load and self-check a model by these options."""
        import torch
        from transformers.utils import logging

        import headscope as hs

        if self.threads:
            torch.set_num_threads(self.threads)
        logging.disable_progress_bar()  # our own bars say what is going on
        with working(f"Loading {model}"):
            return hs.load(model, device=self.device, dtype=self.dtype, check=not force, **options)

    def show(self, document: Any, human: Callable[[Console], None]) -> None:
        """Print the document as JSON where asked for, else let `human` print on a terminal's console."""
        if self.json:
            ascii_only = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
            print(json.dumps(_finite(document), ensure_ascii=ascii_only, allow_nan=False))
            return
        from rich.console import Console

        # piped output is not cut to the width of a terminal that is not there
        human(Console(highlight=False, width=None if sys.stdout.isatty() else 160))


def command(app: typer.Typer, name: str, **settings: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command whose first argument is `Common`; its options join those that the function declares."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(function).parameters.values())[1:]
        hints = typing.get_type_hints(function, include_extras=True)
        shared = typing.get_type_hints(Common, include_extras=True)

        def run(**given: Any) -> None:
            common = Common(**{field.name: given.pop(field.name) for field in fields(Common)})
            function(common, **given)

        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [p.replace(kind=keyword, annotation=hints[p.name]) for p in own]
        parameters += [
            inspect.Parameter(f.name, keyword, default=f.default, annotation=shared[f.name]) for f in fields(Common)
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__doc__ = function.__doc__
        run.__name__ = function.__name__
        if settings.get("callback"):
            app.callback(invoke_without_command=True)(run)
        else:
            app.command(name, **settings)(run)
        return function

    return register


def _finite(value: Any) -> Any:
    """JSON has no NaN: what was not measured is null."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class Steps:
    """A progress bar on standard error with the time left; plain lines where that is not a terminal."""

    def __init__(self, progress: Any) -> None:
        self._progress = progress
        self._what = ""
        self._task: Any = None

    def __call__(self, what: str, step: int, steps: int) -> None:
        if what != self._what:
            self._what = what
            if self._progress is None:
                print(f"{what} …", file=sys.stderr, flush=True)
            else:
                if self._task is not None:
                    self._progress.remove_task(self._task)
                self._task = self._progress.add_task(what, total=steps or None)
        if self._progress is not None:
            self._progress.update(self._task, completed=step, total=steps or None)


@contextmanager
def working(what: str) -> Iterator[Steps]:
    """Say on standard error that something is being done; gives `Steps` to say how far it is."""
    if not sys.stderr.isatty():
        steps = Steps(None)
        steps(what, 0, 0)
        yield steps
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        steps = Steps(progress)
        steps(what, 0, 0)
        yield steps
