"""nanochat's models: the port in transformers, and nanochat's own config. Standard library only."""

from __future__ import annotations

from headwise.configs.defaults import ALIASES
from headwise.configs.stacks import attention_bias, decoder
from headwise.configs.values import (
    NANOCHAT_KEYS,
    PLAIN,
    Config,
    Fields,
    activation,
    head_dim_of,
    layers,
    number,
    optional,
    whole,
)
from headwise.errors import UsageError, shown


def nanochat(c: Config) -> Fields:
    """The port in transformers."""
    fields = (
        decoder({**c, "hidden_act": "silu"})
        | attention_bias(c)
        | {"norm": "rms-free", "qk_norm": "free"}
    )
    return fields | {"activation": activation(c, "hidden_act", "relu2", PLAIN)}


def nanochat_own(c: Config) -> Fields:
    """nanochat's GPTConfig: value embeddings in every other layer, the last one included.

    `head_dim`, `v_head_dim` and `logit_scale` are what `headwise.integrations.nanochat` adds to it.
    """
    head_dim, depth, kv_heads = (
        head_dim_of(c, "n_embd", "n_head"),
        layers(c, "n_layer"),
        whole(c, "n_kv_head"),
    )
    width, scale = optional(c, "v_head_dim") or head_dim, c.get("logit_scale")
    pattern = str(c["window_pattern"]).upper()
    if not pattern or set(pattern) - set("SL"):
        raise UsageError(
            "window_pattern must be made of S (short) and L (long), got "
            f"{shown(c['window_pattern'])}"
        )
    short = (
        -(-whole(c, "sequence_len") // 512) * 128 + 1
    )  # a quarter, rounded up to whole tiles, and the query's own key
    windows = [short if pattern[layer % len(pattern)] == "S" else 0 for layer in range(depth)]
    vocab, valued = -(-whole(c, "vocab_size") // 64) * 64, (depth + 1) // 2
    extras = [
        ("value embeddings", valued * vocab * kv_heads * width),
        ("value gates", valued * 12 * kv_heads),
    ]
    extras += [("residual scalars", 2 * depth), ("smear", 24 + 1), ("backout", 1)]
    sizes = {ALIASES.get(key, key): c[key] for key in NANOCHAT_KEYS}
    fields = nanochat(
        {
            **sizes,
            "vocab_size": vocab,
            "head_dim": head_dim,
        }
    )
    fields |= {
        "rope_theta": 1e5,
        "logit_scale": 1.2 * 1.2 * head_dim**-0.5
        if scale is None
        else number("logit_scale", scale),
    }
    return fields | {"v_head_dim": width, "windows": (*windows[:-1], 0), "extras": tuple(extras)}
