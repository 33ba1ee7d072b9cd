"""Shape -> module: `Encoder` and `Decoder`.

With `models` = M a module holds M independent models, an ensemble: each parameter and each input
has a leading model axis, and one forward pass runs them all.

Parameters have the same names with and without it: embedding, read_in, positions,
blocks.0.attention.qkv, blocks.0.feed.up, blocks.0.norm1, final_norm, head, read_out.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import UsageError
from headwise.kernels import embed_readout
from headwise.model.attention import Attention
from headwise.model.cache import Cache, LayerCache
from headwise.model.extras import Documents
from headwise.model.layers import FeedForward, Norm
from headwise.model.linear import AnyLinear, linear, linear_layer, reset_linears, uniform
from headwise.model.packed import HeadGroups
from headwise.model.rotary import Rotary, rotary_at, rotary_table
from headwise.model.seen import padded_positions, with_padding
from headwise.shape import Shape, not_built

Tables = dict[int, Rotary]  # rotary positions by how many coordinates of a head they turn


class Block(nn.Module):
    """One layer: attention A and feed-forward F with skips, norms n where `Shape.norm_at` puts
    them.

    post        x <- n1(x + A(x)),    x <- n2(x + F(x))
    pre         x <- x + A(n1(x)),    x <- x + F(n2(x))
    output      x <- x + n1(A(x)),    x <- x + n2(F(x))
    parallel    x <- x + A(n1(x)) + F(n1(x))
    parallel-2  x <- x + A(n1(x)) + F(n2(x))
    sandwich    x <- x + m1(A(n1(x))), x <- x + m2(F(n2(x)))

    Without feed-forward the second step is left out.
    """

    def __init__(
        self,
        shape: Shape,
        layer: int,
        models: int | None = None,
        head_groups: HeadGroups = (),
        hard: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.norm_at = shape.norm_at
        norm = functools.partial(Norm, shape.norm, shape.dim, models)

        # A parallel block has one norm for both parts; a sandwich has one more behind each.
        self.attention = Attention(
            shape, layer=layer, models=models, head_groups=head_groups, hard=hard, **options
        )
        self.norm1 = norm()
        own = shape.layer(layer) if shape.layers else shape
        self.feed = FeedForward(own, models) if own.ffn_dim else None
        sandwich = shape.norm_at == "sandwich"
        self.norm2 = norm() if self.feed is not None and shape.norm_at != "parallel" else None
        self.after1 = norm() if sandwich else None
        self.after2 = norm() if sandwich and self.feed is not None else None

    def reset_parameters(self) -> None:
        """Every parameter as it is made."""
        self.attention.reset_parameters()
        for part in (self.feed, self.norm1, self.norm2, self.after1, self.after2):
            if part is not None:
                part.reset_parameters()

    def forward(
        self,
        x: Tensor,
        keep: bool = False,
        cache: LayerCache | None = None,
        rotary: Rotary | None = None,
        **given: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The block's output, and with `keep` its intermediates by name.

        With `cache` x follows what is in it, and joins it. `rotary` and what else is given (mask,
        documents, positions) as in `Attention`.
        """
        out: dict[str, Tensor] = {}

        def attention(z: Tensor) -> Tensor:
            if not keep:
                return self.attention(z, rotary=rotary, cache=cache, **given)
            y, kept = self.attention(z, keep=True, rotary=rotary, **given)
            out.update(kept, attention=y)
            return y

        # Parts that a shape lacks become identities, so that each case reads as its formula.
        feed = self.feed or torch.zeros_like
        norm2 = self.norm2 or nn.Identity()
        match self.norm_at:
            case "post":
                x = self.norm1(x + attention(x))
                x = norm2(x + feed(x)) if self.feed else x
            case "pre":
                x = x + attention(self.norm1(x))
                x = x + feed(norm2(x)) if self.feed else x
            case "parallel":
                z = self.norm1(x)
                x = x + attention(z) + feed(z) if self.feed else x + attention(z)
            case "parallel-2":
                y = x + attention(self.norm1(x))
                x = y + feed(norm2(x)) if self.feed else y
            case "output":
                x = x + self.norm1(attention(x))
                x = x + norm2(feed(x)) if self.feed else x
            case "sandwich":
                after1, after2 = self.after1 or nn.Identity(), self.after2 or nn.Identity()
                x = x + after1(attention(self.norm1(x)))
                x = x + after2(feed(norm2(x))) if self.feed else x
        if keep:
            out["residual"] = x
        return x, out


