"""Which of several arms has the smallest mean loss: elimination on paired seeds.

An arm is one shape; seed s gives every arm the same data in the same order and the same stream of
initial weights, so two arms are compared by their differences seed by seed. After certain numbers
of seeds the race is looked at:

    leader          the arm with the smallest mean so far
    difference      of every other arm from the leader: mean of the paired differences
    variance        of an arm's differences, moved towards the mean variance of all arms as if
                    that had been seen with `prior` degrees of freedom (Smyth 2004, limma):
                        s2 = (prior * pool + (n - 1) * own) / (prior + n - 1)
    interval        mean -+ t * sqrt(s2 / n), Student's t with prior + n - 1 degrees of freedom;
                    what may lie outside is delta / ((arms - 1) * looks), so that all intervals of
                    all looks hold together in 1 - delta of all races
    ruled out       an arm whose interval lies above 0, and one with a run that diverged, whose
                    mean loss has no bound

The race ends when one arm is left, when all that are left are within `epsilon` of the leader, or
when the seeds are used up. It is a pure function of losses: the same losses give the same looks,
whoever made them and however often that was interrupted. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from headwise.errors import UsageError, shown
from headwise.stats import tail_point

LOOKS = (3, 4, 6, 8, 12, 16, 20)  # seeds; doubled by halves beyond
PRIOR = 4.0  # degrees of freedom that the pool counts for
# Of the degrees of freedom of each further arm, how many the pool is taken to have: differences
# from one leader share its noise, and variances differ between arms.
SHARED = 0.25
MOST_SEEDS = 10_000
SEEDS_TOLD = 1_000  # more seeds than that are not counted out
Losses = Mapping[str, Mapping[int, float]]  # arm -> seed -> loss; diverged is infinite
End = Literal["one left", "equal", "seeds", "diverged", ""]


# ---- the rule


@dataclass(frozen=True, kw_only=True)
class Rule:
    """When the race is looked at, and what rules an arm out.

    >>> Rule(seeds=10).looks
    (3, 4, 6, 8, 10)
    """

    delta: float = 0.05  # the chance that any statement is wrong
    epsilon: float = 0.0  # a difference that does not matter
    seeds: int = 20  # per arm, at most
    prior: float = PRIOR

    def __post_init__(self) -> None:
        if not 0 < self.delta < 1:
            raise UsageError(f"delta must lie between 0 and 1, got {shown(self.delta)}")
        if not 0 <= self.epsilon < math.inf:
            raise UsageError(f"epsilon must be 0 or more, got {shown(self.epsilon)}")
        if not 2 <= self.seeds <= MOST_SEEDS:
            raise UsageError(f"seeds must be 2 to {MOST_SEEDS:,}, got {shown(self.seeds)}")

    @property
    def looks(self) -> tuple[int, ...]:
        """After how many seeds."""
        places = list(LOOKS)
        while places[-1] < self.seeds:
            places.append(places[-2] * 2)
        return (*(n for n in places if n < self.seeds), self.seeds)


# ---- what a look sees


@dataclass(frozen=True, kw_only=True)
class Gap:
    """How far an arm's mean loss is above the leader's, with its interval; infinite where a run of
    the arm diverged."""

    arm: str
    mean: float
    low: float
    high: float
    error: float  # standard error of the mean, moderated
    diverged: int = 0  # of its runs so far

    @property
    def ruled_out(self) -> bool:
        """Whether its interval lies above 0."""
        return self.low > 0


@dataclass(frozen=True, kw_only=True)
class Look:
    """The race after so many seeds of every arm that was left."""

    seeds: int
    leader: str
    loss: float  # the leader's mean
    gaps: tuple[Gap, ...]  # of the others, the smallest first
    point: float  # half of an interval in standard errors

    @property
    def left(self) -> tuple[str, ...]:
        """The arms that it leaves, the leader first."""
        return (self.leader, *(gap.arm for gap in self.gaps if not gap.ruled_out))

    @property
    def within(self) -> float:
        """The leader is within this of the best arm: no arm is better than it by more."""
        return max((-gap.low for gap in self.gaps if not gap.ruled_out), default=0.0)


@dataclass(frozen=True, kw_only=True)
class Race:
    """What the losses say so far: the looks that could be made, and which runs come next."""

    rule: Rule
    arms: tuple[str, ...]
    looks: tuple[Look, ...]
    end: End  # why it is over; empty: it is not
    missing: tuple[tuple[str, int], ...]  # arms and seeds of the next look that have no loss yet

    @property
    def left(self) -> tuple[str, ...]:
        """The arms that are left, the leader first once there is one."""
        return self.looks[-1].left if self.looks else self.arms

    @property
    def leader(self) -> str | None:
        """The arm with the smallest mean at the last look; None: nothing was looked at yet."""
        return self.looks[-1].leader if self.looks else None

    @property
    def out(self) -> dict[str, tuple[int, Gap]]:
        """The arms that were ruled out: at which look, counted from 0, and by what."""
        return {
            gap.arm: (number, gap)
            for number, look in enumerate(self.looks)
            for gap in look.gaps
            if gap.ruled_out
        }


# ---- the race


def race(losses: Losses, arms: Sequence[str], rule: Rule | None = None) -> Race:
    """Look at the losses as far as they go.

    >>> losses = {"a": {1: 1.0, 2: 1.2, 3: 1.1}, "b": {1: 9.0, 2: 9.2, 3: 9.1}}
    >>> found = race(losses, ["a", "b"], Rule(seeds=3))
    >>> found.leader, found.end
    ('a', 'one left')
    """
    rule = rule or Rule()
    if not arms or len(set(arms)) < len(arms):
        raise UsageError(
            f"arms must be there and differ, got {', '.join(map(str, arms)) or 'none'}"
        )
    point_level = rule.delta / 2 / max(1, len(arms) - 1) / len(rule.looks)
    left, looks = tuple(arms), list[Look]()
    if len(arms) == 1:
        return Race(rule=rule, arms=left, looks=(), end="one left", missing=())
    for n in rule.looks:
        seeds = range(1, n + 1)
        missing = tuple((arm, s) for s in seeds for arm in left if s not in losses.get(arm, {}))
        if missing:
            return Race(rule=rule, arms=tuple(arms), looks=tuple(looks), end="", missing=missing)
        look = look_at({arm: [losses[arm][s] for s in seeds] for arm in left}, rule, point_level)
        looks.append(look)
        left = look.left
        end = _end(look, rule, n)
        if end:
            return Race(rule=rule, arms=tuple(arms), looks=tuple(looks), end=end, missing=())
    raise AssertionError("the last look ends the race")


def look_at(values: Mapping[str, Sequence[float]], rule: Rule, level: float) -> Look:
    """One look at arms that all have the same seeds; `level` is what may lie above an interval."""
    arms, n = list(values), len(next(iter(values.values())))
    # An arm with a diverged run has an infinite mean. Where all have one, those with the fewest
    # lead, by the mean of their other runs, and nothing more can be said.
    lost = {arm: sum(not math.isfinite(x) for x in values[arm]) for arm in arms}
    finite = {arm: [x for x in values[arm] if math.isfinite(x)] for arm in arms}
    means = {arm: math.fsum(finite[arm]) / len(finite[arm]) if finite[arm] else math.inf
             for arm in arms}  # fmt: skip
    leader = min(arms, key=lambda arm: (lost[arm], means[arm]))
    others = [arm for arm in arms if arm != leader]
    compared = {
        arm: [a - b for a, b in zip(values[arm], values[leader], strict=True)]
        for arm in others
        if not lost[arm] and not lost[leader]
    }
    # Each arm's variance is moved towards the mean of all of them.
    own = {arm: _variance(differences) for arm, differences in compared.items()}
    pool = math.fsum(own.values()) / len(own) if own else 0.0
    prior = min(rule.prior, (len(own) - 1) * (n - 1) * SHARED) if own else 0.0
    freedom = prior + n - 1
    point = tail_point(level, freedom)
    gaps = []
    for arm in others:
        if arm not in compared:
            unclear = lost[leader] > 0  # then the leader's mean has no bound either
            low = -math.inf if unclear else math.inf
            gaps.append(Gap(arm=arm, mean=math.inf, low=low, high=math.inf, error=math.inf,
                            diverged=lost[arm]))  # fmt: skip
            continue
        mean = math.fsum(compared[arm]) / n
        error = math.sqrt((prior * pool + (n - 1) * own[arm]) / freedom / n)
        half = point * error
        gaps.append(Gap(arm=arm, mean=mean, low=mean - half, high=mean + half, error=error))
    gaps.sort(key=lambda gap: gap.mean)
    return Look(seeds=n, leader=leader, loss=means[leader], gaps=tuple(gaps), point=point)


def _variance(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1)


def _end(look: Look, rule: Rule, n: int) -> End:
    """Why a look ends the race; empty: it does not."""
    left = [gap for gap in look.gaps if not gap.ruled_out]
    if not left:
        return "one left"
    if any(gap.diverged or math.isinf(gap.mean) for gap in left):
        return "diverged"
    if rule.epsilon and all(max(-gap.low, gap.high) <= rule.epsilon for gap in left):
        return "equal"
    return "seeds" if n == rule.seeds else ""


# ---- what it would take


def seeds_needed(found: Race) -> dict[str, int | None]:
    """For every arm that is left beside the leader, about how many seeds would rule it out if its
    difference and its spread are what they seem; None: more than 1,000."""
    if not found.looks:
        return {}
    look = found.looks[-1]
    out: dict[str, int | None] = {}
    for gap in look.gaps:
        if gap.ruled_out:
            continue
        if not gap.mean > 0 or math.isinf(gap.mean):
            out[gap.arm] = None
            continue
        needed = math.ceil((look.point * gap.error / gap.mean) ** 2 * look.seeds)
        out[gap.arm] = max(needed, look.seeds + 1) if needed <= SEEDS_TOLD else None
    return out
