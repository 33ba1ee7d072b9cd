"""The arms of `nanochat_heads`: what is varied about a nanochat-style decoder, every shape at the
FLOPs of the base."""

from __future__ import annotations

from dataclasses import dataclass

from headwise.errors import UsageError, nearest
from headwise.experiments.base import Settings
from headwise.experiments.settings import check_lists, without_effect
from headwise.experiments.shapes import heads_in_words
from headwise.shape import Shape

FAMILIES = {  # what is varied, and its words in the figure
    "split": "heads x rank",
    "logit": "larger scores, against the usual",
    "scale": "one spread of scores at all ranks",
    "unnormed": "queries and keys not normed",
    "query": "query/key rank / value width",
    "kv": "KV heads",
    "latent": "latent width",
    "mla": "latent width, as published",
}


@dataclass(frozen=True, kw_only=True)
class NanochatSettings(Settings):
    """The base, what is varied about it, and how it is trained."""

    dim: int
    depth: int
    rank: int  # of the base's heads
    families: tuple[str, ...]
    ranks: tuple[int, ...]  # split: heads are dim / rank
    controls: tuple[int, ...]  # the same for logit, scale and unnormed, beside the base's
    logits: tuple[float, ...]  # other largest scores than max_logit
    queries: tuple[int, ...]  # query/key rank of the base's heads, whose values keep their width
    kv_heads: tuple[int, ...]
    latents: tuple[int, ...]  # kv_lora_rank
    max_logit: float
    source: str = ""
    tokenizer: str = ""
    vocab: int = 272  # ids of the tables; at least the tokenizer's
    length: int
    batch_tokens: int
    steps: int
    lrs: tuple[float, ...]
    further: int  # rates that an arm may try beyond them, where its best is the last to a side
    optimiser: str
    precision: str
    eval_tokens: int
    seeds: int

    def idle(self) -> dict[str, str]:
        """Sizes of families that are not among those chosen."""
        of = {
            "ranks": ("split",),
            "controls": ("logit", "scale", "unnormed"),
            "logits": ("logit",),
            "queries": ("query",),
            "kv_heads": ("kv",),
            "latents": ("latent", "mla"),
        }
        return without_effect(of, self.families, "families")

    def __post_init__(self) -> None:
        numbers = ("ranks", "controls", "queries", "kv_heads", "latents")
        check_lists(self, numbers, ("families", "logits", "lrs"))
        if min(self.logits) <= self.max_logit:
            raise UsageError(
                f"logits must be above max_logit {self.max_logit:g}, got {min(self.logits):g}"
            )
        for family in self.families:
            if family not in FAMILIES:
                raise UsageError(f"unknown family {family!r}; {nearest(family, FAMILIES)}")
        # Rotary positions turn pairs of coordinates, so every rank is even.
        controlled = {"logit", "scale", "unnormed"} & set(self.families)
        for rank in (self.rank, *self.ranks, *(self.controls if controlled else ())):
            if rank < 1 or self.dim % rank or rank % 2:
                raise UsageError(f"ranks must be even and divide dim {self.dim}, got {rank}")
        heads = self.dim // self.rank
        if bad := [n for n in self.kv_heads if heads % n]:
            raise UsageError(f"kv_heads must divide the base's {heads} heads, got {bad[0]}")


PRESETS = {
    "quick": NanochatSettings(
        dim=64,
        depth=2,
        rank=16,
        families=("split", "kv"),
        ranks=(8, 16, 32, 64),
        controls=(8, 64),
        logits=(12.0,),
        queries=(8, 32),
        kv_heads=(1, 2),
        latents=(16, 32),
        max_logit=6.0,
        length=64,
        batch_tokens=1024,
        steps=150,
        lrs=(0.005, 0.01, 0.02),
        further=3,
        optimiser="muon",
        precision="fp32",
        eval_tokens=16_384,
        seeds=3,
    ),
    "paper": NanochatSettings(
        dim=512,
        depth=8,
        rank=128,
        families=tuple(FAMILIES),
        ranks=(32, 64, 128, 256, 512),
        controls=(32, 512),
        logits=(32.6, 65.2),
        queries=(64, 256),
        kv_heads=(1, 2),
        latents=(64, 170, 512),
        max_logit=16.3,
        length=512,
        batch_tokens=16_384,
        steps=500,
        lrs=(0.001, 0.002, 0.004),
        further=3,
        optimiser="muon",
        precision="bf16",
        eval_tokens=1 << 19,
        seeds=3,
    ),
}


# ---- settings -> shapes


def base_of(s: NanochatSettings) -> Shape:
    """nanochat's form: heads of one rank over the whole width."""
    return Shape(
        dim=s.dim,
        depth=s.depth,
        num_heads=s.dim // s.rank,
        head_dim=s.rank,
        qk_rope_head_dim=s.rank,
        ffn_dim=4 * s.dim,
        activation="relu2",
        causal=True,
        norm="rms",
        qk_norm="free",
        max_logit=s.max_logit,
        vocab_size=s.vocab,
        tied=False,
    )


def arms(s: NanochatSettings) -> dict[tuple[str, str], Shape]:
    """Every shape by what is varied and how, each with the feed-forward that makes its FLOPs the
    base's."""
    base = base_of(s)
    return {
        (family, arm): at_budget(shape, base, s.length)
        for family in s.families
        for arm, shape in _variants(s, family, base).items()
    }


