"""The post-norm layer around the heads, for narrow models: x <- n(x + A(x)), x <- n(x + W_2
relu(W_1 x)), n(z) = s z/||z||.

Every kernel has the model in its grid and weights in flat rows, one row a model: matrices in the
operands' type, everything else in float32, `model` numbers from one row to the next. Activations
between kernels are `u` (float32, the direction z/||z||), `x` (s u in the operands' type) and `inv`
(1/||z||). The hidden layer of the feed-forward never leaves the chip, forward or backward: it is
made again where it is needed.

Axes: T tokens, C inner width of attention, D model width, F hidden width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headwise.kernels.adamw_triton import stepped
from headwise.kernels.attention_short_triton_packs import LOG2E, inner, softmax


@triton.jit
def _norm(z, s, u, x, inv, at, rows):
    """Write n(z): direction, scaled operand, inverse norm."""
    inverse = 1.0 / tl.sqrt(tl.sum(z * z, 1))
    z = z * inverse[:, None]
    tl.store(u + at, z)
    tl.store(x + at, (z * s).to(x.dtype.element_ty))
    tl.store(inv + rows, inverse)


@triton.jit
def _norm_back(grad, u, inv, scale, parts, D: tl.constexpr):
    """The gradient of z from that of n(z); its sum over the tile's tokens and what they add to the
    gradient of s go to the parts."""
    direction = tl.load(u)
    along = tl.sum(direction * grad, 1)
    z = (grad - direction * along[:, None]) * (tl.load(inv) * tl.load(scale))[:, None]
    part = parts + tl.program_id(0) * 2 * D
    tl.store(part + tl.arange(0, D), tl.sum(z, 0))
    tl.store(part + D, tl.sum(along, 0))
    return z


@triton.jit
def _residual(u0, scale0, bias, D: tl.constexpr, AVERAGE: tl.constexpr, FIRST: tl.constexpr):
    """What passes the attention by, s0 u0, and the mean of its modules' biases. The first layer's
    input has no scale."""
    shift = tl.zeros([D], tl.float32)
    for i in range(AVERAGE):
        shift += tl.load(bias + i * D + tl.arange(0, D))
    passed = tl.load(u0)
    if not FIRST:
        passed = passed * tl.load(scale0)
    return passed + (shift / AVERAGE)[None, :]


@triton.jit
def project(
    x, w, b, y, T, C, model, D: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, IP: tl.constexpr
):
    """y[T, C] = x[T, D] w[C, D]^T + b."""
    m = tl.program_id(2).to(tl.int64)
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    d = tl.arange(0, D)
    xt = tl.load(x + m * T * D + t[:, None] * D + d[None, :])
    wt = tl.load(w + m * model + c[:, None] * D + d[None, :])
    bt = tl.load(b + m * model + c)
    yt = tl.dot(xt, tl.trans(wt), input_precision=IP) + bt[None, :]
    tl.store(y + m * T * C + t[:, None] * C + c[None, :], yt.to(y.dtype.element_ty))


@triton.jit
def collect(
    a,
    w,
    bias,
    scale0,
    u0,
    scale,
    u,
    x,
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
    m = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.arange(0, D)
    z = tl.zeros([BT, D], tl.float32)
    for c0 in range(0, C, BC):
        c = c0 + tl.arange(0, BC)
        at = tl.load(a + m * T * C + t[:, None] * C + c[None, :])
        wt = tl.load(w + m * model + d[:, None] * C + c[None, :])
        z = tl.dot(at, tl.trans(wt), z, input_precision=IP)
    to = m * T * D + t[:, None] * D + d[None, :]
    z = z * alpha + _residual(u0 + to, scale0 + m * model, bias + m * model, D, AVERAGE, FIRST)
    _norm(z, tl.load(scale + m * model), u, x, inv, to, m * T + t)


@triton.jit
def feed(
    x, w1, b1, w2, b2, scale0, u0, scale, u, y, inv, T, F, model,
    D: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, IP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """n(s0 u0 + w2[D, F] relu(w1[F, D] x + b1) + b2)."""
    m = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.arange(0, D)
    to = m * T * D + t[:, None] * D + d[None, :]
    xt = tl.load(x + to)
    z = tl.zeros([BT, D], tl.float32)
    for f0 in tl.range(0, F, BF, num_stages=STAGES):
        f = f0 + tl.arange(0, BF)
        w1t = tl.load(w1 + m * model + f[:, None] * D + d[None, :])
        w2t = tl.load(w2 + m * model + d[:, None] * F + f[None, :])
        h = tl.dot(xt, tl.trans(w1t), input_precision=IP) + tl.load(b1 + m * model + f)[None, :]
        h = tl.maximum(h, 0.0).to(xt.dtype)
        z = tl.dot(h, tl.trans(w2t), z, input_precision=IP)
    z += tl.load(b2 + m * model + d)[None, :] + tl.load(u0 + to) * tl.load(scale0 + m * model)
    _norm(z, tl.load(scale + m * model), u, y, inv, to, m * T + t)


@triton.jit
def feed_back(
    g,
    u,
    inv,
    scale,
    x,
    w1,
    b1,
    w2,
    dz,
    dx,
    u1,
    inv1,
    scale1,
    lower,
    parts,
    T,
    F,
    model,
    SLOT,
    SLOTS,
    D: tl.constexpr,
    BT: tl.constexpr,
    BF: tl.constexpr,
    LOWER: tl.constexpr,
    IP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Through the norm and the feed-forward to its input: dz (operands' type), dx = dz + dz w2
    relu' w1, sums for s and b2. With LOWER through the norm before it too: dx is the gradient
    behind that, in the operands' type in `lower`; its sums go to the slot before."""
    m = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.arange(0, D)
    to = m * T * D + t[:, None] * D + d[None, :]
    z = _norm_back(
        tl.load(g + to),
        u + to,
        inv + m * T + t,
        scale + m * model,
        parts + (m * SLOTS + SLOT) * tl.num_programs(0) * 2 * D,
        D,
    )
    xt = tl.load(x + to)
    zt = z.to(xt.dtype)
    tl.store(dz + to, zt)
    for f0 in tl.range(0, F, BF, num_stages=STAGES):
        f = f0 + tl.arange(0, BF)
        w1t = tl.load(w1 + m * model + f[:, None] * D + d[None, :])
        w2t = tl.load(w2 + m * model + d[:, None] * F + f[None, :])
        h = tl.dot(xt, tl.trans(w1t), input_precision=IP) + tl.load(b1 + m * model + f)[None, :]
        dh = tl.dot(zt, w2t, input_precision=IP)
        dh = tl.where(h > 0.0, dh, 0.0).to(xt.dtype)
        z = tl.dot(dh, w1t, z, input_precision=IP)
    if LOWER:
        sums = parts + (m * SLOTS + SLOT - 1) * tl.num_programs(0) * 2 * D
        z = _norm_back(z, u1 + to, inv1 + m * T + t, scale1 + m * model, sums, D)
        tl.store(lower + to, z.to(xt.dtype))
    tl.store(dx + to, z)


