"""`headwise pretrain` of a small decoder, and what it prints."""

import json
from pathlib import Path
from typing import Any


def words_of(store: Path, book: str, *more: str) -> list[str]:
    shape = ["dim=22", "depth=2", "num_heads=3", "head_dim=10", "qk_rope_head_dim=10"]
    sizes = [
        "--steps",
        "150",
        "--batch-tokens",
        "88",
        "--length",
        "11",
        "--evals",
        "2",
        "--checkpoint-every",
        "0",
    ]
    return [
        "pretrain",
        "--device",
        "cpu",
        "--text",
        book,
        "--store",
        str(store),
        "--set",
        *shape,
        *sizes,
        "--json",
        *more,
    ]


def answer(out: str) -> dict[str, Any]:
    return json.loads(out.splitlines()[-1])["row"]
