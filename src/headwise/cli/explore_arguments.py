"""`headwise explore` and its options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headwise.cli.values import whole


def add_explore(
    add: Callable[[str, str, str], Any],
    add_config: Callable[[Any, str], None],
    add_set: Callable[[Any, str], None],
) -> None:
    """The command with all its options."""
    command = add(
        "explore",
        "Write one page on which a shape is moved by sliders: exact costs, neighbours at equal "
        "budget, the measured map.",
        "headwise explore config.json --rows results/map/text.jsonl",
    )
    add_config(command, "where to start")
    add_set(command, "fields of Shape, given or changed")
    command.add_argument(
        "--rows", action="extend", nargs="+", default=[], metavar="FILE",
        help="files of rows: their shapes are a map with the loss of each",
    )  # fmt: skip
    command.add_argument("--store", metavar="DIR", help="the same from a store")
    command.add_argument(
        "--context", type=whole, metavar="N",
        help="tokens at which costs are counted first; default 2048, or as many as there are "
        "positions for",
    )  # fmt: skip
    command.add_argument("--batch", type=whole, default=1, metavar="N", help="sequences; default 1")
    command.add_argument(
        "--dtype", default="bf16", help="fp32, bf16, fp16, fp8, int8 or int4; default bf16"
    )
    command.add_argument(
        "--output", default="explorer.html", metavar="FILE", help="default explorer.html"
    )
