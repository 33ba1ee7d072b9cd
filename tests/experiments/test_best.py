"""A best point is never named without those that cannot be told apart from it."""

import random
from dataclasses import dataclass
from typing import Any

import pytest

from headwise.experiments.best import best_in_words, ranking
from headwise.experiments.points import Measured, interval


@dataclass(frozen=True, kw_only=True)
class Arm(Measured):
    name: str


def arm(name: str, *values: float, **more: Any) -> Arm:
    return Arm(name=name, n=len(values), values=list(values), **interval(list(values)), **more)


def words(*arms: Arm) -> str:
    return best_in_words(arms, lambda p: p.name, "arms", "loss")


NEAR = [arm(f"near {i}", 1.0 + i / 1000, 1.1, 1.2) for i in range(4)]
FAR = arm("far", 5.0, 5.01, 5.02)


@pytest.mark.parametrize(
    ("arms", "said"),
    [
        (
            [FAR, *NEAR],
            "best near 0, loss 1.1000 ± 0.2484 (3 seeds); cannot be told apart from 3 others of 5 "
            "arms (near 1; near 2; near 3)",
        ),
        (
            [FAR, NEAR[0]],
            "best near 0, loss 1.1000 ± 0.2484 (3 seeds); told apart from all 1 others",
        ),
        (
            NEAR,
            "no best: none of the 4 arms can be told apart at n=3; smallest: near 0, loss 1.1000 "
            "± 0.2484 (3 seeds)",
        ),
        (
            [arm("one", 1.0), arm("two", 9.0)],
            "no best: none of the 2 arms can be told apart at n=1; smallest: one, loss 1.0000 (one "
            "seed)",
        ),
        ([NEAR[0]], "near 0, loss 1.1000 ± 0.2484 (3 seeds); nothing to compare it with"),
        (
            [arm("tried", 0.1, tuning=True)],
            "tuning only, no best yet: every loss is of seed 0, by which rates are chosen",
        ),
        (
            [arm("tried", 0.1, tuning=True), FAR, NEAR[0]],
            "best near 0, loss 1.1000 ± 0.2484 (3 seeds); told apart from all 1 others; tuning "
            "only in 1 more",
        ),
        ([arm("gone")], "no best: all diverged"),
    ],
    ids=["alike", "apart", "none", "single", "alone", "tuning", "partly tuning", "diverged"],
)
def test_best_in_words(arms: list[Arm], said: str) -> None:
    assert words(*arms) == said


def test_truly_best_one_is_first_or_among_those_alike() -> None:
    """400 maps of 15 cells that differ by less than their scatter: at most 5 % may lose the best
    one; a run of 400 has 95 % +- 2.2 %."""
    rng, lost, alone = random.Random(0), 0, 0
    for _ in range(400):
        arms = [arm(str(i), *(rng.gauss(i / 30, 0.3) for _ in range(4))) for i in range(15)]
        found = ranking(arms)
        assert found.first is not None
        lost += "0" not in {found.first.name, *(p.name for p in found.alike)}
        alone += found.first.name != "0"
    assert alone > 100, "the smallest mean is mostly another one's"
    assert lost <= 400 * 0.072
