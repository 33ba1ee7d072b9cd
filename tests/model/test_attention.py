"""`Attention` against `nn.MultiheadAttention` where that exists, against sums written out in
float64 everywhere else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.attention_sums import reference_layer, sees, turned
from support.tolerance import close, close_all, examples, same, seeded
from torch import nn

from headwise.errors import UsageError
from headwise.model.attention import Attention
from headwise.model.rotary import rotate
from headwise.shape import Shape

PRIMES = (2, 3, 5, 7, 11, 13)


def filled(layer, seed=0, spread=0.5):
    generator = seeded(seed)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(0.0, spread, generator=generator)
    return layer


def check_layer(shape, batch, tokens, seed, layer=0, **options):
    """Value, and gradients of input and of every parameter, in float64."""
    module = filled(Attention(shape, layer=layer, **options), seed).double()
    x = torch.randn(batch, tokens, shape.dim, generator=seeded(seed + 1), dtype=torch.float64)
    params = list(module.parameters())
    weighting = torch.randn(x.shape, generator=seeded(seed + 2), dtype=torch.float64)
    found = []
    for function in (module, lambda z: reference_layer(module, z, module.hard)):
        z = x.clone().requires_grad_()
        y = function(z)
        found.append(
            (
                y,
                torch.autograd.grad(
                    (y * weighting).sum(), (z, *params), allow_unused=True, materialize_grads=True
                ),
            )
        )
    (y, grads), (expected, expected_grads) = found
    close(y, expected, f"value of {shape}")
    close_all(grads, expected_grads, f"gradients of {shape}")


# ---- the layer


@st.composite
def grouped(draw):
    kv, rank = draw(st.sampled_from((1, 2, 3))), 2 * draw(st.integers(1, 6))
    heads = kv * draw(st.sampled_from((1, 2, 5)))
    qk_norm = draw(st.sampled_from(("none", "head", "free")))
    largest = draw(st.sampled_from((None, 3.0))) if qk_norm != "none" else None
    return Shape(
        dim=draw(st.sampled_from(PRIMES)),
        depth=2,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=rank,
        v_head_dim=draw(st.sampled_from((rank, *PRIMES))),
        qk_rope_head_dim=2 * draw(st.integers(0, rank // 2)),
        rope_theta=100.0,
        qk_norm=qk_norm,
        max_logit=largest,
        logit_scale=None if largest else draw(st.sampled_from((None, 0.7))),
        average=draw(st.sampled_from([n for n in (1, 2, 3, 5) if heads % n == 0])),
        causal=draw(st.booleans()),
        windows=(draw(st.sampled_from((0, 1, 3))), draw(st.sampled_from((0, 2, 5)))),
        qkv_bias=draw(st.booleans()),
        out_bias=draw(st.booleans()),
    )


@st.composite
def latent(draw):
    rank = 2 * draw(st.integers(1, 6))
    return Shape(
        dim=draw(st.sampled_from(PRIMES)),
        depth=1,
        num_heads=draw(st.sampled_from((1, 2, 3, 5))),
        head_dim=rank,
        v_head_dim=draw(st.sampled_from((rank, *PRIMES))),
        kv_lora_rank=draw(st.sampled_from(PRIMES)),
        q_lora_rank=draw(st.sampled_from((0, *PRIMES))),
        qk_rope_head_dim=2 * draw(st.integers(0, rank // 2)),
        rope_theta=50.0,
        causal=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        out_bias=draw(st.booleans()),
        qk_norm=draw(st.sampled_from(("none", "free"))),
    )


@examples(120)
@given(
    grouped(),
    st.sampled_from((1, 3)),
    st.sampled_from((1, 2, 5, 7, 11)),
    st.integers(0, 1),
    st.integers(0, 2**16),
)
def test_attention_grouped_heads_equal_the_formula(shape, batch, tokens, layer, seed):
    check_layer(shape, batch, tokens, seed, layer)


@examples(80)
@given(latent(), st.sampled_from((1, 3)), st.sampled_from((1, 2, 5, 11)), st.integers(0, 2**16))
def test_attention_latent_heads_equal_the_formula(shape, batch, tokens, seed):
    check_layer(shape, batch, tokens, seed)


@examples(40)
@given(st.one_of(grouped(), latent()), st.sampled_from((2, 5, 11)), st.integers(0, 2**16))
def test_attention_hardmax_equals_the_formula(shape, tokens, seed):
    check_layer(shape, 3, tokens, seed, hard=True)


@pytest.mark.parametrize("backend", ["auto", "short", "flash", "plain", "blocked"])
@pytest.mark.parametrize("rank", [1, 2, 5, 8])
def test_attention_every_backend_of_the_layer_equals_the_formula(backend, rank):
    check_layer(
        Shape(dim=11, depth=1, num_heads=6, head_dim=rank, average=3, qkv_bias=True, out_bias=True),
        3,
        7,
        rank,
        backend=backend,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dim", "heads", "tokens"), [(15, 5, 7), (14, 1, 11), (22, 11, 5), (21, 21, 3), (26, 2, 37)]
)
def test_attention_equals_multihead_attention(dim, heads, tokens, causal, dtype):
    ours = filled(
        Attention(
            Shape(dim=dim, depth=1, num_heads=heads, causal=causal, qkv_bias=True, out_bias=True)
        )
    ).to(dtype)
    theirs = nn.MultiheadAttention(dim, heads, batch_first=True, dtype=dtype)
    pairs = [
        (theirs.in_proj_weight, ours.qkv.weight),
        (theirs.in_proj_bias, ours.qkv.bias),
        (theirs.out_proj.weight, ours.out.weight),
        (theirs.out_proj.bias, ours.out_bias),
    ]
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source.view_as(target))
    mask = torch.ones(tokens, tokens, dtype=torch.bool).triu(1) if causal else None
    x = torch.randn(3, tokens, dim, generator=seeded(1), dtype=dtype)
    weighting = torch.randn(3, tokens, dim, generator=seeded(2), dtype=dtype)
    z = x.clone().requires_grad_()
    expected = theirs(z, z, z, attn_mask=mask, need_weights=False)[0]
    expected_grads = torch.autograd.grad((expected * weighting).sum(), (z, *(t for t, _ in pairs)))
    z = x.clone().requires_grad_()
    y = ours(z)
    grads = torch.autograd.grad((y * weighting).sum(), (z, *(s for _, s in pairs)))
    close(y, expected)
    close_all([g.view_as(e) for g, e in zip(grads, expected_grads, strict=True)], expected_grads)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_heads": 8, "head_dim": 1},
        {"num_heads": 4, "head_dim": 8},
        {"num_heads": 3, "head_dim": 16, "v_head_dim": 7},
        {
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
            "qk_norm": "head",
            "qk_rope_head_dim": 4,
            "causal": True,
        },
        {
            "num_heads": 3,
            "head_dim": 8,
            "kv_lora_rank": 11,
            "q_lora_rank": 7,
            "qk_rope_head_dim": 2,
        },
    ],
)
def test_attention_half_precision_by_autocast(changes):
    """bf16 products of float32 weights stay within bf16 of the float64 formula, and gradients
    flow."""
    layer = filled(Attention(Shape(dim=31, depth=1, **changes)), spread=0.2)
    x = torch.randn(3, 8, 31, generator=seeded(1))
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        fused = Attention(layer.shape, backend="flash")
        fused.load_state_dict(layer.state_dict())
        same(
            y,
            fused(x),
            "chosen by the dtype of the products, not of the weights: the short kernel adds in "
            "its own dtype",
        )
    assert y.dtype == torch.bfloat16
    close(y, reference_layer(layer.double(), x.double()))
    layer.float()
    with torch.autocast("cpu", torch.bfloat16):
        layer(x).float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(dim=11, depth=1, num_heads=5, head_dim=2),
        Shape(
            dim=11,
            depth=1,
            num_heads=6,
            num_kv_heads=3,
            head_dim=10,
            v_head_dim=3,
            causal=True,
            windows=(3,),
        ),
        Shape(
            dim=11,
            depth=1,
            num_heads=3,
            head_dim=10,
            v_head_dim=13,
            windows=(2,),
            qk_norm="free",
            qk_rope_head_dim=4,
        ),
        Shape(
            dim=11,
            depth=1,
            num_heads=3,
            head_dim=6,
            kv_lora_rank=5,
            q_lora_rank=7,
            qk_rope_head_dim=2,
            causal=True,
        ),
    ],
)
def test_attention_keep_returns_the_same_output_and_proper_weights(shape, hard):
    layer = filled(Attention(shape, hard=hard)).double()
    x = torch.randn(2, 7, 11, generator=seeded(3), dtype=torch.float64)
    y, out = layer(x, keep=True)
    close(y, layer(x))
    H, KV, R, V = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.v_head_dim
    sizes = {
        "q": (2, H, 7, R),
        "k": (2, KV, 7, R),
        "v": (2, KV, 7, V),
        "scores": (2, H, 7, 7),
        "weights": (2, H, 7, 7),
        "heads": (2, H, 7, V),
    }
    assert {name: tuple(t.shape) for name, t in out.items()} == sizes
    weights = out["weights"]
    close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    assert weights.min() >= 0
    assert not weights[..., ~sees(7, 7, shape.causal, shape.window(0))].any()
    if hard:
        assert set(weights.unique().tolist()) == {0.0, 1.0}
    group = H // KV
    close(
        out["heads"], torch.einsum("bhqn,bhnv->bhqv", weights, out["v"].repeat_interleave(group, 1))
    )
    close(
        out["scores"],
        shape.scale
        * torch.einsum("bhqr,bhnr->bhqn", out["q"], out["k"].repeat_interleave(group, 1)),
    )


def test_attention_keep_works_on_ensembles():
    layer = filled(Attention(Shape(dim=7, depth=1, num_heads=3, head_dim=5), models=2)).double()
    x = torch.randn(2, 3, 5, 7, generator=seeded(0), dtype=torch.float64)
    y, out = layer(x, keep=True)
    close(y, layer(x))
    assert out["weights"].shape == (2, 3, 3, 5, 5)


@pytest.mark.parametrize("qk_norm", ["free", "head"])
def test_attention_max_logit_is_the_largest_score_at_every_rank(qk_norm):
    """Equal query and key weights put the largest possible score on the diagonal."""
    for rank in (8, 32, 128):
        shape = Shape(dim=29, depth=1, num_heads=3, head_dim=rank, qk_norm=qk_norm, max_logit=11.0)
        layer = Attention(shape).double()
        with torch.no_grad():
            layer.qkv.weight.normal_(
                0.0, 100.0, generator=seeded(rank)
            )  # large, so that the norm's epsilon is nothing
            layer.qkv.weight[3 * rank : 6 * rank] = layer.qkv.weight[: 3 * rank]
            layer.out.weight.zero_()
        _, out = layer(torch.randn(2, 5, 29, generator=seeded(1), dtype=torch.float64), keep=True)
        diagonal = out["scores"].diagonal(dim1=-2, dim2=-1)
        close(diagonal, torch.full_like(diagonal, 11.0), f"rank {rank}")
        assert out["scores"].abs().max() <= 11.0 + 1e-9


def test_attention_models_with_their_own_axis_do_not_mix():
    shape = Shape(
        dim=7,
        depth=1,
        num_heads=6,
        num_kv_heads=2,
        head_dim=4,
        qk_norm="head",
        qk_rope_head_dim=2,
        average=3,
        out_bias=True,
    )
    ensemble = filled(Attention(shape, models=3)).double()
    x = torch.randn(3, 2, 5, 7, generator=seeded(1), dtype=torch.float64)
    y = ensemble(x)
    for m in range(3):
        alone = Attention(shape).double()
        alone.load_state_dict({name: t[m] for name, t in ensemble.state_dict().items()})
        close(y[m], alone(x[m]))


# ---- rotary positions


@examples(60)
@given(
    st.integers(1, 7),
    st.integers(0, 5),
    st.integers(1, 9),
    st.integers(0, 30),
    st.sampled_from((10.0, 10_000.0)),
)
def test_rotation_keeps_lengths_and_depends_on_distance_alone(half, rest, tokens, start, theta):
    width = 2 * half
    q, k = (
        torch.randn(3, tokens, rest + width, generator=seeded(i), dtype=torch.float64)
        for i in (1, 2)
    )
    close(rotate(q, width, theta).norm(dim=-1), q.norm(dim=-1))
    same(rotate(q, width, theta)[..., :rest], q[..., :rest])
    close(rotate(q, width, theta), turned(q, width, theta))
    scores = rotate(q, width, theta) @ rotate(k, width, theta).mT
    close(rotate(q, width, theta, start) @ rotate(k, width, theta, start).mT, scores)
    close(rotate(torch.cat((q, q), 1), width, theta)[:, tokens:], rotate(q, width, theta, tokens))


@pytest.mark.parametrize("changes", [{"qk_norm": "head"}, {"qk_norm": "free"}, {}])
def test_attention_scores_of_rotary_heads_depend_on_distance_alone(changes):
    """The same tokens later in the sequence score each other the same: also with learned gains on q
    and k."""
    shape = Shape(
        dim=11, depth=1, num_heads=3, head_dim=6, qk_rope_head_dim=4, causal=True, **changes
    )
    layer = filled(Attention(shape), spread=1.0).double()
    x = torch.randn(2, 5, 11, generator=seeded(1), dtype=torch.float64)
    _, early = layer(x, keep=True)
    _, late = layer(torch.cat((torch.zeros(2, 7, 11, dtype=torch.float64), x), 1), keep=True)
    close(late["scores"][..., 7:, 7:], early["scores"])


# ---- mistakes


def test_attention_layer_refuses_unknown_backends():
    with pytest.raises(UsageError, match=r"unknown backend 'plane'; did you mean plain"):
        Attention(Shape(dim=4, depth=1, num_heads=2), backend="plane")
