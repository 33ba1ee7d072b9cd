"""Sorting: the tokens are numbers in any order, the answers the same numbers from the smallest."""

from dataclasses import dataclass

import torch

import headwise


@dataclass(frozen=True)
class Sorting(headwise.SquaredError):
    """`tokens` numbers, each written as one coordinate; token i answers the i-th smallest."""

    tokens: int = 16
    in_dim = 1
    answer_dim = 1

    def sample(self, generator, batch, step=None):
        size = (batch, self.tokens, 1)
        numbers = torch.randn(size, generator=generator, device=generator.device)
        return numbers, numbers.sort(1).values

    def baselines(self):
        """Zero; and the mean of the i-th smallest number, whatever the input is."""
        numbers = torch.randn(20_000, self.tokens, generator=torch.Generator().manual_seed(0))
        spread = numbers.sort(1).values.var(0).mean().item()
        return {"zero": 1.0, "mean by place": spread}
