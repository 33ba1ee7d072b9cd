"""Attention over short sequences on a GPU: every head whole in one program, scores never written to
memory.

Four kernels, all with an exact softmax over whole rows and with heads innermost in memory, so that
loads coalesce:

    lanes   rank 1 and 2, at most 16 tokens: a thread owns one head of one sequence
    packs   rank 4 to 32, at most 16 tokens: heads that share a line of memory side by side, one
            small product each
    tiles   any rank up to 64, at most 256 tokens: a few warps own a sequence and walk over heads
    stairs  the same under a causal mask, 33 to 128 tokens: blocks of 32, only those that are seen

Each has a file of its own, attention_short_triton_<kernel>.py. This one chooses the kernel, counts
programs and launches. Tensors are (sequences, tokens, heads x rank) by strides, so a slice of one
wide projection is taken as it lies. Programs stand in one line, blocks of heads innermost, because
a grid's other axes end at 65,535. The plain twin is `headwise.model.reference.plain`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwise.kernels.attention_short_triton_lanes import lanes_backward, lanes_forward
from headwise.kernels.attention_short_triton_packs import packs_backward, packs_forward
from headwise.kernels.attention_short_triton_stairs import stairs_backward, stairs_forward
from headwise.kernels.attention_short_triton_tiles import tiles_backward, tiles_forward

LINE = 64  # numbers of a row that one program of packs takes


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    heads: int,
    rank: int,
    scale: float,
    precision: str,
    causal: bool = False,
    together: bool = False,
) -> None:
    """o = softmax(scale q k^T) v; tensors are (sequences, tokens, heads x rank) views, q, k and v
    with the same strides.

    `precision` is how products of float32 are made: tf32 or tf32x3. `together`: short sequences may
    share a product, 16 rows of them, in which a number that is not finite reaches them all.
    """
    # How many rows a program takes decides how many programs there are; each kernel then has its
    # own number of programs per sequence, for its heads.
    sequences, tokens, _ = q.shape
    kernel = kind_of(tokens, rank, causal)
    share = together and kernel != "lanes" and not causal
    rows = _rows_at_once(sequences, tokens, share, q.stride(), o.stride())
    programs = sequences * tokens // rows
    args = q, k, v, o, *_steps(q, rows), *_steps(o, rows)
    match kernel:
        case "lanes":
            blocks = triton.cdiv(heads, 64)
            lanes_forward[blocks * programs,](
                *args, heads, scale, blocks, N=tokens, R=rank, BLOCK=64, num_warps=2
            )
        case "packs":
            blocks = triton.cdiv(heads * rank, LINE)
            packs_forward[blocks * programs,](
                *args, heads * rank, scale, blocks, IP=precision, **_packs(tokens, rows, rank)
            )
        case "stairs":
            stairs_forward[heads * programs,](
                *args, scale, heads, IP=precision, **_stairs(tokens, rank)
            )
        case _:
            sizes = _tiles(tokens, rows, rank, causal, q.dtype)
            blocks = triton.cdiv(heads, sizes["GROUP"])
            tiles_forward[blocks * programs,](*args, heads, scale, blocks, IP=precision, **sizes)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    heads: int,
    rank: int,
    scale: float,
    precision: str,
    causal: bool = False,
    together: bool = False,
) -> None:
    """Gradients of q, k and v from g, that of the output; they may be written over q, k and v.
    `precision` and `together` as in `forward`."""
    sequences, tokens, _ = q.shape
    kernel = kind_of(tokens, rank, causal)
    share = together and kernel != "lanes" and not causal
    rows = _rows_at_once(sequences, tokens, share, q.stride(), g.stride(), dq.stride())
    programs = sequences * tokens // rows
    args = q, k, v, g, dq, dk, dv, *_steps(q, rows), *_steps(g, rows), *_steps(dq, rows)
    match kernel:
        case "lanes":
            blocks = triton.cdiv(heads, 32)
            lanes_backward[blocks * programs,](
                *args, heads, scale, blocks, N=tokens, R=rank, BLOCK=32, num_warps=1
            )
        case "packs":
            blocks = triton.cdiv(heads * rank, LINE)
            packs_backward[blocks * programs,](
                *args, heads * rank, scale, blocks, IP=precision, **_packs(tokens, rows, rank)
            )
        case "stairs":
            stairs_backward[heads * programs,](
                *args, scale, heads, IP=precision, **_stairs(tokens, rank)
            )
        case _:
            sizes = _tiles(tokens, rows, rank, causal, q.dtype)
            blocks = triton.cdiv(heads, sizes["GROUP"])
            tiles_backward[blocks * programs,](*args, heads, scale, blocks, IP=precision, **sizes)


# ---- which kernel, and its sizes


def kind_of(tokens: int, rank: int, causal: bool = False) -> str:
    """Which of the kernels takes this size: lanes, packs, tiles or stairs; tiles and stairs have a
    mask.

    >>> kind_of(16, 1), kind_of(16, 8), kind_of(64, 8), kind_of(64, 8, causal=True)
    ('lanes', 'packs', 'tiles', 'stairs')
    """
    if causal:
        return "stairs" if 32 < tokens <= 128 else "tiles"
    if tokens <= 16 and rank in (1, 2):
        return "lanes"
    return "packs" if tokens <= 16 and rank in (4, 8, 16, 32) else "tiles"


def _tiles(tokens: int, rows: int, rank: int, causal: bool, dtype: torch.dtype) -> dict[str, Any]:
    # A product takes 16 rows and columns at least, and powers of two. Above 128 keys the queries go
    # in blocks, or the scores would not fit in registers.
    padded, wide = max(16, triton.next_power_of_2(rows)), max(16, triton.next_power_of_2(rank))
    queries = padded
    if padded > 128:
        queries = 16 if dtype == torch.float32 else 32
    return {
        "N": tokens,
        "R": rank,
        "NP": padded,
        "ROWS": rows,
        "RP": wide,
        "BQ": queries,
        "GROUP": max(1, 64 // wide),
        "num_warps": min(8, padded // 16),
        "num_stages": 2,
        "CAUSAL": causal,
    }


def _stairs(tokens: int, rank: int) -> dict[str, int]:
    wide = max(16, triton.next_power_of_2(rank))
    return {
        "N": tokens,
        "R": rank,
        "RP": wide,
        "B": 32,
        "STEPS": triton.cdiv(tokens, 32),
        "num_warps": 4 if wide > 32 else 2,
    }


def _packs(tokens: int, rows: int, rank: int) -> dict[str, int]:
    return {
        "N": tokens,
        "R": rank,
        "NP": 16,
        "ROWS": rows,
        "HEADS": LINE // rank,
        "num_warps": 1 if rank == 32 else 4,
    }


def _steps(t: Tensor, rows: int) -> tuple[int, int]:
    """From the rows of one program to those of the next, and from row to row."""
    return rows // t.shape[1] * t.stride(0), t.stride(1)


def _rows_at_once(sequences: int, tokens: int, together: bool, *strides: tuple[int, ...]) -> int:
    """How many rows a program takes: a sequence, or as many short ones as fill the 16 rows of a
    product where they lie end to end."""
    fits = together and tokens < 16 and 16 % tokens == 0 and sequences * tokens % 16 == 0
    return 16 if fits and all(seq == tokens * row for seq, row, *_ in strides) else tokens


# ---- for autograd


def attend_heads(
    q: Tensor, k: Tensor, v: Tensor, scale: float, precision: str, causal: bool = False
) -> Tensor:
    """softmax(scale q k^T) v for (batch, heads, tokens, rank) tensors of equal sizes; `precision`
    as in `forward`."""
    # Under torch.compile the whole pass is one operation. Traced one by one, the kernels would get
    # `scale` in 64 bits from inductor, in which the sums of `lanes` do not compile.
    if torch.compiler.is_compiling():
        return _heads(q, k, v, float(scale), precision, causal)
    out: Tensor = _Heads.apply(q, k, v, scale, precision, causal)  # type: ignore[assignment]
    return out


def _as_rows(*tensors: Tensor) -> list[Tensor]:
    """(batch, tokens, heads x rank) views with equal strides, copied only where the tensors do not
    lie so."""
    rows = [t.transpose(1, 2) for t in tensors]
    if any(t.stride()[2:] != (t.shape[3], 1) or t.stride() != rows[0].stride() for t in rows):
        rows = [t.contiguous() for t in rows]
    return [t.flatten(2) for t in rows]


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, precision: str, causal: bool
    ) -> Tensor:
        """Heads become columns of rows, without a copy where they lie so."""
        _, heads, _, rank = q.shape
        ctx.options = heads, rank, scale, precision, causal
        q, k, v = _as_rows(q, k, v)
        o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        forward(q, k, v, o, *ctx.options)
        ctx.save_for_backward(q, k, v)
        return o.unflatten(2, (heads, rank)).transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """The gradients of q, k and v, in the layout of q."""
        q, k, v = ctx.saved_tensors
        heads, rank = ctx.options[:2]
        (g,) = _as_rows(grad)
        dq, dk, dv = (torch.empty(q.shape, dtype=grad.dtype, device=grad.device) for _ in range(3))
        backward(q, k, v, g, dq, dk, dv, *ctx.options)
        by_head = (t.unflatten(2, (heads, rank)).transpose(1, 2) for t in (dq, dk, dv))
        return *by_head, None, None, None


# ---- for torch.compile: one operation that it does not look into


def _like(t: Tensor) -> Tensor:
    """Memory for the numbers of a tensor (batch, heads, tokens, rank), heads beside each other."""
    batch, heads, tokens, rank = t.shape
    return t.new_empty(batch, tokens, heads, rank).transpose(1, 2)


@torch.library.custom_op("headwise::heads", mutates_args=())
def _heads(q: Tensor, k: Tensor, v: Tensor, scale: float, precision: str, causal: bool) -> Tensor:
    _, heads, _, rank = q.shape
    q, k, v = _as_rows(q, k, v)
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    forward(q, k, v, o, heads, rank, scale, precision, causal)
    return o.unflatten(2, (heads, rank)).transpose(1, 2)


@_heads.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, precision: str, causal: bool) -> Tensor:
    return _like(q)


@torch.library.custom_op("headwise::heads_backward", mutates_args=())
def _heads_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, precision: str, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    _, heads, _, rank = q.shape
    q, k, v = _as_rows(q, k, v)
    (g,) = _as_rows(grad)
    dq, dk, dv = (torch.empty(q.shape, dtype=grad.dtype, device=grad.device) for _ in range(3))
    backward(q, k, v, g, dq, dk, dv, heads, rank, scale, precision, causal)
    by_head = [t.unflatten(2, (heads, rank)).transpose(1, 2) for t in (dq, dk, dv)]
    return by_head[0], by_head[1], by_head[2]


@_heads_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, precision: str, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(grad), _like(grad), _like(grad)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.options = inputs[3:]


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_heads_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None


_heads.register_autograd(_gradients, setup_context=_save)
