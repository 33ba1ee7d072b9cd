"""Random weights of the same sizes and layout: what every figure is read against."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from headwise.diagnose.layouts import Layout, Parts, sizes_of


def control_key(parts: Parts, layout: Layout) -> Any:
    """Layers with equal keys have the same control."""
    return sizes_of(parts), layout


def random_parts(parts: Parts, layout: Layout) -> dict[str, Tensor]:
    """Gaussian matrices in the place of a layer's; norms and biases as at the start of training.

    The numbers follow from the sizes alone, so a control is the same everywhere.
    """
    out = {}
    for name, tensor in sorted(parts.items()):
        seed = int.from_bytes(hashlib.sha256(f"{name}{tuple(tensor.shape)}".encode()).digest()[:4])
        generator = torch.Generator().manual_seed(seed)
        if name.endswith("_norm"):
            out[name] = torch.full(tensor.shape, 1.0 - layout.gain_offset)
        elif name.endswith("_bias"):
            out[name] = torch.zeros(tensor.shape)
        else:
            out[name] = torch.randn(tensor.shape, generator=generator)
    return out
