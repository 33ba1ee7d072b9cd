"""Attention against `nn.MultiheadAttention` where that exists, against sums written out in float64 everywhere else."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerance import close, close_all, examples, same, seeded
from torch import nn
from torch.overrides import TorchFunctionMode

from headwise import backends
from headwise.attention import Attention, _planned, attend, mask_of, rotate
from headwise.backends import Call, choose_backend, explain, forced
from headwise.shape import Shape, UsageError

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
    return torch.stack([mix(q[:, h], k[:, h // group], v[:, h // group], scale, seen, hard) for h in range(q.shape[1])], 1)


def turned(x, width, theta):
    """Rotary positions as complex numbers: coordinate j of the first half with coordinate j of the second."""
    if not width:
        return x
    rest, re, im = x[..., :-width], x[..., -width : x.shape[-1] - width // 2], x[..., x.shape[-1] - width // 2 :]
    angle = torch.tensor([[n * theta ** (-2 * j / width) for j in range(width // 2)] for n in range(x.shape[-2])], dtype=torch.float64)
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
        deep = rms(affine(x, w["q_down.weight"], w.get("q_down.bias")), w["q_norm.weight"]) if s.q_lora_rank else x
        down = affine(x, w["kv_down.weight"], w.get("kv_down.bias"))
        shared = turned(down[..., s.kv_lora_rank :], rope, s.rope_theta)
        grown = affine(rms(down[..., : s.kv_lora_rank], w["kv_norm.weight"]), w["kv.weight"])
        for h in range(H):
            both = grown[..., h * (R - rope + V) : (h + 1) * (R - rope + V)]
            qs.append(turned(affine(deep, w["q.weight"][h * R : (h + 1) * R]), rope, s.rope_theta))
            ks.append(torch.cat((both[..., : R - rope], shared), -1))
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
            y = y + affine(mix(qs[h], ks[h], vs[h], scale, seen, hard), w["out.weight"][:, h * V : (h + 1) * V])
        modules.append(y)
    return sum(modules) / s.average


def filled(layer, seed=0, spread=0.5):
    generator = seeded(seed)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(0.0, spread, generator=generator)
    return layer


def with_gradients(function, tensors, generator_seed=7):
    """The function's value and its gradients under one random weighting of the value; hardmax sends none into q and k."""
    tensors = [t.detach().clone().requires_grad_() for t in tensors]
    y = function(*tensors)
    weighting = torch.randn(y.shape, generator=seeded(generator_seed), dtype=torch.float64).to(y.dtype)
    return y.detach(), torch.autograd.grad((y * weighting).sum(), tensors, allow_unused=True, materialize_grads=True)


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
        found.append((y, torch.autograd.grad((y * weighting).sum(), (z, *params), allow_unused=True, materialize_grads=True)))
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
        dim=draw(st.sampled_from(PRIMES)), depth=2, num_heads=heads, num_kv_heads=kv, head_dim=rank,
        v_head_dim=draw(st.sampled_from((rank, *PRIMES))), qk_rope_head_dim=2 * draw(st.integers(0, rank // 2)), rope_theta=100.0,
        qk_norm=qk_norm, max_logit=largest, logit_scale=None if largest else draw(st.sampled_from((None, 0.7))),
        average=draw(st.sampled_from([n for n in (1, 2, 3, 5) if heads % n == 0])), causal=draw(st.booleans()),
        windows=(draw(st.sampled_from((0, 1, 3))), draw(st.sampled_from((0, 2, 5)))),
        qkv_bias=draw(st.booleans()), out_bias=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def latent(draw):
    rank = 2 * draw(st.integers(1, 6))
    return Shape(
        dim=draw(st.sampled_from(PRIMES)), depth=1, num_heads=draw(st.sampled_from((1, 2, 3, 5))), head_dim=rank,
        v_head_dim=draw(st.sampled_from((rank, *PRIMES))), kv_lora_rank=draw(st.sampled_from(PRIMES)),
        q_lora_rank=draw(st.sampled_from((0, *PRIMES))), qk_rope_head_dim=2 * draw(st.integers(0, rank // 2)), rope_theta=50.0,
        causal=draw(st.booleans()), qkv_bias=draw(st.booleans()), out_bias=draw(st.booleans()),
    )  # fmt: skip


@examples(120)
@given(grouped(), st.sampled_from((1, 3)), st.sampled_from((1, 2, 5, 7, 11)), st.integers(0, 1), st.integers(0, 2**16))
def test_grouped_heads_equal_the_formula(shape, batch, tokens, layer, seed):
    check_layer(shape, batch, tokens, seed, layer)


@examples(80)
@given(latent(), st.sampled_from((1, 3)), st.sampled_from((1, 2, 5, 11)), st.integers(0, 2**16))
def test_latent_heads_equal_the_formula(shape, batch, tokens, seed):
    check_layer(shape, batch, tokens, seed)


@examples(40)
@given(st.one_of(grouped(), latent()), st.sampled_from((2, 5, 11)), st.integers(0, 2**16))
def test_hardmax_equals_the_formula(shape, tokens, seed):
    check_layer(shape, 3, tokens, seed, hard=True)


@pytest.mark.parametrize("backend", ["auto", "short", "flash", "plain", "blocked"])
@pytest.mark.parametrize("rank", [1, 2, 5, 8])
def test_every_backend_of_the_layer_equals_the_formula(backend, rank):
    check_layer(Shape(dim=11, depth=1, num_heads=6, head_dim=rank, average=3, qkv_bias=True, out_bias=True), 3, 7, rank, backend=backend)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dim", "heads", "tokens"), [(15, 5, 7), (14, 1, 11), (22, 11, 5), (21, 21, 3), (26, 2, 37)])
def test_equals_multihead_attention(dim, heads, tokens, causal, dtype):
    ours = filled(Attention(Shape(dim=dim, depth=1, num_heads=heads, causal=causal, qkv_bias=True, out_bias=True))).to(dtype)
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
        {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "qk_norm": "head", "qk_rope_head_dim": 4, "causal": True},
        {"num_heads": 3, "head_dim": 8, "kv_lora_rank": 11, "q_lora_rank": 7, "qk_rope_head_dim": 2},
    ],
)
def test_half_precision_by_autocast(changes):
    """bf16 products of float32 weights stay within bf16 of the float64 formula, and gradients flow."""
    layer = filled(Attention(Shape(dim=31, depth=1, **changes)), spread=0.2)
    x = torch.randn(3, 8, 31, generator=seeded(1))
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        fused = Attention(layer.shape, backend="flash")
        fused.load_state_dict(layer.state_dict())
        same(y, fused(x), "chosen by the dtype of the products, not of the weights: the short kernel adds in its own dtype")
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
        Shape(dim=11, depth=1, num_heads=6, num_kv_heads=3, head_dim=10, v_head_dim=3, causal=True, windows=(3,)),
        Shape(dim=11, depth=1, num_heads=3, head_dim=10, v_head_dim=13, windows=(2,), qk_norm="free", qk_rope_head_dim=4),
        Shape(dim=11, depth=1, num_heads=3, head_dim=6, kv_lora_rank=5, q_lora_rank=7, qk_rope_head_dim=2, causal=True),
    ],
)
def test_keep_returns_the_same_output_and_proper_weights(shape, hard):
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
    close(out["heads"], torch.einsum("bhqn,bhnv->bhqv", weights, out["v"].repeat_interleave(group, 1)))
    close(out["scores"], shape.scale * torch.einsum("bhqr,bhnr->bhqn", out["q"], out["k"].repeat_interleave(group, 1)))


