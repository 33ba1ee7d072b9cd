"""Many models at once against the same models one by one."""

import pytest
import torch
from support.initial import filled
from support.tolerance import close, close_all, same, seeded
from support.transformers import ENSEMBLES, inputs, pass_of

from headwise.experiments.rank_paper import regression
from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.model.transformer import build
from headwise.shape import Shape
from headwise.tasks import Regression


def check_ensemble(ensemble, singles, batch, tokens, equal):
    """`ensemble` holds the models of `singles`, each with a model axis of 1, in order."""
    shape, count = ensemble.shape, len(singles)
    x = inputs(shape, count, batch, tokens)
    y, _ = ensemble(x)
    weighting = torch.randn(y.shape, generator=seeded(2))
    y, grads = pass_of(ensemble, x, weighting)
    for m, single in enumerate(singles):
        one, one_grads = pass_of(single, x[m : m + 1], weighting[m : m + 1])
        equal(y[m : m + 1], one, f"value of model {m}")
        for (name, _), g, e in zip(ensemble.named_parameters(), grads, one_grads, strict=True):
            equal(g[m : m + 1], e, f"gradient of {name} of model {m}")


def load(model, source, m):
    model.load_state_dict({name: t[m : m + 1] for name, t in source.state_dict().items()})
    return model


def fills_lines(shape, batch, tokens):
    """Whether every model's activations and matrices are whole cache lines of 16 floats: where they
    are not, its neighbours lie across lines and the matrix library may take another path."""
    sizes = [
        p.numel()
        for name, p in build(shape).named_parameters()
        if p.ndim == 2 and not name.endswith("bias")
    ]
    return not any(size % 16 for size in (batch * tokens, *sizes))


@pytest.mark.parametrize("name", ENSEMBLES)
@pytest.mark.parametrize(("batch", "tokens"), [(4, 8), (16, 5), (3, 7), (1, 5)])
def test_ensemble_equals_its_models_one_by_one(name, batch, tokens):
    """Bit by bit where sizes are even, within rounding everywhere."""
    shape = ENSEMBLES[name]
    bitwise = fills_lines(shape, batch, tokens)
    assert bitwise == (not name.startswith("odd") and batch * tokens % 16 == 0)
    ensemble = filled(build(shape, models=5))
    check_ensemble(
        ensemble,
        [load(build(shape, models=1), ensemble, m) for m in range(5)],
        batch,
        tokens,
        same if bitwise else close,
    )


@pytest.mark.parametrize("name", ENSEMBLES)
def test_model_axis_changes_nothing(name):
    shape = ENSEMBLES[name]
    ensemble = filled(build(shape, models=3)).double()
    x = inputs(shape, 3, 2, 7, dtype=torch.float64)
    y, _ = ensemble(x)
    weighting = torch.randn(y.shape, generator=seeded(2), dtype=torch.float64)
    y, grads = pass_of(ensemble, x, weighting)
    for m in range(3):
        alone = build(shape).double()
        alone.load_state_dict({key: t[m] for key, t in ensemble.state_dict().items()})
        one, one_grads = pass_of(alone, x[m], weighting[m])
        close(y[m], one, f"value of model {m}")
        close_all([g[m] for g in grads], one_grads, f"gradients of model {m}")


SPLITS = {
    "paper": [paper_shape(16, 2, rank, 2, ffn_dim=29) for rank in (1, 4, 16)],
    "grouped": [
        Shape(
            dim=16,
            depth=2,
            num_heads=h,
            num_kv_heads=h // 2,
            head_dim=24 // h,
            causal=True,
            vocab_size=17,
            windows=(0, 3),
        )
        for h in (2, 4, 12)
    ],
    "read in and out": [regression.decoder(16, 2, heads, Regression(3, 4)) for heads in (1, 4, 16)],
    "values apart": [
        Shape(dim=16, depth=1, num_heads=h, head_dim=12 // h, v_head_dim=36 // h, norm="scalar")
        for h in (1, 3, 6)
    ],
}


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize(("batch", "tokens", "equal"), [(4, 8, same), (3, 7, close)])
def test_models_that_split_the_same_width_form_an_ensemble(name, batch, tokens, equal):
    shapes = SPLITS[name]
    assert len({s.widths_key() for s in shapes}) == 1
    counts = (2, 1, 3)
    ensemble = filled(
        build(shapes[0], models=6, head_groups=list(zip(counts, shapes, strict=True)))
    )
    each = [s for count, s in zip(counts, shapes, strict=True) for _ in range(count)]
    check_ensemble(
        ensemble,
        [load(build(s, models=1), ensemble, m) for m, s in enumerate(each)],
        batch,
        tokens,
        equal,
    )


def test_models_that_split_the_same_width_have_rotary_positions_of_their_own():
    """The engine makes no ensemble of these, but one may be asked for."""
    shapes = [
        Shape(
            dim=12,
            depth=2,
            num_heads=12 // r,
            head_dim=r,
            qk_rope_head_dim=r - 2,
            rope_theta=theta,
            vocab_size=7,
            causal=True,
        )
        for r, theta in ((4, 10_000.0), (6, 10_000.0), (4, 100.0))
    ]
    ensemble = filled(build(shapes[0], models=3, head_groups=[(1, s) for s in shapes]))
    check_ensemble(
        ensemble, [load(build(s, models=1), ensemble, m) for m, s in enumerate(shapes)], 3, 5, close
    )


def test_shapes_of_equal_split_key_have_equal_parameters():
    for shapes in SPLITS.values():
        sizes = [[tuple(p.shape) for p in build(s).parameters()] for s in shapes]
        assert sizes[0] == sizes[1] == sizes[2]
    shape = SPLITS["paper"][0]
    for changes in (
        {"depth": 3},
        {"ffn_dim": 31},
        {"causal": True},
        {"average": 1},
        {"head_dim": 2},
        {"windows": (3,)},
        {"logit_scale": 0.5},
    ):
        assert shape.replace(**changes).widths_key() != shape.widths_key(), changes
    rotary = [Shape(dim=12, depth=1, num_heads=h, qk_rope_head_dim=2) for h in (2, 3)]
    assert rotary[0].widths_key() != rotary[1].widths_key()  # angles belong to a rank
