"""What the rank paper's smaller figures say to their questions, in a sentence each. Of models they
speak of data that never repeat, where there are any, and leave out those that learned nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from headwise.experiments.points import Errors, Measured, groups, plural
from headwise.stats import told_apart

if TYPE_CHECKING:
    from headwise.experiments.rank_paper import (
        features,
        learned,
        length,
        positions,
        regression,
        representation,
    )

NEAR, TOWARDS = 10, 45  # degrees: nearly the same direction, and leaning to it
MOST_SAID = 2  # of places in one sentence; each has its line below
NOTHING = "Nothing can be said: the runs have only learned to predict zero (more steps?)"
P = TypeVar("P", bound=Errors)


# ---- computed


def of_features(points: Sequence[features.Point]) -> str:
    """How many heads one error takes, by dimension; keys of length 1 where there are any."""
    kinds = {p.kind: p.draw for p in points}
    kind = "cos-uniform" if "cos-uniform" in kinds else next(iter(kinds))
    lines = {
        dim: [p for p in sorted(same, key=lambda p: p.heads) if p.held_out is not None]
        for (dim,), same in groups([p for p in points if p.kind == kind], "dim").items()
    }
    lines = {dim: line for dim, line in lines.items() if line}
    if len(lines) < 2:
        return ""
    # The smallest error that all dimensions reach, in two digits above it.
    least = max(min(p.held_out or 0.0 for p in line) for line in lines.values())
    digits = 10.0 ** -_place(least)
    error = (int(least / digits) + 1) * digits
    needed = {
        dim: next(p.heads for p in line if p.held_out is not None and p.held_out <= error)
        for dim, line in lines.items()
    }
    (first, heads), *rest = needed.items()
    said = _listed([f"{heads:,} heads at d={first}", *(f"{n:,} at d={d}" for d, n in rest)])
    return f"An error of {error:.2g} takes {said} (of the numbers tried; keys: {kinds[kind]})"


def _place(value: float) -> int:
    """The decimal place of a value's second digit.

    >>> _place(0.1858), _place(0.0123), _place(3.2)
    (2, 3, 1)
    """
    return 1 - int(f"{value:.1e}".split("e")[1])


def of_representation(points: Sequence[representation.Point]) -> str:
    """The largest weight of each dimension, in the corrected form where it is there."""
    right = [p for p in points if p.form == "corrected"] or list(points)
    most = max(p.degree for p in right)
    line = sorted((p for p in right if p.degree == most), key=lambda p: p.dim)
    if len(line) < 2:
        return ""
    first, last = line[0], line[-1]
    return (
        f"The largest weight is {first.peak:.3g} at d={first.dim} and {last.peak:.3g} at "
        f"d={last.dim}, in the {first.form} form with harmonics up to degree {most}"
    )


# ---- trained


def of_learned(points: Sequence[learned.Point]) -> str:
    """How near the score matrices come to a negative multiple of the identity."""
    found = [p for p in _fresh(points) if p.angle is not None]
    known = {p.heads: 180 - p.angle for p in found if p.angle is not None and not p.zero}
    if not known:
        return NOTHING if found else ""
    least, most = min(known.values()), max(known.values())
    became = (
        "nearly a negative multiple of the identity"
        if most <= NEAR
        else "something that leans to a negative multiple of the identity"
        if most <= TOWARDS
        else "no negative multiple of the identity"
        if least > TOWARDS
        else "a negative multiple of the identity at some numbers of heads alone"
    )
    said = _listed([f"{left:.2g} degrees with {_heads(heads)}" for heads, left in known.items()])
    return f"It learns {became}: its scores are off by {said} (a random matrix is off by 90)"


def of_length(points: Sequence[length.Point]) -> str:
    """How much worse the lowest rank is than the highest, at both ends."""
    found = _fresh(points)
    low, high = min(p.rank for p in found), max(p.rank for p in found)
    pairs = {}
    for (count,), same in groups(found, "points").items():
        by_rank = {p.rank: p for p in same if p.held_out and not p.zero}
        if low in by_rank and high in by_rank:
            pairs[count] = (by_rank[low], by_rank[high])
    if low == high or not pairs:
        return ""
    ends = [(count, *pairs[count]) for count in dict.fromkeys((min(pairs), max(pairs)))]
    (count, one, other), *rest = ends
    said = f"{_times(one, other)} as much as heads of rank {high} with {count} points"
    said += "".join(f", and {_times(one, other)} with {count}" for count, one, other in rest)
    return f"Heads of rank {low} err {said}{_on(found)}"


def of_positions(points: Sequence[positions.Point]) -> str:
    """What the best kind of positions does for the lowest rank, beside none and full rank."""
    found, said = _fresh(points), []
    for (layers,), same in groups(found, "layers").items():
        known = [p for p in same if p.held_out is not None and not p.zero]
        low = min((p.rank for p in known), default=0)
        placed = [p for p in known if p.encoding not in ("none", "room")]
        full = [p for p in placed if p.rank == max(q.rank for q in same)]
        of_low = [p for p in placed if p.rank == low]
        if not of_low or not full or full[0].rank == low:
            continue
        best = min(of_low, key=lambda p: p.held_out or 0.0)
        bare = next((p for p in known if (p.rank, p.encoding) == (low, "none")), None)
        room = next((p for p in known if (p.rank, p.encoding) == (low, "room")), None)
        ratio = _times(best, min(full, key=lambda p: p.held_out or 0.0))
        gain = "" if bare is None else f", {_beside(best, bare, len(of_low))} without positions"
        gain += "" if room is None else f", {_beside(best, room, 1)} with a stream as wide"
        said.append(
            f"in {plural(layers, 'layer')} rank {low} errs by {best.held_out:.2g} with its best "
            f"positions ({best.encoding}){gain}, and {ratio} as much as full rank"
        )
    text = "; ".join(said[:MOST_SAID])
    return text and f"{text[:1].upper()}{text[1:]}{_on(found)}"


def of_regression(points: Sequence[regression.Point]) -> str:
    """The best number of heads of each width and depth, and the one that loses most."""
    said = []
    for (width, depth), same in groups(points, "width", "depth").items():
        known = [p for p in same if p.held_out]
        if len(known) < 2:
            continue
        best, worst = (pick(known, key=lambda p: p.held_out or 0.0) for pick in (min, max))
        others = [p for p in known if p is not best]
        alike = [p.heads for p in others if not _apart(p, best, len(others))]
        doubt = f" ({_listed(list(map(str, alike)))} not told apart from it)" if alike else ""
        if len(alike) == len(others):
            counts = f"{known[0].heads} to {known[-1].heads} heads"
            said.append(f"at width {width} and depth {depth}, no best of {counts} is found")
            continue
        said.append(
            f"at width {width} and depth {depth}, {_heads(best.heads)} of rank {best.rank} "
            f"{'errs' if best.heads == 1 else 'err'} least{doubt}; {worst.heads} heads "
            f"of rank {worst.rank} err {_times(worst, best)} as much"
        )
    text = "; ".join(said[:MOST_SAID])
    return text and f"{text[:1].upper()}{text[1:]} ({_seeds(points)})"


# ---- words


def _fresh(points: Sequence[P]) -> list[P]:
    """The points of models trained on data that never repeat, or all where there are none."""
    found = [p for p in points if not p.tuning]
    return [p for p in found if p.protocol == "stream"] or found  # type: ignore[attr-defined]


def _times(one: Measured, other: Measured) -> str:
    """How many times as large the first error is."""
    assert one.held_out
    assert other.held_out
    return f"{float(f'{one.held_out / other.held_out:.2g}'):g} times"


def _apart(one: regression.Point, other: regression.Point, comparisons: int) -> bool:
    """Whether seeds tell two errors after all pairs apart."""
    a, b = ([profile[-1] for profile in p.profiles] for p in (one, other))
    return told_apart(a, b, comparisons)


def _beside(one: Errors, other: Errors, comparisons: int) -> str:
    """How an error stands to that of another encoding, as far as seeds can tell."""
    assert one.held_out
    assert other.held_out
    alone = one.one_seed or other.one_seed
    if not alone and not told_apart(one.values, other.values, comparisons):
        return "not told apart from that"
    less = 1 - one.held_out / other.held_out
    return f"{100 * abs(less):.2g} % {'less' if less > 0 else 'more'} than"


def _on(points: Sequence[Any]) -> str:
    """The data and the seeds behind a sentence, in brackets."""
    data = sorted({p.protocol for p in points})
    words = "data that never repeat" if data == ["stream"] else " and ".join(data)
    return f" ({words}, {_seeds(points)})"


def _seeds(points: Sequence[Any]) -> str:
    counts = sorted({p.n for p in points if p.n})
    if counts in ([], [1]):
        return "one seed each"
    return f"{counts[0]} to {counts[-1]} seeds" if len(counts) > 1 else f"{counts[0]} seeds"


def _heads(count: int) -> str:
    return plural(count, "head")


def _listed(words: Sequence[str]) -> str:
    """One, two and three.

    >>> _listed(["a", "b", "c"])
    'a, b and c'
    """
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)
