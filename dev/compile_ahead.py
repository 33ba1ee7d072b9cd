"""Compile the Triton kernels for cards that are not here, and check that they fit them.

    python dev/compile_ahead.py                          every case on every card, some minutes
    python dev/compile_ahead.py --cards 80 --only wide   cases of that name on one of them
    python dev/compile_ahead.py --few                    every family on some card, as the tests do

Each case is a call of the project's own launching code on tensors without memory (meta). What it
would launch is compiled for the card instead, by Triton with a driver that only names the card. So
block sizes, warps and loads in flight are what a user of the card gets. A kernel fits when its
shared memory is within the card's limit per block. Machine code is kept as Triton keeps it; an
environment with TRITON_INTERPRET compiles nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

CARDS = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
META = torch.device("meta")
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


class NamedCard:
    """Triton's driver, as far as compiling asks for it: which card it is for."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # compiled kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compiled_for(capability: int, rows: list[dict[str, Any]], case: str) -> Iterator[None]:
    """Launches compile their kernel for this card, note it in `rows`, and do nothing else."""
    run = JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if warmup:  # asked what it would take
            return run(self, *args, grid=grid, warmup=True, **kwargs)
        began = time.perf_counter()
        made = run(self, *args, grid=grid, warmup=True, **kwargs)
        row = {"card": capability, "case": case, "kernel": self.__name__}
        row |= {"shared": made.metadata.shared, "warps": made.metadata.num_warps}
        row |= {"stages": kwargs.get("STAGES", made.metadata.num_stages)}
        row |= {name: kwargs[name] for name in ("BT", "BC", "BF", "BQ") if name in kwargs}
        row |= {"fits": made.metadata.shared <= CARDS[capability]}
        row |= {"seconds": round(time.perf_counter() - began, 2)}
        rows.append(row)
        return None

    JITFunction.run = compiled  # type: ignore[method-assign]
    driver.set_active(NamedCard(capability))
    try:
        yield
    finally:
        JITFunction.run = run  # type: ignore[method-assign]


# ---- the cases


def wide(
    heads: tuple[int, int], tokens: int, widths: tuple[int, int], dtype: torch.dtype,
    causal: bool = True, window: int = 0,
) -> Callable[[], None]:  # fmt: skip
    """Attention of large rank, both ways; heads and KV heads."""

    def call() -> None:
        from headwise.kernels import attention_wide_triton
        from headwise.kernels.attention_wide_span import Span, padded

        (H, KV), (R, V) = heads, widths
        q, k, v, o, g = (
            torch.empty(2, h, tokens, w, dtype=dtype, device=META)
            for h, w in ((H, R), (KV, R), (KV, V), (H, V), (H, V))
        )
        span = Span.of(q, k, causal, window)
        lse = torch.empty(2, H, tokens, device=META)
        for p in (q.new_empty(2, H, padded(tokens), padded(tokens)), None):
            attention_wide_triton.forward(q, k, v, o, lse, p, 0.1, span, 1 << 30)
            attention_wide_triton.backward(g, q, k, v, o, lse, p, 0.1, span, 1 << 30)

    return call


def short(
    tokens: int, heads: int, rank: int, dtype: torch.dtype, causal: bool = False,
    together: bool = False,
    backward: bool = True,
) -> Callable[[], None]:  # fmt: skip
    """Attention over short sequences, both ways."""

    def call() -> None:
        from headwise.kernels import attention_short_triton

        ts = [torch.empty(32, tokens, heads * rank, dtype=dtype, device=META) for _ in range(7)]
        options = heads, rank, 0.3, "tf32x3" if dtype == FP32 else "tf32", causal, together
        attention_short_triton.forward(*ts[:4], *options)
        if backward:
            attention_short_triton.backward(*ts, *options)

    return call


def rows_of(shape: Any, models: int, precision: str) -> Any:
    from headwise.model.transformer import build
    from headwise.training.flat import OPERANDS, FlatRows, Layout, head_groups

    with META:
        layout = Layout.of(build(shape, models=models).named_parameters())
        weights = torch.empty(models, layout.length)
    half = weights if OPERANDS[precision] == FP32 else weights.to(OPERANDS[precision])
    return FlatRows(head_groups([shape] * models), layout, weights, half, precision)


