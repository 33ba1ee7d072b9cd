"""Condition numbers of attention: of the heads' outputs side by side, and of their Jacobian.
Everything in float64.

A = [A_1, ..., A_h] is (N tokens, h d), the heads' outputs before the output projection W_O;
kappa(A) = s_1/s_k with s_k the smallest of the k = min(N, h d) singular values. "Leaner
Transformers" (arXiv 2505.20802) has a theorem on it for independent Gaussian heads, and in a later
version on the Jacobian. Two kappas with different k are kappas of different things; k is always
told.

The Jacobian J here is that of one layer's output for one input with respect to the projections W_Q,
W_K, W_V (no biases, no norms, not W_O); rows are outputs, columns weights. Its output is one of
two, and they behave differently:
  before W_O   A itself. A head's output depends on its own weights alone, so J is block-diagonal, one block a head:
               kappa(J) = max_h s_1(J_h) / min_h s_k(J_h), which more heads cannot lower below the
               worst head's.
  after W_O    A W_O: the blocks come to stand side by side, mixed by W_O. With h d < D it has not full row rank: kappa is infinite.
Queries times G and keys times G^-T score alike, so at least h d^2 directions of the weights change
nothing; kappa is infinite too where the outputs outnumber the other directions (N above about 3 D).
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
from headwise.model.layers import Linear
from headwise.model.transformer import Decoder, Encoder
from headwise.shape import Shape

EPS = torch.finfo(torch.float64).eps
MOST_BYTES = 4 << 30  # of a Jacobian that is written out
MEASURES = ("largest", "smallest", "kappa", "stable_rank", "effective_rank")


# ---- Gaussian heads


def gaussian_kappa(tokens: int, width: int) -> float:
    """kappa of an N x w matrix of independent Gaussians for large sizes: (sqrt(M) + sqrt(m)) /
    (sqrt(M) - sqrt(m)), M and m the larger and the smaller of N and w = h d. Infinite at N = w,
    where it peaks.

    >>> [round(gaussian_kappa(197, 64 * heads), 2) for heads in (1, 2, 4, 12, 16)]
    [3.65, 9.31, 15.29, 3.05, 2.56]
    """
    _check_sizes(tokens, width)
    least, most = math.sqrt(min(tokens, width)), math.sqrt(max(tokens, width))
    return math.inf if tokens == width else (most + least) / (most - least)


def sampled_gaussian_kappa(
    tokens: int, width: int, draws: int, generator: torch.Generator
) -> Tensor:
    """kappa of each of `draws` drawn matrices, one after another, so that memory does not grow with
    them."""
    _check_sizes(tokens, width)
    if draws < 1:
        raise UsageError(f"draws must be at least 1, got {draws}")
    return torch.stack(
        [spectrum(_normal(tokens, width, generator=generator)).kappa for _ in range(draws)]
    )


def _check_sizes(tokens: int, width: int) -> None:
    for name, value, least in (("tokens", tokens, 2), ("width", width, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UsageError(f"{name} must be a whole number of at least {least}, got {value!r}")


def _normal(*size: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=generator, device=generator.device)


# ---- one matrix, or many


@dataclass(frozen=True)
class Spectrum:
    """What is told of the singular values s_1 >= ... >= s_k; tensors of the matrices' leading axes.

    1 <= stable rank <= effective rank <= rank <= k.
    """

    largest: Tensor
    # s_k, or 0 when it is rounding: below s_1 eps max(sizes), of centred matrices ||A||_F of before
    # instead of s_1
    smallest: Tensor
    kappa: Tensor  # s_1 / s_k, infinite when s_k is 0
    stable_rank: Tensor  # ||A||_F^2 / s_1^2
    effective_rank: Tensor  # exp(-sum p log p), p = s / sum s
    rank: Tensor  # how many are more than rounding
    k: int


def spectrum(A: Tensor, *, centred: bool = False) -> Spectrum:
    """The spectrum of matrices (..., tokens, width); `centred` removes the mean token first, and
    then k = min(tokens - 1, width).

    >>> s = spectrum(torch.diag(torch.tensor([4.0, 2.0, 1.0])))
    >>> s.kappa.item(), s.stable_rank.item(), s.k
    (4.0, 1.3125, 3)
    """
    _check_matrix(A)
    A = A.detach().double()
    norm = A.norm(dim=(-2, -1))
    if centred:
        A = A - A.mean(-2, keepdim=True)
    k = min(A.shape[-2] - centred, A.shape[-1])
    s = torch.linalg.svdvals(A)[..., :k]
    s = torch.where(
        s > EPS * max(A.shape[-2:]) * (norm if centred else s[..., 0]).unsqueeze(-1), s, 0.0
    )
    share = s / s.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    top = s[..., 0].clamp_min(torch.finfo(torch.float64).tiny)
    rank = (s > 0).sum(-1)
    return Spectrum(
        largest=s[..., 0],
        smallest=s[..., -1],
        kappa=torch.where(s[..., -1] > 0, s[..., 0] / s[..., -1], math.inf),
        stable_rank=(s / top.unsqueeze(-1)).square().sum(-1),
        effective_rank=torch.where(rank > 0, (-torch.xlogy(share, share).sum(-1)).exp(), 0.0),
        rank=rank,
        k=k,
    )


def _check_matrix(A: Tensor) -> None:
    if A.ndim < 2 or A.shape[-1] < 1:
        raise UsageError(f"a matrix (..., tokens, width) is needed, got shape {tuple(A.shape)}")
    if A.shape[-2] < 2:
        raise UsageError(f"tokens must be at least 2, got {A.shape[-2]}")
    if A.is_complex() or not A.isfinite().all():
        raise UsageError(
            "a matrix of finite real numbers is needed, got "
            + ("complex ones" if A.is_complex() else "NaN or infinity")
        )


def geometric_mean(values: Tensor) -> float:
    """exp of the mean logarithm."""
    return values.double().log().mean().exp().item()


# ---- the outputs of heads


def side_by_side(heads_BHNV: Tensor) -> Tensor:
    """[A_1, ..., A_h]: (..., heads, tokens, width) -> (..., tokens, heads * width)."""
    return heads_BHNV.transpose(-3, -2).flatten(-2)


def head_outputs(model: Encoder | Decoder, inputs: Tensor) -> list[Tensor]:
    """A of every layer for every input, before W_O, (inputs, tokens, heads * value width) each;
    computed in float64 whatever the model's precision, one input at a time. `inputs` is (inputs,
    tokens, width), or (inputs, tokens) of whole numbers."""
    if model.models is not None:
        raise UsageError(f"one model at a time can be measured, got a stack of {model.models}")
    _check_inputs(model, inputs)
    exact = copy.deepcopy(model).double()
    found: list[list[Tensor]] = [[] for _ in exact.blocks]
    with torch.no_grad():
        for one in inputs.double() if inputs.is_floating_point() else inputs:
            h = exact.embed(one.unsqueeze(0))
            for layer, block in zip(found, exact.blocks, strict=True):
                h, kept = block(h, keep=True)
                layer.append(side_by_side(kept["heads"]))
    return [torch.cat(layer) for layer in found]


def _check_inputs(model: Encoder | Decoder, inputs: Tensor) -> None:
    s = model.shape
    tail = () if s.vocab_size else (s.input_dim or s.dim - s.position_dim,)
    if (
        inputs.ndim != 2 + len(tail)
        or inputs.shape[2:] != tail
        or 0 in inputs.shape
        or inputs.is_floating_point() == bool(s.vocab_size)
    ):
        form = ", ".join(("inputs", "tokens", *map(str, tail))) + (
            ") of whole" if s.vocab_size else ") of real"
        )
        raise UsageError(
            f"the model takes ({form} numbers, got {tuple(inputs.shape)} of "
            f"{str(inputs.dtype).removeprefix('torch.')}"
        )


def attention_spectra(
    model: Encoder | Decoder, inputs: Tensor
) -> list[dict[str, float | int | str]]:
    """A row a layer, then one of their (arithmetic) means, "layer": "mean": geometric means over
    the inputs of s_1, s_k, kappa, stable and effective rank of A, and of kappa once the mean token
    is removed (k_centred = min(N - 1, h d))."""
    rows: list[dict[str, float | int | str]] = []
    for i, A in enumerate(head_outputs(model, inputs)):
        plain, centred = spectrum(A), spectrum(A, centred=True)
        values = {name: geometric_mean(getattr(plain, name)) for name in MEASURES}
        sizes = {"inputs": A.shape[0], "tokens": A.shape[1], "k": plain.k, "k_centred": centred.k}
        rows.append({"layer": i, **sizes, **values, "kappa_centred": geometric_mean(centred.kappa)})
    means = {
        name: sum(float(row[name]) for row in rows) / len(rows)
        for name in (*MEASURES, "kappa_centred")
    }
    return [*rows, {**rows[0], "layer": "mean", **means}]


# ---- a layer with random weights


def random_tokens(
    tokens: int, dim: int, generator: torch.Generator, normalised: bool = True
) -> Tensor:
    """Independent Gaussian tokens, (tokens, dim); `normalised` to mean 0 and variance 1 each, as a
    layer norm leaves them."""
    _check_sizes(tokens, dim)
    x = _normal(tokens, dim, generator=generator)
    return (
        (x - x.mean(-1, keepdim=True)) / x.std(-1, correction=0, keepdim=True) if normalised else x
    )


def random_attention(
    dim: int, heads: int, head_dim: int, std: float, generator: torch.Generator
) -> Attention:
    """A layer whose weights, W_O's too, are N(0, std^2)."""
    shape = Shape(dim=dim, depth=1, num_heads=heads, head_dim=head_dim)
    if not 0 < std < math.inf:
        raise UsageError(f"std must be positive, got {std!r}")
    with torch.random.fork_rng(devices=[]):  # what a module starts with is drawn over
        layer = Attention(shape).double().to(generator.device)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(0.0, std, generator=generator)
    return layer


