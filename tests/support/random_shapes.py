"""Random shapes of every family."""

import random

from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.shape import (
    ACTIVATIONS,
    ATTN_GATES,
    NORM_PLACES,
    NORMS,
    QK_NORMS,
    ROPE_PLACES,
    Layer,
    Shape,
)

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
SHAPES = 200  # of each family


def flip(rng):
    return rng.random() < 0.5


def common(rng):
    """What every family chooses freely: depth, feed-forward, norms, biases."""
    return {
        "dim": rng.choice(PRIMES[4:]),
        "depth": rng.randint(1, 3),
        "ffn_dim": rng.choice((0, *PRIMES[5:])),
        "activation": rng.choice(ACTIVATIONS),
        "norm": rng.choice(NORMS),
        "norm_at": rng.choice(NORM_PLACES),
        "qkv_bias": flip(rng),
        "out_bias": flip(rng),
        "ffn_bias": flip(rng),
    }


def heads(rng, rotary=True):
    """Grouped heads of free rank and value width."""
    kv, rank = rng.choice((1, 2, 3)), 2 * rng.randint(1, 9)
    return {
        "num_heads": kv * rng.choice((1, 2, 5)),
        "num_kv_heads": kv,
        "head_dim": rank,
        "v_head_dim": rng.choice((rank, rng.randint(1, 19))),
        "qk_norm": rng.choice(QK_NORMS),
        "qk_rope_head_dim": rng.choice((0, rank, 2 * rng.randint(0, rank // 2))) if rotary else 0,
    }


def latent(rng):
    rank = 2 * rng.randint(1, 9)
    return {
        "num_heads": rng.choice((1, 2, 3, 5)),
        "head_dim": rank,
        "v_head_dim": rng.choice((rank, rng.randint(1, 19))),
        "kv_lora_rank": rng.choice(PRIMES),
        "qk_rope_head_dim": 2 * rng.randint(0, rank // 2),
        "qk_norm": rng.choice(("none", "free")),
    }


def outputs(rng, num_heads):
    """Gates on the heads' outputs, and outputs by groups of heads."""
    groups = rng.choice([n for n in (1, 2, 3, 5) if num_heads % n == 0])
    low = rng.choice(({}, {"o_lora_rank": rng.choice(PRIMES[:6]), "o_groups": groups}))
    return low | {"attn_gate": rng.choice(ATTN_GATES)}


def modern(rng):
    """Heads with all that came after the first shapes: keys that are the values, low-rank queries,
    rotary positions at either end."""
    fields = heads(rng) | {"rope_at": rng.choice(ROPE_PLACES), "q_lora_rank": rng.choice((0, 3, 7))}
    fields["rope_interleaved"] = fields["rope_at"] == "first"  # no draw: the shapes stay the same
    if flip(rng):
        fields |= {"shared_kv": True, "v_head_dim": fields["head_dim"]}
    return fields | outputs(rng, fields["num_heads"])


def layer(rng, base):
    """What one layer has that differs from the base's heads and feed-forward."""
    own = heads(rng, rotary=flip(rng))
    del own["qk_norm"]
    groups = base.get("o_groups", 1)
    own["num_heads"] *= groups
    own |= {"ffn_dim": rng.choice((0, *PRIMES[5:]))}
    if own["v_head_dim"] == own["head_dim"]:
        own["shared_kv"] = flip(rng)
    else:
        own["shared_kv"] = False
    return Layer(**own)


def by_layer(rng):
    fields = common(rng) | modern(rng) | {"depth": rng.randint(2, 5)}
    layers = tuple(layer(rng, fields) for _ in range(rng.randint(1, fields["depth"])))
    windows = tuple(rng.choice((0, 1, 3, 7)) for _ in range(rng.randint(1, fields["depth"])))
    return Shape(**fields, **tokens_in(rng), layers=layers, windows=windows, causal=True)


def tokens_in(rng):
    return {"vocab_size": rng.choice((41, 43, 47)), "tied": flip(rng)}


def read(rng):
    """Maps at either end or both, wide enough to be seen in every cost."""
    ends = rng.choice((("input_dim",), ("output_dim",), ("input_dim", "output_dim")))
    return {name: rng.choice((1, 3, 53, 101, 211)) for name in ends}


def read_out(rng):
    """One map at the end, of tokens that have positions or none."""
    return {
        "output_dim": rng.choice((1, 3, 53, 101, 211)),
        "positions": rng.choice(("none", "additive")),
        "num_positions": 13,
    }


def placed(rng):
    return rng.choice(
        ({}, {"positions": "additive"}, {"positions": "concatenated", "position_dim": 3})
    ) | {"num_positions": 13}


def averaged(rng, fields):
    """Now and then some of the heads form separate modules whose outputs are averaged."""
    return fields | {
        "average": rng.choice([n for n in (1, 2, 3, 5) if fields["num_heads"] % n == 0])
    }


def paper(rng):
    dim, positions = (
        rng.choice((8, 12, 20)),
        rng.choice(("none", "additive", "concatenated", "room")),
    )
    wide = dim + (64 if positions in ("concatenated", "room") else 0)
    rank = rng.choice([r for r in range(1, wide + 1) if wide % r == 0])
    return paper_shape(
        dim,
        rng.randint(1, 3),
        rank,
        rng.choice((1, 2, 3)),
        rng.choice(PRIMES),
        positions,
        rng.choice(PRIMES),
    )


FAMILIES = {
    "paper": paper,
    "encoder": lambda rng: Shape(
        **common(rng), **averaged(rng, heads(rng)), **(tokens_in(rng) if flip(rng) else {})
    ),
    "decoder": lambda rng: Shape(**common(rng), **heads(rng), **tokens_in(rng), causal=True),
    "latent": lambda rng: Shape(**common(rng), **latent(rng), **tokens_in(rng), causal=True),
    "latent queries": lambda rng: Shape(
        **common(rng), **latent(rng), q_lora_rank=rng.choice(PRIMES), causal=flip(rng)
    ),
    "windows": lambda rng: (
        lambda s: Shape(
            **s,
            **heads(rng),
            causal=flip(rng),
            windows=tuple(rng.choice((0, 1, 3, 7)) for _ in range(s["depth"])),
        )
    )(common(rng)),
    "additive": lambda rng: Shape(
        **common(rng),
        **heads(rng),
        **tokens_in(rng),
        causal=flip(rng),
        positions="additive",
        num_positions=rng.choice(PRIMES),
    ),
    "concatenated": lambda rng: Shape(
        **common(rng),
        **heads(rng),
        positions="concatenated",
        num_positions=rng.choice(PRIMES),
        position_dim=rng.choice((1, 3, 7)),
    ),
    "room": lambda rng: Shape(
        **common(rng), **heads(rng), positions="room", position_dim=rng.choice((1, 3, 7))
    ),
    "token classifier": lambda rng: Shape(
        **common(rng), **heads(rng), **tokens_in(rng), causal=flip(rng), **read_out(rng)
    ),
    "modern": lambda rng: Shape(**common(rng), **modern(rng), **tokens_in(rng), causal=True),
    "modern encoder": lambda rng: Shape(**common(rng), **modern(rng), causal=flip(rng)),
    "latent with gates": lambda rng: (
        lambda heads: Shape(
            **common(rng),
            **heads,
            **outputs(rng, heads["num_heads"]),
            **tokens_in(rng),
            causal=True,
        )
    )(latent(rng)),
    "by layer": by_layer,
    "read in and out": lambda rng: Shape(
        **common(rng), **heads(rng), causal=flip(rng), **read(rng), **placed(rng)
    ),
}


def shapes(family, count=SHAPES):
    rng = random.Random(f"{family} shapes")
    return [FAMILIES[family](rng) for _ in range(count)]
