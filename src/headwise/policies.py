"""Ways to change the number of heads, and their controls: from a base shape to a family of shapes
at one budget.

With D = dim, h = num_heads, d = head_dim, M = ffn_dim, L = depth (names and rules after arXiv
2505.20802):

    split            h d kept             the rank pays; parameters and FLOPs are those of the base
    widen            d kept               nobody pays: 4 D d parameters more a head and layer
    widen-iso        d kept               the feed-forward pays: M is solved for
    trade            one of the above     the depth pays: the largest L at or below the budget

    shallower        base's heads         control of trade: its depth without its heads
    narrower         base's heads         control of widen-iso: its feed-forward without its heads
    spend-on-ffn     base's heads         control of widen: what its heads cost, spent on M
    spend-on-depth   base's heads         control of widen: what its heads cost, spent on L

Sizes are whole numbers, found with `Shape`'s own counts (biases, gates, norms, masks and all), and
every arm tells what is left over. Fewer heads than the base are as welcome as more: then the
feed-forward or the depth grows.

Under every policy the number of query heads to a KV head stays, so KV heads grow with heads: else
split would change parameters, FLOPs and the KV cache. Split keeps the rotated share of a head.
`extras`, embeddings, `logit_scale` and what differs by layer in the first layers (windows, sizes)
stay as they are, also where a model's extras would grow with its heads or layers. Where sizes
differ by layer only the depth can be changed (shallower, spend-on-depth).
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headwise.errors import UsageError, nearest
from headwise.shape import LAYER_PARTS, Shape

TOLERANCE = 0.005  # an arm further from its budget than this has not met it
MOST_LAYERS = 2**16


# ---- budgets


def _layers(shape: Shape, tokens: int) -> int:
    table = shape.param_table()
    return sum(table.get(part, 0) for part in LAYER_PARTS)


# All arms of a family share what lies outside their layers, so equal totals are equal layers, and
# the total is what people quote. But one per cent of a total is many of the layers' where the
# embedding is large: "layers" counts those alone.
BUDGETS: dict[str, Callable[[Shape, int], int]] = {
    "params": lambda shape, tokens: shape.params,
    "layers": _layers,
    "flops": lambda shape, tokens: shape.flops(tokens),
}


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a shape may cost: all parameters, those of the layers, or the FLOPs of a forward pass
    over `tokens` tokens."""

    kind: str = "params"
    target: int
    tokens: int = 0  # of FLOPs only

    def __post_init__(self) -> None:
        if self.kind not in BUDGETS:
            raise UsageError(f"unknown budget {self.kind!r}; {nearest(str(self.kind), BUDGETS)}")
        _count("target", self.target)

    @classmethod
    def of(cls, shape: Shape, kind: str = "params", tokens: int = 0) -> Budget:
        """What this shape costs."""
        return cls(kind=kind, target=1, tokens=tokens).like(shape)

    def like(self, shape: Shape) -> Budget:
        """The same kind of budget, as large as this shape's cost."""
        return dataclasses.replace(self, target=self.cost(shape))

    def cost(self, shape: Shape) -> int:
        """What a shape costs in this budget's currency."""
        return BUDGETS[self.kind](shape, self.tokens)


@dataclass(frozen=True)
class Arm:
    """One shape of a comparison, and how far it is from its budget."""

    policy: str
    # that were asked for; a control has the base's, and stands beside the arm that has these
    heads: int
    shape: Shape
    budget: Budget

    @property
    def value(self) -> int:
        """What it costs."""
        return self.budget.cost(self.shape)

    @property
    def residual(self) -> int:
        """What it costs beyond its budget; below zero it costs less."""
        return self.value - self.budget.target

    @property
    def off(self) -> float:
        """The residual as a share of the budget."""
        return self.residual / self.budget.target

    @property
    def met(self) -> bool:
        """Whether it is within 0.5 % of its budget."""
        return abs(self.off) <= TOLERANCE


# ---- policies


