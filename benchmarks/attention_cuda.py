"""The two kernels of the attention part in CUDA C++ (kernels/encoder_attention_cuda*.cu) alone on a
GPU, by rank: microseconds per layer, step and model.

    python -m benchmarks.attention_cuda --out encoder_attention_cuda.json

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
from headwise.kernels.encoder import AttentionWeights, End, Gradients

MODELS, TOKENS, WIDTH = 14, 4096, 64
CALLS = 4  # in a graph


def timed(work: Callable[[], None]) -> float:
    """Microseconds per model of one call, by replays of a graph."""
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
        M, T = MODELS, TOKENS
        D, C = WIDTH, columns
        draw = torch.Generator(device).manual_seed(0)

        def drawn(*size: int) -> torch.Tensor:
            return torch.randn(M, *size, device=device, generator=draw)

        self.C, self.splits = C, encoder_attention_cuda.token_splits(M, T, C)
        at_bias, at_out, at_rest = 3 * C * D, 3 * C * D + 3 * C, 4 * C * D + 3 * C
        self.P = at_rest + 2 * D
        self.x, self.dz, u0 = drawn(T, D).half(), drawn(T, D).half(), drawn(T, D)
        row = drawn(self.P) * 0.1
        exact, half = row.view(-1), row.half().view(-1)
        self.weights = AttentionWeights(half, exact[at_bias:], half[at_out:])
        self.end = End(
            bias=exact[at_rest:],
            scale0=exact[at_rest:],
            u0=u0,
            scale=exact[at_rest + 1 :],
            u=torch.empty_like(u0),
            y=torch.empty_like(self.x),
            inv=torch.empty(M, T, device=device),
        )
        partials = encoder_attention_cuda.dx_partials(C)
        sums = torch.empty(self.splits, M, self.P, device=device).view(-1)
        self.gradients = Gradients(
            dx_partials=torch.empty(M, partials, T, D, dtype=torch.float16, device=device),
            weights=AttentionWeights(sums, sums[at_bias:], sums[at_out:]),
            total=torch.zeros(M, device=device),
            token_splits=self.splits,
            row=self.P,
            unscale=1.0,
        )

    def _sizes(self, rank: int) -> encoder_attention_cuda.Layer:
        return encoder_attention_cuda.Layer(
            MODELS, TOKENS, self.C, rank, self.P, scale=rank**-0.5, average=1
        )

    def forward(self, rank: int) -> None:
        encoder_attention_cuda.forward(
            self._sizes(rank), self.x, self.weights, self.end, self.end.inv, 1, first=False
        )

    def backward(self, rank: int, first: bool) -> None:
        encoder_attention_cuda.backward(
            self._sizes(rank), self.x, self.dz, self.weights, self.gradients, first=first
        )


def measure(columns: int, device: torch.device) -> list[dict[str, Any]]:
    layer, rows = Layer(columns, device), []
    for rank in reversed(encoder_attention_cuda.RANKS):
        row = {
            "rank": rank,
            "forward": timed(lambda: layer.forward(rank)),  # noqa: B023
            "backward": timed(lambda: layer.backward(rank, False)),  # noqa: B023
            "backward of a first layer": timed(lambda: layer.backward(rank, True)),  # noqa: B023
            "off": encoder_attention_cuda.trial(rank, device),
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
        raise SystemExit(f"benchmarks.attention_cuda needs {missing}")
    refused = encoder_attention_cuda.refusal(
        WIDTH,
        encoder_attention_cuda.TOKENS,
        TOKENS,
        args.columns,
        encoder_attention_cuda.RANKS[-1],
        torch.float16,
    )
    if refused:
        raise SystemExit(f"benchmarks.attention_cuda: {refused}")
    rows = measure(args.columns, device)
    mean = statistics.mean(row["forward"] + row["backward"] for row in rows)
    print(f"mean of forward and backward over the ranks: {mean:.1f} us per layer, step and model")
    if args.out:
        where = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "commit": commit(),
        }
        found = {**where, "columns": args.columns, "rows": rows}
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
