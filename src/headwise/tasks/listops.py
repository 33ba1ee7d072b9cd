"""ListOps: evaluate a nested expression of MIN, MAX, MEDIAN and SUM MODULO 10 over digits.

[MAX 4 [MIN 8 2 ] 0 ] is 4. An expression is drawn from the root down: an argument is an operation
with probability `nested` while the depth allows, else a digit. Expressions longer than `length`
tokens are drawn again; shorter ones are followed by blanks, which are tokens like any other. The
held-out part is 2,000 expressions drawn once; training uses `examples` others, so that none of them
is held out, however short.
"""

from __future__ import annotations

import functools
import random
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import UsageError, check_whole_numbers
from headwise.tasks.task import Classified

OPERATIONS = ("MIN", "MAX", "MED", "SUM")
CLOSE, BLANK = 10 + len(OPERATIONS), 11 + len(OPERATIONS)
HELD_OUT = 2000


@dataclass(frozen=True)
class ListOps(Classified):
    """The value, 0 to 9, of a nested expression.

    >>> evaluate([11, 4, 10, 8, 2, 14, 0, 14])
    4
    """

    name = "listops"
    length: int = 128
    depth: int = 5
    arguments: int = 5
    nested: float = 0.25
    examples: int = 20_000

    def __post_init__(self) -> None:
        check_whole_numbers(self, 5, "length")
        check_whole_numbers(self, 1, "depth", "examples")
        check_whole_numbers(self, 2, "arguments")
        if (
            isinstance(self.nested, bool)
            or not isinstance(self.nested, int | float)
            or not 0 <= self.nested <= 1
        ):
            raise UsageError(f"nested must be a number from 0 to 1, got {self.nested!r}")
        # 1 and 1.0 are one run, so the field is always a float.
        object.__setattr__(self, "nested", float(self.nested))
        # Expressions that hardly ever fit are refused here rather than in the middle of a training.
        _fitting(random.Random(0), self, set())

    @property
    def tokens(self) -> int:
        """Length of a sequence, blanks included."""
        return self.length

    @property
    def vocab(self) -> int:
        """Ten digits, four operations, the closing bracket and the blank."""
        return BLANK + 1

    @property
    def classes(self) -> int:
        """The digits."""
        return 10

    def sample(
        self, generator: torch.Generator, batch: int, step: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Ids (batch, length) and values (batch,)."""
        ids, values = _pool(self, step is None, generator.device)
        rows = torch.randint(len(ids), (batch,), generator=generator, device=generator.device)
        return ids[rows], values[rows]


def expression(
    rng: random.Random, depth: int, arguments: int, nested: float, most: int = sys.maxsize
) -> list[int]:
    """One expression as ids: digits are themselves, an operation opens and CLOSE ends it.

    It is left unfinished, but longer than `most`, as soon as it cannot fit: its length may grow
    exponentially with depth.
    """
    out = [10 + rng.randrange(len(OPERATIONS))]
    for _ in range(rng.randint(2, arguments)):
        if len(out) >= most:
            break
        deeper = depth > 1 and rng.random() < nested
        if deeper:
            out += expression(rng, depth - 1, arguments, nested, most - len(out))
        else:
            out.append(rng.randrange(10))
    return [*out, CLOSE]


def evaluate(ids: list[int]) -> int:
    """The value of an expression; blanks behind it are passed over."""
    # A stack of open operations, each with the arguments found so far; the bottom entry collects
    # the answer.
    open_ones: list[tuple[int, list[int]]] = [(-1, [])]
    for token in ids:
        if token < 10:
            open_ones[-1][1].append(token)
        elif token < CLOSE:
            open_ones.append((token - 10, []))
        elif token == CLOSE:
            operation, found = open_ones.pop()
            open_ones[-1][1].append(_apply(operation, found))
    return open_ones[0][1][0]


def _apply(operation: int, found: list[int]) -> int:
    match OPERATIONS[operation]:
        case "MIN":
            return min(found)
        case "MAX":
            return max(found)
        case "MED":
            ordered, half = sorted(found), len(found) // 2
            return ordered[half] if len(found) % 2 else (ordered[half - 1] + ordered[half]) // 2
        case _:
            return sum(found) % 10


@functools.lru_cache(4)
def _drawn(task: ListOps, held_out: bool) -> tuple[Tensor, Tensor]:
    # Training draws avoid every held-out expression. Both parts are drawn once and then indexed.
    rng = random.Random(f"listops {'held out' if held_out else 'training'}")
    others = set() if held_out else {tuple(ids) for ids in _drawn(task, True)[0].tolist()}
    drawn = [_fitting(rng, task, others) for _ in range(HELD_OUT if held_out else task.examples)]
    return torch.tensor(drawn), torch.tensor([evaluate(ids) for ids in drawn])


def _fitting(rng: random.Random, task: ListOps, others: set[tuple[int, ...]]) -> list[int]:
    """An expression with its blanks that fits and is none of the others."""
    known = 0
    for _ in range(1000):
        found = expression(rng, task.depth, task.arguments, task.nested, task.length)
        if len(found) <= task.length:
            ids = found + [BLANK] * (task.length - len(found))
            if tuple(ids) not in others:
                return ids
            known += 1
        if known == 100:
            raise UsageError(
                f"hardly any expression of length {task.length} is left when {HELD_OUT:,} are "
                "held out; make it longer"
            )
    raise UsageError(
        f"expressions of depth {task.depth} hardly ever fit length {task.length}; make it longer "
        "or less nested"
    )


@functools.lru_cache(8)
def _pool(task: ListOps, held_out: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    ids, values = _drawn(task, held_out)
    return ids.to(device), values.to(device)
