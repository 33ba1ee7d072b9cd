"""Means with intervals. Standard library only."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple


class Mean(NamedTuple):
    """A mean over seeds with its 95 % interval (Student's t); the interval is None for a single
    value."""

    mean: float
    low: float | None
    high: float | None
    n: int

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:.4f} (n=1)"
        return f"{self.mean:.4f} ± {(self.high - self.low) / 2:.4f}"


def mean(values: Sequence[float]) -> Mean:
    """The mean of independent values with the interval that holds the true mean in 95 of 100 such
    samples.

    >>> print(mean([1.0, 2.0, 3.0]))
    2.0000 ± 2.4841
    """
    n = len(values)
    centre = math.fsum(values) / n
    if n == 1:
        return Mean(centre, None, None, 1)
    half = _t975(n - 1) * math.sqrt(_variance(values) / n)
    return Mean(centre, centre - half, centre + half, n)


def group(
    rows: Iterable[dict[str, Any]], *keys: str
) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Rows by the values of some columns, in order of those values."""
    out: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        out.setdefault(tuple(row[k] for k in keys), []).append(row)
    return dict(sorted(out.items()))


def difference(a: Sequence[float], b: Sequence[float]) -> Mean:
    """mean(a) - mean(b) of independent samples with its 95 % interval (Welch); n is the smaller
    sample's.

    The interval is None unless both have at least two values. An interval that holds 0 says that no
    difference was found, and half its length is about the smallest that would have been.

    >>> print(difference([2.0, 3.0, 4.0], [1.0, 2.0, 3.0]))
    1.0000 ± 2.2670
    """
    gap, n = math.fsum(a) / len(a) - math.fsum(b) / len(b), min(len(a), len(b))
    if n < 2:
        return Mean(gap, None, None, n)
    error, freedom = _welch(a, b)
    half = _t975(freedom) * error if error else 0.0
    return Mean(gap, gap - half, gap + half, n)


def told_apart(a: Sequence[float], b: Sequence[float], comparisons: int = 1) -> bool:
    """Whether the interval of mean(a) - mean(b) leaves out 0, where the intervals of so many
    comparisons hold together in 95 of 100 cases (Welch, Bonferroni). Single values never do.

    Compared with the smallest of m means in m - 1 comparisons, those that are not told apart from
    it hold the truly smallest one in 95 of 100 cases.

    >>> told_apart([1.0, 1.1, 1.2], [2.0, 2.1, 2.2]), told_apart([1.0], [2.0])
    (True, False)
    """
    if min(len(a), len(b)) < 2:
        return False
    gap = abs(math.fsum(a) / len(a) - math.fsum(b) / len(b))
    error, freedom = _welch(a, b)
    return gap > 0 if error == 0 else _tail(gap / error, freedom) < 0.025 / comparisons


def _welch(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """The standard error of a difference, each sample with its own variance, and its degrees of
    freedom, which weigh the two (Satterthwaite)."""
    parts = [_variance(x) / len(x) for x in (a, b)]
    total = sum(parts)
    if total == 0:
        return 0.0, math.inf
    freedom = total**2 / sum(part**2 / (len(x) - 1) for part, x in zip(parts, (a, b), strict=True))
    return math.sqrt(total), freedom


def _tail(t: float, freedom: float, pieces: int = 128) -> float:
    """Student's mass above t. With t = sqrt(freedom) / tan(angle) it is an integral of
    sin(angle)^(freedom - 1) from 0; over the root of the angle that is smooth at 0."""
    end = math.sqrt(math.atan2(math.sqrt(freedom), t))
    heights = [
        2 * u * math.sin(u * u) ** (freedom - 1)
        for u in (end * i / pieces for i in range(pieces + 1))
    ]
    whole = heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2])
    return _density(freedom) * whole * end / pieces / 3


