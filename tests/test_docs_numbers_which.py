"""The page on which shape to take: every number is that of the rows or of a public config, every
statement has a grade and a link."""

import re

import pytest
from support.page_numbers import (
    ROOT,
    agrees,
    cells,
    cells_of_map,
    check_difference,
    errors,
    rows_of,
    unclaimed,
)
from support.published_points import counted, fresh

from headwise.experiments import nanochat_heads
from headwise.shape import Shape
from headwise.stats import Mean, difference, mean

PAGE = "docs/which-shape.md"
TEXT = (ROOT / PAGE).read_text()
BY_TASK = "| what the task asks | take | grade | difference | numbers |"
BY_SIZE = "| parameters | what was varied | grade there | at ten times the size |"
BY_BUDGET = "| you want | take | grade | bits per byte | numbers |"
LAYERS = "| task | 8 x 16 in two layers for 4 x 16 in four | the same cut without more heads |"
RELEASED = "| family | width | heads x rank (values) | heads x rank over width | what our rows"
GRADES = {"A", "B", "C"}

Cell = tuple[int, int, int]  # layers, heads, rank


def gap(task: str, cell: Cell, base: Cell) -> Mean:
    at = cells_of_map(f"{task}.jsonl")
    return difference(errors(at[cell]), errors(at[base]))


def best(task: str, depth: int) -> Cell:
    at = cells_of_map(f"{task}.jsonl")
    of_depth = [cell for cell in at if cell[0] == depth]
    return min(of_depth, key=lambda cell: mean(errors(at[cell])).mean)


def number_in(cell: str) -> str:
    return re.findall(r"[\d.]+", cell)[-1]


def test_differences_by_task_are_those_of_the_rows() -> None:
    rows = [row[3] for row in cells(PAGE, BY_TASK)]
    assert len(rows) == 9
    full, half = mean(counted(1, 1, 64, 0.03)).mean, mean(counted(1, 1, 32, 0.1)).mean
    assert agrees(re.findall(r"(\d+) times", rows[0])[0], half / full)
    check_difference(rows[1], gap("farthest", (1, 16, 4), (1, 1, 64)))
    five = mean(errors(fresh("rates.jsonl", 0.003)[5, 8, 32])).mean
    one = mean(counted(1, 8, 64, 0.03)).mean
    assert agrees(re.findall(r"(\d+) times", rows[2])[0], five / one)
    assert agrees(number_in(rows[3]), gap("recall", (1, 4, 16), (4, 4, 16)).mean)
    check_difference(rows[4].partition(": ")[2], gap("listops-quick", (2, 1, 8), (2, 8, 8)))
    for row, deep, shallow in ((rows[5], 2, 1), (rows[6], 4, 2)):
        found = gap("text", best("text", deep), best("text", shallow))
        check_difference(row.partition(": ")[2], found)
    for row, depth in ((rows[7], 4), (rows[8], 1)):
        found = gap("images", (depth, 16, 4), (depth, 1, 64))
        check_difference(row.partition(": ")[2], found)


def test_parameters_by_size_are_those_of_the_rows() -> None:
    maps, one_layer, nanochat = (row[0] for row in cells(PAGE, BY_SIZE))

    def ends(rows: list[dict]) -> list[int]:
        found = [row["params"] for row in rows]
        return [min(found), max(found)]

    def shown(cell: str) -> list[float]:
        return [float(text.replace(",", "")) for text in re.findall(r"[\d][\d,.]*\d", cell)]

    files = ("farthest", "recall", "text", "images")
    large = [ends(rows_of(f"map/{file}.jsonl"))[1] for file in files]
    small = ends(rows_of("map/listops-quick.jsonl"))[0]
    assert shown(maps) == pytest.approx([small, max(large)], rel=0.02)
    layer = [row for row in rows_of("fig1/rows.jsonl") if row["depth"] == 1]
    assert shown(one_layer.partition(" million")[0]) == pytest.approx(
        [end / 1e6 for end in ends(layer)], abs=0.005
    )
    assert shown(nanochat) == pytest.approx(
        [end / 1e6 for end in ends(rows_of("nanochat/rows.jsonl"))], abs=0.05
    )


def test_bits_by_budget_are_those_of_the_rows() -> None:
    summary = nanochat_heads.EXPERIMENT.summary(rows_of("nanochat/rows.jsonl"))
    arms = {(arm.family, arm.arm): arm for arm in summary}
    names = [
        ("split", "2 x 256"), ("split", "8 x 64"), ("query", "4 x 64 / 128"),
        ("latent", "latent 512"), ("kv", "4 x 128, 2 KV"), ("latent", "latent 170"),
    ]  # fmt: skip
    table = cells(PAGE, BY_BUDGET)
    assert len(table) == len(names)
    for row, name in zip(table, names, strict=True):
        found = arms[name].gap
        assert found is not None
        check_difference(row[3].partition(": ")[2] if ": " in row[3] else row[3], Mean(*found, 3))


