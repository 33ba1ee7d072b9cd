"""Figures of real rows, and the page: the same rows give the same bytes, and the page works alone,
in a real browser without a network.

Longer than 450 lines because its tests share one store of trained runs and one browser."""

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Error, Page, sync_playwright
from support.fig1_points import CASES

from headwise.cli import main
from headwise.experiments.pages import write_report
from headwise.experiments.rank_paper import fig1
from headwise.experiments.rank_paper.fig1_figures import figure as draw_fig1
from headwise.show import figure as figure_parts
from headwise.show import report
from headwise.show.figure import from_json, to_json
from headwise.show.matplotlib_figure import save
from headwise.show.plotly_figure import plotly_figure
from headwise.store import Store

TINY = [
    "dim=8",
    "points=4",
    "ffn_dim=8",
    "ranks=8,2,1",
    "depths=1,2",
    "widths=1,2",
    "steps=16",
    "epoch=2",
    "batch=8",
    "held_out=128",
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real store: 24 runs, 12 points, two of each point."""
    path = tmp_path_factory.mktemp("report") / "store"
    words = [word for change in TINY for word in ("--set", change)]
    assert (
        main(
            [
                "run",
                "fig1",
                "--device",
                "cpu",
                "--seeds",
                "2",
                "--workers",
                "1",
                "--store",
                str(path),
                *words,
            ]
        )
        == 0
    )
    return path


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Store:
    """A copy of it to play with."""
    shutil.copytree(made, tmp_path / "store")
    return Store(tmp_path / "store")


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
    ours = page[page.index("</script>") :]  # after the library
    assert "http://" not in ours
    assert "https://" not in ours
    head = page[: page.index("<script>")]
    assert 'src="' not in head
    assert "@import" not in head
    assert "url(" not in head


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
    page = write_report(store).read_text()
    assert "<th>invented</th>" in page
    assert "<th>host_cpus</th>" in page


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
    return page[page.rindex("<main>") :]


def test_report_shows_an_own_experiment_by_what_its_run_left(store: Store) -> None:
    page = note_own(store, page=json.loads(json.dumps(own_page())))
    assert "<h2>Is mine better?</h2>" in page
    assert "<li>mine is better</li>" in page
    assert '<div class="plot" id="plot-mine">' in page
    assert "3 of 3 runs finished" in page
    assert "Not shown" not in page


def test_report_imports_nothing_that_a_store_names(store: Store, tmp_path: Path) -> None:
    """An older store names the file of an experiment of one's own."""
    code = tmp_path / "mine.py"
    code.write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    page = note_own(store, source=str(code))
    assert not (tmp_path / "imported").exists()
    assert "<h2>mine</h2>" in page
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
    assert page.count("<p>Not shown: mine: ") == 1
    assert '<section id="fig1">' in page, "the others are shown"


# ---- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next(
        (
            path
            for name in ("chromium", "chromium-browser", "google-chrome")
            if (path := shutil.which(name))
        ),
        None,
    )
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except Error:
            if found or "CI" in os.environ:
                raise
            pytest.skip(
                "there is no browser: install Debian's chromium, or run `playwright install "
                "chromium`"
            )
        yield browser
        browser.close()


class Watched:
    """A page that was opened offline, with everything it asked for and said."""

    def __init__(self, browser: Browser, path: Path) -> None:
        self.context = browser.new_context(offline=True, viewport={"width": 1280, "height": 900})
        self.page: Page = self.context.new_page()
        self.requests: list[str] = []
        self.said: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.said.append(dialog.message), dialog.dismiss()))
        self.page.goto(path.as_uri())
        self.path = path

    def assert_quiet(self) -> None:
        assert self.requests == [self.path.as_uri()]
        assert self.said == []

    def cells(self, table: str, column: int) -> list[str]:
        return self.page.locator(
            f"table[data-name={table}] tbody tr td:nth-child({column + 1})"
        ).all_inner_texts()

    def heading(self, text: str) -> int:
        return self.page.locator("table[data-name=points] th").all_inner_texts().index(text)

    def sort_by(self, text: str) -> list[str]:
        self.page.locator("table[data-name=points] th button").get_by_text(text, exact=True).click()
        return self.cells("points", self.heading(text))

    def value(self, script: str) -> Any:
        return self.page.evaluate(script)


