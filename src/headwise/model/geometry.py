"""What trained heads' scores look like, read from the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headwise.shape import Shape, beyond_plain


def score_geometry(shape: Shape, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Per layer, how near the heads' score forms W_Q^T W_K are to multiples of the identity.

    `score_angle`: the angle between W_Q^T W_K and the identity in degrees; `score_norm`: its norm
    over sqrt(dim). Each is a list over layers of (least, lower quartile, median, upper quartile,
    largest) over the heads. For heads of full rank also with W_Q W_K^T, which is what the rank
    paper's code takes (names ending in _transposed); the two agree when the product is a multiple
    of the identity. Empty for shapes whose queries and keys are not one projection each.
    """
    if shape.latent or shape.num_kv_heads != shape.num_heads or beyond_plain(shape):
        return {}
    H, R, D = shape.num_heads, shape.head_dim, shape.dim
    found: dict[str, list[list[float]]] = {}
    for layer in range(shape.depth):
        # W_Q and W_K of every head, (H, R, D), in float64.
        qkv = weights[f"blocks.{layer}.attention.qkv.weight"].double()
        q, k = (qkv[j * H * R : (j + 1) * H * R].view(H, R, D) for j in (0, 1))
        # For A = W_Q^T W_K (D, D) nothing of size D x D is made: trace A is the sum of W_Q * W_K,
        # and |A|^2 = trace((W_Q W_Q^T)(W_K W_K^T)), a product of R x R matrices.
        trace = (q * k).sum((1, 2))
        norms = {"": ((q @ q.mT) * (k @ k.mT)).sum((1, 2)).sqrt()}
        if R == D:
            norms["_transposed"] = ((q.mT @ q) * (k.mT @ k)).sum((1, 2)).sqrt()
        # The cosine with the identity is trace A / (|A| |I|), and |I| = sqrt(D).
        for name, norm in norms.items():
            cosine = trace / (norm * math.sqrt(D)).clamp_min(torch.finfo(torch.float64).tiny)
            angle = torch.rad2deg(cosine.clamp(-1, 1).arccos())
            for what, values in (("angle", angle), ("norm", norm / math.sqrt(D))):
                found.setdefault(f"score_{what}{name}", []).append(_quartiles(values))
    return found


def _quartiles(values: Tensor) -> list[float]:
    levels = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0], dtype=values.dtype)
    return [float(f"{v:.6g}") for v in torch.quantile(values, levels).tolist()]
