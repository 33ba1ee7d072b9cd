"""The report in a real browser without a network: figures, tables, learning curves, downloads."""

import csv
import io
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser
from support.report_page import Watched, browser, make_store  # noqa: F401

from headwise.experiments.pages import write_report
from headwise.experiments.rank_paper import fig1
from headwise.experiments.rank_paper.fig1_figures import figure as draw_fig1
from headwise.show import report_data
from headwise.store import Store


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("browser") / "store")


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Store:
    """A copy of it to play with."""
    shutil.copytree(made, tmp_path / "store")
    return Store(tmp_path / "store")


@pytest.fixture
def opened(browser: Browser, made: Path) -> Iterator[Watched]:  # noqa: F811
    watched = Watched(browser, made / "report.html")
    watched.drawn("#plot-fig1")
    yield watched
    watched.close()


def points_of(path: Path) -> list[fig1.Point]:
    store = Store(path)
    return fig1.summary(store.rows(store.experiments()["fig1"]["ids"]))


# ---- figures

TRACES = "document.querySelectorAll('#plot-fig1 .scatterlayer .trace').length"
MARKERS = "document.querySelectorAll('#plot-fig1 .scatterlayer .point').length"


def test_report_draws_the_figure_offline(opened: Watched, made: Path) -> None:
    lines = [line for panel in draw_fig1(points_of(made)).panels for line in panel.lines]
    assert opened.value(TRACES) == len(lines)
    assert opened.value(MARKERS) == sum(len(line.x) for line in lines)
    bars = opened.value("document.querySelectorAll('#plot-fig1 .errorbar').length")
    assert bars == 12, "an interval per point"
    titles = opened.page.locator("#plot-fig1 .annotation-text").all_text_contents()
    assert titles == ["1 layer", "predicting zero", "2 layers"]
    assert opened.page.locator("figure h4").inner_text().startswith("Farthest neighbour")


def test_report_shows_seeds_statistic_and_published_values_as_they_are_asked_for(
    opened: Watched, made: Path
) -> None:
    before = opened.value(MARKERS)
    button = {
        kind: opened.page.locator(f"figure button[data-kind={kind}]")
        for kind in ("mean", "seed", "statistic", "published")
    }
    assert button["seed"].get_attribute("aria-pressed") == "false"
    button["seed"].click()
    opened.until(f"{MARKERS} == {before + 24}")
    button["statistic"].click()
    opened.until(f"{MARKERS} == {before + 24 - 12}")
    assert button["statistic"].get_attribute("aria-pressed") == "false"
    for kind in ("mean", "published"):
        button[kind].click()
    opened.until(f"{MARKERS} == 24")
    drawn = opened.value(
        "document.getElementById('plot-fig1').data.filter(t => t.visible)"
        ".flatMap(t => t.y.map((y, i) => [t.customdata[i][0], y]))"
    )
    rows = Store(made).rows(Store(made).experiments()["fig1"]["ids"])
    assert dict(drawn) == {row["id"]: row["held_out"] for row in rows}


def test_report_hover_says_the_run_and_its_settings(opened: Watched, made: Path) -> None:
    opened.page.locator("figure button[data-kind=seed]").click()
    opened.page.locator("figure button[data-kind=mean]").click()
    opened.page.wait_for_timeout(100)
    opened.page.locator("#plot-fig1").scroll_into_view_if_needed()
    dots = opened.page.locator("#plot-fig1 .scatterlayer .trace:has(path.point) .point")
    texts = set()
    for i in range(dots.count()):
        box = dots.nth(i).bounding_box()
        assert box
        opened.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        label = opened.page.locator("#plot-fig1 .hoverlayer .hovertext")
        if label.count():
            texts.add(label.first.text_content())
    said = [text for text in texts if text and "run " in text]
    ids = Store(made).experiments()["fig1"]["ids"]
    assert said, texts
    assert all(any(run_id in text for run_id in ids) for text in said)
    assert all("head_dim" in text and "seed" in text for text in said)


def test_report_point_that_is_clicked_shows_its_runs(opened: Watched) -> None:
    box = opened.page.locator("#plot-fig1 .scatterlayer .trace .point").first.bounding_box()
    assert box
    opened.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    opened.until("document.querySelectorAll('table[data-name=runs] tbody tr').length == 2")
    assert sorted(opened.cells("runs", "seed")) == ["0", "1"]
    assert len(set(opened.cells("runs", "head_dim"))) == 1


def test_report_legend_hides_a_series_by_a_click_and_another_brings_it_back(
    opened: Watched,
) -> None:
    before = opened.value(TRACES)
    button = opened.page.locator("figure .legend button").first
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    # held out and statistic in both panels, published in the first
    opened.until(f"{TRACES} == {before - 5}")
    button.click()
    opened.until(f"{TRACES} == {before}")


