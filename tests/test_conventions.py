"""What every file keeps to: sizes, columns, words, names of tests. Lists of exceptions are exact:
an entry that is no longer needed fails."""

import re
from pathlib import Path

import pytest
from conftest import FIRST, QUICK

ROOT = Path(__file__).parent.parent
FOLDERS = ("src", "tests", "benchmarks", "dev", "examples")
SOURCES = {
    str(path.relative_to(ROOT)): path.read_text()
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".cu", ".cuh", ".cpp", ".h", ".html")
}
TESTS = {path: source for path, source in SOURCES.items() if path.startswith("tests/")}

# ---- sizes

LINES = 450
REASON = "Longer than 450 lines because"


def too_long(source: str) -> bool:
    """A file that is read in more than one sitting, and does not say why."""
    reason = REASON in " ".join(source[: 100 * 40].split())
    return len(source.splitlines()) > LINES and not reason


def test_package_has_at_most_thirteen_modules_at_its_top() -> None:
    paths = [Path(path) for path in SOURCES if path.count("/") == 2 and path.startswith("src/")]
    files = [path.stem for path in paths if not path.stem.startswith("__")]
    assert len(files) <= 13, sorted(files)


def test_file_is_read_in_one_sitting_or_says_why() -> None:
    assert {path for path, source in SOURCES.items() if too_long(source)} == set()


def test_long_file_is_seen() -> None:
    long = "a = 1\n" * (LINES + 1)
    assert too_long(long)
    assert not too_long(f'"""What.\n\nLonger than 450 lines\nbecause it is one table."""\n{long}')
    assert not too_long("a = 1\n" * LINES)


# ---- columns

COLUMNS = 100


def wide_lines(source: str) -> list[str]:
    """As ruff counts: without a comment for the type checker, and no line that is one word."""
    lines = (re.sub(r"\s+# (?:type: ignore|noqa).*$", "", line) for line in source.splitlines())
    return [line for line in lines if len(line) > COLUMNS and len(line.split()) > 1]


def test_lines_have_at_most_100_columns() -> None:
    assert {path for path, source in SOURCES.items() if wide_lines(source)} == set()


def test_wide_line_is_seen() -> None:
    assert wide_lines("int a;\n" + "a " * 51) == ["a " * 51]
    assert wide_lines("a " * 50 + "\n" + "1" * 200 + "\n" + "a " * 45 + "  # type: ignore[x]") == []


# ---- words

# Words of no one else -> what a reader would search for
DIALECT = {
    r"\btold\b(?! apart)": "message",  # two means may be told apart
    r"\bnow: slice\b": "group",
    r"\b(goes|go|going|went|gone) on\b": "resumes",
    r"\bway back\b|\bback through\b": "backward",
    r"\bµs a layer\b": "µs per layer",
    r"\bbytes a token\b": "bytes per token",
    r"\bseeds a point\b": "seeds per point",
    r"\bjudge[ds]?\b": "evaluated",
    r"\bit has .{1,60}, got\b": "needs X, this shape has Y",
}
OTHER_WORDS = {  # a key of old checkpoints, and what tests these words; nothing may join them
    "src/headwise/lm/checkpoint.py",
    "tests/test_conventions.py",
    "tests/test_docs.py",
}


def dialect_of(source: str) -> list[str]:
    return [
        line.strip()
        for line in source.splitlines()
        if any(re.search(word, line, re.IGNORECASE) for word in DIALECT)
    ]


def test_source_has_the_words_of_the_field() -> None:
    found = {path: dialect_of(source) for path, source in SOURCES.items() if path.endswith(".py")}
    assert {path for path, lines in found.items() if lines} == OTHER_WORDS, {
        path: lines for path, lines in found.items() if lines and path not in OTHER_WORDS
    }


def test_dialect_is_seen() -> None:
    for line in (
        "told = 3",
        "def step(self, now: slice):",
        "the run goes on where it was",
        "# 7 µs a layer, 12 bytes a token, 3 seeds a point",
        "errors on which it is judged",
        "it has the scalar norm after each part, got rms pre",
    ):
        assert dialect_of(line), line
    assert dialect_of("the run resumes; evaluated on 3 seeds per point") == []


# ---- tests

FILLER = r"(?:an?|the|what|every|no|all|so|it|each|both|nor|some|many)"


def misnamed(source: str) -> list[str]:
    """Tests whose names do not begin with the thing tested."""
    return re.findall(rf"def (test_{FILLER}_\w+)", source)


def test_name_of_a_test_begins_with_the_thing_tested() -> None:
    assert {path: misnamed(source) for path, source in TESTS.items() if misnamed(source)} == {}


def test_misnamed_test_is_seen() -> None:
    assert misnamed("def test_" + "the_row_is_kept():") == ["test_the_row_is_kept"]
    assert misnamed("def test_item_is_kept():\ndef test_allowance_is_exact():") == []


@pytest.mark.parametrize(("path", "prefix"), [*QUICK.items(), *((path, "") for path in FIRST)])
def test_choice_of_tests_names_tests_that_are_there(path: str, prefix: str) -> None:
    sources = [text for name, text in TESTS.items() if name.startswith(f"tests/{path}")]
    assert any(re.search(rf"^def {prefix or 'test_'}", source, re.M) for source in sources)