class Transformer(nn.Module):
    """Blocks between what comes in and what goes out; use `Encoder` or `Decoder`.

    Inputs are vectors (batch, tokens, in_dim) or ids (batch, tokens), outputs (batch, tokens,
    out_dim); in an ensemble both have a leading model axis. `separate` and `dropout` as in
    `Attention`.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        models: int | None = None,
        head_groups: HeadGroups = (),
        hard: bool = False,
        separate: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if shape.extras:
            names = ", ".join(name for name, _ in shape.extras)
            raise UsageError(
                "a model with parameters outside its blocks can be costed but not built, got "
                f"extras {names}"
            )
        if missing := not_built(shape):
            raise UsageError(missing)
        lead = () if models is None else (models,)
        self.shape, self.models = shape, models
        self.rotated = tuple(shape.layer(i).qk_rope_head_dim for i in range(shape.depth))
        self.rotary_widths = tuple(sorted({*self.rotated} - {0}))
        self.rotary: Tables = {}  # of sequences of the length given to `prepare`

        def table(rows: int, width: int) -> nn.Parameter:
            return nn.Parameter(uniform(0.02, *lead, rows, width))

        # What comes in: ids are looked up, vectors read in. Concatenated positions take the last
        # `position_dim` coordinates, added ones all D.
        D, vocab = shape.dim, shape.vocab_size
        self.embedding = table(vocab, D) if vocab else None
        self.read_in = (
            linear_layer(shape.input_dim, D - shape.position_dim, True, models)
            if shape.input_dim
            else None
        )
        rows = shape.position_rows
        self.positions = table(rows, shape.position_dim or D) if rows else None
        # Post-norm blocks end in a norm already.
        self.blocks = nn.ModuleList(
            Block(shape, i, models, head_groups, hard, separate=separate, dropout=dropout)
            for i in range(shape.depth)
        )
        self.final_norm = Norm(shape.norm, D, models) if shape.norm_at != "post" else None
        # What goes out: a head for ids, tied to the embedding or its own, or a map to vectors.
        own_head = vocab and shape.lm_head and not shape.tied and not shape.output_dim
        self.head = table(vocab, D) if own_head else None
        self.read_out = (
            linear_layer(D, shape.output_dim, True, models) if shape.output_dim else None
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Every parameter as it is made, such as after `to_empty`; `init.initialise` draws the
        starts of `init.STARTS`."""
        for table in (self.embedding, self.positions, self.head):
            if table is not None:
                table.uniform_(-0.02, 0.02)
        reset_linears(self.children())
        for block in self.blocks:
            assert isinstance(block, Block)
            block.reset_parameters()
        if self.final_norm is not None:
            self.final_norm.reset_parameters()

    def forward(
        self,
        x: Tensor,
        keep: bool = False,
        *,
        mask: Tensor | None = None,
        padding: Tensor | None = None,
        documents: Documents | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
        """Outputs, and with `keep` every layer's intermediates: out["layer 0"]["weights"].

        mask, padding and documents as in `Attention`: what hides a token hides it in all blocks.
        positions (batch, tokens): where tokens stand, for learned and rotary positions; behind each
        other unless given, padding left out. `document_positions` restarts them by document.
        """
        out: dict[str, dict[str, Tensor]] = {}
        h = self.embed(x, 0, self._positions_of(padding, positions))
        # One table for all blocks that rotate as many coordinates.
        tables = self._rotary(h) if positions is None else self._tables_at(positions, h)
        given = self._given(mask, padding, documents)
        for i, block in enumerate(self.blocks):
            h, kept = block(h, keep, rotary=tables.get(self.rotated[i]), **given)
            if keep:
                out[f"layer {i}"] = kept
        return self.unembed(h), out

    def follow(
        self,
        x: Tensor,
        cache: Cache,
        *,
        mask: Tensor | None = None,
        padding: Tensor | None = None,
        documents: Documents | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """The last block's output for inputs that follow those in the cache, and join it. Masks are
        of all tokens so far, positions of the new ones."""
        if self.models is not None:
            raise UsageError(f"a cache needs a single model, this module holds {self.models}")
        cache.check(self.shape, len(x))
        at = self._positions_of(padding, positions)
        at = at if at is None or positions is not None else at[..., cache.length :]
        h = self.embed(x, cache.length, at)
        given = self._given(mask, padding, documents)
        given |= {} if positions is None else {"positions": positions}
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            h, _ = block(h, cache=layer, **given)
        return h

    def _given(
        self, mask: Tensor | None, padding: Tensor | None, documents: Documents | None
    ) -> dict[str, Any]:
        """What blocks are given of these; nothing for most calls."""
        found = {"mask": with_padding(mask, padding), "documents": documents}
        return {name: value for name, value in found.items() if value is not None}

    def _positions_of(self, padding: Tensor | None, positions: Tensor | None) -> Tensor | None:
        """Where tokens stand, if not all behind each other. Rotary positions depend on distances
        only, so padding does not move them."""
        if positions is not None or padding is None or not self.shape.num_positions:
            return positions
        return padded_positions(padding)

    def prepare(self, tokens: int) -> None:
        """Make the rotary table of sequences of one length once for all: compiled, every use would
        compute it anew."""
        self.rotary = self._tables(tokens, next(self.parameters()))

    def _tables(self, tokens: int, like: Tensor) -> Tables:
        theta = self.shape.rope_theta
        return {width: rotary_table(tokens, width, theta, like) for width in self.rotary_widths}

    def _tables_at(self, positions: Tensor, like: Tensor) -> Tables:
        theta = self.shape.rope_theta
        return {width: rotary_at(positions, width, theta, like) for width in self.rotary_widths}

    def _rotary(self, h: Tensor) -> Tables:
        if not self.rotary_widths:
            return {}
        # Prepared tables serve sequences of their own length, device and precision only.
        tokens = h.shape[-2]
        exact = torch.promote_types(h.dtype, torch.float32)
        fit = [
            (len(cos), cos.device, cos.dtype) == (tokens, h.device, exact)
            for cos, _ in self.rotary.values()
        ]
        return self.rotary if fit and all(fit) else self._tables(tokens, h)

    # ---- what comes in

    def embed(self, x: Tensor, start: int = 0, positions: Tensor | None = None) -> Tensor:
        """What the first block gets: tokens looked up or vectors read in, with their positions; the
        first input stands at position `start`, or each where `positions` says."""
        # One kernel reads vectors in and adds positions, for narrow ensembles on a GPU; not while
        # decoding, where positions start late.
        first, table = self.read_in, self.positions
        late = start or positions is not None
        if first is None or table is None or late or not self._has_short_inputs(x):
            return self._add_positions(self._look_up(x), start, positions)
        assert first.bias is not None
        return embed_readout.enter(x, first.weight, first.bias, table)

    def _has_short_inputs(self, x: Tensor) -> bool:
        """Whether x is what the kernel of `embed_readout` takes: few and short vectors of an
        ensemble on a GPU, with added positions."""
        s = self.shape
        if x.ndim != 4 or x.requires_grad or s.positions != "additive":
            return False
        if s.dim > embed_readout.WIDTH or not embed_readout.possible(x):
            return False
        if x.shape[0] != self.models or x.shape[-1] != s.input_dim:
            return False
        tokens = min(embed_readout.TOKENS, s.num_positions)
        return s.input_dim <= embed_readout.INPUTS and x.shape[-2] <= tokens

    def _look_up(self, x: Tensor) -> Tensor:
        # Vectors are read in, or taken as they are where the shape has no map for them.
        if self.embedding is None:
            return x if self.read_in is None else self.read_in(x)
        if self.models is None:
            return F.embedding(x, self.embedding)
        # All models' tables as one, model m's ids shifted by m vocabularies.
        offset = torch.arange(self.models, device=x.device) * self.shape.vocab_size
        rows = x + offset.view(-1, *([1] * (x.ndim - 1)))
        return F.embedding(rows, self.embedding.flatten(0, 1))

    def _add_positions(self, h: Tensor, start: int, positions: Tensor | None) -> Tensor:
        if self.positions is None:
            return h
        # A room table has one row, the same for all tokens; other tables have a row per token.
        stop, table = start + h.shape[-2], self.positions.unsqueeze(-3)
        if self.shape.positions != "room" and positions is not None:
            # On a GPU the look-up itself checks, and nothing waits for it.
            if not (positions.is_cuda or torch.compiler.is_compiling()):
                self._check_positions(positions)
            table = self.positions[..., positions, :]
        elif self.shape.positions != "room":
            if stop > self.shape.num_positions:
                raise UsageError(
                    f"at most num_positions {self.shape.num_positions} tokens fit the position "
                    f"table, got {stop}"
                )
            table = table[..., start:stop, :]
        if self.shape.positions == "additive":
            return h + table
        return torch.cat((h, table.expand(*h.shape[:-1], self.shape.position_dim)), -1)

    def _check_positions(self, positions: Tensor) -> None:
        low, high = (int(n) for n in positions.aminmax())
        if low < 0 or high >= self.shape.num_positions:
            raise UsageError(
                f"positions must be from 0 to below num_positions {self.shape.num_positions}, got "
                f"{low} to {high}"
            )

    # ---- what goes out

    def unembed(self, h: Tensor) -> Tensor:
        """Outputs from the last block's: the final norm, then logits or vectors."""
        # One kernel takes the last norm and the read-out to one number, for narrow ensembles on a
        # GPU.
        norm, last = self.final_norm, self.read_out
        if norm is None:
            return self._project_out(h)
        one_output = last is not None and self.shape.output_dim == 1
        if not one_output or norm.kind != "layer" or not norm.has_short_rows(h):
            return self._project_out(norm(h))
        assert norm.weight is not None
        assert norm.bias is not None
        assert last is not None
        assert last.bias is not None
        return embed_readout.leave(h, norm.weight, norm.bias, last.weight, last.bias)

    def _project_out(self, h: Tensor) -> Tensor:
        if self.read_out is not None:
            return self._read_out(h, self.read_out)
        if self.embedding is None or not self.shape.lm_head:
            return h
        # Logits are products with the rows of the head, or of the embedding where they are tied.
        table = self.embedding if self.head is None else self.head
        if self.models is None:
            return F.linear(h, table)
        return torch.bmm(h.flatten(1, -2), table.mT).unflatten(1, h.shape[1:-1])

    def _read_out(self, h: Tensor, last: AnyLinear) -> Tensor:
        """An ensemble's outputs are padded to a multiple of sixteen columns: products with one
        column take a path of their own, whose bits depend on the models beside it."""
        outputs = self.shape.output_dim
        missing = -outputs % 16
        if self.models is None or not missing or last.bias is None:
            return last(h)
        weight, bias = F.pad(last.weight, (0, 0, 0, missing)), F.pad(last.bias, (0, missing))
        return linear(h, weight, bias)[..., :outputs]


class Encoder(Transformer):
    """A transformer in which every token sees every other; vectors or tokens in, the same out.

    The rank paper's encoder has post-norm blocks with n(x) = s x / ||x||.

    >>> y, _ = Encoder(Shape(dim=12, depth=2, num_heads=3))(torch.zeros(2, 5, 12))
    >>> y.shape
    torch.Size([2, 5, 12])
    """


class Decoder(Transformer):
    """A causal transformer: tokens in, logits out.

    >>> shape = Shape(dim=12, depth=2, num_heads=3, causal=True, vocab_size=31)
    >>> logits, _ = Decoder(shape)(torch.zeros(2, 5, dtype=torch.long))
    >>> logits.shape
    torch.Size([2, 5, 31])
    """

    def __init__(
        self,
        shape: Shape,
        *,
        models: int | None = None,
        head_groups: HeadGroups = (),
        hard: bool = False,
        separate: bool = False,
        dropout: float = 0.0,
    ) -> None:
        if not shape.causal:
            raise UsageError("a Decoder needs a causal shape, this shape has causal=False")
        super().__init__(
            shape,
            models=models,
            head_groups=head_groups,
            hard=hard,
            separate=separate,
            dropout=dropout,
        )


def build(
    shape: Shape, *, models: int | None = None, head_groups: HeadGroups = ()
) -> Encoder | Decoder:
    """The module of a shape: a Decoder when it is causal, else an Encoder."""
    return (Decoder if shape.causal else Encoder)(shape, models=models, head_groups=head_groups)
