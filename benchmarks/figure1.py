"""Figure 1 of the rank paper on one GPU: what a training step costs the stock way, done
competently, and with headwise.

    python -m benchmarks.figure1 --out figure1.json

All nine (layers, budget) panels at ranks 64, 8 and 1, in one run on one card:

stock      the module loop of the published code, eager float32, one model (stock.py)
competent  one wide projection, torch.compile, one CUDA graph, one model, in fp16 or bf16: the best
           of SDPA, the formula and our own kernels (competent.py)
headwise   as `headwise run fig1 --preset paper` trains: an ensemble, data made on the card

Milliseconds per step and model. The hours of the whole figure (63 points, 5 seeds, 100,000 steps)
come from ensembles of a panel's 35 models, all seven ranks together, for headwise, and from the
mean of the three ranks for the others. What is in the file already is not measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.competent import ATTENTION, competent_step
from benchmarks.stock import StockEncoder
from headwise.device import commit, numerics
from headwise.experiments.rank_paper.fig1 import PRESETS, budget, runs
from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.tasks import Farthest
from headwise.training.checkpoint import begin
from headwise.training.ensemble import Ensemble, most_models
from headwise.training.fused_encoder import FusedEncoder

GPU = torch.device("cuda")
DEPTHS, WIDTHS, RANKS = (1, 3, 5), (1, 8, 64), (64, 8, 1)
SEEDS = 5
MODELS = {1: 35, 8: 21, 64: 14}  # in an ensemble of one rank, by width; more are no faster
PAPER = dataclasses.replace(PRESETS["paper"], protocols=("stream",))
FIGURE_STEPS = SEEDS * 100_000  # of one point


def events(work: Callable[[], Any], repeats: int) -> float:
    """Milliseconds for one call, the median of three groups of calls."""
    times = []
    for _ in range(3):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        for _ in range(repeats):
            work()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after) / repeats)
    return statistics.median(times)


def repeats_of(work: Callable[[], Any], milliseconds: float = 60.0) -> int:
    work()
    return max(1, min(50, round(milliseconds / events(work, 1))))


def matmul_rate(dtype: torch.dtype, tf32: bool) -> float:
    """The card's own rate, TFLOP/s, on a large product of random numbers."""
    a, b = (torch.randn(8192, 8192, device=GPU, dtype=dtype) for _ in range(2))
    torch.backends.cuda.matmul.allow_tf32 = tf32
    rate = 2 * 8192**3 / events(lambda: a @ b, 5) / 1e9
    torch.backends.cuda.matmul.allow_tf32 = False
    return rate


