"""Random shapes against the best that PyTorch does at each, in one run: the guard against cliffs.

    python -m benchmarks.shapes --out shapes.jsonl --seconds 560      again until it says: complete
    python -m benchmarks.shapes --out shapes.jsonl --show             the tables and the plot alone
    python -m benchmarks.shapes --out tiny.jsonl --tiny               a few small ones, on a CPU too

Seeded cases of three kinds (shapes_cases.py), known hard ones first, measured as shapes_timed.py
says:

attention   `attend`, forward and backward, against every kernel of PyTorch that takes the case
ensemble    a training step of many small models: ours against one compiled model in a CUDA graph
            (`single`), and against torch.compile over the stacked module in one (`stacked`)
decoder     the same of decoders as people train them today

Every case is one line of JSON with device, commit and date, written when it is measured; what is
there already is not measured again. Errors are rows too. The kinds take turns, so that any part of
the run says something about each. ratio = best of PyTorch / ours: below 1 ours is slower.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.shapes_cases import (
    AttentionCase,
    EnsembleCase,
    attention_cases,
    decoder_cases,
    ensemble_cases,
)
from benchmarks.shapes_timed import clean, one_line, timed_attention, timed_ensemble
from headwise.device import pick_device, provenance

KINDS = ("attention", "decoder", "ensemble")
COUNTS = {"attention": 110, "decoder": 12, "ensemble": 44}
TINY = {"attention": 3, "decoder": 1, "ensemble": 2}
FIRST = {"attention": 4.0, "decoder": 100.0, "ensemble": 70.0}  # seconds of a case, until known
Case = AttentionCase | EnsembleCase


def kind_of(case: Case) -> str:
    return "attention" if isinstance(case, AttentionCase) else case.kind


def all_cases(kinds: list[str], counts: dict[str, int], tiny: bool) -> list[Case]:
    """Cases of the kinds in turn, about as far through each."""
    makers = {
        "attention": attention_cases,
        "decoder": decoder_cases,
        "ensemble": ensemble_cases,
    }
    placed: list[tuple[float, int, Case]] = []
    for order, kind in enumerate(kinds):
        made = list(makers[kind](counts[kind], tiny))
        placed += [((i + 0.5) / len(made), order, case) for i, case in enumerate(made)]
    return [case for _, _, case in sorted(placed, key=lambda found: found[:2])]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of earlier calls; a line that a stopped call left unfinished is not one."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def measured(case: Case, device: torch.device, seconds: float, compiled: bool) -> dict[str, Any]:
    """The row of a case; what ends the case is its error."""
    row: dict[str, Any] = {"name": case.name, "kind": kind_of(case)}
    began = time.perf_counter()
    try:
        if isinstance(case, AttentionCase):
            row |= timed_attention(case, device, seconds)
        else:
            row |= timed_ensemble(case, device, seconds, compiled)
    except Exception as error:
        row["error"] = one_line(error)
    clean()
    return row | {"seconds": round(time.perf_counter() - began, 2)} | provenance(device)


def measure(
    cases: list[Case], path: Path, device: torch.device, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Rows of what is not in the file, each written as it is made, until the time is up."""
    end = time.monotonic() + args.seconds
    known = {row["name"] for row in read_rows(path) if not (args.retry and failed(row))}
    longest = dict(FIRST) if device.type == "cuda" else dict.fromkeys(FIRST, 0.0)
    stretch = 0.02 if args.tiny else 0.2
    for case in cases:
        left = end - time.monotonic()
        if case.name in known or left < longest[kind_of(case)]:
            continue
        row = measured(case, device, stretch, compiled=not args.eager)
        kind = row["kind"]
        if longest[kind] == FIRST[kind]:  # the first one measured replaces the guess
            longest[kind] = 0.0
        longest[kind] = max(longest[kind], 1.2 * row["seconds"])
        path.parent.mkdir(parents=True, exist_ok=True)
        cut = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
        with path.open("a") as file:
            file.write("\n" * cut + json.dumps(row) + "\n")
        yield row
        if device.type == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                raise SystemExit(f"{case.name} left a fault on the card: call again") from error


def failed(row: dict[str, Any]) -> bool:
    """Whether ours has no time, or one of the others none for an error."""
    return "error" in row or row.get("ours_ms") is None or bool(row.get("errors"))


# ---- what the rows say


