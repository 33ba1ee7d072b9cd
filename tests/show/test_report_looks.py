"""How the report looks: on a wide window and a phone, light and dark, printed; what can be read."""

import dataclasses
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser
from support.report_page import Watched, browser, make_store  # noqa: F401

from headwise.experiments import find
from headwise.experiments.pages import page_of
from headwise.rows import Row
from headwise.show.colours import COLOURS, DARK_GROUND, GROUND, contrast, dark_colours
from headwise.show.report import Sample, Section, write_page
from headwise.store import Store, read_rows

WIDE, PHONE = {"width": 1400, "height": 900}, {"width": 390, "height": 844}
ROWS = Path(__file__).parents[2] / "results"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("looks") / "store")


def section(name: str, rows: list[Row], **more: Any) -> Section:
    experiment = find(name)
    page = page_of(experiment, "", experiment.summary(rows))
    about = {"command": f"headwise run {name}", "preset": "", "state": "all of it is there."}
    return Section(name=name, rows=rows, page=page, **{**about, **more})


@pytest.fixture(scope="module")
def every_kind(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with lines, colours and intervals, several experiments and a decoder's text."""
    path = tmp_path_factory.mktemp("kinds") / "page.html"
    files = {"fig1": "fig1/rates", "map": "map/text", "nanochat_heads": "nanochat/rows"}
    sections = [section(n, read_rows(ROWS / f"{file}.jsonl")) for n, file in files.items()]
    text = Sample(about="a decoder", prompt="It <b>was", text=" the</pre><i>end")
    writes = dataclasses.replace(sections[0], name="writes", samples=[text], remarks=["So."])
    write_page(path, [*sections, writes])
    return path


@pytest.fixture(params=[WIDE, PHONE], ids=["wide", "phone"])
def opened(
    request: pytest.FixtureRequest,
    browser: Browser,  # noqa: F811
    every_kind: Path,
) -> Iterator[Watched]:
    watched = Watched(browser, every_kind, viewport=request.param)
    yield watched
    watched.close()


PLOTS = ("#plot-fig1", "#plot-map", "#plot-map-1", "#plot-nanochat_heads")


def boxes(watched: Watched, selector: str) -> list[list[float]]:
    return watched.value(
        "s => [...document.querySelectorAll(s)].map(e => e.getBoundingClientRect())"
        ".filter(r => r.width && r.height).map(r => [r.left, r.top, r.right, r.bottom])",
        selector,
    )


def overlap(a: list[float], b: list[float], least: float = 1.0) -> bool:
    """Whether two boxes share more than `least` pixels either way."""
    wide = min(a[2], b[2]) - max(a[0], b[0])
    tall = min(a[3], b[3]) - max(a[1], b[1])
    return wide > least and tall > least


# ---- windows


def test_report_never_scrolls_sideways(opened: Watched) -> None:
    for plot in PLOTS:
        opened.drawn(plot)
    wider = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert opened.value(wider) <= 0
    width = opened.page.viewport_size["width"]
    for left, _, right, _ in boxes(opened, "main > *, section > *, figure > *, .plot svg.main-svg"):
        assert left >= -0.5
        assert right <= width + 0.5


@pytest.mark.parametrize("plot", PLOTS)
def test_report_figure_has_no_text_over_another_and_none_cut_off(
    plot: str, opened: Watched
) -> None:
    opened.drawn(plot)
    (frame,) = boxes(opened, plot)
    kinds = {
        "titles of panels": ".annotation-text",
        "labels of axes": ".g-xtitle text, .g-ytitle text, [class*=title] > text",
        "ticks across": ".xtick text",
        "ticks up": ".ytick text",
    }
    found = {kind: boxes(opened, ", ".join(f"{plot} {s}" for s in names.split(", ")))
             for kind, names in kinds.items()}  # fmt: skip
    assert found["ticks across"]
    for kind, texts in found.items():
        for left, top, right, bottom in texts:
            assert frame[0] - 1 <= left < right <= frame[2] + 1, kind
            assert frame[1] - 1 <= top < bottom <= frame[3] + 1, kind
    for kind in ("ticks across", "ticks up", "labels of axes"):
        for i, one in enumerate(found[kind]):
            for other in found[kind][i + 1 :]:
                same = all(abs(a - b) < 1 for a, b in zip(one, other, strict=True))
                assert same or not overlap(one, other), (kind, one, other)
    for title in found["titles of panels"]:
        for kind in ("labels of axes", "ticks across"):
            assert not any(overlap(title, other) for other in found[kind]), (kind, title)


def test_report_panels_stand_below_each_other_on_a_phone(opened: Watched) -> None:
    opened.drawn("#plot-map")
    lefts = opened.value(
        "Object.entries(document.getElementById('plot-map')._fullLayout)"
        ".filter(([name]) => /^xaxis/.test(name)).map(([, axis]) => Math.round(axis._offset))"
    )
    assert len(lefts) == 3
    phone = opened.page.viewport_size == PHONE
    assert (len(set(lefts)) == 1) == phone
    legend, (plot,) = boxes(opened, "#map .legend")[0], boxes(opened, "#plot-map")
    assert legend[1] >= plot[3] - 1, "the legend is below"


# ---- ticks of a log axis


def test_log_axis_has_some_ticks_and_room_between_their_labels(
    browser: Browser,  # noqa: F811
    made: Path,
) -> None:
    watched = Watched(browser, made / "report.html")
    starts = [-9.3, -3.0, -1.52, -0.31, -0.05, 0.0, 0.42, 0.96, 3.0]
    spans = [0.004, 0.02, 0.07, 0.2, 0.35, 0.59, 0.61, 0.9, 1.0, 1.4, 2.2, 3.9, 7.7, 14.0]
    ranges = [[start, start + span] for start in starts for span in spans]
    ticks = watched.page.evaluate("ranges => ranges.map(range => logTicks(range))", ranges)
    for (low, high), found in zip(ranges, ticks, strict=True):
        assert 2 <= len(found) <= 9, (low, high, found)
        places = [(math.log10(value) - low) / (high - low) for value in found]
        assert all(-1e-6 <= place <= 1 + 1e-6 for place in places), (low, high, found)
        gaps = [b - a for a, b in pairwise(places)]
        assert min(gaps) > 0.045, f"13 of 280 pixels at least: {low} {high} {found}"
    watched.close()


# ---- colours

# Text that is read, with the colour it has and the colour behind it.
TEXTS = """() => {
  const parse = text => {
    const n = text.match(/[\\d.]+/g).map(Number);
    return text.startsWith("color(srgb") ? [255 * n[0], 255 * n[1], 255 * n[2], n[3] ?? 1]
      : [n[0], n[1], n[2], n[3] ?? 1];
  };
  const two = v => Math.round(v).toString(16).padStart(2, "0");
  const hex = c => "#" + c.slice(0, 3).map(two).join("");
  const behind = element => {
    for (let e = element; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c[3] === 1) return hex(c);
    }
    return null;
  };
  const out = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim(), element = walker.currentNode.parentElement;
    if (!text || !element.checkVisibility() || element.matches("script, option")) continue;
    if (element.closest(".heatmaplayer")) continue; // on a cell's own colour
    const style = getComputedStyle(element);
    const svg = element.closest("svg");
    const colour = svg ? style.fill : style.color;
    if (colour === "none" || parse(colour)[3] === 0) continue;
    out.push([text.slice(0, 40), hex(parse(colour)), behind(element)]);
  }
  return out;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_report_text_can_be_read(scheme: str, browser: Browser, every_kind: Path) -> None:  # noqa: F811
    watched = Watched(browser, every_kind, color_scheme=scheme)
    for plot in PLOTS:
        watched.drawn(plot)
    watched.drawn("#curve-map")
    found = watched.value(TEXTS)
    assert len(found) > 500
    assert {ground for _, _, ground in found} >= {GROUND if scheme == "light" else DARK_GROUND}
    faint = {
        (text, colour, ground, round(contrast(colour, ground), 2))
        for text, colour, ground in found
        if contrast(colour, ground) < 4.5  # WCAG AA
    }
    assert not faint
    watched.close()


def test_colours_of_figures_stand_out_light_and_dark() -> None:
    """Lines and markers: WCAG asks for 3."""
    assert len(set(COLOURS)) == len(COLOURS)
    for colour in COLOURS:
        assert contrast(colour, GROUND) >= 3, colour
        assert contrast(dark_colours()[colour], DARK_GROUND) >= 4.5, colour
    assert len({dark_colours()[colour] for colour in COLOURS}) == len(COLOURS)


def test_report_follows_the_system_and_its_switch(browser: Browser, made: Path) -> None:  # noqa: F811
    watched = Watched(browser, made / "report.html", color_scheme="dark")
    watched.drawn("#plot-fig1")
    ground = "getComputedStyle(document.body).backgroundColor"
    plot = "document.getElementById('plot-fig1').layout.plot_bgcolor"
    assert watched.value(plot) == DARK_GROUND
    dark = watched.value(ground)
    watched.page.locator("#theme").select_option("light")
    assert watched.value(ground) == "rgb(255, 255, 255)"
    watched.until(f"{plot} == '{GROUND}'")
    watched.page.locator("#theme").select_option("")
    assert watched.value(ground) == dark
    watched.page.emulate_media(color_scheme="light")
    watched.until(f"{plot} == '{GROUND}'")
    watched.close()


@pytest.mark.parametrize("name", ["fig1", "map", "nanochat_heads", "leaner", "dimension"])
def test_colour_means_one_thing_through_an_experiments_page(name: str) -> None:
    """By its legends: a colour of one figure is no other thing's in the next."""
    files = {
        "fig1": "fig1/rows",
        "map": "map/text",
        "nanochat_heads": "nanochat/rows",
        "leaner": "map/leaner-text",
        "dimension": "dimension/rows",
    }
    made = section(name, read_rows(ROWS / f"{files[name]}.jsonl"))
    meanings: dict[str, set[str]] = {}
    from headwise.show.plotly_figure import plotly_figure

    for figure in made.page.figures:
        for one in plotly_figure(figure)["legend"]["series"]:
            # A way to add heads is the same thing from whichever shape it starts.
            label = one["label"].partition(":")[0].removeprefix("held out, ")
            if one["style"] not in ("star", "diamond"):
                meanings.setdefault(one["colour"], set()).add(label)
    assert meanings
    assert {colour: names for colour, names in meanings.items() if len(names) > 1} == {}


# ---- print, screen readers, sizes


def test_report_is_printed_light_and_without_buttons(
    browser: Browser,  # noqa: F811
    made: Path,
    tmp_path: Path,
) -> None:
    watched = Watched(browser, made / "report.html", color_scheme="dark")
    watched.drawn("#plot-fig1")
    watched.page.emulate_media(media="print", color_scheme="dark")
    assert watched.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    shown = "[...document.querySelectorAll('button, input, select')].filter(e => "
    shown += "e.checkVisibility() && !e.closest('th')).length"
    assert watched.value(shown) == 0
    watched.page.emulate_media(media="screen", color_scheme="dark")
    watched.page.pdf(path=tmp_path / "a.pdf")
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF-")
    watched.until(f"document.getElementById('plot-fig1').layout.plot_bgcolor == '{DARK_GROUND}'")
    watched.close()


def test_report_names_everything_for_a_screen_reader(opened: Watched) -> None:
    nameless = opened.value(
        """[...document.querySelectorAll('button, input, select, [role], nav, table')].filter(e =>
          !(e.getAttribute('aria-label') || e.labels?.length || e.textContent.trim()
            || e.querySelector('caption'))).map(e => e.outerHTML.slice(0, 80))"""
    )
    assert nameless == []
    ids = opened.value("[...document.querySelectorAll('[id]')].map(e => e.id)")
    ours = [one for one in ids if not one.startswith(("clip", "g", "topdefs", "defs", "legend"))]
    assert len(ours) == len(set(ours))
    links = opened.value("[...document.querySelectorAll('a[href^=\"#\"]')].map(e => e.hash)")
    assert {link[1:] for link in links} <= set(ids), "a table of contents that leads somewhere"
    assert opened.value("document.documentElement.lang") == "en"


def test_report_shows_a_decoders_text_as_text(opened: Watched) -> None:
    sample = opened.page.locator(".samples pre")
    assert sample.inner_text() == "It <b>was the</pre><i>end"
    assert sample.locator("mark").inner_text() == "It <b>was"


@pytest.mark.parametrize("number", [1000])
def test_report_of_a_thousand_runs_is_small_and_begins_with_five_lines(
    number: int,
    made: Path,
    browser: Browser,  # noqa: F811
    tmp_path: Path,
) -> None:
    """With a thousand epochs each, as the paper's figure has."""
    known = Store(made).rows()
    rows = []
    for i in range(number):
        row = known[i % len(known)]
        error = row["held_out"] * (1 + math.sin(i) / 97)
        curve = [error * (2 - math.cos(i + e / 50)) for e in range(1000)]
        evaluated = [[e, curve[e]] for e in range(0, 1000, 10)]
        new = {"id": f"{i:016x}", "seed": i, "held_out": error, "train_best": min(curve)}
        rows.append({**row, **new, "curve": curve, "held_out_curve": evaluated})
    path = tmp_path / "page.html"
    made_section = section("fig1", rows)
    write_page(path, [made_section])
    assert path.stat().st_size < 4_000_000
    watched = Watched(browser, path)
    watched.drawn("#plot-fig1")
    assert watched.page.locator("#fig1 > .answer, #fig1 > ul.headline li").count() <= 5
    assert watched.page.locator("table[data-name=runs] tbody tr").count() == 50
    watched.page.locator("#filter-0-runs").fill("seed>=990")
    assert watched.cells("runs", "seed") == [str(seed) for seed in range(990, 1000)]
    watched.drawn("#curve-fig1")
    watched.close()
