"""The experiment on condition numbers: its presets, its draws, its page; mistakes are one line."""

import contextlib
import dataclasses
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.page_data import page_data

from headwise.cli import main
from headwise.errors import UsageError
from headwise.experiments import find
from headwise.experiments.leaner_paper import conditioning
from headwise.experiments.leaner_paper.conditioning import EXPERIMENT
from headwise.experiments.leaner_paper.known_kappas import known_kappas
from headwise.experiments.pages import write_report
from headwise.experiments.settings import settings_of
from headwise.show.figure import to_json
from headwise.show.matplotlib_figure import save
from headwise.show.plotly_figure import plotly_figure
from headwise.store import Store
from headwise.theory.gaussian import gaussian_kappa

# ---- the experiment

TINY = [
    "heads=1,2",
    "gaussian_heads=1,2,3",
    "tokens=7",
    "dim=6",
    "head_dim=3",
    "small_tokens=3",
    "small_dim=4",
    "small_head_dim=2",
]
TINY += ["small_heads=1,2,4", "weights=0.5,1/sqrt(D)"]


def rows_of(settings: conditioning.ConditioningSettings) -> list[dict[str, Any]]:
    return [
        json.loads(json.dumps(conditioning.make(case, "cpu"), allow_nan=False))
        for case in conditioning.runs(settings)
    ]


def test_conditioning_has_all_parts() -> None:
    assert find("conditioning") is EXPERIMENT
    assert not EXPERIMENT.trains
    text = conditioning.__doc__ or ""
    assert "headwise run conditioning --preset paper" in text
    assert "Expected" in text
    assert EXPERIMENT.question.endswith("?")
    assert {heading for _, heading in EXPERIMENT.columns} >= {"known"}
    assert not any("published" in heading for _, heading in EXPERIMENT.columns), (
        "none of these numbers is the authors'"
    )


def test_conditioning_presets_hold_the_known_sizes() -> None:
    known = known_kappas()
    assert len(known) == 18 + 2 * 32 + 3 * 8
    keys = ("kind", "policy", "weights", "tokens", "dim", "heads", "head_dim")
    for preset, missing in (
        ("paper", 8),
        ("quick", 8 + 2 * 20),
    ):  # eight Gaussian rows are of 64 tokens
        cases = conditioning.runs(conditioning.PRESETS[preset])
        assert len({case.id for case in cases}) == len(cases)
        made = {tuple(getattr(case, key) for key in keys) for case in cases}
        assert len(set(known) - made) == missing
        assert made <= set(known)
        more = conditioning.runs(
            dataclasses.replace(
                conditioning.PRESETS[preset], seeds=conditioning.PRESETS[preset].seeds + 1
            )
        )
        assert {case.id for case in cases} < {case.id for case in more}, (
            "more seeds keep the rows that are there"
        )


def test_conditioning_draws_by_sizes_and_seed() -> None:
    split, widen = (
        conditioning.Matrix("outputs", policy, "0.5", 7, 6, 2, 3, 0)
        for policy in ("split", "widen")
    )
    one, other = conditioning.make(split, "cpu"), conditioning.make(widen, "cpu")
    assert one["id"] != other["id"]
    assert one["kappa"] == other["kappa"]
    assert conditioning.make(dataclasses.replace(split, seed=1), "cpu")["kappa"] != one["kappa"]
    assert (
        conditioning.make(dataclasses.replace(split, kind="centred"), "cpu")["k"] == one["k"] == 6
    )


