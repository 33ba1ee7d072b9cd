"""Conversions of trained decoders: predicted and measured loss beside plainer means, as CSV.

headwise pretrain --store store ...                        # twice, keep the ids
python -m benchmarks.convert_decoders store/runs/ID text.txt --name gpt2-style --csv rows.csv
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from headwise.converting.convert import convert
from headwise.diagnose.checkpoints import open_checkpoint
from headwise.errors import UsageError

ASKED: tuple[dict[str, int], ...] = (
    {"head_dim": 16},
    {"rank": 16},
    {"rank": 8},
    {"rank": 4},
    {"num_kv_heads": 2},
    {"num_kv_heads": 1},
    {"rank": 16, "num_kv_heads": 2},
    {"kv_lora_rank": 129},
    {"kv_lora_rank": 64},
    {"kv_lora_rank": 32},
    {"kv_lora_rank": 16},
    {"head_dim": 64, "v_head_dim": 64},
    {"num_heads": 8, "num_kv_heads": 8, "v_head_dim": 16},
)


def commit() -> str:
    """Of this checkout."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def row_of(run: Path, data: Path, name: str, sizes: dict[str, Any], count: int) -> dict[str, Any]:
    """One conversion, written and loaded again."""
    words = " ".join(f"{key}={value}" for key, value in sizes.items())
    row: dict[str, Any] = {"model": name, "asked": words}
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = convert(run, out=Path(folder) / "new", data=data, sequences=count, **sizes)
        except UsageError as error:
            return row | {"refused": str(error)}
    losses = done.losses
    assert losses is not None
    miss = losses.miss
    pretraining = json.loads(open_checkpoint(run).source.about["run"])
    return row | {
        "exact": done.exact,
        "before": losses.before,
        "predicted": losses.predicted - losses.before,
        "measured": losses.measured - losses.before,
        "error": losses.error,
        "miss": None if miss is None else miss,
        **{key.replace(" ", "_"): v - losses.before for key, v in losses.controls.items()},
        "worst_scores_lost": max(layer.scores_lost for layer in done.layers),
        "worst_outputs_lost": max(layer.outputs_lost for layer in done.layers),
        "pairs_energy": done.pairs_energy,
        "params": done.target.params / done.source.params - 1,
        "kv_bytes": done.target.kv_bytes(1) / done.source.kv_bytes(1) - 1,
        "sequences": losses.sequences,
        "tokens": losses.tokens,
        "seed": pretraining["seed"],
        "steps": pretraining["steps"],
        "seconds": round(done.seconds, 1),
        "command": f"headwise convert RUN --to {words} --data TEXT --sequences {count}",
        "commit": commit(),
        "device": f"cpu ({platform.machine()}), torch {torch.__version__}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=128)
    args = parser.parse_args()
    rows = []
    for sizes in ASKED:
        rows.append(row_of(args.run, args.data, args.name, sizes, args.sequences))
        print(json.dumps(rows[-1]), flush=True)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with args.csv.open("w", newline="") as f:
        writer = csv.DictWriter(f, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
