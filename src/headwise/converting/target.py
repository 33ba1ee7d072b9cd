"""What is asked of a conversion, and the shape that it leads to; refused where the function would
change in a way that nobody asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headwise.diagnose.checkpoints import Checkpoint
from headwise.errors import UsageError, nearest, shown
from headwise.shape import Shape
from headwise.shape.names import field_of

FIELDS = ("num_heads", "num_kv_heads", "head_dim", "v_head_dim", "kv_lora_rank",
          "qk_rope_head_dim")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Target:
    """Sizes to come, and which steps lead there, in their order: more heads, KV heads joined and
    ranks cut, a latent, zeros."""

    shape: Shape  # of the result; its rotary base is settled with the pairs that stay
    more: int  # heads of each head
    more_kv: int  # KV heads of each KV head
    joined: bool
    latent: bool
    padded: bool

    @property
    def inner(self) -> int:
        """Coordinates of a head beside a part that rotates for all heads."""
        return self.shape.head_dim - (self.shape.qk_rope_head_dim if self.latent else 0)

    @property
    def exact(self) -> bool:
        """Whether the function stays as it is."""
        return not self.joined and not self.latent

    @property
    def same(self) -> bool:
        """Whether nothing changes at all."""
        return self.exact and not self.padded and self.more == self.more_kv == 1


def wanted_sizes(given: Mapping[str, Any]) -> dict[str, int]:
    """The sizes that are asked for, by their fields of Shape."""
    sizes: dict[str, int] = {}
    for name, value in given.items():
        field = field_of(name, value)
        if field not in FIELDS:
            raise UsageError(f"convert changes {', '.join(FIELDS)}; {nearest(name, FIELDS)}")
        if field in sizes:
            raise UsageError(f"{field} is given twice")
        if type(value) is not int or not 0 < value <= 65_536:
            raise UsageError(f"{name} must be a whole number from 1 to 65,536, got {shown(value)}")
        sizes[field] = value
    return sizes


def target_of(checkpoint: Checkpoint, sizes: Mapping[str, int]) -> Target:
    """The shape that sizes lead to, from a checkpoint's."""
    shape = checkpoint.shape
    if shape is None:
        raise UsageError("a conversion needs the checkpoint's config; this one has none that says "
                         "a shape")  # fmt: skip
    _check_source(checkpoint, shape)
    H, K, R, V = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.v_head_dim
    wanted = {"num_heads": H, "num_kv_heads": K, "head_dim": R, "v_head_dim": V, **sizes}
    if checkpoint.family == "gpt2":  # has no KV heads of its own
        wanted["num_kv_heads"] = sizes.get("num_kv_heads", wanted["num_heads"])
    H2, K2, R2, V2 = (wanted[name] for name in FIELDS[:4])
    if H2 % H:
        raise UsageError(f"num_heads must be a multiple of the {H} there are, got {H2}; heads are "
                         "made more, not fewer")  # fmt: skip
    if H2 % K2 or (K2 % K and K % K2):
        raise UsageError(
            f"num_kv_heads must divide num_heads {H2}, and be a part or a multiple of the {K} "
            f"there are, got {K2}"
        )
    latent = wanted.get("kv_lora_rank", 0)
    joined = K2 < K or R2 < R or V2 < V
    padded = R2 > R or V2 > V
    if joined and padded and (R2 > R) and (K2 < K):
        raise UsageError("KV heads are joined or heads padded, one after the other, not both")
    rope = shape.qk_rope_head_dim
    if R2 != R and rope:
        if R2 % 2:
            raise UsageError(f"rotary positions need an even head_dim, got {R2}")
        rope = R2 if rope == R else min(rope, R2 // 2 * 2)
    changes: dict[str, Any] = {
        "num_heads": H2, "num_kv_heads": K2, "head_dim": R2, "v_head_dim": V2,
        "qk_rope_head_dim": rope,
    }  # fmt: skip
    if "qk_rope_head_dim" in sizes and not latent:
        raise UsageError("qk_rope_head_dim goes with a latent: give kv_lora_rank too")
    if latent:
        _check_latent(shape, latent, padded)
        if shape.qk_rope_head_dim:
            rope = _latent_rope(shape, sizes)
            changes |= {"head_dim": R + rope, "qk_rope_head_dim": rope, "rope_at": "last",
                        "rope_interleaved": False}  # fmt: skip
        changes |= {"kv_lora_rank": latent, "num_kv_heads": H2, "qkv_bias": True}
    target = Target(
        shape=shape.replace(**changes), more=H2 // H, more_kv=max(1, K2 // K), joined=joined,
        latent=bool(latent), padded=padded,
    )  # fmt: skip
    _check_norms(shape, target, R2, K2)
    return target


def _check_source(checkpoint: Checkpoint, shape: Shape) -> None:
    """Refuse what the maps of heads do not reach."""

    def refuse(what: str) -> None:
        raise UsageError(f"convert would change the function: {what}")

    if shape.latent or shape.q_lora_rank:
        refuse("keys or queries pass through a latent, whose norm a change would not follow")
    if checkpoint.depth != shape.depth:
        refuse(f"of {shape.depth} layers {checkpoint.depth} have attention that is known")
    if not shape.uniform:
        refuse("sizes of heads or feed-forwards differ by layer")
    if shape.attn_gate != "none" or any(layout.gated for layout in checkpoint.layouts):
        refuse("heads have gates")
    if shape.shared_kv or shape.o_lora_rank:
        refuse("keys are the values, or outputs pass through a latent")
    if shape.sinks or shape.positions == "alibi":
        refuse("heads have sinks or slopes of their own")
    names = [name for layer in checkpoint.layers for name in layer.parts.values()]
    if len(names) != len(set(names)):
        refuse("layers share tensors")
    if shape.average != 1:
        refuse("attention modules stand side by side")
    if any("kv" in layer.parts or ("v" not in layer.parts and "qkv" not in layer.parts)
           for layer in checkpoint.layers):  # fmt: skip
        refuse("values have no projection of their own")


def _latent_rope(shape: Shape, sizes: Mapping[str, int]) -> int:
    """Coordinates of the one key that rotates for all heads."""
    most = shape.qk_rope_head_dim
    rope = sizes.get("qk_rope_head_dim", most)
    if rope % 2 or rope > most:
        raise UsageError(f"qk_rope_head_dim must be even and at most the {most} coordinates that "
                         f"rotate, got {rope}")  # fmt: skip
    if sizes.get("head_dim", shape.head_dim) != shape.head_dim:
        raise UsageError(
            f"under rotary positions head_dim follows from a latent: {shape.head_dim} that do not "
            f"rotate and qk_rope_head_dim {rope}; leave head_dim out, v_head_dim can be had"
        )
    return rope


def _check_latent(shape: Shape, width: int, padded: bool) -> None:
    if padded:
        raise UsageError("a latent grows heads as they are: ask for wider ones without it")
    if shape.qk_norm != "none":
        raise UsageError("a latent needs qk_norm none, this shape has "
                         f"{shape.qk_norm!r}: keys could not be absorbed")  # fmt: skip
    if width < 2:
        raise UsageError(f"kv_lora_rank must be at least 2, one of them constant, got {width}")


def _check_norms(shape: Shape, target: Target, R: int, K: int) -> None:
    """Under norms of queries and keys a head's basis is fixed."""
    if shape.qk_norm == "none":
        return
    what = ""
    if shape.head_dim != R:
        what = "head_dim changes what they divide by"
    elif shape.num_kv_heads > K:
        what = "queries cannot adapt to joined keys behind them"
    elif shape.qk_norm == "all" and (target.more > 1 or target.more_kv > 1):
        what = "they run over all heads together"
    if what:
        raise UsageError(f"queries and keys are normed (qk_norm {shape.qk_norm!r}): {what}; "
                         "v_head_dim and more heads can be had (--to v_head_dim=N)")  # fmt: skip


# ---- rotary positions


def steps_of(pairs: int, kept: int) -> list[int]:
    """Steps at which `kept` of so many pairs can stay: their frequencies are then those of a head
    of their own, under another base."""
    return list(range(1, (pairs - 1) // max(kept - 1, 1) + 1)) if kept > 1 else [1]


def slots(pairs: int, new: int, step: int) -> tuple[list[int], list[int], float]:
    """Which pairs stay, in which new places, and the power of the base.

    Pair i turns by theta^(-i / pairs), so pair step * j of `pairs` turns as pair j of `new` does
    under theta^(step new / pairs).

    >>> slots(8, 4, 2), slots(4, 8, 1)
    (([0, 2, 4, 6], [0, 1, 2, 3], 1.0), ([0, 1, 2, 3], [0, 2, 4, 6], 1.0))
    """
    if new <= pairs:
        return [step * j for j in range(new)], list(range(new)), step * new / pairs
    if new % pairs == 0:
        return list(range(pairs)), [new // pairs * j for j in range(pairs)], 1.0
    return list(range(pairs)), list(range(pairs)), new / pairs


def with_base(shape: Shape, power: float) -> Shape:
    """Another base of the rotary positions."""
    if not shape.qk_rope_head_dim or power == 1.0:
        return shape
    return dataclasses.replace(shape, rope_theta=shape.rope_theta**power)
