"""Shape: its rules, and that it is a value."""

import dataclasses
import json
import math

import pytest
from support.random_shapes import FAMILIES, shapes

from headwise.errors import UsageError, nearest
from headwise.shape import Shape

# ---- rules


GOOD = {"dim": 12, "depth": 2, "num_heads": 6}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"head_dim": 0}, ("head_dim must be at least 1", "got 0")),
        ({"dim": 0}, ("dim must be at least 1", "got 0")),
        ({"depth": 0, "windows": ()}, ("depth must be at least 1", "got 0")),
        ({"depth": -3}, ("depth must be at least 1", "got -3")),
        ({"num_heads": 0}, ("num_heads must be at least 1", "got 0")),
        ({"num_heads": -2, "head_dim": 3}, ("num_heads must be at least 1", "got -2")),
        ({"v_head_dim": 0}, ("v_head_dim must be at least 1", "got 0")),
        ({"num_kv_heads": 0}, ("num_kv_heads must be at least 1", "got 0")),
        ({"average": 0}, ("average must be at least 1", "got 0")),
        (
            {"num_heads": 5},
            ("head_dim must be given", ("num_heads does not divide dim"), "dim 12", "num_heads 5"),
        ),
        (
            {"num_kv_heads": 4},
            ("num_heads must be a multiple of num_kv_heads", "num_heads 6", "num_kv_heads 4"),
        ),
        ({"average": 4}, ("num_heads must be a multiple of average", "num_heads 6", "average 4")),
        (
            {"head_dim": 7, "qk_rope_head_dim": 7},
            ("head_dim must be even for rotary positions", "got 7"),
        ),
        (
            {"head_dim": 8, "qk_rope_head_dim": 3},
            ("qk_rope_head_dim must be even for rotary positions", "got 3"),
        ),
        (
            {"head_dim": 4, "qk_rope_head_dim": 6},
            ("qk_rope_head_dim must not exceed head_dim", "6", "head_dim 4"),
        ),
        *(
            ({name: -1}, (f"{name} must not be negative", "got -1"))
            for name in (
                "kv_lora_rank",
                "q_lora_rank",
                "qk_rope_head_dim",
                "ffn_dim",
                "vocab_size",
                "num_positions",
                "position_dim",
                "input_dim",
                "output_dim",
            )
        ),
        *(
            ({name: bad}, (f"{name} must be a whole number", f"got {bad!r}"))
            for name in (
                "dim",
                "depth",
                "num_heads",
                "head_dim",
                "num_kv_heads",
                "ffn_dim",
                "vocab_size",
                "input_dim",
                "output_dim",
            )
            for bad in ("8", 8.0, True)
        ),
        *(
            ({name: 1}, (f"{name} must be true or false", "got 1"))
            for name in ("causal", "qkv_bias", "tied")
        ),
        *(
            ({name: bad}, (f"{name} must be a positive number", f"got {bad!r}"))
            for name in ("rope_theta", "logit_scale")
            for bad in (0, -1.0, "1", True, math.inf, math.nan)
        ),
        ({"rope_theta": None}, ("rope_theta must be a positive number", "got None")),
        ({"max_logit": 4.0}, ("max_logit needs qk_norm", "qk_norm none")),
        (
            {"max_logit": 4.0, "qk_norm": "head", "logit_scale": 0.5},
            ("max_logit", "replaces logit_scale", "0.5"),
        ),
        (
            {"kv_lora_rank": 4, "num_kv_heads": 3},
            ("num_kv_heads must equal num_heads 6", "kv_lora_rank 4", "got 3"),
        ),
        (
            {"kv_lora_rank": 4, "qk_norm": "head"},
            ("qk_norm must be none or free", "kv_lora_rank 4", "got head"),
        ),
        (
            {"vocab_size": 5, "input_dim": 3},
            (
                "takes tokens or vectors",
                ("vocab_size excludes input_dim"),
                "vocab_size 5, input_dim 3",
            ),
        ),
        (
            {"vocab_size": 5, "input_dim": 3, "output_dim": 2},
            ("vocab_size excludes input_dim", "vocab_size 5, input_dim 3"),
        ),
        ({"activation": "swigly"}, ("unknown activation 'swigly'", "did you mean swiglu", "relu2")),
        ({"norm": "rsm"}, ("unknown norm 'rsm'", "did you mean rms", "layer-nobias")),
        ({"norm_at": "pree"}, ("unknown norm_at 'pree'", "did you mean pre", "sandwich")),
        ({"qk_norm": "heads"}, ("unknown qk_norm 'heads'", "did you mean head", "free")),
        (
            {"positions": "aditive"},
            ("unknown positions 'aditive'", "did you mean additive", "concatenated"),
        ),
        ({"norm": 3}, ("unknown norm 3", "choices: layer")),
        (
            {"positions": "additive"},
            ("num_positions must be given for additive positions", "got 0"),
        ),
        (
            {"positions": "concatenated", "num_positions": 4},
            ("position_dim goes with concatenated", "position_dim 0"),
        ),
        (
            {"positions": "concatenated", "num_positions": 4, "position_dim": 2, "vocab_size": 7},
            ("concatenated positions go with vectors, not with tokens", "vocab_size 7"),
        ),
        (
            {"position_dim": 4},
            ("position_dim goes with concatenated", "position_dim 4", "positions none"),
        ),
        (
            {"positions": "room"},
            (
                "position_dim goes with concatenated positions and room",
                "position_dim 0",
                "positions room",
            ),
        ),
        (
            {"positions": "room", "position_dim": 2, "num_positions": 4},
            ("num_positions must be 0 with room", "same at every place", "4"),
        ),
        (
            {"positions": "concatenated", "num_positions": 4, "position_dim": 12},
            ("position_dim must be below dim", "12"),
        ),
        *(
            ({"windows": bad}, ("windows must be 1 to depth (2)", repr(bad)))
            for bad in ((), (1, 2, 3), (-1,), ("4",), 4, None, (True,))
        ),
        *(
            ({"extras": bad}, ("extras must be pairs", repr(bad)))
            for bad in (5, (("a", -1),), (("a",),), ((1, 2),), "ab", None)
        ),
    ],
)
def test_bad_shapes_die_with_one_line(changes, parts):
    with pytest.raises(UsageError) as caught:
        Shape(**GOOD | changes)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize("bad", [0, -1, 2.0, True, "3", None])
