"""Which shapes are considered: what is fixed, which sizes vary and how far. Standard library only.

Without a model to start from, a decoder as most are today: rotary positions, RMS norms first, a
gated feed-forward without biases. With one, its neighbours: all that is not said to vary is the
model's.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from headwise.errors import MOST_SIZE, UsageError, nearest, shown
from headwise.planning.fields import KINDS, RATIOS, Choices, choices_of, ratio_of
from headwise.shape import Shape
from headwise.shape.names import field_of

HEAD_DIMS = (32, 64, 96, 128, 192, 256)
SMALL_HEAD_DIMS = (4, 8, 16, 32, 64)  # where no width is above SMALL
SMALL = 256
DECODER = {
    "vocab_size": 32_768,
    "tied": True,
    "activation": "swiglu",
    "norm": "rms",
    "norm_at": "pre",
    "causal": True,
}
ASPECTS = {
    "dim/depth": (Fraction(16), Fraction(160)),
    "inner/dim": (Fraction(1, 2), Fraction(2)),
    "ffn/dim": (Fraction(1), Fraction(8)),
}
EXPERT_ASPECT = Fraction(1, 8), Fraction(4)  # of an expert's width
OF_ASPECTS = {
    "dim/depth": ("dim", "depth"),
    "inner/dim": ("num_heads", "head_dim"),
    "ffn/dim": ("ffn_dim",),
}
DEPTHS_TRIED = (*range(1, 48), *range(48, 96, 2), *range(96, 257, 4))
NEIGHBOURS = Fraction(3, 4), Fraction(5, 4)  # of the width of the model that --like names
DEPTHS = Fraction(1, 2), Fraction(3, 2)  # of its depth
ROTATED = 64  # coordinates of a head, at most, where a latent's part of a key is shared
# Heads times rank is a multiple of the second number where no width is above the first.
INNER = ((SMALL, 8), (2560, 64), (6144, 256), (MOST_SIZE, 512))
WIDTHS = (16, 32, 48, *range(64, 1024, 64), *range(1024, 4096, 128), *range(4096, 8192, 256))
WIDTHS += tuple(range(8192, 32_769, 1024))
MOST_HEADS = 256


@dataclass(frozen=True, kw_only=True)
class Space:
    """Fields that are fixed, choices of those that vary, and rules for those that follow.

    `rotated` is the share of a head's rank that is rotated, or None where the field has choices of
    its own. `solved` is the width that meets the budget: of the feed-forward, or of an expert.
    """

    fixed: Mapping[str, Any]
    choices: Mapping[str, Choices | str]
    ratios: Mapping[str, tuple[Fraction, Fraction]]
    rotated: Fraction | None
    solved: str = "ffn_dim"
    multiple: int = 64
    inner: int = 64  # heads times rank is a multiple of it, where heads are free
    like: Shape | None = field(default=None, compare=False)

    def values(self, name: str) -> Choices:
        """The explicit choices of a field; none where it follows from a rule."""
        given = self.choices.get(name, ())
        return () if isinstance(given, str) else given

    def rule(self, name: str) -> str:
        """The rule that a field follows; nothing where it has choices."""
        given = self.choices.get(name, ())
        return given if isinstance(given, str) else ""


def space_of(
    fields: Mapping[str, Any],
    like: Shape | None = None,
    largest: int | None = None,
    smallest: int | None = None,
    solvable: bool = True,
    multiple: int = 64,
) -> Space:
    """The space of what the user gave, and else the default; `largest` and `smallest` are the
    budget in parameters, which bounds widths that were not given."""
    given: dict[str, Choices | str] = {}
    ratios: dict[str, tuple[Fraction, Fraction]] = {}
    known = sorted({*KINDS, *RATIOS})
    for typed, value in fields.items():
        name = field_of(typed)
        if name in given:
            raise UsageError(f"{typed} is given twice, as two names of one field")
        if name in RATIOS:
            ratios[name] = ratio_of(name, value)
        elif name in KINDS:
            given[name] = choices_of(name, value)
        else:
            raise UsageError(f"unknown field {shown(name)}; {nearest(str(name), known)}")
    ratios_given = dict(ratios)
    # An aspect bounds what was not given: two sizes that were stand as they are.
    usual = ASPECTS if like is None else {"inner/dim": _around_inner(like)}
    for name, sizes in OF_ASPECTS.items():
        if name in usual and not all(size in given for size in sizes):
            ratios.setdefault(name, usual[name])
    if like is not None:
        default, fixed, rotated = _neighbours(like, solvable)
    else:
        default, fixed, rotated = _decoders(given, solvable)
    choices = {**default, **given}
    if "qk_rope_head_dim" in given:
        rotated = Fraction(1) if given["qk_rope_head_dim"] == "head_dim" else None
    experts = choices.get("num_experts", (0 if like is None else like.num_experts,))
    solved = "expert_ffn_dim" if any(experts) else "ffn_dim"
    if solved == "expert_ffn_dim" and solved not in given:
        choices[solved] = "solved" if solvable else _experts_width(like)
        if like is None:
            ratios["ffn/dim"] = ratios_given.get("ffn/dim", EXPERT_ASPECT)
    if solved == "expert_ffn_dim" and "ffn_dim" not in given:  # the width of dense layers
        choices["ffn_dim"] = (0 if like is None else like.ffn_dim,)
    if "dim" not in choices:
        choices["dim"] = _widths(choices, ratios, fixed, smallest, largest)
    widest = max(dim for dim in choices["dim"] if isinstance(dim, int))
    small = like is None and widest <= SMALL
    if small and "head_dim" not in given:
        choices["head_dim"] = SMALL_HEAD_DIMS
    for name in list(choices):
        fixed.pop(name, None)
    if "depth" not in choices:
        choices["depth"] = _depths(choices["dim"], ratios.get("dim/depth"))
    return Space(
        fixed=fixed,
        choices=choices,
        ratios=ratios,
        rotated=rotated,
        solved=solved,
        multiple=multiple,
        inner=next(step for width, step in INNER if widest <= width),
        like=like,
    )


def _decoders(
    given: Mapping[str, Choices | str], solvable: bool
) -> tuple[dict[str, Choices | str], dict[str, Any], Fraction | None]:
    """The default space, without its widths and depths."""
    default: dict[str, Choices | str] = {
        "head_dim": HEAD_DIMS,
        "num_heads": "free",
        "num_kv_heads": "divisors",
        "v_head_dim": "head_dim",
        "ffn_dim": "solved" if solvable else "usual",
    }
    return default, dict(DECODER), Fraction(1)


def _neighbours(
    like: Shape, solvable: bool
) -> tuple[dict[str, Choices | str], dict[str, Any], Fraction | None]:
    """What varies around a model, and what stays as it is."""
    fixed = {f.name: getattr(like, f.name) for f in dataclasses.fields(like)}
    default: dict[str, Choices | str] = {
        "dim": _scaled(like.dim, *NEIGHBOURS, 64 if like.dim < 2048 else 128),
        # Where layers differ by more than their window they are not repeated or left out.
        "depth": (like.depth,) if like.layers else _scaled(like.depth, *DEPTHS, 1),
        "head_dim": tuple(sorted({*HEAD_DIMS, like.head_dim})),
        "num_heads": "free",
        "num_kv_heads": "num_heads" if like.latent else "divisors",
        "v_head_dim": "head_dim" if like.v_head_dim == like.head_dim else (like.v_head_dim,),
        "ffn_dim": "solved" if solvable else (like.ffn_dim,),
    }
    rotated: Fraction | None = Fraction(like.qk_rope_head_dim, like.head_dim)
    if like.latent:
        ranks = {like.kv_lora_rank * times // 4 for times in (1, 2, 3, 4, 6, 8)}
        default["kv_lora_rank"] = tuple(sorted(rank for rank in ranks if rank))
        if rotated != 1:  # the part that all heads share stays as wide
            default["qk_rope_head_dim"], rotated = (like.qk_rope_head_dim,), None
    return default, fixed, rotated


def _experts_width(like: Shape | None) -> Choices:
    if like is None or not like.expert_ffn_dim:
        raise UsageError("experts need a width: give --set expert_ffn_dim=... or a budget")
    return (like.expert_ffn_dim,)


def _scaled(size: int, low: Fraction, high: Fraction, step: int) -> tuple[int, ...]:
    """Multiples of a step around a size, and the size."""
    first, last = -(-size * low // step), size * high // step
    around = {step * times for times in range(max(1, int(first)), int(last) + 1)}
    return tuple(sorted({*around, size}))


def _around_inner(like: Shape) -> tuple[Fraction, Fraction]:
    ratio = Fraction(like.num_heads * like.head_dim, like.dim)
    return min(ratio, Fraction(1, 2)), max(ratio, Fraction(2))


def _widths(
    choices: Mapping[str, Choices | str],
    ratios: Mapping[str, tuple[Fraction, Fraction]],
    fixed: Mapping[str, Any],
    smallest: int | None,
    largest: int | None,
) -> tuple[int, ...]:
    """Widths that a budget leaves possible at the aspects allowed. Bounds are generous: what is
    outside cannot meet the budget."""
    if smallest is None and largest is None:
        return tuple(128 * times for times in (2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64))
    thin, thick = ratios.get("dim/depth", ASPECTS["dim/depth"])
    depths = choices.get("depth")
    found, counts = [], choices.get("num_experts", ())
    experts = max([1, *(n for n in counts if isinstance(n, int))])
    for dim in WIDTHS:
        shallow, deep = (
            max(1, -(-dim // thick)),
            max(1, int(dim // thin) if thin else DEPTHS_TRIED[-1]),
        )
        if depths and not isinstance(depths, str):
            allowed = [d for d in depths if shallow <= d <= deep]
            if not allowed:
                continue
            shallow, deep = min(allowed), max(allowed)
        inner = ratios.get("inner/dim", (Fraction(0), Fraction(100)))
        ffn = ratios.get("ffn/dim", (Fraction(0), Fraction(1000)))
        vocabulary = choices.get("vocab_size") or (fixed.get("vocab_size", 0),)
        tables = [v for v in vocabulary if isinstance(v, int)] or [0]
        least = dim * min(tables) + shallow * dim * dim * (inner[0] + 2 * ffn[0])
        most = 2 * dim * max(tables)
        most += deep * dim * dim * (8 * inner[1] + 3 * ffn[1] * experts + 4)
        if (largest is None or least <= largest) and (smallest is None or most >= smallest):
            found.append(dim)
    if not found:
        raise UsageError(
            "no width meets the parameters at the default aspects; give --set dim=... or other "
            "aspects such as --set dim/depth=1..1000, and a smaller --set vocab_size=..."
        )
    return tuple(found)


def _depths(dims: Choices | str, aspect: tuple[Fraction, Fraction] | None) -> tuple[int, ...]:
    if aspect is None or isinstance(dims, str):
        return DEPTHS_TRIED
    low = max(1, -(-min(dims) // aspect[1]))
    high = max(dims) // aspect[0] if aspect[0] else DEPTHS_TRIED[-1]
    return tuple(d for d in DEPTHS_TRIED if low <= d <= high) or (int(low),)


def said(space: Space) -> str:
    """The space in one line, as --set takes it.

    >>> said(space_of({"dim": 1024, "depth": "12..24"}))[:36]
    'dim=1024, depth=12..24, head_dim=32,'
    """
    order = ("dim", "depth", "head_dim", "num_heads", "num_kv_heads", "v_head_dim", "ffn_dim")
    names = [*order, *(name for name in space.choices if name not in order)]
    parts = [f"{name}={_written(space.choices[name])}" for name in names if name in space.choices]
    fixed = [f"{name}={_one(space.fixed[name])}" for name in DECODER if name in space.fixed]
    aspects = [f"{name}={float(a):g}..{float(b):g}" for name, (a, b) in space.ratios.items()]
    return ", ".join([*parts, *(fixed if space.like is None else ()), *aspects])


def _written(given: Choices | str) -> str:
    """Choices as --set takes them."""
    if isinstance(given, str):
        return given
    if len(given) == 1:
        return _one(given[0])
    ints = all(isinstance(v, int) and not isinstance(v, bool) for v in given)
    steps = {b - a for a, b in itertools.pairwise(given)} if ints else set()
    if len(given) > 2 and len(steps) == 1:
        step = steps.pop()
        return f"{given[0]}..{given[-1]}" + (f":{step}" if step != 1 else "")
    if len(given) > 8:
        return f"{given[0]}..{given[-1]} ({len(given)} values)"
    return ",".join(map(_one, given))


def _one(value: Any) -> str:
    if isinstance(value, tuple):
        return "/".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
