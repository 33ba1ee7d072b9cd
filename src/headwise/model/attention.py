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

from typing import Any

import torch
from torch import Tensor

from headwise.errors import UsageError, nearest
from headwise.kernels.attention_cpu import short_packed
from headwise.model import decode
from headwise.model.backends import BACKENDS
from headwise.model.cache import LayerCache
from headwise.model.dispatch import attend, attend_with_weights
from headwise.model.extras import Documents
from headwise.model.head_outputs import gated, turned_back
from headwise.model.linear import as_made, linear, scaled_linear
from headwise.model.packed import HeadGroups, heads_last, takes_packed
from headwise.model.projections import Projections
from headwise.model.reference import mask_of, repeat_kv, weights_of
from headwise.model.rotary import Rotary, rotary_at
from headwise.model.seen import Seen, seen_of
from headwise.shape import Shape, beyond_plain, not_built


class Attention(Projections):
    """Attention with heads, rank, value width, KV heads and latent all free.

    y = W_O concat_h softmax(c q_h k_h^T + mask) v_h, with q_h = W_Q,h x (H heads of rank r) and
    k_h, v_h either W_K x, W_V x (num_kv_heads of them) or grown from one latent of width
    kv_lora_rank. `average` modules side by side give the mean of their outputs.

    x is (batch, tokens, dim), or (models, batch, tokens, dim) when `models` is given. Models of one
    ensemble may differ in how they cut the same width into heads: each of `head_groups` is how many
    models have which shape. Weights of such groups lie side by side, and so do their projections;
    only the heads' attention runs group by group.

    One model's projections are `nn.Linear`: `qkv` (rows of queries, keys, values) and `out`; with
    `separate` instead of `qkv` one for each, `q_proj`, `k_proj` and `v_proj`, which tensor
    parallelism cuts by heads. Each loads the other's weights. `dropout` of the weights acts while
    training.

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
        separate: bool = False,
        dropout: float = 0.0,
    ) -> None:
        if backend != "auto" and backend not in BACKENDS:
            raise UsageError(
                f"unknown backend {backend!r}; {nearest(backend, ('auto', *BACKENDS))}"
            )
        if missing := not_built(shape):
            raise UsageError(missing)
        if not 0 <= dropout < 1:
            raise UsageError(f"dropout must be from 0 to below 1, got {dropout}")
        super().__init__(shape.layer(layer) if shape.layers else shape, models, separate)
        self.window = shape.window(layer)
        self.plain = not beyond_plain(self.shape)
        self.hard = hard
        self.backend = backend
        self.dropout = dropout
        self.head_groups = head_groups

    def forward(
        self,
        x: Tensor,
        keep: bool = False,
        rotary: Rotary | None = None,
        *,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        padding: Tensor | None = None,
        documents: Documents | None = None,
        positions: Tensor | int = 0,
        offset: int | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """The layer's output; with `keep` also q, k, v, scores, weights and head outputs by name.

        context     keys and values are made from it, (batch, keys, dim): cross-attention. A causal
                    mask or window of the shape then counts only with `offset`
        mask        true where a query sees a key, or numbers that are added to the scores;
                    broadcasts to (batch, heads, queries, keys)
        padding     (batch, keys), true or 1 where there is a token
        documents   ids (batch, tokens), or a pair, of queries and of keys: no token sees another
                    document
        positions   where x stands, for its rotary positions: of the first token, or (batch, tokens)
        offset      query i stands at key i + offset; otherwise the last at the last
        cache       x follows what is in it, and joins it; masks are then of all tokens so far
        rotary      the table of x's positions, where the model around has made it
        """
        s = self.shape
        found: dict[str, Tensor] = {}
        kept = found if keep else None
        seen = seen_of(mask, padding, documents, offset, context is not None)
        start = positions if isinstance(positions, int) else 0
        if isinstance(positions, Tensor) and rotary is None and s.qk_rope_head_dim:
            rotary = rotary_at(positions, s.qk_rope_head_dim, s.rope_theta, x)
        if cache is not None:
            if keep or context is not None:
                raise UsageError("a cache goes with neither keep nor context")
            if start:
                raise UsageError(
                    f"with a cache x stands behind what is in it, or where positions (batch, "
                    f"tokens) say, got positions {start}"
                )
            placed = isinstance(positions, Tensor)
            return decode.follow(self, x, cache, seen, rotary if placed else None)
        if offset is not None:
            if context is None:
                raise UsageError("offset goes with context: without one, queries stand at the keys")
            start += offset
        # A latent has projections of its own. A compiled single model takes three products, because
        # their gradients need not be copied together. All other models take one product for
        # queries, keys and values.
        weight = None
        compiled_alone = torch.compiler.is_compiling() and not self.ensemble and not keep
        apart = self.separate or s.q_lora_rank or context is not None
        if s.latent:
            heads = self.attend_heads(s, *self._from_latent(x, context, start, rotary), kept, seen)
        elif apart or (compiled_alone and as_made(self.qkv) and not self._packs(s, x, seen)):
            q = self.queries(x, start, rotary)
            if context is None:
                k, v = self.keys_values(x, start, rotary)
            else:
                k, v = self.keys_values(context)
            heads = self.attend_heads(s, q, k, v, kept, seen)
        else:
            heads, weight = self._by_groups(x, kept, start, rotary, seen)
        y = self.combine(heads, x, start, rotary, weight)
        return (y, found) if keep else y

    def attend_heads(
        self,
        s: Shape,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kept: dict[str, Tensor] | None = None,
        seen: Seen | None = None,
    ) -> Tensor:
        """Attention of the heads of shape s: q, k, v (..., heads, tokens, width) to (..., tokens,
        heads * value width)."""
        # A model axis joins the batch: attention treats all sequences alike.
        lead = q.shape[:-3]
        if seen is not None and len(lead) > 1:
            seen = seen.of_all(lead[0])
        q, k, v = (t.flatten(0, -4) for t in (q, k, v))
        own = seen is None or seen.own
        options: dict[str, Any] = {
            "causal": s.causal and own,
            "window": self.window if own else 0,
            "scale": s.scale,
            "hard": self.hard,
            "dropout": self.dropout if self.training else 0.0,
        }
        options |= {} if seen is None else seen.arguments()
        if kept is None:
            o = attend(q, k, v, backend=self.backend, graphed=self.ensemble, **options)
        else:
            # The same formula written out, so that every intermediate can be kept by name.
            scores = q @ repeat_kv(k, q.shape[1]).mT * s.scale
            if seen is None and not options["dropout"]:
                mask = mask_of(q.shape[-2], k.shape[-2], s.causal, self.window, q.device)
                weights = weights_of(scores, mask, self.hard)
                o = weights @ repeat_kv(v, q.shape[1])
            else:
                o, weights = attend_with_weights(q, k, v, **options)
            parts = {"q": q, "k": k, "v": v, "scores": scores, "weights": weights, "heads": o}
            kept.update({name: t.unflatten(0, lead) for name, t in parts.items()})
        y = o.transpose(1, 2).flatten(-2)
        return y.unflatten(0, lead) if len(lead) > 1 else y

    def combine(
        self,
        heads: Tensor,
        x: Tensor,
        start: int = 0,
        rotary: Rotary | None = None,
        weight: Tensor | None = None,
    ) -> Tensor:
        """W_O of the heads' outputs, the mean over averaged modules; x is the layer's input, whose
        first token stands at position `start`. `weight` stands in for W_O."""
        s = self.shape
        if s.shared_kv and s.qk_rope_head_dim:
            heads = turned_back(heads, s, start, rotary)
        if s.attn_gate != "none":
            heads = gated(heads, self.gate(x))
        if s.o_lora_rank:
            heads = self.out_down(heads)
        bias = None if self.out_bias is None else self.out_bias.mean(-2)
        if weight is not None:
            return linear(heads, weight, bias, 1 / s.average)
        return scaled_linear(self.out, heads, bias, 1 / s.average)

    def _from_latent(
        self, x: Tensor, context: Tensor | None, start: int, rotary: Rotary | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q = self.latent_queries(x, start, rotary)
        if context is None:
            return q, *self.expand(*self.compress(x, start, rotary))
        return q, *self.expand(*self.compress(context))

    # ---- models that cut the same width into different heads

    def _by_groups(
        self,
        x: Tensor,
        kept: dict[str, Tensor] | None,
        start: int,
        rotary: Rotary | None,
        seen: Seen | None,
    ) -> tuple[Tensor, Tensor | None]:
        """The heads' outputs, and the output weights where their columns are in another order.

        All models are projected at once; then each head group attends by itself.
        """
        # One group stands for all models where they share a shape.
        groups = self.head_groups
        if len(groups) < 2:
            groups = ((x.shape[0] if self.ensemble else 1, self.shape),)
        counts = [models for models, _ in groups]
        # The short CPU kernel reads a projection with heads innermost. Turning the weights gives it
        # that order without moving an activation; the output projection is turned to match.
        packs = [kept is None and self._packs(s, x, seen) for _, s in groups]
        out_weight = None
        if any(packs):
            weight, bias = self.qkv.weight, self.qkv.bias
            weight = heads_last(weight, -2, 3, groups, packs)
            bias = None if bias is None else heads_last(bias, -1, 3, groups, packs)
            out_weight = heads_last(self.out.weight, -1, 1, groups, packs)
            qkv = linear(x, weight, bias)
        else:
            qkv = self.qkv(x)
        # One product for all groups; then each group cuts its models' part into heads of its own.
        outputs = []
        parts = qkv.split(counts) if len(groups) > 1 else (qkv,)
        for part, (_, s), packed in zip(parts, groups, packs, strict=True):
            if packed:
                o = short_packed(part.flatten(0, -3), s.num_heads, s.scale)
                outputs.append(o.unflatten(0, part.shape[:-2]))
            else:
                # A table of rotary positions is only good for the rank it was made for.
                same_rank = s.qk_rope_head_dim == self.shape.qk_rope_head_dim
                same_theta = s.rope_theta == self.shape.rope_theta
                table = rotary if same_rank and same_theta else None
                qkv_heads = self.split_qkv(s, part, start, table)
                outputs.append(self.attend_heads(s, *qkv_heads, kept, seen))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0], out_weight

    def _packs(self, s: Shape, x: Tensor, seen: Seen | None) -> bool:
        """Whether the short CPU kernel takes heads of shape s straight from the projection."""
        if seen is not None or not self.plain or (self.training and self.dropout):
            return False
        made = as_made(self.qkv) and as_made(self.out)
        return made and takes_packed(s, x, self.window, self.hard, self.backend)
