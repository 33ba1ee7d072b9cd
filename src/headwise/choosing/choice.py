"""What `choose` returns: the recommendation as values, and as sentences."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.choosing.learning_curve import Worth
from headwise.choosing.race import Race
from headwise.experiments.points import plural, signed
from headwise.experiments.shapes import heads_in_words
from headwise.shape import Shape
from headwise.stats import Mean

TIE = 0.01  # costs that differ by less than that share are equal in words
ENDS = {
    "one left": "every other shape was ruled out",
    "equal": "all that are left are within epsilon of the leader",
    "seeds": "the seeds are used up",
    "time": "time was up",
    "diverged": "every shape that is left diverged with some seed",
    "failed": "",
}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One shape in the race: what it costs, its rate, and how it did."""

    name: str
    shape: Shape
    params: int
    flops: int | None  # per token, forward; of a model of one's own nobody knows
    kv_bytes: int | None  # per token, of a decoder
    lr: float | None = None
    edge: bool = False  # whether the rate is the smallest or largest that it tried
    tuning_loss: float | None = None  # at that rate, on validation data
    seeds: int = 0
    diverged: int = 0
    loss: float | None = None  # mean over its seeds
    gap: Mean | None = None  # from the leader, at its last look; None: it leads, or no look yet
    out: int | None = None  # seeds of the look at which it was ruled out

    @property
    def cost(self) -> tuple[float, ...]:
        """What a band is ordered by: the cache of a decoder, then arithmetic, then parameters."""
        return (self.kv_bytes or 0, self.flops or 0, self.params)


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What the answer took."""

    tuning: int  # runs by which rates were chosen
    race: int  # runs by which shapes were compared
    grid: int  # runs of every shape at all seeds
    seconds: float  # of wall clock, in this call


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A recommendation with its evidence. `print(choice)` says it."""

    task: str
    unit: str  # of the loss
    best: Shape | None  # the leader; None: nothing can be said yet
    arms: tuple[Arm, ...]
    band: tuple[Arm, ...]  # the leader and what cannot be told apart from it, the cheapest first
    race: Race
    ended: str  # a key of ENDS
    worth: Worth | str  # the lead in training, or why it cannot be said
    seeds_needed: dict[str, int | None]  # by arm of the band: about how many would rule it out
    changes: tuple[str, ...]  # what would change the answer
    spent: Spent
    store: Path
    command: str = ""
    page: Path | None = None

    # -- values

    @property
    def leader(self) -> Arm | None:
        """The arm with the smallest mean loss."""
        return next((arm for arm in self.arms if arm.name == self.race.leader), None)

    @property
    def second(self) -> Arm | None:
        """The arm that comes next to the leader at the last look."""
        looks = self.race.looks
        finite = [gap for gap in looks[-1].gaps if math.isfinite(gap.mean)] if looks else []
        return next((a for a in self.arms if finite and a.name == finite[0].arm), None)

    @property
    def lead(self) -> Mean | None:
        """How far the second is behind, with its interval; None: there is nothing to compare."""
        return self.second.gap if self.second else None

    @property
    def within(self) -> float | None:
        """With probability 1 - delta the leader is within this of the best; None: not known."""
        if not self.race.looks or self.ended == "diverged":
            return None
        return max(0.0, self.race.looks[-1].within)

    @property
    def ruled_out(self) -> tuple[Arm, ...]:
        """The arms that were ruled out, those that lasted longest first."""
        out = [arm for arm in self.arms if arm.out is not None]
        return tuple(sorted(out, key=lambda arm: (-(arm.out or 0), _mean_of(arm))))

    # -- sentences

    @property
    def sentence(self) -> str:
        """The recommendation."""
        leader = self.leader
        if leader is None or self.best is None:
            made = f"{plural(self.spent.tuning, 'run')} of the tuning"
            if self.spent.race:
                made += f" and {self.spent.race} of the race"
            return f"Nothing can be said about {self.task} yet: time was up after {made}."
        if self.ended == "diverged":
            return f"No shape can be named on {self.task}: {ENDS['diverged']}."
        if len(self.band) == 1:
            return f"{leader.name} is best on {self.task}{self._lead_in_words}."
        first = self.band[0]
        cheapest = _cheaper(first, leader)
        some = "these 2" if len(self.band) == 2 else f"these {len(self.band)}"
        apart = "differ by less than epsilon" if self.ended == "equal" else "cannot be told apart"
        return (
            f"On {self.task} {some} {apart}: {_listed([arm.name for arm in self.band])}; "
            f"{cheapest}."
        )

    @property
    def _lead_in_words(self) -> str:
        gap, second = self.lead, self.second
        if gap is None or second is None or gap.low is None or gap.high is None:
            return ": all others diverged"
        return (
            f": its {self.unit} is {signed(gap.mean)[1:]} below that of {second.name} "
            f"({signed(gap.low)[1:]} to {signed(gap.high)[1:]})"
        )

    @property
    def statement(self) -> str:
        """What is claimed, and with which probability."""
        if self.within is None or self.leader is None:
            return ""
        sure = f"With probability {1 - self.race.rule.delta:.3g}"
        of = f"of these {len(self.arms)} shapes at their tuned rates"
        if self.within == 0:
            return f"{sure} {self.leader.name} is the best {of}."
        return (
            f"{sure} {self.leader.name}, which has the smallest mean, is within "
            f"{signed(self.within)[1:]} of the best {of}."
        )

    @property
    def lines(self) -> list[str]:
        """All of it, the recommendation first."""
        spent, leader = self.spent, self.leader
        out = [self.sentence]
        if self.statement:
            out.append(self.statement)
        if leader and self.second and self.lead and len(self.band) == 1:
            out.append(
                f"The lead over {self.second.name} is worth {self.worth}."
                if isinstance(self.worth, Worth)
                else f"What the lead is worth in training cannot be said: {self.worth}."
            )
        if self.ruled_out:
            out.append(
                "Ruled out: " + _listed([_out_in_words(arm) for arm in self.ruled_out]) + "."
            )
        if needed := self._needed_in_words:
            out.append(needed)
        share = spent.race / spent.grid
        out.append(
            f"{plural(spent.race, 'run')} of {spent.grid} that all seeds of all shapes would take "
            f"({share:.0%}), after {spent.tuning} to tune rates; it ended because "
            f"{ENDS.get(self.ended) or self.ended}."
        )
        return [*out, *(f"What would change this: {line}" for line in self.changes)]

    @property
    def _needed_in_words(self) -> str:
        known = {name: n for name, n in self.seeds_needed.items() if n is not None}
        unknown = [name for name, n in self.seeds_needed.items() if n is None]
        words = [f"about {n} for {name}" for name, n in known.items()]
        if unknown:
            words.append(f"more than 1,000 for {_listed(unknown)}")
        return "Seeds to tell the others from the leader: " + _listed(words) + "." if words else ""

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def __repr__(self) -> str:
        where = f"\npage: {self.page}" if self.page else ""
        return f"{self}{where}"

    def _repr_html_(self) -> str:
        """For a notebook."""
        first, *others = self.lines
        items = "".join(f"<li>{html.escape(line)}</li>" for line in others)
        head, *body = self.table
        cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in body
        )
        table = f"<table><tr>{cells}</tr>{rows}</table>"
        return f"<b>{html.escape(first)}</b><ul>{items}</ul>{table}"

    @property
    def table(self) -> list[list[str]]:
        """The headings, then a line per shape: the band by cost, then what was ruled out."""
        head = ["shape", "stands", self.unit, "from the leader", "rate", "seeds", "parameters",
                "FLOPs per token", "KV bytes per token"]  # fmt: skip
        rest = [arm for arm in self.arms if arm not in self.band and arm.out is None]
        arms = (*self.band, *self.ruled_out, *rest)
        return [head, *(self._cells(arm) for arm in arms)]

    def _cells(self, arm: Arm) -> list[str]:
        return [
            arm.name,
            self._stands(arm),
            _number(arm.loss),
            "" if arm.gap is None else _gap_in_words(arm.gap),
            ("" if arm.lr is None else f"{arm.lr:g}") + (" (edge)" if arm.edge else ""),
            f"{arm.seeds}" + (f", {arm.diverged} diverged" if arm.diverged else ""),
            f"{arm.params:,}",
            "-" if arm.flops is None else f"{arm.flops:,}",
            "-" if arm.kv_bytes is None else f"{arm.kv_bytes:,}",
        ]

    def _stands(self, arm: Arm) -> str:
        if arm.out is not None:
            return f"out at {arm.out} seeds"
        if not self.race.looks:
            return "not compared"
        return "leads" if arm.name == self.race.leader else "not told apart"

    def to_json(self) -> dict[str, Any]:
        """As values that JSON has; what is infinite is null."""
        values = {
            "task": self.task,
            "sentence": self.sentence,
            "statement": self.statement,
            "best": None if self.best is None else self.best,
            "leader": self.leader.name if self.leader else None,
            "lead": self.lead,
            "within": self.within,
            "delta": self.race.rule.delta,
            "epsilon": self.race.rule.epsilon,
            "band": [arm.name for arm in self.band],
            "worth": self.worth,
            "arms": self.arms,
            "looks": self.race.looks,
            "seeds_needed": self.seeds_needed,
            "changes": self.changes,
            "ended": self.ended,
            "spent": self.spent,
            "store": str(self.store),
            "page": None if self.page is None else str(self.page),
        }
        return _plain(values)


