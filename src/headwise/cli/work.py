"""Commands that train, compute, and show what is in a store; each returns what --json prints."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from headwise.cli.output import print_table, say
from headwise.cli.shapes import shape_of
from headwise.errors import UsageError, nearest

ROUNDS = 32  # of runs that depend on others' rows


def run(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    from headwise.device import pick_device
    from headwise.execute.sweep import check_space, compute, pretrain_all, sweep
    from headwise.experiments import find, settings_of
    from headwise.lm.spec import Pretraining
    from headwise.store import Store

    module, name = find(args.experiment), Path(args.experiment).stem
    changes = [*args.changes, *([f"tasks={args.task}"] if getattr(args, "task", None) else [])]
    if len(changes) > len(args.changes) and not hasattr(
        next(iter(module.PRESETS.values())), "tasks"
    ):
        raise UsageError(
            f"{name} has one task; --task goes with experiments over tasks: leaner, map, removable"
        )
    settings = settings_of(module, args.preset, changes, args.seeds)
    runs, trained = module.runs(settings), not hasattr(module, "make")
    if not trained and getattr(args, "keep_weights", False):
        raise UsageError(
            f"--keep-weights goes with experiments that train; {name} computes its rows"
        )
    if getattr(args, "workers", None) and (not trained or isinstance(runs[0], Pretraining)):
        raise UsageError(
            f"--workers goes with runs that are trained in stacks; {name} makes its rows one "
            "after another"
        )
    device = pick_device(args.device)
    store, given = Store(args.store), _given(getattr(args, "rows", []))
    if given and not any(run.id in given for run in runs):
        raise UsageError(
            f"none of the {len(given)} rows of {', '.join(args.rows)} is one of these {len(runs)} "
            "runs; see --set and --seeds"
        )
    noted = store.experiments().get(name)
    before = noted.get("ids") or [] if isinstance(noted, dict) else []
    taken = _take(given, runs, store, module, name)
    missing = store.missing(runs)
    check_space(store.path, missing if trained else [], trained and args.keep_weights)
    begun = store.begun(missing)
    resumed = (
        f", {taken} of them from {', '.join(args.rows)}, {len(missing)} to make" if taken else ""
    )
    resumed += f", {begun} to go on with" if begun else ""
    what = f"{len(runs)} {'runs' if trained else 'rows'}"
    say(
        f"{name} ({args.preset}): {what}, {len(runs) - len(missing)} already in "
        f"{store.path}{resumed}"
    )
    show = getattr(args, "no_train", False)
    if show and len(missing) == len(runs):
        raise UsageError(
            f"none of these {what} is in {store.path}; without --no-train they are made"
        )
    if missing and trained and not show and args.preset == "paper" and device.type == "cpu":
        say(
            "the preset paper is made for a GPU and may take days on a CPU; --no-train shows what "
            "is there"
        )
    command = shlex.join(["headwise", *words])
    source = {} if args.experiment == name else {"source": str(Path(args.experiment).resolve())}

    def note(some: Sequence[Any]) -> list[str]:
        """What is asked for, so that the store's page shows it, also after a kill; some checks
        alone do not replace the page of all."""
        ids = list(dict.fromkeys(run.id for run in some))
        if not getattr(args, "only", ()):
            store.note(
                name,
                {
                    **source,
                    "command": command,
                    "preset": args.preset,
                    "settings": dataclasses.asdict(settings),
                    "ids": ids,
                },
            )
        return ids

    def train_all(some: list[Any], keep: bool = False) -> list[Any]:
        if show:
            return store.rows([run.id for run in some])
        if some and isinstance(some[0], Pretraining):
            return pretrain_all(
                some,
                store,
                device=args.device,
                checkpoint_every=args.checkpoint_every,
                keep_weights=args.keep_weights,
                label=name,
            )
        return sweep(
            some,
            store,
            device=args.device,
            workers=args.workers,
            label=name,
            keep_weights=keep or args.keep_weights,
            checkpoint_every=args.checkpoint_every,
            probe=getattr(module, "probe", None),
        )

    note(runs)
    if trained or show:
        rows = train_all(runs, getattr(module, "KEEP", False))
    else:
        rows = compute(runs, module.make, store, device=args.device, label=name)
    for later in (
        _later_rounds(module, settings, runs, rows, name) if not (show and missing) else ()
    ):
        taken += _take(given, later, store, module, name)
        waiting = store.missing(later)
        say(
            f"{name}, next round: {len(later)} runs, {len(later) - len(waiting)} already in "
            f"{store.path}"
        )
        rows += train_all(later)
        runs, missing = [*runs, *later], [*missing, *waiting]
    points, ids = module.summary(rows), note(runs)
    if set(before) - set(ids) and not getattr(args, "only", ()):
        say(
            f"{name} was made with other settings in {store.path} before: its page now shows "
            "these; the older rows are still there"
        )
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
        say(f"headwise: {len(failed)} of {len(points)} checks do not hold")
    return {
        "experiment": name,
        "preset": args.preset,
        "store": str(store.path),
        "runs": len(runs),
        "made": 0 if show else len(missing),
        **({"missing": len(missing)} if show else {}),
        "taken": taken,
        "points": points,
        **({"failed": len(failed)} if failed else {}),
        **written,
    }


class _NoNumberError(ValueError):
    """NaN, Infinity or a number too large, where JSON has none."""


def _number(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise _NoNumberError(f"{text} is no number")
    return value


def _rows_of(source: Path) -> list[dict[str, Any]]:
    """The rows of a file, one JSON object a line."""
    from headwise.files import read_lines
    from headwise.rows import check_row

    if not source.exists() or source.is_dir():
        raise UsageError(
            f"there is no file of rows at {source}"
            + (": it is a folder" if source.is_dir() else "")
        )
    rows = []
    for number, line in enumerate(read_lines(source), 1):
        if not line.strip("\ufeff \t\r"):
            continue
        try:
            row = json.loads(line.lstrip("\ufeff"), parse_constant=_number, parse_float=_number)
        except _NoNumberError as e:
            raise UsageError(f"{source} holds a row, line {number}, that cannot be: {e}") from None
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise UsageError(
                f"{source} does not hold rows, one JSON object a line: line {number} is none"
            )
        if why := check_row(row):
            raise UsageError(f"{source} holds a row, line {number}, that cannot be: {why}")
        rows.append(row)
    if not rows:
        raise UsageError(f"{source} holds no rows")
    return rows


def _rows_at(source: Path, experiment: str) -> list[dict[str, Any]]:
    """The rows of a file, or an experiment's in a store."""
    from headwise.store import MARK, Store

    if not (source / MARK).exists():
        return _rows_of(source)
    store, name = Store(source), Path(experiment).stem
    asked = store.experiments()
    if name not in asked:
        raise UsageError(
            f"the store {source} has no {name}; it has {', '.join(asked) or 'no experiment yet'}"
        )
    with _shown(str(source), name):
        return store.rows(asked[name]["ids"])


