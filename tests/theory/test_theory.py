"""The rank paper's numbers: closed forms against high precision and against drawn heads,
constructions, and what is refused."""

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath as mp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tolerance import STANDARD_ERRORS, examples, seeded

from headwise.errors import UsageError
from headwise.experiments.rank_paper import features as features_experiment
from headwise.experiments.rank_paper import representation as representation_experiment
from headwise.experiments.rank_paper import theory as theory_experiment
from headwise.model.transformer import Encoder
from headwise.tasks import Farthest
from headwise.theory import constructions, features, harmonics

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
SOFTMAX = {
    8: {10: 0.05508, 100: 0.005564, 1000: 0.0005565},
    64: {10: 0.1552, 100: 0.01721, 1000: 0.001723},
}
VOTES = {  # 1, 11, 101, 1001, 10001 heads
    8: (0.8062, 0.5522, 0.2410, 0.0802, 0.0255),
    16: (0.8682, 0.6711, 0.3410, 0.1189, 0.0380),
    64: (0.9359, 0.8301, 0.5660, 0.2380, 0.0786),
}
PEAKS = {
    4: (1.35e8, 1.34919e8, 2.64954e6),
    6: (6.47e12, 6.46526e12, 8.33028e9),
    8: (6.03e16, 6.02866e16, 7.78061e12),
}


# ---- an independent reference in high precision


def exact_omega(dim: int) -> Any:
    return mp.gamma(mp.mpf(dim) / 2) / (mp.sqrt(mp.pi) * mp.gamma(mp.mpf(dim - 1) / 2))


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


def expected(dim: int, f: Callable[[Any], Any]) -> Any:
    """E f(|t|) under u_d, with t the sine of an angle."""
    return (
        2
        * exact_omega(dim)
        * mp.quad(lambda a: mp.cos(a) ** (dim - 2) * f(mp.sin(a)), mp.linspace(0, mp.pi / 2, 5))
    )


def agreement(q: torch.Tensor, k: torch.Tensor) -> np.ndarray:
    """The probability that two heads of a layer agree, in numpy, each head with itself for
    certain."""
    a, b = q.numpy(), k.numpy()
    return 0.5 + 2 / np.pi**2 * np.arcsin(np.clip(a @ a.T, -1, 1)) * np.arcsin(
        np.clip(b @ b.T, -1, 1)
    )


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


# ---- random heads


