"""Which rates are tried: equal effort, edges, and the lowest point of a parabola."""

import math

import pytest
from support.data import refused

from headwise.choosing.rates import at_edge, best_rate, check_grid, next_trials

GRID = (0.001, 0.003, 0.01)


def tune(loss, grid=GRID, trials=5) -> dict[float, float]:
    tried: dict[float, float] = {}
    while todo := next_trials(tried, grid, trials):
        tried |= {rate: loss(rate) for rate in todo}
    return tried


@pytest.mark.parametrize("best", [1e-5, 0.0005, 0.0021, 0.004, 0.03, 0.5])
@pytest.mark.parametrize("trials", [3, 4, 6])
def test_trials_are_as_many_wherever_the_best_rate_is(best: float, trials: int) -> None:
    assert len(tune(lambda rate: math.log(rate / best) ** 2, trials=trials)) == trials


def test_parabola_is_found_by_one_more_trial() -> None:
    """The loss is a parabola in the logarithm, so its lowest point is tried next."""
    tried = tune(lambda rate: math.log(rate / 0.002) ** 2, trials=4)
    assert best_rate(tried) == pytest.approx(0.002, rel=1e-5)
    assert not at_edge(tried)


def test_edge_is_left_by_the_same_step() -> None:
    tried = tune(lambda rate: -math.log(rate), trials=5)
    assert sorted(tried)[3:] == pytest.approx([0.01 / 0.3, 0.01 / 0.09], rel=1e-5)
    assert at_edge(tried)


def test_rate_towards_one_that_diverges_is_not_tried() -> None:
    tried = {0.001: 0.5, 0.003: 0.4, 0.01: math.inf}
    (rate,) = next_trials(tried, GRID, 4)
    assert 0.001 < rate < 0.003
    assert best_rate(dict.fromkeys(GRID, math.inf)) == 0.001
    assert next_trials(dict.fromkeys(GRID, math.inf), GRID, 4)[0] < 0.001


def test_grid_refuses() -> None:
    assert "rates must be there" in refused(check_grid, (), 1)
    assert "rates must be there and differ" in refused(check_grid, (0.1, 0.1), 2)
    assert "rates must be above 0, got -1" in refused(check_grid, (-1,), 1)
    assert "got 2 for 3 rates" in refused(check_grid, GRID, 2)
    assert "one rate has no neighbours" in refused(check_grid, (0.1,), 2)
