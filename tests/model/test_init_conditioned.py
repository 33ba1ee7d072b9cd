"""Initial values that condition attention better, against loops over rows."""

import math

import pytest
import torch
from support.initial import check_plain_values, drawn, filled, is_constant, is_normal
from support.tolerance import close, same, seeded

from headwise.errors import UsageError
from headwise.model.init import fresh, initialise
from headwise.model.transformer import build
from headwise.shape import Shape
from headwise.theory.conditioning import attention_spectra

CONDITIONED = ("spectral", "orthogonal")

BIASED = {"norm": "layer", "qkv_bias": True, "out_bias": True, "ffn_bias": True}
VECTORS = Shape(
    dim=13,
    depth=2,
    num_heads=1,
    ffn_dim=17,
    input_dim=5,
    output_dim=3,
    positions="additive",
    num_positions=7,
    **BIASED,
)
TOKENS = Shape(
    dim=13, depth=3, num_heads=1, ffn_dim=17, causal=True, vocab_size=19, tied=False, **BIASED
)
HEADS = {
    "below dim": (2, 5),
    "dim, one head": (1, 13),
    "dim": (13, 1),
    "above dim, across a head": (3, 7),
    "above dim twice": (5, 7),
    "rank dim": (3, 13),
}
CUTS = [
    (ends.replace(num_heads=h, head_dim=r, v_head_dim=r, num_kv_heads=h), h, r)
    for ends in (VECTORS, TOKENS)
    for h, r in HEADS.values()
]
NAMED = [f"{kind}, {name}" for kind in ("vectors", "tokens") for name in HEADS]
with_cuts = pytest.mark.parametrize(("shape", "heads", "rank"), CUTS, ids=NAMED)


def identity_rows(heads, rank, dim):
    """(heads, rank, dim): one 1 a row, head after head, from the first coordinate again after the
    last."""
    out, at = torch.zeros(heads, rank, dim), 0
    for head in range(heads):
        for row in range(rank):
            out[head, row, at] = 1.0
            at = 0 if at == dim - 1 else at + 1
    return out


@with_cuts
def test_spectral_is_normal_with_the_identity_in_queries_keys_and_values(shape, heads, rank):
    plain, model = dict(drawn(shape, "normal", 5).named_parameters()), drawn(shape, "spectral", 5)
    added = identity_rows(heads, rank, shape.dim).flatten(0, 1)
    for name, p in model.named_parameters():
        same(
            p,
            plain[name] + added.repeat(3, 1) if name.endswith("qkv.weight") else plain[name],
            name,
        )


@with_cuts
def test_orthogonal_has_orthonormal_queries_and_keys_and_the_identity_as_values(shape, heads, rank):
    model, seen = drawn(shape, "orthogonal", 5), []
    for block in model.blocks:
        queries, keys, values = block.attention.qkv.weight.detach().split(heads * rank)
        same(values, identity_rows(heads, rank, shape.dim).flatten(0, 1), "values")
        for head in (*queries.split(rank), *keys.split(rank)):
            close(head @ head.T, torch.eye(rank), "rows")
            seen.append(head)
        is_constant(block.attention.qkv.bias, 0.0, "bias")
        is_constant(block.attention.out_bias, 0.0, "bias")
    assert len(seen) == 2 * heads * shape.depth
    for i, head in enumerate(seen):
        assert all((head - other).abs().max() > 1e-3 for other in seen[:i]), (
            "every head is drawn anew"
        )


def test_orthogonal_follows_the_law_of_normal_in_all_else():
    shape = Shape(
        dim=53,
        depth=3,
        num_heads=3,
        head_dim=17,
        ffn_dim=71,
        causal=True,
        vocab_size=101,
        tied=False,
        **BIASED,
    )
    model, plain = drawn(shape, "orthogonal"), drawn(shape, "normal")
    check_plain_values(model)
    for i, block in enumerate(model.blocks):
        for what, part, spread in (
            ("out", block.attention.out, 0.02 / math.sqrt(6)),
            ("up", block.feed.up, 0.02),
            ("down", block.feed.down, 0.02 / math.sqrt(6)),
        ):
            is_normal(part.weight, 0.0, spread, f"layer {i} {what}")
        for part in (block.feed.up, block.feed.down):
            is_constant(part.bias, 0.0, f"layer {i} bias")
    for a, b in (
        (model.blocks[0].attention.out, plain.blocks[0].attention.out),
        (model.blocks[0].feed.up, plain.blocks[0].feed.up),
    ):
        same(a.weight, b.weight, "the first layer's are normal's own")


@pytest.mark.parametrize("scheme", CONDITIONED)
def test_seed_alone_decides_the_start(scheme):
    shape = TOKENS.replace(num_heads=3, head_dim=5, v_head_dim=5, num_kv_heads=3)
    torch.manual_seed(1)
    model, other = drawn(shape, scheme, 5), drawn(shape, scheme, 6)
    torch.manual_seed(2)
    again = filled(build(shape), seed=9)
    initialise(again, scheme, seeded(5))
    for (name, p), q, r in zip(
        model.named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        same(p, q, name)
        if p.ndim == 2 and not name.endswith("out_bias"):
            assert not torch.equal(p, r), name
    ensemble = fresh(shape, scheme, [seeded(seed) for seed in (6, 3, 5)])
    for (name, p), q, r in zip(
        ensemble.named_parameters(), other.parameters(), model.parameters(), strict=True
    ):
        same(p[0], q, name)
        same(p[2], r, name)


REFUSED = {
    "grouped": {"num_heads": 6, "num_kv_heads": 2, "head_dim": 5},
    "latent": {"num_heads": 3, "head_dim": 5, "kv_lora_rank": 7},
    "rank above dim": {"num_heads": 2, "head_dim": 14},
    "values apart": {"num_heads": 2, "head_dim": 5, "v_head_dim": 3},
}


@pytest.mark.parametrize("scheme", CONDITIONED)
@pytest.mark.parametrize("name", REFUSED)
def test_heads_without_an_identity_of_their_own_are_refused_in_one_line(name, scheme):
    shape = Shape(dim=13, depth=2, **REFUSED[name])
    drawn(shape, "normal")
    with pytest.raises(UsageError) as caught:
        drawn(shape, scheme)
    assert str(caught.value).startswith(f"init {scheme} needs plain heads")
    assert f"this shape has rank {shape.head_dim}, " in str(caught.value)
    assert f"dim 13, {shape.num_heads} heads, {shape.num_kv_heads} KV heads" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("scheme", CONDITIONED)
@pytest.mark.parametrize(
    ("heads", "rank", "tokens"), [(2, 5, 7), (2, 5, 17), (3, 7, 7), (3, 7, 17), (1, 13, 7)]
)
def test_attention_starts_better_conditioned(scheme, heads, rank, tokens):
    shape = Shape(dim=13, depth=2, num_heads=heads, head_dim=rank, ffn_dim=17, **BIASED)
    x = torch.randn(5, tokens, 13, generator=seeded(3))
    plain, better = (attention_spectra(drawn(shape, init, 1), x) for init in ("normal", scheme))
    for a, b in zip(plain, better, strict=True):
        assert b["kappa"] < a["kappa"] / 20, (
            f"layer {a['layer']}: {a['kappa']:.4g}, {scheme} {b['kappa']:.4g}"
        )
        assert b["kappa_centred"] < a["kappa_centred"], f"layer {a['layer']}, centred"
