"""`headwise pretrain`: one decoder on one text."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headwise.cli.cluster_arguments import place_of
from headwise.cli.export import tracking
from headwise.cli.output import print_table, say
from headwise.cli.shapes import shape_of
from headwise.errors import UsageError, nearest
from headwise.rows import SAMPLE_FILE, WEIGHTS_FILE
from headwise.shape import field_of


def _pretraining(args: argparse.Namespace, device: str) -> Any:
    """What `headwise pretrain` was asked to train."""
    from headwise.lm.spec import PRESETS, Pretraining
    from headwise.lm.text_files import find_tokenizer, vocab_of

    if args.preset not in PRESETS:
        raise UsageError(f"unknown preset {args.preset!r}; {nearest(args.preset, PRESETS)}")
    fields, values = PRESETS[args.preset]
    if args.config and not args.text and args.config.endswith(".txt"):
        raise UsageError(
            f"pretrain takes a model's config.json, got {args.config}; a text is given by --text "
            f"{args.config}"
        )
    vocab = -(-vocab_of(find_tokenizer(args.tokenizer)[0]) // 64) * 64
    shape = (
        shape_of(args.changes, args.config, args.part)
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

    given = {field_of(change.partition("=")[0], 0) for change in changes}
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
    start += [] if "dim" in given else sizes
    asked = [change for change in start if change.partition("=")[0] not in given]
    shape = shape_of([*asked, *changes])
    if {"qk_rope_head_dim", "positions"} & given:
        return shape
    ranks = [shape.layer(i).head_dim for i in range(len(shape.layers) or 1)]
    if odd := [rank for rank in ranks if rank % 2]:
        raise UsageError(
            f"rotary positions need an even head_dim, got {odd[0]}; give "
            "qk_rope_head_dim, 0 for no positions"
        )
    rotated = [rank // 4 * 2 if shape.latent else rank for rank in ranks]
    return shape.replace(qk_rope_head_dim=rotated if shape.layers else rotated[0])


def _in_words(shape: Any) -> str:
    """A decoder in words."""
    from headwise.experiments.points import plural

    heads = f"{plural(shape.num_heads, 'head')} of rank {shape.head_dim}"
    rotary = (
        f"{shape.qk_rope_head_dim} of {shape.head_dim} coordinates rotated"
        if shape.qk_rope_head_dim
        else ""
    )
    positions = rotary or (
        "no positions" if shape.positions == "none" else f"{shape.positions} positions"
    )
    norms = {"none": "not normed", "free": "normed", "head": "normed with gains"} | {
        "all": "normed over all heads"
    }
    norm = norms[shape.qk_norm]
    style = f"{positions}, queries and keys {norm}, {shape.activation}"
    return (
        f"{plural(shape.depth, 'layer')}, dim {shape.dim}, {heads}, {style}, {shape.params:,} "
        "parameters"
    )


def pretrain(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    if args.nodes or args.gpus_per_node:
        return _pretrain_on_nodes(args, words)
    from headwise.device import pick_device
    from headwise.execute.memory import check_memory
    from headwise.execute.slurm_nodes import hold, reporting, words_of_job
    from headwise.execute.sweep import check_space
    from headwise.lm.distributed import broadcast_result, local_device, process_group
    from headwise.lm.launch import from_env
    from headwise.lm.trainer import check_execution, load_corpus, pretrain
    from headwise.rows import CHECKPOINT_FILE
    from headwise.store import Store

    world = from_env()
    place = place_of(args)
    if place.by_engine:
        return _pretrain_elsewhere(args, place, world.size)
    where = local_device(world, pick_device(args.device))
    run, store = _pretraining(args, str(where)), Store(args.store)
    peak, compiled = _execution(args)
    check_execution(run, world, args.accumulate, args.shard, compiled, peak)
    group = args.group if world.is_main else ""
    with (
        tracking(args.track, store, enabled=world.is_main) as also,
        reporting(group, args.attempt, args.stop) as beat,
        process_group(world, where),
        contextlib.ExitStack() as held,
    ):

        def claimed() -> dict[str, Any] | bool:
            """The row if it is there, else whether the run is ours to train."""
            row = store.row(run.id)
            if row is None:
                check_memory([run], where, world.size * args.accumulate)
                check_space(store.path, [run])
                store.open()
                # a text that cannot be used leaves no run behind
                load_corpus(run, store.path / "tokens")
                return hold(store, run, beat, held, args.stop) or store.row(run.id) or False
            store.tidy([run])
            return row

        also([run.id])
        row = broadcast_result(world, claimed)
        if row is False:
            raise UsageError(f"another process is training run {run.id} in {store.path}")
        begun = (store.runs_path / run.id / CHECKPOINT_FILE).exists()
        state = ("resumed" if begun else "to train") if row is True else "already"
        tell = say if world.is_main else _nothing
        tell(_announced(run, store.path, state))
        command = {"command": shlex.join(["headwise", *words_of_job(words)])}

        def done(made: dict[str, Any]) -> None:
            store.add_once(command | made)
            if beat is not None:
                beat.add(rows=1)

        if row is True:
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
                done=done,
                stop=args.stop,
                advance=beat.add if beat is not None else None,
            )
    if world.is_main:
        _leave_sample(run, store.path / "runs" / run.id, str(where), tell)
    return _answered(run, store.path, row, tell)


def _leave_sample(run: Any, folder: Path, device: str, tell: Callable[[str], None]) -> None:
    """A text by the decoder beside its weights, for the store's page; without weights none."""
    from headwise.lm.writing import write_sample

    if (folder / SAMPLE_FILE).exists() or not (folder / WEIGHTS_FILE).exists():
        return
    try:
        write_sample(folder, run.source, device)
    except UsageError as e:  # the row is what was asked for
        tell(f"no sample of its text: {e}")


