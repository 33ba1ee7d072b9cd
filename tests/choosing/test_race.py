"""The race's formulas against arithmetic by hand and PyTorch-free references, and its verdicts."""

import math
import random
import statistics

import pytest
from support.data import refused

from headwise.choosing.race import LOOKS, Race, Rule, look_at, race, seeds_needed
from headwise.stats import mean, tail_point


def losses(**values: list[float]) -> dict[str, dict[int, float]]:
    return {arm: dict(enumerate(list_, 1)) for arm, list_ in values.items()}


def noisy(centre: float, spread: float, seed: int, n: int = 20) -> list[float]:
    rng = random.Random(seed)
    return [centre + rng.gauss(0, spread) for _ in range(n)]


# ---- the formulas


def test_look_is_the_moderated_t_interval_by_hand() -> None:
    """Three arms of five seeds, every number of the docstring's formula written out."""
    values = {"a": noisy(1, 0.3, 1, 5), "b": noisy(2, 0.3, 2, 5), "c": noisy(3, 0.9, 3, 5)}
    found = look_at(values, Rule(), level=0.01)
    differences = {
        arm: [x - y for x, y in zip(values[arm], values["a"], strict=True)] for arm in "bc"
    }
    own = {arm: statistics.variance(found) for arm, found in differences.items()}
    pool = sum(own.values()) / 2
    prior = min(4, 0.25 * (2 - 1) * (5 - 1))
    point = tail_point(0.01, prior + 4)
    assert found.leader == "a"
    assert found.loss == pytest.approx(statistics.mean(values["a"]))
    for gap, arm in zip(found.gaps, "bc", strict=True):
        error = math.sqrt((prior * pool + 4 * own[arm]) / (prior + 4) / 5)
        centre = statistics.mean(differences[arm])
        half = point * error
        assert gap.arm == arm
        assert (gap.mean, gap.error) == pytest.approx((centre, error))
        assert (gap.low, gap.high) == pytest.approx((centre - half, centre + half))


def test_look_at_two_arms_is_the_paired_t_test() -> None:
    """With one difference there is no pool to move towards."""
    values = {"a": noisy(1, 0.3, 4, 7), "b": noisy(2, 0.3, 5, 7)}
    (gap,) = look_at(values, Rule(), level=0.025).gaps
    paired = mean([x - y for x, y in zip(values["b"], values["a"], strict=True)])
    assert (gap.mean, gap.low, gap.high) == pytest.approx(paired[:3], abs=1e-8)


def test_noise_of_one_arm_widens_its_interval_and_hardly_the_others() -> None:
    """Moderated, not pooled."""
    values = {name: noisy(i, 0.1, i, 12) for i, name in enumerate("abcdef")}
    calm = look_at(values, Rule(), level=0.01)
    wild = look_at({**values, "f": noisy(5, 4.0, 5, 12)}, Rule(), level=0.01)
    half = {look: {gap.arm: (gap.high - gap.low) / 2 for gap in look.gaps} for look in (calm, wild)}
    assert half[wild]["f"] > 20 * half[calm]["f"]
    # A pooled variance would give every arm the noisy one's.
    assert all(half[wild][arm] < half[wild]["f"] / 1.7 for arm in "bcde")


def test_looks_end_at_the_seeds_and_are_doubled_by_halves() -> None:
    assert Rule(seeds=20).looks == LOOKS == (3, 4, 6, 8, 12, 16, 20)
    assert Rule(seeds=5).looks == (3, 4, 5)
    assert Rule(seeds=2).looks == (2,)
    assert Rule(seeds=70).looks == (3, 4, 6, 8, 12, 16, 20, 32, 40, 64, 70)


# ---- verdicts


def test_race_is_a_pure_function_of_what_is_there() -> None:
    """Made round by round from what it asks for, it ends as it does from all losses at once, and
    never asks for a run of an arm that is out."""
    table = {name: noisy(centre, 0.2, i) for i, (name, centre) in
             enumerate({"a": 0, "b": 0.05, "c": 1, "d": 2, "e": 0.6}.items())}  # fmt: skip
    whole = race(losses(**table), list(table))
    made: dict[str, dict[int, float]] = {}
    asked, rounds = 0, 0
    while (found := race(made, list(table))).missing:
        rounds += 1
        for arm, seed in found.missing:
            assert arm not in found.out
            assert seed not in made.setdefault(arm, {})
            made[arm][seed] = table[arm][seed - 1]
            asked += 1
    assert found == whole
    assert rounds == len(whole.looks) > 2
    assert asked == sum(map(len, made.values())) < 5 * 20
    assert set(whole.out) >= {"c", "d", "e"}


