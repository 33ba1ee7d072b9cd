"""Policies on shapes whose layers differ, and on experts, gates and groups of outputs."""

import pytest

from headwise.errors import UsageError
from headwise.policies import Budget, family, narrower, shallower, spend_on_depth, split, widen
from headwise.shape import Layer, Shape

BASE = Shape(dim=24, depth=5, num_heads=(6, 2), ffn_dim=(29, 31, 37), windows=(3, 0), causal=True)
EXPERTS = Shape(
    dim=24, depth=3, num_heads=6, num_experts=5, num_experts_per_tok=2, expert_ffn_dim=7
)


@pytest.mark.parametrize("policy", [split, widen])
def test_heads_of_layers_that_differ_are_not_changed_alike(policy):
    message = f"^{policy.__name__} changes the heads of all layers alike, so it needs layers of"
    with pytest.raises(UsageError, match=message):
        policy(BASE, 4)


def test_feed_forward_pays_where_all_layers_have_the_same():
    for shape, has in ((BASE, "layers="), (EXPERTS, "num_experts=5")):
        with pytest.raises(UsageError, match=f"must be one size in all layers.* has {has}"):
            narrower(shape, 13)
        with pytest.raises(UsageError, match=f"must be one size in all layers.* has {has}"):
            spend_on_depth(shape, Budget.of(shape), exact=True)


def test_depth_changes_and_the_first_layers_stay():
    for depth in (1, 2, 4, 5, 11):
        shape = shallower(BASE, depth)
        assert shape.depth == depth
        assert [shape.layer(i) for i in range(min(depth, 5))] == [
            BASE.layer(i) for i in range(min(depth, 5))
        ]
    for kind in ("params", "layers", "flops"):
        budget = Budget.of(BASE, kind, tokens=7)
        assert spend_on_depth(BASE, budget) == BASE
        deeper = spend_on_depth(BASE, Budget(kind=kind, target=2 * budget.target, tokens=7))
        next_one = shallower(BASE, deeper.depth + 1)
        assert budget.cost(deeper) <= 2 * budget.target < budget.cost(next_one)


def test_layers_budget_is_all_parts_of_layers():
    shape = EXPERTS.replace(attn_gate="head", sinks=True, shared_ffn_dim=11, shared_gate=True)
    parts = {"attention", "gates", "sinks", "router", "experts", "shared experts", "norms"}
    assert set(shape.param_table()) == parts
    assert Budget.of(shape, "layers").target == shape.params


def test_heads_of_experts_are_widened_and_split_like_others():
    for policy, heads in (("split", 12), ("widen", 12), ("trade", 12)):
        (arm,) = family(EXPERTS, policy, (heads,))
        assert arm.shape.num_experts == 5
        assert arm.shape.num_heads == heads
    assert family(EXPERTS, "split", (12,))[0].residual == 0


def test_heads_keep_groups_of_outputs():
    base = Shape(dim=24, depth=2, num_heads=6, o_lora_rank=5, o_groups=3)
    assert widen(base, 9).o_groups == 3
    with pytest.raises(UsageError, match="multiple of 3 to keep 3 groups of outputs, got 8"):
        widen(base, 8)
    assert split(base, 12).params == base.params


def test_layers_that_reuse_keys_and_values_stay_where_they_are():
    base = Shape(dim=24, depth=4, num_heads=6, layers=(Layer(), Layer(reuses_kv=True)))
    assert shallower(base, 3).layers == (Layer(), Layer(reuses_kv=True))
    assert shallower(base, 1).uniform
