"""The tables of results/*/README.md on dimension, length and positions are those of their rows."""

import re

import pytest
from support.page_numbers import ROOT, agrees, cells, check_difference, check_mean, errors, rows_of
from support.published_points import fresh

from headwise.stats import difference, group, mean


def test_dimension_table_is_that_of_the_rows() -> None:
    found = {
        (int(dim), int(dim) // int(rank), int(steps)): errors(rows)
        for file in ("rows", "longer")
        for (dim, rank, steps), rows in group(
            rows_of(f"dimension/{file}.jsonl"), "dim", "head_dim", "steps"
        ).items()
    }
    table = cells("results/dimension/README.md", "| d | one head of rank d | two of d/2 |")
    assert len(table) == 5
    for name, *shown, ratio in table:
        dim, steps = int(re.findall(r"\d+", name)[0]), 24_000 if "four times" in name else 6_000
        for cell, split in zip(shown, (1, 2, 4, 8), strict=True):
            if cell:
                check_mean(cell, found[dim, split, steps])
        one, two = (mean(found[dim, split, steps]).mean for split in (1, 2))
        assert agrees(ratio.removesuffix(" times"), two / one)


def test_dimension_at_the_published_size_is_that_of_the_rows() -> None:
    rows = {(r["protocol"], r["head_dim"]): r for r in rows_of("dimension/paper.jsonl")}
    table = cells("results/dimension/README.md", "| heads per module | rank | replay: training st")
    for _, rank, statistic, replayed, new in table:
        replay, stream = (rows[protocol, int(rank)] for protocol in ("replay", "stream"))
        assert agrees(statistic, replay["train_best"])
        assert agrees(replayed, replay["held_out"])
        assert agrees(new, stream["held_out"])


def test_length_tables_are_those_of_the_rows() -> None:
    page = "results/length/README.md"
    rows = {
        (r["protocol"], r["task_points"], r["head_dim"]): r for r in rows_of("length/rows.jsonl")
    }
    for points, rank, _, _, statistic, replayed, new in cells(
        page, "| points | rank | heads | pub"
    ):
        replay, stream = (rows[p, int(points), int(rank)] for p in ("replay", "stream"))
        assert agrees(statistic, replay["train_best"])
        assert agrees(replayed.strip("*"), replay["held_out"])
        assert agrees(new, stream["held_out"])
    small = group(
        [r for r in rows_of("length/small.jsonl") if r["protocol"] == "stream"],
        "task_points",
        "head_dim",
    )
    for points, _, *shown, _ in cells(page, "| points | from the point alone | rank 16 |"):
        for cell, rank in zip(shown, (16, 4, 1), strict=True):
            check_mean(cell, errors(small[int(points), rank]))


def test_positions_at_equal_parameters_are_those_of_the_rows() -> None:
    found = group(rows_of("positions/equal.jsonl"), "positions", "head_dim")
    table = cells("results/positions/README.md", "| rank | without (397,378 parameters) |")
    short = cells("docs/rank-paper.md", "| concatenated, one layer, fresh data, three seeds |")
    gaps = {name.removeprefix("rank "): gap for name, _, gap in short}
    for rank, without, concatenated, gap, _ in table:
        plain = errors(fresh("rows.jsonl")[1, 8, int(rank)])
        placed = errors(found["concatenated", int(rank)])
        check_mean(without, plain)
        check_mean(concatenated, placed)
        check_difference(gap, difference(placed, plain))
        check_difference(gaps[rank], difference(placed, plain))
        # The control trains nowhere, as the page says.
        assert mean(errors(found["room", int(rank)])).mean == pytest.approx(1, abs=1e-3)


def test_account_names_every_file_of_rows_beside_it_or_shows_its_picture() -> None:
    for path in sorted((ROOT / "results").glob("*/*.jsonl")):
        pages = [path.parent / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
        said = "".join(page.read_text() for page in pages)
        assert path.name in said or f"({path.stem}.png)" in said, path
