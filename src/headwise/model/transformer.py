"""Shape -> module: `Encoder`, `Decoder`, and every initialisation.

With `models` = M a module holds M independent models: each parameter and each input has a leading
model axis, and one forward pass runs them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import UsageError, nearest
from headwise.kernels import embed_readout
from headwise.model import INITS
from headwise.model.attention import Attention, Linear, Norm, Turns, drawn, linear, turns_of
from headwise.model.cache import Cache, LayerCache
from headwise.shape import WIDENING, Shape

Splits = Sequence[tuple[int, Shape]]


class FeedForward(nn.Module):
    """W_2 act(W_1 x), or W_2 (act(W_g x) * W_1 x) when gated."""

    def __init__(self, shape: Shape, models: int | None = None) -> None:
        super().__init__()
        self.activation, self.width = shape.activation, shape.ffn_dim
        self.up = Linear(
            shape.dim, shape.ffn_dim * (2 if shape.gated else 1), shape.ffn_bias, models
        )
        self.down = Linear(shape.ffn_dim, shape.dim, shape.ffn_bias, models)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self._activate(self.up(x)))

    def _activate(self, hidden: Tensor) -> Tensor:
        match self.activation:
            case "relu":
                return F.relu(hidden, inplace=True)
            case "relu2":
                return F.relu(hidden).square()
            case "gelu":
                return F.gelu(hidden)
        gate, up = hidden.split(self.width, -1)
        return (
            F.silu(gate) if self.activation == "swiglu" else F.gelu(gate, approximate="tanh")
        ) * up


class Block(nn.Module):
    """One layer: attention and feed-forward with skips, norms where `Shape.norm_at` puts them."""

    def __init__(
        self,
        shape: Shape,
        layer: int,
        models: int | None = None,
        splits: Splits = (),
        hard: bool = False,
    ) -> None:
        super().__init__()
        self.place = shape.norm_at

        def norm() -> Norm:
            return Norm(shape.norm, shape.dim, models)

        self.attention = Attention(shape, layer=layer, models=models, splits=splits, hard=hard)
        self.norm1 = norm()
        self.feed = FeedForward(shape, models) if shape.ffn_dim else None
        sandwich = shape.norm_at == "sandwich"
        self.norm2 = norm() if self.feed is not None and shape.norm_at != "parallel" else None
        self.after1 = norm() if sandwich else None
        self.after2 = norm() if sandwich and self.feed is not None else None

    def forward(
        self, x: Tensor, keep: bool = False, cache: LayerCache | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        out: dict[str, Tensor] = {}

        def attention(z: Tensor) -> Tensor:
            if not keep:
                return self.attention(z, cache=cache)
            y, kept = self.attention(z, keep=True)
            out.update(kept, attention=y)
            return y

        feed = self.feed or torch.zeros_like
        norm2 = self.norm2 or nn.Identity()
        match self.place:
            case "post":
                x = self.norm1(x + attention(x))
                x = norm2(x + feed(x)) if self.feed else x
            case "pre":
                x = x + attention(self.norm1(x))
                x = x + feed(norm2(x)) if self.feed else x
            case "parallel":
                z = self.norm1(x)
                x = x + attention(z) + feed(z) if self.feed else x + attention(z)
            case "sandwich":
                after1, after2 = self.after1 or nn.Identity(), self.after2 or nn.Identity()
                x = x + after1(attention(self.norm1(x)))
                x = x + after2(feed(norm2(x))) if self.feed else x
        if keep:
            out["residual"] = x
        return x, out


class _Stack(nn.Module):
    def __init__(
        self, shape: Shape, *, models: int | None = None, splits: Splits = (), hard: bool = False
    ) -> None:
        super().__init__()
        if shape.extras:
            names = ", ".join(name for name, _ in shape.extras)
            raise UsageError(
                "a model with parts outside the stack can be costed but not built, got extras "
                f"{names}"
            )
        lead = () if models is None else (models,)
        self.shape, self.models = shape, models
        self.embedding = (
            nn.Parameter(drawn(0.02, *lead, shape.vocab_size, shape.dim))
            if shape.vocab_size
            else None
        )
        self.read_in = (
            Linear(shape.input_dim, shape.dim - shape.position_dim, True, models)
            if shape.input_dim
            else None
        )
        width = shape.position_dim or shape.dim
        self.positions = (
            nn.Parameter(drawn(0.02, *lead, shape.position_rows, width))
            if shape.position_rows
            else None
        )
        self.blocks = nn.ModuleList(
            Block(shape, i, models, splits, hard) for i in range(shape.depth)
        )
        self.final_norm = Norm(shape.norm, shape.dim, models) if shape.norm_at != "post" else None
        own_head = shape.vocab_size and not shape.tied and not shape.output_dim
        self.head = (
            nn.Parameter(drawn(0.02, *lead, shape.vocab_size, shape.dim)) if own_head else None
        )
        self.read_out = (
            Linear(shape.dim, shape.output_dim, True, models) if shape.output_dim else None
        )
        self.turns: Turns | None = None

    def forward(self, x: Tensor, keep: bool = False) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
        """Outputs, and with `keep` every layer's intermediates: out["layer 0"]["weights"]."""
        out: dict[str, dict[str, Tensor]] = {}
        h = self.enter(x)
        turns = self._turns(h)
        for i, block in enumerate(self.blocks):
            attention: Any = block.attention
            attention.turns = turns  # made once for all blocks
            h, kept = block(h, keep)
            attention.turns = None
            if keep:
                out[f"layer {i}"] = kept
        return self.leave(h), out

    def _turns(self, h: Tensor) -> Turns | None:
        s, known = self.shape, self.turns
        exact = torch.promote_types(h.dtype, torch.float32)
        if known is not None and (*known[0].shape, known[0].device, known[0].dtype) == (
            h.shape[-2], s.qk_rope_head_dim // 2, h.device, exact
        ):  # fmt: skip
            return known
        return (
            turns_of(h.shape[-2], s.qk_rope_head_dim, s.rope_theta, h)
            if s.qk_rope_head_dim
            else None
        )

    def prepare(self, tokens: int) -> None:
        """Make the rotary positions of sequences of one length once for all: compiled, every use
        would compute them anew."""
        s, like = self.shape, next(self.parameters())
        self.turns = (
            turns_of(tokens, s.qk_rope_head_dim, s.rope_theta, like) if s.qk_rope_head_dim else None
        )

    def follow(self, x: Tensor, cache: Cache) -> Tensor:
        """The last block's output for inputs that follow those in the cache, and join it."""
        if self.models is not None:
            raise UsageError(f"a cache is for one model, got {self.models} stacked")
        cache.check(self.shape, len(x))
        h = self.enter(x, cache.length)
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            h, _ = block(h, cache=layer)
        return h

    def enter(self, x: Tensor, start: int = 0) -> Tensor:
        """What the first block gets; the first input stands at position `start`."""
        first, table = self.read_in, self.positions
        if first is None or table is None or start or not self._narrow(x):
            return self._position(self._embed(x), start)
        assert first.bias is not None
        return embed_readout.enter(x, first.weight, first.bias, table)

    def leave(self, h: Tensor) -> Tensor:
        """What becomes of the last block's output."""
        norm, last = self.final_norm, self.read_out
        if norm is None:
            return self._unembed(h)
        if last is None or self.shape.output_dim > 1 or norm.kind != "layer" or not norm.narrow(h):
            return self._unembed(norm(h))
        assert norm.weight is not None
        assert norm.bias is not None
        assert last.bias is not None
        return embed_readout.leave(h, norm.weight, norm.bias, last.weight, last.bias)

    def _narrow(self, x: Tensor) -> bool:
        """Whether these are few and short vectors for a stack on a GPU, read in with added
        positions."""
        s = self.shape
        if (
            x.ndim != 4
            or x.requires_grad
            or s.positions != "additive"
            or s.dim > embed_readout.WIDTH
            or not embed_readout.possible(x)
        ):
            return False
        alike = x.shape[0] == self.models and x.shape[-1] == s.input_dim
        return (
            alike
            and s.input_dim <= embed_readout.INPUTS
            and x.shape[-2] <= min(embed_readout.TOKENS, s.num_positions)
        )

    def _embed(self, x: Tensor) -> Tensor:
        if self.embedding is None:
            return x if self.read_in is None else self.read_in(x)
        if self.models is None:
            return F.embedding(x, self.embedding)
        offset = torch.arange(self.models, device=x.device) * self.shape.vocab_size
        rows = x + offset.view(-1, *([1] * (x.ndim - 1)))
        return F.embedding(rows, self.embedding.flatten(0, 1))

    def _position(self, h: Tensor, start: int) -> Tensor:
        if self.positions is None:
            return h
        stop, table = start + h.shape[-2], self.positions.unsqueeze(-3)
        if self.shape.positions != "room":
            if stop > self.shape.num_positions:
                raise UsageError(
                    f"at most num_positions {self.shape.num_positions} tokens fit the position "
                    f"table, got {stop}"
                )
            table = table[..., start:stop, :]
        if self.shape.positions == "additive":
            return h + table
        return torch.cat((h, table.expand(*h.shape[:-1], self.shape.position_dim)), -1)

    def _unembed(self, h: Tensor) -> Tensor:
        if self.read_out is not None:
            return self._read_out(h, self.read_out)
        if self.embedding is None:
            return h
        table = self.embedding if self.head is None else self.head
        if self.models is None:
            return F.linear(h, table)
        return torch.bmm(h.flatten(1, -2), table.mT).unflatten(1, h.shape[1:-1])

    def _read_out(self, h: Tensor, last: Linear) -> Tensor:
        """Few outputs are computed among sixteen: products with one column take a path of their
        own, whose bits depend on the models beside it."""
        more = -self.shape.output_dim % 16
        if self.models is None or not more or last.bias is None:
            return last(h)
        return linear(h, F.pad(last.weight, (0, 0, 0, more)), F.pad(last.bias, (0, more)))[
            ..., : self.shape.output_dim
        ]


