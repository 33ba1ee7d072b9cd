"""What moves the weights of one large model: AdamW for all, or Muon for the matrices of its blocks
and AdamW for the rest.

One learning rate serves both: an orthogonalised update is scaled to the size that AdamW's have, 0.2
a coordinate, whatever the matrix's shape (Liu and others, 2502.16982), so that shapes are compared
at one rate. Query, key and value maps are orthogonalised apart though they lie in one parameter,
and so are the two maps of a gated feed-forward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from headwise.kernels import has_triton
from headwise.lm.distributed import Ranks, all_of, dealt, mine, part_of
from headwise.shape import Shape

OPTIMISERS = ("adamw", "muon")
SCHEDULES = ("cosine", "trapezoid")
BETAS, EPS = (0.9, 0.95), 1e-8
MOMENTUM = 0.95
SIZE = 0.2  # root mean square of an orthogonalised update's coordinates, as AdamW's

# a x + b x^3 + c x^5, one after another: the Polar Express (Amsel, Persson, Musco, Gower,
# 2505.16932), for singular values from a thousandth of the norm, to within 15 % of 1
POLYNOMIALS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
MARGIN = 1.02  # of the norm, against rounding
LARGE = 1 << 20  # numbers of a parameter


def rate(schedule: str, step: int, steps: int, warmup: float, warmdown: float) -> float:
    """The share of the learning rate at a step: a linear warm-up, then a cosine to 0, or 1 and a
    linear warm-down.

    >>> [rate("trapezoid", step, 8, 0.25, 0.5) for step in range(8)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    up, down = max(1, round(warmup * steps)), round(warmdown * steps)
    if step < up:
        return (step + 1) / up
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * (step - up) / max(1, steps - up)))
    return min(1.0, (steps - step) / down) if down else 1.0


