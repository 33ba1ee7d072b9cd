"""`Regression`: prompts and their curriculum, the error by pairs seen, baselines."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.prompts import loop
from support.tolerance import STANDARD_ERRORS, close, examples, same, seeded
from torch import Tensor

from headwise.errors import UsageError
from headwise.experiments.rank_paper import regression
from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.experiments.settings import settings_of
from headwise.shape import Shape
from headwise.tasks import Farthest, Regression
from headwise.training.data import block_steps, draw_block
from headwise.training.fused_encoder import refusal
from headwise.training.run import Recipe, Run

CPU = torch.device("cpu")
TASK = Regression(dim=5, points=7, curriculum=3, first_dim=2, first_points=3)


# ---- prompts


def check_prompt(x_TD: Tensor, target_P2: Tensor, dim: int, points: int) -> None:
    """One prompt token by token: x, y, x, y, ...; one w for all; what is not in play is zero or
    does not count."""
    xs, ys = x_TD[0::2].double().numpy(), x_TD[1::2].double().numpy()
    count, width = xs.shape
    for i in range(count):
        assert all(xs[i, :dim] != 0)
        assert all(xs[i, dim:] == 0), "coordinates beyond those in play"
        assert all(ys[i, 1:] == 0), "a y token has one number"
        assert ys[i, 0] == target_P2[i, 0]
        assert target_P2[i, 1] == pytest.approx(count / points if i < points else 0.0)
    seen = xs[:, :dim]
    w, *_ = np.linalg.lstsq(seen[:dim], ys[:dim, 0], rcond=None)
    if count > dim and np.linalg.cond(seen[:dim]) < 100:
        assert np.allclose(seen @ w, ys[:, 0], atol=1e-3), "no w explains all pairs"
        assert np.abs(w).max() < 8
    assert width == x_TD.shape[1]


@examples(60)
@given(
    st.tuples(
        st.integers(1, 7),
        st.integers(2, 11),
        st.integers(0, 5),
        st.integers(1, 8),
        st.integers(1, 12),
    ),
    st.integers(0, 40),
    st.integers(0, 2**16),
)
def test_prompts_are_right_at_every_size_and_stage(sizes, step, seed):
    dim, points, curriculum, first_dim, first_points = sizes
    task = Regression(*sizes)
    x, target = task.sample(seeded(seed), 3, step)
    assert x.shape == (3, task.tokens, dim)
    assert task.tokens == 2 * points
    assert target.shape == (3, points, 2)
    stages = 0 if curriculum == 0 else step // curriculum
    active = (
        (min(dim, first_dim + stages), min(points, first_points + 2 * stages))
        if curriculum
        else (dim, points)
    )
    for b in range(3):
        check_prompt(x[b], target[b], *active)
    x, target = task.sample(seeded(seed), 3)
    for b in range(3):
        check_prompt(x[b], target[b], dim, points)  # what is evaluated is never the easier task


def test_prompts_have_functions_of_their_own_and_all_are_standard_normal():
    """x and w have mean 0 and covariance I, w is independent of x; n = 20000 prompts, seed 3."""
    n, d, points = 20_000, 3, 5
    x_BTD, target = Regression(d, points).sample(seeded(3), n)
    x_BPD, y_BP = x_BTD[:, ::2].double(), target[..., 0].double()
    w_BD = torch.linalg.solve(x_BPD[:, :d], y_BP[:, :d])
    well = (
        torch.linalg.cond(x_BPD[:, :d]) < 100
    )  # where single precision tells w; that depends on x alone
    for what, t in (("w", w_BD[well]), *((f"x_{i}", x_BPD[:, i]) for i in range(points))):
        m = len(t)
        assert t.mean(0).abs().max() < STANDARD_ERRORS / math.sqrt(m), what
        off = (t.T @ t / m - torch.eye(d)).abs()
        assert off.max() < STANDARD_ERRORS * math.sqrt(2 / m), what
    cross = w_BD[well].T @ x_BPD[well, -1] / well.sum()
    assert cross.abs().max() < STANDARD_ERRORS / math.sqrt(well.sum())
    between = (w_BD[:-1] * w_BD[1:])[well[:-1] & well[1:]].mean(0)
    assert between.abs().max() < STANDARD_ERRORS / math.sqrt(0.8 * n), (
        "neighbouring prompts share a function"
    )


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, (2, 3)),
        (2, (2, 3)),
        (3, (3, 5)),
        (5, (3, 5)),
        (6, (4, 7)),
        (8, (4, 7)),
        (9, (5, 7)),
        (10**9, (5, 7)),
        (None, (5, 7)),
    ],
)
def test_curriculum_moves_at_the_multiples_of_its_length(step, expected):
    assert TASK.active(step) == expected
    assert dataclasses.replace(TASK, curriculum=0).active(step) == (5, 7)


def test_paper_s_curriculum_is_garg_s():
    """Fact sheet d.10: dimensions 5 -> 20 by 1 and points 11 -> 41 by 2 every 2000 steps: both are
    there at step 30,000."""
    (task,) = {run.task for run in regression.runs(regression.PRESETS["paper"])}
    assert isinstance(task, Regression)
    for step, expected in (
        (0, (5, 11)),
        (1999, (5, 11)),
        (2000, (6, 13)),
        (29_999, (19, 39)),
        (30_000, (20, 41)),
        (499_999, (20, 41)),
    ):
        assert task.active(step) == expected


def in_play(x: Tensor, target: Tensor) -> tuple[int, int]:
    """How many coordinates and pairs of (batch, tokens, dim) prompts are in play."""
    return int((x[:, ::2] != 0).any(0).any(0).sum()), int((target[..., 1] != 0).any(0).sum())


@pytest.mark.parametrize("protocol", ["stream", "replay"])
@pytest.mark.parametrize(
    ("curriculum", "epoch"), [(3, 6), (3, 5), (4, 6), (7, 20), (1, 4), (60, 20), (0, 20)]
)
def test_training_steps_see_their_own_stages(protocol, curriculum, epoch):
    """Also where a stage ends within an epoch, or within what would be drawn at once; under replay
    only the stage changes."""
    task = dataclasses.replace(TASK, curriculum=curriculum)
    recipe = Recipe(steps=4 * epoch, epoch=epoch, batch=11, protocol=protocol)
    run = Run(regression.decoder(16, 1, 2, task), task, recipe, seed=5)
    per_block = block_steps(task, recipe)
    assert epoch % per_block == 0
    drawn = []
    for step in range(recipe.steps):
        x, target = draw_block(run, step // per_block, CPU)
        assert x.shape == (per_block, 11, 14, 5)
        assert target.shape == (per_block, 11, 7, 2)
        x, target = x[step % per_block], target[step % per_block]
        stage = step // curriculum if curriculum else 99
        assert in_play(x, target) == (min(5, 2 + stage), min(7, 3 + 2 * stage)), f"step {step}"
        drawn.append(x)
    first = [x[:, ::2, :2] for x in drawn]  # the coordinates that are always in play
    for step in range(epoch, recipe.steps):
        assert torch.equal(first[step], first[step % epoch]) == (protocol == "replay"), (
            f"step {step}"
        )


def test_draws_without_a_curriculum_are_as_large_as_ever():
    recipe = Recipe(steps=100, epoch=50, batch=8)
    assert block_steps(Regression(5, 7), recipe) == block_steps(Farthest(5, 14), recipe) == 25
    assert block_steps(Regression(5, 7, curriculum=2000), recipe) == 25


# ---- the error


@pytest.mark.parametrize("step", [0, 4, None])
@pytest.mark.parametrize("width", [1, 3])
def test_loss_and_profile_equal_a_loop(step, width):
    _, target = TASK.sample(seeded(4), 13, step)
    outputs = torch.randn(2, 13, 14, width, generator=seeded(5))
    expected = torch.tensor(
        np.stack([loop(o.double().numpy(), target.double().numpy()) for o in outputs])
    )
    for given_target in (target, target.expand(2, *target.shape)):
        found, loss = TASK.measures(outputs, given_target), TASK.loss(outputs, given_target)
        assert set(found) == {"profile"}
        profile = found["profile"]
        assert (profile.shape, loss.shape) == ((2, 7), (2,))
        close(profile, expected)
        close(loss, expected.mean(1))
    close(TASK.loss(outputs[1], target), expected[1].mean())
    close(TASK.measures(outputs[1], target)["profile"], expected[1])
    points = TASK.active(step)[1]
    plain = (outputs[..., 0:14:2, 0] - target[..., 0])[..., :points].square().double()
    close(TASK.loss(outputs, target), plain.mean((1, 2)), "the mean over what is in play")


def test_error_is_of_the_first_number_at_each_x_alone():
    _, target = TASK.sample(seeded(4), 13)
    outputs = torch.randn(2, 13, 14, 3, generator=seeded(5))
    spoiled = outputs.clone()
    spoiled[..., 1::2, :] = math.nan
    spoiled[..., 1:] = math.nan
    same(TASK.loss(spoiled, target), TASK.loss(outputs, target))
    same(TASK.measures(spoiled, target)["profile"], TASK.measures(outputs, target)["profile"])
    outputs[..., ::2, 0] = target[..., 0]
    same(TASK.loss(outputs, target), torch.zeros(2))


# ---- baselines


def test_least_squares_is_what_it_says():
    """After k pairs the solution of least norm errs by d - k, then by nothing: numpy's own solver,
    n = 1500, seed 7."""
    task, n = Regression(5, 8), 1500
    x, target = (t.double().numpy() for t in task.sample(seeded(7), n))
    xs, ys, baseline = x[:, ::2], target[..., 0], task.baseline_profile()["least squares"]
    assert baseline == [5.0, 4.0, 3.0, 2.0, 1.0, 0.0, 0.0, 0.0]
    for k in range(8):
        errors = np.array(
            [
                (xs[b, k] @ np.linalg.lstsq(xs[b, :k], ys[b, :k], rcond=None)[0] - ys[b, k]) ** 2
                for b in range(n)
            ]
        )
        if k < 5:
            assert abs(errors.mean() - baseline[k]) < STANDARD_ERRORS * errors.std() / math.sqrt(
                n
            ), f"k {k}"
        else:
            assert np.median(errors) < 1e-8, (
                f"k {k}"
            )  # rounding, which a nearly singular prompt makes large


def test_averaging_is_what_it_says():
    """w = mean of y_i x_i errs by d (d + 1)/k: n = 20000, seed 8."""
    task, n = Regression(5, 9), 20_000
    x, target = (t.double() for t in task.sample(seeded(8), n))
    xs, ys, baseline = x[:, ::2], target[..., 0], task.baseline_profile()["averaging"]
    for k in range(9):
        w = (ys[:, :k, None] * xs[:, :k]).sum(1) / max(k, 1)
        errors = ((w * xs[:, k]).sum(-1) - ys[:, k]).square()
        assert abs(errors.mean() - baseline[k]) < STANDARD_ERRORS * errors.std() / math.sqrt(n), (
            f"k {k}: {errors.mean():.3f}, baseline {baseline[k]}"
        )


def test_three_nearest_is_what_it_says():
    """The mean answer of the nearest three pairs before, one distance at a time, on the same 4,096
    prompts; and n = 20000 others."""
    task, generator = Regression(3, 7), seeded(0)
    baseline, total = np.array(task.baseline_profile()["3 nearest"]), np.zeros(7)
    for _ in range(16):
        x, target = (t.double().numpy() for t in task.sample(generator, 256))
        for xs, ys in zip(x[:, ::2], target[..., 0], strict=True):
            for k in range(7):
                near = sorted(
                    range(k), key=lambda i, xs=xs, k=k: float(((xs[i] - xs[k]) ** 2).sum())
                )[:3]
                total[k] += (sum(ys[i] for i in near) / max(len(near), 1) - ys[k]) ** 2
    assert total / 4096 == pytest.approx(baseline, rel=1e-9)
    n = 20_000
    x, target = (t.double().numpy() for t in task.sample(seeded(9), n))
    xs, ys = x[:, ::2], target[..., 0]
    near = np.argsort(((xs[:, :6] - xs[:, 6:]) ** 2).sum(-1), 1)[:, :3]
    errors = (np.take_along_axis(ys, near, 1).mean(1) - ys[:, 6]) ** 2
    assert abs(errors.mean() - baseline[6]) < STANDARD_ERRORS * errors.std() * math.sqrt(
        1 / n + 1 / 4096
    ), "seed 9"


@pytest.mark.parametrize(
    "task", [Regression(1, 2), Regression(5, 3), Regression(3, 11, curriculum=7)], ids=str
)
def test_baselines_are_the_means_of_their_profiles(task):
    profile, means = task.baseline_profile(), task.baselines()
    assert set(profile) == set(means) == {"zero", "least squares", "averaging", "3 nearest"}
    for name, errors in profile.items():
        assert len(errors) == task.points
        assert means[name] == pytest.approx(np.mean(errors))
        if name != "3 nearest":
            assert errors[0] == task.dim, "before the first pair nothing is known"
    assert set(profile["zero"]) == {float(task.dim)}
    profile["3 nearest"].clear()
    assert len(task.baseline_profile()["3 nearest"]) == task.points, "the caller's list is its own"


# ---- what does not fit is refused in one line


SHAPE = regression.decoder(16, 1, 2, TASK)


def refused(make: Any, **fields: Any) -> str:
    with pytest.raises(UsageError) as caught:
        make(**fields)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "least"),
    [("dim", 1), ("first_dim", 1), ("first_points", 1), ("points", 2), ("curriculum", 0)],
)
def test_sizes_of_the_task_are_whole_numbers(name, least):
    for bad in (least - 1, -3, 2.0, "7", True, None):
        message = refused(Regression, **{"dim": 5, "points": 7, name: bad})
        assert message == f"{name} must be a whole number of at least {least}, got {bad!r}"


CAUSAL = (
    "a shape for this task must be causal, because later tokens hold the answers; got causal False"
)
BESIDE = {"dim": 19, "head_dim": 3, "v_head_dim": 3, "positions": "concatenated", "position_dim": 3}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"input_dim": 6},
            (
                "a shape's input_dim must be its task's in_dim, got "
                "input_dim 6, in_dim 5: input_dim=5 takes them"
            ),
        ),
        (
            {"input_dim": 6} | BESIDE,
            (
                "a shape's input_dim must be its task's in_dim, got "
                "input_dim 6, in_dim 5: input_dim=5 takes them"
            ),
        ),
        (
            {"input_dim": 0},
            "a shape's dim must be its task's in_dim, got dim 16, in_dim 5: input_dim=5 takes them",
        ),
        (
            {"input_dim": 0} | BESIDE,
            (
                "a shape's dim must be its task's in_dim beside 3 of positions, got "
                "dim 19, in_dim 5: input_dim=5 takes them"
            ),
        ),
        ({"output_dim": 2}, "output_dim must be the width of the task's answers, 1, got 2"),
        ({"causal": False}, CAUSAL),
        ({"num_positions": 13}, "num_positions must be at least the task's 14 tokens, got 13"),
    ],
)
def test_shape_that_does_not_fit_the_task_is_refused_in_one_line(changes, message):
    assert (
        refused(Run, shape=SHAPE.replace(**changes), task=TASK, recipe=Recipe(steps=100)) == message
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"dim": 8, "input_dim": 12},
            "outputs must be at least as wide as the task's answers, 12, got 8",
        ),
        (
            {"dim": 1, "num_heads": 1, "input_dim": 12},
            "outputs must be at least as wide as the task's answers, 12, got 1",
        ),
        (
            {"dim": 12, "output_dim": 5},
            "output_dim must be the width of the task's answers, 12, got 5",
        ),
    ],
)
def test_answers_that_do_not_fit_in_the_outputs_are_refused_in_one_line(fields, message):
    shape = Shape(**{"depth": 1, "num_heads": 2, **fields})
    assert refused(Run, shape=shape, task=Farthest(12, 5), recipe=Recipe(steps=100)) == message
    Run(
        Shape(dim=14, depth=1, num_heads=2, input_dim=12), Farthest(12, 5), Recipe(steps=100)
    )  # the first twelve are evaluated


@pytest.mark.parametrize(
    "word",
    [
        "16",
        "16x3",
        "16x3x0",
        "16x3x-1",
        "16x3x1x1",
        "16xax1",
        "16 x3x1",
        "16x3x²",
        "16X3X1",
        "x3x1",
    ],
)
def test_name_of_no_shape_is_refused_in_one_line(word):
    message = refused(
        settings_of, experiment=regression.EXPERIMENT, preset="quick", typed=[f"shapes={word}"]
    )
    assert message == f"shapes are width x layers x heads like 48x12x2, got {word!r}"


def test_lists_of_shapes_that_make_no_sense_are_refused_in_one_line():
    for changes, message in (
        (["shapes="], "shapes must not be empty"),
        (["shapes=16x3x1,16x3x1"], "shapes must differ from each other, got 16x3x1, 16x3x1"),
        (["protocols="], "protocols must not be empty"),
        (["shapes=16x3x3"], "heads must divide the width, got 3 heads and width 16 in '16x3x3'"),
    ):
        assert (
            refused(settings_of, experiment=regression.EXPERIMENT, preset="quick", typed=changes)
            == message
        )


def test_kernels_of_the_gpu_step_refuse_maps_at_the_ends():
    plain = paper_shape(16, 1, 8, 1, ffn_dim=64)
    assert refusal(plain, 16, 64) == ""
    for name in ("input_dim", "output_dim"):
        message = refusal(plain.replace(**{name: 16}), 16, 64)
        assert message.endswith("this shape has maps that read vectors in or out")
