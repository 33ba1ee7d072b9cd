"""The numbers of the pages on figure 1 and on learned weights are those of the rows in results/ and
of the published values."""

from statistics import median

import pytest
from support.page_numbers import (
    ROOT,
    Claim,
    agrees,
    cells,
    check_difference,
    check_mean,
    errors,
    rows_of,
    wrong_claims,
)
from support.published_points import (
    WIDTH,
    counted,
    fresh,
    points,
    published,
    reproduced,
)

from headwise.stats import Mean, difference, mean

FIGURE1 = "docs/figure1.md"
BUDGETS = {"d²": 1, "d^2.5": 8, "d³": 64}


def test_points_of_figure_1_are_those_of_the_rows() -> None:
    table = cells("docs/figure1-published.md", "| layers | budget | rank | published | replay: tr")
    replay, stream = points("rows.jsonl", "replay"), fresh("rows.jsonl")
    assert len(table) == 63
    for layers, budget, rank, value, statistic, replayed, new in table:
        key = int(layers), WIDTH[budget], int(rank)
        assert float(value) == pytest.approx(published()[key], rel=1e-6)
        assert agrees(statistic, min(row["train_best"] for row in replay[key]))
        check_mean(replayed, errors(replay[key]))
        check_mean(new, errors(stream[key]))


def test_single_points_of_figure_1_are_counted() -> None:
    alone = [
        sum(len(rows) == 1 for rows in points("rows.jsonl", protocol).values())
        for protocol in ("stream", "replay")
    ]
    for page, phrase in (
        (FIGURE1, "# of the 63 points on the right, drawn hollow, and # on the left."),
        ("results/fig1/README.md", "# points of the stream and # of the replay are single runs"),
    ):
        assert not wrong_claims((ROOT / page).read_text(), [Claim(phrase, lambda: alone)])


def test_protocols_of_figure_1_reproduce_as_many_points_as_it_says() -> None:
    one = [p for p in published() if p[0] == 1]
    three = [p for p in published() if p[0] == 3 and p[1] < 64]
    others = [p for p in published() if p not in one and p not in three]
    table = cells(FIGURE1, "| | `replay` | `stream` |")
    for (name, *shown), among in zip(table, (None, one, three, others), strict=True):
        assert name.endswith(f"{len(among or published())}")
        assert [int(cell) for cell in shown] == [
            reproduced(protocol, among) for protocol in ("replay", "stream")
        ]
    stream = fresh("rows.jsonl")
    worst = max(min(r["train_best"] for r in stream[p]) / published()[p] for p in published())
    claim = Claim("by up to # times.\n", lambda: [worst])
    assert not wrong_claims((ROOT / FIGURE1).read_text(), [claim])


def test_depth_table_of_figure_1_is_that_of_the_rows() -> None:
    table = cells(FIGURE1, "| rank | one layer | three layers | five layers | 5 - 1 |")
    at_published, lower = fresh("rows.jsonl"), fresh("rates.jsonl", 0.003)
    assert len(table) == 7
    for rank, one, three, five, five_one, five_three, known in table:
        of_layers = [
            errors(rows[layers, 8, int(rank)])
            for layers, rows in ((1, at_published), (3, at_published), (5, lower))
        ]
        for cell, values in zip((one, three, five), of_layers, strict=True):
            check_mean(cell, values)
        check_difference(five_one, difference(of_layers[2], of_layers[0]))
        gap = difference(of_layers[2], of_layers[1])
        if "±" in five_three:
            check_difference(five_three, gap)
        elif five_three:
            assert found_nothing(gap)
        values = [published()[layers, 8, int(rank)] for layers in (1, 3, 5)]
        assert all(agrees(a, b) for a, b in zip(known.split(", "), values, strict=True))


def found_nothing(gap: Mean) -> bool:
    assert gap.low is not None
    assert gap.high is not None
    return gap.low <= 0 <= gap.high