def test_arm_that_diverged_once_is_out_and_never_leads() -> None:
    table = losses(a=[math.inf, 0.0, 0.0], b=[1.0, 1.1, 1.2], c=[9.0, 9.1, 9.2])
    found = race(table, ["a", "b", "c"], Rule(seeds=3))
    assert (found.leader, found.end) == ("b", "one left")
    assert [gap.diverged for _, gap in found.out.values()] == [0, 1]
    assert found.out["a"][1].mean == math.inf


def test_leader_that_diverges_later_is_out_at_that_look() -> None:
    table = losses(a=[0.0, 0.01, 0.02, math.inf], b=[0.005, 0.0, 0.03, 0.01],
                   c=[0.02, 0.01, 0.0, 0.03])  # fmt: skip
    found = race(table, ["a", "b", "c"], Rule(seeds=4))
    assert [found.looks[0].leader, found.looks[1].leader] == ["a", "b"]
    assert found.out["a"][0] == 1


def test_race_in_which_all_diverge_names_nobody() -> None:
    found = race(losses(a=[math.inf] * 3, b=[1.0, math.inf, math.inf]), ["a", "b"], Rule(seeds=3))
    assert found.end == "diverged"
    assert found.left == ("b", "a")
    assert seeds_needed(found) == {"a": None}


def test_epsilon_ends_a_tie_and_holds_for_all_that_are_left() -> None:
    table = losses(a=noisy(1, 0.01, 1), b=noisy(1.001, 0.01, 2), c=noisy(2, 0.01, 3))
    found = race(table, list(table), Rule(epsilon=0.05))
    assert found.end == "equal"
    assert len(found.looks) < len(LOOKS)
    assert set(found.left) == {"a", "b"}
    assert found.looks[-1].within <= 0.05
    assert race(table, list(table), Rule(epsilon=1e-9)).end == "seeds"


def test_equal_losses_are_a_tie_and_constant_differences_are_none() -> None:
    same = race(losses(a=[1.0, 2.0, 3.0], b=[1.0, 2.0, 3.0]), ["a", "b"], Rule(seeds=3))
    assert same.end == "seeds"
    assert seeds_needed(same) == {"b": None}
    apart = race(losses(a=[1.0, 2.0, 3.0], b=[1.5, 2.5, 3.5]), ["a", "b"], Rule(seeds=3))
    assert apart.end == "one left"


def test_seeds_that_are_said_to_be_needed_do_rule_out() -> None:
    """Copies of the same differences keep their mean and spread."""
    noise = [(-1) ** i * (1 + i % 3) for i in range(20)]
    centre, spread = statistics.mean(noise), statistics.stdev(noise)
    worse = [0.4 + (x - centre) / spread for x in noise]
    found = race(losses(a=[0.0] * 20, b=worse), ["a", "b"])
    needed = seeds_needed(found)["b"]
    assert found.end == "seeds"
    assert needed is not None
    again = race(losses(a=[0.0] * 120, b=worse * 6), ["a", "b"], Rule(seeds=120))
    assert again.end == "one left"
    assert 20 < needed <= 120


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"delta": 0.0}, "delta must lie between 0 and 1, got 0.0"),
        ({"delta": 1.0}, "delta must lie between 0 and 1, got 1.0"),
        ({"epsilon": -1.0}, "epsilon must be 0 or more, got -1.0"),
        ({"seeds": 1}, "seeds must be 2 to 10,000, got 1"),
    ],
)
def test_rule_refuses(rule: dict[str, float], message: str) -> None:
    assert refused(Rule, **rule) == message


def test_race_refuses_arms_of_one_name() -> None:
    assert "must be there and differ" in refused(race, {}, ["a", "a"])
    assert isinstance(race({}, ["a"]), Race)
