"""What a scan found, on disk: `atlas.json`, `scores/<method>.parquet`, `verdicts.parquet`, `report.html`.

Readable by pandas, polars or DuckDB without headscope.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headscope.core.errors import FileError, UsageError
from headscope.core.files import new_folder, read_json
from headscope.core.scores import from_frame, to_frame
from headscope.verify import Verdict

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

FORMAT = 1
MARKER = "atlas.json"


@dataclass(eq=False)
class Atlas:
    """`model`: {name, fingerprint, anatomy}. `scores`: by method id. `skipped`: method id → why it was not run.

    `examples`: rows {head, role, tokens, pattern} with a real attention pattern [query, key] of a top head.
    """

    model: dict[str, Any]
    seed: int
    scores: dict[str, xr.DataArray]
    verdicts: list[Verdict]
    skipped: dict[str, str] = field(default_factory=dict)
    examples: list[dict[str, Any]] = field(default_factory=list)

    def verdict_frame(self) -> pd.DataFrame:
        """One row a role, as in `verdicts.parquet`."""
        import pandas as pd

        rows = [
            {
                **asdict(v),
                "components": json.dumps(v.components),
                "dose": json.dumps(v.dose),
                "control_effects": json.dumps(v.control_effects),
            }
            for v in self.verdicts
        ]
        return pd.DataFrame(rows, columns=list(Verdict.__dataclass_fields__))

    def save(self, path: str | Path) -> Path:
        """Write the atlas; the folder appears whole or not at all. Raises FileError where it cannot be written."""
        import headscope
        from headscope.report import html

        path = Path(path)
        with new_folder(path, marker=MARKER) as folder:
            (folder / "scores").mkdir()
            results = []
            for method, scores in self.scores.items():
                file = f"scores/{method}.parquet"
                to_frame(scores).to_parquet(folder / file, index=False)
                attrs = scores.attrs
                kind = "score"
                results.append(
                    {
                        "id": method,
                        "kind": kind,
                        "file": file,
                        "sha256": _digest(folder / file),
                        "task": attrs.get("task"),
                        "params": attrs.get("options", {}),
                        "attrs": attrs,
                    }
                )
            self.verdict_frame().to_parquet(folder / "verdicts.parquet", index=False)
            document = {
                "format_version": FORMAT,
                "headscope": headscope.__version__,
                "model": self.model,
                "seed": self.seed,
                "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "results": results,
                "verdicts_sha256": _digest(folder / "verdicts.parquet"),
                "skipped": self.skipped,
                "examples": self.examples,
            }
            (folder / "report.html").write_text(html.render(self), encoding="utf-8")
            (folder / MARKER).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Atlas:
        """Read a saved atlas. Raises FileError when it is damaged, newer, or not one."""
        import pandas as pd

        path = Path(path)
        document = read_json(path / MARKER, "atlas")
        if not isinstance(document, dict) or "results" not in document:
            raise FileError(f"{path / MARKER} is not an atlas of headscope.")
        if document.get("format_version") != FORMAT:
            version = document.get("format_version")
            raise FileError(f"{path} has atlas format {version}, and this headscope reads {FORMAT}; upgrade headscope.")
        try:
            scores = {}
            for row in document["results"]:
                _same_digest(path / row["file"], row["sha256"])
                scores[row["id"]] = from_frame(pd.read_parquet(path / row["file"]), **row["attrs"])
            _same_digest(path / "verdicts.parquet", document["verdicts_sha256"])
            frame = pd.read_parquet(path / "verdicts.parquet")
            verdicts = []
            for row in frame.to_dict("records"):
                lists = {name: json.loads(row[name]) for name in ("components", "dose", "control_effects")}
                verdicts.append(Verdict(**{**row, **lists}))
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise FileError(f"The atlas {path} is damaged ({error}).") from None
        return cls(
            document["model"], document["seed"], scores, verdicts, document["skipped"], document["examples"]
        )  # fmt: skip

    def _repr_html_(self) -> str:
        import html as escape

        from headscope.report import html

        return f'<iframe style="width:100%;height:640px;border:0" srcdoc="{escape.escape(html.render(self))}"></iframe>'

    def __repr__(self) -> str:
        verdicts = ", ".join(f"{v.role}: {v.verdict}" for v in self.verdicts) or "no roles tested"
        return f"Atlas({self.model['name']}; {', '.join(self.scores)}; {verdicts})"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _same_digest(path: Path, wanted: str) -> None:
    if not path.is_file():
        raise FileError(f"The atlas is damaged: {path} is missing.")
    if _digest(path) != wanted:
        raise FileError(f"The atlas is damaged: {path} is not the file that was written (its sha256 differs).")


def compare(a: Atlas, b: Atlas) -> pd.DataFrame:
    """Heads by how much they changed between two atlases, most first: columns component, change, method, before, after.

    A change is the largest difference over the methods they share, each in units of that method's spread over heads.
    """
    import numpy as np
    import pandas as pd

    shared = [m for m in a.scores if m in b.scores and a.scores[m].shape == b.scores[m].shape]
    if not shared:
        raise UsageError("The two atlases share no method with the same heads, so there is nothing to compare.")
    rows = []
    differences = {m: (b.scores[m].values - a.scores[m].values) / (a.scores[m].values.std() or 1.0) for m in shared}
    n_layers, n_heads = a.scores[shared[0]].shape
    for layer in range(n_layers):
        for h in range(n_heads):
            method = max(shared, key=lambda m: np.nan_to_num(abs(differences[m][layer, h])))
            before, after = (float(x.scores[method].values[layer, h]) for x in (a, b))
            rows.append((f"L{layer}H{h}", abs(float(differences[method][layer, h])), method, before, after))
    frame = pd.DataFrame(rows, columns=["component", "change", "method", "before", "after"])
    return frame.sort_values("change", ascending=False, kind="stable", ignore_index=True)
