"""Every number in the README's sentences and tables is that of the rows in results/, or of a file
of published or measured values; the few that are not are named here."""

import json
import re
from functools import cache

from support.page_numbers import (
    ROOT,
    Claim,
    agrees,
    cells,
    cells_of_map,
    errors,
    half_width,
    rows_of,
    unclaimed,
    wrong_claims,
)
from support.published_points import (
    counted,
    fresh,
    published,
    reproduced,
    stock_over_ours,
)

from headwise.experiments import nanochat_heads
from headwise.stats import difference, mean

README = (ROOT / "README.md").read_text()
NOT_FROM_ROWS = ("Python 3.11", "(1.3 GB)", "Apache-2.0")


@cache
def quick(rank: int) -> float:
    """The demo's mean error with one layer at d²."""
    rows = [r for r in rows_of("fig1/quick.jsonl") if (r["depth"], r["head_dim"]) == (1, rank)]
    values = errors([r for r in rows if r["num_heads"] * rank == r["dim"]])
    assert len(values) == 3
    return mean(values).mean


def quick_setting(key: str) -> float:
    (value,) = {row[key] for row in rows_of("fig1/quick.jsonl")}
    return value


def costs_of_fewer_layers() -> list[float]:
    """Half of the layers on text, with twice the heads and without: nothing is found. The larger
    half-width."""
    cell = cells_of_map("text.jsonl")
    base = errors(cell[4, 4, 16])
    gaps = [difference(errors(cell[2, heads, 16]), base) for heads in (8, 4)]
    for gap in gaps:
        assert gap.low is not None
        assert gap.high is not None
        assert gap.low < 0 < gap.high
    return [max(map(half_width, gaps))]


def ranks_of_nanochat() -> list[float]:
    """The best rank among the cuts of the width, and the one that is worst and known to be."""
    arms = nanochat_heads.EXPERIMENT.summary(rows_of("nanochat/rows.jsonl"))
    cuts = sorted((arm for arm in arms if arm.family == "split"), key=lambda arm: arm.held_out or 9)
    gap = cuts[-1].gap
    assert gap is not None
    assert gap[1] is not None
    assert gap[1] > 0
    return [cuts[0].rank, cuts[-1].rank]


def nanochat_base() -> nanochat_heads.Arm:
    arms = nanochat_heads.EXPERIMENT.summary(rows_of("nanochat/rows.jsonl"))
    tokens = {row["tokens"] for row in rows_of("nanochat/rows.jsonl")}
    base = next(arm for arm in arms if arm.base)
    assert max(tokens) < base.params  # less than a token for each, as the page says
    return base


def speed_of_wide_heads() -> list[float]:
    measured = json.loads((ROOT / "results/speed/attention.json").read_text())
    (row,) = [row for row in measured["width"] if row["rank"] == 448]
    return [row["rank"], row["ratio"]]


def in_ensembles() -> list[float]:
    """The least and the largest ratio on the slowest host, the least on the fastest."""
    slowest, fastest = (stock_over_ours(file) for file in ("figure1-whole", "figure1"))
    return [min(slowest), max(slowest), min(fastest)]


def alone() -> list[float]:
    ratios = [stock_over_ours(file, alone=True)[0] for file in ("figure1", "figure1-whole")]
    return sorted(ratios)


CLAIMS = [
    Claim("Then # small models train", lambda: [len(rows_of("fig1/quick.jsonl"))]),
    Claim(
        "find the farthest of # points in # dimensions",
        lambda: [quick_setting("task_points"), quick_setting("task_dim")],
    ),
    Claim(
        "mean of # seeds: one head of full rank errs by #.",
        lambda: [len({row["seed"] for row in rows_of("fig1/quick.jsonl")}), quick(16)],
    ),
    Claim("err by #, **# times as much**", lambda: [quick(8), quick(8) / quick(16)]),
    Claim("We trained all # points", lambda: [len(published())]),
    Claim("repeats # sequences", lambda: [100 * rows_of("fig1/rows.jsonl")[0]["batch"]]),
    Claim(
        "# within 10 %, against # on data that never repeat",
        lambda: [reproduced("replay"), reproduced("stream")],
    ),
    Claim("anything on text (±# nats)", costs_of_fewer_layers),
    Claim("nanochat's heads of #, and heads of # are worse", ranks_of_nanochat),
    Claim("That is # million parameters", lambda: [nanochat_base().params / 1e6]),
    Claim("# steps also show", lambda: [rows_of("map/farthest-quick.jsonl")[0]["steps"]]),
    Claim(
        "takes a #th to an #nd of the published loop's time on the slowest host seen, and at most "
        "a #th on the fastest.",
        in_ensembles,
    ),
    Claim("Alone it takes a #th to a #th.", alone),
    Claim("heads of # runs # times as fast", speed_of_wide_heads),
]


def test_numbers_of_the_readme_are_those_of_the_rows() -> None:
    assert not wrong_claims(README, CLAIMS)


def test_readme_has_no_number_that_nothing_computes() -> None:
    named = [Claim(phrase, list) for phrase in NOT_FROM_ROWS]
    assert not unclaimed(README, [*CLAIMS, *named])


def test_wrong_number_in_the_readme_is_seen() -> None:
    planted = 0
    for claim in CLAIMS:
        right = list(claim.values())  # once, since rows are read for it
        held = Claim(claim.phrase, lambda right=right: right)
        found = re.search(claim.pattern, README)
        assert found
        for place in range(1, len(right) + 1):
            start, end = found.span(place)
            digit = README[end - 1]
            wrong = README[: end - 1] + str((int(digit) + 1) % 10) + README[end:]
            assert wrong_claims(wrong, [held]), (claim.phrase, README[start:end])
            planted += 1
    assert planted == sum(claim.phrase.count("#") for claim in CLAIMS)
    assert unclaimed(README + "\nAnd 7 more.", [])
    assert not unclaimed("| 7 |\n\n```\n7\n```\n`7` d^2.5 H200", [])


def test_other_words_around_a_number_are_seen() -> None:
    said = "Alone it takes a 29th to a 40th."
    assert not wrong_claims(said, [CLAIMS[12]])
    assert wrong_claims(said.replace("Alone", "In an ensemble"), [CLAIMS[12]])


def test_table_of_the_readme_is_that_of_the_rows() -> None:
    table = cells("README.md", "| | published (training error) | ours (held out) |")
    five = fresh("rates.jsonl", 0.003)
    assert [row[0].partition(",")[0] for row in table] == ["full rank", "rank 32", "rank 8"]
    for (_, known, ours), rank in zip(table, (64, 32, 8), strict=True):
        of_layers = {1: counted(1, 8, rank, 0.03), 5: errors(five[5, 8, rank])}
        shown = [*zip(known.split(" → "), ours.split(" → "), strict=True)]
        for (a, b), (layers, values) in zip(shown, of_layers.items(), strict=False):
            assert len(values) == (4 if layers == 1 else 3)  # as the page says
            assert agrees(a, published()[layers, 8, rank])
            assert agrees(b, mean(values).mean)
