"""Amounts as people write them. The one seam to the grammar of `headwise plan`."""

from __future__ import annotations

import re

from headwise.errors import MOST_COUNT, UsageError, check_most, shown

SIZES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}


def amount(name: str, given: int | str) -> int:
    """A number of parameters, as 300k, 1.1M or 124439808.

    >>> amount("params", "300k"), amount("params", 7)
    (300000, 7)
    """
    found = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?)([kKmMbB]?)", str(given).strip()[:60])
    if found is None or isinstance(given, bool):
        rule = f"{name} must be an amount such as 300k, 10M or 124439808"
        raise UsageError(f"{rule}, got {shown(given)}")
    value = round(float(found[1].replace("_", "")) * SIZES[found[2].lower()])
    if value < 1:
        raise UsageError(f"{name} must be at least 1, got {shown(given)}")
    check_most(name, value, MOST_COUNT)
    return value
