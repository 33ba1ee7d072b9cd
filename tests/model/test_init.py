"""Initial values: the library's laws, the paper's, and the generator that alone decides them."""

import math

import pytest
import torch
from support.initial import check_plain_values, drawn, filled, is_constant, is_normal, is_uniform
from support.tolerance import same, seeded

from benchmarks.stock import StockEncoder, copy_into_stock
from headwise.errors import UsageError
from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.model import INITS
from headwise.model.init import STARTS, fresh, initialise
from headwise.model.transformer import build
from headwise.shape import Shape

BIG = {
    "paper": paper_shape(64, 2, 16, 3, ffn_dim=512, positions="additive", points=512),
    "concatenated": paper_shape(64, 1, 32, 1, ffn_dim=512, positions="concatenated", points=128),
    "room": paper_shape(64, 1, 32, 1, ffn_dim=512, positions="room", position_dim=512),
    "decoder": Shape(
        dim=96,
        depth=3,
        num_heads=8,
        num_kv_heads=2,
        head_dim=20,
        v_head_dim=12,
        ffn_dim=300,
        activation="swiglu",
        causal=True,
        vocab_size=500,
        tied=False,
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
        norm="layer",
        qk_norm="head",
    ),
    "latent": Shape(
        dim=96,
        depth=2,
        num_heads=6,
        head_dim=20,
        kv_lora_rank=70,
        q_lora_rank=50,
        qk_rope_head_dim=8,
        qkv_bias=True,
        causal=True,
    ),
}


def matrices(block):
    """The attention's matrices but the output's, by name."""
    return {
        name: m
        for name, m in block.attention.named_children()
        if hasattr(m, "weight") and m.weight.ndim == 2 and name != "out"
    }


@pytest.mark.parametrize("name", BIG)
def test_library_values(name):
    shape = BIG[name]
    model = drawn(shape, "library")
    check_plain_values(model)
    for i, block in enumerate(model.blocks):
        for part, linear in matrices(block).items():
            rows, columns = linear.weight.shape
            is_uniform(
                linear.weight, math.sqrt(6 / (columns + rows / shape.average)), f"layer {i} {part}"
            )
        fan_in = shape.num_heads * shape.v_head_dim / shape.average
        is_uniform(block.attention.out.weight, 1 / math.sqrt(fan_in), f"layer {i} out")
        for part, linear in (("up", block.feed.up), ("down", block.feed.down)):
            bound = 1 / math.sqrt(linear.weight.shape[1])
            is_uniform(linear.weight, bound, f"layer {i} {part}")
            if linear.bias is not None:
                is_uniform(linear.bias, bound, f"layer {i} {part} bias")
    if shape.positions == "additive":
        is_normal(model.positions, 0.0, 1.0, "positions")
    if shape.positions == "concatenated":
        is_uniform(model.positions, 1.0, "positions")
    if shape.depth > 1:
        assert not torch.equal(
            model.blocks[0].attention.out.weight, model.blocks[1].attention.out.weight
        )


def test_library_values_are_the_library_s():
    """The same bounds as PyTorch's own modules: the largest of many draws lies within a
    thousandth."""
    shape = paper_shape(64, 1, 16, 4, ffn_dim=512)
    ours = drawn(shape, "library")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = StockEncoder(shape)
    found = StockEncoder(shape)
    copy_into_stock(found, ours.state_dict(), shape)
    for (name, a), (_, b) in zip(found.named_parameters(), theirs.named_parameters(), strict=True):
        if a.numel() > 10_000:
            assert a.abs().max().item() == pytest.approx(b.abs().max().item(), rel=1e-3), name
        elif "in_proj_bias" in name or "out_proj.bias" in name:
            assert not a.any(), name
            assert not b.any(), name


def test_published_values_copy_the_first_layer():
    model = drawn(BIG["paper"].replace(depth=3), "published")
    first, *others = model.blocks
    for block in others:
        for (name, p), q in zip(first.named_parameters(), block.parameters(), strict=True):
            same(p, q, name)
            assert p.data_ptr() != q.data_ptr(), f"{name} is shared, not copied"
    is_normal(model.positions, -1.0, 1.0, "positions")
    one = drawn(BIG["paper"].replace(depth=3), "library")
    same(
        first.attention.qkv.weight,
        one.blocks[0].attention.qkv.weight,
        "its first layer is the library's",
    )


@pytest.mark.parametrize("name", BIG)
def test_normal_values(name):
    shape = BIG[name]
    model = drawn(shape, "normal")
    check_plain_values(model)
    back = 0.02 / math.sqrt(2 * shape.depth)
    for i, block in enumerate(model.blocks):
        for part, linear in {**matrices(block), "up": block.feed.up}.items():
            is_normal(linear.weight, 0.0, 0.02, f"layer {i} {part}")
        is_normal(block.attention.out.weight, 0.0, back, f"layer {i} out")
        is_normal(block.feed.down.weight, 0.0, back, f"layer {i} down")
        for linear in (block.feed.up, block.feed.down):
            if linear.bias is not None:
                is_constant(linear.bias, 0.0, f"layer {i} bias")
    if model.positions is not None:
        is_normal(model.positions, 0.0, 0.02, "positions")


def test_init_has_a_start_for_every_name_that_a_recipe_may_give():
    assert tuple(STARTS) == INITS


@pytest.mark.parametrize("name", BIG)
@pytest.mark.parametrize("scheme", INITS)
def test_initial_values_follow_the_generator_alone(scheme, name):
    shape = BIG[name]
    if scheme in ("spectral", "orthogonal") and (
        shape.latent or shape.num_kv_heads != shape.num_heads
    ):
        with pytest.raises(UsageError, match="needs plain heads"):
            drawn(shape, scheme, seed=5)
        return
    if scheme == "original":
        return  # has a seed of its own: test_original_data.py
    torch.manual_seed(1)
    model = drawn(shape, scheme, seed=5)
    torch.manual_seed(2)
    again = filled(build(shape), seed=9)  # as if trained before: nothing of it may stay
    initialise(again, scheme, seeded(5))
    other = drawn(shape, scheme, seed=6)
    for (key, p), q, r in zip(
        model.named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        same(p, q, key)
        if p.ndim >= 2 and not key.endswith("out_bias"):
            assert not torch.equal(p, r), key


def test_fresh_models_are_drawn_alone():
    shape = paper_shape(12, 2, 4, 2, ffn_dim=29)
    ensemble = fresh(shape, "library", [seeded(seed) for seed in (3, 1, 4)])
    for m, seed in enumerate((3, 1, 4)):
        one = drawn(shape, "library", seed)
        for (name, p), q in zip(ensemble.named_parameters(), one.parameters(), strict=True):
            same(p[m], q, name)


def test_unknown_schemes_are_refused():
    with pytest.raises(
        UsageError,
        match=(
            r"^unknown init 'libary'; did you mean library\? choices: library, normal, original, "
            r"orthogonal, published, spectral$"
        ),
    ):
        drawn(paper_shape(64), "libary")
