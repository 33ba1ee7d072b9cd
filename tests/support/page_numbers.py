"""Numbers of documentation pages beside the values that rows of results/ give.

A claim is a phrase of a page with `#` where a number stands, and how that number is computed. What
is shown must be the value rounded to the digits shown.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from headwise.experiments.tuning import rows_at_best_rate
from headwise.stats import Mean, group, mean

ROOT = Path(__file__).parent.parent.parent
SHOWN = r"([-+]?\d[\d,]*(?:\.\d+)?)"
Rows = list[dict[str, Any]]


def rows_of(*files: str) -> Rows:
    """The rows of files in results/."""
    lines = [line for f in files for line in (ROOT / "results" / f).read_text().splitlines()]
    return [json.loads(line) for line in lines]


def errors(rows: Rows) -> list[float]:
    """Held-out errors of the runs that did not diverge."""
    return [row["held_out"] for row in rows if row["status"] == "done"]


def cells_of_map(file: str) -> dict[tuple[int, int, int], Rows]:
    """(layers, heads, rank) -> the rows that count: those at the tuned rate."""
    found = group(rows_of(f"map/{file}"), "depth", "num_heads", "head_dim")
    return {(key[0], key[1], key[2]): rows_at_best_rate(rows) for key, rows in found.items()}


# ---- tables


def cells(page: str, heading: str) -> list[list[str]]:
    """The body of the table with that first line, row by row."""
    text = (ROOT / page).read_text()
    assert text.count(heading) == 1, heading
    lines = text[text.index(heading) :].split("\n\n")[0].strip().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def agrees(shown: str, value: float) -> bool:
    """Whether a number in a page is that value, rounded to the digits shown."""
    number = Decimal(shown.replace(",", "").replace("*", ""))
    digits = -int(number.as_tuple().exponent)
    return abs(float(number) - value) <= 0.5000001 * 10.0**-digits


def check_mean(cell: str, values: list[float]) -> None:
    """A cell such as `0.476 ± 0.01` or `0.4 (n=1)`."""
    found = mean(values)
    shown = re.match(r"([\d.]+)(?: ± ([\d.]+))?", cell)
    assert shown, cell
    assert agrees(shown[1], found.mean), (cell, found)
    if shown[2]:
        assert agrees(shown[2], half_width(found)), (cell, found)
    else:
        assert len(values) == 1, cell
    if shown[2] and "n=" in cell:
        assert f"n={len(values)}" in cell


def check_difference(cell: str, gap: Mean) -> None:
    """A cell such as `-0.027 ± 0.019` or `none found (+0.005 ± 0.021)`: of the two only one says
    that nothing was found, the one whose interval holds zero."""
    shown = re.search(r"([-+]?[\d.]+(?:e-\d+)?) ± ([\d.]+(?:e-\d+)?)", cell)
    assert shown, cell
    assert gap.low is not None
    assert gap.high is not None
    assert agrees(shown[1], gap.mean), (cell, gap)
    assert agrees(shown[2], half_width(gap)), (cell, gap)
    assert cell.startswith("none found") == (gap.low <= 0 <= gap.high), (cell, gap)


def check_correlation(cell: str, rho: Mean) -> None:
    """A cell such as `-0.89 (-0.96 to -0.74)`."""
    shown = re.search(r"([-+][\d.]+) \(([-+][\d.]+) to ([-+][\d.]+)\)", cell)
    assert shown, cell
    assert rho.low is not None
    assert rho.high is not None
    for text, value in zip(shown.groups(), (rho.mean, rho.low, rho.high), strict=True):
        assert agrees(text, value), (cell, rho)


def half_width(found: Mean) -> float:
    assert found.low is not None
    assert found.high is not None
    return (found.high - found.low) / 2


# ---- claims in sentences


@dataclass(frozen=True)
class Claim:
    """A phrase of a page with `#` for each number, and the values of these numbers."""

    phrase: str
    values: Callable[[], Sequence[float]]

    @property
    def pattern(self) -> str:
        made = {"#": SHOWN, " ": r"\s+"}
        return "".join(
            made.get(part) or re.escape(part) for part in re.split("([# ])", self.phrase)
        )


def wrong_claims(page: str, claims: Iterable[Claim]) -> list[str]:
    """What of the claims a page does not say, or says with another number."""
    out = []
    for claim in claims:
        found = re.findall(claim.pattern, page)
        values = claim.values()
        if len(found) != 1:
            out.append(f"{len(found)} times in the page: {claim.phrase}")
            continue
        shown = [found[0]] if isinstance(found[0], str) else list(found[0])
        for text, value in zip(shown, values, strict=True):
            if not agrees(text, value):
                out.append(f"{claim.phrase}: {text} for {value:.6g}")
    return out


def unclaimed(page: str, claims: Iterable[Claim]) -> list[str]:
    """The page's numbers in sentences that no claim covers, each with some words around it."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.M | re.S)
    text = re.sub(r"^(\s*\|.*|!\[.*)$", "", text, flags=re.M)
    for claim in claims:
        text = re.sub(claim.pattern, "", text)
    text = re.sub(r"\]\([^)]*\)|`[^`]*`", "", text)
    found = re.finditer(r"(?<![\w^.,/])\d[\d,]*(?:\.\d+)?(?![\w²³]|\.\d)", text)
    return [" ".join(text[max(m.start() - 20, 0) : m.end() + 20].split()) for m in found]
