"""One value of a public config: read, checked, with the defaults of its family. Standard library
only.

Each function takes the config and a key, and refuses a value that breaks the key's rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headwise.errors import LARGEST, MOST_LAYERS, UsageError, check_most, nearest, shown

Config = Mapping[str, Any]
Fields = dict[str, Any]

_GELUS = (
    "gelu",
    "gelu_accurate",
    "gelu_fast",
    "gelu_new",
    "gelu_python",
    "gelu_python_tanh",
    "gelu_pytorch_tanh",
    "quick_gelu",
)
PLAIN = {"relu": "relu", "relu2": "relu2", **dict.fromkeys(_GELUS, "gelu")}
GATED = {"silu": "swiglu", "swish": "swiglu", **dict.fromkeys(_GELUS, "geglu")}
LAYER_TYPES = ("full_attention", "sliding_attention")
NANOCHAT_KEYS = (
    "n_layer",
    "n_head",
    "n_kv_head",
    "n_embd",
    "sequence_len",
    "vocab_size",
    "window_pattern",
)


def is_nanochat(config: Config) -> bool:
    return all(key in config for key in NANOCHAT_KEYS)


def whole(c: Config, name: str, default: Any = None, least: int = 1) -> int:
    value = c.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name} must be a whole number of at least {least}, got {shown(value)}")
    check_most(name, value)
    return value


def optional(c: Config, name: str, default: int | None = None) -> int | None:
    return None if c.get(name, default) is None else whole(c, name, default)


def table_of(c: Config, name: str) -> Config:
    """A mapping inside the config; empty where it is left out."""
    value = {} if c.get(name) is None else c[name]
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} must be a mapping, got {shown(value)}")
    return value


def number(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= LARGEST:
        raise UsageError(f"{name} must be a positive number up to {LARGEST:g}, got {shown(value)}")
    return value


def flag(c: Config, name: str, default: bool = False) -> bool:
    value = default if c.get(name) is None else c[name]
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be true or false, got {shown(value)}")
    return value


def pair(c: Config, name: str, default: int) -> tuple[int, int]:
    value = c.get(name, default)
    sides = value if isinstance(value, list | tuple) else (value, value)
    if len(sides) != 2:
        raise UsageError(f"{name} must be one whole number or two, got {shown(value)}")
    return whole({name: sides[0]}, name), whole({name: sides[1]}, name)


def rope_setting(c: Config, name: str, default: float) -> float:
    """A rotary setting, where transformers 5 keeps it (by layer type or not) or where its older
    versions did."""
    for key in ("rope_scaling", "rope_parameters"):
        table = c.get(key) or {}
        table = (table.get("full_attention") or table) if isinstance(table, Mapping) else table
        if not isinstance(table, Mapping):
            raise UsageError(f"{key} must be a mapping, got {shown(c[key])}")
        if table.get(name) is not None:
            return number(name, table[name])
    return number(name, c.get(name, default))


def activation(c: Config, name: str, default: str, table: dict[str, str]) -> str:
    value, kind = c.get(name, default), "gated" if table is GATED else "plain"
    if not isinstance(value, str) or value not in table:
        raise UsageError(
            f"{name} {shown(value)} cannot be expressed in a {kind} feed-forward; "
            f"{nearest(str(value), table)}"
        )
    return table[value]


def head_dim_of(c: Config, dim: str = "hidden_size", heads: str = "num_attention_heads") -> int:
    if c.get("head_dim") is not None:
        return whole(c, "head_dim")
    if whole(c, dim) % whole(c, heads):
        raise UsageError(
            f"{dim} must be a multiple of {heads} where head_dim is not given, got {dim} "
            f"{c[dim]}, {heads} {c[heads]}"
        )
    return c[dim] // c[heads]


def kinds_of(
    c: Config, default: Callable[[int], str], known: tuple[str, ...], name: str = "layer_types"
) -> list[str]:
    """What each layer is, as the config lists it or as its family has it."""
    depth = layers(c, "num_hidden_layers")
    kinds = c.get(name) or [default(i) for i in range(depth)]
    if not isinstance(kinds, list | tuple) or len(kinds) != depth:
        raise UsageError(
            f"{name} must name each of num_hidden_layers {depth} layers, got {shown(kinds)}"
        )
    for kind in kinds:
        if not isinstance(kind, str) or kind not in known:
            raise UsageError(f"unknown layer type {shown(kind)}; {nearest(str(kind), known)}")
    return list(kinds)


def windows_of(c: Config, slides: Callable[[int], bool]) -> tuple[int, ...]:
    """The windows of the layers, cut to the shortest run that tiles them."""
    kinds = kinds_of(c, lambda i: LAYER_TYPES[slides(i)], LAYER_TYPES)
    return tiled([whole(c, "sliding_window") if kind == LAYER_TYPES[1] else 0 for kind in kinds])


def layers(c: Config, name: str) -> int:
    """A number of layers, each of which may be listed."""
    depth = whole(c, name)
    check_most(name, depth, MOST_LAYERS)
    return depth


def tiled(values: Sequence[Any]) -> tuple[Any, ...]:
    """The shortest run that tiles a sequence, the last tile maybe cut off."""
    # border[i] is how long a beginning of values[: i + 1] is also its end (Knuth, Morris, Pratt):
    # in time that grows with the length alone.
    border, length = [0], 0
    for value in values[1:]:
        while length and value != values[length]:
            length = border[length - 1]
        length += value == values[length]
        border.append(length)
    return tuple(values[: len(values) - border[-1]])
