"""What is released: every file of the package has a pattern that puts it into the wheel, one
version, one place to cite, and an overview whose links lead somewhere. `dev/check_package.py`
builds and installs for real."""

import re
import tomllib
from pathlib import Path

import headwise

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "headwise"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PATTERNS = PROJECT["tool"]["setuptools"]["package-data"]["headwise"]


def data_files(package: Path) -> set[str]:
    """Every file of the package that is no Python, as git would know it."""
    return {
        str(path.relative_to(package))
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }


def matched(package: Path, patterns: list[str]) -> set[str]:
    """What the patterns put into a wheel, as setuptools reads them."""
    found = {path for pattern in patterns for path in package.glob(pattern) if path.is_file()}
    return {str(path.relative_to(package)) for path in found}


def test_wheel_has_every_file_of_the_package() -> None:
    assert matched(PACKAGE, PATTERNS) == data_files(PACKAGE)
    assert {"py.typed", "show/templates/explorer/costs.js"} <= data_files(PACKAGE)


def test_wheel_has_every_folder_with_python() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert {folder for folder in folders if not (folder / "__init__.py").is_file()} == set()


def test_file_without_a_pattern_is_seen(tmp_path: Path) -> None:
    (tmp_path / "show/templates/explorer").mkdir(parents=True)
    for name in ("show/templates/page.html", "show/templates/explorer/a.js", "show/b.css"):
        (tmp_path / name).write_text("")
    assert data_files(tmp_path) - matched(tmp_path, PATTERNS) == {"show/b.css"}


def test_version_has_one_place() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "headwise.__version__"}
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {headwise.__version__}\n" in citation


def test_changelog_keeps_its_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert text.startswith("# Changelog\n")
    sections = re.findall(r"^## (.+)$", text, re.M)
    assert sections[0] == "Unreleased"
    for section in sections[1:]:
        assert re.fullmatch(
            r"\[?\d+\.\d+\.\d+\]?( - \d{4}-\d\d-\d\d| \(not published\))", section
        ), section
    unreleased = text.partition("\n## Unreleased\n")[2].partition("\n## ")[0]
    kinds = set(re.findall(r"^### (.+)$", unreleased, re.M))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_overview_leads_to_pages_that_are_there() -> None:
    text = (ROOT / "llms.txt").read_text()
    assert text.startswith("# headwise\n\n> ")
    links = re.findall(r"^- \[[^]]+\]\(([^)]+)\)", text, re.M)
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).is_file()] == []


def test_sdist_names_files_that_are_there() -> None:
    lines = (ROOT / "MANIFEST.in").read_text().splitlines()
    named = [word for line in lines if line.startswith("include ") for word in line.split()[1:]]
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_skill_has_a_name_and_says_when_to_use_it() -> None:
    head = (ROOT / "docs/SKILL.md").read_text().split("---")[1]
    fields = dict(line.split(": ", 1) for line in head.strip().splitlines())
    assert fields["name"] == "headwise"
    assert 100 < len(fields["description"]) < 500
