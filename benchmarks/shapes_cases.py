"""The cases of benchmarks/shapes.py: named ones that are known to be hard, then seeded random ones.

Equal seeds give equal cases, in the same order, and more cases only add to fewer. A case is a value
without tensors; `name` is its key in the file of rows.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from headwise.errors import UsageError
from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.shape import Shape
from headwise.tasks import Farthest, Recall
from headwise.training.run import Recipe, Run

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "tf32": torch.float32,  # with products in TF32
}
SEED = 20261119


@dataclass(frozen=True)
class AttentionCase:
    """One call of `attend`; the last query stands at the last key."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    rank: int
    width: int
    causal: bool
    window: int
    dtype: str

    @property
    def name(self) -> str:
        """All fields.

        >>> AttentionCase(2, 6, 3, 100, 100, 64, 64, True, 0, "bf16").name
        'attention 2x6/3 100x100 64/64 causal bf16'
        """
        mask = " causal" * self.causal + f" window {self.window}" * bool(self.window)
        sizes = f"{self.batch}x{self.heads}/{self.kv_heads} {self.queries}x{self.keys}"
        return f"attention {sizes} {self.rank}/{self.width}{mask} {self.dtype}"

    @property
    def pairs(self) -> int:
        """Scores that count, over batch and heads."""
        offset, seen = self.keys - self.queries, 0
        for query in range(self.queries):
            place = query + offset
            low = max(0, place - self.window + 1) if self.window else 0
            high = self.keys
            if self.causal:
                high = place + 1
            elif self.window:
                high = min(self.keys, place + self.window)
            seen += max(0, high - low)
        return self.batch * self.heads * seen

    @property
    def flops(self) -> float:
        """Of both passes: two products forward, five backward."""
        return 7.0 * self.pairs * (self.rank + self.width)

    def rounded(self) -> AttentionCase:
        """The nearest case with rank and width in 64s and tokens in 128s."""

        def to(n: int, step: int) -> int:
            return max(step, round(n / step) * step)

        return dataclasses.replace(
            self,
            queries=to(self.queries, 128),
            keys=max(to(self.keys, 128), to(self.queries, 128)),
            rank=to(self.rank, 64),
            width=to(self.width, 64),
        )


@dataclass(frozen=True)
class EnsembleCase:
    """So many models of one run, trained together."""

    kind: str  # ensemble or decoder
    name: str
    run: Run
    models: int


# ---- attention

KNOWN_ATTENTION = (
    AttentionCase(4, 3, 3, 3000, 3000, 600, 600, True, 0, "bf16"),
    AttentionCase(8, 14, 14, 2048, 2048, 128, 128, True, 512, "bf16"),
    AttentionCase(8, 7, 7, 2048, 2048, 256, 256, True, 512, "bf16"),
    AttentionCase(4, 4, 4, 1024, 1024, 448, 448, True, 0, "fp32"),
    AttentionCase(2, 4, 4, 8192, 8192, 448, 448, True, 1024, "bf16"),
    AttentionCase(16, 2, 2, 777, 777, 640, 640, False, 0, "bf16"),
    AttentionCase(2, 8, 2, 512, 4096, 128, 128, True, 0, "bf16"),
    AttentionCase(64, 4, 4, 197, 197, 288, 288, False, 0, "bf16"),
    AttentionCase(256, 64, 64, 16, 16, 1, 1, False, 0, "fp16"),
    AttentionCase(256, 64, 64, 16, 16, 8, 8, False, 0, "fp16"),
)


def attention_cases(count: int, tiny: bool = False) -> list[AttentionCase]:
    """The known ones and random ones, `count` in all."""
    if tiny:
        return list(_distinct(_random_attention, count, "attention", tiny))
    drawn = _distinct(_random_attention, max(0, count - len(KNOWN_ATTENTION)), "attention", tiny)
    return [*KNOWN_ATTENTION[:count], *drawn]


