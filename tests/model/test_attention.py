"""Attention against `nn.MultiheadAttention` where that exists, against sums written out in float64
everywhere else."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tolerance import close, close_all, examples, same, seeded
from torch import nn
from torch.overrides import TorchFunctionMode

from headwise.errors import UsageError
from headwise.model import reference
from headwise.model.attention import Attention, attend
from headwise.model.layers import rotate
from headwise.model.reference import mask_of
from headwise.shape import Shape

PRIMES = (2, 3, 5, 7, 11, 13)


# ---- the reference: loops over heads, sums in float64, nothing shared with the package


def sees(queries, keys, causal, window):
    """(queries, keys) truth table: the last query stands at the last key."""

    def one(i, j):
        return (not causal or j <= i) and (window == 0 or abs(i - j) < window)

    return torch.tensor([[one(i, j) for j in range(keys)] for i in range(keys - queries, keys)])


def mix(q, k, v, scale, seen, hard=False):
    """One head: (B, Q, r), (B, N, r), (B, N, v) -> (B, Q, v)."""
    scores = scale * torch.einsum("bqr,bnr->bqn", q, k)
    scores = scores.masked_fill(~seen, -math.inf)
    if hard:
        weights = torch.nn.functional.one_hot(scores.argmax(-1), k.shape[1]).to(v)
    else:
        e = (scores - scores.amax(-1, keepdim=True).detach()).exp()
        weights = e / e.sum(-1, keepdim=True)
    return torch.einsum("bqn,bnv->bqv", weights, v)


def reference_attend(q, k, v, scale, causal=False, window=0, hard=False):
    group = q.shape[1] // k.shape[1]
    seen = sees(q.shape[2], k.shape[2], causal, window)
    return torch.stack(
        [
            mix(q[:, h], k[:, h // group], v[:, h // group], scale, seen, hard)
            for h in range(q.shape[1])
        ],
        1,
    )


def turned(x, width, theta):
    """Rotary positions as complex numbers: coordinate j of the first half with coordinate j of the
    second."""
    if not width:
        return x
    rest, re, im = (
        x[..., :-width],
        x[..., -width : x.shape[-1] - width // 2],
        x[..., x.shape[-1] - width // 2 :],
    )
    angle = torch.tensor(
        [[n * theta ** (-2 * j / width) for j in range(width // 2)] for n in range(x.shape[-2])],
        dtype=torch.float64,
    )
    z = torch.complex(re, im) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((rest, z.real, z.imag), -1)


def rms(x, gain=None):
    y = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    return y if gain is None else y * gain


def affine(x, weight, bias=None):
    y = torch.einsum("bni,oi->bno", x, weight)
    return y if bias is None else y + bias


def reference_layer(layer, x, hard=False):
    """The formula in `Attention`'s docstring, head by head."""
    s, w = layer.shape, dict(layer.named_parameters())
    H, R, V, rope = s.num_heads, s.head_dim, s.v_head_dim, s.qk_rope_head_dim
    qs, ks, vs = [], [], []
    if s.latent:
        deep = (
            rms(affine(x, w["q_down.weight"], w.get("q_down.bias")), w["q_norm.weight"])
            if s.q_lora_rank
            else x
        )
        down = affine(x, w["kv_down.weight"], w.get("kv_down.bias"))
        shared = turned(down[..., s.kv_lora_rank :], rope, s.rope_theta)
        grown = affine(rms(down[..., : s.kv_lora_rank], w["kv_norm.weight"]), w["kv.weight"])
        for h in range(H):
            both = grown[..., h * (R - rope + V) : (h + 1) * (R - rope + V)]
            q, k = (
                turned(affine(deep, w["q.weight"][h * R : (h + 1) * R]), rope, s.rope_theta),
                torch.cat((both[..., : R - rope], shared), -1),
            )
            qs.append(q if s.qk_norm == "none" else rms(q))
            ks.append(k if s.qk_norm == "none" else rms(k))
            vs.append(both[..., R - rope :])
    else:
        KV = s.num_kv_heads
        all_ = affine(x, w["qkv.weight"], w.get("qkv.bias"))
        for h in range(H):
            g = h // (H // KV)
            q, k = all_[..., h * R : (h + 1) * R], all_[..., (H + g) * R : (H + g + 1) * R]
            if s.qk_norm != "none":
                q, k = rms(q, w.get("q_norm.weight")), rms(k, w.get("k_norm.weight"))
            qs.append(turned(q, rope, s.rope_theta))
            ks.append(turned(k, rope, s.rope_theta))
            start = (H + KV) * R + g * V
            vs.append(all_[..., start : start + V])
    scale = 1 / math.sqrt(R) if s.logit_scale is None else s.logit_scale
    scale = scale if s.max_logit is None else s.max_logit / R
    seen = sees(x.shape[1], x.shape[1], s.causal, layer.window)
    modules = []
    for m in range(s.average):
        y = 0 if layer.out_bias is None else w["out_bias"][m]
        for h in range(m * H // s.average, (m + 1) * H // s.average):
            y = y + affine(
                mix(qs[h], ks[h], vs[h], scale, seen, hard), w["out.weight"][:, h * V : (h + 1) * V]
            )
        modules.append(y)
    return sum(modules) / s.average


def filled(layer, seed=0, spread=0.5):
    generator = seeded(seed)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(0.0, spread, generator=generator)
    return layer


def with_gradients(function, tensors, generator_seed=7):
    """The function's value and its gradients under one random weighting of the value; hardmax sends
    none into q and k."""
    tensors = [t.detach().clone().requires_grad_() for t in tensors]
    y = function(*tensors)
    weighting = torch.randn(y.shape, generator=seeded(generator_seed), dtype=torch.float64).to(
        y.dtype
    )
    return y.detach(), torch.autograd.grad(
        (y * weighting).sum(), tensors, allow_unused=True, materialize_grads=True
    )


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
    stacked = filled(Attention(shape, models=3)).double()
    x = torch.randn(3, 2, 5, 7, generator=seeded(1), dtype=torch.float64)
    y = stacked(x)
    for m in range(3):
        alone = Attention(shape).double()
        alone.load_state_dict({name: t[m] for name, t in stacked.state_dict().items()})
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


# ---- the function


@st.composite
def calls(draw, mask=True):
    """q, k, v sizes and mask of one call; fewer queries than keys now and then."""
    kv, keys = draw(st.sampled_from((1, 2, 3))), draw(st.sampled_from((1, 2, 3, 5, 7, 13)))
    queries = draw(st.sampled_from([n for n in (1, 2, 3, 5, 7, 13) if n <= keys]))
    rank = draw(st.sampled_from((1, 3, 5, 8, 11)))
    width = draw(st.sampled_from((rank, 1, 2, 7, 13)))
    sizes = (
        draw(st.sampled_from((1, 2))),
        kv * draw(st.sampled_from((1, 2, 5))),
        kv,
        queries,
        keys,
        rank,
        width,
    )
    causal, window = (
        (draw(st.booleans()), draw(st.sampled_from((0, 1, 2, 4, 20)))) if mask else (False, 0)
    )
    return sizes, causal, window


def tensors_of(sizes, dtype, seed):
    batch, heads, kv, queries, keys, rank, width = sizes
    generator = seeded(seed)
    shapes = (batch, heads, queries, rank), (batch, kv, keys, rank), (batch, kv, keys, width)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def check_attend(backend, case, dtype, seed, hard=False):
    """Value and gradients of one call against the sums in float64."""
    sizes, causal, window = case
    tensors, scale = tensors_of(sizes, dtype, seed), 0.6
    options = {"causal": causal, "window": window, "hard": hard}
    y, grads = with_gradients(
        lambda q, k, v: attend(q, k, v, scale=scale, backend=backend, **options), tensors
    )
    exact = [t.double() for t in tensors]
    expected, expected_grads = with_gradients(
        lambda q, k, v: reference_attend(q, k, v, scale, **options), exact
    )
    close(y, expected, f"{backend} value")
    close_all(grads, expected_grads, f"{backend} gradients")


@pytest.mark.parametrize("backend", ["auto", "flash", "plain", "blocked"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_backends_equal_the_sums(backend, dtype):
    @examples(60)
    @given(calls(), st.integers(0, 2**16))
    def check(case, seed):
        check_attend(backend, case, dtype, seed)

    check()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_short_backend_equals_the_sums(dtype):
    @examples(60)
    @given(calls(mask=False).filter(lambda c: c[0][4] <= 8 and c[0][5] <= 8), st.integers(0, 2**16))
    def check(case, seed):
        check_attend("short", case, dtype, seed)

    check()


@pytest.mark.parametrize("backend", ["auto", "plain", "blocked"])
def test_attention_hardmax_backends_equal_the_sums(backend):
    @examples(30)
    @given(calls(), st.integers(0, 2**16))
    def check(case, seed):
        check_attend(backend, case, torch.float64, seed, hard=True)

    check()


@pytest.mark.parametrize("block_bytes", [1, 300, 2000])
@pytest.mark.parametrize("hard", [False, True])
def test_attention_many_small_blocks_equal_the_sums(monkeypatch, block_bytes, hard):
    """One byte: a block a query; the others: several queries, the last block ragged."""
    monkeypatch.setattr(reference, "BLOCK_BYTES", block_bytes)

    @examples(40)
    @given(calls(), st.integers(0, 2**16))
    def check(case, seed):
        check_attend("blocked", case, torch.float64, seed, hard=hard)

    check()


class Scores(TorchFunctionMode):
    """Records the bytes of every tensor that goes through a softmax."""

    def __init__(self):
        super().__init__()
        self.bytes = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.softmax:
            self.bytes.append(args[0].nbytes)
        return func(*args, **kwargs or {})


def test_attention_blocks_never_hold_more_scores_than_allowed(monkeypatch):
    monkeypatch.setattr(reference, "BLOCK_BYTES", 4000)
    q, k, v = tensors_of((2, 3, 3, 37, 37, 5, 5), torch.float32, 0)
    with Scores() as seen:
        attend(q, k, v, backend="blocked")
    assert len(seen.bytes) == math.ceil(37 / (4000 // (2 * 3 * 37 * 4)))
    assert max(seen.bytes) <= 4000
    assert sum(seen.bytes) == 2 * 3 * 37 * 37 * 4


@pytest.mark.parametrize("backend", ["flash", "plain", "blocked"])
def test_attention_half_precision_backends_are_close(backend):
    for seed, case in enumerate(
        (
            ((2, 6, 3, 7, 7, 5, 5), True, 0),
            ((1, 3, 3, 13, 13, 11, 2), False, 0),
            ((1, 2, 1, 3, 13, 8, 8), True, 4),
        )
    ):
        check_attend(backend, case, torch.bfloat16, seed)


@pytest.mark.parametrize("backend", ["auto", "flash", "plain", "blocked"])
@pytest.mark.parametrize("window", [0, 4])
def test_attention_last_queries_alone_are_the_end_of_the_whole(backend, window):
    """Decoding: m queries against n keys stand at the last m of them."""
    q, k, v = tensors_of((2, 6, 2, 13, 13, 5, 7), torch.float64, 0)
    whole = attend(q, k, v, causal=True, window=window, backend="plain")
    for m in (1, 2, 5, 12, 13):
        close(
            attend(q[:, :, -m:], k, v, causal=True, window=window, backend=backend),
            whole[:, :, -m:],
            f"{m} queries",
        )


def test_attention_scale_is_the_inverse_root_of_the_rank_unless_given():
    q, k, v = tensors_of((2, 3, 3, 5, 5, 7, 2), torch.float64, 0)
    close(attend(q, k, v), reference_attend(q, k, v, 7**-0.5))
    close(attend(q, k, v, scale=0.3), reference_attend(q, k, v, 0.3))


@examples(100)
@given(st.integers(1, 9), st.integers(0, 6), st.booleans(), st.integers(0, 11))
def test_mask_equals_the_truth_table(queries, more, causal, window):
    keys = queries + more
    mask = mask_of(queries, keys, causal, window)
    same(
        torch.ones(queries, keys, dtype=torch.bool) if mask is None else mask,
        sees(queries, keys, causal, window),
    )


# ---- mistakes


def ones(*size, dtype=torch.float32):
    return torch.ones(size, dtype=dtype)


@pytest.mark.parametrize(
    ("arguments", "options", "parts"),
    [
        (
            (ones(2, 3, 4), ones(2, 3, 4), ones(2, 3, 4)),
            {},
            ("(batch, heads, tokens, width)", "q (2, 3, 4)"),
        ),
        (
            (ones(2, 3, 5, 7), ones(2, 3, 5, 6), ones(2, 3, 5, 7)),
            {},
            ("q and k must share batch and rank", "k (2, 3, 5, 6)"),
        ),
        (
            (ones(1, 3, 5, 7), ones(2, 3, 5, 7), ones(2, 3, 5, 7)),
            {},
            ("q and k must share batch", "q (1, 3, 5, 7)"),
        ),
        (
            (ones(2, 3, 5, 7), ones(2, 3, 5, 7), ones(2, 3, 4, 7)),
            {},
            ("k and v batch, heads and tokens", "v (2, 3, 4, 7)"),
        ),
        (
            (ones(2, 5, 5, 7), ones(2, 3, 5, 7), ones(2, 3, 5, 7)),
            {},
            ("query heads must be a multiple of KV heads", "got 5 and 3"),
        ),
        (
            (ones(2, 3, 0, 7), ones(2, 3, 5, 7), ones(2, 3, 5, 7)),
            {},
            ("no axis may be empty", "q (2, 3, 0, 7)"),
        ),
        (
            (ones(2, 3, 5, 7), ones(2, 0, 5, 7), ones(2, 0, 5, 7)),
            {},
            ("no axis may be empty", "k (2, 0, 5, 7)"),
        ),
        (
            (ones(2, 3, 5, 7), ones(2, 3, 5, 7), ones(2, 3, 5, 0)),
            {},
            ("no axis may be empty", "v (2, 3, 5, 0)"),
        ),
        (
            (ones(2, 3, 5, 7), ones(2, 3, 4, 7), ones(2, 3, 4, 7)),
            {"causal": True},
            ("causal attention needs", "4 keys, 5 queries"),
        ),
        (
            (ones(2, 3, 5, 7), ones(2, 3, 4, 7), ones(2, 3, 4, 7)),
            {"window": 1},
            ("windowed attention needs", "4 keys, 5 queries"),
        ),
        ((ones(2, 3, 5, 7),) * 3, {"window": -1}, ("window must not be negative", "got -1")),
        (
            (ones(2, 3, 5, 7), ones(2, 3, 5, 7), ones(2, 3, 5, 7, dtype=torch.float64)),
            {},
            ("share dtype", "v float64 on cpu"),
        ),
        (
            (ones(2, 3, 5, 7),) * 3,
            {"backend": "flsh"},
            ("unknown backend 'flsh'", "did you mean flash", "blocked"),
        ),
        (
            (ones(2, 3, 5, 7),) * 3,
            {"backend": "cudnn"},
            ("backend cudnn cannot run this call", "needs a GPU, the device is cpu"),
        ),
        (
            (ones(2, 3, 5, 7),) * 3,
            {"backend": "heads"},
            ("backend heads cannot run this call", "needs a GPU, the device is cpu"),
        ),
        (
            (ones(2, 3, 5, 7),) * 3,
            {"backend": "efficient"},
            ("backend efficient cannot run this call", "needs a GPU"),
        ),
        (
            (ones(2, 3, 5, 7),) * 3,
            {"backend": "short", "causal": True},
            ("backend short cannot run this call", "without a mask"),
        ),
        (
            (ones(2, 3, 5, 9),) * 3,
            {"backend": "short"},
            ("backend short cannot run this call", "5 keys at rank 9"),
        ),
        (
            (ones(2, 3, 5, 7),) * 3,
            {"backend": "flash", "hard": True},
            ("flash does not compute hardmax", "plain, blocked"),
        ),
        (
            (ones(2, 3, 5, 7),) * 3,
            {"backend": "heads", "hard": True},
            ("heads does not compute hardmax", "plain, blocked"),
        ),
    ],
)
def test_attention_bad_calls_die_with_one_line(arguments, options, parts):
    with pytest.raises(UsageError) as caught:
        attend(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def test_attention_layer_refuses_unknown_backends():
    with pytest.raises(UsageError, match=r"unknown backend 'plane'; did you mean plain"):
        Attention(Shape(dim=4, depth=1, num_heads=2), backend="plane")
