"""Sizes that differ by layer: one form however they were written, views, sums, refusals."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.random_shapes import FAMILIES, shapes
from support.tolerance import examples

from headwise.errors import MOST_LAYERS, MOST_SIZE, UsageError
from headwise.shape import BY_LAYER, Layer, Shape

GOOD = {"dim": 64, "depth": 4, "num_heads": 8}

# ---- one form


def test_shapes_with_equal_layers_are_equal_however_they_were_written():
    wide = Layer(num_heads=4, num_kv_heads=4, head_dim=16, v_head_dim=16)
    listed = Shape(dim=64, depth=4, num_heads=(8, 8, 4, 4), head_dim=(8, 8, 16, 16))
    assert listed == Shape(**GOOD, layers=(Layer(), Layer(), wide, wide))
    assert listed == Shape(**GOOD, layers=[Layer(), Layer(num_heads=8), wide, wide])
    assert listed == Shape.of({"d_model": 64, "layers": 4, "n_head": [8, 8, 4, 4]})
    # From the other end: the shape's own sizes become those of its most common layer.
    narrow = Layer(num_heads=8, num_kv_heads=8, head_dim=8, v_head_dim=8)
    assert listed == Shape(dim=64, depth=4, num_heads=4, layers=(narrow, narrow, Layer(), Layer()))
    assert len({listed, listed.replace(), Shape.of(listed.spec())}) == 1
    assert (listed.num_heads, listed.head_dim, listed.num_kv_heads) == (8, 8, 8)
    assert listed.layers == (Layer(), Layer(), wide, wide)
    assert not listed.uniform


def test_lists_tile_the_depth_and_equal_layers_leave_nothing():
    assert Shape(**GOOD | {"num_heads": (8, 8)}) == Shape(**GOOD)
    assert Shape(**GOOD, ffn_dim=[5, 5, 5]).uniform
    assert Shape(**GOOD, layers=(Layer(), Layer(ffn_dim=256))) == Shape(**GOOD)
    assert Shape(**GOOD, layers=[]) == Shape(**GOOD)
    assert Shape(**GOOD, ffn_dim=(5, 7, 5, 7)) == Shape(**GOOD, ffn_dim=(5, 7))
    # Patterns of different lengths meet in their least common multiple, or the depth.
    two, three = (5, 7), (8, 4, 2)
    shape = Shape(dim=64, depth=7, num_heads=three, head_dim=6, ffn_dim=two)
    assert [shape.layer(i).num_heads for i in range(7)] == [8, 4, 2, 8, 4, 2, 8]
    assert [shape.layer(i).ffn_dim for i in range(7)] == [5, 7, 5, 7, 5, 7, 5]
    assert len(shape.layers) == 6


def test_most_common_layer_gives_the_shape_its_sizes():
    shape = Shape(dim=64, depth=5, num_heads=(4, 8, 8), head_dim=3)
    assert shape.num_heads == 8
    assert shape.layers == (Layer(num_heads=4, num_kv_heads=4), Layer(), Layer())
    # Where any layer has experts, of those; and the feed-forward is the dense layers'.
    moe = {"num_experts_per_tok": 2, "expert_ffn_dim": 5}
    first = Shape(**GOOD, num_experts=(0, 0, 0, 6), ffn_dim=(7, 9, 9, 11), **moe)
    assert (first.num_experts, first.num_experts_per_tok, first.ffn_dim) == (6, 2, 9)
    assert first.layers[3] == Layer()
    assert [first.layer(i).num_experts for i in range(4)] == [0, 0, 0, 6]
    assert [first.layer(i).ffn_dim for i in range(3)] == [7, 9, 9]


def test_sizes_follow_from_the_layers_own():
    shape = Shape(dim=64, depth=2, num_heads=(8, 4))
    assert [shape.layer(i).head_dim for i in range(2)] == [8, 16]
    assert [shape.layer(i).num_kv_heads for i in range(2)] == [8, 4]
    given = Shape(dim=64, depth=2, num_heads=(8, 4), num_kv_heads=2, head_dim=(8, 6), v_head_dim=5)
    assert [given.layer(i).num_kv_heads for i in range(2)] == [2, 2]
    assert [given.layer(i).v_head_dim for i in range(2)] == [5, 5]


@examples(200)
@given(
    st.integers(1, 9),
    st.lists(st.sampled_from((2, 4, 8)), min_size=1, max_size=4),
    st.lists(st.sampled_from((0, 3, 5)), min_size=1, max_size=4),
    st.lists(st.sampled_from((0, 2)), min_size=1, max_size=3),
)
def test_form_is_a_fixed_point_and_holds_every_layer(depth, heads, ffn, windows):
    heads, ffn, windows = heads[:depth], ffn[:depth], windows[:depth]
    shape = Shape(dim=16, depth=depth, num_heads=heads, ffn_dim=ffn, windows=windows, causal=True)
    for i in range(depth):
        layer = shape.layer(i)
        own = heads[i % len(heads)], 16 // heads[i % len(heads)], ffn[i % len(ffn)]
        assert (layer.num_heads, layer.head_dim, layer.ffn_dim) == own
        assert (layer.depth, layer.windows) == (1, (windows[i % len(windows)],))
        assert layer == layer.layer(0) == Shape.of(layer.spec())
        assert layer.uniform
    for again in (Shape.of(shape.spec()), shape.replace(), Shape.of(dataclasses.asdict(shape))):
        assert again == shape
        assert again.layers == shape.layers
    # The same layers in full, one after another.
    full = [shape.layer(i) for i in range(depth)]
    listed = {name: [getattr(layer, name) for layer in full] for name in BY_LAYER}
    assert Shape(dim=16, depth=depth, windows=windows, causal=True, **listed) == shape
    # Sums over distinct layers are sums over all.
    assert sum(count for _, count in shape.distinct_layers()) == depth
    counted = shape.distinct_layers()
    assert len({layer for layer, _ in counted}) == len(counted)
    expected = sum(layer.kv_bytes(7) for layer in full)
    assert shape.kv_bytes(7) == expected
    assert shape.flops(7) == sum(layer.flops(7) for layer in full)
    norm = 16  # each one-layer shape has a final norm of its own
    assert shape.params == sum(layer.params - norm for layer in full) + norm


def test_costs_of_many_layers_are_sums_over_kinds():
    few, many = (
        Shape(dim=24, depth=depth, num_heads=(8, 4, 2), ffn_dim=(5, 7), windows=(0, 3), causal=True)
        for depth in (6, 60_000)
    )
    assert len(many.distinct_layers()) == 6
    assert many.kv_bytes(7) == 10_000 * few.kv_bytes(7)
    assert many.flops(7) == 10_000 * few.flops(7)
    assert many.params - 24 == 10_000 * (few.params - 24)


@pytest.mark.parametrize("family", ["by layer", "modern"])
def test_shape_survives_json_as_a_spec(family):
    for shape in shapes(family, 30):
        assert Shape.of(json.loads(json.dumps(shape.spec()))) == shape


def test_old_shapes_have_the_spec_that_they_had():
    """Fields that came later are in it only where they are used, so ids stay."""
    for family in FAMILIES:
        for shape in shapes(family, 20):
            later = set(shape.spec()) - set(Shape(**GOOD).spec())
            assert later == set(shape.later())
    assert len(Shape(**GOOD).spec()) == 31


# ---- changed


def test_replace_gives_a_size_to_all_layers_and_a_list_to_each():
    shape = Shape(**GOOD | {"num_heads": (8, 4)}, ffn_dim=(5, 7))
    same = shape.replace(num_heads=4, num_kv_heads=4, head_dim=16, v_head_dim=16)
    assert same == Shape(dim=64, depth=4, num_heads=4, ffn_dim=(5, 7))
    assert shape.replace(ffn_dim=[7, 5]) == Shape(**GOOD | {"num_heads": (8, 4)}, ffn_dim=(7, 5))
    assert shape.replace(layers=()).uniform
    assert shape.replace(hidden_size=32).dim == 32
    one = Shape(dim=64, depth=1, num_heads=8, ffn_dim=5)
    assert shape.replace(depth=1, layers=shape.layers[:1]) == one
    with pytest.raises(UsageError, match=r"^layers must be at most depth \(1\) values of Layer"):
        shape.replace(depth=1)


# ---- keys and values of another layer


def test_layers_that_reuse_keys_and_values_have_none():
    own = Layer()
    shape = Shape(
        dim=22, depth=5, num_heads=6, num_kv_heads=3, head_dim=4, ffn_dim=13, qk_norm="head",
        layers=(own, own, *[Layer(reuses_kv=True)] * 3), windows=(3, 0), causal=True,
    )  # fmt: skip
    plain = shape.replace(layers=())
    # Three layers less of W_K, W_V and the keys' gains; caches of the first two, one in a window.
    assert plain.params - shape.params == 3 * (22 * 2 * 3 * 4 + 4)
    assert shape.kv_bytes(7) == (3 + 7) * 3 * (4 + 4) * 2
    assert plain.flops(7) - shape.flops(7) == 3 * 2 * 7 * 22 * 2 * 3 * 4
    assert [shape.layer(i).reuses_kv for i in range(5)] == [False, False, True, True, True]
    assert shape.layer(3).layer(0) == shape.layer(3)
    assert shape.layer(3).uniform
    assert shape.layer(3).kv_bytes(7) == 0
    assert shape.kv_width(layer=3) == 0


# ---- refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 5}, "layers must be at most depth (4) values of Layer, got 5"),
        ({"layers": None}, "layers must be at most depth (4) values of Layer, got None"),
        ({"layers": (Layer(),) * 5}, "layers must be at most depth (4) values of Layer, got"),
        ({"layers": ("x",)}, "layers must be at most depth (4) values of Layer, got 'x'"),
        ({"layers": ({"num_head": 3},)}, "unknown layer key 'num_head'; did you mean num_heads"),
        ({"num_heads": ()}, "num_heads by layer must be 1 to depth (4) values, which tile"),
        ({"ffn_dim": (1,) * 5}, "ffn_dim by layer must be 1 to depth (4) values, which tile"),
        ({"num_heads": (8, "4")}, "num_heads by layer must be a whole number, got '4'"),
        ({"num_heads": (8, True)}, "num_heads by layer must be a whole number, got True"),
        ({"num_heads": (8, -4)}, f"num_heads by layer must be from 0 to {MOST_SIZE:,}, got -4"),
        ({"ffn_dim": (8, 2**31)}, f"ffn_dim by layer must be from 0 to {MOST_SIZE:,}, got 2147"),
        ({"shared_kv": (True, 0)}, "shared_kv by layer must be true or false, got 0"),
        ({"num_heads": (8, 0)}, "layer 1: num_heads must be at least 1, got 0"),
        ({"head_dim": (8, 0)}, "layer 1: head_dim must be at least 1, got 0"),
        ({"num_heads": (8, 5)}, "layer 1: head_dim must be given when num_heads does not divide"),
        ({"num_kv_heads": (8, 3)}, "layer 1: num_heads must be a multiple of num_kv_heads, got"),
        ({"qk_rope_head_dim": (2, 3)}, "layer 1: qk_rope_head_dim must be even for rotary"),
        ({"qk_rope_head_dim": (2, 10)}, "layer 1: qk_rope_head_dim must not exceed head_dim, got"),
        (
            {"v_head_dim": 5, "shared_kv": (False, True)},
            "layer 1: shared_kv makes the keys the values, so v_head_dim must be head_dim, got "
            "head_dim 8, v_head_dim 5",
        ),
        (
            {"ffn_dim": (3, 5), "layers": (Layer(ffn_dim=7),)},
            "ffn_dim is given twice: as a list and in layers",
        ),
        (
            {"layers": (Layer(reuses_kv=True), Layer())},
            "layer 0: reuses_kv needs a layer before with keys and values of its own in the same",
        ),
        (
            {"layers": (Layer(), Layer(reuses_kv=True, head_dim=3))},
            "layer 1: reuses_kv needs a layer before with keys and values of its own in the same",
        ),
        (
            {"layers": (Layer(), Layer(reuses_kv=True)), "kv_lora_rank": 5},
            "layer 1: reuses_kv goes with keys and values, not with a latent (kv_lora_rank 5)",
        ),
        (
            {"num_heads": (8, 4), "depth": MOST_LAYERS + 1},
            f"depth must be from 1 to {MOST_LAYERS:,} layers, got {MOST_LAYERS + 1}",
        ),
        ({"num_heads": (8, 4), "depth": 0}, f"depth must be from 1 to {MOST_LAYERS:,} layers"),
        ({"num_heads": (8, 4), "depth": "4"}, "depth must be a whole number, got '4'"),
        ({"num_heads": "8", "ffn_dim": (3, 5)}, "num_heads must be a whole number, got '8'"),
        ({"num_heads": None, "ffn_dim": (3, 5)}, "num_heads must be a whole number, got None"),
    ],
)
def test_bad_layers_die_with_one_line(changes, message):
    with pytest.raises(UsageError) as caught:
        Shape(**GOOD | changes)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("name", [*BY_LAYER, "reuses_kv"])
def test_bad_sizes_of_a_layer_die_with_one_line(name):
    flag = name in ("shared_kv", "reuses_kv")
    for bad in ("8", 8.0, [8]) + ((1,) if flag else (True, -1, 2**31)):
        with pytest.raises(UsageError, match=f"^{name} of a layer must be "):
            Layer(**{name: bad})