def _given(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Rows of files by their run's id."""
    from headwise.rows import MEASURED

    out: dict[str, dict[str, Any]] = {}
    for source in map(Path, names):
        for row in _rows_of(source):
            known = out.setdefault(str(row.get("id")), row)
            if any(
                known.get(key) != row.get(key) for key in (known.keys() | row.keys()) - MEASURED
            ):
                raise UsageError(
                    f"{source} holds a row of run {row.get('id')} that another row of it "
                    "contradicts"
                )
    return out


def _take(
    given: dict[str, dict[str, Any]], runs: Sequence[Any], store: Any, module: Any, name: str
) -> int:
    """Put the rows that are given into the store where it has none of its own, if the experiment
    can show them; how many."""
    from headwise.rows import check_row

    some = [(run, given[run.id]) for run in store.missing(runs) if run.id in given] if given else []
    for run, row in some:
        if why := check_row(row, run):
            raise UsageError(f"the row of run {run.id} that is given cannot be its own: {why}")
    if some:
        with _shown("--rows", name):
            points = module.summary([row for _, row in some])
            module.headline(points), module.figure(points)
    for _, row in some:
        store.add(row)
    return len(some)


@contextlib.contextmanager
def _shown(where: str, name: str) -> Iterator[None]:
    """Rows of files may hold anything: what an experiment can make nothing of is one line."""
    try:
        yield
    except UsageError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, ArithmeticError) as e:
        what = f"no {e}" if isinstance(e, KeyError) else " ".join(str(e).split())[:80]
        raise UsageError(
            f"{where} does not hold rows of {name}, one JSON object a line: {what}"
        ) from None


