"""Means with intervals: against numerical integration, known values and simulation."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.stats import Mean, difference, group, mean, rank_correlation, told_apart


def t_distribution(t: float, freedom: float) -> float:
    """P(T <= t): the density itself, by Gauss and Legendre's rule."""
    nodes, weights = np.polynomial.legendre.leggauss(200)
    x = (nodes + 1) * t / 2
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(
        math.pi * freedom
    )
    return 0.5 + scale * t / 2 * float(weights @ (1 + x * x / freedom) ** (-(freedom + 1) / 2))


def quantile(freedom: float) -> float:
    """The t that 97.5 % of Student's distribution lie below."""
    low, high = 1.9, 13.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if t_distribution(middle, freedom) < 0.975 else (low, middle)
    return low


def used(freedom: int) -> float:
    """The t that `mean` uses, from the width of its interval."""
    values = [float(i) for i in range(freedom + 1)]
    answer = mean(values)
    assert answer.high is not None
    spread = math.sqrt(sum((x - answer.mean) ** 2 for x in values) / freedom)
    return (answer.high - answer.mean) / (spread / math.sqrt(freedom + 1))


def test_integration_is_right_where_there_is_a_closed_form() -> None:
    for t in (0.3, 1.0, 5.0, 12.7):
        assert t_distribution(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-12)
        assert t_distribution(t, 2) == pytest.approx(
            0.5 + t / (2 * math.sqrt(2 + t * t)), abs=1e-12
        )


@pytest.mark.parametrize("freedom", [*range(1, 18), 19, 24, 29, 49, 99, 400])
def test_quantiles_are_exact_to_six_decimals(freedom: int) -> None:
    assert used(freedom) == pytest.approx(quantile(freedom), abs=1e-6)


def test_known_values() -> None:
    assert mean([1.0, 2.0, 3.0]) == pytest.approx(
        (2.0, 2 - 4.30265273 / math.sqrt(3), 2 + 4.30265273 / math.sqrt(3), 3)
    )
    assert mean([2.0, 4.0]) == pytest.approx((3.0, 3 - 12.7062047, 3 + 12.7062047, 2))
    assert mean([0.5] * 7) == (0.5, 0.5, 0.5, 7)


def test_interval_of_one_value_is_none() -> None:
    assert mean([0.25]) == Mean(0.25, None, None, 1)
    assert str(mean([0.25])) == "0.2500 (n=1)"
    assert str(mean([2.0, 4.0])) == "3.0000 ± 12.7062"


def test_mean_of_no_value_is_none() -> None:
    with pytest.raises(ZeroDivisionError):
        mean([])


@pytest.mark.parametrize(("n", "seed"), [(2, 1), (3, 2), (5, 3), (20, 4)])
def test_interval_holds_the_truth_in_95_of_100_samples(n: int, seed: int) -> None:
    """20,000 samples: the share lies within four standard errors of 0.95."""
    rng, samples, held = random.Random(seed), 20_000, 0
    for _ in range(samples):
        answer = mean([rng.gauss(7.0, 3.0) for _ in range(n)])
        assert answer.low is not None
        assert answer.high is not None
        held += answer.low <= 7.0 <= answer.high
    assert held / samples == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / samples))


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30),
    st.floats(-1e3, 1e3),
    st.floats(0.01, 100),
)
def test_shifting_and_scaling_the_values_shifts_and_scales_the_interval(
    values: list[float], shift: float, scale: float
) -> None:
    a, b = mean(values), mean([shift + scale * x for x in values])
    assert a.low is not None
    assert a.high is not None
    assert a.low <= a.mean <= a.high
    size = max(map(abs, values)) * scale + abs(shift) + 1
    assert b[:3] == pytest.approx(
        [shift + scale * v for v in (a.mean, a.low, a.high)], abs=1e-9 * size * 13
    )
    assert mean(values[::-1])[:3] == pytest.approx(a[:3], rel=1e-9, abs=1e-6)


def test_rows_are_grouped_and_sorted_and_keep_their_order_within() -> None:
    rows = [
        {"a": a, "b": b, "n": n}
        for n, (a, b) in enumerate([(2, "x"), (1, "y"), (2, "x"), (1, "x")])
    ]
    assert group(rows, "a", "b") == {
        (1, "x"): [rows[3]],
        (1, "y"): [rows[1]],
        (2, "x"): [rows[0], rows[2]],
    }
    assert list(group(rows, "a")) == [(1,), (2,)]
    assert group([], "a") == {}


# ---- two samples, and orders


