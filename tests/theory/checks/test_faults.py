"""Checks that do not hold: planted faults, margins, mistakes in what is asked."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.checks import command, row_of

from headwise.theory import constructions, features, harmonics
from headwise.theory.checks import CHECKS


def test_check_margins() -> None:
    half = row_of("equal", 1.0, 1.25, allowed=0.5)
    assert (half["margin"], half["holds"], half["low"], half["high"], half["allowed"]) == (
        0.5,
        True,
        None,
        None,
        0.5,
    )
    assert row_of("equal", 1.0, 1.0, allowed=1e-12)["margin"] == 1
    edge = row_of("equal", 1.0, 0.5, allowed=0.5)
    assert (edge["margin"], edge["holds"]) == (0, True)
    assert row_of("equal", 1.0, 2.0, allowed=0.5)["margin"] == -1
    assert row_of("equal", 1.0, 2.0, allowed=0.5)["holds"] is False
    sampled = row_of("equal", 1.0, 1.2, se=0.1)
    assert (sampled["allowed"], sampled["margin"]) == (pytest.approx(0.4), pytest.approx(0.5))
    assert (sampled["low"], sampled["high"]) == (pytest.approx(1.004), pytest.approx(1.396))
    for kind, good in (("least", 2.0), ("most", 1.0)):
        bound = 3.0 - good
        fine, bad, edge = (
            row_of(kind, bound, good),
            row_of(kind, good, bound),
            row_of(kind, 2.0, 2.0),
        )
        assert (fine["margin"], fine["holds"], fine["allowed"]) == (0.5, True, None)
        assert (bad["margin"], bad["holds"]) == (-0.5, False)
        assert (edge["margin"], edge["holds"]) == (0, True)
    assert row_of("most", 0.0, 0.0)["holds"] is True
    assert row_of("most", -0.4, -0.5)["margin"] == pytest.approx(0.2), "a negative bound"
    for kind in ("equal", "least", "most"):
        assert row_of(kind, 1.0, math.nan, allowed=0.1)["holds"] is False, (
            "what cannot be computed does not hold"
        )
    assert row_of("least", 1.0, 2.0, residual=3e-7)["residual"] == 3e-7


def off(original: Callable[..., Any], factor: float = 1.0, more: float = 0.0) -> Callable[..., Any]:
    return lambda *args, **kwargs: original(*args, **kwargs) * factor + more


FAULTS: list[tuple[str, Any, str, Any]] = [
    ("degrees", harmonics, "sign_coefficient", off(harmonics.sign_coefficient, 1.01)),
    ("kernels", harmonics, "head_target", off(harmonics.head_target, 1.001)),
    ("kernels", harmonics, "head_head", off(harmonics.head_head, more=0.01)),
    ("floor", features, "optimise_heads", lambda *args, **kwargs: 0.1),
    ("floor", harmonics, "singular_floor", off(harmonics.singular_floor, 4.0)),
    ("growth", harmonics, "heads_for", lambda dim, error: dim**2),
    ("subspace", constructions, "explained", lambda *args, **kwargs: (0.0, 1e-4)),
    ("biased", constructions, "biased_target", off(constructions.biased_target, -1.0)),
    (
        "majority",
        constructions,
        "vote",
        lambda x, y, directions, vote=constructions.vote: vote(x, y, directions[:-2]),
    ),
    ("majority", constructions, "vote_error", off(constructions.vote_error, 1.05)),
    ("lengths", constructions, "full_rank_head", lambda x, y, beta=1.0: x.mean(1)),
    ("full-rank-head", constructions, "full_rank_head", lambda x, y, beta=1.0: x[:, 0]),
    ("full-rank-head", constructions, "softmax_error", off(constructions.softmax_error, 1.05)),
    (
        "full-rank-head",
        constructions,
        "perfect_encoder",
        lambda d, depth, make=constructions.perfect_encoder: make(d, depth, 1.0),
    ),
    ("plane", constructions, "spaced_closed", off(constructions.spaced_closed, 1.01)),
    ("continuum", harmonics, "representation", off(harmonics.representation, 1.001)),
    ("random-features", features, "right", off(features.right, more=0.002)),
    (
        "random-features",
        features,
        "draw_heads",
        lambda d, h, g, draw="published", make=features.draw_heads: make(d, h, g, "published"),
    ),
]


@pytest.mark.parametrize(
    ("group", "module", "name", "wrong"), FAULTS, ids=[f"{f[0]}: {f[2]}" for f in FAULTS]
)
def test_check_of_a_planted_fault_does_not_hold(
    group: str, module: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, wrong)
    assert any(not check.holds for check in CHECKS[group](0))


def test_theory_with_a_failed_check_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constructions, "spaced_closed", off(constructions.spaced_closed, 1.01))
    code, out, err = command("theory", "--only", "plane", "--json", "--store", str(tmp_path / "s"))
    answer = json.loads(out.splitlines()[-1])
    assert code == 1
    assert 0 < answer["failed"] <= 8
    assert f"headwise: {answer['failed']} of 8 checks do not hold" in err
    fails = [line for line in out.splitlines() if line.startswith("  FAILS: ")]
    assert len(fails) == answer["failed"]
    assert any(
        "equally spaced heads: quadratic form of the closed kernels" in line
        and "H=1: 0.5 against 0.505" in line
        for line in fails
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["theory", "--only", "plan"],
            (
                "unknown check 'plan'; did you mean plane? choices: biased, continuum, degrees, "
                "floor, "
            ),
        ),
        (
            ["theory", "--only", "plane", "kernel"],
            "unknown check 'kernel'; did you mean kernels? choices: ",
        ),
        (["theory", "--only"], "argument --only: expected at least one argument"),
        (["theory", "--seed", "x"], "argument --seed: "),
        (["run", "theory", "--seeds", "3"], "unknown setting 'seeds'"),
        (["run", "representation", "--seeds", "3"], "unknown setting 'seeds'"),
        (["run", "theory", "--set", "only="], "only must not be empty"),
        (["run", "features", "--set", "dims=2"], "dims must be at least 3, got 2"),
        (["run", "features", "--set", "heads=0"], "heads must be at least 1, got 0"),
        (
            ["run", "features", "--set", "draws=unit"],
            "unknown draw 'unit'; choices: cos-uniform, published",
        ),
        (
            ["run", "representation", "--set", "degree=500"],
            "degree must lie between 1 and 400, got 500",
        ),
    ],
)
def test_theory_mistake_is_one_line(words: list[str], text: str, tmp_path: Path) -> None:
    code, out, err = command(*words, "--store", str(tmp_path / "s"))
    assert (code, out) == (2, "")
    assert err.startswith(f"headwise: error: {text}")
    assert err.count("\n") == 1
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["run", "features", "--set", "draws="],
        ["run", "features", "--seeds", "1", "--set", "heads=64,64"],
        ["theory", "--only", "plane", "--seed", "9" * 30],
    ],
)
def test_theory_settings_mistake_is_one_line(words: list[str], tmp_path: Path) -> None:
    small = ["--set", "dims=8"] if "features" in words else []
    code, out, err = command(*words, *small, "--store", str(tmp_path / "s"))
    assert (code, out) == (2, "")
    assert err.startswith("headwise: error: ")
    assert err.count("\n") == 1


def test_representation_refuses_weights_beyond_floating_point(tmp_path: Path) -> None:
    changes = ["--set", "dims=2000", "--set", "degree=399", "--set", "angles=3"]
    code, _, err = command(
        "run", "representation", "--device", "cpu", *changes, "--store", str(tmp_path / "s")
    )
    assert code in (1, 2)
    assert err.splitlines()[-1].startswith("headwise: error: ")


def test_checks_hold_with_another_seed() -> None:
    assert all(check.holds for check in CHECKS["full-rank-head"](3))


def test_run_theory_with_a_failed_check_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constructions, "spaced_closed", off(constructions.spaced_closed, 1.01))
    code, _, _ = command(
        "run", "theory", "--set", "only=plane", "--no-report", "--store", str(tmp_path / "s")
    )
    assert code == 1