@pytest.mark.parametrize("cost", ["flops", "kv_bytes", "activation_bytes"])
def test_costs_refuse_senseless_counts(cost, bad):
    shape = Shape(**GOOD)
    with pytest.raises(UsageError, match=r"^tokens must be a whole number of at least 1, got"):
        getattr(shape, cost)(bad)
    with pytest.raises(UsageError, match=r"^batch must be a whole number of at least 1, got"):
        getattr(shape, cost)(3, batch=bad)


def test_unknown_and_missing_keys():
    with pytest.raises(
        UsageError,
        match=r"^unknown shape key 'num_head'; did you mean num_heads.*choices: .*vocab_size",
    ) as caught:
        Shape.of({**GOOD, "num_head": 3})
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="unknown shape key 'heds'"):
        Shape(**GOOD).replace(heds=3)
    for name in GOOD:
        with pytest.raises(UsageError, match=f"got no {name}$"):
            Shape.of({key: value for key, value in GOOD.items() if key != name})


def test_nearest_names_come_first_and_all_are_listed():
    assert (
        nearest("beta", ("gamma", "beto", "alpha"))
        == "did you mean beto? choices: alpha, beto, gamma"
    )
    assert nearest("zzz", ("gamma", "alpha")) == "choices: alpha, gamma"


# ---- a value


def test_shape_is_a_value():
    shape, again, other = Shape(**GOOD), Shape(**GOOD), Shape(**GOOD, head_dim=5)
    assert shape == again
    assert hash(shape) == hash(again)
    assert shape != other
    assert len({shape, again, other}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        shape.dim = 13


def test_sizes_that_follow_from_others():
    shape = Shape(**GOOD)
    assert (shape.head_dim, shape.v_head_dim, shape.num_kv_heads, shape.ffn_dim) == (2, 2, 6, 48)
    wide = Shape(dim=12, depth=1, num_heads=5, head_dim=7)  # heads times rank need not be dim
    assert (wide.v_head_dim, wide.num_kv_heads) == (7, 5)
    assert Shape(**GOOD, windows=[3, 0], extras=[["a", 1]]) == Shape(
        **GOOD, windows=(3, 0), extras=(("a", 1),)
    )
    assert [Shape(dim=4, depth=5, num_heads=1, windows=(3, 0)).window(i) for i in range(5)] == [
        3,
        0,
        3,
        0,
        3,
    ]


def test_replace_changes_one_field_and_keeps_derived_sizes():
    shape = Shape(**GOOD)
    longer = shape.replace(depth=7)
    assert longer == Shape(dim=12, depth=7, num_heads=6)
    assert shape.depth == 2
    assert shape.replace(dim=18).head_dim == shape.head_dim  # 2, not 18 // 6
    with pytest.raises(UsageError, match="num_heads must be a multiple of num_kv_heads"):
        shape.replace(num_heads=7)


@pytest.mark.parametrize("family", FAMILIES)
def test_shape_survives_json(family):
    for shape in shapes(family, 20):
        assert Shape.of(json.loads(json.dumps(dataclasses.asdict(shape)))) == shape


def test_scale_of_the_scores():
    assert Shape(dim=9, depth=1, num_heads=1).scale == pytest.approx(1 / 3, rel=1e-15)
    assert Shape(dim=9, depth=1, num_heads=1, logit_scale=0.7).scale == 0.7
    shapes_ = [
        Shape(dim=256, depth=1, num_heads=2, head_dim=r, qk_norm="free", max_logit=12.0)
        for r in (8, 32, 128)
    ]
    assert [s.scale * s.head_dim for s in shapes_] == [12.0, 12.0, 12.0]