def encoder(precision: str, tokens: int = 16, batch: int = 256, **sizes: int) -> Callable[[], None]:
    """A fused step of post-norm encoders."""

    def call() -> None:
        from headwise.experiments.rank_paper.shapes import paper_shape
        from headwise.training.fused_encoder import FusedEncoder

        shape = paper_shape(**{"depth": 2, **sizes})  # type: ignore[arg-type]
        step = FusedEncoder(rows_of(shape, 2, precision), batch, tokens)
        x = torch.empty(2, batch, tokens, shape.dim, device=META)
        with META:
            step.gradient(step.groups[0], x, x, torch.empty(2), torch.ones(2))

    return call


def decoder(precision: str, tokens: int = 64, batch: int = 8, **sizes: Any) -> Callable[[], None]:
    """The fused blocks of pre-norm models."""

    def call() -> None:
        from headwise.shape import Shape
        from headwise.training.decoder_blocks import TritonBlocks

        given = {"depth": 2, "num_heads": 4, "norm": "layer", "norm_at": "pre", "causal": True}
        biased = {"qkv_bias": True, "out_bias": True, "ffn_bias": True, "activation": "gelu"}
        shape = Shape(**{**given, **biased, **sizes})
        with META:
            blocks = TritonBlocks(rows_of(shape, 2, precision), batch, tokens, 1.0)
            x = torch.empty(2, batch * tokens, shape.dim)
            blocks.forward(x)
            blocks.backward(x)

    return call


def around(dim: int, inputs: int) -> Callable[[], None]:
    """What is before and after the blocks: reading in, layer norms, the read-out."""

    def call() -> None:
        from headwise.kernels import embed_readout as er

        with META:

            def made(*sizes: int) -> Tensor:
                return torch.empty(2, *sizes, requires_grad=True)

            gain, shift = made(dim), made(dim)
            x = er.enter(torch.empty(2, 8, 40, inputs), made(dim, inputs), made(dim), made(40, dim))
            x = er.layer_norm(x, gain, shift)
            er.leave(x, gain, shift, made(1, dim), made(1)).sum().backward()

    return call


def adamw() -> None:
    from headwise.kernels import adamw_triton

    w, mean, square, grad = (torch.empty(5000, device=META) for _ in range(4))
    adamw_triton.adamw(
        w, mean, square, grad, torch.empty(1, device=META), 0.1, 0.9, 0.99, 1e-8, 0.0, 3
    )


def feed_weights() -> None:
    """One kernel of the fused encoder that takes more than 99 KiB as it was chosen."""
    from headwise.experiments.rank_paper.shapes import paper_shape
    from headwise.training.fused_encoder import FusedEncoder, Layer

    step = FusedEncoder(rows_of(paper_shape(dim=128, depth=1), 2, "fp32"), 64, 16)
    step.mlp._feed_weights(Layer(0, step.groups[0]), step.mlp.dz16[0])  # type: ignore[union-attr]


def scores() -> None:
    """The first product of attention of large rank."""
    from headwise.kernels.attention_wide_launch import launch_scores
    from headwise.kernels.attention_wide_span import Span

    q, k = (torch.empty(2, 3, 200, 320, dtype=FP16, device=META) for _ in range(2))
    launch_scores(q, k, torch.empty(2, 3, 256, 256, device=META), Span.of(q, k, True, 0))


def norm() -> None:
    """A layer norm."""
    from headwise.kernels import embed_readout

    with META:
        embed_readout.layer_norm(torch.empty(2, 5, 40, 48), torch.empty(2, 48), torch.empty(2, 48))


