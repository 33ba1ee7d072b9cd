"""The feed-forward of a post-norm layer within the fused step (fused_encoder.py): in CUDA C++ or in
Triton.

Both take the gradient from the layer's output to the residual between its two parts. They differ in
where the norms are:

CudaMlp     The kernels leave partial sums of dx. `FusedEncoder.norm_backward` adds them up while it
            takes dx through a norm: the layer's upper norm before the feed-forward, with what the
            attention part of the layer above left, and its lower norm after it.
TritonMlp   `feed_back` takes dx through the upper norm itself, and through the lower one, too,
            where the attention part below is CUDA C++ and begins behind its norm. Weights'
            gradients are a kernel of their own on the stream `later`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwise.kernels import encoder_mlp_cuda
from headwise.kernels.encoder import End, Gradients, MlpWeights

if TYPE_CHECKING:
    from headwise.training.fused_encoder import FusedEncoder, Layer


def weights_of(step: FusedEncoder, layer: Layer) -> MlpWeights:
    m = layer.group.first
    return MlpWeights(
        up=step.matrix(layer.name("feed.up.weight"), m),
        up_bias=step.vector(layer.name("feed.up.bias"), m),
        down=step.matrix(layer.name("feed.down.weight"), m),
    )


def gradients_of(step: FusedEncoder, layer: Layer) -> MlpWeights:
    m = layer.group.first
    return MlpWeights(
        up=step.vector(layer.name("feed.up.weight"), m, step.grads),
        up_bias=step.vector(layer.name("feed.up.bias"), m, step.grads),
        down=step.vector(layer.name("feed.down.weight"), m, step.grads),
    )


class CudaMlp:
    """The feed-forward as one kernel each way, in CUDA C++."""

    def __init__(self, step: FusedEncoder) -> None:
        self.step = step
        self.dx_partials = encoder_mlp_cuda.dx_partials(step.F)

    def _sizes(self, layer: Layer) -> encoder_mlp_cuda.Layer:
        step = self.step
        return encoder_mlp_cuda.Layer(layer.group.size, step.T, step.F, step.P)

    def forward(self, layer: Layer, x: Tensor, end: End) -> None:
        encoder_mlp_cuda.forward(self._sizes(layer), x, weights_of(self.step, layer), end)

    def backward(self, layer: Layer, later: torch.cuda.Stream | None) -> None:
        step, group = self.step, layer.group
        middle, out = step.left_by(layer)
        top = layer.index + 1 == step.shape.depth
        above = 0 if top else step.attention.dx_partials
        step.norm_backward(layer, out, "norm2.weight", above, layer.mlp_slot)
        gradients = Gradients(
            dx_partials=step.partials_of(group),
            weights=gradients_of(step, layer),
            total=step.totals[group.models],
            token_splits=1,
            row=step.P,
            unscale=1 / step.gain,
        )
        dz, weights = step.dz16[group.models], weights_of(step, layer)
        encoder_mlp_cuda.backward(self._sizes(layer), middle.x, dz, weights, gradients)
        step.norm_backward(layer, middle, "norm1.weight", self.dx_partials, layer.attention_slot)


class TritonMlp:
    """The feed-forward as one kernel forward and two backward, in Triton."""

    dx_partials = 0  # dx is complete

    def __init__(self, step: FusedEncoder) -> None:
        self.step = step
        dtype = step.rows.operands.dtype
        self.wide = dtype == torch.float32
        turns = min(2, step.shape.depth) if step.training else 0
        # dz behind the upper norm, which `later` still reads while the next layer writes its own
        self.dz16 = [step.empty(step.T, step.D, dtype=dtype) for _ in range(turns)]
        self.token_tile = 128 if step.T % 128 == 0 else 64

    def forward(self, layer: Layer, x: Tensor, end: End) -> None:
        from headwise.kernels import encoder_mlp_triton

        step = self.step
        launch: dict[str, Any] = {"STAGES": 3, "num_warps": 4}
        if self.wide:
            launch = {"STAGES": 1, "num_warps": 8}
        encoder_mlp_triton.feed[lambda sizes: (step.T // sizes["BT"], layer.group.size)](
            x=x,
            **weights_of(step, layer)._asdict(),
            **end._asdict(),
            T=step.T,
            F=step.F,
            model=step.P,
            D=step.D,
            BT=self.token_tile,
            BF=64,
            IP=step.dot,
            **launch,
        )

    def backward(self, layer: Layer, later: torch.cuda.Stream | None) -> None:
        step = self.step
        dz16 = self.dz16[layer.index % 2][layer.group.models]
        self._feed_back(layer, dz16)
        if layer.index + 1 < step.shape.depth:
            step.join(later)  # the layer above may still read what the attention part writes over
        with step.on(later):
            self._feed_weights(layer, dz16)

    def _feed_back(self, layer: Layer, dz16: Tensor) -> None:
        from headwise.kernels import encoder_mlp_triton

        step, group = self.step, layer.group
        middle, out = step.left_by(layer)
        encoder_mlp_triton.feed_back[(step.T // 64, group.size)](
            g=step.dx[group.models],
            u=out.u,
            inv=out.inv,
            scale=step.vector(layer.name("norm2.weight"), group.first),
            x=middle.x,
            **weights_of(step, layer)._asdict(),
            dz=dz16,
            dx=step.middle_dx[group.models],
            u1=middle.u,
            inv1=middle.inv,
            scale1=step.vector(layer.name("norm1.weight"), group.first),
            lower=step.dz16[group.models],
            tile_sums=step.tile_sums[group.models],
            T=step.T,
            F=step.F,
            model=step.P,
            slot=layer.mlp_slot,
            slots=step.slots,
            D=step.D,
            BT=64,
            BF=64,
            LOWER=step.cuda_attention,
            IP=step.dot,
            STAGES=1 if self.wide else 3,
            num_warps=4,
        )

    def _feed_weights(self, layer: Layer, dz16: Tensor) -> None:
        from headwise.kernels import encoder_mlp_triton

        step = self.step
        middle, _ = step.left_by(layer)
        grads = gradients_of(step, layer)
        # The grid follows the tile of hidden units, which gives way on cards with less memory.
        encoder_mlp_triton.feed_weights[lambda sizes: (step.F // sizes["BF"], layer.group.size)](
            x=middle.x,
            dz=dz16,
            **weights_of(step, layer)._asdict(),
            d_up=grads.up,
            d_up_bias=grads.up_bias,
            d_down=grads.down,
            T=step.T,
            F=step.F,
            model=step.P,
            unscale=1 / step.gain,
            D=step.D,
            BT=64,
            BF=64,
            IP=step.dot,
            STAGES=1 if self.wide else 3,
            num_warps=4,
        )
