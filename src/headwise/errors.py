"""What a user is told when a value does not do: `UsageError`, the checks that all values share, and
the findings of `headwise check`. Standard library only."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

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


def one_line(error: BaseException) -> str:
    """An exception in one line: its class, and what it says."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".removesuffix(": ")


@dataclass(frozen=True)
class Finding:
    """One line of a check: which rule, whether it holds, and the sentence that says so."""

    rule: str
    level: Literal["ok", "note", "wrong"]  # a note is worth knowing and breaks nothing
    text: str


class Wrong(Exception):
    """Raised by a rule that does not hold, with the sentence."""


class Note(Exception):
    """Raised by a rule that holds, where there is something to know."""


@dataclass(frozen=True)
class Rule:
    """One rule of a check: `test(value)` returns what holds, or raises `Wrong` or `Note`."""

    name: str
    test: Callable[[Any], str]
    needed: bool = False  # the rules behind it cannot be tested where it does not hold


def findings(value: Any, rules: Iterable[Rule]) -> list[Finding]:
    """One finding per rule, until a needed one does not hold. A rule that raises anything else does
    not hold either."""
    found: list[Finding] = []
    for rule in rules:
        try:
            found.append(Finding(rule.name, "ok", rule.test(value)))
            continue
        except Note as e:
            found.append(Finding(rule.name, "note", str(e)))
            continue
        except (Wrong, UsageError) as e:
            found.append(Finding(rule.name, "wrong", str(e)))
        except Exception as e:  # a user's class may raise anything
            found.append(Finding(rule.name, "wrong", f"{rule.name} raises {one_line(e)}"))
        if rule.needed:
            break
    return found
