"""From a config, or from sizes that were given, to the layout of each layer."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from headwise.configs.families import INTERLEAVED
from headwise.configs.values import is_nanochat
from headwise.configs.wrappers import inner_config, is_wrapper
from headwise.diagnose.layouts import Layout
from headwise.diagnose.names import Named
from headwise.diagnose.sources_gguf import PERMUTED
from headwise.errors import UsageError, shown
from headwise.shape import Shape

# Families whose queries, keys and values lie side by side per KV head.
GROUPED = ("bloom", "falcon", "gpt_neox", "gpt_bigcode", "persimmon")
# Families whose gain is 1 + weight, and those whose norm of queries and keys is a layer norm.
ONE_PLUS = (
    *("gemma3_text", "gemma3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
    *("step3p5", "step3p7_text"),
)
GATED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # queries and their gate in one
LAYER_NORMS = ("cohere", "cohere2", "persimmon", "phi", "stablelm")
OURS = "headwise"

_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_head", "kv_n_heads")


def family_of(config: Mapping[str, Any] | None, shape: Shape | None) -> str:
    """What kind of model it is: its text part's model_type, or OURS."""
    if config is None:
        return OURS if shape is not None else "unknown"
    if is_wrapper(config):
        with contextlib.suppress(UsageError):
            config = inner_config(config, "text")
    name = config.get("model_type")
    if isinstance(name, str):
        return name[:60]
    return "nanochat" if is_nanochat(config) else "unknown"


def layouts_of(
    layers: list[Named],
    family: str,
    config: Mapping[str, Any] | None,
    shape: Shape | None,
    num_heads: int | None,
    num_kv_heads: int | None,
    kind: str,
) -> tuple[list[Named], list[Layout], list[str]]:
    """The layers with those that have no keys of their own completed, and a layout for each."""
    notes: list[str] = []
    if num_heads is not None or shape is None:
        base, notes = _plain(config, num_heads, num_kv_heads)
        layouts = [base] * len(layers)
    else:
        layouts = _by_shape(layers, shape)
    change: dict[str, Any] = {"rope_back": family == "nanochat"}
    if family in INTERLEAVED and (config or {}).get("rope_interleave") is not False:
        change["rope_interleaved"] = True
    if family in GATED and shape is not None and shape.attn_gate == "value":
        change["gated"] = True
    fused = next((n.parts["qkv"] for n in layers if "qkv" in n.parts), "")
    if family == "codegen":
        change["fused"] = "codegen"
    elif (family in GROUPED and kind != "GGUF") or (config is None and "query_key_value" in fused):
        change["fused"] = "grouped"
    if family in ONE_PLUS and kind != "GGUF":
        change["gain_offset"] = 1.0
    normed = any("q_norm" in layer.parts for layer in layers)
    if normed:
        change["qk_norm"] = "layer" if family in LAYER_NORMS else "rms"
    if kind == "GGUF":
        change |= {"rope_interleaved": False, "permuted": family in PERMUTED}
    if family == "gpt2" and kind != "GGUF":
        change["transposed"] = True
    layouts = [dataclasses.replace(layout, **change) for layout in layouts]
    return _with_keys(layers, layouts, shape), layouts, notes


def _by_shape(layers: list[Named], shape: Shape) -> list[Layout]:
    """A layout per layer, from the shape's own layer. Of hybrids the shape has only those with
    attention."""
    if len(layers) == shape.depth:
        places = list(range(shape.depth))
    elif all(layer.index < shape.depth for layer in layers):
        places = [layer.index for layer in layers]
    else:
        raise UsageError(
            f"the config has {shape.depth} layers with attention, the tensors {len(layers)}"
        )
    out = []
    for place in places:
        one = shape.layer(place)
        out.append(
            Layout(
                num_heads=one.num_heads,
                num_kv_heads=one.num_kv_heads,
                head_dim=one.head_dim,
                v_head_dim=one.v_head_dim,
                rope_dim=one.qk_rope_head_dim,
                rope_theta=one.rope_theta,
                rope_at=one.rope_at,
                rope_interleaved=one.rope_interleaved,
                shared_kv=one.shared_kv,
                o_groups=one.o_groups,
            )
        )
    return out


def _plain(
    config: Mapping[str, Any] | None, num_heads: int | None, num_kv_heads: int | None
) -> tuple[Layout, list[str]]:
    """A layout from the number of heads alone."""
    found = config or {}
    if is_wrapper(found):
        found = inner_config(found, "text")
    heads = num_heads or next((found[key] for key in _HEADS if key in found), None)
    kv_heads = num_kv_heads
    if num_heads is None:  # else the tensors say it
        kv_heads = kv_heads or next((found[key] for key in _KV_HEADS if key in found), None)
    if heads is None:
        raise UsageError(
            "how many heads a layer has is not known without a config: --heads N says so, or "
            "--config FILE"
        )
    for name, value in (("heads", heads), ("KV heads", kv_heads)):
        if value is not None and (type(value) is not int or not 0 < value <= 65_536):
            raise UsageError(f"the number of {name} must be from 1 to 65,536, got {shown(value)}")
    notes = [] if config else ["without a config rotary positions are not known: taken as none"]
    rope, theta = _rotary_of(found, heads)
    return Layout(num_heads=heads, num_kv_heads=kv_heads, rope_dim=rope, rope_theta=theta), notes


def _rotary_of(config: Mapping[str, Any], heads: int) -> tuple[int, float]:
    """Rotating coordinates of a head, and their base, where a config that is not known has Llama's
    keys."""
    inner = config.get("rope_parameters")
    inner = inner if isinstance(inner, Mapping) else {}
    theta = config.get("rope_theta", inner.get("rope_theta"))
    width = config.get("head_dim")
    if type(width) is not int:
        hidden = config.get("hidden_size")
        width = hidden // heads if type(hidden) is int else 0
    share = config.get("partial_rotary_factor", inner.get("partial_rotary_factor", 1.0))
    numbers = all(type(value) in (int, float) for value in (theta, share))
    if not numbers or not 0 < width <= 65_536 or not (0 < share <= 1 < theta < 1e12):
        return 0, 10_000.0
    return int(width * share) // 2 * 2, float(theta)


def _with_keys(layers: list[Named], layouts: list[Layout], shape: Shape | None) -> list[Named]:
    """Layers that read the keys and values of an earlier one, with its names."""
    out: list[Named] = []
    for i, layer in enumerate(layers):
        has = layer.parts.keys()
        if not has & {"k", "qkv", "kv", "kv_b"} or (shape and _reuses(shape, i, len(layers))):
            sizes = (layouts[i].num_kv_heads, layouts[i].head_dim)
            for j in range(i - 1, -1, -1):
                before = (layouts[j].num_kv_heads, layouts[j].head_dim)
                if before == sizes and out[j].parts.keys() & {"k"}:
                    kept = {p: n for p, n in out[j].parts.items() if p[:1] in "kv"}
                    layer = Named(layer.index, {**layer.parts, **kept})
                    break
            else:
                raise UsageError(f"layer {layer.index} has queries and no keys")
        out.append(layer)
    return out


def _reuses(shape: Shape, i: int, count: int) -> bool:
    return count == shape.depth and shape.layer(i).reuses_kv
