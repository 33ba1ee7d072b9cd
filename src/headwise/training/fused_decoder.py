"""A training step of narrow pre-norm models with their blocks as kernels, for GPUs.

`FusedDecoder` computes what `model.Decoder` (or a pre-norm Encoder) and autograd compute, for the
shapes that `refusal` lets through: layer norms before each part, as GPT-2 has them. The step runs
module -> kernels -> module: embedding and positions are a module's forward, then come the blocks,
then last norm, read-out and loss with autograd; back the same way. Products take operands of one
type as in fused_encoder.py; the residual, norms, sums and weights are float32.

The blocks are made of one of two families:

CudaBlocks     short causal sequences on an H100 or H200: three kernels per block in CUDA C++. A
               head group goes through all blocks and back without waiting for the others.
TritonBlocks   everything else. All head groups share a kernel, but for the heads themselves.

Both cut sums over tokens into token splits, each with its own partial sums of all weights'
gradients (`weight_partials`: splits, models, row), and add these up at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from headwise.kernels import decoder_cuda, nvrtc
from headwise.kernels.cards import shared_bytes
from headwise.kernels.decoder_cuda import BlockWeights
from headwise.model.transformer import Decoder, Encoder
from headwise.shape import Shape, beyond_plain
from headwise.tasks.task import Task
from headwise.training.decoder_blocks import TritonBlocks
from headwise.training.flat import OPERANDS, FlatKernels, FlatRows, HeadGroup
from headwise.training.loss_scale import base_scale
from headwise.training.run import Run
from headwise.training.step import gpu_refusal

TOKEN_TILE = 64  # tokens of a program in Triton
WIDE_SHARED = 139_264  # bytes that `feed_back` takes at least, of float32 beyond width 64
STRETCH = 1024  # numbers of a program that adds up partial sums
ATTENTION = ("norm1.weight", "norm1.bias", "qkv.weight", "qkv.bias", "out.weight")  # summed there


def refusal(shape: Shape, tokens: int, batch: int, precision: str = "fp16") -> str:
    """What the fused blocks need that this shape has not; empty when they take it."""
    s = shape
    if s.norm != "layer" or s.norm_at != "pre":
        return (
            f"needs norm='layer' and norm_at='pre', this shape has norm={s.norm!r} and "
            f"norm_at={s.norm_at!r}"
        )
    if special := beyond_plain(s):
        return f"needs plain heads and equal layers, this shape has {special}"
    if s.latent or s.num_kv_heads != s.num_heads or s.v_head_dim != s.head_dim or s.average > 1:
        return (
            "needs plain heads (as many KV heads, values as wide as the rank, no latent, no "
            f"average), this shape has {s.num_heads} heads of rank {s.head_dim}, {s.num_kv_heads} "
            f"KV heads, values of {s.v_head_dim}, average {s.average}"
            f"{' and a latent' if s.latent else ''}"
        )
    if any(s.windows) or s.qk_norm != "none" or s.qk_rope_head_dim:
        return (
            "needs no windows, no query/key norm and no rotary positions, this shape has "
            f"windows={s.windows}, qk_norm={s.qk_norm!r}, qk_rope_head_dim={s.qk_rope_head_dim}"
        )
    biased = s.qkv_bias and s.out_bias and s.ffn_bias
    if s.activation not in ("relu", "gelu") or not s.ffn_dim or not biased:
        return (
            "needs a ReLU or GELU feed-forward and biases everywhere, this shape has "
            f"activation={s.activation!r}, ffn_dim={s.ffn_dim}, qkv_bias={s.qkv_bias}, "
            f"out_bias={s.out_bias}, ffn_bias={s.ffn_bias}"
        )
    if s.dim % 16 or s.dim > 128:
        return f"needs dim in 16s up to 128, this shape has dim {s.dim}"
    if tokens > 128 or s.head_dim > 64:
        return (
            f"needs at most 128 tokens and rank 64, this shape has {tokens} tokens and rank "
            f"{s.head_dim}"
        )
    if batch * tokens % TOKEN_TILE:
        return f"needs batch x tokens in {TOKEN_TILE}s, this shape has {batch * tokens}"
    return ""


def card_refusal(shape: Shape, precision: str, shared: int) -> str:
    """What the blocks in Triton need of a card with so many bytes of shared memory per block."""
    if shape.dim <= 64 or OPERANDS[precision] != torch.float32 or shared >= WIDE_SHARED:
        return ""
    return (
        f"needs dim 64 or less with operands of 32 bits on a card with {shared >> 10} KiB of "
        f"shared memory per block, this shape has dim {shape.dim}"
    )


def cuda_refusal(shape: Shape, tokens: int, precision: str = "fp16") -> str:
    """What blocks in CUDA C++ need that this shape has not; empty when they take it, where a GPU
    has such kernels."""
    if not shape.causal or shape.activation != "gelu":
        return (
            f"needs causal=True and activation='gelu', this shape has causal={shape.causal} and "
            f"activation={shape.activation!r}"
        )
    columns = shape.num_heads * shape.head_dim
    return decoder_cuda.refusal(sizes_of(shape, tokens), columns, OPERANDS[precision])


def sizes_of(shape: Shape, tokens: int) -> decoder_cuda.Sizes:
    return decoder_cuda.Sizes(shape.dim, shape.ffn_dim, tokens, shape.head_dim)


def model_bytes(shape: Shape, tokens: int, batch: int, precision: str) -> int:
    """Bytes of one model in training: weights, gradients, moments, and every buffer of whichever
    family has more."""
    T, D, C = batch * tokens, shape.dim, shape.num_heads * shape.head_dim
    size, splits = OPERANDS[precision].itemsize, TritonBlocks.MOST_SPLITS
    kept = shape.depth * T * (D * (8 + 2 * size) + 4 * C * size)
    most = kept + T * (40 * D + C * size) + shape.params * (16 + size + 4 * splits)
    if not cuda_refusal(shape, tokens, precision):
        T = batch * sizes_of(shape, tokens).padded
        kept = shape.depth * T * (18 * D + 4 * shape.num_heads)
        splits = decoder_cuda.MOST_SPLITS
        most = max(most, kept + T * 18 * D + shape.params * (22 + 4 * splits))
    return most


def blocks_of(
    rows: FlatRows, batch: int, tokens: int, *, training: bool = True
) -> CudaBlocks | TritonBlocks:
    """The blocks of an ensemble as kernels, the fastest that there are."""
    gain = base_scale(batch * tokens, rows.precision)
    kind = CudaBlocks if _has_cuda(rows, tokens) else TritonBlocks
    return kind(rows, batch, tokens, gain, training=training)


def _has_cuda(rows: FlatRows, tokens: int) -> bool:
    device = rows.weights.device
    shapes = [group.shape for group in rows.head_groups]
    if any(cuda_refusal(shape, tokens, rows.precision) for shape in shapes):
        return False
    if nvrtc.missing(device):
        return False
    return all(decoder_cuda.proven(sizes_of(shape, tokens), device) for shape in shapes)


class FusedDecoder:
    """Blocks as kernels, what is around them as modules (`step.Kernels`)."""

    fused: ClassVar[bool] = True
    captured: ClassVar[bool] = True

    def __init__(
        self, blocks: CudaBlocks | TritonBlocks, model: Encoder | Decoder, task: Task
    ) -> None:
        self.blocks, self.model, self.task = blocks, model, task
        self.groups = [HeadGroup(slice(0, blocks.M), blocks.shape)]  # all models wait for another
        names = [name for name, _ in model.named_parameters()]
        self.around = [name for name in names if not name.startswith("blocks.")]

    @staticmethod
    def refusal(run: Run, device: torch.device) -> str:
        why = gpu_refusal(run, device, refusal)
        if why or torch.version.hip:
            return why
        shared = shared_bytes(torch.cuda.get_device_capability(device))
        return card_refusal(run.shape, run.recipe.precision, shared)

    @staticmethod
    def model_bytes(run: Run) -> int:
        recipe = run.recipe
        return model_bytes(run.shape, run.task.tokens, recipe.batch, recipe.precision)

    @classmethod
    def make(
        cls,
        rows: FlatRows,
        model: Encoder | Decoder,
        task: Task,
        batch: int,
        *,
        training: bool,
    ) -> FusedDecoder:
        return cls(blocks_of(rows, batch, task.tokens, training=training), model, task)

    def each_group(self, work: Callable[[HeadGroup], None]) -> None:
        work(self.groups[0])

    def around_block(self, block: int) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def total(self, group: HeadGroup, grads: Tensor) -> Tensor:
        return grads.sum(1)

    def forward(self, inputs: Tensor) -> Tensor:
        before = self.model.embed(inputs)
        return self.model.unembed(self.blocks.forward(before.flatten(1, -2)).view(before.shape))

    def gradient(
        self, group: HeadGroup, inputs: Tensor, targets: Tensor, losses_M: Tensor, scale_M: Tensor
    ) -> Tensor:
        params = dict(self.model.named_parameters())
        around = [params[name] for name in self.around]
        gain = self.blocks.gain
        before = self.model.embed(inputs)
        after = self.blocks.forward(before.detach().flatten(1, -2)).view(before.shape)
        after.requires_grad_()
        losses = self.task.loss(self.model.unembed(after).float(), targets)
        losses_M.copy_(losses.detach())
        d_after, *behind = torch.autograd.grad(
            (losses * scale_M).sum() * gain, [after, *around], allow_unused=True
        )
        d_before, grads = self.blocks.backward(d_after.flatten(1, -2))
        ahead: tuple[Tensor | None, ...] = (None,) * len(around)
        if before.requires_grad:
            ahead = torch.autograd.grad(
                before, around, d_before.view(before.shape), allow_unused=True
            )
        # a parameter may be used behind the blocks, ahead of them, or at both ends
        for name, last, first in zip(self.around, behind, ahead, strict=True):
            start, size = self.blocks.rows.layout.spans[name]
            found, *more = [g for g in (last, first) if g is not None]
            torch.div(sum(more, found).flatten(1), gain, out=grads[:, start : start + size])
        return grads


class CudaBlocks(FlatKernels):
    """The blocks in CUDA C++, for short causal sequences: three kernels per block."""

    def __init__(
        self, rows: FlatRows, batch: int, tokens: int, gain: float, *, training: bool = True
    ) -> None:
        super().__init__(rows, batch, tokens, gain)
        sizes = sizes_of(self.shape, tokens)
        heads = [group.shape.num_heads for group in self.head_groups]
        if self.streams:  # more heads take longer: they go first, so that none ends alone
            self.streams = [
                torch.cuda.Stream(self.device, priority=-sum(few < many for few in heads))
                for many in heads[1:]
            ]
        self.kept = [
            decoder_cuda.buffers(sizes, self.M, batch, self.device, max(heads))
            for _ in range(self.shape.depth if training else 1)
        ]
        self.out = torch.empty(self.M, self.T, self.D, device=self.device)
        if training:
            self.between, self.dx_between = decoder_cuda.gradients(
                sizes, self.M, batch, self.device
            )
            self.dx = torch.empty_like(self.out)
            self.mlp_splits, self.attention_splits = decoder_cuda.token_splits(sizes, batch, self.M)
            most = max(self.mlp_splits, self.attention_splits)
            self.weight_partials = torch.zeros(most, self.M, self.P, device=self.device)
            self.counts = self._counts().to(self.device)
            self.grads = torch.zeros_like(rows.weights)

    def _counts(self) -> Tensor:
        """How many splits hold something, for each stretch of the flat rows."""
        counts = torch.zeros(-(-self.P // STRETCH), dtype=torch.int32)
        for name, (start, size) in self.rows.layout.spans.items():
            if not name.startswith("blocks."):
                continue
            splits = self.attention_splits if name.endswith(ATTENTION) else self.mlp_splits
            counts[start // STRETCH : -(-(start + size) // STRETCH)].clamp_(min=splits)
        return counts

    def forward(self, x_MTD: Tensor) -> Tensor:
        """The residual after the last block; (models, batch x tokens, dim), as the input."""
        self.first = x_MTD.contiguous()
        self.each_head_group(self._blocks)
        return self.out

    def backward(self, dx_MTD: Tensor) -> tuple[Tensor, Tensor]:
        """From the gradient of the last residual, times the gain: that of the input, times the
        gain, and the flat rows' own."""
        from headwise.kernels import encoder_norm_triton

        dx = dx_MTD.contiguous()
        self.each_head_group(lambda group: self._blocks_backward(dx[group.models], group))
        encoder_norm_triton.sum_splits[(len(self.counts), self.M)](
            partials=self.weight_partials,
            grads=self.grads,
            size=self.P,
            model=self.P,
            splits=self.counts,
            EACH=True,
            BLOCK=STRETCH,
        )
        return self.dx, self.grads

    def _call(self, group: HeadGroup) -> decoder_cuda.Call:
        return decoder_cuda.Call(group.size, self.batch, self.P, group.shape.scale)

    def _blocks(self, group: HeadGroup) -> None:
        """All blocks of one group."""
        sizes, call = sizes_of(group.shape, self.tokens), self._call(group)
        last, x = self.shape.depth - 1, self.first[group.models]
        for i in range(self.shape.depth):
            kept = self.kept[i % len(self.kept)].of(group.models)
            to = kept._replace(x2=self.out[group.models]) if i == last else kept
            weights = self._weights(i, group)
            decoder_cuda.forward(sizes, call, x, weights, to, lowest=i == 0, highest=i == last)
            x = kept.x2

    def _blocks_backward(self, dx: Tensor, group: HeadGroup) -> None:
        """Backward through all of them, from the gradient of what is after the last."""
        sizes, call = sizes_of(group.shape, self.tokens), self._call(group)
        last, models = self.shape.depth - 1, group.models
        between, apart, unscale = self.between.of(models), self.M * self.P, 1 / self.gain
        mlp = decoder_cuda.Splits(self.mlp_splits, apart, unscale)
        attention = decoder_cuda.Splits(self.attention_splits, apart, unscale)
        for i in reversed(range(self.shape.depth)):
            kept = self.kept[i].of(models)
            x = self.kept[i - 1].x2[models] if i else self.first[models]
            weights = self._weights(i, group)
            grads = self._weights(i, group, of=self.weight_partials)
            decoder_cuda.feed_back(
                sizes, call, dx, kept, weights, between, grads, mlp, highest=i == last
            )
            dx = self.dx_between[models] if i else self.dx[models]
            decoder_cuda.backward(
                sizes, call, x, kept, weights, between, dx, grads, attention, lowest=i == 0
            )

    def _weights(self, index: int, group: HeadGroup, of: Tensor | None = None) -> BlockWeights:
        """A block's parameters as the kernels take them, or the same places in other rows."""

        def find(name: str, matrix: bool = False) -> Tensor:
            full = f"blocks.{index}.{name}"
            if matrix and of is None:
                return self.matrix(full, group.first)
            return self.vector(full, group.first, of)

        return BlockWeights(
            gain1=find("norm1.weight"),
            shift1=find("norm1.bias"),
            qkv=find("attention.qkv.weight", matrix=True),
            qkv_bias=find("attention.qkv.bias"),
            out=find("attention.out.weight", matrix=True),
            out_bias=find("attention.out_bias"),
            gain2=find("norm2.weight"),
            shift2=find("norm2.bias"),
            up=find("feed.up.weight", matrix=True),
            up_bias=find("feed.up.bias"),
            down=find("feed.down.weight", matrix=True),
            down_bias=find("feed.down.bias"),
        )
