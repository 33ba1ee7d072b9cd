"""The blocks of narrow pre-norm models in Triton (kernels/decoder_triton.py), for the fused step of
fused_decoder.py.

What lies where: per block the residual after each part in float32 (`x`), its normed copy as an
operand (`h`), projections and heads. Backward the residual's gradient goes from dx to dx1, which is
between the two parts, and on to dx; `d_heads` is the heads' gradient, and queries', keys' and
values' gradients are written over what they are of.

Who sums what: weights' gradients are cut into `splits` token splits with partial sums of their own;
those of norms and biases are tile sums. Both are added up at the end, over all layers at once.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from headwise.training.flat import FlatKernels, FlatRows, HeadGroup

TOKEN_TILE = 64  # tokens of a program
COLUMN_TILE = 64
SUMMED = (  # the parameters whose gradients are tile sums, in their order there
    "norm2.weight",
    "norm2.bias",
    "feed.down.bias",
    "attention.out_bias",
    "norm1.weight",
    "norm1.bias",
)


class TritonBlocks(FlatKernels):
    """The blocks in Triton: two kernels forward, five backward, and the heads."""

    MOST_SPLITS: ClassVar[int] = 8  # of sums over tokens, so that few models fill a card

    def __init__(
        self, rows: FlatRows, batch: int, tokens: int, gain: float, *, training: bool = True
    ) -> None:
        super().__init__(rows, batch, tokens, gain)
        depth, dtype = self.shape.depth, rows.operands.dtype
        kept, tiles = depth if training else 1, self.T // TOKEN_TILE

        def empty(width: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(self.M, self.T, width, dtype=dtype, device=self.device)

        self.x = [empty(self.D) for _ in range(2 * kept)]  # after each part
        self.h = [empty(self.D, dtype) for _ in range(2 * kept)]  # each part's normed input
        self.qkv = [empty(3 * self.C, dtype) for _ in range(kept)]
        self.heads = [empty(self.C, dtype) for _ in range(kept)]
        exact = dtype == torch.float32
        padded = max(16, 1 << (self.D - 1).bit_length())
        self.sizes: dict[str, Any] = {"D": self.D, "BD": padded, "BT": TOKEN_TILE, "IP": self.dot}
        self.stages = 1 if exact else 2  # loads in flight
        self.hidden_tile = 32 if exact else 64
        self.splits = min(self.MOST_SPLITS, tiles)
        if training:
            self.dx, self.dx1, self.d_heads = empty(self.D), empty(self.D), empty(self.C, dtype)
            self.weight_partials = torch.zeros(self.splits, self.M, self.P, device=self.device)
            self.tile_sums = torch.empty(self.M, depth, tiles, 6, padded, device=self.device)
            self.index = self._index()

    def _index(self) -> Tensor:
        """Where the tile sums of each layer belong in a flat row."""
        start = self.rows.layout.start
        starts = [start(f"blocks.{i}.{n}") for i in range(self.shape.depth) for n in SUMMED]
        index = torch.tensor(starts).unsqueeze(1) + torch.arange(self.D)
        return index.flatten().to(self.device)

    def _feed_sizes(self) -> dict[str, Any]:
        gelu = self.shape.activation == "gelu"
        return {"BF": self.hidden_tile, "GELU": gelu, "STAGES": self.stages}

    def _gradient(self, name: str) -> Tensor:
        """Where a parameter's gradient goes, in the first split's rows."""
        return self.vector(name, of=self.weight_partials)

    # -- forward

    def forward(self, x_MTD: Tensor) -> Tensor:
        """The residual after the last block; (models, batch x tokens, dim), as the input."""
        x = self.first = x_MTD.contiguous()
        for i in range(self.shape.depth):
            self._project(i, x)
            self.each_head_group(lambda group, i=i: self._mix(i, group))
            x = self._feed(i, x)
        return x

    def _kept(self, i: int) -> int:
        """Which buffers a block uses: its own, or without training those of all blocks."""
        return i if len(self.heads) > 1 else 0

    def _project(self, i: int, x: Tensor) -> None:
        from headwise.kernels import decoder_triton

        b, kept = f"blocks.{i}.", self._kept(i)
        decoder_triton.project[(self.T // TOKEN_TILE, self.M)](
            x=x,
            gain=self.vector(b + "norm1.weight"),
            shift=self.vector(b + "norm1.bias"),
            w=self.matrix(b + "attention.qkv.weight"),
            b=self.vector(b + "attention.qkv.bias"),
            h=self.h[2 * kept],
            y=self.qkv[kept],
            T=self.T,
            C=3 * self.C,
            model=self.P,
            **self.sizes,
            BC=COLUMN_TILE,
        )

    def _feed(self, i: int, x: Tensor) -> Tensor:
        from headwise.kernels import decoder_triton

        b, kept = f"blocks.{i}.", self._kept(i)
        decoder_triton.feed[(self.T // TOKEN_TILE, self.M)](
            o=self.heads[kept],
            out=self.matrix(b + "attention.out.weight"),
            out_bias=self.vector(b + "attention.out_bias"),
            x=x,
            gain=self.vector(b + "norm2.weight"),
            shift=self.vector(b + "norm2.bias"),
            up=self.matrix(b + "feed.up.weight"),
            up_bias=self.vector(b + "feed.up.bias"),
            down=self.matrix(b + "feed.down.weight"),
            down_bias=self.vector(b + "feed.down.bias"),
            x1=self.x[2 * kept],
            h=self.h[2 * kept + 1],
            x2=self.x[2 * kept + 1],
            T=self.T,
            C=self.C,
            F=self.F,
            model=self.P,
            **self.sizes,
            BC=COLUMN_TILE,
            **self._feed_sizes(),
        )
        return self.x[2 * kept + 1]

    # -- backward

    def backward(self, dx_MTD: Tensor) -> tuple[Tensor, Tensor]:
        """From the gradient of the last residual, times the gain: that of the input, times the
        gain, and the flat rows' own."""
        dx = dx_MTD.contiguous()
        for i in reversed(range(self.shape.depth)):
            self._feed_back(i, dx)
            self._feed_weights(i, dx)
            self._out_weights(i)
            self.each_head_group(lambda group, i=i: self._mix_back(i, group))
            self._qkv_weights(i)
            self._project_back(i)
            dx = self.dx
        grads = self.weight_partials.sum(0)
        sums = self.tile_sums.sum(2)[..., : self.D].flatten(1)
        grads[:, self.index] = sums * (1 / self.gain)
        return dx, grads

    def _feed_back(self, i: int, dx: Tensor) -> None:
        from headwise.kernels import decoder_triton

        b = f"blocks.{i}."
        decoder_triton.feed_back[(self.T // TOKEN_TILE, self.M)](
            dx2=dx,
            x1=self.x[2 * i],
            h=self.h[2 * i + 1],
            gain=self.vector(b + "norm2.weight"),
            up=self.matrix(b + "feed.up.weight"),
            up_bias=self.vector(b + "feed.up.bias"),
            down=self.matrix(b + "feed.down.weight"),
            out=self.matrix(b + "attention.out.weight"),
            dx1=self.dx1,
            do=self.d_heads,
            tile_sums=self.tile_sums,
            T=self.T,
            C=self.C,
            F=self.F,
            model=self.P,
            slot=i,
            slots=self.shape.depth,
            **self.sizes,
            BC=COLUMN_TILE,
            **self._feed_sizes(),
        )

    def _project_back(self, i: int) -> None:
        from headwise.kernels import decoder_triton

        b = f"blocks.{i}."
        decoder_triton.project_back[(self.T // TOKEN_TILE, self.M)](
            dy=self.qkv[i],
            w=self.matrix(b + "attention.qkv.weight"),
            x=self.x[2 * i - 1] if i else self.first,
            gain=self.vector(b + "norm1.weight"),
            dx1=self.dx1,
            dx=self.dx,
            tile_sums=self.tile_sums,
            T=self.T,
            C=3 * self.C,
            model=self.P,
            slot=i,
            slots=self.shape.depth,
            **self.sizes,
            BC=COLUMN_TILE,
        )

    # -- weights' gradients, in token splits

    def _split_sizes(self) -> dict[str, Any]:
        """What the kernels of partial sums have in common."""
        common: dict[str, Any] = {"T": self.T, "model": self.P, "apart": self.M * self.P}
        return {**common, "undo": 1 / self.gain, **self.sizes, "SPLIT": self.splits}

    def _feed_weights(self, i: int, dx: Tensor) -> None:
        from headwise.kernels import decoder_triton

        b = f"blocks.{i}."
        # The grid follows the tile of hidden units, which gives way on cards with less memory.
        decoder_triton.feed_weights[lambda sizes: (-(-self.F // sizes["BF"]), self.splits, self.M)](
            h=self.h[2 * i + 1],
            dx2=dx,
            up=self.matrix(b + "feed.up.weight"),
            up_bias=self.vector(b + "feed.up.bias"),
            down=self.matrix(b + "feed.down.weight"),
            d_up=self._gradient(b + "feed.up.weight"),
            d_up_bias=self._gradient(b + "feed.up.bias"),
            d_down=self._gradient(b + "feed.down.weight"),
            F=self.F,
            **self._split_sizes(),
            **self._feed_sizes(),
        )

    def _out_weights(self, i: int) -> None:
        from headwise.kernels import decoder_triton

        decoder_triton.outer[(-(-self.C // COLUMN_TILE), self.splits, self.M)](
            a=self.heads[i],
            b=self.dx1,
            grad=self._gradient(f"blocks.{i}.attention.out.weight"),
            grad_bias=self.weight_partials,  # not written
            C=self.C,
            c_step=1,
            d_step=self.C,
            **self._split_sizes(),
            BC=COLUMN_TILE,
            BIAS=False,
            STAGES=self.stages,
        )

    def _qkv_weights(self, i: int) -> None:
        from headwise.kernels import decoder_triton

        b = f"blocks.{i}.attention."
        decoder_triton.outer[(-(-3 * self.C // COLUMN_TILE), self.splits, self.M)](
            a=self.qkv[i],
            b=self.h[2 * i],
            grad=self._gradient(b + "qkv.weight"),
            grad_bias=self._gradient(b + "qkv.bias"),
            C=3 * self.C,
            c_step=self.D,
            d_step=1,
            **self._split_sizes(),
            BC=COLUMN_TILE,
            BIAS=True,
            STAGES=self.stages,
        )

    # -- heads

    def _mix(self, i: int, group: HeadGroup) -> None:
        from headwise.kernels import attention_short_triton

        kept, s = self._kept(i), group.shape
        q, k, v = self._sequences(self.qkv[kept], group).split(self.C, -1)
        heads = self._sequences(self.heads[kept], group)
        attention_short_triton.forward(
            q, k, v, heads, s.num_heads, s.head_dim, s.scale, self.dot, s.causal
        )

    def _mix_back(self, i: int, group: HeadGroup) -> None:
        """The gradients are written over what they are of."""
        from headwise.kernels import attention_short_triton

        s = group.shape
        q, k, v = self._sequences(self.qkv[i], group).split(self.C, -1)
        d_heads = self._sequences(self.d_heads, group)
        attention_short_triton.backward(
            q, k, v, d_heads, q, k, v, s.num_heads, s.head_dim, s.scale, self.dot, s.causal
        )

    def _sequences(self, t: Tensor, group: HeadGroup) -> Tensor:
        """A group's part of a buffer, (sequences, tokens, width)."""
        return t[group.models].view(-1, self.tokens, t.shape[-1])
