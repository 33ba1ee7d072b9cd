"""The explorer inside the report: opened when asked for, on the maps of the page's experiments; and
the contents of a page with several experiments."""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Frame
from support.report_page import Watched, browser  # noqa: F401

from headwise.experiments import find
from headwise.experiments.measured import MOST_CELLS, measured_page
from headwise.experiments.pages import explorer_of, page_of
from headwise.show.explorer_page import scripts_of
from headwise.show.report import Section, made_page, write_page
from headwise.store import read_rows

ROWS = Path(__file__).parents[2] / "results"
WIDE, PHONE = {"width": 1400, "height": 900}, {"width": 390, "height": 844}


def section(name: str, file: str) -> Section:
    experiment, rows = find(name), read_rows(ROWS / f"{file}.jsonl")
    page = page_of(experiment, "", experiment.summary(rows))
    return Section(name=name, command="headwise run", preset="", state="", rows=rows, page=page)


@pytest.fixture(scope="module")
def sections() -> list[Section]:
    files = {"fig1": "fig1/quick", "map": "map/farthest-quick", "features": "features/rows"}
    return [section(name, file) for name, file in files.items()]


@pytest.fixture(params=[(WIDE, "light"), (PHONE, "dark")], ids=["wide", "phone"])
def opened(
    request: pytest.FixtureRequest,
    browser: Browser,  # noqa: F811
    sections: list[Section],
    tmp_path: Path,
) -> Iterator[Watched]:
    path = tmp_path / "report.html"
    write_page(path, sections, explorer=explorer_of(sections))
    viewport, scheme = request.param
    watched = Watched(browser, path, viewport=viewport, color_scheme=scheme)
    yield watched
    watched.close()


def until(found: Callable[[], bool]) -> None:
    """Wait for what a page does by itself; its policy allows no script that asks in the page."""
    for _ in range(100):
        if found():
            return
        time.sleep(0.05)
    pytest.fail("it did not come about in 5 seconds")


def explorer_in(watched: Watched) -> Frame:
    """The explorer, after its button was pressed."""
    watched.page.click("#explore")
    until(lambda: len(watched.page.frames) == 2)
    (frame,) = watched.page.frames[1:]
    frame.wait_for_selector("#map button")
    return frame


def test_report_opens_the_explorer_on_its_largest_map(opened: Watched) -> None:
    assert opened.page.locator("iframe").count() == 0, "not made before it is asked for"
    frame = explorer_in(opened)
    assert frame.locator("#map button").count() == 28
    # The best shape of that map, and where it lies.
    assert "4 heads of rank 32, width 32" in frame.inner_text("#sentence")
    assert "You are here" in frame.inner_text("#here")
    names = frame.locator("#task option").all_inner_texts()
    assert names[0] == "map: farthest"
    assert any(name.startswith("fig1: ") for name in names)
    assert frame.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_contents_are_folded_on_a_phone_alone(opened: Watched) -> None:
    phone = opened.page.viewport_size == PHONE
    entries = opened.page.locator("#contents li")
    assert entries.count() == 4  # three experiments, the explorer
    assert entries.first.is_visible() is not phone
    if phone:
        opened.page.click("#contents summary")
        assert entries.first.is_visible()
    opened.page.click("#contents a[href='#explorer']")
    assert opened.page.locator("#explore").is_visible()


def test_page_without_a_measured_shape_has_no_explorer(sections: list[Section]) -> None:
    computed = [one for one in sections if one.name == "features"]
    assert explorer_of(computed) == ""
    page = made_page(computed)
    assert "Move the shape yourself" not in page
    assert 'id="explore"' not in page


def test_policy_names_every_script_of_the_explorer(sections: list[Section]) -> None:
    explorer = explorer_of(sections)
    page = made_page(sections, explorer=explorer)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None
    assert policy.group(1).count("sha256-") == 2 + len(scripts_of(explorer))
    assert "unsafe-inline" not in policy.group(1).partition("style-src")[0]


def test_report_of_1000_runs_and_its_explorer_stay_below_4_mb(sections: list[Section]) -> None:
    rows = read_rows(ROWS / "map/farthest-quick.jsonl")
    many = [
        {**row, "seed": i, "id": f"{row['id']}-{i}"}
        for i in range(1000 // len(rows) + 1)
        for row in rows
    ]
    experiment = find("map")
    large = Section(
        name="map", command="headwise run map", preset="", state="", rows=many,
        page=page_of(experiment, "", experiment.summary(many)),
    )  # fmt: skip
    assert len(many) >= 1000
    assert len(made_page([large], explorer=explorer_of([large])).encode()) < 4e6


def test_explorer_of_very_many_maps_shows_the_largest() -> None:
    rows = read_rows(ROWS / "map/farthest-quick.jsonl")
    page = measured_page({f"own{i}": rows for i in range(90)})
    cells = sum(len(task["cells"]) for task in page["tasks"])
    assert MOST_CELLS - 28 < cells <= MOST_CELLS
    assert page["at"]["context"] == rows[0]["task_points"]
