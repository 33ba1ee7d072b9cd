"""On a GPU: is every backend right, does it run what `explain` says, and what does a training step
cost?

    python -m benchmarks.cuda_check [--out FILE.json]

Attention is compared with float64 on the same inputs (relative error of outputs and gradients); a
fused backend that cannot run raises, since each is asked for by name. Steps are timed with device
events over CUDA-graph replays of 25.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from headwise.device import numerics
from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.model.backends import Call, choose_backend
from headwise.model.dispatch import attend
from headwise.model.reference import mask_of, plain
from headwise.tasks import Farthest
from headwise.training.checkpoint import begin
from headwise.training.ensemble import Ensemble
from headwise.training.run import Recipe, Run

GPU = torch.device("cuda")
SHAPES = (  # batch, heads, KV heads, tokens, rank, value width, causal, window
    (4, 6, 6, 16, 1, 1, False, 0),
    (4, 6, 6, 16, 64, 64, False, 0),
    (2, 6, 2, 100, 40, 24, True, 0),
    (2, 6, 2, 300, 64, 64, True, 0),
    (2, 4, 4, 300, 72, 72, True, 50),
    (2, 3, 3, 200, 37, 11, False, 0),
    (2, 4, 2, 256, 128, 128, True, 0),
    (2, 2, 1, 256, 256, 128, True, 0),
    (1, 2, 2, 512, 448, 448, True, 0),
    (1, 2, 1, 512, 512, 128, True, 0),
    (1, 1, 1, 512, 1792, 1792, True, 100),
)
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 1.2e-2}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b).norm() / b.norm()).item()


def check_attention() -> list[dict[str, Any]]:
    rows = []
    for batch, heads, kv, tokens, rank, width, causal, window in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            g = torch.Generator(GPU).manual_seed(rank)
            sizes = (
                (batch, heads, tokens, rank),
                (batch, kv, tokens, rank),
                (batch, kv, tokens, width),
                (batch, heads, tokens, width),
            )
            q, k, v, grad = (torch.randn(s, generator=g, device=GPU).to(dtype) for s in sizes)
            ours = [t.clone().requires_grad_() for t in (q, k, v)]
            exact = [t.double().requires_grad_() for t in (q, k, v)]
            choice = choose_backend(
                Call("cuda", dtype, batch, heads, kv, tokens, tokens, rank, width, causal, window)
            )
            y = attend(ours[0], ours[1], ours[2], causal=causal, window=window)
            want = plain(
                exact[0],
                exact[1],
                exact[2],
                rank**-0.5,
                mask_of(tokens, tokens, causal, window, GPU),
            )
            got = torch.autograd.grad(y, ours, grad)
            ref = torch.autograd.grad(want, exact, grad.double())
            errors = [relative(y, want), *(relative(a, b) for a, b in zip(got, ref, strict=True))]
            ok = max(errors) <= LIMIT[dtype]
            rows.append(
                {
                    "shape": [batch, heads, kv, tokens, rank, width, causal, window],
                    "dtype": str(dtype),
                    "backend": choice.backend,
                    "errors": errors,
                    "ok": ok,
                }
            )
            print(
                f"{'ok ' if ok else 'BAD'} {choice.backend:9s} {str(dtype)[6:]:8s} "
                f"{rows[-1]['shape']} {max(errors):.1e}",
                flush=True,
            )
    return rows


def time_step(run: Run, models: int) -> dict[str, Any]:
    runs = [Run(run.shape, run.task, run.recipe, seed) for seed in range(models)]
    torch.cuda.reset_peak_memory_stats()
    with numerics(run.recipe.precision, GPU):
        ensemble = Ensemble([begin(r) for r in runs], GPU)
        for block in range(3):
            ensemble.run_block(block)
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        before.record()
        for block in range(4, 8):
            ensemble.run_block(block)
        after.record()
        torch.cuda.synchronize()
    ms = before.elapsed_time(after) / (4 * ensemble.steps * models)
    s = run.shape
    rate = s.flops(run.task.tokens, batch=run.recipe.batch, training=True) / ms / 1e9
    memory = torch.cuda.max_memory_allocated() / 2**30
    what = f"L={s.depth} W={s.average:2d} rank {s.head_dim:2d} M={models}"
    print(f"{what}: {ms:.3f} ms a step and model, {rate:.1f} TFLOP/s, {memory:.1f} GiB", flush=True)
    return {
        "depth": s.depth,
        "width": s.average,
        "rank": s.head_dim,
        "models": models,
        "ms": ms,
        "tflops": rate,
    }


def check_ensemble() -> bool:
    """Five models at once are five models alone, to rounding, after 50 steps."""
    runs = [
        Run(paper_shape(rank=r, ffn_dim=256), Farthest(64, 16), Recipe(steps=100, lr=0.003), s)
        for r in (64, 8)
        for s in range(2)
    ]
    with numerics("fp32", GPU):
        together = Ensemble([begin(r) for r in runs], GPU)
        alone = [Ensemble([begin(r)], GPU) for r in runs]
        for block in range(2):
            for ensemble in (together, *alone):
                ensemble.run_block(block)
        worst = max(
            relative(together.losses[:, i], a.losses[:, 0].double()) for i, a in enumerate(alone)
        )
    print(
        f"{'ok ' if worst < 1e-4 else 'BAD'} ensemble against alone: relative difference of the "
        f"losses {worst:.1e}",
        flush=True,
    )
    return worst < 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out")
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "attention": check_attention(),
        "ensemble": check_ensemble(),
        "steps": [],
    }
    for depth, width, rank, models in (
        (1, 1, 64, 1),
        (1, 1, 64, 6),
        (1, 1, 64, 12),
        (1, 1, 8, 6),
        (1, 1, 1, 6),
        (1, 8, 8, 3),
        (3, 1, 64, 6),
        (3, 1, 8, 6),
    ):
        run = Run(
            paper_shape(depth=depth, width=width, rank=rank),
            Farthest(64, 16),
            Recipe(steps=1000, precision="tf32"),
        )
        result["steps"].append(time_step(run, models))
        if args.out:
            with open(args.out, "w") as f:
                json.dump(result, f, indent=1)


if __name__ == "__main__":
    main()
