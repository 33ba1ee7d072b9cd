"""`headwise.plan`: the value it returns, and what it refuses."""

import csv
import io
import math

import pytest

import headwise
from headwise import Shape, UsageError, plan
from headwise.planning.costs import COSTS, At
from headwise.planning.space import said

SMALL = {"params": "2M", "vocab_size": 512, "head_dim": 32, "dim": (96, 128)}
LIKE = {"dim": 128, "depth": 6, "num_heads": 4, "num_kv_heads": 4, "head_dim": 32, "ffn_dim": 384}
LIKE |= {"activation": "swiglu", "causal": True, "vocab_size": 512, "qk_rope_head_dim": 32}


def test_plan_is_a_value_with_rows() -> None:
    found = headwise.plan(**SMALL)
    assert isinstance(found, headwise.Plan)
    assert len(found) == len(found.rows) > 10
    assert found.rows[-1].number == len(found)
    assert [row.number for row in found.rows[:3]] == [1, 2, 3]
    assert found.considered == len(found) + sum(count for _, count in found.removed)
    with pytest.raises(IndexError):
        found.rows[len(found)]
    with pytest.raises(UsageError, match=f"row must be from 1 to {len(found)}, got 0"):
        found.row(0)
    with pytest.raises(AttributeError):
        found.at = At()  # type: ignore[misc]


def test_plan_goes_elsewhere_with_the_same_numbers() -> None:
    found = plan(**SMALL)
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    frame = found.to_pandas()
    assert len(rows) == len(frame) == len(found)
    for i in (0, 7):
        row = found.rows[i]
        assert {name: float(rows[i][name]) for name in row.costs} == row.costs
        assert frame.iloc[i]["num_heads"] == row.shape.num_heads
    assert found.table(rows=3).count("\n") == 3
    page = found._repr_html_()
    assert page.count("<tr>") == 21
    assert "candidates" in page


def test_plan_is_sorted_filtered_and_has_the_columns_asked_for() -> None:
    found = plan(**SMALL, sort="-depth,activation_bytes", columns="depth,dim,decode_flops")
    keys = [(-row.shape.depth, row.costs["activation_bytes"]) for row in found.rows]
    assert keys == sorted(keys)
    assert found.table().split("\n")[0].split() == ["layers", "dim", "decode", "FLOPs"]
    two = found.where(num_kv_heads=2)
    assert {row.shape.num_kv_heads for row in two.rows} == {2}
    assert 0 < len(two) < len(found)
    assert {row.pareto for row in found.only_pareto().rows} == {True}


def test_front_is_of_the_costs_that_no_limit_holds() -> None:
    found = plan(**SMALL)
    assert "params" not in found.pareto_costs
    rows = list(found.rows)
    for row in rows[:10]:
        beaten = any(
            all(other.costs[c] <= row.costs[c] for c in found.pareto_costs)
            and any(other.costs[c] < row.costs[c] for c in found.pareto_costs)
            for other in rows
        )
        assert row.pareto != beaten


def test_plan_like_a_model_names_differences_from_it() -> None:
    like = Shape.of(LIKE)
    found = plan(like, keep="params", kv_bytes_per_token="-50%")
    assert len(found) > 5
    near = [
        sum(abs(math.log(getattr(r.shape, n) / getattr(like, n)))
            for n in ("dim", "depth", "num_heads", "num_kv_heads", "head_dim", "v_head_dim",
                      "qk_rope_head_dim", "ffn_dim"))
        for r in found.rows[:30]
    ]  # fmt: skip
    assert near == sorted(near)
    for row in found.rows[:5]:
        assert row.change["kv_bytes_per_token"] == pytest.approx(-0.5, abs=0.006)
        assert abs(row.change["params"]) <= 0.01
        assert row.shape.replace(**{n: LIKE[n] for n in LIKE}, v_head_dim=32) == like
    assert found.like_costs == {n: c.of(like, found.at) for n, c in COSTS.items()}


def test_space_is_said_and_may_be_replaced() -> None:
    found = plan(params="350M", hidden_size=1024, n_layer="8..16:4", d_model=None)
    text = said(found.space)
    assert text.startswith("dim=1024, depth=8..16:4, head_dim=32,64,96,128,192,256, num_heads=free")
    assert "vocab_size=32768" in text
    assert {row.shape.depth for row in found.rows[:200]} <= {8, 12, 16}
    assert any("--set vocab_size=N" in line for line in found.summary())


def test_space_given_in_full_is_not_cut_by_aspects() -> None:
    found = plan(dim=8, depth=40, num_heads=16, head_dim=4, ffn_dim=3, vocab_size=5)
    assert [row.shape.num_kv_heads for row in found.rows] == [1, 2, 4, 8, 16]
    with pytest.raises(UsageError, match="no shape has these fields at these aspects"):
        plan(dim=8, depth=40, fields={"dim/depth": "1..2"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"parms": "3"}, "unknown limit or field 'parms'; did you mean params"),
        ({"params": "350X"}, "unknown unit 'X' of params"),
        ({"params": "1M", "keep": "params"}, "params is kept and limited at once"),
        ({"keep": "params"}, "params 'same' is relative to a model"),
        ({"keep": "heads"}, "unknown cost 'heads' of keep"),
        ({"params": "1M", "sort": "loss"}, "unknown column 'loss' to sort by"),
        ({"params": "1M", "sort": "near"}, "near sorts by nearness to a model"),
        ({"params": "1M", "columns": "loss"}, "unknown column 'loss'"),
        ({"params": "1M", "pareto": "loss"}, "unknown cost 'loss' of pareto"),
        ({"params": "1M", "tolerance": 2}, "tolerance must be a share"),
        ({"params": "1M", "dtype": "fp7"}, "unknown dtype 'fp7'; did you mean fp"),
        ({"params": "1M", "context": 0}, "context must be a whole number of at least 1"),
        ({"params": "1M", "train_ms": "3"}, "train_ms is measured"),
        ({"params": "1M", "depth": "a..b"}, "depth takes a whole number, low..high"),
        ({"params": "1M", "depth": "9..3"}, "depth takes a whole number, low..high"),
        ({"params": "1M", "depth": ""}, "depth takes a whole number"),
        ({"params": "1M", "depth": []}, "depth needs at least one choice"),
        ({"params": "1M", "depth": 2.5}, "depth takes a whole number"),
        ({"params": "1M", "dim": "1..2147483647:1"}, "dim must be at most 1,000,000 choices"),
        ({"params": "1M", "tied": "perhaps"}, "tied takes true, false"),
        ({"params": "1M", "activation": "gelo"}, "unknown activation 'gelo'; did you mean gelu"),
        ({"params": "1M", "windows": "a/b"}, "windows takes patterns such as 512/512/0"),
        ({"params": "1M", "dim": 64, "d_model": 64}, "d_model is given twice"),
        ({"params": "1M", "multiple": 0}, "multiple must be a whole number"),
        ({"num_heads": 7, "num_kv_heads": 2}, "num_heads must be a multiple of num_kv_heads"),
        ({"params": "1M", "causal": False, "kv_bytes_per_token": 4}, "needs a causal shape"),
        ({"params": "300k"}, "a smaller --set vocab_size"),
        (
            {"fields": {"dim/depth": "4"}, "params": "1M", "depth": "0"},
            "depth must be at least 1|asp",
        ),
        ({"params": "1M", "fields": {"inner/dim": "x"}}, "inner/dim takes low..high"),
    ],
)
def test_plan_refuses_in_one_line(given: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        plan(**given)
    assert "\n" not in str(caught.value)
