"""Every error a user can cause, in one family.

HeadscopeError            one clear sentence: what was wrong, what was expected, what to try
├── UsageError            a bad name, option or value (exit status 2 on the command line)
├── ModelError            a model that cannot be found, read or understood
├── NotApplicable         a method or task that needs what this model does not have
└── FileError             a damaged, foreign or unwritable file
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HeadscopeError(Exception):
    """Base of all errors whose message is written for the user. `exit_code` is the command line's status."""

    exit_code = 1


class UsageError(HeadscopeError):
    """A bad name, option or value given by the caller."""

    exit_code = 2


class ModelError(HeadscopeError):
    """A model that cannot be found, read, or whose parts cannot be told apart."""


class NotApplicable(HeadscopeError):
    """A method or task that needs something this model does not have."""


class FileError(HeadscopeError):
    """A file of ours that is damaged, of another version, or cannot be written."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A ' Did you mean …?' for a mistyped name, or the whole list where nothing is near."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return f" Did you mean {' or '.join(close)}?"
    return f" Known are: {', '.join(known)}." if known else ""
