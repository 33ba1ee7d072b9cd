"""The pages of docs/ and the README: short sentences, numbers in tables, links that lead somewhere,
the names of today."""

import re
from pathlib import Path

import pytest
from support.prose import prose

from dev.write_layout import FOLDERS, files, layout

ROOT = Path(__file__).parent.parent
GENERATED = {"docs/api.md", "docs/cli.md", "docs/layout.md"}
PAGES = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))
READ = ["README.md", "CONTRIBUTING.md", *PAGES]  # by people who want to know what headwise is
ACCOUNTS = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "results").glob("*/README.md"))

NUMBERS_PER_100_WORDS = 8
MEDIAN_SENTENCE = 22
LONGEST_SENTENCE = 50
MEDIAN_SENTENCE_OF_AN_ACCOUNT = 26  # of results/*/README.md, which are for who checks

# Modules that other names have now, and what the project's own dialect was.
OLD_MODULES = (
    *("engine", "stack", "trunk", "fused", "ranks", "families", "models", "runs", "sweep"),
    *("report", "figures", "language", "tokens", "optimise", "pretrain", "attention", "backends"),
    *("generate", "infer", "cache"),
)
OLD_NAMES = re.compile(
    rf"\bheadwise[./](?:{'|'.join(OLD_MODULES)})\b(?!\()"
    r"|\bkernels/(?:short|heads|wide|tiles|chain|feed|decoder|layer|pre|ends|points|adamw|unit)\."
    r"|\b(?:chain|feed|decoder)\.cu\b|\bpost\.cuh\b|(?<!tests/support/)\bwarp\.h\b"
)
DIALECT = re.compile(
    r"\b(?:µs|ms|seconds) an? (?:layer|step|run)\b|\bbytes? a token\b|\btokens a second\b"
    r"|\bseeds? a point\b|\bjudged?\b|\bgoes on (?:from|where)\b|\bgo on (?:from|where)\b"
    r"|\bway back\b|\bcarried times\b|\ba line a rank\b|\bone file a figure\b",
    re.I,
)


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def test_readme_is_at_most_8_kilobytes() -> None:
    assert len(text_of("README.md").encode()) <= 8 * 1024


@pytest.mark.parametrize("page", [p for p in READ if p not in GENERATED])
def test_page_keeps_its_numbers_in_tables_and_its_sentences_short(page: str) -> None:
    counted = prose(text_of(page))
    assert counted.numbers_per_100_words <= NUMBERS_PER_100_WORDS
    assert counted.median_sentence <= MEDIAN_SENTENCE
    assert len(counted.longest_sentence.split()) <= LONGEST_SENTENCE, counted.longest_sentence


@pytest.mark.parametrize("page", ACCOUNTS)
def test_account_opens_with_its_claim(page: str) -> None:
    claim = text_of(page).splitlines()[2]
    assert claim.startswith("**"), claim
    counted = prose(text_of(page))
    assert counted.median_sentence <= MEDIAN_SENTENCE_OF_AN_ACCOUNT
    assert len(counted.longest_sentence.split()) <= LONGEST_SENTENCE, counted.longest_sentence


@pytest.mark.parametrize("page", [*READ, *ACCOUNTS])
def test_page_has_the_names_of_today(page: str) -> None:
    assert not OLD_NAMES.findall(text_of(page))


@pytest.mark.parametrize("page", [*(p for p in READ if p not in GENERATED), *ACCOUNTS])
def test_page_has_the_words_of_the_field(page: str) -> None:
    assert not DIALECT.findall(text_of(page))


@pytest.mark.parametrize("page", [*READ, *ACCOUNTS, "CHANGELOG.md"])
def test_links_and_pictures_of_a_page_lead_somewhere(page: str) -> None:
    text = text_of(page)
    for target in re.findall(r"\]\(((?!http)[^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        there = (ROOT / page).parent / path if path else ROOT / page
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there.read_text()), target


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    kept = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings]
    return {re.sub(r"[²³]", "", h) for h in kept} | set(kept)


def test_layout_names_every_file_and_no_other() -> None:
    page = text_of("docs/layout.md")
    named: set[str] = set()
    for section in page.split("\n## ")[1:]:
        folder = section.partition("/\n")[0]
        named |= {f"{folder}/{name}" for name in re.findall(r"^\| `([^`]+)` \|", section, re.M)}
    there = {str(path) for folder in FOLDERS for path in files(folder)}
    assert named == there, "docs/layout.md is out of date: run `make docs`"


def test_layout_has_a_clause_for_every_file() -> None:
    assert not re.findall(r"^\| `[^`]+` \| +\|$", layout(), re.M)


@pytest.mark.parametrize("page", [*READ, "CHANGELOG.md"])
def test_page_names_targets_that_make_has(page: str) -> None:
    targets = set(re.findall(r"^(\w+):", text_of("Makefile"), re.M))
    assert set(re.findall(r"^make (\w+)|`make (\w+)`", text_of(page), re.M)) <= {
        pair for name in targets for pair in ((name, ""), ("", name))
    }


def test_glossary_names_files_that_are_there() -> None:
    table = text_of("CONTRIBUTING.md").partition("## Glossary")[2]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 40
    assert [r[0].strip() for r in rows] == sorted((r[0].strip() for r in rows), key=str.lower)
    for term, _, where in rows:
        for path in re.findall(r"`([a-z_*/]+(?:/|\.py|\.cu))`", where):
            folder = ROOT if path.startswith("tests") else ROOT / "src" / "headwise"
            assert list(folder.glob(path.rstrip("/"))), (term, path)


# The thresholds can fail: pages as they were.


def test_prose_sees_a_wall_of_numbers() -> None:
    wall = (
        "Five layers against one: -0.29 ± 0.06, -0.37 ± 0.02, -0.376 ± 0.009, -0.319 ± 0.003 at "
        "ranks 32 to 4, and -0.0014 ± 0.0007 at full rank of 64."
    )
    assert prose(wall).numbers == 13
    assert prose(wall).numbers_per_100_words > NUMBERS_PER_100_WORDS
    table = "\n".join(f"| {n} | 0.{n} |" for n in range(40))
    assert prose(f"In words.\n\n{table}\n\n```\n1 2 3\n```\n`4` d^2.5 H200 4 x 128").numbers == 0


def test_prose_sees_a_long_sentence() -> None:
    long = "One, " + "and a word, " * 20 + "and an end."
    assert prose(long).median_sentence > MEDIAN_SENTENCE
    assert prose(f"{long} Short one. Another, shorter. The last.").median_sentence < 5
    assert prose(long).longest_sentence == long


def test_old_names_and_dialect_are_seen() -> None:
    assert OLD_NAMES.findall("see headwise/engine.py, headwise.pretrain.trained, kernels/chain.cu")
    assert not OLD_NAMES.findall("headwise pretrain, headwise.run(), headwise.training.engine")
    assert len(DIALECT.findall("57 bytes a token, 3 µs a layer, judged on, goes on where")) == 4
    assert not DIALECT.findall("bytes per token, evaluated on, the loss goes on falling")