@cache
def tail_point(tail: float, freedom: float) -> float:
    """Where Student's t has this mass above it: half the width of an interval in standard errors,
    for a mass of half of what may lie outside.

    >>> round(tail_point(0.025, 4), 4)
    2.7764
    """
    low, high = 0.0, 1.0
    while _tail(high, freedom) > tail:
        low, high = high, 2 * high
    for _ in range(40):  # of an interval as long as its lower end they leave less than 1e-11
        middle = (low + high) / 2
        if _tail(middle, freedom) > tail:
            low = middle
        else:
            high = middle
    return high


def _variance(values: Sequence[float]) -> float:
    centre = math.fsum(values) / len(values)
    return math.fsum((x - centre) ** 2 for x in values) / (len(values) - 1)


def _density(freedom: float) -> float:
    """Student's density over the angle, where it is largest."""
    return math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)


@cache
def _t975(freedom: float) -> float:
    """Student's 97.5 % point, by halving. With t = sqrt(freedom) tan(angle) the mass is an integral
    of cos(angle)^(freedom - 1)."""
    density = _density(freedom)

    def mass(t: float, pieces: int = 64) -> float:  # between 0 and t, by Simpson's rule
        step = math.atan(t / math.sqrt(freedom)) / pieces
        heights = [math.cos(i * step) ** (freedom - 1) for i in range(pieces + 1)]
        return (
            density
            * step
            / 3
            * (heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2]))
        )

    # 36 halvings of an interval of 11 leave less than 1e-9.
    low, high = 1.9, 13.0  # from 12.706 at one degree of freedom to 1.960
    for _ in range(36):
        middle = (low + high) / 2
        if mass(middle) < 0.475:
            low = middle
        else:
            high = middle
    return low


def rank_correlation(
    x: Sequence[float], y: Sequence[float], draws: int = 2000, seed: int = 0
) -> Mean:
    """Spearman's correlation, ties at their mean rank, with a 95 % bootstrap interval over the
    pairs; n pairs.

    >>> rank_correlation([1, 2, 3, 4], [10, 20, 25, 90]).mean
    1.0
    """
    n = len(x)
    if n < 3:
        return Mean(math.nan, None, None, n)
    # A bootstrap draws pairs with replacement; a draw without any spread has no correlation and is
    # left out.
    rng, found = random.Random(seed), []
    for _ in range(draws):
        chosen = [rng.randrange(n) for _ in range(n)]
        value = _correlation(_ranks([x[i] for i in chosen]), _ranks([y[i] for i in chosen]))
        if not math.isnan(value):
            found.append(value)
    found.sort()
    whole = _correlation(_ranks(x), _ranks(y))
    if math.isnan(whole) or not found:
        return Mean(whole, None, None, n)
    return Mean(
        whole,
        found[int(0.025 * len(found))],
        found[min(len(found) - 1, int(0.975 * len(found)))],
        n,
    )


def _ranks(values: Sequence[float]) -> list[float]:
    # Equal values share the mean of their ranks.
    order = sorted(range(len(values)), key=lambda i: values[i])
    ranks, at = [0.0] * len(values), 0
    while at < len(order):
        stop = at
        while stop + 1 < len(order) and values[order[stop + 1]] == values[order[at]]:
            stop += 1
        for i in range(at, stop + 1):
            ranks[order[i]] = (at + stop) / 2
        at = stop + 1
    return ranks


def _correlation(a: Sequence[float], b: Sequence[float]) -> float:
    va, vb = (math.fsum((x - math.fsum(v) / len(v)) ** 2 for x in v) for v in (a, b))
    if va == 0 or vb == 0:
        return math.nan
    ma, mb = math.fsum(a) / len(a), math.fsum(b) / len(b)
    covariance = math.fsum((x - ma) * (y - mb) for x, y in zip(a, b, strict=True))
    # Rounding may pass 1 in the last digit.
    return max(-1.0, min(1.0, covariance / math.sqrt(va * vb)))
