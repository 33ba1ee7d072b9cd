"""The Jacobian of one attention layer, and its condition number, in float64.

J is the Jacobian of one layer's output for one input with respect to the projections W_Q, W_K, W_V
(no biases, no norms, not W_O); rows are outputs, columns weights. There are two outputs, and they
behave differently:

before W_O   A itself. A head's output depends on its own weights alone, so J is block-diagonal, one
             block per head: kappa(J) = max_h s_1(J_h) / min_h s_k(J_h), which more heads cannot
             lower below the worst head's.
after W_O    A W_O: the blocks stand side by side, mixed by W_O. With h d < D it has not full row
             rank: kappa is infinite.

Queries times G and keys times G^-T score alike, so at least h d^2 directions of the weights change
nothing. kappa is infinite too where the outputs outnumber the other directions (N above about 3 D).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call, jacrev, vjp

from headwise.errors import UsageError
from headwise.model.attention import Attention
from headwise.model.linear import LINEARS
from headwise.shape import beyond_plain
from headwise.theory.conditioning import check_layer_input, side_by_side
from headwise.theory.spectrum import EPS, TINY

MOST_BYTES = 4 << 30  # of a Jacobian that is written out


# ---- written out


def jacobian(layer: Attention, tokens: Tensor, *, after: bool) -> Tensor:
    """d(output)/d(W_Q, W_K, W_V) of a layer for one input (tokens, dim), before or `after` the
    output projection.

    (N h d or N D, number of weights). Rows run over tokens, then heads, then their width; columns
    over the layer's weight as it is stored: the heads' queries, then keys, then values, each (head,
    width, dim). Exact, so for small sizes; else `jacobian_extremes`.
    """
    output, weights = _output_of_weights(layer, tokens, after)
    s = layer.shape
    rows = len(tokens) * (s.dim if after else s.num_heads * s.v_head_dim)
    if 8 * rows * len(weights) > MOST_BYTES:
        raise UsageError(
            f"a Jacobian of {rows:,} x {len(weights):,} does not fit {MOST_BYTES >> 30} GiB; "
            "jacobian_extremes needs no matrix"
        )
    return jacrev(output)(weights)


def head_blocks(layer: Attention, J: Tensor) -> tuple[Tensor, float]:
    """The heads' blocks of a Jacobian before W_O, (heads, N d, a head's weights), and the largest
    entry outside them (exactly 0)."""
    s = layer.shape
    if s.latent or s.num_kv_heads != s.num_heads:
        raise UsageError("heads that share keys or values have no blocks of their own")
    if special := beyond_plain(s):
        raise UsageError(f"blocks by head need plain heads, this layer has {special}")
    # Rows run over (token, head, width), columns over (query, key or value; head; width, dim). Each
    # row and each column belongs to one head.
    H, widths = s.num_heads, (s.head_dim, s.head_dim, s.v_head_dim)
    if J.ndim != 2 or J.shape[0] % (H * s.v_head_dim) or J.shape[1] != H * s.dim * sum(widths):
        raise UsageError(
            f"a Jacobian before W_O of {H} heads is needed, got shape {tuple(J.shape)}"
        )
    whose_row = (
        torch.arange(H, device=J.device)
        .repeat_interleave(s.v_head_dim)
        .repeat(J.shape[0] // (H * s.v_head_dim))
    )
    whose_column = torch.cat(
        [torch.arange(H, device=J.device).repeat_interleave(width * s.dim) for width in widths]
    )
    blocks = torch.stack([J[whose_row == head][:, whose_column == head] for head in range(H)])
    # A head's output does not depend on another head's weights, so everything off the blocks is 0.
    outside = J.masked_fill(whose_row.unsqueeze(1) == whose_column, 0.0)
    return blocks, outside.abs().max().item()


def _output_of_weights(
    layer: Attention, tokens: Tensor, after: bool
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The layer's flat output (tokens outermost) as a function of all its projections' weights in
    one vector, and that vector."""
    check_layer_input(layer, tokens)
    # W_O is not among the weights: J is with respect to W_Q, W_K and W_V.
    exact = copy.deepcopy(layer).double().requires_grad_(False)
    x = tokens.detach().double().unsqueeze(0)
    weights = {
        f"{name}.weight": module.weight
        for name, module in exact.named_children()
        if isinstance(module, LINEARS) and name != "out"
    }
    sizes = [weight.numel() for weight in weights.values()]

    def output(flat: Tensor) -> Tensor:
        given = {
            name: values.view_as(weight)
            for (name, weight), values in zip(weights.items(), flat.split(sizes), strict=True)
        }
        y, kept = functional_call(exact, given, (x,), {"keep": True})
        return (y if after else side_by_side(kept["heads"])).flatten()

    return output, torch.cat([weight.flatten() for weight in weights.values()])


# ---- extreme singular values of what is too large to write out


