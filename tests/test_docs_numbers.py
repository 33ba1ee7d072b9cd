"""The numbers of the pages on figure 1 are those of the rows in results/ and of the published
values."""

import csv
import json
import re
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import headwise
from headwise.stats import mean

ROOT = Path(__file__).parent.parent
PUBLISHED = Path(headwise.__file__).parent / "experiments" / "published" / "fig1.csv"
WIDTH = {"d^2": 1, "d^2.5": 8, "d^3": 64}  # heads of full rank

Key = tuple[int, int, int]  # layers, heads of full rank, rank


def cells(page: str, heading: str) -> list[list[str]]:
    """The body of the table with that first line, row by row."""
    text = (ROOT / page).read_text()
    assert text.count(heading) == 1, heading
    lines = text[text.index(heading) :].split("\n\n")[0].strip().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def runs(file: str, protocol: str, lr: float = 0.01) -> dict[Key, list[dict[str, Any]]]:
    found: dict[Key, list[dict[str, Any]]] = defaultdict(list)
    for line in (ROOT / "results" / "fig1" / file).read_text().splitlines():
        row = json.loads(line)
        if row["protocol"] == protocol and row["lr"] == lr:
            width = row["num_heads"] * row["head_dim"] // row["dim"]
            found[row["depth"], width, row["head_dim"]].append(row)
    return found


def published() -> dict[Key, float]:
    lines = [line for line in PUBLISHED.read_text().splitlines() if not line.startswith("#")]
    out = {}
    for row in csv.DictReader(lines):
        width = {"2": 1, "2.5": 8, "3": 64}[row["params_power"]]
        out[int(row["layers"]), width, int(row["rank"])] = float(row["mse"])
    return out


def agrees(shown: str, value: float) -> bool:
    """Whether a number in a page is that value, rounded to the digits shown."""
    digits = -int(Decimal(shown).as_tuple().exponent)
    return abs(float(shown) - value) <= 0.5000001 * 10.0**-digits


def check_mean(cell: str, values: list[float]) -> None:
    """A cell such as `0.476 ± 0.01` or `0.4 (n=1)`."""
    found = mean(values)
    shown = re.match(r"([\d.]+)(?: ± ([\d.]+))?", cell)
    assert shown, cell
    assert agrees(shown[1], found.mean), (cell, found)
    if shown[2]:
        assert found.low is not None
        assert found.high is not None
        assert agrees(shown[2], (found.high - found.low) / 2), (cell, found)
    if not shown[2]:
        assert len(values) == 1
    elif "n=" in cell:
        assert f"n={len(values)}" in cell


def test_points_of_figure_1_are_those_of_the_rows() -> None:
    table = cells("docs/figure1-published.md", "| layers | budget | rank | published | replay: tr")
    replay, stream, known = runs("rows.jsonl", "replay"), runs("rows.jsonl", "stream"), published()
    assert len(table) == 63
    for layers, budget, rank, value, statistic, replayed, fresh in table:
        key = int(layers), WIDTH[budget], int(rank)
        assert float(value) == pytest.approx(known[key], rel=1e-6)
        assert agrees(statistic, min(row["train_best"] for row in replay[key]))
        check_mean(replayed, [row["held_out"] for row in replay[key]])
        check_mean(fresh, [row["held_out"] for row in stream[key]])


def test_depth_table_of_figure_1_is_that_of_the_rows() -> None:
    table = cells("docs/figure1.md", "| rank | one layer | three layers | five layers | 5 - 1 |")
    at_published, lower = runs("rows.jsonl", "stream"), runs("rates.jsonl", "stream", 0.003)
    assert len(table) == 7
    for rank, one, three, five, *_, known in table:
        for cell, layers, rows in (
            (one, 1, at_published),
            (three, 3, at_published),
            (five, 5, lower),
        ):
            check_mean(cell, [row["held_out"] for row in rows[layers, 8, int(rank)]])
        values = [published()[layers, 8, int(rank)] for layers in (1, 3, 5)]
        assert all(agrees(a, b) for a, b in zip(known.split(", "), values, strict=True))


def counted(layers: int, width: int, rank: int, lr: float) -> list[float]:
    """Errors of the seeds that did not choose the rate, of the runs that did not diverge."""
    rows = [*runs("rows.jsonl", "stream", lr)[layers, width, rank]]
    rows += runs("tuned.jsonl", "stream", lr)[layers, width, rank]
    return [row["held_out"] for row in rows if row["seed"] and row["status"] == "done"]


def test_tuned_tables_of_figure_1_are_those_of_the_rows() -> None:
    for budget, full, rate, half, half_rate, ratio, known in cells(
        "docs/figure1.md", "| budget | full rank | rate | half rank | rate |"
    ):
        width = WIDTH[budget.replace("²", "^2").replace("³", "^3")]
        best = counted(1, width, 64, float(rate))
        other = counted(1, width, 32, float(half_rate))
        check_mean(full, best)
        check_mean(half, other)
        assert len(best) == (2 if "n=2" in full else 4)
        assert len(other) == 4
        assert agrees(ratio, mean(other).mean / mean(best).mean)
        assert agrees(known, published()[1, width, 32] / published()[1, width, 64])
    for rank, error, rate, before in cells("docs/figure1.md", "| rank | error | rate | at 0.01"):
        check_mean(error, counted(3, 1, int(rank), float(rate)))
        at_published = runs("rows.jsonl", "stream")[3, 1, int(rank)]
        assert agrees(before, mean([row["held_out"] for row in at_published]).mean)


def test_table_of_the_readme_is_that_of_the_rows() -> None:
    table = cells("README.md", "| | published (training error) | ours (held out) |")
    five = runs("rates.jsonl", "stream", 0.003)
    assert [row[0].partition(",")[0] for row in table] == ["full rank", "rank 32", "rank 8"]
    for (_, known, ours), rank in zip(table, (64, 32, 8), strict=True):
        of_layers = {
            1: counted(1, 8, rank, 0.03),
            5: [row["held_out"] for row in five[5, 8, rank]],
        }
        shown = [*zip(known.split(" → "), ours.split(" → "), strict=True)]
        for (a, b), (layers, errors) in zip(shown, of_layers.items(), strict=False):
            assert len(errors) == (4 if layers == 1 else 3)
            assert agrees(a, published()[layers, 8, rank])
            assert agrees(b, mean(errors).mean)


def test_numbers_that_differ_are_seen() -> None:
    assert agrees("0.481", 0.48092)
    assert not agrees("0.482", 0.48092)
    with pytest.raises(AssertionError):
        check_mean("0.50 ± 0.10", [0.4, 0.6, 0.5])
