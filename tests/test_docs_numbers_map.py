"""The numbers of the pages on heads and depth, on nanochat and on speed are those of the rows in
results/."""

import json
from functools import cache

import pytest
from support.page_numbers import (
    ROOT,
    Claim,
    Rows,
    agrees,
    cells,
    cells_of_map,
    check_correlation,
    check_difference,
    errors,
    half_width,
    rows_of,
    wrong_claims,
)
from support.published_points import stock_over_ours

from headwise.experiments import nanochat_heads
from headwise.stats import Mean, difference, mean, rank_correlation

PAGE = "docs/heads-or-depth.md"
ACCOUNT = "results/map/README.md"
FIELD = {"heads": 1, "rank": 2}  # of a cell's (layers, heads, rank)

Cell = tuple[int, int, int]
cells_of = cache(cells_of_map)


def gap(task: str, cell: Cell, base: Cell) -> Mean:
    at = cells_of(f"{task}.jsonl")
    return difference(errors(at[cell]), errors(at[base]))


def correlation(task: str, field: str, depth: int) -> Mean:
    """Of the loss with heads or rank, over the cells of one depth."""
    found: dict[Cell, Rows] = {k: v for k, v in cells_of(f"{task}.jsonl").items() if k[0] == depth}
    places = [cell[FIELD[field]] for cell in found]
    return rank_correlation(places, [mean(errors(rows)).mean for rows in found.values()])


@pytest.mark.parametrize(("task", "first"), [("farthest", "rank"), ("text", "heads")])
def test_correlations_at_each_depth_are_those_of_the_rows(task: str, first: str) -> None:
    heading = (
        f"| correlation of the loss with | one layer | two | four |\n|---|---|---|---|\n| {first}"
    )
    for field, *shown in cells(PAGE, heading):
        for cell, depth in zip(shown, (1, 2, 4), strict=True):
            check_correlation(cell, correlation(task, field, depth))


def test_correlations_in_sentences_are_those_of_the_rows() -> None:
    def three(task: str, depth: int) -> list[float]:
        found = correlation(task, "heads", depth)
        assert found.low is not None
        assert found.high is not None
        return [found.mean, found.low, found.high]

    claims = [
        Claim("goes with the number of heads (#, # to #)", lambda: three("images", 4)),
        Claim("the sign is the other (#, # to #)", lambda: three("images", 1)),
        Claim("in two nothing is found (#, # to #)", lambda: three("images", 2)),
        Claim("rank, in one layer (#, # to #)", lambda: three("listops-quick", 1)),
        Claim("and in two (#, # to #)", lambda: three("listops-quick", 2)),
    ]
    assert not wrong_claims((ROOT / PAGE).read_text(), claims)


@pytest.mark.parametrize(
    ("page", "heading"),
    [
        (PAGE, "| task | 8 x 16 in two layers for 4 x 16 in four | 4 x 16 in two layers |"),
        (ACCOUNT, "| task | 8 x 16 in two layers (the leaner paper's trade) |"),
    ],
    ids=["page", "account"],
)
def test_half_of_the_layers_costs_what_the_rows_say(page: str, heading: str) -> None:
    table = cells(page, heading)
    assert {row[0] for row in table} == {"text", "images", "farthest", "recall"}
    for task, more, control, *loss in table:
        check_difference(more, gap(task, (2, 8, 16), (4, 4, 16)))
        check_difference(control, gap(task, (2, 4, 16), (4, 4, 16)))
        base = mean(errors(cells_of(f"{task}.jsonl")[4, 4, 16])).mean
        for shown in loss:
            assert float(shown) == pytest.approx(base, rel=0.1 if task == "recall" else 0.02)


