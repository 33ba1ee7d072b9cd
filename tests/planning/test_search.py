"""What a plan lists, against an enumeration of every shape with `Shape` itself."""

import itertools
import random
from fractions import Fraction

import numpy as np
import pytest
import torch

from headwise.errors import UsageError
from headwise.model.cache import Cache
from headwise.model.transformer import build
from headwise.planning.costs import COSTS, At
from headwise.planning.limits import limit_of
from headwise.planning.plan import plan
from headwise.planning.search import nearest_times
from headwise.shape import Shape

AT = {"context": 29, "batch": 3, "dtype": "fp32"}
AXES = {
    "dim": (53, 59),
    "depth": (1, 2, 5),
    "num_heads": (1, 2, 3, 4),
    "head_dim": (6, 10),
    "v_head_dim": (4, 6, 10),
    "ffn_dim": (0, 1, 61),
}
DECODER = {"vocab_size": 101, "causal": True, "norm": "rms", "norm_at": "pre"}


def shapes_of(axes: dict, fixed: dict) -> set[Shape]:
    """Every shape of a product of fields that Shape allows."""
    found = set()
    for values in itertools.product(*axes.values()):
        fields = {**fixed, **dict(zip(axes, values, strict=True))}
        fields["windows"] = fields.get("windows", (0,))[: fields["depth"]]
        try:
            found.add(Shape.of(fields))
        except UsageError:
            continue
    return found


def listed(found) -> list[Shape]:
    return [row.shape for row in found.rows]