CASES: dict[str, Callable[[], None]] = {
    "wide 448 bf16": wide((4, 4), 600, (448, 448), BF16),
    "wide 320/512 grouped window fp16": wide((6, 2), 700, (320, 512), FP16, window=100),
    "wide 600 ragged": wide((3, 3), 300, (600, 600), BF16),
    "wide 384 fp32": wide((4, 4), 500, (384, 384), FP32, causal=False),
    "lanes 1": short(16, 100, 1, FP16),
    "lanes 2 fp32": short(13, 70, 2, FP32),
    "packs 8": short(16, 24, 8, FP16, together=True),
    "packs 4 fp32": short(11, 24, 4, FP32),
    "packs 32": short(8, 6, 32, BF16, together=True),
    "tiles 64": short(64, 4, 64, BF16),
    "tiles 128 x 64 fp32": short(128, 4, 64, FP32),
    "tiles 256 x 16 fp32": short(256, 4, 16, FP32),
    "tiles 200 x 64 fp16": short(200, 4, 64, FP16),
    "tiles 16 fp32": short(50, 12, 16, FP32),
    "stairs 64": short(128, 4, 64, FP16, causal=True),
    "stairs 64 fp32": short(128, 4, 64, FP32, causal=True),
    "stairs 8": short(40, 8, 8, FP16, causal=True),
    **{
        f"encoder {dim} rank {rank} {precision}": encoder(precision, dim=dim, rank=rank)
        for precision in ("fp16", "tf32", "fp32")
        for dim, rank in ((64, 64), (64, 32), (64, 8), (128, 64), (128, 16), (32, 16), (16, 4))
    },
    **{
        f"decoder {dim} {precision}": decoder(precision, dim=dim)
        for precision in ("fp16", "fp32")
        for dim in (48, 64, 128)
    },
    "around 48": around(48, 11),
    "around 128": around(128, 64),
    "adamw": adamw,
    "feed weights 128 fp32": feed_weights,
    "scores 320 fp16": scores,
    "lanes 1, 3 tokens": short(3, 100, 1, FP16, backward=False),
    "stairs 8, 33 tokens": short(33, 8, 8, FP16, causal=True, backward=False),
    "norm 48": norm,
}
# A few that are quick to compile, every family and every card: for the tests
FEW = {
    "feed weights 128 fp32": (89, 100),
    "scores 320 fp16": (120,),
    "lanes 1, 3 tokens": (80,),
    "packs 8": (120,),
    "stairs 8, 33 tokens": (100,),
    "norm 48": (89,),
    "adamw": (80,),
}


def rows_for(card: int, case: str) -> list[dict[str, Any]]:
    """Every kernel that a case launches on a card."""
    rows: list[dict[str, Any]] = []
    with compiled_for(card, rows, case):
        try:
            CASES[case]()
        except RuntimeError as error:
            rows.append({"card": card, "case": case, "fits": False, "error": str(error)[:300]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cards", default="80,89,90,100,120", help="compute capabilities")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--few", action="store_true", help="those of the tests")
    parser.add_argument("--json", action="store_true", help="one JSON object per kernel")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET"):
        raise SystemExit("kernels are compiled here: unset TRITON_INTERPRET")
    pairs = itertools.product(map(int, args.cards.split(",")), CASES)
    if args.few:
        pairs = ((card, case) for case, cards in FEW.items() for card in cards)
    missing = 0
    for card, case in pairs:
        if args.only not in case:
            continue
        rows = rows_for(card, case)
        missing += sum(not row["fits"] for row in rows)
        if args.json:
            print("\n".join(map(json.dumps, rows)), flush=True)
            continue
        for row in rows:
            print(f"sm_{card} {case}: {row.get('error') or line_of(row)}", flush=True)
    if missing:
        raise SystemExit(f"{missing} kernels do not fit")


def line_of(row: dict[str, Any]) -> str:
    """What a kernel takes of its card."""
    share = row["shared"] / CARDS[row["card"]]
    what = f"{row['kernel']} {row['shared']:,} bytes, {share:.0%}, {row['warps']} warps"
    tiles = "".join(f", {name} {row[name]}" for name in ("BT", "BC", "BF", "BQ") if name in row)
    return f"{what}, {row['stages']} stages{tiles}{'' if row['fits'] else ': TOO MUCH'}"


if __name__ == "__main__":
    main()
