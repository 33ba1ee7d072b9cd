"""Attention of new tokens over a cache, `follow`.

What a layer keeps decides how keys and values come back (cache.LayerCache.kind):

    keys    keys and values, as they are
    latent  latents: keys and values are grown again, or the query is brought to the latents
    input   the layer's inputs: likewise, with W_K and W_V in the place of the growing maps

"Brought to" is the absorbed form, for one new token: q^T (W_K c) = (W_K^T q)^T c, so the query is
multiplied by W_K once and meets the C numbers of every kept row directly; the weighted mean of rows
is multiplied by W_V once. That is H C (R + V) products per token instead of N times as many.

Axes: B batch, N kept tokens, H heads, K KV heads, G query heads per KV head, R rank, V value width,
C numbers of a kept row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.errors import UsageError
from headwise.model.cache import LayerCache
from headwise.model.dispatch import attend
from headwise.model.linear import as_made
from headwise.model.rotary import Rotary
from headwise.model.seen import Seen

if TYPE_CHECKING:
    from headwise.model.attention import Attention


def follow(
    layer: Attention,
    x: Tensor,
    cache: LayerCache,
    seen: Seen | None = None,
    rotary: Rotary | None = None,
) -> Tensor:
    """The layer's output for x (batch, tokens, dim), which follows what is in the cache and joins
    it. `seen` is of all tokens so far; `rotary` is the table of x's positions where they are not
    those behind the cache."""
    s, start = layer.shape, cache.length
    # Under a mask every kept row must be known by its place, and all of them come back as keys.
    absorb = cache.absorb and x.shape[-2] == 1 and seen is None
    ordered = seen is not None
    # Kept keys and values: the new tokens join them, and attention is as usual.
    if cache.kind == "keys":
        if s.q_lora_rank or layer.separate:
            q, k, v = layer.project(x, start, rotary)
        else:
            q, k, v = layer.split_qkv(s, layer.qkv(x), start, rotary)
        new = (k,) if s.shared_kv else (k, v)
        kept = cache.append(*new, ordered=ordered)
        heads = _attend(layer, q, kept[0], kept[-1], seen)
        return layer.combine(heads, x, start, rotary)
    # Kept latents, with the rotated key part that all heads share behind them.
    if cache.kind == "latent":
        new_rows = torch.cat(layer.compress(x, start, rotary), -1)
        (rows,) = cache.append(new_rows, ordered=ordered)
        q = layer.latent_queries(x, start, rotary)
        return layer.combine(_from_latents(layer, q, rows, absorb, seen), x, start)
    # Kept inputs. With rotary positions each one must be known by its place, so they come in order;
    # the first stands at position `first`.
    if rotary is not None:
        raise UsageError(
            "a cache of inputs makes keys anew, at the places where they lie: it needs positions "
            "that follow each other, got positions by token"
        )
    (inputs,) = cache.append(x, ordered=ordered or s.qk_rope_head_dim > 0)
    first = cache.length - inputs.shape[-2]
    if s.latent:
        rows = torch.cat(layer.compress(inputs, first), -1)
        heads = _from_latents(layer, layer.latent_queries(x, start), rows, absorb, seen)
    else:
        heads = _from_inputs(layer, x, start, inputs, first, absorb, seen)
    return layer.combine(heads, x, start)


def decode_backend(device: str, dtype: torch.dtype, rank: int, width: int, hard: bool) -> str:
    """The backend of a few queries whose keys grow by one at every token.

    No kernel that pads, hence copies, all keys; and not cuDNN, which is planned anew for every
    number of keys.
    """
    # On a GPU flash takes ranks in eights up to 256 as they are, on a CPU any rank; values must be
    # as wide as the rank.
    half = dtype in (torch.float16, torch.bfloat16)
    fits = device == "cpu" or (half and rank <= 256 and rank % 8 == 0)
    return "flash" if fits and rank == width and not hard else "plain"


def _from_latents(
    layer: Attention, q: Tensor, rows: Tensor, absorb: bool, seen: Seen | None
) -> Tensor:
    s = layer.shape
    # The rank without its rotated part, which stands in the latent's row already.
    nope = s.head_dim - s.qk_rope_head_dim
    # A norm stands between the latent and the scores, or a tool has changed the growing map.
    if not absorb or s.qk_norm != "none" or not as_made(layer.kv):
        k, v = layer.expand(*rows.split((s.kv_lora_rank, s.qk_rope_head_dim), -1))
        return _attend(layer, q, k, v, seen)
    # W_K (H, R - rope, C) and W_V (H, V, C) of every head are rows of the one growing map.
    maps = layer.kv.weight.unflatten(0, (s.num_heads, nope + s.v_head_dim))
    key_map, value_map = maps.split((nope, s.v_head_dim), 1)
    return _absorbed(layer, q, rows, key_map, value_map)


def _from_inputs(
    layer: Attention,
    x: Tensor,
    start: int,
    inputs: Tensor,
    first: int,
    absorb: bool,
    seen: Seen | None,
) -> Tensor:
    """`inputs` are the kept ones, the first of them at position `first`."""
    s = layer.shape
    # The queries of the new tokens at their own positions; keys and values follow from the kept
    # inputs.
    H, KV = s.num_heads, s.num_kv_heads
    R, V = s.head_dim, s.v_head_dim
    q = layer.queries(x, start)
    readable = not layer.separate and as_made(layer.kv if s.q_lora_rank else layer.qkv)
    if absorb and readable and s.qk_norm == "none" and not s.qk_rope_head_dim:
        weights, biases = layer.projections()
        k_map, v_map, v_bias = weights[-2], weights[-1], biases[-1]
        # The keys' bias adds one number to all scores of a query, which softmax does not see.
        o = _absorbed(layer, q, inputs, k_map.unflatten(0, (KV, R)), v_map.unflatten(0, (KV, V)))
        if v_bias is None:
            return o
        return o + v_bias.view(KV, 1, V).expand(KV, H // KV, V).flatten()
    # Not absorbed: keys and values of all kept tokens are made anew.
    return _attend(layer, q, *layer.keys_values(inputs, first), seen)


def _attend(layer: Attention, q: Tensor, k: Tensor, v: Tensor, seen: Seen | None) -> Tensor:
    """Heads' outputs, (batch, tokens, H V).

    A single query sees everything that is kept, unless a mask says otherwise. So the G query heads
    of a KV head become G queries of one head: no mask, and no repeated keys.
    """
    s = layer.shape
    if q.shape[-2] > 1 or seen is not None:
        seen = seen and seen.last(q.shape[-2], k.shape[-2])
        return layer.attend_heads(s, q, k, v, None, seen)
    q_BKGR = q.reshape(len(q), k.shape[1], -1, s.head_dim)
    return _attend_all(layer, q_BKGR, k, v).reshape(len(q), 1, -1)


def _attend_all(layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A handful of queries, unmasked."""
    backend = layer.backend
    if backend == "auto":
        backend = decode_backend(q.device.type, q.dtype, q.shape[-1], v.shape[-1], layer.hard)
    return attend(q, k, v, scale=layer.shape.scale, hard=layer.hard, backend=backend)