@pytest.mark.parametrize(
    ("more", "fixed"),
    [
        ({"num_kv_heads": (1, 2, 3)}, {"qk_rope_head_dim": 4, "activation": "swiglu"}),
        ({"num_kv_heads": (1, 2)}, {"qk_rope_head_dim": 0, "activation": "relu2", "tied": False}),
        (
            {"num_kv_heads": (1, 2), "windows": ((7, 7, 0), (0,)), "tied": (True, False)},
            {"qk_rope_head_dim": 6, "qk_norm": "head", "activation": "gelu", "ffn_bias": True},
        ),
        (
            {"kv_lora_rank": (0, 13), "q_lora_rank": (0, 11), "num_kv_heads": (1, 2, 3, 4)},
            {"qk_rope_head_dim": 2, "activation": "geglu"},
        ),
        (
            {"num_kv_heads": (1, 2), "norm": ("layer", "rms")},
            {
                "qk_rope_head_dim": 0,
                "average": 2,
                "qkv_bias": True,
                "out_bias": True,
                "activation": "relu",
            },
        ),
    ],
)
def test_plan_lists_what_an_enumeration_finds(more: dict, fixed: dict) -> None:
    axes, at = {**AXES, **more}, At(**AT)
    every = shapes_of(axes, DECODER | fixed)
    middle = sorted(shape.params for shape in every)[len(every) // 2]
    cache = sorted(COSTS["kv_bytes_at_context"].of(shape, at) for shape in every)
    low, high = cache[len(cache) // 5], cache[len(cache) // 2]
    wanted = {
        shape
        for shape in every
        if middle // 2 <= shape.params <= middle
        and low <= COSTS["kv_bytes_at_context"].of(shape, at) <= high
    }
    # The same fields in words, one of two ways to give them.
    given = {name: list(values) for name, values in axes.items()}
    found = plan(
        params=f"{middle // 2}..{middle}",
        kv_bytes_at_context=f"{low}..{high}",
        fields={**fixed, "vocab_size": 101, "causal": True, **given},
        **AT,
    )
    assert len(wanted) > 20
    assert len(found) == len(wanted), "every row is another shape"
    assert set(listed(found)) == wanted
    assert found.considered == len(every)
    assert sum(count for _, count in found.removed) == len(every) - len(wanted)


def test_plan_solves_the_feed_forward_nearest_to_the_budget() -> None:
    axes = {"dim": (64, 96), "depth": (1, 2, 3), "num_heads": (1, 2, 3), "head_dim": (8, 16)}
    target, wanted = 120_000, set()
    for values in itertools.product(*axes.values()):
        fields = dict(zip(axes, values, strict=True)) | DECODER | {"activation": "swiglu"}
        for kv in range(1, fields["num_heads"] + 1):
            if fields["num_heads"] % kv:
                continue
            rope = {"qk_rope_head_dim": fields["head_dim"], "num_kv_heads": kv}
            shapes = [Shape.of({**fields, **rope, "ffn_dim": 8 * m}) for m in range(1, 90)]
            best = min(shapes, key=lambda s: (abs(s.params - target), s.ffn_dim))
            if abs(best.params - target) <= Fraction(target, 50):
                wanted.add(best)
    found = plan(
        params=str(target), tolerance=0.02, multiple=8, vocab_size=101, **axes,
        fields={"ffn/dim": "0..1000"},
    )  # fmt: skip
    assert set(listed(found)) == wanted
    assert len(found) == len(wanted) > 20


@pytest.mark.parametrize(
    ("text", "wanted"), [("100", 8), ("<=100", 8), (">=100", 9), ("90..112", 8), ("<=3", 0)]
)
def test_solved_feed_forward_takes_the_side_of_the_limit(text: str, wanted: int) -> None:
    # Steps of 12 from 0; 102 would be a tie.
    line = np.array([0]), np.array([12])
    limit = limit_of("params", text)
    assert nearest_times(*line, limit, 1).tolist() == [wanted]
    assert nearest_times(*line, limit_of("params", "102"), 1).tolist() == [8], "a tie: the fewer"


@pytest.mark.parametrize(
    ("params", "flops"), [("<=60000", "<=110k"), ("18k..19k", "110k..125k"), (">=20k", "<=130k")]
)
def test_solved_feed_forward_meets_every_limit_where_any_does(params: str, flops: str) -> None:
    axes = {"dim": (32, 40), "depth": (1, 2), "num_heads": (1, 2), "head_dim": (8, 16)}
    given = {"params": params, "train_flops_per_token": flops}
    limits = [limit_of(name, text, kind="flops") for name, text in given.items()]
    wanted = set()
    for values in itertools.product(*axes.values()):
        fields = dict(zip(axes, values, strict=True)) | DECODER | {"activation": "swiglu"}
        fields |= {"qk_rope_head_dim": fields["head_dim"], "num_kv_heads": 1}
        shapes = [Shape.of({**fields, "ffn_dim": 8 * m}) for m in range(1, 200)]
        met = [
            s
            for s in shapes
            if s.dim <= s.ffn_dim <= 8 * s.dim
            and limits[0].holds(s.params)
            and limits[1].holds(s.train_flops_per_token(31))
        ]
        if met:
            wanted.add(min(met, key=lambda s: (abs(s.params - limits[0].target), s.ffn_dim)))
    found = plan(**given, **axes, num_kv_heads=1, vocab_size=101, multiple=8, context=31)
    assert set(listed(found)) == wanted
    assert 3 < len(wanted) < 16


DEFAULTS = [
    {"params": "350M", "kv_bytes_per_token": "48KiB"},
    {"params": "10M", "vocab_size": 512},
    {"params": "70B", "kv_bytes_per_token": "<=100KiB", "context": 131_072},
    {"params": "2B", "windows": "512/512/0", "kv_lora_rank": "128,256", "activation": "geglu"},
    {"train_flops_per_token": "<=3G", "decode_flops": "100M..900M", "tied": False},
    {"params": "8B", "active_params": "<=2B", "num_experts": 32, "num_experts_per_tok": "2,4"},
    {"weight_bytes": "1GiB", "dtype": "int4", "prefill_flops": "<=12T", "qk_norm": "head"},
]


@pytest.mark.parametrize("limits", DEFAULTS)
def test_listed_costs_equal_those_of_the_shape(limits: dict) -> None:
    found, rng = plan(**limits), random.Random(1)
    assert len(found) > 40
    for number in rng.sample(range(1, len(found) + 1), 40):
        row = found.row(number)
        for name, cost in COSTS.items():
            if not cost.missing(row.shape, found.at):
                assert row.costs[name] == cost.of(row.shape, found.at), (name, row)
        for limit in found.limits:
            assert limit.holds(row.costs[limit.cost]), (limit, row)
        ours, at = row.costs, found.at
        assert ours["train_flops_per_token"] == row.shape.train_flops_per_token(at.context)
        assert ours["weight_bytes"] == row.shape.weight_bytes(at.dtype)


def test_listed_params_and_cache_equal_the_real_module() -> None:
    found = plan(params="3M", vocab_size=512, kv_lora_rank="0,64", context=64)
    rng = random.Random(2)
    for number in rng.sample(range(1, len(found) + 1), 12):
        row = found.row(number)
        with torch.device("meta"):
            model = build(row.shape)
        assert sum(p.numel() for p in model.parameters()) == row.costs["params"]
        cache = Cache(row.shape, 1, 64, dtype=torch.bfloat16)
        assert cache.bytes == row.costs["kv_bytes_at_context"]


@pytest.mark.parametrize("context", [2**27, 2**50])
def test_costs_above_63_bits_are_exact(context: int) -> None:
    found = plan(
        context=min(context, 2**31 - 1), batch=2**20, dim=2**14, depth="60..64", num_heads=128,
        num_kv_heads=128, head_dim=256, ffn_dim=2**16,
    )  # fmt: skip
    assert len(found) == 5
    for row in found.rows:
        assert row.costs["activation_bytes"] > 2**63
        for name, cost in COSTS.items():
            assert row.costs[name] == cost.of(row.shape, found.at), name


def test_layers_that_differ_are_counted_as_the_shape_counts_them() -> None:
    like = Shape(
        dim=96, depth=6, num_heads=(4, 4, 2), head_dim=(16, 16, 32), num_kv_heads=(2, 2, 1),
        ffn_dim=256, windows=(16, 16, 0), vocab_size=203, causal=True, activation="geglu",
    )  # fmt: skip
    found = plan(like, params="<=+20%", kv_bytes_at_context="<=-10%", ffn_dim=(192, 256), **AT)
    assert 10 < len(found) < 5000
    for row in random.Random(3).sample(list(found.rows), 10):
        assert row.shape.depth == 6
        assert not row.shape.uniform
        for name, value in row.costs.items():
            assert value == COSTS[name].of(row.shape, found.at), name


# ---- what to relax


def test_plan_without_rows_names_the_limit_to_relax_and_by_how_much() -> None:
    axes = {"dim": (64, 128), "depth": (2, 3), "num_heads": (2, 4), "head_dim": 16}
    fixed = {"ffn_dim": (100, 200), "vocab_size": 100, "num_kv_heads": "num_heads"}
    at = At(**AT)
    found = plan(params="<=90000", kv_bytes_per_token=">=1400", **axes, **fixed, **AT)
    assert len(found) == 0
    every = [row.shape for row in plan(**axes, **fixed, **AT).rows]
    cache = COSTS["kv_bytes_per_token"]
    # By hand: the least parameters with enough cache, the most cache with few enough parameters.
    least = min(s.params for s in every if cache.of(s, at) >= 1400)
    most = max(cache.of(s, at) for s in every if s.params <= 90_000)
    named = {one.limit.cost: one for one in found.relax if one.limit}
    assert named["params"].costs["params"] == least
    assert named["kv_bytes_per_token"].costs["kv_bytes_per_token"] == most
    assert named["params"].outside == pytest.approx(least / 90_000 - 1)
    assert any("relax params at most 90k by" in line for line in found.summary())


def test_plan_whose_limits_miss_together_says_so() -> None:
    axes = {"dim": 64, "depth": 2, "num_heads": 2, "head_dim": 16, "ffn_dim": 100}
    found = plan(params="<=100", kv_bytes_per_token="<=1", vocab_size=100, **axes)
    assert [one.limit for one in found.relax] == [None]
    assert any("no single limit can be relaxed" in line for line in found.summary())
