"""Tasks: targets by brute force, laws of the points, baselines in closed form against Monte Carlo,
one contract for all."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tolerance import QUADRATURE, STANDARD_ERRORS, close, examples, same, seeded

from headwise.errors import UsageError
from headwise.tasks import TASKS, BiasedNearest, Farthest, Nearest, task_class, task_of
from headwise.tasks.neighbors import LAWS, Neighbors, sphere
from headwise.tasks.task import Classified

NAMED = {
    **{f"farthest {law}": Farthest(7, 5, law) for law in ("uniform", "doubled")},
    **{f"nearest {law}": Nearest(7, 5, law) for law in LAWS},
    **{f"biased {law}": BiasedNearest(7, 5, law, bias=0.3) for law in LAWS},
    **{f"biased {law}, bias 0": BiasedNearest(7, 5, law) for law in LAWS},
    "biased the other way": BiasedNearest(7, 5, bias=-0.4),
    "farthest in two dimensions": Farthest(2, 3),
    "nearest of two": Nearest(3, 2),
}
NEIGHBORS = sorted(name for name in TASKS if issubclass(task_class(name), Neighbors))
# the others have tests of their own in test_regression.py, test_text.py and test_sentences.py; here
# is what all have in common
SMALL = {
    **{name: {"dim": 7, "points": 5} for name in (*NEIGHBORS, "regression")},
    "text": {"length": 7},
    "images": {"patch": 8},
    "listops": {"length": 11, "depth": 2, "examples": 97},
    "recall": {"pairs": 5, "keys": 7, "values": 3},
    "sentences": {"length": 29},
    "masked": {"length": 13, "level": "byte"},
}
OTHER = {
    **{name: {"points": 6} for name in (*NEIGHBORS, "regression")},
    "text": {"length": 5},
    "images": {"patch": 2},
} | {
    "listops": {"examples": 89},
    "recall": {"values": 2},
    "sentences": {"examples": 101},
    "masked": {"share": 0.3},
}
SIZES = {  # every whole number of every task, and the least it may be
    **{name: {"dim": 2, "points": 2} for name in NEIGHBORS},
    "regression": {"dim": 1, "points": 2, "curriculum": 0, "first_dim": 1, "first_points": 1},
    "text": {"length": 2, "most": 2},
    "images": {"patch": 1},
    "listops": {"length": 5, "depth": 1, "arguments": 2, "examples": 1},
    "recall": {"pairs": 1, "keys": 1, "values": 2, "queries": 0},
    "sentences": {"length": 3, "most": 1, "examples": 0},
    "masked": {"length": 2, "most": 2},
}
WITH_DATA = {
    "text",
    "images",
    "listops",
    "sentences",
    "masked",
}  # what is judged is held out of what is trained on


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


def test_every_target_is_one_of_the_points(task):
    x, target = task.sample(seeded(3), 31)
    for b in range(31):
        points = {tuple(p) for p in points_of(task, x[b]).tolist()}
        assert {tuple(t) for t in target[b].tolist()} <= points


def test_a_point_is_never_its_own_farthest(task):
    if isinstance(task, Farthest):
        x, target = task.sample(seeded(3), 31)
        assert not (x == target).all(-1).any()


def test_a_large_bias_decides():
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
def test_each_point_and_the_query_are_uniform_on_the_sphere(law):
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


def test_loss_judges_neither_other_tokens_nor_other_coordinates(task):
    _, target = task.sample(seeded(4), 13)
    outputs = torch.randn(2, 13, task.tokens, task.dim + 6, generator=seeded(5))
    judged = outputs[..., : task.dim].clone()
    same(task.loss(outputs, target), task.loss(judged, target))
    outputs[..., task.dim :] = math.nan
    outputs[..., : task.tokens - target.shape[1], :] = math.nan
    same(task.loss(outputs, target), task.loss(judged, target))


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


# ---- the contract


def test_every_task_is_held_to_the_contract():
    assert set(SMALL) == set(OTHER) == set(SIZES) == set(TASKS)


def whole_fields(name):
    return {f.name for f in dataclasses.fields(task_class(name)) if f.type == "int"}


@pytest.mark.parametrize("name", sorted(TASKS))
def test_contract(name):
    """Frozen, hashable, equal by value; named; rebuilt from its fields; samples, loss, measures and
    baselines of the agreed form."""
    task = task_of(name, SMALL[name])
    assert task.spec()["name"] == name
    assert task == task_of(name, SMALL[name])
    assert hash(task) == hash(task_of(name, SMALL[name]))
    assert task != task_of(name, SMALL[name] | OTHER[name])
    assert task_of(name, dataclasses.asdict(task)) == task
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(task, next(iter(SMALL[name])), 8)
    x, target = task.sample(seeded(0), 3)
    assert bool(task.vocab) != bool(task.in_dim), "tokens or vectors"
    if task.vocab:
        assert (x.shape, x.dtype) == ((3, task.tokens), torch.int64)
        assert 0 <= x.min() <= x.max() < task.vocab
    else:
        assert (x.shape, x.dtype) == ((3, task.tokens, task.in_dim), torch.float32)
    assert target.shape[0] == 3
    assert target.ndim == 1 or 1 <= target.shape[1] <= task.tokens
    assert target.dtype == (torch.int64 if isinstance(task, Classified) else torch.float32)
    answers = target[..., 0] if name == "masked" else target  # whose targets say also where
    assert (
        not isinstance(task, Classified)
        or 0 <= answers.min() <= answers.max() < task.answer_dim == task.classes
    )
    assert isinstance(task, Classified) or 1 <= task.answer_dim <= 7
    assert not x.requires_grad
    assert not target.requires_grad
    late = task.sample(seeded(0), 3, 10**9)
    for a, b in zip(
        late, task.sample(seeded(0), 3, 0) if name in WITH_DATA else (x, target), strict=True
    ):
        same(a, b, "late in training the task is the one that is judged, or that of the start")
    assert (name in WITH_DATA) == (not torch.equal(late[0], x)), "what is judged is held out"
    outputs = torch.randn(2, 3, task.tokens, task.answer_dim, generator=seeded(1))
    loss = task.loss(outputs, target)
    assert loss.shape == (2,)
    same(
        task.loss(outputs, target.expand(2, *target.shape)),
        loss,
        "the same targets for every model, given once or each",
    )
    close(task.loss(outputs[1], target), loss[1])
    wider = torch.cat((outputs, torch.full((2, 3, task.tokens, 2), math.nan)), -1)
    same(task.loss(wider, target), loss, "coordinates beyond the answer are not judged")
    measures = task.measures(outputs, target)
    for key, value in measures.items():
        assert key.isidentifier()
        assert value.shape[:1] == (2,)
        same(task.measures(outputs, target.expand(2, *target.shape))[key], value)
        same(task.measures(wider, target)[key], value)
        close(task.measures(outputs[1], target)[key], value[1])
    assert ("accuracy" in measures) == isinstance(task, Classified)
    if "accuracy" in measures:
        assert measures["accuracy"].shape == (2,)
        assert (measures["accuracy"] >= 0).all()
        assert (measures["accuracy"] <= 1).all()
    assert ("profile" in measures) == (name == "regression")
    if "profile" in measures:
        assert measures["profile"].shape == (2, target.shape[1])
        close(measures["profile"].mean(-1), loss)
    assert task.squared == (name in NEIGHBORS), "the kernels of the whole step know one loss"
    baselines = task.baselines()
    assert all(isinstance(v, float) and 0.0 <= v < math.inf for v in baselines.values())
    zero, n = baselines["zero"], 4001
    errors = [
        task.loss(torch.zeros(1, task.tokens, task.answer_dim), t[None])
        for t in task.sample(seeded(2), n)[1]
    ]
    errors = torch.stack(errors).double()
    assert abs(errors.mean() - zero) <= STANDARD_ERRORS * errors.std() / math.sqrt(n) + 1e-6, (
        f"n {n}, seed 2"
    )
    if name in NEIGHBORS:
        assert target.shape[2] == task.answer_dim == 7
        assert zero == 1.0
        assert max(baselines.values()) == zero
    assert type(task).__doc__


@pytest.mark.parametrize("name", sorted(TASKS))
def test_data_of_every_task_follow_the_generator_alone(name):
    task = task_of(name, SMALL[name])
    for step in (None, 0):
        torch.manual_seed(1)
        np.random.seed(1)  # noqa: NPY002
        first = task.sample(seeded(9), 13, step)
        torch.manual_seed(2)
        np.random.seed(2)  # noqa: NPY002
        for a, b in zip(first, task.sample(seeded(9), 13, step), strict=True):
            same(a, b)
        assert not torch.equal(first[0], task.sample(seeded(10), 13, step)[0])
        generator = seeded(9)
        task.sample(generator, 13, step)
        assert not torch.equal(first[0], task.sample(generator, 13, step)[0]), (
            "the generator moves on"
        )


def test_names_are_of_different_tasks():
    assert len(set(TASKS.values())) == len(TASKS)
    assert Nearest(7, 5) != BiasedNearest(7, 5)


# ---- mistakes


@pytest.mark.parametrize(
    ("name", "field"), [(name, field) for name in sorted(TASKS) for field in SIZES[name]]
)
@pytest.mark.parametrize("bad", [4, 1, 0, -3, 2.0, "7", True, None])
def test_sizes_are_whole_numbers(name, field, bad):
    assert set(SIZES[name]) == whole_fields(name)
    least, message = (
        SIZES[name][field],
        f"{field} must be a whole number of at least {SIZES[name][field]}, got {bad!r}",
    )
    if type(bad) is int and bad >= least:
        fields = SMALL[name] | ({"pairs": 1} if field == "keys" else {}) | {field: bad}
        assert getattr(task_of(name, fields), field) == bad
        return
    with pytest.raises(UsageError) as caught:
        task_of(name, SMALL[name] | {field: bad})
    assert str(caught.value) == message


@pytest.mark.parametrize("name", sorted(TASKS))
def test_unknown_fields_of_tasks_die_with_one_line(name):
    known = [f.name for f in dataclasses.fields(task_class(name))]
    with pytest.raises(UsageError) as caught:
        task_of(name, SMALL[name] | {known[0].capitalize(): 3})
    for part in (
        f"unknown key {known[0].capitalize()!r} of task {name}",
        f"did you mean {known[0]}",
        *known,
    ):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


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


def test_a_task_by_name_says_what_it_lacks() -> None:
    with pytest.raises(UsageError, match="task farthest needs points"):
        task_of("farthest", {"dim": 8})
