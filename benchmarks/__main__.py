"""`python -m benchmarks [trace memory import sweep routes circuits scan]`: measure, write the results and the page."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

from benchmarks import page
from benchmarks.common import Others, machine
from headscope.core.files import new_file, write_json

#: name → module
NAMES = {
    "trace": "trace",
    "memory": "memory",
    "import": "imports",
    "sweep": "sweep",
    "routes": "routes",
    "circuits": "circuits",
    "scan": "scan",
}


def main() -> int:
    """Run the named benchmarks, all by default; 1 if a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, default=page.RESULTS, help="folder of the results files")
    parser.add_argument("--page-only", action="store_true", help="only write the page again")
    given = parser.parse_args()
    unknown = sorted(set(given.names) - set(NAMES))
    if unknown:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(NAMES)}")
    missed = False
    for name in [] if given.page_only else given.names or NAMES:
        print(f"{name} …", file=sys.stderr, flush=True)
        others = Others()
        found = importlib.import_module(f"benchmarks.{NAMES[name]}").measure(given.threads)
        busy = others.cores()
        for result in found if isinstance(found, list) else [found]:
            document = result.document({**machine(given.threads), "busy_cores_of_others": busy})
            write_json(given.out / f"{result.name}.json", document)
            print(document["medians"], document["ratio"], f"met: {document['met']}", file=sys.stderr, flush=True)
            missed = missed or document["met"] is False
    if given.out.resolve() == page.RESULTS.resolve():  # results elsewhere are a trial, not what the docs say
        with new_file(page.PAGE) as temporary:
            temporary.write_text(page.render(), encoding="utf-8")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
