"""An experiment in a file of one's own: same parts, run by its path."""

import json
from pathlib import Path

import pytest

from headwise.cli import main

OWN = '''
"""Does a window hurt? A sketch of one's own experiment."""
from dataclasses import dataclass

from headwise import Farthest, Recipe, Run, Shape
from headwise.experiments.base import Experiment, Settings
from headwise.experiments.points import Measured, interval
from headwise.show.figure import Line, LineFigure, LinePanel
from headwise.stats import group


@dataclass(frozen=True, kw_only=True)
class Windows(Settings):
    seeds: int = 2
    windows: tuple[int, ...] = (0, 2)
    steps: int = 6


@dataclass(frozen=True, kw_only=True)
class Window(Measured):
    window: int


def runs(settings):
    shape = Shape(dim=16, depth=1, num_heads=2, ffn_dim=16)
    recipe = Recipe(steps=settings.steps, epoch=3, batch=16, held_out=32)
    return [
        Run(shape.replace(windows=(w,)), Farthest(16, 4), recipe, seed)
        for w in settings.windows
        for seed in range(settings.seeds)
    ]


def probe(run, weights):
    return {"weights_seen": len(weights)}


def summary(rows):
    rows = [{**row, "window": row["windows"][0]} for row in rows]
    return [
        Window(window=window, n=len(same), **interval([row["held_out"] for row in same]))
        for (window,), same in group(rows, "window").items()
    ]


def headline(points):
    return [f"window {p.window}: {p.held_out:.3f}" for p in points]


def figure(points):
    line = Line(
        label="error", colour=0, x=[1 + p.window for p in points], y=[p.held_out for p in points]
    )
    panel = LinePanel(title="all", lines=[line])
    return LineFigure(title="windows", x_label="1 + window", y_label="error", panels=[panel])


EXPERIMENT = Experiment(
    name="windows",
    question="Does a window of keys hurt?",
    about="a window of keys against none",
    presets={"quick": Windows()},
    columns=(("window", "window"), ("held_out", "error"), ("n", "n")),
    runs=runs,
    summary=summary,
    headline=headline,
    figure=figure,
    probe=probe,
)
'''


def test_own_experiment_runs_prints_draws_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "windows.py"
    own.write_text(OWN)
    code = main(["run", str(own), "--store", str(tmp_path / "store"), "--workers", "2", "--json"])
    out = capsys.readouterr().out
    assert code == 0
    answer = json.loads(out.splitlines()[-1])
    assert answer["experiment"] == "windows"
    assert [p["window"] for p in answer["points"]] == [0, 2]
    assert Path(answer["figure"]).stat().st_size > 1000
    assert "Does a window of keys hurt?" in Path(answer["report"]).read_text()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "QUESTION = 'x'",
            "needs one value EXPERIMENT = Experiment(...); it has 0 experiments",
        ),
        ("EXPERIMENT = 3", "must be an Experiment, got 3"),
        (
            "from headwise.experiments import find\nEXPERIMENT = find('fig1')",
            "an experiment of your own needs a name of its own; fig1 in ",
        ),
        ("1 / 0", "cannot be loaded: ZeroDivisionError: division by zero"),
        ("def broken(:", "cannot be loaded: SyntaxError"),
    ],
)
def test_file_that_is_no_experiment_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    own = tmp_path / "broken.py"
    own.write_text(text)
    assert main(["run", str(own), "--store", str(tmp_path / "store")]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
    assert not (tmp_path / "store").exists()
    assert main(["run", str(tmp_path / "nowhere.py")]) == 2
    assert "there is no experiment file at" in capsys.readouterr().err
