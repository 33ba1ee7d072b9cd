"""Budgets, what an arm says of itself, and refusals."""

import pytest

from headwise.errors import UsageError
from headwise.policies import (
    BUDGETS,
    MOST_LAYERS,
    POLICIES,
    Arm,
    Budget,
    family,
    narrower,
    shallower,
    spend_on_ffn,
    split,
    trade,
    widen,
    widen_iso,
)
from headwise.shape import Shape


def test_policies_have_names():
    assert list(POLICIES) == [
        "split",
        "widen",
        "widen-iso",
        "trade",
        "shallower",
        "narrower",
        "spend-on-ffn",
        "spend-on-depth",
    ]
    assert sorted(BUDGETS) == ["flops", "layers", "params"]


def test_parameters_outside_the_layers_are_in_the_total_only():
    """The same shapes meet both budgets; of the layers alone the same rest is a larger share."""
    base = Shape(
        dim=23,
        depth=6,
        num_heads=2,
        head_dim=7,
        ffn_dim=101,
        vocab_size=9973,
        extras=(("pooler", 97),),
    )
    bare = base.replace(vocab_size=0, extras=())
    assert Budget.of(base, "layers").target == bare.params == base.params - 9973 * 23 - 97
    total, layers = (family(base, "trade", (3, 11), budget=kind) for kind in ("params", "layers"))
    assert [a.shape for a in total] == [a.shape for a in layers]
    assert [a.residual for a in total] == [a.residual for a in layers]
    assert all(abs(a.off) < abs(b.off) / 6 for a, b in zip(total, layers, strict=True))
    assert [(a.met, b.met) for a, b in zip(total, layers, strict=True)] == [
        (False, False),
        (True, False),
    ]


@pytest.mark.parametrize(
    ("target", "met"),
    [(100_000, True), (99_503, True), (99_502, False), (100_502, True), (100_503, False)],
)
def test_arm_says_how_far_it_is_off(target, met):
    base = Shape(dim=100, depth=1, num_heads=1, norm="rms-free", ffn_dim=300)
    arm = Arm("widen", 1, base, Budget(target=target))
    assert (arm.value, arm.residual, arm.met) == (100_000, 100_000 - target, met)
    assert arm.off == pytest.approx(100_000 / target - 1, abs=1e-15)


def test_flops_are_those_of_the_length_asked_for():
    base = Shape(dim=64, depth=2, num_heads=4, ffn_dim=512)
    short, long = (family(base, "widen-iso", (5,), budget="flops", tokens=n)[0] for n in (1, 1000))
    assert short.budget.target == base.flops(1)
    assert long.budget.target == base.flops(1000)
    assert (short.shape.ffn_dim, long.shape.ffn_dim) == (480, 230)  # 2 d (1 + T / 2 D) a head


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda b: family(b, "spilt", [4]),
            "unknown policy 'spilt'; did you mean split? choices: narrower, ",
        ),
        (
            lambda b: family(b, "trade", [4], within="spilt"),
            "unknown way 'spilt' to add heads within; did you mean split? choices: split, ",
        ),
        (
            lambda b: family(b, "widen", [4], budget="parms"),
            "unknown budget 'parms'; did you mean params or layers? choices: flops, ",
        ),
        (
            lambda b: family(b, "widen", [4], budget="flops"),
            "tokens must be a whole number of at least 1, got 0",
        ),
        (
            lambda b: family(b, "widen", [4], target=0),
            "target must be a whole number of at least 1, got 0",
        ),
        (lambda b: family(b, "widen", [0]), "heads must be a whole number of at least 1, got 0"),
        (lambda b: family(b, "split", [-1]), "heads must be a whole number of at least 1, got -1"),
        (lambda b: widen(b, 2.0), "heads must be a whole number of at least 1, got 2.0"),
        (lambda b: split(b, True), "heads must be a whole number of at least 1, got True"),
        (
            lambda b: split(b, 4),
            (
                "split cuts the inner width into whole heads, KV groups and rotary pairs, got "
                "heads "
                "4; choices: 2, 6"
            ),
        ),
        (
            lambda b: widen(b, 5),
            "heads must be a multiple of 2 to keep 2 query heads to a KV head, got 5",
        ),
        (
            lambda b: widen(b.replace(average=3), 4),
            "heads must be a multiple of 6 to keep 2 query heads to a KV head and 3 averaged ",
        ),
        (
            lambda b: widen_iso(b, 6, multiple=0),
            "multiple must be a whole number of at least 1, got 0",
        ),
        (
            lambda b: widen_iso(b, 60),
            (
                "60 heads of rank 10 in 2 layers leave no feed-forward at 5,907 params: ffn_dim "
                "would "
                "be "
            ),
        ),
        (
            lambda b: widen_iso(b.replace(ffn_dim=0), 6),
            "a feed-forward that pays must be there, got ffn_dim 0 and a budget of 3,993 params",
        ),
        (
            lambda b: trade(b, 60),
            "one layer of 60 heads of rank 10 costs 20,779 params, above the budget of 5,907; ",
        ),
        (
            lambda b: trade(b, 2, Budget(target=10**12)),
            f"a budget of 1,000,000,000,000 params would be more than {MOST_LAYERS:,} layers",
        ),
        (lambda b: shallower(b, 0), "depth must be a whole number of at least 1, got 0"),
        (lambda b: narrower(b, 0), "ffn_dim must be a whole number of at least 1, got 0"),
        (
            lambda b: spend_on_ffn(b, Budget(target=100)),
            "6 heads of rank 10 in 2 layers leave no feed-forward at 100 params: ",
        ),
    ],
)
def test_refusals_are_one_line(make, message):
    base = Shape(
        dim=11, depth=2, num_heads=6, num_kv_heads=3, head_dim=10, qk_rope_head_dim=10, ffn_dim=43
    )
    with pytest.raises(UsageError) as caught:
        make(base)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