def test_keep_works_on_stacked_models():
    layer = filled(Attention(Shape(dim=7, depth=1, num_heads=3, head_dim=5), models=2)).double()
    x = torch.randn(2, 3, 5, 7, generator=seeded(0), dtype=torch.float64)
    y, out = layer(x, keep=True)
    close(y, layer(x))
    assert out["weights"].shape == (2, 3, 3, 5, 5)


@pytest.mark.parametrize("qk_norm", ["free", "head"])
def test_max_logit_is_the_largest_score_at_every_rank(qk_norm):
    """Equal query and key weights put the largest possible score on the diagonal."""
    for rank in (8, 32, 128):
        shape = Shape(dim=29, depth=1, num_heads=3, head_dim=rank, qk_norm=qk_norm, max_logit=11.0)
        layer = Attention(shape).double()
        with torch.no_grad():
            layer.qkv.weight.normal_(0.0, 100.0, generator=seeded(rank))  # large, so that the norm's epsilon is nothing
            layer.qkv.weight[3 * rank : 6 * rank] = layer.qkv.weight[: 3 * rank]
            layer.out.weight.zero_()
        _, out = layer(torch.randn(2, 5, 29, generator=seeded(1), dtype=torch.float64), keep=True)
        diagonal = out["scores"].diagonal(dim1=-2, dim2=-1)
        close(diagonal, torch.full_like(diagonal, 11.0), f"rank {rank}")
        assert out["scores"].abs().max() <= 11.0 + 1e-9


