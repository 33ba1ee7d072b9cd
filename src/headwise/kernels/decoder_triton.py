"""The pre-norm block around the heads in Triton, for narrow models: x <- x + A(n(x)), x <- x + W_2
act(W_1 n(x)), n a layer norm.

The model is in every grid and weights lie in flat rows, `model` numbers from one row to the next:
matrices in the operands' type, norms and biases in float32. The residual x is float32, its normed
copy h has the operands' type. Widths need not be powers of two: D numbers are padded to BD on the
chip. The hidden layer never leaves the chip.

Who sums what: weights' gradients are sums over tokens, cut into SPLIT token splits so that few
models fill a card. Each split has partial sums of the flat rows, `apart` numbers from the next
one's, which the caller adds up. Gradients of norms and biases are tile sums, six rows of BD numbers
per layer and tile of tokens (`slot` of `slots` layers): of the second norm's gain and shift, the
feed-forward's and the attention's output bias, the first norm's gain and shift.

Axes: T tokens, C inner width of attention, D model width, F hidden width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headwise.kernels.shared_memory_triton import FEWER_LOADS, FEWER_STAGES, gives_way, smaller

EPS: tl.constexpr = tl.constexpr(1e-6)


@triton.jit
def _act(z, GELU: tl.constexpr):
    if GELU:
        return 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    else:
        return tl.maximum(z, 0.0)


@triton.jit
def _slope(z, GELU: tl.constexpr):
    if GELU:
        return (
            0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
            + z * tl.exp(-0.5 * z * z) * 0.3989422804014327
        )
    else:
        return tl.where(z > 0.0, 1.0, 0.0)


@triton.jit
def normalized(x, some, D: tl.constexpr):
    """(x - mean)/std of each row, zero in the padding, and 1/std."""
    # The padding must stay zero, or it would count in the variance.
    x = tl.where(some, x - (tl.sum(x, 1) / D)[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / D + EPS)
    return x * inverse[:, None], inverse


@triton.jit
def _normed(x, gain, shift, h, wide, D: tl.constexpr):
    """n(x), also written to h."""
    some = wide[None, :]
    hat, _ = normalized(x, some, D)
    g = tl.load(gain, mask=wide, other=0.0)
    s = tl.load(shift, mask=wide, other=0.0)
    out = (hat * g[None, :] + s[None, :]).to(h.dtype.element_ty)
    tl.store(h, out, mask=some)
    return out


@triton.jit
def _hidden(up, up_bias, down, f, d, wide, F, D: tl.constexpr):
    """Both matrices of the feed-forward and the first one's bias for some hidden units; zeros
    beyond the last."""
    # W_1 [BF, BD] and W_2 [BD, BF] of the block.
    there = f < F
    w1 = tl.load(up + f[:, None] * D + d[None, :], mask=there[:, None] & wide[None, :], other=0.0)
    w2 = tl.load(down + d[:, None] * F + f[None, :], mask=wide[:, None] & there[None, :], other=0.0)
    return w1, w2, tl.load(up_bias + f, mask=there, other=0.0)


@triton.jit
def norm_gradient(hat, inverse, dh, gain, some, D: tl.constexpr):
    """The gradient of a norm's input from that of its output."""
    # The norm removes mean and length, so its gradient has no part along either: subtract its mean,
    # and its part along hat.
    g = dh * gain[None, :]
    g = g - (tl.sum(g, 1) / D)[:, None] - hat * (tl.sum(g * hat, 1) / D)[:, None]
    return tl.where(some, g * inverse[:, None], 0.0)


