"""Short attention under torch.compile: one operation with a formula for its gradients, which
inductor does not look into. Without a GPU in Triton's interpreter."""

import pytest
import torch
from support.tolerance import same, seeded

pytest.importorskip("triton", reason="the kernels are written in triton")
from support.gpu import DEVICE, FP32, INTERPRETED

from headwise.kernels.attention_short_triton import attend_heads

pytestmark = pytest.mark.usefixtures("products_as_on_a_gpu")


def operands(heads, tokens, rank, transposed):
    """q, k and v as a projection leaves them, or with heads before tokens."""
    generator = seeded(7)
    sizes = (2, tokens, heads, rank) if transposed else (2, heads, tokens, rank)
    made = [torch.randn(sizes, generator=generator).to(DEVICE) for _ in range(4)]
    return [(t.transpose(1, 2) if transposed else t).requires_grad_() for t in made]


@pytest.mark.parametrize(
    ("tokens", "rank", "causal"), [(5, 1, False), (5, 2, False), (3, 4, False), (7, 3, True)]
)
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.filterwarnings("ignore")  # of the tracers
def test_heads_compiled_equal_heads_called(tokens, rank, causal, transposed):
    *given, grad = operands(5, tokens, rank, transposed)

    def passes(way):
        out = way(*given, 0.3, "tf32x3", causal)
        return out, *torch.autograd.grad(out, given, grad)

    # A compiler that only traces is enough to see fake tensors meet the formula of the gradient;
    # inductor adds the strides that it relies on.
    kind = "inductor" if not INTERPRETED or (rank, transposed) == (1, True) else "aot_eager"
    torch.compiler.reset()
    compiled = torch.compile(attend_heads, backend=kind, fullgraph=True)
    for made, wanted in zip(passes(compiled), passes(attend_heads), strict=True):
        assert made.dtype == FP32
        same(made, wanted, kind)


@pytest.mark.filterwarnings("ignore")
def test_heads_as_an_operation_keep_its_contract():
    q, k, v, _ = operands(3, 5, 1, True)
    torch.library.opcheck(torch.ops.headwise.heads.default, (q, k, v, 0.3, "tf32x3", False))