def hard_choices(
    q: torch.Tensor, k: torch.Tensor, samples: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of two orthonormal points each head picks, and which is nearer."""
    g = seeded(seed)
    x = torch.linalg.qr(torch.randn(samples, q.shape[1], 2, dtype=torch.float64, generator=g))[0]
    x = (
        x * torch.randn(samples, 1, 2, dtype=torch.float64, generator=g).sign()
    )  # the decomposition fixes them
    y = torch.randn(samples, q.shape[1], dtype=torch.float64, generator=g)
    first, second = x[..., 0], x[..., 1]
    picks = (first @ k.T) * (y @ q.T) > (second @ k.T) * (y @ q.T)
    return picks, (first * y).sum(1) > (second * y).sum(1)


@pytest.mark.parametrize("dim", [3, 8, 32])
def test_right_and_agree_against_hard_heads(dim: int) -> None:
    q, k = features.draw_heads(dim, 5, seeded(1))
    q[1], k[1] = q[0], k[0] + 0.2 * k[1]
    k[1] /= k[1].norm()
    picks, truth = hard_choices(q, k, 100_000, 2)
    se = 0.5 / math.sqrt(len(picks))
    measured = (picks == truth[:, None]).double().mean(0)
    assert (measured - features.right(q, k, 199)).abs().max() < STANDARD_ERRORS * se
    both = (picks[:, :, None] == picks[:, None, :]).double().mean(0)
    assert (both - features.agree(q, k, q, k)).abs().max() < STANDARD_ERRORS * se


def test_right_and_agree_in_numpy_and_torch() -> None:
    q, k = features.draw_heads(8, 6, seeded(3))
    cosines = (q * k).sum(1).numpy()
    assert np.abs(features.right(q, k).numpy() - harmonics.head_target(8, cosines)).max() < 1e-13
    other = features.draw_heads(8, 4, seeded(4))
    want = harmonics.head_head((q @ other[0].T).numpy(), (k @ other[1].T).numpy())
    assert np.abs(features.agree(q, k, *other).numpy() - want).max() < 1e-13
    assert np.abs(features.agree(q, k, q, k).numpy() - agreement(q, k)).max() < 1e-5


def test_right_and_agree_have_gradients() -> None:
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
def test_best_weights_by_iteration_reach_their_tolerance(
    memory: int, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the matrix made again for every product and with the matrix kept, in several blocks."""
    monkeypatch.setattr(features, "BLOCK", 128)
    q, k = features.draw_heads(8, 300, seeded(8))
    direct, solved = (
        features.best_weights(q, k),
        features.best_weights(q, k, tolerance=tolerance, memory=memory),
    )
    assert direct.iterations == 0
    assert solved.iterations > 0
    assert solved.residual <= tolerance
    a, matrix, b = solved.weights.numpy(), agreement(q, k), features.right(q, k).numpy()
    diagonal = 2e-6  # how far from 1 a head's agreement with itself may be
    residual = np.linalg.norm(matrix @ a - b) / np.linalg.norm(b)
    assert residual == pytest.approx(
        solved.residual, rel=0.01, abs=diagonal * np.linalg.norm(a) / np.linalg.norm(b)
    )
    assert solved.error == pytest.approx(1 - 2 * b @ a + a @ matrix @ a, abs=diagonal * (a @ a)), (
        "the error of these very weights"
    )
    assert solved.error == pytest.approx(direct.error, abs=max(10 * tolerance**2, 1e-9) * 100)


def test_best_weights_stop_at_their_limit() -> None:
    q, k = features.draw_heads(16, 200, seeded(9))
    solved = features.best_weights(q, k, limit=3, memory=1000)
    assert solved.iterations == 3
    assert solved.residual > 1e-6
    assert solved.error > features.best_weights(q, k).error


@pytest.mark.parametrize("noise", [0.0, 1e-13, 1e-9])
@pytest.mark.parametrize("memory", [4 << 30, 1000])
def test_best_weights_of_nearly_equal_heads(noise: float, memory: int) -> None:
    q, k = features.draw_heads(8, 40, seeded(10))
    once = features.best_weights(q, k)
    again = [
        t + noise * torch.randn(t.shape, dtype=torch.float64, generator=seeded(11)) for t in (q, k)
    ]
    q2, k2 = (
        torch.cat((t, a / a.norm(dim=1, keepdim=True))) for t, a in zip((q, k), again, strict=True)
    )
    twice = features.best_weights(q2, k2, memory=memory)
    assert math.isfinite(twice.error)
    assert twice.residual < 1e-5
    assert twice.error == pytest.approx(once.error, abs=1e-4), (
        "a copy of a layer knows no more than the layer"
    )


def distance(sample: np.ndarray, law: Callable[[np.ndarray], np.ndarray]) -> float:
    """Kolmogorov and Smirnov's, times the root of the sample's size: below 1.95 in 999 of 1000
    samples of that law."""
    x = np.sort(sample)
    below = law(x)
    steps = np.arange(len(x) + 1) / len(x)
    return float(max(np.max(steps[1:] - below), np.max(below - steps[:-1]))) * math.sqrt(len(x))


@pytest.mark.parametrize("dim", [3, 8, 64])
def test_draw_heads_has_its_laws(dim: int) -> None:
    count = 20_000
    for draw in features.DRAWS:
        q, k = features.draw_heads(dim, count, seeded(12), draw)
        assert q.shape == k.shape == (count, dim)
        assert q.dtype == k.dtype == torch.float64
        assert (q.norm(dim=1) - 1).abs().max() < 1e-12
        cosine, length = (q * k).sum(1).numpy(), k.norm(dim=1)
        assert q.mean(0).abs().max() < 4.5 / math.sqrt(count * dim), "no direction is special"
        if draw == "independent":
            assert abs(np.mean(cosine**2) - 1 / dim) < STANDARD_ERRORS * np.std(
                cosine**2
            ) / math.sqrt(count)
            if dim == 3:
                assert distance(cosine, lambda t: (t + 1) / 2) < 1.95
        else:
            assert distance(cosine, lambda t: (t + 1) / 2) < 1.95
        if draw == "published":
            lost = (1 - length.square()).numpy()
            assert length.max() < 1
            assert abs(np.mean(lost) - 2 / 3 / dim) < STANDARD_ERRORS * np.std(lost) / math.sqrt(
                count
            )
        else:
            assert (length - 1).abs().max() < 1e-12
    first, second = (features.draw_heads(dim, 4, seeded(13))[0] for _ in range(2))
    assert torch.equal(first, second)


def test_optimise_heads_improves_and_respects_the_floor() -> None:
    for dim, heads in ((3, 3), (8, 8)):
        start, end = (features.optimise_heads(dim, heads, seeded(14), steps) for steps in (0, 60))
        drawn = features.best_weights(*features.draw_heads(dim, heads, seeded(14)))
        assert start == pytest.approx(drawn.error, abs=1e-6)
        assert end < start - 0.01
        assert end >= harmonics.singular_floor(dim, heads)


@pytest.mark.parametrize("draw", ["cos-uniform", "independent"])
def test_measured_error_is_that_of_the_closed_form(draw: str) -> None:
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


def test_measured_error_knows_no_special_direction() -> None:
    for sign in (-1, 1):
        q = torch.tensor([[0.9239, 0.3729, 0.0862]], dtype=torch.float64)
        k = torch.tensor([[0.1398, -0.7963, -0.5885]], dtype=torch.float64) * sign
        q, k = q / q.norm(), k / k.norm()
        want = 2 - 2 * features.right(q, k, 199).item()  # a single head of weight 1
        got, se = features.measured_error(
            q, k, torch.ones(1, dtype=torch.float64), 100_000, seeded(18)
        )
        assert abs(got - want) < STANDARD_ERRORS * se


def test_features_experiment_tables() -> None:
    for dim, heads, unit, spread, shortened in (
        (8, 128, 0.2530, 0.0059, 0.2265),
        (16, 256, 0.2626, 0.0034, None),
    ):
        errors = [
            features.best_weights(*features.draw_heads(dim, heads, seeded(s))).error
            for s in range(5)
        ]
        assert abs(np.mean(errors) - unit) < STANDARD_ERRORS * spread * math.sqrt(2 / 5)
        if shortened:
            errors = [
                features.best_weights(
                    *features.draw_heads(dim, heads, seeded(s), "published")
                ).error
                for s in range(5)
            ]
            assert (
                abs(np.mean(errors) - shortened)
                < STANDARD_ERRORS * 0.0059 * math.sqrt(2 / 5) + 0.0005
            )
    errors = [
        features.best_weights(*features.draw_heads(8, 256, seeded(s), "independent")).error
        for s in range(5)
    ]
    assert abs(np.mean(errors) - 0.2466) < STANDARD_ERRORS * 0.0024 * math.sqrt(2 / 5)


# ---- constructions


def sphere(*size: int, seed: int) -> torch.Tensor:
    x = torch.randn(*size, dtype=torch.float64, generator=seeded(seed))
    return x / x.norm(dim=-1, keepdim=True)


def nearest_by_loop(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.stack(
        [
            points[max(range(len(points)), key=lambda i: float(points[i] @ query))]
            for points, query in zip(x, y, strict=True)
        ]
    )


@pytest.mark.parametrize(("dim", "points"), [(3, 2), (5, 7), (64, 100)])
def test_full_rank_head_is_exact(dim: int, points: int) -> None:
    x, y = sphere(50, points, dim, seed=20), sphere(50, dim, seed=21)
    assert torch.equal(constructions.full_rank_head(x, y), nearest_by_loop(x, y))
    assert torch.equal(constructions.full_rank_head(x, -y), nearest_by_loop(x, -y))
    weights = torch.softmax(7.5 * (x @ y[:, :, None]).squeeze(-1), 1)
    assert (
        constructions.full_rank_head(x, y, 7.5) - (weights[:, :, None] * x).sum(1)
    ).abs().max() < 1e-12
    assert (constructions.full_rank_head(x, y, 1e9) - nearest_by_loop(x, y)).abs().max() < 1e-3


@pytest.mark.parametrize("dim", [3, 4, 8, 64, 1000])
@pytest.mark.parametrize("beta", [0.5, 10.0, 1000.0])
def test_softmax_error_in_high_precision(dim: int, beta: float) -> None:
    with mp.workdps(25):
        cuts = [0, *(mp.mpf(c) / beta for c in (1, 5, 20, 80) if c / beta < 1.5), mp.pi / 2]
        root = mp.sqrt(2) * mp.mpf(beta)
        want = (
            4
            * exact_omega(dim)
            * mp.quad(lambda a: mp.cos(a) ** (dim - 2) / (1 + mp.exp(root * mp.sin(a))) ** 2, cuts)
        )
        assert constructions.softmax_error(dim, beta) == pytest.approx(
            float(want), rel=1e-8 if dim == 4 else 1e-11
        )


def test_softmax_error_of_the_table() -> None:
    for dim, row in SOFTMAX.items():
        for beta, value in row.items():
            assert constructions.softmax_error(dim, float(beta)) == pytest.approx(value, rel=5e-4)
        assert constructions.softmax_limit(dim, 1e5) == pytest.approx(
            constructions.softmax_error(dim, 1e5), rel=1e-4
        )
    assert constructions.softmax_limit(1000, 50.0) == pytest.approx(
        0.218 * math.sqrt(1000) / 50, rel=2e-3
    )
    assert constructions.softmax_error(8, 1e-9) == pytest.approx(0.5, rel=1e-6), (
        "the mean of the points"
    )


@pytest.mark.parametrize("depth", [1, 3])
def test_perfect_encoder_answers(depth: int) -> None:
    task, model = Farthest(64, 16), constructions.perfect_encoder(64, depth)
    assert isinstance(model, Encoder)
    x, target = task.sample(seeded(22), 128)
    with torch.no_grad():
        error = task.loss(model(x)[0], target).item()
        swapped = task.loss(model(-x)[0], target).item()
    assert error < 5e-4
    assert swapped > 0.5, "the answer to another question is not an answer to this one"


@pytest.mark.parametrize("heads", [1, 3, 9, 21])
def test_vote_error_by_exact_fractions(heads: int) -> None:
    at = [Fraction(1, 2), Fraction(5, 9), Fraction(3, 4), Fraction(99, 100), Fraction(1)]
    want = [
        sum(math.comb(heads, i) * p**i * (1 - p) ** (heads - i) for i in range(heads // 2 + 1))
        for p in at
    ]
    got = constructions._at_most_half(heads, np.array([float(p) for p in at[:-1]]))
    assert got == pytest.approx([float(v) for v in want[:-1]], rel=1e-12)
    assert want[-1] == 0
    for dim in (3, 4, 9):
        with mp.workdps(20):

            def wrong(t: Any) -> Any:
                p = mp.mpf(1) / 2 + mp.asin(t) / mp.pi
                return mp.fsum(
                    math.comb(heads, i) * p**i * (1 - p) ** (heads - i)
                    for i in range(heads // 2 + 1)
                )

            assert constructions.vote_error(dim, heads) == pytest.approx(
                float(2 * expected(dim, wrong)), rel=1e-11
            )


def test_vote_error_of_the_table() -> None:
    for dim, row in VOTES.items():
        for heads, value in zip((1, 11, 101, 1001, 10001), row, strict=True):
            assert constructions.vote_error(dim, heads) == pytest.approx(value, abs=5.1e-5)
    assert constructions.averaging_error(8) == pytest.approx(0.3350, abs=5.1e-5)
    assert constructions.averaging_error(64) == pytest.approx(0.4391, abs=5.1e-5)
    assert constructions.vote_error(8, 1) == pytest.approx(
        2 * (1 - harmonics.head_target(8, 1.0)), abs=1e-6
    ), "one vote is one head"
    assert constructions.vote_limit(64, 10**6) == pytest.approx(math.sqrt(64 / 10**6), rel=0.02)
    assert constructions.vote_wide(10**4, 10**7) == pytest.approx(
        math.sqrt(10**4 / 10**7), rel=0.01
    )


@pytest.mark.parametrize(("points", "heads"), [(2, 1), (2, 11), (3, 9), (6, 15)])
def test_vote_against_a_plain_loop(points: int, heads: int) -> None:
    x, y, directions = (
        sphere(60, points, 5, seed=23),
        sphere(60, 5, seed=24),
        sphere(heads, 5, seed=25),
    )
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
        assert distance(values[:, 2].numpy(), lambda t: (t + 1) / 2) < 1.95, (
            "a coordinate in 3 dimensions is uniform"
        )
    values = torch.tensor([1.0, 2.0, 4.0, 9.0])
    assert constructions.mean_and_error(values) == pytest.approx(
        (4.0, np.std([1, 2, 4, 9], ddof=1) / 2)
    )


def test_spaced_error_of_heads_in_the_plane() -> None:
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
    """E of a function of |cot a cot b|, where cos a and cos b are coordinates of uniform unit
    vectors, on a grid of angles."""
    x, w = np.polynomial.legendre.leggauss(600)
    angle, weight = (x + 1) * np.pi / 4, w * np.pi / 4
    density = weight * np.sin(angle) ** (dim - 2)
    density /= density.sum()
    ratio = np.abs(np.multiply.outer(1 / np.tan(angle), 1 / np.tan(angle)))
    return float(density @ hidden(ratio) @ density)


def test_explained_by_a_subspace() -> None:
    """One hidden coordinate: known unless it outweighs the rest; three hidden ones: their mean is
    uniform; and the table."""

    def all_but_one(
        ratio: np.ndarray,
    ) -> np.ndarray:  # of 8: the visible part of 7 dimensions must beat the hidden coordinate
        t = np.minimum(ratio, 1)
        return 1 - 15 / 8 * (t - 2 * t**3 / 3 + t**5 / 5)

    cases = (
        (8, 7, share_known(8, all_but_one), 0.0),
        (4, 1, share_known(4, lambda ratio: np.minimum(ratio, 1) ** 2), 0.0),
    )
    table = (
        (8, 1, 0.083, 0.002),
        (8, 4, 0.368, 0.002),
        (8, 7, 0.808, 0.002),
        (64, 32, 0.338, 0.002),
        (64, 63, 0.937, 0.002),
    )
    for dim, rank, want, slack in (*cases, *table):
        got, se = constructions.explained(dim, rank, 60_000, seeded(28))
        assert 0 < se < 0.01
        assert abs(got - want) < STANDARD_ERRORS * se + slack, (dim, rank)


def test_explained_of_the_square_wave() -> None:
    for dim, rank, want in ((4, 2, 0.040), (8, 6, 0.033), (8, 4, 0.0), (16, 12, 0.0)):
        got, se = constructions.explained(dim, rank, 100_000, seeded(29), wave=1 / dim)
        assert abs(got - want) < STANDARD_ERRORS * se + 0.002, (dim, rank)
        many, small = constructions.explained(dim, rank, 4_000, seeded(30), wave=1 / dim, twins=64)
        assert small < se
        assert abs(many - got) < STANDARD_ERRORS * math.hypot(se, small), (dim, rank)
    wave = constructions.square_wave(torch.tensor([-0.6, -0.4, -0.1, 0.1, 0.4, 0.6, 1.1]), 0.5)
    assert wave.tolist() == [1, -1, -1, 1, 1, -1, 1]


@pytest.mark.parametrize("dim", [3, 4, 5, 8])
def test_biased_bank_is_the_biased_target(dim: int) -> None:
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
    *(
        (lambda f=f: f(1, 1), "dim must be a whole number of at least 3, got 1")
        for f in (harmonics.singular_floor, harmonics.plateau)
    ),
    (lambda: harmonics.polynomials(2, 3, 0.0), "dim must be a whole number of at least 3, got 2"),
    (lambda: harmonics.quadrature(1, 10), "dim must be a whole number of at least 3, got 1"),
    (lambda: harmonics.log_omega(8.0), "dim must be a whole number of at least 3, got 8.0"),
    (lambda: harmonics.multiplicity(True, 1), "dim must be a whole number of at least 3, got True"),
    (lambda: harmonics.head_target(2, 0.5), "dim must be a whole number of at least 3, got 2"),
    (lambda: harmonics.heads_for(2, 0.1), "dim must be a whole number of at least 3, got 2"),
    (lambda: harmonics.representation(2, 0.5), "dim must be a whole number of at least 3, got 2"),
    (
        lambda: constructions.softmax_error(2, 1.0),
        "dim must be a whole number of at least 3, got 2",
    ),
    (lambda: constructions.vote_error(1, 1), "dim must be a whole number of at least 3, got 1"),
    (lambda: constructions.averaging_error(2), "dim must be a whole number of at least 3, got 2"),
    (
        lambda: constructions.explained(2, 1, 10, seeded(0)),
        "dim must be a whole number of at least 3, got 2",
    ),
    (
        lambda: features.draw_heads(2, 4, seeded(0)),
        "dim must be a whole number of at least 3, got 2",
    ),
    (lambda: harmonics.multiplicity(8, -1), "degree must be a whole number of at least 0, got -1"),
    (
        lambda: harmonics.sign_coefficient(8, 1.5),
        "degree must be a whole number of at least 0, got 1.5",
    ),
    (lambda: harmonics.representation(8, 0.5, 401), "degree must be at most 400, got 401"),
    (lambda: harmonics.singular_floor(8, 0), "heads must be a whole number of at least 1, got 0"),
    (
        lambda: features.draw_heads(8, 0, seeded(0)),
        "heads must be a whole number of at least 1, got 0",
    ),
    (lambda: constructions.vote_error(8, 0), "heads must be a whole number of at least 1, got 0"),
    (lambda: constructions.spaced_error(0), "heads must be a whole number of at least 1, got 0"),
    (lambda: constructions.spaced_closed(0), "heads must be a whole number of at least 1, got 0"),
    (lambda: constructions.vote_error(8, 10), "a majority needs an odd number of heads, got 10"),
    (
        lambda: constructions.softmax_error(8, 0.0),
        "beta, the inverse temperature, must be positive, got 0.0",
    ),
    (
        lambda: constructions.softmax_error(8, -1.0),
        "beta, the inverse temperature, must be positive, got -1.0",
    ),
    (
        lambda: constructions.softmax_error(8, math.nan),
        "beta, the inverse temperature, must be positive, got nan",
    ),
    (
        lambda: constructions.full_rank_head(torch.ones(1, 2, 3), torch.ones(1, 3), 0),
        "beta, the inverse temperature, must be positive, got 0",
    ),
    *(
        (lambda e=e: harmonics.heads_for(8, e), f"error must lie between 0 and 0.5, got {e}")
        for e in (0.0, 0.5, -1.0, math.nan)
    ),
    (
        lambda: harmonics.heads_for(4000, 1e-4),
        "error 0.0001 needs more than 2^200 heads in 4000 dimensions",
    ),
    *(
        (
            lambda t=t: features.best_weights(*features.draw_heads(4, 3, seeded(0)), tolerance=t),
            f"tolerance must lie between 0 and 1, got {t}",
        )
        for t in (0, -1e-3, 1.0)
    ),
    *(
        (
            lambda r=r: constructions.explained(8, r, 10, seeded(0)),
            f"rank must lie between 0 and dim 8, got {r}",
        )
        for r in (0, 8, 9, -1)
    ),
    (
        lambda: features.draw_heads(8, 4, seeded(0), "publisht"),
        (
            "unknown draw 'publisht'; did you mean published? choices: cos-uniform, independent, "
            "published"
        ),
    ),
    (
        lambda: theory_experiment.Settings(only=("kernel",)),
        "unknown check 'kernel'; did you mean kernels? choices: biased, ",
    ),
    (lambda: theory_experiment.Settings(only=()), "only must not be empty"),
    (
        lambda: features_experiment.Settings(dims=(2,), heads=(1,), seeds=1),
        "dims must be at least 3, got 2",
    ),
    (lambda: features_experiment.Settings(dims=(), heads=(1,), seeds=1), "dims must not be empty"),
    (
        lambda: features_experiment.Settings(dims=(8,), heads=(4, 0), seeds=1),
        "heads must be at least 1, got 0",
    ),
    (
        lambda: features_experiment.Settings(dims=(8,), heads=(1,), seeds=0),
        "seeds must be at least 1, got 0",
    ),
    (
        lambda: features_experiment.Settings(dims=(8,), heads=(1,), seeds=1, draws=("unit",)),
        "unknown draw 'unit'; choices: cos-uniform, published",
    ),
    (
        lambda: representation_experiment.Settings(dims=(2,), degree=9, angles=9),
        "dims must lie between 3 and 100,000, got 2",
    ),
    (
        lambda: representation_experiment.Settings(dims=(), degree=9, angles=9),
        "dims must lie between 3 and 100,000, got none",
    ),
    (
        lambda: representation_experiment.Settings(dims=(8,), degree=401, angles=9),
        "degree must lie between 1 and 400, got 401",
    ),
    (
        lambda: representation_experiment.Settings(dims=(8,), degree=0, angles=9),
        "degree must lie between 1 and 400, got 0",
    ),
    (
        lambda: representation_experiment.Settings(dims=(8,), degree=9, angles=1),
        "angles must lie between 2 and 1,000,000, got 1",
    ),
]


@pytest.mark.parametrize(
    ("act", "text"), BAD, ids=[f"{i}: {text}" for i, (_, text) in enumerate(BAD)]
)
def test_mistake_is_one_line_with_rule_and_value(act: Callable[[], Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        act()
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)
