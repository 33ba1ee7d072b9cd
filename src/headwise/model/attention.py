"""Attention with every size free: the layer `Attention`.

For each head h, with queries q_h = W_Q,h x, keys k_h = W_K,h x and values v_h = W_V,h x,

    y = W_O concat_h softmax(c q_h k_h^T + mask) v_h

H heads of rank r (`head_dim`) need not satisfy H r = dim; values have a width of their own; several
query heads may share one key/value head (grouped queries), and all keys and values may grow from
one latent (MLA). The function `attend` (dispatch.py) computes the part after the projections on the
fastest backend that takes the sizes.

Axes: M models, B batch, N keys, Q queries, H heads, R rank, V value width, D dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import UsageError, nearest
from headwise.kernels.attention_cpu import short_packed
from headwise.model.backends import BACKENDS, Call, choose_backend
from headwise.model.dispatch import attend
from headwise.model.head_outputs import GroupedLinear, gated, turned_back
from headwise.model.layers import Linear, Norm, Rotary, linear, rotate
from headwise.model.reference import mask_of, repeat_kv, weights_of
from headwise.shape import Shape, beyond_plain, not_built

HeadGroups = Sequence[tuple[int, Shape]]  # (how many models, their shape), in the models' order


class Attention(nn.Module):
    """Self-attention with heads, rank, value width, KV heads and latent all free.

    y = W_O concat_h softmax(c q_h k_h^T + mask) v_h, with q_h = W_Q,h x (H heads of rank r) and
    k_h, v_h either W_K x, W_V x (num_kv_heads of them) or grown from one latent of width
    kv_lora_rank. `average` modules side by side give the mean of their outputs.

    x is (batch, tokens, dim), or (models, batch, tokens, dim) when `models` is given. Models of one
    ensemble may differ in how they cut the same width into heads: each of `head_groups` is how many
    models have which shape. Weights of such groups lie side by side, and so do their projections;
    only the heads' attention runs group by group.

    >>> layer = Attention(Shape(dim=12, depth=1, num_heads=5, head_dim=3, v_head_dim=7))
    >>> layer(torch.zeros(2, 4, 12)).shape
    torch.Size([2, 4, 12])
    """

    def __init__(
        self,
        shape: Shape,
        *,
        layer: int = 0,
        models: int | None = None,
        head_groups: HeadGroups = (),
        hard: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if backend != "auto" and backend not in BACKENDS:
            raise UsageError(
                f"unknown backend {backend!r}; {nearest(backend, ('auto', *BACKENDS))}"
            )
        if missing := not_built(shape):
            raise UsageError(missing)
        self.window = shape.window(layer)
        shape = shape.layer(layer) if shape.layers else shape
        self.shape = shape
        self.plain = not beyond_plain(shape)
        self.hard = hard
        self.backend = backend
        self.ensemble = models is not None
        self.head_groups = head_groups
        # Latent attention (MLA) projects down to a latent of width C and up again, H (R - rope) for
        # keys and H V for values. Otherwise queries, keys and values are one product with a matrix
        # of H R + KV (R + V) rows.
        D, H, KV = shape.dim, shape.num_heads, shape.num_kv_heads
        R, V = shape.head_dim, shape.v_head_dim
        if shape.latent:
            rope, C = shape.qk_rope_head_dim, shape.kv_lora_rank
            if shape.q_lora_rank:
                self.q_down = Linear(D, shape.q_lora_rank, shape.qkv_bias, models)
                self.q_norm = Norm("rms", shape.q_lora_rank, models)
            self.q = Linear(shape.q_lora_rank or D, H * R, False, models)
            self.kv_down = Linear(D, C + rope, shape.qkv_bias, models)
            self.kv_norm = Norm("rms", C, models)
            self.kv = Linear(C, H * (R - rope + V), False, models)
        else:
            rows = sum(self.kv_rows)
            if shape.q_lora_rank:
                self.q_down = Linear(D, shape.q_lora_rank, shape.qkv_bias, models)
                self.q_down_norm = Norm("rms", shape.q_lora_rank, models)
                self.q = Linear(shape.q_lora_rank, H * R, False, models)
                self.kv = Linear(D, rows, shape.qkv_bias, models)
            else:
                self.qkv = Linear(D, H * R + rows, shape.qkv_bias, models)
            if shape.qk_norm != "none":
                norm = "rms-free" if shape.qk_norm == "free" else "rms"
                heads = (H, KV) if shape.qk_norm == "all" else (1, 1)
                self.q_norm, self.k_norm = (Norm(norm, count * R, models) for count in heads)
        if shape.attn_gate != "none":
            gates = H if shape.attn_gate == "head" else H * V
            self.gate = Linear(D, gates, shape.qkv_bias, models)
        # Every averaged module has an output bias of its own, so their mean is added.
        inner = H * V
        if shape.o_lora_rank:
            self.out_down = GroupedLinear(inner, shape.o_lora_rank, shape.o_groups, models)
            inner = shape.o_groups * shape.o_lora_rank
        self.out = Linear(inner, D, False, models)
        lead = () if models is None else (models,)
        bias = torch.zeros(*lead, shape.average, D) if shape.out_bias else None
        self.out_bias = None if bias is None else nn.Parameter(bias)

    @property
    def kv_rows(self) -> tuple[int, ...]:
        """Rows of the projection that are keys, and those that are values where they are not the
        keys."""
        s = self.shape
        keys = s.num_kv_heads * s.head_dim
        return (keys,) if s.shared_kv else (keys, s.num_kv_heads * s.v_head_dim)

    @overload
    def forward(
        self, x: Tensor, keep: Literal[False] = False, rotary: Rotary | None = None
    ) -> Tensor: ...
    @overload
    def forward(
        self, x: Tensor, keep: Literal[True], rotary: Rotary | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]: ...
    def forward(
        self, x: Tensor, keep: bool = False, rotary: Rotary | None = None
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """The layer's output; with `keep` also q, k, v, scores, weights and head outputs by name.

        `rotary` is the table of x's positions, where the model around has made it.
        """
        found: dict[str, Tensor] = {}
        kept = found if keep else None
        # A latent has projections of its own. A compiled single model takes three products, because
        # their gradients need not be copied together. All other models take one product for
        # queries, keys and values.
        compiled_alone = torch.compiler.is_compiling() and not self.ensemble and not keep
        if self.shape.latent:
            heads = self.attend_heads(self.shape, *self._from_latent(x, rotary), kept)
            y = self.combine(heads, x)
        elif self.shape.q_lora_rank or (compiled_alone and not self._short(x)):
            heads = self.attend_heads(self.shape, *self.project(x, 0, rotary), kept)
            y = self.combine(heads, x, 0, rotary)
        else:
            heads, weight = self._by_groups(x, kept, rotary)
            y = self.combine(heads, x, 0, rotary, weight)
        return (y, found) if keep else y

    def attend_heads(
        self, s: Shape, q: Tensor, k: Tensor, v: Tensor, kept: dict[str, Tensor] | None = None
    ) -> Tensor:
        """Attention of the heads of shape s: q, k, v (..., heads, tokens, width) to (..., tokens,
        heads * value width)."""
        # A model axis joins the batch: attention treats all sequences alike.
        lead = q.shape[:-3]
        q, k, v = (t.flatten(0, -4) for t in (q, k, v))
        if kept is None:
            o = attend(
                q,
                k,
                v,
                causal=s.causal,
                window=self.window,
                scale=s.scale,
                hard=self.hard,
                backend=self.backend,
                graphed=self.ensemble,
            )
        else:
            # The same formula written out, so that every intermediate can be kept by name.
            mask = mask_of(q.shape[-2], k.shape[-2], s.causal, self.window, q.device)
            scores = q @ repeat_kv(k, s.num_heads).mT * s.scale
            weights = weights_of(scores, mask, self.hard)
            o = weights @ repeat_kv(v, s.num_heads)
            parts = {"q": q, "k": k, "v": v, "scores": scores, "weights": weights, "heads": o}
            kept.update({name: t.unflatten(0, lead) for name, t in parts.items()})
        return o.transpose(1, 2).reshape(*lead, q.shape[-2], s.num_heads * s.v_head_dim)

    def combine(
        self,
        heads: Tensor,
        x: Tensor,
        start: int = 0,
        rotary: Rotary | None = None,
        weight: Tensor | None = None,
    ) -> Tensor:
        """W_O of the heads' outputs, the mean over averaged modules; x is the layer's input, whose
        first token stands at position `start`."""
        s = self.shape
        if s.shared_kv and s.qk_rope_head_dim:
            heads = turned_back(heads, s, start, rotary)
        if s.attn_gate != "none":
            heads = gated(heads, self.gate(x), s.num_heads)
        if s.o_lora_rank:
            heads = self.out_down(heads)
        bias = None if self.out_bias is None else self.out_bias.mean(-2)
        weight = self.out.weight if weight is None else weight
        return linear(heads, weight, bias, 1 / s.average)

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
        if not s.qk_rope_head_dim:
            return t
        return rotate(t, s.qk_rope_head_dim, s.rope_theta, start, rotary, at=s.rope_at)

    def projections(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """W_Q, W_K, W_V and their biases; W_Q is left out where queries have a latent, W_V is W_K
        where keys are the values."""
        s = self.shape
        part = self.kv if s.q_lora_rank else self.qkv
        sizes = self.kv_rows if s.q_lora_rank else (s.num_heads * s.head_dim, *self.kv_rows)
        weights = list(part.weight.split(sizes))
        biases: list[Tensor | None] = [None] * len(sizes)
        if part.bias is not None:
            biases = list(part.bias.split(sizes))
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
            weights, biases = self.projections()
            q = linear(x, weights[0], biases[0])
        return self.place_queries(self.shape, q, start, rotary)

    def keys_values(
        self, x: Tensor, start: int = 0, rotary: Rotary | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values by head."""
        s = self.shape
        if s.q_lora_rank:  # one product: no gradient of queries to be joined with theirs
            found = self.kv(x).split(self.kv_rows, -1)
        else:
            weights, biases = self.projections()
            count = len(self.kv_rows)
            pairs = zip(weights[1 : 1 + count], biases[1 : 1 + count], strict=True)
            found = [linear(x, weight, bias) for weight, bias in pairs]
        keys = self.place_keys(s, found[0], start, rotary)
        return keys, keys if s.shared_kv else self.split_heads(found[1], s.v_head_dim)

    # ---- models that cut the same width into different heads

    def _by_groups(
        self, x: Tensor, kept: dict[str, Tensor] | None, rotary: Rotary | None
    ) -> tuple[Tensor, Tensor]:
        """The heads' outputs, and the output weights in the order of their columns.

        All models are projected at once; then each head group attends by itself. The short CPU
        kernel wants heads innermost. For its groups the rows of the projection, and the columns of
        the output weights, are put in (rank, head) order: weights are small, so that costs less
        than moving activations.
        """
        # One group stands for all models where they share a shape.
        groups = self.head_groups
        if len(groups) < 2:
            groups = ((x.shape[0] if self.ensemble else 1, self.shape),)
        counts = [models for models, _ in groups]
        # The short CPU kernel reads a projection with heads innermost. Turning the weights gives it
        # that order without moving an activation; the output projection is turned to match.
        heads_last = [kept is None and self._short(x, s) for _, s in groups]
        weight, bias, out_weight = self.qkv.weight, self.qkv.bias, self.out.weight
        if any(heads_last):
            weight = _heads_last(weight, -2, 3, groups, heads_last)
            bias = None if bias is None else _heads_last(bias, -1, 3, groups, heads_last)
            out_weight = _heads_last(out_weight, -1, 1, groups, heads_last)
        # One product for all groups; then each group cuts its models' part into heads of its own.
        qkv = linear(x, weight, bias)
        outputs = []
        parts = qkv.split(counts) if len(groups) > 1 else (qkv,)
        for part, (_, s), packed in zip(parts, groups, heads_last, strict=True):
            if packed:
                o = short_packed(part.flatten(0, -3), s.num_heads, s.scale)
                outputs.append(o.unflatten(0, part.shape[:-2]))
            else:
                # A table of rotary positions is only good for the rank it was made for.
                same_rank = s.qk_rope_head_dim == self.shape.qk_rope_head_dim
                same_theta = s.rope_theta == self.shape.rope_theta
                table = rotary if same_rank and same_theta else None
                qkv_heads = self.split_qkv(s, part, 0, table)
                outputs.append(self.attend_heads(s, *qkv_heads, kept))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0], out_weight

    def _short(self, x: Tensor, s: Shape | None = None) -> bool:
        """Whether the short CPU kernel takes heads of shape s straight from the projection."""
        # The kernel has no grouped KV heads, norms or rotation, and its values are as wide as its
        # rank.
        s = s or self.shape
        equal = s.num_kv_heads == s.num_heads and s.v_head_dim == s.head_dim
        if not equal or s.qk_norm != "none" or s.qk_rope_head_dim or not self.plain:
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
            window=self.window,
            hard=self.hard,
        )
        return self.backend in ("auto", "short") and choose_backend(call).backend == "short"

    # ---- keys and values from a latent (MLA)

    def _from_latent(self, x: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        q = self.latent_queries(x, 0, rotary)
        return q, *self.expand(*self.compress(x, 0, rotary))

    def latent_queries(self, x: Tensor, start: int = 0, rotary: Rotary | None = None) -> Tensor:
        """Queries by head, through a latent of their own where the shape has one."""
        s = self.shape
        q = self.q(self.q_norm(self.q_down(x)) if s.q_lora_rank else x)
        q = rotate(self.split_heads(q, s.head_dim), s.qk_rope_head_dim, s.rope_theta, start, rotary)
        return self._normalised(q)

    def compress(
        self, x: Tensor, start: int = 0, rotary: Rotary | None = None
    ) -> tuple[Tensor, Tensor]:
        """The latent (..., tokens, C), and the rotated key part that all heads share."""
        s = self.shape
        latent, shared = self.kv_down(x).split((s.kv_lora_rank, s.qk_rope_head_dim), -1)
        shared = rotate(shared, s.qk_rope_head_dim, s.rope_theta, start, rotary)
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


def _heads_last(
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
