"""Policies: who pays for other heads, to the last parameter."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.tolerance import examples

from headwise.errors import UsageError
from headwise.policies import (
    BUDGETS,
    GROWTH,
    Budget,
    family,
    narrower,
    shallower,
    spend_on_depth,
    spend_on_ffn,
    split,
    trade,
    widen,
    widen_iso,
)
from headwise.shape import ACTIVATIONS, NORM_PLACES, NORMS, QK_NORMS, Shape

PRIMES = (11, 13, 17, 19, 23, 29, 31, 37)
TOKENS = 7


@st.composite
def bases(draw, ffn=True):
    """Bases of every kind: grouped, rotary, averaged or latent heads, biases, gates, windows,
    embeddings, extras."""
    latent, kv, group = (
        draw(st.booleans()),
        draw(st.sampled_from((1, 2, 3))),
        draw(st.sampled_from((1, 2, 5))),
    )
    rank, depth = 2 * draw(st.integers(1, 12)), draw(st.integers(1, 5))
    heads = kv if latent else kv * group
    vocab, bools = draw(st.sampled_from((0, 0, 41))), st.booleans()
    return Shape(
        dim=draw(st.sampled_from(PRIMES)),
        depth=depth,
        num_heads=heads,
        head_dim=rank,
        num_kv_heads=kv,
        v_head_dim=draw(st.sampled_from((rank, 2, 5, 12))),
        qk_rope_head_dim=draw(st.sampled_from((0, rank, rank // 2 // 2 * 2))),
        kv_lora_rank=draw(st.sampled_from(PRIMES)) if latent else 0,
        q_lora_rank=draw(st.sampled_from((0, 7))) if latent else 0,
        average=draw(st.sampled_from((1, heads))),
        qk_norm="none" if latent else draw(st.sampled_from(QK_NORMS)),
        ffn_dim=draw(st.sampled_from((PRIMES if ffn else ()) + (43, 101, 211))),
        activation=draw(st.sampled_from(ACTIVATIONS)),
        norm=draw(st.sampled_from(NORMS)),
        norm_at=draw(st.sampled_from(NORM_PLACES)),
        qkv_bias=draw(bools),
        out_bias=draw(bools),
        ffn_bias=draw(bools),
        causal=draw(bools),
        windows=tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=depth))),
        vocab_size=vocab,
        tied=draw(bools),
        extras=draw(st.sampled_from(((), (("pooler", 97),)))),
    )


def unit(base):
    return math.lcm(base.num_heads // base.num_kv_heads, base.average)


def more_heads(base, times):
    return unit(base) * times


def budget_of(base, kind):
    return Budget.of(base, kind, TOKENS)


KINDS = st.sampled_from(sorted(BUDGETS))
TIMES = st.integers(1, 12)


# ---- split


@examples(150)
@given(bases())
def test_split_changes_no_cost(base):
    for heads in range(1, base.num_heads * base.head_dim + 1):
        try:
            shape = split(base, heads)
        except UsageError:
            continue
        rank, rotated = (
            shape.head_dim - base.head_dim,
            shape.qk_rope_head_dim - base.qk_rope_head_dim,
        )
        gains = 2 * rank if base.qk_norm == "head" else 0  # one for each coordinate of a head
        shared = rotated if base.latent else 0  # the rotary part that all heads of a latent share
        assert shape.num_heads == heads
        assert shape.params - base.params == base.depth * (
            gains + shared * (base.dim + base.qkv_bias)
        )
        assert (
            shape.flops(TOKENS) - base.flops(TOKENS) == 2 * TOKENS * base.depth * base.dim * shared
        )
        assert shape.kv_width() - base.kv_width() == shared
        for width in ("head_dim", "v_head_dim", "qk_rope_head_dim"):
            assert heads * getattr(shape, width) == base.num_heads * getattr(base, width), width
        assert shape.num_heads * base.num_kv_heads == base.num_heads * shape.num_kv_heads


@examples(150)
@given(bases())
def test_split_takes_every_number_of_heads_that_it_can(base):
    """Whatever `Shape` accepts of the same widths and groups; and a refusal lists exactly these."""
    H, taken = base.num_heads, []
    inner = H * base.head_dim
    for heads in range(1, inner + 2):
        whole = (
            not any(H * w % heads for w in (base.head_dim, base.v_head_dim, base.qk_rope_head_dim))
            and heads * base.num_kv_heads % H == 0
        )
        try:
            split(base, heads)
            taken.append(heads)
            assert whole
        except UsageError as e:
            message = str(e)
            odd = H * base.qk_rope_head_dim // heads % 2
            assert not whole or heads % base.average or odd
    assert message.endswith(f"got heads {inner + 1}; choices: {', '.join(map(str, taken))}")
    assert base.num_heads in taken
    assert split(base, base.num_heads) == base


def test_split_of_the_usual_transformer():
    base = Shape(dim=768, depth=12, num_heads=12)
    assert [split(base, h).head_dim for h in (1, 12, 16, 24, 768)] == [768, 64, 48, 32, 1]
    assert split(base, 24) == Shape(dim=768, depth=12, num_heads=24)
    grouped = base.replace(num_kv_heads=4, qk_rope_head_dim=64)
    assert split(grouped, 24) == grouped.replace(
        num_heads=24, num_kv_heads=8, head_dim=32, v_head_dim=32, qk_rope_head_dim=32
    )


# ---- widen


@examples(200)
@given(bases(), TIMES)
def test_widen_costs_what_its_heads_cost(base, times):
    heads = more_heads(base, times)
    shape, D, R, V = widen(base, heads), base.dim, base.head_dim, base.v_head_dim
    assert shape == base.replace(num_heads=heads, num_kv_heads=shape.num_kv_heads)
    added, kv_added = heads - base.num_heads, shape.num_kv_heads - base.num_kv_heads
    assert added * base.num_kv_heads == kv_added * base.num_heads
    if base.latent:
        query = base.q_lora_rank or D
        weights, biases = (
            added * (query * R + base.kv_lora_rank * (R - base.qk_rope_head_dim + V) + V * D),
            0,
        )
    else:
        weights, biases = (
            added * D * (R + V) + kv_added * D * (R + V),
            added * R + kv_added * (R + V),
        )
    gains = (added + kv_added) * R if base.qk_norm == "all" else 0
    assert shape.params - base.params == base.depth * (weights + base.qkv_bias * biases + gains)
    pairs = sum(base.pairs(TOKENS, layer) for layer in range(base.depth))
    assert shape.flops(TOKENS) - base.flops(TOKENS) == 2 * (
        TOKENS * base.depth * weights + added * (R + V) * pairs
    )


def test_widen_without_biases_is_4_D_d_a_head_and_layer():
    base = Shape(dim=23, depth=3, num_heads=2, head_dim=7, ffn_dim=101)
    for heads in (1, 2, 5, 11):
        assert widen(base, heads).params - base.params == 3 * 4 * 23 * 7 * (heads - 2)
        assert widen(base, heads).kv_bytes(1) == 3 * 2 * heads * 7 * 2


# ---- the feed-forward pays


def nearest_feed_forward(shape, budget, multiple):
    """No neighbour is nearer, and of two that are as near the smaller is taken."""

    def distance(ffn_dim):
        return abs(budget.cost(shape.replace(ffn_dim=ffn_dim)) - budget.target)

    assert shape.ffn_dim > 0
    assert shape.ffn_dim % multiple == 0
    assert distance(shape.ffn_dim) <= distance(shape.ffn_dim + multiple)
    assert shape.ffn_dim == multiple or distance(shape.ffn_dim) < distance(shape.ffn_dim - multiple)


def vanishes(shape, budget, multiple):
    """Even the smallest feed-forward is at least half a step over the budget."""
    one, two = (budget.cost(shape.replace(ffn_dim=n * multiple)) for n in (1, 2))
    return 2 * (one - budget.target) >= two - one


@examples(200)
@given(bases(), TIMES, KINDS, st.sampled_from((1, 2, 8, 13)))
def test_widen_iso_is_as_near_as_whole_numbers_go(base, times, kind, multiple):
    heads, budget = more_heads(base, times), budget_of(base, kind)
    try:
        arm = family(base, "widen-iso", [heads], budget=kind, tokens=TOKENS, multiple=multiple)[0]
    except UsageError:
        assert vanishes(widen(base, heads), budget, multiple)
        return
    assert arm.shape == widen_iso(base, heads, budget, multiple=multiple)
    assert arm.shape.replace(ffn_dim=base.ffn_dim) == widen(base, heads)
    assert arm.residual == budget.cost(arm.shape) - budget.cost(base)
    nearest_feed_forward(arm.shape, budget, multiple)
    if heads == base.num_heads and multiple == 1:
        assert arm.shape == base


def test_widen_iso_takes_two_d_a_head_off_the_feed_forward():
    base = Shape(dim=23, depth=3, num_heads=2, head_dim=7, ffn_dim=101)
    arms = family(base, "widen-iso", (1, 2, 3, 7))
    assert [arm.shape.ffn_dim for arm in arms] == [115, 101, 87, 31]
    assert [arm.residual for arm in arms] == [0] * 4
    assert family(base, "widen-iso", (9,))[0].shape.ffn_dim == 3
    with pytest.raises(
        UsageError,
        match=(
            r"^10 heads of rank 7 in 3 layers leave no feed-forward at 17,963 params: ffn_dim "
            r"would be -11; "
        ),
    ):
        family(base, "widen-iso", (10,))


def test_gate_is_three_matrices_and_a_bias_is_counted():
    base = Shape(
        dim=23,
        depth=3,
        num_heads=2,
        head_dim=7,
        ffn_dim=101,
        activation="geglu",
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
    )
    arm = family(base, "widen-iso", (3,))[0]
    head, step = 3 * (4 * 23 * 7 + 3 * 7), 3 * (3 * 23 + 2)  # one more head; one more hidden unit
    lost = round(head / step)
    assert arm.shape.ffn_dim == 101 - lost
    assert arm.residual == head - lost * step
    assert abs(arm.residual) <= step / 2


def test_tie_goes_to_the_smaller():
    base = Shape(
        dim=5, depth=1, num_heads=1, norm="rms-free", ffn_dim=10
    )  # 100 parameters of attention, 10 a hidden unit
    half = Budget(target=base.params + 5)
    assert spend_on_ffn(base, half).ffn_dim == 10
    assert spend_on_ffn(base, Budget(target=base.params + 6)).ffn_dim == 11
    assert spend_on_ffn(base, Budget(target=base.params + 15), multiple=1).ffn_dim == 11
    assert spend_on_ffn(base, Budget(target=base.params + 59), multiple=4).ffn_dim == 16


# ---- the depth pays


def deepest(shape, depth, budget):
    assert budget.cost(shallower(shape, depth)) <= budget.target
    assert budget.cost(shallower(shape, depth + 1)) > budget.target


@examples(150)
@given(bases(ffn=False), TIMES, KINDS, st.sampled_from(GROWTH), st.floats(0.3, 3.0))
def test_trade_is_as_deep_as_the_budget_allows(base, times, kind, within, scale):
    heads, own = more_heads(base, times), budget_of(base, kind)
    budget = Budget(kind=kind, target=max(1, int(own.target * scale)), tokens=TOKENS)
    options = {
        "budget": kind,
        "tokens": TOKENS,
        "target": budget.target,
        "within": within,
        "multiple": 2,
    }
    try:
        grown = family(base, within, [heads], budget=kind, tokens=TOKENS, multiple=2)[0].shape
    except UsageError:
        assume(False)
    if budget.cost(shallower(grown, 1)) > budget.target:
        with pytest.raises(
            UsageError,
            match=(
                rf"^one layer of {heads} heads of rank {grown.head_dim} costs [\d,]+ {kind}, "
                r"above the budget of "
            ),
        ):
            family(base, "trade", [heads], **options)
        return
    arm = family(base, "trade", [heads], **options)[0]
    assert arm.shape == trade(base, heads, budget, within=within, multiple=2)
    assert arm.shape == shallower(grown, arm.shape.depth)
    assert arm.residual <= 0
    if arm.shape.depth < len(base.windows):  # the windows of the first layers stay
        assert arm.shape.windows == base.windows[: arm.shape.depth]
    deepest(grown, arm.shape.depth, budget)
    exact = family(base, "trade", [heads], **options, exact=True)[0]
    assert exact.shape.replace(ffn_dim=grown.ffn_dim) == arm.shape
    nearest_feed_forward(exact.shape, budget, 2)
    control = family(base, "shallower", [heads], **options)[0]
    assert control.shape == shallower(base, arm.shape.depth)
    assert (control.heads, control.budget) == (heads, arm.budget)


def test_trade_of_layers_with_windows():
    base = Shape(dim=11, depth=5, num_heads=2, head_dim=3, windows=(4, 4, 4, 4, 0), causal=True)
    traded = [trade(base, h, Budget.of(base, "flops", 64)) for h in (1, 2, 4, 8)]
    assert [shape.depth for shape in traded] == [5, 5, 4, 3]
    assert [shape.windows for shape in traded] == [
        (4, 4, 4, 4, 0),
        (4, 4, 4, 4, 0),
        (4, 4, 4, 4),
        (4, 4, 4),
    ]
    for shape in traded:
        deepest(widen(base, shape.num_heads), shape.depth, Budget.of(base, "flops", 64))


def test_trade_leaves_a_rest_and_says_so():
    base = Shape(dim=768, depth=12, num_heads=12)
    plain = family(base, "trade", (16,))[0]
    assert (plain.shape.depth, plain.residual) == (10, -6_294_528)
    assert plain.off == pytest.approx(-6_294_528 / 84_953_856, rel=1e-15)
    assert not plain.met
    exact = family(base, "trade", (16,), exact=True)[0]
    assert (exact.shape.depth, exact.shape.ffn_dim) == (10, 3482)
    assert exact.met
    assert abs(exact.residual) <= 768 * 10  # half of a hidden unit in each layer


# ---- controls


@examples(100)
@given(bases(ffn=False), TIMES, KINDS)
def test_controls_have_the_base_s_heads(base, times, kind):
    heads, options = more_heads(base, times), {"budget": kind, "tokens": TOKENS}
    wide, own = widen(base, heads), budget_of(base, kind)
    budget = own.like(wide)
    assert budget == budget_of(wide, kind)
    for policy in ("spend-on-ffn", "spend-on-depth", "narrower"):
        try:
            arm = family(base, policy, [heads], **options)[0]
        except UsageError:
            continue
        assert arm.heads == heads
        assert (
            arm.shape.replace(depth=base.depth, ffn_dim=base.ffn_dim, windows=base.windows) == base
        )
        if policy == "narrower":
            assert arm.shape == narrower(base, widen_iso(base, heads, own).ffn_dim)
            assert arm.budget == own
        elif policy == "spend-on-ffn":
            assert arm.budget == budget
            assert arm.shape.depth == base.depth
            nearest_feed_forward(arm.shape, budget, 1)
        else:
            assert arm.budget == budget
            deepest(base, arm.shape.depth, budget)
            exact = family(base, policy, [heads], **options, exact=True)[0]
            assert exact.shape.replace(ffn_dim=base.ffn_dim) == arm.shape
            nearest_feed_forward(exact.shape, budget, 1)


def test_controls_in_numbers():
    base = Shape(dim=23, depth=6, num_heads=2, head_dim=7, ffn_dim=101)
    heads = 4 * 23 * 7
    wide = base.params + 6 * 3 * heads
    spent = family(base, "spend-on-ffn", (5,))[0]
    assert (spent.shape, spent.budget.target, spent.residual) == (
        narrower(base, 101 + 3 * 14),
        wide,
        0,
    )
    assert family(base, "narrower", (5,))[0].shape == base.replace(ffn_dim=101 - 3 * 14)
    layer = 2 * heads + 2 * 23 * 101 + 2 * 23
    deeper = family(base, "spend-on-depth", (5,))[0]
    assert (deeper.shape, deeper.residual) == (
        base.replace(depth=6 + 6 * 3 * heads // layer),
        -(6 * 3 * heads % layer),
    )
    assert family(base, "shallower", (5,))[0].shape == base.replace(
        depth=base.depth * layer // (layer + 3 * heads)
    )
    assert family(base, "spend-on-ffn", (5,), within="split", target=base.params)[0].shape == base
    assert spend_on_depth(base, Budget.of(base)) == base
    with pytest.raises(UsageError, match=r"choices: 1, 2, 7, 14$"):
        family(base, "spend-on-ffn", (5,), within="split")
