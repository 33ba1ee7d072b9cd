"""The numbers of the page on thin keys are those of results/thin_keys."""

import math

from support.page_numbers import agrees, cells, check_difference, check_mean, rows_of

from headwise.experiments.thin_keys import EXPERIMENT, needed

PAGE = "docs/thin-keys.md"
POINTS = EXPERIMENT.summary(rows_of("thin_keys/rows.jsonl"))
AT = {(p.task, p.candidates, p.rank): p for p in POINTS}


def test_differences_from_full_rank_are_those_of_the_rows() -> None:
    table = cells(PAGE, "| task | N | rank 1 | rank 2 | log2 N | a quarter of d | rank 8 |")
    assert [(row[0], int(row[1])) for row in table] == [
        (task, n) for task in ("lookup", "farthest") for n in (8, 16, 32)
    ]
    for task, n, *shown, full in table:
        ranks = (1, 2, round(math.log2(int(n))), 4, 8)
        for cell, rank in zip(shown, ranks, strict=True):
            point = AT[task, int(n), rank]
            assert point.n == 3
            assert point.cost is not None
            check_difference(cell, point.cost)
            assert cell.endswith("(edge)") == point.edge
        check_mean(full, AT[task, int(n), 16].values)
        assert agrees("1.386" if task == "lookup" else "1", AT[task, int(n), 16].zero)


def test_ranks_that_are_enough_are_those_of_the_rows() -> None:
    _, select, compare = cells(PAGE, "| what is asked | N = 8 | N = 16 | N = 32 |")
    for task, shown in (("lookup", select[1:]), ("farthest", compare[1:])):
        for n, cell in zip((8, 16, 32), shown, strict=True):
            found = needed([p for p in POINTS if (p.task, p.candidates) == (task, n)])
            assert found is not None
            assert found.rank == int(cell)
    for n in (8, 16, 32):
        assert {AT["farthest", n, rank].enough for rank in (1, 2, 4, 8)} == {"no"}
    assert sum(p.edge for p in POINTS) == 4
    assert {p.rank for p in POINTS if p.edge} <= {1, 2}
    counted = [r for r in rows_of("thin_keys/rows.jsonl") if r["seed"]]
    assert (len(POINTS), len(counted), sum(p.diverged for p in POINTS)) == (34, 102, 0)
