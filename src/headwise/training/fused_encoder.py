"""A training step of post-norm encoders as a dozen kernels: forward, loss and backward.

It computes what `model.Encoder` and autograd compute (step.Modules, its plain twin), for the shapes
that `refusal` lets through.

What lies where. Per layer and part, n(z) = s z/||z|| leaves a `Normed`: the direction u in float32,
s u in the operands' type, which the next part multiplies, and 1/||z||. Nothing else is kept for
backward, except queries, keys, values and heads where no kernel holds a whole attention part. In
backward `dx` is the gradient of the residual in float32, `dz16` that of what is normed as an
operand.

Who makes what. The attention part and the feed-forward of a layer are objects that own their
kernels: in CUDA C++ for sequences of 16 tokens on an H100 or H200, else in Triton
(encoder_attention.py, encoder_mlp.py). Head groups go beside each other on streams of their own,
from the data to AdamW. Within a group, sums for weights' gradients, which nobody waits for, go to a
further stream, `later`.

Who sums what. Gradients of norms, biases and the loss are tile sums, added by one `finish` at the
end (kernels/encoder_norm_triton.py); weights' gradients are written complete by the parts.

Products take operands of one type; sums, norms, residual, weights and moments are float32:

fp16    operands rounded to 11 bits, as TF32 rounds them, at half the bytes and twice the rate;
        gradients are carried times a power of two so that they stay in range (loss_scale.py)
tf32    operands of 32 bits, rounded by the tensor cores
fp32    three TF32 products for one, as exact as float32
bf16    operands rounded to 8 bits
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from headwise.kernels import encoder_attention_cuda, encoder_mlp_cuda, nvrtc
from headwise.kernels.encoder import End, Normed
from headwise.shape import Shape, beyond_plain
from headwise.training.encoder_attention import CudaAttention, TritonAttention
from headwise.training.encoder_mlp import CudaMlp, TritonMlp
from headwise.training.flat import OPERANDS, FlatKernels, FlatRows, HeadGroup
from headwise.training.loss_scale import base_scale
from headwise.training.run import Run
from headwise.training.step import gpu_refusal


def refusal(shape: Shape, tokens: int, batch: int, precision: str = "fp16") -> str:
    """What the fused step needs that this shape has not; empty when it takes it."""
    s = shape
    inner = s.num_heads * s.head_dim
    if s.norm != "scalar" or s.norm_at != "post":
        has = f"norm={s.norm!r} and norm_at={s.norm_at!r}"
        return f"needs norm='scalar' and norm_at='post', this shape has {has}"
    if special := beyond_plain(s):
        return f"needs plain heads and equal layers, this shape has {special}"
    if s.latent or s.num_kv_heads != s.num_heads or s.v_head_dim != s.head_dim:
        return (
            "needs plain heads (as many KV heads, values as wide as the rank, no latent), this "
            f"shape has {s.num_heads} heads of rank {s.head_dim}, {s.num_kv_heads} KV heads, "
            f"values of {s.v_head_dim}{' and a latent' if s.latent else ''}"
        )
    others = {
        "a mask": s.causal or any(s.windows),
        "query/key norm": s.qk_norm != "none",
        "rotary positions": s.qk_rope_head_dim,
        "tokens": s.vocab_size,
        "maps that read vectors in or out": s.input_dim or s.output_dim,
    }
    if any(others.values()):
        needed = ", ".join(f"no {name}" for name in others)
        return f"needs {needed}; this shape has {_and(name for name in others if others[name])}"
    if s.activation != "relu" or not s.ffn_dim or not (s.qkv_bias and s.out_bias and s.ffn_bias):
        return (
            "needs a ReLU feed-forward and biases everywhere, this shape has "
            f"activation={s.activation!r}, ffn_dim={s.ffn_dim}, qkv_bias={s.qkv_bias}, "
            f"out_bias={s.out_bias}, ffn_bias={s.ffn_bias}"
        )
    if s.dim not in (16, 32, 64, 128):
        return f"needs dim 16, 32, 64 or 128, this shape has dim {s.dim}"
    if s.ffn_dim % 64 or inner % 16:
        return (
            f"needs ffn_dim in 64s and heads x rank in 16s, this shape has {s.ffn_dim} and {inner}"
        )
    if tokens > 256 or s.head_dim > 64:
        return (
            f"needs at most 256 tokens and rank 64, this shape has {tokens} tokens and rank "
            f"{s.head_dim}"
        )
    if tokens > 128 and s.head_dim > 16 and OPERANDS[precision] == torch.float32:
        return (
            "needs rank 16 or less beyond 128 tokens with operands of 32 bits, this shape has rank "
            f"{s.head_dim} and {tokens} tokens"
        )
    if batch * tokens % 64:
        return f"needs batch x tokens in 64s, this shape has {batch * tokens}"
    return ""


def _and(names: Any) -> str:
    return " and ".join(names)


def cuda_attention_refusal(shape: Shape, tokens: int, batch: int, precision: str = "fp16") -> str:
    """What the attention part in CUDA C++ needs that this shape has not; empty when it takes it,
    where a GPU has such kernels."""
    columns, dtype = shape.num_heads * shape.head_dim, OPERANDS[precision]
    return encoder_attention_cuda.refusal(
        shape.dim, tokens, batch * tokens, columns, shape.head_dim, dtype
    )


def cuda_mlp_refusal(shape: Shape, tokens: int, batch: int, precision: str = "fp16") -> str:
    """The same of the feed-forward, beside such an attention part."""
    return encoder_mlp_cuda.refusal(shape.dim, batch * tokens, shape.ffn_dim, OPERANDS[precision])


def model_bytes(shape: Shape, tokens: int, batch: int, precision: str) -> int:
    """Bytes of one model in training: weights, gradients, moments, and every buffer."""
    T, D = batch * tokens, shape.dim
    C, size = shape.num_heads * shape.head_dim, OPERANDS[precision].itemsize
    kept = shape.depth * (2 * T * (D * (4 + size) + 4) + 4 * T * C * size)
    columns = C  # of the widest temporary: the heads' gradients, or partial sums of dx
    call = (shape, tokens, batch, precision)
    if not cuda_mlp_refusal(*call) and not cuda_attention_refusal(*call):
        columns = max(C, encoder_mlp_cuda.dx_partials(shape.ffn_dim) * D)
    return kept + T * columns * size + T * D * (12 + 4 * size) + shape.params * (16 + size)


class Layer(NamedTuple):
    """One layer of one head group."""

    index: int
    group: HeadGroup

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def attention_slot(self) -> int:
        """Of the tile sums."""
        return 1 + 2 * self.index

    @property
    def mlp_slot(self) -> int:
        return 2 + 2 * self.index

    def name(self, parameter: str) -> str:
        return f"blocks.{self.index}.{parameter}"


class FusedEncoder(FlatKernels):
    """The kernels of one ensemble and one batch size, and their buffers (`step.Kernels`)."""

    fused: ClassVar[bool] = True
    captured: ClassVar[bool] = True

    def __init__(self, rows: FlatRows, batch: int, tokens: int, *, training: bool = True) -> None:
        super().__init__(rows, batch, tokens, base_scale(batch * tokens, rows.precision))
        self.groups = self.head_groups
        self.training = training
        s, dtype = self.shape, rows.operands.dtype
        self.cuda_attention = self._has_cuda_attention()
        self.cuda_mlp = self.cuda_attention and self._has_cuda_mlp()
        self.attention = CudaAttention(self) if self.cuda_attention else TritonAttention(self)
        self.mlp = CudaMlp(self) if self.cuda_mlp else TritonMlp(self)
        kept = s.depth if training else 1  # without training every layer writes over the last one
        self.left = [
            Normed(
                self.empty(self.T, self.D),
                self.empty(self.T, self.D, dtype=dtype),
                self.empty(self.T),
            )
            for _ in range(2 * kept)
        ]
        if training:
            self._make_gradients(dtype)

    def _make_gradients(self, dtype: torch.dtype) -> None:
        s = self.shape
        self.grads = torch.zeros_like(self.rows.weights)
        self.dx = self.empty(self.T, self.D)
        self.dz16 = self.empty(self.T, self.D, dtype=dtype)
        # of the residual between a layer's parts, where the attention part takes it from
        self.middle_dx = self.dx if self.cuda_attention else self.empty(self.T, self.D)
        # of both parts in turn: what kernels in CUDA C++ leave of dx
        partials = max(self.attention.dx_partials, self.mlp.dx_partials)
        self.dx_partials = self.empty(partials, self.T, self.D, dtype=dtype) if partials else None
        self.totals = torch.zeros(self.M, device=self.device)  # what `total` gives
        self.norm_tile = 16 if self.cuda_mlp else 64  # tokens of a tile where dx passes a norm
        self.tiles = self.T // self.norm_tile
        self.slots = 1 + 2 * s.depth
        self.tile_sums = self.empty(self.slots, self.tiles, 2 * self.D)
        self.table = self._table()
        self.later: dict[int, torch.cuda.Stream] = {}  # by a group's first model
        if self.rows.weights.is_cuda and not self.cuda_mlp:
            self.later = {group.first: torch.cuda.Stream(self.device) for group in self.groups}

    def _has_cuda_attention(self) -> bool:
        """Whether every head group's attention part is one kernel in CUDA C++ each way."""
        for group in self.head_groups:
            if cuda_attention_refusal(group.shape, self.tokens, self.batch, self.rows.precision):
                return False
        if nvrtc.missing(self.device):
            return False
        return all(
            encoder_attention_cuda.proven(group.shape.head_dim, self.device)
            for group in self.head_groups
        )

    def _has_cuda_mlp(self) -> bool:
        if not encoder_mlp_cuda.fills(self.M, self.F):
            return False
        if cuda_mlp_refusal(self.shape, self.tokens, self.batch, self.rows.precision):
            return False
        return encoder_mlp_cuda.proven(self.device)

    def _table(self) -> Tensor:
        """Where the tile sums of a slot go in a row: start of the norm's scale, start of the part's
        output bias, and how many rows that bias has."""
        start = self.rows.layout.start
        table = [[0, 0, 0]]  # slot 0 is the loss
        for i in range(self.shape.depth):
            b = f"blocks.{i}."
            bias, rows = start(b + "attention.out_bias"), self.shape.average
            table.append([start(b + "norm1.weight"), bias, rows])
            table.append([start(b + "norm2.weight"), start(b + "feed.down.bias"), 1])
        return torch.tensor(table, dtype=torch.int32, device=self.device)

    def empty(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A buffer, models first."""
        return torch.empty(self.M, *size, dtype=dtype, device=self.device)

    # -- the protocol

    @staticmethod
    def refusal(run: Run, device: torch.device) -> str:
        if not run.task.squared:
            return f"needs the squared error, this task is {run.task.spec()['name']}"
        return gpu_refusal(run, device, refusal)

    @staticmethod
    def model_bytes(run: Run) -> int:
        recipe = run.recipe
        return model_bytes(run.shape, run.task.tokens, recipe.batch, recipe.precision)

    @classmethod
    def make(
        cls, rows: FlatRows, model: Any, task: Any, batch: int, *, training: bool
    ) -> FusedEncoder:
        return cls(rows, batch, task.tokens, training=training)

    def each_group(self, work: Callable[[HeadGroup], None]) -> None:
        self.each_head_group(work)

    def around_block(self, block: int) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def total(self, group: HeadGroup, grads: Tensor) -> Tensor:
        if self.cuda_mlp and self.shape.positions == "none":
            return self.totals[group.models]  # the kernels have added everything up
        return grads.sum(1)

    # -- forward

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs (models, batch, tokens, dim)."""

        def work(group: HeadGroup) -> None:
            self._layers(group, *self._enter(group, inputs[group.models]))

        self.each_head_group(work)
        last = self.rows.layout.start(f"blocks.{self.shape.depth - 1}.norm2.weight")
        outputs = self.left[-1].u * self.rows.weights[:, last].view(-1, 1, 1)
        return outputs.view(self.M, self.batch, self.tokens, self.D)

    def _enter(self, group: HeadGroup, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """A group's input with its positions, (models, T, D): as it is added to, and as operand."""
        u = self._placed(group, inputs).reshape(-1, self.T, self.D).float().contiguous()
        return u, u.to(self.rows.operands.dtype)

    def _placed(self, group: HeadGroup, inputs: Tensor) -> Tensor:
        s = self.shape
        if s.positions == "none":
            return inputs
        start = self.rows.layout.start("positions")
        width = s.position_dim or s.dim
        count = min(s.position_rows, self.tokens)
        flat = self.rows.weights[group.models, start : start + count * width]
        table = flat.unflatten(1, (1, count, width))
        if s.positions == "additive":
            return inputs + table
        return torch.cat((inputs, table.expand(-1, self.batch, self.tokens, width)), -1)

    def _layers(self, group: HeadGroup, u: Tensor, x: Tensor) -> None:
        for i in range(self.shape.depth):
            layer = Layer(i, group)
            middle, out = self.left_by(layer)
            self.attention.forward(layer, x, self._attention_end(layer, u, middle))
            self.mlp.forward(layer, middle.x, self._mlp_end(layer, middle.u, out))
            u, x = out.u, out.x

    def left_by(self, layer: Layer) -> tuple[Normed, Normed]:
        """What a layer's attention part and its feed-forward leave."""
        at = 2 * layer.index if self.training else 0
        return self.left[at].of(layer.group.models), self.left[at + 1].of(layer.group.models)

    def _attention_end(self, layer: Layer, u0: Tensor, left: Normed) -> End:
        m = layer.group.first
        return End(
            bias=self.vector(layer.name("attention.out_bias"), m),
            scale0=self.vector(f"blocks.{max(layer.index - 1, 0)}.norm2.weight", m),
            u0=u0,
            scale=self.vector(layer.name("norm1.weight"), m),
            u=left.u,
            y=left.x,
            inv=left.inv,
        )

    def _mlp_end(self, layer: Layer, u0: Tensor, left: Normed) -> End:
        m = layer.group.first
        return End(
            bias=self.vector(layer.name("feed.down.bias"), m),
            scale0=self.vector(layer.name("norm1.weight"), m),
            u0=u0,
            scale=self.vector(layer.name("norm2.weight"), m),
            u=left.u,
            y=left.x,
            inv=left.inv,
        )

    # -- backward

    def gradient(
        self, group: HeadGroup, inputs: Tensor, targets: Tensor, losses_M: Tensor, scale_M: Tensor
    ) -> Tensor:
        """The mean squared error of a group's models (written), and its gradient times a model's
        loss scale; waits for no other group."""
        models, s = group.models, group.shape
        u, x = self._enter(group, inputs)
        self._layers(group, u, x)
        count = self.batch * targets.shape[-2]  # answers of a model
        self._squared_error(group, targets.contiguous(), count, scale_M)
        later = self.later.get(group.first)
        for i in reversed(range(s.depth)):
            layer = Layer(i, group)
            x0 = self.left[2 * i - 1].x[models] if i else x
            self.mlp.backward(layer, later)
            self.attention.backward(layer, x0, later)
        self.join(later)
        self._positions_gradient(group)
        self._finish(group, losses_M, count)
        return self.grads[models]

    def _squared_error(
        self, group: HeadGroup, targets: Tensor, count: int, scale_M: Tensor
    ) -> None:
        """The loss as tile sums, and its gradient in dx, times base scale and loss scale."""
        from headwise.kernels import encoder_norm_triton

        last = f"blocks.{self.shape.depth - 1}.norm2.weight"
        encoder_norm_triton.squared_error[(self.tiles, group.size)](
            u=self.left[-1].u[group.models],
            scale=self.vector(last, group.first),
            target=targets,
            loss_scale=scale_M,
            dx=self.dx[group.models],
            tile_sums=self.tile_sums[group.models],
            total=self.totals[group.models],
            T=self.T,
            N=self.tokens,
            Q=targets.shape[-2],
            model=self.P,
            factor=2 * self.gain / count,
            slot=0,
            slots=self.slots,
            D=self.D,
            W=targets.shape[-1],
            BT=self.norm_tile,
        )

    def norm_backward(
        self, layer: Layer, left: Normed, norm: str, partials: int, slot: int
    ) -> None:
        """dx and its partial sums, backward through one norm: to dx and dz16, with tile sums."""
        from headwise.kernels import encoder_norm_triton

        models = layer.group.models
        encoder_norm_triton.norm_backward[(self.tiles, layer.group.size)](
            dx=self.dx[models],
            partials=self.partials_of(layer.group),
            u=left.u,
            inv=left.inv,
            scale=self.vector(layer.name(norm), layer.group.first),
            dz=self.dz16[models],
            tile_sums=self.tile_sums[models],
            T=self.T,
            count=partials,
            model=self.P,
            slot=slot,
            slots=self.slots,
            D=self.D,
            BT=self.norm_tile,
            EACH=loaded_at_once(partials),
            num_warps=2,
        )

    def partials_of(self, group: HeadGroup) -> Tensor:
        assert self.dx_partials is not None, "only kernels in CUDA C++ leave partial sums"
        return self.dx_partials[group.models]

    def _positions_gradient(self, group: HeadGroup) -> None:
        """Of a table of positions: sums of the input's gradient over sequences, or over tokens too
        where all of them have the same row."""
        s = group.shape
        if s.positions == "none":
            return
        start = self.rows.layout.start("positions")
        width = s.position_dim or self.D
        over = (1, 2) if s.positions == "room" else (1,)
        dx = self.dx[group.models].view(group.size, self.batch, self.tokens, self.D)
        table = dx.sum(over)[..., -width:].flatten(1)
        self.grads[group.models, start : start + table.shape[1]] = table / self.gain

    def _finish(self, group: HeadGroup, losses_M: Tensor, count: int) -> None:
        """Add up the tile sums: losses, and gradients of norms and output biases."""
        from headwise.kernels import encoder_norm_triton

        encoder_norm_triton.finish[(self.slots, group.size)](
            tile_sums=self.tile_sums[group.models],
            grads=self.grads[group.models],
            losses=losses_M,
            total=self.totals[group.models],
            table=self.table,
            model=self.P,
            unscale=1 / self.gain,
            per_loss=1 / count,
            slots=self.slots,
            TILES=self.tiles,
            D=self.D,
            BLOCK=64,
        )


def loaded_at_once(partials: int) -> int:
    """How many partial sums of a gradient a program loads at once."""
    return max(n for n in (1, 2, 4, 8) if partials % n == 0)