def test_tuned_tables_of_figure_1_are_those_of_the_rows() -> None:
    for budget, full, rate, half, half_rate, ratio, known in cells(
        FIGURE1, "| budget | full rank | rate | half rank | rate |"
    ):
        width = BUDGETS[budget]
        best = counted(1, width, 64, float(rate))
        other = counted(1, width, 32, float(half_rate))
        check_mean(full, best)
        check_mean(half, other)
        assert len(best) == (2 if "n=2" in full else 4)
        assert len(other) == 4
        assert agrees(ratio, mean(other).mean / mean(best).mean)
        assert agrees(known, published()[1, width, 32] / published()[1, width, 64])
    for rank, error, rate, before in cells(FIGURE1, "| rank | error | rate | at 0.01"):
        check_mean(error, counted(3, 1, int(rank), float(rate)))
        assert agrees(before, mean(errors(fresh("rows.jsonl")[3, 1, int(rank)])).mean)


def test_half_rank_at_the_published_rate_is_that_of_the_rows() -> None:
    stream, replay = fresh("rows.jsonl"), points("rows.jsonl", "replay")
    table = cells(FIGURE1, "| budget | half rank over full rank | published | full rank, stream |")
    for budget, ratio, known, full, best, replayed in table:
        width = BUDGETS[budget]
        half, whole = (mean(errors(stream[1, width, rank])).mean for rank in (32, 64))
        assert agrees(ratio, half / whole)
        assert agrees(known, published()[1, width, 32] / published()[1, width, 64])
        assert agrees(full, whole)
        assert agrees(best, published()[1, width, 64])
        assert agrees(replayed, mean(errors(replay[1, width, 64])).mean)


# The lowest error of any low rank, over one layer of full rank at its own rate.
FULL = {"d²": 0.03, "d^2.5": 0.03, "d³": 0.1}


def test_factors_behind_full_rank_are_those_of_the_rows() -> None:
    rates = {"rows.jsonl": (0.01,), "rates.jsonl": (0.03, 0.003, 0.001)}
    low = min(
        error
        for file, tried in rates.items()
        for lr in tried
        for (_, _, rank), rows in fresh(file, lr).items()
        if rank < 64
        for error in errors(rows)
    )
    full = {name: mean(counted(1, BUDGETS[name], 64, rate)).mean for name, rate in FULL.items()}
    known = min(error for (_, _, rank), error in published().items() if rank < 64)
    best = min(error for (_, _, rank), error in published().items() if rank == 64)
    theirs = [published()[1, width, 64] for width in BUDGETS.values()] + [best]
    ours = [*full.values(), min(full.values())]
    assert min(full.values()) < min(
        mean(errors(rows)).mean
        for file, tried in rates.items()
        for lr in tried
        for (_, _, rank), rows in fresh(file, lr).items()
        if rank == 64 and errors(rows)
    )
    table = cells(FIGURE1, "| compared with | on fresh data | published |")
    for (_, shown, of_them), a, b in zip(table, ours, theirs, strict=True):
        assert agrees(shown.removesuffix(" times"), low / a)
        assert agrees(of_them.removesuffix(" times"), known / b)
    one = low / full["d²"]
    pages = {
        FIGURE1: (
            "low rank we have run is # times that of one head",
            "On fresh data it is # times worse",
        ),
        "docs/rank-paper.md": ("low rank run is # times that of one full-rank head",),
    }
    for page, phrases in pages.items():
        claims = [Claim(phrase, lambda: [one]) for phrase in phrases]
        assert not wrong_claims((ROOT / page).read_text(), claims)


# ---- what heads of full rank learn


def degrees(heads: int, lr: float, quantile: int) -> list[float]:
    """Of each run with one layer on fresh data: degrees from -c I of a quantile of its heads."""
    rows = [*fresh("rows.jsonl", lr)[1, heads, 64], *fresh("tuned.jsonl", lr)[1, heads, 64]]
    counts = [row for row in rows if row["status"] == "done" and (row["seed"] or lr == 0.01)]
    return [180 - row["score_angle"][0][quantile] for row in counts]


