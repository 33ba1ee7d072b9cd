"""What the smaller figures say to their questions: the sentence on the rows that are kept, and on
rows that were made to say something else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headwise.experiments import find
from headwise.store import read_rows

ROWS = Path(__file__).parents[2] / "results"
Rows = list[dict[str, Any]]


def said(name: str, rows: Rows) -> str:
    experiment = find(name)
    return experiment.answered(experiment.summary(rows))


def kept(file: str) -> Rows:
    return read_rows(ROWS / f"{file}.jsonl")


# The figures in the sentences are those of the accounts in results/*/README.md.
SENTENCES = {
    ("features", "features/rows"): (
        "An error of 0.19 takes 512 heads at d=8, 2,048 at d=16, 8,192 at d=32 and 16,384 at d=64 "
        "(of the numbers tried; keys: unit)"
    ),
    ("conditioning", "conditioning/rows"): (
        "At random weights, with the most heads the condition number is lower than with the fewest "
        "in 13 of 14 comparisons, by factors of 1.6 to 670, and higher in 1"
    ),
    ("length", "length/rows"): (
        "Heads of rank 1 err 11 times as much as heads of rank 64 with 4 points, and 46 times with "
        "16 (data that never repeat, one seed each)"
    ),
    ("positions", "positions/rows"): (
        "In 1 layer rank 1 errs by 0.81 with its best positions (concatenated), and 68 times as "
        "much as full rank (data that never repeat, one seed each)"
    ),
    ("regression", "regression/rows"): (
        "At width 48 and depth 12, 2 heads of rank 24 err least (1 not told apart from it); 16 "
        "heads of rank 3 err 9.3 times as much (3 seeds)"
    ),
    ("regression", "regression/short"): (
        "At width 48 and depth 12, no best of 1 to 16 heads is found (3 seeds)"
    ),
    ("learned", "fig1/rows"): (
        "It learns nearly a negative multiple of the identity: its scores are off by 0.044 degrees "
        "with 1 head, 0.73 degrees with 8 heads and 1.1 degrees with 64 heads (a random matrix is "
        "off by 90)"
    ),
}


@pytest.mark.parametrize(("name", "file"), SENTENCES)
def test_answer_of_the_rows_that_are_kept(name: str, file: str) -> None:
    assert said(name, kept(file)) == SENTENCES[name, file]


def test_representation_says_how_weights_grow() -> None:
    experiment = find("representation")
    settings = experiment.preset("quick", dims=(3, 5), angles=4, degree=9)
    rows = [experiment.make(curve, "cpu") for curve in experiment.runs(settings)]
    peaks = {row["dim"]: row["peak"] for row in rows if row["form"] == "corrected"}
    assert said("representation", rows) == (
        f"The largest weight is {peaks[3]:.3g} at d=3 and {peaks[5]:.3g} at d=5, in the corrected "
        "form with harmonics up to degree 9"
    )


def changed(file: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Rows:
    """Kept rows with a fault planted in each."""
    return [{**row, **change(row)} for row in kept(file)]


def test_features_without_a_second_dimension_claim_no_growth() -> None:
    assert said("features", [row for row in kept("features/rows") if row["dim"] == 8]) == ""


def test_conditioning_says_when_more_heads_are_no_better() -> None:
    """The same draws with the numbers of heads in the other order."""
    rows = kept("conditioning/rows")
    most = max(row["heads"] for row in rows)
    turned = said("conditioning", [{**row, "heads": most + 1 - row["heads"]} for row in rows])
    assert "lower than with the fewest in 1 of 14 comparisons, and higher in 13" in turned


def test_length_speaks_of_replayed_data_only_without_others() -> None:
    rows = [row for row in kept("length/rows") if row["protocol"] == "replay"]
    assert said("length", rows).endswith("(replay, one seed each)")
    assert said("length", [row for row in rows if row["head_dim"] == 1]) == "", "nothing beside it"


def test_length_leaves_out_models_that_learned_nothing() -> None:
    def unlearned(row: dict[str, Any]) -> dict[str, Any]:
        return {"held_out": row["zero_error"]} if row["task_points"] == 4 else {}

    found = said("length", changed("length/rows", unlearned))
    assert "46 times as much as heads of rank 64 with 16 points (" in found


def test_positions_beside_none_and_beside_a_stream_as_wide() -> None:
    rows = kept("positions/small-0.008")
    assert "than without positions" in said("positions", rows)
    assert "than with a stream as wide" in said("positions", rows)
    bare = [row for row in rows if row["positions"] not in ("none", "room")]
    assert "without positions" not in said("positions", bare)

    def as_without(row: dict[str, Any]) -> dict[str, Any]:
        low = row["head_dim"] == 1
        return {"held_out": 0.6 + 0.01 * (row["seed"] % 3)} if low else {}

    doubtful = said("positions", changed("positions/small-0.008", as_without))
    assert "not told apart from that without positions" in doubtful


def test_learned_says_how_far_from_the_identity() -> None:
    def turned(by: float) -> str:
        def change(row: dict[str, Any]) -> dict[str, Any]:
            found = row.get("score_angle")
            return {"score_angle": [[180 - by] * 5 for _ in found]} if found else {}

        return said("learned", changed("fig1/rows", change))

    assert "learns something that leans to a negative multiple" in turned(30)
    assert "learns no negative multiple" in turned(88)
