"""AdamW of an ensemble in flat rows: one step moves every model, each at its own rate.

    a <- b1 a + (1 - b1) g        b <- b2 b + (1 - b2) g^2
    w <- w (1 - lr decay) - lr/(1 - b1^t) a / (sqrt(b)/sqrt(1 - b2^t) + eps)

What depends on the step alone is a table, made before the first step in float64. `fused_adamw` is
one Triton kernel over a group's rows; `plain_adamw` is its twin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headwise.training.run import Recipe

TILE = 1024  # numbers of a row that one program of the kernel moves


class Moved(NamedTuple):
    """What a step moves, each (models, numbers of a row)."""

    weights: Tensor
    mean: Tensor  # of gradients
    square: Tensor  # the mean of their squares
    operands: Tensor  # the weights in the operands' type; the same tensor where that is float32

    def of(self, models: slice) -> Moved:
        return Moved(*(t[models] for t in self))

    def copy(self) -> Moved:
        """The same numbers elsewhere."""
        weights = self.weights.clone()
        operands = weights if self.operands is self.weights else self.operands.clone()
        return Moved(weights, self.mean.clone(), self.square.clone(), operands)


class Overflow(NamedTuple):
    """What half precision needs, each (models,)."""

    total: Tensor  # a number that is not finite where a gradient is not: that model stays as it is
    inverse: Tensor  # gradients are taken times this: one over the loss scale


def rate_table(recipe: Recipe) -> Any:
    """(steps, 3) float32: lr/(1 - b1^t), 1/sqrt(1 - b2^t), 1 - lr x weight decay."""
    t = np.arange(1, recipe.steps + 1)
    lr = recipe.rates()
    step_size = lr / (1 - recipe.beta1**t)
    correction = 1 / np.sqrt(1 - recipe.beta2**t)
    kept = 1 - lr * recipe.weight_decay
    with np.errstate(over="ignore"):  # an absurd rate diverges, as it should
        return np.stack((step_size, correction, kept), 1).astype(np.float32)


def plain_adamw(
    moved: Moved, grads: Tensor, rates_3M1: Tensor, recipe: Recipe, overflow: Overflow | None = None
) -> None:
    """One step in place; of `recipe` it reads betas and eps. Leaves `moved.operands` alone."""
    weights, mean, square = moved[:3]
    step_size_M1, correction_M1, kept_M1 = rates_3M1
    before = [weights.clone(), mean.clone(), square.clone()] if overflow else []
    if overflow is not None:
        grads = grads * overflow.inverse.unsqueeze(1)
    mean.lerp_(grads, 1 - recipe.beta1)
    square.mul_(recipe.beta2).addcmul_(grads, grads, value=1 - recipe.beta2)
    update = mean / (square.sqrt().mul_(correction_M1).add_(recipe.eps))
    weights.mul_(kept_M1)
    weights.sub_(update.mul_(step_size_M1))
    if overflow is not None:
        good_M1 = overflow.total.isfinite().unsqueeze(1)
        for new, old in zip((weights, mean, square), before, strict=True):
            new.copy_(torch.where(good_M1, new, old))


def fused_adamw(
    moved: Moved, grads: Tensor, rates_3M1: Tensor, recipe: Recipe, overflow: Overflow | None = None
) -> None:
    """The same as one kernel, which also writes the weights' copy in the operands' type."""
    from headwise.kernels import adamw_triton

    models, numbers = moved.weights.shape
    total, inverse = overflow or (grads, grads)
    adamw_triton.adamw_rows[(-(-numbers // TILE), models)](
        w=moved.weights,
        mean=moved.mean,
        square=moved.square,
        grad=grads,
        half=moved.operands,
        rates=rates_3M1,
        total=total,
        inverse=inverse,
        P=numbers,
        M=rates_3M1.stride(0),  # models of the whole ensemble, of which these are a part
        beta1=recipe.beta1,
        beta2=recipe.beta2,
        eps=recipe.eps,
        HALF=moved.operands.data_ptr() != moved.weights.data_ptr(),
        CHECK=overflow is not None,
        BLOCK=TILE,
    )


class AdamW:
    """The optimiser of an ensemble: its rates block by block, and the step."""

    def __init__(
        self, moved: Moved, recipes: Sequence[Recipe], block_steps: int, fused: bool
    ) -> None:
        device = moved.weights.device
        self.moved, self.recipe = moved, recipes[0]
        self.block_steps = block_steps
        self.step_of = fused_adamw if fused else plain_adamw
        tables = np.stack([rate_table(recipe) for recipe in recipes], -1)[..., None]
        self.table = torch.from_numpy(tables).to(device)  # (all steps, 3, models, 1)
        self.rates = torch.zeros(block_steps, 3, len(recipes), 1, device=device)

    def begin_block(self, block: int) -> None:
        """Bring a block's rates to where the steps, and their CUDA graph, read them."""
        first = block * self.block_steps
        self.rates.copy_(self.table[first : first + self.block_steps])

    def step(
        self,
        i: int,
        models: slice,
        grads: Tensor,
        overflow: Overflow | None = None,
        moved: Moved | None = None,
    ) -> None:
        """Step i of the block for some models, of which `grads` are the gradients; `moved` in the
        place of the ensemble's own."""
        chosen = (moved or self.moved).of(models)
        self.step_of(chosen, grads, self.rates[i][:, models], self.recipe, overflow)
