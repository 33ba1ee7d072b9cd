"""`headwise pretrain`: one decoder on one text."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import shlex
from collections.abc import Sequence
from typing import Any

from headwise.cli.cluster_arguments import place_of
from headwise.cli.output import print_table, say
from headwise.cli.shapes import shape_of
from headwise.errors import UsageError, nearest


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
    norm = {"none": "not normed", "free": "normed", "head": "normed with gains"}[shape.qk_norm]
    style = f"{positions}, queries and keys {norm}, {shape.activation}"
    return (
        f"{plural(shape.depth, 'layer')}, dim {shape.dim}, {heads}, {style}, {shape.params:,} "
        "parameters"
    )


def pretrain(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    from headwise.device import pick_device
    from headwise.execute.memory import check_memory
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
    peak = None if args.peak_tflops is None else args.peak_tflops * 1e12
    compiled = "blocks" if args.compile_blocks else "model" if args.compile else ""
    check_execution(run, world, args.accumulate, args.shard, compiled, peak)
    with process_group(world, where), contextlib.ExitStack() as held:

        def claimed() -> dict[str, Any] | bool:
            """The row if it is there, else whether the run is ours to train."""
            row = store.row(run.id)
            if row is None:
                check_memory([run], where, world.size * args.accumulate)
                check_space(store.path, [run])
                store.open()
                # a text that cannot be used leaves no run behind
                load_corpus(run, store.path / "tokens")
                return bool(held.enter_context(store.claim([run])))
            store.tidy([run])
            return row

        row = broadcast_result(world, claimed)
        if row is False:
            raise UsageError(f"another process is training run {run.id} in {store.path}")
        begun = (store.runs_path / run.id / CHECKPOINT_FILE).exists()
        state = ("resumed" if begun else "to train") if row is True else "already"
        tell = say if world.is_main else _nothing
        tell(
            f"pretrain {run.id}: {_in_words(run.shape)}, {run.steps} steps of {run.batch_tokens:,} "
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
                stop=args.stop,
            )
    _print_pretrained(row)
    tell(f"beside others: headwise report --store {shlex.quote(str(store.path))}")
    return {
        "store": str(store.path),
        "folder": str(store.runs_path / run.id),
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
