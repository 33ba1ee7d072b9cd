"""Shapes of models and inputs for them."""

import torch
from support.tolerance import seeded

from headwise.experiments.rank_paper import regression
from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.shape import Shape
from headwise.tasks import Regression


def inputs(shape, *lead, seed=1, dtype=torch.float32):
    """Tokens or vectors of (*lead) sequences; the last entry of `lead` is their length."""
    if shape.vocab_size:
        return torch.randint(shape.vocab_size, lead, generator=seeded(seed))
    return torch.randn(*lead, shape.in_dim, generator=seeded(seed), dtype=dtype)


def pass_of(model, x, weighting):
    """Output, and the gradients of every parameter."""
    y, _ = model(x)
    return y.detach(), torch.autograd.grad((y * weighting).sum(), list(model.parameters()))


DECODER = Shape(
    dim=16,
    depth=2,
    num_heads=6,
    num_kv_heads=3,
    head_dim=4,
    qk_rope_head_dim=2,
    qk_norm="head",
    norm="rms",
    norm_at="sandwich",
    activation="swiglu",
    ffn_dim=13,
    causal=True,
    vocab_size=17,
    tied=False,
    windows=(0, 3),
)
LATENT = Shape(
    dim=16,
    depth=1,
    num_heads=3,
    head_dim=6,
    v_head_dim=5,
    kv_lora_rank=16,
    q_lora_rank=16,
    qk_rope_head_dim=2,
    norm_at="parallel",
    causal=True,
    vocab_size=17,
    qkv_bias=True,
    out_bias=True,
    ffn_bias=True,
)
POSITIONED = Shape(
    dim=16,
    depth=2,
    num_heads=3,
    head_dim=5,
    norm="layer",
    activation="gelu",
    ffn_dim=29,
    positions="additive",
    num_positions=8,
)
READ = regression.decoder(16, 2, 2, Regression(3, 4))
ENSEMBLES = {
    "paper, rank 1": paper_shape(16, 2, 1, 2, ffn_dim=29),
    "paper, rank 4": paper_shape(16, 2, 4, 1, ffn_dim=29),
    "paper, full rank": paper_shape(48, 1, 48, 3, ffn_dim=29),
    "paper, concatenated": paper_shape(
        16, 1, 20, 1, ffn_dim=29, positions="concatenated", points=8
    ),
    "paper, room": paper_shape(16, 2, 20, 1, ffn_dim=29, positions="room"),
    "encoder": POSITIONED,
    "decoder": DECODER,
    "latent": LATENT,
    "read in and out": READ,
    "read in wide, out of many": POSITIONED.replace(input_dim=32, output_dim=19),
    "read out alone": paper_shape(16, 1, 4, 1, ffn_dim=29).replace(output_dim=2),
    "keys are values": DECODER.replace(shared_kv=True, rope_at="first", norm_at="output"),
    "gates, outputs by groups": DECODER.replace(
        attn_gate="head", o_lora_rank=16, o_groups=3, head_dim=16, qk_norm="all"
    ),
    "low-rank queries": DECODER.replace(q_lora_rank=16, attn_gate="value", norm_at="parallel-2"),
    "by layer": DECODER.replace(num_heads=(6, 3), head_dim=(4, 8), ffn_dim=(13, 29)),
    "classifier of tokens": DECODER.replace(output_dim=10),
    "odd classifier": DECODER.replace(dim=11, tied=True, output_dim=10),
    "odd read": READ.replace(dim=11, output_dim=2),
    "odd paper": paper_shape(11, 2, 1, 3, ffn_dim=29),
    "odd encoder": POSITIONED.replace(dim=11, v_head_dim=2),
    "odd decoder": DECODER.replace(dim=11),
    "odd latent": LATENT.replace(dim=11, kv_lora_rank=7, q_lora_rank=5),
}
