"""A law over smaller sizes: planted laws are predicted, bends widen, and changes of order are
said."""

import math
import random
from typing import Any

import pytest
from support.data import refused

from headwise.choosing.extrapolate import Prediction, _weights, extrapolate, predict
from headwise.choosing.race import Rule, race

SIZES = (1_000, 4_000, 16_000)
GOAL = 64_000
LAWS = {"a": (3.0, 0.20), "b": (3.3, 0.20), "c": (4.5, 0.22)}  # height * size^-slope


def losses(
    laws: dict[str, tuple[float, float]], seed: int, seeds: int = 6, noise: float = 0.01
) -> dict[int, dict[str, dict[int, float]]]:
    rng = random.Random(seed)
    return {
        size: {
            name: {s: height * size**-slope * math.exp(rng.gauss(0, noise))
                   for s in range(1, seeds + 1)}
            for name, (height, slope) in laws.items()
        }
        for size in SIZES
    }  # fmt: skip


def test_weights_are_the_least_squares_line() -> None:
    """A line through any points on it is that line, wherever it is asked for."""
    x = [1.0, 2.0, 4.0]
    weights = _weights(x, 7.0)
    assert sum(w * (3 - 0.5 * v) for w, v in zip(weights, x, strict=True)) == pytest.approx(-0.5)


def test_planted_law_lies_in_its_interval_and_the_best_is_named() -> None:
    """The intervals hold together in 95 of 100; of 40 at least 36."""
    inside, named = 0, 0
    for seed in range(40):
        found = predict(losses(LAWS, seed), GOAL)
        truth = {name: height * GOAL**-slope for name, (height, slope) in LAWS.items()}
        inside += all(one.low <= truth[one.name] <= one.high for one in found.designs)
        band = {one.name for one in found.designs if one.in_band}
        named += found.predictable and "a" in band and "c" not in band
    assert inside >= 36
    assert named >= 36


def test_bend_widens_the_interval() -> None:
    """A floor that the law does not have: the truth lies within, because the bend is measured."""
    floor = 0.4
    table = {
        size: {name: {s: x + floor for s, x in seeds.items()} for name, seeds in arms.items()}
        for size, arms in losses(LAWS, 3, noise=0.002).items()
    }
    straight = predict(losses(LAWS, 3, noise=0.002), GOAL)
    bent = predict(table, GOAL)

    def width(found: Prediction, name: str) -> float:
        one = next(one for one in found.designs if one.name == name)
        return math.log(one.high / one.low)

    truth = 3.0 * GOAL**-0.20 + floor
    one = next(one for one in bent.designs if one.name == "a")
    assert width(bent, "a") > width(straight, "a")
    assert one.low <= truth <= one.high


def test_order_that_changes_with_size_is_not_predictable() -> None:
    laws = {"a": (3.0, 0.10), "b": (6.0, 0.20)}  # they cross at 1,024
    table = losses({"a": (3.0, 0.10), "b": (8.0, 0.22)}, 0)
    assert race(table[1_000], ["a", "b"], Rule(seeds=6)).leader == "a"
    races = {size: race(arms, ["a", "b"], Rule(seeds=6)) for size, arms in table.items()}
    found = predict(table, GOAL, races=races, task="planted")
    assert not found.predictable
    assert found.sentence == (
        "At 64,000 parameters on planted the best shape is not predictable: the order changes "
        "with size, a leads at 1,000 parameters and is ruled out at 16,000."
    )
    assert laws["a"][0] * 1_024**-0.10 == pytest.approx(laws["b"][0] * 1_024**-0.20)
    same = losses(LAWS, 0)
    races = {size: race(arms, list(LAWS), Rule(seeds=6)) for size, arms in same.items()}
    assert predict(same, GOAL, races=races).predictable


def test_design_that_diverged_has_no_law() -> None:
    table = losses(LAWS, 1)
    table[4_000]["b"][2] = math.inf
    assert {one.name for one in predict(table, GOAL).designs} == {"a", "c"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sizes": (30_000,)}, "extrapolate needs at least two sizes below params 100,000, got"),
        ({"sizes": (30_000, 100_000)}, "extrapolate needs at least two sizes below params 100,000"),
        ({"sizes": (300, 500), "params": 900}, "0 designs can be built at all of 300, 500, 900"),
    ],
)
def test_extrapolate_refuses(given: dict[str, Any], message: str) -> None:
    assert refused(extrapolate, "farthest", **{"params": 100_000, **given}).startswith(message)


def test_predict_refuses_one_size_and_sizes_above() -> None:
    table = losses(LAWS, 1)
    assert "at least two sizes" in refused(predict, {1_000: table[1_000]}, GOAL)
    assert "at least two sizes" in refused(predict, table, 16_000)
    one = {size: {name: {1: 1.0} for name in LAWS} for size in SIZES}
    assert "two seeds" in refused(predict, one, GOAL)
