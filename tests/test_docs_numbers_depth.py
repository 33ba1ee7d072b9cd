"""The tables of docs/figure1.md on depth, rates and length of training are those of the rows, and
so is the table of what was trained in docs/rank-paper.md."""

import re

import pytest
from support.page_numbers import (
    agrees,
    cells,
    check_difference,
    check_mean,
    errors,
    half_width,
    rows_of,
)
from support.published_points import Point, counted, fresh, points, published

from headwise.stats import Mean, difference, group, mean

PAGE = "docs/figure1.md"
RATES = (0.03, 0.01, 0.003, 0.001)


def at(point: Point, lr: float) -> list[float]:
    """A point's errors on fresh data at one rate, in the files of all seeds."""
    return errors([*fresh("rows.jsonl", lr)[point], *fresh("rates.jsonl", lr)[point]])


def elsewhere(place: Point) -> list[list[float]]:
    """A point's errors at other rates than the published one; with one and three layers also at
    rates that seed 0 chose, without that seed."""
    lower, deep = [at(place, 0.003)], place[0] == 5
    chosen = [] if deep else [counted(*place, lr) for lr in (0.1, 0.03, 0.01)]
    return lower + [values for values in chosen if len(values) in (2, 4)]


def verdict(cell: str, gap: Mean) -> None:
    """A cell with a difference, or one of the words for it."""
    assert gap.low is not None
    assert gap.high is not None
    if "±" in cell:
        check_difference(cell, gap)
    else:
        assert cell == (
            "none found" if gap.low <= 0 <= gap.high else "worse" if gap.low > 0 else ""
        )


def test_three_layers_against_one_are_those_of_the_rows() -> None:
    table = cells(PAGE, "| rank | difference (1.19 against 1.33 million parameters) | errors |")
    assert len(table) == 7
    for rank, change, shown in table:
        three, one = at((3, 8, int(rank)), 0.01), at((1, 64, int(rank)), 0.01)
        assert len(three) == len(one) == 3
        verdict(change, difference(three, one))
        if shown:
            for text, values in zip(shown.split(" for "), (three, one), strict=True):
                assert agrees(text, mean(values).mean)
    sizes = [fresh("rows.jsonl")[p][0]["params"] / 1e6 for p in ((3, 8, 64), (1, 64, 64))]
    assert [round(size, 2) for size in sizes] == [1.19, 1.33]


def test_best_of_any_budget_is_that_of_the_rows() -> None:
    for rank, *shown in cells(
        PAGE, "| rank | one layer | three layers | five layers |\n|---|---|---|---|\n| 64 | 0.0154*"
    ):
        for cell, layers in zip(shown, (1, 3, 5), strict=True):
            found = re.match(
                r"([\d.]+)(\*?)(?: \[([\d.]+)(\*{0,2})\])? \((?:published )?([\d.]+)\)", cell
            )
            assert found, cell
            places = [(layers, width, int(rank)) for width in (1, 8, 64)]
            best = min(places, key=lambda p: mean(at(p, 0.01)).mean)
            assert agrees(found[1], mean(at(best, 0.01)).mean), cell
            assert bool(found[2]) == (len(at(best, 0.01)) >= 3), cell
            assert agrees(found[5], min(published()[p] for p in places)), cell
            others = [values for place in places for values in elsewhere(place) if values]
            if found[3]:
                values = min(others, key=lambda values: mean(values).mean)
                assert agrees(found[3], mean(values).mean), (cell, others)
                assert {1: "", 2: "**"}.get(len(values), "*") == found[4], cell


def test_rates_table_is_that_of_the_rows() -> None:
    table = cells(PAGE, "| rank | layers | 0.03 | 0.01 | 0.003 | 0.001 |")
    assert len(table) == 13
    for rank, layers, *shown in table:
        known: dict[float, float] = {}
        for cell, lr in zip(shown, RATES, strict=True):
            # The higher rates of one layer have a table of their own.
            values = at((int(layers), 8, int(rank)), lr)
            assert bool(cell) == bool(values), (rank, layers, lr)
            if cell:
                number = re.search(r"[\d.]+", cell)
                assert number
                known[lr] = mean(values).mean
                assert agrees(number[0], known[lr])
                assert ("\\*" in cell) == (len(values) == 3)
        bold = [lr for cell, lr in zip(shown, RATES, strict=True) if "**" in cell]
        level = any("level" in cell for cell in shown)
        assert bold == ([] if level else [min(known, key=lambda lr: known[lr])])


