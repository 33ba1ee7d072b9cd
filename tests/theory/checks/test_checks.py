"""The rank paper's theory as commands: every check in a store, and the tables, figures and pages
made of them."""

import json
import math
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.checks import command
from support.page_data import page_data
from support.tolerance import STANDARD_ERRORS

from headwise.experiments import EXPERIMENTS, find
from headwise.experiments.pages import write_report
from headwise.experiments.rank_paper import features as features_experiment
from headwise.experiments.rank_paper import theory as theory_experiment
from headwise.store import Store
from headwise.theory.checks import CHECKS

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
    assert features_experiment.NOTE.text in text
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
    tables = {section["name"]: section for section in page_data(page)["sections"]}
    assert set(sections) == set(tables) == {"features", "representation", "theory"}
    for name, section in sections.items():
        experiment = find(name)
        assert experiment.question in section
        assert f'id="plot-{name}"' in section
        assert "Not shown" not in page
        asked = len(Store(made.path).experiments()[name]["ids"])
        assert f"{asked} of {asked} r" in section, "rows or runs"
        words = {"features": FEATURES, "representation": REPRESENTATION, "theory": ["theory"]}[name]
        assert f'<pre class="command">headwise {" ".join(words)} --store ' in section
        table = tables[name]["points"]
        points = made.answers[name]["checks" if name == "theory" else "points"]
        assert len(table["cells"]) == len(points)
        assert table["headings"] == [heading for _, heading in experiment.columns]
        assert "angle" not in table["headings"], "long columns stay in the store"
    assert "Theorem 5: 14 of 14 hold" in sections["theory"]
    assert "7,780,610," in f"{tables['representation']['points']}"
    assert "The published figure is too low" in sections["features"]


def test_report_mentions_no_training_where_nothing_is_trained(made: Made) -> None:
    page = (made.path / "report.html").read_text().partition('<section id="')[2]
    assert [section["curves"] for section in page_data(page)["sections"]] == [None] * 3
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
