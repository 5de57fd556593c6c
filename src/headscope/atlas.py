"""What a scan found, on disk: `atlas.json`, `scores/<method>.parquet`, `verdicts.parquet`, `weights.parquet`,
`report.html`.

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
from headscope.core.scores import from_frame, infinite_at, to_frame
from headscope.verify import Verdict

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import xarray as xr

FORMAT = 1
MARKER = "atlas.json"
#: neurons that a comparison names
MOST_NEURONS = 100


@dataclass(eq=False)
class Atlas:
    """`model`: {name, fingerprint, anatomy}. `scores`: by method id. `skipped`: method or role → why it was not run.

    `examples`: rows {head, method, tokens, pattern} with a real attention pattern [query, key] of a top head.
    `weights`: a sketch of each head's weights, dims (layer, head, probe); None where they are quantised.
    """

    model: dict[str, Any]
    seed: int
    scores: dict[str, xr.DataArray]
    verdicts: list[Verdict]
    skipped: dict[str, str] = field(default_factory=dict)
    examples: list[dict[str, Any]] = field(default_factory=list)
    weights: xr.DataArray | None = None

    def __post_init__(self) -> None:
        for name, scores in self.scores.items():
            if place := infinite_at(scores):
                raise UsageError(f"The scores of {name} are infinite at {place}; take NaN for what was not measured.")

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
                results.append(
                    {
                        "id": method,
                        "kind": "score",
                        "file": file,
                        "sha256": _digest(folder / file),
                        "task": attrs.get("task"),
                        "params": attrs.get("options", {}),
                        "attrs": attrs,
                    }
                )
            self.verdict_frame().to_parquet(folder / "verdicts.parquet", index=False)
            files = ["verdicts.parquet"]
            if self.weights is not None:
                to_frame(self.weights).to_parquet(folder / "weights.parquet", index=False)
                files.append("weights.parquet")
            document = {
                "format_version": FORMAT,
                "headscope": headscope.__version__,
                "model": self.model,
                "seed": self.seed,
                "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "results": results,
                "files": {file: _digest(folder / file) for file in files},
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
            for file, digest in document["files"].items():
                _same_digest(path / file, digest)
            weights = None
            if "weights.parquet" in document["files"]:
                weights = from_frame(pd.read_parquet(path / "weights.parquet"))
            model = {name: document["model"][name] for name in ("name", "fingerprint", "anatomy")}
            origin = {"model": model["name"], "fingerprint": model["fingerprint"], "seed": document["seed"],
                      "version": document["headscope"]}  # fmt: skip
            frame = pd.read_parquet(path / "verdicts.parquet")
            verdicts = [_verdict(row, origin) for row in frame.to_dict("records")]
            return cls(model, document["seed"], scores, verdicts, document["skipped"], document["examples"], weights)
        except (KeyError, TypeError, ValueError, AttributeError, OSError, UsageError) as error:
            raise FileError(f"The atlas {path} is damaged ({error!r}).") from None

    def _repr_html_(self) -> str:
        from headscope.report.notebook import atlas_html

        return atlas_html(self)

    def __repr__(self) -> str:
        verdicts = ", ".join(f"{v.role}: {v.verdict}" for v in self.verdicts) or "no roles tested"
        return f"Atlas({self.model['name']}; {', '.join(self.scores)}; {verdicts})"


def _verdict(row: dict[Any, Any], origin: dict[str, Any]) -> Verdict:
    """A row of `verdicts.parquet`; one that does not say what it was tested on was so on what the atlas is of."""
    lists = {name: json.loads(row[name]) for name in ("components", "dose", "control_effects")}
    own: dict[str, Any] = {name: row.get(name) for name in ("model", "fingerprint", "seed", "version")}
    own = {name: origin[name] if value in ("", None) or value != value else value for name, value in own.items()}
    return Verdict(**{**row, **lists, **own, "seed": int(own["seed"])})


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _same_digest(path: Path, wanted: str) -> None:
    if not path.is_file():
        raise FileError(f"The atlas is damaged: {path} is missing.")
    if _digest(path) != wanted:
        raise FileError(f"The atlas is damaged: {path} is not the file that was written (its sha256 differs).")


@dataclass(frozen=True)
class Comparison:
    """`heads`: one row a head, most changed first: component, edited, weights, change, method, before, after.
    `neurons`: those that changed most, at most a hundred: component, change, method, before, after.

    `edited`: its own weights changed (others only read what changed before them). `weights`: that change, relative.
    `change`: the largest difference over the methods, each in units of that method's spread over heads; `method`,
    `before`, `after`: where that was. `roles`: {role, before, after} verdicts. `notes`: what else differs between the
    atlases, and so may be behind a change.
    """

    heads: pd.DataFrame
    neurons: pd.DataFrame
    roles: list[dict[str, str | None]]
    notes: list[str]


def compare(a: Atlas, b: Atlas) -> Comparison:
    """Which heads changed from one atlas to another: edited ones first, then by how differently they behave; and which
    neurons.

    Raises UsageError when the models have other numbers of heads, or the atlases share no method.
    """
    import numpy as np
    import pandas as pd

    shapes = [tuple(x.model["anatomy"][name] for name in ("n_layers", "n_heads")) for x in (a, b)]
    if shapes[0] != shapes[1]:
        raise UsageError(
            f"The atlases are of models with {shapes[0][0]} × {shapes[0][1]} and {shapes[1][0]} × {shapes[1][1]} heads; "
            "only models with the same heads compare."
        )
    both = [m for m in a.scores if m in b.scores and a.scores[m].sizes == b.scores[m].sizes]
    shared = [m for m in both if a.scores[m].dims == ("layer", "head") and a.scores[m].shape == shapes[0]]
    of_neurons = [m for m in both if a.scores[m].dims == ("layer", "neuron")]
    if not shared and not of_neurons:
        raise UsageError("The two atlases share no method, so there is nothing to compare.")
    moved = np.stack([_moved(a, b, m) for m in shared]) if shared else np.zeros((0, 0, 0))  # [method, layer, head]
    weights = np.zeros(shapes[0])
    if a.weights is not None and b.weights is not None:
        size = np.sqrt((a.weights.values**2).sum(-1))
        weights = np.sqrt(((b.weights.values - a.weights.values) ** 2).sum(-1)) / np.where(size > 0, size, 1.0)
    # rounding, as from a cast, moves all heads a little: an edited head stands out among the changes
    edited = weights > max(1e-6, 0.1 * float(weights.max()))
    rows = []
    for layer, h in np.ndindex(*moved.shape[1:]):
        i = int(moved[:, layer, h].argmax())
        before, after = (float(x.scores[shared[i]].values[layer, h]) for x in (a, b))
        change = float(moved[i, layer, h])
        rows.append(
            (f"L{layer}H{h}", bool(edited[layer, h]), float(weights[layer, h]), change, shared[i], before, after)
        )
    frame = pd.DataFrame(rows, columns=["component", "edited", "weights", "change", "method", "before", "after"])
    frame = frame.sort_values(["edited", "change"], ascending=False, kind="stable", ignore_index=True)
    verdicts = [{v.role: v.verdict for v in x.verdicts} for x in (a, b)]
    roles = [
        {"role": r, "before": verdicts[0].get(r), "after": verdicts[1].get(r)} for r in {**verdicts[0], **verdicts[1]}
    ]
    return Comparison(frame, _changed_neurons(a, b, of_neurons), roles, _notes(a, b, [*shared, *of_neurons]))


def _moved(a: Atlas, b: Atlas, method: str) -> np.ndarray:
    """[layer unit]: the size of each difference, in units of the method's spread; 0 where one was not measured."""
    import numpy as np

    before, after = a.scores[method].values, b.scores[method].values
    return np.nan_to_num(abs(after - before) / (float(np.nanstd(before)) or 1.0))