@gives_way(smaller(FEWER_STAGES, "BC", 32, 16))
@triton.jit
def project(
    x,
    gain,
    shift,
    w,
    b,
    h,
    y,
    T,
    C,
    model,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    IP: tl.constexpr,
):
    """h = n(x), y[T, C] = h w[C, D]^T + b."""
    # The model, the tile's tokens, and their place in (models, T, D).
    m = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.arange(0, BD)
    wide = d < D
    some = wide[None, :]
    at = (m * T + t)[:, None] * D + d[None, :]
    ht = _normed(
        tl.load(x + at, mask=some, other=0.0),
        gain + m * model + d,
        shift + m * model + d,
        h + at,
        wide,
        D,
    )
    # The normed tile stays on the chip while columns of W go by.
    for first in range(0, C, BC):
        c = first + tl.arange(0, BC)
        live = c < C
        wt = tl.load(
            w + m * model + c[:, None] * D + d[None, :],
            mask=live[:, None] & wide[None, :],
            other=0.0,
        )
        yt = (
            tl.dot(ht, tl.trans(wt), input_precision=IP)
            + tl.load(b + m * model + c, mask=live, other=0.0)[None, :]
        )
        tl.store(
            y + (m * T + t)[:, None] * C + c[None, :], yt.to(y.dtype.element_ty), mask=live[None, :]
        )


