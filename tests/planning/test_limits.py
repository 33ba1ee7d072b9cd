"""Amounts and limits: the grammar, exactly, and what it refuses."""

from fractions import Fraction

import pytest

from headwise.errors import UsageError
from headwise.planning.costs import COSTS, At
from headwise.planning.limits import limit_of
from headwise.planning.units import read_amount, written


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("350M", "count", 350_000_000),
        ("1.1B", "count", 1_100_000_000),
        ("1.1b", "count", 1_100_000_000),
        ("300k", "count", 300_000),
        ("124_439_808", "count", 124_439_808),
        ("124,439,808", "count", 124_439_808),
        ("2.5e12", "flops", 2_500_000_000_000),
        ("3TFLOP", "flops", 3_000_000_000_000),
        ("3 tflops", "flops", 3_000_000_000_000),
        ("0.7G", "flops", 700_000_000),
        ("64KiB", "bytes", 65_536),
        ("64kB", "bytes", 64_000),
        ("10GB", "bytes", 10_000_000_000),
        ("1.5 GiB", "bytes", 1_610_612_736),
        ("49152", "bytes", 49_152),
        ("7B", "bytes", 7),
        ("12ms", "time", 12),
        ("0.5s", "time", 500),
        ("800us", "time", Fraction(4, 5)),
    ],
)
def test_amount_is_read_exactly(text: str, kind: str, value: Fraction) -> None:
    assert read_amount("x", text, kind) == value


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("350Q", "count", "unknown unit 'Q' of x; choices: B, G, M, T, k"),
        ("64K", "bytes", "unknown unit 'K' of x; did you mean .*KiB"),
        ("64KiB", "count", "unknown unit 'KiB'"),
        ("many", "count", "x must be an amount such as 350M"),
        ("", "count", "x must be an amount such as 350M"),
        ("-3", "count", "x must be an amount"),
        ("1e99", "count", "x must be at most 9,223,372,036,854,775,807"),
        ("1" * 100, "count", "x must be an amount"),
        ("nan", "flops", "x must be an amount"),
        ("3m", "time", "unknown unit 'm'"),
    ],
)
def test_amount_that_is_none_is_refused(text: str, kind: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_amount("x", text, kind)


@pytest.mark.parametrize("value", [0, 1, 999, 1000, 1023, 1024, 49_152, 350_000_000, 10**15])
@pytest.mark.parametrize("kind", ["count", "bytes", "flops"])
def test_written_amount_is_read_as_the_same_within_a_percent(value: int, kind: str) -> None:
    again = read_amount("x", written(value, kind), kind)
    assert abs(again - value) <= Fraction(value, 100)


def test_limit_about_is_within_the_tolerance_and_no_wider() -> None:
    limit = limit_of("params", "1000", tolerance=Fraction(3, 200))
    assert (limit.low, limit.high, limit.target) == (985, 1015, 1000)
    assert [limit.holds(v) for v in (984, 985, 1015, 1016)] == [False, True, True, False]


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("<=350M", None, 350_000_000),
        ("<= 350M", None, 350_000_000),
        (">=300M", 300_000_000, None),
        ("300M..400M", 300_000_000, 400_000_000),
        ("7..7", 7, 7),
        (350, 347, 353),  # 346.5 to 353.5
        ("-50%", 495, 505),
        ("<=-50%", None, 500),
        (">=+10%", 1100, None),
        ("-50%..-40%", 500, 600),
        ("=", 990, 1010),
        ("same", 990, 1010),
        ("+0.5%", 995, 1015),  # 994.95 to 1015.05
    ],
)
def test_limit_has_its_ends(text: str, low: int | None, high: int | None) -> None:
    limit = limit_of("params", text, base=1000)
    assert (limit.low, limit.high) == (low, high)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-50%", "kv-bytes '-50%' is relative to a model: give --like config.json"),
        ("same", "is relative to a model"),
        ("<48KiB", "kv-bytes takes 48KiB, <=48KiB, >=48KiB, low..high"),
        ("50%", "a percentage with its sign"),
        ("9KiB..1KiB", "a range from low to high"),
        ("..", "kv-bytes takes 48KiB"),
        ("-3KiB", "kv-bytes takes 48KiB"),
        ("<=", "kv-bytes takes 48KiB"),
        ("=48KiB", "kv-bytes must be an amount"),
    ],
)
def test_limit_in_no_form_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        limit_of("kv_bytes_per_token", text, kind="bytes", flag="kv-bytes")


def test_limit_that_takes_all_of_a_model_away_is_refused() -> None:
    with pytest.raises(UsageError, match="more than 0 % of the model"):
        limit_of("params", "-100%", base=1000)


def test_limit_without_a_whole_number_is_refused() -> None:
    with pytest.raises(UsageError, match="leaves no whole number between"):
        limit_of("params", "-33.35%", tolerance=Fraction(1, 10_000), base=10)


@pytest.mark.parametrize("value", [True, None, float("nan"), -1.0, [3]])
def test_limit_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(UsageError, match="params must be"):
        limit_of("params", value)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["int4", "fp8", "bf16"])
def test_span_of_weight_bytes_agrees_with_costs_that_are_rounded_up(dtype: str) -> None:
    at, cost = At(dtype=dtype), COSTS["weight_bytes"]
    limit = limit_of("weight_bytes", "5..9", kind="bytes")
    low, high = cost.span(limit, at)
    assert low is not None
    assert high is not None
    bits = {"int4": 4, "fp8": 8, "bf16": 16}[dtype]
    for params in range(40):
        inside = low <= params * bits <= high
        assert inside == (5 <= cost.value(params * bits, at) <= 9), params
