"""Harmonics, the floor and the continuum: closed forms against high precision and quadrature."""

import itertools
import math
import warnings
from typing import Any

import mpmath as mp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.high_precision import exact_omega, expected
from support.tolerance import examples, seeded

from headwise.theory import features, harmonics

DIMS = (3, 4, 8, 16, 32, 64)
PLATEAUS = {  # half of the sign's energy beyond degrees 1, 3, 5, 7, 9, 11
    4: (0.1397, 0.0821, 0.0583, 0.0452, 0.0369, 0.0312),
    8: (0.1612, 0.1027, 0.0765, 0.0613, 0.0513, 0.0442),
    16: (0.1716, 0.1148, 0.0888, 0.0732, 0.0626, 0.0549),
    32: (0.1767, 0.1215, 0.0962, 0.0809, 0.0705, 0.0627),
    64: (0.1792, 0.1250, 0.1003, 0.0855, 0.0753, 0.0677),
}
LAMBDA = {
    (3, 1): 0.500000,
    (4, 1): 0.424413,
    (8, 1): 0.291026,
    (16, 1): 0.202610,
    (32, 1): 0.142153,
    (64, 1): 0.100126,
    (8, 3): -0.0323362,
    (8, 5): 0.0088190,
    (64, 3): -0.00154040,
}
RIGHT = {  # the probability that a head is right: query = key, and at 45 degrees
    3: (0.68169, 0.63328), 4: (0.64868, 0.60792), 8: (0.59689, 0.56933),
    16: (0.56591, 0.54686), 32: (0.54573, 0.53243), 64: (0.53204, 0.52269),
}  # fmt: skip

PEAKS = {
    4: (1.35e8, 1.34919e8, 2.64954e6),
    6: (6.47e12, 6.46526e12, 8.33028e9),
    8: (6.03e16, 6.02866e16, 7.78061e12),
}


def exact_polynomial(dim: int, degree: int, t: Any) -> Any:
    """P_l, the Gegenbauer polynomial scaled to 1 at 1."""
    parameter = mp.mpf(dim) / 2 - 1
    return mp.gegenbauer(degree, parameter, mp.mpf(t), zeroprec=1000) / mp.gegenbauer(
        degree, parameter, 1
    )


def exact_coefficient(dim: int, degree: int) -> Any:
    """lambda_l, from the derivative formula: P_l under u_d integrates to a value at 0 of the
    polynomial of two dimensions more."""
    return 2 * exact_omega(dim) / (dim - 1) * exact_polynomial(dim + 2, degree - 1, 0)


# ---- harmonics


def test_multiplicity_counts_harmonics_as_polynomials() -> None:
    for dim, degree in itertools.product((3, 4, 5, 8, 16, 64, 1000), range(12)):
        homogeneous = math.comb(dim + degree - 1, degree)
        times_square = math.comb(dim + degree - 3, degree - 2) if degree >= 2 else 0
        assert harmonics.multiplicity(dim, degree) == homogeneous - times_square
    assert [harmonics.multiplicity(dim, 3) for dim in (4, 8, 16, 32, 64)] == [
        16,
        112,
        800,
        5952,
        45696,
    ]


@pytest.mark.parametrize("dim", DIMS)
def test_sign_coefficients_and_energies(dim: int) -> None:
    with mp.workdps(30):
        for degree in (1, 3, 5, 11, 25):
            by_quadrature = expected(dim, lambda t, degree=degree: exact_polynomial(dim, degree, t))
            assert mp.almosteq(by_quadrature, exact_coefficient(dim, degree), 1e-20), (
                "the reference itself"
            )
        for degree in (1, 3, 5, 11, 25, 49, 199):
            want = exact_coefficient(dim, degree)
            assert harmonics.sign_coefficient(dim, degree) == pytest.approx(float(want), rel=1e-11)
            assert harmonics.energy(dim, degree) == pytest.approx(
                float(harmonics.multiplicity(dim, degree) * want**2), rel=1e-10
            )
    assert [harmonics.sign_coefficient(dim, even) for even in (0, 2, 48)] == [0, 0, 0]
    assert harmonics.energy(dim, 2) == 0


def test_coefficients_and_plateaus_of_the_tables() -> None:
    for (dim, degree), value in LAMBDA.items():
        assert harmonics.sign_coefficient(dim, degree) == pytest.approx(value, rel=6e-6)
    for dim, row in PLATEAUS.items():
        for degree, value in zip(range(1, 12, 2), row, strict=True):
            assert harmonics.plateau(dim, degree) == pytest.approx(value, abs=5.1e-5)
    assert harmonics.plateau(8, 0) == 0.5
    assert harmonics.plateau(8, 2) == harmonics.plateau(8, 1)
    for degree, value in zip(
        range(1, 12, 2), (0.1817, 0.1286, 0.1047, 0.0905, 0.0808, 0.0737), strict=True
    ):
        assert harmonics.plateau(20_000, degree) == pytest.approx(value, abs=1e-4)


