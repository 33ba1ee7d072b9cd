"""Mistakes in what is asked of the theory: one line each, with rule and value."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.tolerance import seeded

from headwise.errors import UsageError
from headwise.experiments.rank_paper import features as features_experiment
from headwise.experiments.rank_paper import representation as representation_experiment
from headwise.experiments.rank_paper import theory as theory_experiment
from headwise.theory import constructions, features, harmonics

BAD: list[tuple[Callable[[], Any], str]] = [
    *(
        (lambda f=f: f(2, 1), "dim must be a whole number of at least 3, got 2")
        for f in (harmonics.multiplicity, harmonics.sign_coefficient)
    ),
    *(
        (lambda f=f: f(1, 1), "dim must be a whole number of at least 3, got 1")
        for f in (harmonics.singular_floor, harmonics.plateau)
    ),
    (lambda: harmonics.polynomials(2, 3, 0.0), "dim must be a whole number of at least 3, got 2"),
    (lambda: harmonics.quadrature(1, 10), "dim must be a whole number of at least 3, got 1"),
    (lambda: harmonics.log_omega(8.0), "dim must be a whole number of at least 3, got 8.0"),
    (lambda: harmonics.multiplicity(True, 1), "dim must be a whole number of at least 3, got True"),
    (lambda: harmonics.head_target(2, 0.5), "dim must be a whole number of at least 3, got 2"),
    (lambda: harmonics.heads_for(2, 0.1), "dim must be a whole number of at least 3, got 2"),
    (lambda: harmonics.representation(2, 0.5), "dim must be a whole number of at least 3, got 2"),
    (
        lambda: constructions.softmax_error(2, 1.0),
        "dim must be a whole number of at least 3, got 2",
    ),
    (lambda: constructions.vote_error(1, 1), "dim must be a whole number of at least 3, got 1"),
    (lambda: constructions.averaging_error(2), "dim must be a whole number of at least 3, got 2"),
    (
        lambda: constructions.explained(2, 1, 10, seeded(0)),
        "dim must be a whole number of at least 3, got 2",
    ),
    (
        lambda: features.draw_heads(2, 4, seeded(0)),
        "dim must be a whole number of at least 3, got 2",
    ),
    (lambda: harmonics.multiplicity(8, -1), "degree must be a whole number of at least 0, got -1"),
    (
        lambda: harmonics.sign_coefficient(8, 1.5),
        "degree must be a whole number of at least 0, got 1.5",
    ),
    (lambda: harmonics.representation(8, 0.5, 401), "degree must be at most 400, got 401"),
    (lambda: harmonics.singular_floor(8, 0), "heads must be a whole number of at least 1, got 0"),
    (
        lambda: features.draw_heads(8, 0, seeded(0)),
        "heads must be a whole number of at least 1, got 0",
    ),
    (lambda: constructions.vote_error(8, 0), "heads must be a whole number of at least 1, got 0"),
    (lambda: constructions.spaced_error(0), "heads must be a whole number of at least 1, got 0"),
    (lambda: constructions.spaced_closed(0), "heads must be a whole number of at least 1, got 0"),
    (lambda: constructions.vote_error(8, 10), "a majority needs an odd number of heads, got 10"),
    (
        lambda: constructions.softmax_error(8, 0.0),
        "beta, the inverse temperature, must be positive, got 0.0",
    ),
    (
        lambda: constructions.softmax_error(8, -1.0),
        "beta, the inverse temperature, must be positive, got -1.0",
    ),
    (
        lambda: constructions.softmax_error(8, math.nan),
        "beta, the inverse temperature, must be positive, got nan",
    ),
    (
        lambda: constructions.full_rank_head(torch.ones(1, 2, 3), torch.ones(1, 3), 0),
        "beta, the inverse temperature, must be positive, got 0",
    ),
    *(
        (lambda e=e: harmonics.heads_for(8, e), f"error must lie between 0 and 0.5, got {e}")
        for e in (0.0, 0.5, -1.0, math.nan)
    ),
    (
        lambda: harmonics.heads_for(4000, 1e-4),
        "error 0.0001 needs more than 2^200 heads in 4000 dimensions",
    ),
    *(
        (
            lambda t=t: features.best_weights(*features.draw_heads(4, 3, seeded(0)), tolerance=t),
            f"tolerance must lie between 0 and 1, got {t}",
        )
        for t in (0, -1e-3, 1.0)
    ),
    *(
        (
            lambda r=r: constructions.explained(8, r, 10, seeded(0)),
            f"rank must lie between 0 and dim 8, got {r}",
        )
        for r in (0, 8, 9, -1)
    ),
    (
        lambda: features.draw_heads(8, 4, seeded(0), "publisht"),
        (
            "unknown draw 'publisht'; did you mean published? choices: cos-uniform, independent, "
            "published"
        ),
    ),
    (
        lambda: theory_experiment.Settings(only=("kernel",)),
        "unknown check 'kernel'; did you mean kernels? choices: biased, ",
    ),
    (lambda: theory_experiment.Settings(only=()), "only must not be empty"),
    (
        lambda: features_experiment.Settings(dims=(2,), heads=(1,), seeds=1),
        "dims must be at least 3, got 2",
    ),
    (lambda: features_experiment.Settings(dims=(), heads=(1,), seeds=1), "dims must not be empty"),
    (
        lambda: features_experiment.Settings(dims=(8,), heads=(4, 0), seeds=1),
        "heads must be at least 1, got 0",
    ),
    (
        lambda: features_experiment.Settings(dims=(8,), heads=(1,), seeds=0),
        "seeds must be at least 1, got 0",
    ),
    (
        lambda: features_experiment.Settings(dims=(8,), heads=(1,), seeds=1, draws=("unit",)),
        "unknown draw 'unit'; choices: cos-uniform, published",
    ),
    (
        lambda: representation_experiment.Settings(dims=(2,), degree=9, angles=9),
        "dims must lie between 3 and 100,000, got 2",
    ),
    (
        lambda: representation_experiment.Settings(dims=(), degree=9, angles=9),
        "dims must lie between 3 and 100,000, got none",
    ),
    (
        lambda: representation_experiment.Settings(dims=(8,), degree=401, angles=9),
        "degree must lie between 1 and 400, got 401",
    ),
    (
        lambda: representation_experiment.Settings(dims=(8,), degree=0, angles=9),
        "degree must lie between 1 and 400, got 0",
    ),
    (
        lambda: representation_experiment.Settings(dims=(8,), degree=9, angles=1),
        "angles must lie between 2 and 1,000,000, got 1",
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
