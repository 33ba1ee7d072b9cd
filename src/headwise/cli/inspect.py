"""`headwise inspect`: a checkpoint's attention as sentences, a table, a page, JSON and CSV."""

from __future__ import annotations

import argparse
import csv
import io
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from headwise.cli.output import print_prose, print_table, say, width_for
from headwise.errors import UsageError, shown
from headwise.files import write_whole
from headwise.progress import Progress

if TYPE_CHECKING:
    from headwise.diagnose.inspection import Inspection
    from headwise.diagnose.on_data import OnData

MOST_LAYERS = 10_000  # that --layers lists


def inspect(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    from headwise.diagnose.inspection import inspect

    if args.kv_heads and not args.heads:
        raise UsageError("--kv-heads needs --heads")
    page = None if args.no_page else _target(args.page)
    table = None if args.csv is None else _target(args.csv)
    found = inspect(
        args.path,
        *args.others,
        mapping=args.mapping,
        config=args.config,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        prefix=args.prefix,
        layers=None if args.layers is None else _layers(args.layers),
        data=args.data,
        tokens=args.tokens,
        sequences=args.sequences,
        progress=_bar(),
    )
    width = width_for(args.wide)
    for line in found.sentences:
        print_prose(line, width)
    for note in found.notes:
        print_prose(f"note: {note}", width)
    print()
    print_table(_table(found), width, (0, 2, 3, 4, 6))
    if found.data is not None:
        print()
        print_table(_data_table(found.data), width, (0, 1, 2, 7))
    plain = found.to_json()
    if table is not None:
        write_whole(table, _csv(found.rows))
        plain["csv"] = str(table)
        print(f"csv: {table}")
    if page is not None:
        written = _write_page(page, found, plain, f"headwise {shlex.join(words)}")
        plain |= {"page": str(page)} if written else {}
    return plain


def _bar() -> Callable[[int, int], None]:
    """What shows how many layers are done."""
    bars: list[Progress] = []

    def tick(done: int, total: int) -> None:
        if not bars:
            bars.append(Progress(total, f"inspect: {total} layers"))
        bars[0].advance(1)
        if done == total:
            bars[0].close()

    return tick


def _target(given: str) -> Path:
    """A file to write, in a folder that is there."""
    path = Path(given)
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"cannot write {given!r}: it must be a file in a folder that is there")
    return path


def _layers(text: str) -> list[int]:
    """0-3,7 as numbers."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip())
        if not match:
            raise UsageError(f"--layers must be numbers such as 0-3,7, got {shown(text)}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first > MOST_LAYERS:
            raise UsageError(f"--layers must count up, got {shown(part)}")
        found += range(first, last + 1)
    return found


def _table(found: Inspection) -> list[tuple[str, ...]]:
    """A line per layer: means over its heads, those of random weights in brackets."""
    out: list[tuple[str, ...]] = [(
        "layer", "heads", "rank paid", "QK 90 %", "QK effective", "worst QK condition", "VO 90 %",
        "VO effective", "independent heads", "KV 99 %", "random", "looks",
    )]  # fmt: skip
    for i, layer in enumerate(found.layers):
        control = found.control(i)
        kappas = [v for v in layer.qk.condition if v is not None]
        singular = len(kappas) < len(layer.qk.condition)
        group = layer.num_heads // layer.num_kv_heads
        vo, other = layer.vo, control.vo
        out.append((
            str(layer.layer),
            str(layer.num_heads) + (f"/{layer.num_kv_heads}" if group > 1 else ""),
            str(layer.head_dim),
            f"{fmean(layer.qk.r90):.1f} ({fmean(control.qk.r90):.1f})",
            f"{fmean(layer.qk.effective):.1f} ({fmean(control.qk.effective):.1f})",
            "infinite" if singular else f"{max(kappas):,.3g}",
            f"{fmean(vo.r90):.1f} ({fmean(other.r90):.1f})" if vo and other else "-",
            f"{fmean(vo.effective):.1f} ({fmean(other.effective):.1f})" if vo and other else "-",
            f"{layer.qk.effective_heads:.1f}",
            f"{layer.kv_ranks[1]} of {layer.kv_width}",
            str(control.kv_ranks[1]),
            "untrained" if found.untrained[i] else "trained",
        ))  # fmt: skip
    return out


def _data_table(data: OnData) -> list[tuple[str, ...]]:
    """A line per layer: what data say."""
    ranks = data.layers[0].ranks
    what = "loss" if data.loss is not None else "change"
    out: list[tuple[str, ...]] = [
        ("layer", "scores 90 %", "range", "entropy", "first token", "largest score", "dead",
         *(f"{what} at rank {rank}" for rank in ranks), "condition side by side"),
    ]  # fmt: skip
    out += [
        (
            str(layer.layer), f"{fmean(layer.r90):.1f}",
            f"{min(layer.r90):.0f} to {max(layer.r90):.0f}", f"{fmean(layer.entropy):.2f}",
            f"{fmean(layer.first):.2f}", f"{max(layer.largest):.1f}", str(len(layer.dead)),
            *(f"{loss:.4f}" for loss in layer.losses),
            "infinite" if layer.kappa is None else f"{layer.kappa:,.3g} (k = {layer.k})",
        )
        for layer in data.layers
    ]  # fmt: skip
    return out


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    out = io.StringIO()
    columns = list(dict.fromkeys(column for row in rows for column in row))
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _write_page(page: Path, found: Inspection, plain: dict[str, Any], command: str) -> bool:
    """Write the page, where what draws it is installed."""
    from headwise.show.inspect_page import write_inspect_page

    try:
        write_inspect_page(page, plain, found.rows, command)
    except ImportError as error:
        say(f"headwise: no page: {error}; pip install 'headwise[report]'")
        return False
    print(f"page: {page}")
    return True