def _absorbed(
    layer: Attention, q_BH1R: Tensor, rows_BNC: Tensor, key_map_KRC: Tensor, value_map_KVC: Tensor
) -> Tensor:
    """One query against the kept rows: W_K^T goes to the query, W_V to the result.

    Behind its R coordinates the query may have rotated ones; behind its C numbers a row has the
    rotated key, which they meet as they are.
    """
    # Query times W_K: from R coordinates to the C numbers of a kept row.
    KV, R, C = key_map_KRC.shape
    batch, width = len(q_BH1R), q_BH1R.shape[-1]
    q_BKGR, rotated = q_BH1R.reshape(batch, KV, -1, width).split((R, width - R), -1)
    q_BKGC = torch.cat((torch.einsum("bkgr,krc->bkgc", q_BKGR, key_map_KRC), rotated), -1)
    # The rows are the values too: as wide as the keys, so that no backend pads and copies them.
    rows_B1NC = rows_BNC.unsqueeze(1)
    # All H queries of a sequence stand side by side as queries of one head that reads the rows.
    o_BHC = _attend_all(layer, q_BKGC.flatten(1, 2).unsqueeze(1), rows_B1NC, rows_B1NC)
    # The weighted mean of rows, times W_V, is the heads' output.
    o_BKGC = o_BHC[:, 0, :, :C].unflatten(1, (KV, -1))
    return torch.einsum("bkgc,kvc->bkgv", o_BKGC, value_map_KVC).reshape(batch, 1, -1)