@triton.jit
def feed_weights(
    x, dz, w1, b1, w2, dw1, db1, dw2, T, F, model, unscale,
    D: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, IP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of w1, b1 and w2: a block of hidden units, all tokens."""
    m = tl.program_id(1).to(tl.int64)
    f = tl.program_id(0) * BF + tl.arange(0, BF)
    d = tl.arange(0, D)
    w1t = tl.load(w1 + m * model + f[:, None] * D + d[None, :])
    w2t = tl.load(w2 + m * model + d[:, None] * F + f[None, :])
    b1t = tl.load(b1 + m * model + f)
    g1 = tl.zeros([BF, D], tl.float32)
    g2 = tl.zeros([BF, D], tl.float32)
    gb = tl.zeros([BF], tl.float32)
    for t0 in tl.range(0, T, BT, num_stages=STAGES):
        t = t0 + tl.arange(0, BT)
        at = m * T * D + t[:, None] * D + d[None, :]
        xt = tl.load(x + at)
        zt = tl.load(dz + at)
        h = tl.dot(w1t, tl.trans(xt), input_precision=IP) + b1t[:, None]
        dh = tl.dot(tl.trans(w2t), tl.trans(zt), input_precision=IP)
        dh = tl.where(h > 0.0, dh, 0.0)
        gb += tl.sum(dh, 1)
        g1 = tl.dot(dh.to(xt.dtype), xt, g1, input_precision=IP)
        g2 = tl.dot(tl.maximum(h, 0.0).to(xt.dtype), zt, g2, input_precision=IP)
    tl.store(dw1 + m * model + f[:, None] * D + d[None, :], g1 * unscale)
    tl.store(dw2 + m * model + d[None, :] * F + f[:, None], g2 * unscale)
    tl.store(db1 + m * model + f, gb * unscale)


@triton.jit
def spread(
    g, u, inv, scale, w, dz, dz16, a, parts, T, C, model, SLOT, SLOTS, alpha,
    D: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """Through the norm and the output projection: dz, sums for s and the bias, and a[T, C] = alpha
    dz w[D, C]."""
    m = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.arange(0, D)
    to = m * T * D + t[:, None] * D + d[None, :]
    z = _norm_back(
        tl.load(g + to),
        u + to,
        inv + m * T + t,
        scale + m * model,
        parts + (m * SLOTS + SLOT) * tl.num_programs(0) * 2 * D,
        D,
    )
    tl.store(dz + to, z)
    zt = z.to(dz16.dtype.element_ty)
    tl.store(dz16 + to, zt)
    for c0 in range(0, C, BC):
        c = c0 + tl.arange(0, BC)
        wt = tl.load(w + m * model + d[:, None] * C + c[None, :])
        at = tl.dot(zt, wt, input_precision=IP) * alpha
        tl.store(a + m * T * C + t[:, None] * C + c[None, :], at.to(a.dtype.element_ty))


@triton.jit
def add_pieces(
    parts, bias, scale0, u0, scale, u, x, inv, T, pieces, model, alpha,
    D: tl.constexpr, BT: tl.constexpr, AVERAGE: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """n(s0 u0 + alpha times the sum of the pieces + mean of the bias rows)."""
    m = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    at = t[:, None] * D + tl.arange(0, D)[None, :]
    parts += m * pieces * T * D + at
    z = tl.zeros([BT, D], tl.float32)
    for _ in range(pieces):
        z += tl.load(parts)
        parts += T * D
    to = m * T * D + at
    z = z * alpha + _residual(u0 + to, scale0 + m * model, bias + m * model, D, AVERAGE, FIRST)
    _norm(z, tl.load(scale + m * model), u, x, inv, to, m * T + t)


@triton.jit
def _sum_of(parts, T, blocks, D: tl.constexpr, BT: tl.constexpr, EACH: tl.constexpr):
    """The sum of some tokens' gradient over blocks, EACH of them on their way at once. There a
    lane's 16 numbers of a row stand together, two of each eight columns (encoder_attention_cuda.cu,
    encoder_mlp_cuda.cu)."""
    z = tl.zeros([BT, D], tl.float32)
    for _ in range(0, blocks, EACH):
        for i in tl.static_range(EACH):
            z += tl.load(parts + i * T * D).to(tl.float32)
        parts += EACH * T * D
    return tl.reshape(tl.permute(tl.reshape(z, (BT, 4, D // 8, 2)), (0, 2, 1, 3)), (BT, D))


@triton.jit
def add_blocks(parts, dx, T, blocks, D: tl.constexpr, BT: tl.constexpr, EACH: tl.constexpr):
    """dx += the blocks' parts of it."""
    m = tl.program_id(1).to(tl.int64)
    at = (tl.program_id(0) * BT + tl.arange(0, BT))[:, None] * D + tl.arange(0, D)[None, :]
    dx += m * T * D + at
    tl.store(dx, tl.load(dx) + _sum_of(parts + m * blocks * T * D + at, T, blocks, D, BT, EACH))


