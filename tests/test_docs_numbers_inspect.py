"""The numbers of docs/inspect.md against the rows that it names."""

import csv
import re
from pathlib import Path
from statistics import fmean

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/inspect.md").read_text()
NAMES = {
    "pre-trained": "rxnfp-bert_pretrained",
    "fine-tuned to classify": "rxnfp-bert_ft",
    "fine-tuned again": "rxnfp-bert_ft_10k_25s",
}


def rows_of(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((ROOT / f"results/inspect/{name}.csv").read_text().splitlines()))


@pytest.mark.parametrize("label", NAMES)
def test_line_of_a_model_is_that_of_its_rows(label: str) -> None:
    rows = rows_of(NAMES[label])
    effective = [float(row["qk_effective"]) for row in rows]
    r90 = [int(row["qk_r90"]) for row in rows]
    worst = max(float(row["qk_condition"]) for row in rows)
    line = (
        f"| {label} | {fmean(effective):.1f} ({min(effective):.1f} to {max(effective):.1f}) | "
        f"{fmean(r90):.1f} ({min(r90)} to {max(r90)}) | {worst:.0f} |"
    )
    assert line in PAGE
    assert len(rows) == 48
    random = rows[0]
    assert f"| random weights | {float(random['qk_effective_random']):.1f} |" in PAGE
    assert float(random["qk_r90_random"]) == 44


def test_first_layers_are_those_that_hold_little() -> None:
    low = {int(row["layer"]) for row in rows_of("rxnfp-bert_pretrained")
           if int(row["qk_r90"]) <= 16}  # fmt: skip
    assert low == set(range(5))
    assert "first five layers" in PAGE


def test_ratio_of_the_speed_table_is_that_of_its_times() -> None:
    layer, dense = (float(re.search(rf"\| {what} \| ([\d.]+) s", PAGE)[1]) for what in
                    ("processor time per layer", "dense SVD of one head's form"))  # fmt: skip
    ratio = int(re.search(r"over a layer here \| (\d+)", PAGE)[1])
    assert 64 * dense / layer == pytest.approx(ratio, rel=0.02)
