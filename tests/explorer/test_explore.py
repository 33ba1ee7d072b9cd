"""`headwise explore` and `headwise.explore`: what they start from, which rows make which maps, and
what they refuse."""

import json
from pathlib import Path
from typing import Any

import pytest

import headwise
from headwise.cli import main
from headwise.errors import UsageError
from headwise.experiments.measured import DEFAULTS, measured
from headwise.explorer.explore import DECODER
from headwise.shape import Shape
from headwise.store import Store, read_rows

RESULTS = Path(__file__).parents[2] / "results"


def page_of(path: Path) -> dict[str, Any]:
    """What the page was given."""
    line = next(line for line in path.read_text().splitlines() if line.startswith("const PAGE"))
    return json.loads(line.removeprefix("const PAGE = ").removesuffix(";"))


def shape_of(path: Path) -> Shape:
    return Shape.of(page_of(path)["shape"])


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "explorer.html"


def test_page_starts_from_a_decoder_unless_given(output: Path) -> None:
    assert headwise.explore(output=output) == output
    assert shape_of(output) == DECODER
    assert page_of(output)["at"] == {"context": 2048, "batch": 1, "dtype": "bf16"}


def test_page_starts_from_a_shape_or_a_config(output: Path) -> None:
    shape = Shape(dim=96, depth=5, num_heads=(6, 3), windows=(7, 0), positions="additive",
                  num_positions=640, vocab_size=11, causal=True)  # fmt: skip
    headwise.explore(shape, output=output)
    assert shape_of(output) == shape
    assert page_of(output)["at"]["context"] == 640
    config = {"model_type": "gpt2", "n_layer": 3, "n_embd": 96, "n_head": 4}
    headwise.explore(config, output=output)
    assert shape_of(output) == Shape.from_hf(config)


def test_page_starts_from_the_best_shape_of_rows(output: Path) -> None:
    headwise.explore(output=output, rows=RESULTS / "map/recall.jsonl")
    found = page_of(output)["tasks"]
    assert [task["name"] for task in found] == ["recall"]
    best = min(found[0]["cells"], key=lambda cell: cell["loss"])
    assert shape_of(output) == Shape.of(DEFAULTS | best["shape"])


def test_command_writes_the_page(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--set", "dim=96", "depth=2", "num_heads=6", "--context", "33", "--json"]
    assert main(["explore", *words, "--output", str(output)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"page": str(output)}
    assert shape_of(output) == Shape(dim=96, depth=2, num_heads=6)
    assert page_of(output)["at"]["context"] == 33


def test_rows_of_a_store_are_those_of_its_files(tmp_path: Path, output: Path) -> None:
    rows = read_rows(RESULTS / "map/farthest-quick.jsonl")
    store = Store(tmp_path / "store")
    for row in rows:
        store.add(row)
    headwise.explore(output=output, store=tmp_path / "store")
    from_store = page_of(output)["tasks"]
    headwise.explore(output=output, rows=RESULTS / "map/farthest-quick.jsonl")
    key = lambda cell: (cell["depth"], cell["num_heads"], cell["head_dim"])  # noqa: E731
    for task in (*from_store, *page_of(output)["tasks"]):
        task["cells"].sort(key=key)
    assert from_store == page_of(output)["tasks"]


def test_cells_have_losses_of_seeds_that_did_not_choose_the_rate() -> None:
    (task,) = measured(read_rows(RESULTS / "map/text.jsonl"))
    rows = [row for row in read_rows(RESULTS / "map/text.jsonl") if row["seed"] > 0]
    for cell in task["cells"]:
        mine = [
            row["held_out"] for row in rows
            if (row["depth"], row["num_heads"], row["head_dim"])
            == (cell["depth"], cell["num_heads"], cell["head_dim"])
        ]  # fmt: skip
        assert cell["n"] == len(mine) == 3
        assert cell["loss"] == pytest.approx(sum(mine) / 3)
    assert [cell["mark"] for cell in task["cells"]].count("best") == 1


@pytest.mark.parametrize(
    ("file", "among"),
    [
        ("fig1/rows.jsonl", "protocol stream"),
        ("map/leaner-text.jsonl", "ffn_dim 256"),
        ("positions/rows.jsonl", "protocol replay"),
    ],
)
def test_runs_that_differ_in_more_are_maps_apart(file: str, among: str) -> None:
    rows = read_rows(RESULTS / file)
    maps = measured(rows)
    assert len(maps) > 1
    assert any(among in found["name"] for found in maps)
    for found in maps:
        places = [(c["depth"], c["num_heads"], c["head_dim"]) for c in found["cells"]]
        assert len(set(places)) == len(places)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rows": RESULTS / "speed/infer.jsonl"}, "holds a row, line 1, that cannot be"),
        ({"rows": RESULTS / "features/rows.jsonl"}, "no measured shape among these rows"),
        ({"store": "nowhere"}, "there is no store at 'nowhere'"),
        ({"output": "/nowhere/there.html"}, "there is no folder '/nowhere'"),
        ({"output": "/"}, "output names a file to write"),
        ({"context": 0}, "context must be"),
        ({"dtype": "fp12"}, "unknown dtype 'fp12'; did you mean"),
    ],
)
def test_bad_input_is_refused_in_one_line(given: dict[str, Any], said: str, output: Path) -> None:
    with pytest.raises(UsageError, match=said):
        headwise.explore(**{"output": output, **given})


def test_markup_in_names_stays_text(output: Path) -> None:
    row = read_rows(RESULTS / "map/farthest-quick.jsonl")[0]
    hostile = "</script><img src=x onerror=alert(1)>"
    (output.parent / "rows.jsonl").write_text(json.dumps(row | {"task": hostile}))
    headwise.explore(output=output, rows=output.parent / "rows.jsonl", name=hostile)
    assert "<img" not in output.read_text()
