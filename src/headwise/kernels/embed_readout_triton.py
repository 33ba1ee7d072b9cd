"""The Triton kernels of embed_readout.py: one pass over the tokens in each direction.

The model is in every grid. Parameters come with the numbers from one model's to the next one's
(`gain_row`, ...). Tile sums are the sums over a program's tokens that gradients of parameters are
made of, one set per program; the caller adds them up.

Axes: T tokens, N tokens of a sequence, D model width, K width of the inputs; BD, BN, BK: those
padded to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headwise.kernels.decoder_triton import norm_gradient, normalized


@triton.jit
def norm(
    x, gain, gain_row, shift, shift_row, y, T, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr
):
    """y = n(x) for rows of D numbers, T of each model; each parameter has its own step from model
    to model."""
    # The model, the tile's rows, and their place in (models, T, D); D is padded to BD.
    m = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.arange(0, BD)
    wide = d < D
    some = (t < T)[:, None] & wide[None, :]
    at = (m * T + t)[:, None] * D + d[None, :]
    hat, _ = normalized(tl.load(x + at, mask=some, other=0.0), some, D)
    g = tl.load(gain + m * gain_row + d, mask=wide, other=0.0)
    s = tl.load(shift + m * shift_row + d, mask=wide, other=0.0)
    tl.store(y + at, hat * g[None, :] + s[None, :], mask=some)


@triton.jit
def norm_back(
    x, gain, gain_row, dy, dx, tile_sums, T, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr
):
    """dx from dy. Tile sums of dy hat and dy."""
    m = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.arange(0, BD)
    wide = d < D
    some = (t < T)[:, None] & wide[None, :]
    at = (m * T + t)[:, None] * D + d[None, :]
    # The norm again, from x.
    hat, inverse = normalized(tl.load(x + at, mask=some, other=0.0), some, D)
    g = tl.load(dy + at, mask=some, other=0.0)
    tl.store(
        dx + at,
        norm_gradient(
            hat, inverse, g, tl.load(gain + m * gain_row + d, mask=wide, other=0.0), some, D
        ),
        mask=some,
    )
    # Sums over this tile's rows, for the gradients of gain and shift.
    sums = tile_sums + (m * tl.num_programs(0) + tl.program_id(0)) * 2 * BD + d
    tl.store(sums, tl.sum(g * hat, 0))
    tl.store(sums + BD, tl.sum(g, 0))


@triton.jit
def leave(
    x,
    gain,
    gain_row,
    shift,
    shift_row,
    w,
    w_row,
    b,
    b_row,
    y,
    T,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
):
    """y[T] = n(x).w + b."""
    m = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.arange(0, BD)
    wide = d < D
    some = (t < T)[:, None] & wide[None, :]
    # n(x) of each row stays in registers; only its product with w is written.
    hat, _ = normalized(
        tl.load(x + (m * T + t)[:, None] * D + d[None, :], mask=some, other=0.0), some, D
    )
    g = tl.load(gain + m * gain_row + d, mask=wide, other=0.0)
    s = tl.load(shift + m * shift_row + d, mask=wide, other=0.0)
    out = tl.load(w + m * w_row + d, mask=wide, other=0.0)
    z = tl.sum((hat * g[None, :] + s[None, :]) * out[None, :], 1) + tl.load(b + m * b_row)
    tl.store(y + m * T + t, z, mask=t < T)


@triton.jit
def leave_back(
    x,
    gain,
    gain_row,
    shift,
    shift_row,
    w,
    w_row,
    dy,
    dx,
    tile_sums,
    T,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
):
    """dx from dy[T]. Tile sums for gain, shift, w, and b, which is in every place."""
    m = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.arange(0, BD)
    wide = d < D
    some = (t < T)[:, None] & wide[None, :]
    at = (m * T + t)[:, None] * D + d[None, :]
    hat, inverse = normalized(tl.load(x + at, mask=some, other=0.0), some, D)
    g = tl.load(gain + m * gain_row + d, mask=wide, other=0.0)
    s = tl.load(shift + m * shift_row + d, mask=wide, other=0.0)
    out = tl.load(w + m * w_row + d, mask=wide, other=0.0)
    # One number per row came back: dn(x) = dy w.
    r = tl.load(dy + m * T + t, mask=t < T, other=0.0)
    tl.store(dx + at, norm_gradient(hat, inverse, r[:, None] * out[None, :], g, some, D), mask=some)
    # With a = sum of dy hat and b = sum of dy: the gain's gradient is w a, the shift's w b, w's own
    # gain a + shift b, the bias's b.
    sloped, total = tl.sum(r[:, None] * hat, 0), tl.sum(r, 0)
    sums = tile_sums + (m * tl.num_programs(0) + tl.program_id(0)) * 4 * BD + d
    tl.store(sums, out * sloped)
    tl.store(sums + BD, out * total)
    tl.store(sums + 2 * BD, g * sloped + s * total)
    tl.store(sums + 3 * BD, total + tl.zeros([BD], tl.float32))


@triton.jit
def enter(
    x, w, w_row, b, b_row, table, table_row, y, T, N,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[T, D] = x[T, K] w[D, K]^T + b + the row of the token's place among N."""
    # The model, the tile's rows, and both widths padded to powers of two.
    m = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.arange(0, BD)
    k = tl.arange(0, BK)
    wide, deep, there = d < D, k < K, (t < T)[:, None]
    some = there & wide[None, :]
    # x [BT, BK] and w^T [BK, BD].
    given = tl.load(
        x + (m * T + t)[:, None] * K + k[None, :], mask=there & deep[None, :], other=0.0
    )
    weight = tl.load(
        w + m * w_row + d[None, :] * K + k[:, None], mask=wide[None, :] & deep[:, None], other=0.0
    )
    z = (
        tl.dot(given, weight, input_precision="ieee")
        + tl.load(b + m * b_row + d, mask=wide, other=0.0)[None, :]
    )
    # The token's place is its number within the sequence.
    z += tl.load(table + m * table_row + (t % N)[:, None] * D + d[None, :], mask=some, other=0.0)
    tl.store(y + (m * T + t)[:, None] * D + d[None, :], z, mask=some)


@triton.jit
def enter_back(
    x, dy, tile_sums, batch, N,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Tile sums over some of the sequences: for the places' rows [N, D] and for w [D, K]."""
    m = tl.program_id(1).to(tl.int64)
    n = tl.arange(0, BN)
    d = tl.arange(0, BD)
    k = tl.arange(0, BK)
    wide, deep, there = d < D, k < K, n < N
    # Whole sequences, so that the sum over them is one per place. Every num_programs-th sequence is
    # this program's.
    rows, w = tl.zeros([BN, BD], tl.float32), tl.zeros([BD, BK], tl.float32)
    for i in range(tl.program_id(0), batch, tl.num_programs(0)):
        t = (m * batch + i) * N + n
        g = tl.load(
            dy + t[:, None] * D + d[None, :], mask=there[:, None] & wide[None, :], other=0.0
        )
        given = tl.load(
            x + t[:, None] * K + k[None, :], mask=there[:, None] & deep[None, :], other=0.0
        )
        rows += g
        w = tl.dot(tl.trans(g), given, w, input_precision="ieee")
    # N D numbers for the places, then D K for w.
    sums = tile_sums + (m * tl.num_programs(0) + tl.program_id(0)) * D * (N + K)
    tl.store(sums + n[:, None] * D + d[None, :], rows, mask=there[:, None] & wide[None, :])
    tl.store(sums + N * D + d[:, None] * K + k[None, :], w, mask=wide[:, None] & deep[None, :])
