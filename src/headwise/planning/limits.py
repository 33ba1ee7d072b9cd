"""What a shape may cost: one grammar for every limit, on the command line and in Python.

    350M              about: within the tolerance, 1 % unless said otherwise
    <=350M   >=300M   at most, at least
    300M..400M        between, both ends included
    -50%  <=-50%      of what the model of --like costs: about half of it, at most half of it
    =  same           about what that model costs

Standard library only.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from headwise.errors import UsageError, shown
from headwise.planning.units import EXAMPLES, NUMBER, read_amount, written

_PERCENT = re.compile(rf"([+-])\s*({NUMBER})\s*%")
SAME = ("=", "same")


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A range that one cost must lie in, both ends included; `target` is what comes nearest to what
    was meant, for sizes that are solved for."""

    cost: str
    text: str
    low: int | None = None
    high: int | None = None
    target: int
    kind: str = "count"

    def holds(self, value: float) -> bool:
        """Whether a cost is within.

        >>> limit_of("params", "<=350M").holds(350_000_001)
        False
        """
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def distance(self, value: float) -> float:
        """How far a cost is outside, as a share of the end it misses; 0 within."""
        if self.high is not None and value > self.high:
            return (value - self.high) / max(abs(self.high), 1)
        if self.low is not None and value < self.low:
            return (self.low - value) / max(abs(self.low), 1)
        return 0.0

    def __str__(self) -> str:
        """The limit in words, with its exact ends."""
        if self.low is None:
            return f"{self.cost} at most {written(self.high or 0, self.kind)}"
        if self.high is None:
            return f"{self.cost} at least {written(self.low, self.kind)}"
        ends = f"{written(self.low, self.kind)} to {written(self.high, self.kind)}"
        return f"{self.cost} {ends}"


def limit_of(
    cost: str,
    given: str | float,
    *,
    kind: str = "count",
    tolerance: Fraction = Fraction(1, 100),
    base: Fraction | int | None = None,
    flag: str = "",
) -> Limit:
    """The limit that a text or a number stands for; `base` is what the model of --like costs.

    >>> limit_of("params", "350M")
    Limit(cost='params', text='350M', low=346500000, high=353500000, target=350000000, kind='count')
    >>> limit_of("kv_bytes_per_token", "<=-50%", kind="bytes", base=98304).high
    49152
    """
    name = flag or cost
    if isinstance(given, bool) or not isinstance(given, str | int | float):
        raise UsageError(f"{name} must be an amount or a text such as '<=350M', got {shown(given)}")
    if isinstance(given, float) and not (math.isfinite(given) and given >= 0):
        raise UsageError(f"{name} must be a number of at least 0, got {shown(given)}")
    text = given.strip() if isinstance(given, str) else str(given)
    low, high, target = _ends(name, text, kind, tolerance, base)
    fine = Fraction(1, 1000) if kind == "time" else Fraction(1)
    # Costs are whole numbers, so ends are moved inwards to whole numbers; of a time to its 1,000th.
    limit = Limit(
        cost=cost,
        text=text,
        low=None if low is None else _inwards(low, fine, math.ceil),
        high=None if high is None else _inwards(high, fine, math.floor),
        target=_inwards(target, fine, round),
        kind=kind,
    )
    if limit.low is not None and limit.high is not None and limit.low > limit.high:
        between = f"between {float(low or 0):,.3f} and {float(high or 0):,.3f}"
        raise UsageError(
            f"{name} {shown(text)} leaves no whole number {between}; give a wider range or a "
            "larger --tolerance"
        )
    return limit


def _inwards(value: Fraction, fine: Fraction, rounding: object) -> int:
    whole = rounding(value / fine)  # type: ignore[operator]
    return whole if fine == 1 else whole * float(fine)


def _ends(
    name: str, text: str, kind: str, tolerance: Fraction, base: Fraction | int | None
) -> tuple[Fraction | None, Fraction | None, Fraction]:
    """The low and the high end of a limit, and its target."""

    def amount(part: str) -> Fraction:
        return _amount(name, part.strip(), kind, base)

    for sign in ("<=", ">="):
        if text.startswith(sign):
            end = amount(text[2:])
            return (None, end, end) if sign == "<=" else (end, None, end)
    if text[:1] in ("<", ">", "≤", "≥", "~"):
        raise UsageError(f"{name} takes {_forms(kind)}, got {shown(text)}")
    if ".." in text:
        low, _, high = text.partition("..")
        ends = amount(low), amount(high)
        if ends[0] > ends[1]:
            raise UsageError(f"{name} must be a range from low to high, got {shown(text)}")
        return *ends, (ends[0] + ends[1]) / 2
    target = amount(text)
    return target * (1 - tolerance), target * (1 + tolerance), target


def _amount(name: str, text: str, kind: str, base: Fraction | int | None) -> Fraction:
    percent = _PERCENT.fullmatch(text)
    if percent or text in SAME:
        if base is None:
            raise UsageError(
                f"{name} {shown(text)} is relative to a model: give --like config.json, or an "
                f"amount such as {EXAMPLES[kind]}"
            )
        change = Fraction(re.sub("[_,]", "", percent[2])) / 100 if percent else Fraction(0)
        if percent and percent[1] == "-":
            change = -change
        if change <= -1:
            raise UsageError(f"{name} must keep more than 0 % of the model, got {shown(text)}")
        return base * (1 + change)
    if "%" in text:
        raise UsageError(
            f"{name} takes a percentage with its sign, -50% or +10%, got {shown(text)}"
        )
    if not text or text[0] in "+-":
        raise UsageError(f"{name} takes {_forms(kind)}, got {shown(text)}")
    return read_amount(name, text, kind)


def _forms(kind: str) -> str:
    one = EXAMPLES[kind].partition(",")[0]
    return f"{one}, <={one}, >={one}, low..high, -50%, <=-50% or same"
