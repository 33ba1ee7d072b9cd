"""Look one of N keys up: every key stands in the sequence once, with a value, and some are asked
for.

A pair of a key and a value is one token, so one layer suffices: the query has to select the one
token of N that holds its key, whatever the value beside it, and to read the value. Nothing is
compared but which key it is. With `recall` a key and its value are two tokens, which takes two
layers; with `farthest` whole vectors are compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import UsageError, check_whole_numbers
from headwise.tasks.task import Classified


@dataclass(frozen=True)
class Lookup(Classified):
    """Which value stands beside this key?

    >>> Lookup(keys=8, values=4, queries=2).tokens, Lookup(keys=8, values=4).vocab
    (10, 40)
    """

    name = "lookup"
    keys: int
    values: int
    queries: int = 0  # as many as keys where 0
    ordered = False

    def __post_init__(self) -> None:
        check_whole_numbers(self, 2, "keys", "values")
        check_whole_numbers(self, 0, "queries")
        if self.queries > self.keys:
            raise UsageError(
                f"queries must be at most as many as keys, got queries {self.queries}, keys "
                f"{self.keys}"
            )

    @property
    def asked(self) -> int:
        """How many keys are asked for."""
        return self.queries or self.keys

    @property
    def tokens(self) -> int:
        """One per key, and one per query."""
        return self.keys + self.asked

    @property
    def vocab(self) -> int:
        """Every pair has an id of its own, and every key that is asked for."""
        return self.keys * self.values + self.keys

    @property
    def classes(self) -> int:
        """The values."""
        return self.values

    def sample(
        self, generator: torch.Generator, batch: int, step: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Ids (batch, tokens): pairs in any order, then queries; targets (batch, queries)."""
        device = generator.device
        value_BK = torch.randint(
            self.values, (batch, self.keys), generator=generator, device=device
        )
        # Random numbers in order of size are a permutation: one of the pairs, and one
        # whose first keys are asked for.
        order_2BK = torch.rand(2, batch, self.keys, generator=generator, device=device).argsort(-1)
        shown_BK, asked_BQ = order_2BK[0], order_2BK[1, :, : self.asked]
        pair_BK = shown_BK * self.values + value_BK.gather(1, shown_BK)
        ids_BT = torch.cat((pair_BK, asked_BQ + self.keys * self.values), 1)
        return ids_BT, value_BK.gather(1, asked_BQ)

    def logits(self, outputs: Tensor) -> Tensor:
        """Only the queries, which are the last tokens, are evaluated."""
        return outputs[..., -self.asked :, : self.classes]
