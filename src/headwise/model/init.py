"""How a model starts: every initialisation, in one table, `STARTS`.

library     what PyTorch's own modules start with: stacked query/key/value weights
            U(+-sqrt(6/(D + rows of one averaged module))), output projection and feed-forward
            U(+-1/sqrt(fan in)), attention biases 0, feed-forward biases U(+-1/sqrt(fan in)),
            additive positions N(0, 1), concatenated and room U(-1, 1)
published   the rank paper's: library, but every layer starts as a copy of the first, and additive
            positions have mean -1
original    the very weights that the rank paper's code starts from, whatever the seed
normal      GPT-2's: N(0, 0.02), projections back into the residual N(0, 0.02/sqrt(2 depth)),
            biases 0, positions N(0, 0.02)
spectral    normal, and to every head's queries, keys and values rows of the identity are added,
            head h those from h rank on: the fixed term of spectral conditioning, which without
            weight decay is a start
orthogonal  normal, but every head's queries and keys are drawn with orthonormal rows, and its
            values are rows of the identity

Under each of them gains of norms are 1, tables of tokens N(0, 0.02), and the maps that read vectors
in and out U(+-1/sqrt(fan in)), biases too (original: as the paper's code makes them).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor, nn

from headwise.errors import UsageError, nearest
from headwise.model.attention import Attention
from headwise.model.layers import Norm
from headwise.model.linear import LINEARS, AnyLinear
from headwise.model.transformer import Block, Decoder, Encoder, build
from headwise.shape import Shape, beyond_plain

ORIGINAL_SEED = 613  # of every run of the rank paper


def initialise(model: Encoder | Decoder, scheme: str, generator: Generator) -> None:
    """Draw every parameter of one model (no model axis), in the order of its layers."""
    if scheme not in STARTS:
        raise UsageError(f"unknown init {scheme!r}; {nearest(scheme, STARTS)}")
    with torch.no_grad():
        # Separate projections start as their rows of the one matrix do.
        one = build(model.shape) if _blocks(model)[0].attention.separate else model
        _reset(one)
        STARTS[scheme](one, generator)
        if one is not model:
            model.load_state_dict(one.state_dict())


def fresh(shape: Shape, scheme: str, generators: Sequence[Generator]) -> Encoder | Decoder:
    """One module of as many models as generators, model m drawn from generators[m] alone."""
    with torch.random.fork_rng(devices=[]):  # what `build` draws is overwritten
        # One single model is drawn anew from each generator and copied into its place on the model
        # axis. So the weights of a model do not depend on the others.
        ensemble, one = build(shape, models=len(generators)), build(shape)
    for m, generator in enumerate(generators):
        initialise(one, scheme, generator)
        with torch.no_grad():
            for target, source in zip(ensemble.parameters(), one.parameters(), strict=True):
                target[m].copy_(source)
    return ensemble


# ---- the schemes


def _library(model: Encoder | Decoder, generator: Generator) -> None:
    for block in _blocks(model):
        _library_block(block, model.shape, generator)
    _draw_ends(model, generator)
    _library_positions(model, 0.0, generator)


def _published(model: Encoder | Decoder, generator: Generator) -> None:
    for block in _blocks(model):  # all are drawn, so that what follows is that of library
        _library_block(block, model.shape, generator)
    _copy_first(model)
    _draw_ends(model, generator)
    _library_positions(model, -1.0, generator)


def _normal(model: Encoder | Decoder, generator: Generator) -> None:
    for block in _blocks(model):
        _normal_block(block, model.shape, generator)
    _draw_ends(model, generator)
    _normal_positions(model, generator)


def _spectral(model: Encoder | Decoder, generator: Generator) -> None:
    for block in _blocks(model):
        _normal_block(block, model.shape, generator)
        weights, identity = _heads_and_identity(block, model.shape, "spectral")
        weights += identity
    _draw_ends(model, generator)
    _normal_positions(model, generator)


def _orthogonal(model: Encoder | Decoder, generator: Generator) -> None:
    for block in _blocks(model):
        _normal_block(block, model.shape, generator)
        weights, identity = _heads_and_identity(block, model.shape, "orthogonal")
        for projection in weights[:2]:
            for head in projection:
                nn.init.orthogonal_(head, generator=generator)
        weights[2] = identity
    _draw_ends(model, generator)
    _normal_positions(model, generator)


def _original(model: Encoder | Decoder, _: Generator) -> None:
    """What PyTorch's modules draw in the order in which the rank paper's code makes them. Heads do
    not matter: all ranks start alike."""
    # The paper's weights follow from one seed, so tensors are drawn in its order and sizes, also
    # those that are never used.
    s, feed = model.shape, _blocks(model)[0].feed
    if feed is None or not _is_rank_papers(s):
        raise UsageError(
            "init original needs one of the rank paper's encoders, as paper_shape makes them; "
            "choices for this shape: library, published"
        )
    generator = torch.Generator().manual_seed(ORIGINAL_SEED)
    D, first = s.dim, _blocks(model)[0]

    def drawn(bound: float, *size: int) -> Tensor:
        return torch.empty(size).uniform_(-bound, bound, generator=generator)

    def module() -> tuple[Tensor, Tensor]:
        out, _ = drawn(D**-0.5, D, D), drawn(D**-0.5, D)  # a bias that is then set to 0
        return drawn(math.sqrt(6 / (4 * D)), 3, D, D), out

    # The paper's order: an attention module, the feed-forward, then the averaged attention modules.
    module()  # one that is never used
    for part in (feed.up, feed.down):
        _uniform_linear(part, generator)
    modules = [module() for _ in range(s.average)]
    # Averaged modules lie side by side: their rows for queries, keys and values (3, average D, D),
    # their columns for the output.
    first.attention.qkv.weight.copy_(torch.cat([qkv for qkv, _ in modules], 1).flatten(0, 1))
    first.attention.out.weight.copy_(torch.cat([out for _, out in modules], 1))
    _copy_first(model)
    if model.positions is not None and s.positions == "additive":
        table = torch.empty(D, s.num_positions).normal_(-1.0, 1.0, generator=generator)
        model.positions.copy_(table.mT)
    elif model.positions is not None:
        model.positions.copy_(drawn(1.0, s.position_dim, s.num_positions).mT)


STARTS: dict[str, Callable[[Encoder | Decoder, Generator], None]] = {
    "library": _library,
    "published": _published,
    "original": _original,
    "normal": _normal,
    "spectral": _spectral,
    "orthogonal": _orthogonal,
}


# ---- what they share


def _blocks(model: Encoder | Decoder) -> list[Block]:
    return list(model.blocks)  # type: ignore[arg-type]


def _reset(model: Encoder | Decoder) -> None:
    """Gains 1 and biases 0, also when the model was trained before."""
    for module in model.modules():
        if isinstance(module, Norm) and module.weight is not None:
            module.weight.fill_(1.0)
        if isinstance(module, (Norm, *LINEARS)) and module.bias is not None:
            module.bias.zero_()
        if isinstance(module, Attention) and module.out_bias is not None:
            module.out_bias.zero_()


def _copy_first(model: Encoder | Decoder) -> None:
    """Every layer as a copy of the first."""
    if not model.shape.uniform:
        raise UsageError(
            "init published copies the first layer, so it needs layers of equal sizes, this shape "
            f"has layers={model.shape.layers!r}"
        )
    first, *rest = _blocks(model)
    for block in rest:
        block.load_state_dict(first.state_dict())


def _uniform(tensor: Tensor | None, bound: float, generator: Generator) -> None:
    if tensor is not None:
        tensor.uniform_(-bound, bound, generator=generator)


def _uniform_linear(part: AnyLinear, generator: Generator) -> None:
    """Weights and biases U(+-1/sqrt(fan in))."""
    bound = part.weight.shape[-1] ** -0.5
    _uniform(part.weight, bound, generator)
    _uniform(part.bias, bound, generator)


def _library_block(block: Block, shape: Shape, generator: Generator) -> None:
    attention = block.attention
    # Queries, keys and values are drawn as one stacked matrix of an averaged module; a latent's
    # maps likewise.
    for name, part in attention.named_children():
        if isinstance(part, LINEARS) and name != "out":
            rows, inputs = part.weight.shape
            _uniform(part.weight, math.sqrt(6 / (inputs + rows / shape.average)), generator)
    # The output projection of one averaged module reads its share of the heads.
    fan_in = attention.out.weight.shape[-1] / shape.average
    _uniform(attention.out.weight, fan_in**-0.5, generator)
    if block.feed is not None:
        for part in (block.feed.up, block.feed.down):
            _uniform_linear(part, generator)


def _normal_block(block: Block, shape: Shape, generator: Generator) -> None:
    # Depth adds 2 depth projections into the residual; each is drawn smaller by the root of that
    # number, so that the sum keeps its size.
    into_residual = [block.attention.out]
    if block.feed is not None:
        into_residual.append(block.feed.down)
    for part in block.modules():
        if isinstance(part, LINEARS):
            smaller = math.sqrt(2 * shape.depth) if any(part is p for p in into_residual) else 1.0
            part.weight.normal_(0.0, 0.02 / smaller, generator=generator)


def _heads_and_identity(block: Block, shape: Shape, scheme: str) -> tuple[Tensor, Tensor]:
    """A block's query, key and value weights (3, H, R, D), and of the identity of width D the rows
    (H, R, D): head h has those from h R on, around the end."""
    if special := beyond_plain(shape):
        raise UsageError(f"init {scheme} needs plain heads, this shape has {special}")
    H, R, D = shape.num_heads, shape.head_dim, shape.dim
    if shape.latent or shape.num_kv_heads != H or shape.v_head_dim != R or R > D:
        raise UsageError(
            f"init {scheme} needs plain heads of at most the model's rank, this shape has rank "
            f"{R}, value width {shape.v_head_dim}, dim {D}, {H} heads, {shape.num_kv_heads} KV "
            f"heads, kv_lora_rank {shape.kv_lora_rank}"
        )
    weights = block.attention.qkv.weight.view(3, H, R, D)
    rows = torch.arange(H * R, device=weights.device).view(H, R) % D
    return weights, torch.eye(D, dtype=weights.dtype, device=weights.device)[rows]


def _draw_ends(model: Encoder | Decoder, generator: Generator) -> None:
    """The maps that read vectors in and out, and the tables of tokens."""
    for end in (model.read_in, model.read_out):
        if end is not None:
            _uniform_linear(end, generator)
    for table in (model.embedding, model.head):
        if table is not None:
            table.normal_(0.0, 0.02, generator=generator)


def _library_positions(model: Encoder | Decoder, mean: float, generator: Generator) -> None:
    if model.positions is not None and model.shape.positions == "additive":
        model.positions.normal_(mean, 1.0, generator=generator)
    elif model.positions is not None:
        model.positions.uniform_(-1.0, 1.0, generator=generator)


def _normal_positions(model: Encoder | Decoder, generator: Generator) -> None:
    if model.positions is not None:
        model.positions.normal_(0.0, 0.02, generator=generator)


def _is_rank_papers(s: Shape) -> bool:
    """Whether this is an encoder of the rank paper: post-norm with the scalar norm, ReLU, biases
    everywhere, and heads that cut the width of each averaged module whole."""
    if s.positions == "room" or s.dim % s.head_dim:
        return False
    return s == Shape(
        dim=s.dim,
        depth=s.depth,
        num_heads=s.average * (s.dim // s.head_dim),
        head_dim=s.head_dim,
        average=s.average,
        ffn_dim=s.ffn_dim,
        activation="relu",
        norm="scalar",
        norm_at="post",
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
        positions=s.positions,
        num_positions=s.position_rows,
        position_dim=s.position_dim,
    )
