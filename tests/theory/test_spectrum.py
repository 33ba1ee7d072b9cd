"""Condition numbers of matrices: known values from their own draws, closed forms, properties."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.attention_layers import normal, printed
from support.tolerance import close, examples, same, seeded
from torch import Tensor

from headwise.errors import UsageError
from headwise.experiments.figure_parts import published_values
from headwise.theory.gaussian import gaussian_kappa
from headwise.theory.spectrum import MEASURES, spectrum

GAUSSIAN = published_values("leaner_kappa_gaussian")
NAN = torch.tensor([[0.0, math.nan], [1.0, 2.0]])


def sampled_kappa(tokens: int, width: int, draws: int, generator: torch.Generator) -> Tensor:
    """kappa of drawn Gaussian matrices."""
    size = (draws, tokens, width)
    return spectrum(torch.randn(size, dtype=torch.float64, generator=generator)).kappa


@pytest.mark.parametrize("row", GAUSSIAN, ids=lambda r: f"{r['N']} x {r['width']}")
def test_gaussian_kappa_is_the_known_closed_form(row: dict[str, str]) -> None:
    tokens, width = int(row["N"]), int(row["width"])
    assert width == int(row["heads"]) * int(row["head_dim"])
    assert f"{gaussian_kappa(tokens, width):.3f}" == row["closed_form"]
    assert gaussian_kappa(width, tokens) == gaussian_kappa(tokens, width)


def test_gaussian_kappa_peaks_where_the_width_is_the_number_of_tokens() -> None:
    values = [gaussian_kappa(197, width) for width in range(1, 800)]
    assert values[196] == math.inf
    assert values[:197] == sorted(values[:197])
    assert values[196:] == sorted(values[196:], reverse=True)
    assert gaussian_kappa(197, 10**9) == pytest.approx(1, abs=1e-3), "part (b) of the theorem"
    assert gaussian_kappa(197, 12 * 64) == gaussian_kappa(197, 48 * 16), (
        "split heads change nothing"
    )


def test_spectrum_of_the_known_samples_from_their_own_draws() -> None:
    rng = np.random.default_rng(0)
    for row in GAUSSIAN:
        drawn = [
            torch.from_numpy(rng.standard_normal((int(row["N"]), int(row["width"]))))
            for _ in range(20)
        ]
        if int(row["width"]) > 400:
            continue
        kappa = spectrum(torch.stack(drawn)).kappa
        assert kappa.mean().item() == printed(row["mc_mean"])
        assert kappa.std(correction=0).item() == printed(row["mc_std"])


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4, 10, 11, 13, 15])
def test_spectrum_of_our_own_samples_is_near_the_known_ones(at: int) -> None:
    row = GAUSSIAN[at]
    kappa = sampled_kappa(int(row["N"]), int(row["width"]), 8, seeded(at))
    assert kappa.shape == (8,)
    assert abs(kappa.mean().item() - float(row["mc_mean"])) < 3 * float(row["mc_std"])
    same(kappa[:3], sampled_kappa(int(row["N"]), int(row["width"]), 3, seeded(at)))
    assert len(set(kappa.tolist())) == 8


matrices = st.tuples(st.integers(2, 11), st.integers(1, 11), st.integers(0, 2**20)).map(
    lambda t: normal(t[0], t[1], seed=t[2])
)


@examples(60)
@given(matrices, st.booleans())
def test_spectrum_by_numpy(A: Tensor, centred: bool) -> None:
    a = A.numpy() - A.numpy().mean(0) if centred else A.numpy()
    k = min(A.shape[0] - 1 if centred else A.shape[0], A.shape[1])
    s = np.linalg.svd(a, compute_uv=False)[:k]
    got, p = spectrum(A, centred=centred), s / s.sum()
    assert got.k == got.rank.item() == k
    for value, expected in (
        (got.largest, s[0]),
        (got.smallest, s[-1]),
        (got.stable_rank, (a**2).sum() / s[0] ** 2),
        (got.effective_rank, math.exp(-(p * np.log(p)).sum())),
    ):
        assert value.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert got.kappa.item() == pytest.approx(s[0] / s[-1], rel=1e-7)


@examples(60)
@given(matrices)
def test_spectrum_keeps_the_order_of_its_ranks(A: Tensor) -> None:
    s, room = spectrum(A), 1 + 1e-12
    assert s.kappa >= 1
    assert s.stable_rank * room >= 1
    assert s.stable_rank <= s.effective_rank * room
    assert s.effective_rank <= s.rank * room
    assert s.rank <= s.k == min(A.shape)


@examples(60)
@given(matrices, st.floats(-30, 30), st.integers(0, 2**20))
def test_spectrum_ratios_ignore_rotations_and_scales(A: Tensor, power: float, seed: int) -> None:
    left, right = (torch.linalg.qr(normal(n, n, seed=seed + i))[0] for i, n in enumerate(A.shape))
    one, other, turned = (
        spectrum(A),
        spectrum(2.0**power * left @ A @ right),
        spectrum(A.T) if A.shape[1] > 1 else spectrum(A),
    )
    for name in ("kappa", "stable_rank", "effective_rank"):
        expected = getattr(one, name).item()
        loss = 1e-13 * one.kappa.item()
        assert getattr(other, name).item() == pytest.approx(expected, rel=1e-10 + loss)
        assert getattr(turned, name).item() == pytest.approx(expected, rel=1e-10 + loss)
    assert other.largest.item() == pytest.approx(2.0**power * one.largest.item(), rel=1e-10)


@examples(60)
@given(matrices, st.integers(0, 2**20))
def test_spectrum_centred_removes_any_mean_token(A: Tensor, seed: int) -> None:
    shifted = A + 10 * normal(1, A.shape[1], seed=seed)
    one, other = spectrum(A, centred=True), spectrum(shifted, centred=True)
    assert one.k == other.k == min(A.shape[0] - 1, A.shape[1])
    for name in ("largest", "smallest", "stable_rank", "effective_rank"):
        assert getattr(other, name).item() == pytest.approx(
            getattr(one, name).item(), rel=1e-9, abs=1e-12
        )
    inside = torch.linalg.svdvals(
        torch.linalg.qr(torch.eye(len(A), dtype=A.dtype) - 1 / len(A))[0][:, :-1].T @ A
    )
    assert one.kappa.item() == pytest.approx((inside[0] / inside[one.k - 1]).item(), rel=1e-7), (
        "in the space at right angles to ones"
    )


def test_spectrum_of_known_matrices() -> None:
    s = spectrum(torch.diag(torch.tensor([4.0, 2.0, 1.0, 1.0])))
    assert (s.largest.item(), s.smallest.item(), s.kappa.item(), s.stable_rank.item(), s.k) == (
        4,
        1,
        4,
        22 / 16,
        4,
    )
    assert s.effective_rank.item() == pytest.approx(
        2 ** (0.5 * 1 + 0.25 * 2 + 2 * 0.125 * 3), rel=1e-12
    )
    eye = spectrum(torch.eye(5, 7))
    assert (eye.kappa.item(), eye.stable_rank.item(), eye.k) == (1, 5, 5)
    assert eye.effective_rank.item() == pytest.approx(5, rel=1e-12)
    assert spectrum(torch.ones(3, 1)).kappa.item() == 1


def test_spectrum_of_less_than_full_rank_is_infinite() -> None:
    low = normal(13, 3) @ normal(3, 7, seed=1)
    s = spectrum(low)
    assert (s.kappa.item(), s.smallest.item(), s.rank.item(), s.k) == (math.inf, 0, 3, 7)
    assert s.effective_rank <= 3
    square = normal(7, 11)
    assert spectrum(square - square.mean(0)).kappa.item() == math.inf
    assert spectrum(square, centred=True).kappa.item() < 1e3
    flat = spectrum(torch.full((5, 3), 0.1), centred=True)
    assert (
        flat.kappa.item(),
        flat.rank.item(),
        flat.stable_rank.item(),
        flat.effective_rank.item(),
    ) == (math.inf, 0, 0, 0)
    rough = spectrum(normal(1, 3).expand(7, 3) * 1e3, centred=True)
    assert (rough.kappa.item(), rough.rank.item()) == (math.inf, 0), (
        "what rounding leaves of equal tokens is nothing"
    )
    assert spectrum(torch.zeros(5, 3)).kappa.item() == math.inf


def test_spectrum_of_many_matrices_at_once() -> None:
    many = normal(2, 3, 7, 5)
    for centred in (False, True):
        got = spectrum(many, centred=centred)
        assert got.kappa.shape == got.rank.shape == (2, 3)
        for i, j in itertools.product(range(2), range(3)):
            one = spectrum(many[i, j], centred=centred)
            for name in (*MEASURES, "rank"):
                close(getattr(got, name)[i, j].double(), getattr(one, name).double(), name)
    half = spectrum(many.float())
    assert half.kappa.dtype == torch.float64
    same(half.kappa, spectrum(many.float().double()).kappa)


BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: gaussian_kappa(1, 64), "tokens must be a whole number of at least 2, got 1"),
    (lambda: gaussian_kappa(197, 0), "width must be a whole number of at least 1, got 0"),
    (
        lambda: gaussian_kappa(197.0, 64),
        ("tokens must be a whole number of at least 2, got 197.0"),
    ),
    (lambda: gaussian_kappa(197, True), "width must be a whole number of at least 1, got True"),
    (lambda: spectrum(torch.ones(5)), "a matrix (..., tokens, width) is needed, got shape (5,)"),
    (
        lambda: spectrum(torch.ones(5, 0)),
        "a matrix (..., tokens, width) is needed, got shape (5, 0)",
    ),
    (lambda: spectrum(torch.ones(1, 5)), "tokens must be at least 2, got 1"),
    (lambda: spectrum(NAN), "a matrix of finite real numbers is needed, got NaN or infinity"),
    (
        lambda: spectrum(NAN.nan_to_num(math.inf), centred=True),
        "a matrix of finite real numbers is needed, got NaN or infinity",
    ),
    (
        lambda: spectrum(torch.ones(3, 3, dtype=torch.complex128)),
        "a matrix of finite real numbers is needed, got complex ones",
    ),
]


@pytest.mark.parametrize(
    ("act", "text"), BAD, ids=[f"{i}: {text}" for i, (_, text) in enumerate(BAD)]
)
def test_mistake_is_one_line_with_rule_and_value(act: Callable[[], Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        act()
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)
