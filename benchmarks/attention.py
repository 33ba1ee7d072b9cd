"""Attention of every shape against PyTorch's, forward and backward, on one GPU in one run.

    python -m benchmarks.attention --out attention.json        about two minutes on an H200

Four tables. `width`: one inner width of 1792 cut into 14 to 1 heads, and queries wider than values;
B=8, N=2048, causal, bfloat16; ours, the best of PyTorch's backends at the same shape, and both
against the best at 14 x 128. `grid`: 60 shapes, ours against what `scaled_dot_product_attention`
chooses by itself, called from Python, with that function against itself to show how far such times
scatter, and in a CUDA graph. `exact` and `memory`: errors against float64 beside PyTorch's own, and
the peak at 32,768 tokens against operands, output and their gradients.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from headwise import attend
from headwise.device import commit
from headwise.model.backends import Call, choose_backend
from headwise.model.reference import mask_of, plain

WIDTHS = (
    (14, 128, 128),
    (7, 256, 256),
    (4, 448, 448),
    (2, 896, 896),
    (1, 1792, 1792),
    (14, 256, 128),
    (14, 512, 128),
)
KINDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def operands(
    batch: int, heads: int, kv: int, tokens: int, rank: int, width: int, dtype: torch.dtype
) -> list[Tensor]:
    """q, k and v from one seed."""
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = ((heads, rank), (kv, rank), (kv, width))
    return [
        torch.randn(batch, h, tokens, r, generator=generator, device="cuda")
        .to(dtype)
        .requires_grad_()
        for h, r in sizes
    ]


def milliseconds(f: Attend, given: list[Tensor], seconds: float = 0.25) -> float:
    """Of one forward and backward pass, called from Python: the median of several stretches."""
    return taking_turns([called(f, given)], seconds)[0]


def called(f: Attend, given: list[Tensor]) -> Callable[[], object]:
    """One forward and backward pass, called from Python."""
    grad = torch.randn_like(f(*given))
    return lambda: torch.autograd.grad(f(*given), given, grad)


def captured(f: Attend, given: list[Tensor], times: int) -> Callable[[], object]:
    """So many forward and backward passes in a CUDA graph."""
    step = called(f, given)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            step()

    def replay() -> object:
        graph.replay()
        return step  # which owns the gradient that the graph reads

    return replay


def taking_turns(fs: list[Callable[[], object]], seconds: float, rounds: int = 9) -> list[float]:
    """Milliseconds of each, the median of stretches made in turn, so that what the machine does
    meanwhile falls on all alike."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def stretch(f: Callable[[], object], times: int) -> float:
        torch.cuda.synchronize()
        start.record()
        for _ in range(times):
            f()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) / times

    for f in fs:
        stretch(f, 3)
    counts = [max(2, min(200, round(seconds / rounds * 1000 / stretch(f, 3)))) for f in fs]
    times: list[list[float]] = [[] for _ in fs]
    for turn in range(rounds):
        for i in range(len(fs)):
            j = (i + turn) % len(fs)
            times[j].append(stretch(fs[j], counts[j]))
    return [sorted(column)[rounds // 2] for column in times]


def stock(kind: SDPBackend | None, causal: bool, grouped: bool) -> Attend:
    """PyTorch's attention by one backend, or by its own choice."""

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if kind is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
        with sdpa_kernel(kind):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    return f


def tried(f: Attend, given: list[Tensor]) -> float | None:
    """Its time, None where it refuses or runs out of memory."""
    try:
        return milliseconds(f, given)
    except (RuntimeError, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        return None


def name_of(given: list[Tensor], causal: bool, graphed: bool = False) -> str:
    """The backend that ours takes."""
    q, k, v = given
    sizes = q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3]
    call = Call("cuda", q.dtype, *sizes, causal, graphed=graphed)
    return choose_backend(call).backend


def width_rows() -> list[dict[str, Any]]:
    """The inner width 1792, cut every way."""
    out: list[dict[str, Any]] = []
    for heads, rank, width in WIDTHS:
        given = operands(8, heads, heads, 2048, rank, width, torch.bfloat16)
        times = {
            name: tried(stock(kind, True, False), given)
            for name, kind in KINDS.items()
            if name != "math" or rank > 1000
        }
        best = min((t, name) for name, t in times.items() if t is not None)
        ours = milliseconds(lambda q, k, v: attend(q, k, v, causal=True), given)
        work = 3.5 * 2 * 8 * heads * 2048**2 * (rank + width) / 2
        out.append(
            {
                "heads": heads,
                "rank": rank,
                "width": width,
                "ours_ms": ours,
                "backend": name_of(given, True),
                "stock_ms": best[0],
                "stock": best[1],
                "ratio": best[0] / ours,
                "tflops": work / ours / 1e9,
            }
        )
        out[-1]["against_14x128"] = ours / out[0]["stock_ms"]
        print(json.dumps(out[-1]), flush=True)
    return out


def grid_rows() -> list[dict[str, Any]]:
    """60 shapes against PyTorch's own choice."""
    out: list[dict[str, Any]] = []
    kinds = ((torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, True))
    shapes = (
        (16, 16, 64, 64),
        (8, 2, 128, 128),
        (4, 4, 256, 256),
        (4, 4, 320, 320),
        (2, 1, 512, 512),
        (8, 8, 512, 128),
        (1, 1, 1024, 1024),
    )
    places = [
        *itertools.product(kinds, shapes, ((8, 512), (2, 2048))),
        *itertools.product(kinds[:2], shapes[:6:2] + shapes[5:], ((4, 64), (1, 8192))),
    ]
    for (dtype, causal), (heads, kv, rank, width), (batch, tokens) in places[:60]:
        given = operands(batch, heads, kv, tokens, rank, width, dtype)
        grouped = heads != kv
        fs = [
            called(lambda q, k, v, causal=causal: attend(q, k, v, causal=causal), given),
            called(stock(None, causal, grouped), given),
            called(stock(None, causal, grouped), given),
        ]
        ours, theirs, same = taking_turns(fs, 0.1)
        times = max(1, min(20, round(1 / theirs)))
        gs = [
            captured(
                lambda q, k, v, causal=causal: attend(q, k, v, causal=causal, graphed=True),
                given,
                times,
            ),
            captured(stock(None, causal, grouped), given, times),
        ]
        ours_graph, theirs_graph = (ms / times for ms in taking_turns(gs, 0.05))
        out.append(
            {
                "dtype": str(dtype).removeprefix("torch."),
                "causal": causal,
                "heads": heads,
                "kv": kv,
                "rank": rank,
                "width": width,
                "batch": batch,
                "tokens": tokens,
                "backend": name_of(given, causal),
                "ours_ms": ours,
                "stock_ms": theirs,
                "ratio": theirs / ours,
                "same_ratio": same / theirs,
                "graph_backend": name_of(given, causal, True),
                "ours_graph_ms": ours_graph,
                "stock_graph_ms": theirs_graph,
                "graph_ratio": theirs_graph / ours_graph,
            }
        )
        print(json.dumps(out[-1]), flush=True)
    return out


def error_rows() -> list[dict[str, Any]]:
    """Relative errors of output and gradients against float64, ours and PyTorch's memory-efficient
    kernel."""
    out: list[dict[str, Any]] = []
    for heads, rank, width in WIDTHS[2:]:
        given = operands(1, heads, heads, 1024, rank, width, torch.bfloat16)
        exact = [t.detach().double().requires_grad_() for t in given]
        truth = plain(*exact, rank**-0.5, mask_of(1024, 1024, True, 0, "cuda"))  # type: ignore[arg-type]
        grad = torch.randn_like(truth).bfloat16()
        wanted = (truth, *torch.autograd.grad(truth, exact, grad.double()))
        row: dict[str, Any] = {"heads": heads, "rank": rank, "width": width}
        for name, f in (
            ("ours", lambda q, k, v: attend(q, k, v, causal=True)),
            ("stock", stock(KINDS["efficient"], True, False)),
        ):
            o = f(*given)
            got = (o, *torch.autograd.grad(o, given, grad))
            row[name] = [
                ((a.double() - b).norm() / b.norm()).item()
                for a, b in zip(got, wanted, strict=True)
            ]
        row["ratio"] = max(a / b for a, b in zip(row["ours"], row["stock"], strict=True))
        out.append(row)
        print(json.dumps(row), flush=True)
    return out


def memory_rows() -> list[dict[str, Any]]:
    """Peak memory of both passes at 32,768 tokens against q, k, v, o and their gradients."""
    out: list[dict[str, Any]] = []
    for heads, rank in ((1, 1792), (4, 448)):
        given = operands(1, heads, heads, 32_768, rank, rank, torch.bfloat16)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() - sum(t.nbytes for t in given)
        o = attend(*given, causal=True)  # type: ignore[misc]
        torch.autograd.grad(o, given, torch.ones_like(o))
        peak, whole = torch.cuda.max_memory_allocated() - before, 8 * o.nbytes
        out.append(
            {
                "heads": heads,
                "rank": rank,
                "peak_bytes": peak,
                "operands_bytes": whole,
                "ratio": peak / whole,
            }
        )
        print(json.dumps(out[-1]), flush=True)
    return out


def main() -> None:
    """Every table, written as it goes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="where the tables go, as JSON")
    makers = {"width": width_rows, "exact": error_rows, "memory": memory_rows, "grid": grid_rows}
    parser.add_argument(
        "--tables", nargs="+", choices=makers, default=list(makers), help="default all"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.attention needs a GPU, torch sees none")
    tables: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit(),
    }
    for name in args.tables:
        tables[name] = makers[name]()
        args.out.write_text(json.dumps(tables, indent=1))


if __name__ == "__main__":
    main()