@dataclass(frozen=True)
class Extremes:
    """s_1 and s_k from below and from above: `kappa` never exceeds the true one, up to rounding,
    and equals it once converged."""

    largest: float
    smallest: float
    # ||J J^T u - s^2 u|| / s^2 of the smallest: s^2 is this near to an eigenvalue, though one below
    # may be overlooked
    residual: float
    steps: int
    converged: bool

    @property
    def kappa(self) -> float:
        """s_1 / s_k, infinite where s_k is rounding."""
        return self.largest / self.smallest if self.smallest > 0 else math.inf


Product = Callable[[Tensor], Tensor]


def extreme_singular_values(
    product: Product,
    transposed: Product,
    rows: int,
    columns: int,
    generator: torch.Generator,
    *,
    steps: int = 500,
    tolerance: float = 1e-8,
) -> Extremes:
    """The largest and the smallest of the min(rows, columns) singular values of J, from products J
    v and J^T u alone.

    Golub-Kahan bidiagonalisation from a random vector of the smaller side, whose basis is
    orthogonalised anew against all of it at every step (twice); the other side's needs no memory.
    After as many steps as the smaller side has dimensions it is exact.
    """
    if min(rows, columns, steps) < 1 or not 0 < tolerance < 1:
        raise UsageError(
            f"sizes and steps must be positive and tolerance in (0, 1), got {rows}, {columns}, "
            f"{steps}, {tolerance}"
        )
    # The iteration runs on the smaller side; J and J^T have the same singular values.
    if columns < rows:
        product, transposed = transposed, product
    least, floor = min(rows, columns), EPS * max(rows, columns)
    basis = torch.empty(min(steps, least), least, dtype=torch.float64, device=generator.device)
    alphas, betas = torch.zeros(2, len(basis), dtype=torch.float64)
    device = generator.device
    u = torch.randn(least, dtype=torch.float64, generator=generator, device=device)
    v, beta = None, 0.0
    found = Extremes(0.0, 0.0, math.inf, 0, False)
    # Golub-Kahan: J^T u_i = beta_(i-1) v_(i-1) + alpha_i v_i and J v_i = alpha_i u_i + beta_i
    # u_(i+1). The alphas and betas are a bidiagonal matrix whose extreme singular values tend to
    # those of J.
    for step in range(len(basis)):
        basis[step] = u / u.norm()
        w = transposed(basis[step])
        w = w if v is None else w - beta * v
        alphas[step] = alpha = w.norm().item()
        v = w / alpha if alpha > 0 else w
        u = product(v) - alpha * basis[step]
        # Rounding makes u drift back into the basis. One pass removes most of it, the second what
        # the first left.
        for _ in range(2):
            u = u - basis[: step + 1].T @ (basis[: step + 1] @ u)
        betas[step] = beta = u.norm().item()
        # An alpha or beta of zero ends the recurrence: the basis spans an invariant subspace.
        last = step + 1 == len(basis) or min(alpha, beta) <= floor * alphas.max().item()
        if last or step > 1.1 * found.steps + 10:  # seldom, since it costs the cube of the steps
            found = _ritz(
                alphas[: step + 1], betas[: step + 1], step + 1 == least, floor, tolerance
            )
        if last or found.converged:
            break
    return found


def _ritz(
    alphas: Tensor, betas: Tensor, complete: bool, floor: float, tolerance: float
) -> Extremes:
    """Extremes of the bidiagonal matrix: alphas on its diagonal, betas but the last below it."""
    left, s, _ = torch.linalg.svd(torch.diag(alphas) + torch.diag(betas[:-1], -1))
    # ||J J^T u - s^2 u|| of a Ritz vector is beta alpha times the last entry of its coordinates.
    rest = betas[-1] * alphas[-1] * left[-1].abs() / s.square().clamp_min(TINY)
    zero = bool(s[-1] <= floor * s[0])
    residual = 0.0 if complete or zero else rest[-1].item()
    done = complete or max(rest[0].item(), residual) <= tolerance
    return Extremes(s[0].item(), 0.0 if zero else s[-1].item(), residual, len(s), done)


def jacobian_extremes(
    layer: Attention,
    tokens: Tensor,
    generator: torch.Generator,
    *,
    after: bool,
    steps: int = 500,
    tolerance: float = 1e-8,
) -> Extremes:
    """s_1 and s_k of `jacobian(layer, tokens, after=after)` without writing it out, by products
    with it and its transpose."""
    output, weights = _output_of_weights(layer, tokens, after)
    # pull is J^T u by reverse mode. push is the transpose of that linear map, so J v needs no
    # forward mode.
    y, pull, *_ = vjp(output, weights)
    _, push, *_ = vjp(
        lambda u: vjp(output, weights)[1](u)[0], torch.zeros_like(y)
    )  # J^T u is linear in u, so its own transpose is J v
    return extreme_singular_values(
        lambda v: push(v)[0],
        lambda u: pull(u)[0],
        len(y),
        len(weights),
        generator,
        steps=steps,
        tolerance=tolerance,
    )
