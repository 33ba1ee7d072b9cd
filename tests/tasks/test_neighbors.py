"""`Farthest`, `Nearest`, `BiasedNearest`: targets by brute force, laws of the points, baselines in
closed form against Monte Carlo."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tasks import NEIGHBORS
from support.tolerance import QUADRATURE, STANDARD_ERRORS, close, examples, same, seeded

from headwise.errors import UsageError
from headwise.tasks import BiasedNearest, Farthest, Nearest, task_class, task_of
from headwise.tasks.neighbors import LAWS, sphere

NAMED = {
    **{f"farthest {law}": Farthest(7, 5, law) for law in ("uniform", "doubled")},
    **{f"nearest {law}": Nearest(7, 5, law) for law in LAWS},
    **{f"biased {law}": BiasedNearest(7, 5, law, bias=0.3) for law in LAWS},
    **{f"biased {law}, bias 0": BiasedNearest(7, 5, law) for law in LAWS},
    "biased the other way": BiasedNearest(7, 5, bias=-0.4),
    "farthest in two dimensions": Farthest(2, 3),
    "nearest of two": Nearest(3, 2),
}


@pytest.fixture(params=NAMED)
def task(request):
    return NAMED[request.param]


# ---- targets


def points_of(task, x):
    """The points among the input tokens: all of them, or all but the query."""
    return x if isinstance(task, Farthest) else x[:-1]


def brute_force(task, x):
    """The targets of one sequence, one comparison at a time."""
    points = list(points_of(task, x))
    if isinstance(task, Farthest):
        return np.stack([min(points, key=lambda p: float(p @ query)) for query in points])
    query = -x[-1]
    bias = getattr(task, "bias", 0.0)
    best, best_score = None, -math.inf
    for i, p in enumerate(points):
        score = float(p @ query) + (bias if i == 0 else 0.0)
        if score > best_score:
            best, best_score = p, score
    return np.stack([best])


def test_targets_are_right_by_brute_force(task):
    x, target = task.sample(seeded(11), 53)
    for b in range(53):
        assert np.array_equal(target[b].numpy(), brute_force(task, x[b].numpy())), (
            f"sequence {b}, seed 11"
        )


@examples(40)
@given(
    st.integers(2, 9),
    st.integers(2, 11),
    st.sampled_from(LAWS),
    st.sampled_from(NEIGHBORS),
    st.integers(0, 2**16),
)
def test_targets_are_right_at_every_size(dim, points, law, name, seed):
    if law == "orthogonal" and (points > dim or name == "farthest"):
        return
    task = task_class(name)(dim, points, law)
    x, target = task.sample(seeded(seed), 3)
    for b in range(3):
        # ties within rounding may fall either way: compare what the targets score, not which they
        # are
        found, expected = target[b].double().numpy(), brute_force(task, x[b].double().numpy())
        queries = x[b].double().numpy() if name == "farthest" else -x[b, -1:].double().numpy()
        assert np.allclose((found * queries).sum(-1), (expected * queries).sum(-1), atol=1e-6)


def test_targets_are_among_the_points(task):
    x, target = task.sample(seeded(3), 31)
    for b in range(31):
        points = {tuple(p) for p in points_of(task, x[b]).tolist()}
        assert {tuple(t) for t in target[b].tolist()} <= points


def test_point_is_never_its_own_farthest(task):
    if isinstance(task, Farthest):
        x, target = task.sample(seeded(3), 31)
        assert not (x == target).all(-1).any()


def test_large_bias_decides():
    x, target = BiasedNearest(7, 5, bias=2.5).sample(seeded(0), 31)
    same(target[:, 0], x[:, 0])
    x, target = BiasedNearest(7, 5, bias=-2.5).sample(seeded(0), 31)
    assert not (target[:, 0] == x[:, 0]).all(-1).any()
    plain, biased = Nearest(7, 5), BiasedNearest(7, 5, bias=0)
    for a, b in zip(plain.sample(seeded(4), 31), biased.sample(seeded(4), 31), strict=True):
        same(a, b, "bias 0 is no bias")


# ---- the law of the points


def test_points_have_norm_one(task):
    x, target = task.sample(seeded(2), 37)
    assert x.shape == (37, task.tokens, task.dim)
    assert target.shape == (37, task.tokens if isinstance(task, Farthest) else 1, task.dim)
    for t in (x, target):
        assert t.dtype == torch.float32
        close(t.norm(dim=-1), torch.ones(t.shape[:-1]))


@pytest.mark.parametrize("points", [2, 5, 7])
def test_orthogonal_points_are_orthogonal(points):
    x, _ = Nearest(7, points, "orthogonal").sample(seeded(1), 37)
    gram = x[:, :-1] @ x[:, :-1].mT
    close(gram, torch.eye(points).expand(37, points, points))


@pytest.mark.parametrize("name", NEIGHBORS)
def test_doubled_points_come_with_their_antipodes(name):
    task = task_class(name)(7, 5, "doubled")
    x, target = task.sample(seeded(1), 37)
    same(x[:, 5:10], -x[:, :5])
    assert x.shape[1] == task.tokens == (10 if name == "farthest" else 11)
    if name == "farthest":
        same(target, -x)


@pytest.mark.parametrize("law", LAWS)
def test_points_and_query_are_uniform_on_the_sphere(law):
    """E x = 0 and E x x^T = I/d for every token, within four standard errors of n = 20000, seed
    5."""
    n, d = 20_000, 5
    x, _ = Nearest(d, 4, law).sample(seeded(5), n)
    variance = 3 / (d * (d + 2)) - 1 / d**2  # of x_i^2; that of x_i x_j is smaller
    for token in range(x.shape[1]):
        t = x[:, token].double()
        assert t.mean(0).abs().max() < STANDARD_ERRORS / math.sqrt(d * n), f"mean of token {token}"
        off = (t.T @ t / n - torch.eye(d) / d).abs().max()
        assert off < STANDARD_ERRORS * math.sqrt(variance / n), f"covariance of token {token}"


@pytest.mark.parametrize("law", ["uniform", "orthogonal"])
def test_points_are_independent_of_the_query(law):
    """The inner product of a point and the query has mean 0 and mean square 1/d."""
    n, d = 20_000, 5
    x, _ = Nearest(d, 3, law).sample(seeded(6), n)
    t = (x[:, :-1] * x[:, -1:]).sum(-1).double()
    assert t.mean(0).abs().max() < STANDARD_ERRORS / math.sqrt(d * n)
    spread = math.sqrt(3 / (d * (d + 2)) - 1 / d**2)
    assert (t.square().mean(0) - 1 / d).abs().max() < STANDARD_ERRORS * spread / math.sqrt(n)


def test_sphere_has_any_leading_axes():
    close(sphere(seeded(0), 2, 3, 5, 7).norm(dim=-1), torch.ones(2, 3, 5))


def test_data_follow_the_generator_alone(task):
    torch.manual_seed(1)
    first = task.sample(seeded(9), 13)
    torch.manual_seed(2)
    for a, b in zip(first, task.sample(seeded(9), 13), strict=True):
        same(a, b)
    assert not torch.equal(first[0], task.sample(seeded(10), 13)[0])
    generator = seeded(9)
    task.sample(generator, 13)
    assert not torch.equal(first[0], task.sample(generator, 13)[0]), "the generator moves on"


# ---- the loss


def loss_formula(outputs, targets, dim):
    """Mean over batch and queries of the squared distance, coordinate by coordinate, in numpy."""
    seen = outputs[:, -targets.shape[1] :, :dim]
    return np.mean(np.sum((seen - targets) ** 2, axis=-1))


def test_loss_formula_and_its_model_axis(task):
    _, target = task.sample(seeded(4), 13)
    outputs = torch.randn(3, 13, task.tokens, task.dim, generator=seeded(5))
    losses = task.loss(outputs, target.expand(3, *target.shape))
    assert losses.shape == (3,)
    expected = [
        loss_formula(o.double().numpy(), target.double().numpy(), task.dim) for o in outputs
    ]
    close(losses, torch.tensor(expected))
    one = task.loss(outputs[1], target)
    assert one.shape == ()
    close(one, losses[1])
    deep = task.loss(outputs.expand(2, 3, *outputs.shape[1:]), target)
    close(deep, losses.expand(2, 3))


def test_loss_is_of_neither_other_tokens_nor_other_coordinates(task):
    _, target = task.sample(seeded(4), 13)
    outputs = torch.randn(2, 13, task.tokens, task.dim + 6, generator=seeded(5))
    evaluated = outputs[..., : task.dim].clone()
    same(task.loss(outputs, target), task.loss(evaluated, target))
    outputs[..., task.dim :] = math.nan
    outputs[..., : task.tokens - target.shape[1], :] = math.nan
    same(task.loss(outputs, target), task.loss(evaluated, target))


def test_loss_is_zero_at_the_target_and_differentiable(task):
    _, target = task.sample(seeded(4), 13)
    outputs = torch.zeros(2, 13, task.tokens, task.dim)
    outputs[..., -target.shape[1] :, :] = target
    same(task.loss(outputs, target), torch.zeros(2))
    outputs = torch.randn(outputs.shape, generator=seeded(1)).requires_grad_()
    (grad,) = torch.autograd.grad(task.loss(outputs, target).sum(), outputs)
    expected = torch.zeros_like(grad)
    expected[..., -target.shape[1] :, :] = (
        2 * (outputs[..., -target.shape[1] :, :] - target) / (13 * target.shape[1])
    )
    close(grad, expected)


def test_predicting_zero_scores_what_the_baseline_says(task):
    _, target = task.sample(seeded(4), 1009)
    loss = task.loss(torch.zeros(1009, task.tokens, task.dim), target)
    close(loss, torch.tensor(task.baselines()["zero"]))
    assert task.baselines()["zero"] == 1.0


# ---- baselines


def test_baselines_are_no_worse_than_zero(task):
    baselines = task.baselines()
    assert baselines["zero"] == 1.0 == max(baselines.values())
    assert task.sample(seeded(0), 3)[1].shape[2] == task.answer_dim == task.dim


def best_multiple(predictor, target):
    """The error of the best multiple of a predictor, and its standard error, from (n, queries, dim)
    samples.

    min_c E|c p - g|^2 = E|g|^2 - (E p.g)^2 / E|p|^2; linearised, its error is that of p.g - c |p|^2
    times 2c.
    """
    cross, square = (predictor * target).sum(-1).mean(1), predictor.square().sum(-1).mean(1)
    c = cross.mean() / square.mean()
    error = 1 - c * cross.mean()
    spread = (c * (2 * cross - c * square)).std() / math.sqrt(len(cross))
    return float(error), float(spread)


BASELINES = [
    *(Farthest(d, n) for d, n in ((2, 3), (3, 2), (5, 4), (16, 16), (64, 16))),
    Farthest(5, 4, "doubled"),
    *(
        kind(d, n)
        for kind in (Nearest, BiasedNearest)
        for d, n in ((2, 2), (3, 5), (16, 7), (64, 16))
    ),
    *(Nearest(d, n, "orthogonal") for d, n in ((2, 2), (3, 3), (16, 5), (64, 16))),
    *(Nearest(d, n, "doubled") for d, n in ((2, 2), (3, 5), (16, 7))),
    BiasedNearest(16, 5, "orthogonal", bias=0.2),
    BiasedNearest(16, 5, "orthogonal", bias=-0.2),
    BiasedNearest(16, 5, bias=0.2),
]


@pytest.mark.parametrize("task", BASELINES, ids=str)
def test_baselines_agree_with_monte_carlo(task):
    n, seed = 20_000 if task.dim < 64 else 6_000, 17
    x, target = (t.double() for t in task.sample(seeded(seed), n))
    points = x if isinstance(task, Farthest) else x[:, :-1]
    query = x if isinstance(task, Farthest) else x[:, -1:]
    predictors = {
        "query": query,
        "mean": points.mean(1, keepdim=True).expand(-1, query.shape[1], -1),
    }
    baselines = task.baselines()
    assert set(baselines) <= {"zero", "query", "mean"}
    for name, predictor in predictors.items():
        if name not in baselines:
            continue
        if predictor.abs().max() < 1e-6:  # points and antipodes: their mean is nothing
            assert baselines[name] == 1.0
            continue
        error, spread = best_multiple(predictor, target)
        off = abs(error - baselines[name])
        bound = STANDARD_ERRORS * spread + 1e-6  # single precision of the samples
        assert off <= bound, (
            f"{name}: {error:.5f} measured, {baselines[name]:.5f} computed, spread {spread:.1e}, "
            f"n {n}, seed {seed}"
        )


@pytest.mark.parametrize(
    ("points", "expected"), [(4, 0.989), (16, 0.953), (64, 0.917), (256, 0.881)]
)
def test_query_baseline_of_the_fact_sheet(points, expected):
    assert round(Farthest(64, points).baselines()["query"], 3) == expected


def test_baselines_in_closed_form():
    """Two points: the farthest is the other one. Orthonormal points on the circle: E max(cos, sin)
    of an angle."""
    two = Farthest(7, 2).baselines()
    assert two["query"] == pytest.approx(1.0, abs=QUADRATURE)
    assert two["mean"] == pytest.approx(0.5, abs=QUADRATURE)
    circle = math.sqrt(2) / math.pi  # the mean of max(cos t, sin t)
    assert Nearest(2, 2, "orthogonal").baselines()["query"] == pytest.approx(
        1 - circle**2, abs=QUADRATURE
    )
    assert Nearest(2, 2, "orthogonal").baselines()["mean"] == 0.5
    # two independent angles on the circle: the larger of two arcsine variables has mean 4/pi^2
    assert Nearest(2, 2).baselines()["query"] == pytest.approx(
        1 - (4 / math.pi**2) ** 2, abs=QUADRATURE
    )
    # on S^2 one coordinate is uniform on (-1, 1): E max of n is (n-1)/(n+1), of n moduli n/(n+1)
    for n in (2, 3, 5):
        assert Nearest(3, n).baselines()["query"] == pytest.approx(
            1 - ((n - 1) / (n + 1)) ** 2, abs=QUADRATURE
        )
        assert Nearest(3, n, "doubled").baselines()["query"] == pytest.approx(
            1 - (n / (n + 1)) ** 2, abs=QUADRATURE
        )
        assert Farthest(3, n + 1).baselines()["query"] == pytest.approx(
            1 - ((n - 1) / (n + 1)) ** 2, abs=QUADRATURE
        )


# ---- mistakes


@pytest.mark.parametrize("name", NEIGHBORS)
@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"law": "unifrom"}, ("unknown law 'unifrom'", "did you mean uniform", "doubled")),
        ({"law": None}, ("unknown law None", "choices: doubled")),
        ({"law": "orthogonal", "points": 8}, ("points",)),
    ],
)
def test_bad_tasks_die_with_one_line(name, fields, parts):
    with pytest.raises(UsageError) as caught:
        task_of(name, {"dim": 7, "points": 5, **fields})
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def test_mistakes_of_one_task():
    with pytest.raises(
        UsageError, match=r"^orthogonal points are all equally far.*choices: uniform, doubled$"
    ):
        Farthest(7, 5, "orthogonal")
    with pytest.raises(UsageError, match=r"^at most dim 7 points are orthogonal, got points 8$"):
        Nearest(7, 8, "orthogonal")
    for bad in ("1", True, None, math.nan, math.inf):
        with pytest.raises(UsageError, match=r"^bias must be a finite number, got"):
            BiasedNearest(7, 5, bias=bad)
    with pytest.raises(UsageError, match=r"^unknown task 'nearst'; did you mean nearest"):
        task_of("nearst", {})
    with pytest.raises(UsageError, match=r"^unknown key 'bias' of task nearest; "):
        task_of("nearest", {"dim": 7, "points": 5, "bias": 0.1})