@triton.jit
def feed(
    o,
    out,
    out_bias,
    x,
    gain,
    shift,
    up,
    up_bias,
    down,
    down_bias,
    x1,
    h,
    x2,
    T,
    C,
    F,
    model,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    BF: tl.constexpr,
    GELU: tl.constexpr,
    IP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """x1 = x + o out^T + bias, h = n(x1), x2 = x1 + act(h up^T + bias) down^T + bias."""
    # The model and the tile's tokens; `row` is where the model's weights begin.
    m = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.arange(0, BD)
    wide = d < D
    some = wide[None, :]
    at = (m * T + t)[:, None] * D + d[None, :]
    row = m * model
    # x1 = x + o W_O^T + bias, summed over blocks of C columns.
    xt = (
        tl.load(x + at, mask=some, other=0.0)
        + tl.load(out_bias + row + d, mask=wide, other=0.0)[None, :]
    )
    for first in range(0, C, BC):
        c = first + tl.arange(0, BC)
        live = c < C
        ot = tl.load(o + (m * T + t)[:, None] * C + c[None, :], mask=live[None, :], other=0.0)
        wt = tl.load(
            out + row + d[:, None] * C + c[None, :], mask=wide[:, None] & live[None, :], other=0.0
        )
        xt = tl.dot(ot, tl.trans(wt), xt, input_precision=IP)
    tl.store(x1 + at, xt, mask=some)
    # n(x1) goes to memory for the backward pass, and stays here for the feed-forward.
    ht = _normed(xt, gain + row + d, shift + row + d, h + at, wide, D)
    xt += tl.load(down_bias + row + d, mask=wide, other=0.0)[None, :]
    # x1 keeps growing: a block of hidden units is made, activated, and added through W_2. Nothing
    # of the hidden layer is written.
    for first in tl.range(0, F, BF, num_stages=STAGES):
        w1, w2, bias = _hidden(
            up + row, up_bias + row, down + row, first + tl.arange(0, BF), d, wide, F, D
        )
        z = tl.dot(ht, tl.trans(w1), input_precision=IP) + bias[None, :]
        xt = tl.dot(_act(z, GELU).to(ht.dtype), tl.trans(w2), xt, input_precision=IP)
    tl.store(x2 + at, xt, mask=some)


@gives_way(smaller(smaller(FEWER_LOADS, "BF", 16), "BC", 32, 16))
@triton.jit
def feed_back(
    dx2,
    x1,
    h,
    gain,
    up,
    up_bias,
    down,
    out,
    dx1,
    do,
    tile_sums,
    T,
    C,
    F,
    model,
    slot,
    slots,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    BF: tl.constexpr,
    GELU: tl.constexpr,
    IP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Through the feed-forward: dx1 from dx2, and do = dx1 out. Tile sums of dh hat, dh, dx2 and
    dx1."""
    m = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.arange(0, BD)
    wide = d < D
    some = wide[None, :]
    at = (m * T + t)[:, None] * D + d[None, :]
    row = m * model
    # dx2 is the gradient of x1 too, through the skip.
    g2 = tl.load(dx2 + at, mask=some, other=0.0)
    ht = tl.load(h + at, mask=some, other=0.0)
    gt = g2.to(ht.dtype)
    # Hidden units are made again, block by block: dz = dx2 W_2 act'(z), dh = dz W_1.
    dh = tl.zeros([BT, BD], tl.float32)
    for first in tl.range(0, F, BF, num_stages=STAGES):
        w1, w2, bias = _hidden(
            up + row, up_bias + row, down + row, first + tl.arange(0, BF), d, wide, F, D
        )
        z = tl.dot(ht, tl.trans(w1), input_precision=IP) + bias[None, :]
        dz = tl.dot(gt, w2, input_precision=IP) * _slope(z, GELU)
        dh = tl.dot(dz.to(ht.dtype), w1, dh, input_precision=IP)
    # dx1 = dx2 + the norm's part.
    hat, inverse = normalized(tl.load(x1 + at, mask=some, other=0.0), some, D)
    g1 = g2 + norm_gradient(
        hat, inverse, dh, tl.load(gain + row + d, mask=wide, other=0.0), some, D
    )
    tl.store(dx1 + at, g1, mask=some)
    # Sums over this tile's tokens, one set per tile; the caller adds tiles up.
    sums = tile_sums + ((m * slots + slot) * tl.num_programs(0) + tl.program_id(0)) * 6 * BD + d
    tl.store(sums, tl.sum(dh * hat, 0))
    tl.store(sums + BD, tl.sum(dh, 0))
    tl.store(sums + 2 * BD, tl.sum(g2, 0))
    tl.store(sums + 3 * BD, tl.sum(g1, 0))
    # do = dx1 W_O, for the attention's backward pass.
    g1 = g1.to(ht.dtype)
    for first in range(0, C, BC):
        c = first + tl.arange(0, BC)
        live = c < C
        wt = tl.load(
            out + row + d[:, None] * C + c[None, :], mask=wide[:, None] & live[None, :], other=0.0
        )
        dot = tl.dot(g1, wt, input_precision=IP)
        tl.store(
            do + (m * T + t)[:, None] * C + c[None, :],
            dot.to(do.dtype.element_ty),
            mask=live[None, :],
        )


@triton.jit
def project_back(
    dy, w, x, gain, dx1, dx, tile_sums, T, C, model, slot, slots,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """Through the projection and its norm: dx = dx1 + dn(dy w). Tile sums of dh hat and dh."""
    m = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.arange(0, BD)
    wide = d < D
    some = wide[None, :]
    at = (m * T + t)[:, None] * D + d[None, :]
    # dh = dy W, over all columns of queries, keys and values.
    dh = tl.zeros([BT, BD], tl.float32)
    for first in range(0, C, BC):
        c = first + tl.arange(0, BC)
        live = c < C
        yt = tl.load(dy + (m * T + t)[:, None] * C + c[None, :], mask=live[None, :], other=0.0)
        wt = tl.load(
            w + m * model + c[:, None] * D + d[None, :],
            mask=live[:, None] & wide[None, :],
            other=0.0,
        )
        dh = tl.dot(yt, wt, dh, input_precision=IP)
    # dx = dx1 + the norm's part, with the norm's tile sums.
    hat, inverse = normalized(tl.load(x + at, mask=some, other=0.0), some, D)
    g = norm_gradient(
        hat, inverse, dh, tl.load(gain + m * model + d, mask=wide, other=0.0), some, D
    )
    tl.store(dx + at, tl.load(dx1 + at, mask=some, other=0.0) + g, mask=some)
    sums = tile_sums + ((m * slots + slot) * tl.num_programs(0) + tl.program_id(0)) * 6 * BD + d
    tl.store(sums + 4 * BD, tl.sum(dh * hat, 0))
    tl.store(sums + 5 * BD, tl.sum(dh, 0))


@gives_way(smaller(smaller(FEWER_LOADS, "BF", 32, 16), "BT", 32, 16))
@triton.jit
def feed_weights(
    h,
    dx2,
    up,
    up_bias,
    down,
    d_up,
    d_up_bias,
    d_down,
    T,
    F,
    model,
    apart,
    undo,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    BF: tl.constexpr,
    SPLIT: tl.constexpr,
    GELU: tl.constexpr,
    IP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of both matrices of the feed-forward and of the first one's bias, for a block of
    hidden units and a token split."""
    # The model, the token split, and the block of hidden units.
    m = tl.program_id(2).to(tl.int64)
    split = tl.program_id(1)
    f = tl.program_id(0) * BF + tl.arange(0, BF)
    d = tl.arange(0, BD)
    wide = d < D
    row = m * model
    there = f < F
    # The block's weights stay on the chip; every SPLIT-th tile of tokens goes by.
    w1, w2, bias = _hidden(up + row, up_bias + row, down + row, f, d, wide, F, D)
    grad1 = tl.zeros([BF, BD], tl.float32)
    grad2 = tl.zeros([BF, BD], tl.float32)
    grad_bias = tl.zeros([BF], tl.float32)
    for tile in tl.range(split, T // BT, SPLIT, num_stages=STAGES):
        t = tile * BT + tl.arange(0, BT)
        at = (m * T + t)[:, None] * D + d[None, :]
        ht = tl.load(h + at, mask=wide[None, :], other=0.0)
        gt = tl.load(dx2 + at, mask=wide[None, :], other=0.0).to(ht.dtype)
        # The hidden units of the tile again, and dz = dx2 W_2 act'(z).
        z = tl.dot(ht, tl.trans(w1), input_precision=IP) + bias[None, :]
        dz = tl.dot(gt, w2, input_precision=IP) * _slope(z, GELU)
        grad_bias += tl.sum(dz, 0)
        grad1 = tl.dot(tl.trans(dz.to(ht.dtype)), ht, grad1, input_precision=IP)
        grad2 = tl.dot(tl.trans(_act(z, GELU).to(ht.dtype)), gt, grad2, input_precision=IP)
    # The split's own copy of the flat rows; d_down is stored transposed.
    to = split.to(tl.int64) * apart + row
    seen = there[:, None] & wide[None, :]
    tl.store(d_up + to + f[:, None] * D + d[None, :], grad1 * undo, mask=seen)
    tl.store(d_up_bias + to + f, grad_bias * undo, mask=there)
    tl.store(d_down + to + d[None, :] * F + f[:, None], grad2 * undo, mask=seen)


@triton.jit
def outer(
    a,
    b,
    grad,
    grad_bias,
    T,
    C,
    model,
    apart,
    undo,
    c_step,
    d_step,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    IP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """grad[c, d] = sum over a split of the tokens of a[t, c] b[t, d], and the bias: the sum of a[t,
    c]."""
    m = tl.program_id(2).to(tl.int64)
    split = tl.program_id(1)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    d = tl.arange(0, BD)
    live = c < C
    wide = d < D
    total = tl.zeros([BC, BD], tl.float32)
    total_bias = tl.zeros([BC], tl.float32)
    # Every SPLIT-th tile of tokens; `a` decides the operands' type.
    for tile in tl.range(split, T // BT, SPLIT, num_stages=STAGES):
        t = tile * BT + tl.arange(0, BT)
        at = tl.load(a + (m * T + t)[:, None] * C + c[None, :], mask=live[None, :], other=0.0)
        bt = tl.load(b + (m * T + t)[:, None] * D + d[None, :], mask=wide[None, :], other=0.0).to(
            at.dtype
        )
        total = tl.dot(tl.trans(at), bt, total, input_precision=IP)
        if BIAS:
            total_bias += tl.sum(at.to(tl.float32), 0)
    # `c_step` and `d_step` say which axis of the gradient is c.
    to = split.to(tl.int64) * apart + m * model
    tl.store(
        grad + to + c[:, None] * c_step + d[None, :] * d_step,
        total * undo,
        mask=live[:, None] & wide[None, :],
    )
    if BIAS:
        tl.store(grad_bias + to + c, total_bias * undo, mask=live)