# ---- words


def names_of(shapes: Sequence[Shape]) -> list[str]:
    """A name for every shape, as short as tells them apart.

    >>> names_of([Shape(dim=8, depth=1, num_heads=2), Shape(dim=8, depth=2, num_heads=2)])
    ['2 x 4 in 1 layer', '2 x 4 in 2 layers']
    """
    names = [f"{heads_in_words(s)} in {plural(s.depth, 'layer')}" for s in shapes]
    for field, word in (("dim", "width"), ("ffn_dim", "feed-forward")):
        values: dict[str, set[int]] = {}
        for name, shape in zip(names, shapes, strict=True):
            values.setdefault(name, set()).add(getattr(shape, field))
        names = [
            f"{name}, {word} {getattr(shape, field)}" if len(values[name]) > 1 else name
            for name, shape in zip(names, shapes, strict=True)
        ]
    if len(set(names)) < len(names):
        twice = {name for name in names if names.count(name) > 1}
        names = [f"{n} (shape {i})" if n in twice else n for i, n in enumerate(names, 1)]
    return names


def _cheaper(first: Arm, leader: Arm) -> str:
    """What the cheapest of a band saves beside its leader."""
    for what, a, b in (
        ("the KV cache", first.kv_bytes, leader.kv_bytes),
        ("the FLOPs", first.flops, leader.flops),
        ("the parameters", first.params, leader.params),
    ):
        if a is not None and b and a < (1 - TIE) * b:
            share = "half of" if abs(a / b - 0.5) < TIE / 2 else f"{a / b:.2f} of"
            return f"the cheapest, {first.name}, has {share} {what} of {leader.name}"
    return f"none of them is cheaper than {leader.name}, which has the smallest mean"


def _out_in_words(arm: Arm) -> str:
    why = f"{arm.diverged} diverged" if arm.diverged else ""
    if not why and arm.gap is not None:
        why = _gap_in_words(arm.gap)
    return f"{arm.name} at {arm.out} seeds ({why})"


def _gap_in_words(gap: Mean) -> str:
    if gap.low is None or gap.high is None:
        return "diverged"
    return f"{signed(gap.mean)} ± {signed((gap.high - gap.low) / 2)[1:]}"


def _mean_of(arm: Arm) -> float:
    return math.inf if arm.gap is None else arm.gap.mean


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if abs(value) >= 0.001 else f"{value:.2e}"


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words)


def _plain(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists, infinity as null, all the way down."""
    if isinstance(value, Mean):
        return {name: _plain(part) for name, part in value._asdict().items()}
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
