"""The optimiser of one large model: AdamW for all parameters, or Muon for the matrices of its
blocks and AdamW for the rest.

One learning rate serves both. An orthogonalised update is scaled to the size that AdamW's have, 0.2
per coordinate, whatever the matrix's shape (Liu and others, 2502.16982). So shapes are compared at
one rate. One parameter may hold several maps: queries, keys and values, or the two maps of a
gated feed-forward. Each map is orthogonalised by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from headwise.kernels import has_triton
from headwise.lm.distributed import full_tensor, local_shard, map_sharded, shard_of
from headwise.lm.launch import World
from headwise.shape import Shape

BETAS = (0.9, 0.95)
EPS = 1e-8
MOMENTUM = 0.95
UPDATE_RMS = 0.2  # root mean square of an orthogonalised update's coordinates, as AdamW's

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


def lr_multiplier(schedule: str, step: int, steps: int, warmup: float, warmdown: float) -> float:
    """The share of the learning rate at a step: a linear warm-up, then a cosine to 0, or 1 and a
    linear warm-down.

    >>> [lr_multiplier("trapezoid", step, 8, 0.25, 0.5) for step in range(8)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    warmup_steps = max(1, round(warmup * steps))
    warmdown_steps = round(warmdown * steps)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "cosine":
        done = (step - warmup_steps) / max(1, steps - warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * done))
    return min(1.0, (steps - step) / warmdown_steps) if warmdown_steps else 1.0


