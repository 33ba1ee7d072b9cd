"""The rank paper's numbers: closed forms against high precision and against drawn heads, every check, and the commands that run them."""

import contextlib
import io
import itertools
import json
import math
import shutil
import warnings
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import mpmath as mp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerance import STANDARD_ERRORS, examples, seeded

from headwise import figures, sweep
from headwise.cli import main
from headwise.experiments import EXPERIMENTS
from headwise.experiments import features as features_experiment
from headwise.experiments import representation as representation_experiment
from headwise.experiments import theory as theory_experiment
from headwise.models import Encoder
from headwise.report import write_report
from headwise.shape import UsageError
from headwise.store import Store
from headwise.tasks import Farthest
from headwise.theory import checks, constructions, features, harmonics

DIMS = (3, 4, 8, 16, 32, 64)
PLATEAUS = {  # half of the sign's energy beyond degrees 1, 3, 5, 7, 9, 11
    4: (0.1397, 0.0821, 0.0583, 0.0452, 0.0369, 0.0312),
    8: (0.1612, 0.1027, 0.0765, 0.0613, 0.0513, 0.0442),
    16: (0.1716, 0.1148, 0.0888, 0.0732, 0.0626, 0.0549),
    32: (0.1767, 0.1215, 0.0962, 0.0809, 0.0705, 0.0627),
    64: (0.1792, 0.1250, 0.1003, 0.0855, 0.0753, 0.0677),
}
LAMBDA = {
    (3, 1): 0.500000, (4, 1): 0.424413, (8, 1): 0.291026, (16, 1): 0.202610, (32, 1): 0.142153, (64, 1): 0.100126,
    (8, 3): -0.0323362, (8, 5): 0.0088190, (64, 3): -0.00154040,
}  # fmt: skip
RIGHT = {  # the probability that a head is right: query = key, and at 45 degrees
    3: (0.68169, 0.63328), 4: (0.64868, 0.60792), 8: (0.59689, 0.56933),
    16: (0.56591, 0.54686), 32: (0.54573, 0.53243), 64: (0.53204, 0.52269),
}  # fmt: skip
SOFTMAX = {8: {10: 0.05508, 100: 0.005564, 1000: 0.0005565}, 64: {10: 0.1552, 100: 0.01721, 1000: 0.001723}}
VOTES = {  # 1, 11, 101, 1001, 10001 heads
    8: (0.8062, 0.5522, 0.2410, 0.0802, 0.0255),
    16: (0.8682, 0.6711, 0.3410, 0.1189, 0.0380),
    64: (0.9359, 0.8301, 0.5660, 0.2380, 0.0786),
}
PEAKS = {4: (1.35e8, 1.34919e8, 2.64954e6), 6: (6.47e12, 6.46526e12, 8.33028e9), 8: (6.03e16, 6.02866e16, 7.78061e12)}


# ---- an independent reference in high precision


def exact_omega(dim: int) -> Any:
    return mp.gamma(mp.mpf(dim) / 2) / (mp.sqrt(mp.pi) * mp.gamma(mp.mpf(dim - 1) / 2))


def exact_polynomial(dim: int, degree: int, t: Any) -> Any:
    """P_l, the Gegenbauer polynomial scaled to 1 at 1."""
    parameter = mp.mpf(dim) / 2 - 1
    return mp.gegenbauer(degree, parameter, mp.mpf(t), zeroprec=1000) / mp.gegenbauer(degree, parameter, 1)


def exact_coefficient(dim: int, degree: int) -> Any:
    """lambda_l, from the derivative formula: P_l under u_d integrates to a value at 0 of the polynomial of two dimensions more."""
    return 2 * exact_omega(dim) / (dim - 1) * exact_polynomial(dim + 2, degree - 1, 0)


def expected(dim: int, f: Callable[[Any], Any]) -> Any:
    """E f(|t|) under u_d, with t the sine of an angle."""
    return 2 * exact_omega(dim) * mp.quad(lambda a: mp.cos(a) ** (dim - 2) * f(mp.sin(a)), mp.linspace(0, mp.pi / 2, 5))


def agreement(q: torch.Tensor, k: torch.Tensor) -> np.ndarray:
    """The probability that two heads of a layer agree, in numpy, each head with itself for certain."""
    a, b = q.numpy(), k.numpy()
    return 0.5 + 2 / np.pi**2 * np.arcsin(np.clip(a @ a.T, -1, 1)) * np.arcsin(np.clip(b @ b.T, -1, 1))


# ---- harmonics


def test_harmonics_are_counted_as_polynomials_are() -> None:
    for dim, degree in itertools.product((3, 4, 5, 8, 16, 64, 1000), range(12)):
        homogeneous = math.comb(dim + degree - 1, degree)
        times_square = math.comb(dim + degree - 3, degree - 2) if degree >= 2 else 0
        assert harmonics.multiplicity(dim, degree) == homogeneous - times_square
    assert [harmonics.multiplicity(dim, 3) for dim in (4, 8, 16, 32, 64)] == [16, 112, 800, 5952, 45696]


@pytest.mark.parametrize("dim", DIMS)
def test_sign_coefficients_and_energies(dim: int) -> None:
    with mp.workdps(30):
        for degree in (1, 3, 5, 11, 25):
            by_quadrature = expected(dim, lambda t, degree=degree: exact_polynomial(dim, degree, t))
            assert mp.almosteq(by_quadrature, exact_coefficient(dim, degree), 1e-20), "the reference itself"
        for degree in (1, 3, 5, 11, 25, 49, 199):
            want = exact_coefficient(dim, degree)
            assert harmonics.sign_coefficient(dim, degree) == pytest.approx(float(want), rel=1e-11)
            assert harmonics.energy(dim, degree) == pytest.approx(float(harmonics.multiplicity(dim, degree) * want**2), rel=1e-10)
    assert [harmonics.sign_coefficient(dim, even) for even in (0, 2, 48)] == [0, 0, 0]
    assert harmonics.energy(dim, 2) == 0


def test_the_tables_of_coefficients_and_plateaus() -> None:
    for (dim, degree), value in LAMBDA.items():
        assert harmonics.sign_coefficient(dim, degree) == pytest.approx(value, rel=6e-6)
    for dim, row in PLATEAUS.items():
        for degree, value in zip(range(1, 12, 2), row, strict=True):
            assert harmonics.plateau(dim, degree) == pytest.approx(value, abs=5.1e-5)
    assert harmonics.plateau(8, 0) == 0.5
    assert harmonics.plateau(8, 2) == harmonics.plateau(8, 1)
    for degree, value in zip(range(1, 12, 2), (0.1817, 0.1286, 0.1047, 0.0905, 0.0808, 0.0737), strict=True):
        assert harmonics.plateau(20_000, degree) == pytest.approx(value, abs=1e-4)


@pytest.mark.parametrize("dim", [3, 4, 8, 64, 1000])
def test_polynomials_against_high_precision(dim: int) -> None:
    at = (-1.0, -0.93, -0.3, 0.0, 0.11, 0.7, 0.999, 1.0)
    values = harmonics.polynomials(dim, 49, np.array(at))
    assert values.shape == (50, len(at))
    with mp.workdps(60):
        for degree, (i, t) in itertools.product((0, 1, 2, 7, 30, 49), enumerate(at)):
            assert values[degree, i] == pytest.approx(float(exact_polynomial(dim, degree, t)), rel=1e-9, abs=1e-13)


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
        assert np.sum(weight * np.sign(t) * t**power) == pytest.approx(math.exp(log) / math.sqrt(math.pi), rel=1e-11)
    values = math.sqrt(harmonics.multiplicity(dim, 5)) * harmonics.polynomials(dim, 7, t)[5]
    assert np.sum(weight * values**2) == pytest.approx(1, rel=1e-10), "G_l has length 1"
    assert abs(np.sum(weight * values * harmonics.polynomials(dim, 7, t)[7])) < 1e-12


@pytest.mark.parametrize("dim", DIMS)
def test_how_often_a_head_is_right(dim: int) -> None:
    same, turned = RIGHT[dim]
    assert float(harmonics.head_target(dim, 1.0)) == pytest.approx(same, abs=1.1e-5)
    assert float(harmonics.head_target(dim, math.cos(math.pi / 4))) == pytest.approx(turned, abs=1.1e-5)
    assert float(harmonics.head_target(dim, 0.0)) == 0.5
    cosines = np.linspace(-1, 1, 41)
    values = harmonics.head_target(dim, cosines)
    assert np.abs(values + values[::-1] - 1).max() < 1e-14
    assert (np.diff(values) > 0).all()
    with mp.workdps(40):
        coefficients = {odd: exact_coefficient(dim, odd) for odd in range(1, 50, 2)}
        for i in (0, 13, 40):
            parts = (harmonics.multiplicity(dim, n) * c**3 * exact_polynomial(dim, n, float(cosines[i])) for n, c in coefficients.items())
            assert values[i] == pytest.approx(float(0.5 + mp.fsum(parts) / 2), abs=1e-13)