def test_models_with_their_own_axis_do_not_mix():
    shape = Shape(dim=7, depth=1, num_heads=6, num_kv_heads=2, head_dim=4, qk_norm="head", qk_rope_head_dim=2, average=3, out_bias=True)
    stacked = filled(Attention(shape, models=3)).double()
    x = torch.randn(3, 2, 5, 7, generator=seeded(1), dtype=torch.float64)
    y = stacked(x)
    for m in range(3):
        alone = Attention(shape).double()
        alone.load_state_dict({name: t[m] for name, t in stacked.state_dict().items()})
        close(y[m], alone(x[m]))


# ---- rotary positions


@examples(60)
@given(st.integers(1, 7), st.integers(0, 5), st.integers(1, 9), st.integers(0, 30), st.sampled_from((10.0, 10_000.0)))
def test_rotation_keeps_lengths_and_depends_on_distance_alone(half, rest, tokens, start, theta):
    width = 2 * half
    q, k = (torch.randn(3, tokens, rest + width, generator=seeded(i), dtype=torch.float64) for i in (1, 2))
    close(rotate(q, width, theta).norm(dim=-1), q.norm(dim=-1))
    same(rotate(q, width, theta)[..., :rest], q[..., :rest])
    close(rotate(q, width, theta), turned(q, width, theta))
    scores = rotate(q, width, theta) @ rotate(k, width, theta).mT
    close(rotate(q, width, theta, start) @ rotate(k, width, theta, start).mT, scores)
    close(rotate(torch.cat((q, q), 1), width, theta)[:, tokens:], rotate(q, width, theta, tokens))


@pytest.mark.parametrize("changes", [{"qk_norm": "head"}, {"qk_norm": "free"}, {}])
def test_scores_of_rotary_heads_depend_on_distance_alone(changes):
    """The same tokens later in the sequence score each other the same: also with learned gains on q and k."""
    shape = Shape(dim=11, depth=1, num_heads=3, head_dim=6, qk_rope_head_dim=4, causal=True, **changes)
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
    sizes = (draw(st.sampled_from((1, 2))), kv * draw(st.sampled_from((1, 2, 5))), kv, queries, keys, rank, width)
    causal, window = (draw(st.booleans()), draw(st.sampled_from((0, 1, 2, 4, 20)))) if mask else (False, 0)
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
    y, grads = with_gradients(lambda q, k, v: attend(q, k, v, scale=scale, backend=backend, **options), tensors)
    exact = [t.double() for t in tensors]
    expected, expected_grads = with_gradients(lambda q, k, v: reference_attend(q, k, v, scale, **options), exact)
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
def test_hardmax_backends_equal_the_sums(backend):
    @examples(30)
    @given(calls(), st.integers(0, 2**16))
    def check(case, seed):
        check_attend(backend, case, torch.float64, seed, hard=True)

    check()


@pytest.mark.parametrize("block_bytes", [1, 300, 2000])
@pytest.mark.parametrize("hard", [False, True])
def test_many_small_blocks_equal_the_sums(monkeypatch, block_bytes, hard):
    """One byte: a block a query; the others: several queries, the last block ragged."""
    monkeypatch.setattr(backends, "BLOCK_BYTES", block_bytes)

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


