"""Random heads: closed forms against drawn heads, and best weights against plain solves."""

import math

import numpy as np
import pytest
import torch
from support.high_precision import distance, hard_choices
from support.tolerance import STANDARD_ERRORS, seeded

from headwise.theory import features, harmonics


def agreement(q: torch.Tensor, k: torch.Tensor) -> np.ndarray:
    """The probability that two heads of a layer agree, in numpy, each head with itself for
    certain."""
    a, b = q.numpy(), k.numpy()
    return 0.5 + 2 / np.pi**2 * np.arcsin(np.clip(a @ a.T, -1, 1)) * np.arcsin(
        np.clip(b @ b.T, -1, 1)
    )


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


def test_agree_of_a_head_with_itself() -> None:
    q, k = features.draw_heads(8, 20, seeded(40))
    assert (features.agree(q, k, q, k).diagonal() - 1).abs().max() < 1e-7


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
