"""Figures of points made by hand: every kind is drawn, and nothing is left out or stretched."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from support.fig1_points import CASES, point

from headwise.cli import main
from headwise.experiments.rank_paper.fig1_figures import figure as draw_fig1
from headwise.show.colours import GROUND
from headwise.show.figure import Line, LineFigure, LinePanel, has_hollow
from headwise.show.matplotlib_figure import save
from headwise.show.plotly_figure import plotly_figure


@pytest.mark.parametrize("case", CASES)
def test_figure_draws_every_kind_of_points(case: str, tmp_path: Path) -> None:
    points = sorted(CASES[case], key=lambda p: (p.protocol, p.layers, p.rank))
    description = draw_fig1(points)
    save(description, tmp_path / "a.png")
    page = plotly_figure(description)
    json.dumps(page, allow_nan=False)
    lines = sum(len(panel.lines) for panel in description.panels)
    drawn = [trace for trace in page["data"] if trace["meta"]["kind"] != "seed"]
    assert len(drawn) == lines
    assert page["hollow"] == has_hollow(description), "the legend says what is hollow"
    names = [entry["label"] for entry in page["legend"]["series"]]
    assert len(names) == len(set(names)), "a name is twice in the legend"
    numbers = {entry["number"] for entry in page["legend"]["series"]}
    assert {trace["meta"]["series"] for trace in page["data"]} <= numbers


def test_figure_panels_show_all_of_their_points_and_the_references_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib.pyplot as plt

    drawn: list[Any] = []
    monkeypatch.setattr(plt, "close", drawn.append)
    points = [
        point(r, value, layers=n)
        for n, low in ((1, 0.5), (2, 0.003))
        for r, value in ((64, low), (32, 0.9))
    ]
    save(draw_fig1(points), tmp_path / "a.png")
    ((low, high),) = {ax.get_ylim() for ax in drawn[0].axes}
    monkeypatch.undo()
    plt.close(drawn[0])
    assert low < 0.003
    assert high >= 2.0


def test_figure_axis_is_not_stretched_by_an_interval_that_reaches_zero() -> None:
    page = plotly_figure(draw_fig1(CASES["an interval that reaches zero"]))
    (bars,) = (trace for trace in page["data"] if "error_y" in trace)
    lows = [y - down for y, down in zip(bars["y"], bars["error_y"]["arrayminus"], strict=True)]
    highs = [y + up for y, up in zip(bars["y"], bars["error_y"]["array"], strict=True)]
    smallest = min(y for trace in page["data"] for y in trace["y"])
    assert lows == pytest.approx([0.6, smallest / 20]), "from low rank to high, out of the picture"
    assert page["layout"]["yaxis"]["autorangeoptions"]["minallowed"] == pytest.approx(
        math.log10(smallest / 2)
    ), "where that ends"
    assert highs == pytest.approx([0.8, 4.0])


def test_figure_draws_a_point_of_one_seed_hollow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib.pyplot as plt

    ends = {"low": [0.3, None, None], "high": [0.7, None, None]}
    line = Line(label="a", colour=0, x=[1, 2, 3], y=[0.5, 0.4, None], **ends)
    assert line.single == (False, True, False)
    assert Line(label="a", colour=0, x=[1], y=[0.5]).single == (False,), "no intervals at all"
    published = Line(label="a", colour=0, x=[1], y=[0.5], low=[None], style="dashed")
    assert published.single == (False,), "drawn without intervals"

    figure = LineFigure(
        title="t", x_label="x", y_label="y", panels=[LinePanel(title="p", lines=[line])]
    )
    drawn: list[Any] = []
    monkeypatch.setattr(plt, "close", drawn.append)
    save(figure, tmp_path / "a.png")
    monkeypatch.undo()
    plt.close(drawn[0])
    (ax,) = drawn[0].axes
    hollow = [mark for mark in ax.get_lines() if mark.get_markerfacecolor() == "white"]
    assert [(list(mark.get_xdata()), list(mark.get_ydata())) for mark in hollow] == [([2], [0.4])]
    legend = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert legend == ["a", "hollow: one seed"]
    page = plotly_figure(figure)
    (trace,) = page["data"]
    inside, colour = trace["marker"]["color"], trace["marker"]["line"]["color"]
    assert inside == [colour, GROUND, colour]
    assert page["hollow"]


def test_figure_of_several_seeds_has_nothing_hollow() -> None:
    line = Line(label="a", colour=0, x=[1, 2], y=[0.5, 0.4], low=[0.3, 0.2], high=[0.7, 0.6])
    figure = LineFigure(
        title="t", x_label="x", y_label="y", panels=[LinePanel(title="p", lines=[line])]
    )
    (trace,) = plotly_figure(figure)["data"]
    assert isinstance(trace["marker"].get("color", ""), str)


@pytest.mark.parametrize("kind", ["pdf", "svg", "png"])
def test_figure_of_a_paper_is_as_wide_as_its_text(kind: str, tmp_path: Path) -> None:
    figure = dataclasses.replace(draw_fig1(CASES["five panels"]), caption="what it shows")
    first, second = tmp_path / f"a.{kind}", tmp_path / f"b.{kind}"
    save(figure, first, paper=True)
    save(figure, second, paper=True)
    content = first.read_bytes()
    assert content == second.read_bytes()
    if kind == "pdf":
        found = re.search(rb"/MediaBox \[ 0 0 ([\d.]+) ", content)
        assert found
        assert 5.2 * 72 < float(found[1]) < 5.7 * 72
        assert b"/FontFile2" in content, "whole letters"
        assert b"STIX" in content
    elif kind == "svg":
        text = content.decode()
        found = re.search(r'width="([\d.]+)pt"', text)
        assert found
        assert 5.2 * 72 < float(found[1]) < 5.7 * 72
        assert figure.title not in text, "title and caption are the paper's"
        assert "what it shows" not in text


def test_draw_by_format_is_in_a_papers_style(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = str(Path(__file__).parents[2] / "results/fig1/quick.jsonl")
    here = tmp_path / "rows.jsonl"
    here.write_text(Path(rows).read_text())
    assert main(["draw", "fig1", str(here), "--format", "svg"]) == 0
    drawn = (tmp_path / "fig1.svg").read_text()
    assert "equal parameters" not in drawn
    assert main(["draw", "fig1", str(here), "--output", str(tmp_path / "screen.svg")]) == 0
    assert "equal parameters" in (tmp_path / "screen.svg").read_text()
    capsys.readouterr()
    assert main(["draw", "fig1", str(here), "--format", "pdf", "--output", "a.png"]) == 2
    assert "--format pdf needs --output to end in .pdf, got a.png" in capsys.readouterr().err
