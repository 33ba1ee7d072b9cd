"""Limits -> shapes: every one meets its budget, and can be trained on its task."""

import pytest
from support.data import refused

from headwise.choosing.candidates import candidates, designs
from headwise.choosing.choice import names_of
from headwise.choosing.limits import shapes_within
from headwise.choosing.trainings import OnTask, OnText, Training, text, training_of
from headwise.shape import Shape
from headwise.tasks import Farthest, ListOps, Recall, Regression

GRID: dict[str, tuple[int, ...]] = {"depths": (), "heads": (), "ranks": ()}
TRAININGS: tuple[Training, ...] = (
    *(training_of(task) for task in (Farthest(7, 5), Recall(3, 12, 5), ListOps(length=11))),
    training_of(Regression(dim=5, points=7)),
    training_of(text(length=8, batch_tokens=16)),
)


@pytest.mark.parametrize("training", TRAININGS, ids=lambda training: training.name)
@pytest.mark.parametrize("params", [20_000, 300_000])
def test_candidates_meet_their_budget_and_fit_their_task(training: Training, params: int) -> None:
    """To half of what one more unit of the feed-forward costs."""
    found = candidates(training, params)
    assert 2 <= len(found) <= 12
    assert len(set(found)) == len(set(names_of(found))) == len(found)
    for shape in found:
        unit = shape.replace(ffn_dim=shape.ffn_dim + 1).params - shape.params
        assert abs(shape.params - params) <= unit / 2
        assert training.run(shape, 0.01, 1).shape == shape
        assert shape.num_heads * shape.head_dim == shape.dim
    assert len({shape.depth for shape in found}) > 1
    assert len({shape.num_heads for shape in found}) > 2


def test_candidates_are_narrowed_by_what_is_said() -> None:
    found = candidates(TRAININGS[0], 30_000, dim=24, depths=(2,), heads=(1, 3), ranks=(5, 8))
    sizes = {(s.dim, s.depth, s.num_heads, s.head_dim) for s in found}
    assert sizes == {(24, 2, h, r) for h in (1, 3) for r in (5, 8)}
    assert len(candidates(TRAININGS[0], 30_000, most=3)) == 3


def test_limits_of_plan_are_met_by_every_shape() -> None:
    """A cache of a quarter leaves fewer KV heads; the parameters stay."""
    training = TRAININGS[-1]
    limits = {"kv_bytes_per_token": "<=600"}
    found = shapes_within(training, "300k", limits, dim=None, most=6, **GRID)
    assert 2 <= len(found) <= 6
    for shape in found:
        assert shape.kv_bytes() <= 600
        assert abs(shape.params / 300_000 - 1) <= 0.01
        assert training.run(shape, 0.01, 1).shape.num_kv_heads <= shape.num_heads
    message = refused(
        shapes_within, training, "300k", {"kv_bytes_per_token": "<=1"}, dim=None, most=6, **GRID
    )
    assert "meets params 300k, kv_bytes_per_token <=1; headwise plan says which" in message


def test_designs_are_the_same_at_every_size() -> None:
    sizes = (3_000, 10_000, 30_000)
    found = designs(TRAININGS[0], sizes)
    assert len({tuple(found[size]) for size in sizes}) == 1
    for size in sizes:
        for name, shape in found[size].items():
            heads, layers = shape.num_heads, shape.depth
            plural = [f"{heads} head{'s' * (heads > 1)}", f"{layers} layer{'s' * (layers > 1)}"]
            assert name == " in ".join(plural)
            assert abs(shape.params / size - 1) < 0.05


def test_names_tell_apart_what_differs_in_other_sizes() -> None:
    base = Shape(dim=8, depth=1, num_heads=2)
    assert names_of([base, base.replace(ffn_dim=5)]) == [
        "2 x 4 in 1 layer, feed-forward 32",
        "2 x 4 in 1 layer, feed-forward 5",
    ]
    wide = Shape(dim=16, depth=1, num_heads=2, head_dim=4)
    wide = wide.replace(ffn_dim=base.ffn_dim)
    assert names_of([base, wide])[1] == "2 x 4 in 1 layer, width 16"
    odd = names_of([base, base.replace(norm="rms"), base.replace(depth=2)])
    assert odd == ["2 x 4 in 1 layer (shape 1)", "2 x 4 in 1 layer (shape 2)", "2 x 4 in 2 layers"]


def test_training_of_a_name_a_value_and_a_text() -> None:
    assert isinstance(training_of("farthest"), OnTask)
    assert isinstance(training_of(text(steps=4, length=8, batch_tokens=8)), OnText)
    assert training_of("recall", steps=70).steps == 70
    assert training_of(text(length=8, batch_tokens=8), steps=7).steps == 7
    assert "unknown task 'farthset'; did you mean farthest" in refused(training_of, "farthset")
    asked = text(length=8, batch_tokens=8)
    assert "model does not go with a text" in refused(training_of, asked, "m.py")
    assert "cannot be described so" in refused(text, stepps=3)
