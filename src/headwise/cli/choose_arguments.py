"""The options of `headwise choose`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from headwise.cli.values import number, seconds, whole, wholes
from headwise.errors import UsageError
from headwise.planning.costs import COSTS

EXAMPLE = (
    "headwise choose my_task.py --params 300k --hours 0.5\n"
    "a text: headwise choose --text book.txt --params 1M --steps 500 --hours 2\n"
    "a larger size from smaller ones: headwise choose my_task.py --params 1M --extrapolate 30k,100k"
)


def rates(text: str) -> tuple[float, ...]:
    return tuple(number(part) for part in text.split(","))


def sizes(text: str) -> tuple[int, ...]:
    from headwise.choosing.limits import amount

    try:
        return tuple(amount("params", part) for part in text.split(","))
    except UsageError as e:
        raise argparse.ArgumentTypeError(str(e).removeprefix("params ")) from None


OPTIONS: tuple[tuple[str, Callable[[str], Any], str], ...] = (
    ("params", str, "parameters of every shape, as 300k, <=10M or 9M..10M"),
    ("depths", wholes, "layers of the shapes; default a grid, as for what follows"),
    ("heads", wholes, "their numbers of heads"),
    ("ranks", wholes, "their ranks of a head"),
    ("dim", whole, "their width"),
    ("most", whole, "shapes that are raced, at most; default 12"),
    ("model", str, "your own my_model.py in the place of ours"),
    ("hours", number, "wall-clock time there is; default no limit"),
    ("seconds", number, "the same in seconds"),
    ("delta", number, "chance that a statement is wrong; default 0.05"),
    ("epsilon", number, "a difference of the loss that does not matter; default 0"),
    ("seeds", whole, "per shape, at most; default 20"),
    ("steps", whole, "of a training; default 1000, for a text 500"),
    ("batch", whole, "sequences per step; default 64"),
    ("rates", rates, "that every shape tries first; default 0.001,0.003,0.01"),
    ("trials", whole, "rates that every shape tries, those among them; default 5"),
    ("extrapolate", sizes, "race at these smaller sizes and predict --params from them"),
    ("length", whole, "tokens in a sequence of the text; default 256"),
    ("batch-tokens", whole, "tokens in a step; default 16384"),
    ("eval-tokens", whole, "held-out tokens of an evaluation, at most"),
    ("tokenizer", str, "of the text, a file; default bytes"),
    ("optimiser", str, "of the text: muon (default) or adamw"),
    ("precision", str, "of the text: bf16 (default on a GPU), tf32 or fp32"),
)


def add_choose(add: Callable[[str, str, str], Any], *shared: Callable[[Any], None]) -> None:
    """The command with all its options; `shared` adds those that commands have in common."""
    command = add(
        "choose",
        "Which shape is best on your task? Tunes every shape's rate, then races them on paired "
        "seeds until the answer is clear or time is up.",
        EXAMPLE,
    )
    command.add_argument(
        "task", nargs="?", help="a built-in task by name, your own my_task.py or my_task.py:MyTask"
    )
    command.add_argument(
        "--text", nargs="?", const="", metavar="PATH",
        help="decoders on a text in the place of a task; without PATH a generated one",
    )  # fmt: skip
    for cost in COSTS.values():
        if cost.name != "params":
            command.add_argument(cost.flag, dest=cost.name, metavar="LIMIT", help=cost.about)
    for name, kind, text in OPTIONS:
        names: dict[Any, str] = {wholes: "N,N", sizes: "N,N", rates: "X,X", str: "NAME"}
        command.add_argument(
            f"--{name}",
            type=kind,
            metavar="LIMIT" if name == "params" else names.get(kind, "N"),
            help=text,
        )
    command.add_argument(
        "--workers", type=whole, metavar="N", help="processes on a CPU; default one per core"
    )
    command.add_argument(
        "--checkpoint-every", type=seconds, default=30.0, metavar="SECONDS",
        help="how often what is being trained is saved; default 30",
    )  # fmt: skip
    command.add_argument("--no-report", action="store_true", help="write no page")
    for add_options in shared:
        add_options(command)
