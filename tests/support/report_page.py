"""A page in a real browser without a network, and a small store to make one of."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Error, Page, sync_playwright

from headwise.cli import main

TINY = [
    *("dim=8", "points=4", "ffn_dim=8", "ranks=8,2,1", "depths=1,2", "widths=1,2"),
    *("steps=16", "epoch=2", "batch=8", "held_out=128"),
]


def make_store(path: Path) -> Path:
    """A real store: 24 runs, 12 points, two of each point."""
    words = [word for change in TINY for word in ("--set", change)]
    options = ["--device", "cpu", "--seeds", "2", "--workers", "1", "--store", str(path)]
    assert main(["run", "fig1", *options, *words]) == 0
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's chromium, or the one of Playwright."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if (path := shutil.which(name))), None)
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

    def __init__(self, browser: Browser, path: Path, **options: Any) -> None:
        options = {"viewport": {"width": 1280, "height": 900}, **options}
        self.context = browser.new_context(offline=True, **options)
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
        """Nothing was asked for but the page, and nothing was said."""
        # What a page makes itself, an image of a figure or a file to save, is no request.
        own = ("blob:", "data:")
        asked = [url for url in self.requests if not url.startswith(own)]
        assert asked == [self.path.as_uri()]
        assert self.said == []

    def close(self) -> None:
        """Close it, quiet to the end."""
        self.assert_quiet()
        self.context.close()

    def value(self, script: str, argument: Any = None) -> Any:
        """What a script gives."""
        return self.page.evaluate(script, argument)

    def until(self, condition: str) -> None:
        """Wait for it. The page's policy lets no script be made of text, so it is asked again and
        again from here."""
        for _ in range(300):
            if self.page.evaluate(condition):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"not within 15 s: {condition}")

    def drawn(self, plot: str) -> None:
        """Wait for a figure, which is drawn when it comes near the window."""
        self.page.locator(plot).scroll_into_view_if_needed()
        self.page.wait_for_selector(f"{plot}[data-drawn]")

    def headings(self, table: str) -> list[str]:
        texts = self.page.locator(f"table[data-name={table}] th").all_inner_texts()
        return [re.sub(" [↑↓]$", "", text) for text in texts]

    def cells(self, table: str, heading: str) -> list[str]:
        column = self.headings(table).index(heading) + 1
        cells = f"table[data-name={table}] tbody tr td:nth-child({column})"
        return self.page.locator(cells).all_inner_texts()

    def sort_by(self, table: str, heading: str) -> list[str]:
        column = self.headings(table).index(heading)
        self.page.locator(f"table[data-name={table}] th button").nth(column).click()
        return self.cells(table, heading)
