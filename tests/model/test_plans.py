"""Plans: what was decided for a call is decided once, and never for another call."""

import pytest
import torch
from support.tolerance import close, same, seeded

from headwise.errors import UsageError
from headwise.model.dispatch import attend
from headwise.model.plans import Operands, Plans, plans


@pytest.mark.parametrize("rank", [1, 11])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("backend", ["flash", "auto"])
def test_backend_fused_kernels_take_columns_side_by_side(rank, first, backend):
    """Whether or not the same sizes came before, in the usual order."""
    q, k, v = (torch.randn(2, 3, rank, 37, generator=seeded(i)).mT for i in range(3))
    plans.clear()
    if not first:
        attend(q.contiguous(), k.contiguous(), v.contiguous(), causal=True, backend=backend)
    close(
        attend(q, k, v, causal=True, backend=backend), attend(q, k, v, causal=True, backend="plain")
    )


def test_backend_what_torch_answers_by_itself_is_asked_of_it_and_still_checked():
    q, k, v = (torch.randn(2, 6, 37, 11, generator=seeded(i)) for i in range(3))
    k, v = k[:, :2], v[:, :2]
    plans.clear()
    expected = attend(q, k, v, causal=True, backend="plain")
    close(attend(q, k, v, causal=True), expected)
    assert len(plans) == 2  # by name and by itself
    close(attend(q, k, v, causal=True), expected)
    close(
        attend(q, k, v, causal=True, scale=0.7),
        attend(q, k, v, causal=True, scale=0.7, backend="plain"),
    )
    close(attend(q, k, v), attend(q, k, v, backend="plain"))
    close(
        attend(q, k, v, causal=True, window=5),
        attend(q, k, v, causal=True, window=5, backend="plain"),
    )
    close(
        attend(q, k, v, causal=True, hard=True),
        attend(q, k, v, causal=True, hard=True, backend="plain"),
    )
    with pytest.raises(UsageError, match="must share dtype and device"):
        attend(q, k.double(), v, causal=True)
    with torch.autocast("cpu", torch.bfloat16):  # where SDPA takes several types, too
        taken = attend(q, k.bfloat16(), v, causal=True)
    same(taken, attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), causal=True))
    exact = [t.double() for t in (q, k, v)]
    assert torch.equal(attend(*exact, causal=True), attend(*exact, causal=True)), (
        "the first time and later"
    )
    trained = [t.clone().requires_grad_() for t in (q, k, v)]
    close(
        torch.stack(
            [g.sum() for g in torch.autograd.grad(attend(*trained, causal=True).sum(), trained)]
        ),
        torch.stack(
            [
                g.sum()
                for g in torch.autograd.grad(
                    attend(*trained, causal=True, backend="plain").sum(), trained
                )
            ]
        ),
    )


def test_plans_forget_the_oldest_beyond_their_limit():
    few = Plans(limit=2)
    operands = [_operands(tokens) for tokens in (3, 5, 7)]
    first, second, third = (few.get(o) for o in operands)
    assert len(few) == 2
    assert few.get(operands[1]) is second
    assert few.get(operands[2]) is third
    assert few.get(operands[0]) == first
    assert few.get(operands[0]) is not first
    few.clear()
    assert len(few) == 0


def _operands(tokens):
    size, dtype, device = torch.Size((1, 2, tokens, 3)), torch.float32, torch.device("cpu")
    return Operands(
        *(size,) * 3, *(dtype,) * 3, *(device,) * 3,
        causal=False, window=0, hard=False, backend="auto", graphed=False, trained=False,
        block_bytes=1 << 20,
    )  # fmt: skip
