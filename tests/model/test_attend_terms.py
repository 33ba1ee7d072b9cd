"""`attend` with masks, documents, offsets, dropout, softcap, sinks and ALiBi, on every backend that
takes them, against keys picked one by one in float64; and what SDPA answers in odd sizes."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.attention_terms import reference_terms
from support.tolerance import close, close_all, examples, same, seeded
from torch.nn.attention import SDPBackend, sdpa_kernel

from headwise.errors import UsageError
from headwise.model import reference
from headwise.model.dispatch import attend, attend_with_weights
from headwise.model.plans import plans

FORMS = ("QN", "1N", "HQN", "B11N", "B1QN", "BHQN", "11Q1", "1H11")  # of masks, axis by axis
SCALE = 0.6


def operands(sizes, seed, dtype=torch.float64):
    batch, heads, kv, queries, keys, rank, width = sizes
    shapes = (batch, heads, queries, rank), (batch, kv, keys, rank), (batch, kv, keys, width)
    generator = seeded(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def mask_like(form, kind, sizes, generator):
    """A mask of one form that hides a third of the keys, now and then all of a query's."""
    batch, heads, _, queries, keys, *_ = sizes
    axes = {"B": batch, "H": heads, "Q": queries, "N": keys, "1": 1}
    shape = [axes[letter] for letter in form]
    seen = torch.rand(shape, generator=generator) > 0.35
    if kind == "bool":
        return seen
    return torch.randn(shape, generator=generator).masked_fill(~seen, -math.inf)


@st.composite
def calls(draw):
    """Sizes, options and a seed."""
    kv = draw(st.sampled_from((1, 2)))
    batch, heads = draw(st.sampled_from((1, 2))), kv * draw(st.sampled_from((1, 3)))
    queries, keys = (draw(st.sampled_from((1, 3, 5, 7))) for _ in range(2))
    sizes = (batch, heads, kv, queries, keys, 5, draw(st.sampled_from((2, 5, 7))))
    seed = draw(st.integers(0, 2**16))
    generator = seeded(seed)
    options = {
        "causal": draw(st.booleans()),
        "window": draw(st.sampled_from((0, 0, 2, 4))),
        "offset": draw(st.sampled_from((None, 0, 2, -3, 20))),
        "softcap": draw(st.sampled_from((0.0, 1.5))),
    }
    if form := draw(st.sampled_from(("", *FORMS))):
        kind = draw(st.sampled_from(("bool", "added")))
        options["mask"] = mask_like(form, kind, sizes, generator)
    if draw(st.booleans()):
        ids = (torch.randint(0, 2, (batch, n), generator=generator) for n in (queries, keys))
        options["documents"] = tuple(ids)
    for name in ("sinks", "alibi"):
        if draw(st.booleans()):
            options[name] = torch.rand(heads, generator=generator, dtype=torch.float64)
    return sizes, options, seed


def check(backend, case):
    """Value and gradients, those of sinks, slopes and an added mask among them."""
    sizes, options, seed = case
    given_ = dict(zip("qkv", operands(sizes, seed), strict=True)) | options
    names = [n for n, t in given_.items() if torch.is_tensor(t) and t.is_floating_point()]
    if backend == "flash":
        names = [n for n in names if n not in ("mask", "alibi")]
    results = []
    for function in (lambda **o: attend(**o, backend=backend), reference_terms):
        leaves = {n: given_[n].clone().requires_grad_() for n in names}
        y = function(**given_ | leaves, scale=SCALE)
        weighting = torch.randn(y.shape, generator=seeded(5), dtype=y.dtype)
        gradients = torch.autograd.grad(
            (y * weighting).sum() + 0 * sum(t.nan_to_num(0, 0, 0).sum() for t in leaves.values()),
            list(leaves.values()),
        )
        results.append((y.detach(), gradients))
    (y, gradients), (expected, expected_gradients) = results
    close(y, expected, f"{backend} value")
    close_all(gradients, expected_gradients, f"{backend} gradients of {names}")


@pytest.mark.parametrize("backend", ["auto", "plain", "blocked"])
def test_attend_with_terms_equals_keys_picked_one_by_one(backend):
    @examples(50)
    @given(calls())
    def run(case):
        check(backend, case)

    run()


def test_attend_fused_with_terms_equals_keys_picked_one_by_one():
    @examples(50)
    @given(calls().filter(lambda case: not case[1]["softcap"]))
    def run(case):
        check("flash", case)

    run()


