"""A training step of post-norm encoders as a dozen kernels: forward, loss, backward and AdamW on
flat rows.

It computes what `models.Encoder` and `stack.Stack` compute, for the shapes that `refusal` lets
through; that is its plain twin. On an H100 or H200 the attention part of sequences of 16 tokens is
one kernel forward and one back, in CUDA C++ (`kernels.chain`), and so is the feed-forward where
there are several models (`kernels.feed`); elsewhere, and for other sizes, they are made of Triton
kernels. Products take operands of one type, sums, norms, residual, weights and moments are float32:

fp16    operands rounded to 11 bits, as TF32 rounds them, at half the bytes and twice the rate; gradients are carried
        times a power of two so that they stay in range
tf32    operands of 32 bits, rounded by the tensor cores
fp32    three TF32 products for one, as exact as float32
bf16    operands rounded to 8 bits
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.kernels import encoder_attention_cuda, encoder_mlp_cuda, nvrtc
from headwise.shape import Shape

DOTS = {"fp16": "tf32", "bf16": "tf32", "tf32": "tf32", "fp32": "tf32x3"}
WHOLE = {
    64: (3, 2),
    32: (3, 3),
    16: (3, 3),
}  # ranks whose attention part is one kernel, and its loads in flight forward and back
STORED = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "tf32": torch.float32,
    "fp32": torch.float32,
}


def refusal(shape: Shape, tokens: int, batch: int, precision: str = "fp16") -> str:
    """Why the fused step cannot take this shape; empty when it can."""
    s = shape
    if s.norm != "scalar" or s.norm_at != "post":
        return f"it has the scalar norm after each part, got {s.norm} {s.norm_at}"
    if s.latent or s.num_kv_heads != s.num_heads or s.v_head_dim != s.head_dim:
        return "it has plain heads: as many KV heads, values as wide as the rank, no latent"
    if s.causal or any(s.windows) or s.qk_norm != "none" or s.qk_rope_head_dim or s.vocab_size:
        return "it has no mask, no rotary positions, no query/key norm and no tokens"
    if s.input_dim or s.output_dim:
        return "it has no maps that read vectors in or out"
    if s.activation != "relu" or not s.ffn_dim or not (s.qkv_bias and s.out_bias and s.ffn_bias):
        return "it has a ReLU feed-forward and biases everywhere"
    if s.dim not in (16, 32, 64, 128):
        return f"it takes dim 16, 32, 64 or 128, got {s.dim}"
    if s.ffn_dim % 64 or s.num_heads * s.head_dim % 16:
        return (
            f"it needs ffn_dim in 64s and heads x rank in 16s, got {s.ffn_dim} and "
            f"{s.num_heads * s.head_dim}"
        )
    if tokens > 256 or s.head_dim > 64:
        return f"it takes at most 256 tokens and rank 64, got {tokens} tokens, rank {s.head_dim}"
    if tokens > 128 and s.head_dim > 16 and STORED[precision] == torch.float32:
        return (
            f"with operands of 32 bits it takes at most rank 16 beyond 128 tokens, got {tokens} "
            f"tokens, rank {s.head_dim}"
        )
    if batch * tokens % 64:
        return f"batch x tokens must be a multiple of 64, got {batch * tokens}"
    return ""


def chain_refusal(shape: Shape, tokens: int, batch: int, precision: str = "fp16") -> str:
    """Why the attention part of a fused step is not one kernel in each direction
    (encoder_attention_cuda.cu); empty when it is, where a GPU has them."""
    return encoder_attention_cuda.refusal(
        shape.dim,
        tokens,
        batch * tokens,
        shape.num_heads * shape.head_dim,
        shape.head_dim,
        STORED[precision],
    )


def feed_refusal(shape: Shape, tokens: int, batch: int, precision: str = "fp16") -> str:
    """The same of the feed-forward beside such an attention part (encoder_mlp_cuda.cu)."""
    return encoder_mlp_cuda.refusal(shape.dim, batch * tokens, shape.ffn_dim, STORED[precision])


def needs(shape: Shape, tokens: int, batch: int, precision: str) -> int:
    """Bytes that one model takes in training: weights, gradients, moments, and every buffer of
    `Fused`."""
    T, D, C, size = (
        batch * tokens,
        shape.dim,
        shape.num_heads * shape.head_dim,
        STORED[precision].itemsize,
    )
    kept = shape.depth * (2 * T * (D * (4 + size) + 4) + 4 * T * C * size)
    refused = feed_refusal(shape, tokens, batch, precision) or chain_refusal(
        shape, tokens, batch, precision
    )
    parts = T * max(
        C, 0 if refused else encoder_mlp_cuda.blocks(shape.ffn_dim) * D
    )  # of the input's gradient, of columns or of hidden units
    return kept + parts * size + T * D * (12 + 4 * size) + shape.params * (16 + size)


def gain_of(count: int, precision: str) -> float:
    """What gradients are carried times: with fp16 operands the number of tokens, so that they have
    the size of a token's own gradient and not of its share in a mean. 64 times more overflowed
    after thousands of steps, where weights had grown."""
    return float(1 << (count - 1).bit_length()) if precision == "fp16" else 1.0


class Flat:
    """Models in flat rows on one batch size: their sizes, and where each parameter starts."""

    def __init__(
        self,
        splits: Sequence[tuple[int, Shape]],
        places: dict[str, tuple[int, int]],
        weights: Tensor,
        half: Tensor,
        batch: int,
        tokens: int,
        precision: str,
    ) -> None:
        s = self.shape = splits[0][1]
        self.splits, self.places, self.weights, self.half = splits, places, weights, half
        self.batch, self.tokens, self.T, self.precision, self.dot = (
            batch,
            tokens,
            batch * tokens,
            precision,
            DOTS[precision],
        )
        self.M, self.P = weights.shape
        self.D, self.C, self.F = s.dim, s.num_heads * s.head_dim, s.ffn_dim
        self.gain = gain_of(self.T, precision)
        self.aside = (
            [torch.cuda.Stream(weights.device) for _ in splits[1:]] if weights.is_cuda else []
        )  # of every split but the first

    def _w(self, name: str, model: int = 0) -> Tensor:
        """A matrix in the operands' type: where it starts in a model's row."""
        return self.half.view(-1)[model * self.P + self.places[name][0] :]

    def _f(self, name: str, model: int = 0, of: Tensor | None = None) -> Tensor:
        """A parameter in float32, or its gradient."""
        return (self.weights if of is None else of).view(-1)[
            model * self.P + self.places[name][0] :
        ]

    def ranges(self) -> Iterator[tuple[slice, Shape]]:
        """The models of each way to cut the width into heads."""
        first = 0
        for models, s in self.splits:
            yield slice(first, first + models), s
            first += models

    def each(self, work: Callable[[slice, Shape], None]) -> None:
        """Do something for the models of each split: on a GPU at the same time, since few of them
        fill it and some wait for memory while others multiply."""
        (first, *others), sides = list(self.ranges()), self.aside
        for (now, s), side in zip(others, sides or [None] * len(others), strict=True):
            with self._beside(side):
                work(now, s)
        work(*first)
        self._join(*sides)

    def _beside(self, side: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[Any]:
        """Behind what was started here so far, and not in the way of what comes; in line where
        there is no such stream."""
        if side is None:
            return contextlib.nullcontext()
        side.wait_stream(torch.cuda.current_stream(self.weights.device))
        return torch.cuda.stream(side)

    def _join(self, *sides: torch.cuda.Stream | None) -> None:
        """Wait here for what was started there."""
        for side in filter(None, sides):
            torch.cuda.current_stream(self.weights.device).wait_stream(side)


class Fused(Flat):
    """Buffers for one stack and one batch size, and the kernels over them."""

    def __init__(self, *flat: Any, training: bool = True) -> None:
        """The arguments of `Flat`."""
        super().__init__(*flat)
        s, batch, tokens, weights, places, splits = (
            self.shape,
            self.batch,
            self.tokens,
            self.weights,
            self.places,
            self.splits,
        )
        self.BT = 128 if self.T % 128 == 0 else 64
        kind, where = self.half.dtype, weights.device
        kept = s.depth if training else 1
        refused = [chain_refusal(shape, tokens, batch, self.precision) for _, shape in splits]
        possible = not any(refused) and not nvrtc.missing(where)
        self.chained = possible and all(
            encoder_attention_cuda.proven(shape.head_dim, where) for _, shape in splits
        )
        enough = self.M * self.F >= encoder_mlp_cuda.ENOUGH * encoder_mlp_cuda.BLOCK
        self.fed = (
            self.chained
            and enough
            and not feed_refusal(s, tokens, batch, self.precision)
            and encoder_mlp_cuda.proven(where)
        )
        self.rows = 16 if self.fed else 64  # tokens of a tile where gradients pass a norm
        self.tiles = self.T // self.rows

        def empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(self.M, *size, dtype=dtype, device=where)

        self.u = [empty(self.T, self.D) for _ in range(2 * kept)]
        self.x = [empty(self.T, self.D, dtype=kind) for _ in range(2 * kept)]
        self.inv = [empty(self.T) for _ in range(2 * kept)]
        whole = self.chained or all(
            self._whole(shape) for _, shape in splits
        )  # no projection outlives its kernel
        if self.chained:
            self.pieces = encoder_attention_cuda.pieces(self.M, self.T, self.C)
            self.partial = empty(self.pieces if self.pieces > 1 else 0, self.T, self.D)
        self.qkv = [
            empty(batch, tokens, 3 * self.C, dtype=kind) for _ in range(0 if whole else kept)
        ]
        self.o = [
            empty(batch, tokens, self.C, dtype=kind)
            for _ in range(0 if self.chained else 1 if whole else kept)
        ]
        self.dqkv: Tensor | None = None
        if training:
            self.grads = torch.zeros_like(weights)
            if self.chained:
                self.shares = encoder_attention_cuda.shares(self.M, self.T, self.C)
                most = max(
                    encoder_attention_cuda.blocks(self.C),
                    encoder_mlp_cuda.blocks(self.F) if self.fed else 0,
                )
                self.blocks = empty(
                    most, self.T, self.D, dtype=kind
                )  # parts of dx, of the attention part and of the feed-forward in turn
                if self.shares > 1:
                    self.shared = torch.empty(
                        self.shares, self.M, self._attention(0)[1], device=where
                    )
            elif whole:
                self.dqkv = empty(batch, tokens, 3 * self.C, dtype=kind)
            else:
                self.mixed = empty(batch, tokens, self.C, dtype=kind)
            self.dx, self.dz16 = empty(self.T, self.D), empty(self.T, self.D, dtype=kind)
            self.dz = None if self.chained else empty(self.T, self.D)
            turns = 0 if self.fed else min(2, s.depth)
            self.behind = [
                empty(self.T, self.D, dtype=kind) for _ in range(turns)
            ]  # dz16 of the feed-forward, layers in turn
            self.total = torch.zeros(self.M, device=where)  # of each model's gradients
            self.shrink = torch.ones(
                self.M, device=where
            )  # gradients are carried times the gain and this, less than 1 after overflows
            self.parts = empty(1 + 2 * s.depth, self.tiles, 2 * self.D)
            table = [[0, 0, 0]]
            for i in range(s.depth):
                b = f"blocks.{i}."
                table.append(
                    [places[b + "norm1.weight"][0], places[b + "attention.out_bias"][0], s.average]
                )
                table.append([places[b + "norm2.weight"][0], places[b + "feed.down.bias"][0], 1])
            self.table = torch.tensor(table, dtype=torch.int32, device=where)
            streams = self.ranges() if weights.is_cuda and not self.fed else ()
            self.later = {
                now.start: torch.cuda.Stream(where) for now, _ in streams
            }  # of each split, for what nobody waits for

    def _whole(self, s: Shape) -> bool:
        """Whether the attention part is one kernel; else its projection, heads and output are
        kernels of their own."""
        return 64 % self.tokens == 0 and s.head_dim in WHOLE and self.half.dtype != torch.float32

    def _attention(self, i: int) -> tuple[int, int]:
        """Where the matrices and inner biases of a layer's attention part start in a row, and how
        many numbers they are."""
        first, (last, length) = (
            self.places[f"blocks.{i}.attention.qkv.weight"][0],
            self.places[f"blocks.{i}.attention.out.weight"],
        )
        return first, last + length - first

    def _cut(self, s: Shape) -> dict[str, int]:
        """How the whole part sees a tile of tokens: a head at a time, sequences below 16 tokens
        side by side."""
        return {"N": max(16, self.tokens), "OWN": self.tokens, "R": s.head_dim, "BC": s.head_dim}

    # -- forward

    def forward(self, x_MBND: Tensor) -> Tensor:
        """Outputs (models, batch, tokens, dim)."""
        self.each(lambda now, s: self._layers(now, s, *self._enter(now, x_MBND[now])))
        at, _ = self.places[f"blocks.{self.shape.depth - 1}.norm2.weight"]
        return (self.u[-1] * self.weights[:, at].view(-1, 1, 1)).view(
            self.M, self.batch, self.tokens, self.D
        )

    def _enter(self, now: slice, x_MBND: Tensor) -> tuple[Tensor, Tensor]:
        """The input as it is added to, and as operands."""
        u = self._placed(now, x_MBND).reshape(-1, self.T, self.D).float().contiguous()
        return u, u.to(self.half.dtype)

    def _layers(self, now: slice, s: Shape, u: Tensor, x: Tensor) -> None:
        """All layers of the models of one split."""
        for i in range(s.depth):
            u, x = self._layer(i, now, s, u, x)

    def _placed(self, now: slice, x_MBND: Tensor) -> Tensor:
        """The input with its positions."""
        s = self.shape
        if s.positions == "none":
            return x_MBND
        at, _ = self.places["positions"]
        width = s.position_dim or s.dim
        rows = min(s.position_rows, self.tokens)
        table = self.weights[now, at : at + rows * width].unflatten(1, (1, rows, width))
        if s.positions == "additive":
            return x_MBND + table
        return torch.cat((x_MBND, table.expand(-1, self.batch, self.tokens, width)), -1)

    def _layer(self, i: int, now: slice, s: Shape, u: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        from headwise.kernels import encoder_triton

        b, at, m = f"blocks.{i}.", 2 * i if len(self.u) > 2 else 0, now.start
        u1, x1, inv1, u2, x2, inv2 = (
            buffers[at + j][now] for j in (0, 1) for buffers in (self.u, self.x, self.inv)
        )
        self._attend(i, s, now, x, u, u1, x1, inv1)
        args = (
            x1,
            self._w(b + "feed.up.weight", m),
            self._f(b + "feed.up.bias", m),
            self._w(b + "feed.down.weight", m),
            self._f(b + "feed.down.bias", m),
            self._f(b + "norm1.weight", m),
            u1,
            self._f(b + "norm2.weight", m),
            u2,
            x2,
            inv2,
            self.T,
            self.F,
            self.P,
        )
        if self.fed:
            encoder_mlp_cuda.forward(len(x), self.T, *args)
        else:
            encoder_triton.feed[(self.T // self.BT, len(x))](
                *args, D=self.D, BT=self.BT, BF=64, IP=self.dot, **self._feed()
            )
        return u2, x2

    def _attend(
        self,
        i: int,
        s: Shape,
        now: slice,
        x: Tensor,
        u: Tensor,
        u1: Tensor,
        x1: Tensor,
        inv1: Tensor,
    ) -> None:
        """The attention part of one layer for the models of one split."""
        from headwise.kernels import attention_short_triton, encoder_triton

        T, P, D, C, BT, dot, b, first = (
            self.T,
            self.P,
            self.D,
            self.C,
            self.BT,
            self.dot,
            f"blocks.{i}.attention.",
            now.start,
        )
        project, bias, out = (
            self._w(b + "qkv.weight", first),
            self._f(b + "qkv.bias", first),
            self._w(b + "out.weight", first),
        )
        before = self._f(
            f"blocks.{max(i - 1, 0)}.norm2.weight", first
        )  # the scale of this layer's input
        end = (
            self._f(b + "out_bias", first),
            before,
            u,
            self._f(f"blocks.{i}.norm1.weight", first),
            u1,
            x1,
            inv1,
            T,
            C,
            P,
        )
        common = {"D": D, "BT": 64, "AVERAGE": s.average, "FIRST": i == 0, "IP": dot}
        if self.chained:
            pieces, to = self.pieces, self.partial[now] if self.pieces > 1 else inv1
            encoder_attention_cuda.forward(
                s.head_dim,
                len(x),
                T,
                x,
                project,
                bias,
                out,
                *end,
                1 / s.average,
                s.scale,
                s.average,
                i == 0,
                to,
                pieces,
            )
            if pieces > 1:
                encoder_triton.add_pieces[(T // 16, len(x))](
                    to,
                    *end[:7],
                    T,
                    pieces,
                    P,
                    1 / s.average,
                    D=D,
                    BT=16,
                    AVERAGE=s.average,
                    FIRST=i == 0,
                )
            return
        if self._whole(s):
            encoder_triton.mix[(T // 64, len(x))](
                x,
                project,
                bias,
                out,
                *end,
                1 / s.average,
                s.scale,
                **common,
                **self._cut(s),
                STAGES=WHOLE[s.head_dim][0],
                num_warps=4,
            )
            return
        qkv, o = (
            self.qkv[i if len(self.qkv) > 1 else 0][now],
            self.o[i if len(self.o) > 1 else 0][now],
        )
        wide = min(128, 3 * C & -(3 * C))
        encoder_triton.project[(3 * C // wide, T // BT, len(x))](
            x, project, bias, qkv, T, 3 * C, P, D=D, BT=BT, BC=wide, IP=dot
        )
        q, k, v = qkv.flatten(0, 1).split(C, -1)
        attention_short_triton.forward(
            q, k, v, o.flatten(0, 1), s.num_heads, s.head_dim, s.scale, dot, together=True
        )
        encoder_triton.collect[(T // 64, len(x))](
            o, out, *end, 1 / s.average, BC=min(64, C & -C), **common
        )

    def _feed(self) -> dict[str, Any]:
        if self.half.dtype == torch.float32:
            return {"STAGES": 1, "num_warps": 8}
        return {"STAGES": 3, "num_warps": 4}

    # -- backward

    def gradient(
        self,
        x_MBND: Tensor,
        targets: Tensor,
        losses_M: Tensor,
        then: Callable[[slice], None] | None = None,
    ) -> Tensor:
        """Losses (written) and gradients of the flat rows: those of the mean squared error, times a
        model's `shrink`; `then` is called for the models of each split when their gradients are
        there."""

        def work(now: slice, s: Shape) -> None:
            self.learn(now, s, x_MBND[now], targets[now], losses_M[now])
            if then is not None:
                then(now)

        self.each(work)
        return self.grads

    def learn(
        self, now: slice, s: Shape, x_MBND: Tensor, targets: Tensor, losses_M: Tensor
    ) -> None:
        """The same for the models of one split, which waits for no other."""
        from headwise.kernels import encoder_triton

        T, P, D, models, m, targets = (
            self.T,
            self.P,
            self.D,
            len(targets),
            now.start,
            targets.contiguous(),
        )
        u, first = self._enter(now, x_MBND)
        self._layers(now, s, u, first)
        queries, slots = targets.shape[-2], 1 + 2 * s.depth
        count, parts, grads = self.batch * queries, self.parts[now], self.grads[now]
        encoder_triton.squared_error[(T // self.rows, models)](
            self.u[-1][now],
            self._f((f"blocks.{s.depth - 1}.norm2.weight"), m),
            targets,
            self.shrink[now],
            self.dx[now],
            parts,
            self.total[now],
            T,
            self.tokens,
            queries,
            P,
            2 * self.gain / count,
            0,
            slots,
            D=D,
            W=targets.shape[-1],
            BT=self.rows,
        )
        later = self.later.get(m)
        for i in reversed(range(s.depth)):
            x0 = self.x[2 * i - 1][now] if i else first
            if self.fed:
                self._fed_back(i, now, s, x0)
            else:
                self._layer_back(i, now, s, x0, later)
        self._join(later)
        if s.positions != "none":
            at, _ = self.places["positions"]
            width = s.position_dim or D
            over = (1, 2) if s.positions == "room" else (1,)
            table = (
                self.dx[now]
                .view(models, self.batch, self.tokens, D)
                .sum(over)[..., -width:]
                .flatten(1)
            )
            grads[:, at : at + table.shape[1]] = table / self.gain
        encoder_triton.finish[(slots, models)](
            parts,
            grads,
            losses_M,
            self.total[now],
            self.table,
            P,
            1 / self.gain,
            1 / count,
            slots,
            TILES=self.tiles,
            D=D,
            BLOCK=64,
        )

    def totals(self, now: slice) -> Tensor:
        """Of the gradients of some models a number that is not finite if one of them is not."""
        whole = (
            self.fed and self.shape.positions == "none"
        )  # their kernels have added everything up
        return self.total[now] if whole else self.grads[now].sum(1)

    def _fed_back(self, i: int, now: slice, s: Shape, x0: Tensor) -> None:
        """One layer where both parts are kernels that leave parts of their input's gradient, which
        the norm below them adds up."""
        from headwise.kernels import encoder_triton

        T, P, D, F, m = self.T, self.P, self.D, self.F, now.start
        b, slots, models = f"blocks.{i}.", 1 + 2 * s.depth, now.stop - now.start
        u1, x1, inv1, u2, _, inv2 = (
            buffers[2 * i + j][now] for j in (0, 1) for buffers in (self.u, self.x, self.inv)
        )
        dx, dz16, blocks, parts = (t[now] for t in (self.dx, self.dz16, self.blocks, self.parts))

        def through(u: Tensor, inv: Tensor, norm: str, count: int, slot: int) -> None:
            encoder_triton.through[(T // self.rows, models)](
                dx,
                blocks,
                u,
                inv,
                self._f(b + norm, m),
                dz16,
                parts,
                T,
                count,
                P,
                slot,
                slots,
                D=D,
                BT=self.rows,
                EACH=_together(count),
                num_warps=2,
            )

        through(
            u2,
            inv2,
            "norm2.weight",
            encoder_attention_cuda.blocks(self.C) if i + 1 < s.depth else 0,
            2 + 2 * i,
        )
        names = [b + name for name in ("feed.up.weight", "feed.up.bias", "feed.down.weight")]
        encoder_mlp_cuda.back(
            models,
            F,
            1,
            x1,
            dz16,
            self._w(names[0], m),
            self._f(names[1], m),
            self._w(names[2], m),
            blocks,
            *[self._f(name, m, self.grads) for name in names],
            self.total[now],
            T,
            F,
            P,
            1 / self.gain,
            models,
            1,
            P,
        )
        through(u1, inv1, "norm1.weight", encoder_mlp_cuda.blocks(F), 1 + 2 * i)
        self._chain_back(i, s, now, x0)

    def _layer_back(
        self, i: int, now: slice, s: Shape, x0: Tensor, later: torch.cuda.Stream | None
    ) -> None:
        """Gradients of weights are sums that nothing waits for: they are made beside what does,
        those of the feed-forward beside the attention part, those of the projections beside the
        next layer's feed-forward."""
        from headwise.kernels import encoder_triton

        T, P, D, C, F, dot, m = self.T, self.P, self.D, self.C, self.F, self.dot, now.start
        b, slots, undo = f"blocks.{i}.", 1 + 2 * s.depth, 1 / self.gain
        u1, x1, inv1, u2, _, inv2 = (
            buffers[2 * i + j][now] for j in (0, 1) for buffers in (self.u, self.x, self.inv)
        )
        behind, dx, dz16 = self.behind[i % 2][now], self.dx[now], self.dz16[now]
        up, down, bias = (
            self._w(b + "feed.up.weight", m),
            self._w(b + "feed.down.weight", m),
            self._f(b + "feed.up.bias", m),
        )
        wide, models = self.half.dtype == torch.float32, len(x1)
        encoder_triton.feed_back[(T // 64, models)](
            dx,
            u2,
            inv2,
            self._f(b + "norm2.weight", m),
            x1,
            up,
            bias,
            down,
            behind,
            dx if self.dz is None else self.dz[now],
            u1,
            inv1,
            self._f(b + "norm1.weight", m),
            dz16,
            self.parts[now],
            T,
            F,
            P,
            2 + 2 * i,
            slots,
            D=D,
            BT=64,
            BF=64,
            LOWER=self.chained,
            IP=dot,
            STAGES=1 if wide else 3,
            num_warps=4,
        )
        if i + 1 < s.depth:  # the layer above may still read what the attention part writes over
            self._join(later)
        with self._beside(later):
            encoder_triton.feed_weights[(F // 64, models)](
                x1,
                behind,
                up,
                bias,
                down,
                self._f(b + "feed.up.weight", m, self.grads),
                self._f(b + "feed.up.bias", m, self.grads),
                self._f(b + "feed.down.weight", m, self.grads),
                T,
                F,
                P,
                undo,
                D=D,
                BT=64,
                BF=64,
                IP=dot,
                STAGES=1 if wide else 3,
                num_warps=4,
            )
        if self.chained:
            self._chain_back(i, s, now, x0)
            return
        self._attend_back(i, s, now, x0, u1, inv1)
        qkv, o = (
            (self.dqkv if self.dqkv is not None else self.qkv[i])[now],
            self.o[i if len(self.o) > 1 else 0][now],
        )
        block = min(64 if wide else 128, C & -C)
        with self._beside(later):
            encoder_triton.outer[(3 * C // block, models)](
                qkv,
                x0,
                self._f(b + "attention.qkv.weight", m, self.grads),
                self._f(b + "attention.qkv.bias", m, self.grads),
                T,
                3 * C,
                P,
                undo,
                D,
                1,
                D=D,
                BT=64,
                BC=block,
                BIAS=True,
                IP=dot,
                STAGES=3,
            )
            encoder_triton.outer[(C // block, models)](
                o,
                dz16,
                self._f(b + "attention.out.weight", m, self.grads),
                self.grads,
                T,
                C,
                P,
                undo / s.average,
                1,
                C,
                D=D,
                BT=64,
                BC=block,
                BIAS=False,
                IP=dot,
                STAGES=3,
            )

    def _attend_back(
        self, i: int, s: Shape, now: slice, x: Tensor, u1: Tensor, inv1: Tensor
    ) -> None:
        from headwise.kernels import attention_short_triton, encoder_triton

        T, P, D, C, dot, b, first = (
            self.T,
            self.P,
            self.D,
            self.C,
            self.dot,
            f"blocks.{i}.attention.",
            now.start,
        )
        slots, models = 1 + 2 * s.depth, len(x)
        project, out, scale = (
            self._w(b + "qkv.weight", first),
            self._w(b + "out.weight", first),
            self._f(f"blocks.{i}.norm1.weight", first),
        )
        assert self.dz is not None
        dz, dx, dz16, parts = (t[now] for t in (self.dz, self.dx, self.dz16, self.parts))
        first_of_all = i == 0 and s.positions == "none"  # nothing learns from its input's gradient
        qkv = (self.dqkv if self.dqkv is not None else self.qkv[i])[now]
        o = self.o[i if len(self.o) > 1 else 0][now]
        if self._whole(s):
            encoder_triton.mix_back[(T // 64, models)](
                dz,
                u1,
                inv1,
                scale,
                x,
                project,
                self._f(b + "qkv.bias", first),
                out,
                dz16,
                dx,
                qkv,
                o,
                parts,
                T,
                C,
                P,
                1 + 2 * i,
                slots,
                1 / s.average,
                s.scale,
                D=D,
                BT=64,
                FIRST=first_of_all,
                IP=dot,
                **self._cut(s),
                STAGES=WHOLE[s.head_dim][1],
                num_warps=4,
            )
            return
        mixed = self.mixed[now]
        encoder_triton.spread[(T // 64, models)](
            dz,
            u1,
            inv1,
            scale,
            out,
            dx,
            dz16,
            mixed,
            parts,
            T,
            C,
            P,
            1 + 2 * i,
            slots,
            1 / s.average,
            D=D,
            BT=64,
            BC=min(128, C & -C),
            IP=dot,
        )
        q, k, v = qkv.flatten(0, 1).split(C, -1)
        attention_short_triton.backward(
            q,
            k,
            v,
            mixed.flatten(0, 1),
            q,
            k,
            v,
            s.num_heads,
            s.head_dim,
            s.scale,
            dot,
            together=True,
        )
        if not first_of_all:
            encoder_triton.gather[(T // 64, models)](
                qkv, project, dx, dx, T, 3 * C, P, D=D, BT=64, BC=min(64, C & -C), IP=dot
            )

    def _chain_back(self, i: int, s: Shape, now: slice, x: Tensor) -> None:
        """From the gradient behind the attention part's norm to that of its input and, in the same
        kernel, of its weights."""
        from headwise.kernels import encoder_triton

        T, P, D, C, b, first = self.T, self.P, self.D, self.C, f"blocks.{i}.attention.", now.start
        models, undo, columns, last = (
            len(x),
            1 / self.gain,
            encoder_attention_cuda.blocks(C),
            i == 0 and s.positions == "none",
        )
        dx, dz16, blocks = (t[now] for t in (self.dx, self.dz16, self.blocks))
        names = [b + name for name in ("qkv.weight", "qkv.bias", "out.weight")]
        start, size = self._attention(i)
        to = own = self._f(names[0], first, self.grads)
        if self.shares > 1:  # (shares, models, size) of this split's models, one block of memory
            to = self.shared.view(-1)[self.shares * first * size :]
        grads, grown = (
            [to[self.places[name][0] - start :] for name in names],
            size if self.shares > 1 else P,
        )
        encoder_attention_cuda.backward(
            s.head_dim,
            models,
            C,
            self.shares,
            x,
            dz16,
            self._w(names[0], first),
            self._f(names[1], first),
            self._w(names[2], first),
            blocks,
            *grads,
            self.total[now],
            T,
            C,
            P,
            1 / s.average,
            s.scale,
            undo,
            last,
            models,
            self.shares,
            grown,
        )
        if self.shares > 1:
            encoder_triton.add_shares[(-(-size // 1024), models)](
                to, own, size, P, self.shares, EACH=False, BLOCK=1024
            )
        if not last and (i == 0 or not self.fed):  # else the norm of the layer below does it
            encoder_triton.add_blocks[(T // 16, models)](
                blocks, dx, T, columns, D=D, BT=16, EACH=_together(columns)
            )


def _together(blocks: int) -> int:
    """How many parts of a gradient are read at once."""
    return max(n for n in (1, 2, 4, 8) if blocks % n == 0)


def adamw(
    weights: Tensor,
    mean: Tensor,
    square: Tensor,
    grads: Tensor,
    half: Tensor,
    rates: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    check: tuple[Tensor, Tensor] | None = None,
    now: slice = slice(None),
) -> None:
    """One step of every model, or of some, in place; rates is (3, models): step size, 1/sqrt(1 -
    beta2^t), decay. With `check`, two numbers of each model that is moved: where the first is not
    finite it stays as it is, and its gradients are taken times the second."""
    from headwise.kernels import encoder_triton

    (M, P), first = weights.shape, now.start or 0
    same, moved = (
        half.data_ptr() == weights.data_ptr(),
        [t[now] for t in (weights, mean, square, grads, half)],
    )
    encoder_triton.adamw[(-(-P // 1024), len(moved[0]))](
        *moved, rates.view(-1)[first:], *(check or (grads, grads)), P, M, beta1, beta2, eps,
        HALF=not same, CHECK=check is not None, BLOCK=1024,
    )  # fmt: skip
