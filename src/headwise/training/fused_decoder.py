"""The blocks of a stack of narrow pre-norm models as kernels of our own, forward and backward, for
GPUs.

`Blocks` compute what the blocks of `models` compute, for the shapes that `refusal` lets through:
layer norms before each part, as GPT-2 has them. What is before and after the blocks (embedding,
positions, last norm, read-out, loss) stays with the modules. Products take operands of one type as
in `fused`; the residual, norms, sums and weights are float32. `Trunk` is made of Triton kernels;
`Narrow` is the same for short causal sequences on an H100 or H200, three kernels a block in CUDA
C++ (`kernels.decoder`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.kernels import decoder_cuda, nvrtc
from headwise.shape import Shape
from headwise.training.fused_encoder import STORED, Flat

SPLIT = 8  # pieces into which sums over tokens are cut, so that narrow models fill a card
TILE = 64  # tokens a program
STRETCH = 1024  # numbers a program, where copies of gradients are added
FIRST = (
    "norm1.weight",
    "norm1.bias",
    "attention.qkv.weight",
    "attention.qkv.bias",
    "attention.out.weight",
)  # a block's parameters
BETWEEN = "attention.out_bias"
SECOND = (
    "norm2.weight",
    "norm2.bias",
    "feed.up.weight",
    "feed.up.bias",
    "feed.down.weight",
    "feed.down.bias",
)


def refusal(shape: Shape, tokens: int, batch: int, precision: str = "fp16") -> str:
    """Why the trunk cannot take this shape; empty when it can."""
    s = shape
    if s.norm != "layer" or s.norm_at != "pre":
        return f"it has layer norms before each part, got {s.norm} {s.norm_at}"
    if s.latent or s.num_kv_heads != s.num_heads or s.v_head_dim != s.head_dim or s.average > 1:
        return (
            "it has plain heads: as many KV heads, values as wide as the rank, no latent, no "
            "average"
        )
    if any(s.windows) or s.qk_norm != "none" or s.qk_rope_head_dim:
        return "it has no windows, no query/key norm and no rotary positions"
    if (
        s.activation not in ("relu", "gelu")
        or not s.ffn_dim
        or not (s.qkv_bias and s.out_bias and s.ffn_bias)
    ):
        return "it has a ReLU or GELU feed-forward and biases everywhere"
    if s.dim % 16 or s.dim > 128:
        return f"it takes dim in 16s up to 128, got {s.dim}"
    if tokens > 128 or s.head_dim > 64:
        return f"it takes at most 128 tokens and rank 64, got {tokens} tokens, rank {s.head_dim}"
    if batch * tokens % TILE:
        return f"batch x tokens must be a multiple of {TILE}, got {batch * tokens}"
    return ""


def decoder_refusal(shape: Shape, tokens: int, precision: str = "fp16") -> str:
    """Why a block is not three kernels in CUDA C++ (decoder_cuda.cu); empty when it is, where a GPU
    has them."""
    if not shape.causal or shape.activation != "gelu":
        return "it is causal and has a GELU feed-forward"
    return decoder_cuda.refusal(
        _sizes(shape, tokens), shape.num_heads * shape.head_dim, STORED[precision]
    )


def _sizes(shape: Shape, tokens: int) -> decoder_cuda.Sizes:
    return decoder_cuda.Sizes(shape.dim, shape.ffn_dim, tokens, shape.head_dim)


def needs(shape: Shape, tokens: int, batch: int, precision: str) -> int:
    """Bytes that one model takes in training: weights, gradients, moments, and every buffer of
    `Trunk` or `Narrow`, whichever has more."""
    T, D, C, size = (
        batch * tokens,
        shape.dim,
        shape.num_heads * shape.head_dim,
        STORED[precision].itemsize,
    )
    kept = shape.depth * T * (D * (8 + 2 * size) + 4 * C * size)
    most = kept + T * (40 * D + C * size) + shape.params * (16 + size + 4 * SPLIT)
    if not decoder_refusal(shape, tokens, precision):
        T = batch * _sizes(shape, tokens).padded
        kept = shape.depth * T * (18 * D + 4 * shape.num_heads)
        most = max(most, kept + T * 18 * D + shape.params * (22 + 4 * decoder_cuda.COPIES))
    return most


def blocks(
    splits: Any,
    places: Any,
    weights: Tensor,
    half: Tensor,
    batch: int,
    tokens: int,
    precision: str,
    training: bool = True,
) -> Blocks:
    """The blocks of a stack as kernels, the fastest that there are. The arguments are those of
    `Flat`."""
    possible = not any(
        decoder_refusal(shape, tokens, precision) for _, shape in splits
    ) and not nvrtc.missing(weights.device)
    whole = possible and all(
        decoder_cuda.proven(_sizes(shape, tokens), weights.device) for _, shape in splits
    )
    return (Narrow if whole else Trunk)(
        splits, places, weights, half, batch, tokens, precision, training=training
    )


class Blocks(Flat):
    """Buffers for one stack and one batch size, and the kernels over them."""

    def forward(self, x_MTD: Tensor) -> Tensor:
        """The residual after the last block; (models, batch x tokens, dim), as the input."""
        raise NotImplementedError

    def backward(self, dx_MTD: Tensor) -> tuple[Tensor, Tensor]:
        """From the gradient of the last residual, times the gain: that of the input, times the
        gain, and the flat rows' own."""
        raise NotImplementedError


