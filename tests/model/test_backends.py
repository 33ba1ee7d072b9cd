"""Which backend computes which attention: every choice, every refusal, and what is padded or
repeated for it."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tolerance import examples

from headwise.model import backends, reference
from headwise.model.backends import Call, choose_backend, explain, forced
from headwise.shape import Shape


def call(device="cpu", dtype=torch.float32, tokens=1024, rank=64, width=None, **changes):
    fields = {
        "batch": 1,
        "heads": 8,
        "kv_heads": 8,
        "queries": tokens,
        "keys": tokens,
        "graphed": device == "cuda",
    }
    return Call(
        device=device,
        dtype=dtype,
        rank=rank,
        width=rank if width is None else width,
        **fields | changes,
    )


BF16 = torch.bfloat16

NARROW = (
    "wide",
    "needs a width above 256 to be faster than fused kernels, this call has 64 and 64",
)


@pytest.mark.parametrize(
    ("given_", "backend", "refusals"),
    [
        (call(tokens=8, rank=8), "short", []),
        (call(tokens=32, rank=2), "short", []),
        (
            call(tokens=9, rank=8),
            "flash",
            [
                ("short", "this call has 9 keys at rank 8"),
                ("cudnn", "needs a GPU, the device is cpu"),
            ],
        ),
        (
            call(tokens=9, rank=3),
            "flash",
            [("short", "this call has 9 keys at rank 3"), ("cudnn", "needs a GPU")],
        ),
        (
            call(tokens=33, rank=1),
            "flash",
            [("short", "this call has 33 keys at rank 1"), ("cudnn", "needs a GPU")],
        ),
        (
            call(tokens=8, rank=8, causal=True),
            "flash",
            [
                ("short", "needs attention without a mask, this call has one"),
                ("cudnn", "needs a GPU"),
            ],
        ),
        (
            call(tokens=8, rank=8, window=3),
            "flash",
            [
                ("short", "needs attention without a mask, this call has one"),
                ("cudnn", "needs a GPU"),
            ],
        ),
        (call(tokens=8, rank=8, dtype=BF16), "flash", [("cudnn", "needs a GPU")]),
        (call(rank=1792), "flash", [("short", "1024 keys at rank 1792"), ("cudnn", "needs a GPU")]),
        (call(hard=True), "plain", [("any fused kernel", "none computes hardmax")]),
        (
            call(hard=True, batch=9),
            "blocked",
            [
                ("any fused kernel", "hardmax"),
                ("plain", "needs at most 256 MiB of scores, this call has 288 MiB"),
            ],
        ),
        (call("cuda", tokens=64), "heads", []),
        (call("cuda", tokens=256, rank=3), "heads", []),
        (call("cuda", tokens=1, rank=64), "heads", []),
        (call("cuda", BF16, tokens=64), "heads", []),
        (call("cuda", torch.float16, tokens=64, rank=1), "heads", []),
        (call("cuda", tokens=16, window=16), "heads", []),  # a window of all keys is none
        (
            call("cuda", tokens=64, rank=65),
            "plain",
            [
                (
                    "heads",
                    "at most 256 tokens and rank 64 in float32 to be the fastest, this call has 64 "
                    "tokens at rank 65",
                )
            ],
        ),
        (
            call("cuda", tokens=64, causal=True),
            "plain",
            [("heads", "needs attention without a mask, this call has one")],
        ),
        (
            call("cuda", tokens=64, window=3),
            "plain",
            [("heads", "needs attention without a mask, this call has one")],
        ),
        (
            call("cuda", torch.float64, tokens=64),
            "plain",
            [("heads", "needs 16 or 32 bits, this call has float64")],
        ),
        (
            call("cuda", tokens=64, rank=8, width=16),
            "plain",
            [("heads", "values as wide as the rank, this call has 64 and 64, 16 and 8")],
        ),
        (
            call("cuda", tokens=64, queries=3),
            "plain",
            [
                (
                    "heads",
                    "as many queries as keys and values as wide as the rank, this call has 3 and "
                    "64",
                )
            ],
        ),
        (
            call("cuda", BF16, tokens=65),
            "cudnn",
            [
                (
                    "heads",
                    "at most 64 tokens and rank 64 in bfloat16 to be the fastest, this call has 65 "
                    "tokens at rank 64",
                )
            ],
        ),
        (call("cuda", BF16), "cudnn", [("heads", "this call has 1024 tokens")]),
        (
            call("cuda", BF16, rank=3, causal=True),
            "cudnn",
            [("heads", "needs attention without a mask")],
        ),
        (
            call("cuda", tokens=257),
            "efficient",
            [
                ("heads", "this call has 257 tokens at rank 64"),
                ("plain", "needs at most 64 tokens"),
                ("cudnn", "this call has float32"),
                ("flash", "this call has float32"),
                NARROW,
            ],
        ),
        (
            call("cuda"),
            "efficient",
            [
                ("heads", "this call has 1024 tokens at rank 64"),
                ("plain", "1024 queries and 1024 keys, 32 MiB of scores"),
                ("cudnn", "float16 or bfloat16, this call has float32"),
                ("flash", "this call has float32"),
                NARROW,
            ],
        ),
        (
            call("cuda", BF16, window=100),
            "efficient",
            [
                ("heads", "needs attention without a mask"),
                ("cudnn", "needs a call without an explicit mask"),
                ("flash", "another mask"),
                ("plain", "needs at most 64 tokens"),
                NARROW,
            ],
        ),
        (
            call("cuda", BF16, queries=100, causal=True),
            "efficient",
            [
                ("heads", "needs attention without a mask"),
                ("cudnn", "needs a call without an explicit mask"),
                ("flash", "as many queries as keys"),
                ("plain", "needs at most 64 tokens"),
                NARROW,
            ],
        ),
        (
            call("cuda", BF16, rank=320),
            "wide",
            [
                ("heads", "at rank 320"),
                ("cudnn", "needs widths of at most"),
                ("flash", "needs widths of at most 256, this call has 320 and 320"),
                ("plain", "needs at most 64 tokens"),
            ],
        ),
        (
            call("cuda", width=320, window=100),
            "wide",
            [
                ("heads", "needs attention without a mask"),
                ("plain", "needs at most 64 tokens"),
                ("cudnn", "this call has float32"),
                ("flash", "this call has float32"),
            ],
        ),
        (
            call("cuda", BF16, rank=16, width=64, keys=1, queries=1),
            "plain",
            [
                ("heads", "this call has 1 and 1, 64 and 16"),
                ("cudnn", "more than one key"),
                (
                    "flash",
                    "needs rank and value width within a factor of two, because it pads the "
                    "smaller; this call has 16 and 64",
                ),
            ],
        ),
        (
            call("cuda", torch.float64),
            "plain",
            [
                ("heads", "needs 16 or 32 bits, this call has float64"),
                ("plain", "needs at most 64 tokens"),
                ("cudnn", "this call has float64"),
                ("flash", "this call has float64"),
                NARROW,
                ("efficient", "needs 16 or 32 bits, this call has float64"),
            ],
        ),
        (call("cuda", hard=True), "plain", [("any fused kernel", "none computes hardmax")]),
        (
            call("mps"),
            "plain",
            [
                ("plain", "needs at most 64 tokens"),
                ("cudnn", "the device is mps"),
                ("flash", "the device is mps"),
                ("efficient", "the device is mps"),
            ],
        ),
    ],
)
def test_backend_choice_and_every_refusal(given_, backend, refusals):
    choice = choose_backend(given_)
    assert choice.backend == backend
    assert [name for name, _ in choice.refused] == [name for name, _ in refusals]
    for (name, why), (_, expected) in zip(choice.refused, refusals, strict=True):
        assert expected in why, f"{name}: {why}"
    lines = str(choice).splitlines()
    assert lines[0] == f"{backend}: {choice.why}"
    others = [
        (name, why) for name, why in choice.refused if name != choice.backend
    ]  # plain may lose its shortcut and still be chosen
    assert [line for line in lines if line.startswith("  not ")] == [
        f"  not {name}: {why}" for name, why in others
    ]


def test_backend_without_triton_a_gpu_does_without_its_own_kernels(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backends, "has_triton", lambda: False)
    assert choose_backend(call("cuda", tokens=64)).refused == (
        ("heads", "needs triton, which is not installed"),
    )
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
def test_backend_padding_and_repetition(given_, backend, pad, repeat):
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
def test_backend_scores_are_never_written_out_whole_when_they_are_large(c):
    choice = choose_backend(c)
    written = c.batch * c.heads * c.queries * c.keys * max(4, c.dtype.itemsize)
    few_tokens_on_a_gpu = c.device != "cpu" and not c.hard and max(c.queries, c.keys) <= 64
    if choice.backend == "plain":
        assert written <= reference.BLOCK_BYTES or (
            few_tokens_on_a_gpu and written <= 16 * reference.BLOCK_BYTES
        )
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
        (
            call("cuda", BF16, tokens=512, rank=512, heads=2, kv_heads=1, causal=True),
            "wide",
            "efficient",
        ),
        (call("cuda", tokens=512, rank=300, heads=2, kv_heads=2, window=30), "wide", "efficient"),
        (call("cuda", torch.float64, tokens=64), "plain", "plain"),
        (call("cuda", BF16, tokens=64, batch=500), "heads", "heads"),
        (call("cuda", BF16, tokens=2048, rank=512, width=128), "wide", "wide"),
    ],
)
def test_backend_where_launches_count_little_work_goes_to_one_kernel(given_, graphed, launched):
    assert choose_backend(given_).backend == graphed
    other = choose_backend(dataclasses.replace(given_, graphed=False))
    assert other.backend == launched
    assert graphed == launched or any("launches" in why for _, why in other.refused)


def test_backend_by_name_little_work_goes_where_it_is_asked_to_go():
    few = call("cuda", BF16, tokens=32, graphed=False)
    assert choose_backend(few).backend != "heads"
    assert forced("heads", few).backend == "heads"
    assert forced("efficient", dataclasses.replace(few, rank=300, width=300)).backend == "efficient"


def test_explain_reads_the_shape():
    shape = Shape(
        dim=96,
        depth=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=16,
        v_head_dim=24,
        causal=True,
        windows=(0, 64),
    )
    assert explain(shape, 512, device="cuda", dtype=BF16).backend == "cudnn"
    assert explain(shape, 512, device="cuda", dtype=BF16, layer=1).backend == "efficient"
    assert (
        explain(shape, 64, device="cuda", dtype=BF16, layer=1).backend == "cudnn"
    )  # a window of all keys is none
    assert explain(shape, 512, device="cpu") == choose_backend(
        call(tokens=512, rank=16, width=24, heads=6, kv_heads=2, causal=True)
    )
    assert explain(shape, 512, device="cpu", hard=True).backend == "plain"
    assert (
        explain(Shape(dim=64, depth=1, num_heads=8), 16, batch=500, device="cuda").backend
        == "heads"
    )
    assert explain(shape, 2, device="cpu").backend == "flash"
    assert explain(shape.replace(causal=False), 4, device="cpu").backend == "flash"  # rank 16
    assert explain(shape.replace(causal=False, head_dim=2), 4, device="cpu").backend == "short"
    assert explain(shape) == explain(
        shape, 1024, device="cuda" if torch.cuda.is_available() else "cpu"
    )


def test_backend_call_measures_its_scores():
    c = call(tokens=11, batch=2, heads=3, queries=5)
    assert c.score_bytes == 2 * 3 * 5 * 11 * 4
    assert dataclasses.replace(c, dtype=torch.float64).score_bytes == 2 * c.score_bytes
    assert dataclasses.replace(c, dtype=BF16).score_bytes == c.score_bytes  # accumulated in float32
