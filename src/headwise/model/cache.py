"""What a decoder keeps of the tokens it has read, so that it reads each of them once.

Axes: B batch, H KV heads, T tokens. All memory is taken at the start and stays where it is.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from headwise.errors import UsageError
from headwise.shape import Shape


class LayerCache:
    """What one attention layer keeps; `kind` says what, `parts` hold it, tokens on the axis before
    the last.

    keys    keys (B, H, T, rank) and values (B, H, T, width), normalised and rotated; keys alone
            where they are the values
    latent  the latent, behind it the rotated key that all heads share (B, T, latent + rotary part)
    input   the layer's input (B, T, dim), from which keys and values are made anew

    A layer with a window keeps the newest `room` tokens: token p lies in slot p mod room.
    """

    def __init__(
        self,
        shape: Shape,
        layer: int,
        batch: int,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device | str,
        inputs: bool,
        absorb: bool,
    ) -> None:
        # A layer with a window never needs more than the newest `window` tokens, so it takes memory
        # for those alone.
        self.tokens = tokens
        self.room = min(tokens, shape.window(layer) or tokens)
        shape = shape.layer(layer) if shape.layers else shape
        self.length = 0
        self.absorb = absorb
        # The input is kept where that was asked for and takes fewer numbers per token.
        self.kind = "latent" if shape.latent else "keys"
        if shape.kv_width(inputs) < shape.kv_width():
            self.kind = "input"
        KV, R, V = shape.num_kv_heads, shape.head_dim, shape.v_head_dim
        sizes = [(KV, self.room, R), (KV, self.room, V)][: 1 if shape.shared_kv else 2]
        if self.kind != "keys":
            sizes = [(self.room, shape.kv_width(inputs))]
        self.parts = tuple(torch.zeros(batch, *size, dtype=dtype, device=device) for size in sizes)

    def append(self, *new: Tensor, ordered: bool = False) -> tuple[Tensor, ...]:
        """Take the newest tokens in; what their queries may look at, with them. Oldest first, but
        when there is one new token and not `ordered` in any order, because one query sees all of
        it."""
        self._check(new)
        start, count = self.length, new[0].shape[-2]
        self.length += count
        return tuple(
            self._append(part, t, start, count, ordered)
            for part, t in zip(self.parts, new, strict=True)
        )

    def _append(self, part: Tensor, new: Tensor, start: int, count: int, ordered: bool) -> Tensor:
        # Before the first wrap tokens lie in order from slot 0, so a slice of the memory is what
        # queries see, without a copy.
        room, stop = self.room, start + count
        if stop <= room:
            part[..., start:stop, :] = new
            return part[..., :stop, :]
        # One token takes the slot of the oldest. Its query sees all of the window, so the order of
        # slots does not matter.
        if count == 1 and not ordered:
            part[..., start % room, :] = new[..., 0, :]
            return part
        # Several tokens around the wrap: each query sees another window, so the kept tokens are
        # copied into order, oldest first, with the new ones behind. Only then may the new ones
        # overwrite their slots.
        old = part.roll(-(start % room), -2) if start >= room else part[..., :start, :]
        seen = torch.cat((old[..., max(0, old.shape[-2] - room + 1) :, :], new), -2)
        slots = torch.arange(max(start, stop - room), stop, device=part.device) % room
        part.index_copy_(-2, slots, new[..., -room:, :])
        return seen

    def _check(self, new: tuple[Tensor, ...]) -> None:
        if self.length + new[0].shape[-2] > self.tokens:
            raise UsageError(
                f"a cache of {self.tokens} tokens is full: it holds {self.length}, got "
                f"{new[0].shape[-2]} more"
            )
        for part, t in zip(self.parts, new, strict=True):
            made, got = (*part.shape[:-2], part.shape[-1]), (*t.shape[:-2], t.shape[-1])
            if made != got:
                raise UsageError(
                    f"the cache was made for another batch or shape: {self.kind} of {made} "
                    f"per token, got {got}"
                )
            if (part.dtype, part.device) != (t.dtype, t.device):
                raise UsageError(
                    f"cache and model must share dtype and device, got {part.dtype} on "
                    f"{part.device}, {t.dtype} on {t.device}"
                )
            if t.requires_grad:
                raise UsageError("a cache is for inference: read into it under torch.no_grad()")


class Cache:
    """The memory of a causal stack for `batch` sequences of at most `tokens` tokens.

    Its bytes are `shape.kv_bytes(tokens, batch=batch, bytes_per=..., inputs=inputs)`. With `inputs`
    a layer keeps its input where that is fewer numbers than keys and values: less memory, more
    arithmetic. With `absorb` a single new token is compared with latents (or inputs) as they are,
    its query brought to them, where that is possible; else keys and values are made of all.

    >>> shape = Shape(dim=12, depth=2, num_heads=4, num_kv_heads=2, causal=True)
    >>> Cache(shape, batch=3, tokens=5).bytes, shape.kv_bytes(5, batch=3, bytes_per=4)
    (1440, 1440)
    """

    def __init__(
        self,
        shape: Shape,
        batch: int,
        tokens: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        inputs: bool = False,
        absorb: bool = True,
    ) -> None:
        if not shape.causal:
            raise UsageError(
                "a cache needs a causal shape: earlier tokens must not depend on later ones, got "
                "causal False"
            )
        for name, value in (("batch", batch), ("tokens", tokens)):
            if value < 1:
                raise UsageError(f"{name} of a cache must be at least 1, got {value}")
        self.shape, self.batch, self.tokens = shape, batch, tokens
        self.layers = [
            LayerCache(shape, i, batch, tokens, dtype, device, inputs, absorb)
            for i in range(shape.depth)
        ]

    @property
    def length(self) -> int:
        """How many tokens have been read."""
        return self.layers[-1].length

    @property
    def bytes(self) -> int:
        """Memory taken, filled or not."""
        return sum(part.nbytes for layer in self.layers for part in layer.parts)

    def clear(self) -> None:
        """Forget every token; the memory stays."""
        for layer in self.layers:
            layer.length = 0

    def check(self, shape: Shape, batch: int) -> None:
        """Refuse a model or a batch that the cache was not made for."""
        if shape != self.shape:
            mine, theirs = dataclasses.asdict(self.shape), dataclasses.asdict(shape)
            other = ", ".join(
                f"{name} {mine[name]} and {theirs[name]}"
                for name in mine
                if mine[name] != theirs[name]
            )
            raise UsageError(f"cache and model must have one shape, got {other}")
        if batch != self.batch:
            raise UsageError(f"the cache is for a batch of {self.batch}, got {batch}")
        if any(layer.length != self.length for layer in self.layers):
            held = ", ".join(str(layer.length) for layer in self.layers)
            raise UsageError(
                f"a step was interrupted and the layers of the cache hold {held} tokens: clear() "
                "it and read again"
            )
