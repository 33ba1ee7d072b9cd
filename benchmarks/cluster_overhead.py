"""What an engine costs: 200 runs of a second on two workers, and a driver's memory over 10,000.

    python -m benchmarks.cluster_overhead                     both engines, overhead
    python -m benchmarks.cluster_overhead --memory            the driver's memory, on Ray
    python -m benchmarks.cluster_overhead --runs 40 --seconds 0.5

The ideal is that each worker trains all the time. A row says how many seconds its training took on
the core that it had, so their sum over workers times wall time is the share of the ideal, also
where other people use the cores. "first row" is what passes before the first run is done: the
engine's start, PyTorch's import. "ratio to pool" is the wall time of headwise's own pool in the
same call over the engine's. Needs the extra `ray`.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path

from headwise.execute.engine import Engine, Place
from headwise.execute.groups import Options
from headwise.execute.sweep import sweep
from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.store import Store
from headwise.tasks import Farthest
from headwise.training.engine import train
from headwise.training.run import Recipe, Run

WORKERS = 2


def runs_of(count: int, steps: int, batch: int = 64) -> list[Run]:
    """Runs that differ in their seed only."""
    shape = paper_shape(dim=16, depth=1, rank=4, width=1, ffn_dim=64, points=8)
    recipe = Recipe(steps=steps, epoch=min(10, steps), batch=batch, held_out=128, evals=1)
    return [Run(shape, Farthest(16, 8), recipe, seed) for seed in range(count)]


def steps_per_second() -> float:
    """Steps of one model of an ensemble of 16 in a second, on one core."""
    rows = train(runs_of(16, 40), device="cpu", advance=lambda steps: None)
    return 16 * 40 / sum(row["seconds"] for row in rows)


def measure(place: str, runs: list[Run], folder: Path) -> dict[str, float]:
    """Wall time of a sweep, and how much of it the workers trained."""
    store, begun = Store(folder), time.monotonic()
    with Engine(Place(place, devices="")) as engine:
        chosen = engine if engine.place.by_engine else None
        rows = sweep(runs, store, device="cpu", workers=WORKERS, engine=chosen, label=place)
    wall = time.monotonic() - begun
    trained = sum(row["seconds"] for row in rows)
    return {"wall": wall, "trained": trained, "share": trained / (WORKERS * wall)}


def resident() -> float:
    """MiB that this process has in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def driver_memory(count: int, folder: Path) -> list[tuple[int, float]]:
    """The driver's memory as rows come in."""
    runs, found = runs_of(count, 2, batch=2), []
    store, ended = Store(folder), threading.Event()

    def sample() -> None:
        while not ended.wait(2.0):
            done = sum(1 for _ in folder.glob("runs/*/rows.jsonl"))
            found.append((done, resident()))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        with Engine(Place("ray")) as engine:
            engine.make(runs, store, Options("cpu"), label="memory")
    finally:
        ended.set()
        thread.join()
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--runs", type=int, default=200)
    options.add_argument("--seconds", type=float, default=1.0)
    options.add_argument("--memory", action="store_true")
    options.add_argument("--most", type=int, default=10_000)
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.memory:
            found = driver_memory(args.most, Path(folder) / "store")
            step = max(1, len(found) // 12)
            for done, size in found[::step] + found[-1:]:
                print(f"{done:6d} rows  {size:7.1f} MiB")
            return
        steps = max(10, round(args.seconds * steps_per_second() / 10) * 10)
        runs = runs_of(args.runs, steps)
        print(
            f"{args.runs} runs of {steps} steps, about {args.seconds:g} s each, {WORKERS} workers"
        )
        pool = measure("local", runs, Path(folder) / "pool")
        ray = measure("ray", runs, Path(folder) / "ray")
        print("engine   wall s   trained s   share of the ideal   ratio to pool")
        for name, one in (("pool", pool), ("ray", ray)):
            print(
                f"{name:6s} {one['wall']:8.1f} {one['trained']:11.1f} {one['share']:20.3f} "
                f"{pool['wall'] / one['wall']:15.3f}"
            )


if __name__ == "__main__":
    main()