def test_report_figure_says_its_points_to_the_keyboard(opened: Watched, made: Path) -> None:
    plot, said = opened.page.locator("#plot-fig1"), opened.page.locator("figure .said")
    plot.focus()
    texts = []
    for _ in range(3):
        plot.press("ArrowRight")
        texts.append(said.text_content() or "")
    assert len(set(texts)) == 3
    first = min(p.rank for p in points_of(made))
    assert f"rank {first}," in texts[0]
    assert "n=2" in texts[0]
    assert opened.page.locator("#plot-fig1 .hoverlayer .hovertext").count() == 1
    plot.press("ArrowLeft")
    assert said.text_content() == texts[1]
    plot.press("Escape")
    assert said.text_content() == ""


@pytest.mark.parametrize("kind", ["SVG", "PNG", "CSV"])
def test_report_figure_is_downloaded(kind: str, opened: Watched, made: Path) -> None:
    with opened.page.expect_download() as waiting:
        opened.page.locator("figure .tools button", has_text=kind).click()
    content = Path(waiting.value.path()).read_bytes()
    assert waiting.value.suggested_filename == f"fig1.{kind.lower()}"
    if kind == "PNG":
        assert content.startswith(b"\x89PNG\r\n")
    elif kind == "SVG":
        assert content.startswith(b"<svg")
    else:
        means = [row for row in csv.reader(io.StringIO(content.decode())) if row[2] == "mean"]
        errors = sorted(float(row[4]) for row in means)
        assert errors == pytest.approx(sorted(p.held_out or 0 for p in points_of(made)))


# ---- tables


def test_report_table_has_a_row_for_every_point_with_its_interval(
    opened: Watched, made: Path
) -> None:
    points = points_of(made)
    assert opened.cells("points", "rank") == [str(p.rank) for p in points]
    errors = opened.cells("points", "held-out error")
    assert errors == [f"{p.held_out:.4f} ± {(p.high - p.low) / 2:.4f}" for p in points]
    assert set(opened.cells("points", "n")) == {"2"}
    assert opened.cells("points", "budget") == [p.budget.replace("^", "") for p in points]
    assert opened.page.locator("table[data-name=points] sup").count() == len(points)


def test_report_columns_sort_both_ways_by_number(opened: Watched, made: Path) -> None:
    ranks = sorted(p.rank for p in points_of(made))
    assert opened.sort_by("points", "rank") == [str(r) for r in ranks]
    heading = opened.page.locator("table[data-name=points] th[aria-sort]")
    assert heading.get_attribute("aria-sort") == "ascending"
    assert opened.sort_by("points", "rank") == [str(r) for r in reversed(ranks)]
    assert heading.get_attribute("aria-sort") == "descending"
    errors = [float(text.split()[0]) for text in opened.sort_by("points", "held-out error")]
    assert errors == sorted(errors)
    params = [int(text.replace(",", "")) for text in opened.sort_by("points", "parameters")]
    assert params == sorted(params)
    assert len(set(params)) > 1


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ("rank=8", lambda p: p.rank == 8),
        ("rank<=2 layers=2", lambda p: p.rank <= 2 and p.layers == 2),
        ("held-outerror>1", lambda p: p.held_out > 1),
        ("RANK=8 stream", lambda p: p.rank == 8),
        ("nothing-like-it", lambda p: False),
    ],
)
def test_report_table_is_filtered_by_words(words, left, opened: Watched, made: Path) -> None:
    wanted = [p for p in points_of(made) if left(p)]
    opened.page.locator("#filter-0-points").fill(words)
    rows = opened.page.locator("table[data-name=points] tbody tr")
    assert rows.count() == len(wanted)
    if wanted:
        assert opened.cells("points", "rank") == [str(p.rank) for p in wanted]
    said = opened.page.locator(".table[data-table=points] output").inner_text()
    assert said == ("12 rows" if len(wanted) == 12 else f"{len(wanted)} of 12 rows")


def test_report_table_is_saved_with_every_column_of_the_rows_that_are_left(
    opened: Watched, made: Path
) -> None:
    opened.page.locator("#filter-0-runs").fill("seed=1 head_dim=2")
    with opened.page.expect_download() as waiting:
        opened.page.locator(".table[data-table=runs] button", has_text="CSV").click()
    saved = list(csv.DictReader(Path(waiting.value.path()).read_text().splitlines()))
    rows = Store(made).rows(Store(made).experiments()["fig1"]["ids"])
    wanted = {row["id"]: row for row in rows if row["seed"] == 1 and row["head_dim"] == 2}
    assert {one["id"] for one in saved} == set(wanted)
    for one in saved:
        row = wanted[one["id"]]
        assert float(one["held_out"]) == row["held_out"], "to the last digit"
        assert int(one["params"]) == row["params"]


def test_report_has_all_settings_once(opened: Watched, made: Path) -> None:
    opened.page.get_by_label("all", exact=False).last.check()
    opened.page.locator("summary", has_text="What is the same").click()
    row = Store(made).rows()[0]
    text = opened.page.locator("main").inner_text()
    for name in set(row) - report_data.HIDDEN:
        assert name in text, name
    assert opened.page.locator("table[data-name=runs] tbody tr").count() == 24


# ---- learning curves