@pytest.mark.parametrize("block_bytes", [1, 300])
def test_attend_blocks_with_terms_equal_keys_picked_one_by_one(monkeypatch, block_bytes):
    monkeypatch.setattr(reference, "BLOCK_BYTES", block_bytes)

    @examples(30)
    @given(calls())
    def run(case):
        check("blocked", case)

    run()


@pytest.mark.parametrize("backend", ["auto", "plain", "blocked"])
def test_attend_hardmax_with_terms_equals_keys_picked_one_by_one(backend):
    @examples(20)
    @given(calls())
    def run(case):
        sizes, options, seed = case
        tensors = operands(sizes, seed)
        y = attend(*tensors, scale=SCALE, hard=True, backend=backend, **options)
        close(y, reference_terms(*tensors, SCALE, hard=True, **options))

    run()


def test_attend_documents_of_keys_alone_are_those_of_queries_beside_them():
    tensors = operands((2, 3, 3, 5, 11, 5, 7), 0)
    ids = torch.randint(0, 3, (2, 11), generator=seeded(1))
    for offset in (None, 0, 4):
        start = 6 if offset is None else offset
        expected = attend(*tensors, documents=(ids[:, start : start + 5], ids), offset=offset)
        same(attend(*tensors, documents=ids, offset=offset), expected)


# ---- a query that sees nothing


@pytest.mark.parametrize("backend", ["auto", "flash", "plain", "blocked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("added", [False, True])
def test_attend_query_that_sees_nothing_gives_zeros_and_finite_gradients(backend, dtype, added):
    tensors = [t.requires_grad_() for t in operands((2, 3, 3, 5, 7, 5, 5), 0, dtype)]
    mask = torch.rand(2, 1, 5, 7, generator=seeded(1)) > 0.3
    mask[1, :, 2:4] = False
    if added:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    y = attend(*tensors, mask=mask, backend=backend)
    assert not y[1, :, 2:4].any()
    assert y[0].abs().min() > 0
    gradients = torch.autograd.grad(y.float().square().sum(), tensors)
    assert all(g.isfinite().all() for g in gradients)
    assert not gradients[0][1, :, 2:4].any()


# ---- weights


def test_attend_with_weights_answers_like_attend_and_with_the_weights_of_it():
    @examples(20)
    @given(calls())
    def run(case):
        sizes, options, seed = case
        q, k, v = operands(sizes, seed)
        y, weights = attend_with_weights(q, k, v, scale=SCALE, **options)
        close(y, attend(q, k, v, scale=SCALE, **options))
        eye = torch.eye(sizes[4], dtype=q.dtype).expand(sizes[0], sizes[2], -1, -1)
        close(weights, reference_terms(q, k, eye, SCALE, **options))

    run()


# ---- sizes that SDPA answers


@pytest.mark.parametrize("backend", ["auto", "flash", "plain", "blocked"])
@pytest.mark.parametrize(
    "sizes",
    [
        (0, 3, 3, 5, 7, 5, 5),
        (2, 0, 0, 5, 7, 5, 5),
        (2, 3, 3, 0, 7, 5, 5),
        (2, 3, 3, 5, 0, 5, 5),
        (2, 3, 3, 5, 7, 0, 5),
        (2, 3, 3, 5, 7, 5, 0),
    ],
)
def test_attend_empty_axes_are_answered_as_sdpa_answers(backend, sizes):
    tensors = operands(sizes, 0, torch.float32)
    with sdpa_kernel(SDPBackend.MATH):  # torch 2.9 dies in its fused kernel, of a division by zero
        expected = F.scaled_dot_product_attention(*tensors)
    close(attend(*tensors, backend=backend).sum(), expected.sum())
    assert attend(*tensors, backend=backend).shape == expected.shape
    assert attend(*tensors, backend=backend, hard=backend in ("plain", "blocked")).isfinite().all()


@pytest.mark.parametrize("backend", ["auto", "flash", "plain", "blocked", "short"])
def test_attend_three_axes_are_a_batch_of_one(backend):
    q, k, v = operands((1, 6, 2, 5, 5, 3, 3), 0, torch.float32)
    expected = attend(q, k, v, backend=backend)[0]
    for _ in range(2):  # the second time with the plan kept
        same(attend(q[0], k[0], v[0], backend=backend), expected)
    if backend != "short":
        mask = torch.rand(6, 5, 5, generator=seeded(1)) > 0.3
        same(
            attend(q[0], k[0], v[0], backend=backend, mask=mask, causal=True),
            attend(q, k, v, backend=backend, mask=mask, causal=True)[0],
        )
    y, weights = attend_with_weights(q[0], k[0], v[0])
    assert (y.shape, weights.shape) == ((6, 5, 3), (6, 5, 5))


# ---- autocast


@pytest.mark.parametrize("backend", ["auto", "flash", "plain", "blocked", "wide", "short"])
def test_attend_under_autocast_answers_in_its_type_from_any_types(backend):
    q, k, v = operands((2, 3, 3, 5, 5, 3, 3), 0, torch.float32)
    expected = attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), backend=backend)
    plans.clear()
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            same(attend(q, k.bfloat16(), v, backend=backend), expected)
            exact = [t.double() for t in (q, k, v)]
            assert attend(*exact, backend=backend).dtype == torch.float64


