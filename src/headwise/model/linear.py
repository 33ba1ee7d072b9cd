"""Linear maps: `nn.Linear` for one model, `EnsembleLinear` for many at once.

A model's projections are torch's own `nn.Linear`, so that tools find them by type and by name:
LoRA, quantisation, tensor parallelism. Such a tool puts another module in the place of one, puts
another kind of tensor in it, or hangs a hook on it. Fast paths that read a weight instead of
calling the module ask `as_made` first.

Axes: M models, T tokens of all sequences, G groups, I inputs of a group, O its outputs, D width.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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


class EnsembleLinear(nn.Module):
    """y_m = x_m W_m^T + b_m for each model m: one batched product.

    >>> EnsembleLinear(5, 3, bias=True, models=2)(torch.zeros(2, 7, 5)).shape
    torch.Size([2, 7, 3])
    """

    def __init__(self, inputs: int, outputs: int, bias: bool, models: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(uniform(inputs**-0.5, models, outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(models, outputs)) if bias else None

    def reset_parameters(self) -> None:
        """Weights and biases as they are made."""
        reset_linear(self)

    def forward(self, x: Tensor) -> Tensor:
        """W x + b."""
        return linear(x, self.weight, self.bias)


class GroupedLinear(nn.Module):
    """y_g = W_g x_g for each of `groups` equal cuts of x, side by side (DeepSeek-V4's output).

    Parameters have the layout of DeepSeek-V4's: W_g are rows of one weight (G O, I).

    >>> GroupedLinear(12, 5, groups=3)(torch.zeros(2, 7, 12)).shape
    torch.Size([2, 7, 15])
    """

    bias = None

    def __init__(self, inputs: int, outputs: int, groups: int, models: int | None = None) -> None:
        super().__init__()
        lead, width = () if models is None else (models,), inputs // groups
        self.weight = nn.Parameter(uniform(width**-0.5, *lead, groups * outputs, width))
        self.groups = groups

    def reset_parameters(self) -> None:
        """Weights as they are made."""
        reset_linear(self)

    def forward(self, x: Tensor) -> Tensor:
        """All W_g x_g, (..., G O)."""
        x_MTGI = x.flatten(1, -2) if self.weight.ndim == 3 else x.reshape(1, -1, x.shape[-1])
        x_MTGI = x_MTGI.unflatten(-1, (self.groups, -1))
        M, T, G, _ = x_MTGI.shape
        # One batched product over models and groups; without models the groups are a view.
        x_BTI = x_MTGI.transpose(1, 2).reshape(M * G, T, -1)
        w_BOI = self.weight.reshape(M * G, -1, self.weight.shape[-1])
        y_BTO = torch.bmm(x_BTI, w_BOI.mT)
        y_MTGO = y_BTO.view(M, G, T, -1).transpose(1, 2)
        return y_MTGO.reshape(*x.shape[:-1], -1)


LINEARS = (nn.Linear, EnsembleLinear, GroupedLinear)
AnyLinear = nn.Linear | EnsembleLinear


def linear_layer(inputs: int, outputs: int, bias: bool, models: int | None = None) -> Any:
    """The linear map of one model, an `nn.Linear`, or of an ensemble. Weights start at U(+-1/sqrt(
    fan in)), biases at 0."""
    if models is not None:
        return EnsembleLinear(inputs, outputs, bias, models)
    # Of exactly this type, which quantize_dynamic asks for. Its parameters are put in by hand: its
    # own constructor would draw numbers that are then drawn again.
    layer = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(layer)
    layer.in_features, layer.out_features = inputs, outputs
    layer.weight = nn.Parameter(uniform(inputs**-0.5, outputs, inputs))
    layer.register_parameter("bias", nn.Parameter(torch.zeros(outputs)) if bias else None)
    return layer


@torch.no_grad()
def reset_linear(layer: nn.Module) -> None:
    """Weights and biases as `linear_layer` makes them; not torch's, whose biases are drawn too."""
    weight, bias = layer.get_parameter("weight"), layer.bias
    weight.uniform_(-(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)
    if isinstance(bias, Tensor):
        bias.zero_()


def reset_linears(layers: Iterable[nn.Module]) -> None:
    """The same for those of some layers that are linear maps."""
    for layer in layers:
        if isinstance(layer, LINEARS):
            reset_linear(layer)


def as_made(layer: nn.Module) -> bool:
    """Whether a layer is what `linear_layer` made, so that to read its weight is to call it.

    It is not where a tool has put another module in its place (LoRA, dynamic int8), another kind of
    tensor into it (torchao, DTensor), or a hook on it (tensor parallelism, recorders).
    """
    if type(layer) is not nn.Linear:
        return type(layer) is EnsembleLinear
    hooks = layer._forward_hooks or layer._forward_pre_hooks
    hooks = hooks or layer._backward_hooks or layer._backward_pre_hooks
    return not hooks and type(layer.weight) in (Tensor, nn.Parameter)


def scaled_linear(layer: nn.Module, x: Tensor, bias: Tensor | None, scale: float = 1.0) -> Tensor:
    """scale * layer(x) + bias, for a layer without a bias of its own; one product where the layer
    is as it was made."""
    if as_made(layer):
        weight: Any = layer.weight  # a plain tensor under torch.func
        return linear(x, weight, bias, scale)
    y = layer(x) if scale == 1.0 else layer(x) * scale
    return y if bias is None else y + bias