@pytest.mark.parametrize("dim", [3, 4, 8, 64, 1000])
def test_polynomials_against_high_precision(dim: int) -> None:
    at = (-1.0, -0.93, -0.3, 0.0, 0.11, 0.7, 0.999, 1.0)
    values = harmonics.polynomials(dim, 49, np.array(at))
    assert values.shape == (50, len(at))
    with mp.workdps(60):
        for degree, (i, t) in itertools.product((0, 1, 2, 7, 30, 49), enumerate(at)):
            assert values[degree, i] == pytest.approx(
                float(exact_polynomial(dim, degree, t)), rel=1e-9, abs=1e-13
            )


@pytest.mark.parametrize("dim", [3, 8, 1000])
def test_polynomials_stay_bounded_in_high_dimension_and_degree(dim: int) -> None:
    values = harmonics.polynomials(dim, 500, np.linspace(-1, 1, 401))
    assert np.isfinite(values).all()
    assert np.abs(values).max() <= 1 + 1e-9
    assert np.abs(values[:, -1] - 1).max() < 1e-9
    assert np.abs(values + values[:, ::-1])[1::2].max() < 1e-12, "odd degrees are odd"
    assert np.abs(values - values[:, ::-1])[::2].max() < 1e-12, "even degrees are even"
    assert harmonics.polynomials(dim, 0, 0.5).tolist() == [1.0]


@pytest.mark.parametrize("dim", [3, 4, 5, 8, 64, 300])
def test_quadrature_has_the_moments_of_a_coordinate(dim: int) -> None:
    t, weight = harmonics.quadrature(dim, 200)
    even = 1.0
    for j in range(12):
        assert np.sum(weight * t ** (2 * j)) == pytest.approx(even, rel=1e-11)
        assert abs(np.sum(weight * t ** (2 * j + 1))) < 1e-14
        even *= (2 * j + 1) / (dim + 2 * j)  # E t^(2j + 2)
    for power in (1, 3, 7):  # what a sign makes of odd ones
        log = math.lgamma(dim / 2) + math.lgamma((power + 1) / 2) - math.lgamma((dim + power) / 2)
        assert np.sum(weight * np.sign(t) * t**power) == pytest.approx(
            math.exp(log) / math.sqrt(math.pi), rel=1e-11
        )
    values = math.sqrt(harmonics.multiplicity(dim, 5)) * harmonics.polynomials(dim, 7, t)[5]
    assert np.sum(weight * values**2) == pytest.approx(1, rel=1e-10), "G_l has length 1"
    assert abs(np.sum(weight * values * harmonics.polynomials(dim, 7, t)[7])) < 1e-12


@pytest.mark.parametrize("dim", DIMS)
def test_head_target_by_quadrature(dim: int) -> None:
    same, turned = RIGHT[dim]
    assert float(harmonics.head_target(dim, 1.0)) == pytest.approx(same, abs=1.1e-5)
    assert float(harmonics.head_target(dim, math.cos(math.pi / 4))) == pytest.approx(
        turned, abs=1.1e-5
    )
    assert float(harmonics.head_target(dim, 0.0)) == 0.5
    cosines = np.linspace(-1, 1, 41)
    values = harmonics.head_target(dim, cosines)
    assert np.abs(values + values[::-1] - 1).max() < 1e-14
    assert (np.diff(values) > 0).all()
    with mp.workdps(40):
        coefficients = {odd: exact_coefficient(dim, odd) for odd in range(1, 50, 2)}
        for i in (0, 13, 40):
            parts = (
                harmonics.multiplicity(dim, n) * c**3 * exact_polynomial(dim, n, float(cosines[i]))
                for n, c in coefficients.items()
            )
            assert values[i] == pytest.approx(float(0.5 + mp.fsum(parts) / 2), abs=1e-13)


@given(st.floats(-1, 1), st.floats(-1, 1))
@examples(50)
def test_head_head_is_symmetric(a: float, b: float) -> None:
    assert harmonics.head_head(a, b) == pytest.approx(harmonics.head_head(b, a), abs=1e-15)
    assert 0 <= harmonics.head_head(a, b) <= 1
    assert harmonics.head_head(a, b) + harmonics.head_head(-a, b) == pytest.approx(1, abs=1e-15)


def test_head_head_of_a_head_with_itself() -> None:
    assert harmonics.head_head(1.0, 1.0) == pytest.approx(1, abs=1e-15)
    assert harmonics.head_head(1 + 1e-12, -1 - 1e-12) == pytest.approx(0, abs=1e-15), (
        "rounding beyond 1 is no error"
    )
    assert harmonics.head_head(0.0, 0.7) == 0.5
    q, _ = features.draw_heads(8, 5, seeded(0))
    matrix = harmonics.head_head((q @ q.T).numpy(), (q @ q.T).numpy())
    assert np.array_equal(matrix, matrix.T)
    assert np.abs(np.diag(matrix) - 1).max() < 1e-7


