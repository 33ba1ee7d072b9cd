"""The explorer in Chromium, without a network: a page that notes whatever it asks for and says."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Error, Page, sync_playwright


@contextmanager
def chromium() -> Iterator[Browser]:
    found = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except Error:
            if found or "CI" in os.environ:
                raise
            pytest.skip("there is no browser: install Debian's chromium")
        yield browser
        browser.close()


class Quiet:
    """A page of a file, opened offline. Leaving it checks that it asked for nothing else."""

    def __init__(self, browser: Browser, path: Path, address: str = "", **options: Any) -> None:
        self.context = browser.new_context(
            offline=True, **{"viewport": {"width": 1400, "height": 1000}, **options}
        )
        self.page: Page = self.context.new_page()
        self.asked: list[str] = []
        self.said: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.uri = path.as_uri()
        self.page.goto(f"{self.uri}{address}")
        self.page.wait_for_function("document.getElementById('sentence').textContent !== ''")

    def __enter__(self) -> Page:
        return self.page

    def __exit__(self, *reason: object) -> None:
        self.context.close()
        if reason[0] is None:
            assert {url.partition("#")[0] for url in self.asked} == {self.uri}
            assert self.said == []
