"""The numbers of docs/convert.md against the rows that it names."""

import csv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/convert.md").read_text()
ASKED = {
    "head_dim=16": "queries and keys of rank 16 for 32",
    "rank=16": "rank 16 for 32, values too",
    "rank=8": "rank 8",
    "num_kv_heads=2": "2 KV heads for 4",
    "num_kv_heads=1": "1 KV head",
    "rank=16 num_kv_heads=2": "rank 16 and 2 KV heads",
    "kv_lora_rank=129": "latent of 129",
    "kv_lora_rank=64": "latent of 64",
    "kv_lora_rank=32": "latent of 32",
}
HALVES = ("head_dim=16", "rank=16", "num_kv_heads=2", "kv_lora_rank=129")


def rows_of(name: str) -> dict[str, dict[str, str]]:
    """The rows of a file that were converted, by what was asked."""
    text = (ROOT / f"results/convert/{name}.csv").read_text()
    return {
        row["asked"]: row for row in csv.DictReader(text.splitlines()) if not row.get("refused")
    }


def signed(row: dict[str, str], name: str) -> str:
    return f"{float(row[name]):+.4f}" if row.get(name) else "-"


@pytest.mark.parametrize("name", ["gpt2-style", "llama-style", "source-code"])
def test_line_of_a_conversion_is_that_of_its_row(name: str) -> None:
    rows = rows_of(name)
    for asked in ASKED.keys() & rows.keys():
        row = rows[asked]
        miss = f"{float(row['miss']):+.0%}" if row["miss"] else "-"
        line = (
            f"| {row['model']} | {ASKED[asked]} | {float(row['kv_bytes']):+.0%} | "
            f"{signed(row, 'predicted')} | {signed(row, 'measured')} | {float(row['error']):.4f} | "
            f"{miss} | {signed(row, 'weights_alone')} | {signed(row, 'by_index')} |"
        )
        assert line in PAGE


def test_line_of_a_latent_beside_a_rotating_key_is_that_of_its_row() -> None:
    rows = rows_of("llama-latent")
    assert len(rows) == 7
    for asked, row in rows.items():
        sizes = {"qk_rope_head_dim": "32"} | dict(part.split("=") for part in asked.split())
        line = (
            f"| {sizes['kv_lora_rank']} | {sizes['qk_rope_head_dim']} | "
            f"{float(row['kv_bytes']):+.0%} | {signed(row, 'predicted')} | "
            f"{signed(row, 'measured')} | {float(row['error']):.4f} | {float(row['miss']):+.0%} | "
            f"{signed(row, 'weights_alone')} |"
        )
        assert line in PAGE


def test_claims_hold_in_the_rows() -> None:
    gpt, llama, code = map(rows_of, ("gpt2-style", "llama-style", "source-code"))
    for asked in ("rank=16", "num_kv_heads=2", "kv_lora_rank=129"):
        assert float(gpt[asked]["measured"]) < 0.001
    assert abs(float(gpt["kv_lora_rank=129"]["measured"])) < 1e-6
    for rows in (gpt, llama, code):
        for asked in HALVES:
            if asked in rows and rows[asked]["miss"]:
                assert abs(float(rows[asked]["miss"])) < 0.2
    for row in (*gpt.values(), *llama.values(), *code.values()):
        if "head_dim=64" in row["asked"] or "num_heads=8" in row["asked"]:
            assert abs(float(row["measured"])) < 1e-6


def test_curves_are_those_of_their_rows() -> None:
    text = (ROOT / "results/convert/finetuned.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    found = {(row["asked"], row["step"]): f"{float(row['held_out']):.4f}" for row in rows}
    before = f"{float(rows[0]['before']):.4f}"
    assert f"| before conversion | {before} | {before} |" in PAGE
    for step in ("0", "20", "80", "160"):
        line = f"| {step} | {found['rank=16', step]} | {found['num_kv_heads=2', step]} |"
        assert line in PAGE