@triton.jit
def through(
    dx,
    parts,
    u,
    inv,
    scale,
    dz,
    sums,
    T,
    blocks,
    model,
    SLOT,
    SLOTS,
    D: tl.constexpr,
    BT: tl.constexpr,
    EACH: tl.constexpr,
):
    """dx and the blocks' parts of it back through a norm: what is added to behind it (in dx), the
    same in the operands' type, its sums."""
    m = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    at = t[:, None] * D + tl.arange(0, D)[None, :]
    to = m * T * D + at
    g = tl.load(dx + to) + _sum_of(parts + m * blocks * T * D + at, T, blocks, D, BT, EACH)
    z = _norm_back(
        g,
        u + to,
        inv + m * T + t,
        scale + m * model,
        sums + (m * SLOTS + SLOT) * tl.num_programs(0) * 2 * D,
        D,
    )
    tl.store(dx + to, z)
    tl.store(dz + to, z.to(dz.dtype.element_ty))


@triton.jit
def add_shares(parts, grads, size, model, shares, EACH: tl.constexpr, BLOCK: tl.constexpr):
    """grads[model, size] = the sum of parts[share, model, size]; with EACH every BLOCK numbers have
    their own number of shares."""
    m = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    parts += m * size + i
    z = tl.zeros([BLOCK], tl.float32)
    for _ in range(tl.load(shares + tl.program_id(0)) if EACH else shares):
        z += tl.load(parts, mask=i < size, other=0.0)
        parts += tl.num_programs(1) * size
    tl.store(grads + m * model + i, z, mask=i < size)