def _variants(s: NanochatSettings, family: str, base: Shape) -> dict[str, Shape]:
    """The base varied in one thing, by name, with its feed-forward."""
    controls = (s.rank, *s.controls)
    match family:
        case "split":
            return _by_heads([_cut(base, rank) for rank in s.ranks])
        case "logit":
            out = {heads_in_words(base): base}
            for logit in s.logits:
                for rank in controls:
                    shape = _cut(base, rank).replace(max_logit=logit)
                    out[f"{heads_in_words(shape)}, to {logit:g}"] = shape
            return out
        case "scale":
            return _by_heads([_cut(base, rank).replace(max_logit=None) for rank in controls])
        case "unnormed":
            cuts = [_cut(base, rank) for rank in controls]
            return _by_heads([cut.replace(max_logit=None, qk_norm="none") for cut in cuts])
        case "query":
            return {
                f"{base.num_heads} x {rank} / {s.rank}": base.replace(
                    head_dim=rank, v_head_dim=s.rank, qk_rope_head_dim=rank
                )
                for rank in (s.rank, *s.queries)
            }
        case "kv":
            counts = (base.num_heads, *s.kv_heads)
            return {f"{count} KV heads": base.replace(num_kv_heads=count) for count in counts}
        case _:  # latent, and mla: as published, without the norm of queries and keys
            plain = base.replace(qk_rope_head_dim=s.rank // 2)
            if family == "mla":
                plain = plain.replace(qk_norm="none", max_logit=None)
            latents = {f"latent {c}": plain.replace(kv_lora_rank=c) for c in s.latents}
            return {"no latent": plain, **latents}


def _by_heads(shapes: list[Shape]) -> dict[str, Shape]:
    return {heads_in_words(shape): shape for shape in shapes}


def _cut(base: Shape, rank: int) -> Shape:
    """The same width in heads of another rank."""
    heads = base.dim // rank
    return base.replace(
        num_heads=heads, num_kv_heads=heads, head_dim=rank, v_head_dim=rank, qk_rope_head_dim=rank
    )


def at_budget(shape: Shape, base: Shape, tokens: int) -> Shape:
    """The shape with the feed-forward whose FLOPs come nearest to the base's."""
    # FLOPs grow linearly with the feed-forward from width 1 on, so two widths give the line.
    target = base.flops(tokens)
    least = shape.replace(ffn_dim=1).flops(tokens)
    step = shape.replace(ffn_dim=2).flops(tokens) - least
    ffn_dim = round(1 + (target - least) / step)
    if ffn_dim < 1:
        raise UsageError(
            f"attention alone costs more than the base, by {least / target - 1:.1%}: "
            f"{shape.num_heads} heads of rank {shape.head_dim}"
        )
    return shape.replace(ffn_dim=ffn_dim)


# ---- shapes -> the base, and what each varies


def base_among(shapes: set[Shape]) -> Shape:
    """Of the cuts of the whole width the one whose heads most other arms have; of several that of
    the smallest of the largest scores, then the one nearest to a quarter of the width."""
    # Rows do not say which shape was the base. It is a plain cut of the width: all coordinates
    # rotated, no shared KV heads, a largest score.
    cuts = [
        shape
        for shape in shapes
        if shape.num_heads * shape.head_dim == shape.dim
        and shape.max_logit
        and shape.num_kv_heads == shape.num_heads
        and shape.qk_rope_head_dim == shape.head_dim
    ]

    def order(shape: Shape) -> tuple[bool, bool, int, float, int]:
        # Families but split, logit, scale and unnormed keep the base's heads, so most shapes have
        # them.
        heads = (shape.num_heads, shape.v_head_dim)
        sharing = sum((other.num_heads, other.v_head_dim) == heads for other in shapes)
        from_quarter = abs(4 * shape.head_dim - shape.dim)
        logit = shape.max_logit or 0.0
        return shape.latent, shape.max_logit is None, -sharing, logit, from_quarter

    return min(cuts or shapes, key=order)


def families_of(shape: Shape, base: Shape) -> list[str]:
    """What an arm varies about the base. The base itself is in every family that keeps its norm of
    queries and keys and its positions."""
    # From the most special to the least: each test may rely on the ones before it.
    half_rotated = shape.qk_rope_head_dim != shape.head_dim
    if shape.qk_norm == "none":
        return ["mla" if shape.latent or half_rotated else "unnormed"]
    if shape.latent or half_rotated:
        return ["latent"]
    if shape == base and shape.max_logit:
        return ["split", "logit", "query", "kv"]
    if shape.num_kv_heads != shape.num_heads:
        return ["kv"]
    if shape.max_logit and shape.max_logit != base.max_logit:
        return ["logit"]
    if shape.head_dim != shape.v_head_dim:
        return ["query"]
    return ["split"] if shape.max_logit else ["scale"]


def has_bases_heads(shape: Shape, base: Shape) -> bool:
    """Whether an arm has the base's heads and largest score, or scores that may grow: its family is
    compared with it."""
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    return (
        heads == (base.num_heads, base.num_heads, base.head_dim)
        and not shape.latent
        and shape.max_logit in (None, base.max_logit)
    )