def test_conditioning_points_headline_and_figure_of_other_sizes(tmp_path: Path) -> None:
    rows = rows_of(settings_of(EXPERIMENT, "quick", TINY, seeds=2))
    points = conditioning.summary(rows)
    json.dumps([dataclasses.asdict(p) for p in points], allow_nan=False)
    assert conditioning.summary(rows[::-1]) == points
    assert sum(p.n for p in points) == len(rows)
    assert all(p.known is p.near is None for p in points), (
        "known values stand only beside their own sizes"
    )
    by = {(p.kind, p.policy, p.weights, p.tokens, p.heads): p for p in points}
    three = by["gaussian", "widen", "", 7, 3]
    assert (three.k, three.n, three.closed_form) == (
        7,
        8,
        pytest.approx(gaussian_kappa(7, 9)),
    )
    of = [r["kappa"] for r in rows if r["kind"] == "gaussian" and r["heads"] == 3]
    assert three.kappa == pytest.approx(sum(of) / 8)
    outputs = by["outputs", "split", "0.5", 7, 2]
    of = [
        r["kappa"]
        for r in rows
        if (r["kind"], r["policy"], r["weights"], r["tokens"], r["heads"])
        == ("outputs", "split", "0.5", 7, 2)
    ]
    assert outputs.kappa == pytest.approx(math.sqrt(of[0] * of[1]))
    assert outputs.low < outputs.kappa < outputs.high
    assert (outputs.k, by["centred", "split", "0.5", 7, 2].k) == (6, 6)
    low = by["after", "widen", "1/sqrt(D)", 3, 1]
    assert (low.kappa, low.shown, low.rank, low.k) == (None, "infinite", 6, 12)
    for p in points:
        assert (p.worst_head is not None) == (p.kind == "before")
        assert all(isinstance(p.cell(key), str) for key, _ in EXPERIMENT.columns)
    for p in points:
        if p.kind == "before":
            assert p.worst_head <= p.kappa * (1 + 1e-9)
            if p.heads == 1:
                assert p.worst_head == pytest.approx(p.kappa, rel=1e-9)
    lines = conditioning.headline(points)
    assert len(lines) == 1 + 2 * 2 * 2 + 3 * 2
    assert any(
        line.startswith(
            "Jacobian after W_O, 3 tokens, width 4, std 1/sqrt(D), widen: kappa infinite with 1 "
            "of 2, "
        )
        for line in lines
    )
    description = conditioning.figure(points)
    json.dumps(to_json(description), allow_nan=False)
    assert len(description.panels) == 6
    shown = {y for panel in description.panels for line in panel.lines for y in line.y}
    assert {p.kappa for p in points} <= shown
    save(description, tmp_path / "a.png")
    plotly_figure(description)
    assert conditioning.summary([]) == []
    assert conditioning.headline([]) == []


def test_conditioning_shows_known_values_beside_their_sizes() -> None:
    settings = settings_of(
        EXPERIMENT,
        "paper",
        ["heads=12", "small_heads=4", "gaussian_heads=1,4", "weights=0.02"],
        seeds=2,
    )
    points = conditioning.summary(rows_of(settings))
    known = {(p.kind, p.policy, p.tokens, p.heads): p for p in points}
    assert known["gaussian", "widen", 197, 4].known == 14.368
    assert (
        known["outputs", "split", 197, 12].known
        == known["outputs", "widen", 197, 12].known
        == 143.3
    )
    assert known["centred", "split", 197, 12].known == 7.45
    assert known["before", "widen", 8, 4].known == 1792.3
    assert known["after", "split", 8, 4].known == 1023.7
    assert known["outputs", "widen", 8, 4].known == 13.2
    assert all(p.near is True for p in points)
    lines = conditioning.headline(points)
    assert (
        lines[-1]
        == f"{len(points)} of {len(points)} near the known values, 0 more within what draws scatter"
    )
    dashed = [
        line
        for panel in conditioning.figure(points).panels
        for line in panel.lines
        if line.style == "dashed"
    ]
    assert {y for line in dashed for y in line.y} == {p.known for p in points}