@triton.jit
def gather(
    a, w, dz, dx, T, C, model, D: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, IP: tl.constexpr
):
    """dx = dz + a[T, C] w[C, D]."""
    m = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.arange(0, D)
    to = m * T * D + t[:, None] * D + d[None, :]
    z = tl.load(dz + to)
    for c0 in range(0, C, BC):
        c = c0 + tl.arange(0, BC)
        at = tl.load(a + m * T * C + t[:, None] * C + c[None, :])
        wt = tl.load(w + m * model + c[:, None] * D + d[None, :])
        z = tl.dot(at, wt, z, input_precision=IP)
    tl.store(dx + to, z)


@triton.jit
def outer(
    a, x, dw, db, T, C, model, unscale, w_c, w_d,
    D: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BIAS: tl.constexpr, IP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dw[c, d] = a[T, C]^T x[T, D], db = the column sums of a: a block of columns, all tokens."""
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
def squared_error(
    u,
    scale,
    target,
    shrink,
    g,
    parts,
    total,
    T,
    N,
    Q,
    model,
    factor,
    SLOT,
    SLOTS,
    D: tl.constexpr,
    W: tl.constexpr,
    BT: tl.constexpr,
):
    """The sum of ||s u - target||^2 over the first W coordinates of the last Q tokens of every N,
    and its gradient times a factor and the model's `shrink`. A model's `total` begins at zero."""
    m = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.arange(0, D)
    to = m * T * D + t[:, None] * D + d[None, :]
    n = t % N
    judged = (n >= N - Q)[:, None] & (d < W)[None, :]
    row = (m * (T // N) + t // N) * Q + n - (N - Q)
    want = tl.load(target + row[:, None] * W + d[None, :], mask=judged, other=0.0)
    e = tl.where(judged, tl.load(u + to) * tl.load(scale + m * model) - want, 0.0)
    tl.store(g + to, e * (factor * tl.load(shrink + m)))
    part = parts + ((m * SLOTS + SLOT) * tl.num_programs(0) + tl.program_id(0)) * 2 * D
    tl.store(part + D, tl.sum(tl.sum(e * e, 1), 0))
    if tl.program_id(0) == 0:
        tl.store(total + m, 0.0)


@triton.jit
def finish(
    parts, grads, losses, total, table, model, unscale, per_loss, SLOTS,
    TILES: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the tiles' sums up, BLOCK at once. Slot 0 is the loss; table[slot] says where the sums of
    dz and of s go, and in how many rows. What goes to the gradients is also added to a model's
    `total`."""
    slot = tl.program_id(0)
    m = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, D)
    part = parts + (m * SLOTS + slot) * TILES * 2 * D
    along = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([D], tl.float32)
    for first in range(0, TILES, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        along += tl.load(part + tile * 2 * D + D, mask=tile < TILES, other=0.0)
        if slot > 0:
            sums += tl.sum(
                tl.load(
                    part + tile[:, None] * 2 * D + d[None, :],
                    mask=(tile < TILES)[:, None],
                    other=0.0,
                ),
                0,
            )
    whole = tl.sum(along, 0)
    if slot == 0:
        tl.store(losses + m, whole * per_loss)
    else:
        at_s = tl.load(table + slot * 3)
        at_b = tl.load(table + slot * 3 + 1)
        rows = tl.load(table + slot * 3 + 2)
        tl.store(grads + m * model + at_s, whole * unscale)
        for i in range(rows):
            tl.store(grads + m * model + at_b + i * D + d, sums * unscale / rows)
        tl.atomic_add(total + m, whole + tl.sum(sums, 0))


@triton.jit
def adamw(
    w,
    mean,
    square,
    grad,
    half,
    rates,
    total,
    undo,
    P,
    M,
    beta1,
    beta2,
    eps,
    HALF: tl.constexpr,
    CHECK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One AdamW update of flat rows; rates holds step size, 1/sqrt(1 - beta2^t) and decay, each
    (M,). `half` gets the operands' copy. With CHECK a model whose `total` is not finite stays as it
    is, and gradients are taken times the model's `undo`."""
    m = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    end = P
    if CHECK:
        # NaN is not below; a mask with a number of each lane would have a thread load one number at
        # a time
        end = tl.where(tl.abs(tl.load(total + m)) < float("inf"), P, 0)
    seen = i < end
    at = m * P + i
    g = tl.load(grad + at, mask=seen, other=0.0)
    if CHECK:
        g = g * tl.load(undo + m)
    a, b, old = (
        tl.load(mean + at, mask=seen, other=0.0),
        tl.load(square + at, mask=seen, other=0.0),
        tl.load(w + at, mask=seen, other=0.0),
    )
    rate, root, keep = tl.load(rates + m), tl.load(rates + M + m), tl.load(rates + 2 * M + m)
    new, a, b = stepped(old, a, b, g, beta1, beta2, rate, root, eps, keep)
    tl.store(mean + at, a, mask=seen)
    tl.store(square + at, b, mask=seen)
    tl.store(w + at, new, mask=seen)
    if HALF:
        tl.store(half + at, new.to(half.dtype.element_ty), mask=seen)


# ---- the whole attention part in one kernel


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
    """One of q, k, v for a block of columns, heads apart, and the weights it took."""
    wt = tl.load(w + c[:, None] * D + d[None, :])
    y = tl.dot(xt, tl.trans(wt), input_precision=IP) + tl.load(b + c)[None, :]
    return _cut(y.to(xt.dtype), S, N, H, R), wt


@triton.jit
def mix(
    x,
    w,
    b,
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
    sharp,
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
    """n(s0 u0 + alpha W_O concat softmax(sharp q k^T) v + mean of the bias rows); q, k, v, scores
    and heads stay on the chip. N tokens are worked on at once, short sequences of OWN tokens side
    by side."""
    S: tl.constexpr = BT // N
    H: tl.constexpr = BC // R
    m = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.arange(0, D)
    to = m * T * D + t[:, None] * D + d[None, :]
    xt = tl.load(x + to)
    w += m * model
    b += m * model
    z = tl.zeros([BT, D], tl.float32)
    for c0 in tl.range(0, C, BC, num_stages=STAGES):
        c = c0 + tl.arange(0, BC)
        q, _ = _heads_of(xt, w, b, c, d, D, S, N, H, R, IP)
        k, _ = _heads_of(xt, w + C * D, b + C, c, d, D, S, N, H, R, IP)
        v, _ = _heads_of(xt, w + 2 * C * D, b + 2 * C, c, d, D, S, N, H, R, IP)
        p = softmax(inner(q, k, S * H, N, R, IP) * (sharp * LOG2E), OWN, N).to(v.dtype)
        o = _join(tl.dot(p, v, input_precision=IP).to(xt.dtype), S, N, H, R)
        wt = tl.load(out + m * model + d[:, None] * C + c[None, :])
        z = tl.dot(o, tl.trans(wt), z, input_precision=IP)
    z = z * alpha + _residual(u0 + to, scale0 + m * model, bias + m * model, D, AVERAGE, FIRST)
    _norm(z, tl.load(scale + m * model), u, y, inv, to, m * T + t)


@triton.jit
def mix_back(
    g,
    un,
    inv,
    scale,
    x,
    w,
    b,
    out,
    dz16,
    dx,
    dqkv,
    o,
    parts,
    T,
    C,
    model,
    SLOT,
    SLOTS,
    alpha,
    sharp,
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
    """Through the norm and the attention part to its input. Writes what the weights' gradients are
    sums of: dz, dq, dk, dv and o."""
    S: tl.constexpr = BT // N
    H: tl.constexpr = BC // R
    m = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.arange(0, D)
    to = m * T * D + t[:, None] * D + d[None, :]
    z = _norm_back(
        tl.load(g + to),
        un + to,
        inv + m * T + t,
        scale + m * model,
        parts + (m * SLOTS + SLOT) * tl.num_programs(0) * 2 * D,
        D,
    )
    xt = tl.load(x + to)
    zt = z.to(xt.dtype)
    tl.store(dz16 + to, zt)
    w += m * model
    b += m * model
    dqkv += m * T * 3 * C + t[:, None] * (3 * C)
    o += m * T * C + t[:, None] * C
    for c0 in tl.range(0, C, BC, num_stages=STAGES):
        c = c0 + tl.arange(0, BC)
        q, wq = _heads_of(xt, w, b, c, d, D, S, N, H, R, IP)
        k, wk = _heads_of(xt, w + C * D, b + C, c, d, D, S, N, H, R, IP)
        v, wv = _heads_of(xt, w + 2 * C * D, b + 2 * C, c, d, D, S, N, H, R, IP)
        wt = tl.load(out + m * model + d[:, None] * C + c[None, :])
        gt = _cut((tl.dot(zt, wt, input_precision=IP) * alpha).to(xt.dtype), S, N, H, R)
        p = softmax(inner(q, k, S * H, N, R, IP) * (sharp * LOG2E), OWN, N)
        dp = inner(gt, v, S * H, N, R, IP)
        ds = (p * (dp - tl.sum(p * dp, 2)[:, :, None]) * sharp).to(xt.dtype)
        p = p.to(xt.dtype)
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
        if not FIRST:
            z = tl.dot(dq, wq, z, input_precision=IP)
            z = tl.dot(dk, wk, z, input_precision=IP)
            z = tl.dot(dv, wv, z, input_precision=IP)
    if not FIRST:
        tl.store(dx + to, z)
