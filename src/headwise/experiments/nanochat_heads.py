"""The nanochat question: fewer, larger heads, queries wider than values, fewer KV heads, a latent,
at one exact budget of arithmetic?

    headwise run nanochat_heads                                             quick: width 64, bytes of a generated text; 2 CPU cores, minutes
    headwise run nanochat_heads --preset paper --set source=FOLDER          width 512, 8 layers; one GPU, seven seconds a run

A nanochat-style decoder (RMS norm, rotary positions, norms of queries and keys without gains,
squared ReLU, untied head) of one width and depth. Every arm sees the same tokens and costs the same
FLOPs a token: what its attention does not use goes into the feed-forward, whole numbers, the rest
is told. Under the norm of queries and keys scores grow with the root of the rank, so every arm has
the same largest score; `logit` makes it larger, `scale` lets it grow, so that random scores spread
alike at every rank. Rates are tuned per arm, on a seed that is not counted: the same values for
all, and on from the smallest or the largest where that is best. Expected of the quick preset: two
heads of 32 and four of 16 do best, no difference found between them, one of 64 and eight of 8 are
0.01 bits worse than the best; of the paper preset: heads of 64 and 32 are 0.03 and 0.06 bits worse
than of 128, of 256 and 512 no difference found; queries and keys of rank 256 0.015 better, two KV
heads for four 0.015 worse, a latent of a third of the width 0.04 (`docs/nanochat.md`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from headwise.errors import UsageError
from headwise.experiments import base
from headwise.experiments.common import (
    against,
    check_lists,
    counted,
    edges,
    name_of,
    next_round,
    shape_in,
    tuned,
    unused,
)
from headwise.lm.spec import Pretraining
from headwise.rows import Row
from headwise.shape import Shape
from headwise.stats import difference

QUESTION = "At one budget of arithmetic, which heads does a language model want?"
COLUMNS = (
    ("family", "varied"),
    ("arm", "arm"),
    ("heads", "heads"),
    ("kv", "KV heads"),
    ("rank", "rank"),
    ("width", "value width"),
    ("latent", "latent"),
    ("ffn", "feed-forward"),
    ("params", "parameters"),
    ("off", "off budget"),
    ("kv_bytes", "cache bytes a token"),
    ("lr", "tuned rate"),
    ("held_out", "bits per byte"),
    ("n", "n"),
    ("diverged", "diverged"),
    ("change", "against base"),
    ("repeats", "recall in text"),
    ("repeats_change", "against base"),
    ("recall", "recall of random pairs"),
    ("tokens_per_second", "tokens/s"),
)
CAPTION = (
    "Held-out bits per byte, mean over seeds at the tuned learning rate with its 95 % interval; "
    "every arm has the FLOPs of the base. "
    "Recall in text: how often the same model has a token right whose pair with the one before is "
    "rare but occurred before in the window; "
    "of random pairs: how often, shown pairs of random tokens, it tells the second of a pair from "
    "the first."
)
FAMILIES = ("split", "logit", "scale", "unnormed", "query", "kv", "latent", "mla")


@dataclass(frozen=True, kw_only=True)
class Settings(base.Settings):
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
        """Settings that would have no effect, and why."""
        of = {
            "ranks": ("split",),
            "controls": ("logit", "scale", "unnormed"),
            "logits": ("logit",),
            "queries": ("query",),
            "kv_heads": ("kv",),
            "latents": ("latent", "mla"),
        }
        return unused(of, self.families, "families")

    def __post_init__(self) -> None:
        check_lists(
            self,
            ("ranks", "controls", "queries", "kv_heads", "latents"),
            ("families", "logits", "lrs"),
        )
        if min(self.logits) <= self.max_logit:
            raise UsageError(
                f"logits must be above max_logit {self.max_logit:g}, got {min(self.logits):g}"
            )
        for family in self.families:
            if family not in FAMILIES:
                raise UsageError(f"unknown family {family!r}; choices: {', '.join(FAMILIES)}")
        for rank in (
            self.rank,
            *self.ranks,
            *(self.controls if {"logit", "scale", "unnormed"} & set(self.families) else ()),
        ):
            if rank < 1 or self.dim % rank or rank % 2:
                raise UsageError(f"ranks must be even and divide dim {self.dim}, got {rank}")
        if bad := [n for n in self.kv_heads if self.dim // self.rank % n]:
            raise UsageError(
                f"kv_heads must divide the base's {self.dim // self.rank} heads, got {bad[0]}"
            )


PRESETS = {
    "quick": Settings(
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
    "paper": Settings(
        dim=512,
        depth=8,
        rank=128,
        families=FAMILIES,
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


# ---- arms at one budget


def base_of(s: Settings) -> Shape:
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


def arms(s: Settings) -> dict[tuple[str, str], Shape]:
    """Every shape by what is varied and how, each with the feed-forward that makes its FLOPs the
    base's."""
    base, out = base_of(s), dict[tuple[str, str], Shape]()
    heads = base.num_heads
    for family in s.families:
        match family:
            case "split":
                made = {name_of(shape): shape for r in s.ranks for shape in [_cut(base, r)]}
            case "logit":
                cuts = [
                    _cut(base, r).replace(max_logit=c)
                    for c in s.logits
                    for r in (s.rank, *s.controls)
                ]
                made = {
                    name_of(base): base,
                    **{f"{name_of(shape)}, to {shape.max_logit:g}": shape for shape in cuts},
                }
            case "scale" | "unnormed":
                norm = {} if family == "scale" else {"qk_norm": "none"}
                made = {
                    name_of(shape): shape
                    for r in (s.rank, *s.controls)
                    for shape in [_cut(base, r).replace(max_logit=None, **norm)]
                }
            case "query":
                made = {
                    f"{heads} x {r} / {s.rank}": base.replace(
                        head_dim=r, v_head_dim=s.rank, qk_rope_head_dim=r
                    )
                    for r in (s.rank, *s.queries)
                }
            case "kv":
                made = {f"{n} KV heads": base.replace(num_kv_heads=n) for n in (heads, *s.kv_heads)}
            case _:
                bare = (
                    {} if family == "latent" else {"qk_norm": "none", "max_logit": None}
                )  # mla: as published
                plain = base.replace(qk_rope_head_dim=s.rank // 2, **bare)
                made = {
                    "no latent": plain,
                    **{f"latent {c}": plain.replace(kv_lora_rank=c) for c in s.latents},
                }
        for arm, shape in made.items():
            out[family, arm] = at_budget(shape, base, s.length)
    return out


def _cut(base: Shape, rank: int) -> Shape:
    """The same width in heads of another rank."""
    heads = base.dim // rank
    return base.replace(
        num_heads=heads, num_kv_heads=heads, head_dim=rank, v_head_dim=rank, qk_rope_head_dim=rank
    )


def at_budget(shape: Shape, base: Shape, tokens: int) -> Shape:
    """The shape with the feed-forward whose FLOPs come nearest to the base's."""
    target = base.flops(tokens)
    one, two = (shape.replace(ffn_dim=f).flops(tokens) for f in (1, 2))
    width = round(1 + (target - one) / (two - one))
    if width < 1:
        raise UsageError(
            f"attention alone costs more than the base, by {one / target - 1:.1%}: "
            f"{shape.num_heads} heads of rank {shape.head_dim}"
        )
    return shape.replace(ffn_dim=width)


def _run(s: Settings, shape: Shape, lr: float, seed: int) -> Pretraining:
    return Pretraining(
        shape=shape,
        steps=s.steps,
        batch_tokens=s.batch_tokens,
        length=s.length,
        source=s.source,
        tokenizer=s.tokenizer,
        optimiser=s.optimiser,
        lr=lr,
        precision=s.precision,
        eval_tokens=s.eval_tokens,
        evals=1,
        seed=seed,
    )


def runs(settings: Settings) -> list[Pretraining]:
    """The tuning: every arm at every rate, one seed."""
    shapes = dict.fromkeys(arms(settings).values())
    return [_run(settings, shape, lr, 0) for shape in shapes for lr in settings.lrs]


def then(settings: Settings, rows: list[Row]) -> list[Pretraining]:
    """The tuning goes on for an arm whose best rate is the last to a side; for the others the
    measurement."""
    return next_round(
        runs(settings), [_judged(row) for row in rows], settings.seeds, settings.further
    )


# ---- points


def summary(rows: list[Row]) -> list[dict[str, Any]]:
    """One point per arm and what it varies: bits per byte, recall, and the difference from the base
    with its interval. Arms that leave the norm of queries and keys out, or let scores grow, are
    compared with the base's heads treated alike."""
    by_shape: dict[Shape, list[Row]] = {}
    for row in rows:
        by_shape.setdefault(shape_in(row), []).append(_judged(row))
    if not by_shape:
        return []
    base = _base(set(by_shape))
    out: list[dict[str, Any]] = [
        {"family": family, "rows": same, **_point(shape, same, base, by_shape)}
        for shape, same in by_shape.items()
        for family in _families(shape, base)
    ]  # fmt: skip
    arms_of, told = Counter(p["family"] for p in out), dict[str, dict[str, Any]]()
    for point in out:
        alike = (point["heads"], point["kv"], point["rank"], point["latent"]) == (
            base.num_heads,
            base.num_heads,
            base.head_dim,
            None,
        )
        if alike and point["logit"] in (None, base.max_logit):
            told[point["family"]] = point
            point["base"] = True
    for point in out:
        like = told.get(point["family"], point)
        for name, key in (("", "held_out"), ("repeats_", "repeats")):
            gap, change = (
                against(point["rows"], like["rows"], key) if like is not point else (None, None)
            )
            point |= {f"{name}gap": gap and (gap.mean, gap.low, gap.high), f"{name}change": change}
    for point in out:
        del point["rows"]
    out = [p for p in out if arms_of[p["family"]] > 1 or len(by_shape) == 1]
    return sorted(
        out,
        key=lambda p: (
            FAMILIES.index(p["family"]),
            p["logit"] or 0,
            -p["rank"],
            -p["kv"],
            p["latent"] or 0,
        ),
    )


def _point(
    shape: Shape, same: list[Row], base: Shape, by_shape: dict[Shape, list[Row]]
) -> dict[str, Any]:
    kept = counted(same)
    speeds = [r["tokens_per_second"] for r in kept if r["tokens_per_second"]]
    recalls, repeated = (
        [r[name] for r in kept if r.get(name) is not None] for name in ("recall", "repeats")
    )
    return {
        "arm": name_of(shape)
        + (
            f", to {shape.max_logit:g}"
            if (shape.max_logit or base.max_logit) != base.max_logit
            else ""
        ),
        "logit": shape.max_logit,
        "heads": shape.num_heads,
        "kv": shape.num_kv_heads,
        "rank": shape.head_dim,
        "width": shape.v_head_dim,
        "latent": shape.kv_lora_rank or None,
        "ffn": shape.ffn_dim,
        "params": shape.params,
        "off": same[0]["flops"] / by_shape[base][0]["flops"] - 1,
        "kv_bytes": shape.kv_bytes(),
        **tuned(same),
        "recall": sum(recalls) / len(recalls) if recalls else None,
        "repeats": sum(repeated) / len(repeated) if repeated else None,
        "tokens_per_second": max(speeds) if speeds else None,
    }


def _judged(row: Row) -> Row:
    """The row judged by its bits per byte."""
    return {**row, "held_out": row["bits_per_byte"]}


def _base(shapes: set[Shape]) -> Shape:
    """Of the cuts of the whole width the one whose heads most other arms have; of several that of
    the smallest of the largest scores, then the one nearest to a quarter of the width."""
    plain = [
        s
        for s in shapes
        if s.num_heads * s.head_dim == s.dim and s.max_logit and s.num_kv_heads == s.num_heads
    ]
    plain = [s for s in plain if s.qk_rope_head_dim == s.head_dim]

    def fits(base: Shape) -> tuple[bool, bool, int, float, int]:
        alike = [
            s for s in shapes if (s.num_heads, s.v_head_dim) == (base.num_heads, base.v_head_dim)
        ]
        return (
            base.latent,
            base.max_logit is None,
            -len(alike),
            base.max_logit or 0.0,
            abs(4 * base.head_dim - base.dim),
        )

    return min(plain or shapes, key=fits)


def _families(shape: Shape, base: Shape) -> list[str]:
    """What an arm varies about the base; the base is at the end of each but those that leave the
    norm of queries and keys out."""
    if shape.qk_norm == "none":
        return ["mla" if shape.latent or shape.qk_rope_head_dim != shape.head_dim else "unnormed"]
    if shape.latent or shape.qk_rope_head_dim != shape.head_dim:
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


def headline(points: list[dict[str, Any]]) -> list[str]:
    """For each thing that is varied: its arms against the base."""
    lines = []
    for family in FAMILIES:
        known = [p for p in points if p["family"] == family and p["held_out"] is not None]
        if known:
            told = [
                f"{p['arm']} {p['held_out']:.4f}" + (f" ({p['change']})" if p["change"] else "")
                for p in known
            ]
            lines.append(f"{family}: " + "; ".join(told))
    return (
        lines
        + _verdict([p for p in points if p["family"] == "split" and p["values"]])
        + _edges(points)
    )


def _verdict(arms: list[dict[str, Any]]) -> list[str]:
    """Which cut of the width is best, and which cannot be told from it."""
    if len(arms) < 2 or any(len(p["values"]) < 2 for p in arms):
        return []
    best = min(arms, key=lambda p: p["held_out"])
    gaps = [(p["arm"], difference(p["values"], best["values"])) for p in arms if p is not best]
    alike = [
        arm
        for arm, gap in gaps
        if gap.low is not None and gap.high is not None and gap.low <= 0 <= gap.high
    ]
    return [
        f"fewest bits per byte of the cuts: {best['arm']}"
        + (f"; no difference found from it: {', '.join(alike)}" if alike else "")
    ]


def _edges(points: list[dict[str, Any]]) -> list[str]:
    arms = {
        (p["arm"], p["family"] if p["logit"] is None or p["family"] == "latent" else ""): p
        for p in points
    }  # the base is in several families
    return edges(list(arms.values()), "arms")


def figure(points: list[dict[str, Any]]) -> dict[str, Any]:
    """Every arm's difference from the base with its interval, a colour for what it varies; bits per
    byte, and recall in text."""
    panels, base = [], next((p["arm"] for p in points if p.get("base")), "the base")
    for gap, title, label in (
        ("gap", "held-out bits per byte, less is better", f"more than {base} of its kind"),
        (
            "repeats_gap",
            "recall in text, more is better",
            f"more often right than {base} of its kind",
        ),
    ):
        known = [p for p in points if p[gap] is not None]
        if known:
            rows = [
                {
                    "name": p["arm"] + _KIND.get(p["family"], ""),
                    "label": _MEANT[p["family"]],
                    "colour": FAMILIES.index(p["family"]),
                    **dict(zip(("mean", "low", "high"), p[gap], strict=True)),
                }
                for p in known
            ]
            panels.append({"title": title, "x_label": label, "rows": rows})
    return {
        "kind": "ranges",
        "title": "Heads of a language model at one budget of arithmetic",
        "columns": len(panels) or 1,
        "panels": panels,
    }


_KIND = {"scale": ", growing", "unnormed": ", not normed", "mla": ", not normed"}
_MEANT = {
    "split": "heads x rank",
    "logit": "larger scores",
    "scale": "scores grow with the rank",
    "unnormed": "queries and keys not normed",
    "query": "query/key rank / value width",
    "kv": "KV heads",
    "latent": "latent width",
    "mla": "latent width, as published",
}
