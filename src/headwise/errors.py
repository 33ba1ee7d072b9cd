"""What a user hears when a value does not do: `UsageError`, and the checks that all values share.
Standard library only."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

LARGEST = 3e38  # the largest number that 32 bits can hold, rounded down


class UsageError(ValueError):
    """A user's mistake: one line that states the rule, the value and the choices."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """The tail of an error about an unknown name: the nearest choices first, then all of them.

    >>> nearest("farhest", ["farthest", "nearest"])
    'did you mean farthest or nearest? choices: farthest, nearest'
    """
    known = sorted(choices)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{hint}choices: {', '.join(known)}"


def check_texts(value: Any, *names: str) -> None:
    """Refuse fields that are not text."""
    for name in names:
        given = getattr(value, name)
        if not isinstance(given, str):
            raise UsageError(f"{name} must be text, got {given!r}")


def check_whole_numbers(value: Any, least: int, *names: str) -> None:
    """Refuse fields that are not whole numbers of at least `least`."""
    for name in names:
        given = getattr(value, name)
        if not isinstance(given, int) or isinstance(given, bool) or given < least:
            raise UsageError(f"{name} must be a whole number of at least {least}, got {given!r}")