def _changed_neurons(a: Atlas, b: Atlas, methods: list[str]) -> pd.DataFrame:
    import numpy as np
    import pandas as pd

    rows = []
    for method in methods:
        moved = _moved(a, b, method)
        for at in np.argsort(-moved.ravel(), kind="stable")[:MOST_NEURONS]:
            place = np.unravel_index(at, moved.shape)
            if moved[place] > 0:
                before, after = (float(x.scores[method].values[place]) for x in (a, b))
                rows.append((f"L{place[0]}N{place[1]}", float(moved[place]), method, before, after))
    frame = pd.DataFrame(rows, columns=["component", "change", "method", "before", "after"])
    frame = frame.sort_values("change", ascending=False, kind="stable").drop_duplicates("component")
    return frame.head(MOST_NEURONS).reset_index(drop=True)


def _notes(a: Atlas, b: Atlas, shared: list[str]) -> list[str]:
    notes = []
    if a.seed != b.seed:
        notes.append(
            f"The atlases were made with different seeds ({a.seed} and {b.seed}); some of the change is chance."
        )
    for method in shared:
        options = [x.scores[method].attrs.get("options") for x in (a, b)]
        if options[0] != options[1]:
            notes.append(f"{method} was run with different options.")
    tested = [{v.role: (v.n_seeds, v.n_controls, v.k) for v in x.verdicts} for x in (a, b)]
    if any(tested[0][role] != tested[1][role] for role in tested[0].keys() & tested[1].keys()):
        notes.append("The roles were tested with different numbers of prompts, control sets or heads.")
    return notes
