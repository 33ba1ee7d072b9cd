"""Rows that no experiment asked for have a section of their own."""

from pathlib import Path

from headwise import train
from headwise.experiments.other_runs import summary
from headwise.experiments.pages import sections_of, write_report
from headwise.experiments.rank_paper import fig1
from headwise.rows import Row
from headwise.store import Store


def rows_in_python() -> list[Row]:
    """Two shapes, three seeds each, trained by a call."""
    settings = fig1.EXPERIMENT.preset(
        "quick", dim=8, points=4, ffn_dim=8, ranks=(8, 2), depths=(1,), widths=(1,), seeds=3,
        steps=8, epoch=2, batch=8, held_out=64,
    )  # fmt: skip
    return train(fig1.runs(settings))


def test_rows_made_in_python_appear(tmp_path: Path) -> None:
    store, rows = Store(tmp_path / "mine"), rows_in_python()
    for row in rows:
        store.add(row)
    points = summary(rows)
    assert [(p.n, p.task) for p in points] == [(3, "farthest")] * 2
    assert {p.name.partition(",")[0] for p in points} == {"1 x 8", "4 x 2"}
    page = write_report(store).read_text()
    assert '<section id="other_runs"' in page
    assert all(row["id"] in page for row in rows)
    assert "has no experiment yet" not in page


def test_rows_of_an_experiment_are_shown_with_it_alone(tmp_path: Path) -> None:
    store, rows = Store(tmp_path / "mine"), rows_in_python()
    for row in rows:
        store.add(row)
    asked = {"command": "headwise run fig1", "preset": "quick", "settings": {}}
    store.note("fig1", {**asked, "ids": [row["id"] for row in rows[:3]]})
    sections, lost = sections_of(store)
    assert [(one.name, len(one.rows)) for one in sections] == [("fig1", 3), ("other_runs", 3)]
    assert lost == []
    store.note("fig1", {**asked, "ids": [row["id"] for row in rows]})
    assert [one.name for one in sections_of(store)[0]] == ["fig1"]