def layer_outputs(layer: Attention, tokens: Tensor) -> Tensor:
    """A of one layer for one input (tokens, dim), in float64."""
    output, at = _output(layer, tokens, after=False)
    return output(at).view(tokens.shape[0], -1)


# ---- the Jacobian


def _output(
    layer: Attention, tokens: Tensor, after: bool
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The layer's flat output (tokens outermost) as a function of all its projections' weights in
    one vector, and that vector."""
    if tokens.ndim != 2 or tokens.shape[-1] != layer.shape.dim:
        raise UsageError(
            f"one input of (tokens, dim {layer.shape.dim}) is needed, got shape "
            f"{tuple(tokens.shape)}"
        )
    _check_matrix(tokens)
    if layer.out.weight.ndim != 2:
        raise UsageError(
            f"one model at a time can be measured, got a stack of {len(layer.out.weight)}"
        )
    exact, x = (
        copy.deepcopy(layer).double().requires_grad_(False),
        tokens.detach().double().unsqueeze(0),
    )
    parts = {
        f"{name}.weight": part.weight
        for name, part in exact.named_children()
        if isinstance(part, Linear) and name != "out"
    }

    def output(flat: Tensor) -> Tensor:
        pieces = flat.split([part.numel() for part in parts.values()])
        weights = {
            name: piece.view_as(part)
            for (name, part), piece in zip(parts.items(), pieces, strict=True)
        }
        y, kept = functional_call(exact, weights, (x,), {"keep": True})
        return (y if after else side_by_side(kept["heads"])).flatten()

    return output, torch.cat([part.flatten() for part in parts.values()])


def jacobian(layer: Attention, tokens: Tensor, *, after: bool) -> Tensor:
    """d(output)/d(W_Q, W_K, W_V) of a layer for one input (tokens, dim), before or `after` the
    output projection.

    (N h d or N D, number of weights). Rows run over tokens, then heads, then their width; columns
    over the layer's weight as it is stored: the heads' queries, then keys, then values, each (head,
    width, dim). Exact, so for small sizes; else `jacobian_extremes`.
    """
    output, at = _output(layer, tokens, after)
    s = layer.shape
    rows = len(tokens) * (s.dim if after else s.num_heads * s.v_head_dim)
    if 8 * rows * len(at) > MOST_BYTES:
        raise UsageError(
            f"a Jacobian of {rows:,} x {len(at):,} does not fit {MOST_BYTES >> 30} GiB; "
            "jacobian_extremes needs no matrix"
        )
    return jacrev(output)(at)


def head_blocks(layer: Attention, J: Tensor) -> tuple[Tensor, float]:
    """The heads' blocks of a Jacobian before W_O, (heads, N d, a head's weights), and the largest
    entry outside them (exactly 0)."""
    s = layer.shape
    if s.latent or s.num_kv_heads != s.num_heads:
        raise UsageError("heads that share keys or values have no blocks of their own")
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
    outside = J.masked_fill(whose_row.unsqueeze(1) == whose_column, 0.0)
    return blocks, outside.abs().max().item()


def block_kappa(blocks: Tensor) -> float:
    """kappa of the block-diagonal matrix of these equally large blocks: max_h s_1 / min_h s_k."""
    of = spectrum(blocks)
    least = of.smallest.min().item()
    return of.largest.max().item() / least if least > 0 else math.inf


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
    if columns < rows:
        product, transposed = transposed, product
    least, floor = min(rows, columns), EPS * max(rows, columns)
    basis = torch.empty(min(steps, least), least, dtype=torch.float64, device=generator.device)
    alphas, betas = torch.zeros(2, len(basis), dtype=torch.float64)
    u, v, beta = _normal(least, generator=generator), None, 0.0
    found = Extremes(0.0, 0.0, math.inf, 0, False)
    for step in range(len(basis)):
        basis[step] = u / u.norm()
        w = transposed(basis[step])
        w = w if v is None else w - beta * v
        alphas[step] = alpha = w.norm().item()
        v = w / alpha if alpha > 0 else w
        u = product(v) - alpha * basis[step]
        for _ in range(2):
            u = u - basis[: step + 1].T @ (basis[: step + 1] @ u)
        betas[step] = beta = u.norm().item()
        last = step + 1 == len(basis) or min(alpha, beta) <= floor * alphas.max().item()
        if last or step > 1.1 * found.steps + 10:  # seldom, since it costs the cube of the steps
            found = _ritz(
                alphas[: step + 1], betas[: step + 1], step + 1 == least, floor, tolerance
            )
        if last or found.converged:
            break
    return found


def _ritz(alphas: Tensor, betas: Tensor, whole: bool, floor: float, tolerance: float) -> Extremes:
    """What the bidiagonal matrix tells: alphas on its diagonal, betas but the last below it."""
    left, s, _ = torch.linalg.svd(torch.diag(alphas) + torch.diag(betas[:-1], -1))
    rest = (
        betas[-1]
        * alphas[-1]
        * left[-1].abs()
        / s.square().clamp_min(torch.finfo(torch.float64).tiny)
    )
    zero = bool(s[-1] <= floor * s[0])
    residual = 0.0 if whole or zero else rest[-1].item()
    done = whole or max(rest[0].item(), residual) <= tolerance
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
    output, at = _output(layer, tokens, after)
    y, pull, *_ = vjp(output, at)
    _, push, *_ = vjp(
        lambda u: vjp(output, at)[1](u)[0], torch.zeros_like(y)
    )  # J^T u is linear in u, so its own transpose is J v
    return extreme_singular_values(
        lambda v: push(v)[0],
        lambda u: pull(u)[0],
        len(y),
        len(at),
        generator,
        steps=steps,
        tolerance=tolerance,
    )
