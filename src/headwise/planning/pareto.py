"""Which rows no other row beats: at most as costly in everything, and cheaper in something."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headwise.planning.straight import Ints


def front(columns: Sequence[Ints]) -> np.ndarray:
    """A mark for each row: no other is at most as large in every column and smaller in one. Rows
    that are equal in all columns are marked together.

    >>> front([np.array([1, 2, 2, 3]), np.array([5, 4, 6, 4])]).tolist()
    [True, True, False, False]
    """
    count = len(columns[0]) if columns else 0
    if not count:
        return np.zeros(count, bool)
    # Places in the order of each column stand for its values: any whole numbers compare exactly.
    ranks = [np.unique(column, return_inverse=True)[1].reshape(-1) for column in columns]
    points, whose = np.unique(np.stack(ranks, 1), axis=0, return_inverse=True)
    marks = _sweep(points) if points.shape[1] <= 2 else _peel(points)
    return marks[whose.reshape(-1)]


def _sweep(points: np.ndarray) -> np.ndarray:
    """Of one or two columns, sorted by the first and then the second: the rows that go below the
    least second value so far."""
    last = points[:, -1] if points.shape[1] == 2 else np.arange(len(points))
    if points.shape[1] == 1:
        return last == 0
    before = np.concatenate([[np.iinfo(np.int64).max], np.minimum.accumulate(last)[:-1]])
    return last < before


def _peel(points: np.ndarray) -> np.ndarray:
    """Of any number of columns: the row of the smallest sum that is left is in the front, and what
    it beats goes."""
    order = np.argsort(points.sum(1), kind="stable")
    left, marks = points[order], np.zeros(len(points), bool)
    while len(order):
        marks[order[0]] = True
        kept = (left < left[0]).any(1)  # distinct rows: what is nowhere smaller is beaten
        order, left = order[kept], left[kept]
    return marks