def test_difference_is_welchs_by_hand():
    """Variances 1 and 4, three values each: t with 2.941 degrees of freedom."""
    found = difference([1.0, 2.0, 3.0], [10.0, 12.0, 14.0])
    assert found.mean == -10.0
    spread, freedom = math.sqrt(1 / 3 + 4 / 3), (5 / 3) ** 2 / ((1 / 3) ** 2 / 2 + (4 / 3) ** 2 / 2)
    half = quantile(freedom) * spread
    assert found.low == pytest.approx(-10 - half)
    assert found.high == pytest.approx(-10 + half)
    assert found.n == 3


def test_difference_of_few_or_equal_values():
    assert difference([1.0], [3.0, 4.0]) == (-2.5, None, None, 1)
    assert difference([2.0, 2.0], [1.0, 1.0, 1.0]) == (1.0, 1.0, 1.0, 2)
    same = difference([1.0, 2.0], [1.0, 2.0])
    assert same.mean == 0.0
    assert same.low == pytest.approx(-same.high)


def test_interval_of_a_difference_holds_it_nineteen_times_in_twenty():
    rng, held = np.random.default_rng(0), 0
    for _ in range(2000):
        a, b = rng.normal(1.0, 1.0, 4), rng.normal(0.0, 3.0, 7)
        found = difference(list(a), list(b))
        held += found.low <= 1.0 <= found.high
    assert 0.93 <= held / 2000 <= 0.975


@given(st.permutations(range(9)))
def test_rank_correlation_without_ties_is_spearmans_formula(order):
    d2 = sum((i - j) ** 2 for i, j in enumerate(order))
    found = rank_correlation(list(range(9)), [math.exp(j) for j in order], draws=20)
    assert found.mean == pytest.approx(1 - 6 * d2 / (9 * 80))
    assert -1 <= found.low <= found.high <= 1


def test_ties_share_their_ranks_and_no_order_gives_no_number():
    x, y = [1, 1, 2, 3, 3, 3], [4, 5, 5, 7, 6, 9]
    ranks = [np.array(r, float) for r in ([0.5, 0.5, 2, 4, 4, 4], [0, 1.5, 1.5, 4, 3, 5])]
    assert rank_correlation(x, y).mean == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert math.isnan(rank_correlation([1, 1, 1], [1, 2, 3]).mean)
    assert rank_correlation([1, 1, 1], [1, 2, 3]).low is None
    assert math.isnan(rank_correlation([1, 2], [1, 2]).mean)


def test_interval_of_a_rank_correlation_narrows_with_more_pairs_and_holds_its_value():
    rng = np.random.default_rng(1)
    x = rng.normal(size=200)
    y = x + rng.normal(size=200)
    few, many = (
        rank_correlation(list(x[:20]), list(y[:20])),
        rank_correlation(list(x), list(y), draws=400),
    )
    assert many.high - many.low < few.high - few.low
    assert many.low < many.mean < many.high
    assert rank_correlation(list(x), list(y), draws=50) == rank_correlation(
        list(x), list(y), draws=50
    ), "the same draws again"


@pytest.mark.parametrize("comparisons", [1, 27, 64])
@pytest.mark.parametrize("n", [2, 3, 5, 12])
def test_told_apart_from_where_the_tail_is_small_enough(n: int, comparisons: int) -> None:
    """Two samples of one spread have 2 (n - 1) degrees of freedom; the gap that is just told apart
    is found by halving, with the tail by Gauss and Legendre's rule."""
    values = [float(i) for i in range(n)]
    spread = math.sqrt(2 * float(np.var(values, ddof=1)) / n)
    low, high = 0.0, 200.0
    for _ in range(50):
        middle = (low + high) / 2
        beyond = 1 - t_distribution(middle, 2 * (n - 1))
        low, high = (middle, high) if beyond > 0.025 / comparisons else (low, middle)
    just = low * spread
    assert told_apart([v + 1.001 * just for v in values], values, comparisons)
    assert not told_apart([v - 0.999 * just for v in values], values, comparisons)


def test_told_apart_agrees_with_the_interval_of_one_difference() -> None:
    rng = random.Random(0)
    found = set()
    for _ in range(300):
        a, b = ([rng.gauss(m, s) for _ in range(rng.randint(2, 5))] for m, s in ((0, 1), (2, 0.4)))
        gap = difference(a, b)
        assert gap.low is not None
        assert gap.high is not None
        found.add(told_apart(a, b))
        assert told_apart(a, b) == (not gap.low <= 0 <= gap.high)
    assert found == {True, False}
    assert not told_apart([1.0], [2.0, 2.1])
    assert told_apart([1.0, 1.0], [2.0, 2.0])
    assert not told_apart([1.0, 1.0], [1.0, 1.0])