def test_best_cells_and_paths_are_those_of_the_rows() -> None:
    ends = {2: ((4, 1, 64), (4, 16, 4)), 3: ((4, 1, 16), (4, 8, 16)), 4: ((4, 4, 16), (1, 16, 16))}
    for row in cells(ACCOUNT, "| task | best cell | split: 1 x 64 to 16 x 4, 4 layers |"):
        task = row[0].split()[0].rstrip(",")
        at = cells_of(f"{task}.jsonl")
        losses = {cell: mean(errors(rows)).mean for cell, rows in at.items()}
        depth, heads, rank = min(losses, key=lambda cell: losses[cell])
        if task != "recall":
            assert row[1].startswith(f"{heads} x {rank} in {depth} layer")
            assert agrees(row[1].rpartition(", ")[2], losses[depth, heads, rank])
        else:
            assert f"by {sum(loss < 0.001 for loss in losses.values())} cells" in row[1]
        for place, (few, many) in ends.items():
            check_difference(row[place].strip("*"), gap(task, many, few))


def test_one_layer_of_four_costs_what_the_rows_say() -> None:
    table = cells(
        PAGE, "| task | the cut, four layers to one | 16 x 16 instead of 4 x 16 in the on"
    )
    for task, cut, more in table:
        for cell, found in (
            (cut, gap(task, (1, 4, 16), (4, 4, 16))),
            (more, gap(task, (1, 16, 16), (1, 4, 16))),
        ):
            if "±" in cell:
                check_difference(cell, found)
            elif cell == "none found":
                assert found.low is not None
                assert found.high is not None
                assert found.low <= 0 <= found.high
            else:
                assert agrees(cell, found.mean)


def test_images_table_is_that_of_the_rows() -> None:
    for depth, split, widen in cells(
        PAGE, "| layers | split, 1 to 16 heads | widened, 1 to 8 heads"
    ):
        for cell, few, many in ((split, (1, 64), (16, 4)), (widen, (1, 16), (8, 16))):
            found = gap("images", (int(depth), *many), (int(depth), *few))
            if "±" in cell:
                check_difference(cell, found)
            else:
                assert cell.startswith("none found")
                assert found.low is not None
                assert found.high is not None
                assert found.low <= 0 <= found.high


def test_text_and_farthest_tables_are_those_of_the_rows() -> None:
    rows = {row[0]: row[-1] for row in cells(PAGE, "| comparison | layers | difference |")}
    at = cells_of("text.jsonl")
    best = {
        depth: min((c for c in at if c[0] == depth), key=lambda c: mean(errors(at[c])).mean)
        for depth in (1, 2, 4)
    }
    for start, found in (
        ("two layers instead of one", gap("text", best[2], best[1])),
        ("one head of rank 4 instead of 16", gap("text", (4, 1, 4), (4, 1, 16))),
        ("two heads of 8 instead of four", gap("text", (2, 2, 8), (2, 4, 8))),
        ("split 1 x 64 to 16 x 4", gap("text", (1, 16, 4), (1, 1, 64))),
        ("widen 1 x 16 to 8 x 16", gap("text", (1, 8, 16), (1, 1, 16))),
    ):
        (cell,) = [shown for name, shown in rows.items() if name.startswith(start)]
        check_difference(cell, found)
    farthest = cells(PAGE, "| shapes | layers | error or difference |")
    assert agrees(farthest[0][2], mean(errors(cells_of("farthest.jsonl")[1, 1, 64])).mean)
    assert agrees(farthest[1][2], mean(errors(cells_of("farthest.jsonl")[1, 16, 32])).mean)
    for row in farthest[2:]:
        depth = int(row[1])
        check_difference(row[2], gap("farthest", (depth, 16, 4), (depth, 1, 64)))


def test_listops_table_is_that_of_the_rows() -> None:
    split, widen = cells(PAGE, "| gain | two layers | one layer |")
    for row, many, few in ((split, (8, 4), (1, 32)), (widen, (8, 8), (1, 8))):
        for cell, depth in zip(row[1:], (2, 1), strict=True):
            check_difference(cell, gap("listops-quick", (depth, *few), (depth, *many)))