def _random_attention(draw: random.Random, tiny: bool) -> AttentionCase:
    def log_uniform(low: float, high: float) -> int:
        return round(low * (high / low) ** draw.random())

    # Ranks: half of them in 64s, a quarter in 8s, a quarter any.
    most = 48 if tiny else 1536
    step = draw.choice((64, 64, 8, 1))
    rank = min(most, max(step if not tiny else 1, log_uniform(4, most) // step * step))
    width = rank if draw.random() < 0.8 else max(8, round(rank * draw.choice((0.5, 0.75, 1.5, 2))))
    keys = log_uniform(5, 40) if tiny else log_uniform(16, 16_384)
    if draw.random() < 0.5:  # half of the lengths in 128s
        keys = max(128, keys // 128 * 128) if not tiny else keys
    causal = draw.random() < 0.6
    queries = keys if draw.random() < 0.85 else max(1, round(keys * draw.random()))
    window = 0
    if causal and draw.random() < 0.25:
        window = max(2, keys // draw.choice((2, 3, 4, 8)))
    kv_heads = draw.choice((1, 2, 3, 4, 5, 7, 8, 12))
    heads = kv_heads * draw.choice((1, 1, 1, 2, 4, 7))
    # As many sequences as make 0.02 to 1.5 TFLOP, of at most 1 GiB of operands.
    one = AttentionCase(
        1, heads, kv_heads, queries, keys, rank, width, causal, window,
        draw.choice(("bf16", "bf16", "bf16", "fp16", "fp16", "fp32", "tf32")),
    )  # fmt: skip
    wanted = (2e10 * 75 ** draw.random()) / one.flops
    if one.flops > (2e12 if DTYPES[one.dtype].itemsize == 2 else 3e11):
        raise UsageError("more work than one case is worth")
    numbers = heads * queries * (rank + width) + kv_heads * keys * (rank + width)
    batch = 2 if tiny else max(1, min(512, round(wanted), (1 << 28) // numbers))
    return dataclasses.replace(one, batch=batch)


def _distinct(
    make: Callable[[random.Random, bool], Any], count: int, kind: str, tiny: bool
) -> Iterator[Any]:
    """The first `count` different cases of a seed; what the project itself refuses is drawn
    again."""
    draw, seen = random.Random(f"{SEED} {kind} {tiny}"), set[str]()
    while len(seen) < count:
        try:
            case = make(draw, tiny)
        except UsageError:
            continue
        if case.name not in seen:
            seen.add(case.name)
            yield case


# ---- ensembles


def _run(shape: Shape, task: Any, batch: int, precision: str) -> Run:
    recipe = Recipe(steps=100_000, batch=batch, lr=1e-3, precision=precision)
    return Run(shape, task, recipe)


def _paper(name: str, changes: dict[str, Any], points: int = 16, **sizes: Any) -> EnsembleCase:
    chosen: dict[str, Any] = {"depth": 3, "width": 8, "rank": 8, **sizes}
    shape = paper_shape(**chosen).replace(**changes)
    run = _run(shape, Farthest(shape.dim, points), 256, "fp16")
    return EnsembleCase("ensemble", f"ensemble {name}", run, 14)


def _known_ensembles() -> Iterator[EnsembleCase]:
    yield _paper("gelu", {"activation": "gelu"})
    yield _paper("dim 96", {}, dim=96)
    yield _paper("v != r", {"v_head_dim": 16})
    yield _paper("kv 8", {"num_kv_heads": 8})
    yield _paper("paper 3,8,8", {})
    yield _paper("points 24", {}, points=24)
    yield _paper("dim 128 r 16", {}, dim=128, rank=16)
    yield _paper("rank 1", {}, rank=1)


def ensemble_cases(count: int, tiny: bool = False) -> list[EnsembleCase]:
    """Encoders that read vectors, and small pre-norm models of any kind."""
    known = [] if tiny else list(_known_ensembles())[:count]
    return [*known, *_distinct(_random_ensemble, count - len(known), "ensemble", tiny)]


def _random_ensemble(draw: random.Random, tiny: bool) -> EnsembleCase:
    dim = draw.choice((8, 12)) if tiny else draw.choice((16, 32, 48, 64, 64, 64, 80, 96, 128, 192))
    rank = draw.choice((2, 4)) if tiny else draw.choice((1, 2, 4, 8, 8, 16, 16, 32, 64))
    heads = draw.choice((1, 2, 4, 8, 16, 32, 64)) if not tiny else draw.choice((2, 4))
    post = draw.random() < 0.5
    width = rank if draw.random() < 0.8 else rank * draw.choice((2, 3))
    kv = heads if draw.random() < 0.8 else max(1, heads // draw.choice((2, 4, 8)))
    points = draw.choice((5, 7)) if tiny else draw.choice((8, 12, 16, 16, 16, 24, 32, 64, 128))
    shape = Shape(
        dim=dim,
        depth=draw.choice((1, 2)) if tiny else draw.choice((1, 2, 3, 5)),
        num_heads=heads,
        head_dim=rank,
        v_head_dim=width,
        num_kv_heads=kv,
        ffn_dim=dim * draw.choice((1, 2, 4, 8)),
        activation=draw.choice(("relu", "relu", "gelu", "relu2", "swiglu")),
        norm="scalar" if post else draw.choice(("layer", "rms")),
        norm_at="post" if post else "pre",
        qkv_bias=post or draw.random() < 0.7,
        out_bias=post or draw.random() < 0.7,
        ffn_bias=post or draw.random() < 0.7,
    )
    batch = 4 if tiny else max(32, min(512, 4096 // points))
    precision = "fp32" if tiny else draw.choice(("fp16", "fp16", "fp16", "bf16", "tf32"))
    models = 2 if tiny else draw.choice((4, 8, 14, 21, 35))
    run = _run(shape, Farthest(dim, points), batch, precision)
    about = (
        f"{'post' if post else shape.norm} {dim}x{shape.depth} heads {heads}/{kv} x {rank}/{width} "
        f"ffn {shape.ffn_dim} {shape.activation} {batch}x{points} {precision} models {models}"
    )
    lacking = [name for name in ("qkv_bias", "out_bias", "ffn_bias") if not getattr(shape, name)]
    about = " no ".join([about, *lacking])
    return EnsembleCase("ensemble", f"ensemble {about}", run, models)


# ---- decoders


def decoder_cases(count: int, tiny: bool = False) -> list[EnsembleCase]:
    """Decoders as people train them today: rms norm, rotary positions, normed queries and keys."""
    known = [] if tiny else list(_known_decoders())[:count]
    return [*known, *_distinct(_random_decoder, count - len(known), "decoder", tiny)]


def _known_decoders() -> Iterator[EnsembleCase]:
    yield _decoder(2, 64, 4, 63, 64, 16)
    yield _decoder(4, 128, 4, 126, 32, 16)
    yield _decoder(4, 256, 4, 255, 16, 8)
    yield _decoder(8, 512, 8, 510, 8, 4)


def _decoder(
    depth: int, dim: int, heads: int, tokens: int, batch: int, models: int, precision: str = "fp16",
    **changes: Any,
) -> EnsembleCase:  # fmt: skip
    pairs = tokens // 3
    task = Recall(pairs=pairs, keys=2 * pairs, values=max(2, pairs))
    shape = Shape(
        dim=dim,
        depth=depth,
        num_heads=heads,
        vocab_size=task.vocab,
        causal=True,
        activation="relu2",
        norm="rms",
        qk_norm="free",
        qk_rope_head_dim=dim // heads,
    ).replace(**changes)
    about = " ".join(f"{name}={value}" for name, value in changes.items())
    name = f"decoder {depth}x{dim} heads {heads} {batch}x{task.tokens} {precision} models {models}"
    name = f"{name} {about}".rstrip()
    return EnsembleCase("decoder", name, _run(shape, task, batch, precision), models)


def _random_decoder(draw: random.Random, tiny: bool) -> EnsembleCase:
    if tiny:
        return _decoder(draw.choice((1, 2)), 8 * draw.choice((1, 2)), 2, 9, 3, 2, "fp32")
    dim = draw.choice((64, 96, 128, 192, 256, 384, 512))
    heads = draw.choice([n for n in (1, 2, 4, 8) if dim // n >= 16 and dim % (2 * n) == 0])
    tokens = 3 * draw.choice((10, 21, 42, 63, 85, 127))
    changes: dict[str, Any] = {}
    if draw.random() < 0.4:
        changes["activation"] = draw.choice(("swiglu", "gelu"))
    if heads > 1 and draw.random() < 0.4:
        changes["num_kv_heads"] = draw.choice([n for n in (1, 2) if heads % n == 0])
    depth = draw.choice((2, 3, 4, 6))
    models = draw.choice((4, 8, 16))
    batch = max(4, min(64, (1 << 20) // (dim * tokens)))  # a residual of a million numbers
    return _decoder(depth, dim, heads, tokens, batch, models, **changes)
