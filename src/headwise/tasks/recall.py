"""Associative recall of many keys at once (MQAR): pairs of a key and a value, then keys whose
values are asked for.

A sequence is k_1 v_1 k_2 v_2 ... k_P v_P q_1 ... q_Q; keys differ within a sequence, values may
repeat, the queries are the keys in another order. Only the answers at the queries are evaluated. A
table that is new in every sequence has to be looked up by matching whole keys: the counterpart of
the nearest-neighbour task for tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import UsageError, check_whole_numbers
from headwise.tasks.task import Classified


@dataclass(frozen=True)
class Recall(Classified):
    """Which value stood behind this key?

    >>> Recall(pairs=8, keys=32, values=16).tokens
    24
    """

    name = "recall"
    pairs: int
    keys: int
    values: int
    queries: int = 0  # as many as pairs where 0

    def __post_init__(self) -> None:
        check_whole_numbers(self, 1, "pairs", "keys")
        check_whole_numbers(self, 2, "values")
        check_whole_numbers(self, 0, "queries")
        if self.keys < self.pairs:
            raise UsageError(
                f"keys must be at least as many as pairs, got keys {self.keys}, pairs {self.pairs}"
            )
        if self.queries > self.pairs:
            raise UsageError(
                f"queries must be at most as many as pairs, got queries {self.queries}, pairs "
                f"{self.pairs}"
            )

    @property
    def asked(self) -> int:
        """How many keys are asked for."""
        return self.queries or self.pairs

    @property
    def tokens(self) -> int:
        """Two per pair, and one per query."""
        return 2 * self.pairs + self.asked

    @property
    def vocab(self) -> int:
        """Values and keys have ids of their own."""
        return self.values + self.keys

    @property
    def classes(self) -> int:
        """The values."""
        return self.values

    def sample(
        self, generator: torch.Generator, batch: int, step: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Ids (batch, tokens), values first and keys behind them; targets (batch, queries)."""
        # The largest random numbers are a draw without replacement: of keys, and of which pairs are
        # asked for.
        device = generator.device
        key_BP = (
            torch.rand(batch, self.keys, generator=generator, device=device)
            .topk(self.pairs)
            .indices
        )
        value_BP = torch.randint(
            self.values, (batch, self.pairs), generator=generator, device=device
        )
        order_BQ = (
            torch.rand(batch, self.pairs, generator=generator, device=device)
            .topk(self.asked)
            .indices
        )
        # Keys follow the values in the vocabulary, and each pair lies side by side.
        key_BP = key_BP + self.values
        pairs_BT = torch.stack((key_BP, value_BP), 2).flatten(1)
        return torch.cat((pairs_BT, key_BP.gather(1, order_BQ)), 1), value_BP.gather(1, order_BQ)

    def logits(self, outputs: Tensor) -> Tensor:
        """Only the queries, which are the last tokens, are evaluated."""
        return outputs[..., -self.asked :, : self.classes]

    def baselines(self) -> dict[str, float]:
        """Equal odds of all values, and of those that the sequence shows."""
        return {
            **super().baselines(),
            "one of the values shown": _among_shown(self.pairs, self.values),
        }


def _among_shown(pairs: int, values: int) -> float:
    """The loss of answering with the values of the sequence by how often they occur: the entropy of
    the empirical law of `pairs` draws from `values` equal ones, in nats.

    The counts are binomial: E[H] = -V E[(c/P) log(c/P)].
    """
    from math import comb, log

    total = 0.0
    # A value occurs `count` times in P pairs with probability C(P, c) (V - 1)^(P - c) / V^P.
    for count in range(1, pairs + 1):
        share = count / pairs
        chance = comb(pairs, count) * (values - 1) ** (pairs - count) / values**pairs
        total -= values * chance * share * log(share)
    return total
