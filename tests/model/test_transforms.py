"""What PyTorch's own attention passes, every backend passes: transforms x backends, with PyTorch's
answer computed beside ours."""

import logging
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.tolerance import close, seeded
from support.transforms import (
    COMPILED,
    TRANSFORMS,
    autocast,
    compiled,
    compiled_for_any_size,
    compiled_for_two_sizes,
    exported_for_any_size,
    result,
    symbolic_graph,
)

from headwise.model.dispatch import attend
from headwise.model.plans import plans

KEYS = torch.tensor([True] * 9 + [False, True])  # one key is padding
SLOPES = torch.tensor([0.5, 0.25, 0.125])


def sdpa_window(q, k, v):
    at = torch.arange(q.shape[2], device=q.device)
    seen = (at <= at[:, None]) & (at[:, None] - at < 4)
    return F.scaled_dot_product_attention(q, k, v, seen)


def sdpa_padded(q, k, v):
    mask = F.pad(KEYS.to(q.device), (0, q.shape[2] - 11), value=True)
    return F.scaled_dot_product_attention(q, k, v, mask.view(1, 1, 1, -1))


def padded(q, k, v, **options):
    mask = F.pad(KEYS.to(q.device), (0, q.shape[2] - 11), value=True)
    return attend(q, k, v, mask=mask.view(1, 1, 1, -1), **options)


def sdpa_alibi(q, k, v):
    at = torch.arange(q.shape[2], device=q.device)
    bias = SLOPES.to(q.device).view(-1, 1, 1) * (at - at[:, None])
    bias = torch.where(at <= at[:, None], bias, -math.inf)
    return F.scaled_dot_product_attention(q, k, v, bias[None].to(q.dtype))


def sloped(q, k, v, **options):
    return attend(q, k, v, causal=True, alibi=SLOPES.to(q.device), **options)


# form: (batch, heads, KV heads, tokens, rank), ours, PyTorch's, backends that take it
FORMS = {
    "dense": (
        (2, 3, 3, 11, 5),
        attend,
        F.scaled_dot_product_attention,
        ("auto", "flash", "plain", "blocked", "wide"),
    ),
    "grouped and causal": (
        (2, 6, 2, 11, 5),
        lambda *t, **o: attend(*t, causal=True, **o),
        lambda *t: F.scaled_dot_product_attention(*t, is_causal=True, enable_gqa=True),
        ("auto", "flash", "plain", "blocked", "wide"),
    ),
    "few keys": (
        (2, 3, 3, 5, 3),
        attend,
        F.scaled_dot_product_attention,
        ("auto", "short", "flash", "plain", "blocked"),
    ),
    "window": (
        (2, 3, 3, 11, 5),
        lambda *t, **o: attend(*t, causal=True, window=4, **o),
        sdpa_window,
        ("auto", "flash", "plain", "blocked", "wide"),
    ),
    "padding": ((2, 3, 3, 11, 5), padded, sdpa_padded, ("auto", "flash", "plain", "blocked")),
    "alibi": ((2, 3, 3, 11, 5), sloped, sdpa_alibi, ("auto", "flash", "plain", "blocked")),
}
CHEAP = [
    (form, backend, transform)
    for form, (*_, backends) in FORMS.items()
    for backend in backends
    for transform in TRANSFORMS
    if transform not in COMPILED
]
# A compiler takes a second or more: each path of the code once. dev/transforms.py does all.
DEAR = [
    ("grouped and causal", "auto", compiled_for_any_size),
    ("grouped and causal", "auto", compiled_for_two_sizes),
    ("grouped and causal", "auto", exported_for_any_size),
    ("grouped and causal", "auto", symbolic_graph),
    ("few keys", "auto", compiled),
    ("few keys", "short", compiled_for_any_size),
    ("few keys", "auto", exported_for_any_size),
    ("window", "wide", compiled_for_two_sizes),
    ("window", "plain", exported_for_any_size),
    ("padding", "auto", compiled_for_any_size),
    ("alibi", "blocked", exported_for_any_size),
]
_ids = {"ids": lambda part: getattr(part, "__name__", str(part))}
_torch: dict = {}  # PyTorch's answers, computed once for all backends


def operands(batch, heads, kv, tokens, rank):
    generator = seeded(0)
    sizes = (batch, heads, tokens, rank), (batch, kv, tokens, rank), (batch, kv, tokens, rank)
    return [torch.randn(size, generator=generator) for size in sizes]


@pytest.mark.filterwarnings("ignore")  # of the tracers
@pytest.mark.parametrize(("form", "backend", "transform"), CHEAP + DEAR, **_ids)
def test_transform_that_torch_passes_passes_with_the_same_answer(form, backend, transform):
    sizes, ours, theirs, _ = FORMS[form]
    tensors = operands(*sizes)
    logging.disable(logging.CRITICAL)
    if (form, transform) not in _torch:
        _torch[form, transform] = result(transform, theirs, tensors)
    expected = _torch[form, transform]
    plans.clear()
    found = result(transform, partial(ours, backend=backend), tensors)
    logging.disable(logging.NOTSET)
    if isinstance(expected, Exception):  # then ours may, too, but in words, or by the formula
        assert not isinstance(found, Exception) or "\n" not in str(found)
        return
    assert not isinstance(found, Exception), found
    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in expected]
    largest = max(t.abs().max().item() for t in expected)
    for ours_, theirs_ in zip(found, expected, strict=True):
        if transform is autocast:
            assert (ours_ - theirs_).abs().max() <= 2**-7 * largest
        else:
            close(ours_, theirs_, largest=largest)


def test_transforms_of_second_order_pass_where_torch_has_none():
    """Forward derivatives and Hessians by the formula, on every automatic choice."""
    for form in ("dense", "grouped and causal", "few keys", "window", "padding", "alibi"):
        sizes, ours, theirs, _ = FORMS[form]
        tensors = operands(*sizes)
        for transform in TRANSFORMS:
            if transform.__name__ in ("pushforward", "jacobian_by_columns", "second_derivatives"):
                assert isinstance(result(transform, theirs, tensors), Exception)
                with torch.no_grad():
                    ours(*tensors)  # with the plan kept, too
                found = result(transform, ours, tensors)
                exact = result(transform, partial(ours, backend="plain"), tensors)
                for a, b in zip(found, exact, strict=True):
                    close(a, b)
