"""Heads back to tensors, in the layout that they were read from; the inverse of `heads_of`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from headwise.diagnose.layouts import Heads, Layout, heads_of, is_turned
from headwise.diagnose.names import GAINS
from headwise.errors import UsageError
from headwise.shape import Shape


def raw_heads(
    parts: Mapping[str, Tensor], layout: Layout, shape: Shape | None = None, where: str = ""
) -> Heads:
    """One layer's heads as they are stored, gains of norms left where they are; checked against
    the sizes of a shape."""
    plain = {part: tensor for part, tensor in parts.items() if part not in GAINS}
    heads = heads_of(plain, dataclasses.replace(layout, qk_norm="none"), where)
    if shape is not None:
        H, K, R, V = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.v_head_dim
        wanted = [(H, R, shape.dim), (K, R, shape.dim), (K, V, shape.dim), (H, V, shape.dim)]
        for name, size in zip("qkvo", wanted, strict=True):
            if (found := tuple(getattr(heads, name).shape)) != size:
                raise UsageError(f"{where}{name} by head must be {size}, as the config says, got "
                                 f"{found}")  # fmt: skip
    return heads


def stored_parts(heads: Heads, parts: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """The tensors of new heads, part by part as `parts` had them, in their precision."""
    rows = {name: t.flatten(0, 1) for name, t in (("q", heads.q), ("k", heads.k), ("v", heads.v))}
    bias = {name: t.flatten() for name, t in heads.biases.items()}
    out: dict[str, Tensor] = {}
    turn = bool(layout.transposed)
    if "qkv" in parts:
        turn = is_turned(parts["qkv"].squeeze().shape, layout)
    for part, old in parts.items():
        if part in ("q", "k", "v"):
            new = rows[part].T if turn else rows[part]
        elif part == "qkv":
            new = _fused(heads.q, heads.k, heads.v, layout)
            new = new.T if turn else new
        elif part == "o":
            flat = heads.o.flatten(0, 1)
            new = flat if turn else flat.T
        elif part in ("q_bias", "k_bias", "v_bias"):
            new = bias[part[0]]
        elif part == "qkv_bias":
            b_q, b_k, b_v = (heads.biases[n][..., None] for n in "qkv")
            new = _fused(b_q, b_k, b_v, layout)[:, 0]
        elif part == "o_bias" or part in GAINS:
            new = old
        else:
            raise UsageError(f"convert does not know how to write {part}")
        out[part] = new.to(old.dtype).contiguous()
    return out


def _fused(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """Rows of queries, keys and values (heads, width, D) as one matrix."""
    if layout.fused == "grouped":  # per KV head: its queries, then its key, then its value
        blocks = q.unflatten(0, (len(k), -1)).flatten(1, 2)
        return torch.cat((blocks, k, v), 1).flatten(0, 1)
    if layout.fused == "codegen":  # four parts, each queries, values, keys
        if len(q) % 4:
            raise UsageError(f"codegen needs a multiple of four heads, got {len(q)}")
        parts = [t.flatten(0, 1).unflatten(0, (4, -1)) for t in (q, v, k)]
        return torch.cat(parts, 1).flatten(0, 1)
    return torch.cat([t.flatten(0, 1) for t in (q, k, v)])