def test_blocks_never_hold_more_scores_than_allowed(monkeypatch):
    monkeypatch.setattr(backends, "BLOCK_BYTES", 4000)
    q, k, v = tensors_of((2, 3, 3, 37, 37, 5, 5), torch.float32, 0)
    with Scores() as seen:
        attend(q, k, v, backend="blocked")
    assert len(seen.bytes) == math.ceil(37 / (4000 // (2 * 3 * 37 * 4)))
    assert max(seen.bytes) <= 4000
    assert sum(seen.bytes) == 2 * 3 * 37 * 37 * 4


@pytest.mark.parametrize("backend", ["flash", "plain", "blocked"])
def test_half_precision_backends_are_close(backend):
    for seed, case in enumerate(
        (((2, 6, 3, 7, 7, 5, 5), True, 0), ((1, 3, 3, 13, 13, 11, 2), False, 0), ((1, 2, 1, 3, 13, 8, 8), True, 4))
    ):
        check_attend(backend, case, torch.bfloat16, seed)


@pytest.mark.parametrize("backend", ["auto", "flash", "plain", "blocked"])
@pytest.mark.parametrize("window", [0, 4])
def test_the_last_queries_alone_are_the_end_of_the_whole(backend, window):
    """Decoding: m queries against n keys stand at the last m of them."""
    q, k, v = tensors_of((2, 6, 2, 13, 13, 5, 7), torch.float64, 0)
    whole = attend(q, k, v, causal=True, window=window, backend="plain")
    for m in (1, 2, 5, 12, 13):
        close(attend(q[:, :, -m:], k, v, causal=True, window=window, backend=backend), whole[:, :, -m:], f"{m} queries")


def test_scale_is_the_inverse_root_of_the_rank_unless_given():
    q, k, v = tensors_of((2, 3, 3, 5, 5, 7, 2), torch.float64, 0)
    close(attend(q, k, v), reference_attend(q, k, v, 7**-0.5))
    close(attend(q, k, v, scale=0.3), reference_attend(q, k, v, 0.3))


@examples(100)
@given(st.integers(1, 9), st.integers(0, 6), st.booleans(), st.integers(0, 11))
def test_mask_equals_the_truth_table(queries, more, causal, window):
    keys = queries + more
    mask = mask_of(queries, keys, causal, window)
    same(torch.ones(queries, keys, dtype=torch.bool) if mask is None else mask, sees(queries, keys, causal, window))


# ---- which backend, and why not another


def call(device="cpu", dtype=torch.float32, tokens=1024, rank=64, width=None, **changes):
    fields = {"batch": 1, "heads": 8, "kv_heads": 8, "queries": tokens, "keys": tokens, "graphed": device == "cuda"}
    return Call(device=device, dtype=dtype, rank=rank, width=rank if width is None else width, **fields | changes)


BF16 = torch.bfloat16


NARROW = ("wide", "faster up to width 256, got 64 and 64")


@pytest.mark.parametrize(
    ("given_", "backend", "refusals"),
    [
        (call(tokens=8, rank=8), "short", []),
        (call(tokens=32, rank=2), "short", []),
        (call(tokens=9, rank=8), "flash", [("short", "got 9 keys at rank 8"), ("cudnn", "needs a GPU, the device is cpu")]),
        (call(tokens=9, rank=3), "flash", [("short", "got 9 keys at rank 3"), ("cudnn", "needs a GPU")]),
        (call(tokens=33, rank=1), "flash", [("short", "got 33 keys at rank 1"), ("cudnn", "needs a GPU")]),
        (call(tokens=8, rank=8, causal=True), "flash", [("short", "has no mask"), ("cudnn", "needs a GPU")]),
        (call(tokens=8, rank=8, window=3), "flash", [("short", "has no mask"), ("cudnn", "needs a GPU")]),
        (call(tokens=8, rank=8, dtype=BF16), "flash", [("cudnn", "needs a GPU")]),
        (call(rank=1792), "flash", [("short", "1024 keys at rank 1792"), ("cudnn", "needs a GPU")]),
        (call(hard=True), "plain", [("any fused kernel", "none computes hardmax")]),
        (
            call(hard=True, batch=9),
            "blocked",
            [("any fused kernel", "hardmax"), ("plain", "would write 288 MiB of scores, more than 256 MiB")],
        ),
        (call("cuda", tokens=64), "heads", []),
        (call("cuda", tokens=256, rank=3), "heads", []),
        (call("cuda", tokens=1, rank=64), "heads", []),
        (call("cuda", BF16, tokens=64), "heads", []),
        (call("cuda", torch.float16, tokens=64, rank=1), "heads", []),
        (call("cuda", tokens=16, window=16), "heads", []),  # a window of all keys is none
        (call("cuda", tokens=64, rank=65), "plain", [("heads", "up to 256 tokens and rank 64 in float32, got 64 tokens at rank 65")]),
        (call("cuda", tokens=64, causal=True), "plain", [("heads", "has no mask")]),
        (call("cuda", tokens=64, window=3), "plain", [("heads", "has no mask")]),
        (call("cuda", torch.float64, tokens=64), "plain", [("heads", "does not take float64")]),
        (call("cuda", tokens=64, rank=8, width=16), "plain", [("heads", "values as wide as the rank, got 64, 64 and 8, 16")]),
        (call("cuda", tokens=64, queries=3), "plain", [("heads", "as many queries as keys and values as wide as the rank, got 3, 64")]),
        (call("cuda", BF16, tokens=65), "cudnn", [("heads", "up to 64 tokens and rank 64 in bfloat16, got 65 tokens at rank 64")]),
        (call("cuda", BF16), "cudnn", [("heads", "got 1024 tokens")]),
        (call("cuda", BF16, rank=3, causal=True), "cudnn", [("heads", "no mask")]),
        (
            call("cuda", tokens=257),
            "efficient",
            [
                ("heads", "got 257 tokens at rank 64"),
                ("plain", "beyond 64 tokens"),
                ("cudnn", "got float32"),
                ("flash", "got float32"),
                NARROW,
            ],
        ),
        (
            call("cuda"),
            "efficient",
            [
                ("heads", "got 1024 tokens at rank 64"),
                ("plain", "fused kernels win beyond 64 tokens"),
                ("cudnn", "float16 and bfloat16, got float32"),
                ("flash", "got float32"),
                NARROW,
            ],
        ),
        (
            call("cuda", BF16, window=100),
            "efficient",
            [("heads", "no mask"), ("cudnn", "a mask of its own"), ("flash", "no mask for windows"), ("plain", "beyond 64 tokens"), NARROW],
        ),
        (
            call("cuda", BF16, queries=100, causal=True),
            "efficient",
            [("heads", "no mask"), ("cudnn", "a mask of its own"), ("flash", "unequal lengths"), ("plain", "beyond 64 tokens"), NARROW],
        ),
        (
            call("cuda", BF16, rank=320),
            "wide",
            [
                ("heads", "at rank 320"),
                ("cudnn", "stops at width"),
                ("flash", "stops at width 256, got 320 and 320"),
                ("plain", "beyond 64 tokens"),
            ],
        ),
        (
            call("cuda", width=320, window=100),
            "wide",
            [("heads", "no mask"), ("plain", "beyond 64 tokens"), ("cudnn", "got float32"), ("flash", "got float32")],
        ),
        (
            call("cuda", BF16, rank=16, width=64, keys=1, queries=1),
            "plain",
            [
                ("heads", "got 1, 1 and 16, 64"),
                ("cudnn", "more than one key"),
                ("flash", "widths 16 and 64 would be padded to 64, more than twice"),
            ],
        ),
        (
            call("cuda", torch.float64),
            "plain",
            [
                ("heads", "does not take float64"),
                ("plain", "beyond 64"),
                ("cudnn", "got float64"),
                ("flash", "got float64"),
                NARROW,
                ("efficient", "does not take float64"),
            ],
        ),
        (call("cuda", hard=True), "plain", [("any fused kernel", "none computes hardmax")]),
        (
            call("mps"),
            "plain",
            [("plain", "beyond 64"), ("cudnn", "the device is mps"), ("flash", "not known on mps"), ("efficient", "the device is mps")],
        ),
    ],
)
def test_the_choice_and_every_refusal(given_, backend, refusals):
    choice = choose_backend(given_)
    assert choice.backend == backend
    assert [name for name, _ in choice.refused] == [name for name, _ in refusals]
    for (name, why), (_, expected) in zip(choice.refused, refusals, strict=True):
        assert expected in why, f"{name}: {why}"
    lines = str(choice).splitlines()
    assert lines[0] == f"{backend}: {choice.why}"
    told = [(name, why) for name, why in choice.refused if name != choice.backend]  # plain may lose its shortcut and still be chosen
    assert [line for line in lines if line.startswith("  not ")] == [f"  not {name}: {why}" for name, why in told]


def test_without_triton_a_gpu_does_without_its_own_kernels(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backends, "has_triton", lambda: False)
    assert choose_backend(call("cuda", tokens=64)).refused == (("heads", "triton is not installed"),)
    monkeypatch.setattr(backends, "has_triton", lambda: True)
    assert choose_backend(call("cuda", tokens=64)).backend == "heads"


@pytest.mark.parametrize(
    ("given_", "backend", "pad", "repeat"),
    [
        (call(rank=3, width=7), "flash", (4, 0), False),
        (call(rank=7, width=3, kv_heads=2), "flash", (0, 4), False),
        (call(tokens=5, rank=3, kv_heads=2), "short", (0, 0), True),
        (call("cuda", tokens=5, rank=3, kv_heads=2), "heads", (0, 0), True),
        (call("cuda", tokens=5, rank=3), "heads", (0, 0), False),
        (call("cuda", BF16, rank=3, width=17, kv_heads=2), "cudnn", (5, 7), False),
        (call("cuda", rank=3, width=17, kv_heads=2), "efficient", (1, 3), True),
        (call("cuda", BF16, rank=3, width=17, window=9), "efficient", (5, 7), False),
    ],
)
def test_padding_and_repetition(given_, backend, pad, repeat):
    choice = choose_backend(given_)
    assert (choice.backend, choice.pad, choice.repeat_kv) == (backend, pad, repeat)
    assert ("padded with zeros" in str(choice)) == any(pad)
    assert ("repeated for every query head" in str(choice)) == repeat


@examples(300)
@given(
    st.builds(
        Call,
        device=st.sampled_from(("cpu", "cuda", "mps")),
        dtype=st.sampled_from((torch.float32, torch.float64, torch.float16, torch.bfloat16)),
        batch=st.sampled_from((1, 7, 1000, 100_000)),
        heads=st.sampled_from((6, 12, 1020)),
        kv_heads=st.sampled_from((1, 2, 6)),
        queries=st.sampled_from((1, 8, 64, 65, 1000)),
        keys=st.sampled_from((1, 8, 64, 65, 1000, 4001)),
        rank=st.sampled_from((1, 8, 100, 257, 1792)),
        width=st.sampled_from((1, 8, 100, 257, 1792)),
        causal=st.booleans(),
        window=st.sampled_from((0, 5, 10_000)),
        hard=st.booleans(),
    )
)
def test_scores_are_never_written_out_whole_when_they_are_large(c):
    choice = choose_backend(c)
    written = c.batch * c.heads * c.queries * c.keys * max(4, c.dtype.itemsize)
    few_tokens_on_a_gpu = c.device != "cpu" and not c.hard and max(c.queries, c.keys) <= 64
    if choice.backend == "plain":
        assert written <= backends.BLOCK_BYTES or (few_tokens_on_a_gpu and written <= 16 * backends.BLOCK_BYTES)
    if choice.backend in ("heads", "cudnn", "flash", "efficient", "short"):
        assert not c.hard
    if choice.backend in ("heads", "cudnn", "efficient"):
        assert c.device == "cuda"
    if choice.backend == "heads":
        assert c.dtype != torch.float64
        assert not c.masked
        assert not c.causal
        assert c.queries == c.keys <= (256 if c.dtype == torch.float32 else 64)
        assert c.rank == c.width <= 64
    if choice.backend == "flash" and c.device == "cuda":
        assert c.dtype in (torch.float16, torch.bfloat16)
        assert max(c.rank, c.width) <= 256
        assert not c.masked
    assert choice.backend not in [name for name, _ in choice.refused] or choice.backend == "plain"


@pytest.mark.parametrize(
    ("given_", "graphed", "launched"),
    [
        (call("cuda", BF16, tokens=64, batch=64), "heads", "cudnn"),
        (call("cuda", tokens=64, batch=64), "heads", "efficient"),
        (call("cuda", BF16, tokens=64, rank=512, width=128), "plain", "efficient"),
        (call("cuda", BF16, tokens=512, rank=512, heads=2, kv_heads=1, causal=True), "wide", "efficient"),
        (call("cuda", tokens=512, rank=300, heads=2, kv_heads=2, window=30), "wide", "efficient"),
        (call("cuda", torch.float64, tokens=64), "plain", "plain"),
        (call("cuda", BF16, tokens=64, batch=500), "heads", "heads"),
        (call("cuda", BF16, tokens=2048, rank=512, width=128), "wide", "wide"),
    ],
)
def test_where_launches_count_little_work_goes_to_one_kernel(given_, graphed, launched):
    assert choose_backend(given_).backend == graphed
    other = choose_backend(dataclasses.replace(given_, graphed=False))
    assert other.backend == launched
    assert graphed == launched or any("launching" in why for _, why in other.refused)


def test_by_name_little_work_goes_where_it_is_asked_to_go():
    few = call("cuda", BF16, tokens=32, graphed=False)
    assert choose_backend(few).backend != "heads"
    assert forced("heads", few).backend == "heads"
    assert forced("efficient", dataclasses.replace(few, rank=300, width=300)).backend == "efficient"


@pytest.mark.parametrize("rank", [1, 11])
@pytest.mark.parametrize("first", [True, False])
def test_fused_kernels_take_columns_side_by_side(rank, first):
    """Whether or not the same sizes came before, in the usual order."""
    q, k, v = (torch.randn(2, 3, rank, 37, generator=seeded(i)).mT for i in range(3))
    _planned.cache_clear()
    if not first:
        attend(q.contiguous(), k.contiguous(), v.contiguous(), causal=True, backend="flash")
    close(attend(q, k, v, causal=True, backend="flash"), attend(q, k, v, causal=True, backend="plain"))


def test_explain_reads_the_shape():
    shape = Shape(dim=96, depth=2, num_heads=6, num_kv_heads=2, head_dim=16, v_head_dim=24, causal=True, windows=(0, 64))
    assert explain(shape, 512, device="cuda", dtype=BF16).backend == "cudnn"
    assert explain(shape, 512, device="cuda", dtype=BF16, layer=1).backend == "efficient"
    assert explain(shape, 64, device="cuda", dtype=BF16, layer=1).backend == "cudnn"  # a window of all keys is none
    assert explain(shape, 512, device="cpu") == choose_backend(call(tokens=512, rank=16, width=24, heads=6, kv_heads=2, causal=True))
    assert explain(shape, 512, device="cpu", hard=True).backend == "plain"
    assert explain(Shape(dim=64, depth=1, num_heads=8), 16, batch=500, device="cuda").backend == "heads"
    assert explain(shape, 2, device="cpu").backend == "flash"
    assert explain(shape.replace(causal=False), 4, device="cpu").backend == "flash"  # rank 16
    assert explain(shape.replace(causal=False, head_dim=2), 4, device="cpu").backend == "short"
    assert explain(shape) == explain(shape, 1024, device="cuda" if torch.cuda.is_available() else "cpu")


def test_a_call_measures_its_scores():
    c = call(tokens=11, batch=2, heads=3, queries=5)
    assert c.score_bytes == 2 * 3 * 5 * 11 * 4
    assert dataclasses.replace(c, dtype=torch.float64).score_bytes == 2 * c.score_bytes
    assert dataclasses.replace(c, dtype=BF16).score_bytes == c.score_bytes  # accumulated in float32


# ---- mistakes


def ones(*size, dtype=torch.float32):
    return torch.ones(size, dtype=dtype)


@pytest.mark.parametrize(
    ("arguments", "options", "parts"),
    [
        ((ones(2, 3, 4), ones(2, 3, 4), ones(2, 3, 4)), {}, ("(batch, heads, tokens, width)", "q (2, 3, 4)")),
        ((ones(2, 3, 5, 7), ones(2, 3, 5, 6), ones(2, 3, 5, 7)), {}, ("q and k must share batch and rank", "k (2, 3, 5, 6)")),
        ((ones(1, 3, 5, 7), ones(2, 3, 5, 7), ones(2, 3, 5, 7)), {}, ("q and k must share batch", "q (1, 3, 5, 7)")),
        ((ones(2, 3, 5, 7), ones(2, 3, 5, 7), ones(2, 3, 4, 7)), {}, ("k and v batch, heads and tokens", "v (2, 3, 4, 7)")),
        ((ones(2, 5, 5, 7), ones(2, 3, 5, 7), ones(2, 3, 5, 7)), {}, ("query heads must be a multiple of KV heads", "got 5 and 3")),
        ((ones(2, 3, 0, 7), ones(2, 3, 5, 7), ones(2, 3, 5, 7)), {}, ("no axis may be empty", "q (2, 3, 0, 7)")),
        ((ones(2, 3, 5, 7), ones(2, 0, 5, 7), ones(2, 0, 5, 7)), {}, ("no axis may be empty", "k (2, 0, 5, 7)")),
        ((ones(2, 3, 5, 7), ones(2, 3, 5, 7), ones(2, 3, 5, 0)), {}, ("no axis may be empty", "v (2, 3, 5, 0)")),
        ((ones(2, 3, 5, 7), ones(2, 3, 4, 7), ones(2, 3, 4, 7)), {"causal": True}, ("causal attention needs", "4 keys, 5 queries")),
        ((ones(2, 3, 5, 7), ones(2, 3, 4, 7), ones(2, 3, 4, 7)), {"window": 1}, ("windowed attention needs", "4 keys, 5 queries")),
        ((ones(2, 3, 5, 7),) * 3, {"window": -1}, ("window must not be negative", "got -1")),
        ((ones(2, 3, 5, 7), ones(2, 3, 5, 7), ones(2, 3, 5, 7, dtype=torch.float64)), {}, ("share dtype", "v float64 on cpu")),
        ((ones(2, 3, 5, 7),) * 3, {"backend": "flsh"}, ("unknown backend 'flsh'", "did you mean flash", "blocked")),
        ((ones(2, 3, 5, 7),) * 3, {"backend": "cudnn"}, ("backend cudnn cannot run this call", "needs a GPU, the device is cpu")),
        ((ones(2, 3, 5, 7),) * 3, {"backend": "heads"}, ("backend heads cannot run this call", "needs a GPU, the device is cpu")),
        ((ones(2, 3, 5, 7),) * 3, {"backend": "efficient"}, ("backend efficient cannot run this call", "needs a GPU")),
        ((ones(2, 3, 5, 7),) * 3, {"backend": "short", "causal": True}, ("backend short cannot run this call", "no mask")),
        ((ones(2, 3, 5, 9),) * 3, {"backend": "short"}, ("backend short cannot run this call", "5 keys at rank 9")),
        ((ones(2, 3, 5, 7),) * 3, {"backend": "flash", "hard": True}, ("flash does not compute hardmax", "plain, blocked")),
        ((ones(2, 3, 5, 7),) * 3, {"backend": "heads", "hard": True}, ("heads does not compute hardmax", "plain, blocked")),
    ],
)
def test_bad_calls_die_with_one_line(arguments, options, parts):
    with pytest.raises(UsageError) as caught:
        attend(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def test_a_layer_refuses_unknown_backends():
    with pytest.raises(UsageError, match=r"unknown backend 'plane'; did you mean plain"):
        Attention(Shape(dim=4, depth=1, num_heads=2), backend="plane")
