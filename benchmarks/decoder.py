"""Training throughput of our decoder against a nanochat-style model in plain PyTorch, compiled, on
one GPU in one run.

    python -m benchmarks.decoder --out decoder.json        about three minutes on an H200

Both sides make whole steps of the same model: bf16 autocast over float32 weights, a batch of tokens
from the host, the loss, clipped gradients, AdamW. Theirs is written as one writes it (three
projections, `scaled_dot_product_attention`, `torch.compile` of the whole model); ours is what
`headwise pretrain --compile` runs. Width 1792 by default, cut into 14 heads of 128 and into fewer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.device import commit, numerics
from headwise.lm.corpus import load
from headwise.lm.peak_flops import peak_flops
from headwise.lm.spec import COMPILED, Pretraining
from headwise.lm.text_files import find_text, find_tokenizer
from headwise.lm.trainer import Trainer, allow_many_shapes
from headwise.shape import Shape


class PlainBlock(nn.Module):
    """x + attention(norm x), then x + W_2 relu(W_1 norm x)^2; rotary positions, queries and keys
    normed."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.up, self.down = (
            nn.Linear(dim, 4 * dim, bias=False),
            nn.Linear(4 * dim, dim, bias=False),
        )
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (
            f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        q, k = (_turned(F.rms_norm(t, t.shape[-1:]).to(v.dtype), cos, sin) for t in (q, k))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(o.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norm2(x))).square())


def _turned(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = t.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class PlainGPT(nn.Module):
    """A decoder of `depth` such blocks; ids in, the mean loss out."""

    def __init__(self, dim: int, depth: int, heads: int, vocab: int, length: int) -> None:
        super().__init__()
        self.table, self.head, self.norm = (
            nn.Embedding(vocab, dim),
            nn.Linear(dim, vocab, bias=False),
            nn.RMSNorm(dim),
        )
        self.blocks = nn.ModuleList(PlainBlock(dim, heads) for _ in range(depth))
        rank = dim // heads
        angle = torch.outer(torch.arange(length), 10_000.0 ** (-torch.arange(0, rank, 2) / rank))
        self.cos, self.sin = (
            nn.Buffer(f(angle).bfloat16(), persistent=False) for f in (torch.cos, torch.sin)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids[:, :-1])
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), ids[:, 1:].flatten())


def plain_step(shape: Shape, rows: int, length: int) -> Callable[[], None]:
    """A function that makes one step of the plain model."""
    model = PlainGPT(shape.dim, shape.depth, shape.num_heads, shape.vocab_size, length).cuda()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    compiled = torch.compile(model, dynamic=False)
    generator = torch.Generator().manual_seed(0)
    assert sum(p.numel() for p in model.parameters()) == shape.params

    def step() -> None:
        ids = (
            torch.randint(257, (rows, length + 1), generator=generator)
            .pin_memory()
            .cuda(non_blocking=True)
        )
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(ids)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


@contextlib.contextmanager
def our_step(
    shape: Shape, rows: int, length: int, optimiser: str, compiled: str = "model"
) -> Iterator[Callable[[], Any]]:
    """Ours, as `headwise pretrain --compile` makes it."""
    run = Pretraining(
        shape=shape,
        steps=1000,
        batch_tokens=rows * length,
        length=length,
        optimiser=optimiser,
        lr=1e-4,
        precision="bf16",
    )
    device = torch.device("cuda")
    with numerics("bf16", device), allow_many_shapes(), tempfile.TemporaryDirectory() as folder:
        corpus = load(find_text(""), find_tokenizer("")[0], Path(folder), run.digest)
        yield Trainer(run, corpus, device, compiled=compiled).step


def seconds(steps: list[Callable[[], Any]], times: int, rounds: int = 5) -> list[float]:
    """Of one step of each: the median of stretches that take turns, so that the card's clock falls
    on all alike."""

    def stretch(step: Callable[[], Any]) -> float:
        torch.cuda.synchronize()
        start = time.monotonic()
        for _ in range(times):
            step()
        torch.cuda.synchronize()
        return (time.monotonic() - start) / times

    for step in steps:
        for _ in range(3):  # compiled at the first
            step()
    found = [[stretch(step) for step in steps] for _ in range(rounds)]
    return [sorted(column)[rounds // 2] for column in zip(*found, strict=True)]


def shape_of(dim: int, depth: int, heads: int, vocab: int) -> Shape:
    rank = dim // heads
    return Shape(
        dim=dim,
        depth=depth,
        num_heads=heads,
        head_dim=rank,
        qk_rope_head_dim=rank,
        ffn_dim=4 * dim,
        activation="relu2",
        causal=True,
        norm="rms",
        qk_norm="free",
        vocab_size=vocab,
        tied=False,
    )


def main() -> None:
    """Every arm, all of them at hand at once."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="where the rows go, as JSON")
    for name, value in (
        ("dim", 1792),
        ("depth", 8),
        ("vocab", 32_768),
        ("rows", 8),
        ("length", 2048),
        ("steps", 5),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument(
        "--heads",
        type=int,
        nargs="+",
        default=[14, 4, 1],
        help="ours; theirs is the first; default 14 4 1",
    )
    parser.add_argument(
        "--compile", default="model", choices=COMPILED, help="ours; default model, as theirs"
    )
    parser.add_argument("--no-muon", action="store_true", help="leave the arm with Muon out")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.decoder needs a GPU, torch sees none")
    torch.manual_seed(0)
    peak = peak_flops(torch.cuda.get_device_name(), "bf16")
    arms = [("plain", args.heads[0], ""), *(("ours", h, "adamw") for h in args.heads)]
    arms += [] if args.no_muon else [("ours", args.heads[0], "muon")]
    with contextlib.ExitStack() as stack:
        steps: list[Callable[[], Any]] = []
        for _, heads, optimiser in arms:
            shape = shape_of(args.dim, args.depth, heads, args.vocab)
            if optimiser:
                steps.append(
                    stack.enter_context(
                        our_step(shape, args.rows, args.length, optimiser, args.compile)
                    )
                )
            else:
                steps.append(plain_step(shape, args.rows, args.length))
        found = seconds(steps, args.steps)
    rows = []
    for (model, heads, optimiser), each in zip(arms, found, strict=True):
        shape = shape_of(args.dim, args.depth, heads, args.vocab)
        share = (
            shape.flops(args.length, batch=args.rows, training=True) / each / peak if peak else None
        )
        rows.append(
            {
                "model": model,
                "heads": heads,
                "rank": args.dim // heads,
                "optimiser": optimiser or "adamw",
                "tokens_per_second": args.rows * args.length / each,
                "mfu": share,
                "of_plain": found[0] / each,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "rows")} | {
        "sequences": args.rows
    }
    args.out.write_text(
        json.dumps(
            {
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "commit": commit(),
                **settings,
                "rows": rows,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