def data(batch: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    return Farthest(64, 16).sample(torch.Generator(GPU).manual_seed(0), batch)


def time_stock(depth: int, width: int, rank: int) -> float:
    model = StockEncoder(paper_shape(depth=depth, width=width, rank=rank)).to(GPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator(GPU).manual_seed(0)

    def step() -> None:
        x, target = Farthest(64, 16).sample(generator, 256)
        optimizer.zero_grad()
        (model(x) - target).square().sum(-1).mean().backward()
        optimizer.step()

    step()
    return events(step, repeats_of(step))


def time_competent(depth: int, width: int, rank: int) -> dict[str, Any]:
    """The best of every attention in fp16, and of that one in bf16; what failed is said."""
    if depth == DEPTHS[0]:
        torch.compiler.reset()  # a compilation a size, shared by the depths
    x, target = data()
    shape = paper_shape(depth=depth, width=width, rank=rank)
    ways: dict[str, float] = {}
    failed: dict[str, str] = {}

    def measure_way(attention: str, precision: str) -> None:
        try:
            step = competent_step(shape, x, target, attention, precision)
            ways[f"{attention} {precision}"] = events(step, repeats_of(step))
        except Exception as error:
            failed[f"{attention} {precision}"] = f"{type(error).__name__}: {error}"[:300]
        clean()

    with numerics("tf32", GPU):
        for attention in ATTENTION:
            measure_way(attention, "fp16")
        if ways:
            measure_way(min(ways, key=lambda name: ways[name]).split()[0], "bf16")
    if not ways:
        raise RuntimeError(f"no way of training one model runs: {failed}")
    best = min(ways, key=lambda name: ways[name])
    return {"ms": ways[best], "way": best, "ways": ways, "failed": failed}


def time_ours(depth: int, width: int, ranks: tuple[int, ...], seeds: int) -> dict[str, Any]:
    """An ensemble of the figure's runs, no larger than `train` would make it; whole blocks of steps
    with their data."""
    chosen = runs(
        dataclasses.replace(PAPER, depths=(depth,), widths=(width,), ranks=ranks, seeds=seeds)
    )
    assert not FusedEncoder.refusal(chosen[0], GPU)
    chosen = sorted(chosen, key=lambda run: run.shape.num_heads)[: most_models(chosen[0], GPU)]
    torch.cuda.reset_peak_memory_stats()
    with numerics(PAPER.precision, GPU):
        ensemble, blocks = Ensemble([begin(run) for run in chosen], GPU), iter(range(1000))
        for _ in range(2):  # the first makes the graph, while the card idles
            ensemble.run_block(next(blocks))
        torch.cuda.synchronize()
        ms = events(lambda: ensemble.run_block(next(blocks)), 2) / (ensemble.steps * len(chosen))
    return {"ms": ms, "models": len(chosen), "gib": torch.cuda.max_memory_allocated() / 2**30}


def clean() -> None:
    gc.collect()
    torch.cuda.empty_cache()


class Results:
    """Measurements by key, in a file that is written after each."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.values: dict[str, Any] = json.loads(path.read_text()) if path and path.exists() else {}

    def add(self, key: str, measure: Callable[..., Any], *args: Any) -> None:
        if key not in self.values:
            self.values[key] = measure(*args)
            clean()
            print(f"{key}: {self.values[key]}", flush=True)
            if self.path:
                self.path.write_text(json.dumps(self.values, indent=1) + "\n")


def measure(results: Results, ways: list[str], widths: tuple[int, ...]) -> None:
    v = results.values
    v["device"], v["torch"], v["commit"] = torch.cuda.get_device_name(), torch.__version__, commit()
    results.add("fp16 matmul TFLOP/s", matmul_rate, torch.float16, False)
    results.add("tf32 matmul TFLOP/s", matmul_rate, torch.float32, True)
    if "headwise" in ways:
        panels = [(depth, width) for width in widths for depth in DEPTHS]
        for depth, width in panels:
            results.add(
                f"headwise {depth} {width} all", time_ours, depth, width, PAPER.ranks, SEEDS
            )
        for depth, width in panels:
            for rank in RANKS:
                results.add(
                    f"headwise {depth} {width} {rank}",
                    time_ours,
                    depth,
                    width,
                    (rank,),
                    MODELS[width],
                )
        for models in (1, 2, 4, 8, 16, 35) if 1 in widths else ():
            results.add(f"models 1 1 64 {models}", time_ours, 1, 1, (64,), models)
    for way, timer in (("stock", time_stock), ("competent", time_competent)):
        for width in widths if way in ways else ():
            for rank in RANKS:
                for depth in DEPTHS:
                    results.add(f"{way} {depth} {width} {rank}", timer, depth, width, rank)


def ms_of(value: Any) -> float | None:
    """Milliseconds of a measurement: a number, or with more about it."""
    return value["ms"] if isinstance(value, dict) else value


def table(values: dict[str, Any]) -> list[str]:
    """The measurements as lines of Markdown."""
    peak = values["fp16 matmul TFLOP/s"]
    lines = [
        (
            f"{values['device']}, torch {values['torch']}; large products: fp16 {peak:.0f}, TF32 "
            f"{values['tf32 matmul TFLOP/s']:.0f} TFLOP/s."
        ),
        "",
        (
            "| layers | budget | rank | stock, ms | competent, ms | headwise, ms | stock / ours | "
            "competent / ours | TFLOP/s | share of fp16 |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    hours = dict.fromkeys(("stock", "competent", "headwise"), 0.0)
    complete = set(hours)
    for depth in DEPTHS:
        for width in WIDTHS:
            for rank in RANKS:
                row = {way: ms_of(values.get(f"{way} {depth} {width} {rank}")) for way in hours}
                ours = row["headwise"]
                rate = (
                    paper_shape(depth=depth, width=width, rank=rank).flops(
                        16, batch=256, training=True
                    )
                    / ours
                    / 1e9
                    if ours
                    else None
                )
                for way in ("stock", "competent"):
                    if row[way] is None:
                        complete.discard(way)
                    else:
                        hours[way] += (row[way] or 0.0) / len(RANKS) * 7 * FIGURE_STEPS / 3.6e6
                both = row["stock"], row["competent"]
                ratios = [f"{ms / ours:.0f}" if ours and ms else "" for ms in both]
                cells = [
                    f"{row[way]:.3g}" if row[way] else "" for way in ("stock", "competent")
                ] + [f"{ours:.4f}" if ours else ""]
                share = [f"{rate:.0f}", f"{rate / peak:.0%}"] if rate else ["", ""]
                lines.append(
                    "| "
                    + " | ".join(
                        [str(depth), budget(width, 64), str(rank), *cells, *ratios, *share]
                    )
                    + " |"
                )
            panel = values.get(f"headwise {depth} {width} all")
            if panel:
                hours["headwise"] += panel["ms"] * 7 * FIGURE_STEPS / 3.6e6
            else:
                complete.discard("headwise")
    totals = ", ".join(f"{way} {hours[way]:.4g}" for way in hours if way in complete)
    lines += ["", f"Hours for the whole figure, 315 models of 100,000 steps: {totals}"]
    most = max(
        (v["gib"] for v in values.values() if isinstance(v, dict) and "gib" in v), default=0.0
    )
    grown = [(v["models"], v["ms"]) for k, v in values.items() if k.startswith("models ")]
    lines += [
        f"Most memory of any ensemble: {most:.1f} GiB",
        "ms a step and model by models in the ensemble, one layer, d^2, rank 64: ",
    ]
    lines[-1] += ", ".join(f"{n}: {ms:.4f}" for n, ms in grown)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON file that collects the measurements")
    parser.add_argument(
        "--ways",
        default="headwise,stock,competent",
        help="which to measure; default headwise,stock,competent",
    )
    parser.add_argument(
        "--widths",
        default="64,8,1",
        help="which budgets, in this order: 64 is d^3, 8 d^2.5, 1 d^2; default all",
    )
    args = parser.parse_args()
    names = args.widths.split(",")
    if not set(names) <= set(map(str, WIDTHS)):
        parser.error(f"--widths must be among {', '.join(map(str, WIDTHS))}, got {args.widths}")
    results = Results(args.out)
    if not torch.cuda.is_available():
        if not results.values:
            raise SystemExit("benchmarks.figure1 needs a GPU, or --out with what one measured")
    else:
        if args.out is None:
            print(
                subprocess.run(
                    ["nvidia-smi", "-L"], capture_output=True, text=True, check=False
                ).stdout.strip()
            )
        measure(results, args.ways.split(","), tuple(map(int, names)))
    print("\n".join(table(results.values)))


if __name__ == "__main__":
    main()
