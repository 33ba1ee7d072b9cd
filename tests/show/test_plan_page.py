"""The page of a plan, in a browser without a network: sorted, filtered, drawn."""

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Error, Page, sync_playwright

from headwise.cli import main


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page of a small plan, opened once."""
    path = tmp_path_factory.mktemp("plan") / "plan.html"
    words = ["--params", "2M", "--set", "vocab_size=512", "head_dim=16,32", "dim=96,128"]
    assert main(["plan", *words, "--page", str(path), "--kv-bytes", "<=4KiB"]) == 0
    found = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except Error:
            if found or "CI" in os.environ:
                raise
            pytest.skip("there is no browser: install Debian's chromium")
        opened = browser.new_context(offline=True).new_page()
        faults: list[str] = []
        opened.on("pageerror", lambda error: faults.append(str(error)))
        opened.goto(path.as_uri())
        yield opened
        assert faults == []
        browser.close()


def column(page: Page, heading: str) -> list[str]:
    heads = page.locator("#heads th").all_text_contents()
    rows = page.locator("#rows tbody tr")
    return rows.locator(f"td:nth-child({heads.index(heading) + 1})").all_text_contents()


def test_page_has_a_row_and_a_point_per_shape(page: Page) -> None:
    numbers = column(page, "#")
    assert numbers[:3] == ["1", "2", "3"]
    count = page.evaluate("document.getElementById('plot').data[0].x.length")
    assert count == len(numbers) > 5
    assert page.locator("#count").text_content() == f"{count} of {count} rows"
    assert "headwise plan --params 2M" in (page.locator("pre").text_content() or "")


def test_page_sorts_by_a_column_and_back(page: Page) -> None:
    button = page.locator("#heads button", has_text="layers")
    button.click()
    depths = [int(text) for text in column(page, "layers")]
    assert depths == sorted(depths)
    assert depths[0] < depths[-1]
    button.click()
    assert [int(text) for text in column(page, "layers")] == depths[::-1]


@pytest.mark.parametrize("text", ["16", "<=16", "1..20"])
def test_page_filters_rows_and_points(page: Page, text: str) -> None:
    field = page.get_by_label("filter rank")
    field.fill(text)
    assert set(column(page, "rank")) == {"16"}
    assert page.evaluate("document.getElementById('plot').data[0].x.length") == len(
        column(page, "rank")
    )
    field.fill("")
    assert set(column(page, "rank")) == {"16", "32"}


def test_page_reads_costs_with_units(page: Page) -> None:
    field = page.get_by_label("filter KV/token")
    field.fill("<=1KiB")
    cells = column(page, "KV/token")
    assert cells
    assert all(cell.endswith("B") for cell in cells)
    assert all(not cell.endswith("KiB") or float(cell[:-3]) <= 1 for cell in cells)
    field.fill("")


def test_page_draws_the_front_of_the_two_costs_chosen(page: Page) -> None:
    page.locator("#x").select_option("kv_bytes_per_token")
    page.locator("#y").select_option("activation_bytes")
    points = page.evaluate(
        "(() => { const d = document.getElementById('plot').data;"
        " return [0, 1].map(i => Array.from(d[i].x, (x, k) => [x, d[i].y[k]])); })()"
    )
    rows, front = ([tuple(point) for point in part] for part in points)

    def beaten(a: tuple[float, float]) -> bool:
        return any(b[0] <= a[0] and b[1] <= a[1] and b != a for b in rows)

    assert set(front) == {point for point in rows if not beaten(point)}
