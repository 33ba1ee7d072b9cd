"""The attention part of a post-norm layer in Triton: x <- n(x + A(x)), for narrow models.

Two ways, whose conventions are those of encoder_norm_triton.py:

apart   `project` writes queries, keys and values, attention_short_triton.py mixes them, `collect`
        adds the output projection and takes the norm; back by `spread`, heads, `gather`.
whole   `mix` and `mix_back` do all of that for a tile of 64 tokens and leave nothing in between:
        ranks 16, 32, 64 and sequences that divide the tile.

Weights' gradients are products over all tokens of what backward wrote (`outer`): a program has
a tile of columns and goes through all tokens, so nothing is left to add.

Axes: T tokens, C inner width of attention, D model width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headwise.kernels.attention_short_triton_packs import LOG2E, inner, softmax
from headwise.kernels.encoder_norm_triton import norm, norm_back, residual
from headwise.kernels.shared_memory_triton import FEWER_LOADS, FEWER_STAGES, gives_way, smaller


@gives_way(FEWER_STAGES)
@triton.jit
def project(
    x, w, b, y, T, C, model, D: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, IP: tl.constexpr
):
    """y[T, C] = x[T, D] w[C, D]^T + b."""
    # A tile of tokens times a tile of columns.
    m = tl.program_id(2).to(tl.int64)
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    d = tl.arange(0, D)
    xt = tl.load(x + m * T * D + t[:, None] * D + d[None, :])
    wt = tl.load(w + m * model + c[:, None] * D + d[None, :])
    bt = tl.load(b + m * model + c)
    yt = tl.dot(xt, tl.trans(wt), input_precision=IP) + bt[None, :]
    tl.store(y + m * T * C + t[:, None] * C + c[None, :], yt.to(y.dtype.element_ty))


@gives_way(smaller(FEWER_STAGES, "BC", 64, 32, 16))
@triton.jit
def collect(
    a,
    w,
    bias,
    scale0,
    u0,
    scale,
    u,
    y,
    inv,
    T,
    C,
    model,
    alpha,
    D: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    AVERAGE: tl.constexpr,
    FIRST: tl.constexpr,
    IP: tl.constexpr,
):
    """n(s0 u0 + alpha a[T, C] w[D, C]^T + mean of the bias rows)."""
    # A tile of tokens, all D columns of the output, summed over blocks of C.
    m = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.arange(0, D)
    z = tl.zeros([BT, D], tl.float32)
    for c0 in range(0, C, BC):
        c = c0 + tl.arange(0, BC)
        at = tl.load(a + m * T * C + t[:, None] * C + c[None, :])
        wt = tl.load(w + m * model + d[:, None] * C + c[None, :])
        z = tl.dot(at, tl.trans(wt), z, input_precision=IP)
    # The residual, the modules' mean, and the norm at the end of the tile.
    to = m * T * D + t[:, None] * D + d[None, :]
    z = z * alpha + residual(u0 + to, scale0 + m * model, bias + m * model, D, AVERAGE, FIRST)
    norm(z, tl.load(scale + m * model), u, y, inv, to, m * T + t)


@gives_way(smaller(FEWER_STAGES, "BC", 64, 32, 16))
@triton.jit
def spread(
    g, u, inv, scale, w, dz, dz16, a, tile_sums, T, C, model, slot, slots, alpha,
    D: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """From g, the gradient of n(z), through the norm and the output projection: dz, also in the
    operands' type, with tile sums, and a[T, C] = alpha dz w[D, C]."""
    m = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.arange(0, D)
    to = m * T * D + t[:, None] * D + d[None, :]
    # dz = the gradient of what the norm took, kept in both types: float32 for the residual, the
    # operands' type for products.
    z = norm_back(
        tl.load(g + to),
        u + to,
        inv + m * T + t,
        scale + m * model,
        tile_sums + (m * slots + slot) * tl.num_programs(0) * 2 * D,
        D,
    )
    tl.store(dz + to, z)
    zt = z.to(dz16.dtype.element_ty)
    tl.store(dz16 + to, zt)
    # The heads' gradient, alpha dz W_O, a block of columns at a time.
    for c0 in range(0, C, BC):
        c = c0 + tl.arange(0, BC)
        wt = tl.load(w + m * model + d[:, None] * C + c[None, :])
        at = tl.dot(zt, wt, input_precision=IP) * alpha
        tl.store(a + m * T * C + t[:, None] * C + c[None, :], at.to(a.dtype.element_ty))


