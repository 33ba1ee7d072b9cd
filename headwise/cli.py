"""The command line: `headwise run | theory | pretrain | list | report | draw | cost | policies | explain | infer`.

argparse, because it is on every machine that has torch and because its errors can be one line. Heavy imports happen
inside the commands. Exit codes: 0 done, 1 failed, 2 bad usage.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from headwise.shape import Shape, UsageError, nearest

DEFAULT_STORE = "headwise-store"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are UsageErrors: one line, exit code 2, nearest names."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def _parser() -> _Parser:
    top = _Parser(prog="headwise", description="How many attention heads, of what rank, how deep? Measure it.", allow_abbrev=False)
    top.add_argument("--version", action="store_true", help="print the version")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)

    def add(name: str, text: str, example: str) -> _Parser:
        command = commands.add_parser(
            name, help=text, description=text, epilog=f"example:  {example}", allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        command.add_argument("--json", action="store_true", help="print one JSON object as the last line")
        return command

    run = add(
        "run",
        "Make an experiment: train what is missing, print the table, write the figure and the report.",
        "headwise run fig1 --preset quick",
    )
    run.add_argument("experiment", help="its name (headwise list shows them), or your own file.py")
    run.add_argument("--preset", default="quick", help="quick (a laptop, minutes) or paper (a GPU); default quick")
    run.add_argument("--store", default=DEFAULT_STORE, metavar="DIR", help=f"where rows are kept; default {DEFAULT_STORE}")
    run.add_argument("--seeds", type=_whole, metavar="N", help="how many seeds a point")
    run.add_argument("--task", metavar="NAME,NAME", help="of an experiment over tasks: which; the same as --set tasks=NAME,NAME")
    run.add_argument("--device", default="auto", help="auto, cpu or cuda; default auto")
    run.add_argument("--workers", type=_whole, metavar="N", help="processes on a CPU; default one a core")
    run.add_argument(
        "--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", dest="changes", help="change settings of the preset"
    )
    run.add_argument(
        "--checkpoint-every", type=_seconds, default=30.0, metavar="SECONDS",
        help="how often an unfinished run is saved, at the end of an epoch; 0 saves at every one; default 30",
    )  # fmt: skip
    run.add_argument("--keep-weights", action="store_true", help="keep every trained model in the store")
    run.add_argument("--no-report", action="store_true", help="only train and print")

    theory = add(
        "theory",
        "Check every statement of the rank paper: closed forms, bounds and constructions, each with its margin.",
        "headwise theory --json",
    )
    theory.add_argument("--only", nargs="+", default=[], metavar="NAME", help="some groups of checks, such as kernels majority")
    theory.add_argument("--seed", type=int, default=0, metavar="N", help="of the samples; default 0")
    theory.add_argument("--store", default=DEFAULT_STORE, metavar="DIR", help=f"where rows are kept; default {DEFAULT_STORE}")
    theory.add_argument("--no-report", action="store_true", help="only check and print")

    _add_pretrain(add)
    lister = add("list", "List experiments and, with a store, what is in it.", "headwise list --store headwise-store --older")
    lister.add_argument("--store", metavar="DIR", help="list this store's runs")
    lister.add_argument("--older", action="store_true", help="only rows that another commit made")

    report = add("report", "Write the page of a store again, from its rows alone.", "headwise report --store headwise-store")
    report.add_argument("--store", default=DEFAULT_STORE, metavar="DIR", help=f"default {DEFAULT_STORE}")
    report.add_argument("--output", metavar="FILE", help="default DIR/report.html")

    draw = add(
        "draw",
        "Draw an experiment's figure from a file of rows (JSON lines).",
        "headwise draw fig1 results/fig1/rows.jsonl --output fig1.png",
    )
    draw.add_argument("experiment", help="whose figure it is")
    draw.add_argument("rows", help="a file with one row a line, such as results/fig1/rows.jsonl")
    draw.add_argument("--output", metavar="FILE", help="png, pdf or svg; default beside the rows, as png")
    draw.add_argument("--view", metavar="NAME", help="another view of the same rows; fig1 has depth (published against held out)")

    cost = add(
        "cost",
        "Parameters, arithmetic and memory of a shape, or of a model's config.json.",
        "headwise cost --set dim=1792 depth=28 num_heads=4 head_dim=448",
    )
    cost.add_argument("config", nargs="?", help="a Hugging Face or nanochat config.json, or its folder")
    cost.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", dest="changes", help="fields of Shape, given or changed")
    cost.add_argument("--tokens", type=_whole, metavar="N", help="sequence length; default 2048, or as many as the model has positions for")

    heads = add(
        "policies",
        "List shapes with other numbers of heads at one budget: who pays for them, and how far each is off.",
        "headwise policies --set dim=768 depth=12 num_heads=12 --policy widen-iso --to 1,2,4,8,16,24",
    )
    heads.add_argument("config", nargs="?", help="the base: a Hugging Face or nanochat config.json, or its folder")
    heads.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", dest="changes", help="fields of the base, given or changed")
    heads.add_argument(
        "--policy", nargs="+", required=True, metavar="NAME",
        help="split, widen, widen-iso, trade; controls: shallower, narrower, spend-on-ffn, spend-on-depth",
    )  # fmt: skip
    heads.add_argument("--to", type=_wholes, required=True, metavar="N,N", help="numbers of heads")
    heads.add_argument("--budget", default="params", help="params (all), layers (theirs alone) or flops; default params")
    heads.add_argument("--target", type=_whole, metavar="N", help="the budget; default what the base costs")
    heads.add_argument("--tokens", type=_whole, metavar="N", help="sequence length of the FLOPs; default as in headwise cost")
    heads.add_argument("--within", default="widen", help="how trade adds heads: split, widen or widen-iso; default widen")
    heads.add_argument("--exact", action="store_true", help="where whole layers leave a rest, the feed-forward takes it up")
    heads.add_argument("--multiple", type=_whole, default=1, metavar="N", help="of the feed-forward's width; default 1")

    why = add(
        "explain",
        "Say which backend computes a shape's attention, and why the faster ones cannot.",
        "headwise explain --set dim=1792 depth=1 num_heads=4 head_dim=448 --dtype bfloat16",
    )
    why.add_argument("config", nargs="?", help="a Hugging Face or nanochat config.json, or its folder")
    why.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", dest="changes", help="fields of Shape")
    why.add_argument("--tokens", type=_whole, default=2048, metavar="N", help="sequence length; default 2048")
    why.add_argument("--batch", type=_whole, default=1, metavar="N", help="sequences; default 1")
    why.add_argument("--device", default="auto", help="auto, cpu or cuda; default auto")
    why.add_argument("--dtype", default="float32", help="float32, bfloat16, float16 or float64; default float32")

    infer = add(
        "infer",
        "Measure prefill and decode of a shape with random weights: with a cache, and with everything computed anew.",
        "headwise infer --set dim=256 depth=4 num_heads=8 num_kv_heads=2 vocab_size=1000 causal=true --batch 1,8",
    )
    infer.add_argument("config", nargs="?", help="a Hugging Face or nanochat config.json, or its folder")
    infer.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", dest="changes", help="fields of Shape, given or changed")
    infer.add_argument("--tokens", type=_whole, metavar="N", help="where decoding ends; default 512, or as many as there are positions for")
    infer.add_argument("--steps", type=_whole, default=16, metavar="N", help="tokens decoded, the last of --tokens; default 16")
    infer.add_argument("--batch", type=_wholes, default=(1, 8), metavar="N,N", help="sequences at once; default 1,8")
    infer.add_argument("--device", default="auto", help="auto, cpu or cuda; default auto")
    infer.add_argument("--dtype", default="float32", help="float32, bfloat16, float16 or float64; default float32")
    return top


def _add_pretrain(add: Callable[[str, str, str], _Parser]) -> None:
    train = add(
        "pretrain",
        "Train one decoder on a text, here or on many GPUs by torchrun, and measure bits per byte on the part held out.",
        "headwise pretrain --text book.txt --set dim=256 depth=6 num_heads=2 head_dim=128 qk_rope_head_dim=128 --steps 1000\n"
        "many GPUs: torchrun --nproc-per-node 8 -m headwise pretrain --preset base --text texts/ --shard fsdp --compile",
    )
    train.add_argument("config", nargs="?", help="the shape: a Hugging Face or nanochat config.json, or its folder")
    train.add_argument(
        "--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", dest="changes",
        help="fields of Shape: a whole one when dim is among them, else changes of the preset's",
    )  # fmt: skip
    train.add_argument("--preset", default="quick", help="quick (a laptop, minutes) or base (125M parameters, a GPU); default quick")
    train.add_argument("--text", default="", metavar="PATH", help="a file, or a folder of .txt files; default a generated text")
    train.add_argument("--tokenizer", default="", metavar="FILE", help="a tokenizers JSON file; default bytes")
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
        ("evals", _whole, "how often the held-out part is judged"),
        ("eval-tokens", _whole, "how much of it at most"),
        ("seed", int, "default 0"),
    )
    for name, kind, text in options:
        train.add_argument(f"--{name}", type=kind, metavar="NAME" if kind is str else "N", help=text)
    train.add_argument("--accumulate", type=_whole, default=1, metavar="N", help="parts in which a step's gradient is added up; default 1")
    train.add_argument("--shard", default="ddp", help="under torchrun: ddp (a copy in each process) or fsdp (shards); default ddp")
    train.add_argument("--compile", action="store_true", help="compile the blocks")
    train.add_argument("--peak-tflops", type=_number, metavar="N", help="what one device can do, for the utilisation; default by its name")
    train.add_argument("--device", default="auto", help="auto, cpu or cuda; default auto")
    train.add_argument("--store", default=DEFAULT_STORE, metavar="DIR", help=f"where rows are kept; default {DEFAULT_STORE}")
    train.add_argument(
        "--checkpoint-every", type=_seconds, default=60.0, metavar="SECONDS", help="how often it is saved; 0: at every step; default 60"
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


# ---- commands: each returns what --json prints


def _run(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    from headwise.engine import pick_device
    from headwise.experiments import find, settings_of
    from headwise.store import Store
    from headwise.sweep import check_space, compute, sweep

    module, name = find(args.experiment), Path(args.experiment).stem
    changes = [*args.changes, *([f"tasks={args.task}"] if getattr(args, "task", None) else [])]
    if len(changes) > len(args.changes) and not hasattr(next(iter(module.PRESETS.values())), "tasks"):
        raise UsageError(f"{name} has one task; --task goes with experiments over tasks: leaner, map, removable")
    settings = settings_of(module, args.preset, changes, args.seeds)
    runs = module.runs(settings)
    pick_device(args.device)
    store = Store(args.store)
    missing = store.missing(runs)
    trained = not hasattr(module, "make")
    if missing and trained:
        check_space(store.path, missing)
    begun = store.begun(missing)
    resumed = f", {begun} to go on with" if begun else ""
    what = f"{len(runs)} {'runs' if trained else 'rows'}"
    _say(f"{name} ({args.preset}): {what}, {len(runs) - len(missing)} already in {store.path}{resumed}")

    def train_all(some: list[Any], keep: bool = False) -> list[Any]:
        return sweep(
            some, store, device=args.device, workers=args.workers, label=name, keep_weights=keep or args.keep_weights,
            checkpoint_every=args.checkpoint_every, probe=getattr(module, "probe", None),
        )  # fmt: skip

    rows = train_all(runs, getattr(module, "KEEP", False)) if trained else compute(runs, module.make, store, device=args.device, label=name)
    if hasattr(module, "then"):
        later = module.then(settings, rows)
        waiting = store.missing(later)
        _say(f"{name}, second round: {len(later)} runs, {len(later) - len(waiting)} already in {store.path}")
        rows += train_all(later)
        runs, missing = [*runs, *later], [*missing, *waiting]
    points = module.summary(rows)
    command = shlex.join(["headwise", *words])
    ids = list(dict.fromkeys(run.id for run in runs))
    if set(store.experiments().get(name, {"ids": ids})["ids"]) - set(ids) and not getattr(args, "only", ()):
        _say(f"{name} was made with other settings in {store.path} before: its page now shows these; the older rows are still there")
    source = {} if args.experiment == name else {"source": str(Path(args.experiment).resolve())}
    if not getattr(args, "only", ()):  # some checks alone do not replace the page of all
        store.note(name, {**source, "command": command, "preset": args.preset, "settings": dataclasses.asdict(settings), "ids": ids})
    _print_points(module, points)
    for line in module.headline(points):
        print(line)
    if args.preset in getattr(module, "NOTES", {}):
        print(module.NOTES[args.preset])
    written = {} if args.no_report else _write(module, points, store, name)
    for what, path in written.items():
        print(f"{what}: {path}")
    failed = [p for p in points if p.get("holds") is False]
    if failed:
        _say(f"headwise: {len(failed)} of {len(points)} checks do not hold")
    return {
        "experiment": name,
        "preset": args.preset,
        "store": str(store.path),
        "runs": len(runs),
        "made": len(missing),
        "points": points,
        **({"failed": len(failed)} if failed else {}),
        **written,
    }


def _write(module: Any, points: list[dict[str, Any]], store: Any, name: str) -> dict[str, str]:
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
        import plotly  # noqa: F401
    except ModuleNotFoundError as e:
        print(f"no figure and no report: {e.name} is not installed (pip install 'headwise[report]'); the rows are in {store.path}")
        return {}
    from headwise import figures
    from headwise.report import write_report

    picture = store.path / f"{name}.png"
    figures.save(module.figure(points), picture)
    return {"figure": str(picture), "report": str(write_report(store))}


def _print_points(module: Any, points: list[dict[str, Any]]) -> None:
    from headwise.experiments import cell

    _print_table([[heading for _, heading in module.COLUMNS], *([cell(p, key) for key, _ in module.COLUMNS] for p in points)])


def _print_table(table: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    words = [i == 0 or any(row[i][:1].isalpha() and " " in row[i] for row in table[1:]) for i in range(len(widths))]  # prose stands left
    for row in table:
        cells = (cell.ljust(w) if left else cell.rjust(w) for cell, w, left in zip(row, widths, words, strict=True))
        print("  ".join(cells).rstrip())


def _list(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    from headwise.experiments import EXPERIMENTS

    if args.older and not args.store:
        raise UsageError("--older lists rows of a store: add --store DIR")
    if not args.store:
        about = {name: (module.__doc__ or "").strip().splitlines()[0] for name, module in EXPERIMENTS.items()}
        _print_table([("experiment", "what"), *((name, text) for name, text in about.items())] if about else [("experiment",)])
        return {"experiments": about}
    from headwise.engine import commit
    from headwise.store import Store

    store = Store(args.store, create=False)
    rows = store.rows(not_commit=commit() if args.older else None)
    keys = (
        "id",
        "status",
        "task",
        "dim",
        "depth",
        "num_heads",
        "head_dim",
        "steps",
        "lr",
        "protocol",
        "seed",
        "held_out",
        "commit",
        "finished",
    )
    short = [{k: r.get(k) for k in keys} for r in rows]
    cells = [[f"{v:.4f}" if isinstance(v, float) else str(v) for v in r.values()] for r in short]
    _print_table([keys, *cells])
    unfinished = sorted(p.parent.name for p in store.runs_path.glob("*/run.json") if store.row(p.parent.name) is None)
    print(f"{len(rows)} rows{' made by other commits' if args.older else ''}, {len(unfinished)} unfinished runs")
    return {"rows": short, "unfinished": unfinished, "experiments": sorted(store.experiments())}


def _report(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    from headwise.store import Store

    store = Store(args.store, create=False)
    try:
        from headwise.report import write_report

        path = write_report(store, Path(args.output) if args.output else None)
    except ModuleNotFoundError as e:
        raise UsageError(f"the report needs {e.name}: pip install 'headwise[report]'") from None
    print(f"report: {path}")
    return {"report": str(path)}


def _draw(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    from headwise import figures
    from headwise.experiments import find
    from headwise.files import read_lines

    module = find(args.experiment)
    views = getattr(module, "VIEWS", {})
    if args.view is not None and args.view not in views:
        raise UsageError(f"unknown view {args.view!r} of {args.experiment}; {nearest(args.view, views) if views else 'it has one figure'}")
    source = Path(args.rows)
    if not source.is_file():
        raise UsageError(f"there is no file of rows at {source}")
    name = Path(args.experiment).stem + (f"-{args.view}" if args.view else "")
    output = Path(args.output) if args.output else source.with_name(f"{name}.png")
    if output.suffix not in (".png", ".pdf", ".svg"):
        raise UsageError(f"a figure ends in .png, .pdf or .svg, got {output.name}")
    try:
        rows = [json.loads(line) for line in read_lines(source)]
        points = module.summary(rows)
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{source} does not hold rows of {args.experiment}, one JSON object a line") from None
    if not points:
        raise UsageError(f"{source} holds no rows")
    try:
        figures.save(views[args.view](points) if args.view else module.figure(points), output)
    except ModuleNotFoundError as e:
        raise UsageError(f"the figure needs {e.name}: pip install 'headwise[report]'") from None
    _print_points(module, points)
    print(f"figure: {output}")
    return {"figure": str(output), "points": points}


def _shape(changes: Sequence[str], config: str | None = None) -> Shape:
    fields = dataclasses.asdict(Shape.from_hf(config)) if config else {}
    kinds = {f.name: str(f.type) for f in dataclasses.fields(Shape)}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals:
            raise UsageError(f"--set takes key=value, got {change!r}")
        if key not in kinds:
            raise UsageError(f"unknown shape key {key!r}; {nearest(key, kinds)}")
        fields[key] = _field(key, text, kinds[key])
    for name in ("dim", "depth", "num_heads"):
        if name not in fields:
            raise UsageError(f"a shape needs {name}: give a config.json or --set dim=... depth=... num_heads=...")
    return Shape.of(fields)


def _field(key: str, text: str, kind: str) -> Any:
    try:
        if kind == "int":
            return int(text.replace("_", ""))
        if "float" in kind:
            return float(text)
        if kind == "bool":
            return {"true": True, "false": False}[text.lower()]
        if kind.startswith("tuple[int"):
            return tuple(int(part) for part in text.split(","))
    except (ValueError, KeyError):
        wants = {"int": "a whole number", "bool": "true or false"}.get(kind, "a number" if "float" in kind else "whole numbers with commas")
        raise UsageError(f"{key} must be {wants}, got {text!r}") from None
    return text


def _tokens(shape: Shape, asked: int | None, most: int = 2048) -> int:
    n = asked or min(most, shape.num_positions or most)
    if shape.num_positions and n > shape.num_positions:
        raise UsageError(f"tokens must not exceed the model's {shape.num_positions} positions, got {n}")
    return n


def _cost(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    shape = _shape(args.changes, args.config)
    n = _tokens(shape, args.tokens)
    answer = {
        "params": shape.params,
        "param_table": shape.param_table(),
        "flops_forward": shape.flops(n),
        "flops_training": shape.flops(n, training=True),
        "kv_bytes_per_token": shape.kv_bytes(1),
        "kv_bytes": shape.kv_bytes(n),
        "input_bytes_per_token": shape.kv_bytes(1, inputs=True),
        "activation_bytes": shape.activation_bytes(n, bytes_per=2),
    }
    heads = f"{shape.num_heads} heads of rank {shape.head_dim} (values {shape.v_head_dim}, {shape.num_kv_heads} KV heads"
    heads += f", latent {shape.kv_lora_rank})" if shape.latent else ")"
    cache = (
        ("KV cache a token, 16-bit", f"{answer['kv_bytes_per_token']:,} B"),
        (f"KV cache, {n} tokens", f"{answer['kv_bytes']:,} B"),
        *(
            [("  inputs kept instead, a token", f"{answer['input_bytes_per_token']:,} B")]
            if shape.kv_width(True) < shape.kv_width()
            else []
        ),
    )
    kind = "causal" if shape.causal else "not causal"
    print(f"{kind}, {shape.depth} layers, dim {shape.dim}, {heads}, feed-forward {shape.ffn_dim} {shape.activation}")
    _print_table(
        [
            ("parameters", f"{shape.params:,}"),
            *((f"  {name}", f"{count:,}") for name, count in shape.param_table().items()),
            (f"forward FLOPs, {n} tokens", f"{answer['flops_forward']:.4g}"),
            ("training FLOPs", f"{answer['flops_training']:.4g}"),
            *(cache if shape.causal else ()),
            ("kept for backward, 16-bit", f"{answer['activation_bytes']:,} B"),
        ]
    )
    return answer


def _pretraining(args: argparse.Namespace, device: str) -> Any:
    """What `headwise pretrain` was asked to train."""
    from headwise.pretrain import PRESETS, Pretraining
    from headwise.tokens import find_tokenizer, vocab_of

    if args.preset not in PRESETS:
        raise UsageError(f"unknown preset {args.preset!r}; {nearest(args.preset, PRESETS)}")
    fields, values = PRESETS[args.preset]
    start = [f"vocab_size={-(-vocab_of(find_tokenizer(args.tokenizer)[0]) // 64) * 64}", "causal=true"]
    whole = args.config or any(change.startswith("dim=") for change in args.changes)
    shape = _shape([*([] if args.config else start), *([] if whole else fields), *args.changes], args.config)
    names = {f.name for f in dataclasses.fields(Pretraining)}
    given = {name: value for name, value in vars(args).items() if name in names and value is not None}
    settings: dict[str, Any] = {"precision": "bf16" if device.startswith("cuda") else "fp32", **values, **given}
    return Pretraining(shape=shape, source=args.text, **settings)


def _pretrain(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    from headwise.engine import pick_device
    from headwise.pretrain import check_way, pretrain
    from headwise.ranks import from_first, joined, place, told
    from headwise.store import Store
    from headwise.sweep import check_space

    ranks = told()
    where = place(ranks, pick_device(args.device))
    run, store = _pretraining(args, str(where)), Store(args.store)
    peak = None if args.peak_tflops is None else args.peak_tflops * 1e12
    check_way(run, ranks, args.accumulate, args.shard, peak)
    with joined(ranks, where), contextlib.ExitStack() as held:

        def claimed() -> dict[str, Any] | bool:
            """The row if it is there, else whether the run is ours to train."""
            row = store.row(run.id)
            if row is None:
                check_space(store.path, [run])
                return bool(held.enter_context(store.claim([run])))
            store.tidy([run])
            return row

        row = from_first(ranks, claimed)
        if row is False:
            raise UsageError(f"another process is training run {run.id} in {store.path}")
        shape = run.shape
        heads = f"{shape.depth} layers, dim {shape.dim}, {shape.num_heads} heads of rank {shape.head_dim}, {shape.params:,} parameters"
        state = "to train" if row is True else "already"
        _say(f"pretrain {run.id}: {heads}, {run.steps} steps of {run.batch_tokens:,} tokens, {state} in {store.path}")
        if row is True:
            row = pretrain(
                run, device=args.device, folder=store.runs_path, cache=store.path / "tokens", ranks=ranks, accumulate=args.accumulate,
                shard=args.shard, compiled=args.compile, peak=peak,
                checkpoint_every=args.checkpoint_every, done=store.add,
            )  # fmt: skip
    _print_pretrained(row)
    return {"store": str(store.path), "folder": str(store.runs_path / run.id), "row": row, "failed": int(row["status"] != "done")}


def _print_pretrained(row: dict[str, Any]) -> None:
    if row["status"] != "done":
        print(f"diverged after {row['steps_done']} steps")
        return

    def error(name: str) -> str:
        return f"{row[name]:.4f}" + (f" ± {row[f'{name}_se']:.4f}" if row[f"{name}_se"] is not None else "")

    lines = [
        ("held out, bits per byte", error("bits_per_byte")),
        ("held out, nats per token", error("held_out")),
        ("last step's training loss", f"{row['train_last']:.4f}"),
        ("tokens", f"{row['tokens']:,}"),
        ("tokens per second", f"{row['tokens_per_second']:,.0f}" if row["tokens_per_second"] else "-"),
        ("share of the devices' peak", f"{row['mfu']:.1%}" if row["mfu"] else "-"),
        ("memory", f"{row['memory_bytes'] / 2**20:,.0f} MiB"),
    ]
    _print_table(lines)


def _arm_cells(row: dict[str, Any]) -> tuple[str, ...]:
    sizes = (str(row[name]) for name in ("to", "num_heads", "head_dim", "depth", "ffn_dim"))
    off = (f"{row['residual']:+,}", f"{row['off']:+.3%}") if row["residual"] else ("0", "0%")
    return row["policy"], *sizes, f"{row['params']:,}", f"{row['flops_forward']:.4g}", f"{row['target']:,}", *off


def _policies(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    from headwise.policies import TOLERANCE, family

    base = _shape(args.changes, args.config)
    n = _tokens(base, args.tokens)
    asked = {"budget": args.budget, "target": args.target, "within": args.within, "exact": args.exact, "multiple": args.multiple}
    arms = [arm for policy in args.policy for arm in family(base, policy, args.to, tokens=n, **asked)]
    sizes = ("num_heads", "head_dim", "v_head_dim", "num_kv_heads", "depth", "ffn_dim", "params")
    rows = [
        {"policy": arm.policy, "to": arm.heads, **{name: getattr(arm.shape, name) for name in sizes}, "flops_forward": arm.shape.flops(n)}
        | {"target": arm.budget.target, "residual": arm.residual, "off": arm.off}
        for arm in arms
    ]
    allowed = f"{args.budget} allowed"
    head = ("policy", "to", "heads", "rank", "layers", "feed-forward", "parameters", f"FLOPs, {n} tokens", allowed, "off by", "share")
    print(f"base: {base.depth} layers, dim {base.dim}, {base.num_heads} heads of rank {base.head_dim}, feed-forward {base.ffn_dim}")
    _print_table([head, *map(_arm_cells, rows)])
    far = sum(not arm.met for arm in arms)
    print(f"{far or 'none'} of {len(arms)} {'is' if far == 1 else 'are'} more than {TOLERANCE:.1%} off the budget")
    return {"budget": args.budget, "tokens": n, "base": dataclasses.asdict(base), "arms": rows}


def _dtype(name: str) -> Any:
    import torch

    kinds = ("float32", "bfloat16", "float16", "float64")
    if name not in kinds:
        raise UsageError(f"unknown dtype {name!r}; {nearest(name, kinds)}")
    return getattr(torch, name)


def _explain(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    import torch

    from headwise.backends import explain

    dtype = _dtype(args.dtype)
    if args.device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"unknown device {args.device!r}; {nearest(args.device, ('auto', 'cpu', 'cuda'))}")
    shape = _shape(args.changes, args.config)
    choice = explain(shape, args.tokens, batch=args.batch, device=args.device, dtype=dtype)
    print(choice)
    told: dict[str, Any] = {"backend": choice.backend, "why": choice.why, "refused": dict(choice.refused)}
    if args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available()):
        from headwise import fused, trunk

        told["step"], told["blocks"] = (kind.refusal(shape, args.tokens, args.batch) for kind in (fused, trunk))
        if not told["step"]:
            print("a training step: fused, from data to optimiser")
        elif not told["blocks"]:
            print("a training step: fused blocks, modules around them")
        else:
            print(f"a training step: plain modules. The fused step cannot: {told['step']}. Fused blocks cannot: {told['blocks']}.")
    return told


def _infer(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    from headwise.engine import pick_device
    from headwise.infer import bandwidth, measure

    shape, dtype, device = _shape(args.changes, args.config), _dtype(args.dtype), pick_device(args.device)
    n = _tokens(shape, args.tokens, 512)
    rate = bandwidth(device)
    rows = [row for batch in args.batch for row in measure(shape, batch, n, args.steps, device, dtype, rate)]
    graphs = ("graph tokens/s",) if device.type == "cuda" else ()
    speed = f"a copy at {rate / 1e9:.1f} GB/s"
    print(f"{shape.params:,} parameters in {args.dtype} on {device}, {speed}; {args.steps} tokens behind {n - args.steps}")
    head = (
        "batch",
        "kept",
        "bytes a token",
        "cache bytes",
        "prefill tokens/s",
        "decode tokens/s",
        *graphs,
        "bandwidth",
        "times recomputing",
    )
    _print_table([head, *map(_infer_cells, rows)])
    about = {"params": shape.params, "device": str(device), "dtype": args.dtype, "tokens": n, "steps": args.steps, "bandwidth": rate}
    return {**about, "rows": rows}


def _infer_cells(row: dict[str, Any]) -> tuple[str, ...]:
    filled = f"{row['prefill_tokens_per_s']:,.0f}" if row["cache_bytes"] else "-"
    graph = (f"{row['batch'] / row['graph_step_s']:,.0f}",) if "graph_step_s" in row else ()
    rates = filled, f"{row['decode_tokens_per_s']:,.0f}", *graph, f"{row['bandwidth_share']:.0%}", f"{row['faster']:.1f}"
    return str(row["batch"]), row["keeps"], f"{row['bytes_per_token']:,}", f"{row['cache_bytes']:,}", *rates


def _theory(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    """The theory experiment with words of its own; fails when a check does."""
    args.experiment, args.preset, args.seeds, args.device = "theory", "quick", None, "cpu"
    args.changes = ([f"only={','.join(args.only)}"] if args.only else []) + [f"seed={args.seed}"]
    args.no_report = args.no_report or bool(args.only)
    answer = _run(args, words)
    return {"checks": answer.pop("points"), "failed": 0, **answer}


COMMANDS = {
    "run": _run,
    "theory": _theory,
    "pretrain": _pretrain,
    "list": _list,
    "report": _report,
    "draw": _draw,
    "cost": _cost,
    "policies": _policies,
    "explain": _explain,
    "infer": _infer,
}


def _first() -> bool:
    """Whether this is the first, or the only one, of the processes that torchrun started: it speaks for all."""
    return os.environ.get("RANK", "0") == "0"


def _say(text: str) -> None:
    if _first():
        print(text, file=sys.stderr, flush=True)


def _dispatch(words: Sequence[str]) -> int:
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        raise UsageError(f"unknown command {words[0]!r}; {nearest(words[0], COMMANDS)}")
    parser = _parser()
    args = parser.parse_args(words)
    if args.version:
        from headwise import __version__

        print(f"headwise {__version__}")
    elif args.command is None:
        parser.print_help()
    else:
        answer = COMMANDS[args.command](args, words)
        if args.json:
            print(json.dumps(answer))
        return 1 if answer.get("failed") else 0
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            with contextlib.nullcontext() if _first() else contextlib.redirect_stdout(io.StringIO()):
                return _dispatch(words)
        finally:
            sys.stdout.flush()  # a reader that is gone shows here, not at exit
    except UsageError as e:
        _say(f"headwise: error: {e}")
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        bar = "\n" if sys.stderr.isatty() else ""  # the progress bar's line is left first
        _say(f"{bar}headwise: stopped; the same command goes on where it was")
        return 1
    except (OSError, RuntimeError) as e:
        if os.environ.get("HEADWISE_TRACEBACK"):
            raise
        who = "" if _first() else f" in process {os.environ['RANK']}"
        print(f"headwise: error{who}: {' '.join(str(e).split())} (HEADWISE_TRACEBACK=1 shows where)", file=sys.stderr, flush=True)
        return 1
