"""Which tensor is which part of a layer's attention: by the names that code bases use, or by a
mapping file.

A part is one of PARTS. Names are looked up by what stands behind the layer's number, so one line
here covers every family that names its parts alike, whatever stands before.
"""

from __future__ import annotations

import re
import string
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwise.errors import UsageError, nearest, one_line, shown
from headwise.files import NotReadableError, read_file

MATRICES = (
    *("q", "k", "v", "o", "qkv", "kv"),
    *("q_a", "q_b", "kv_a", "kv_b", "o_a"),  # through a latent: down, up; outputs in groups
)
GAINS = ("q_norm", "k_norm", "q_a_norm", "kv_a_norm")
BIASES = tuple(f"{part}_bias" for part in (*MATRICES, *GAINS))
PARTS = (*MATRICES, *GAINS, *BIASES)

_SEPARATE = [
    # before, then the names of queries, keys, values and outputs
    ("self_attn", "q_proj k_proj v_proj", "o_proj out_proj dense"),
    ("attention", "q_proj k_proj v_proj", "o_proj out_proj"),
    ("attn", "q_proj k_proj v_proj", "out_proj o_proj"),
    ("attn.attention", "q_proj k_proj v_proj", "out_proj"),
    ("attention.self", "query key value", ""),
    ("attention.attention", "query key value", ""),
    ("attention", "query key value", "output.dense dense"),
    ("attention", "q_lin k_lin v_lin", "out_lin"),
    ("attention", "wq wk wv", "wo"),
    ("attn", "c_q c_k c_v", "c_proj"),
    ("attn", "q k v", "proj o"),
    ("SelfAttention", "q k v", "o"),
]
_FUSED = [
    ("attn", "c_attn", "c_proj"),
    ("attn", "qkv", "proj"),
    ("attn", "qkv_proj", "out_proj"),
    ("attn", "Wqkv", "out_proj Wo"),
    ("self_attn", "qkv_proj", "o_proj"),
    ("self_attn", "query_key_value", "dense"),
    ("self_attention", "query_key_value", "dense"),
    ("attention", "query_key_value", "dense"),
    ("attention", "qkv", "out"),  # ours
    ("attention", "wqkv", "wo"),
]
_LATENT = {
    "self_attn.q_a_proj": "q_a",
    "self_attn.q_b_proj": "q_b",
    "self_attn.kv_a_proj_with_mqa": "kv_a",
    "self_attn.kv_b_proj": "kv_b",
    "self_attn.q_a_layernorm": "q_a_norm",
    "self_attn.kv_a_layernorm": "kv_a_norm",
    # ours
    "attention.q_down": "q_a",
    "attention.q": "q_b",
    "attention.kv_down": "kv_a",
    "attention.q_down_norm": "q_a_norm",
    "attention.kv_norm": "kv_a_norm",
    "attention.out_down": "o_a",
    "attention.kv": "kv",
}
_NORMS = ("norm", "_layernorm", "_ln")
_GGUF = {"attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_output": "o", "attn_qkv": "qkv"}
_GGUF |= {"attn_q_norm": "q_norm", "attn_k_norm": "k_norm", "attn_q_a": "q_a", "attn_q_b": "q_b"}
_GGUF |= {"attn_kv_a_mqa": "kv_a", "attn_kv_b": "kv_b", "attn_q_a_norm": "q_a_norm"}
_GGUF |= {"attn_kv_a_norm": "kv_a_norm"}


def _table() -> dict[str, str]:
    """What stands behind a layer's number -> which part it is."""
    found: dict[str, str] = {}
    for before, three, out in _SEPARATE:
        found |= {f"{before}.{name}": p for name, p in zip(three.split(), "qkv", strict=True)}
        found |= {f"{before}.{name}": "o" for name in out.split()}
    found |= {f"{before}.{name}": "qkv" for before, name, _ in _FUSED}
    found |= {f"{before}.{name}": "o" for before, _, out in _FUSED for name in out.split()}
    for before in ("self_attn", "attention", "attn"):
        for ending in ("q_norm", "q_layernorm", "query_layernorm", "q_ln"):
            found[f"{before}.{ending}"] = "q_norm"
            found[f"{before}.{ending.replace('q', 'k', 1).replace('kuery', 'key')}"] = "k_norm"
    found |= _LATENT | {"attention.output.dense": "o"}
    table = {}
    for name, part in found.items():
        table[f"{name}.weight"], table[f"{name}.bias"] = part, f"{part}_bias"
    for before in ("self_attn", "attn"):  # torch.nn.MultiheadAttention
        table[f"{before}.in_proj_weight"], table[f"{before}.in_proj_bias"] = "qkv", "qkv_bias"
    for name, part in _GGUF.items():
        table[f"{name}.weight"], table[f"{name}.bias"] = part, f"{part}_bias"
    return table


TABLE = _table()
_LAYER = re.compile(r"^(.*?)(?:^|[./])(\d{1,6})[./](.+)$")


@dataclass(frozen=True)
class Named:
    """The tensors of one layer's attention: part -> name."""

    index: int
    parts: Mapping[str, str]

    @property
    def complete(self) -> bool:
        """Whether scores can be made of it."""
        has = self.parts.keys()
        queries = has & {"q", "qkv", "q_b"}
        return bool(queries) and bool(has & {"k", "qkv", "kv", "kv_b"} or "q" in has)