def _later_rounds(
    module: Any, settings: Any, runs: list[Any], rows: list[Any], name: str
) -> Iterator[list[Any]]:
    """Runs that depend on rows, round after round; `rows` grows meanwhile."""
    known = {run.id for run in runs}
    for _ in range(ROUNDS if hasattr(module, "then") else 0):
        later = [run for run in module.then(settings, rows) if run.id not in known]
        if not later:
            return
        known |= {run.id for run in later}
        yield later
    if hasattr(module, "then"):
        raise UsageError(
            f"`then` of {name} must come to an end, it has new runs after {ROUNDS} rounds"
        )


def _write(module: Any, points: list[dict[str, Any]], store: Any, name: str) -> dict[str, str]:
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
        import plotly  # noqa: F401
    except ModuleNotFoundError as e:
        print(
            f"no figure and no report: {e.name} is not installed (pip install "
            f"'headwise[report]'); the rows are in {store.path}"
        )
        return {}
    from headwise.show.matplotlib_figure import save
    from headwise.show.report import write_report

    picture = store.path / f"{name}.png"
    save(module.figure(points), picture)
    return {"figure": str(picture), "report": str(write_report(store))}


def _print_points(module: Any, points: list[dict[str, Any]]) -> None:
    from headwise.experiments import cell

    print_table(
        [
            [heading for _, heading in module.COLUMNS],
            *([cell(p, key) for key, _ in module.COLUMNS] for p in points),
        ]
    )


def _list_settings(experiment: str) -> dict[str, Any]:
    """What --set can change in an experiment, by preset."""
    from headwise.experiments import find

    module = find(experiment)
    presets = {preset: dataclasses.asdict(settings) for preset, settings in module.PRESETS.items()}
    names = list(dict.fromkeys(name for values in presets.values() for name in values))

    def shown(value: Any) -> str:
        return (
            ",".join(map(str, value))
            if isinstance(value, tuple | list)
            else ""
            if value is None
            else str(value)
        )

    print(f"{module.QUESTION}\n")
    print_table(
        [
            ("setting", *presets),
            *([name, *(shown(values.get(name)) for values in presets.values())] for name in names),
        ]
    )
    return {"experiment": experiment, "presets": presets}


def list_runs(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    from headwise.experiments import EXPERIMENTS

    if args.older and not args.store:
        raise UsageError("--older lists rows of a store: add --store DIR")
    if args.experiment and args.store:
        raise UsageError(
            f"list shows the settings of an experiment or a store, got {args.experiment} and "
            f"{args.store}"
        )
    if args.experiment:
        return _list_settings(args.experiment)
    if not args.store:
        about = {
            name: (module.__doc__ or "").strip().splitlines()[0]
            for name, module in EXPERIMENTS.items()
        }
        print_table([("experiment", "what"), *about.items()])
        return {"experiments": about}
    from headwise.device import commit
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
        "bits_per_byte",
        "commit",
        "finished",
    )
    keys = tuple(k for k in keys if k != "bits_per_byte" or any(r.get(k) is not None for r in rows))
    short = [{k: r.get(k) for k in keys} for r in rows]
    cells = [[f"{v:.4f}" if isinstance(v, float) else str(v) for v in r.values()] for r in short]
    print_table([keys, *cells])
    unfinished = sorted(
        p.parent.name
        for p in store.runs_path.glob("*/run.json")
        if store.row(p.parent.name) is None
    )
    print(
        f"{len(rows)} rows{' made by other commits' if args.older else ''}, {len(unfinished)} "
        "unfinished runs"
    )
    return {"rows": short, "unfinished": unfinished, "experiments": sorted(store.experiments())}


