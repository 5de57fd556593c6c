"""A sweep on disk: what was planned, the chunks that are done, and the result. A killed sweep goes on from here.

run/
  manifest.json               format_version, digest of the plan, edits in words, chunks as first planned
  chunks/00000.safetensors    values [set, prompt] of a finished chunk
  sweep.parquet               edit, component, prompt, value, clean; written when all chunks are done
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from headscope.core.errors import FileError, UsageError
from headscope.core.files import new_file, read_document, read_json, write_json
from headscope.sweep.job import Job, labelled
from headscope.sweep.plan import Chunk, Plan

if TYPE_CHECKING:
    import xarray as xr

FORMAT = 1


class RunFolder:
    """The folder of one sweep. Every file appears whole or not at all."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.manifest = self.path / "manifest.json"

    def begin(self, job: Job, *, resume: bool) -> Plan:
        """The plan to run: a new one, or with `resume` the one that was begun here.

        Raises UsageError where another sweep stands here, or one stands here and `resume` is not said; FileError where
        the folder cannot be used.
        """
        if not self.manifest.exists():
            if self.path.is_file() or (self.path.exists() and any(self.path.iterdir())):
                raise FileError(
                    f"{self.path} exists and holds no sweep (it has no manifest.json); choose another place."
                )
            plan = job.plan()
            write_json(self.manifest, self._describe(job, plan))
            return plan
        document = read_json(self.manifest, "manifest of a sweep")
        if not isinstance(document, dict) or document.get("format") != "headscope-sweep":
            raise FileError(f"{self.manifest} is not the manifest of a sweep of headscope.")
        if document.get("format_version") != FORMAT:
            version = document.get("format_version")
            raise FileError(f"{self.path} has sweep format {version}, and this headscope reads {FORMAT}.")
        if not resume:
            raise UsageError(f"{self.path} holds a sweep already; go on with it by --resume, or choose another place.")
        if document.get("digest") != job.digest():
            raise UsageError(
                f"{self.path} holds another sweep (other model, prompts, edits or metric); it cannot be resumed by this one."
            )
        try:
            chunks = [Chunk(tuple(c["sets"]), tuple(c["layers"]), c["column"]) for c in document["chunks"]]
            return Plan(tuple(chunks), document["work"], document["plain"])
        except (KeyError, TypeError) as error:
            raise FileError(f"{self.manifest} is damaged ({error!r}).") from None

    @staticmethod
    def _describe(job: Job, plan: Plan) -> dict[str, Any]:
        return {
            "format": "headscope-sweep",
            "format_version": FORMAT,
            "digest": job.digest(),
            "model": {"name": job.model.name, "fingerprint": job.model.fingerprint},
            "metric": job.metric_name,
            "origin": job.origin(),
            "edits": job.names,
            "work": plan.work,
            "plain": plan.plain,
            "chunks": [{"sets": c.sets, "layers": c.layers, "column": c.column} for c in plan.chunks],
        }

    def _file(self, number: int) -> Path:
        return self.path / "chunks" / f"{number:05d}.safetensors"

    def read(self, number: int, shape: tuple[int, int]) -> Tensor | None:
        """The values of a chunk, or None where it is not done. Raises FileError where the file is damaged."""
        from safetensors.torch import load_file

        file = self._file(number)
        if not file.exists():
            return None
        try:
            values: Tensor = load_file(file)["values"]
        except Exception as error:  # safetensors has its own kinds
            raise FileError(f"{file} is damaged ({error}); delete it, and the sweep computes it again.") from None
        if tuple(values.shape) != shape:
            raise FileError(f"{file} holds values of shape {tuple(values.shape)}, not {shape}; delete it to go on.")
        return values

    def write(self, number: int, values: Tensor) -> None:
        """Keep a finished chunk."""
        from safetensors.torch import save_file

        with new_file(self._file(number)) as temporary:
            save_file({"values": values.contiguous()}, temporary)

    def finish(self, found: xr.DataArray) -> Path:
        """Write the whole result as a table."""
        import numpy as np
        import pandas as pd

        n_sets, n_prompts = found.shape
        frame = pd.DataFrame(
            {
                "edit": np.repeat(found.edit.values, n_prompts),
                "component": np.repeat(found.component.values, n_prompts),
                "prompt": np.tile(np.arange(n_prompts), n_sets),
                "value": found.values.ravel(),
                "clean": np.tile(found.clean.values, n_sets),
            }
        )
        target = self.path / "sweep.parquet"
        with new_file(target) as temporary:
            frame.to_parquet(temporary, index=False)
        return target


def load_sweep(path: str | Path) -> xr.DataArray:
    """What `sweep` wrote with `out`. Raises FileError where it is not finished, damaged or of another version."""
    import pandas as pd

    path = Path(path)
    document = read_document(path / "manifest.json", "sweep", "sweep", FORMAT)
    if not (path / "sweep.parquet").is_file():
        raise FileError(f"The sweep {path} is not finished; go on with it by --resume.")
    try:
        frame = pd.read_parquet(path / "sweep.parquet")
        shape = len(document["edits"]), int(frame["prompt"].max()) + 1
        if "component" not in frame:  # written before it was recorded
            frame = frame.assign(component="", clean=float("nan"))
        model = {"model": document["model"]["name"], "fingerprint": document["model"]["fingerprint"]}
        origin = document.get("origin", {"method": "sweep", "metric": document["metric"], **model})
        components = frame["component"].to_numpy()[:: shape[1]].tolist()
        clean = frame["clean"].to_numpy()[: shape[1]]
        return labelled(frame["value"].to_numpy().reshape(shape), document["edits"], components, clean, origin)
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise FileError(f"The sweep {path} is damaged ({error!r}).") from None
