"""The layers beside attention: Norm and FeedForward.

With `models` = M a layer holds M independent models: its parameters and its input have a leading
model axis, and one call computes them all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from headwise.kernels import embed_readout
from headwise.model.linear import as_made, linear_layer, reset_linears
from headwise.shape import Shape

# ---- norms


class Norm(nn.Module):
    """The normalisations of `Shape.norm` over the last axis, with gain g and bias b.

    layer         (x - mean) / std * g + b
    layer-nobias  (x - mean) / std * g
    layer-free    (x - mean) / std
    rms           x / rms * g
    rms-free      x / rms
    scalar        s x / ||x||, one learned s
    """

    def __init__(self, kind: str, dim: int, models: int | None = None, eps: float = 1e-6) -> None:
        super().__init__()
        lead = () if models is None else (models,)
        self.kind = kind
        self.dim = dim
        self.eps = eps
        self.ensemble = models is not None
        # How many gains a model has: one per coordinate, one in all, or none.
        gains = {"layer": dim, "layer-nobias": dim, "rms": dim, "scalar": 1}.get(kind, 0)
        self.weight = nn.Parameter(torch.ones(*lead, gains)) if gains else None
        self.bias = nn.Parameter(torch.zeros(*lead, dim)) if kind == "layer" else None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Gains 1, biases 0."""
        if self.weight is not None:
            self.weight.fill_(1.0)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """n(x) over the last axis of x."""
        gain, bias = self.weight, self.bias
        if self.kind == "scalar":
            assert gain is not None
            return unit(x, gain.view(-1, *([1] * (x.ndim - 1))))
        # Fast paths first: norm and gain in one kernel for a single model, and a kernel for the
        # short rows of an ensemble. Everything else is torch's norm, then gains and biases of each
        # model.
        alone = self.kind == "rms" and not self.ensemble
        if alone and gain is not None and x.dtype == gain.dtype:
            return F.rms_norm(x, (self.dim,), gain, self.eps)  # norm and gain in one kernel
        if gain is not None and bias is not None and self.has_short_rows(x):
            return embed_readout.layer_norm(x, gain, bias)
        normalise = F.layer_norm if self.kind.startswith("layer") else F.rms_norm
        y = normalise(x, (self.dim,), eps=self.eps)
        if gain is not None:
            y = y * self._per_model(gain, x)
        return y if bias is None else y + self._per_model(bias, x)

    def has_short_rows(self, x: Tensor) -> bool:
        """Whether x is what the kernels of `embed_readout` take: short rows of an ensemble on a
        GPU."""
        if not self.ensemble or self.weight is None:
            return False
        if self.dim > embed_readout.MOST or self.eps != embed_readout.EPS:
            return False
        fits = x.shape[0] == len(self.weight) and x.shape[-1] == self.dim
        return fits and embed_readout.possible(x)

    def _per_model(self, gain: Tensor, x: Tensor) -> Tensor:
        """Gains or biases (models, dim) with the axes of x between."""
        return gain.view(gain.shape[0], *([1] * (x.ndim - 2)), -1) if self.ensemble else gain


def plain_unit(x: Tensor, scale: Tensor) -> Tensor:
    """y = s x/||x||, the formula itself."""
    return scale * x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def unit(x: Tensor, scale: Tensor) -> Tensor:
    """The same with its gradient written out, in half the passes of the composed form. `scale`
    has x's axes, all of length 1 but a leading model axis."""
    out: Tensor = _Unit.apply(x, scale)  # type: ignore[assignment]
    return out


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).reciprocal_()
        direction = x * inverse
        ctx.save_for_backward(direction, inverse, scale)
        return direction * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        direction, inverse, scale = ctx.saved_tensors
        along = (grad * direction).sum(-1, keepdim=True)
        d_x = torch.addcmul(grad, direction, along, value=-1).mul_(inverse * scale)
        lead = scale.shape[0] if scale.shape[0] != 1 or scale.ndim == 1 else 1
        d_scale = along.reshape(lead, -1).sum(-1).view(scale.shape)
        return d_x, d_scale


# ---- feed-forward


class FeedForward(nn.Module):
    """W_2 act(W_1 x), or W_2 (act(W_g x) * W_1 x) when gated; `up` holds W_g over W_1."""

    def __init__(self, shape: Shape, models: int | None = None) -> None:
        super().__init__()
        self.activation = shape.activation
        self.width = shape.ffn_dim
        hidden = shape.ffn_dim * (2 if shape.gated else 1)
        self.up = linear_layer(shape.dim, hidden, shape.ffn_bias, models)
        self.down = linear_layer(shape.ffn_dim, shape.dim, shape.ffn_bias, models)

    def reset_parameters(self) -> None:
        """Weights and biases as they are made."""
        reset_linears(self.children())

    def forward(self, x: Tensor) -> Tensor:
        """The feed-forward of x (..., D)."""
        return self.down(self._activate(self.up(x)))

    def _activate(self, hidden: Tensor) -> Tensor:
        match self.activation:
            case "relu":
                # What a tool made of the projection may be wanted again.
                return F.relu(hidden, inplace=as_made(self.up))
            case "relu2":
                return F.relu(hidden).square()
            case "gelu":
                return F.gelu(hidden)
            case "gelu-tanh":  # of weights that were trained with it; no shape asks for it
                return F.gelu(hidden, approximate="tanh")
        gate, up = hidden.split(self.width, -1)
        if self.activation == "swiglu":
            return F.silu(gate) * up
        return F.gelu(gate, approximate="tanh") * up
