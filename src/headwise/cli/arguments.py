"""What may be written on the command line: the commands, their options, and what those take."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from headwise.cli.choose_arguments import add_choose
from headwise.cli.cluster_arguments import add_groups, add_live, add_nodes, add_place
from headwise.cli.convert_arguments import add_convert
from headwise.cli.explore_arguments import add_explore
from headwise.cli.inspect_arguments import add_inspect
from headwise.cli.parser import Parser
from headwise.cli.plan_arguments import add_plan
from headwise.cli.show_arguments import add_draw, add_report, add_writing
from headwise.cli.tracking_arguments import add_export, add_track
from headwise.cli.values import number, seconds, whole, wholes

DEFAULT_STORE = "headwise-store"

# Makes a command of its name, what it does and an example.
Add = Callable[[str, str, str], Parser]


def parser() -> Parser:
    """All commands, in the order of `headwise --help`."""
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

    _add_run(add)
    add_choose(add, _add_store, _add_device, _add_wide, add_place)
    _add_theory(add)
    _add_pretrain(add)
    _add_list(add)
    add_report(add, DEFAULT_STORE)
    add_draw(add, _add_wide)
    add_writing(add, _add_store, _add_device)
    add_export(add, DEFAULT_STORE)
    _add_cost(add)
    _add_policies(add)
    add_plan(add, _add_device)
    add_explore(add, _add_config, _add_set)
    _add_explain(add)
    _add_check(add)
    _add_infer(add)
    add_groups(add)
    add_inspect(add)
    add_convert(add)
    return top


def _add_run(add: Add) -> None:
    command = add(
        "run",
        "Make an experiment: train what is missing, print the table, write the figure and the "
        "report.",
        "headwise run fig1 --preset quick\nown task: headwise run map my_task.py",
    )
    command.add_argument(
        "experiment", help="its name (headwise list shows them), or your own file.py"
    )
    command.add_argument(
        "tasks",
        nargs="*",
        metavar="TASK",
        help=(
            "the experiment on other tasks: names of built-in ones, your own my_task.py, or "
            "my_task.py:MyTask where the file has several (fig1, leaner, map, removable)"
        ),
    )
    command.add_argument(
        "--preset",
        default="quick",
        help="quick (a laptop, minutes) or paper (a GPU); default quick",
    )
    _add_store(command)
    command.add_argument(
        "--rows", action="extend", nargs="+", default=[], metavar="FILE",
        help=(
            "rows made before, such as results/fig1/rows.jsonl: what they hold is taken into the "
            "store and not made again"
        ),
    )  # fmt: skip
    command.add_argument("--seeds", type=whole, metavar="N", help="seeds per point")
    command.add_argument(
        "--task", metavar="TASK,TASK", help="the same as TASK, for several separated by commas"
    )
    command.add_argument(
        "--model",
        metavar="FILE",
        help="your own my_model.py, or my_model.py:MyModel, in the place of ours in every run",
    )
    _add_device(command)
    command.add_argument(
        "--workers", type=whole, metavar="N", help="processes on a CPU; default one per core"
    )
    add_place(command)
    _add_set(command, "change settings of the preset")
    command.add_argument(
        "--checkpoint-every", type=seconds, default=30.0, metavar="SECONDS",
        help=(
            "how often an unfinished run is saved, at the end of an epoch; 0 saves at every one; "
            "default 30"
        ),
    )  # fmt: skip
    command.add_argument(
        "--keep-weights", action="store_true", help="keep every trained model in the store"
    )
    command.add_argument(
        "--no-train", action="store_true", help="show what is there, in --rows too; make nothing"
    )
    text = "make those runs again that other code of your task or model made"
    command.add_argument("--fresh", action="store_true", help=text)
    command.add_argument("--no-report", action="store_true", help="only train and print")
    add_track(command)
    _add_wide(command)


def _add_theory(add: Add) -> None:
    command = add(
        "theory",
        "Check every statement of the rank paper: closed forms, bounds and constructions, each "
        "with its margin.",
        "headwise theory --json",
    )
    command.add_argument(
        "--only",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="some groups of checks, such as kernels majority",
    )
    command.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the samples; default 0"
    )
    _add_store(command)
    command.add_argument("--no-report", action="store_true", help="only check and print")
    _add_wide(command)


def _add_pretrain(add: Add) -> None:
    command = add(
        "pretrain",
        "Train one decoder on a text, here or on many GPUs by torchrun, and measure bits per byte "
        "on the part held out.",
        "headwise pretrain --text book.txt --set dim=256 depth=6 num_heads=2 --steps 1000\n"
        "many GPUs: torchrun --nproc-per-node 8 -m headwise pretrain --preset base --text texts/ "
        "--shard fsdp --compile",
    )
    _add_config(command, "the shape")
    _add_set(
        command,
        "fields of Shape: all sizes when dim is among them, else changes of the preset's; "
        "rotary positions, normed queries and keys, relu2 unless said",
    )
    command.add_argument(
        "--preset",
        default="quick",
        help="quick (a laptop, minutes) or base (125M parameters, a GPU); default quick",
    )
    command.add_argument(
        "--text",
        default="",
        metavar="PATH",
        help="a file, or a folder of .txt files; default a generated text",
    )
    command.add_argument(
        "--tokenizer", default="", metavar="FILE", help="a tokenizers JSON file; default bytes"
    )
    options: tuple[tuple[str, Callable[[str], Any], str], ...] = (
        ("steps", whole, "default the preset's, as for what follows"),
        ("batch-tokens", whole, "tokens in one step, over all processes"),
        ("length", whole, "tokens in a sequence"),
        ("optimiser", str, "muon (AdamW beside it) or adamw; default muon"),
        ("lr", number, "the learning rate, of both"),
        ("schedule", str, "trapezoid or cosine; default trapezoid"),
        ("warmup", number, "share of the steps; default 0.02"),
        ("warmdown", number, "share of the steps, of a trapezoid; default 0.4"),
        ("weight-decay", number, "of matrices and tables; default 0"),
        ("clip", number, "largest norm of the gradient, 0 for none; default 1"),
        ("precision", str, "bf16, tf32 or fp32; default bf16 on a GPU, fp32 on a CPU"),
        ("evals", whole, "how often the held-out part is evaluated"),
        ("eval-tokens", whole, "how much of it at most"),
        ("seed", int, "default 0"),
        ("peak-tflops", number, "what one device can do, for the utilisation; default by its name"),
    )
    for name, kind, text in options:
        command.add_argument(
            f"--{name}", type=kind, metavar="NAME" if kind is str else "N", help=text
        )
    command.add_argument(
        "--accumulate",
        type=whole,
        default=1,
        metavar="N",
        help="parts in which a step's gradient is added up; default 1",
    )
    command.add_argument(
        "--shard",
        default="ddp",
        help="under torchrun: ddp (a copy each) or fsdp (shards); default ddp",
    )
    command.add_argument(
        "--compile", action="store_true", help="compile the model; with several, block by block"
    )
    command.add_argument(
        "--compile-blocks",
        action="store_true",
        help="compile block by block: sooner done, a little slower",
    )
    _add_device(command)
    add_place(command)
    add_nodes(command)
    _add_store(command)
    command.add_argument(
        "--checkpoint-every",
        type=seconds,
        default=60.0,
        metavar="SECONDS",
        help="how often it is saved; 0: at every step; default 60",
    )
    add_track(command)


def _add_list(add: Add) -> None:
    command = add(
        "list",
        "List experiments, one's settings, or what is in a store.",
        "headwise list --store headwise-store --older",
    )
    command.add_argument(
        "experiment",
        nargs="?",
        help="whose settings to list, with their values in every preset; --set changes them",
    )
    command.add_argument("--store", metavar="DIR", help="list this store's runs")
    command.add_argument("--older", action="store_true", help="only rows that another commit made")
    add_live(command)
    _add_wide(command)


def _add_cost(add: Add) -> None:
    command = add(
        "cost",
        "Parameters, arithmetic and memory of a shape, or of a model's config.json.",
        "headwise cost --set dim=1792 depth=28 num_heads=4 head_dim=448",
    )
    _add_config(command)
    _add_set(command, "fields of Shape, given or changed")
    command.add_argument(
        "--tokens",
        type=whole,
        metavar="N",
        help="sequence length; default 2048, or as many as the model has positions for",
    )


def _add_policies(add: Add) -> None:
    command = add(
        "policies",
        "List shapes with other numbers of heads at one budget: who pays for them, and how far "
        "each is off.",
        "headwise policies --set dim=768 depth=12 num_heads=12 --policy widen-iso --to "
        "1,2,4,8,16,24",
    )
    _add_config(command, "the base")
    _add_set(command, "fields of the base, given or changed")
    command.add_argument(
        "--policy", nargs="+", action="extend", required=True, metavar="NAME",
        help=(
            "split, widen, widen-iso, trade; controls: shallower, narrower, spend-on-ffn, "
            "spend-on-depth"
        ),
    )  # fmt: skip
    command.add_argument("--to", type=wholes, required=True, metavar="N,N", help="numbers of heads")
    command.add_argument(
        "--budget",
        default="params",
        help="params (all), layers (theirs alone) or flops; default params",
    )
    command.add_argument(
        "--target", type=whole, metavar="N", help="the budget; default what the base costs"
    )
    command.add_argument(
        "--tokens",
        type=whole,
        metavar="N",
        help="sequence length of the FLOPs; default as in headwise cost",
    )
    command.add_argument(
        "--within",
        default="widen",
        help="how trade adds heads: split, widen or widen-iso; default widen",
    )
    command.add_argument(
        "--exact",
        action="store_true",
        help="where whole layers leave a rest, the feed-forward takes it up",
    )
    command.add_argument(
        "--multiple",
        type=whole,
        default=1,
        metavar="N",
        help="of the feed-forward's width; default 1",
    )
    _add_wide(command)


def _add_explain(add: Add) -> None:
    command = add(
        "explain",
        "Say which backend computes a shape's attention, and why the faster ones cannot.",
        "headwise explain --set dim=1792 depth=1 num_heads=4 head_dim=448 --dtype bfloat16",
    )
    _add_config(command)
    _add_set(command, "fields of Shape")
    command.add_argument(
        "--tokens", type=whole, default=2048, metavar="N", help="sequence length; default 2048"
    )
    command.add_argument("--batch", type=whole, default=1, metavar="N", help="sequences; default 1")
    command.add_argument("--device", default="auto", help="auto, cpu, cuda, or a card such as a100")
    command.add_argument(
        "--dtype", default="float32", help="float32, bfloat16, float16 or float64; default float32"
    )


def _add_check(add: Add) -> None:
    command = add(
        "check",
        "Say in one line per rule whether a task or a model of your own keeps its contract.",
        "headwise check my_task.py",
    )
    command.add_argument(
        "file", help="FILE.py, FILE.py:NAME or 'FILE.py:NAME(field=value)', with the task or model"
    )
    command.add_argument(
        "--task", metavar="FILE", help="the task of your own on which a model is checked"
    )


def _add_infer(add: Add) -> None:
    command = add(
        "infer",
        "Measure prefill and decode of a shape with random weights: with a cache, and with "
        "everything computed anew.",
        "headwise infer --set dim=256 depth=4 num_heads=8 num_kv_heads=2 vocab_size=1000 "
        "causal=true --batch 1,8",
    )
    _add_config(command)
    _add_set(command, "fields of Shape, given or changed")
    command.add_argument(
        "--tokens", type=whole, metavar="N",
        help="where decoding ends; default 512, or as many as there are positions for",
    )  # fmt: skip
    command.add_argument(
        "--steps", type=whole, default=16, metavar="N",
        help="tokens decoded, the last of --tokens; default 16",
    )  # fmt: skip
    command.add_argument(
        "--batch", type=wholes, default=(1, 8), metavar="N,N", help="sequences at once; default 1,8"
    )
    _add_device(command)
    command.add_argument(
        "--dtype", default="float32", help="float32, bfloat16, float16 or float64; default float32"
    )
    _add_wide(command)


def _add_store(parser: Parser) -> None:
    text = f"where rows are kept; default {DEFAULT_STORE}"
    parser.add_argument("--store", default=DEFAULT_STORE, metavar="DIR", help=text)


def _add_wide(parser: Parser) -> None:
    text = "all columns of the table, however narrow the terminal is"
    parser.add_argument("--wide", action="store_true", help=text)


def _add_device(parser: Any) -> None:
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda; default auto")


def _add_config(parser: Parser, role: str = "") -> None:
    text = "a Hugging Face or nanochat config.json, or its folder"
    if role:
        text = f"{role}: {text}"
    parser.add_argument("config", nargs="?", help=text)
    text = "of a model with several: text, vision, or its attention layers alone"
    parser.add_argument("--part", help=f"{text}; default all, or text where it wraps that")


def _add_set(parser: Parser, text: str) -> None:
    parser.add_argument(
        "--set", action="extend", nargs="+", default=[], dest="changes", help=text,
        metavar="KEY=VALUE",
    )  # fmt: skip
