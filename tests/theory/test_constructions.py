"""Constructed heads: exact, voting, in pairs and spaced; what a subspace explains."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath as mp
import numpy as np
import pytest
import torch
from support.high_precision import distance, exact_omega, expected, hard_choices
from support.tolerance import STANDARD_ERRORS, seeded

from headwise.model.transformer import Encoder
from headwise.tasks import Farthest
from headwise.theory import constructions, harmonics

SOFTMAX = {
    8: {10: 0.05508, 100: 0.005564, 1000: 0.0005565},
    64: {10: 0.1552, 100: 0.01721, 1000: 0.001723},
}
VOTES = {  # 1, 11, 101, 1001, 10001 heads
    8: (0.8062, 0.5522, 0.2410, 0.0802, 0.0255),
    16: (0.8682, 0.6711, 0.3410, 0.1189, 0.0380),
    64: (0.9359, 0.8301, 0.5660, 0.2380, 0.0786),
}


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


def test_softmax_error_of_a_hard_head() -> None:
    assert constructions.softmax_error(8, math.inf) == 0


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
