"""The benchmarks page is what its results files say."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_page_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import page

    assert page.PAGE.read_text(encoding="utf-8") == page.render(), "stale: run python -m benchmarks --page-only"
