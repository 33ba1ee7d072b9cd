"""The feed-forward of a post-norm layer in Triton: x <- n(x + W_2 relu(W_1 x)), for narrow models.

A program of `feed` has a tile of tokens and goes through the hidden units in tiles of BF: the
hidden layer never leaves the chip. In backward it is made again, twice: `feed_back` has tiles
of tokens and makes the input's gradient, `feed_weights` has tiles of hidden units and goes through
all tokens for the weights' gradients, which need nobody to add them. Conventions and `tile sums`
are those of encoder_norm_triton.py.

Axes: T tokens, D model width, F hidden width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headwise.kernels.encoder_norm_triton import norm, norm_back
from headwise.kernels.shared_memory_triton import FEWER_LOADS, gives_way, smaller


@gives_way(smaller(smaller(FEWER_LOADS, "BT", 64), "BF", 32, 16))
@triton.jit
def feed(
    x, up, up_bias, down, bias, scale0, u0, scale, u, y, inv, T, F, model,
    D: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, IP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """n(s0 u0 + down[D, F] relu(up[F, D] x + up_bias) + bias)."""
    # The model, the tile's tokens, and their place in (models, T, D).
    m = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.arange(0, D)
    to = m * T * D + t[:, None] * D + d[None, :]
    xt = tl.load(x + to)
    z = tl.zeros([BT, D], tl.float32)
    # The input's tile stays; blocks of hidden units go by and are added through W_2.
    for f0 in tl.range(0, F, BF, num_stages=STAGES):
        f = f0 + tl.arange(0, BF)
        w1t = tl.load(up + m * model + f[:, None] * D + d[None, :])
        w2t = tl.load(down + m * model + d[:, None] * F + f[None, :])
        h = (
            tl.dot(xt, tl.trans(w1t), input_precision=IP)
            + tl.load(up_bias + m * model + f)[None, :]
        )
        h = tl.maximum(h, 0.0).to(xt.dtype)
        z = tl.dot(h, tl.trans(w2t), z, input_precision=IP)
    # The residual and the output's bias, then the norm at the end of the tile.
    z += tl.load(bias + m * model + d)[None, :] + tl.load(u0 + to) * tl.load(scale0 + m * model)
    norm(z, tl.load(scale + m * model), u, y, inv, to, m * T + t)


@gives_way(smaller(FEWER_LOADS, "BF", 32, 16))
@triton.jit
def feed_back(
    g,
    u,
    inv,
    scale,
    x,
    up,
    up_bias,
    down,
    dz,
    dx,
    u1,
    inv1,
    scale1,
    lower,
    tile_sums,
    T,
    F,
    model,
    slot,
    slots,
    D: tl.constexpr,
    BT: tl.constexpr,
    BF: tl.constexpr,
    LOWER: tl.constexpr,
    IP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """From g, the gradient of the layer's output, through the norm and the feed-forward: dz (in
    the operands' type) and dx = dz + dz down relu' up, with tile sums in `slot`. With LOWER also
    through the norm below: dx, and `lower` in the operands' type, are then the gradient of what
    that one norms, with tile sums in the slot before."""
    m = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.arange(0, D)
    to = m * T * D + t[:, None] * D + d[None, :]
    # Through the norm: dz, which is also the skip's part of dx.
    z = norm_back(
        tl.load(g + to),
        u + to,
        inv + m * T + t,
        scale + m * model,
        tile_sums + (m * slots + slot) * tl.num_programs(0) * 2 * D,
        D,
    )
    xt = tl.load(x + to)
    zt = z.to(xt.dtype)
    tl.store(dz + to, zt)
    # Hidden units are made again: a unit that was cut off passes no gradient.
    for f0 in tl.range(0, F, BF, num_stages=STAGES):
        f = f0 + tl.arange(0, BF)
        w1t = tl.load(up + m * model + f[:, None] * D + d[None, :])
        w2t = tl.load(down + m * model + d[:, None] * F + f[None, :])
        h = (
            tl.dot(xt, tl.trans(w1t), input_precision=IP)
            + tl.load(up_bias + m * model + f)[None, :]
        )
        dh = tl.dot(zt, w2t, input_precision=IP)
        dh = tl.where(h > 0.0, dh, 0.0).to(xt.dtype)
        z = tl.dot(dh, w1t, z, input_precision=IP)
    # The norm below is the attention part's own, so its gradient can be taken while dx is still
    # here.
    if LOWER:
        sums = tile_sums + (m * slots + slot - 1) * tl.num_programs(0) * 2 * D
        z = norm_back(z, u1 + to, inv1 + m * T + t, scale1 + m * model, sums, D)
        tl.store(lower + to, z.to(xt.dtype))
    tl.store(dx + to, z)


@gives_way(smaller(smaller(FEWER_LOADS, "BT", 32), "BF", 32, 16))
@triton.jit
def feed_weights(
    x, dz, up, up_bias, down, d_up, d_up_bias, d_down, T, F, model, unscale,
    D: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, IP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of up, up_bias and down: a tile of hidden units, all tokens."""
    # A tile of hidden units, [BF, T]: its weights stay on the chip, all tokens go by.
    m = tl.program_id(1).to(tl.int64)
    f = tl.program_id(0) * BF + tl.arange(0, BF)
    d = tl.arange(0, D)
    w1t = tl.load(up + m * model + f[:, None] * D + d[None, :])
    w2t = tl.load(down + m * model + d[:, None] * F + f[None, :])
    b1t = tl.load(up_bias + m * model + f)
    g1 = tl.zeros([BF, D], tl.float32)
    g2 = tl.zeros([BF, D], tl.float32)
    gb = tl.zeros([BF], tl.float32)
    for t0 in tl.range(0, T, BT, num_stages=STAGES):
        t = t0 + tl.arange(0, BT)
        at = m * T * D + t[:, None] * D + d[None, :]
        xt = tl.load(x + at)
        zt = tl.load(dz + at)
        # The hidden units of these tokens again, transposed, and their gradients.
        h = tl.dot(w1t, tl.trans(xt), input_precision=IP) + b1t[:, None]
        dh = tl.dot(tl.trans(w2t), tl.trans(zt), input_precision=IP)
        dh = tl.where(h > 0.0, dh, 0.0)
        gb += tl.sum(dh, 1)
        g1 = tl.dot(dh.to(xt.dtype), xt, g1, input_precision=IP)
        g2 = tl.dot(tl.maximum(h, 0.0).to(xt.dtype), zt, g2, input_precision=IP)
    tl.store(d_up + m * model + f[:, None] * D + d[None, :], g1 * unscale)
    tl.store(d_down + m * model + d[None, :] * F + f[:, None], g2 * unscale)
    tl.store(d_up_bias + m * model + f, gb * unscale)
