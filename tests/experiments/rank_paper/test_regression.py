"""The experiment on linear regression in context: presets, points, figures, a run end to end. The
task itself: test_regression.py."""

import dataclasses
import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import started
from support.small_runs import bits

from headwise.cli import main
from headwise.experiments.rank_paper import regression
from headwise.experiments.settings import settings_of
from headwise.model import transformer
from headwise.show.figure import Line, LineFigure, to_json
from headwise.show.matplotlib_figure import save
from headwise.show.plotly_figure import plotly_figure
from headwise.store import Store
from headwise.tasks import Regression


def test_paper_presets_are_the_papers():
    """Fact sheet d.10: 12 layers of width 48 cut into 1, 2, 4, 8, 16 heads; Garg's recipe."""
    for preset, sizes in (
        ("paper", {(48, 12, h) for h in (1, 2, 4, 8, 16)}),
        ("garg", {(64, 3, 2), (128, 6, 4), (256, 12, 8)}),
    ):
        runs = regression.runs(regression.PRESETS[preset])
        assert {(r.shape.dim, r.shape.depth, r.shape.num_heads) for r in runs} == sizes
        for run in runs:
            s, r, t = run.shape, run.recipe, run.task
            assert s.num_heads * s.head_dim == s.dim
            assert (s.ffn_dim, s.activation, s.norm, s.norm_at, s.causal, s.positions) == (
                4 * s.dim,
                "gelu",
                "layer",
                "pre",
                True,
                "additive",
            )
            assert (s.input_dim, s.output_dim, s.num_positions) == (20, 1, 82)
            assert t == Regression(20, 41, 2000, 5, 11)
            assert (r.steps, r.batch, r.lr, r.schedule, r.weight_decay, r.beta1, r.beta2) == (
                500_000,
                64,
                1e-4,
                "constant",
                0.0,
                0.9,
                0.999,
            )
            assert (r.init, r.protocol) == ("normal", "stream")


def rows_of(
    settings: Any, profiles: dict[tuple[int, int], list[float] | None]
) -> list[dict[str, Any]]:
    """Rows by (heads, seed) with these profiles; None: it diverged."""
    rows = []
    for run in regression.runs(settings):
        profile = profiles[run.shape.num_heads, run.seed]
        shape, task = (
            run.spec()["shape"],
            {f"task_{k}": v for k, v in run.spec()["task"].items() if k != "name"},
        )
        row = {
            **shape,
            **task,
            **run.spec()["recipe"],
            "params": run.shape.params,
            "seed": run.seed,
        }
        if profile is None:
            rows.append({**row, "status": "diverged", "held_out": None})
        else:
            rows.append(
                {
                    **row,
                    "status": "done",
                    "held_out": sum(profile) / len(profile),
                    "held_out_profile": profile,
                }
            )
    return rows


PAPER = settings_of(regression.EXPERIMENT, "paper", ["shapes=48x12x2,48x12x1,48x12x4"], seeds=2)


def paper_rows() -> list[dict[str, Any]]:
    falls = {
        seed: [20.0 - 0.4 * k + seed for k in range(41)] for seed in range(2)
    }  # 20 and 21 at first, 4 and 5 at the end
    half = [10.0] * 41
    return rows_of(
        PAPER,
        {
            (1, 0): falls[0],
            (1, 1): falls[1],
            (2, 0): half,
            (2, 1): None,
            (4, 0): None,
            (4, 1): None,
        },
    )


def test_point_is_the_error_after_all_pairs_over_the_dimension():
    one, two, four = regression.summary(paper_rows())
    assert [(p.heads, p.rank, p.n, p.diverged) for p in (one, two, four)] == [
        (1, 48, 2, 0),
        (2, 24, 1, 1),
        (4, 12, 0, 2),
    ]
    assert one.held_out == pytest.approx((4 + 5) / 2 / 20)
    assert one.squared == pytest.approx(4.5)
    assert one.high - one.held_out == pytest.approx(
        12.7062047 * 0.05 / 2
    )  # Student's t of two seeds
    assert one.average == pytest.approx((12 + 13) / 2 / 20)
    assert one.profile == pytest.approx([(20.5 - 0.4 * k) / 20 for k in range(41)])
    assert [one.published, two.published, four.published] == [0.0421, 0.0308, 0.0817]
    assert (two.held_out, two.low, two.high, two.profile) == (
        0.5,
        None,
        None,
        [0.5] * 41,
    )
    assert four.held_out is four.squared is four.average is None
    assert four.profile == []
    assert regression.headline([one, two, four]) == [
        "width 48, 12 layers: no best; 1 head of rank 48, error 0.2250 ± 0.3177 (2 seeds); 2 heads "
        "2.2 times, by one seed",
    ]