def test_flops_at_equal_parameters_differ_as_the_pages_say() -> None:
    def spread(file: str) -> float:
        flops = [rows[0]["flops"] for rows in cells_of(file).values()]
        return 100 * (max(flops) / min(flops) - 1)

    def more(file: str, many: Cell, few: Cell) -> float:
        at = cells_of(file)
        return 100 * (at[many][0]["flops"] / at[few][0]["flops"] - 1)

    four = [spread(f"{task}.jsonl") for task in ("farthest", "recall", "text", "images")]
    lists = spread("listops-quick.jsonl")
    images = more("images.jsonl", (4, 8, 16), (4, 1, 16))
    listops = more("listops-quick.jsonl", (2, 8, 8), (2, 1, 8))
    claims = {
        PAGE: [
            Claim(
                "by # % (farthest), # % (recall), # % (text), # % (images), # % (ListOps)",
                lambda: [*four, lists],
            ),
            Claim("buys its gain with # % more FLOPs", lambda: [images]),
            Claim("instead of one (# % more FLOPs)", lambda: [listops]),
        ],
        ACCOUNT: [
            Claim("# % (farthest), # % (recall), # % (text) and # % (images)", lambda: four),
            Claim("FLOPs differ by # % over", lambda: [lists]),
            Claim("(# % more FLOPs), splitting", lambda: [listops]),
        ],
    }
    for page, of_page in claims.items():
        assert not wrong_claims((ROOT / page).read_text(), of_page)


def test_condition_number_follows_the_inner_width_as_the_page_says() -> None:
    low, high = cells(PAGE, "| text, 64 tokens: heads x rank |")
    by_width: dict[int, list[float]] = {}
    for (_, heads, rank), rows in cells_of("text.jsonl").items():
        known = [row["kappa_start"] for row in rows if row.get("kappa_start")]
        if known:
            by_width.setdefault(heads * rank, []).append(known[0])
    assert len(by_width) == len(low) - 1
    for ends, shown in ((min, low), (max, high)):
        for cell, width in zip(shown[1:], sorted(by_width), strict=True):
            value = float(cell.strip("*").replace(",", ""))
            assert value == pytest.approx(ends(by_width[width]), rel=0.1)
    assert max(by_width, key=lambda width: min(by_width[width])) == 64


def test_starts_that_condition_are_those_of_the_rows() -> None:
    costs = {
        row[0]: row for row in cells(ACCOUNT, "| start | 8 to 4 layers costs | against normal")
    }
    at: dict[tuple[str, int], list[float]] = {}
    for row in sorted(rows_of("map/removable.jsonl"), key=lambda r: r["seed"]):
        if row["task"] == "text" and row["seed"]:
            at.setdefault((row["init"], row["depth"]), []).append(row["held_out"])

    def lost(start: str, depth: int) -> list[float]:
        return [b - a for a, b in zip(at[start, 8], at[start, depth], strict=True)]

    for start, row in costs.items():
        for cost, against, depth in ((row[1], row[2], 4), (row[3], row[4], 2)):
            found = difference(at[start, depth], at[start, 8])
            shown, _, half = cost.partition(" ± ")
            assert agrees(shown, found.mean)
            assert agrees(half, half_width(found))
            if against:
                other = difference(lost(start, depth), lost("normal", depth))
                check_difference(f"none found ({against})", other)


# ---- nanochat


@pytest.mark.parametrize(
    ("file", "place"), [("rows", 0), ("depth", 1), ("long", 2)], ids=["rows", "depth", "long"]
)
def test_table_of_nanochat_is_that_of_the_rows(file: str, place: int) -> None:
    text = (ROOT / "results/nanochat/README.md").read_text()
    table = text.split("| varied | arm |")[place + 1].split("\n\n")[0].splitlines()[2:]
    arms = {
        (arm.family, arm.arm): arm
        for arm in nanochat_heads.EXPERIMENT.summary(rows_of(f"nanochat/{file}.jsonl"))
    }
    assert len(table) == len(arms)
    for line in table:
        family, name, *_, bits, n, change, repeats, repeats_change = (
            cell.strip() for cell in line.strip("|").split("|")
        )
        arm = arms[family, name]
        assert bits == arm.cell("held_out").strip()
        assert int(n) == arm.n
        assert change == (arm.change or "")
        assert repeats_change == (arm.repeats_change or "")
        assert arm.repeats is not None
        assert agrees(repeats, arm.repeats)


