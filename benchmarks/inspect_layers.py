"""Seconds per layer and peak memory of `headwise inspect` on a checkpoint as large as Llama 3 8B,
random and made on the spot, beside a dense SVD of the d x d form in the same run.

    python -m benchmarks.inspect_layers --layers 3
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from headwise.diagnose.inspection import inspect

D, H, K, R = 4096, 32, 8, 128
CONFIG = {
    "model_type": "llama", "hidden_size": D, "num_attention_heads": H, "num_key_value_heads": K,
    "intermediate_size": 14336, "vocab_size": 128256, "rope_theta": 500000.0,
}  # fmt: skip


def make(folder: Path, layers: int) -> None:
    """A folder with the attention of this many layers in bfloat16, a shard per layer."""
    index = {}
    generator = torch.Generator().manual_seed(1)
    for i in range(layers):
        tensors = {}
        for name, rows in (("q", H * R), ("k", K * R), ("v", K * R), ("o", D)):
            weight = torch.randn(rows, D, generator=generator).mul_(0.02).bfloat16()
            tensors[f"model.layers.{i}.self_attn.{name}_proj.weight"] = weight
        save_file(tensors, folder / f"{i}.safetensors")
        index |= dict.fromkeys(tensors, f"{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds on the clock, and of the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - clock, time.process_time() - processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--no-dense", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, args.layers)
        ticks = [(time.perf_counter(), time.process_time())]

        def tick(*_: int) -> None:
            ticks.append((time.perf_counter(), time.process_time()))

        inspect(
            folder, progress=lambda *_: ticks.append((time.perf_counter(), time.process_time()))
        )
        # The first layer brings the control with it.
        steps = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(ticks[1:])]
        clock, processor = (sorted(column)[len(steps) // 2] for column in zip(*steps, strict=True))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        out = {
            "threads": torch.get_num_threads(),
            "load": round(os.getloadavg()[0], 1),
            "first_layer_s": round(ticks[1][0] - ticks[0][0], 2),
            "layer_s": round(clock, 2),
            "layer_processor_s": round(processor, 2),
            "peak_gib": round(peak, 2),
        }
        if not args.no_dense:
            # One head's query-key form in 64 bits; a layer has 32, and as many value-output forms.
            q, k = torch.randn(2, R, D, dtype=torch.float64)
            clock, processor = timed(lambda: torch.linalg.svdvals(q.T @ k))
            out |= {
                "dense_head_s": round(clock, 2),
                "dense_head_processor_s": round(processor, 2),
                "ratio_of_layers": round(2 * H * processor / out["layer_processor_s"]),
            }
    print(json.dumps(out))


if __name__ == "__main__":
    main()
