"""How fast `headwise plan` is: start-up, candidates per second, memory; and whether its costs are
those of built modules.

    python -m benchmarks.plan_speed

Every figure comes from a process of its own. Against it stands the plain way: `Shape` itself, asked
for every candidate.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time

SPACES = {  # every candidate is counted: the feed-forward is given, and nothing is cut by an aspect
    "heads, widths, depths": {
        "dim": "512..2432:64", "depth": "8..39", "num_heads": "8..24", "head_dim": "32..128:32",
        "num_kv_heads": "divisors", "ffn_dim": "2048,4096", "dim/depth": "1..10000",
    },
    "feed-forwards": {
        "dim": "1024,1536", "depth": "8..39", "num_heads": "8,16", "head_dim": "64,128",
        "num_kv_heads": "2,4,8", "ffn_dim": "64..81920:64",
    },
    "ranks and values, 1 depth": {
        "dim": "2048", "depth": "24", "num_heads": "1..32", "head_dim": "2..256:2",
        "v_head_dim": "1..256:1", "num_kv_heads": "num_heads", "ffn_dim": "4096",
    },
}  # fmt: skip
BUDGETS = ("10M", "350M", "8B", "70B")


def timed(given: dict[str, object]) -> dict[str, float]:
    """One plan in this process: seconds (`cpu`: of a processor), candidates, largest memory."""
    from headwise.planning.plan import plan

    start, cpu = time.perf_counter(), time.process_time()
    found = plan(fields=given, params="340M..350M", kv_bytes_per_token="20KiB..50KiB")
    return {
        "seconds": time.perf_counter() - start,
        "cpu": time.process_time() - cpu,
        "candidates": found.considered,
        "listed": len(found),
        "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def budget(params: str) -> dict[str, float]:
    """The default space of a budget, all of the command."""
    from headwise.planning.plan import plan

    start, cpu = time.perf_counter(), time.process_time()
    found = plan(params=params)
    found.table()
    return {
        "seconds": time.perf_counter() - start,
        "cpu": time.process_time() - cpu,
        "candidates": found.considered,
        "listed": len(found),
        "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def plain(count: int = 3000) -> float:
    """Candidates per second of Shape itself, all costs of each."""
    from headwise.planning.costs import COSTS, At
    from headwise.shape import Shape

    at, start = At(), time.perf_counter()
    for i in range(count):
        shape = Shape(
            dim=1024, depth=8 + i % 32, num_heads=16, head_dim=64, num_kv_heads=4, ffn_dim=64 + i,
            qk_rope_head_dim=64, activation="swiglu", causal=True, vocab_size=32768,
        )  # fmt: skip
        for cost in COSTS.values():
            cost.total(shape, at)
    return count / (time.perf_counter() - start)


def compared(count: int) -> int:
    """Rows of several plans whose parameters and cache equal a module built on the meta device."""
    import torch

    from headwise.model.cache import Cache
    from headwise.model.transformer import build
    from headwise.planning.costs import COSTS
    from headwise.planning.plan import plan

    equal, rng = 0, random.Random(1)
    plans = [
        plan(params="3M", vocab_size=512, context=64),
        plan(params="20M", vocab_size=512, context=64, kv_lora_rank="0,64", tied="true,false"),
        plan(params="5M", vocab_size=512, context=64, windows="16/16/0", activation="gelu,relu2"),
        plan(params="5M", vocab_size=512, context=64, qk_norm="head", v_head_dim="8,32"),
    ]
    for i in range(count):
        found = plans[i % len(plans)]
        row = found.row(rng.randint(1, len(found)))
        with torch.device("meta"):
            model = build(row.shape)
        params = sum(p.numel() for p in model.parameters())
        cache = Cache(row.shape, 1, 64, dtype=torch.bfloat16).bytes
        same = params == row.costs["params"] and cache == row.costs["kv_bytes_at_context"]
        equal += same and all(row.costs[n] == c.of(row.shape, found.at) for n, c in COSTS.items())
    return equal


def in_process(call: str) -> dict[str, float]:
    """The answer of a function of this file in a new process."""
    code = f"import json; from benchmarks.plan_speed import *; print(json.dumps({call}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def start_up(repeats: int = 5) -> dict[str, float]:
    """Seconds of `headwise plan` from the shell: its help, and a small plan."""
    words = {"help": ["--help"], "350M": ["--params", "350M", "--kv-bytes", "48KiB"]}
    found = {}
    for name, more in words.items():
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            command = [sys.executable, "-m", "headwise", "plan", *more]
            subprocess.run(command, capture_output=True, check=True)
            times.append(time.perf_counter() - start)
        found[name] = sorted(times)[repeats // 2]
    return found


def main() -> None:
    """Print every figure."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--modules", type=int, default=500, help="rows compared with modules")
    args = options.parse_args()
    print("start-up, median of 5:", {k: f"{v:.2f} s" for k, v in start_up().items()})
    rate = plain()
    print(f"Shape itself: {rate:,.0f} candidates per second")
    for name, given in SPACES.items():
        one = in_process(f"timed({given!r})")
        speed = one["candidates"] / one["seconds"]
        print(
            f"{name}: {one['candidates']:,} candidates in {one['seconds']:.2f} s (of a processor "
            f"{one['cpu']:.2f}), {speed:,.0f} per second ({speed / rate:,.0f} times), "
            f"{one['mib']:,.0f} MiB, {one['listed']:,} listed"
        )
    for params in BUDGETS:
        one = in_process(f"budget({params!r})")
        print(
            f"--params {params}: {one['candidates']:,} candidates, {one['listed']:,} listed with "
            f"all costs and the front in {one['seconds']:.2f} s (of a processor {one['cpu']:.2f}), "
            f"{one['mib']:,.0f} MiB"
        )
    equal = compared(args.modules)
    print(f"{equal} of {args.modules} sampled rows equal built modules")


if __name__ == "__main__":
    main()
