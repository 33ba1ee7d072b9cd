"""Operations and bytes of a `Shape`: what a sequence costs, and its cache. Functions of `s` take
one layer, as in parameters.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headwise.errors import UsageError, nearest, shown
from headwise.shape.parameters import attention_matrices, feed_forward_weights, gate_matrices
from headwise.shape.rules import is_int

if TYPE_CHECKING:
    from headwise.shape.fields import Shape

DTYPE_BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4}


# ---- operations


def pairs(s: Shape, tokens: int, window: int) -> int:
    """(query, key) pairs that one head scores in a sequence, masks counted exactly."""
    if s.chunked and window:
        chunks, rest = divmod(tokens, window)
        return (chunks * window * (window + 1) + rest * (rest + 1)) // 2
    window = window or tokens
    if s.causal:
        full = min(tokens, window)
        return full * (full + 1) // 2 + (tokens - full) * full
    reach = min(window, tokens) - 1  # an encoder window is symmetric: |i - j| < window
    return tokens + 2 * (reach * tokens - reach * (reach + 1) // 2)


def flops(shape: Shape, tokens: int) -> int:
    """Of a forward pass over one sequence, every token to its outputs."""
    total = tokens * (_input_weights(shape) + _output_weights(shape))
    for s, window, layers in shape.kinds():
        scores = s.num_heads * (s.head_dim + s.v_head_dim) * pairs(s, tokens, window)
        total += layers * (tokens * layer_weights(s) + scores)
    return 2 * total


def prefill_flops(shape: Shape, context: int) -> int:
    """Of reading one sequence, with outputs for its last token only."""
    return flops(shape, context) - 2 * (context - 1) * _output_weights(shape)


def decode_flops(shape: Shape, context: int, absorbed: bool) -> int:
    """Of one more token, the last of `context`."""
    total = _input_weights(shape) + _output_weights(shape)
    for s, window, layers in shape.kinds():
        keys = min(context, window or context)
        if s.chunked and window:
            keys = (context - 1) % window + 1
        C, H = s.kv_lora_rank, s.num_heads
        width = H * (s.head_dim + s.v_head_dim)
        grown = 0
        if s.latent and absorbed:  # queries meet latents and rotary parts, and so do the weights
            width = H * (2 * C + s.qk_rope_head_dim)
        elif s.latent:  # keys and values of the earlier tokens are grown again
            grown = (keys - 1) * C * H * (s.head_dim - s.qk_rope_head_dim + s.v_head_dim)
        total += layers * (layer_weights(s) + width * keys + grown)
    return 2 * total


def layer_weights(s: Shape) -> int:
    """Weights of a layer that multiply one token."""
    matrices = [*attention_matrices(s), *gate_matrices(s)]
    return sum(a * b for a, b, _ in matrices) + feed_forward_weights(s)


def _input_weights(shape: Shape) -> int:
    return shape.input_dim * (shape.dim - shape.position_dim)


def _output_weights(shape: Shape) -> int:
    return (shape.output_dim or shape.vocab_size * shape.lm_head) * shape.dim


# ---- bytes


def kv_width(s: Shape, inputs: bool) -> int:
    """Numbers that one token leaves in one layer's cache."""
    if s.reuses_kv:
        return 0
    width = s.kv_lora_rank + s.qk_rope_head_dim
    if not s.latent:
        one = s.shared_kv and not s.split_kv_cache
        width = s.num_kv_heads * (s.head_dim + (0 if one else s.v_head_dim))
    return min(width, s.dim) if inputs else width


def kv_numbers(shape: Shape, tokens: int, inputs: bool) -> int:
    """Numbers in the cache of one sequence."""
    return sum(
        layers * min(tokens, window or tokens) * kv_width(s, inputs)
        for s, window, layers in shape.kinds()
    )


def weight_bytes(params: int, dtype: str) -> int:
    """Bytes of that many parameters, rounded up."""
    if dtype not in DTYPE_BITS:
        raise UsageError(f"unknown dtype {shown(dtype)}; {nearest(str(dtype), DTYPE_BITS)}")
    return -(-params * DTYPE_BITS[dtype] // 8)


def check_count(name: str, value: Any) -> None:
    """Refuse what is no number of tokens or sequences."""
    if not is_int(value) or value < 1:
        raise UsageError(f"{name} must be a whole number of at least 1, got {shown(value)}")
