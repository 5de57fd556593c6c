"""What one server shows: an atlas, the model it is of (loaded when first needed), and the queue of work on it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headscope.app.jobs import Jobs, Tell
from headscope.core.errors import FileError, ModelError, NotApplicable, UsageError

if TYPE_CHECKING:
    from headscope.atlas import Atlas
    from headscope.model import Model

#: longer prompts are refused: a pattern of 2048 tokens is 8 MiB for the browser
MOST_TOKENS = 2048
#: a question that the model has not answered after so many seconds is given up
MOST_SECONDS = 120.0
METHOD_LIST = re.compile(r"[a-z0-9,-]{1,2000}")


class Session:
    """`load` gives the model named `name`; `atlas` may be None, then a scan makes one. `out`: where results are written."""

    def __init__(self, *, name: str, load: Callable[[], Model], atlas: Atlas | None = None, out: Path | None = None):
        self.name, self.atlas, self.out = name, atlas, out
        self.jobs = Jobs(self._free)
        self._load = load
        self._model: Model | None = None
        self._refused: str | None = None

    @property
    def state(self) -> str:
        """Of the model: waiting, ready or refused."""
        return "refused" if self._refused else "ready" if self._model is not None else "waiting"

    @property
    def refused(self) -> str | None:
        """Why the model cannot be used, in one sentence."""
        return self._refused

    def model(self) -> Model:
        """The model, loaded if need be; only the thread of the queue may call this.

        Raises ModelError where it cannot be loaded or is not the one that the atlas is of.
        """
        if self._refused:
            raise ModelError(self._refused)
        if self._model is None:
            model = self._load()
            try:
                self.check(model)
            except ModelError as error:
                self._refused = str(error)
                raise
            self._model = model
        return self._model

    def _free(self) -> bool:
        """Whether nothing has its hooks on the model just now."""
        if self._model is None:
            return True
        return not any(part._forward_hooks or part._forward_pre_hooks for part in self._model.hf.modules())

    def check(self, model: Model) -> None:
        """Raise ModelError where the atlas is of another model."""
        if self.atlas is not None and model.fingerprint != self.atlas.model["fingerprint"]:
            raise ModelError(
                f"The atlas is of {self.atlas.model['name']} with fingerprint {self.atlas.model['fingerprint']}, but "
                f"{model.name} has {model.fingerprint}; serve it with the model it was made of."
            )

    def need_atlas(self) -> Atlas:
        """The atlas. Raises NotApplicable before there is one."""
        if self.atlas is None:
            raise NotApplicable("There is no atlas yet; start a scan, or give one to headscope serve.")
        return self.atlas

    # jobs that take minutes

    def start_scan(self, methods: str, seed: int) -> int:
        """Queue a scan; its atlas is shown as soon as it is done. Returns the job's number."""
        from headscope.scan import chosen_methods

        if not METHOD_LIST.fullmatch(methods):
            raise UsageError("methods is 'quick', 'all', or ids with commas.")
        chosen_methods(methods)  # a mistyped id fails here, not after the model was loaded

        def work(tell: Tell) -> dict[str, Any]:
            from headscope.scan import scan

            tell("loading the model", 0, 0)
            atlas = scan(self.model(), methods, seed=seed, progress=tell)
            path = self.keep(job.id, "atlas", atlas.save)
            self.atlas = atlas
            return {"view": "/", "out": path}

        job = self.jobs.submit("scan", f"Scan {self.name} ({methods})", work)
        return job.id

    def start_score(self, method: str, seed: int) -> int:
        """Queue one method; its scores join the atlas. Returns the job's number."""
        from headscope.core.registry import get

        get(method, "score")
        self.need_atlas()

        def work(tell: Tell) -> dict[str, Any]:
            from headscope.methods.run import score

            tell("loading the model", 0, 0)
            model = self.model()
            tell(f"score {method}", 0, 0)
            found = score(model, method, seed=seed)
            tell(f"score {method}", 1, 1)  # the last chance to cancel
            atlas = self.need_atlas()
            self.atlas = atlas = replace(atlas, scores={**atlas.scores, method: found})
            return {"view": f"/?method={method}", "out": self.keep(job.id, "atlas", atlas.save)}

        job = self.jobs.submit("score", f"Score {method}", work)
        return job.id

    def start_verify(self, role: str, heads: list[str] | None, seed: int) -> int:
        """Queue the test of a role; its verdict joins the atlas. Returns the job's number."""
        from headscope.core.component import components
        from headscope.verify import get_role

        get_role(role)
        chosen = components(heads) if heads is not None else None
        size = self.need_atlas().model["anatomy"]
        for c in chosen or ():
            if c.kind == "head" and not (c.layer < size["n_layers"] and (c.index or 0) < size["n_heads"]):
                raise UsageError(
                    f"{c} does not exist; the atlas is of {size['n_layers']} layers of {size['n_heads']} heads, counted from 0."
                )

        def work(tell: Tell) -> dict[str, Any]:
            from headscope.verify import verify

            tell("loading the model", 0, 0)
            verdict = verify(self.model(), role, chosen, seed=seed, progress=lambda i, n: tell(f"verify {role}", i, n))
            atlas = self.need_atlas()
            # tested alone, so not corrected together with the roles of the scan: it stands beside them, not in their place
            self.atlas = atlas = replace(atlas, verdicts=[*atlas.verdicts, verdict])
            view = f"/head/{verdict.components[0][1:].replace('H', '/')}" if verdict.components else "/"
            return {"view": view, "verdict": verdict.verdict, "reason": verdict.reason,
                    "out": self.keep(job.id, "atlas", atlas.save)}  # fmt: skip

        job = self.jobs.submit(
            "verify", f"Verify {role}" + (f" ({', '.join(map(str, chosen))})" if chosen else ""), work
        )
        return job.id

    def keep(self, number: int, what: str, save: Callable[[Path], Any]) -> str | None:
        """Write a finished result at once; nothing that was waited for is lost when the server is killed."""
        if self.out is None:
            return None
        path = self.out / f"{what}-{number}"
        while path.exists():
            number += 1
            path = self.out / f"{what}-{number}"
        try:
            save(path)
        except OSError as error:
            raise FileError(
                f"The result could not be written to {path} ({error.strerror}); it is shown here."
            ) from None
        return str(path)
