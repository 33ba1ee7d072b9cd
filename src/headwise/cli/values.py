"""Values of options, read from their text: a wrong one is named by its rule."""

from __future__ import annotations

import argparse
import math

from headwise.errors import MOST_COUNT, UsageError, check_most, shown


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {shown(text)}") from None


def whole(text: str) -> int:
    try:
        value = int(text.replace("_", ""))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {shown(text)}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {shown(value)}")
    try:
        check_most("it", value, MOST_COUNT)
    except UsageError as e:
        raise argparse.ArgumentTypeError(str(e).removeprefix("it ")) from None
    return value


def wholes(text: str) -> tuple[int, ...]:
    return tuple(whole(part) for part in text.split(","))


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a number of seconds, got {shown(text)}"
        ) from None
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be 0 or more seconds, got {text[:80]}")
    return value
