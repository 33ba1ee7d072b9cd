"""What a competent engineer writes for one model: one wide projection, torch.compile, half
precision, fused AdamW, the whole step in one CUDA graph. It computes what `stock.StockEncoder`
computes.

Which attention is the fastest depends on the shape, so each is tried (`ATTENTION`): PyTorch's SDPA,
the formula left to the compiler, and headwise's own `attend`, which anybody may import. The best of
them is what an ensemble is measured against.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.stock import ScaledUnit
from headwise import attend
from headwise.shape import Shape


def by_formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(r)) v, for the compiler to make of it what it can."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return scores.softmax(-1) @ v


def by_headwise(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Our own kernels, called as anybody calls them."""
    return attend(q, k, v, graphed=q.is_cuda)


ATTENTION: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sdpa": F.scaled_dot_product_attention,
    "plain": by_formula,
    "ours": by_headwise,
}
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


class CompetentLayer(nn.Module):
    """One post-norm layer: all averaged modules in one projection, their heads in one call."""

    def __init__(self, shape: Shape, attention: str = "sdpa") -> None:
        super().__init__()
        self.attention = ATTENTION[attention]
        inner = shape.num_heads * shape.head_dim
        self.heads, self.average = shape.num_heads, shape.average
        self.qkv, self.out = nn.Linear(shape.dim, 3 * inner), nn.Linear(inner, shape.dim)
        self.up, self.down = (
            nn.Linear(shape.dim, shape.ffn_dim),
            nn.Linear(shape.ffn_dim, shape.dim),
        )
        self.norm1, self.norm2 = ScaledUnit(), ScaledUnit()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        o = self.attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.out(o) / self.average)
        return self.norm2(x + self.down(F.relu(self.up(x))))


def outputs_of(layers: list[CompetentLayer], x: Tensor, precision: str) -> Tensor:
    """Of all layers, products in the given precision and outputs in float32."""
    half = HALF.get(precision)
    with torch.autocast(x.device.type, half) if half else contextlib.nullcontext():
        for layer in layers:
            x = layer(x)
    return x.float()


def competent_step(
    shape: Shape,
    inputs: Tensor,
    targets: Tensor,
    attention: str = "sdpa",
    precision: str = "fp16",
) -> Callable[[], None]:
    """A function that makes one training step of one model, replaying a CUDA graph. Layers of one
    size share a compilation."""
    layers = [CompetentLayer(shape, attention).to(inputs.device) for _ in range(shape.depth)]
    for layer in layers:
        layer.compile(dynamic=False)
    params = [p for layer in layers for p in layer.parameters()]
    optimizer = torch.optim.AdamW(
        params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True, capturable=True
    )

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        x = outputs_of(layers, inputs, precision)
        ((x - targets).square().sum(-1).mean()).backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
