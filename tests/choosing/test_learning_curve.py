"""A lead in training: curves whose law is known."""

import math

import pytest

from headwise.choosing.learning_curve import Curve, Worth, fit, worth

SHARES = [i / 10 for i in range(1, 11)]


def curve(floor: float, height: float, slope: float) -> list[tuple[float, float]]:
    return [(share, floor + height * share**-slope) for share in SHARES]


@pytest.mark.parametrize(("floor", "height", "slope"), [(0.5, 0.1, 0.5), (0, 2, 0.1), (1, 3, 1.5)])
def test_fit_finds_the_law(floor: float, height: float, slope: float) -> None:
    found = fit(curve(floor, height, slope))
    assert isinstance(found, Curve)
    assert found.at(1.0) == pytest.approx(floor + height, rel=1e-3)
    assert found.at(0.25) == pytest.approx(floor + height * 0.25**-slope, rel=5e-3)


def test_worth_is_the_time_to_catch_up() -> None:
    """A shape that ends where the leader was at 0.8 of its training is 1.25 times behind; at twice
    the FLOPs, 2.5 times."""
    points = curve(0.5, 0.1, 0.5)
    lead = 0.1 * (0.8**-0.5 - 1)
    for ratio in (1.0, 2.0):
        found = worth(points, (lead, 0.0, 2 * lead), ratio)
        assert isinstance(found, Worth)
        assert found.factor == pytest.approx(1.25 * ratio, rel=0.02)
        assert found.low == pytest.approx(ratio, rel=0.02)
        assert found.high > found.factor
        assert not found.beyond


def test_worth_beyond_the_evaluations_is_a_bound() -> None:
    found = worth(curve(0.5, 0.1, 0.5), (0.5, 0.4, 0.6))
    assert str(found) == "more than 5 times the training"


def test_worth_says_why_it_cannot_be_said() -> None:
    assert "5 are needed" in str(worth(curve(0.5, 0.1, 0.5)[-3:], (0.1, 0.0, 0.2)))
    rising = [(share, share) for share in SHARES]
    assert worth(rising, (0.1, 0.0, 0.2)) == ("the leader's error does not fall along its training")
    jumping = [(share, 1.0 + (-1) ** i * 0.5 - share / 10) for i, share in enumerate(SHARES)]
    assert isinstance(worth(jumping, (0.1, 0.0, 0.2)), str)
    assert "behind the warm-up" in str(worth([(s, math.inf) for s in SHARES], (0.1, 0.0, 0.2)))
