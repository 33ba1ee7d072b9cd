"""What a stopping rule costs, and how often it says too much: simulated searches among 24 shapes.

    python -m benchmarks.stopping_rules --searches 400

No training: a loss is a mean plus noise of standard deviation 1. The noise of one seed is partly
shared by all shapes (`pairing`, its share of the variance), as with the same data order and the
same stream of initial weights. Three questions per rule:

    tied      two shapes are equally good, the others 2 to 8 worse: is one of the two ruled out?
    lead      the same with one of the two 2 better: is the best named alone?
    cost      runs in both, as a share of 24 shapes x 20 seeds

The rules: `race` (headwise.choosing.race, the same function that `headwise choose` calls), a t-test
against the leader after every seed, and the rule of Optuna's WilcoxonPruner at its default p of 0.1
(implemented here: a shape is compared with the best one so far, seed by seed, on common seeds).
2 CPU cores, about two minutes. docs/choose.md has the table.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headwise.choosing.race import Rule, race
from headwise.stats import mean

SHAPES, SEEDS = 24, 20
PATTERNS = ("equal", "one noisy", "spread", "best noisy")  # whose noise differs
Table = list[list[float]]  # shape -> seed -> loss


class Outcome(NamedTuple):
    left: set[int]
    runs: int


# ---- losses


def noise_of(pattern: str, rng: random.Random) -> list[float]:
    """The standard deviation of every shape's own noise; shapes 0 and 1 are the two best."""
    match pattern:
        case "one noisy":  # four times as noisy as the others, in the middle of the field
            return [4.0 if shape == SHAPES // 2 else 1.0 for shape in range(SHAPES)]
        case "spread":
            return [math.exp(rng.gauss(0, 0.5)) for _ in range(SHAPES)]
        case "best noisy":
            return [2.0 if shape < 2 else 1.0 for shape in range(SHAPES)]
    return [1.0] * SHAPES


def draw(rng: random.Random, pattern: str, pairing: float, heavy: bool, lead: float) -> Table:
    """Losses of all shapes and seeds."""

    def standard() -> float:  # normal, or Student's t with 3 degrees of freedom at variance 1
        if not heavy:
            return rng.gauss(0, 1)
        squares = sum(rng.gauss(0, 1) ** 2 for _ in range(3))
        return rng.gauss(0, 1) / math.sqrt(squares)

    centres = [-lead, 0.0, *(2 + 6 * i / (SHAPES - 3) for i in range(SHAPES - 2))]
    spread, shared = noise_of(pattern, rng), [standard() for _ in range(SEEDS)]
    own, common = math.sqrt(1 - pairing), math.sqrt(pairing)
    return [
        [centre + sd * (common * shared[seed] + own * standard()) for seed in range(SEEDS)]
        for centre, sd in zip(centres, spread, strict=True)
    ]


# ---- rules


def by_race(table: Table, seeds: int = SEEDS) -> Outcome:
    """The rule of `headwise choose`."""
    names = [str(i) for i in range(len(table))]
    losses = {n: dict(enumerate(row, 1)) for n, row in zip(names, table, strict=True)}
    found = race(losses, names, Rule(seeds=seeds))
    return Outcome({int(name) for name in found.left}, runs_of(found.looks, len(names)))


def runs_of(looks: Sequence[object], arms: int) -> int:
    """How many runs a race took."""
    runs, before, left = 0, 0, arms
    for look in looks:
        runs += left * (look.seeds - before)  # type: ignore[attr-defined]
        before, left = look.seeds, len(look.left)  # type: ignore[attr-defined]
    return runs


def by_t_test(table: Table) -> Outcome:
    """A paired t-test against the leader after every seed, p < 0.05."""
    left, runs = set(range(len(table))), len(table)
    for n in range(2, SEEDS + 1):
        runs += len(left)
        leader = min(left, key=lambda i: sum(table[i][:n]))
        gaps = {i: mean([a - b for a, b in zip(table[i][:n], table[leader][:n], strict=True)])
                for i in left if i != leader}  # fmt: skip
        left -= {i for i, gap in gaps.items() if gap.low is not None and gap.low > 0}
        if len(left) == 1:
            break
    return Outcome(left, runs)


def by_wilcoxon(table: Table) -> Outcome:
    """Shapes one after the other, each seed by seed; ruled out where the signed-rank test says with
    p < 0.1 that it is worse than the best so far."""
    order = list(range(len(table)))
    random.Random(str(table[0][0])).shuffle(order)
    best, left, runs = order[0], {order[0]}, SEEDS
    for shape in order[1:]:
        for n in range(1, SEEDS + 1):
            runs += 1
            worse = [a - b for a, b in zip(table[shape][:n], table[best][:n], strict=True)]
            if n > 2 and sum(worse) > 0 and signed_rank_p(worse) < 0.1:
                break
        else:
            # A shape that was not ruled out stays beside the best one; a better one takes its
            # place, and its seeds are compared with those of what was best.
            left.add(shape)
            if sum(table[shape]) < sum(table[best]):
                worse = [a - b for a, b in zip(table[best], table[shape], strict=True)]
                if signed_rank_p(worse) < 0.1:
                    left.discard(best)
                best = shape
    return Outcome(left, runs)


def signed_rank_p(differences: Sequence[float]) -> float:
    """The chance of a sum of positive ranks as large as this one, if all signs are fair."""
    order = sorted(range(len(differences)), key=lambda i: abs(differences[i]))
    positive = sum(rank for rank, i in enumerate(order, 1) if differences[i] > 0)
    counts = rank_sums(len(differences))
    return sum(counts[positive:]) / 2 ** len(differences)


@functools.cache
def rank_sums(n: int) -> list[int]:
    """How many of the 2^n choices of signs have each sum of positive ranks."""
    counts = [1]
    for rank in range(1, n + 1):
        added = [0] * (len(counts) + rank)
        for total, count in enumerate(counts):
            added[total] += count
            added[total + rank] += count
        counts = added
    return counts


RULES: dict[str, Callable[[Table], Outcome]] = {
    "t-test after every seed": by_t_test,
    "WilcoxonPruner's rule, p = 0.1": by_wilcoxon,
    "race": by_race,
}


# ---- the table


class Measured(NamedTuple):
    tied: float  # share of searches in which one of two equal best was ruled out
    named: float  # share in which a lead of 2 is named alone
    cost: tuple[float, float]  # share of the full grid, tied and with a lead


def measure(
    rule: Callable[[Table], Outcome], searches: int, pattern: str, pairing: float, heavy: bool
) -> Measured:
    """One rule in one case."""
    rng = random.Random(f"{pattern} {pairing} {heavy}")
    tied = [rule(draw(rng, pattern, pairing, heavy, 0.0)) for _ in range(searches)]
    led = [rule(draw(rng, pattern, pairing, heavy, 2.0)) for _ in range(searches)]
    grid = SHAPES * SEEDS * searches
    return Measured(
        sum(not {0, 1} <= found.left for found in tied) / searches,
        sum(found.left == {0} for found in led) / searches,
        (sum(found.runs for found in tied) / grid, sum(found.runs for found in led) / grid),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--searches", type=int, default=400)
    searches = parser.parse_args().searches
    print("| rule | noise | pairing | tails | tied told apart | lead of 2 named | share of grid |")
    print("|---|---|---|---|---|---|---|")
    for name, rule in RULES.items():
        for pattern in PATTERNS:
            for pairing in (0.0, 0.8):
                for heavy in (False, True):
                    found = measure(rule, searches, pattern, pairing, heavy)
                    cost = " / ".join(f"{share:.2f}" for share in found.cost)
                    tails = "t3" if heavy else "normal"
                    print(f"| {name} | {pattern} | {pairing} | {tails} | {found.tied:.1%} | "
                          f"{found.named:.0%} | {cost} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