def _pretrain_on_nodes(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    """The same, by one job of Slurm over several nodes."""
    if args.on != "slurm":
        raise UsageError(f"--nodes and --gpus-per-node are for --on slurm, got --on {args.on}")
    from headwise.execute.driver import GroupsFailedError
    from headwise.execute.groups import Options
    from headwise.execute.slurm_nodes import SlurmNodes, train_on_nodes, words_of_job
    from headwise.execute.sweep import check_space
    from headwise.lm.launch import World
    from headwise.lm.trainer import check_execution
    from headwise.store import Store

    nodes = args.nodes or 1
    world = World(size=nodes * max(1, args.gpus_per_node))
    # The machine that submits may have another device, on which "auto" is another run.
    by_gpus = "cuda" if args.gpus_per_node else "cpu"
    device = by_gpus if args.device == "auto" else args.device
    run, store = _pretraining(args, device), Store(args.store)
    peak, compiled = _execution(args)
    check_execution(run, world, args.accumulate, args.shard, compiled, peak)
    row = store.row(run.id)
    state = "already" if row is not None else f"to train on {nodes} nodes of Slurm"
    say(_announced(run, store.path, state))
    if row is None:
        check_space(store.path, [run])
        job = [*words_of_job(words), *(["--device", device] if args.device == "auto" else [])]
        executor = SlurmNodes(args.slurm, nodes, args.gpus_per_node, job)
        store.open()
        options = Options(device, False, args.checkpoint_every, lost_after=args.lost_after)
        try:
            row = train_on_nodes(run, store, executor, options, args.tries, args.stop)
        except GroupsFailedError as e:
            raise RuntimeError(f"run {run.id} is not made: {e.table[1][-1]}") from None
    return _answered(run, store.path, row, say)


def _execution(args: argparse.Namespace) -> tuple[float | None, str]:
    """What the devices can do, and what is compiled."""
    peak = None if args.peak_tflops is None else args.peak_tflops * 1e12
    return peak, "blocks" if args.compile_blocks else "model" if args.compile else ""


def _announced(run: Any, store: Path, state: str) -> str:
    return (
        f"pretrain {run.id}: {_in_words(run.shape)}, {run.steps} steps of {run.batch_tokens:,} "
        f"tokens, {state} in {store}"
    )


def _answered(
    run: Any, store: Path, row: dict[str, Any], tell: Callable[[str], None]
) -> dict[str, Any]:
    """Show the row; what the command answers."""
    _print_pretrained(row)
    quoted = shlex.quote(str(store))
    tell(f"beside others: headwise report --store {quoted}")
    if (store / "runs" / run.id / WEIGHTS_FILE).exists():
        tell(f"what it writes: headwise generate {run.id[:8]} --prompt Once --store {quoted}")
    return {
        "store": str(store),
        "folder": str(store / "runs" / run.id),
        "row": row,
        "failed": int(row["status"] != "done"),
    }


def _pretrain_elsewhere(args: argparse.Namespace, place: Any, processes: int) -> dict[str, Any]:
    """The decoder as one group of an engine, on one device."""
    from headwise.execute.engine import Engine
    from headwise.execute.sweep import pretrain_all
    from headwise.store import Store

    given = {
        "torchrun": processes > 1,
        "--shard": args.shard != "ddp",
        "--accumulate": args.accumulate != 1,
        "--compile": args.compile or args.compile_blocks,
        "--peak-tflops": args.peak_tflops is not None,
    }
    if chosen := [name for name, there in given.items() if there]:
        raise UsageError(
            f"--on {place.on} trains a decoder on one device, compiled on a GPU, got {chosen[0]}"
        )
    run, store = _pretraining(args, args.device), Store(args.store)
    with Engine(place) as engine:
        (row,) = pretrain_all(
            [run],
            store,
            device=args.device,
            checkpoint_every=args.checkpoint_every,
            keep_weights=True,
            stop=args.stop,
            engine=engine,
        )
    _print_pretrained(row)
    return {
        "store": str(store.path),
        "folder": str(store.runs_path / run.id),
        "row": row,
        "failed": int(row["status"] != "done"),
    }


def _nothing(text: str) -> None:
    """What the other processes say."""


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
