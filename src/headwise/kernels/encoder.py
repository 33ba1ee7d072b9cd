"""What the kernels of a post-norm layer share: the tensors of its two parts, by name.

Each part ends in z = s0 u0 + alpha (what it computes) + bias, and leaves n(z) = s z/||z||. Weights
are given from where they start in the first model's row; the next model's are a row further on.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class End(NamedTuple):
    """How a part ends: what it adds to, and where it writes (encoder.cuh has the same struct)."""

    bias: Tensor  # rows whose mean is added, float32
    scale0: Tensor  # s0, the scale of the norm before this part
    u0: Tensor  # (models, T, D) float32: that norm's direction, so s0 u0 is the residual
    scale: Tensor  # s, this norm's scale
    u: Tensor  # written, (models, T, D) float32: the direction z/||z||
    y: Tensor  # written, (models, T, D) in the operands' type: s u, the next part's input
    inv: Tensor  # written, (models, T) float32: 1/||z||


class Normed(NamedTuple):
    """What a part left, as its own backward pass reads it."""

    u: Tensor
    x: Tensor
    inv: Tensor

    def of(self, models: slice) -> Normed:
        """The same of some models."""
        return Normed(*(t[models] for t in self))


class AttentionWeights(NamedTuple):
    """The matrices and inner biases of an attention part, or their gradients."""

    qkv: Tensor  # (3 C, D)
    qkv_bias: Tensor  # (3 C,)
    out: Tensor  # (D, C)


class MlpWeights(NamedTuple):
    """The matrices and the inner bias of a feed-forward, or their gradients."""

    up: Tensor  # (F, D)
    up_bias: Tensor  # (F,)
    down: Tensor  # (D, F)


class Gradients(NamedTuple):
    """Where a part's backward pass in CUDA C++ writes.

    A program has a column tile (of heads or hidden units) and some of the token tiles, and sums
    over both are left as partial sums, for somebody else to add:
    - of the input's gradient, one per column tile, or per cluster of two, whose programs add theirs
      up through each other's shared memory before either writes;
    - of the weights' gradients, one per token split.
    """

    dx_partials: Tensor  # (models, partial sums, T, D) in half
    weights: AttentionWeights | MlpWeights
    total: Tensor  # (models,) float32: gains a number that is not finite if a gradient is not
    token_splits: int
    row: int  # numbers from one model's gradients to the next one's
    unscale: float  # gradients of weights are written times this


def from_lane_order(x: Tensor) -> Tensor:
    """Partial sums of an input's gradient with their D columns back in order: a lane writes its 16
    numbers of a row together, two of each eight columns."""
    i = torch.arange(x.shape[-1], device=x.device)
    out = torch.empty_like(x)
    out[..., i % 16 // 2 * 8 + i // 16 * 2 + i % 2] = x
    return out