def line_of(row: dict[str, Any]) -> str:
    """One case in one line."""
    if row.get("ratio") is None:
        return f"   -  {row['name']}: {row.get('error') or row.get('errors')}"
    took = row.get("backend") or row.get("step")
    line = f"{row['ratio']:6.2f}  {row['name']}: {row['ours_ms']:.4g} ms ({took}), "
    line += f"{row['best']} {row['best_ms']:.4g}"
    if row.get("rounded_tflops"):
        line += f"; {row['tflops'] / row['rounded_tflops']:.2f} of the rate at round sizes"
    if row.get("ratio_single"):
        line += f"; {row['ratio_single']:.2f} of one by one"
    return line + (f"; errors {row['errors']}" if row.get("errors") else "")


def errors_of(row: dict[str, Any]) -> float | None:
    """Ours over the best of PyTorch's, the larger of output and gradients."""
    accuracy = row.get("accuracy") or {}
    ours, best = accuracy.get("ours"), accuracy.get(row.get("best") or "")
    if ours is None or best is None or ours == [] or best == []:
        return None
    pairs = zip(ours, best, strict=True) if isinstance(ours, list) else [(ours, best)]
    return max(a / max(b, 1e-12) for a, b in pairs)


def tables(rows: list[dict[str, Any]], worst: int = 10) -> list[str]:
    """Per kind how many cases, the mean ratio, and the worst ones."""
    lines: list[str] = []
    for kind in KINDS:
        its = [row for row in rows if row["kind"] == kind]
        timed = sorted((r for r in its if r.get("ratio") is not None), key=lambda r: r["ratio"])
        if not its:
            continue
        lines += ["", f"{kind}: {len(its)} cases, {len(its) - len(timed)} without a ratio"]
        if timed:
            ratios = [row["ratio"] for row in timed]
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            below = sum(ratio < 1 for ratio in ratios)
            lines[-1] += f"; geometric mean {mean:.2f}, least {ratios[0]:.2f}, {below} below 1"
        lines += [line_of(row) for row in timed[:worst]]
        lines += [line_of(row) for row in its if row.get("ratio") is None]
        shares = [
            (row["tflops"] / row["rounded_tflops"], row["name"])
            for row in timed
            if row.get("rounded_tflops")
        ]
        if shares:
            lines.append("least share of the rate at the nearest round sizes:")
            lines += [f"{share:6.2f}  {name}" for share, name in sorted(shares)[:worst]]
        off = [(errors_of(row) or 0.0, row["name"]) for row in timed]
        lines.append("largest error against the best of PyTorch's own:")
        lines += [f"{error:6.2f}  {name}" for error, name in sorted(off)[::-1][:3]]
    return lines


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Every ratio over our time per call or step, a panel per kind."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in rows)]
    figure, panels = plt.subplots(1, len(kinds), figsize=(4.2 * len(kinds), 3.4), squeeze=False)
    for panel, kind in zip(panels[0], kinds, strict=True):
        groups: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row["kind"] == kind and row.get("ratio") is not None:
                way = row.get("backend") or row.get("step")
                groups.setdefault(str(way), []).append((row["ours_ms"], row["ratio"]))
        for way, points in sorted(groups.items()):
            panel.scatter(*zip(*points, strict=True), s=14, label=way)
        panel.axhline(1.0, color="black", linewidth=0.8)
        panel.set(xscale="log", yscale="log", title=kind, xlabel="ours, ms")
        panel.legend(fontsize=7)
    panels[0][0].set_ylabel("best of PyTorch / ours")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="file of rows, JSON lines")
    parser.add_argument("--seconds", type=float, default=560.0, help="time there is; default 560")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--retry", action="store_true", help="measure again what had errors")
    parser.add_argument("--eager", action="store_true", help="no torch.compile on their side")
    parser.add_argument("--tiny", action="store_true", help="a few small cases")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda; default auto")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    args = parser.parse_args(words)
    device = pick_device(args.device)
    if device.type == "cpu" and not args.tiny and not args.show:
        parser.error("the cases are for a GPU, torch sees none; on a CPU: --tiny")
    cases = all_cases(args.kinds, TINY if args.tiny else COUNTS, args.tiny)
    cases = [case for case in cases if args.only in case.name]
    if not args.show:
        for row in measure(cases, args.out, device, args):
            print(line_of(row), flush=True)
    # A case measured again counts with its last row.
    rows = list({row["name"]: row for row in read_rows(args.out)}.values())
    print("\n".join(tables(rows)))
    left = len({case.name for case in cases} - {row["name"] for row in rows})
    print(f"\n{'complete' if not left else f'{left} cases are left: call again'}")
    if rows:
        try:
            plot(rows, args.out.with_suffix(".png"))
        except ImportError:
            print("no plot: matplotlib is not installed")


if __name__ == "__main__":
    main()
