"""What may be written on the command line: the commands, their options, and what those take."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any, NoReturn

from headwise.errors import UsageError

DEFAULT_STORE = "headwise-store"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are UsageErrors: one line, exit code 2, nearest names."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def parser() -> Parser:
    top = Parser(
        prog="headwise",
        description="How many attention heads, of what rank, how deep? Measure it.",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="store_true", help="print the version")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)

    def add(name: str, text: str, example: str) -> Parser:
        command = commands.add_parser(
            name, help=text, description=text, epilog=f"example:  {example}", allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        command.add_argument(
            "--json", action="store_true", help="print one JSON object as the last line"
        )
        return command

    run = add(
        "run",
        "Make an experiment: train what is missing, print the table, write the figure and the "
        "report.",
        "headwise run fig1 --preset quick\nown task: headwise run map my_task.py",
    )
    run.add_argument("experiment", help="its name (headwise list shows them), or your own file.py")
    run.add_argument(
        "tasks",
        nargs="*",
        metavar="TASK",
        help=(
            "the experiment on other tasks: names of built-in ones, your own my_task.py, or "
            "my_task.py:MyTask where the file has several (fig1, leaner, map, removable)"
        ),
    )
    run.add_argument(
        "--preset",
        default="quick",
        help="quick (a laptop, minutes) or paper (a GPU); default quick",
    )
    run.add_argument(
        "--store",
        default=DEFAULT_STORE,
        metavar="DIR",
        help=f"where rows are kept; default {DEFAULT_STORE}",
    )
    run.add_argument(
        "--rows", action="extend", nargs="+", default=[], metavar="FILE",
        help=(
            "rows made before, such as results/fig1/rows.jsonl: what they hold is taken into the "
            "store and not made again"
        ),
    )  # fmt: skip
    run.add_argument("--seeds", type=_whole, metavar="N", help="seeds per point")
    run.add_argument(
        "--task", metavar="TASK,TASK", help="the same as TASK, for several separated by commas"
    )
    run.add_argument(
        "--model",
        metavar="FILE",
        help="your own my_model.py, or my_model.py:MyModel, in the place of ours in every run",
    )
    run.add_argument("--device", default="auto", help="auto, cpu or cuda; default auto")
    run.add_argument(
        "--workers", type=_whole, metavar="N", help="processes on a CPU; default one per core"
    )
    _add_set(run, "change settings of the preset")
    run.add_argument(
        "--checkpoint-every", type=_seconds, default=30.0, metavar="SECONDS",
        help=(
            "how often an unfinished run is saved, at the end of an epoch; 0 saves at every one; "
            "default 30"
        ),
    )  # fmt: skip
    run.add_argument(
        "--keep-weights", action="store_true", help="keep every trained model in the store"
    )
    run.add_argument(
        "--no-train",
        action="store_true",
        help="show what is in the store and in --rows; make nothing",
    )
    run.add_argument("--no-report", action="store_true", help="only train and print")

    theory = add(
        "theory",
        "Check every statement of the rank paper: closed forms, bounds and constructions, each "
        "with its margin.",
        "headwise theory --json",
    )
    theory.add_argument(
        "--only",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="some groups of checks, such as kernels majority",
    )
    theory.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the samples; default 0"
    )
    theory.add_argument(
        "--store",
        default=DEFAULT_STORE,
        metavar="DIR",
        help=f"where rows are kept; default {DEFAULT_STORE}",
    )
    theory.add_argument("--no-report", action="store_true", help="only check and print")

    _add_pretrain(add)
    lister = add(
        "list",
        "List experiments, one's settings, or what is in a store.",
        "headwise list --store headwise-store --older",
    )
    lister.add_argument(
        "experiment",
        nargs="?",
        help="whose settings to list, with their values in every preset; --set changes them",
    )
    lister.add_argument("--store", metavar="DIR", help="list this store's runs")
    lister.add_argument("--older", action="store_true", help="only rows that another commit made")

    report = add(
        "report",
        "Write the page of a store again, from its rows alone.",
        "headwise report --store headwise-store",
    )
    report.add_argument(
        "--store", default=DEFAULT_STORE, metavar="DIR", help=f"default {DEFAULT_STORE}"
    )
    report.add_argument("--output", metavar="FILE", help="default DIR/report.html")

    draw = add(
        "draw",
        "Draw an experiment's figure from files of rows (JSON lines), or from a store.",
        "headwise draw fig1 results/fig1/rows.jsonl --output fig1.png",
    )
    draw.add_argument("experiment", help="whose figure it is")
    draw.add_argument(
        "rows",
        nargs="+",
        help="files with one row a line, such as results/fig1/rows.jsonl, or stores",
    )
    draw.add_argument(
        "--output", metavar="FILE", help="png, pdf or svg; default beside the (first) rows, as png"
    )
    draw.add_argument(
        "--view",
        metavar="NAME",
        help=(
            "another view of the same rows: fig1 has depth (published against held out, by rank) "
            "and layers (the same by depth), map summary (all tasks), regression examples"
        ),
    )

    cost = add(
        "cost",
        "Parameters, arithmetic and memory of a shape, or of a model's config.json.",
        "headwise cost --set dim=1792 depth=28 num_heads=4 head_dim=448",
    )
    cost.add_argument(
        "config", nargs="?", help="a Hugging Face or nanochat config.json, or its folder"
    )
    _add_set(cost, "fields of Shape, given or changed")
    cost.add_argument(
        "--tokens",
        type=_whole,
        metavar="N",
        help="sequence length; default 2048, or as many as the model has positions for",
    )

    heads = add(
        "policies",
        "List shapes with other numbers of heads at one budget: who pays for them, and how far "
        "each is off.",
        "headwise policies --set dim=768 depth=12 num_heads=12 --policy widen-iso --to "
        "1,2,4,8,16,24",
    )
    heads.add_argument(
        "config", nargs="?", help="the base: a Hugging Face or nanochat config.json, or its folder"
    )
    _add_set(heads, "fields of the base, given or changed")
    heads.add_argument(
        "--policy", nargs="+", action="extend", required=True, metavar="NAME",
        help=(
            "split, widen, widen-iso, trade; controls: shallower, narrower, spend-on-ffn, "
            "spend-on-depth"
        ),
    )  # fmt: skip
    heads.add_argument("--to", type=_wholes, required=True, metavar="N,N", help="numbers of heads")
    heads.add_argument(
        "--budget",
        default="params",
        help="params (all), layers (theirs alone) or flops; default params",
    )
    heads.add_argument(
        "--target", type=_whole, metavar="N", help="the budget; default what the base costs"
    )
    heads.add_argument(
        "--tokens",
        type=_whole,
        metavar="N",
        help="sequence length of the FLOPs; default as in headwise cost",
    )
    heads.add_argument(
        "--within",
        default="widen",
        help="how trade adds heads: split, widen or widen-iso; default widen",
    )
    heads.add_argument(
        "--exact",
        action="store_true",
        help="where whole layers leave a rest, the feed-forward takes it up",
    )
    heads.add_argument(
        "--multiple",
        type=_whole,
        default=1,
        metavar="N",
        help="of the feed-forward's width; default 1",
    )

    why = add(
        "explain",
        "Say which backend computes a shape's attention, and why the faster ones cannot.",
        "headwise explain --set dim=1792 depth=1 num_heads=4 head_dim=448 --dtype bfloat16",
    )
    why.add_argument(
        "config", nargs="?", help="a Hugging Face or nanochat config.json, or its folder"
    )
    _add_set(why, "fields of Shape")
    why.add_argument(
        "--tokens", type=_whole, default=2048, metavar="N", help="sequence length; default 2048"
    )
    why.add_argument("--batch", type=_whole, default=1, metavar="N", help="sequences; default 1")
    why.add_argument("--device", default="auto", help="auto, cpu or cuda; default auto")
    why.add_argument(
        "--dtype", default="float32", help="float32, bfloat16, float16 or float64; default float32"
    )

    checker = add(
        "check",
        "Say in one line per rule whether a task or a model of your own keeps its contract.",
        "headwise check my_task.py",
    )
    checker.add_argument(
        "file", help="FILE.py, FILE.py:NAME or 'FILE.py:NAME(field=value)', with the task or model"
    )
    checker.add_argument(
        "--task", metavar="FILE", help="the task of your own on which a model is checked"
    )

    infer = add(
        "infer",
        "Measure prefill and decode of a shape with random weights: with a cache, and with "
        "everything computed anew.",
        "headwise infer --set dim=256 depth=4 num_heads=8 num_kv_heads=2 vocab_size=1000 "
        "causal=true --batch 1,8",
    )
    infer.add_argument(
        "config", nargs="?", help="a Hugging Face or nanochat config.json, or its folder"
    )
    _add_set(infer, "fields of Shape, given or changed")
    infer.add_argument(
        "--tokens",
        type=_whole,
        metavar="N",
        help="where decoding ends; default 512, or as many as there are positions for",
    )
    infer.add_argument(
        "--steps",
        type=_whole,
        default=16,
        metavar="N",
        help="tokens decoded, the last of --tokens; default 16",
    )
    infer.add_argument(
        "--batch",
        type=_wholes,
        default=(1, 8),
        metavar="N,N",
        help="sequences at once; default 1,8",
    )
    infer.add_argument("--device", default="auto", help="auto, cpu or cuda; default auto")
    infer.add_argument(
        "--dtype", default="float32", help="float32, bfloat16, float16 or float64; default float32"
    )
    return top


def _add_set(parser: Parser, text: str) -> None:
    parser.add_argument(
        "--set",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        dest="changes",
        help=text,
    )


def _add_pretrain(add: Callable[[str, str, str], Parser]) -> None:
    train = add(
        "pretrain",
        "Train one decoder on a text, here or on many GPUs by torchrun, and measure bits per byte "
        "on the part held out.",
        "headwise pretrain --text book.txt --set dim=256 depth=6 num_heads=2 --steps 1000\n"
        "many GPUs: torchrun --nproc-per-node 8 -m headwise pretrain --preset base --text texts/ "
        "--shard fsdp --compile",
    )
    train.add_argument(
        "config", nargs="?", help="the shape: a Hugging Face or nanochat config.json, or its folder"
    )
    _add_set(
        train,
        "fields of Shape: all sizes when dim is among them, else changes of the preset's; "
        "rotary positions, normed queries and keys, relu2 unless said",
    )
    train.add_argument(
        "--preset",
        default="quick",
        help="quick (a laptop, minutes) or base (125M parameters, a GPU); default quick",
    )
    train.add_argument(
        "--text",
        default="",
        metavar="PATH",
        help="a file, or a folder of .txt files; default a generated text",
    )
    train.add_argument(
        "--tokenizer", default="", metavar="FILE", help="a tokenizers JSON file; default bytes"
    )
    options: tuple[tuple[str, Callable[[str], Any], str], ...] = (
        ("steps", _whole, "default the preset's, as for what follows"),
        ("batch-tokens", _whole, "tokens in one step, over all processes"),
        ("length", _whole, "tokens in a sequence"),
        ("optimiser", str, "muon (AdamW beside it) or adamw; default muon"),
        ("lr", _number, "the learning rate, of both"),
        ("schedule", str, "trapezoid or cosine; default trapezoid"),
        ("warmup", _number, "share of the steps; default 0.02"),
        ("warmdown", _number, "share of the steps, of a trapezoid; default 0.4"),
        ("weight-decay", _number, "of matrices and tables; default 0"),
        ("clip", _number, "largest norm of the gradient, 0 for none; default 1"),
        ("precision", str, "bf16, tf32 or fp32; default bf16 on a GPU, fp32 on a CPU"),
        ("evals", _whole, "how often the held-out part is evaluated"),
        ("eval-tokens", _whole, "how much of it at most"),
        ("seed", int, "default 0"),
    )
    for name, kind, text in options:
        train.add_argument(
            f"--{name}", type=kind, metavar="NAME" if kind is str else "N", help=text
        )
    train.add_argument(
        "--accumulate",
        type=_whole,
        default=1,
        metavar="N",
        help="parts in which a step's gradient is added up; default 1",
    )
    train.add_argument(
        "--shard",
        default="ddp",
        help="under torchrun: ddp (a copy in each process) or fsdp (shards); default ddp",
    )
    train.add_argument(
        "--compile",
        action="store_true",
        help="compile the model; with several processes block by block",
    )
    train.add_argument(
        "--compile-blocks",
        action="store_true",
        help="compile block by block: sooner done, a little slower",
    )
    train.add_argument(
        "--peak-tflops",
        type=_number,
        metavar="N",
        help="what one device can do, for the utilisation; default by its name",
    )
    train.add_argument("--device", default="auto", help="auto, cpu or cuda; default auto")
    train.add_argument(
        "--store",
        default=DEFAULT_STORE,
        metavar="DIR",
        help=f"where rows are kept; default {DEFAULT_STORE}",
    )
    train.add_argument(
        "--checkpoint-every",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="how often it is saved; 0: at every step; default 60",
    )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def _whole(text: str) -> int:
    try:
        value = int(text.replace("_", ""))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _wholes(text: str) -> tuple[int, ...]:
    return tuple(_whole(part) for part in text.split(","))


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}") from None
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be 0 or more seconds, got {text}")
    return value