def test_shares_of_the_cache_are_those_of_shape() -> None:
    style = {"dim": 512, "depth": 8, "num_heads": 4, "head_dim": 128, "causal": True}
    base = Shape(**style)
    half_rank = base.replace(head_dim=64, v_head_dim=128)
    half_heads = base.replace(num_kv_heads=2)
    latents = [base.replace(kv_lora_rank=width, qk_rope_head_dim=64) for width in (512, 170)]
    shares = {
        "three quarters": half_rank, "56 %": latents[0], "half": half_heads, "23 %": latents[1],
    }  # fmt: skip
    asked = [row[0].removesuffix(" of the cache") for row in cells(PAGE, BY_BUDGET)[2:]]
    assert asked == list(shares)
    for text, shape in shares.items():
        share = 100 * shape.kv_bytes(1) / base.kv_bytes(1)
        wanted = {"three quarters": "75", "half": "50"}.get(text, text.partition(" ")[0])
        assert agrees(wanted, share)


def test_half_of_the_layers_costs_what_the_rows_say() -> None:
    for task, more, control in cells(PAGE, LAYERS):
        check_difference(more, gap(task, (2, 8, 16), (4, 4, 16)))
        check_difference(control, gap(task, (2, 4, 16), (4, 4, 16)))


def test_released_shapes_are_those_of_the_configs() -> None:
    table = cells(PAGE, RELEASED)
    assert len(table) >= 8
    for family, width, sizes, inner, *_ in table:
        model = family.partition(" ")[0]
        part = "attention" if model in ("qwen3_next", "glm_moe_dsa") else None
        shape = Shape.from_hf({"model_type": model}, part=part)
        heads, rank = map(int, re.findall(r"(\d+) x (\d+)", sizes)[0])
        assert (shape.dim, shape.num_heads, shape.head_dim) == (int(width), heads, rank)
        values = re.findall(r"\((\d+)\)", sizes)
        assert shape.v_head_dim == int(values[0] if values else rank)
        latent = re.findall(r"latent (\d+)", sizes)
        if latent:
            assert shape.kv_lora_rank == int(latent[0])
        assert agrees(inner, shape.num_heads * shape.head_dim / shape.dim)


def test_longer_training_shrinks_what_cuts_cost_as_the_page_says() -> None:
    def cost(file: str) -> float:
        arms = nanochat_heads.EXPERIMENT.summary(rows_of(f"nanochat/{file}.jsonl"))
        (arm,) = [a for a in arms if a.family == "split" and a.rank == 32]
        assert arm.gap is not None
        return arm.gap[0]

    assert "Heads of 32 lost a third as much after three times the training" in TEXT
    assert cost("long") / cost("rows") == pytest.approx(1 / 3, abs=0.03)
    steps = [rows_of(f"nanochat/{file}.jsonl")[0]["steps"] for file in ("rows", "long")]
    assert steps[1] == 3 * steps[0]


def test_latents_without_the_norm_cost_nothing_found() -> None:
    arms = nanochat_heads.EXPERIMENT.summary(rows_of("nanochat/rows.jsonl"))
    low, high = next(a.gap for a in arms if a.family == "mla" and a.latent == 64 and a.gap)[1:]
    assert low is not None
    assert high is not None
    assert low < 0 < high


def test_statements_have_a_grade_and_a_link() -> None:
    for heading, grade, link in ((BY_TASK, 2, 4), (BY_BUDGET, 2, 4)):
        for row in cells(PAGE, heading):
            assert row[grade] in GRADES
            assert re.fullmatch(r"\[[^]]+\]\([a-z0-9-]+\.md#[a-z0-9-]+\)", row[link]), row
    for row in cells(PAGE, BY_SIZE):
        assert row[2][0] in GRADES
        assert row[3][0] in GRADES
        assert "](" in row[1]
    for row in cells(PAGE, RELEASED):
        assert row[-1] in GRADES
    released = TEXT.partition("## Where released")[2].partition("## What to do")[0]
    for item in re.findall(r"^- (.+)$", released, re.M):
        assert re.search(r"\([ABC], \[[^]]+\]\([^)]+\)\)", item), item


def test_sentences_have_no_number_that_nothing_computes() -> None:
    allowed = ("headwise's", "128 were not beaten", "heads of 128", "16.3", "transformers 5.22")
    text = TEXT
    for words in (*allowed, "Heads of 32"):
        text = text.replace(words, "")
    text = re.sub(r"^\d\. ", "", text, flags=re.M)
    assert not unclaimed(text, [])
