"""The options of the commands that show: `report`, `draw`, `generate`, `chat`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from headwise.cli.values import number, whole

Add = Callable[[str, str, str], Any]
PORT = 8765  # of headwise report --serve


def add_report(add: Add, default_store: str) -> None:
    command = add(
        "report",
        "Write the page of a store again, from its rows alone, or serve it while a sweep runs.",
        "headwise report --store headwise-store\n"
        "while it runs: headwise report --store headwise-store --serve",
    )
    command.add_argument(
        "--store", default=default_store, metavar="DIR", help=f"default {default_store}"
    )
    command.add_argument("--output", metavar="FILE", help="default DIR/report.html")
    command.add_argument(
        "--serve",
        action="store_true",
        help="show the page to this machine's browsers alone and follow the store, until Ctrl-C",
    )
    command.add_argument(
        "--port", type=_port, help=f"of --serve; default {PORT}, or a free one where it is taken"
    )


def _port(text: str) -> int:
    value = int(text) if text.isdecimal() else -1
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"must be a port from 0 to 65535, got {text[:40]}")
    return value


def add_draw(add: Add, add_wide: Callable[[Any], None]) -> None:
    command = add(
        "draw",
        "Draw an experiment's figure from files of rows (JSON lines), or from a store.",
        "headwise draw fig1 results/fig1/rows.jsonl --output fig1.png\n"
        "for a paper: headwise draw fig1 results/fig1/rows.jsonl --format pdf",
    )
    command.add_argument("experiment", help="whose figure it is")
    command.add_argument(
        "rows",
        nargs="+",
        help="files with one row a line, such as results/fig1/rows.jsonl, or stores",
    )
    command.add_argument(
        "--output", metavar="FILE", help="png, pdf or svg; default beside the (first) rows, as png"
    )
    command.add_argument(
        "--format",
        choices=("png", "pdf", "svg"),
        help=(
            "pdf and svg in a paper's style: as wide as its text, letters of its size, no title "
            "and no caption"
        ),
    )
    command.add_argument(
        "--view",
        metavar="NAME",
        help=(
            "another view of the same rows: fig1 has depth (published against held out, by rank) "
            "and layers (the same by depth), map summary (all tasks), regression examples"
        ),
    )
    add_wide(command)


def add_writing(
    add: Add, add_store: Callable[[Any], None], add_device: Callable[[Any], None]
) -> None:
    """The two commands that let a decoder write."""
    generate = add(
        "generate",
        "Let a decoder that headwise pretrain trained continue a text.",
        "headwise generate 3f2a --prompt Once --tokens 200",
    )
    _add_decoder(generate, add_store, add_device)
    generate.add_argument("--prompt", default="", help="what it continues; default nothing")
    generate.add_argument(
        "--samples",
        type=whole,
        default=1,
        help="texts, each of the next seed; default 1",
    )
    chat = add(
        "chat",
        "Write a line, read how a decoder continues it, and so on.",
        "headwise chat 3f2a",
    )
    _add_decoder(chat, add_store, add_device)


def _add_decoder(
    command: Any, add_store: Callable[[Any], None], add_device: Callable[[Any], None]
) -> None:
    command.add_argument(
        "run", metavar="RUN", help="the beginning of a run's id, its folder, or a store with one"
    )
    add_store(command)
    command.add_argument("--tokens", type=whole, default=200, help="at most; default 200")
    command.add_argument(
        "--temperature", type=number, default=0.8, help="0: the likeliest each time; default 0.8"
    )
    command.add_argument(
        "--top-k", type=_count, default=0, help="draw from the likeliest so many; default 0, all"
    )
    command.add_argument("--seed", type=_count, default=0, help="default 0")
    command.add_argument(
        "--tokenizer", default="", metavar="FILE", help="where its tokenizer's file lies now"
    )
    add_device(command)


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"must be a whole number of 0 or more, got {text[:40]}")
    return int(text)
