"""Norms, losses and sums of the post-norm encoder's step, for narrow models: n(z) = s z/||z||.

In all kernels of the step (encoder_*_triton.py) the model is in the grid and weights lie in flat
rows, `model` numbers from one row to the next: matrices in the operands' type, everything else
float32. A part of a layer leaves `u` (float32, the direction z/||z||), `y` (s u in the operands'
type, the next part's input) and `inv` (1/||z||); no z is kept.

Who sums what: a sum over tokens that gives a gradient is made in two passes, in a fixed order,
so that the same step gives the same bits. First every program writes the sum over its tile:

tile sums   (models, slots, tiles, 2 D): per tile of tokens the sum of dz, which is the gradient of
            the part's output bias, then the gradient of s in the first of the other D numbers. Slot
            0 is the loss, slot 1 + 2 i and 2 + 2 i are layer i's attention part and feed-forward.
partials    what kernels in CUDA C++ leave of the input's gradient, per column tile (encoder.py)
splits      what they leave of an output or of weights' gradients, where several programs share it

Then `finish`, `norm_backward`, `add_partials`, `sum_outputs` and `sum_splits` add them up.

Axes: T tokens, D model width.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm(z, s, u, y, inv, at, rows):
    """Write n(z): direction, scaled operand, inverse norm."""
    inverse = 1.0 / tl.sqrt(tl.sum(z * z, 1))
    z = z * inverse[:, None]
    tl.store(u + at, z)
    tl.store(y + at, (z * s).to(y.dtype.element_ty))
    tl.store(inv + rows, inverse)


@triton.jit
def norm_back(grad, u, inv, scale, tile_sums, D: tl.constexpr):
    """The gradient of z from that of n(z). Writes this program's tile sums: of dz, and of the
    gradient of s."""
    # n(z) does not change with z's length, so only what is across the direction counts: (g - u
    # (u.g)) s / ||z||.
    direction = tl.load(u)
    along = tl.sum(direction * grad, 1)
    z = (grad - direction * along[:, None]) * (tl.load(inv) * tl.load(scale))[:, None]
    sums = tile_sums + tl.program_id(0) * 2 * D
    tl.store(sums + tl.arange(0, D), tl.sum(z, 0))
    tl.store(sums + D, tl.sum(along, 0))
    return z


@triton.jit
def residual(u0, scale0, bias, D: tl.constexpr, AVERAGE: tl.constexpr, FIRST: tl.constexpr):
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
def sum_outputs(
    partials, bias, scale0, u0, scale, u, y, inv, T, splits, model, alpha,
    D: tl.constexpr, BT: tl.constexpr, AVERAGE: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """n(s0 u0 + alpha times the sum of the splits' partial outputs + mean of the bias rows)."""
    m = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    at = t[:, None] * D + tl.arange(0, D)[None, :]
    # The same numbers of each split, in order.
    partials += m * splits * T * D + at
    z = tl.zeros([BT, D], tl.float32)
    for _ in range(splits):
        z += tl.load(partials)
        partials += T * D
    to = m * T * D + at
    z = z * alpha + residual(u0 + to, scale0 + m * model, bias + m * model, D, AVERAGE, FIRST)
    norm(z, tl.load(scale + m * model), u, y, inv, to, m * T + t)


@triton.jit
def _sum_partials(partials, T, count, D: tl.constexpr, BT: tl.constexpr, EACH: tl.constexpr):
    """The sum of a token tile's `count` partial sums, EACH of them loaded at once. Kernels in CUDA
    C++ write a lane's 16 numbers of a row together, two of each eight columns; here they are put
    back in order."""
    z = tl.zeros([BT, D], tl.float32)
    for _ in range(0, count, EACH):
        for i in tl.static_range(EACH):
            z += tl.load(partials + i * T * D).to(tl.float32)
        partials += EACH * T * D
    return tl.reshape(tl.permute(tl.reshape(z, (BT, 4, D // 8, 2)), (0, 2, 1, 3)), (BT, D))


@triton.jit
def add_partials(partials, dx, T, count, D: tl.constexpr, BT: tl.constexpr, EACH: tl.constexpr):
    """dx += the sum of its partial sums."""
    m = tl.program_id(1).to(tl.int64)
    at = (tl.program_id(0) * BT + tl.arange(0, BT))[:, None] * D + tl.arange(0, D)[None, :]
    dx += m * T * D + at
    tl.store(
        dx, tl.load(dx) + _sum_partials(partials + m * count * T * D + at, T, count, D, BT, EACH)
    )


@triton.jit
def norm_backward(
    dx,
    partials,
    u,
    inv,
    scale,
    dz,
    tile_sums,
    T,
    count,
    model,
    slot,
    slots,
    D: tl.constexpr,
    BT: tl.constexpr,
    EACH: tl.constexpr,
):
    """The gradient of a norm's output, dx + its partial sums, to that of its input: written over dx
    in float32, and to dz in the operands' type; with tile sums."""
    m = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    at = t[:, None] * D + tl.arange(0, D)[None, :]
    to = m * T * D + at
    g = tl.load(dx + to) + _sum_partials(partials + m * count * T * D + at, T, count, D, BT, EACH)
    z = norm_back(
        g,
        u + to,
        inv + m * T + t,
        scale + m * model,
        tile_sums + (m * slots + slot) * tl.num_programs(0) * 2 * D,
        D,
    )
    tl.store(dx + to, z)
    tl.store(dz + to, z.to(dz.dtype.element_ty))


@triton.jit
def sum_splits(partials, grads, size, model, splits, EACH: tl.constexpr, BLOCK: tl.constexpr):
    """grads[model, i] = the sum of partials[split, model, i] over the splits. With EACH `splits` is
    a tensor: how many of them every BLOCK numbers have."""
    m = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    partials += m * size + i
    z = tl.zeros([BLOCK], tl.float32)
    for _ in range(tl.load(splits + tl.program_id(0)) if EACH else splits):
        z += tl.load(partials, mask=i < size, other=0.0)
        partials += tl.num_programs(1) * size
    tl.store(grads + m * model + i, z, mask=i < size)


@triton.jit
def squared_error(
    u,
    scale,
    target,
    loss_scale,
    dx,
    tile_sums,
    total,
    T,
    N,
    Q,
    model,
    factor,
    slot,
    slots,
    D: tl.constexpr,
    W: tl.constexpr,
    BT: tl.constexpr,
):
    """The sum of ||s u - target||^2 over the first W coordinates of the last Q tokens of every N,
    and its gradient times a factor and the model's `loss_scale`. `total` begins at zero."""
    m = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.arange(0, D)
    to = m * T * D + t[:, None] * D + d[None, :]
    # Only the last Q tokens of a sequence have answers; row counts answers over the batch.
    n = t % N
    answers = (n >= N - Q)[:, None] & (d < W)[None, :]
    row = (m * (T // N) + t // N) * Q + n - (N - Q)
    want = tl.load(target + row[:, None] * W + d[None, :], mask=answers, other=0.0)
    # The error s u - target, its gradient into dx, and its square into this tile's sum, where the
    # gradient of s would be.
    e = tl.where(answers, tl.load(u + to) * tl.load(scale + m * model) - want, 0.0)
    tl.store(dx + to, e * (factor * tl.load(loss_scale + m)))
    sums = tile_sums + ((m * slots + slot) * tl.num_programs(0) + tl.program_id(0)) * 2 * D
    tl.store(sums + D, tl.sum(tl.sum(e * e, 1), 0))
    if tl.program_id(0) == 0:
        tl.store(total + m, 0.0)


@triton.jit
def finish(
    tile_sums, grads, losses, total, table, model, unscale, per_loss, slots,
    TILES: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the tile sums up, BLOCK tiles at once. Slot 0 is the loss; table[slot] says where the
    sums of dz and of s go, and in how many rows. What goes to the gradients is also added to a
    model's `total`, only to see whether it is finite: the order of that sum is not fixed."""
    slot = tl.program_id(0)
    m = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, D)
    # One program per slot and model goes through all tiles, so the order of the sum is fixed.
    start = tile_sums + (m * slots + slot) * TILES * 2 * D
    along = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([D], tl.float32)
    for first in range(0, TILES, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        along += tl.load(start + tile * 2 * D + D, mask=tile < TILES, other=0.0)
        if slot > 0:
            sums += tl.sum(
                tl.load(
                    start + tile[:, None] * 2 * D + d[None, :],
                    mask=(tile < TILES)[:, None],
                    other=0.0,
                ),
                0,
            )
    # Where the sums go: the loss, or the gradients of s and of the bias rows, which share the sum
    # of dz.
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
