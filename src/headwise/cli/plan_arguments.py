"""`headwise plan` and its options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headwise.cli.values import seconds, whole
from headwise.planning.costs import COSTS, MEASURED

EXAMPLE = """headwise plan --params 350M --kv-bytes 48KiB
          headwise plan --like config.json --keep params --kv-bytes -50%
          headwise plan --params 350M --kv-bytes 48KiB --row 3 --write row3

limits: 350M (about), <=350M, >=300M, 300M..400M; of the model of --like: -50%, <=-50%, same
fields: --set dim=1024 depth=12..32 num_kv_heads=1,2,4 activation=gelu windows=512/512/0"""


def add_plan(add: Callable[[str, str, str], Any], add_device: Callable[[Any], None]) -> None:
    """The command with all its options, by group."""
    command = add(
        "plan",
        "List every shape that meets limits on parameters, FLOPs and memory, with exact costs.",
        EXAMPLE,
    )
    limits = command.add_argument_group("limits")
    for cost in COSTS.values():
        limits.add_argument(cost.flag, dest=cost.name, metavar="LIMIT", help=cost.about)
    for name, about in MEASURED.items():
        flag = f"--{name.replace('_', '-')}"
        limits.add_argument(flag, dest=name, metavar="LIMIT", help=f"{about}; with --measure")
    at = command.add_argument_group("where costs are counted")
    at.add_argument("--context", type=whole, default=2048, metavar="N", help="tokens; default 2048")
    at.add_argument("--batch", type=whole, default=1, metavar="N", help="sequences; default 1")
    at.add_argument(
        "--dtype", default="bf16", help="fp32, bf16, fp16, fp8, int8 or int4; default bf16"
    )
    at.add_argument(
        "--tolerance", default="1%", metavar="SHARE", help="of limits without a sign; default 1%%"
    )
    space = command.add_argument_group("the space")
    space.add_argument(
        "--like", metavar="CONFIG", help="start from a model: its config.json, or the folder of it"
    )
    space.add_argument(
        "--keep", default="", metavar="COST,COST", help="costs that stay as the model's"
    )
    space.add_argument(
        "--set", action="extend", nargs="+", default=[], dest="changes", metavar="FIELD=CHOICES",
        help=(
            "fields of Shape: a value, a..b, a..b:step or a,b,c; also the aspects dim/depth, "
            "inner/dim and ffn/dim"
        ),
    )  # fmt: skip
    space.add_argument(
        "--multiple", type=whole, default=64, metavar="N",
        help="of the feed-forward's width; default 64",
    )  # fmt: skip
    table = command.add_argument_group("rows")
    table.add_argument("--rows", type=whole, default=20, metavar="N", help="shown; default 20")
    table.add_argument(
        "--sort", default="", metavar="COLUMN,-COLUMN",
        help="costs, sizes, pareto or near; - from the largest",
    )  # fmt: skip
    table.add_argument("--columns", metavar="COLUMN,COLUMN", help="of the table")
    table.add_argument("--pareto", default="", metavar="COST,COST", help="what the front is over")
    table.add_argument("--only-pareto", action="store_true", help="only rows that none beats")
    table.add_argument(
        "--backends", action="store_true",
        help="which kernel runs the rows shown, and what is padded for it",
    )  # fmt: skip
    table.add_argument(
        "--wide", action="store_true", help="all columns of the table, however narrow the terminal"
    )
    timing = command.add_argument_group("measuring")
    timing.add_argument(
        "--measure", action="store_true", help="time training and decoding of the rows shown, here"
    )
    timing.add_argument(
        "--measure-seconds", type=seconds, default=60.0, metavar="S", help="at most; default 60"
    )
    add_device(timing)
    files = command.add_argument_group("files")
    files.add_argument("--csv", metavar="FILE", help="all rows as CSV")
    files.add_argument("--page", metavar="FILE", help="an interactive page, one file of HTML")
    files.add_argument(
        "--write", metavar="FOLDER",
        help=(
            "the shape of --row as a Hugging Face config.json and as arguments of Megatron-LM, "
            "torchtitan and nanochat"
        ),
    )  # fmt: skip
    files.add_argument("--row", type=whole, default=1, metavar="K", help="which row; default 1")