@pytest.fixture
def opened(browser: Browser, made: Path) -> Iterator[Watched]:
    watched = Watched(browser, made / "report.html")
    yield watched
    watched.assert_quiet()
    watched.context.close()


TRACES = "document.querySelectorAll('#plot-fig1 .scatterlayer .trace').length"


def test_report_draws_the_figure_offline(opened: Watched, made: Path) -> None:
    description = draw_fig1(points_of(Store(made)))
    opened.page.wait_for_function(f"{TRACES} > 0")
    assert opened.value(TRACES) == sum(
        bool(line.x) for panel in description.panels for line in panel.lines
    )
    dots = opened.value("document.querySelectorAll('#plot-fig1 .scatterlayer .point').length")
    assert dots == sum(len(line.x) for panel in description.panels for line in panel.lines)
    bars = opened.value("document.querySelectorAll('#plot-fig1 .errorbar').length")
    assert bars == 12, "an interval a point"
    titles = opened.page.locator("#plot-fig1 .annotation-text").all_text_contents()
    assert titles == ["1 layer", "predicting zero", "2 layers"]


def test_report_figure_has_nothing_that_overlaps_or_is_cut_off(opened: Watched) -> None:
    opened.page.wait_for_function(f"{TRACES} > 0")
    boxes: dict[str, list[float]] = opened.value(
        """Object.fromEntries(Object.entries({
            plot: '#plot-fig1', legend: '#plot-fig1 .legend', title: '#plot-fig1 .g-gtitle',
            y: '#plot-fig1 .g-ytitle', ticks: '#plot-fig1 .yaxislayer-above',
            x: '#plot-fig1 .g-xtitle', panel: '#plot-fig1 .annotation-text'
        }).map(([k, s]) => [k, (r => [r.left, r.top, r.right, r.bottom])(
            document.querySelector(s).getBoundingClientRect())]))"""
    )
    left, top, right, bottom = boxes.pop("plot")
    for name, (x0, y0, x1, y1) in boxes.items():
        assert left - 1 <= x0 < x1 <= right + 1, name
        assert top - 1 <= y0 < y1 <= bottom + 1, name
    names = list(boxes)
    for i, one in enumerate(names):
        for two in names[i + 1 :]:
            a, b = boxes[one], boxes[two]
            apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
            assert apart, (one, two, a, b)
    assert opened.value("document.documentElement.scrollWidth <= window.innerWidth"), (
        "the page is wider than its window"
    )


def test_report_table_has_a_row_for_every_point_with_its_interval(
    opened: Watched, made: Path
) -> None:
    points = points_of(Store(made))
    assert opened.cells("points", opened.heading("rank")) == [str(p.rank) for p in points]
    errors = opened.cells("points", opened.heading("held-out error"))
    assert errors == [f"{p.held_out:.4f} ± {(p.high - p.low) / 2:.4f}" for p in points]
    assert set(opened.cells("points", opened.heading("n"))) == {"2"}
    assert opened.cells("points", opened.heading("budget")) == [
        p.budget.replace("^", "") for p in points
    ]
    assert opened.page.locator("table[data-name=points] sup").count() == len(points)


def test_report_legend_hides_lines_by_a_click_and_another_brings_them_back(opened: Watched) -> None:
    opened.page.wait_for_function(f"{TRACES} > 0")
    before = opened.value(TRACES)
    item = opened.page.locator("#plot-fig1 .legendtoggle").first
    item.click()
    opened.page.wait_for_function(f"{TRACES} == {before - 2}")  # the same name in both panels
    opened.page.wait_for_timeout(500)  # two clicks at once would be a double-click
    item.click()
    opened.page.wait_for_function(f"{TRACES} == {before}")


def test_report_columns_sort_both_ways_by_number(opened: Watched, made: Path) -> None:
    ranks = sorted(p.rank for p in points_of(Store(made)))
    assert opened.sort_by("rank") == [str(r) for r in ranks]
    assert opened.sort_by("rank") == [str(r) for r in reversed(ranks)]
    errors = [float(text.split()[0]) for text in opened.sort_by("held-out error")]
    assert errors == sorted(errors)
    params = [int(text.replace(",", "")) for text in opened.sort_by("parameters")]
    assert params == sorted(params)
    assert len(set(params)) > 1


