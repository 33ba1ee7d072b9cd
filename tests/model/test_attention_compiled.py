"""Attention inside torch.compile: one operation where heads are wide."""

import pytest
import torch
from support.tolerance import close, seeded

from headwise import Attention, Shape, attend
from headwise.kernels import attention_wide

SIZES = [(6, 3, 9, 9, 4, 6), (6, 3, 9, 9, 300, 7), (4, 4, 5, 11, 6, 264), (3, 1, 7, 7, 258, 258)]
MASKS = [(False, 0), (True, 0), (True, 4), (False, 3)]


def inputs(heads, kv_heads, queries, keys, rank, width, dtype=torch.float64):
    generator = seeded(0)
    sizes = ((heads, queries, rank), (kv_heads, keys, rank), (kv_heads, keys, width))
    return [torch.randn(2, *size, generator=generator, dtype=dtype) for size in sizes]


@pytest.mark.parametrize("asked", ["auto", "wide"])
@pytest.mark.parametrize(("causal", "window"), MASKS)
@pytest.mark.parametrize("sizes", SIZES)
def test_compiled_attention_has_the_same_outputs_and_gradients(sizes, causal, window, asked):
    found = []
    for compiled in (False, True):
        leaves = [t.requires_grad_() for t in inputs(*sizes)]
        torch._dynamo.reset()
        run = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
        out = run(*leaves, causal=causal, window=window, scale=0.1, backend=asked)
        out.square().sum().backward()
        found.append([out, *(t.grad for t in leaves)])
    for ours, wanted in zip(*found, strict=True):
        close(ours, wanted)


@pytest.mark.parametrize("asked", ["auto", "wide"])
@pytest.mark.parametrize("sizes", SIZES)
def test_compiled_only_the_wide_backend_is_hidden(sizes, asked):
    names = []

    def backend(graph, _):
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(attend, backend=backend, fullgraph=True)(
        *inputs(*sizes), causal=True, window=0, scale=0.1, backend=asked
    )
    assert any("headwise" in name for name in names) == (asked == "wide")


@pytest.mark.parametrize("keep", [0.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_compiled_operation_is_what_it_says_it_is(dtype, keep):
    leaves = [t.requires_grad_() for t in inputs(4, 2, 5, 5, 3, 6, dtype)]
    torch.library.opcheck(
        attention_wide._wide, (*leaves, 0.5, True, 0, 8, 0, keep), atol=1e-2, rtol=1e-2
    )


LAYOUTS = {
    "heads side by side": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "one projection": lambda t: torch.cat((t, t), -1)[..., : t.shape[-1]],
    "columns side by side": lambda t: t.mT.contiguous().mT,
    "one for all heads": lambda t: t[:, :1].expand(t.shape),
}
KEPT = list(zip(LAYOUTS, (0.0, 1e9, 1e9, 0.0), strict=True))[
    :: 1 if torch.cuda.is_available() else 2
]  # compiling for a CPU takes long


@pytest.mark.parametrize(("layout", "keep"), KEPT)
def test_compiled_is_what_it_says_too(layout, keep, monkeypatch):
    """Whatever lies beside what: the strides that are promised are those that come."""
    pytest.importorskip("triton")
    if not torch.cuda.is_available():
        monkeypatch.setattr(attention_wide, "runs_on_triton", lambda t: True)
    q, k, v = (
        LAYOUTS[layout](t).detach().requires_grad_()
        for t in inputs(2, 1, 5, 5, 3, 6, torch.float32)
    )
    rest = 0.5, True, 0, 8, 0
    torch.library.opcheck(
        attention_wide._wide,
        (q, k, v, *rest, keep),
        atol=1e-4,
        rtol=1e-4,
        test_utils=("test_schema", "test_faketensor"),
    )
    o, lse, p = (t.detach() for t in attention_wide._wide(q, k, v, *rest, keep))
    given = torch.ones_like(o), q.detach(), k.detach(), v.detach(), o, lse, p
    torch.library.opcheck(
        attention_wide._wide_backward,
        (*given, *rest),
        atol=1e-4,
        rtol=1e-4,
        test_utils=("test_schema", "test_faketensor"),
    )


LAYERS = [
    {},
    {"num_kv_heads": 2, "v_head_dim": 7, "qkv_bias": True},
    {
        "num_kv_heads": 1,
        "qk_norm": "head",
        "qk_rope_head_dim": 6,
        "qkv_bias": True,
        "causal": True,
        "num_heads": 3,
    },
    {"kv_lora_rank": 5, "causal": True},
]


@pytest.mark.parametrize("changes", LAYERS)
def test_compiled_layer_compiled_is_the_layer(changes):
    shape = Shape(**{"dim": 12, "depth": 1, "num_heads": 4, "head_dim": 6, **changes})
    layer = Attention(shape, backend="plain").double()
    generator = seeded(1)
    for p in layer.parameters():
        torch.nn.init.normal_(p, generator=generator)
    found, given, products = [], torch.randn(2, 5, 12, generator=generator, dtype=torch.float64), []

    def backend(graph, _):
        products.extend(node for node in graph.graph.nodes if "linear" in str(node.target))
        return graph.forward

    for compiled in (False, True):
        torch._dynamo.reset()
        layer.zero_grad()
        out = (torch.compile(layer, backend=backend, fullgraph=True) if compiled else layer)(given)
        out.square().sum().backward()
        found.append([out, *(p.grad.clone() for p in layer.parameters())])
    for ours, wanted in zip(*found, strict=True):
        close(ours, wanted)
    if not shape.latent:
        assert len(products) == 4, "queries, keys, values and the output apart"
