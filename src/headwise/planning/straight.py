"""Costs of many shapes at once, exactly, from a few shapes.

Every cost of a `Shape` is a straight line in each of its sizes while the others are held, between
the few places where a formula bends (a size of 0, one head, values wider than the rank). So the
costs of some dozens of small shapes give whole-number coefficients, and numpy evaluates them at
millions of sizes:

    f(x) = sum over sets S of at most three sizes of  c_S * product of (x_i - a_i) for i in S

A check at other sizes follows each fit. Where it does not hold, `fitted` says so, and the caller
asks Shape itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
ORDER = 3  # sizes that one product of a cost has at most, depth and feed-forward left aside
LARGEST = 9.2e18  # what 63 bits hold, rounded down


@dataclass(frozen=True)
class Lines:
    """Some functions of the same sizes, each a straight line in every size."""

    starts: Mapping[str, int]
    terms: Mapping[tuple[str, ...], tuple[int, ...]]  # one coefficient for each function
    count: int

    def at(self, sizes: Mapping[str, Ints], length: int) -> list[Ints]:
        """Every function at every place: in 64 bits, or in Python's whole numbers where those do
        not hold them."""
        moved = {name: sizes[name] - start for name, start in self.starts.items()}
        far = {name: float(np.abs(v).max()) if length else 0.0 for name, v in moved.items()}
        bounds = {names: math.prod(far[name] for name in names) for names in self.terms}
        found, large = [], False
        for k in range(self.count):
            large |= sum(abs(c[k]) * bounds[names] for names, c in self.terms.items()) > LARGEST
        if large:
            moved = {name: values.astype(object) for name, values in moved.items()}
        kind = object if large else np.int64
        products: dict[tuple[str, ...], Ints] = {(): np.ones(length, kind)}
        for names in sorted(self.terms, key=len):
            _product(names, moved, products)
        for k in range(self.count):
            total = np.zeros(length, kind)
            for names, coefficients in self.terms.items():
                if coefficients[k]:
                    total += coefficients[k] * products[names]
            found.append(total)
        return found


def _product(
    names: tuple[str, ...], moved: Mapping[str, Ints], products: dict[tuple[str, ...], Ints]
) -> Ints:
    """The product of some sizes; those of fewer are made once."""
    if names not in products:
        products[names] = _product(names[:-1], moved, products) * moved[names[-1]]
    return products[names]


def fitted(
    of: Callable[[Mapping[str, int]], Sequence[int]], points: Mapping[str, tuple[int, int]]
) -> Lines | None:
    """The lines through the values at `points`, two for each size; None where there are none."""
    starts = {name: first for name, (first, _) in points.items()}
    values: dict[tuple[str, ...], list[int]] = {}
    terms: dict[tuple[str, ...], tuple[int, ...]] = {}
    for order in range(min(ORDER, len(points)) + 1):
        for names in itertools.combinations(points, order):
            moved = {name: points[name][1] for name in names}
            values[names] = list(of({**starts, **moved}))
            # What is left when the terms of every smaller set are taken away is this set's own.
            own = list(values[names])
            for smaller in range(order):
                for part in itertools.combinations(names, smaller):
                    if part in terms:
                        step = _steps(part, points)
                        own = [v - c * step for v, c in zip(own, terms[part], strict=True)]
            step = _steps(names, points)
            if any(v % step for v in own):
                return None
            if any(own):
                terms[names] = tuple(v // step for v in own)
    lines = Lines(starts, terms, len(values[()]))
    return lines if _holds(lines, of, points) else None


def _steps(names: Sequence[str], points: Mapping[str, tuple[int, int]]) -> int:
    product = 1
    for name in names:
        product *= points[name][1] - points[name][0]
    return product


def _holds(
    lines: Lines,
    of: Callable[[Mapping[str, int]], Sequence[int]],
    points: Mapping[str, tuple[int, int]],
) -> bool:
    """Whether the functions are straight further out, all sizes moved at once: two and five steps
    behind the second point."""
    for far in (3, 6):
        place = {name: a + far * (b - a) for name, (a, b) in points.items()}
        arrays = {name: np.array([value], np.int64) for name, value in place.items()}
        if [int(v[0]) for v in lines.at(arrays, 1)] != list(of(place)):
            return False
    return True