class Trunk(Blocks):
    """In Triton."""

    def __init__(self, *flat: Any, training: bool = True) -> None:
        """The arguments of `Flat`."""
        super().__init__(*flat)
        s, weights, half = self.shape, self.weights, self.half
        kept, kind, tiles = s.depth if training else 1, half.dtype, self.T // TILE

        def empty(width: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(self.M, self.T, width, dtype=dtype, device=weights.device)

        self.x = [empty(self.D) for _ in range(2 * kept)]  # after each part
        self.h = [empty(self.D, kind) for _ in range(2 * kept)]  # its normed input
        self.qkv = [empty(3 * self.C, kind) for _ in range(kept)]
        self.o = [empty(self.C, kind) for _ in range(kept)]
        wide = 1 << (self.D - 1).bit_length()
        self.sizes: dict[str, Any] = {"D": self.D, "BD": max(16, wide), "BT": TILE, "IP": self.dot}
        exact = kind == torch.float32
        self.feed_sizes = {
            "BF": 32 if exact else 64,
            "GELU": s.activation == "gelu",
            "STAGES": 1 if exact else 2,
        }
        self.pieces = min(SPLIT, tiles)
        if training:
            self.dx, self.dx1, self.do = empty(self.D), empty(self.D), empty(self.C, kind)
            self.copies = torch.zeros(self.pieces, self.M, self.P, device=weights.device)
            self.parts = torch.empty(
                self.M, s.depth, tiles, 6, self.sizes["BD"], device=weights.device
            )
            self.index = self._index()

    def _index(self) -> Tensor:
        """Where the six sums of each layer belong in a flat row."""
        names = (
            "norm2.weight",
            "norm2.bias",
            "feed.down.bias",
            "attention.out_bias",
            "norm1.weight",
            "norm1.bias",
        )
        at = [
            self.places[f"blocks.{i}.{name}"][0] for i in range(self.shape.depth) for name in names
        ]
        return (
            (torch.tensor(at).unsqueeze(1) + torch.arange(self.D)).flatten().to(self.weights.device)
        )

    def _g(self, name: str) -> Tensor:
        """A parameter's gradient, in the first copy."""
        return self._f(name, of=self.copies)

    def forward(self, x_MTD: Tensor) -> Tensor:
        from headwise.kernels import decoder_triton

        T, C, F, P, grid = self.T, self.C, self.F, self.P, (self.T // TILE, self.M)
        x = self.first = x_MTD.contiguous()
        for i in range(self.shape.depth):
            b, k = f"blocks.{i}.", i if len(self.o) > 1 else 0
            x1, x2, h1, h2, qkv, o = (
                self.x[2 * k],
                self.x[2 * k + 1],
                self.h[2 * k],
                self.h[2 * k + 1],
                self.qkv[k],
                self.o[k],
            )
            decoder_triton.project[grid](
                x,
                self._f(b + "norm1.weight"),
                self._f(b + "norm1.bias"),
                self._w(b + "attention.qkv.weight"),
                self._f(b + "attention.qkv.bias"),
                h1,
                qkv,
                T,
                3 * C,
                P,
                **self.sizes,
                BC=64,
            )
            self.each(lambda now, s, qkv=qkv, o=o: self._heads(qkv[now], o[now], s))
            decoder_triton.feed[grid](
                o,
                self._w(b + "attention.out.weight"),
                self._f(b + "attention.out_bias"),
                x,
                self._f(b + "norm2.weight"),
                self._f(b + "norm2.bias"),
                self._w(b + "feed.up.weight"),
                self._f(b + "feed.up.bias"),
                self._w(b + "feed.down.weight"),
                self._f(b + "feed.down.bias"),
                x1,
                h2,
                x2,
                T,
                C,
                F,
                P,
                **self.sizes,
                BC=64,
                **self.feed_sizes,
            )
            x = x2
        return x

    def backward(self, dx_MTD: Tensor) -> tuple[Tensor, Tensor]:
        from headwise.kernels import decoder_triton

        T, C, F, P, D, grid, copy, undo = (
            self.T,
            self.C,
            self.F,
            self.P,
            self.D,
            (self.T // TILE, self.M),
            self.M * self.P,
            1 / self.gain,
        )
        pieces, depth = self.pieces, self.shape.depth
        dx = dx_MTD.contiguous()
        split = {**self.sizes, "SPLIT": pieces}
        stages = self.feed_sizes["STAGES"]
        for i in reversed(range(depth)):
            b, x = f"blocks.{i}.", self.x[2 * i - 1] if i else self.first
            x1, h1, h2, qkv, o = (
                self.x[2 * i],
                self.h[2 * i],
                self.h[2 * i + 1],
                self.qkv[i],
                self.o[i],
            )
            up, up_bias, down = (
                self._w(b + "feed.up.weight"),
                self._f(b + "feed.up.bias"),
                self._w(b + "feed.down.weight"),
            )
            decoder_triton.feed_back[grid](
                dx,
                x1,
                h2,
                self._f(b + "norm2.weight"),
                up,
                up_bias,
                down,
                self._w(b + "attention.out.weight"),
                self.dx1,
                self.do,
                self.parts,
                T,
                C,
                F,
                P,
                i,
                depth,
                **self.sizes,
                BC=64,
                **self.feed_sizes,
            )
            decoder_triton.feed_weights[(-(-F // self.feed_sizes["BF"]), pieces, self.M)](
                h2,
                dx,
                up,
                up_bias,
                down,
                self._g(b + "feed.up.weight"),
                self._g(b + "feed.up.bias"),
                self._g(b + "feed.down.weight"),
                T,
                F,
                P,
                copy,
                undo,
                **split,
                **self.feed_sizes,
            )
            decoder_triton.outer[(-(-C // 64), pieces, self.M)](
                o,
                self.dx1,
                self._g(b + "attention.out.weight"),
                self.copies,
                T,
                C,
                P,
                copy,
                undo,
                1,
                C,
                **split,
                BC=64,
                BIAS=False,
                STAGES=stages,
            )
            self.each(lambda now, s, qkv=qkv: self._heads_back(qkv[now], self.do[now], s))
            decoder_triton.outer[(-(-3 * C // 64), pieces, self.M)](
                qkv,
                h1,
                self._g(b + "attention.qkv.weight"),
                self._g(b + "attention.qkv.bias"),
                T,
                3 * C,
                P,
                copy,
                undo,
                D,
                1,
                **split,
                BC=64,
                BIAS=True,
                STAGES=stages,
            )
            decoder_triton.project_back[grid](
                qkv,
                self._w(b + "attention.qkv.weight"),
                x,
                self._f(b + "norm1.weight"),
                self.dx1,
                self.dx,
                self.parts,
                T,
                3 * C,
                P,
                i,
                depth,
                **self.sizes,
                BC=64,
            )
            dx = self.dx
        grads = self.copies.sum(0)
        grads[:, self.index] = self.parts.sum(2)[..., :D].flatten(1) * undo
        return dx, grads

    def _heads(self, qkv: Tensor, o: Tensor, s: Shape) -> None:
        from headwise.kernels import attention_short_triton

        q, k, v = self._sequences(qkv, 3 * self.C).split(self.C, -1)
        attention_short_triton.forward(
            q,
            k,
            v,
            self._sequences(o, self.C),
            s.num_heads,
            s.head_dim,
            s.scale,
            self.dot,
            s.causal,
        )

    def _heads_back(self, qkv: Tensor, do: Tensor, s: Shape) -> None:
        """The gradients are written over what they are of."""
        from headwise.kernels import attention_short_triton

        q, k, v = self._sequences(qkv, 3 * self.C).split(self.C, -1)
        attention_short_triton.backward(
            q,
            k,
            v,
            self._sequences(do, self.C),
            q,
            k,
            v,
            s.num_heads,
            s.head_dim,
            s.scale,
            self.dot,
            s.causal,
        )

    def _sequences(self, t: Tensor, width: int) -> Tensor:
        return t.view(-1, self.tokens, width)


class Narrow(Blocks):
    """In CUDA C++, for short causal sequences, every split on its own from the first block to the
    last and back."""

    def __init__(self, *flat: Any, training: bool = True) -> None:
        """The arguments of `Flat`."""
        super().__init__(*flat)
        sizes, where = _sizes(self.shape, self.tokens), self.weights.device
        many = [shape.num_heads for _, shape in self.splits]
        if (
            self.aside
        ):  # more heads take longer: theirs go first, and none is alone on the card at the end
            self.aside = [
                torch.cuda.Stream(where, priority=-sum(few < heads for few in many))
                for heads in many[1:]
            ]
        self.kept = [
            decoder_cuda.buffers(sizes, self.M, self.batch, where, max(many))
            for _ in range(self.shape.depth if training else 1)
        ]
        self.out = torch.empty(self.M, self.T, self.D, device=where)
        if training:
            self.dx1, self.do, self.between = decoder_cuda.gradients(
                sizes, self.M, self.batch, where
            )
            self.dx = torch.empty_like(self.out)
            self.pieces = decoder_cuda.pieces(sizes, self.batch, self.M)
            self.copies = torch.zeros(max(self.pieces), self.M, self.P, device=where)
            self.counts = self._counts().to(where)
            self.grads = torch.zeros_like(self.weights)

    def _counts(self) -> Tensor:
        """Of the copies, how many hold something in each stretch of the flat rows."""
        counts = torch.zeros(-(-self.P // STRETCH), dtype=torch.int32)
        for names, many in zip(((*SECOND, BETWEEN), FIRST), self.pieces, strict=True):
            for at, size in (
                self.places[f"blocks.{i}.{name}"] for i in range(self.shape.depth) for name in names
            ):
                counts[at // STRETCH : -(-(at + size) // STRETCH)].clamp_(min=many)
        return counts

    def forward(self, x_MTD: Tensor) -> Tensor:
        self.first = x_MTD.contiguous()
        self.each(self._decode)
        return self.out

    def backward(self, dx_MTD: Tensor) -> tuple[Tensor, Tensor]:
        from headwise.kernels import encoder_triton

        dx = dx_MTD.contiguous()
        self.each(lambda now, s: self._decode_back(dx[now], now, s))
        encoder_triton.add_shares[(len(self.counts), self.M)](
            self.copies, self.grads, self.P, self.P, self.counts, EACH=True, BLOCK=STRETCH
        )
        return self.dx, self.grads

    def _decode(self, now: slice, s: Shape) -> None:
        """All blocks of some models."""
        sizes, last, x = _sizes(s, self.tokens), self.shape.depth - 1, self.first[now]
        for i in range(self.shape.depth):
            kept = self.kept[i % len(self.kept)].of(now)
            to = kept._replace(x2=self.out[now]) if i == last else kept
            given = (self._of(i, name, now) for name in (*FIRST, BETWEEN, *SECOND))
            decoder_cuda.forward(
                sizes, len(x), x, *given, *to, self.batch, self.P, s.scale, i == 0, i == last
            )
            x = kept.x2

    def _decode_back(self, dx: Tensor, now: slice, s: Shape) -> None:
        """Back through all of them, from the gradient of what is after the last."""
        sizes, last, undo, far = (
            _sizes(s, self.tokens),
            self.shape.depth - 1,
            1 / self.gain,
            self.M * self.P,
        )
        (tiles, pieces), dx1, give, between = (
            self.pieces,
            self.dx1[now],
            self.do[now],
            self.between[now],
        )
        for i in reversed(range(self.shape.depth)):
            kept, x = self.kept[i].of(now), self.kept[i - 1].x2[now] if i else self.first[now]
            gain, _, up, up_bias, down, _ = (self._of(i, name, now) for name in SECOND)
            decoder_cuda.feed_back(
                sizes,
                len(x),
                tiles,
                dx,
                kept.x1,
                kept.h2,
                gain,
                up,
                up_bias,
                down,
                self._of(i, FIRST[-1], now),
                dx1,
                give,
                *self._grads(i, now, (*SECOND, BETWEEN)),
                self.batch,
                tiles,
                self.P,
                far,
                undo,
                i == last,
            )
            dx = between if i else self.dx[now]
            decoder_cuda.backward(
                sizes,
                len(x),
                pieces,
                x,
                *(self._of(i, name, now) for name in FIRST[:3]),
                kept.qkv,
                kept.o,
                give,
                dx1,
                kept.peaks,
                dx,
                *self._grads(i, now, FIRST),
                self.batch,
                pieces,
                self.P,
                far,
                s.scale,
                undo,
                i == 0,
            )

    def _of(self, i: int, name: str, now: slice) -> Tensor:
        """A block's parameter as the kernels take it: matrices in the operands' type."""
        find = self._w if name.endswith("weight") and "norm" not in name else self._f
        return find(f"blocks.{i}.{name}", now.start)

    def _grads(self, i: int, now: slice, names: tuple[str, ...]) -> list[Tensor]:
        return [self._f(f"blocks.{i}.{name}", now.start, self.copies) for name in names]
