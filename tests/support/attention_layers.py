"""Attention layers with known weights, and numbers as they are printed in tables."""

from typing import Any

import numpy as np
import pytest
import torch
from support.tolerance import seeded
from torch import Tensor

from headwise.model.attention import Attention
from headwise.shape import Shape
from headwise.theory.spectrum import geometric_mean


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=seeded(seed))


def with_weights(shape: Shape, seed: int = 0) -> Attention:
    """A layer of any form in float64, every parameter drawn."""
    layer = Attention(shape).double()
    with torch.no_grad():
        for i, weight in enumerate(layer.parameters()):
            weight.copy_(normal(*weight.shape, seed=1000 * seed + i) * shape.dim**-0.5)
    return layer


def known_draw(
    seed: int, tokens: int, dim: int, heads: int, head_dim: int, std: float
) -> tuple[Attention, Tensor]:
    """The layer and tokens behind a known value: NumPy's generator draws tokens, then by head W_Q,
    W_K, W_V, then W_O."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, dim))
    x = (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)
    heads_3DR = np.stack(
        [[std * rng.standard_normal((dim, head_dim)) for _ in range(3)] for _ in range(heads)]
    )
    layer = Attention(Shape(dim=dim, depth=1, num_heads=heads, head_dim=head_dim)).double()
    with torch.no_grad():
        layer.qkv.weight.copy_(torch.from_numpy(heads_3DR.transpose(1, 0, 3, 2).reshape(-1, dim)))
        layer.out.weight.copy_(
            torch.from_numpy(std * rng.standard_normal((heads * head_dim, dim)).T)
        )
    return layer, torch.from_numpy(x)


def printed(text: str) -> Any:
    """A number as it is printed: half a unit of its last digit either way."""
    digits = len(text.partition(".")[2])
    return pytest.approx(float(text), abs=0.5001 * 10.0**-digits, rel=1e-9)


def geometric_mean_of(values: list[Tensor]) -> float:
    return geometric_mean(torch.stack(values))
