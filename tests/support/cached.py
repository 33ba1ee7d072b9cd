"""Decoders of every kind of attention, for tests of their caches."""

import pytest
import torch
from support.tolerance import close, seeded

from headwise.errors import UsageError
from headwise.model.cache import Cache
from headwise.model.generate import decode, prefill
from headwise.shape import Shape

VOCAB = 53
BASE = Shape(
    dim=22,
    depth=2,
    num_heads=6,
    head_dim=4,
    v_head_dim=7,
    ffn_dim=13,
    causal=True,
    vocab_size=VOCAB,
)
LATENT = BASE.replace(kv_lora_rank=9, qk_rope_head_dim=2)
FAMILY = {
    "plain heads": BASE,
    "3 KV heads": BASE.replace(num_kv_heads=3),
    "2 KV heads": BASE.replace(num_kv_heads=2, v_head_dim=3),
    "one KV head": BASE.replace(num_kv_heads=1, head_dim=10, v_head_dim=5),
    "rank 1": BASE.replace(head_dim=1, v_head_dim=1),
    "rank above dim": BASE.replace(num_heads=2, num_kv_heads=1, head_dim=26, v_head_dim=2),
    "rotary": BASE.replace(num_kv_heads=2, qk_rope_head_dim=4, rope_theta=50.0),
    "partly rotary": BASE.replace(head_dim=6, qk_rope_head_dim=2, rope_theta=50.0),
    "norms of queries and keys": BASE.replace(num_kv_heads=3, qk_norm="head", max_logit=9.0),
    "rotary, free norms": BASE.replace(qk_norm="free", qk_rope_head_dim=4),
    "learned positions": BASE.replace(num_kv_heads=2, positions="additive", num_positions=31),
    "biases, averaged modules": BASE.replace(
        average=2, qkv_bias=True, out_bias=True, ffn_bias=True, num_kv_heads=3
    ),
    "windows": BASE.replace(depth=3, windows=(3, 0, 5), num_kv_heads=3, qk_rope_head_dim=4),
    "narrow windows": BASE.replace(windows=(1, 2)),
    "windows, biases, norms": BASE.replace(windows=(4,), qkv_bias=True, qk_norm="head"),
    "latent": LATENT,
    "latent, no rotation": BASE.replace(kv_lora_rank=9, qkv_bias=True),
    "latent of queries too": LATENT.replace(q_lora_rank=5, qkv_bias=True),
    "latent, all rotary": LATENT.replace(qk_rope_head_dim=4, v_head_dim=2),
    "latent, normed": LATENT.replace(qk_norm="free", max_logit=7.0),
    "latent in windows": LATENT.replace(q_lora_rank=11, windows=(3, 0)),
    "latent above dim": LATENT.replace(kv_lora_rank=31, windows=(0, 4)),
    "norms behind": BASE.replace(norm_at="post", norm="layer", activation="gelu"),
    "parallel, untied": BASE.replace(norm_at="parallel", activation="swiglu", tied=False),
    "sandwich, no feed-forward": BASE.replace(norm_at="sandwich", ffn_dim=0),
}
ROTARY = BASE.replace(num_kv_heads=3, v_head_dim=4, qk_rope_head_dim=2, rope_theta=50.0)
MODERN = {
    "keys are values": BASE.replace(num_kv_heads=2, v_head_dim=4, shared_kv=True),
    "keys are values, biases": BASE.replace(v_head_dim=4, shared_kv=True, qkv_bias=True),
    "keys are values, rotary": ROTARY.replace(shared_kv=True, rope_at="first"),
    "keys are values, normed, in windows": ROTARY.replace(
        shared_kv=True, qk_norm="head", windows=(3, 0), qk_rope_head_dim=4
    ),
    "rotary first": ROTARY.replace(rope_at="first", head_dim=6),
    "neighbours turn": ROTARY.replace(rope_interleaved=True, head_dim=6, qk_rope_head_dim=4),
    "norms over all heads": ROTARY.replace(qk_norm="all", qk_rope_head_dim=4),
    "low-rank queries": ROTARY.replace(q_lora_rank=5, qk_norm="free", qkv_bias=True),
    "low-rank queries, keys are values": ROTARY.replace(q_lora_rank=5, shared_kv=True),
    "gates by head": BASE.replace(attn_gate="head", num_kv_heads=3, qkv_bias=True),
    "gates by value": ROTARY.replace(attn_gate="value", out_bias=True),
    "latent, gates by value": LATENT.replace(attn_gate="value", o_lora_rank=5, o_groups=2),
    "outputs by groups": ROTARY.replace(o_lora_rank=5, o_groups=3, average=2, out_bias=True),
    "norms of outputs": BASE.replace(norm_at="output", norm="layer"),
    "two parallel norms": BASE.replace(norm_at="parallel-2"),
    "parallel norm, no feed-forward": BASE.replace(norm_at="parallel-2", ffn_dim=0),
    "by layer": Shape(
        dim=22,
        depth=3,
        num_heads=(6, 2),
        num_kv_heads=(3, 2, 1),
        head_dim=(4, 10),
        v_head_dim=(4, 5, 4),
        qk_rope_head_dim=(2, 4),
        ffn_dim=(13, 0, 17),
        shared_kv=(True, False, False),
        windows=(0, 3),
        attn_gate="head",
        qk_norm="head",
        causal=True,
        vocab_size=VOCAB,
    ),
}
VECTORS = BASE.replace(
    vocab_size=0,
    input_dim=5,
    output_dim=3,
    positions="concatenated",
    num_positions=31,
    position_dim=2,
)


def filled(model, seed=0, spread=0.4):
    """Every parameter drawn, gains and biases too."""
    generator = seeded(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0.0, spread, generator=generator)
    return model


def ids(batch, tokens, seed=1):
    return torch.randint(VOCAB, (batch, tokens), generator=seeded(seed))


def refused(message, function, *args, **options):
    with pytest.raises(UsageError) as error:
        function(*args, **options)
    assert str(error.value) == message


def poisoned(cache):
    """A cache whose memory is NaN until something is written: what is read before shows."""
    for layer in cache.layers:
        for part in layer.parts:
            part.fill_(float("nan"))
    return cache


def check_reading(model, x, pieces, **options):
    """Pieces read one after the other give what the whole gives at their last tokens, with the
    bytes that were promised."""
    shape, (batch, tokens) = model.shape, x.shape[:2]
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        whole = model(x)[0]
    cache = poisoned(Cache(shape, batch, tokens, dtype=dtype, **options))
    promised = shape.kv_bytes(
        tokens, batch=batch, bytes_per=dtype.itemsize, inputs=options.get("inputs", False)
    )
    assert (
        cache.bytes
        == sum(p.untyped_storage().nbytes() for layer in cache.layers for p in layer.parts)
        == promised
    )
    at = 0
    for size in pieces:
        piece, at = x[:, at : at + size], at + size
        y = decode(model, piece[:, 0], cache) if size == 1 else prefill(model, piece, cache)
        close(y, whole[:, at - 1], f"after {at} tokens of {shape}")
        assert cache.length == at
    assert at == tokens