@given(st.floats(-1, 1), st.floats(-1, 1))
@examples(50)
def test_two_heads(a: float, b: float) -> None:
    assert harmonics.head_head(a, b) == pytest.approx(harmonics.head_head(b, a), abs=1e-15)
    assert 0 <= harmonics.head_head(a, b) <= 1
    assert harmonics.head_head(a, b) + harmonics.head_head(-a, b) == pytest.approx(1, abs=1e-15)


def test_a_head_agrees_with_itself() -> None:
    assert harmonics.head_head(1.0, 1.0) == pytest.approx(1, abs=1e-15)
    assert harmonics.head_head(1 + 1e-12, -1 - 1e-12) == pytest.approx(0, abs=1e-15), "rounding beyond 1 is no error"
    assert harmonics.head_head(0.0, 0.7) == 0.5
    q, _ = features.draw_heads(8, 5, seeded(0))
    matrix = harmonics.head_head((q @ q.T).numpy(), (q @ q.T).numpy())
    assert np.array_equal(matrix, matrix.T)
    assert np.abs(np.diag(matrix) - 1).max() < 1e-7


# ---- the floor


def test_the_floor_by_listing_every_singular_value() -> None:
    for dim in (3, 4, 5, 8):
        by_degree = {degree: float(exact_coefficient(dim, degree)) ** 2 for degree in range(1, 60 if dim == 3 else 14, 2)}
        squares = sorted((v for degree, v in by_degree.items() for _ in range(harmonics.multiplicity(dim, degree))), reverse=True)
        for heads in (1, 2, 3, dim - 1, dim, dim + 1, 2 * dim, 100, 250):
            largest = squares[: heads + 1]
            assert len(largest) == heads + 1
            assert harmonics.singular_floor(dim, heads) == pytest.approx(0.5 * (1 - math.fsum(largest)), abs=1e-12)


@pytest.mark.parametrize("dim", [3, 4, 8, 64, 512])
def test_the_floor_meets_the_plateaus(dim: int) -> None:
    used = 0
    for degree in (1, 3, 5, 7):
        used += harmonics.multiplicity(dim, degree)
        if used > 1:
            assert harmonics.singular_floor(dim, used - 1) == pytest.approx(harmonics.plateau(dim, degree), abs=1e-12)
            assert harmonics.singular_floor(dim, used) < harmonics.plateau(dim, degree)


@given(st.integers(3, 128), st.integers(1, 10**9), st.integers(1, 10**6))
@examples(100)
def test_the_floor_falls_and_stays_between_nothing_and_a_half(dim: int, heads: int, more: int) -> None:
    here, there = harmonics.singular_floor(dim, heads), harmonics.singular_floor(dim, heads + more)
    assert 0 <= there <= here <= 0.5


@given(st.integers(3, 64), st.floats(0.06, 0.499))
@examples(60)
def test_heads_for_is_the_floor_turned_round(dim: int, error: float) -> None:
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
        low, high = (middle, high) if harmonics.representation(8, middle)[0] * harmonics.representation(8, high)[0] < 0 else (low, middle)
    with mp.workdps(60):
        for t, value in zip((low, high), harmonics.representation(8, [low, high]), strict=True):
            parts = (harmonics.multiplicity(8, n) / exact_coefficient(8, n) * exact_polynomial(8, n, t) for n in range(1, 50, 2))
            assert value == pytest.approx(float(mp.fsum(parts)), rel=1e-13)


def test_the_peaks_of_the_representation() -> None:
    for dim, (read, published, corrected) in PEAKS.items():
        assert harmonics.representation(dim, 1.0)[0] == pytest.approx(corrected, rel=1e-5)
        assert harmonics.representation(dim, 1.0, published=True)[0] == pytest.approx(published, rel=1e-5)
        assert harmonics.representation(dim, 1.0, published=True)[0] == pytest.approx(read, rel=5e-3)
    assert harmonics.representation(8, [0.3], 1)[0] == pytest.approx(8 * 0.3 / harmonics.sign_coefficient(8, 1), rel=1e-12)
    assert harmonics.representation(8, 0.3, 2)[0] == harmonics.representation(8, 0.3, 1)[0], "even degrees add nothing"


# ---- random heads


