"""The rank paper's theory as commands: every check in a store, the tables, figures and pages made
of them, and faults that are gone."""

import contextlib
import dataclasses
import io
import json
import math
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from support.tolerance import STANDARD_ERRORS, seeded

from headwise.cli import main
from headwise.execute import sweep
from headwise.experiments import EXPERIMENTS, find
from headwise.experiments.pages import write_report
from headwise.experiments.rank_paper import features as features_experiment
from headwise.experiments.rank_paper import representation as representation_experiment
from headwise.experiments.rank_paper import theory as theory_experiment
from headwise.show.figure import Line, LineFigure, LinePanel, Reference
from headwise.show.matplotlib_figure import save
from headwise.show.plotly_figure import plotly_figure
from headwise.store import Store
from headwise.theory import constructions, features, harmonics
from headwise.theory.checks import CHECKS
from headwise.theory.checks.check import Check

PEAKS = {
    4: (1.35e8, 1.34919e8, 2.64954e6),
    6: (6.47e12, 6.46526e12, 8.33028e9),
    8: (6.03e16, 6.02866e16, 7.78061e12),
}


# ---- everything in one store, each group of checks made once


class Made(NamedTuple):
    path: Path
    answers: dict[str, dict[str, Any]]
    texts: dict[str, str]


def command(*words: str) -> tuple[int, str, str]:
    """A command in this process: exit code, standard output, standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    return code, out.getvalue(), err.getvalue()


FEATURES = [
    "run",
    "features",
    "--device",
    "cpu",
    "--seeds",
    "2",
    "--set",
    "heads=1,2,4",
    "--set",
    "dims=8",
]
REPRESENTATION = ["run", "representation", "--device", "cpu", "--set", "angles=41"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """All checks with seed 0, a few layers of random heads, and u(t)."""
    path, answers, texts = tmp_path_factory.mktemp("theory") / "store", {}, {}
    for name, words in (
        ("features", FEATURES),
        ("representation", REPRESENTATION),
        ("theory", ["theory"]),
    ):
        code, out, err = command(*words, "--store", str(path), "--json")
        assert code == 0, err
        *lines, last = out.splitlines()
        answers[name], texts[name] = json.loads(last), "\n".join(lines)
    return Made(path, answers, texts)


@pytest.fixture
def copy(made: Made, tmp_path: Path) -> Path:
    """The store to play with."""
    return Path(shutil.copytree(made.path, tmp_path / "store"))


KEYS = {
    "statement",
    "what",
    "parameters",
    "kind",
    "bound",
    "measured",
    "low",
    "high",
    "allowed",
    "margin",
    "holds",
    "source",
}


@pytest.mark.parametrize("name", theory_experiment.NAMES)
def test_check_holds_and_states_what_it_compared(name: str, made: Made) -> None:
    ids = made.answers["theory"]["checks"]
    (row,) = [r for r in Store(made.path).rows() if r.get("name") == name]
    assert row["status"] == "done"
    assert row["seed"] == 0
    assert row["version"] == theory_experiment.VERSION
    assert len(row["checks"]) == sum(p["group"] == name for p in ids) >= 5
    for check in row["checks"]:
        assert set(check) - {"residual"} == KEYS
        assert check["holds"] is True, check
        assert check["margin"] >= 0
        assert check["kind"] in ("equal", "least", "most")
        assert check["source"] in ("paper", "derived", "published")
        assert check["statement"]
        assert check["what"]
        assert isinstance(check["parameters"], dict)
        assert (check["low"] is None) == (check["high"] is None)
        if check["kind"] == "equal":
            assert abs(check["measured"] - check["bound"]) <= check["allowed"]
            assert check["margin"] <= 1
        else:
            assert check["allowed"] is None
            assert (
                (check["measured"] >= check["bound"])
                if check["kind"] == "least"
                else (check["measured"] <= check["bound"])
            )
        if check["low"] is not None:
            assert check["low"] <= check["measured"] <= check["high"]


def test_checks_are_the_experiments_groups() -> None:
    assert tuple(CHECKS) == theory_experiment.NAMES
    assert {"theory", "features", "representation"} <= set(EXPERIMENTS)


def test_checks_of_the_same_seed_are_the_same(made: Made) -> None:
    (row,) = [r for r in Store(made.path).rows() if r.get("name") == "plane"]
    assert json.loads(json.dumps([check.row() for check in CHECKS["plane"](0)])) == row["checks"]
    assert [check.measured for check in CHECKS["plane"](1)] != [
        r["measured"] for r in row["checks"]
    ]


def row_of(kind: Any, bound: float, measured: float, **more: Any) -> dict[str, Any]:
    """The row of one check of a statement that nobody made."""
    named = {"statement": "Fact 9", "what": "this", "at": {"d": 3}, "source": "paper", **more}
    return Check(kind=kind, bound=bound, measured=measured, **named).row()


def test_check_margins() -> None:
    half = row_of("equal", 1.0, 1.25, allowed=0.5)
    assert (half["margin"], half["holds"], half["low"], half["high"], half["allowed"]) == (
        0.5,
        True,
        None,
        None,
        0.5,
    )
    assert row_of("equal", 1.0, 1.0, allowed=1e-12)["margin"] == 1
    edge = row_of("equal", 1.0, 0.5, allowed=0.5)
    assert (edge["margin"], edge["holds"]) == (0, True)
    assert row_of("equal", 1.0, 2.0, allowed=0.5)["margin"] == -1
    assert row_of("equal", 1.0, 2.0, allowed=0.5)["holds"] is False
    sampled = row_of("equal", 1.0, 1.2, se=0.1)
    assert (sampled["allowed"], sampled["margin"]) == (pytest.approx(0.4), pytest.approx(0.5))
    assert (sampled["low"], sampled["high"]) == (pytest.approx(1.004), pytest.approx(1.396))
    for kind, good in (("least", 2.0), ("most", 1.0)):
        bound = 3.0 - good
        fine, bad, edge = (
            row_of(kind, bound, good),
            row_of(kind, good, bound),
            row_of(kind, 2.0, 2.0),
        )
        assert (fine["margin"], fine["holds"], fine["allowed"]) == (0.5, True, None)
        assert (bad["margin"], bad["holds"]) == (-0.5, False)
        assert (edge["margin"], edge["holds"]) == (0, True)
    assert row_of("most", 0.0, 0.0)["holds"] is True
    assert row_of("most", -0.4, -0.5)["margin"] == pytest.approx(0.2), "a negative bound"
    for kind in ("equal", "least", "most"):
        assert row_of(kind, 1.0, math.nan, allowed=0.1)["holds"] is False, (
            "what cannot be computed does not hold"
        )
    assert row_of("least", 1.0, 2.0, residual=3e-7)["residual"] == 3e-7


def off(original: Callable[..., Any], factor: float = 1.0, more: float = 0.0) -> Callable[..., Any]:
    return lambda *args, **kwargs: original(*args, **kwargs) * factor + more


FAULTS: list[tuple[str, Any, str, Any]] = [
    ("degrees", harmonics, "sign_coefficient", off(harmonics.sign_coefficient, 1.01)),
    ("kernels", harmonics, "head_target", off(harmonics.head_target, 1.001)),
    ("kernels", harmonics, "head_head", off(harmonics.head_head, more=0.01)),
    ("floor", features, "optimise_heads", lambda *args, **kwargs: 0.1),
    ("floor", harmonics, "singular_floor", off(harmonics.singular_floor, 4.0)),
    ("growth", harmonics, "heads_for", lambda dim, error: dim**2),
    ("subspace", constructions, "explained", lambda *args, **kwargs: (0.0, 1e-4)),
    ("biased", constructions, "biased_target", off(constructions.biased_target, -1.0)),
    (
        "majority",
        constructions,
        "vote",
        lambda x, y, directions, vote=constructions.vote: vote(x, y, directions[:-2]),
    ),
    ("majority", constructions, "vote_error", off(constructions.vote_error, 1.05)),
    ("lengths", constructions, "full_rank_head", lambda x, y, beta=1.0: x.mean(1)),
    ("full-rank-head", constructions, "full_rank_head", lambda x, y, beta=1.0: x[:, 0]),
    ("full-rank-head", constructions, "softmax_error", off(constructions.softmax_error, 1.05)),
    (
        "full-rank-head",
        constructions,
        "perfect_encoder",
        lambda d, depth, make=constructions.perfect_encoder: make(d, depth, 1.0),
    ),
    ("plane", constructions, "spaced_closed", off(constructions.spaced_closed, 1.01)),
    ("continuum", harmonics, "representation", off(harmonics.representation, 1.001)),
    ("random-features", features, "right", off(features.right, more=0.002)),
    (
        "random-features",
        features,
        "draw_heads",
        lambda d, h, g, draw="published", make=features.draw_heads: make(d, h, g, "published"),
    ),
]


@pytest.mark.parametrize(
    ("group", "module", "name", "wrong"), FAULTS, ids=[f"{f[0]}: {f[2]}" for f in FAULTS]
)
def test_check_of_a_planted_fault_does_not_hold(
    group: str, module: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, wrong)
    assert any(not check.holds for check in CHECKS[group](0))


# ---- the command


def test_theory_prints_every_statement_and_one_json_object(made: Made) -> None:
    answer, text = made.answers["theory"], made.texts["theory"]
    assert answer["failed"] == 0
    assert answer["runs"] == answer["made"] == len(theory_experiment.NAMES)
    assert len(answer["checks"]) > 100
    assert "points" not in answer
    for point in answer["checks"]:
        assert KEYS | {"group"} <= set(point)
        assert isinstance(point["parameters"], str)
    for statement in (
        "Fact 1",
        "Theorem 2, kernels",
        "Theorem 3",
        "Theorem 5",
        "Conjecture 6",
        "Two dimensions",
    ):
        assert f"{statement}: " in text
    assert "FAILS" not in text
    assert Path(answer["figure"]).read_bytes().startswith(b"\x89PNG")
    assert f"report: {answer['report']}" in text


def test_theory_only_some_checks(tmp_path: Path) -> None:
    words = ["theory", "--only", "plane", "--json", "--store", str(tmp_path / "s")]
    code, out, err = command(*words)
    answer = json.loads(out.splitlines()[-1])
    assert code == 0, err
    assert (answer["failed"], answer["runs"], answer["made"], len(answer["checks"])) == (0, 1, 1, 8)
    assert {p["group"] for p in answer["checks"]} == {"plane"}
    assert "Two dimensions: 8 of 8 hold, least margin " in out
    assert not (tmp_path / "s/report.html").exists()
    code, out, err = command(*words)
    again = json.loads(out.splitlines()[-1])
    assert (code, again["made"]) == (0, 0)
    assert again["checks"] == answer["checks"]
    assert "1 already in" in err
    code, out, _ = command(*words, "--seed", "5")
    assert (code, json.loads(out.splitlines()[-1])["made"]) == (0, 1), "another seed is another row"


def test_theory_with_a_failed_check_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constructions, "spaced_closed", off(constructions.spaced_closed, 1.01))
    code, out, err = command("theory", "--only", "plane", "--json", "--store", str(tmp_path / "s"))
    answer = json.loads(out.splitlines()[-1])
    assert code == 1
    assert 0 < answer["failed"] <= 8
    assert f"headwise: {answer['failed']} of 8 checks do not hold" in err
    fails = [line for line in out.splitlines() if line.startswith("  FAILS: ")]
    assert len(fails) == answer["failed"]
    assert any(
        "equally spaced heads: quadratic form of the closed kernels" in line
        and "H=1: 0.5 against 0.505" in line
        for line in fails
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["theory", "--only", "plan"],
            (
                "unknown check 'plan'; did you mean plane? choices: biased, continuum, degrees, "
                "floor, "
            ),
        ),
        (
            ["theory", "--only", "plane", "kernel"],
            "unknown check 'kernel'; did you mean kernels? choices: ",
        ),
        (["theory", "--only"], "argument --only: expected at least one argument"),
        (["theory", "--seed", "x"], "argument --seed: "),
        (["run", "theory", "--seeds", "3"], "unknown setting 'seeds'"),
        (["run", "representation", "--seeds", "3"], "unknown setting 'seeds'"),
        (["run", "theory", "--set", "only="], "only must not be empty"),
        (["run", "features", "--set", "dims=2"], "dims must be at least 3, got 2"),
        (["run", "features", "--set", "heads=0"], "heads must be at least 1, got 0"),
        (
            ["run", "features", "--set", "draws=unit"],
            "unknown draw 'unit'; choices: cos-uniform, published",
        ),
        (
            ["run", "representation", "--set", "degree=500"],
            "degree must lie between 1 and 400, got 500",
        ),
    ],
)
def test_theory_mistake_is_one_line(words: list[str], text: str, tmp_path: Path) -> None:
    code, out, err = command(*words, "--store", str(tmp_path / "s"))
    assert (code, out) == (2, "")
    assert err.startswith(f"headwise: error: {text}")
    assert err.count("\n") == 1
    assert not (tmp_path / "s").exists()


def test_theory_makes_everything_once(copy: Path) -> None:
    before = {p: p.read_bytes() for p in copy.rglob("rows.jsonl")}
    for words in (FEATURES, REPRESENTATION, ["theory"]):
        code, out, err = command(*words, "--store", str(copy), "--json")
        assert code == 0, err
        assert json.loads(out.splitlines()[-1])["made"] == 0
    assert {p: p.read_bytes() for p in copy.rglob("rows.jsonl")} == before


def test_theory_makes_only_what_is_missing(copy: Path, made: Made) -> None:
    gone = Store(copy).experiments()["features"]["ids"][7]
    before = Store(copy).row(gone)
    shutil.rmtree(copy / "runs" / gone)
    code, out, _ = command(*FEATURES, "--store", str(copy), "--json")
    answer = json.loads(out.splitlines()[-1])
    assert (code, answer["made"]) == (0, 1)
    after = Store(copy).row(gone)
    assert before is not None
    assert after is not None
    assert after["error"] == before["error"]
    assert answer["points"] == made.answers["features"]["points"]


def test_random_features_from_the_command(made: Made) -> None:
    answer = made.answers["features"]
    assert answer["made"] == answer["runs"] == 2 * 3 * 100, "a hundred draws of small layers"
    assert [(p["kind"], p["dim"], p["heads"], p["n"]) for p in answer["points"]] == [
        (kind, 8, heads, 100) for kind in ("cos-uniform", "published") for heads in (1, 2, 4)
    ]
    for point, known, spread in zip(
        answer["points"][:3], (0.7431, 0.6542, 0.5756), (0.0510, 0.0462, 0.0462), strict=True
    ):
        assert abs(point["held_out"] - known) < STANDARD_ERRORS * spread * math.sqrt(
            1 / 20 + 1 / 100
        )
        assert point["floor"] < point["low"] < point["held_out"] < point["high"]
    text = made.texts["features"]
    assert "within 3 % of the axis of the published figure" in text
    assert features_experiment.NOTE in text
    assert Path(answer["figure"]).read_bytes().startswith(b"\x89PNG")


def test_representation_from_the_command(made: Made) -> None:
    answer = made.answers["representation"]
    assert answer["made"] == answer["runs"] == 6
    for point in answer["points"]:
        read, loud, corrected = PEAKS[point["dim"]]
        published = point["form"] == "published"
        assert point["peak"] == pytest.approx(loud if published else corrected, rel=1e-5)
        assert point["known"] == (loud if published else corrected)
        assert point["published"] == (read if published else None)
        assert len(point["angle"]) == len(point["size"]) == 41
        assert point["size"] == point["size"][::-1]
        assert point["size"][0] == point["size"][20] == point["size"][40] == max(point["size"])
        assert (point["angle"][0], point["angle"][20], point["angle"][40]) == (-math.pi, 0, math.pi)
    assert (
        "d=8: published form 6.029e+16, 0.0% from the figure; corrected 7.781e+12"
        in made.texts["representation"]
    )
    assert Path(answer["figure"]).read_bytes().startswith(b"\x89PNG")


def test_report_has_a_section_for_each_computed_experiment(made: Made, tmp_path: Path) -> None:
    page = write_report(Store(made.path), tmp_path / "page.html").read_text()
    assert page == (made.path / "report.html").read_text(), "the page is a function of the store"
    sections = {part.partition('"')[0]: part for part in page.split('<section id="')[1:]}
    assert set(sections) == {"features", "representation", "theory"}
    for name, section in sections.items():
        experiment = find(name)
        assert experiment.question in section
        assert f'id="plot-{name}"' in section
        assert "Not shown" not in page
        asked = len(Store(made.path).experiments()[name]["ids"])
        assert f"{asked} of {asked} r" in section, "rows or runs"
        words = {"features": FEATURES, "representation": REPRESENTATION, "theory": ["theory"]}[name]
        assert f"<pre>headwise {' '.join(words)} --store " in section
        table = section.partition('data-name="points"')[2].partition("</table>")[0]
        points = made.answers[name]["checks" if name == "theory" else "points"]
        assert table.count("<tr>") == len(points) + 1
        for _, heading in experiment.columns:
            assert f">{heading}</th>" in table
    assert "Theorem 5: 14 of 14 hold" in sections["theory"]
    assert "7.781e+12" in sections["representation"]
    assert "The published figure is too low" in sections["features"]
    assert ">angle</th>" not in page, "long columns stay in the store"


def test_report_mentions_no_training_where_nothing_is_trained(made: Made) -> None:
    page = (made.path / "report.html").read_text().partition('<section id="')[2]
    assert "Learning curves" not in page
    assert "the smallest training loss" not in page
    assert " of training in all" not in page


def test_list_and_draw_of_what_was_computed(copy: Path, tmp_path: Path) -> None:
    code, out, err = command("list", "--store", str(copy), "--json")
    assert code == 0, err
    listed = json.loads(out.splitlines()[-1])
    assert listed["experiments"] == ["features", "representation", "theory"]
    assert len(listed["rows"]) == 618
    assert listed["unfinished"] == []
    store = Store(copy)
    for name, asked in store.experiments().items():
        rows = tmp_path / f"{name}.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in store.rows(asked["ids"])))
        code, _, err = command("draw", name, str(rows), "--output", str(tmp_path / f"{name}.svg"))
        assert code == 0, err
        assert (tmp_path / f"{name}.svg").read_text().startswith("<?xml")
    code, out, _ = command("list", "--json")
    assert {"features", "representation", "theory"} <= set(
        json.loads(out.splitlines()[-1])["experiments"]
    )


def test_store_finds_computed_rows(made: Made) -> None:
    pytest.importorskip("duckdb")
    store = Store(made.path)
    assert store.query(
        "select count(*) from rows where draw = 'published' and heads = 4"
    ).fetchall() == [(100,)]
    assert store.query("select count(*) from rows where name = 'plane'").fetchall() == [(1,)]


# ---- compute


class Value(NamedTuple):
    id: str

    def spec(self) -> dict[str, Any]:
        return {"experiment": "own", "id": self.id}


def test_compute_makes_what_is_missing_in_order(tmp_path: Path) -> None:
    store, calls = Store(tmp_path / "s"), []

    def make(value: Value, device: str) -> dict[str, Any]:
        calls.append((value.id, device))
        return {"id": value.id, "status": "done", "seconds": 0.0}

    values = [Value(name) for name in ("b", "a", "b")]
    rows = sweep.compute(values, make, store, device="cpu")
    assert [row["id"] for row in rows] == ["b", "a", "b"]
    assert calls == [("b", "cpu"), ("a", "cpu")], "each once"
    assert {"commit", "device"} <= set(rows[0]), "where and by what it was made"
    assert sweep.compute([*values, Value("c")], make, store, device="cpu")[-1]["id"] == "c"
    assert calls[2:] == [("c", "cpu")]
    assert json.loads((tmp_path / "s/runs/a/run.json").read_text()) == {
        "experiment": "own",
        "id": "a",
    }


def test_compute_keeps_what_was_made_before_a_failure(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")

    def make(value: Value, device: str) -> dict[str, Any]:
        if value.id == "b":
            raise RuntimeError("no memory")
        return {"id": value.id, "status": "done", "seconds": 0.0}

    with pytest.raises(RuntimeError, match="no memory"):
        sweep.compute([Value("a"), Value("b")], make, store, device="cpu")
    assert store.row("a") is not None
    assert [value.id for value in store.missing([Value("a"), Value("b")])] == ["b"]


def other_process(
    store: Store, monkeypatch: pytest.MonkeyPatch, leaves_a_row: bool
) -> contextlib.ExitStack:
    """Somebody else holds the value `a`, and is gone when we wait for the first time."""
    held = contextlib.ExitStack()
    held.enter_context(Store(store.path).claim([Value("a")]))
    waits = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 1 and leaves_a_row:
            store.add({"id": "a", "status": "done", "seconds": 0.0, "by": "another"})
        held.close()
        assert len(waits) < 5, "waits for ever"

    monkeypatch.setattr(sweep, "time", SimpleNamespace(sleep=sleep))
    return held


def test_compute_waits_for_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "s")
    with other_process(store, monkeypatch, leaves_a_row=True):
        rows = sweep.compute(
            [Value("a")], lambda value, device: pytest.fail("made twice"), store, device="cpu"
        )
    assert rows[0]["by"] == "another"


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


# ---- what the figures can do for them


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
    assert "dtick" not in drawn["layout"]["yaxis"]
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
    assert logarithmic["layout"]["yaxis"]["dtick"] == 1
    assert [shape["y0"] for shape in logarithmic["layout"]["shapes"]] == [0.5]
    assert logarithmic["data"][0]["mode"] == "lines+markers"
    mixed = [dataclasses.replace(plain, **{axis: "linear"}) for axis in ("x_scale", "y_scale")]
    for i, figure in enumerate((linear, plain, *mixed)):
        save(figure, tmp_path / f"{i}.svg")
    sizes = [(tmp_path / f"{i}.svg").read_text() for i in range(4)]
    assert len(set(sizes)) == 4, "each option shows"


# ---- faults that were found, and are gone


def test_compute_makes_what_another_process_gave_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "s")
    with other_process(store, monkeypatch, leaves_a_row=False):
        rows = sweep.compute(
            [Value("a")],
            lambda value, device: {"id": value.id, "status": "done", "seconds": 0.0},
            store,
            device="cpu",
        )
    assert [row["id"] for row in rows] == ["a"]


@pytest.mark.parametrize(
    "words",
    [
        ["run", "features", "--set", "draws="],
        ["run", "features", "--seeds", "1", "--set", "heads=64,64"],
        ["theory", "--only", "plane", "--seed", "9" * 30],
    ],
)
def test_theory_settings_mistake_is_one_line(words: list[str], tmp_path: Path) -> None:
    small = ["--set", "dims=8"] if "features" in words else []
    code, out, err = command(*words, *small, "--store", str(tmp_path / "s"))
    assert (code, out) == (2, "")
    assert err.startswith("headwise: error: ")
    assert err.count("\n") == 1


def test_representation_refuses_weights_beyond_floating_point(tmp_path: Path) -> None:
    changes = ["--set", "dims=2000", "--set", "degree=399", "--set", "angles=3"]
    code, _, err = command(
        "run", "representation", "--device", "cpu", *changes, "--store", str(tmp_path / "s")
    )
    assert code in (1, 2)
    assert err.splitlines()[-1].startswith("headwise: error: ")


def test_softmax_error_of_a_hard_head() -> None:
    assert constructions.softmax_error(8, math.inf) == 0


def test_head_head_takes_tensors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(harmonics.head_head(torch.tensor(0.5), torch.tensor(0.5))) == pytest.approx(
            0.5 + 2 / 36, abs=1e-6
        )


def test_agree_of_a_head_with_itself() -> None:
    q, k = features.draw_heads(8, 20, seeded(40))
    assert (features.agree(q, k, q, k).diagonal() - 1).abs().max() < 1e-7


def test_checks_hold_with_another_seed() -> None:
    assert all(check.holds for check in CHECKS["full-rank-head"](3))


def test_run_theory_with_a_failed_check_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constructions, "spaced_closed", off(constructions.spaced_closed, 1.01))
    code, _, _ = command(
        "run", "theory", "--set", "only=plane", "--no-report", "--store", str(tmp_path / "s")
    )
    assert code == 1
