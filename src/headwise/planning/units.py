"""Amounts as people write them: 1.1B, 300k, 64KiB, 2.5e12, 3 TFLOP, 12ms; read exactly, and written
short. Standard library only."""

from __future__ import annotations

import re
from fractions import Fraction

from headwise.errors import MOST_COUNT, UsageError, nearest, shown

THOUSANDS = ("", "k", "M", "G", "T", "P", "E")
BYTES = {"B": 1} | {
    f"{prefix}{unit}": base ** (place + 1)
    for unit, base in (("B", 1000), ("iB", 1024))
    for place, prefix in enumerate("kMGTP" if unit == "B" else "KMGTP")
}
COUNTS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
FLOPS = {f"{prefix}{word}": 1000**place for place, prefix in enumerate(THOUSANDS)
         for word in ("FLOP", "FLOPs", "")}  # fmt: skip
TIMES = {"ms": Fraction(1), "us": Fraction(1, 1000), "µs": Fraction(1, 1000), "s": Fraction(1000)}
UNITS = {
    "count": COUNTS,
    "bytes": {"": 1, **BYTES},
    "flops": FLOPS,
    "time": {"": Fraction(1), **TIMES},  # in milliseconds
}
EXAMPLES = {
    "count": "350M, 1.1B, 300k or 124439808",
    "bytes": "48KiB, 10GB or 49152",
    "flops": "2.5e12, 3TFLOP or 700M",
    "time": "12ms, 0.5s or 800us",
}
NUMBER = r"(?:\d[\d_,]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,2})?"
LONGEST = 60  # characters of an amount
_AMOUNT = re.compile(rf"({NUMBER})\s*([A-Za-zµ]*)")


def read_amount(name: str, text: str, kind: str) -> Fraction:
    """An amount of some kind, exactly.

    >>> read_amount("params", "1.1B", "count"), read_amount("KV bytes", "48KiB", "bytes")
    (Fraction(1100000000, 1), Fraction(49152, 1))
    """
    found = _AMOUNT.fullmatch(text.strip())
    if not found or len(text) > LONGEST:
        raise UsageError(f"{name} must be an amount such as {EXAMPLES[kind]}, got {shown(text)}")
    units = {unit.lower(): size for unit, size in UNITS[kind].items()}
    unit = found[2].lower()
    if unit not in units:
        names = [unit for unit in UNITS[kind] if unit]
        raise UsageError(f"unknown unit {found[2]!r} of {name}; {nearest(found[2], names)}")
    value = Fraction(re.sub("[_,]", "", found[1])) * units[unit]
    if value > MOST_COUNT:
        raise UsageError(f"{name} must be at most {MOST_COUNT:,} (64 bits), got {shown(text)}")
    return value


def written(value: float, kind: str) -> str:
    """An amount in few characters, for tables.

    >>> written(354_871_296, "count"), written(49_152, "bytes"), written(2.1e12, "flops")
    ('354.9M', '48KiB', '2.10T')
    """
    if kind == "time":
        return f"{value:.3g}ms"
    base, names = 1000, THOUSANDS if kind == "flops" else ("", "k", "M", "B", "T")
    if kind == "bytes":
        base, names = 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    size, place = float(value), 0
    while size >= base * 0.99995 and place < len(names) - 1:
        size, place = size / base, place + 1
    if size == int(size) and size < base:
        return f"{int(size)}{names[place]}"
    return f"{size:.{1 if size >= 100 else 2}f}{names[place]}"