def test_report_learning_curve_follows_the_chosen_run(opened: Watched, made: Path) -> None:
    rows = Store(made).rows(Store(made).experiments()["fig1"]["ids"])
    select = opened.page.locator("#pick-fig1")
    assert select.locator("option").count() == len(rows) == 24
    for index in (0, 5, 23):
        select.select_option(index=index)
        shown = opened.value(
            "document.getElementById('curve-fig1').data.map(line => [line.x, line.y])"
        )
        row = rows[index]
        assert shown[0][1] == pytest.approx(row["curve"], rel=1e-3)
        assert shown[0][0] == [2 * (e + 1) for e in range(8)]
        assert shown[1][0] == [2 * e for e, _ in row["held_out_curve"]]
        assert shown[1][1] == pytest.approx([v for _, v in row["held_out_curve"]], rel=1e-3)
        label = select.locator("option").nth(index).inner_text()
        assert label.endswith(
            f"of rank {row['head_dim']}, stream, rate {row['lr']:g}, seed {row['seed']}"
        )
    assert opened.value("document.querySelectorAll('#curve-fig1 .scatterlayer .trace').length") == 2


def test_report_has_all_settings_once(opened: Watched, made: Path) -> None:
    opened.page.locator("summary").click()
    row = Store(made).rows()[0]
    text = opened.page.locator("details").inner_text()
    for name in set(row) - report.HIDDEN:
        assert name in text, name
    assert opened.page.locator("table[data-name=rows] tbody tr").count() == 24


EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7 * 7 }}\u2028"


def test_report_shows_hostile_strings_as_text(browser: Browser, store: Store) -> None:
    """In the command, in settings, and in every text of every row."""
    asked = store.experiments()["fig1"]
    store.note(
        "fig1",
        {**asked, "command": f"headwise run {EVIL}", "preset": EVIL, "settings": {EVIL: EVIL}},
    )
    for row in store.rows():
        store.add(
            {
                **row,
                "device": EVIL,
                "commit": EVIL,
                "protocol": EVIL,
                "init": EVIL,
                EVIL: f"{EVIL}{row['seed']}",
            }
        )
    watched = Watched(browser, write_report(store))
    page = watched.page
    page.wait_for_function(f"{TRACES} > 0")
    assert page.locator("img").count() == 0
    assert page.locator("pre").inner_text() == f"headwise run {EVIL}"
    assert set(watched.cells("points", 0)) == {EVIL}
    page.locator("summary").click()
    page.locator("table[data-name=rows] th button").last.click()
    page.locator("#pick-fig1").select_option(index=3)
    watched.assert_quiet()
    watched.context.close()


def test_report_shows_diverged_runs_and_sorts_them_last(browser: Browser, store: Store) -> None:
    gone = [row for row in store.rows() if row["head_dim"] == 8 and row["depth"] == 1]
    for row in gone:
        curve = [2.5, None]
        store.add(
            {
                **row,
                "status": "diverged",
                "held_out": None,
                "train_last": None,
                "curve": curve,
                "held_out_curve": [[1, None]],
            }
        )
    watched = Watched(browser, write_report(store))
    watched.page.wait_for_function(f"{TRACES} > 0")
    texts = watched.sort_by("held-out error")
    assert texts[-2:] == ["diverged", "diverged"]
    numbers = [float(text.split()[0]) for text in texts[:-2]]
    assert numbers == sorted(numbers)
    assert all(math.isfinite(x) for x in numbers)
    watched.assert_quiet()
    watched.context.close()


def test_report_of_an_empty_store_opens_too(browser: Browser, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.note(
        "fig1",
        {"command": "headwise run fig1", "preset": "quick", "settings": {}, "ids": ["a" * 16]},
    )
    watched = Watched(browser, write_report(store))
    assert "0 of 1 runs finished" in watched.page.locator("body").inner_text()
    watched.assert_quiet()
    watched.context.close()


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