def part_of(name: str) -> tuple[str, int, str] | None:
    """What stands before, the layer's number and the part, where a name is one of an attention.

    >>> part_of("model.layers.3.self_attn.q_proj.weight")
    ('model.layers', 3, 'q')
    """
    found = _LAYER.match(name)
    if not found:
        return None
    rest = found[3].split(".")
    for skip in range(len(rest) - 1):
        part = TABLE.get(".".join(rest[skip:]))
        if part:
            inner = re.sub(r"\d+", "0", ".".join(rest[:skip]))  # such as albert_layers.0
            if "cross" in inner or "encoder_attn" in inner or "expert" in inner:
                return None
            return found[1], int(found[2]), part
    return None


def named_layers(
    names: Iterable[str], prefix: str | None = None, depth: int | None = None
) -> tuple[list[Named], list[str]]:
    """The layers with attention, in order, and the prefixes of other stacks that were found.

    Of several stacks, such as text and vision, the one that `prefix` names is taken, or one of this
    depth, or the deepest; of equals rather text.
    """
    stacks: dict[str, dict[int, dict[str, str]]] = {}
    for name in names:
        found = part_of(name)
        if found:
            before, index, part = found
            stacks.setdefault(before, {}).setdefault(index, {}).setdefault(part, name)
    found_layers = {
        before: [layer for i in sorted(rows) if (layer := Named(i, rows[i])).complete]
        for before, rows in stacks.items()
    }
    found_layers = {before: layers for before, layers in found_layers.items() if layers}
    if not found_layers:
        return [], []
    if prefix is None:

        def rank(one: str) -> tuple[bool, bool, int]:
            count = len(found_layers[one])
            return count == depth, not re.search("vis|image|audio", one), count

        prefix = max(found_layers, key=rank)
    elif prefix not in found_layers:
        raise UsageError(f"no stack {shown(prefix)}; {nearest(prefix, found_layers)}")
    return found_layers[prefix], [one for one in found_layers if one != prefix]


# ---- mapping files


@dataclass(frozen=True)
class Mapped:
    """What a mapping file says: where each part of layer {layer} is, and the sizes."""

    parts: Mapping[str, str]
    sizes: Mapping[str, Any] = field(default_factory=dict)


SIZES = {
    "num_heads": int,
    "num_kv_heads": int,
    "rope_dim": int,
    "rope_theta": (int, float),
    "rope_interleaved": bool,
    "transposed": bool,
    "fused": str,
    "qk_norm": str,
    "layers": int,
}


def read_mapping(path: str | Path) -> Mapped:
    """A mapping file in TOML: names of tensors by part, {layer} in the place of its number, and
    sizes.

        num_heads = 8
        q = "encoder.layers.{layer}.self_attn.q_proj.weight"
        ...
    """
    try:
        found = tomllib.loads(read_file(path, 1 << 20, links=True).decode())
    except (NotReadableError, ValueError, RecursionError) as error:
        raise UsageError(f"{str(path)!r} is no mapping file: {one_line(error)}") from None
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r} ({error.strerror})") from None
    parts, sizes = {}, {}
    for key, value in found.items():
        if key in SIZES:
            kind = SIZES[key]
            whole = isinstance(value, bool) == (kind is bool)
            if not isinstance(value, kind) or not whole:
                raise UsageError(f"{key} in a mapping cannot be {shown(value)}")
            sizes[key] = value
        elif key in PARTS:
            _check_template(key, value)
            parts[key] = value
        else:
            raise UsageError(f"unknown key {shown(key)}; {nearest(key, (*SIZES, *PARTS))}")
    if "num_heads" not in sizes:
        raise UsageError("a mapping must say num_heads")
    if sizes.get("fused", "concat") not in ("concat", "grouped"):
        raise UsageError(f"fused must be concat or grouped, got {shown(sizes['fused'])}")
    if sizes.get("qk_norm", "none") not in ("none", "rms", "layer"):
        raise UsageError(f"qk_norm must be none, rms or layer, got {shown(sizes['qk_norm'])}")
    if not parts.keys() & {"q", "qkv", "q_b"}:
        raise UsageError("a mapping must name the tensors of queries: q, qkv or q_b")
    return Mapped(parts, sizes)


def _check_template(key: str, value: Any) -> None:
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(value) if name is not None]
    except (ValueError, TypeError, AttributeError):
        fields = ["?"]
    if any(name != "layer" for name in fields):
        raise UsageError(f"{key} must be a name of a tensor with {{layer}} in it, got "
                         f"{shown(value)}")  # fmt: skip


def mapped_layers(mapped: Mapped, names: Iterable[str]) -> list[Named]:
    """The layers that a mapping finds."""
    there = set(names)
    first = next(iter(mapped.parts.values()))
    most = mapped.sizes.get("layers", 10_000 if "{layer}" in first else 1)
    found = []
    for index in range(min(most, 10_000)):
        parts = {part: t.replace("{layer}", str(index)) for part, t in mapped.parts.items()}
        parts = {part: name for part, name in parts.items() if name in there}
        layer = Named(index, parts)
        if layer.complete:
            found.append(layer)
        elif found or index:  # counted from 0 or from 1
            break
    return found
