"""The page of an inspection in a browser: offline, no errors, maps that answer clicks, a filter."""

import pytest
import torch
from support.planted_heads import planted, separate, write
from support.report_page import browser  # noqa: F401

from headwise.diagnose.inspection import inspect
from headwise.show.inspect_page import write_inspect_page


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    heads = planted()
    first = write(folder / "first", *separate(*heads))
    other = write(folder / "other", *separate(heads[0] + 0.1 * torch.ones(29), *heads[1:]))
    found = inspect(first, other)
    write_inspect_page(folder / "page.html", found.to_json(), found.rows, "headwise inspect first")
    return folder / "page.html"


@pytest.mark.parametrize("width", [1400, 390])
def test_page_of_an_inspection_works_offline(width, path, browser):  # noqa: F811
    context = browser.new_context(offline=True, viewport={"width": width, "height": 900})
    page = context.new_page()
    faults, asked = [], []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    assert page.locator("#table tbody tr").count() == 6
    page.fill("#filter", "head<2 layer=0")
    assert page.locator("#count").inner_text() == "2 of 6 heads"
    page.fill("#filter", "")
    page.locator("#table tbody tr").nth(4).click()
    assert "head 4" in page.locator("#spectrum").inner_text()
    page.select_option("#measure", "condition")
    page.click("[data-form=vo]")
    assert "condition number" in page.locator("#legend").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("#moved .heatmaplayer").count() == 1
    with page.expect_download() as download:
        page.click("#csv")
    assert download.value.path().read_text().startswith("layer,head,kv_head")
    assert faults == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    context.close()
