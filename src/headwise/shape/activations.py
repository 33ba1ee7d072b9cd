"""Bytes that a training step keeps for the backward pass: this package's modules and the loss.
Functions of `s` take one layer, as in parameters.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwise.errors import UsageError
from headwise.shape.built import not_built
from headwise.shape.parameters import norms_per_layer

if TYPE_CHECKING:
    from headwise.shape.fields import Shape


def step_bytes(shape: Shape, tokens: int, batch: int, bytes_per: int) -> int:
    """Bytes that one training step keeps."""
    missing = not_built(shape)
    if missing:
        raise UsageError(f"activation bytes are those of headwise's own modules: {missing}")
    ids = 8 * (1 + shape.lm_head) if shape.vocab_size else 0  # inputs and labels, 64 bits each
    # cosines and sines, one set for all layers of one width and the batch
    angles = sum({s.qk_rope_head_dim for s, _, _ in shape.kinds()})
    layers = sum(count * kept_per_token(s) for s, _, count in shape.kinds())
    per_token = layers + kept_at_ends(shape)
    return batch * tokens * (per_token * bytes_per + ids) + tokens * angles * bytes_per


def kept_per_token(s: Shape) -> int:
    """Numbers that one layer keeps of one token."""
    inputs = s.dim * (2 if s.ffn_dim and s.norm_at != "parallel" else 1)
    values = {"relu": 1, "relu2": 2, "gelu": 2, "swiglu": 4, "geglu": 4}[s.activation]
    norms = norms_per_layer(s) * _norm_keeps(s.norm, s.dim)
    if s.norm_at == "parallel-2" and s.ffn_dim and s.norm != "scalar":
        norms -= s.dim  # both divide the same
    heads = _kept_by_latent(s) if s.latent else _kept_by_projection(s)
    return inputs + values * s.ffn_dim + norms + heads


def _kept_by_projection(s: Shape) -> int:
    H, R, V, KV, Q = s.num_heads, s.head_dim, s.v_head_dim, s.num_kv_heads, s.q_lora_rank
    normed = s.qk_norm != "none"
    # New tensors for q and k, where they are not views of the projection.
    new_qk = bool(s.qk_rope_head_dim or normed or R < V)
    kept = (H + KV) * max(R, V) if new_qk else 0
    if s.qk_norm == "all":
        kept += 2 + (H + KV) * R
    elif normed:
        kept += (H + KV) * (1 + (R if s.qk_norm == "head" else 0))
    # The projection, where any view of it is kept: of values, or of what a norm divides.
    queries, keys_values = H * R, KV * (R if s.shared_kv else R + V)
    of_values = not s.shared_kv and V >= R
    if not new_qk or of_values or normed:
        kept += keys_values
    if not new_qk or (of_values and not Q) or normed:
        kept += queries
    if Q:
        kept += _norm_keeps("rms", Q) + Q
    by_head = bool(s.qk_rope_head_dim or s.qk_norm in ("head", "free") or R < V)
    return kept + _kept_by_kernel(s, by_head) + _kept_by_output(s)


def _kept_by_latent(s: Shape) -> int:
    H, R, V, rope = s.num_heads, s.head_dim, s.v_head_dim, s.qk_rope_head_dim
    C, Q, normed = s.kv_lora_rank, s.q_lora_rank, s.qk_norm != "none"
    new_qk = bool(rope or R < V or normed)
    kept = rope + _norm_keeps("rms", C) + C + (_norm_keeps("rms", Q) + Q if Q else 0)
    if not (new_qk and V < R and (rope or not normed)):
        kept += H * (R - rope + V)  # keys and values as they grow from the latent
    if normed:  # what the norms divide, unless it is a part of what has grown
        kept += H * (2 + R * (2 if rope else 1))
    kept += (2 if new_qk else 1) * H * max(R, V)
    return kept + _kept_by_kernel(s, new_qk) + _kept_by_output(s)


def _kept_by_kernel(s: Shape, by_head: bool) -> int:
    """Padded values, output, log-sum-exp; and the output again where its heads do not lie side
    by side as asked, because queries lie head by head, or where it is turned back."""
    H, R, V = s.num_heads, s.head_dim, s.v_head_dim
    padded = s.num_kv_heads * R if V < R else 0
    turned = s.shared_kv and s.qk_rope_head_dim
    apart = by_head or V < R
    if V == 1:  # numbers of heads side by side: a product copies them, a gate does not
        apart = by_head and s.attn_gate == "none"
    copied = H * V if turned or (H > 1 and apart) else 0
    return padded + H * max(R, V) + H + copied


def _kept_by_output(s: Shape) -> int:
    """A gate's sigmoid and what it leaves of the outputs; the latents of groups of heads."""
    H, V = s.num_heads, s.v_head_dim
    gate = {"none": 0, "head": H + H * V, "value": 2 * H * V}[s.attn_gate]
    return gate + (s.o_groups * s.o_lora_rank if s.o_lora_rank else 0)


def kept_at_ends(shape: Shape) -> int:
    """Numbers that inputs, outputs and the loss keep of one token."""
    final = _norm_keeps(shape.norm, shape.dim) if shape.norm_at != "post" else 0
    if shape.vocab_size:
        return final + shape.dim * shape.lm_head + shape.out_dim
    if shape.output_dim:
        final += shape.dim
    if shape.input_dim:
        return final + shape.input_dim + shape.out_dim
    before = shape.norm_at not in ("post", "output")
    if before and shape.positions == "none" and shape.norm != "scalar":
        # The first norm has nothing to send back to given vectors, of two beside each other both.
        first = norms_per_layer(shape.layer(0)) if shape.norm_at == "parallel-2" else 1
        final -= shape.dim + first * (2 if shape.norm.startswith("layer") else 1)
    return final + (shape.output_dim or shape.dim - shape.position_dim)


def _norm_keeps(kind: str, dim: int) -> int:
    """Numbers that one norm keeps of one token: what it divides, its statistics, and the quotient
    where a gain follows."""
    quotient = dim if kind in ("layer", "layer-nobias", "rms") else 0
    return dim + (2 if kind.startswith("layer") else 1) + quotient
