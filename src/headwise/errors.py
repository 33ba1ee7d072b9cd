"""What a user hears when a value does not do: `UsageError`, the checks that all values share, and
the findings of `headwise check`. Standard library only."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

LARGEST = 3e38  # the largest number that 32 bits can hold, rounded down
MOST_SIZE = 2**31 - 1  # of one size, so that kernels can count it in 32 bits
MOST_COUNT = 2**63 - 1  # of what sizes multiply to, such as parameters, and of seeds: 64 bits
MOST_LAYERS = 100_000  # of a model, since what differs by layer is listed
SHOWN = 80  # characters of a value in a message


class UsageError(ValueError):
    """A user's mistake: one line that states the rule, the value and the choices."""

    def __init__(self, message: str) -> None:
        super().__init__(bounded(message))


def bounded(message: str) -> str:
    """A message of one line and at most about 1,000 characters, whatever a value in it holds."""
    line = re.sub(r"[\x00-\x1f\x7f-\x9f]+", " ", message)
    line = re.sub(r"\S{241,}", lambda word: f"{word[0][:SHOWN]}...", line)
    return line if len(line) <= 1000 else f"{line[:800]} ... {line[-150:]}"


def shown(value: Any) -> str:
    """A value in a message: as Python writes it, cut to about 80 characters.

    >>> shown("rank"), len(shown("x" * 10**6))
    ("'rank'", 83)
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python writes out no number of more than 4,300 digits
        digits = isinstance(value, int)
        text = "a number of more than 4,300 digits" if digits else f"a {type(value).__name__}"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def nearest(name: str, choices: Iterable[str]) -> str:
    """The tail of an error about an unknown name: the nearest choices first, then all of them.

    >>> nearest("farhest", ["farthest", "nearest"])
    'did you mean farthest or nearest? choices: farthest, nearest'
    """
    known = sorted(choices)
    name = name[:SHOWN]  # comparing takes time that grows with the square of the length
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{hint}choices: {', '.join(known)}"


def check_texts(value: Any, *names: str) -> None:
    """Refuse fields that are not text."""
    for name in names:
        given = getattr(value, name)
        if not isinstance(given, str):
            raise UsageError(f"{name} must be text, got {shown(given)}")


def check_whole_numbers(value: Any, least: int, *names: str) -> None:
    """Refuse fields that are not whole numbers of at least `least`, or too large for any size."""
    for name in names:
        given = getattr(value, name)
        if not isinstance(given, int) or isinstance(given, bool) or given < least:
            rule = f"{name} must be a whole number of at least {least}"
            raise UsageError(f"{rule}, got {shown(given)}")
        check_most(name, given)


def check_most(name: str, value: float, most: int = MOST_SIZE) -> None:
    """Refuse a number beyond what its bits can count."""
    if abs(value) > most:
        bits = {MOST_SIZE: " (32 bits)", MOST_COUNT: " (64 bits)"}.get(most, "")
        raise UsageError(f"{name} must be at most {most:,}{bits}, got {shown(value)}")


def check_seed(value: Any) -> None:
    """Refuse a seed that is not a whole number of 64 bits."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"seed must be a whole number, got {shown(value)}")
    check_most("seed", value, MOST_COUNT)


def check_instance(what: str, value: Any) -> None:
    """Refuse a class where one of its instances is meant."""
    if isinstance(value, type):
        raise UsageError(f"{what} must be a value: pass {value.__name__}(...), got the class")


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
    follows: str = ""  # where the rule of that name is broken, this one says nothing of its own


def findings(
    value: Any, rules: Iterable[Rule], found_one: Callable[[Finding], None] | None = None
) -> list[Finding]:
    """One finding per rule, until a needed one does not hold. A rule that raises anything else does
    not hold either. `found_one` gets each as soon as it is there."""
    found: list[Finding] = []
    for rule in rules:
        finding = _finding(value, rule)
        broken = {before.rule for before in found if before.level == "wrong"}
        if finding.level == "wrong" and rule.follows in broken:
            text = f"follows from {rule.follows}: {finding.text}"
            finding = Finding(rule.name, "note", text)
        found.append(finding)
        if found_one is not None:
            found_one(finding)
        if rule.needed and finding.level == "wrong":
            break
    return found


def _finding(value: Any, rule: Rule) -> Finding:
    try:
        return Finding(rule.name, "ok", rule.test(value))
    except Note as e:
        return Finding(rule.name, "note", str(e))
    except (Wrong, UsageError) as e:
        return Finding(rule.name, "wrong", str(e))
    except (Exception, SystemExit) as e:  # a user's class may raise anything
        return Finding(rule.name, "wrong", f"{rule.name} raises {one_line(e)}")