# ---- mistakes

Q = torch.ones(2, 3, 5, 7)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"mask": torch.ones(5, 6, dtype=torch.bool)}, ("broadcast to", "(2, 3, 5, 5)", "(5, 6)")),
        ({"mask": torch.ones(5)}, ("two to four axes", "got (5,)")),
        ({"mask": torch.ones(5, 5, dtype=torch.int64)}, ("bool (true where seen)", "got int64")),
        ({"mask": [[True]]}, ("mask must be a tensor", "got list")),
        ({"documents": torch.ones(2, 4, dtype=torch.int64)}, ("(2, 5)", "got (2, 4)")),
        ({"documents": torch.ones(2, 5)}, ("documents must be integers", "float32")),
        ({"documents": (torch.ones(2, 5),)}, ("a pair (of queries, of keys)", "got 1 parts")),
        (
            {"documents": torch.ones(2, 5, dtype=torch.int64), "offset": 3},
            ("a pair (of queries, of keys)", "5 queries from key 3 on and 5 keys"),
        ),
        ({"offset": 0.5}, ("offset must be an int", "float")),
        ({"dropout": 1.5}, ("probability from 0 to 1", "1.5")),
        ({"softcap": -1.0}, ("softcap must be positive", "-1.0")),
        ({"sinks": torch.ones(2)}, ("sinks must be one number per head, (3,)", "(2,)")),
        ({"alibi": torch.ones(3, dtype=torch.int64)}, ("alibi must be one number", "int64")),
        ({"mask": torch.ones(5, 5, device="meta")}, ("must be on cpu", "on meta")),
        (
            {"backend": "flash", "dropout": 0.1},
            ("backend flash cannot run", "without dropout or softcap, this call has dropout 0.1"),
        ),
        ({"backend": "flash", "softcap": 30.0}, ("this call has a softcap of 30",)),
        (
            {"backend": "flash", "alibi": torch.ones(3, requires_grad=True)},
            ("added mask without a gradient",),
        ),
        ({"backend": "wide", "mask": torch.ones(5, 5)}, ("causal and window, this call has",)),
        ({"backend": "wide", "sinks": torch.ones(3)}, ("without dropout or softcap or sinks",)),
        ({"backend": "short", "sinks": torch.ones(3)}, ("this call has sinks",)),
    ],
)
def test_attend_bad_terms_die_with_one_line(options, parts):
    with pytest.raises(UsageError) as caught:
        attend(Q, Q, Q, **options)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    ("bad", "part"),
    [
        (Q.int(), "float16, bfloat16, float32 and float64, got int32"),
        (Q.bool(), "got bool"),
        (Q.to(torch.complex64), "got complex64"),
        (Q.to(torch.float8_e4m3fn), "got float8_e4m3fn"),
        (Q.numpy(), "q must be a torch.Tensor, got ndarray"),
        (None, "q must be a torch.Tensor, got NoneType"),
        (
            torch.nested.nested_tensor([Q[0], Q[0, :2]], layout=torch.jagged),
            "a nested tensor as q; pad it",
        ),
        (Q.to_sparse(), "got layout torch.sparse_coo as q"),
    ],
)
def test_attend_inputs_that_are_no_numbers_are_refused_in_our_words(bad, part):
    with pytest.raises(UsageError) as caught:
        attend(bad, bad, bad)
    assert part in str(caught.value)
    with pytest.raises(UsageError):
        attend_with_weights(bad, bad, bad)
