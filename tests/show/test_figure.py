"""A figure is a value: it survives JSON, and what cannot be drawn dies when it is described."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from headwise.errors import UsageError
from headwise.show.colours import GROUND
from headwise.show.figure import (
    Figure,
    HeatFigure,
    HeatPanel,
    Line,
    LineFigure,
    LinePanel,
    Mark,
    Range,
    RangeFigure,
    RangePanel,
    Reference,
    from_json,
    has_panels,
    to_json,
)
from headwise.show.figure import Path as CellPath
from headwise.show.matplotlib_figure import save
from headwise.show.plotly_figure import plotly_figure

LINES = LineFigure(
    title="error, $5",
    x_label="rank",
    y_label="error",
    columns=2,
    x_scale="linear",
    share_y=False,
    reference=Reference(label="predicting zero", y=1.0),
    caption="five points",
    panels=[
        LinePanel(
            title="d^2.5",
            lines=[
                Line(
                    label="ours",
                    colour=3,
                    x=[1, 2, 3],
                    y=[0.5, None, 0.25],
                    low=[0.4, None, -1.0],
                    high=[0.6, None, 0.5],
                    text=["a", "", "c"],
                ),
                Line(label="theirs", colour=11, style="dashed", x=[1, 3], y=[0.7, 0.3]),
            ],
        ),
        LinePanel(
            title="d",
            lines=[
                Line(label="closed form", colour=0, style="line", x=[2], y=[0.1]),
                Line(label="statistic", colour=0, style="dots", x=[2], y=[0.2]),
            ],
        ),
    ],
)
HEAT = HeatFigure(
    title="loss",
    x_label="rank",
    y_label="heads",
    x_names=["4", "8", "16"],
    y_names=["1", "2"],
    panels=[
        HeatPanel(
            title="2 layers",
            cells=[[0.5, 0.25, None], [1.0, 0.75, 20.0]],
            least=0.25,
            most=20.0,
            paths=[CellPath(label="split", colour=1, x=[1, 0], y=[0, 1])],
            marks=[Mark(label="the rank paper", symbol="star", x=1, y=0)],
            best=[(1, 0)],
            alike=[(0, 0), (1, 1)],
            single=[(1, 1)],
        )
    ],
)
RANGES = RangeFigure(
    title="differences",
    columns=2,
    panels=[
        RangePanel(
            title="bits",
            x_label="more than the base",
            ranges=[
                Range(name="8 x 8", label="split", colour=0, mean=0.1, low=-0.1, high=0.3),
                Range(name="8 x 8", label="kv", colour=1, mean=0.2, hollow=True),
            ],
        ),
        RangePanel(title="recall", x_label="more", ranges=[]),
    ],
)
FIGURES = {"lines": LINES, "heat": HEAT, "ranges": RANGES}


@pytest.mark.parametrize("kind", FIGURES)
def test_figure_survives_json_and_is_drawn_the_same(kind: str, tmp_path: Path) -> None:
    figure = FIGURES[kind]
    again = from_json(json.loads(json.dumps(to_json(figure), allow_nan=False)))
    assert again == figure
    assert to_json(figure)["kind"] == kind
    assert plotly_figure(again) == plotly_figure(figure)
    save(figure, tmp_path / "a.png")
    save(again, tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


@pytest.mark.parametrize("kind", FIGURES)
def test_figure_with_another_title_is_another_picture(kind: str, tmp_path: Path) -> None:
    other = dataclasses.replace(FIGURES[kind], title="another")
    save(FIGURES[kind], tmp_path / "a.png")
    save(other, tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "b.png").read_bytes()


def test_figure_floor_is_half_its_smallest_value() -> None:
    assert LINES.floor == 0.05
    assert [LINES.leaves_picture(panel) for panel in LINES.panels] == [True, False]
    assert LINES.drawn_low(-1.0) == pytest.approx(0.005)
    linear = dataclasses.replace(LINES, y_scale="linear")
    assert linear.drawn_low(-1.0) == -1.0, "a linear axis has no floor"


def test_figure_ticks_are_thinned_when_there_are_many() -> None:
    def figure(count: int) -> LineFigure:
        xs = list(range(count))
        line = Line(label="l", colour=0, x=xs, y=xs)
        panel = LinePanel(title="", lines=[line])
        return LineFigure(title="", x_label="", y_label="", panels=[panel])

    assert figure(9).ticks == list(range(9))
    assert figure(11).ticks == [0, 2, 4, 6, 8, 10]


def test_has_panels_means_something_in_every_one() -> None:
    assert [has_panels(figure) for figure in (LINES, HEAT, RANGES)] == [True, True, False]
    assert not has_panels(dataclasses.replace(LINES, panels=[]))


BAD = {
    "y without a value per x": (
        lambda: Line(label="l", colour=0, x=[1, 2], y=[1.0]),
        "y of line 'l' needs a value per x: 2, got 1",
    ),
    "low without a value per x": (
        lambda: Line(label="l", colour=0, x=[1, 2], y=[1.0, 2.0], low=[0.5], high=[1.5, 2.5]),
        "low of line 'l' needs a value per x: 2, got 1",
    ),
    "unknown style": (
        lambda: Line(label="l", colour=0, x=[1], y=[1.0], style="dotted"),  # pyrefly: ignore
        "unknown style 'dotted'; did you mean dots",
    ),
    "unknown scale": (
        lambda: dataclasses.replace(LINES, x_scale="logs"),
        "unknown x_scale 'logs'; did you mean log",
    ),
    "cells of another size": (
        lambda: dataclasses.replace(HEAT, x_names=["4", "8"]),
        "cells of panel '2 layers' must be 2 rows of 2, got 2 of 3",
    ),
    "unknown kind": (
        lambda: from_json({"kind": "tree", "panels": []}),
        "unknown kind of figure 'tree'; choices: heat, lines, ranges",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_figure_that_cannot_be_drawn_dies_when_it_is_described(case: str) -> None:
    describe, message = BAD[case]
    with pytest.raises(UsageError) as caught:
        describe()
    assert str(caught.value).startswith(message)


def test_figure_of_no_panels_is_drawn(tmp_path: Path) -> None:
    empty: list[Figure] = [
        dataclasses.replace(HEAT, panels=[]),
        dataclasses.replace(RANGES, panels=[]),
        dataclasses.replace(LINES, panels=[]),
    ]
    for i, figure in enumerate(empty):
        save(figure, tmp_path / f"{i}.png")
        assert plotly_figure(figure)["data"] == []


def test_frames_stand_around_the_best_and_what_is_alike() -> None:
    page = plotly_figure(HEAT)
    frames = [shape for shape in page["layout"]["shapes"] if shape["type"] == "rect"]
    assert [(round(f["x0"] + 0.47), round(f["y0"] + 0.46)) for f in frames] == [
        (0, 0),
        (1, 1),
        (1, 0),
    ]
    assert ["dash" in frame["line"] for frame in frames] == [True, True, False]
    (heat,) = (trace for trace in page["data"] if trace["type"] == "heatmap")
    cells = [[re.sub("<[^>]+>", "", cell) for cell in row] for row in heat["text"]]
    assert cells == [["0.500", "0.250", ""], ["1.000", "(0.750)", "20"]]
    plain = dataclasses.replace(HEAT.panels[0], best=(), alike=())
    page = plotly_figure(dataclasses.replace(HEAT, panels=[plain]))
    assert not page["layout"]["shapes"], "the smallest number alone is no best cell"


def test_heat_panel_of_an_older_store_is_drawn_without_frames() -> None:
    value = json.loads(json.dumps(to_json(HEAT)))
    for name in ("best", "alike", "single"):
        del value["panels"][0][name]
    assert not plotly_figure(from_json(value))["layout"]["shapes"]


def test_one_seed_is_hollow_and_the_legend_says_so() -> None:
    line = Line(
        label="held out",
        colour=0,
        x=[1, 2, 4],
        y=[0.5, 0.4, None],
        low=[0.4, None, None],
        high=[0.6, None, None],
    )
    assert line.single == (False, True, False)
    crosses = Line(label="statistic", colour=0, style="dots", x=[1], y=[0.1])
    assert crosses.single == (False,)
    panel = LinePanel(title="", lines=[line, crosses])
    figure = LineFigure(title="", x_label="", y_label="", panels=[panel])
    page = plotly_figure(figure)
    held_out, _ = page["data"]
    assert [colour == GROUND for colour in held_out["marker"]["color"]] == [False, True, False]
    assert page["hollow"]
    assert plotly_figure(RANGES)["hollow"]
    inside = [trace["marker"]["color"] for trace in plotly_figure(RANGES)["data"]]
    assert [colour == GROUND for colour in inside] == [False, True]
