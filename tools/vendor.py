"""Fetch the page's JavaScript libraries from the npm registry, at pinned versions with known sha256.

    python tools/vendor.py            write src/headscope/page/static/vendor/
    python tools/vendor.py --check    only compare what is there with the pins (no network)

Needs `npm` to fetch. The files are taken as they are published; nothing is built or changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "src" / "headscope" / "page" / "static" / "vendor"
LIST = "vendor.json"


@dataclass(frozen=True)
class Package:
    """One published package: the sha256 of its tarball, and which of its files go where."""

    name: str
    version: str
    license: str
    sha256: str
    files: dict[str, str]


PACKAGES = (
    Package("preact", "11.2.0", "MIT", "3c4456766bd32b6b534d52bf4e9c2a29b33e7eedf6e96ed479300ba1a7888ebf", {
        "dist/preact.mjs": "preact.js", "hooks/dist/hooks.mjs": "preact-hooks.js", "LICENSE": "preact.LICENSE",
    }),
    Package("htm", "3.1.1", "Apache-2.0", "2425b9bee11409177bcabc7f32e319926fc6690c1701c0b257c88bdff2d5ba90", {"dist/htm.mjs": "htm.js", "LICENSE": "htm.LICENSE"}),
    Package("d3", "7.9.2", "ISC", "f0c1d2c2479907a6e3265370d0fd715f7aef0f561cdd2b415df385ba7df9d1aa", {"dist/d3.min.js": "d3.js", "LICENSE": "d3.LICENSE"}),
    Package("@observablehq/plot", "0.6.17", "ISC", "4dcc9f7afd10caee8b2283c0075a5765610cfbbf6d7d93cdb153b3b5d3501afc", {
        "dist/plot.umd.min.js": "plot.js", "LICENSE": "plot.LICENSE",
    }),
)  # fmt: skip


def digest(data: bytes) -> str:
    """The sha256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def fetch(package: Package, folder: Path) -> Path:
    """The package's tarball from the registry, by npm."""
    name = f"{package.name}@{package.version}"
    done = subprocess.run(
        ["npm", "pack", "--silent", name], cwd=folder, capture_output=True, text=True, check=False
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"npm could not fetch {name}: {done.stderr.strip()}")
    path = folder / done.stdout.strip().splitlines()[-1]
    if digest(path.read_bytes()) != package.sha256:
        raise SystemExit(f"{name} has sha256 {digest(path.read_bytes())}, not the pinned {package.sha256}.")
    return path


def write() -> None:
    """Fetch all packages and write their files and the list of them."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for package in PACKAGES:
            files = {}
            with tarfile.open(fetch(package, Path(temporary))) as tar:
                for inside, name in package.files.items():
                    member = tar.extractfile(f"package/{inside}")
                    if member is None:
                        raise SystemExit(f"{package.name} {package.version} has no file {inside}.")
                    data = member.read()
                    (FOLDER / name).write_bytes(data)
                    files[name] = digest(data)
            rows.append(
                {"name": package.name, "version": package.version, "license": package.license,
                 "tarball_sha256": package.sha256, "files": files}
            )  # fmt: skip
    (FOLDER / LIST).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def problems() -> list[str]:
    """How the folder differs from the pins and from its own list."""
    rows = {row["name"]: row for row in json.loads((FOLDER / LIST).read_text(encoding="utf-8"))}
    found = []
    for package in PACKAGES:
        row = rows.get(package.name, {})
        if (row.get("version"), row.get("tarball_sha256")) != (package.version, package.sha256):
            found.append(f"{package.name} is not the pinned {package.version}")
    listed = {name: sha for row in rows.values() for name, sha in row["files"].items()}
    there = {path.name for path in FOLDER.iterdir()} - {LIST}
    found += [f"{name} is in no package" for name in sorted(there - set(listed))]
    found += [f"{name} is missing" for name in sorted(set(listed) - there)]
    changed = [name for name in sorted(there & set(listed)) if digest((FOLDER / name).read_bytes()) != listed[name]]
    return found + [f"{name} was changed" for name in changed]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare what is there with the pins")
    if not parser.parse_args().check:
        write()
    if wrong := problems():
        sys.exit("; ".join(wrong))
