"""What figures of the rank paper say to their questions, in a sentence each. A difference is only
claimed where the seeds tell it apart, or where there is one seed each and the sentence says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headwise.experiments.points import Errors, groups
from headwise.stats import told_apart

if TYPE_CHECKING:
    from headwise.experiments.rank_paper import dimension, fig1

Pair = tuple[Any, Any]  # the shape with fewer, wider heads, and the one with more


def of_fig1(points: Sequence[fig1.Point]) -> str:
    """Full rank against half rank over all depths and budgets."""
    pairs = []
    for same in groups(_fresh(points), "protocol", "layers", "width").values():
        by_rank = {p.rank: p for p in same if p.held_out and p.held_out > 0}
        full, half = by_rank.get(same[0].dim), by_rank.get(same[0].dim // 2)
        if full and half and same[0].dim % 2 == 0:
            pairs.append((full, half))
    return _fewer_or_more(pairs, "full rank", "twice as many of half rank")


def of_dimension(points: Sequence[dimension.Point]) -> str:
    """One head against two over dimensions."""
    pairs = []
    for same in groups(_fresh(points), "protocol", "dim").values():
        by_split = {p.split: p for p in same if p.held_out and p.held_out > 0}
        if 1 in by_split and 2 in by_split:
            pairs.append((by_split[1], by_split[2]))
    found = _fewer_or_more(pairs, "full rank", "twice as many of half rank")
    if len(pairs) < 2 or not all(_better(pair) for pair in pairs):
        return found
    ends = [pairs[0], pairs[-1]]
    said = " and ".join(f"{_times(pair)} times at d={pair[0].dim}" for pair in ends)
    return f"One head errs less than two in all {len(pairs)} dimensions, {said}"


def _fresh(points: Sequence[Any]) -> list[Any]:
    """The points of models trained on data that never repeat, or all where there are none. Those of
    which only the seed is there that chose their rate are left out: it flatters them."""
    found = [p for p in points if not p.tuning]
    return [p for p in found if p.protocol == "stream"] or found


def _better(pair: Pair) -> bool:
    """Whether the first errs less, as far as seeds can tell."""
    one, other = pair
    alone = one.one_seed or other.one_seed
    return one.held_out < other.held_out and (alone or told_apart(other.values, one.values))


def _times(pair: Pair) -> str:
    return _factor(pair[1].held_out / pair[0].held_out)


def _factor(times: float) -> str:
    """A factor in two digits, written out.

    >>> _factor(5.91), _factor(182.4)
    ('5.9', '180')
    """
    return f"{float(f'{times:.2g}'):g}"


def _fewer_or_more(pairs: Sequence[Pair], few: str, many: str) -> str:
    """How often and by how much the fewer, wider heads err less."""
    # Where runs learned nothing but to answer zero, nothing is compared.
    learned = [pair for pair in pairs if not any(_learned_nothing(p) for p in pair)]
    if not learned:
        if not pairs:
            return ""
        return "Nothing can be compared: the runs have only learned to predict zero (more steps?)"
    better = [pair for pair in learned if _better(pair)]
    worse = [(many_heads, few_heads) for few_heads, many_heads in learned]
    worse = [pair for pair in worse if _better(pair)]
    seeds = sorted({p.n for pair in learned for p in pair})
    single = sum(any(p.one_seed for p in pair) for pair in learned)
    n = f"{'up to ' if len(seeds) > 1 else ''}{seeds[-1]} seeds"
    # One seed says nothing about chance, so it is said how many comparisons rest on it.
    basis = f"{n}; {single} of them with one seed" if single else n
    basis = "one seed each" if single == len(learned) else basis
    if not better and not worse:
        return f"No difference is found between heads of {few} and {many} ({basis})"
    if len(better) < len(worse):
        factors = _range(worse)
        return (
            f"{many[:1].upper()}{many[1:]} do better than heads of {few}: {factors} times less "
            f"error in {len(worse)} of {len(learned)} comparisons at equal parameters ({basis})"
        )
    count = f"{len(better)} of {len(learned)} comparisons"
    count = f"all {len(learned)} comparisons" if len(better) == len(learned) else count
    count = "the one comparison" if len(learned) == 1 else count
    return (
        f"Fewer heads of {few}: {_range(better)} times less error than {many} in {count} at equal "
        f"parameters ({basis})"
    )


def _learned_nothing(p: Errors) -> bool:
    return p.zero > 0


def _range(pairs: Sequence[Pair]) -> str:
    """The least and the largest factor between their errors."""
    factors = sorted(b.held_out / a.held_out for a, b in pairs)
    few, many = _factor(factors[0]), _factor(factors[-1])
    return few if few == many else f"{few} to {many}"