def split(base: Shape, heads: int) -> Shape:
    """Heads of rank h d / heads: the inner width is cut into other pieces, at the same cost.

    Only gains for each coordinate of a head (qk_norm head), gates and sinks for each head, and a
    rotary part that all heads share (a latent) change the cost.
    """
    _count("heads", heads)
    _uniform("split", base)
    if not _splits(base, heads):
        inner = math.gcd(base.num_heads * base.head_dim, base.num_heads * base.v_head_dim)
        choices = ", ".join(str(h) for h in range(1, inner + 1) if _splits(base, h))
        raise UsageError(
            "split cuts the inner width into whole heads, KV groups and rotary pairs, got heads "
            f"{heads}; choices: {choices}"
        )
    # Queries, values and rotated coordinates are each cut into as many pieces as there are heads.
    rank, values, rotated = (width // heads for width in _inner(base))
    return widen(base, heads).replace(head_dim=rank, v_head_dim=values, qk_rope_head_dim=rotated)


def widen(base: Shape, heads: int) -> Shape:
    """Heads of the base's rank: the inner width is heads x d."""
    _count("heads", heads)
    _uniform("widen", base)
    group, unit = base.num_heads // base.num_kv_heads, _unit(base)
    if heads % unit:
        shared = []
        if group > 1:
            shared.append(f"{group} query heads to a KV head")
        if base.average > 1:
            shared.append(f"{base.average} averaged modules")
        if base.o_groups > 1:
            shared.append(f"{base.o_groups} groups of outputs")
        raise UsageError(
            f"heads must be a multiple of {unit} to keep {' and '.join(shared)}, got {heads}"
        )
    return base.replace(num_heads=heads, num_kv_heads=heads // group)


def widen_iso(base: Shape, heads: int, budget: Budget | None = None, *, multiple: int = 1) -> Shape:
    """Heads of the base's rank, and the feed-forward (a multiple of `multiple`) that comes nearest
    to the budget."""
    return _meet(widen(base, heads), budget or Budget.of(base), multiple)


def trade(
    base: Shape,
    heads: int,
    budget: Budget | None = None,
    *,
    within: str = "widen",
    exact: bool = False,
    multiple: int = 1,
) -> Shape:
    """Other heads, paid for with layers: the largest depth at or below the budget.

    A layer is a large coin: what is left over may be much more than 0.5 %. With `exact` the
    feed-forward takes it up. `within` says how heads are added; widen-iso is at the base's own
    cost.
    """
    budget = budget or Budget.of(base)
    return spend_on_depth(
        _grow(base, heads, budget, within, multiple), budget, exact=exact, multiple=multiple
    )


# ---- controls


def shallower(base: Shape, depth: int) -> Shape:
    """The base with another depth and nothing else."""
    _count("depth", depth)
    return base.replace(depth=depth, windows=base.windows[:depth], layers=base.layers[:depth])


def narrower(base: Shape, ffn_dim: int) -> Shape:
    """The base with another feed-forward and nothing else."""
    _count("ffn_dim", ffn_dim)
    _feeds(base)
    return base.replace(ffn_dim=ffn_dim)


def spend_on_ffn(base: Shape, budget: Budget, *, multiple: int = 1) -> Shape:
    """The base's heads and depth, and the feed-forward that comes nearest to the budget."""
    return _meet(base, budget, multiple)


def spend_on_depth(base: Shape, budget: Budget, *, exact: bool = False, multiple: int = 1) -> Shape:
    """The base's heads, and the largest depth at or below the budget; with `exact` the feed-forward
    takes up the rest."""
    shape = shallower(base, _deepest(base, budget))
    return _meet(shape, budget, multiple) if exact else shape


# ---- families


@dataclass(frozen=True)
class _Options:
    budget: Budget
    within: str
    exact: bool
    multiple: int


GROWTH = ("split", "widen", "widen-iso")  # how a trade may add its heads
SPENDING = ("spend-on-ffn", "spend-on-depth")
POLICIES: dict[str, Callable[[Shape, int, _Options], Shape]] = {
    "split": lambda base, heads, o: split(base, heads),
    "widen": lambda base, heads, o: widen(base, heads),
    "widen-iso": lambda base, heads, o: widen_iso(base, heads, o.budget, multiple=o.multiple),
    "trade": lambda base, heads, o: trade(
        base, heads, o.budget, within=o.within, exact=o.exact, multiple=o.multiple
    ),
    "shallower": lambda base, heads, o: shallower(
        base, trade(base, heads, o.budget, within=o.within, multiple=o.multiple).depth
    ),
    "narrower": lambda base, heads, o: narrower(
        base, widen_iso(base, heads, o.budget, multiple=o.multiple).ffn_dim
    ),
    "spend-on-ffn": lambda base, heads, o: spend_on_ffn(base, o.budget, multiple=o.multiple),
    "spend-on-depth": lambda base, heads, o: spend_on_depth(
        base, o.budget, exact=o.exact, multiple=o.multiple
    ),
}


def family(
    base: Shape,
    policy: str,
    heads: Iterable[int],
    *,
    budget: str = "params",
    tokens: int = 0,
    target: int | None = None,
    within: str = "widen",
    exact: bool = False,
    multiple: int = 1,
) -> list[Arm]:
    """One arm for each number of heads, each with what is left over of its budget.

    The budget is `target`, or else what the base costs; for a control that spends, what `within`
    makes of the base.

    >>> base = Shape(dim=768, depth=12, num_heads=12)
    >>> [(arm.shape.ffn_dim, arm.residual) for arm in family(base, "widen-iso", (6, 12, 24))]
    [(3840, 0), (3072, 0), (1536, 0)]
    >>> [(arm.shape.depth, f"{arm.off:.2%}") for arm in family(base, "trade", (16, 24))]
    [(10, '-7.41%'), (9, '-0.01%')]
    """
    if policy not in POLICIES:
        raise UsageError(f"unknown policy {policy!r}; {nearest(str(policy), POLICIES)}")
    # A control that spends is compared with the arm of as many heads, so its budget is what that
    # arm costs.
    own = Budget.of(base, budget, tokens)
    given = own if target is None else dataclasses.replace(own, target=target)
    arms = []
    for h in heads:
        paid = given
        if policy in SPENDING and target is None:
            paid = own.like(_grow(base, h, own, within, multiple))
        shape = POLICIES[policy](base, h, _Options(paid, within, exact, multiple))
        arms.append(Arm(policy, h, shape, paid))
    return arms


# ---- whole numbers


def _count(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{name} must be a whole number of at least 1, got {value!r}")


def _unit(base: Shape) -> int:
    """What the number of heads is a multiple of."""
    return math.lcm(base.num_heads // base.num_kv_heads, base.average, base.o_groups)


def _uniform(policy: str, base: Shape) -> None:
    if not base.uniform:
        raise UsageError(
            f"{policy} changes the heads of all layers alike, so it needs layers of equal sizes, "
            f"this shape has layers={base.layers!r}"
        )


def _feeds(base: Shape) -> None:
    """Refuse a shape in which one feed-forward of all layers cannot pay or be paid."""
    if not base.uniform or base.num_experts:
        what = f"num_experts={base.num_experts}" if base.uniform else f"layers={base.layers!r}"
        raise UsageError(
            "a feed-forward that pays must be one size in all layers, without experts, this shape "
            f"has {what}"
        )


def _inner(base: Shape) -> tuple[int, int, int]:
    """Width of all heads together: queries, values, rotated coordinates."""
    return (
        base.num_heads * base.head_dim,
        base.num_heads * base.v_head_dim,
        base.num_heads * base.qk_rope_head_dim,
    )


def _splits(base: Shape, heads: int) -> bool:
    whole = not any(width % heads for width in _inner(base))
    return whole and heads % _unit(base) == 0 and _inner(base)[2] // heads % 2 == 0


def _grow(base: Shape, heads: int, budget: Budget, within: str, multiple: int) -> Shape:
    if within not in GROWTH:
        raise UsageError(
            f"unknown way {within!r} to add heads within; {nearest(str(within), GROWTH)}"
        )
    return POLICIES[within](base, heads, _Options(budget.like(base), within, False, multiple))


def _meet(shape: Shape, budget: Budget, multiple: int) -> Shape:
    """The feed-forward nearest to the budget, the smaller of two that are as near: its cost is a
    straight line from width 1 on."""
    _count("multiple", multiple)
    _feeds(shape)
    if not shape.ffn_dim:
        raise UsageError(
            "a feed-forward that pays must be there, got ffn_dim 0 and a budget of "
            f"{_amount(budget)}"
        )
    # Two widths give the line; the nearest whole multiple follows from it in integers, without
    # rounding errors.
    first, second = (budget.cost(shape.replace(ffn_dim=times * multiple)) for times in (1, 2))
    step, rest = second - first, budget.target - first
    times = 1 - (step - 2 * rest) // (2 * step)
    if times < 1:
        what = f"{shape.num_heads} heads of rank {shape.head_dim} in {shape.depth} layers"
        raise UsageError(
            f"{what} leave no feed-forward at {_amount(budget)}: ffn_dim would be "
            f"{times * multiple}; take fewer heads or a larger budget"
        )
    return shape.replace(ffn_dim=times * multiple)


def _deepest(shape: Shape, budget: Budget) -> int:
    """The largest depth whose cost is at or below the budget."""

    def cost(depth: int) -> int:
        return budget.cost(shallower(shape, depth))

    if cost(1) > budget.target:
        what = f"one layer of {shape.num_heads} heads of rank {shape.head_dim}"
        raise UsageError(
            f"{what} costs {cost(1):,} {budget.kind}, above the budget of {budget.target:,}; take "
            "fewer heads or a larger budget"
        )
    # Double the depth until it costs too much, then search between. The cost grows with every
    # layer.
    high = 2
    while cost(high) <= budget.target:
        if high >= MOST_LAYERS:
            raise UsageError(
                f"a budget of {_amount(budget)} would be more than {MOST_LAYERS:,} layers"
            )
        high *= 2
    return bisect_right(range(1, high), budget.target, key=cost)


def _amount(budget: Budget) -> str:
    return f"{budget.target:,} {budget.kind}"
