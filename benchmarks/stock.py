"""The stock way: PyTorch's own modules, one model after another, as the rank paper's published code
does it.

Each layer averages `width` separate `nn.MultiheadAttention` modules in a Python loop; one optimiser
a model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.shape import Shape


class ScaledUnit(nn.Module):
    """s x/||x||."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * F.normalize(x, dim=-1, eps=0.0)


class StockLayer(nn.Module):
    """One post-norm layer of the rank paper's encoder out of library modules."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        heads = shape.num_heads // shape.average
        self.attention = nn.ModuleList(
            nn.MultiheadAttention(shape.dim, heads, batch_first=True) for _ in range(shape.average)
        )
        self.up, self.down = (
            nn.Linear(shape.dim, shape.ffn_dim),
            nn.Linear(shape.ffn_dim, shape.dim),
        )
        self.norm1, self.norm2 = ScaledUnit(), ScaledUnit()

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for module in self.attention:
            out = out + module(x, x, x, need_weights=False)[0] / len(self.attention)
        x = self.norm1(x + out)
        return self.norm2(x + self.down(F.relu(self.up(x))))


class StockEncoder(nn.Sequential):
    """The rank paper's encoder out of library modules; takes what `paper_shape` makes."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(*(StockLayer(shape) for _ in range(shape.depth)))


def copy_into_stock(stock: StockEncoder, weights: dict[str, Tensor], shape: Shape) -> None:
    """Give the stock model the weights of a headwise encoder (its state_dict), so that both compute
    the same function."""
    D, W = shape.dim, shape.average
    with torch.no_grad():
        for i, layer in enumerate(stock):
            assert isinstance(layer, StockLayer)
            w = {
                name.removeprefix(f"blocks.{i}."): t
                for name, t in weights.items()
                if name.startswith(f"blocks.{i}.")
            }
            qkv = w["attention.qkv.weight"].view(3, W, D, D)
            bias = w["attention.qkv.bias"].view(3, W, D)
            out = w["attention.out.weight"].view(D, W, D)
            for m, module in enumerate(layer.attention):
                assert isinstance(module, nn.MultiheadAttention)
                module.in_proj_weight.copy_(qkv[:, m].reshape(3 * D, D))
                module.in_proj_bias.copy_(bias[:, m].reshape(3 * D))
                module.out_proj.weight.copy_(out[:, m])
                module.out_proj.bias.copy_(w["attention.out_bias"][m])
            for ours, theirs in (("feed.up", layer.up), ("feed.down", layer.down)):
                theirs.weight.copy_(w[f"{ours}.weight"])
                theirs.bias.copy_(w[f"{ours}.bias"])
            layer.norm1.scale.copy_(w["norm1.weight"])
            layer.norm2.scale.copy_(w["norm2.weight"])
