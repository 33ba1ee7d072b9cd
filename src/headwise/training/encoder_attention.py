"""The attention part of a post-norm layer within the fused step (fused_encoder.py): in CUDA C++ or
in Triton.

Both take the gradient from the residual between a layer's two parts to the layer's input:

CudaAttention     The feed-forward has taken dx through the norm already. One kernel makes the
                  weights' gradients, and partial sums of the input's, which the norm of the layer
                  below adds up, or a kernel of its own does.
TritonAttention   begins with the norm. Ranks 16, 32, 64 of short sequences are one kernel each way,
                  others are projection, heads and output. Weights' gradients are products over all
                  tokens, on the stream `later`, beside the feed-forward of the layer below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwise.kernels import encoder_attention_cuda
from headwise.kernels.encoder import AttentionWeights, End, Gradients, Normed
from headwise.shape import Shape

if TYPE_CHECKING:
    from headwise.training.fused_encoder import FusedEncoder, Layer

# ranks whose attention part is one Triton kernel, and its loads in flight forward and backward
STAGES = {64: (3, 2), 32: (3, 3), 16: (3, 3)}
SUM_TILE = 1024  # numbers of a program that adds up token splits


def weights_of(step: FusedEncoder, layer: Layer) -> AttentionWeights:
    m = layer.group.first
    return AttentionWeights(
        qkv=step.matrix(layer.name("attention.qkv.weight"), m),
        qkv_bias=step.vector(layer.name("attention.qkv.bias"), m),
        out=step.matrix(layer.name("attention.out.weight"), m),
    )


def gradients_of(step: FusedEncoder, layer: Layer) -> AttentionWeights:
    m = layer.group.first
    return AttentionWeights(
        qkv=step.vector(layer.name("attention.qkv.weight"), m, step.grads),
        qkv_bias=step.vector(layer.name("attention.qkv.bias"), m, step.grads),
        out=step.vector(layer.name("attention.out.weight"), m, step.grads),
    )


def needs_no_dx(step: FusedEncoder, layer: Layer) -> bool:
    """Whether nothing learns from the gradient of this layer's input."""
    return layer.first and step.shape.positions == "none"