@gives_way(smaller(FEWER_STAGES, "BC", 64, 32, 16))
@triton.jit
def gather(
    a, w, dz, dx, T, C, model, D: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, IP: tl.constexpr
):
    """dx = dz + a[T, C] w[C, D]."""
    m = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.arange(0, D)
    to = m * T * D + t[:, None] * D + d[None, :]
    # dz passes by on the skip; the projections' part is added.
    z = tl.load(dz + to)
    for c0 in range(0, C, BC):
        c = c0 + tl.arange(0, BC)
        at = tl.load(a + m * T * C + t[:, None] * C + c[None, :])
        wt = tl.load(w + m * model + c[:, None] * D + d[None, :])
        z = tl.dot(at, wt, z, input_precision=IP)
    tl.store(dx + to, z)


@gives_way(smaller(FEWER_LOADS, "BT", 32, 16))
@triton.jit
def outer(
    a, x, dw, db, T, C, model, unscale, w_c, w_d,
    D: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BIAS: tl.constexpr, IP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dw[c, d] = a[T, C]^T x[T, D], db = the column sums of a: a tile of columns, all tokens."""
    # A tile of columns, whose sums over all tokens stay on the chip.
    m = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    d = tl.arange(0, D)
    g = tl.zeros([BC, D], tl.float32)
    gb = tl.zeros([BC, 16], tl.float32)
    ones = tl.full([BT, 16], 1.0, a.dtype.element_ty)
    for t0 in tl.range(0, T, BT, num_stages=STAGES):
        t = t0 + tl.arange(0, BT)
        at = tl.load(a + m * T * C + t[:, None] * C + c[None, :])
        xt = tl.load(x + m * T * D + t[:, None] * D + d[None, :])
        g = tl.dot(tl.trans(at), xt, g, input_precision=IP)
        if BIAS:  # a product with ones: the columns never leave shared memory
            gb = tl.dot(tl.trans(at), ones, gb, input_precision=IP)
    tl.store(dw + m * model + c[:, None] * w_c + d[None, :] * w_d, g * unscale)
    if BIAS:
        tl.store(db + m * model + c, tl.sum(gb, 1) * (unscale / 16))


@triton.jit
def _cut(x, S: tl.constexpr, N: tl.constexpr, H: tl.constexpr, R: tl.constexpr):
    """(sequences x tokens, heads x rank) -> (sequences x heads, tokens, rank)."""
    return tl.reshape(tl.permute(tl.reshape(x, (S, N, H, R)), (0, 2, 1, 3)), (S * H, N, R))


@triton.jit
def _join(x, S: tl.constexpr, N: tl.constexpr, H: tl.constexpr, R: tl.constexpr):
    """The inverse of `_cut`."""
    return tl.reshape(tl.permute(tl.reshape(x, (S, H, N, R)), (0, 2, 1, 3)), (S * N, H * R))


@triton.jit
def _heads_of(
    xt,
    w,
    b,
    c,
    d,
    D: tl.constexpr,
    S: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    IP: tl.constexpr,
):
    """One of q, k, v for a tile of columns, heads apart, and the weights it took."""
    wt = tl.load(w + c[:, None] * D + d[None, :])
    y = tl.dot(xt, tl.trans(wt), input_precision=IP) + tl.load(b + c)[None, :]
    return _cut(y.to(xt.dtype), S, N, H, R), wt


@gives_way(FEWER_LOADS)
@triton.jit
def mix(
    x,
    qkv,
    qkv_bias,
    out,
    bias,
    scale0,
    u0,
    scale,
    u,
    y,
    inv,
    T,
    C,
    model,
    alpha,
    score_scale,
    D: tl.constexpr,
    N: tl.constexpr,
    OWN: tl.constexpr,
    R: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    AVERAGE: tl.constexpr,
    FIRST: tl.constexpr,
    IP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """n(s0 u0 + alpha W_O concat softmax(score_scale q k^T) v + mean of the bias rows); q, k, v,
    scores and heads stay on the chip. N tokens are worked on at once, short sequences of OWN tokens
    side by side."""
    # A tile has S runs of N tokens and, per block of columns, H heads.
    S: tl.constexpr = BT // N
    H: tl.constexpr = BC // R
    m = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.arange(0, D)
    to = m * T * D + t[:, None] * D + d[None, :]
    # The input's tile stays; blocks of heads go by: projected, mixed, and added through W_O.
    xt = tl.load(x + to)
    qkv += m * model
    qkv_bias += m * model
    z = tl.zeros([BT, D], tl.float32)
    for c0 in tl.range(0, C, BC, num_stages=STAGES):
        c = c0 + tl.arange(0, BC)
        q, _ = _heads_of(xt, qkv, qkv_bias, c, d, D, S, N, H, R, IP)
        k, _ = _heads_of(xt, qkv + C * D, qkv_bias + C, c, d, D, S, N, H, R, IP)
        v, _ = _heads_of(xt, qkv + 2 * C * D, qkv_bias + 2 * C, c, d, D, S, N, H, R, IP)
        p = softmax(inner(q, k, S * H, N, R, IP) * (score_scale * LOG2E), OWN, N).to(v.dtype)
        o = _join(tl.dot(p, v, input_precision=IP).to(xt.dtype), S, N, H, R)
        wt = tl.load(out + m * model + d[:, None] * C + c[None, :])
        z = tl.dot(o, tl.trans(wt), z, input_precision=IP)
    z = z * alpha + residual(u0 + to, scale0 + m * model, bias + m * model, D, AVERAGE, FIRST)
    norm(z, tl.load(scale + m * model), u, y, inv, to, m * T + t)


@gives_way(FEWER_LOADS)
@triton.jit
def mix_back(
    g,
    u,
    inv,
    scale,
    x,
    qkv,
    qkv_bias,
    out,
    dz16,
    dx,
    dqkv,
    o,
    tile_sums,
    T,
    C,
    model,
    slot,
    slots,
    alpha,
    score_scale,
    D: tl.constexpr,
    N: tl.constexpr,
    OWN: tl.constexpr,
    R: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    FIRST: tl.constexpr,
    IP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """From g, the gradient of n(z), through the norm and the attention part to its input, dx.
    Writes what the weights' gradients are products of: dz, dq, dk, dv and o."""
    S: tl.constexpr = BT // N
    H: tl.constexpr = BC // R
    m = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.arange(0, D)
    to = m * T * D + t[:, None] * D + d[None, :]
    # Through the norm, as in `spread`.
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
    tl.store(dz16 + to, zt)
    # Blocks of heads again: q, k, v and the weights p are made anew from the input, so the way
    # forward keeps none of them.
    qkv += m * model
    qkv_bias += m * model
    dqkv += m * T * 3 * C + t[:, None] * (3 * C)
    o += m * T * C + t[:, None] * C
    for c0 in tl.range(0, C, BC, num_stages=STAGES):
        c = c0 + tl.arange(0, BC)
        q, wq = _heads_of(xt, qkv, qkv_bias, c, d, D, S, N, H, R, IP)
        k, wk = _heads_of(xt, qkv + C * D, qkv_bias + C, c, d, D, S, N, H, R, IP)
        v, wv = _heads_of(xt, qkv + 2 * C * D, qkv_bias + 2 * C, c, d, D, S, N, H, R, IP)
        wt = tl.load(out + m * model + d[:, None] * C + c[None, :])
        # The heads' gradient, and through the softmax: ds = p (dp - sum of p dp) scale.
        gt = _cut((tl.dot(zt, wt, input_precision=IP) * alpha).to(xt.dtype), S, N, H, R)
        p = softmax(inner(q, k, S * H, N, R, IP) * (score_scale * LOG2E), OWN, N)
        dp = inner(gt, v, S * H, N, R, IP)
        ds = (p * (dp - tl.sum(p * dp, 2)[:, :, None]) * score_scale).to(xt.dtype)
        p = p.to(xt.dtype)
        # For the weights' gradients: the heads' outputs, dq, dk and dv, heads joined.
        tl.store(o + c[None, :], _join(tl.dot(p, v, input_precision=IP).to(xt.dtype), S, N, H, R))
        dq = _join(tl.dot(ds, k, input_precision=IP).to(xt.dtype), S, N, H, R)
        dk = _join(
            tl.dot(tl.permute(ds, (0, 2, 1)), q, input_precision=IP).to(xt.dtype), S, N, H, R
        )
        dv = _join(
            tl.dot(tl.permute(p, (0, 2, 1)), gt, input_precision=IP).to(xt.dtype), S, N, H, R
        )
        tl.store(dqkv + c[None, :], dq)
        tl.store(dqkv + C + c[None, :], dk)
        tl.store(dqkv + 2 * C + c[None, :], dv)
        # The input's gradient, summed over blocks on top of the skip's dz.
        if not FIRST:
            z = tl.dot(dq, wq, z, input_precision=IP)
            z = tl.dot(dk, wk, z, input_precision=IP)
            z = tl.dot(dv, wv, z, input_precision=IP)
    if not FIRST:
        tl.store(dx + to, z)