def orthogonalise(stack: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """U V^T of every matrix U S V^T of a stack (..., rows, columns), nearly: singular values within
    15 % of 1.

    Five steps of matrix products in `dtype`, which bfloat16 is good enough for; singular values
    below a thousandth of the matrix's norm stay smaller.
    """
    tall = stack.shape[-2] > stack.shape[-1]
    x = (stack.mT if tall else stack).to(torch.promote_types(stack.dtype, torch.float32))
    norm = x.norm(dim=(-2, -1), keepdim=True) * MARGIN
    x = (x / norm.clamp_min(torch.finfo(torch.float32).tiny)).to(dtype)
    size, x = x.shape, x.reshape(-1, *x.shape[-2:])
    for a, b, c in POLYNOMIALS:  # sums that the products end with, no passes of their own
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.view(size).mT if tall else x.view(size)


def pieces(shape: Shape, name: str, rows: int) -> tuple[int, ...]:
    """How many rows of a block's matrix belong to each of the maps that lie in it."""
    if name.endswith("attention.qkv.weight"):
        kv = shape.num_kv_heads
        return shape.num_heads * shape.head_dim, kv * shape.head_dim, kv * shape.v_head_dim
    if name.endswith("attention.kv_down.weight") and shape.qk_rope_head_dim:
        return shape.kv_lora_rank, shape.qk_rope_head_dim
    if name.endswith("feed.up.weight") and shape.gated:
        return shape.ffn_dim, shape.ffn_dim
    return (rows,)


def is_matrix(name: str, p: Tensor) -> bool:
    """Whether a parameter is a linear map of a block; biases of averaged modules have two axes
    too."""
    return name.startswith("blocks.") and name.endswith("weight") and p.ndim == 2


class Optimiser:
    """Moments of the parameters of one model, and the step; on shards where they are sharded."""

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        shape: Shape,
        kind: str = "adamw",
        weight_decay: float = 0.0,
        ranks: Ranks | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.named, self.shape, self.decay, self.ranks, self.dtype = (
            dict(named),
            shape,
            weight_decay,
            ranks or Ranks(),
            dtype,
        )
        self.matrices = [name for name, p in named.items() if kind == "muon" and is_matrix(name, p)]
        rest = [name for name in named if name not in self.matrices]
        self.moments = {
            f"mean.{name}": torch.zeros_like(mine(named[name])) for name in (*self.matrices, *rest)
        }
        self.moments |= {f"square.{name}": torch.zeros_like(mine(named[name])) for name in rest}
        self.decays = {
            name: weight_decay if named[name].ndim > 1 and not name.endswith("bias") else 0.0
            for name in rest
        }
        self.large = [name for name in rest if _is_large(mine(named[name]))]
        self.counts = {
            name: torch.zeros((), device=mine(named[name]).device)
            for name in rest
            if name not in self.large
        }
        self.made = 0  # steps

    def set_step(self, step: int) -> None:
        """How many steps were made, after moments were put in."""
        self.made = step
        for count in self.counts.values():
            count.fill_(step)

    def owner(self, moment: str) -> nn.Parameter:
        """The parameter that a moment is of."""
        return self.named[moment.partition(".")[2]]

    @torch.no_grad()
    def step(self, lr: float, over: Tensor | None = None) -> None:
        """Move every parameter by its gradient, which is divided by `over`: AdamW does so while it
        reads it."""
        self.made += 1
        for name in self.large:
            self._move(name, lr, over)
        for decay in dict.fromkeys(self.decays.values()):
            names = [name for name in self.counts if self.decays[name] == decay]
            ps = [self.named[name] for name in names]
            mean, square = (
                [self.moments[f"{kind}.{name}"] for name in names] for kind in ("mean", "square")
            )
            adamw(
                [mine(p) for p in ps],
                [mine(_grad(p)) for p in ps],
                mean,
                square,
                [],
                [self.counts[name] for name in names],
                foreach=False,
                fused=True,
                amsgrad=False,
                maximize=False,
                grad_scale=over,
                beta1=BETAS[0],
                beta2=BETAS[1],
                lr=lr,
                weight_decay=decay,
                eps=EPS,
            )
        if self.matrices:
            if over is not None:
                torch._foreach_div_([mine(_grad(self.named[name])) for name in self.matrices], over)
            self._turn(lr)

    def _move(self, name: str, lr: float, over: Tensor | None) -> None:
        from headwise.kernels.adamw_triton import adamw

        tensors = (
            mine(self.named[name]),
            self.moments[f"mean.{name}"],
            self.moments[f"square.{name}"],
            mine(_grad(self.named[name])),
        )
        adamw(*tensors, over, lr, *BETAS, EPS, self.decays[name], self.made)

    def _alike(self) -> dict[tuple[int, int], list[tuple[str, int, int]]]:
        """The maps by their sizes: (parameter, first row, behind the last)."""
        groups: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
        for name in self.matrices:
            rows, columns = self.named[name].shape
            at = 0
            for count in pieces(self.shape, name, rows):
                groups.setdefault((count, columns), []).append((name, at, at + count))
                at += count
        return groups

    def _turn(self, lr: float) -> None:
        """Muon: momentum with look-ahead, orthogonalised, all maps of one size at once."""
        ps, means = (
            [self.named[name] for name in self.matrices],
            [self.moments[f"mean.{name}"] for name in self.matrices],
        )
        grads = [mine(_grad(p)) for p in ps]
        torch._foreach_lerp_(means, grads, 1 - MOMENTUM)
        looked = torch._foreach_lerp(grads, means, MOMENTUM)
        ahead = {
            name: all_of(x.to(self.dtype), p)
            for name, x, p in zip(self.matrices, looked, ps, strict=True)
        }
        for (rows, columns), group in self._alike().items():
            stack = torch.stack([ahead[name][start:stop] for name, start, stop in group])
            turned = dealt(self.ranks, stack, lambda some: orthogonalise(some, self.dtype))
            for (name, start, stop), update in zip(group, turned, strict=True):
                torch.mul(update, SIZE * math.sqrt(max(rows, columns)), out=ahead[name][start:stop])
        if self.decay:
            torch._foreach_mul_([mine(p) for p in ps], 1 - lr * self.decay)
        for name, p in zip(self.matrices, ps, strict=True):
            mine(p).sub_(part_of(ahead[name], p), alpha=lr)


def _grad(p: nn.Parameter) -> Tensor:
    assert p.grad is not None
    return p.grad


def _is_large(p: Tensor) -> bool:
    """Whether a parameter is moved by a kernel of its own; the others go together, in one of
    torch's."""
    return (
        p.is_cuda
        and p.dtype == torch.float32
        and p.numel() >= LARGE
        and p.is_contiguous()
        and has_triton()
    )