def hard_choices(q: torch.Tensor, k: torch.Tensor, samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of two orthonormal points each head picks, and which is nearer."""
    g = seeded(seed)
    x = torch.linalg.qr(torch.randn(samples, q.shape[1], 2, dtype=torch.float64, generator=g))[0]
    x = x * torch.randn(samples, 1, 2, dtype=torch.float64, generator=g).sign()  # the decomposition fixes them
    y = torch.randn(samples, q.shape[1], dtype=torch.float64, generator=g)
    first, second = x[..., 0], x[..., 1]
    picks = (first @ k.T) * (y @ q.T) > (second @ k.T) * (y @ q.T)
    return picks, (first * y).sum(1) > (second * y).sum(1)


@pytest.mark.parametrize("dim", [3, 8, 32])
def test_closed_forms_against_hard_heads(dim: int) -> None:
    q, k = features.draw_heads(dim, 5, seeded(1))
    q[1], k[1] = q[0], k[0] + 0.2 * k[1]
    k[1] /= k[1].norm()
    picks, truth = hard_choices(q, k, 100_000, 2)
    se = 0.5 / math.sqrt(len(picks))
    measured = (picks == truth[:, None]).double().mean(0)
    assert (measured - features.right(q, k, 199)).abs().max() < STANDARD_ERRORS * se
    both = (picks[:, :, None] == picks[:, None, :]).double().mean(0)
    assert (both - features.agree(q, k, q, k)).abs().max() < STANDARD_ERRORS * se


def test_the_two_ways_to_the_kernels_agree() -> None:
    q, k = features.draw_heads(8, 6, seeded(3))
    cosines = (q * k).sum(1).numpy()
    assert np.abs(features.right(q, k).numpy() - harmonics.head_target(8, cosines)).max() < 1e-13
    other = features.draw_heads(8, 4, seeded(4))
    want = harmonics.head_head((q @ other[0].T).numpy(), (k @ other[1].T).numpy())
    assert np.abs(features.agree(q, k, *other).numpy() - want).max() < 1e-13
    assert np.abs(features.agree(q, k, q, k).numpy() - agreement(q, k)).max() < 1e-5


def test_the_kernels_have_gradients() -> None:
    q, k = (t.requires_grad_() for t in features.draw_heads(5, 3, seeded(5)))
    assert torch.autograd.gradcheck(features.right, (q, k))
    fixed = features.draw_heads(5, 2, seeded(6))
    assert torch.autograd.gradcheck(lambda a, b: features.agree(a, b, *fixed), (q, k))


@pytest.mark.parametrize("draw", features.DRAWS)
def test_best_weights_against_a_plain_solve(draw: str) -> None:
    q, k = features.draw_heads(8, 120, seeded(7), draw)
    matrix, b = agreement(q, k), features.right(q, k).numpy()
    want = np.linalg.solve(matrix, b)
    solved = features.best_weights(q, k)
    assert solved.iterations == 0
    assert solved.residual < 1e-12
    assert np.abs(solved.weights.numpy() - want).max() < 1e-4
    assert solved.error == pytest.approx(1 - b @ want, abs=1e-5)


@pytest.mark.parametrize("memory", [1000, 4 * 300 * 300])
@pytest.mark.parametrize("tolerance", [1e-3, 1e-6, 1e-10])
def test_the_iterative_way_reaches_its_tolerance(memory: int, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the matrix made again for every product and with the matrix kept, in several blocks."""
    monkeypatch.setattr(features, "BLOCK", 128)
    q, k = features.draw_heads(8, 300, seeded(8))
    direct, solved = features.best_weights(q, k), features.best_weights(q, k, tolerance=tolerance, memory=memory)
    assert direct.iterations == 0
    assert solved.iterations > 0
    assert solved.residual <= tolerance
    a, matrix, b = solved.weights.numpy(), agreement(q, k), features.right(q, k).numpy()
    diagonal = 2e-6  # how far from 1 a head's agreement with itself may be
    residual = np.linalg.norm(matrix @ a - b) / np.linalg.norm(b)
    assert residual == pytest.approx(solved.residual, rel=0.01, abs=diagonal * np.linalg.norm(a) / np.linalg.norm(b))
    assert solved.error == pytest.approx(1 - 2 * b @ a + a @ matrix @ a, abs=diagonal * (a @ a)), "the error of these very weights"
    assert solved.error == pytest.approx(direct.error, abs=max(10 * tolerance**2, 1e-9) * 100)


def test_iterations_stop_at_their_limit_and_say_so() -> None:
    q, k = features.draw_heads(16, 200, seeded(9))
    solved = features.best_weights(q, k, limit=3, memory=1000)
    assert solved.iterations == 3
    assert solved.residual > 1e-6
    assert solved.error > features.best_weights(q, k).error


@pytest.mark.parametrize("noise", [0.0, 1e-13, 1e-9])
@pytest.mark.parametrize("memory", [4 << 30, 1000])
def test_heads_that_are_nearly_the_same(noise: float, memory: int) -> None:
    q, k = features.draw_heads(8, 40, seeded(10))
    once = features.best_weights(q, k)
    again = [t + noise * torch.randn(t.shape, dtype=torch.float64, generator=seeded(11)) for t in (q, k)]
    q2, k2 = (torch.cat((t, a / a.norm(dim=1, keepdim=True))) for t, a in zip((q, k), again, strict=True))
    twice = features.best_weights(q2, k2, memory=memory)
    assert math.isfinite(twice.error)
    assert twice.residual < 1e-5
    assert twice.error == pytest.approx(once.error, abs=1e-4), "a copy of a layer knows no more than the layer"


def distance(sample: np.ndarray, law: Callable[[np.ndarray], np.ndarray]) -> float:
    """Kolmogorov and Smirnov's, times the root of the sample's size: below 1.95 in 999 of 1000 samples of that law."""
    x = np.sort(sample)
    below = law(x)
    steps = np.arange(len(x) + 1) / len(x)
    return float(max(np.max(steps[1:] - below), np.max(below - steps[:-1]))) * math.sqrt(len(x))


@pytest.mark.parametrize("dim", [3, 8, 64])
def test_the_laws_of_drawn_heads(dim: int) -> None:
    count = 20_000
    for draw in features.DRAWS:
        q, k = features.draw_heads(dim, count, seeded(12), draw)
        assert q.shape == k.shape == (count, dim)
        assert q.dtype == k.dtype == torch.float64
        assert (q.norm(dim=1) - 1).abs().max() < 1e-12
        cosine, length = (q * k).sum(1).numpy(), k.norm(dim=1)
        assert q.mean(0).abs().max() < 4.5 / math.sqrt(count * dim), "no direction is special"
        if draw == "independent":
            assert abs(np.mean(cosine**2) - 1 / dim) < STANDARD_ERRORS * np.std(cosine**2) / math.sqrt(count)
            if dim == 3:
                assert distance(cosine, lambda t: (t + 1) / 2) < 1.95
        else:
            assert distance(cosine, lambda t: (t + 1) / 2) < 1.95
        if draw == "published":
            lost = (1 - length.square()).numpy()
            assert length.max() < 1
            assert abs(np.mean(lost) - 2 / 3 / dim) < STANDARD_ERRORS * np.std(lost) / math.sqrt(count)
        else:
            assert (length - 1).abs().max() < 1e-12
    first, second = (features.draw_heads(dim, 4, seeded(13))[0] for _ in range(2))
    assert torch.equal(first, second)


def test_heads_moved_downhill_improve_and_respect_the_floor() -> None:
    for dim, heads in ((3, 3), (8, 8)):
        start, end = (features.optimise_heads(dim, heads, seeded(14), steps) for steps in (0, 60))
        drawn = features.best_weights(*features.draw_heads(dim, heads, seeded(14)))
        assert start == pytest.approx(drawn.error, abs=1e-6)
        assert end < start - 0.01
        assert end >= harmonics.singular_floor(dim, heads)


@pytest.mark.parametrize("draw", ["cos-uniform", "independent"])
def test_the_error_of_a_layer_on_drawn_points(draw: str) -> None:
    q, k = features.draw_heads(8, 64, seeded(15), draw)
    solved, b = features.best_weights(q, k), features.right(q, k)
    assert solved.error == pytest.approx(1 - (b @ solved.weights).item(), abs=1e-12)
    got, se = features.measured_error(q, k, solved.weights, 40_000, seeded(16))
    assert abs(got - solved.error) < STANDARD_ERRORS * se
    other = torch.full((64,), 1 / 64, dtype=torch.float64)
    want = 1 - 2 * (b @ other).item() + other.numpy() @ agreement(q, k) @ other.numpy()
    got, se = features.measured_error(q, k, other, 40_000, seeded(17))
    assert abs(got - want) < STANDARD_ERRORS * se
    assert want > solved.error


def test_no_direction_is_special_to_the_drawn_points() -> None:
    for sign in (-1, 1):
        q = torch.tensor([[0.9239, 0.3729, 0.0862]], dtype=torch.float64)
        k = torch.tensor([[0.1398, -0.7963, -0.5885]], dtype=torch.float64) * sign
        q, k = q / q.norm(), k / k.norm()
        want = 2 - 2 * features.right(q, k, 199).item()  # a single head of weight 1
        got, se = features.measured_error(q, k, torch.ones(1, dtype=torch.float64), 100_000, seeded(18))
        assert abs(got - want) < STANDARD_ERRORS * se


def test_the_recomputed_and_the_published_table() -> None:
    for dim, heads, unit, spread, shortened in ((8, 128, 0.2530, 0.0059, 0.2265), (16, 256, 0.2626, 0.0034, None)):
        errors = [features.best_weights(*features.draw_heads(dim, heads, seeded(s))).error for s in range(5)]
        assert abs(np.mean(errors) - unit) < STANDARD_ERRORS * spread * math.sqrt(2 / 5)
        if shortened:
            errors = [features.best_weights(*features.draw_heads(dim, heads, seeded(s), "published")).error for s in range(5)]
            assert abs(np.mean(errors) - shortened) < STANDARD_ERRORS * 0.0059 * math.sqrt(2 / 5) + 0.0005
    errors = [features.best_weights(*features.draw_heads(8, 256, seeded(s), "independent")).error for s in range(5)]
    assert abs(np.mean(errors) - 0.2466) < STANDARD_ERRORS * 0.0024 * math.sqrt(2 / 5)


# ---- constructions


def sphere(*size: int, seed: int) -> torch.Tensor:
    x = torch.randn(*size, dtype=torch.float64, generator=seeded(seed))
    return x / x.norm(dim=-1, keepdim=True)


def nearest_by_loop(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.stack(
        [points[max(range(len(points)), key=lambda i: float(points[i] @ query))] for points, query in zip(x, y, strict=True)]
    )


@pytest.mark.parametrize(("dim", "points"), [(3, 2), (5, 7), (64, 100)])
def test_one_full_rank_head_is_exact(dim: int, points: int) -> None:
    x, y = sphere(50, points, dim, seed=20), sphere(50, dim, seed=21)
    assert torch.equal(constructions.full_rank_head(x, y), nearest_by_loop(x, y))
    assert torch.equal(constructions.full_rank_head(x, -y), nearest_by_loop(x, -y))
    weights = torch.softmax(7.5 * (x @ y[:, :, None]).squeeze(-1), 1)
    assert (constructions.full_rank_head(x, y, 7.5) - (weights[:, :, None] * x).sum(1)).abs().max() < 1e-12
    assert (constructions.full_rank_head(x, y, 1e9) - nearest_by_loop(x, y)).abs().max() < 1e-3


@pytest.mark.parametrize("dim", [3, 4, 8, 64, 1000])
@pytest.mark.parametrize("beta", [0.5, 10.0, 1000.0])
def test_softmax_error_in_high_precision(dim: int, beta: float) -> None:
    with mp.workdps(25):
        cuts = [0, *(mp.mpf(c) / beta for c in (1, 5, 20, 80) if c / beta < 1.5), mp.pi / 2]
        root = mp.sqrt(2) * mp.mpf(beta)
        want = 4 * exact_omega(dim) * mp.quad(lambda a: mp.cos(a) ** (dim - 2) / (1 + mp.exp(root * mp.sin(a))) ** 2, cuts)
        assert constructions.softmax_error(dim, beta) == pytest.approx(float(want), rel=1e-8 if dim == 4 else 1e-11)


def test_softmax_errors_of_the_table() -> None:
    for dim, row in SOFTMAX.items():
        for beta, value in row.items():
            assert constructions.softmax_error(dim, float(beta)) == pytest.approx(value, rel=5e-4)
        assert constructions.softmax_limit(dim, 1e5) == pytest.approx(constructions.softmax_error(dim, 1e5), rel=1e-4)
    assert constructions.softmax_limit(1000, 50.0) == pytest.approx(0.218 * math.sqrt(1000) / 50, rel=2e-3)
    assert constructions.softmax_error(8, 1e-9) == pytest.approx(0.5, rel=1e-6), "the mean of the points"


@pytest.mark.parametrize("depth", [1, 3])
def test_the_perfect_encoder(depth: int) -> None:
    task, model = Farthest(64, 16), constructions.perfect_encoder(64, depth)
    assert isinstance(model, Encoder)
    x, target = task.sample(seeded(22), 128)
    with torch.no_grad():
        error = task.loss(model(x)[0], target).item()
        swapped = task.loss(model(-x)[0], target).item()
    assert error < 5e-4
    assert swapped > 0.5, "the answer to another question is not an answer to this one"


@pytest.mark.parametrize("heads", [1, 3, 9, 21])
def test_a_majority_by_exact_fractions(heads: int) -> None:
    at = [Fraction(1, 2), Fraction(5, 9), Fraction(3, 4), Fraction(99, 100), Fraction(1)]
    want = [sum(math.comb(heads, i) * p**i * (1 - p) ** (heads - i) for i in range(heads // 2 + 1)) for p in at]
    got = constructions._at_most_half(heads, np.array([float(p) for p in at[:-1]]))
    assert got == pytest.approx([float(v) for v in want[:-1]], rel=1e-12)
    assert want[-1] == 0
    for dim in (3, 4, 9):
        with mp.workdps(20):

            def wrong(t: Any) -> Any:
                p = mp.mpf(1) / 2 + mp.asin(t) / mp.pi
                return mp.fsum(math.comb(heads, i) * p**i * (1 - p) ** (heads - i) for i in range(heads // 2 + 1))

            assert constructions.vote_error(dim, heads) == pytest.approx(float(2 * expected(dim, wrong)), rel=1e-11)


def test_majorities_of_the_table() -> None:
    for dim, row in VOTES.items():
        for heads, value in zip((1, 11, 101, 1001, 10001), row, strict=True):
            assert constructions.vote_error(dim, heads) == pytest.approx(value, abs=5.1e-5)
    assert constructions.averaging_error(8) == pytest.approx(0.3350, abs=5.1e-5)
    assert constructions.averaging_error(64) == pytest.approx(0.4391, abs=5.1e-5)
    assert constructions.vote_error(8, 1) == pytest.approx(2 * (1 - harmonics.head_target(8, 1.0)), abs=1e-6), "one vote is one head"
    assert constructions.vote_limit(64, 10**6) == pytest.approx(math.sqrt(64 / 10**6), rel=0.02)
    assert constructions.vote_wide(10**4, 10**7) == pytest.approx(math.sqrt(10**4 / 10**7), rel=0.01)


@pytest.mark.parametrize(("points", "heads"), [(2, 1), (2, 11), (3, 9), (6, 15)])
def test_votes_against_a_plain_loop(points: int, heads: int) -> None:
    x, y, directions = sphere(60, points, 5, seed=23), sphere(60, 5, seed=24), sphere(heads, 5, seed=25)
    got, compared = constructions.vote(x, y, directions), 0
    for i in range(60):
        votes = [0] * points
        for g in directions:
            scores = [float(g @ p) * float(g @ y[i]) for p in x[i]]
            votes[scores.index(max(scores))] += 1
        winners = [p for p in range(points) if votes[p] == max(votes)]
        if len(winners) == 1:
            compared += 1
            assert torch.equal(got[i], x[i, winners[0]])
    assert compared == 60 if points == 2 else compared > 30


def test_pairs_are_orthonormal_and_have_no_preferred_side() -> None:
    x, y = constructions.pairs(seeded(26), 20_000, 3)
    assert x.shape == (20_000, 2, 3)
    assert y.shape == (20_000, 3)
    assert (x @ x.mT - torch.eye(2)).abs().max() < 1e-12
    assert (y.norm(dim=1) - 1).abs().max() < 1e-12
    for values in (x[:, 0], x[:, 1], y, (x[:, 0] - x[:, 1]) / math.sqrt(2)):
        assert values.mean(0).abs().max() < 4.5 / math.sqrt(3 * len(values))
        assert distance(values[:, 2].numpy(), lambda t: (t + 1) / 2) < 1.95, "a coordinate in 3 dimensions is uniform"
    values = torch.tensor([1.0, 2.0, 4.0, 9.0])
    assert constructions.mean_and_error(values) == pytest.approx((4.0, np.std([1, 2, 4, 9], ddof=1) / 2))


def test_heads_at_equal_angles_in_the_plane() -> None:
    for heads, value in ((1, 0.5), (2, 0.25), (4, 0.1875), (8, 0.171875)):
        assert constructions.spaced_closed(heads) == pytest.approx(value, abs=1e-15)
        assert constructions.spaced_error(heads) == pytest.approx(value, abs=1e-12)
        angle = math.pi * torch.arange(heads, dtype=torch.float64) / heads
        q = torch.stack((angle.cos(), angle.sin()), 1)
        picks, truth = hard_choices(q, q, 40_000, 27)
        share = (picks == truth[:, None]).double().mean(1)
        got, se = constructions.mean_and_error(2 * (1 - share).square())
        assert abs(got - value) < STANDARD_ERRORS * se
    assert constructions.spaced_error(2000, 9 / 8) == pytest.approx(5 / 32, abs=1e-6)
    for weight in (1.1, 1.15):
        assert constructions.spaced_error(2000, weight) > 5 / 32


def share_known(dim: int, hidden: Callable[[np.ndarray], np.ndarray]) -> float:
    """E of a function of |cot a cot b|, where cos a and cos b are coordinates of uniform unit vectors, on a grid of angles."""
    x, w = np.polynomial.legendre.leggauss(600)
    angle, weight = (x + 1) * np.pi / 4, w * np.pi / 4
    density = weight * np.sin(angle) ** (dim - 2)
    density /= density.sum()
    ratio = np.abs(np.multiply.outer(1 / np.tan(angle), 1 / np.tan(angle)))
    return float(density @ hidden(ratio) @ density)


def test_what_a_subspace_explains() -> None:
    """One hidden coordinate: known unless it outweighs the rest; three hidden ones: their mean is uniform; and the table."""

    def all_but_one(ratio: np.ndarray) -> np.ndarray:  # of 8: the visible part of 7 dimensions must beat the hidden coordinate
        t = np.minimum(ratio, 1)
        return 1 - 15 / 8 * (t - 2 * t**3 / 3 + t**5 / 5)

    cases = ((8, 7, share_known(8, all_but_one), 0.0), (4, 1, share_known(4, lambda ratio: np.minimum(ratio, 1) ** 2), 0.0))
    table = ((8, 1, 0.083, 0.002), (8, 4, 0.368, 0.002), (8, 7, 0.808, 0.002), (64, 32, 0.338, 0.002), (64, 63, 0.937, 0.002))
    for dim, rank, want, slack in (*cases, *table):
        got, se = constructions.explained(dim, rank, 60_000, seeded(28))
        assert 0 < se < 0.01
        assert abs(got - want) < STANDARD_ERRORS * se + slack, (dim, rank)


def test_what_a_subspace_explains_of_the_square_wave() -> None:
    for dim, rank, want in ((4, 2, 0.040), (8, 6, 0.033), (8, 4, 0.0), (16, 12, 0.0)):
        got, se = constructions.explained(dim, rank, 100_000, seeded(29), wave=1 / dim)
        assert abs(got - want) < STANDARD_ERRORS * se + 0.002, (dim, rank)
    wave = constructions.square_wave(torch.tensor([-0.6, -0.4, -0.1, 0.1, 0.4, 0.6, 1.1]), 0.5)
    assert wave.tolist() == [1, -1, -1, 1, 1, -1, 1]


@pytest.mark.parametrize("dim", [3, 4, 5, 8])
def test_the_biased_bank_is_the_biased_target(dim: int) -> None:
    x, _ = constructions.pairs(seeded(30), 300, dim)
    y = torch.randn(300, dim, dtype=torch.float64, generator=seeded(31))
    y = y[((x[:, 0] - x[:, 1]) * y).sum(1).abs() < dim]
    x = x[: len(y)]
    inside = ((x[:, 0] - x[:, 1]) * y).sum(1).abs() < dim
    x, y = x[inside], y[inside]
    assert len(x) > 100
    bank, target = constructions.biased_bank(x, y, dim), constructions.biased_target(x, y, dim)
    assert (bank - target).abs().max() < 1e-12
    assert (target.norm(dim=1) - 1).abs().max() < 1e-12
    for i in range(20):
        total = torch.zeros(dim, dtype=torch.float64)
        for j in range(-(dim**2), dim**2 + 1):
            scores = x[i] @ y[i] + torch.tensor([j / dim, 0.0])
            total += (-1) ** j * x[i, int(scores.argmax())]
        assert (bank[i] - total).abs().max() < 1e-12
    mean = (1 if dim % 2 == 0 else -1) * (x[:, 0] + x[:, 1]) / 2
    assert ((target - mean).square().sum(1) - 0.5).abs().max() < 1e-12


# ---- bad input


BAD: list[tuple[Callable[[], Any], str]] = [
    *(
        (lambda f=f: f(2, 1), "dim must be a whole number of at least 3, got 2")
        for f in (harmonics.multiplicity, harmonics.sign_coefficient)
    ),
    *((lambda f=f: f(1, 1), "dim must be a whole number of at least 3, got 1") for f in (harmonics.singular_floor, harmonics.plateau)),
    (lambda: harmonics.polynomials(2, 3, 0.0), "dim must be a whole number of at least 3, got 2"),
    (lambda: harmonics.quadrature(1, 10), "dim must be a whole number of at least 3, got 1"),
    (lambda: harmonics.log_omega(8.0), "dim must be a whole number of at least 3, got 8.0"),
    (lambda: harmonics.multiplicity(True, 1), "dim must be a whole number of at least 3, got True"),
    (lambda: harmonics.head_target(2, 0.5), "dim must be a whole number of at least 3, got 2"),
    (lambda: harmonics.heads_for(2, 0.1), "dim must be a whole number of at least 3, got 2"),
    (lambda: harmonics.representation(2, 0.5), "dim must be a whole number of at least 3, got 2"),
    (lambda: constructions.softmax_error(2, 1.0), "dim must be a whole number of at least 3, got 2"),
    (lambda: constructions.vote_error(1, 1), "dim must be a whole number of at least 3, got 1"),
    (lambda: constructions.averaging_error(2), "dim must be a whole number of at least 3, got 2"),
    (lambda: constructions.explained(2, 1, 10, seeded(0)), "dim must be a whole number of at least 3, got 2"),
    (lambda: features.draw_heads(2, 4, seeded(0)), "dim must be a whole number of at least 3, got 2"),
    (lambda: harmonics.multiplicity(8, -1), "degree must be a whole number of at least 0, got -1"),
    (lambda: harmonics.sign_coefficient(8, 1.5), "degree must be a whole number of at least 0, got 1.5"),
    (lambda: harmonics.representation(8, 0.5, 401), "degree must be at most 400, got 401"),
    (lambda: harmonics.singular_floor(8, 0), "heads must be a whole number of at least 1, got 0"),
    (lambda: features.draw_heads(8, 0, seeded(0)), "heads must be a whole number of at least 1, got 0"),
    (lambda: constructions.vote_error(8, 0), "heads must be a whole number of at least 1, got 0"),
    (lambda: constructions.spaced_error(0), "heads must be a whole number of at least 1, got 0"),
    (lambda: constructions.spaced_closed(0), "heads must be a whole number of at least 1, got 0"),
    (lambda: constructions.vote_error(8, 10), "a majority needs an odd number of heads, got 10"),
    (lambda: constructions.softmax_error(8, 0.0), "beta, the inverse temperature, must be positive, got 0.0"),
    (lambda: constructions.softmax_error(8, -1.0), "beta, the inverse temperature, must be positive, got -1.0"),
    (lambda: constructions.softmax_error(8, math.nan), "beta, the inverse temperature, must be positive, got nan"),
    (
        lambda: constructions.full_rank_head(torch.ones(1, 2, 3), torch.ones(1, 3), 0),
        "beta, the inverse temperature, must be positive, got 0",
    ),
    *((lambda e=e: harmonics.heads_for(8, e), f"error must lie between 0 and 0.5, got {e}") for e in (0.0, 0.5, -1.0, math.nan)),
    (lambda: harmonics.heads_for(4000, 1e-4), "error 0.0001 needs more than 2^200 heads in 4000 dimensions"),
    *(
        (
            lambda t=t: features.best_weights(*features.draw_heads(4, 3, seeded(0)), tolerance=t),
            f"tolerance must lie between 0 and 1, got {t}",
        )
        for t in (0, -1e-3, 1.0)
    ),
    *((lambda r=r: constructions.explained(8, r, 10, seeded(0)), f"rank must lie between 0 and dim 8, got {r}") for r in (0, 8, 9, -1)),
    (
        lambda: features.draw_heads(8, 4, seeded(0), "publisht"),
        "unknown draw 'publisht'; did you mean published? choices: cos-uniform, independent, published",
    ),
    (lambda: theory_experiment.Settings(only=("kernel",)), "unknown check 'kernel'; did you mean kernels? choices: biased, "),
    (lambda: theory_experiment.Settings(only=()), "only must not be empty"),
    (lambda: features_experiment.Settings(dims=(2,), heads=(1,), seeds=1), "dims must be at least 3, got 2"),
    (lambda: features_experiment.Settings(dims=(), heads=(1,), seeds=1), "dims must not be empty"),
    (lambda: features_experiment.Settings(dims=(8,), heads=(4, 0), seeds=1), "heads must be at least 1, got 0"),
    (lambda: features_experiment.Settings(dims=(8,), heads=(1,), seeds=0), "seeds must be at least 1, got 0"),
    (
        lambda: features_experiment.Settings(dims=(8,), heads=(1,), seeds=1, draws=("unit",)),
        "unknown draw 'unit'; choices: cos-uniform, published",
    ),
    (lambda: representation_experiment.Settings(dims=(2,), degree=9, angles=9), "dims must be at least 3, got 2"),
    (lambda: representation_experiment.Settings(dims=(), degree=9, angles=9), "dims must be at least 3, got none"),
    (lambda: representation_experiment.Settings(dims=(8,), degree=401, angles=9), "degree must lie between 1 and 400, got 401"),
    (lambda: representation_experiment.Settings(dims=(8,), degree=0, angles=9), "degree must lie between 1 and 400, got 0"),
    (lambda: representation_experiment.Settings(dims=(8,), degree=9, angles=1), "angles must be at least 2, got 1"),
]


@pytest.mark.parametrize(("act", "text"), BAD, ids=[f"{i}: {text}" for i, (_, text) in enumerate(BAD)])
def test_bad_input_is_one_line_that_names_the_rule_and_the_value(act: Callable[[], Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        act()
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)


# ---- everything in one store, each group of checks made once


class Made(NamedTuple):
    path: Path
    answers: dict[str, dict[str, Any]]
    texts: dict[str, str]


def command(*words: str) -> tuple[int, str, str]:
    """A command in this process: exit code, standard output, standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    return code, out.getvalue(), err.getvalue()


FEATURES = ["run", "features", "--device", "cpu", "--seeds", "2", "--set", "heads=1,2,4", "--set", "dims=8"]
REPRESENTATION = ["run", "representation", "--device", "cpu", "--set", "angles=41"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """All checks with seed 0, a few layers of random heads, and u(t)."""
    path, answers, texts = tmp_path_factory.mktemp("theory") / "store", {}, {}
    for name, words in (("features", FEATURES), ("representation", REPRESENTATION), ("theory", ["theory"])):
        code, out, err = command(*words, "--store", str(path), "--json")
        assert code == 0, err
        *lines, last = out.splitlines()
        answers[name], texts[name] = json.loads(last), "\n".join(lines)
    return Made(path, answers, texts)


@pytest.fixture
def copy(made: Made, tmp_path: Path) -> Path:
    """The store to play with."""
    return Path(shutil.copytree(made.path, tmp_path / "store"))


KEYS = {"statement", "what", "parameters", "kind", "bound", "measured", "low", "high", "allowed", "margin", "holds", "source"}


@pytest.mark.parametrize("name", theory_experiment.NAMES)
def test_every_check_holds_and_says_what_it_compared(name: str, made: Made) -> None:
    ids = made.answers["theory"]["checks"]
    (row,) = [r for r in Store(made.path).rows() if r.get("name") == name]
    assert row["status"] == "done"
    assert row["seed"] == 0
    assert row["version"] == theory_experiment.VERSION
    assert len(row["checks"]) == sum(p["group"] == name for p in ids) >= 5
    for check in row["checks"]:
        assert set(check) - {"residual"} == KEYS
        assert check["holds"] is True, check
        assert check["margin"] >= 0
        assert check["kind"] in ("equal", "least", "most")
        assert check["source"] in ("paper", "derived", "published")
        assert check["statement"]
        assert check["what"]
        assert isinstance(check["parameters"], dict)
        assert (check["low"] is None) == (check["high"] is None)
        if check["kind"] == "equal":
            assert abs(check["measured"] - check["bound"]) <= check["allowed"]
            assert check["margin"] <= 1
        else:
            assert check["allowed"] is None
            assert (check["measured"] >= check["bound"]) if check["kind"] == "least" else (check["measured"] <= check["bound"])
        if check["low"] is not None:
            assert check["low"] <= check["measured"] <= check["high"]


def test_the_groups_are_the_registered_ones() -> None:
    assert tuple(checks.CHECKS) == theory_experiment.NAMES
    assert {"theory", "features", "representation"} <= set(EXPERIMENTS)


def test_the_same_seed_gives_the_same_rows(made: Made) -> None:
    (row,) = [r for r in Store(made.path).rows() if r.get("name") == "plane"]
    assert json.loads(json.dumps(list(checks.CHECKS["plane"](0)))) == row["checks"]
    assert [r["measured"] for r in checks.CHECKS["plane"](1)] != [r["measured"] for r in row["checks"]]


def test_margins() -> None:
    def row(kind: str, bound: float, measured: float, **more: Any) -> dict[str, Any]:
        return checks._row("s", "w", {"d": 3}, kind, bound, measured, "paper", **more)

    half = row("equal", 1.0, 1.25, allowed=0.5)
    assert (half["margin"], half["holds"], half["low"], half["high"], half["allowed"]) == (0.5, True, None, None, 0.5)
    assert row("equal", 1.0, 1.0, allowed=1e-12)["margin"] == 1
    edge = row("equal", 1.0, 0.5, allowed=0.5)
    assert (edge["margin"], edge["holds"]) == (0, True)
    assert row("equal", 1.0, 2.0, allowed=0.5)["margin"] == -1
    assert row("equal", 1.0, 2.0, allowed=0.5)["holds"] is False
    sampled = row("equal", 1.0, 1.2, se=0.1)
    assert (sampled["allowed"], sampled["margin"]) == (pytest.approx(0.4), pytest.approx(0.5))
    assert (sampled["low"], sampled["high"]) == (pytest.approx(1.004), pytest.approx(1.396))
    for kind, good in (("least", 2.0), ("most", 1.0)):
        bound = 3.0 - good
        fine, bad, edge = row(kind, bound, good), row(kind, good, bound), row(kind, 2.0, 2.0)
        assert (fine["margin"], fine["holds"], fine["allowed"]) == (0.5, True, None)
        assert (bad["margin"], bad["holds"]) == (-0.5, False)
        assert (edge["margin"], edge["holds"]) == (0, True)
    assert row("most", 0.0, 0.0)["holds"] is True
    assert row("most", -0.4, -0.5)["margin"] == pytest.approx(0.2), "a negative bound"
    for kind in ("equal", "least", "most"):
        assert row(kind, 1.0, math.nan, allowed=0.1)["holds"] is False, "what cannot be computed does not hold"
    assert row("least", 1.0, 2.0, residual=3e-7)["residual"] == 3e-7


def off(original: Callable[..., Any], factor: float = 1.0, more: float = 0.0) -> Callable[..., Any]:
    return lambda *args, **kwargs: original(*args, **kwargs) * factor + more


FAULTS: list[tuple[str, Any, str, Any]] = [
    ("degrees", harmonics, "sign_coefficient", off(harmonics.sign_coefficient, 1.01)),
    ("kernels", harmonics, "head_target", off(harmonics.head_target, 1.001)),
    ("kernels", harmonics, "head_head", off(harmonics.head_head, more=0.01)),
    ("floor", features, "optimise_heads", lambda *args, **kwargs: 0.1),
    ("floor", harmonics, "singular_floor", off(harmonics.singular_floor, 4.0)),
    ("growth", harmonics, "heads_for", lambda dim, error: dim**2),
    ("subspace", constructions, "explained", lambda *args, **kwargs: (0.0, 1e-4)),
    ("biased", constructions, "biased_target", off(constructions.biased_target, -1.0)),
    ("majority", constructions, "vote", lambda x, y, directions, vote=constructions.vote: vote(x, y, directions[:-2])),
    ("majority", constructions, "vote_error", off(constructions.vote_error, 1.05)),
    ("lengths", constructions, "full_rank_head", lambda x, y, beta=1.0: x.mean(1)),
    ("full-rank-head", constructions, "full_rank_head", lambda x, y, beta=1.0: x[:, 0]),
    ("full-rank-head", constructions, "softmax_error", off(constructions.softmax_error, 1.05)),
    ("full-rank-head", constructions, "perfect_encoder", lambda d, depth, make=constructions.perfect_encoder: make(d, depth, 1.0)),
    ("plane", constructions, "spaced_closed", off(constructions.spaced_closed, 1.01)),
    ("continuum", harmonics, "representation", off(harmonics.representation, 1.001)),
    ("random-features", features, "right", off(features.right, more=0.002)),
    ("random-features", features, "draw_heads", lambda d, h, g, draw="published", make=features.draw_heads: make(d, h, g, "published")),
]


@pytest.mark.parametrize(("group", "module", "name", "wrong"), FAULTS, ids=[f"{f[0]}: {f[2]}" for f in FAULTS])
def test_a_planted_fault_does_not_hold(group: str, module: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, name, wrong)
    assert any(not row["holds"] for row in checks.CHECKS[group](0))


# ---- the command


def test_theory_prints_every_statement_and_one_json_object(made: Made) -> None:
    answer, text = made.answers["theory"], made.texts["theory"]
    assert answer["failed"] == 0
    assert answer["runs"] == answer["made"] == len(theory_experiment.NAMES)
    assert len(answer["checks"]) > 100
    assert "points" not in answer
    for point in answer["checks"]:
        assert KEYS | {"group"} <= set(point)
        assert isinstance(point["parameters"], str)
    for statement in ("Fact 1", "Theorem 2, kernels", "Theorem 3", "Theorem 5", "Conjecture 6", "Two dimensions"):
        assert f"{statement}: " in text
    assert "FAILS" not in text
    assert Path(answer["figure"]).read_bytes().startswith(b"\x89PNG")
    assert f"report: {answer['report']}" in text


def test_some_checks_alone(tmp_path: Path) -> None:
    words = ["theory", "--only", "plane", "--json", "--store", str(tmp_path / "s")]
    code, out, err = command(*words)
    answer = json.loads(out.splitlines()[-1])
    assert code == 0, err
    assert (answer["failed"], answer["runs"], answer["made"], len(answer["checks"])) == (0, 1, 1, 8)
    assert {p["group"] for p in answer["checks"]} == {"plane"}
    assert "Two dimensions: 8 of 8 hold, least margin " in out
    assert not (tmp_path / "s/report.html").exists()
    code, out, err = command(*words)
    again = json.loads(out.splitlines()[-1])
    assert (code, again["made"]) == (0, 0)
    assert again["checks"] == answer["checks"]
    assert "1 already in" in err
    code, out, _ = command(*words, "--seed", "5")
    assert (code, json.loads(out.splitlines()[-1])["made"]) == (0, 1), "another seed is another row"


def test_a_check_that_fails_fails_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constructions, "spaced_closed", off(constructions.spaced_closed, 1.01))
    code, out, err = command("theory", "--only", "plane", "--json", "--store", str(tmp_path / "s"))
    answer = json.loads(out.splitlines()[-1])
    assert code == 1
    assert 0 < answer["failed"] <= 8
    assert f"headwise: {answer['failed']} of 8 checks do not hold" in err
    fails = [line for line in out.splitlines() if line.startswith("  FAILS: ")]
    assert len(fails) == answer["failed"]
    assert any("equally spaced heads: quadratic form of the closed kernels" in line and "H=1: 0.5 against 0.505" in line for line in fails)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["theory", "--only", "plan"], "unknown check 'plan'; did you mean plane? choices: biased, continuum, degrees, floor, "),
        (["theory", "--only", "plane", "kernel"], "unknown check 'kernel'; did you mean kernels? choices: "),
        (["theory", "--only"], "argument --only: expected at least one argument"),
        (["theory", "--seed", "x"], "argument --seed: "),
        (["run", "theory", "--seeds", "3"], "theory has no seeds"),
        (["run", "representation", "--seeds", "3"], "representation has no seeds"),
        (["run", "theory", "--set", "only="], "only must not be empty"),
        (["run", "features", "--set", "dims=2"], "dims must be at least 3, got 2"),
        (["run", "features", "--set", "heads=0"], "heads must be at least 1, got 0"),
        (["run", "features", "--set", "draws=unit"], "unknown draw 'unit'; choices: cos-uniform, published"),
        (["run", "representation", "--set", "degree=500"], "degree must lie between 1 and 400, got 500"),
    ],
)
def test_mistakes_are_one_line(words: list[str], text: str, tmp_path: Path) -> None:
    code, out, err = command(*words, "--store", str(tmp_path / "s"))
    assert (code, out) == (2, "")
    assert err.startswith(f"headwise: error: {text}")
    assert err.count("\n") == 1
    assert not (tmp_path / "s").exists()


def test_everything_is_made_once(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (theory_experiment, features_experiment, representation_experiment):
        monkeypatch.setattr(module, "make", lambda *args: pytest.fail("made again"))
    before = {p: p.read_bytes() for p in copy.rglob("rows.jsonl")}
    for words in (FEATURES, REPRESENTATION, ["theory"]):
        code, out, err = command(*words, "--store", str(copy), "--json")
        assert code == 0, err
        assert json.loads(out.splitlines()[-1])["made"] == 0
    assert {p: p.read_bytes() for p in copy.rglob("rows.jsonl")} == before


def test_only_what_is_missing_is_made(copy: Path, made: Made) -> None:
    gone = Store(copy).experiments()["features"]["ids"][7]
    before = Store(copy).row(gone)
    shutil.rmtree(copy / "runs" / gone)
    code, out, _ = command(*FEATURES, "--store", str(copy), "--json")
    answer = json.loads(out.splitlines()[-1])
    assert (code, answer["made"]) == (0, 1)
    after = Store(copy).row(gone)
    assert before is not None
    assert after is not None
    assert after["error"] == before["error"]
    assert answer["points"] == made.answers["features"]["points"]


def test_random_features_from_the_command(made: Made) -> None:
    answer = made.answers["features"]
    assert answer["made"] == answer["runs"] == 2 * 3 * 100, "a hundred draws of small layers"
    assert [(p["kind"], p["dim"], p["heads"], p["n"]) for p in answer["points"]] == [
        (kind, 8, heads, 100) for kind in ("cos-uniform", "published") for heads in (1, 2, 4)
    ]
    for point, known, spread in zip(answer["points"][:3], (0.7431, 0.6542, 0.5756), (0.0510, 0.0462, 0.0462), strict=True):
        assert abs(point["held_out"] - known) < STANDARD_ERRORS * spread * math.sqrt(1 / 20 + 1 / 100)
        assert point["floor"] < point["low"] < point["held_out"] < point["high"]
    text = made.texts["features"]
    assert "within 3 % of the axis of the published figure" in text
    assert features_experiment.NOTE in text
    assert Path(answer["figure"]).read_bytes().startswith(b"\x89PNG")


def test_the_representation_from_the_command(made: Made) -> None:
    answer = made.answers["representation"]
    assert answer["made"] == answer["runs"] == 6
    for point in answer["points"]:
        read, loud, corrected = PEAKS[point["dim"]]
        published = point["form"] == "published"
        assert point["peak"] == pytest.approx(loud if published else corrected, rel=1e-5)
        assert point["known"] == (loud if published else corrected)
        assert point["published"] == (read if published else None)
        assert len(point["angle"]) == len(point["size"]) == 41
        assert point["size"] == point["size"][::-1]
        assert point["size"][0] == point["size"][20] == point["size"][40] == max(point["size"])
        assert (point["angle"][0], point["angle"][20], point["angle"][40]) == (-math.pi, 0, math.pi)
    assert "d=8: published form 6.029e+16, 0.0% from the figure; corrected 7.781e+12" in made.texts["representation"]
    assert Path(answer["figure"]).read_bytes().startswith(b"\x89PNG")


def test_the_page_has_a_section_for_each(made: Made, tmp_path: Path) -> None:
    page = write_report(Store(made.path), tmp_path / "page.html").read_text()
    assert page == (made.path / "report.html").read_text(), "the page is a function of the store"
    sections = {part.partition('"')[0]: part for part in page.split('<section id="')[1:]}
    assert set(sections) == {"features", "representation", "theory"}
    for name, section in sections.items():
        module = EXPERIMENTS[name]
        assert module.QUESTION in section
        assert f'id="plot-{name}"' in section
        assert "Not shown" not in page
        asked = len(Store(made.path).experiments()[name]["ids"])
        assert f"{asked} of {asked} r" in section, "rows or runs"
        words = {"features": FEATURES, "representation": REPRESENTATION, "theory": ["theory"]}[name]
        assert f"<pre>headwise {' '.join(words)} --store " in section
        table = section.partition('data-name="points"')[2].partition("</table>")[0]
        points = made.answers[name]["checks" if name == "theory" else "points"]
        assert table.count("<tr>") == len(points) + 1
        for _, heading in module.COLUMNS:
            assert f">{heading}</th>" in table
    assert "Theorem 5: 14 of 14 hold" in sections["theory"]
    assert "7.781e+12" in sections["representation"]
    assert "The published figure is too low" in sections["features"]
    assert ">angle</th>" not in page, "long columns stay in the store"


def test_the_page_says_nothing_of_training_where_nothing_is_trained(made: Made) -> None:
    page = (made.path / "report.html").read_text().partition('<section id="')[2]
    assert "Learning curves" not in page
    assert "the smallest training loss" not in page
    assert " of training in all" not in page


def test_the_store_lists_and_draws_what_was_computed(copy: Path, tmp_path: Path) -> None:
    code, out, err = command("list", "--store", str(copy), "--json")
    assert code == 0, err
    listed = json.loads(out.splitlines()[-1])
    assert listed["experiments"] == ["features", "representation", "theory"]
    assert len(listed["rows"]) == 618
    assert listed["unfinished"] == []
    store = Store(copy)
    for name, asked in store.experiments().items():
        rows = tmp_path / f"{name}.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in store.rows(asked["ids"])))
        code, _, err = command("draw", name, str(rows), "--output", str(tmp_path / f"{name}.svg"))
        assert code == 0, err
        assert (tmp_path / f"{name}.svg").read_text().startswith("<?xml")
    code, out, _ = command("list", "--json")
    assert {"features", "representation", "theory"} <= set(json.loads(out.splitlines()[-1])["experiments"])


def test_computed_rows_can_be_asked_for(made: Made) -> None:
    pytest.importorskip("duckdb")
    store = Store(made.path)
    assert store.query("select count(*) from rows where draw = 'published' and heads = 4").fetchall() == [(100,)]
    assert store.query("select count(*) from rows where name = 'plane'").fetchall() == [(1,)]


# ---- compute


class Value(NamedTuple):
    id: str

    def spec(self) -> dict[str, Any]:
        return {"experiment": "own", "id": self.id}


def test_compute_makes_what_is_missing_in_order(tmp_path: Path) -> None:
    store, calls = Store(tmp_path / "s"), []

    def make(value: Value, device: str) -> dict[str, Any]:
        calls.append((value.id, device))
        return {"id": value.id, "status": "done", "seconds": 0.0}

    values = [Value(name) for name in ("b", "a", "b")]
    rows = sweep.compute(values, make, store, device="cpu")
    assert [row["id"] for row in rows] == ["b", "a", "b"]
    assert calls == [("b", "cpu"), ("a", "cpu")], "each once"
    assert {"commit", "device"} <= set(rows[0]), "where and by what it was made"
    assert sweep.compute([*values, Value("c")], make, store, device="cpu")[-1]["id"] == "c"
    assert calls[2:] == [("c", "cpu")]
    assert json.loads((tmp_path / "s/runs/a/run.json").read_text()) == {"experiment": "own", "id": "a"}


def test_compute_keeps_what_was_made_before_a_failure(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")

    def make(value: Value, device: str) -> dict[str, Any]:
        if value.id == "b":
            raise RuntimeError("no memory")
        return {"id": value.id, "status": "done", "seconds": 0.0}

    with pytest.raises(RuntimeError, match="no memory"):
        sweep.compute([Value("a"), Value("b")], make, store, device="cpu")
    assert store.row("a") is not None
    assert [value.id for value in store.missing([Value("a"), Value("b")])] == ["b"]


def other_process(store: Store, monkeypatch: pytest.MonkeyPatch, leaves_a_row: bool) -> contextlib.ExitStack:
    """Somebody else holds the value `a`, and is gone when we wait for the first time."""
    held = contextlib.ExitStack()
    held.enter_context(Store(store.path).claim([Value("a")]))
    waits = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 1 and leaves_a_row:
            store.add({"id": "a", "status": "done", "seconds": 0.0, "by": "another"})
        held.close()
        assert len(waits) < 5, "waits for ever"

    monkeypatch.setattr(sweep, "time", SimpleNamespace(sleep=sleep))
    return held


def test_compute_waits_for_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "s")
    with other_process(store, monkeypatch, leaves_a_row=True):
        rows = sweep.compute([Value("a")], lambda value, device: pytest.fail("made twice"), store, device="cpu")
    assert rows[0]["by"] == "another"


# ---- summaries, headlines, figures on rows made by hand


def layers(kind: str, heads: int, errors: list[float], dim: int = 8) -> list[dict[str, Any]]:
    return [{"draw": kind, "dim": dim, "heads": heads, "error": e, "floor": 0.1, "seed": i} for i, e in enumerate(errors)]


def test_features_summary_headline_and_figure() -> None:
    rows = [*layers("published", 512, [0.174, 0.176]), *layers("published", 1, [0.9, 0.9001]), *layers("published", 3, [0.5, 0.6])]
    rows += [*layers("cos-uniform", 512, [0.185, 0.1856]), *layers("cos-uniform", 1, [0.6]), *layers("cos-uniform", 2, [0.66, 0.65])]
    points = features_experiment.summary(rows)
    found = {(p["kind"], p["heads"]): p for p in points}
    assert len(points) == len(found) == 6
    point = found["published", 512]
    assert (point["published"], point["recomputed"], point["draw"]) == (0.175, None, "shortened, as published")
    assert (point["held_out"], point["n"], point["floor"]) == (pytest.approx(0.175), 2, 0.1)
    assert point["low"] < 0.174 < 0.176 < point["high"]
    assert point["spread"] == pytest.approx(math.sqrt(2) * 1e-3)
    assert (found["cos-uniform", 512]["recomputed"], found["cos-uniform", 512]["published"]) == (0.1853, None)
    assert (found["cos-uniform", 1]["low"], found["cos-uniform", 1]["spread"]) == (None, None)
    assert found["published", 3]["published"] is None, "the figure has no such point"
    published, farther, unit = features_experiment.headline(points)
    assert published.startswith("keys shortened, as published: 1 of 2 points within 3 % of the axis of the published figure, 0 more")
    assert farther == "  farther: d=8, 1 heads: 0.9001 against 0.6855 (n=2)"
    assert unit.startswith("keys unit: 2 of 2 points within 3 % of the axis of the values known for unit keys, 0 more")
    drawn = features_experiment.figure(points)
    assert [p["title"] for p in drawn["panels"]] == ["keys as in the published code", "keys of length 1"]
    assert drawn["y_scale"] == "linear"
    solid, dashed = drawn["panels"][0]["lines"]
    assert (solid["label"], solid["x"]) == ("d=8", [1, 3, 512])
    assert (dashed["label"], dashed["x"], dashed["y"]) == ("published, d=8", [1, 512], [0.6855, 0.175])
    assert features_experiment.headline([]) == []


def test_representation_summary_headline_and_figure() -> None:
    curve = {"angle": [-math.pi, 0.0, math.pi], "size": [9.0, 0.2, 9.0]}
    rows = [
        {"dim": 4, "form": "published", "degree": 49, "peak": 1.485e8, **curve},
        {"dim": 4, "form": "corrected", "degree": 49, "peak": 2.65e6, **curve},
        {"dim": 4, "form": "corrected", "degree": 9, "peak": 1.0, **curve},
        {"dim": 5, "form": "published", "degree": 49, "peak": 1.0, **curve},
    ]
    points = representation_experiment.summary(rows)
    assert [(p["published"], p["known"]) for p in points] == [(1.35e8, 1.34919e8), (None, 2.64954e6), (None, None), (None, None)]
    assert representation_experiment.headline(points[:2]) == ["d=4: published form 1.485e+08, 10.0% from the figure; corrected 2.65e+06"]
    assert representation_experiment.headline(points[:1]) == ["d=4: published form 1.485e+08, 10.0% from the figure; corrected nan"]
    drawn = representation_experiment.figure(points)
    assert [len(panel["lines"]) for panel in drawn["panels"]] == [2, 2]
    line = drawn["panels"][0]["lines"][0]
    assert (line["label"], line["style"], line["y"]) == ("d=4", "line", [9.0, 1.0, 9.0])
    assert drawn["x_scale"] == "linear"


def test_theory_summary_headline_and_figure() -> None:
    good = checks._row("Fact 9", "this", {"d": 8, "H": 1_000_001, "x": 0.123456, "N": [3, 6, 12]}, "least", 1.0, 2.0, "paper")
    bad = checks._row("Fact 9", "that", {"d": 8}, "equal", 1.0, 2.0, "paper", allowed=0.5)
    points = theory_experiment.summary([{"name": "one", "checks": [good]}, {"name": "two", "checks": [bad]}])
    assert [p["group"] for p in points] == ["one", "two"]
    assert points[0]["parameters"] == "d=8, H=1,000,001, x=0.1235, N=3..12"
    assert theory_experiment.headline(points) == [
        "Fact 9: 1 of 2 hold, least margin -1 (that)",
        "  FAILS: that at d=8: 2 against 1",
    ]
    assert theory_experiment.headline(points[:1]) == ["Fact 9: 1 of 1 hold, least margin 0.5 (this)"]
    drawn = theory_experiment.figure(points)
    floor, votes = ({line["label"]: line for line in panel["lines"]} for panel in drawn["panels"])
    assert set(floor) == set(votes) == {"d=8", "d=16", "d=64"}
    at = floor["d=8"]["x"].index(64)
    assert floor["d=8"]["y"][at] == harmonics.singular_floor(8, 64)
    assert votes["d=8"]["y"][at] == constructions.vote_error(8, 65)
    assert votes["d=64"]["y"][0] == constructions.vote_error(64, 1)


def test_rows_are_told_apart_by_everything_that_shapes_them() -> None:
    settings = features_experiment.Settings(dims=(8, 16), heads=(1, 64), seeds=2)
    runs = features_experiment.runs(settings)
    assert len(runs) == 2 * 2 * (100 + 64)
    curves = representation_experiment.runs(representation_experiment.PRESETS["quick"])
    groups = [theory_experiment.Check(name, seed) for name in theory_experiment.NAMES for seed in (0, 1)]
    groups.append(theory_experiment.Check("plane", 0, theory_experiment.VERSION + 1))
    ids = [value.id for value in (*runs, *curves, *groups)]
    assert len(set(ids)) == len(ids)
    assert runs[0].spec() == {"experiment": "features", "dim": 8, "heads": 1, "draw": "cos-uniform", "seed": 0}
    assert [c.name for c in theory_experiment.runs(theory_experiment.Settings(only=("plane", "kernels", "plane")))] == ["kernels", "plane"]


# ---- what the figures can do for them


def test_figures_with_linear_axes_plain_lines_and_no_reference(tmp_path: Path) -> None:
    none = [None] * 3
    line = {"label": "a", "colour": 0, "style": "line", "x": [-1.0, 0.0, 1.0], "y": [3.0, 1.0, 3.0], "low": none, "high": none}
    description = {
        "title": "t", "x_label": "x", "y_label": "y", "x_scale": "linear", "y_scale": "linear", "columns": 2,
        "panels": [{"title": "p", "lines": [line]}],
    }  # fmt: skip
    drawn = figures.plotly_figure(description)
    assert drawn["data"][0]["mode"] == "lines"
    assert "error_y" not in drawn["data"][0]
    assert drawn["layout"]["shapes"] == []
    assert drawn["layout"]["xaxis"]["type"] == drawn["layout"]["yaxis"]["type"] == "linear"
    assert "tickvals" not in drawn["layout"]["xaxis"]
    assert "dtick" not in drawn["layout"]["yaxis"]
    above = {**line, "style": "solid", "x": [1, 2, 4], "low": [2.9, None, 2.8], "high": [3.1, None, 3.2]}
    plain = {k: v for k, v in description.items() if k not in ("x_scale", "y_scale")}
    plain |= {"panels": [{"title": "p", "lines": [above]}], "reference": {"label": "r", "y": 0.5}}
    logarithmic = figures.plotly_figure(plain)
    assert logarithmic["layout"]["xaxis"]["type"] == logarithmic["layout"]["yaxis"]["type"] == "log"
    assert logarithmic["layout"]["xaxis"]["tickvals"] == [1, 2, 4]
    assert logarithmic["layout"]["yaxis"]["dtick"] == 1
    assert [shape["y0"] for shape in logarithmic["layout"]["shapes"]] == [0.5]
    assert logarithmic["data"][0]["mode"] == "lines+markers"
    for i, what in enumerate((description, plain, {**plain, "x_scale": "linear"}, {**plain, "y_scale": "linear"})):
        figures.save(what, tmp_path / f"{i}.svg")
    sizes = [(tmp_path / f"{i}.svg").read_text() for i in range(4)]
    assert len(set(sizes)) == 4, "each option shows"


# ---- faults that were found, and are gone


def test_compute_makes_what_another_process_gave_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "s")
    with other_process(store, monkeypatch, leaves_a_row=False):
        rows = sweep.compute([Value("a")], lambda value, device: {"id": value.id, "status": "done", "seconds": 0.0}, store, device="cpu")
    assert [row["id"] for row in rows] == ["a"]


@pytest.mark.parametrize(
    "words",
    [
        ["run", "features", "--set", "draws="],
        ["run", "features", "--seeds", "1", "--set", "heads=64,64"],
        ["theory", "--only", "plane", "--seed", "9" * 30],
    ],
)
def test_more_mistakes_are_one_line(words: list[str], tmp_path: Path) -> None:
    small = ["--set", "dims=8"] if "features" in words else []
    code, out, err = command(*words, *small, "--store", str(tmp_path / "s"))
    assert (code, out) == (2, "")
    assert err.startswith("headwise: error: ")
    assert err.count("\n") == 1


def test_weights_beyond_floating_point_are_refused(tmp_path: Path) -> None:
    changes = ["--set", "dims=2000", "--set", "degree=399", "--set", "angles=3"]
    code, _, err = command("run", "representation", "--device", "cpu", *changes, "--store", str(tmp_path / "s"))
    assert code in (1, 2)
    assert err.splitlines()[-1].startswith("headwise: error: ")


def test_softmax_error_of_a_hard_head() -> None:
    assert constructions.softmax_error(8, math.inf) == 0


def test_two_heads_from_tensors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(harmonics.head_head(torch.tensor(0.5), torch.tensor(0.5))) == pytest.approx(0.5 + 2 / 36, abs=1e-6)


def test_a_head_of_a_layer_agrees_with_itself() -> None:
    q, k = features.draw_heads(8, 20, seeded(40))
    assert (features.agree(q, k, q, k).diagonal() - 1).abs().max() < 1e-7


def test_checks_hold_with_another_seed() -> None:
    assert all(row["holds"] for row in checks.CHECKS["full-rank-head"](3))


def test_a_check_that_fails_fails_the_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constructions, "spaced_closed", off(constructions.spaced_closed, 1.01))
    code, _, _ = command("run", "theory", "--set", "only=plane", "--no-report", "--store", str(tmp_path / "s"))
    assert code == 1