def test_parameters_of_nanochats_arms_differ_as_the_page_says() -> None:
    page = (ROOT / "docs/nanochat.md").read_text()
    rows = rows_of("nanochat/rows.jsonl")
    sizes = [row["params"] for row in rows]
    (base,) = {row["params"] for row in rows if (row["num_heads"], row["head_dim"]) == (8, 64)}
    best = [r["recall"] for f in ("rows", "depth", "long") for r in rows_of(f"nanochat/{f}.jsonl")]
    claims = [
        Claim(
            "by # %: # to # million",
            lambda: [
                100 * (max(sizes) / min(sizes) - 1),
                min(sizes) / 1e6,
                max(sizes) / 1e6,
            ],
        ),
        Claim(
            "# million tokens in sequences of 512: **# per parameter**",
            lambda: [rows[0]["tokens"] / 1e6, rows[0]["tokens"] / base],
        ),
        Claim("the highest is # of 1", lambda: [max(best)]),
    ]
    assert not wrong_claims(page, claims)


# ---- speed


def test_speed_names_the_host_of_every_ratio() -> None:
    whole = json.loads((ROOT / "results/speed/figure1-whole.json").read_text())
    assert len([key for key in whole if key.startswith("stock ")]) == 27
    table = cells("docs/speed.md", "| compared with | budget d² | d^2.5 | d³ |")
    fastest, slowest = table[0], table[1]
    by_budget = {
        file: [ratios_of_budget(file, width) for width in (1, 8, 64)]
        for file in ("figure1", "figure1-second", "figure1-whole")
    }
    # The fastest host of each budget: the least ratio of any measurement of the published loop.
    for cell, of_first, of_second in zip(
        fastest[1:], by_budget["figure1"], by_budget["figure1-second"], strict=True
    ):
        assert agrees(cell.removeprefix("at least ").strip("*"), min([*of_first, *of_second]))
    for cell, found in zip(slowest[1:], by_budget["figure1-whole"], strict=True):
        for text, value in zip(cell.split(" to "), (min(found), max(found)), strict=True):
            assert agrees(text, value)
    page = (ROOT / "docs/speed.md").read_text()
    one = [stock_over_ours(file, alone=True)[0] for file in ("figure1", "figure1-whole")]
    assert not wrong_claims(page, [Claim("One model alone is # to # times as fast", lambda: one)])


def ratios_of_budget(file: str, width: int) -> list[float]:
    """Of the shapes of one budget that were measured."""
    stock = json.loads((ROOT / f"results/speed/{file}.json").read_text())
    shapes = [key.split() for key in stock if key.startswith("stock ")]
    ratios = stock_over_ours(file)
    return [r for (_, _, w, _), r in zip(shapes, ratios, strict=True) if int(w) == width]


def test_wrong_number_of_a_map_is_seen() -> None:
    with pytest.raises(AssertionError):
        check_correlation("-0.97 (-0.98 to -0.90)", correlation("images", "heads", 4))
    with pytest.raises(AssertionError):
        check_difference("+0.005 ± 0.021", gap("text", (2, 8, 16), (4, 4, 16)))


def test_suggestions_of_nanochats_page_are_those_of_the_rows() -> None:
    page = "docs/nanochat.md"
    arms = {
        (arm.family, arm.arm): arm
        for arm in nanochat_heads.EXPERIMENT.summary(rows_of("nanochat/rows.jsonl"))
    }
    shown: list[tuple[str, str, str, str]] = []  # family, arm, bits per byte, against the base
    for row in cells(page, "| heads x rank | largest score 16.3 | against 4 x 128 |"):
        name = row[0].strip("*")
        shown.append(("split", name, row[1], row[2]))
        shown += [("scale", name, row[6], row[7])] if row[6] else []
    for row in cells(page, "| query/key rank | bits per byte | against 128 |"):
        name = "4 x 128" if row[0] == "128" else f"4 x {row[0]} / 128"
        shown.append(("query", name, row[1], row[2]))
    for row in cells(page, "| latent | bits per byte | against none |"):
        name = "4 x 128" if row[0] == "none" else f"latent {row[0].partition(' ')[0]}"
        shown.append(("latent", name, row[1], row[2]))
    assert len(shown) == 15
    for family, name, bits, change in shown:
        arm = arms[family, name]
        assert arm.held_out is not None
        assert agrees(bits, arm.held_out)
        if change:
            assert arm.gap is not None
            check_difference(change, Mean(*arm.gap, 3))
