"""How close two results must be: every tolerance of the tests, and how hypothesis is run."""

import torch
from hypothesis import settings

RTOL_ATOL = {
    torch.float64: (1e-10, 1e-10),  # against a closed form or an independent float64 computation
    torch.float32: (1e-5, 1e-6),
    torch.bfloat16: (1e-2, 1e-2),
}
STANDARD_ERRORS = 4.0  # closed form against Monte Carlo
QUADRATURE = 1e-8  # closed form against the midpoint rule of 20000 nodes that the baselines use
KEPT_BYTES = 0.05  # the formula of activation memory against what autograd keeps (asked for: 0.10)


def close(actual, expected, what="", largest=0.0):
    """|actual - expected| <= atol + rtol max|expected|, by the coarser of the two dtypes; NaN and
    inf never pass.

    The relative part is of the largest entry: a sum's rounding error grows with its terms, not with
    what is left of them.
    """
    assert actual.shape == expected.shape, (
        f"{what}: shapes {tuple(actual.shape)} and {tuple(expected.shape)}"
    )
    rtol, atol = max(RTOL_ATOL[actual.dtype], RTOL_ATOL[expected.dtype])
    a, e = actual.detach().double(), expected.detach().double()
    bound = atol + rtol * max(largest, e.abs().max().item())
    error = (a - e).abs().max().item()
    assert error <= bound, f"{what}: off by {error:.3g}, allowed {bound:.3g}"


def close_all(actual, expected, what=""):
    """`close` for the gradients of one pass, all by their largest entry: they are sums of the same
    terms."""
    largest = max(e.abs().max().item() for e in expected)
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        close(a, e, f"{what} [{i}]", largest)


def same(actual, expected, what=""):
    """Bitwise equality: the same code and seed on a CPU."""
    assert actual.shape == expected.shape, (
        f"{what}: shapes {tuple(actual.shape)} and {tuple(expected.shape)}"
    )
    assert torch.equal(actual, expected), (
        f"{what}: bits differ by up to {(actual - expected).abs().max().item():.3g}"
    )


def examples(count):
    """Hypothesis with this many examples, the same ones every time."""
    return settings(max_examples=count, deadline=None, derandomize=True)


def seeded(seed):
    """A CPU generator."""
    return torch.Generator().manual_seed(seed)