class CudaAttention:
    """The attention part as one kernel each way, in CUDA C++."""

    def __init__(self, step: FusedEncoder) -> None:
        self.step = step
        self.dx_partials = encoder_attention_cuda.dx_partials(step.C)
        sizes = (step.M, step.T, step.C)
        self.column_splits = encoder_attention_cuda.column_splits(*sizes)
        splits = self.column_splits if self.column_splits > 1 else 0
        self.outputs = step.empty(splits, step.T, step.D)  # partial sums
        self.token_splits = encoder_attention_cuda.token_splits(*sizes)
        if step.training and self.token_splits > 1:
            _, size = self._span(0)
            self.weight_splits = torch.empty(
                self.token_splits, step.M, size, device=step.device
            )  # partial sums of the weights' gradients; each group has its own block of them

    def _span(self, index: int) -> tuple[int, int]:
        """Where a layer's matrices and inner biases start in a row, and how many numbers they
        are."""
        spans = self.step.rows.layout.spans
        first, _ = spans[f"blocks.{index}.attention.qkv.weight"]
        last, length = spans[f"blocks.{index}.attention.out.weight"]
        return first, last + length - first

    def _sizes(self, layer: Layer) -> encoder_attention_cuda.Layer:
        step, s = self.step, layer.group.shape
        return encoder_attention_cuda.Layer(
            models=layer.group.size,
            tokens=step.T,
            columns=step.C,
            rank=s.head_dim,
            row=step.P,
            scale=s.scale,
            average=s.average,
        )

    def forward(self, layer: Layer, x: Tensor, end: End) -> None:
        from headwise.kernels import encoder_norm_triton

        step, s, splits = self.step, layer.group.shape, self.column_splits
        sizes, weights = self._sizes(layer), weights_of(step, layer)
        partials = self.outputs[layer.group.models] if splits > 1 else end.inv  # not written then
        encoder_attention_cuda.forward(sizes, x, weights, end, partials, splits, first=layer.first)
        if splits == 1:
            return
        encoder_norm_triton.sum_outputs[(step.T // 16, layer.group.size)](
            partials=partials,
            **end._asdict(),
            T=step.T,
            splits=splits,
            model=step.P,
            alpha=1 / s.average,
            D=step.D,
            BT=16,
            AVERAGE=s.average,
            FIRST=layer.first,
        )

    def backward(self, layer: Layer, x: Tensor, later: torch.cuda.Stream | None) -> None:
        step, group = self.step, layer.group
        no_dx = needs_no_dx(step, layer)
        complete = gradients_of(step, layer)
        grads, row = complete, step.P
        if self.token_splits > 1:
            grads, row = self._splits_of(layer)
        gradients = Gradients(
            dx_partials=step.partials_of(group),
            weights=grads,
            total=step.totals[group.models],
            token_splits=self.token_splits,
            row=row,
            unscale=1 / step.gain,
        )
        dz, weights = step.dz16[group.models], weights_of(step, layer)
        encoder_attention_cuda.backward(self._sizes(layer), x, dz, weights, gradients, first=no_dx)
        if self.token_splits > 1:
            self._sum_splits(layer, grads, complete)
        if not no_dx and (layer.first or not step.cuda_mlp):
            self._add_partials(layer)  # else the norm of the layer below does it

    def _splits_of(self, layer: Layer) -> tuple[AttentionWeights, int]:
        """Where the token splits' gradients go: (splits, models, numbers) of this group's models,
        one block of memory; and the numbers of one model."""
        start, size = self._span(layer.index)
        block = self.weight_splits.view(-1)[self.token_splits * layer.group.first * size :]
        names = ("attention.qkv.weight", "attention.qkv.bias", "attention.out.weight")
        layout = self.step.rows.layout
        parts = [block[layout.start(layer.name(name)) - start :] for name in names]
        return AttentionWeights(*parts), size

    def _sum_splits(self, layer: Layer, splits: AttentionWeights, to: AttentionWeights) -> None:
        from headwise.kernels import encoder_norm_triton

        _, size = self._span(layer.index)
        encoder_norm_triton.sum_splits[(-(-size // SUM_TILE), layer.group.size)](
            partials=splits.qkv,
            grads=to.qkv,
            size=size,
            model=self.step.P,
            splits=self.token_splits,
            EACH=False,
            BLOCK=SUM_TILE,
        )

    def _add_partials(self, layer: Layer) -> None:
        from headwise.kernels import encoder_norm_triton
        from headwise.training.fused_encoder import loaded_at_once

        step, group = self.step, layer.group
        encoder_norm_triton.add_partials[(step.T // 16, group.size)](
            partials=step.partials_of(group),
            dx=step.dx[group.models],
            T=step.T,
            count=self.dx_partials,
            D=step.D,
            BT=16,
            EACH=loaded_at_once(self.dx_partials),
        )


class TritonAttention:
    """The attention part in Triton: one kernel each way, or projection, heads and output."""

    dx_partials = 0  # dx is complete

    def __init__(self, step: FusedEncoder) -> None:
        self.step = step
        dtype = self.dtype = step.rows.operands.dtype
        training, depth = step.training, step.shape.depth
        whole = all(self._whole(group.shape) for group in step.head_groups)
        kept = depth if training else 1

        def empty(width: int) -> Tensor:
            return step.empty(step.batch, step.tokens, width, dtype=dtype)

        self.qkv = [] if whole else [empty(3 * step.C) for _ in range(kept)]
        self.heads = [empty(step.C) for _ in range(1 if whole else kept)]
        self.token_tile = 128 if step.T % 128 == 0 else 64
        if training:
            self.dqkv = [empty(3 * step.C)] if whole else self.qkv  # written over what they are of
            self.d_heads = [] if whole else [empty(step.C)]

    def _whole(self, shape: Shape) -> bool:
        """Whether no projection outlives its kernel."""
        short = 64 % self.step.tokens == 0
        return short and shape.head_dim in STAGES and self.dtype != torch.float32

    def _tile(self, shape: Shape) -> dict[str, int]:
        """How a whole part sees a tile of tokens: one head at a time, sequences of less than 16
        tokens side by side."""
        tokens, rank = self.step.tokens, shape.head_dim
        return {"N": max(16, tokens), "OWN": tokens, "R": rank, "BC": rank}

    def _of(self, buffers: list[Tensor], layer: Layer) -> Tensor:
        """A layer's buffer, or the one that all layers share."""
        return buffers[layer.index if len(buffers) > 1 else 0][layer.group.models]

    # -- forward

    def forward(self, layer: Layer, x: Tensor, end: End) -> None:
        if self._whole(layer.group.shape):
            self._mix(layer, x, end)
            return
        from headwise.kernels import attention_short_triton

        s = layer.group.shape
        qkv, heads = self._of(self.qkv, layer), self._of(self.heads, layer)
        self._project(layer, x, qkv)
        q, k, v = qkv.flatten(0, 1).split(self.step.C, -1)
        sizes = (s.num_heads, s.head_dim, s.scale, self.step.dot)
        attention_short_triton.forward(q, k, v, heads.flatten(0, 1), *sizes, together=True)
        self._collect(layer, heads, end)

    def _mix(self, layer: Layer, x: Tensor, end: End) -> None:
        from headwise.kernels import encoder_attention_triton

        step, s = self.step, layer.group.shape
        forward_stages, _ = STAGES[s.head_dim]
        encoder_attention_triton.mix[(step.T // 64, layer.group.size)](
            x=x,
            **weights_of(step, layer)._asdict(),
            **end._asdict(),
            T=step.T,
            C=step.C,
            model=step.P,
            alpha=1 / s.average,
            score_scale=s.scale,
            D=step.D,
            BT=64,
            AVERAGE=s.average,
            FIRST=layer.first,
            IP=step.dot,
            **self._tile(s),
            STAGES=forward_stages,
            num_warps=4,
        )

    def _project(self, layer: Layer, x: Tensor, qkv: Tensor) -> None:
        from headwise.kernels import encoder_attention_triton

        step, weights = self.step, weights_of(self.step, layer)
        width = 3 * step.C
        tile = min(128, width & -width)
        grid = (width // tile, step.T // self.token_tile, layer.group.size)
        encoder_attention_triton.project[grid](
            x=x,
            w=weights.qkv,
            b=weights.qkv_bias,
            y=qkv,
            T=step.T,
            C=width,
            model=step.P,
            D=step.D,
            BT=self.token_tile,
            BC=tile,
            IP=step.dot,
        )

    def _collect(self, layer: Layer, heads: Tensor, end: End) -> None:
        from headwise.kernels import encoder_attention_triton

        step, s = self.step, layer.group.shape
        encoder_attention_triton.collect[(step.T // 64, layer.group.size)](
            a=heads,
            w=weights_of(step, layer).out,
            **end._asdict(),
            T=step.T,
            C=step.C,
            model=step.P,
            alpha=1 / s.average,
            D=step.D,
            BT=64,
            BC=min(64, step.C & -step.C),
            AVERAGE=s.average,
            FIRST=layer.first,
            IP=step.dot,
        )

    # -- backward

    def backward(self, layer: Layer, x: Tensor, later: torch.cuda.Stream | None) -> None:
        step = self.step
        middle, _ = step.left_by(layer)
        if self._whole(layer.group.shape):
            self._mix_back(layer, x, middle)
        else:
            self._apart_back(layer, middle)
        with step.on(later):
            self._weights_back(layer, x)

    def _mix_back(self, layer: Layer, x: Tensor, middle: Normed) -> None:
        from headwise.kernels import encoder_attention_triton

        step, group, s = self.step, layer.group, layer.group.shape
        _, backward_stages = STAGES[s.head_dim]
        encoder_attention_triton.mix_back[(step.T // 64, group.size)](
            g=step.middle_dx[group.models],
            u=middle.u,
            inv=middle.inv,
            scale=step.vector(layer.name("norm1.weight"), group.first),
            x=x,
            **weights_of(step, layer)._asdict(),
            dz16=step.dz16[group.models],
            dx=step.dx[group.models],
            dqkv=self._of(self.dqkv, layer),
            o=self._of(self.heads, layer),
            tile_sums=step.tile_sums[group.models],
            T=step.T,
            C=step.C,
            model=step.P,
            slot=layer.attention_slot,
            slots=step.slots,
            alpha=1 / s.average,
            score_scale=s.scale,
            D=step.D,
            BT=64,
            FIRST=needs_no_dx(step, layer),
            IP=step.dot,
            **self._tile(s),
            STAGES=backward_stages,
            num_warps=4,
        )

    def _apart_back(self, layer: Layer, middle: Normed) -> None:
        """Through the norm and the output projection, the heads, the first projection."""
        from headwise.kernels import attention_short_triton

        step, s = self.step, layer.group.shape
        d_heads = self.d_heads[0][layer.group.models]
        self._spread(layer, middle, d_heads)
        qkv = self._of(self.dqkv, layer)
        q, k, v = qkv.flatten(0, 1).split(step.C, -1)
        sizes = (s.num_heads, s.head_dim, s.scale, step.dot)
        attention_short_triton.backward(
            q, k, v, d_heads.flatten(0, 1), q, k, v, *sizes, together=True
        )
        if not needs_no_dx(step, layer):
            self._gather(layer, qkv)

    def _spread(self, layer: Layer, middle: Normed, d_heads: Tensor) -> None:
        from headwise.kernels import encoder_attention_triton

        step, group = self.step, layer.group
        encoder_attention_triton.spread[(step.T // 64, group.size)](
            g=step.middle_dx[group.models],
            u=middle.u,
            inv=middle.inv,
            scale=step.vector(layer.name("norm1.weight"), group.first),
            w=weights_of(step, layer).out,
            dz=step.dx[group.models],
            dz16=step.dz16[group.models],
            a=d_heads,
            tile_sums=step.tile_sums[group.models],
            T=step.T,
            C=step.C,
            model=step.P,
            slot=layer.attention_slot,
            slots=step.slots,
            alpha=1 / group.shape.average,
            D=step.D,
            BT=64,
            BC=min(128, step.C & -step.C),
            IP=step.dot,
        )

    def _gather(self, layer: Layer, dqkv: Tensor) -> None:
        from headwise.kernels import encoder_attention_triton

        step, group = self.step, layer.group
        dx = step.dx[group.models]
        encoder_attention_triton.gather[(step.T // 64, group.size)](
            a=dqkv,
            w=weights_of(step, layer).qkv,
            dz=dx,
            dx=dx,
            T=step.T,
            C=3 * step.C,
            model=step.P,
            D=step.D,
            BT=64,
            BC=min(64, step.C & -step.C),
            IP=step.dot,
        )

    def _weights_back(self, layer: Layer, x: Tensor) -> None:
        """Gradients of both projections: products over all tokens."""
        from headwise.kernels import encoder_attention_triton

        step, group = self.step, layer.group
        C, unscale = step.C, 1 / step.gain
        grads = gradients_of(step, layer)
        tile = min(64 if self.dtype == torch.float32 else 128, C & -C)
        common: dict[str, Any] = {"T": step.T, "model": step.P, "D": step.D, "BT": 64, "BC": tile}
        common |= {"IP": step.dot, "STAGES": 3}
        encoder_attention_triton.outer[(3 * C // tile, group.size)](
            a=self._of(self.dqkv, layer),
            x=x,
            dw=grads.qkv,
            db=grads.qkv_bias,
            C=3 * C,
            unscale=unscale,
            w_c=step.D,
            w_d=1,
            BIAS=True,
            **common,
        )
        encoder_attention_triton.outer[(C // tile, group.size)](
            a=self._of(self.heads, layer),
            x=step.dz16[group.models],
            dw=grads.out,
            db=step.grads,  # not written
            C=C,
            unscale=unscale / group.shape.average,
            w_c=1,
            w_d=C,
            BIAS=False,
            **common,
        )