class Least:
    """Instead of a decoder: exact from the pairs, in some of the coordinates."""

    def __init__(self, scale: list[float]) -> None:
        self.scale = torch.tensor(scale, dtype=torch.float64)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        assert state == {}

    def __call__(self, inputs: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        x, y = inputs[:, ::2].double(), inputs[:, 1::2, 0].double()
        w = torch.linalg.pinv(x[:, :-1]) @ y[:, :-1, None]
        out = torch.full((*inputs.shape[:2], 1), math.nan, dtype=torch.float64)
        out[:, -2] = (x[:, -1:] * self.scale @ w)[:, 0]
        return out, {}


def test_slopes_show_which_coordinates_count(monkeypatch):
    (run,) = regression.runs(
        settings_of(regression.EXPERIMENT, "quick", ["shapes=16x3x2", "dim=4", "points=9"], seeds=1)
    )
    scale = [1.0, 0.0, 0.25, -1.0]
    monkeypatch.setattr(transformer, "build", lambda shape: Least(scale))
    assert regression.probe(run, {})["slopes"] == pytest.approx(scale, abs=2e-4)
    short = settings_of(
        regression.EXPERIMENT,
        "quick",
        ["shapes=16x3x2", "dim=4", "points=4", "first_points=4"],
        seeds=1,
    )
    assert regression.probe(regression.runs(short)[0], {}) == {}


def test_coordinates_that_are_used_are_counted_where_they_were_probed():
    rows = paper_rows()
    assert {p.used for p in regression.summary(rows)} == {None}
    for row in rows:
        row["slopes"] = [1.0] * (14 + 2 * row["seed"]) + [0.1] * (6 - 2 * row["seed"])
    assert [p.used for p in regression.summary(rows)] == [15.0, 14.0, None]


def test_tasks_of_several_sizes_are_points_of_their_own():
    shorter = settings_of(
        regression.EXPERIMENT, "paper", ["shapes=48x12x1", "points=8", "first_points=8"], seeds=2
    )
    rows = rows_of(shorter, {(1, seed): [3.0] * 8 for seed in range(2)})
    for both in (paper_rows() + rows, rows + paper_rows()):
        points = [p for p in regression.summary(both) if p.heads == 1]
        assert sorted((p.task_points, p.n, len(p.profile)) for p in points) == [
            (8, 2, 8),
            (41, 2, 41),
        ]


def test_published_values_stand_beside_the_paper_s_sizes_alone():
    for changes in ("points=40", "dim=19"), ("shapes=48x11x1",), ("shapes=64x12x1",):
        settings = settings_of(regression.EXPERIMENT, "paper", list(changes), seeds=1)
        count = settings.points
        profiles: dict[tuple[int, int], list[float] | None] = {
            (h, 0): [1.0] * count for h in (1, 2, 4, 8, 16)
        }
        assert {p.published for p in regression.summary(rows_of(settings, profiles))} == {None}


def lines_of(description: LineFigure, seeds: int = 1) -> dict[str, Line]:
    """By label; of a shape's seeds, drawn one by one, the last."""
    (panel,) = description.panels
    found = {line.label: line for line in panel.lines}
    assert len(found) >= len(panel.lines) - (seeds - 1), "two lines have one label"
    return found


def test_figures_hold_the_points_and_draw(tmp_path):
    points = regression.summary(paper_rows())
    by_rank, by_pairs = regression.figure(points), regression.by_examples(points)
    for i, description in enumerate((by_rank, by_pairs)):
        json.dumps(to_json(description), allow_nan=False)
        for line in lines_of(description, 2).values():
            assert len(line.x) == len(line.y)
            assert all(y > 0 for y in line.y), "a log axis has no zero"
        save(description, tmp_path / f"{i}.png")
        assert (tmp_path / f"{i}.png").stat().st_size > 5000
        assert plotly_figure(description)["data"]
    ranks = lines_of(by_rank)
    assert set(ranks) == {
        "width 48, 12 layers",
        "single seeds, width 48, 12 layers",
        "published, divided by d",
    }
    single = ranks["single seeds, width 48, 12 layers"]
    assert sorted(zip(single.x, single.y, strict=True)) == [
        (48, pytest.approx(4 / 20)),
        (48, pytest.approx(5 / 20)),
    ]
    assert sorted(
        zip(ranks["width 48, 12 layers"].x, ranks["width 48, 12 layers"].y, strict=True)
    ) == [
        (24, 0.5),
        (48, pytest.approx(0.225)),
    ]
    beside = ranks["published, divided by d"]
    assert sorted(zip(beside.x, beside.y, strict=True)) == [
        (24, pytest.approx(0.00154)),
        (48, pytest.approx(0.002105)),
    ]
    pairs = lines_of(by_pairs, 2)
    assert set(pairs) == {"1 head of rank 48", "2 heads of rank 24", "least squares"}
    one = [line for line in by_pairs.panels[0].lines if line.label == "1 head of rank 48"]
    assert [line.x for line in one] == [tuple(range(41))] * 2
    assert [[*line.y] for line in one] == points[0].profiles
    assert [(a + b) / 2 for a, b in zip(*points[0].profiles, strict=True)] == pytest.approx(
        points[0].profile
    )
    many = [dataclasses.replace(p, profiles=p.profiles * 6) for p in points]
    several = lines_of(regression.by_examples(many))
    assert (several["1 head of rank 48"].y, several["1 head of rank 48"].low) == (
        tuple(points[0].profile),
        tuple(points[0].profile_low),
    )
    exact = Regression(20, 41).baseline_profile()["least squares"]
    assert pairs["least squares"].x == tuple(range(20))
    assert pairs["least squares"].y == pytest.approx(tuple(e / 20 for e in exact if e))


def test_depths_and_protocols_are_kept_apart(tmp_path):
    settings = settings_of(
        regression.EXPERIMENT,
        "quick",
        ["shapes=16x3x1,16x2x1,16x3x2", "protocols=stream,replay"],
        seeds=1,
    )
    points = regression.summary(rows_of(settings, {(1, 0): [1.0] * 8, (2, 0): [2.0] * 8}))
    assert len(points) == 6
    for draw in (regression.figure, regression.by_examples):
        save(draw(points), tmp_path / "a.png")
    assert set(lines_of(regression.figure(points))) == {
        f"width 16, {n} layers, {p}" for n in (2, 3) for p in ("stream", "replay")
    }
    assert len(lines_of(regression.by_examples(points))) == 7
    assert len(set(regression.headline(points))) == 4


# ---- end to end

TINY = [
    "dim=2",
    "points=3",
    "shapes=16x1x1,16x1x2",
    "steps=600",
    "epoch=2",
    "batch=16",
    "held_out=128",
    "evals=2",
    "curriculum=100",
    "first_dim=1",
    "first_points=1",
]


def words(store: Path, *more: str) -> list[str]:
    sets = [word for change in TINY for word in ("--set", change)]
    return [
        "run",
        "regression",
        "--device",
        "cpu",
        "--seeds",
        "2",
        "--store",
        str(store),
        "--workers",
        "1",
        "--json",
        *sets,
        *more,
    ]


def test_regression_runs_from_the_command_line_and_resumes_after_a_kill(tmp_path, capsys):
    """kill -9 between a checkpoint and the end; then the same command, in this process, and one
    that nobody killed."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    with started(
        [sys.executable, "-m", "headwise", *words(killed, "--checkpoint-every", "0")]
    ) as process:
        end = time.monotonic() + 60
        while len(list(killed.glob("runs/*/checkpoint.safetensors"))) < 4:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end, "no checkpoint came"
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert Store(killed).rows() == []
    answers = []
    for store in (killed, whole):
        assert main(words(store)) == 0
        out = capsys.readouterr().out
        answers.append(json.loads(out.splitlines()[-1]))
        assert "width 16, 1 layer: " in out
        assert (store / "regression.png").stat().st_size > 5000
        assert "Linear regression in context" in (store / "report.html").read_text()
    rows, expected = ({row["id"]: row for row in Store(store).rows()} for store in (killed, whole))
    assert {name: bits(row) for name, row in rows.items()} == {
        name: bits(row) for name, row in expected.items()
    }
    assert len(rows) == 4
    assert all(row["resumed"] == 1 for row in rows.values())
    assert answers[0]["points"] == answers[1]["points"]
    assert [(p["heads"], p["n"], len(p["profile"])) for p in answers[0]["points"]] == [
        (1, 2, 3),
        (2, 2, 3),
    ]
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    assert main(["draw", "regression", str(lines), "--view", "examples"]) == 0
    assert (tmp_path / "regression-examples.png").stat().st_size > 5000
    assert (
        len(
            Store(killed).frame(
                "select id, held_out_profile, input_dim from rows where output_dim = 1"
            )
        )
        == 4
    )
