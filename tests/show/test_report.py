"""Figures of real rows, and the page: the same rows give the same bytes, and the page says what it
has to. What it does in a browser is in test_report_browser.py."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.fig1_points import CASES
from support.page_data import page_data
from support.report_page import make_store

from headwise.experiments.pages import write_report
from headwise.experiments.rank_paper import fig1
from headwise.experiments.rank_paper.fig1_figures import figure as draw_fig1
from headwise.show import figure as figure_parts
from headwise.show import report
from headwise.show.figure import from_json, to_json
from headwise.show.matplotlib_figure import save
from headwise.show.pages import plotly
from headwise.show.plotly_figure import plotly_figure
from headwise.store import Store


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("report") / "store")


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Store:
    """A copy of it to play with."""
    shutil.copytree(made, tmp_path / "store")
    return Store(tmp_path / "store")


def data_of(page: Path) -> dict[str, Any]:
    """What the page's scripts read."""
    return page_data(page.read_text())


def points_of(store: Store) -> list[fig1.Point]:
    return fig1.summary(store.rows(store.experiments()["fig1"]["ids"]))


# ---- figures


MAGIC = {"png": b"\x89PNG\r\n", "pdf": b"%PDF-", "svg": b"<?xml"}


@pytest.mark.parametrize("kind", MAGIC)
def test_picture_is_the_same_for_the_same_rows(kind: str, made: Path, tmp_path: Path) -> None:
    description = draw_fig1(points_of(Store(made)))
    first, second = tmp_path / f"a.{kind}", tmp_path / f"b.{kind}"
    save(description, first)
    save(from_json(json.loads(json.dumps(to_json(description)))), second)
    assert first.read_bytes().startswith(MAGIC[kind])
    assert len(first.read_bytes()) > 5000
    assert first.read_bytes() == second.read_bytes()


def test_picture_is_another_for_other_rows(made: Path, tmp_path: Path) -> None:
    points = points_of(Store(made))
    save(draw_fig1(points), tmp_path / "a.png")
    save(
        draw_fig1([dataclasses.replace(p, held_out=p.held_out / 2) for p in points]),
        tmp_path / "b.png",
    )
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.png").read_bytes() == (made / "fig1.png").read_bytes()


# ---- the page is a pure function of the store


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_report_is_a_pure_function_of_the_store(store: Store, tmp_path: Path) -> None:
    first = snapshot(store.path)
    (store.path / "report.html").unlink()
    write_report(store)
    assert snapshot(store.path) == first
    code = (
        "import sys; from headwise.cli import main; raise SystemExit(main(['report', '--store', "
        "sys.argv[1], '--output', sys.argv[2]]))"
    )
    for seed in ("1", "2"):
        other = tmp_path / f"{seed}.html"
        environment = {**os.environ, "PYTHONHASHSEED": seed, "TZ": "Pacific/Auckland"}
        subprocess.run(
            [sys.executable, "-c", code, store.path, other],
            check=True,
            capture_output=True,
            env=environment,
        )
        assert other.read_bytes() == first["report.html"]
    assert snapshot(store.path) == first


def test_report_loads_nothing(made: Path) -> None:
    page = (made / "report.html").read_text()
    ours = page.replace(plotly(), "")
    for address in re.findall(r"https?://[^\"' <]*", ours):
        assert address == "http://www.w3.org/2000/svg", "the name of a kind of element"
    assert 'src="' not in ours
    assert "@import" not in ours
    assert "url(" not in ours


def test_report_of_a_store_that_has_nothing_yet(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.open()
    page = write_report(store).read_text()
    assert "This store has no experiment yet" in page
    store.note(
        "fig1",
        {"command": "headwise run fig1", "preset": "quick", "settings": {}, "ids": ["a" * 16]},
    )
    assert "0 of 1 runs finished" in write_report(store).read_text()


def test_report_says_how_far_an_unfinished_experiment_is(store: Store) -> None:
    ids = store.experiments()["fig1"]["ids"]
    shutil.rmtree(store.runs_path / ids[0])
    assert "23 of 24 runs finished" in write_report(store).read_text()


def test_report_shows_the_columns_of_rows_of_another_version(store: Store) -> None:
    first, second, *_ = store.rows()
    store.add({**first, "invented": 7})
    store.add({k: v for k, v in second.items() if k != "host_cpus"})
    columns = data_of(write_report(store))["sections"][0]["runs"]["columns"]
    assert {"invented", "host_cpus"} <= set(columns)


# ---- experiments that are not headwise's: the page shows what their runs left


def own_page(**changes: Any) -> dict[str, Any]:
    line = figure_parts.Line(label="ours", colour=0, x=[1, 2], y=[0.5, 0.25])
    panel = figure_parts.LinePanel(title="one", lines=[line])
    drawn = figure_parts.LineFigure(title="own", x_label="x", y_label="y", panels=[panel])
    page = report.Page(
        question="Is mine better?",
        headline=["mine is better"],
        figures=[drawn],
        headings=["arm", "error"],
        cells=[["mine", "0.25"]],
    )
    return {**page.to_json(), **changes}


def note_own(store: Store, **more: Any) -> str:
    ids = store.experiments()["fig1"]["ids"][:3]
    asked = {"command": "headwise run mine.py", "preset": "quick", "settings": {}, "ids": ids}
    store.note("mine", {**asked, **more})
    page = write_report(store).read_text()
    return page[page.index("<main>") : page.index("</main>")]


def test_report_shows_an_own_experiment_by_what_its_run_left(store: Store) -> None:
    page = note_own(store, page=json.loads(json.dumps(own_page())))
    assert '<h2 class="question">Is mine better?</h2>' in page
    assert '<p class="answer">Mine is better.</p>' in page
    assert '<div class="plot" id="plot-mine" tabindex="0"' in page
    assert "3 of 3 runs finished" in page
    assert "Not shown" not in page


def test_report_imports_nothing_that_a_store_names(store: Store, tmp_path: Path) -> None:
    """An older store names the file of an experiment of one's own."""
    code = tmp_path / "mine.py"
    code.write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    page = note_own(store, source=str(code))
    assert not (tmp_path / "imported").exists()
    assert '<h2 class="question">mine</h2>' in page
    assert "3 of 3 runs finished" in page, "its rows are there all the same"


@pytest.mark.parametrize(
    "changes",
    [
        {"question": 7},
        {"cells": [["mine"]]},
        {"figures": [{"kind": "tree", "panels": []}]},
        {"headline": None},
    ],
    ids=["a number for text", "a cell too few", "no figure", "no headline"],
)
def test_report_says_in_a_line_which_page_cannot_be_read(
    changes: dict[str, Any], store: Store
) -> None:
    page = note_own(store, page=own_page(**changes))
    assert page.count('<p class="warn">Not shown: mine: ') == 1
    assert '<section id="fig1" data-name="fig1">' in page, "the others are shown"


def test_figure_panel_title_stands_in_the_middle_above_it() -> None:
    """Plotly's own choice moves titles to the middle of the page, one over the other."""
    layout = plotly_figure(draw_fig1(CASES["an interval that reaches zero"]))["layout"]
    panels = [layout[name]["domain"] for name in sorted(layout) if name.startswith("xaxis")]
    titles = [
        a for a in layout["annotations"] if a["xref"] == "paper" and a.get("yanchor") == "bottom"
    ]
    assert len(titles) == len(panels)
    assert [(a["xanchor"], a["x"]) for a in titles] == [
        ("center", pytest.approx(sum(domain) / 2)) for domain in panels
    ]