def test_head_head_takes_tensors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(harmonics.head_head(torch.tensor(0.5), torch.tensor(0.5))) == pytest.approx(
            0.5 + 2 / 36, abs=1e-6
        )


# ---- the floor


def test_singular_floor_by_listing_every_singular_value() -> None:
    for dim in (3, 4, 5, 8):
        by_degree = {
            degree: float(exact_coefficient(dim, degree)) ** 2
            for degree in range(1, 60 if dim == 3 else 14, 2)
        }
        squares = sorted(
            (
                v
                for degree, v in by_degree.items()
                for _ in range(harmonics.multiplicity(dim, degree))
            ),
            reverse=True,
        )
        for heads in (1, 2, 3, dim - 1, dim, dim + 1, 2 * dim, 100, 250):
            largest = squares[: heads + 1]
            assert len(largest) == heads + 1
            assert harmonics.singular_floor(dim, heads) == pytest.approx(
                0.5 * (1 - math.fsum(largest)), abs=1e-12
            )


@pytest.mark.parametrize("dim", [3, 4, 8, 64, 512])
def test_singular_floor_meets_the_plateaus(dim: int) -> None:
    used = 0
    for degree in (1, 3, 5, 7):
        used += harmonics.multiplicity(dim, degree)
        if used > 1:
            assert harmonics.singular_floor(dim, used - 1) == pytest.approx(
                harmonics.plateau(dim, degree), abs=1e-12
            )
            assert harmonics.singular_floor(dim, used) < harmonics.plateau(dim, degree)


@given(st.integers(3, 128), st.integers(1, 10**9), st.integers(1, 10**6))
@examples(100)
def test_singular_floor_falls_and_stays_between_nothing_and_a_half(
    dim: int, heads: int, more: int
) -> None:
    here, there = harmonics.singular_floor(dim, heads), harmonics.singular_floor(dim, heads + more)
    assert 0 <= there <= here <= 0.5


@given(st.integers(3, 64), st.floats(0.06, 0.499))
@examples(60)
def test_heads_for_inverts_the_floor(dim: int, error: float) -> None:
    heads = harmonics.heads_for(dim, error)
    assert harmonics.singular_floor(dim, heads) <= error
    if heads > 1:
        assert harmonics.singular_floor(dim, heads - 1) > error


def test_heads_for_many_heads_is_exact_in_whole_numbers() -> None:
    heads = harmonics.heads_for(512, 0.085)
    assert heads > 10**12
    assert harmonics.singular_floor(512, heads) <= 0.085


# ---- the continuum


@pytest.mark.parametrize("dim", [3, 4, 6, 7, 8, 64])
@pytest.mark.parametrize("published", [False, True])
def test_representation_in_sixty_digits(dim: int, published: bool) -> None:
    at = [1.0, -1.0, 0.999, 0.5, -0.3, 1e-3, 0.0]
    got = harmonics.representation(dim, at, published=published)
    with mp.workdps(60):
        terms = {}
        for odd in range(1, 50, 2):
            count = mp.mpf(harmonics.multiplicity(dim, odd))
            shat = mp.sqrt(count) * exact_coefficient(dim, odd)
            terms[odd] = (count ** mp.mpf("1.5") if published else count) / shat * mp.sqrt(count)
        for value, t in zip(got, at, strict=True):
            want = mp.fsum(term * exact_polynomial(dim, odd, t) for odd, term in terms.items())
            assert value == pytest.approx(float(want), rel=1e-13, abs=1e-300)


def test_representation_beside_a_zero_where_its_terms_cancel() -> None:
    low, high = 0.5, 0.55
    assert harmonics.representation(8, low)[0] * harmonics.representation(8, high)[0] < 0
    while np.nextafter(low, 1) < high:
        middle = (low + high) / 2
        low, high = (
            (middle, high)
            if harmonics.representation(8, middle)[0] * harmonics.representation(8, high)[0] < 0
            else (low, middle)
        )
    with mp.workdps(60):
        for t, value in zip((low, high), harmonics.representation(8, [low, high]), strict=True):
            parts = (
                harmonics.multiplicity(8, n) / exact_coefficient(8, n) * exact_polynomial(8, n, t)
                for n in range(1, 50, 2)
            )
            assert value == pytest.approx(float(mp.fsum(parts)), rel=1e-13)


def test_representation_peaks() -> None:
    for dim, (read, published, corrected) in PEAKS.items():
        assert harmonics.representation(dim, 1.0)[0] == pytest.approx(corrected, rel=1e-5)
        assert harmonics.representation(dim, 1.0, published=True)[0] == pytest.approx(
            published, rel=1e-5
        )
        assert harmonics.representation(dim, 1.0, published=True)[0] == pytest.approx(
            read, rel=5e-3
        )
    assert harmonics.representation(8, [0.3], 1)[0] == pytest.approx(
        8 * 0.3 / harmonics.sign_coefficient(8, 1), rel=1e-12
    )
    assert harmonics.representation(8, 0.3, 2)[0] == harmonics.representation(8, 0.3, 1)[0], (
        "even degrees add nothing"
    )
