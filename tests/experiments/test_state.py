"""How far an experiment is: rounds that are announced, stores that were stopped between them."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.experiment_rows import rows_with_losses

from headwise.cli.output import print_made
from headwise.experiments import find
from headwise.experiments.base import Experiment, Note
from headwise.experiments.pages import write_report
from headwise.experiments.runner import ROUNDS, Made, make
from headwise.experiments.state import State
from headwise.show.figure import HeatFigure
from headwise.store import Store

MAP, FIG1 = find("map"), find("fig1")
SMALL = {"dim": 8, "points": 4, "heads": (1, 2), "ranks": (4, 8), "base": (2, 2, 4, 32)}
TWO_ROUNDS = [
    ("map", SMALL),
    ("map", {**SMALL, "further": 2, "lrs": (0.001, 0.01, 0.1)}),
    ("leaner", {}),
    ("removable", {"further": 1}),
    ("nanochat_heads", {"families": ("split",)}),
    ("fig1", {"rates": (1.0, 0.3)}),
    ("fig1", {}),
    ("finetune", {}),
    ("thin_keys", {}),
]


# ---- the number of later runs is known in advance


def least_row(run: Any) -> dict[str, Any]:
    """What later rounds ask of a row; the best rate is the smallest one."""
    rate = run.recipe.lr if run.work == "train" else run.lr
    shared = {"id": run.id, "lr": rate, "status": "done"}
    return {**shared, "held_out": rate, "bits_per_byte": rate}


@pytest.mark.parametrize(("name", "changes"), TWO_ROUNDS)
def test_later_runs_are_as_many_as_announced(name: str, changes: dict[str, Any]) -> None:
    experiment = find(name)
    settings = experiment.preset("quick", **changes)
    assert experiment.later is not None
    assert experiment.then is not None
    least, most = experiment.later(settings)
    rows = [least_row(run) for run in experiment.runs(settings)]
    known, count = {row["id"] for row in rows}, 0
    for _ in range(ROUNDS):
        new = [run for run in experiment.then(settings, rows) if run.id not in known]
        if not new:
            break
        known |= {run.id for run in new}
        rows += [least_row(run) for run in new]
        count += len(new)
    assert least <= count <= most
    if "further" not in changes and name != "nanochat_heads":
        assert count == most


@pytest.mark.parametrize(
    "name", ["map", "leaner", "removable", "nanochat_heads", "finetune", "thin_keys"]
)
def test_experiment_of_several_rounds_announces_them(name: str) -> None:
    experiment = find(name)
    assert (experiment.then is None) == (experiment.later is None)


# ---- a store that was stopped


class Stopped(KeyboardInterrupt):
    """Ctrl-C at a line that is said."""


def made_so_far(
    store: Store, stop: str = "", keep: Sequence[int] = (0,), train: bool = True
) -> tuple[Made | None, list[str]]:
    """The small map in a store that has the rows of these seeds, stopped at a line that has this
    word."""
    settings = MAP.preset("quick", **SMALL)
    first = list(MAP.runs(settings))
    assert MAP.then is not None

    def loss_of(run: Any) -> float:
        return run.recipe.lr + run.shape.depth + 0.001 * run.seed

    rows = rows_with_losses(first, loss_of)
    rows += rows_with_losses(list(MAP.then(settings, rows)), loss_of)
    for row in rows:
        if row["seed"] in keep and store.row(row["id"]) is None:
            store.add({**row, "seconds": 1.0, "commit": "", "device": "cpu"})
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if stop and stop in text:
            raise Stopped

    options: dict[str, Any] = {"preset": "quick", "device": "cpu", "workers": 1, "report": False}
    try:
        return make(MAP, settings, store, say=say, train=train, **options), said
    except Stopped:
        return None, said


def state_of_page(store: Store) -> str:
    """What the page says about how far it is."""
    text = write_report(store).read_text()
    found = re.findall(r"preset <b>quick</b>: ([^<]*)</p>", text)
    assert len(found) == 1
    return str(found[0])


def test_rounds_are_counted_before_during_and_after(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    _, said = made_so_far(store, stop="next round")
    assert said[0].endswith("; 24 more follow these, 40 in all")
    assert state_of_page(store) == "16 of 40 runs finished: tuning only."
    made_so_far(store, stop="next round", keep=(0, 1))
    assert state_of_page(store) == "24 of 40 runs finished; 16 still to be made."
    made, _ = made_so_far(store, keep=(0, 1, 2, 3))
    assert made is not None
    assert state_of_page(store) == "40 of 40 runs finished."
    assert made.state.finished


def test_tuning_names_no_best_in_table_headline_or_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(tmp_path / "store")
    made_so_far(store, stop="next round")
    made, _ = made_so_far(store, train=False)
    assert made is not None
    answer = print_made(made, show=True)
    out = capsys.readouterr().out
    assert (
        "16 runs are shown of the 40 that these settings ask for; the others are not here: tuning "
        "only.\n"
    ) in out
    assert "farthest: tuning only, no best yet" in out
    assert out.count(" (tuning)  ") == 8
    assert (answer["missing"], answer["later"]) == (24, (0, 0))
    figure = made.figure
    assert isinstance(figure, HeatFigure)
    assert all(panel.title.endswith("(tuning only)") for panel in figure.panels)
    assert not any(panel.best or panel.alike for panel in figure.panels)
    assert "tuning only, no best yet" in write_report(store).read_text()


def test_page_of_an_older_store_does_not_call_the_tuning_finished(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    made_so_far(store, stop="next round")
    asked = store.experiments()["map"]
    first = [run.id for run in MAP.runs(MAP.preset("quick", **SMALL))]
    store.note(
        "map", {k: v for k, v in asked.items() if k not in ("later", "made")} | {"ids": first}
    )
    assert state_of_page(store) == (
        "16 of 16 runs of the first rounds finished; how many follow is not known: tuning only."
    )
    made_so_far(store, keep=(0, 1, 2, 3))
    asked = store.experiments()["map"]
    store.note("map", {key: value for key, value in asked.items() if key not in ("later", "made")})
    assert state_of_page(store) == "40 of 40 runs finished."


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (State(there=3, asked=3), "3 of 3 runs finished."),
        (State(there=0, asked=2, trains=False), "0 of 2 rows finished; 2 still to be made."),
        (
            State(there=3, asked=5, later=(4, 9)),
            "3 of 9 to 14 runs finished; 6 to 11 still to be made.",
        ),
        (
            State(there=261, asked=630, made=False),
            "261 runs are shown of the 630 that these settings ask for; the others are not here.",
        ),
        (
            State(there=0, asked=4, later=(8, 8), tuning=True),
            "0 of 12 runs finished; 12 still to be made.",
        ),
    ],
)
def test_state_in_words(state: State, words: str) -> None:
    assert state.in_words == words


# ---- notes of a preset


@pytest.mark.parametrize(
    ("changes", "said"),
    [({}, True), ({"seeds": 5}, True), ({"depths": (1,)}, False), ({"steps": 200}, False)],
)
def test_note_is_said_where_its_settings_hold(changes: dict[str, Any], said: bool) -> None:
    words = FIG1.note("quick", FIG1.preset("quick", **changes).plain())
    assert ("two layers are undertrained" in words) == said


def test_note_names_the_settings_that_it_is_about() -> None:
    paper = MAP.preset("paper")
    assert "size of no experiment" in MAP.note("paper", paper.changed(tasks=("recall",)).plain())
    assert MAP.note("paper", paper.changed(dim=128).plain()) == ""
    assert MAP.note("no preset", {}) == ""
    always: Experiment[Any, Any] = find("representation")
    assert isinstance(always.notes["quick"], Note)
    assert always.note("quick", {"anything": 1})
