"""Decoders of every kind of attention, for tests of their caches."""

import pytest
import torch
from support.tolerance import seeded

from headwise.errors import UsageError
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