class Encoder(_Stack):
    """A stack in which every token sees every other; vectors or tokens in, the same out.

    The rank paper's encoder is `Encoder(paper_shape(...))`: layers x <- n(x + A(x)), x <- n(x +
    MLP(x)) with n(x) = s x/||x||.

    >>> y, _ = Encoder(Shape(dim=12, depth=2, num_heads=3))(torch.zeros(2, 5, 12))
    >>> y.shape
    torch.Size([2, 5, 12])
    """


class Decoder(_Stack):
    """A causal stack in today's form: tokens in, logits out."""

    def __init__(
        self, shape: Shape, *, models: int | None = None, splits: Splits = (), hard: bool = False
    ) -> None:
        if not shape.causal:
            raise UsageError("a Decoder needs a causal shape, got causal False")
        super().__init__(shape, models=models, splits=splits, hard=hard)


def build(shape: Shape, *, models: int | None = None, splits: Splits = ()) -> Encoder | Decoder:
    """The module of a shape: a Decoder when it is causal, else an Encoder."""
    return (Decoder if shape.causal else Encoder)(shape, models=models, splits=splits)


def paper_shape(
    dim: int = 64,
    depth: int = 1,
    rank: int = 64,
    width: int = 1,
    ffn_dim: int = 2048,
    positions: str = "none",
    points: int = 16,
    position_dim: int = 64,
) -> Shape:
    """The rank paper's encoder: `width` modules of dim/rank heads, averaged.

    With concatenated positions or room the model is `position_dim` wider than the points.
    """
    wide = dim + (position_dim if positions in WIDENING else 0)
    for name, value, least in (("dim", dim, 2), ("width", width, 1)):
        if value < least:
            raise UsageError(f"{name} must be a whole number of at least {least}, got {value}")
    if rank < 1 or wide % rank:
        raise UsageError(f"rank must divide the width {wide}, got rank {rank}")
    return Shape(
        dim=wide,
        depth=depth,
        num_heads=width * (wide // rank),
        head_dim=rank,
        average=width,
        ffn_dim=ffn_dim,
        activation="relu",
        norm="scalar",
        norm_at="post",
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
        positions=positions,
        num_positions=0 if positions in ("none", "room") else points,
        position_dim=wide - dim,
    )


def initialise(model: Encoder | Decoder, scheme: str, generator: torch.Generator) -> None:
    """Draw every parameter of one model (no model axis), in the order of its layers; gains of norms
    are 1.

    library    what PyTorch's own modules start with: stacked query/key/value weights U(+-sqrt(6/(D + rows of
               one averaged module))), output projection and feed-forward U(+-1/sqrt(fan in)),
               attention biases 0, feed-forward biases U(+-1/sqrt(fan in)), additive positions N(0,
               1), concatenated and room U(-1, 1)
    published  the rank paper's: library, but every layer starts as a copy of the first, and additive
               positions have mean -1
    original   the very weights that the rank paper's code starts from, whatever the seed
    normal     GPT-2's: N(0, 0.02), projections back into the residual N(0, 0.02/sqrt(2 depth)), biases 0
    spectral   normal, and to every head's queries, keys and values the identity's rows are added, head h those from h rank on: the
               fixed term of spectral conditioning, which without weight decay is a start
    orthogonal normal, but every head's queries and keys are drawn with orthonormal rows and its
    values are the identity's rows

    The maps that read vectors in and out are U(+-1/sqrt(fan in)) under each, biases too.
    """
    if scheme not in INITS:
        raise UsageError(f"unknown init {scheme!r}; {nearest(scheme, INITS)}")
    shape = model.shape
    blocks: list[Block] = list(model.blocks)  # type: ignore[arg-type]
    with torch.no_grad():
        _reset(model)
        if scheme == "original":
            _original(model, blocks)
            return
        normal = scheme not in ("library", "published")
        for block in blocks:
            (_normal_block if normal else _library_block)(block, shape, generator)
            if scheme in ("spectral", "orthogonal"):
                _conditioned_block(block, shape, scheme, generator)
        if scheme == "published":
            for block in blocks[1:]:
                block.load_state_dict(blocks[0].state_dict())
        for end in (model.read_in, model.read_out):
            if end is not None:
                _uniform_linear(end, generator)
        for table in (model.embedding, model.head):
            if table is not None:
                table.normal_(0.0, 0.02, generator=generator)
        if model.positions is not None and normal:
            model.positions.normal_(0.0, 0.02, generator=generator)
        elif model.positions is not None and shape.positions == "additive":
            model.positions.normal_(
                -1.0 if scheme == "published" else 0.0, 1.0, generator=generator
            )
        elif model.positions is not None:
            model.positions.uniform_(-1.0, 1.0, generator=generator)


ORIGINAL = 613  # the seed of every run of the rank paper


def _original(model: Encoder | Decoder, blocks: list[Block]) -> None:
    """What PyTorch's modules draw in the order in which the rank paper's code makes them. Heads do
    not matter: all ranks start alike."""
    s, feed = model.shape, blocks[0].feed
    rest = s.average, s.ffn_dim, s.positions, s.num_positions, s.position_dim
    if (
        feed is None
        or s.positions == "room"
        or s.dim % s.head_dim
        or s != paper_shape(s.dim - s.position_dim, s.depth, s.head_dim, *rest)
    ):
        raise UsageError(
            "init original is for the rank paper's encoders, as models.paper_shape makes them; "
            "choices: library, published"
        )
    generator, D, first = torch.Generator().manual_seed(ORIGINAL), s.dim, blocks[0]

    def drawn(bound: float, *size: int) -> Tensor:
        return torch.empty(size).uniform_(-bound, bound, generator=generator)

    def module() -> tuple[Tensor, Tensor]:
        out, _ = drawn(D**-0.5, D, D), drawn(D**-0.5, D)  # a bias that is then set to 0
        return drawn(math.sqrt(6 / (4 * D)), 3, D, D), out

    module()  # one that is never used
    for part in (feed.up, feed.down):
        _uniform_linear(part, generator)
    modules = [module() for _ in range(s.average)]
    first.attention.qkv.weight.copy_(torch.cat([qkv for qkv, _ in modules], 1).flatten(0, 1))
    first.attention.out.weight.copy_(torch.cat([out for _, out in modules], 1))
    for block in blocks[1:]:
        block.load_state_dict(first.state_dict())
    if model.positions is not None and s.positions == "additive":
        model.positions.copy_(
            torch.empty(D, s.num_positions).normal_(-1.0, 1.0, generator=generator).mT
        )
    elif model.positions is not None:
        model.positions.copy_(drawn(1.0, s.position_dim, s.num_positions).mT)


def _reset(model: Encoder | Decoder) -> None:
    """Gains 1 and biases 0, also when the model was trained before."""
    for module in model.modules():
        if isinstance(module, Norm) and module.weight is not None:
            module.weight.fill_(1.0)
        for name in ("bias", "out_bias"):
            bias = getattr(module, name, None)
            if isinstance(bias, nn.Parameter):
                bias.zero_()


def _uniform(tensor: Tensor | None, bound: float, generator: torch.Generator) -> None:
    if tensor is not None:
        tensor.uniform_(-bound, bound, generator=generator)


def _uniform_linear(part: Linear, generator: torch.Generator) -> None:
    bound = part.weight.shape[-1] ** -0.5
    _uniform(part.weight, bound, generator)
    _uniform(part.bias, bound, generator)


def _library_block(block: Block, shape: Shape, generator: torch.Generator) -> None:
    attention = block.attention
    for name, part in attention.named_children():
        if isinstance(part, Linear) and name != "out":
            rows, inputs = part.weight.shape
            _uniform(part.weight, math.sqrt(6 / (inputs + rows / shape.average)), generator)
    _uniform(
        attention.out.weight,
        (shape.num_heads * shape.v_head_dim / shape.average) ** -0.5,
        generator,
    )
    if block.feed is not None:
        for part in (block.feed.up, block.feed.down):
            _uniform_linear(part, generator)


def _normal_block(block: Block, shape: Shape, generator: torch.Generator) -> None:
    back = [block.attention.out] + ([block.feed.down] if block.feed is not None else [])
    for part in block.modules():
        if isinstance(part, Linear):
            shrink = math.sqrt(2 * shape.depth) if any(part is b for b in back) else 1.0
            part.weight.normal_(0.0, 0.02 / shrink, generator=generator)


def _conditioned_block(block: Block, shape: Shape, scheme: str, generator: torch.Generator) -> None:
    H, R, D = shape.num_heads, shape.head_dim, shape.dim
    if shape.latent or shape.num_kv_heads != H or shape.v_head_dim != R or R > D:
        raise UsageError(
            f"init {scheme} is for plain heads of at most the model's rank, got rank {R}, dim "
            f"{D}, {shape.num_kv_heads} KV heads"
        )
    weights = block.attention.qkv.weight.view(3, H, R, D)
    rows = torch.arange(H * R, device=weights.device).view(H, R) % D
    identity = torch.eye(D, dtype=weights.dtype, device=weights.device)[rows]
    if scheme == "spectral":
        weights += identity
        return
    for score in weights[:2]:
        for head in score:
            nn.init.orthogonal_(head, generator=generator)
    weights[2] = identity


def fresh(
    shape: Shape, scheme: str, seeds: list[int], derive: Callable[[int], torch.Generator]
) -> Encoder | Decoder:
    """One module of len(seeds) models, model m drawn from derive(seeds[m]) alone."""
    with torch.random.fork_rng(
        devices=[]
    ):  # what a module starts with is drawn over; the caller's numbers stay theirs
        stacked, one = build(shape, models=len(seeds)), build(shape)
    for m, seed in enumerate(seeds):
        initialise(one, scheme, derive(seed))
        with torch.no_grad():
            for target, source in zip(stacked.parameters(), one.parameters(), strict=True):
                target[m].copy_(source)
    return stacked


def score_geometry(shape: Shape, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """What the trained heads' scores look like, a list of layers: the angle in degrees between
    W_Q^T W_K and the identity, and its norm over sqrt(dim), each as (least, lower quartile, median,
    upper quartile, largest) over the heads of a layer.

    For heads of full rank also with W_Q W_K^T, which is what the rank paper's code takes; the two
    agree when the product is a multiple of the identity. Empty for shapes whose queries and keys
    are not one projection each.
    """
    if shape.latent or shape.num_kv_heads != shape.num_heads or shape.depth < 1:
        return {}
    H, R, D = shape.num_heads, shape.head_dim, shape.dim
    found: dict[str, list[list[float]]] = {}
    for i in range(shape.depth):
        stacked = weights[f"blocks.{i}.attention.qkv.weight"].double()
        q, k = (stacked[j * H * R : (j + 1) * H * R].view(H, R, D) for j in (0, 1))
        trace = (q * k).sum((1, 2))
        forms = {"": ((q @ q.mT) * (k @ k.mT)).sum((1, 2)).sqrt()}
        if R == D:
            forms["_transposed"] = ((q.mT @ q) * (k.mT @ k)).sum((1, 2)).sqrt()
        for name, norm in forms.items():
            cosine = trace / (norm * math.sqrt(D)).clamp_min(torch.finfo(torch.float64).tiny)
            angle = torch.rad2deg(cosine.clamp(-1, 1).arccos())
            for what, values in (("angle", angle), ("norm", norm / math.sqrt(D))):
                found.setdefault(f"score_{what}{name}", []).append(_quartiles(values))
    return found


def _quartiles(values: Tensor) -> list[float]:
    at = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0], dtype=values.dtype)
    return [float(f"{v:.6g}") for v in torch.quantile(values, at).tolist()]
