"""What experiments say to their questions: a sentence that the rows bear out."""

from pathlib import Path
from typing import Any

import pytest

from headwise.cli import main
from headwise.experiments import EXPERIMENTS, find
from headwise.experiments.rank_paper import fig1
from headwise.show.report import answer_of
from headwise.store import read_rows

ROWS = Path(__file__).parents[2] / "results"
FILES = {
    "fig1": "fig1/rows",
    "dimension": "dimension/rows",
    "length": "length/rows",
    "positions": "positions/small-0.008",
    "regression": "regression/rows",
    "features": "features/rows",
    "conditioning": "conditioning/rows",
    "map": "map/farthest",
    "leaner": "map/leaner-text",
    "removable": "map/removable",
    "nanochat_heads": "nanochat/rows",
    "finetune": "finetune/rows",
    "thin_keys": "thin_keys/rows",
}


def said(name: str, rows: list[dict[str, Any]]) -> str:
    experiment = find(name)
    points = experiment.summary(rows)
    return answer_of(experiment.answered(points), experiment.headline(points))


@pytest.mark.parametrize("name", FILES)
def test_answer_is_a_sentence(name: str) -> None:
    answer = said(name, read_rows(ROWS / f"{FILES[name]}.jsonl"))
    assert answer.endswith(".")
    assert answer[0] == answer[0].upper()
    assert 20 < len(answer) < 420
    assert "None" not in answer


def test_experiments_without_rows_say_so() -> None:
    for name in EXPERIMENTS:
        assert answer_of(find(name).answered([]), []) == "There is no answer yet."


def rows_of(full: list[float], half: list[float], **more: Any) -> list[dict[str, Any]]:
    """The rows of one place of the main figure, of heads of full and of half rank."""
    base = read_rows(ROWS / "fig1/quick.jsonl")
    place = [r for r in base if r["depth"] == 1 and r["num_heads"] * r["head_dim"] == 16]
    out = []
    for rank, errors in ((16, full), (8, half)):
        like = next(row for row in place if row["head_dim"] == rank)
        out += [
            {**like, "seed": i, "id": f"{rank}-{i}", "held_out": e, **more}
            for i, e in enumerate(errors)
        ]
    return out


@pytest.mark.parametrize(
    ("full", "half", "wanted"),
    [
        ([0.1, 0.11, 0.09], [0.5, 0.52, 0.48], "Fewer heads of full rank: 5 times less error"),
        ([0.5, 0.52, 0.48], [0.1, 0.11, 0.09], "Twice as many of half rank do better"),
        ([0.3, 0.5, 0.4], [0.4, 0.2, 0.6], "No difference is found between heads of full rank"),
        ([0.1], [0.4], "in the one comparison at equal parameters (one seed each)"),
        ([0.9996] * 3, [0.9995] * 3, "Nothing can be compared: the runs have only learned to"),
    ],
    ids=["better", "worse", "not told apart", "one seed", "learned nothing"],
)
def test_answer_of_fig1_claims_what_seeds_tell_apart(
    full: list[float], half: list[float], wanted: str
) -> None:
    assert wanted in said("fig1", rows_of(full, half, zero_error=1.0))


def test_answer_of_fig1_is_of_fresh_data_where_there_are_any() -> None:
    fresh = rows_of([0.1, 0.11, 0.09], [0.5, 0.52, 0.48])
    replayed = rows_of([0.5, 0.52, 0.48], [0.1, 0.11, 0.09], protocol="replay")
    assert "Fewer heads of full rank: 5 times" in said("fig1", [*fresh, *replayed])
    points = fig1.summary([*fresh, *replayed])
    assert "stream" in fig1.headline(points)[0], "and its findings come first"


def test_terminal_ends_with_the_sentence_that_the_page_begins_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, store = str(ROWS / "fig1/quick.jsonl"), str(tmp_path / "store")
    assert main(["run", "fig1", "--no-train", "--rows", rows, "--store", store]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    page = (tmp_path / "store" / "report.html").read_text()
    assert f'<p class="answer">{last}</p>' in page
    assert page.index('class="question"') < page.index(last) < page.index("<figure")
    assert main(["report", "--store", store]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == last
    drawn = str(tmp_path / "a.svg")
    assert main(["draw", "fig1", rows, "--output", drawn]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == last
