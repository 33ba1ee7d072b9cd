"""The site of the documentation, without its generator: the navigation has every page once, and the
pages as they are assembled lead to each other, to places that are there. `make docs` builds it."""

import re
import sys
from pathlib import Path

import pytest

from dev.build_docs import SHOWN, anchor, assembled, faults, pages

ROOT = Path(__file__).parent.parent
NAVIGATION = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
NAMED = re.findall(r"^ +- .+: (\S+\.md)$", NAVIGATION, re.M)
KNOWN = set(pages())


def test_navigation_has_every_page_of_the_docs_once() -> None:
    assert len(NAMED) == len(set(NAMED))
    of_docs = {str(page) for page in KNOWN if page.parts[0] == "docs"}
    assert {name for name in NAMED if name.startswith("docs/")} == of_docs
    assert {Path(name) for name in NAMED} <= KNOWN


def test_navigation_begins_with_which_shape() -> None:
    assert NAMED[:3] == ["README.md", "docs/which-shape.md", "docs/first-hour.md"]


@pytest.mark.parametrize("page", sorted(map(str, KNOWN)))
def test_links_of_an_assembled_page_lead_to_pages_and_places(page: str) -> None:
    pictures: set[Path] = set()
    text = re.sub(r"^```.*?^```", "", assembled(Path(page), KNOWN, pictures), flags=re.M | re.S)
    assert all((ROOT / picture).is_file() for picture in pictures)
    for to in re.findall(r"(?<!`)\]\(([^)\s]+)\)", text):
        path, _, part = to.partition("#")
        if re.match(r"\w+:", to):
            continue
        there = (ROOT / page).parent / path if path else ROOT / page
        target = there.resolve().relative_to(ROOT)
        assert target in KNOWN or target.suffix in SHOWN, to
        if part:
            assert f"{{#{part}}}" in assembled(target, KNOWN, set()), to


def test_anchors_are_those_of_the_repository() -> None:
    assert anchor("Three layers at d³: a plateau") == "three-layers-at-d-a-plateau"
    assert anchor("2. Query/key rank, `apart`") == "2-querykey-rank-apart"
    assert anchor("[A page](there.md) and more") == "a-page-and-more"


def test_pages_ask_no_other_host() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in text
    assert "http" not in text


def test_faults_of_a_site_are_seen(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="top">A</h1><a href="b.html#here">b</a><a href="b.html#gone">b</a>'
        '<a href="c.html">c</a><a href="#top">a</a><a href="https://example.org/">far</a>'
        '<script src="https://example.org/a.js"></script>'
        '<link rel="stylesheet" href="https://example.org/a.css">'
    )
    (tmp_path / "b.html").write_text('<p id="here">B</p>')
    assert faults(tmp_path) == [
        "a.html asks for https://example.org/a.js",
        "a.html asks for https://example.org/a.css",
        "a.html: no place b.html#gone",
        "a.html: no c.html",
    ]


def test_assembling_needs_no_generator() -> None:
    assert "zensical" not in sys.modules