def test_rates_at_the_largest_budget_are_those_of_the_rows() -> None:
    table = cells(PAGE, "| d³, fresh data | rank 64 | 32 | 16 | 8 | 4 |")
    for name, *shown in table:
        layers = 3 if name.startswith("three") else 5
        lr = float(name.rpartition(" ")[2])
        for cell, rank in zip(shown, (64, 32, 16, 8, 4), strict=True):
            if cell:
                assert agrees(cell, mean(at((layers, 64, rank), lr)).mean)
    best = cells(PAGE, "| d³ | rank 32 | 16 | 8 | 4 | 2 | 1 |")
    for name, *shown in best:
        layers = 3 if name.startswith("three") else 5
        for cell, rank in zip(shown, (32, 16, 8, 4, 2, 1), strict=True):
            tried = [at((layers, 64, rank), lr) for lr in RATES]
            assert agrees(cell, min(mean(values).mean for values in tried if values))


def test_replayed_models_are_those_of_the_rows() -> None:
    table = cells(PAGE, "| | rank 64 | 32 | 16 | 8 | 4 | 2 | 1 |")
    places = ((3, 1), (3, 8), (5, 64))
    for training, new, place in zip(table[::2], table[1::2], places, strict=True):
        for a, b, rank in zip(training[1:], new[1:], (64, 32, 16, 8, 4, 2, 1), strict=True):
            rows = points("rows.jsonl", "replay")[*place, rank]
            if a:
                assert agrees(a, min(row["train_best"] for row in rows))
                assert agrees(b, mean(errors(rows)).mean)


@pytest.fixture(scope="module")
def small() -> dict[tuple[int, int, int], list[float]]:
    """(layers, rank, steps) -> errors at the rate with the best mean over these very seeds."""
    found = group(
        rows_of("fig1/small.jsonl", "fig1/small-long.jsonl"), "depth", "head_dim", "steps", "lr"
    )
    best: dict[tuple[int, int, int], list[float]] = {}
    for (layers, rank, steps, _), rows in found.items():
        values, key = errors(rows), (layers, rank, steps)
        if len(values) == 3 and (key not in best or mean(values).mean < mean(best[key]).mean):
            best[key] = values
    return best


def test_length_of_training_is_that_of_the_rows(
    small: dict[tuple[int, int, int], list[float]],
) -> None:
    for name, layers, short, long, change in cells(PAGE, "| rank | layers | 8,000 steps | 32,000"):
        rank = int(name.partition(" ")[0])
        check_mean(short, small[int(layers), rank, 8_000])
        if long:
            check_mean(long, small[int(layers), rank, 32_000])
            verdict(
                change,
                difference(small[int(layers), rank, 32_000], small[int(layers), rank, 8_000]),
            )
    rows = cells(PAGE, "| half rank | 8,000 steps | 32,000 steps |")
    pairs = ((5, 1), (3, 1), (5, 3))
    for (_, *shown), (more, fewer) in zip(rows, pairs, strict=False):
        for cell, steps in zip(shown, (8_000, 32_000), strict=True):
            if cell:
                verdict(cell, difference(small[more, 8, steps], small[fewer, 8, steps]))
    for cell, steps in zip(rows[-1][1:], (8_000, 32_000), strict=True):
        half = min(mean(small[layers, 8, steps]).mean for layers in (1, 3, 5))
        assert agrees(cell.strip("*").removesuffix(" times"), half / mean(small[1, 16, steps]).mean)


def test_table_of_trained_models_is_that_of_the_rows() -> None:
    table = cells("docs/rank-paper.md", "| figure | model | published: training, best of five |")
    length = {
        (r["protocol"], r["task_points"], r["head_dim"]): [r] for r in rows_of("length/rows.jsonl")
    }
    width = {"d²": 1, "d^2.5": 8, "d³": 64}
    seen = 0
    for figure, model, _, statistic, replayed, new in table:
        parts = model.split(", ")
        rank = int(parts[-1].removeprefix("rank ")) if parts[-1].startswith("rank") else 0
        if "main" in figure:
            place = int(parts[0].split()[0]), width[parts[1]], rank
            replay, stream = points("rows.jsonl", "replay")[place], fresh("rows.jsonl")[place]
        elif "length" in figure:
            count = int(parts[2].removeprefix("N = "))
            replay, stream = (length[p, count, rank] for p in ("replay", "stream"))
        else:
            continue
        seen += 1
        assert agrees(statistic, min(row["train_best"] for row in replay))
        for cell, rows in ((replayed, replay), (new, stream)):
            shown, _, half = cell.replace("*", "").partition(" ± ")
            assert agrees(shown, mean(errors(rows)).mean)
            if half:
                assert agrees(half, half_width(mean(errors(rows))))
            else:
                assert len(rows) == 1
    assert seen == 9
