"""The layers that attention and transformers are made of: Linear, Norm, FeedForward, rotary
positions.

With `models` = M a layer holds M independent models: its parameters and its input have a leading
model axis, and one call computes them all.

Axes: M models, T tokens of all sequences, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from headwise.kernels import embed_readout
from headwise.shape import Shape

# ---- linear maps


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, scale: float = 1.0) -> Tensor:
    """scale * x W^T + b.

    W is (outputs, inputs), or (models, outputs, inputs) with x (models, ..., inputs).
    """
    # One model: torch's own linear map, which takes any leading axes.
    if weight.ndim == 2:
        return F.linear(x, weight if scale == 1.0 else weight * scale, bias)
    # An ensemble: one batched product over the model axis, all other axes flattened into T.
    flat_MTD = x.flatten(1, -2)
    if bias is None:
        y_MTD = torch.bmm(flat_MTD, weight.mT)
        y_MTD = y_MTD if scale == 1.0 else y_MTD * scale
    else:
        y_MTD = torch.baddbmm(bias.unsqueeze(1), flat_MTD, weight.mT, alpha=scale)
    return y_MTD.unflatten(1, x.shape[1:-1])


def uniform(bound: float, *size: int) -> Tensor:
    """U(+-bound) from torch's global generator, as torch's own modules start, so that a module
    works as it is made; `init.initialise` draws anew, from a generator.

    On the meta device nothing is drawn: torch would load a symbolic algebra system for it.
    """
    tensor = torch.empty(*size)
    return tensor if tensor.is_meta else tensor.uniform_(-bound, bound)


class Linear(nn.Module):
    """y = x W^T + b; with `models` the product is batched.

    >>> Linear(5, 3, bias=True, models=2)(torch.zeros(2, 7, 5)).shape
    torch.Size([2, 7, 3])
    """

    def __init__(self, inputs: int, outputs: int, bias: bool, models: int | None = None) -> None:
        super().__init__()
        lead = () if models is None else (models,)
        self.weight = nn.Parameter(uniform(inputs**-0.5, *lead, outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(*lead, outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """W x + b."""
        return linear(x, self.weight, self.bias)


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
        self.up = Linear(shape.dim, hidden, shape.ffn_bias, models)
        self.down = Linear(shape.ffn_dim, shape.dim, shape.ffn_bias, models)

    def forward(self, x: Tensor) -> Tensor:
        """The feed-forward of x (..., D)."""
        return self.down(self._activate(self.up(x)))

    def _activate(self, hidden: Tensor) -> Tensor:
        match self.activation:
            case "relu":
                return F.relu(hidden, inplace=True)
            case "relu2":
                return F.relu(hidden).square()
            case "gelu":
                return F.gelu(hidden)
        gate, up = hidden.split(self.width, -1)
        if self.activation == "swiglu":
            return F.silu(gate) * up
        return F.gelu(gate, approximate="tanh") * up


# ---- rotary positions

Rotary = tuple[Tensor, Tensor]  # cosines and sines, each (tokens, width / 2)


def rotary_table(tokens: int, width: int, theta: float, like: Tensor, start: int = 0) -> Rotary:
    """Cosines and sines of the angles p theta^(-2i/width), positions p from `start` on.

    Never below float32: half precision cannot tell large positions apart.
    """
    # One rate per pair of coordinates, fastest first; one angle per position and pair.
    exact = torch.promote_types(like.dtype, torch.float32)
    positions = torch.arange(start, start + tokens, device=like.device, dtype=exact)
    rates = theta ** (-torch.arange(0, width, 2, device=like.device, dtype=exact) / width)
    angles = torch.outer(positions, rates)
    return angles.cos(), angles.sin()


def rotate(
    x: Tensor,
    width: int,
    theta: float,
    start: int = 0,
    table: Rotary | None = None,
    *,
    at: str = "last",
    back: bool = False,
) -> Tensor:
    """Rotary positions on the last `width` coordinates of x (..., tokens, rank), or the first:
    coordinate i turns with coordinate i + width / 2, `back` the other way.

    `table` is `rotary_table(...)` of the same tokens, where the caller has it.
    """
    if not width:
        return x
    # The other coordinates pass by; these turn in pairs (a_i, b_i).
    table = table or rotary_table(x.shape[-2], width, theta, x, start)
    cos, sin = (t.to(x.dtype) for t in table)
    half, others = width // 2, x.shape[-1] - width
    if at == "first":
        a, b, rest = x.split((half, half, others), -1)
    else:
        rest, a, b = x.split((others, half, half), -1)
    if back:
        turned = a * cos + b * sin, b * cos - a * sin
    else:
        turned = a * cos - b * sin, b * cos + a * sin
    return torch.cat((*turned, rest) if at == "first" else (rest, *turned), -1)