def test_report_learning_curves_are_those_of_the_rows_left(opened: Watched, made: Path) -> None:
    opened.drawn("#curve-fig1")
    rows = {row["id"]: row for row in Store(made).rows(Store(made).experiments()["fig1"]["ids"])}

    def lines() -> list[dict]:
        return opened.value(
            "document.getElementById('curve-fig1').data.map(t => ({x: t.x, y: t.y, row: t.meta.row,"
            " about: t.hovertemplate}))"
        )

    drawn = lines()
    assert len(drawn) == 48, "a training and a held-out curve per run"
    for train, held_out in zip(drawn[::2], drawn[1::2], strict=True):
        (row,) = (row for run_id, row in rows.items() if run_id in train["about"])
        assert train["y"] == pytest.approx(row["curve"], rel=1e-3)
        assert train["x"] == [2 * (e + 1) for e in range(8)]
        assert held_out["x"] == [2 * e for e, _ in row["held_out_curve"]]
        assert held_out["y"] == pytest.approx([v for _, v in row["held_out_curve"]], rel=1e-3)
        assert f"seed {row['seed']}" in train["about"]
    opened.page.locator("#filter-0-runs").fill("head_dim=8 seed=0")
    opened.until("document.getElementById('curve-fig1').data.length == 8")
    opened.page.get_by_label("training").uncheck()
    opened.until("document.getElementById('curve-fig1').data.length == 4")
    names = opened.page.locator(".curves .legend").inner_text()
    assert "head_dim 8" in names
    assert "head_dim 2" not in names


# ---- texts of others, runs that are not there


EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7 * 7 }}\u2028"


def test_report_shows_hostile_strings_as_text(browser: Browser, store: Store) -> None:  # noqa: F811
    """In the command, in settings, and in every text of every row."""
    asked = store.experiments()["fig1"]
    evil = {"command": f"headwise run {EVIL}", "preset": EVIL, "settings": {EVIL: EVIL}}
    store.note("fig1", {**asked, **evil, "remarks": [EVIL]})
    for row in store.rows():
        texts = dict.fromkeys(("device", "commit", "protocol", "init"), EVIL)
        store.add({**row, **texts, EVIL: f"{EVIL}{row['seed']}"})
    watched = Watched(browser, write_report(store))
    page = watched.page
    watched.drawn("#plot-fig1")
    assert page.locator("pre").inner_text() == f"headwise run {EVIL}"
    assert set(watched.cells("points", "data")) == {EVIL}
    page.locator(".bar input[type=checkbox]").last.check()
    page.locator("table[data-name=runs] th button").last.click()
    watched.drawn("#curve-fig1")
    page.locator(".curves select").select_option(index=1)
    page.locator("#plot-fig1").focus()
    page.locator("#plot-fig1").press("ArrowRight")
    page.locator("figure button[data-kind=seed]").click()
    page.mouse.move(500, 500)
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 3, "data, library, ours"
    watched.close()


def test_report_runs_no_script_but_its_own(browser: Browser, made: Path, tmp_path: Path) -> None:  # noqa: F811
    """Markup that got into the page all the same would not be run: its policy names two scripts."""
    text = (made / "report.html").read_text()
    broken = tmp_path / "broken.html"
    broken.write_text(text.replace("<main>", "<main><script>alert(1)</script><b onclick='x()'>"))
    watched = Watched(browser, broken)
    watched.drawn("#plot-fig1")
    assert not [line for line in watched.said if line == "1"], "no dialog"
    assert any("Content Security Policy" in line for line in watched.said)
    watched.context.close()


def test_report_names_missing_and_diverged_runs(browser: Browser, store: Store) -> None:  # noqa: F811
    ids = store.experiments()["fig1"]["ids"]
    gone = [row for row in store.rows() if row["head_dim"] == 8 and row["depth"] == 1]
    for row in gone:
        nothing = {"held_out": None, "train_last": None, "held_out_curve": [[1, None]]}
        store.add({**row, "status": "diverged", "curve": [2.5, None], **nothing})
    lost = next(run_id for run_id in ids if run_id not in {row["id"] for row in gone})
    shutil.rmtree(store.runs_path / lost)
    watched = Watched(browser, write_report(store))
    watched.drawn("#plot-fig1")
    texts = watched.sort_by("points", "held-out error")
    assert texts[-2:] == ["diverged", "diverged"]
    numbers = [float(text.split()[0]) for text in texts[:-2]]
    assert numbers == sorted(numbers)
    assert all(math.isfinite(x) for x in numbers)
    text = watched.page.locator("main").inner_text()
    assert "1 run was asked for and is not here" in text
    assert lost in text
    assert f"{len(gone)} runs diverged" in text
    watched.page.locator("#filter-0-runs").fill("status=diverged")
    assert watched.page.locator("table[data-name=runs] tbody tr").count() == len(gone)
    watched.close()


def test_report_of_an_empty_store_opens_too(browser: Browser, tmp_path: Path) -> None:  # noqa: F811
    store = Store(tmp_path / "store")
    asked = {"command": "headwise run fig1", "preset": "quick", "settings": {}, "ids": ["a" * 16]}
    store.note("fig1", asked)
    watched = Watched(browser, write_report(store))
    assert "0 of 1 runs finished" in watched.page.locator("body").inner_text()
    watched.close()
