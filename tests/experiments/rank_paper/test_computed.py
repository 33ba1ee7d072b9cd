"""Summaries, headlines and figures of the theory's experiments, on rows made by hand."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from support.checks import row_of

from headwise.experiments.rank_paper import features as features_experiment
from headwise.experiments.rank_paper import representation as representation_experiment
from headwise.experiments.rank_paper import theory as theory_experiment
from headwise.show.figure import Line, LineFigure, LinePanel, Reference
from headwise.show.matplotlib_figure import save
from headwise.show.plotly_figure import plotly_figure
from headwise.theory import constructions, harmonics

# ---- summaries, headlines, figures on rows made by hand


def layers(kind: str, heads: int, errors: list[float], dim: int = 8) -> list[dict[str, Any]]:
    return [
        {"draw": kind, "dim": dim, "heads": heads, "error": e, "floor": 0.1, "seed": i}
        for i, e in enumerate(errors)
    ]


def test_features_summary_headline_and_figure() -> None:
    rows = [
        *layers("published", 512, [0.174, 0.176]),
        *layers("published", 1, [0.9, 0.9001]),
        *layers("published", 3, [0.5, 0.6]),
    ]
    rows += [
        *layers("cos-uniform", 512, [0.185, 0.1856]),
        *layers("cos-uniform", 1, [0.6]),
        *layers("cos-uniform", 2, [0.66, 0.65]),
    ]
    points = features_experiment.summary(rows)
    found = {(p.kind, p.heads): p for p in points}
    assert len(points) == len(found) == 6
    point = found["published", 512]
    assert (point.published, point.recomputed, point.draw) == (
        0.175,
        None,
        "shortened, as published",
    )
    assert (point.held_out, point.n, point.floor) == (pytest.approx(0.175), 2, 0.1)
    assert point.low < 0.174 < 0.176 < point.high
    assert point.spread == pytest.approx(math.sqrt(2) * 1e-3)
    assert (found["cos-uniform", 512].recomputed, found["cos-uniform", 512].published) == (
        0.1853,
        None,
    )
    assert (found["cos-uniform", 1].low, found["cos-uniform", 1].spread) == (None, None)
    assert found["published", 3].published is None, "the figure has no such point"
    published, farther, unit = features_experiment.headline(points)
    assert published.startswith(
        "keys shortened, as published: 1 of 2 points within 3 % of the axis of the published "
        "figure, 0 more"
    )
    assert farther == "  farther: d=8, 1 heads: 0.9001 against 0.6855 (n=2)"
    assert unit.startswith(
        "keys unit: 2 of 2 points within 3 % of the axis of the values known for unit keys, 0 more"
    )
    drawn = features_experiment.figure(points)
    assert [p.title for p in drawn.panels] == [
        "keys as in the published code",
        "keys of length 1",
    ]
    assert drawn.y_scale == "linear"
    solid, dashed = drawn.panels[0].lines
    assert (solid.label, solid.x) == ("d=8", (1, 3, 512))
    assert (dashed.label, dashed.x, dashed.y) == (
        "published, d=8",
        (1, 512),
        (0.6855, 0.175),
    )
    assert features_experiment.headline([]) == []


def test_representation_summary_headline_and_figure() -> None:
    curve = {"angle": [-math.pi, 0.0, math.pi], "size": [9.0, 0.2, 9.0]}
    rows = [
        {"dim": 4, "form": "published", "degree": 49, "peak": 1.485e8, **curve},
        {"dim": 4, "form": "corrected", "degree": 49, "peak": 2.65e6, **curve},
        {"dim": 4, "form": "corrected", "degree": 9, "peak": 1.0, **curve},
        {"dim": 5, "form": "published", "degree": 49, "peak": 1.0, **curve},
    ]
    points = representation_experiment.summary(rows)
    assert [(p.published, p.known) for p in points] == [
        (1.35e8, 1.34919e8),
        (None, 2.64954e6),
        (None, None),
        (None, None),
    ]
    assert representation_experiment.headline(points[:2]) == [
        "d=4: published form 1.485e+08, 10.0% from the figure; corrected 2.65e+06"
    ]
    assert representation_experiment.headline(points[:1]) == [
        "d=4: published form 1.485e+08, 10.0% from the figure; corrected nan"
    ]
    drawn = representation_experiment.figure(points)
    assert [len(panel.lines) for panel in drawn.panels] == [2, 2]
    line = drawn.panels[0].lines[0]
    assert (line.label, line.style, line.y) == ("d=4, degree 49", "line", (9.0, None, 9.0))
    assert drawn.x_scale == "linear"


def test_theory_summary_headline_and_figure() -> None:
    at = {"d": 8, "H": 1_000_001, "x": 0.123456, "N": [3, 6, 12]}
    good = row_of(what="this", at=at, kind="least", bound=1.0, measured=2.0)
    bad = row_of(what="that", at={"d": 8}, kind="equal", bound=1.0, measured=2.0, allowed=0.5)
    points = theory_experiment.summary(
        [{"name": "one", "checks": [good]}, {"name": "two", "checks": [bad]}]
    )
    assert [p.group for p in points] == ["one", "two"]
    assert points[0].parameters == "d=8, H=1,000,001, x=0.1235, N=3..12"
    assert theory_experiment.headline(points) == [
        "Fact 9: 1 of 2 hold, least margin -1 (that)",
        "  FAILS: that at d=8: 2 against 1",
    ]
    assert theory_experiment.headline(points[:1]) == [
        "Fact 9: 1 of 1 hold, least margin 0.5 (this)"
    ]
    drawn = theory_experiment.figure(points)
    floor, votes = ({line.label: line for line in panel.lines} for panel in drawn.panels)
    assert set(floor) == set(votes) == {"d=8", "d=16", "d=64"}
    at = floor["d=8"].x.index(64)
    assert floor["d=8"].y[at] == harmonics.singular_floor(8, 64)
    assert votes["d=8"].y[at] == constructions.vote_error(8, 65)
    assert votes["d=64"].y[0] == constructions.vote_error(64, 1)


def test_summary_separates_rows_by_everything_that_shapes_them() -> None:
    settings = features_experiment.Settings(dims=(8, 16), heads=(1, 64), seeds=2)
    runs = features_experiment.runs(settings)
    assert len(runs) == 2 * 2 * (100 + 64)
    curves = representation_experiment.runs(representation_experiment.PRESETS["quick"])
    groups = [
        theory_experiment.Check(name, seed) for name in theory_experiment.NAMES for seed in (0, 1)
    ]
    groups.append(theory_experiment.Check("plane", 0, theory_experiment.VERSION + 1))
    ids = [value.id for value in (*runs, *curves, *groups)]
    assert len(set(ids)) == len(ids)
    assert runs[0].spec() == {
        "experiment": "features",
        "dim": 8,
        "heads": 1,
        "draw": "cos-uniform",
        "seed": 0,
    }
    assert [
        c.name
        for c in theory_experiment.runs(
            theory_experiment.Settings(only=("plane", "kernels", "plane"))
        )
    ] == ["kernels", "plane"]


# ---- figures


def test_figure_with_linear_axes_plain_lines_and_no_reference(tmp_path: Path) -> None:
    line = Line(label="a", colour=0, style="line", x=[-1.0, 0.0, 1.0], y=[3.0, 1.0, 3.0])
    linear = LineFigure(
        title="t",
        x_label="x",
        y_label="y",
        x_scale="linear",
        y_scale="linear",
        columns=2,
        panels=[LinePanel(title="p", lines=[line])],
    )
    drawn = plotly_figure(linear)
    assert drawn["data"][0]["mode"] == "lines"
    assert "error_y" not in drawn["data"][0]
    assert drawn["layout"]["shapes"] == []
    assert drawn["layout"]["xaxis"]["type"] == drawn["layout"]["yaxis"]["type"] == "linear"
    assert "tickvals" not in drawn["layout"]["xaxis"]
    low, high = [2.9, None, 2.8], [3.1, None, 3.2]
    above = dataclasses.replace(line, style="solid", x=[1, 2, 4], low=low, high=high)
    plain = dataclasses.replace(
        linear,
        x_scale="log",
        y_scale="log",
        panels=[LinePanel(title="p", lines=[above])],
        reference=Reference(label="r", y=0.5),
    )
    logarithmic = plotly_figure(plain)
    assert logarithmic["layout"]["xaxis"]["type"] == logarithmic["layout"]["yaxis"]["type"] == "log"
    assert logarithmic["layout"]["xaxis"]["tickvals"] == [1, 2, 4]
    assert [shape["y0"] for shape in logarithmic["layout"]["shapes"]] == [0.5]
    assert logarithmic["data"][0]["mode"] == "lines+markers"
    mixed = [dataclasses.replace(plain, **{axis: "linear"}) for axis in ("x_scale", "y_scale")]
    for i, figure in enumerate((linear, plain, *mixed)):
        save(figure, tmp_path / f"{i}.svg")
    sizes = [(tmp_path / f"{i}.svg").read_text() for i in range(4)]
    assert len(set(sizes)) == 4, "each option shows"
