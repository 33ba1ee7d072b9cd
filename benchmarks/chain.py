"""The two kernels of the attention part in CUDA C++ (kernels/encoder_attention_cuda.cu) alone on a
GPU, by rank: microseconds a layer, step and model.

    python -m benchmarks.chain --out encoder_attention_cuda.json

Sequences of 16 tokens, width 64, batch 256, heads x rank = 4,096 (the d^3 panels of figure 1)
unless --columns says otherwise, 14 models, in a CUDA graph: forward, backward, backward of a first
layer, whose input has no gradient; and the relative error against float64 of the small layer that
the kernels are tried on before they are used.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.figure1 import events
from headwise.device import commit
from headwise.kernels import encoder_attention_cuda, nvrtc

MODELS, TOKENS, WIDTH, CALLS = 14, 4096, 64, 4


def timed(work: Callable[[], None]) -> float:
    """Microseconds a model for one call, by replays of a graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            work()
    for _ in range(20):  # the card may have been idle while a kernel was compiled
        graph.replay()
    return events(graph.replay, 2) * 1000 / (CALLS * MODELS)


class Layer:
    """Random weights, tokens and buffers of one layer, whatever its rank."""

    def __init__(self, columns: int, device: torch.device) -> None:
        M, T, D, C = MODELS, TOKENS, WIDTH, columns
        draw = torch.Generator(device).manual_seed(0)

        def drawn(*size: int) -> torch.Tensor:
            return torch.randn(M, *size, device=device, generator=draw)

        self.C, self.shares = C, encoder_attention_cuda.shares(M, T, C)
        self.biases, self.out, self.rest = 3 * C * D, 3 * C * D + 3 * C, 4 * C * D + 3 * C
        self.P = self.rest + 2 * D
        self.row = drawn(self.P) * 0.1
        self.half = self.row.half()
        self.x, self.dz, self.u0 = drawn(T, D).half(), drawn(T, D).half(), drawn(T, D)
        self.u, self.y, self.inv = (
            torch.empty_like(self.u0),
            torch.empty_like(self.x),
            torch.empty(M, T, device=device),
        )
        self.parts = torch.empty(
            M, encoder_attention_cuda.blocks(C), T, D, dtype=torch.float16, device=device
        )
        self.sums, self.total = (
            torch.empty(self.shares, M, self.P, device=device),
            torch.zeros(M, device=device),
        )

    def forward(self, rank: int) -> None:
        f, h = self.row.view(-1), self.half.view(-1)
        encoder_attention_cuda.forward(
            rank,
            MODELS,
            TOKENS,
            self.x,
            h,
            f[self.biases :],
            h[self.out :],
            f[self.rest :],
            f[self.rest :],
            self.u0,
            f[self.rest + 1 :],
            self.u,
            self.y,
            self.inv,
            TOKENS,
            self.C,
            self.P,
            1.0,
            rank**-0.5,
            1,
            False,
            self.inv,
            1,
        )

    def backward(self, rank: int, first: bool) -> None:
        f, h, s = self.row.view(-1), self.half.view(-1), self.sums.view(-1)
        encoder_attention_cuda.backward(
            rank,
            MODELS,
            self.C,
            self.shares,
            self.x,
            self.dz,
            h,
            f[self.biases :],
            h[self.out :],
            self.parts,
            s,
            s[self.biases :],
            s[self.out :],
            self.total,
            TOKENS,
            self.C,
            self.P,
            1.0,
            rank**-0.5,
            1.0,
            first,
            MODELS,
            self.shares,
            self.P,
        )


def measure(columns: int, device: torch.device) -> list[dict[str, Any]]:
    layer, rows = Layer(columns, device), []
    for rank in reversed(encoder_attention_cuda.RANKS):
        row = {
            "rank": rank,
            "forward": timed(lambda: layer.forward(rank)),  # noqa: B023
            "backward": timed(lambda: layer.backward(rank, False)),  # noqa: B023
            "backward of a first layer": timed(lambda: layer.backward(rank, True)),  # noqa: B023
            "off": encoder_attention_cuda._trial(rank, device),
        }
        rows.append(row)
        print(", ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--columns", type=int, default=4096, help="heads x rank; default 4096")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    missing = nvrtc.missing(device)
    if missing:
        raise SystemExit(f"benchmarks.chain needs {missing}")
    refused = encoder_attention_cuda.refusal(
        WIDTH,
        encoder_attention_cuda.TOKENS,
        TOKENS,
        args.columns,
        encoder_attention_cuda.RANKS[-1],
        torch.float16,
    )
    if refused:
        raise SystemExit(f"benchmarks.chain: {refused}")
    rows = measure(args.columns, device)
    mean = statistics.mean(row["forward"] + row["backward"] for row in rows)
    print(f"mean of forward and backward over the ranks: {mean:.1f} us a layer, step and model")
    if args.out:
        where = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "commit": commit(),
        }
        told = {**where, "columns": args.columns, "rows": rows}
        args.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
