"""The words of `headwise convert`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from headwise.cli.values import number, whole


def add_convert(add: Callable[[str, str, str], argparse.ArgumentParser]) -> None:
    """`headwise convert`; `add` makes a command of its name, what it does and an example."""
    command = add(
        "convert",
        "Write a checkpoint at another shape: lower rank, fewer KV heads, a latent, or wider and "
        "more heads at the same function. With --data it is calibrated, and the loss that it costs "
        "is predicted and measured.",
        "headwise convert ./checkpoint --rank 64 --data book.txt\n"
        "half the cache: headwise convert ./checkpoint --to num_kv_heads=4 --data book.txt\n"
        "and recovered:  headwise convert ./checkpoint --rank 64 --data book.txt --finetune 500",
    )
    command.add_argument(
        "path", help="a Hugging Face folder, or the folder of a run whose weights were kept"
    )
    command.add_argument(
        "--to", nargs="+", default=[], metavar="SIZE=N",
        help="head_dim, v_head_dim, num_kv_heads, kv_lora_rank (under rotary positions also "
        "qk_rope_head_dim) or num_heads: smaller ones are the best approximation, larger ones "
        "exact",
    )  # fmt: skip
    command.add_argument("--rank", type=whole, metavar="N", help="head_dim and v_head_dim at once")
    command.add_argument(
        "--out", metavar="FOLDER",
        help="a new folder; default the checkpoint's name and the sizes, here",
    )  # fmt: skip
    command.add_argument(
        "--dry-run", action="store_true", help="write nothing, say what it would cost"
    )
    command.add_argument(
        "--as", dest="format", default="same", metavar="FORMAT",
        help="hf (Hugging Face, for transformers), headwise, or same as the checkpoint; default "
        "same",
    )  # fmt: skip
    command.add_argument(
        "--data", metavar="FILE",
        help="a text, or a JSON list of token ids: its first part calibrates, its last is "
        "measured on",
    )  # fmt: skip
    command.add_argument(
        "--tokens", type=whole, default=128, metavar="N", help="of a sequence; default 128"
    )
    command.add_argument(
        "--sequences", type=whole, default=32, metavar="N",
        help="half to calibrate, half to measure; default 32",
    )  # fmt: skip
    command.add_argument(
        "--no-controls", action="store_true",
        help="leave out the same conversion without data, and by index",
    )  # fmt: skip
    command.add_argument(
        "--finetune", type=whole, default=0, metavar="STEPS",
        help="then train the result on the data that are not measured on, by AdamW, and say the "
        "curve; the result replaces the converted weights (the experiment `headwise run finetune` "
        "is something else)",
    )  # fmt: skip
    command.add_argument(
        "--lr", type=number, default=1e-3, metavar="N", help="of --finetune; default 0.001"
    )
    command.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of --finetune; default 0"
    )
    command.add_argument("--wide", action="store_true", help="all columns of the table")