def report(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    from headwise.store import Store

    store, output = Store(args.store, create=False), Path(args.output) if args.output else None
    if output and output.is_dir():
        raise UsageError(f"--output names a file, got the folder {output}")
    try:
        from headwise.show.report import write_report

        path = write_report(store, output)
    except ModuleNotFoundError as e:
        raise UsageError(f"the report needs {e.name}: pip install 'headwise[report]'") from None
    print(f"report: {path}")
    return {"report": str(path)}


def draw(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    from headwise.experiments import page
    from headwise.show.matplotlib_figure import save

    module = page(args.experiment)
    views = getattr(module, "VIEWS", {})
    if args.view is not None and args.view not in views:
        raise UsageError(
            f"unknown view {args.view!r} of {args.experiment}; "
            f"{nearest(args.view, views) if views else 'it has one figure'}"
        )
    sources = [Path(name) for name in args.rows]
    name = Path(args.experiment).stem + (f"-{args.view}" if args.view else "")
    output = Path(
        args.output
        or (
            sources[0] / f"{name}.png"
            if sources[0].is_dir()
            else sources[0].with_name(f"{name}.png")
        )
    )
    if output.suffix not in (".png", ".pdf", ".svg"):
        raise UsageError(f"a figure ends in .png, .pdf or .svg, got {output.name}")
    if not output.parent.is_dir():
        raise UsageError(f"there is no folder {output.parent} to draw into")
    where, rows = (
        ", ".join(map(str, sources)),
        [row for source in sources for row in _rows_at(source, args.experiment)],
    )
    with _shown(where, args.experiment):
        points = module.summary(
            list({row.get("id", i): row for i, row in enumerate(rows)}.values())
        )  # a row of two files is one
        description = views[args.view](points) if args.view else module.figure(points)
    if not points:
        raise UsageError(f"{where} holds no rows of {args.experiment}")
    if not description["panels"]:
        raise UsageError(
            f"the view {args.view} of {args.experiment} has nothing to compare in {where}"
        )
    try:
        save(description, output)
    except ModuleNotFoundError as e:
        raise UsageError(f"the figure needs {e.name}: pip install 'headwise[report]'") from None
    _print_points(module, points)
    for line in module.headline(points):
        print(line)
    print(f"figure: {output}")
    return {"figure": str(output), "points": points}


def _pretraining(args: argparse.Namespace, device: str) -> Any:
    """What `headwise pretrain` was asked to train."""
    from headwise.lm.spec import PRESETS, Pretraining
    from headwise.lm.text_files import find_tokenizer, vocab_of

    if args.preset not in PRESETS:
        raise UsageError(f"unknown preset {args.preset!r}; {nearest(args.preset, PRESETS)}")
    fields, values = PRESETS[args.preset]
    vocab = -(-vocab_of(find_tokenizer(args.tokenizer)[0]) // 64) * 64
    shape = (
        shape_of(args.changes, args.config)
        if args.config
        else _decoder(args.changes, fields, vocab)
    )
    names = {f.name for f in dataclasses.fields(Pretraining)}
    given = {
        name: value for name, value in vars(args).items() if name in names and value is not None
    }
    settings: dict[str, Any] = {
        "precision": "bf16" if device.startswith("cuda") else "fp32",
        **values,
        **given,
    }
    return Pretraining(shape=shape, source=args.text, **settings)


def _decoder(changes: Sequence[str], sizes: Sequence[str], vocab: int) -> Any:
    """The shape that was asked for: sizes of the preset unless dim is given, nanochat's style and
    every head rotated unless said."""
    from headwise.lm.spec import STYLE

    given = {change.partition("=")[0] for change in changes}
    style = {
        key: value
        for key, value in STYLE.items()
        if key != "qk_norm" or "kv_lora_rank" not in given
    }
    start = [
        f"vocab_size={vocab}",
        "causal=true",
        *(f"{key}={value}" for key, value in style.items()),
    ]
    shape = shape_of([*start, *([] if "dim" in given else sizes), *changes])
    if {"qk_rope_head_dim", "positions"} & given:
        return shape
    if shape.head_dim % 2:
        raise UsageError(
            f"rotary positions need an even head_dim, got {shape.head_dim}; give "
            "qk_rope_head_dim, 0 for no positions"
        )
    return shape.replace(
        qk_rope_head_dim=shape.head_dim // 4 * 2 if shape.latent else shape.head_dim
    )


def _told(shape: Any) -> str:
    """A decoder in words."""
    from headwise.experiments.common import plural

    heads = f"{plural(shape.num_heads, 'head')} of rank {shape.head_dim}"
    rotary = (
        f"{shape.qk_rope_head_dim} of {shape.head_dim} coordinates rotated"
        if shape.qk_rope_head_dim
        else ""
    )
    positions = rotary or (
        "no positions" if shape.positions == "none" else f"{shape.positions} positions"
    )
    norm = {"none": "not normed", "free": "normed", "head": "normed with gains"}[shape.qk_norm]
    style = f"{positions}, queries and keys {norm}, {shape.activation}"
    return (
        f"{plural(shape.depth, 'layer')}, dim {shape.dim}, {heads}, {style}, {shape.params:,} "
        "parameters"
    )


def pretrain(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    from headwise.device import pick_device
    from headwise.execute.sweep import check_space
    from headwise.lm.distributed import broadcast_result, from_env, local_device, process_group
    from headwise.lm.trainer import check_execution, load_corpus, pretrain
    from headwise.rows import CHECKPOINT_FILE
    from headwise.store import Store

    world = from_env()
    where = local_device(world, pick_device(args.device))
    run, store = _pretraining(args, str(where)), Store(args.store)
    peak = None if args.peak_tflops is None else args.peak_tflops * 1e12
    compiled = "blocks" if args.compile_blocks else "model" if args.compile else ""
    check_execution(run, world, args.accumulate, args.shard, compiled, peak)
    with process_group(world, where), contextlib.ExitStack() as held:

        def claimed() -> dict[str, Any] | bool:
            """The row if it is there, else whether the run is ours to train."""
            row = store.row(run.id)
            if row is None:
                check_space(store.path, [run])
                store.open()
                load_corpus(
                    run, store.path / "tokens"
                )  # a text that does not do leaves no run behind
                return bool(held.enter_context(store.claim([run])))
            store.tidy([run])
            return row

        row = broadcast_result(world, claimed)
        if row is False:
            raise UsageError(f"another process is training run {run.id} in {store.path}")
        begun = (store.runs_path / run.id / CHECKPOINT_FILE).exists()
        state = ("going on" if begun else "to train") if row is True else "already"
        say(
            f"pretrain {run.id}: {_told(run.shape)}, {run.steps} steps of {run.batch_tokens:,} "
            f"tokens, {state} in {store.path}"
        )
        if row is True:
            command = {"command": shlex.join(["headwise", *words])}
            row = command | pretrain(
                run,
                device=args.device,
                folder=store.runs_path,
                cache=store.path / "tokens",
                world=world,
                accumulate=args.accumulate,
                shard=args.shard,
                compiled=compiled,
                peak=peak,
                checkpoint_every=args.checkpoint_every,
                done=lambda made: store.add(command | made),
            )
    _print_pretrained(row)
    say(f"beside others: headwise report --store {shlex.quote(str(store.path))}")
    return {
        "store": str(store.path),
        "folder": str(store.runs_path / run.id),
        "row": row,
        "failed": int(row["status"] != "done"),
    }


def _print_pretrained(row: dict[str, Any]) -> None:
    if row["status"] != "done":
        print(f"diverged after {row['steps_done']} steps")
        return

    def error(name: str) -> str:
        return f"{row[name]:.4f}" + (
            f" ± {row[f'{name}_se']:.4f}" if row[f"{name}_se"] is not None else ""
        )

    lines = [
        ("held out, bits per byte", error("bits_per_byte")),
        ("held out, nats per token", error("held_out")),
        ("last step's training loss", f"{row['train_last']:.4f}"),
        ("tokens", f"{row['tokens']:,}"),
        (
            "tokens per second",
            f"{row['tokens_per_second']:,.0f}" if row["tokens_per_second"] else "-",
        ),
        ("share of the devices' peak", f"{row['mfu']:.1%}" if row["mfu"] else "-"),
        ("memory", f"{row['memory_bytes'] / 2**20:,.0f} MiB"),
    ]
    print_table(lines)


def theory(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    """The theory experiment with words of its own; fails when a check does."""
    args.experiment, args.preset, args.seeds, args.device = "theory", "quick", None, "cpu"
    args.changes = ([f"only={','.join(args.only)}"] if args.only else []) + [f"seed={args.seed}"]
    args.no_report = args.no_report or bool(args.only)
    answer = run(args, words)
    return {"checks": answer.pop("points"), "failed": 0, **answer}
