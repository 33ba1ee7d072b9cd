"""Straight lines through values, and the Pareto front, against plain twins."""

import random

import numpy as np
import pytest

from headwise.planning.pareto import front
from headwise.planning.straight import fitted


def test_lines_give_every_product_of_three_sizes_exactly() -> None:
    def of(p):
        a, b, c, d = (p[name] for name in "abcd")
        return [7 + 3 * a * b * c - 5 * b * d + d, 10**15 * a + b, 0]

    lines = fitted(of, {"a": (1, 2), "b": (4, 6), "c": (3, 4), "d": (10, 13)})
    assert lines is not None
    rng = random.Random(4)
    rows = [{name: rng.randrange(1000) for name in "abcd"} for _ in range(50)]
    columns = {name: np.array([row[name] for row in rows]) for name in "abcd"}
    found = lines.at(columns, 50)
    assert [[int(f[i]) for f in found] for i in range(50)] == [of(row) for row in rows]
    assert found[0].dtype == np.int64


@pytest.mark.parametrize(
    "bent",
    [lambda p: [p["a"] ** 2], lambda p: [max(p["a"], 4)], lambda p: [p["a"] // 3]],
)
def test_lines_through_what_is_bent_are_refused(bent) -> None:
    assert fitted(bent, {"a": (1, 2)}) is None


def test_lines_of_four_sizes_in_one_product_are_refused() -> None:
    points = dict.fromkeys("abcd", (1, 2))
    assert fitted(lambda p: [p["a"] * p["b"] * p["c"] * p["d"]], points) is None


def test_lines_beyond_63_bits_are_python_numbers() -> None:
    lines = fitted(lambda p: [p["a"] * p["b"] * p["c"]], dict.fromkeys("abc", (1, 2)))
    assert lines is not None
    big = {name: np.array([3 * 10**6 + 1, 5]) for name in "abc"}
    found = lines.at({**big, "c": np.array([2 * 10**7, 7])}, 2)[0]
    assert found.tolist() == [(3 * 10**6 + 1) ** 2 * 2 * 10**7, 175]


def plain_front(rows: list[tuple[int, ...]]) -> list[bool]:
    """By comparing every pair."""

    def beats(a, b):
        return all(x <= y for x, y in zip(a, b, strict=True)) and a != b

    return [not any(beats(other, row) for other in rows) for row in rows]


@pytest.mark.parametrize("costs", [1, 2, 3, 4])
@pytest.mark.parametrize("largest", [2, 6, 50, 2**80])
def test_front_equals_comparing_every_pair(costs: int, largest: int) -> None:
    rng = random.Random(costs)
    rows = [tuple(rng.randrange(largest) for _ in range(costs)) for _ in range(150)]
    columns = [np.array(column, object) for column in zip(*rows, strict=True)]
    assert front(columns).tolist() == plain_front(rows)


def test_front_of_no_rows_is_empty() -> None:
    assert front([np.zeros(0, np.int64)]).tolist() == []
