"""What a competent engineer writes without kernels of their own: one wide projection, SDPA,
torch.compile, one CUDA graph.

One model, TF32, fused AdamW, the whole step in the graph. It computes what `stock.StockEncoder`
computes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.stock import ScaledUnit
from headwise.shape import Shape


class CompetentLayer(nn.Module):
    """One post-norm layer: all averaged modules in one projection, their heads in one call."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
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
        o = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.out(o) / self.average)
        return self.norm2(x + self.down(F.relu(self.up(x))))


def competent_step(shape: Shape, inputs: Tensor, targets: Tensor) -> Callable[[], None]:
    """A function that makes one training step of one model, replaying a CUDA graph. Layers of one
    size share a compilation."""
    layers = [CompetentLayer(shape).to(inputs.device) for _ in range(shape.depth)]
    for layer in layers:
        layer.compile(dynamic=False)
    params = [p for layer in layers for p in layer.parameters()]
    optimizer = torch.optim.AdamW(
        params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True, capturable=True
    )

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        x = inputs
        for layer in layers:
            x = layer(x)
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