def orthogonalise(stack: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """U V^T of every matrix U S V^T of a stack (..., rows, columns), nearly: singular values within
    15 % of 1.

    Five steps of matrix products in `dtype`; bfloat16 is good enough. Singular values below a
    thousandth of the matrix's norm stay smaller.
    """
    # Rows are the shorter side, so that the Gram matrix x x^T is the smaller one. The norm bounds
    # the largest singular value by 1.
    tall = stack.shape[-2] > stack.shape[-1]
    x = (stack.mT if tall else stack).to(torch.promote_types(stack.dtype, torch.float32))
    norm = x.norm(dim=(-2, -1), keepdim=True) * MARGIN
    x = (x / norm.clamp_min(torch.finfo(torch.float32).tiny)).to(dtype)
    size = x.shape
    x = x.reshape(-1, *size[-2:])
    for a, b, c in POLYNOMIALS:  # each product adds its sum itself: no passes for the sums
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.view(size).mT if tall else x.view(size)


def map_rows(shape: Shape, name: str, rows: int) -> tuple[int, ...]:
    """How many rows of a block's matrix belong to each of the maps that it holds."""
    shape = shape.layer(int(name.split(".")[1]))  # blocks.<layer>. ...
    values = () if shape.shared_kv else (shape.num_kv_heads * shape.v_head_dim,)
    keys_values = (shape.num_kv_heads * shape.head_dim, *values)
    if name.endswith("attention.qkv.weight"):
        return shape.num_heads * shape.head_dim, *keys_values
    if name.endswith("attention.kv.weight") and not shape.latent:
        return keys_values
    if name.endswith("attention.out_down.weight"):
        return (shape.o_lora_rank,) * shape.o_groups
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
    """The moments of one model's parameters, and the step; on shards where they are sharded.

    `matrices` are moved by Muon and have a mean only. All other parameters are moved by AdamW and
    have a mean and a square: the `large` ones by a kernel each, the rest together by torch's.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        shape: Shape,
        kind: str = "adamw",
        weight_decay: float = 0.0,
        world: World | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.named = dict(named)
        self.shape = shape
        self.weight_decay = weight_decay
        self.world = world or World()
        self.dtype = dtype  # of the orthogonalisation
        self.steps = 0  # made so far

        # Muon moves the matrices of blocks. AdamW moves the rest: large parameters by a kernel
        # each, which reads each number once, and small ones in one launch of torch's. Weight decay
        # is for tables and matrices, not for gains and biases.
        muon = kind == "muon"
        self.matrices = [name for name, p in named.items() if muon and is_matrix(name, p)]
        rest = [name for name in named if name not in self.matrices]
        self.large = [name for name in rest if _is_large(local_shard(named[name]))]
        self.small = [name for name in rest if name not in self.large]
        self.decays = {
            name: weight_decay if named[name].ndim > 1 and not name.endswith("bias") else 0.0
            for name in rest
        }

        # Moments lie in shards as their parameters do.
        self.moments: dict[str, Tensor] = {}
        for name in (*self.matrices, *rest):
            self.moments[f"mean.{name}"] = torch.zeros_like(local_shard(named[name]))
        for name in rest:
            self.moments[f"square.{name}"] = torch.zeros_like(local_shard(named[name]))
        # torch's fused AdamW counts steps on the device, for each parameter
        self.counts = {
            name: torch.zeros((), device=local_shard(named[name]).device) for name in self.small
        }

    def set_steps(self, steps: int) -> None:
        """How many steps were made, after moments were put in."""
        self.steps = steps
        for count in self.counts.values():
            count.fill_(steps)

    def owner(self, moment: str) -> nn.Parameter:
        """The parameter that a moment is of."""
        return self.named[moment.partition(".")[2]]

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor | None = None) -> None:
        """Move every parameter by its gradient over `grad_scale`; AdamW divides while it reads."""
        # AdamW divides gradients by `grad_scale` while it reads them. Torch takes one weight decay
        # per call, so small parameters go by their decay.
        self.steps += 1
        for name in self.large:
            self._adamw_kernel(name, lr, grad_scale)
        for decay in dict.fromkeys(self.decays.values()):
            names = [name for name in self.small if self.decays[name] == decay]
            self._adamw(names, lr, decay, grad_scale)
        # Muon reads gradients several times, so they are divided before.
        if self.matrices:
            if grad_scale is not None:
                torch._foreach_div_(self._grads(self.matrices), grad_scale)
            self._muon(lr)

    def _adamw(self, names: list[str], lr: float, decay: float, grad_scale: Tensor | None) -> None:
        """torch's AdamW for several parameters of one weight decay."""
        adamw(
            [local_shard(self.named[name]) for name in names],
            self._grads(names),
            [self.moments[f"mean.{name}"] for name in names],
            [self.moments[f"square.{name}"] for name in names],
            [],
            [self.counts[name] for name in names],
            foreach=False,
            fused=True,
            amsgrad=False,
            maximize=False,
            grad_scale=grad_scale,
            beta1=BETAS[0],
            beta2=BETAS[1],
            lr=lr,
            weight_decay=decay,
            eps=EPS,
        )

    def _adamw_kernel(self, name: str, lr: float, grad_scale: Tensor | None) -> None:
        """Our kernel, for one parameter."""
        from headwise.kernels.adamw_triton import adamw

        tensors = (
            local_shard(self.named[name]),
            self.moments[f"mean.{name}"],
            self.moments[f"square.{name}"],
            local_shard(_grad(self.named[name])),
        )
        adamw(*tensors, grad_scale, lr, *BETAS, EPS, self.decays[name], self.steps)

    def _muon(self, lr: float) -> None:
        """Muon: momentum with look-ahead, then orthogonalised, all maps of one size at once.

        The update of every matrix is gathered from its shards, since orthogonalisation needs all of
        it. Maps of one size are stacked and shared out over the processes. Each process then
        subtracts its own rows.
        """
        # The momentum, then a step ahead along it (Nesterov), all matrices in one launch each.
        ps = [self.named[name] for name in self.matrices]
        means = [self.moments[f"mean.{name}"] for name in self.matrices]
        grads = self._grads(self.matrices)
        torch._foreach_lerp_(means, grads, 1 - MOMENTUM)
        looked_ahead = torch._foreach_lerp(grads, means, MOMENTUM)
        # Complete matrices, gathered from their shards.
        updates = {
            name: full_tensor(update.to(self.dtype), p)
            for name, update, p in zip(self.matrices, looked_ahead, ps, strict=True)
        }
        # One stack (maps, rows, columns) per size. UPDATE_RMS sqrt(max(rows, columns)) gives an
        # orthogonal matrix's coordinates a root mean square of UPDATE_RMS.
        for (rows, columns), group in self._maps_by_size().items():
            scale = UPDATE_RMS * math.sqrt(max(rows, columns))
            maps = [updates[name][start:stop] for name, start, stop in group]
            orthogonal = map_sharded(
                self.world, torch.stack(maps), lambda share: orthogonalise(share, self.dtype)
            )
            for update, result in zip(maps, orthogonal, strict=True):
                torch.mul(result, scale, out=update)
        # Decay first, then the step; each process moves its own rows.
        if self.weight_decay:
            torch._foreach_mul_([local_shard(p) for p in ps], 1 - lr * self.weight_decay)
        for name, p in zip(self.matrices, ps, strict=True):
            local_shard(p).sub_(shard_of(updates[name], p), alpha=lr)

    def _maps_by_size(self) -> dict[tuple[int, int], list[tuple[str, int, int]]]:
        """The maps by (rows, columns): (parameter, first row, behind the last)."""
        groups: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
        for name in self.matrices:
            rows, columns = self.named[name].shape
            first = 0
            for count in map_rows(self.shape, name, rows):
                groups.setdefault((count, columns), []).append((name, first, first + count))
                first += count
        return groups

    def _grads(self, names: list[str]) -> list[Tensor]:
        return [local_shard(_grad(self.named[name])) for name in names]


def _grad(p: nn.Parameter) -> Tensor:
    assert p.grad is not None
    return p.grad


def _is_large(p: Tensor) -> bool:
    """Whether a parameter is moved by a kernel of its own."""
    return (
        p.is_cuda
        and p.dtype == torch.float32
        and p.numel() >= LARGE
        and p.is_contiguous()
        and has_triton()
    )
