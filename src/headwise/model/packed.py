"""Models of one ensemble that cut the same width into different heads, and the order of heads that
the short CPU kernel wants.

That kernel reads a projection with heads innermost. The rows of the projection, and the columns of
the output weights, are put in (rank, head) order: weights are small, so that costs less than moving
activations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.model.backends import Call, choose_backend
from headwise.shape import Shape

HeadGroups = Sequence[tuple[int, Shape]]  # (how many models, their shape), in the models' order


def takes_packed(s: Shape, x: Tensor, window: int, hard: bool, backend: str) -> bool:
    """Whether the short CPU kernel takes plain heads of shape s as a projection of x holds them."""
    # The kernel has no grouped KV heads, norms or rotation, and its values are as wide as its
    # rank.
    equal = s.num_kv_heads == s.num_heads and s.v_head_dim == s.head_dim
    if not equal or s.qk_norm != "none" or s.qk_rope_head_dim:
        return False
    # What the backends' table says about this call decides the rest.
    device, tokens = x.device.type, x.shape[-2]
    half = torch.is_autocast_enabled(device)
    call = Call(
        device=device,
        dtype=torch.get_autocast_dtype(device) if half else x.dtype,
        batch=math.prod(x.shape[:-2]),
        heads=s.num_heads,
        kv_heads=s.num_heads,
        queries=tokens,
        keys=tokens,
        rank=s.head_dim,
        width=s.head_dim,
        causal=s.causal,
        window=window,
        hard=hard,
    )
    return backend in ("auto", "short") and choose_backend(call).backend == "short"


def heads_last(
    t: Tensor, axis: int, projections: int, groups: HeadGroups, chosen: list[bool]
) -> Tensor:
    """Weights with (head, rank) order turned to (rank, head) order along an axis of `projections`
    such blocks, for the head groups that are chosen."""

    def swap(part: Tensor, s: Shape) -> Tensor:
        blocks = part.unflatten(axis, (projections, s.num_heads, s.head_dim))
        return blocks.transpose(axis, axis - 1).flatten(axis - 2, axis)

    parts = t.split([models for models, _ in groups]) if len(groups) > 1 else (t,)
    done = [
        swap(part, s) if swapped else part
        for part, (_, s), swapped in zip(parts, groups, chosen, strict=True)
    ]
    return torch.cat(done) if len(done) > 1 else done[0]