def test_learned_weights_are_those_of_the_rows() -> None:
    page = (ROOT / "results/learned/README.md").read_text()
    # Quantiles of the angle are least, quartile, median, quartile, largest: the farthest is least.
    near, far = degrees(64, 0.01, 1), degrees(64, 0.01, 0)
    claims = [
        Claim("three quarters are within #, # and # degrees by seed", lambda: near),
        Claim("the farthest is #, **#** and # degrees away", lambda: far),
    ]
    assert not wrong_claims(page, claims)
    table = cells("results/learned/README.md", "| heads | rate | held out | degrees from -c I: med")
    for heads, rate, error, middle, farthest in table:
        assert agrees(error, mean(counted(1, int(heads), 64, float(rate))).mean)
        found = sorted(degrees(int(heads), float(rate), 2), reverse=True)
        shown = middle.partition(" (")[0].split(", ")
        if heads != "1":
            assert all(agrees(a, b) for a, b in zip(shown, found, strict=True))
            assert agrees(farthest, max(degrees(int(heads), float(rate), 0)))


def test_table_of_learned_weights_is_that_of_the_rows() -> None:
    table = cells("results/learned/README.md", "| data | heads | held out | angle | norm |")
    assert len(table) == 6
    for data, heads, error, angle, norm, product, _ in table:
        rows = points("rows.jsonl", data)[1, int(heads), 64]
        check_mean(error, errors(rows))
        keys = ("score_angle", "score_norm", "score_angle_transposed", "score_norm_transposed")
        for text, key in zip((angle, norm, *product.split(", ")), keys, strict=True):
            assert agrees(text, median(row[key][0][2] for row in rows)), (data, heads, key)


def test_learned_weights_of_the_rank_papers_page_are_those_of_the_rows() -> None:
    table = cells("docs/rank-paper.md", "| median angle, degrees | 1 head | 8 heads | 64 heads |")
    own = next(row[1:] for row in table if "the rate that suits each" in row[0])
    plain = next(row[1:] for row in table if row[0] == "ours, fresh data")
    for cell, heads in zip(plain, (1, 8, 64), strict=True):
        assert agrees(cell, 180 - median(degrees(heads, 0.01, 2)))
    for cell, heads, lr in zip(own, (1, 8, 64), FULL.values(), strict=True):
        assert agrees(cell, 180 - median(degrees(heads, lr, 2)))


def test_rows_of_figure_1_are_as_many_as_its_pages_say() -> None:
    page = (ROOT / "results/fig1/README.md").read_text()
    claims = [
        Claim("`rows.jsonl`: the # runs", lambda: [len(rows_of("fig1/rows.jsonl"))]),
        Claim("at other rates, # runs.", lambda: [len(rows_of("fig1/rates.jsonl"))]),
        Claim("below 0.01, # runs on", lambda: [len(rows_of("fig1/tuned.jsonl"))]),
        Claim("makes, # runs on two", lambda: [len(rows_of("fig1/quick.jsonl"))]),
    ]
    assert not wrong_claims(page, claims)


# ---- the checks can fail


def test_numbers_that_differ_are_seen() -> None:
    assert agrees("0.481", 0.48092)
    assert not agrees("0.482", 0.48092)
    assert agrees("25,600", 25_600)
    with pytest.raises(AssertionError):
        check_mean("0.50 ± 0.10", [0.4, 0.6, 0.5])
    with pytest.raises(AssertionError):
        check_mean("0.50", [0.4, 0.6, 0.5])  # without its interval


def test_difference_that_is_not_found_must_be_said() -> None:
    gap = Mean(0.005, -0.016, 0.026, 3)
    check_difference("none found (+0.005 ± 0.021)", gap)
    with pytest.raises(AssertionError):
        check_difference("+0.005 ± 0.021", gap)
    with pytest.raises(AssertionError):
        check_difference("none found (+0.005 ± 0.021)", Mean(0.005, 0.001, 0.009, 3))
