"""`headwise convert`: a checkpoint at another shape, as sentences and tables."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.cli.output import print_prose, print_table, width_for
from headwise.errors import UsageError, shown
from headwise.progress import Progress

if TYPE_CHECKING:
    from headwise.converting.convert import Conversion


def convert(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    from headwise.converting.convert import convert

    sizes = _sizes(args.to)
    out = None
    if not args.dry_run:
        out = args.out or _default_out(args.path, args.rank, sizes)
    elif args.out:
        raise UsageError("--dry-run writes nothing, --out names where: give one of them")
    done = convert(
        args.path,
        out=out,
        rank=args.rank,
        to=args.format,
        data=args.data,
        tokens=args.tokens,
        sequences=args.sequences,
        finetune=args.finetune,
        lr=args.lr,
        seed=args.seed,
        controls=not args.no_controls,
        progress=_bar(),
        **sizes,
    )
    width = width_for(args.wide)
    for line in done.sentences:
        print_prose(line, width)
    for note in done.notes:
        print_prose(f"note: {note}", width)
    print()
    print_table(_costs(done), width, (0, 1, 2, 3))
    if not done.exact:
        print()
        print_table(_layers(done), width, (0, 1, 2, 3))
    if done.curve:
        print()
        print_table(_curve(done), width, (0, 1))
    if done.out is not None:
        print(f"\nwritten: {done.out} ({done.format})")
    return done.to_json()


def _sizes(given: Sequence[str]) -> dict[str, int]:
    """SIZE=N as numbers."""
    sizes: dict[str, int] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not value.strip().isdecimal() or len(value) > 9:
            raise UsageError(f"--to takes sizes such as num_kv_heads=4, got {shown(text)}")
        if name in sizes:
            raise UsageError(f"{shown(name)} is given twice")
        sizes[name] = int(value)
    return sizes


def _default_out(path: str, rank: int | None, sizes: dict[str, int]) -> str:
    """The checkpoint's name and what changes, in this folder."""
    changes = ({} if rank is None else {"rank": rank}) | sizes
    name = Path(path).absolute().name.partition(".")[0] or "checkpoint"
    return "-".join([name, *(f"{key}{value}" for key, value in changes.items())] +
                    ([] if changes else ["copy"]))[:200]  # fmt: skip


def _bar() -> Callable[[int, int], None]:
    """What shows how many layers were tried, and how many steps were trained."""
    bars: dict[int, Progress] = {}

    def tick(done: int, total: int) -> None:
        if total not in bars:
            bars[total] = Progress(total, f"convert: {total}")
        bars[total].advance(1)
        if done == total:
            bars[total].close()

    return tick


def _costs(done: Conversion) -> list[tuple[str, ...]]:
    out: list[tuple[str, ...]] = [("", "before", "after", "change")]
    for name, before, after in done.costs:
        change = f"{after / before - 1:+.1%}" if before else "-"
        out.append((name, f"{before:,}", f"{after:,}", change))
    return out


def _layers(done: Conversion) -> list[tuple[str, ...]]:
    """A line per layer: what it loses."""
    loss = done.losses
    out: list[tuple[str, ...]] = [
        ("layer", "scores lost", "outputs lost", "loss of it alone", "KV heads joined")
    ]
    for layer in done.layers:
        alone = "-" if layer.loss is None or loss is None else f"{layer.loss - loss.before:+.5f}"
        groups = " ".join("+".join(map(str, g)) for g in layer.groups if len(g) > 1)
        out.append((str(layer.layer), f"{layer.scores_lost:.2%}", f"{layer.outputs_lost:.2%}",
                    alone, groups or "-"))  # fmt: skip
    return out


def _curve(done: Conversion) -> list[tuple[str, ...]]:
    rows = [(f"{step:,}", f"{loss:.4f}") for step, loss in done.curve]
    return [("step", "held-out loss"), *rows]