def test_conditioning_states_what_is_far_from_the_known_value() -> None:
    case = conditioning.Matrix("outputs", "widen", "0.02", 197, 768, 12, 64, 0)

    def rows(*kappas: float | None) -> list[dict[str, Any]]:
        size = {
            "stable_rank": 1.1,
            "effective_rank": 100.0,
            "rank": 197,
            "k": 197,
            "worst_head": None,
        }
        return [
            {**dataclasses.asdict(case), **size, "seed": i, "kappa": kappa}
            for i, kappa in enumerate(kappas)
        ]

    for kappa, near in ((143.3 * 1.19, True), (143.3 * 1.21, False), (143.3 * 0.79, False)):
        (point,) = conditioning.summary(rows(kappa, kappa * 1.0001))
        assert point.near is near
        assert len(conditioning.headline([point])) == (2 if near else 3)
    assert conditioning.headline(conditioning.summary(rows(200.0, 200.1)))[-1] == (
        "  farther: outputs of heads, 197 tokens, width 768, std 0.02, widen, 12 heads: 200 "
        "(199.4 to 200.7) against 143.3"
    )
    (wild,) = conditioning.summary(rows(100.0, 900.0))
    assert wild.near is False
    assert (
        conditioning.headline([wild])[-1]
        == "0 of 1 near the known values, 1 more within what draws scatter"
    )
    (once,) = conditioning.summary(rows(150.0, None))
    assert (once.kappa, once.shown, once.near) == (None, "infinite", None), (
        "one draw without full rank"
    )
    (alone,) = conditioning.summary(rows(150.0))
    assert (alone.near, alone.low, alone.spread, alone.shown) == (
        True,
        None,
        None,
        "150",
    )


def test_conditioning_from_the_command(tmp_path: Path) -> None:
    words = [
        "run",
        "conditioning",
        "--device",
        "cpu",
        "--seeds",
        "1",
        "--store",
        str(tmp_path / "s"),
        "--json",
        "--set",
        *TINY,
    ]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main(words) == 0, err.getvalue()
    answer = json.loads(out.getvalue().splitlines()[-1])
    assert answer["made"] == answer["runs"] == 3 * 4 + 2 * 2 * 2 * 2 + 2 * 3 * 3 * 4
    assert Path(answer["figure"]).read_bytes().startswith(b"\x89PNG")
    assert conditioning.NOTE.text in out.getvalue()
    page = write_report(Store(tmp_path / "s"), tmp_path / "page.html").read_text()
    assert EXPERIMENT.question in page
    # Columns without a value are left out: nothing is known of these sizes.
    (section,) = page_data(page)["sections"]
    assert "closed form" in section["points"]["headings"]
    assert "near known" not in section["points"]["headings"]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main(words) == 0
    assert json.loads(out.getvalue().splitlines()[-1])["made"] == 0


BAD: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: settings_of(EXPERIMENT, "quick", ["heads=5"]),
        "heads must divide the width 768 where it is split, got 5",
    ),
    (
        lambda: settings_of(EXPERIMENT, "quick", ["small_heads=3"]),
        "small_heads must divide the width 16 where it is split, got 3",
    ),
    (lambda: settings_of(EXPERIMENT, "quick", ["heads=0"]), "heads must be at least 1, got 0"),
    (lambda: settings_of(EXPERIMENT, "quick", ["tokens=1"]), "tokens must be at least 2, got 1"),
    (
        lambda: settings_of(EXPERIMENT, "quick", ["policies=splt"]),
        "unknown policy 'splt'; did you mean split",
    ),
    (
        lambda: settings_of(EXPERIMENT, "quick", ["weights=big"]),
        "weights must be positive numbers or 1/sqrt(D), got 'big'",
    ),
    (
        lambda: settings_of(EXPERIMENT, "quick", ["weights=-1"]),
        "weights must be positive numbers or 1/sqrt(D), got '-1'",
    ),
    (
        lambda: settings_of(EXPERIMENT, "quick", ["weights=nan"]),
        "weights must be positive numbers or 1/sqrt(D), got 'nan'",
    ),
    (lambda: settings_of(EXPERIMENT, "quick", ["seeds=0"]), "seeds must be at least 1, got 0"),
]


@pytest.mark.parametrize(
    ("act", "text"), BAD, ids=[f"{i}: {text}" for i, (_, text) in enumerate(BAD)]
)
def test_mistake_is_one_line_with_rule_and_value(act: Callable[[], Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        act()
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)
