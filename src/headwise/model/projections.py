"""The projections of `Attention`: from a layer's input to queries, keys and values by head.

Queries, keys and values are one product (`qkv`) or one each (`separate`), or keys and values grow
from one latent (MLA).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import UsageError
from headwise.model.layers import Norm
from headwise.model.linear import (
    GroupedLinear,
    as_made,
    linear,
    linear_layer,
    reset_linears,
)
from headwise.model.rotary import Rotary, rotate
from headwise.shape import Shape


class Projections(nn.Module):
    """The parameters of one attention layer of `shape`, and what is made with them of its input."""

    def __init__(self, shape: Shape, models: int | None, separate: bool) -> None:
        super().__init__()
        if separate and (models is not None or shape.latent or shape.q_lora_rank):
            raise UsageError(
                "separate needs a single model whose queries, keys and values are products of x, "
                f"got models={models}, kv_lora_rank={shape.kv_lora_rank}, "
                f"q_lora_rank={shape.q_lora_rank}"
            )
        self.shape = shape
        self.ensemble = models is not None
        self.separate = separate
        # Latent attention (MLA) projects down to a latent of width C and up again, H (R - rope) for
        # keys and H V for values. Otherwise queries, keys and values are one product with a matrix
        # of H R + KV (R + V) rows.
        D, H, KV = shape.dim, shape.num_heads, shape.num_kv_heads
        R, V, bias = shape.head_dim, shape.v_head_dim, shape.qkv_bias
        if shape.latent:
            rope, C = shape.qk_rope_head_dim, shape.kv_lora_rank
            if shape.q_lora_rank:
                self.q_down = linear_layer(D, shape.q_lora_rank, bias, models)
                self.q_norm = Norm("rms", shape.q_lora_rank, models)
            self.q = linear_layer(shape.q_lora_rank or D, H * R, False, models)
            self.kv_down = linear_layer(D, C + rope, bias, models)
            self.kv_norm = Norm("rms", C, models)
            self.kv = linear_layer(C, H * (R - rope + V), False, models)
        else:
            rows = sum(self.kv_rows)
            if shape.q_lora_rank:
                self.q_down = linear_layer(D, shape.q_lora_rank, bias, models)
                self.q_down_norm = Norm("rms", shape.q_lora_rank, models)
                self.q = linear_layer(shape.q_lora_rank, H * R, False, models)
                self.kv = linear_layer(D, rows, bias, models)
            elif separate:
                self.q_proj = linear_layer(D, H * R, bias)
                self.k_proj = linear_layer(D, KV * R, bias)
                if not shape.shared_kv:
                    self.v_proj = linear_layer(D, KV * V, bias)
            else:
                self.qkv = linear_layer(D, H * R + rows, bias, models)
            if shape.qk_norm != "none":
                norm = "rms-free" if shape.qk_norm == "free" else "rms"
                heads = (H, KV) if shape.qk_norm == "all" else (1, 1)
                self.q_norm, self.k_norm = (Norm(norm, count * R, models) for count in heads)
        if shape.attn_gate != "none":
            gates = H if shape.attn_gate == "head" else H * V
            self.gate = linear_layer(D, gates, bias, models)
        # Every averaged module has an output bias of its own, so their mean is added.
        inner = H * V
        if shape.o_lora_rank:
            self.out_down = GroupedLinear(inner, shape.o_lora_rank, shape.o_groups, models)
            inner = shape.o_groups * shape.o_lora_rank
        self.out = linear_layer(inner, D, False, models)
        lead = () if models is None else (models,)
        zeros = torch.zeros(*lead, shape.average, D) if shape.out_bias else None
        self.out_bias = None if zeros is None else nn.Parameter(zeros)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Weights, biases and gains as they are made, such as after `to_empty`."""
        reset_linears(self.children())
        for part in self.children():
            if isinstance(part, Norm):
                part.reset_parameters()
        if self.out_bias is not None:
            self.out_bias.zero_()

    @property
    def kv_rows(self) -> tuple[int, ...]:
        """Rows of the projection that are keys, and those that are values where they are not the
        keys."""
        s = self.shape
        keys = s.num_kv_heads * s.head_dim
        return (keys,) if s.shared_kv else (keys, s.num_kv_heads * s.v_head_dim)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any, **more: Any) -> None:
        """Weights of layers that are separate load where they are one, and the other way round."""
        s = self.shape
        names = ("q_proj", "k_proj", "v_proj")[: 1 + len(self.kv_rows)]
        for kind in ("weight", "bias"):
            one, each = f"{prefix}qkv.{kind}", [f"{prefix}{name}.{kind}" for name in names]
            if self.separate and one in state_dict:
                rows = state_dict.pop(one).split((s.num_heads * s.head_dim, *self.kv_rows))
                state_dict.update(zip(each, rows, strict=True))
            elif not self.separate and all(name in state_dict for name in each):
                state_dict[one] = torch.cat([state_dict.pop(name) for name in each])
        super()._load_from_state_dict(state_dict, prefix, *rest, **more)

    # ---- queries, keys and values by one projection each

    def split_heads(self, t: Tensor, width: int) -> Tensor:
        """(..., tokens, heads * width) to (..., heads, tokens, width)."""
        return t.unflatten(-1, (-1, width)).transpose(-3, -2)

    def split_qkv(
        self, s: Shape, qkv: Tensor, start: int = 0, rotary: Rotary | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A projection (..., tokens, H R + KV (R + V)) as queries, keys and values by head."""
        R, KV = s.head_dim, s.num_kv_heads
        if s.shared_kv:
            q, k = qkv.split((s.num_heads * R, KV * R), -1)
            keys = self.place_keys(s, k, start, rotary)
            return self.place_queries(s, q, start, rotary), keys, keys
        q, k, v = qkv.split((s.num_heads * R, KV * R, KV * s.v_head_dim), -1)
        return (
            self.place_queries(s, q, start, rotary),
            self.place_keys(s, k, start, rotary),
            self.split_heads(v, s.v_head_dim),
        )

    def place_queries(
        self, s: Shape, q: Tensor, start: int = 0, rotary: Rotary | None = None
    ) -> Tensor:
        """Queries by head, normalised and rotated; the first stands at position `start`."""
        norm = None if s.qk_norm == "none" else self.q_norm
        return self._placed(s, q, norm, start, rotary)

    def place_keys(
        self, s: Shape, k: Tensor, start: int = 0, rotary: Rotary | None = None
    ) -> Tensor:
        """Keys by head, likewise."""
        norm = None if s.qk_norm == "none" else self.k_norm
        return self._placed(s, k, norm, start, rotary)

    def _placed(
        self, s: Shape, t: Tensor, norm: Norm | None, start: int, rotary: Rotary | None
    ) -> Tensor:
        # A gain after the rotation would make the scores depend on absolute positions. Under
        # autocast a norm answers in float32.
        if norm is not None and s.qk_norm == "all":
            t, norm = norm(t).to(t.dtype), None
        t = self.split_heads(t, s.head_dim)
        t = t if norm is None else norm(t).to(t.dtype)
        return self._rotated(s, t, start, rotary) if s.qk_rope_head_dim else t

    def _rotated(self, s: Shape, t: Tensor, start: int, rotary: Rotary | None) -> Tensor:
        return rotate(
            t, s.qk_rope_head_dim, s.rope_theta, start, rotary,
            at=s.rope_at, interleaved=s.rope_interleaved,
        )  # fmt: skip

    def projections(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """W_Q, W_K, W_V and their biases; W_Q is left out where queries have a latent, W_V is W_K
        where keys are the values."""
        s = self.shape
        biases: list[Tensor | None]
        if self.separate:
            parts = [self.q_proj, self.k_proj, *([] if s.shared_kv else [self.v_proj])]
            weights, biases = [part.weight for part in parts], [part.bias for part in parts]
        else:
            part = self.kv if s.q_lora_rank else self.qkv
            sizes = self.kv_rows if s.q_lora_rank else (s.num_heads * s.head_dim, *self.kv_rows)
            weights = list(part.weight.split(sizes))
            biases = [None for _ in sizes] if part.bias is None else list(part.bias.split(sizes))
        if s.shared_kv:
            weights, biases = [*weights, weights[-1]], [*biases, biases[-1]]
        return weights, biases

    def project(
        self, x: Tensor, start: int = 0, rotary: Rotary | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values by three products: compiled, their gradients then need not be
        copied into one tensor. Only the weights' are, and those are small."""
        return self.queries(x, start, rotary), *self.keys_values(x, start, rotary)

    def queries(self, x: Tensor, start: int = 0, rotary: Rotary | None = None) -> Tensor:
        """Queries by head, through a latent of their own where the shape has one."""
        if self.shape.q_lora_rank:
            q = self.q(self.q_down_norm(self.q_down(x)))
        else:
            (q,) = self._products(x, slice(1))
        return self.place_queries(self.shape, q, start, rotary)

    def keys_values(
        self, x: Tensor, start: int = 0, rotary: Rotary | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values by head."""
        s = self.shape
        if s.q_lora_rank:  # one product: no gradient of queries to be joined with theirs
            found = list(self.kv(x).split(self.kv_rows, -1))
        else:
            found = self._products(x, slice(1, None))
        keys = self.place_keys(s, found[0], start, rotary)
        return keys, keys if s.shared_kv else self.split_heads(found[1], s.v_head_dim)

    def _products(self, x: Tensor, chosen: slice) -> list[Tensor]:
        """Some of W_Q x, W_K x and W_V x, each by a product of its own where that can be."""
        s = self.shape
        if self.separate:
            parts = [self.q_proj, self.k_proj, *([] if s.shared_kv else [self.v_proj])]
            return [part(x) for part in parts[chosen]]
        sizes = (s.num_heads * s.head_dim, *self.kv_rows)
        if not as_made(self.qkv):
            return list(self.qkv(x).split(sizes, -1)[chosen])
        weights, biases = self.projections()
        pairs = list(zip(weights, biases, strict=True))[: len(sizes)][chosen]
        return [linear(x, weight, bias) for weight, bias in pairs]

    # ---- keys and values from a latent (MLA)

    def latent_queries(self, x: Tensor, start: int = 0, rotary: Rotary | None = None) -> Tensor:
        """Queries by head, through a latent of their own where the shape has one."""
        s = self.shape
        q = self.q(self.q_norm(self.q_down(x)) if s.q_lora_rank else x)
        return self._normalised(self._rotated(s, self.split_heads(q, s.head_dim), start, rotary))

    def compress(
        self, x: Tensor, start: int = 0, rotary: Rotary | None = None
    ) -> tuple[Tensor, Tensor]:
        """The latent (..., tokens, C), and the rotated key part that all heads share."""
        s = self.shape
        latent, shared = self.kv_down(x).split((s.kv_lora_rank, s.qk_rope_head_dim), -1)
        shared = self._rotated(s, shared.unsqueeze(-3), start, rotary).squeeze(-3)
        return self.kv_norm(latent), shared

    def expand(self, latent: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """Every head's keys and values from the latent and the shared part."""
        s = self.shape
        rope, nope = s.qk_rope_head_dim, s.head_dim - s.qk_rope_head_dim
        kv = self.split_heads(self.kv(latent), nope + s.v_head_dim)
        k, v = kv.split((nope, s.v_head_dim), -1)
        if rope:
            k = torch.cat((k, shared.unsqueeze(-3).expand(*k.shape[:-1], rope)), -1)
        return self._normalised(k), v

    def _normalised(self, t: Tensor) -> Tensor:
        """Queries or keys of heads with a latent, under qk_norm. It has no gains, so that it does
        not matter that they are rotated already."""
        if self.shape.qk_norm == "none":
            return t
        return F.rms_norm(t, t.shape[-1:], eps=1e-6).to(t.dtype)
