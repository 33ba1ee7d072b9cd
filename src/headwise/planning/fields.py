"""Choices of a field, as people write them: one value, 12..24, 512..4096:64, or 64,96,128. Standard
library only."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from headwise.errors import MOST_SIZE, UsageError, nearest, shown
from headwise.planning.units import LONGEST, NUMBER
from headwise.shape import (
    ACTIVATIONS,
    ATTN_GATES,
    NORM_PLACES,
    NORMS,
    POSITIONS,
    QK_NORMS,
    ROPE_PLACES,
    Shape,
)

Choices = tuple[Any, ...]
# What a plan varies; the others are taken over from the model of --like.
KINDS = {
    f.name: str(f.type) for f in dataclasses.fields(Shape) if f.name not in ("layers", "extras")
}
STEPS = {"dim": 64, "ffn_dim": 64, "head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 64}
STEPS |= {"q_lora_rank": 64, "expert_ffn_dim": 64, "vocab_size": 64}
WORDS = {
    "activation": ACTIVATIONS,
    "norm": NORMS,
    "norm_at": NORM_PLACES,
    "qk_norm": QK_NORMS,
    "positions": POSITIONS,
    "attn_gate": ATTN_GATES,
    "rope_at": ROPE_PLACES,
}
RULES = {  # a field that follows from others
    "num_heads": ("free",),
    "num_kv_heads": ("divisors", "num_heads"),
    "v_head_dim": ("head_dim",),
    "qk_rope_head_dim": ("head_dim",),
    "ffn_dim": ("solved", "usual"),
    "expert_ffn_dim": ("solved",),
}
RATIOS = ("dim/depth", "inner/dim", "ffn/dim")
MOST_CHOICES = 1_000_000
FINEST = 1_000_000  # denominator of a ratio, so that it can be compared in 64 bits


def choices_of(name: str, given: Any) -> Choices | str:
    """The values that a field may take, in the order given; a text for a rule such as divisors.

    >>> choices_of("dim", "512..768"), choices_of("head_dim", "64,128"), choices_of("depth", 12)
    ((512, 576, 640, 704, 768), (64, 128), (12,))
    >>> choices_of("windows", "512/512/0,0")
    ((512, 512, 0), (0,))
    """
    kind = KINDS[name]
    if isinstance(given, str):
        text = given.strip()
        if text in RULES.get(name, ()):
            return text
        values = [value for part in text.split(",") for value in _values(name, kind, part.strip())]
    elif name == "windows" and isinstance(given, list | tuple):
        patterns = given if given and isinstance(given[0], list | tuple) else [given]
        values = [tuple(pattern) for pattern in patterns]
    elif isinstance(given, list | tuple | range | set | frozenset):
        values = [value for part in given for value in _one(name, kind, part)]
    else:
        values = list(_one(name, kind, given))
    found = tuple(dict.fromkeys(values))
    if not found:
        raise UsageError(f"{name} needs at least one choice, got {shown(given)}")
    if len(found) > MOST_CHOICES:
        raise UsageError(f"{name} must be at most {MOST_CHOICES:,} choices, got {len(found):,}")
    return found


def _one(name: str, kind: str, value: Any) -> Iterable[Any]:
    """A value that Python gave."""
    if isinstance(value, str):
        return _values(name, kind, value)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if ("int" in kind and "tuple" not in kind and not whole) or (
        kind == "bool" and not isinstance(value, bool)
    ):
        raise UsageError(f"{name} takes {_forms(name, kind)}, got {shown(value)}")
    return [value]


def _values(name: str, kind: str, text: str) -> Iterable[Any]:
    """The values of one part between commas."""
    wrong = UsageError(f"{name} takes {_forms(name, kind)}, got {shown(text)}")
    try:
        if kind == "bool":
            return [{"true": True, "false": False}[text.lower()]]
        if name == "windows":
            return [tuple(int(part) for part in text.split("/"))]
        if "float" in kind:
            return [float(text)]
        if kind == "str":
            if text not in WORDS.get(name, (text,)):
                raise UsageError(f"unknown {name} {shown(text)}; {nearest(text, WORDS[name])}")
            return [text]
        if ".." in text:
            return _range(name, text, wrong)
        return [_whole(text)]
    except (ValueError, KeyError, OverflowError) as error:
        raise error if isinstance(error, UsageError) else wrong from None


def _range(name: str, text: str, wrong: UsageError) -> Iterable[int]:
    ends, _, step_text = text.partition(":")
    low_text, _, high_text = ends.partition("..")
    low, high = _whole(low_text), _whole(high_text)
    step = _whole(step_text) if step_text else STEPS.get(name, 1)
    if step < 1 or low > high:
        raise wrong
    if (high - low) // step >= MOST_CHOICES:
        count = (high - low) // step + 1
        raise UsageError(f"{name} must be at most {MOST_CHOICES:,} choices, got {count:,}")
    return range(low, high + 1, step)


def _whole(text: str) -> int:
    value = int(text.strip().replace("_", ""))
    if not 0 <= value <= MOST_SIZE:
        raise UsageError(f"a size must be from 0 to {MOST_SIZE:,}, got {shown(value)}")
    return value


def _forms(name: str, kind: str) -> str:
    if kind == "bool":
        return "true, false or true,false"
    if name == "windows":
        return "patterns such as 512/512/0, several separated by commas"
    if "float" in kind:
        return "numbers separated by commas"
    if kind != "int":
        return "words separated by commas"
    rules = "".join(f", {rule}" for rule in RULES.get(name, ()))
    return f"a whole number, low..high, low..high:step or a,b,c{rules}"


def ratio_of(name: str, given: Any) -> tuple[Fraction, Fraction]:
    """The ends of a ratio such as dim/depth, both included.

    >>> ratio_of("inner/dim", "0.5..2")
    (Fraction(1, 2), Fraction(2, 1))
    """
    ends = str(given).split("..") if isinstance(given, str | int | float) else list(given)
    low, high = Fraction(1), Fraction(0)
    written = [str(end).strip() for end in ends]
    if len(ends) <= 2 and all(re.fullmatch(NUMBER, w) and len(w) <= LONGEST for w in written):
        both = written if len(written) == 2 else [*written, *written]
        low, high = (Fraction(w).limit_denominator(FINEST) for w in both)
    if not (0 <= low <= high <= MOST_SIZE and high > 0):
        raise UsageError(f"{name} takes low..high, such as 0.5..2, got {shown(given)}")
    return low, high
