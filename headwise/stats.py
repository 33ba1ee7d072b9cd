"""Means with intervals. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

_T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


class Mean(NamedTuple):
    """A mean over seeds with its 95 % interval (Student's t); the interval is None for a single value."""

    mean: float
    low: float | None
    high: float | None
    n: int

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:.4f} (n=1)"
        return f"{self.mean:.4f} ± {(self.high - self.low) / 2:.4f}"


def mean(values: Sequence[float]) -> Mean:
    """The mean of independent values with the interval that holds the true mean in 95 of 100 such samples.

    >>> print(mean([1.0, 2.0, 3.0]))
    2.0000 ± 2.4843
    """
    n = len(values)
    centre = math.fsum(values) / n
    if n == 1:
        return Mean(centre, None, None, 1)
    spread = math.sqrt(math.fsum((x - centre) ** 2 for x in values) / (n - 1))
    t = _T975[n - 2] if n - 2 < len(_T975) else 1.96 + 2.5 / (n - 1)
    half = t * spread / math.sqrt(n)
    return Mean(centre, centre - half, centre + half, n)


def group(rows: Iterable[dict[str, Any]], *keys: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Rows by the values of some columns, in order of those values."""
    out: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        out.setdefault(tuple(row[k] for k in keys), []).append(row)
    return dict(sorted(out.items()))
