"""Attention with every size free.

Axes: M models, B batch, N keys, Q queries, H heads, R rank, V value width, D dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from headwise.errors import UsageError, nearest
from headwise.kernels import embed_readout
from headwise.kernels.attention_cpu import short, short_packed
from headwise.kernels.attention_wide import attend_wide, straight
from headwise.kernels.unit_norm import unit
from headwise.model import backends
from headwise.model.backends import BACKENDS, Call, Choice, choose_backend, dtype_name, forced
from headwise.model.cache import LayerCache
from headwise.shape import Shape

_FUSED = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


# ---- the function


def mask_of(
    queries: int, keys: int, causal: bool, window: int, device: torch.device | str = "cpu"
) -> Tensor | None:
    """Which query sees which key, (Q, N), true where seen; None when every query sees every key.

    The last query stands at the last key. A window of w keeps |i - j| < w.
    """
    if not causal and not 0 < window < keys:
        return None
    at_Q1 = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    at_N = torch.arange(keys, device=device)
    seen_QN = (
        at_N <= at_Q1 if causal else torch.ones(queries, keys, dtype=torch.bool, device=device)
    )
    if window:
        seen_QN = seen_QN & ((at_Q1 - at_N).abs() < window)
    return seen_QN


def weights_of(scores_BHQN: Tensor, seen_QN: Tensor | None, hard: bool) -> Tensor:
    """Scores to attention weights: softmax, or all of it on the first largest score."""
    if seen_QN is not None:
        scores_BHQN = scores_BHQN.masked_fill(~seen_QN, -math.inf)
    if hard:
        best_BHQ1 = scores_BHQN.argmax(-1, keepdim=True)
        return torch.zeros_like(scores_BHQN).scatter_(-1, best_BHQ1, 1.0)
    return scores_BHQN.softmax(-1)


def plain(
    q: Tensor, k: Tensor, v: Tensor, scale: float, seen_QN: Tensor | None = None, hard: bool = False
) -> Tensor:
    """The formula itself, scores written out: w(scale q k^T) v."""
    k, v = _repeat(k, q.shape[1]), _repeat(v, q.shape[1])
    return weights_of(q @ k.mT * scale, seen_QN, hard).to(v.dtype) @ v


def _blocked(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: int, hard: bool
) -> Tensor:
    queries, keys = q.shape[-2], k.shape[-2]
    per_query = q.shape[0] * q.shape[1] * keys * max(4, q.dtype.itemsize)
    block = max(1, backends.BLOCK_BYTES // per_query)

    def part(start: int) -> Tensor:
        stop = min(start + block, queries)
        last = keys - queries + stop if causal else keys
        first = max(0, keys - queries + start - window + 1) if window else 0
        if window and not causal:
            last = min(keys, keys - queries + stop + window - 1)
        at_Q1 = torch.arange(
            keys - queries + start, keys - queries + stop, device=q.device
        ).unsqueeze(1)
        at_N = torch.arange(first, last, device=q.device)
        seen = at_N <= at_Q1 if causal else None
        if window:
            near = (at_Q1 - at_N).abs() < window
            seen = near if seen is None else seen & near
        return plain(
            q[..., start:stop, :], k[..., first:last, :], v[..., first:last, :], scale, seen, hard
        )

    return torch.cat(
        [checkpoint(part, start, use_reentrant=False) for start in range(0, queries, block)], -2
    )


def _repeat(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: int = 0,
    scale: float | None = None,
    hard: bool = False,
    backend: str = "auto",
    graphed: bool = False,
) -> Tensor:
    """softmax(scale q k^T) v, or hardmax, on the best backend for these sizes.

    q is (batch, heads, queries, rank), k (batch, kv heads, keys, rank), v (batch, kv heads, keys,
    width); fewer KV heads serve groups of query heads. `scale` is rank ** -0.5 unless given.
    `graphed`: the call is part of a CUDA graph, where launches cost nothing, so that the choice
    need not mind them.

    >>> attend(torch.zeros(2, 6, 5, 3), torch.zeros(2, 2, 5, 3), torch.ones(2, 2, 5, 7)).shape
    torch.Size([2, 6, 5, 7])
    """
    compiling, kind = torch.compiler.is_compiling(), None
    if not (compiling or window or hard or graphed) and backend == "auto":
        trained = q.requires_grad or k.requires_grad or v.requires_grad
        kind = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, causal, trained)
        asked = _asked.get(kind)
        if asked and _in_rows(q, k, v):
            grouped, usual = asked
            try:
                return F.scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    None,
                    0.0,
                    causal,
                    scale=usual if scale is None else scale,
                    enable_gqa=grouped,
                )
            except RuntimeError:
                if q.device == k.device == v.device:
                    raise  # else the rule that they break is told below
    kinds = (q.dtype, k.dtype, v.dtype), (q.device, k.device, v.device)
    plan = _plan if compiling else _planned
    call, choice, own, simple = plan(
        q.shape,
        k.shape,
        v.shape,
        *kinds,
        causal,
        window,
        hard,
        backend,
        graphed,
        backends.BLOCK_BYTES,
    )
    scale = call.rank**-0.5 if scale is None else scale
    if choice.backend == "plain":
        return plain(
            q, k, v, scale, mask_of(call.queries, call.keys, causal, window, q.device), hard
        )
    if choice.backend == "blocked":
        return _blocked(q, k, v, scale, causal, window, hard)
    if choice.backend == "wide":
        return attend_wide(q, k, v, scale, causal, window)
    if choice.repeat_kv:
        k, v = _repeat(k, call.heads), _repeat(v, call.heads)
    if choice.backend == "short":
        return short(q, k, v, scale)
    if choice.backend == "heads":
        from headwise.kernels.attention_short_triton import attend_heads

        return attend_heads(
            q, k, v, scale, "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"
        )
    out = _fused(choice, call, own, q, k, v, scale)
    if kind and simple and own.get(kind[-1]) and len(_asked) < 4096:
        _asked[kind] = call.heads != call.kv_heads, call.rank**-0.5
    return out


_asked: dict[
    tuple[Any, ...], tuple[bool, float]
] = {}  # calls that torch's function answers as we would: do heads share keys, usual scale


def _in_rows(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the numbers of each row lie side by side."""
    if q.is_contiguous() and k.is_contiguous() and v.is_contiguous():
        return True
    return q.stride(-1) == k.stride(-1) == v.stride(-1) == 1


def _fused(
    choice: Choice, call: Call, own: dict[bool, bool], q: Tensor, k: Tensor, v: Tensor, scale: float
) -> Tensor:
    if choice.pad[0]:
        q, k = F.pad(q, (0, choice.pad[0])), F.pad(k, (0, choice.pad[0]))
    if choice.pad[1]:
        v = F.pad(v, (0, choice.pad[1]))
    q, k, v = straight(q), straight(k), straight(v)  # no fused kernel takes others
    mask = (
        mask_of(call.queries, call.keys, call.causal, call.window, q.device)
        if call.masked
        else None
    )
    causal, grouped = call.causal and mask is None, k.shape[1] != q.shape[1]
    if not torch.compiler.is_compiling() and _is_own(
        _FUSED[choice.backend], own, q, k, v, mask, causal, scale, grouped
    ):
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    else:
        with sdpa_kernel(_FUSED[choice.backend]):
            out = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped
            )
    return out[..., : call.width] if choice.pad[1] else out


def _is_own(
    kind: SDPBackend,
    own: dict[bool, bool],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    grouped: bool,
) -> bool:
    """Whether torch chooses this kernel by itself: to ask for it by name takes longer than small
    calls. Found out once."""
    trained = q.requires_grad or k.requires_grad or v.requires_grad
    if trained not in own:
        own[trained] = (
            torch._fused_sdp_choice(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=grouped)
            == kind.value
        )
    return own[trained]


Three = tuple[Any, Any, Any]


def _plan(
    q: torch.Size, k: torch.Size, v: torch.Size, dtypes: Three, devices: Three,
    causal: bool, window: int, hard: bool, backend: str, graphed: bool, _: int,
) -> tuple[Call, Choice, dict[bool, bool], bool]:  # fmt: skip
    """The call that these operands make, who answers it, room for whether torch does so by itself,
    and whether one only has to ask it."""
    if wrong := _wrong(q, k, v, dtypes, devices, causal, window):
        raise UsageError(wrong)
    call = Call(
        devices[0].type,
        dtypes[0],
        q[0],
        q[1],
        k[1],
        q[2],
        k[2],
        q[3],
        v[3],
        causal,
        window,
        hard,
        graphed,
    )
    choice = choose_backend(call) if backend == "auto" else forced(backend, call)
    simple = choice.backend in _FUSED and not (any(choice.pad) or choice.repeat_kv or call.masked)
    return call, choice, {}, simple


_planned = functools.lru_cache(4096)(_plan)


def _wrong(
    q: torch.Size,
    k: torch.Size,
    v: torch.Size,
    dtypes: Three,
    devices: Three,
    causal: bool,
    window: int,
) -> str:
    """Which rule these operands break, if any."""
    shapes = f"q {tuple(q)}, k {tuple(k)}, v {tuple(v)}"
    if len(q) != 4 or len(k) != 4 or len(v) != 4:
        return f"attend takes (batch, heads, tokens, width) tensors, got {shapes}"
    if q[-1] != k[-1] or k[:3] != v[:3] or q[0] != k[0]:
        return f"q and k must share batch and rank, k and v batch, heads and tokens, got {shapes}"
    if min(q) == 0 or min(v) == 0:
        return f"no axis may be empty, got {shapes}"
    if q[1] % k[1]:
        return f"query heads must be a multiple of KV heads, got {q[1]} and {k[1]}"
    if len(set(dtypes)) > 1 or len(set(devices)) > 1:
        kinds = ", ".join(
            f"{name} {dtype_name(dtype)} on {device}"
            for name, dtype, device in zip("qkv", dtypes, devices, strict=True)
        )
        return f"q, k and v must share dtype and device, got {kinds}"
    if window < 0:
        return f"window must not be negative, got {window}"
    if (causal or window) and q[2] > k[2]:
        what = "causal" if causal else "windowed"
        return (
            f"{what} attention needs at least as many keys as queries, got {k[2]} keys, {q[2]} "
            "queries"
        )
    return ""


# ---- the layer


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, scale: float = 1.0) -> Tensor:
    """scale * x W^T + b; W is (outputs, inputs), or (models, outputs, inputs) with x (models, ...,
    inputs)."""
    if weight.ndim == 2:
        return F.linear(x, weight if scale == 1.0 else weight * scale, bias)
    flat_MTD = x.flatten(1, -2)
    if bias is None:
        y_MTD = torch.bmm(flat_MTD, weight.mT)
        y_MTD = y_MTD if scale == 1.0 else y_MTD * scale
    else:
        y_MTD = torch.baddbmm(bias.unsqueeze(1), flat_MTD, weight.mT, alpha=scale)
    return y_MTD.unflatten(1, x.shape[1:-1])


def _regroup(
    t: Tensor, axis: int, times: int, splits: Sequence[tuple[int, Shape]], lanes: list[bool]
) -> Tensor:
    """Swap (head, rank) to (rank, head) order along an axis of `times` such groups, for the models
    whose lane is set."""

    def swap(part: Tensor, s: Shape) -> Tensor:
        groups = part.unflatten(axis, (times, s.num_heads, s.head_dim))
        return groups.transpose(axis, axis - 1).flatten(axis - 2, axis)

    parts = t.split([models for models, _ in splits]) if len(splits) > 1 else (t,)
    done = [
        swap(part, s) if lane else part
        for part, (_, s), lane in zip(parts, splits, lanes, strict=True)
    ]
    return torch.cat(done) if len(done) > 1 else done[0]


def drawn(bound: float, *size: int) -> Tensor:
    """U(+-bound) as torch's own modules start, so that a module works as it is made;
    `models.initialise` draws anew, from a generator. On the meta device nothing is drawn (torch
    would load a symbolic algebra system for it)."""
    tensor = torch.empty(*size)
    return tensor if tensor.is_meta else tensor.uniform_(-bound, bound)


class Linear(nn.Module):
    """y = x W^T + b; with `models` = M every tensor has a leading model axis and the product is
    batched."""

    def __init__(self, inputs: int, outputs: int, bias: bool, models: int | None = None) -> None:
        super().__init__()
        lead = () if models is None else (models,)
        self.weight = nn.Parameter(drawn(inputs**-0.5, *lead, outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(*lead, outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Norm(nn.Module):
    """The normalisations of `Shape.norm` over the last axis.

    layer: (x - mean)/std * g + b; rms: x/rms * g; rms-free: x/rms; scalar: s x/||x||, one learned
    s.
    """

    def __init__(self, kind: str, dim: int, models: int | None = None, eps: float = 1e-6) -> None:
        super().__init__()
        lead = () if models is None else (models,)
        self.kind, self.dim, self.eps, self.stacked = kind, dim, eps, models is not None
        size = {
            "layer": (dim,),
            "layer-nobias": (dim,),
            "rms": (dim,),
            "rms-free": None,
            "scalar": (1,),
        }[kind]
        self.weight = None if size is None else nn.Parameter(torch.ones(*lead, *size))
        self.bias = nn.Parameter(torch.zeros(*lead, dim)) if kind == "layer" else None

    def _wide(self, gain: Tensor, x: Tensor) -> Tensor:
        return gain.view(gain.shape[0], *([1] * (x.ndim - 2)), -1) if self.stacked else gain

    def narrow(self, x: Tensor) -> bool:
        """Whether the rows are short ones of a stack on a GPU."""
        if (
            not self.stacked
            or self.weight is None
            or self.dim > embed_readout.MOST
            or self.eps != embed_readout.EPS
        ):
            return False
        return (
            x.shape[0] == len(self.weight) and x.shape[-1] == self.dim and embed_readout.possible(x)
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "scalar":
            assert self.weight is not None
            return unit(x, self.weight.view(-1, *([1] * (x.ndim - 1))))
        if (
            self.kind == "rms"
            and not self.stacked
            and self.weight is not None
            and x.dtype == self.weight.dtype
        ):  # at once
            return F.rms_norm(x, (self.dim,), self.weight, self.eps)
        if (
            self.kind == "layer"
            and self.narrow(x)
            and self.weight is not None
            and self.bias is not None
        ):
            return embed_readout.layer_norm(x, self.weight, self.bias)
        y = (
            F.layer_norm(x, (self.dim,), eps=self.eps)
            if self.kind.startswith("layer")
            else F.rms_norm(x, (self.dim,), eps=self.eps)
        )
        if self.weight is not None:
            y = y * self._wide(self.weight, x)
        return y if self.bias is None else y + self._wide(self.bias, x)


Turns = tuple[Tensor, Tensor]


def turns_of(tokens: int, width: int, theta: float, like: Tensor, start: int = 0) -> Turns:
    """Cosines and sines of rotary positions, (tokens, width / 2)."""
    exact = torch.promote_types(like.dtype, torch.float32)
    at = torch.arange(start, start + tokens, device=like.device, dtype=exact)
    rate = theta ** (-torch.arange(0, width, 2, device=like.device, dtype=exact) / width)
    angle = torch.outer(at, rate)
    return angle.cos(), angle.sin()


def rotate(
    x: Tensor, width: int, theta: float, start: int = 0, turns: Turns | None = None
) -> Tensor:
    """Rotary positions on the last `width` coordinates of (..., tokens, rank), halves paired;
    `turns` if they are known."""
    if not width:
        return x
    cos, sin = (t.to(x.dtype) for t in turns or turns_of(x.shape[-2], width, theta, x, start))
    rest, a, b = x.split((x.shape[-1] - width, width // 2, width // 2), -1)
    return torch.cat((rest, a * cos - b * sin, b * cos + a * sin), -1)


def decode_backend(device: str, dtype: torch.dtype, rank: int, width: int, hard: bool) -> str:
    """What a few queries go to when the keys grow by one at every token: no kernel that pads, hence
    copies, all of them, and not cuDNN, which is planned anew for every number of keys."""
    half = dtype in (torch.float16, torch.bfloat16)
    fits = device == "cpu" or (half and rank <= 256 and rank % 8 == 0)
    return "flash" if fits and rank == width and not hard else "plain"


class Attention(nn.Module):
    """Self-attention with heads, rank, value width, KV heads and latent all free.

    y = W_O concat_h softmax(c q_h k_h^T + mask) v_h, with q_h = W_Q,h x (H heads of rank r) and
    k_h, v_h either W_K x, W_V x (num_kv_heads of them) or grown from one latent of width
    kv_lora_rank. x is (batch, tokens, dim), or (models, batch, tokens, dim) when `models` is given.
    `splits` lets stacked models differ in how they cut the same width into heads: (how many models,
    their shape), in order.

    >>> layer = Attention(Shape(dim=12, depth=1, num_heads=5, head_dim=3, v_head_dim=7))
    >>> layer(torch.zeros(2, 4, 12)).shape
    torch.Size([2, 4, 12])
    """

    def __init__(
        self,
        shape: Shape,
        *,
        layer: int = 0,
        models: int | None = None,
        splits: Sequence[tuple[int, Shape]] = (),
        hard: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.splits, self.stacked = splits, models is not None
        self.turns: Turns | None = None  # of all tokens, if the model around it has made them
        if backend != "auto" and backend not in BACKENDS:
            raise UsageError(
                f"unknown backend {backend!r}; {nearest(backend, ('auto', *BACKENDS))}"
            )
        self.shape, self.window, self.hard, self.backend = shape, shape.window(layer), hard, backend
        H, R, V, KV, D = (
            shape.num_heads,
            shape.head_dim,
            shape.v_head_dim,
            shape.num_kv_heads,
            shape.dim,
        )
        if shape.latent:
            rope, C = shape.qk_rope_head_dim, shape.kv_lora_rank
            if shape.q_lora_rank:
                self.q_down = Linear(D, shape.q_lora_rank, shape.qkv_bias, models)
                self.q_norm = Norm("rms", shape.q_lora_rank, models)
            self.q = Linear(shape.q_lora_rank or D, H * R, False, models)
            self.kv_down = Linear(D, C + rope, shape.qkv_bias, models)
            self.kv_norm = Norm("rms", C, models)
            self.kv = Linear(C, H * (R - rope + V), False, models)
        else:
            self.qkv = Linear(D, H * R + KV * (R + V), shape.qkv_bias, models)
            if shape.qk_norm != "none":
                kind = "rms" if shape.qk_norm == "head" else "rms-free"
                self.q_norm, self.k_norm = Norm(kind, R, models), Norm(kind, R, models)
        self.out = Linear(H * V, D, False, models)
        lead = () if models is None else (models,)
        self.out_bias = (
            nn.Parameter(torch.zeros(*lead, shape.average, D)) if shape.out_bias else None
        )

    @overload
    def forward(
        self, x: Tensor, keep: Literal[False] = False, cache: LayerCache | None = None
    ) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, keep: Literal[True]) -> tuple[Tensor, dict[str, Tensor]]: ...
    def forward(
        self, x: Tensor, keep: bool = False, cache: LayerCache | None = None
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """The layer's output; with `keep` also q, k, v, scores, weights and head outputs by name;
        with `cache` x follows what is in it, and joins it."""
        s, out = self.shape, {}
        if cache is not None:
            o, weight = self._cached(x, cache), self.out.weight
        elif s.latent:
            o, weight = self._mix(s, *self._latent(x), out if keep else None), self.out.weight
        else:
            o, weight = self._grouped(x, out if keep else None)
        bias = None if self.out_bias is None else self.out_bias.mean(-2)
        y = linear(o, weight, bias, 1 / s.average)
        return (y, out) if keep else y

    def _grouped(self, x: Tensor, out: dict[str, Tensor] | None) -> tuple[Tensor, Tensor]:
        """The heads' outputs, and the output weights in the order of their columns.

        Where the short kernel runs, the rows of the projection are put in (rank, head) order, heads
        innermost, and the columns of the output weights likewise; weights are small, so that costs
        less than moving activations.
        """
        splits = (
            self.splits
            if len(self.splits) > 1
            else ((1 if self.qkv.weight.ndim == 2 else x.shape[0], self.shape),)
        )
        lanes = [out is None and self._short(s, x) for _, s in splits]
        project, bias, collect = self.qkv.weight, self.qkv.bias, self.out.weight
        if any(lanes):
            project = _regroup(project, -2, 3, splits, lanes)
            bias = None if bias is None else _regroup(bias, -1, 3, splits, lanes)
            collect = _regroup(collect, -1, 1, splits, lanes)
        if torch.compiler.is_compiling() and not self.stacked and not any(lanes) and out is None:
            return self._mix(self.shape, *self._apart(x)), collect
        qkv = linear(x, project, bias)
        parts = qkv.split([models for models, _ in splits]) if len(splits) > 1 else (qkv,)
        done = [
            short_packed(part.flatten(0, -3), s.num_heads, s.scale).unflatten(0, part.shape[:-2])
            if lane
            else self._mix(s, *self._direct(s, part), out)
            for part, (_, s), lane in zip(parts, splits, lanes, strict=True)
        ]
        return torch.cat(done) if len(done) > 1 else done[0], collect

    def _short(self, s: Shape, x: Tensor) -> bool:
        """Whether one projection goes to the short kernel whole."""
        if (
            s.num_kv_heads != s.num_heads
            or s.v_head_dim != s.head_dim
            or s.qk_norm != "none"
            or s.qk_rope_head_dim
        ):
            return False
        sizes = (
            s.num_heads,
            s.num_heads,
            x.shape[-2],
            x.shape[-2],
            s.head_dim,
            s.head_dim,
            s.causal,
            self.window,
            self.hard,
        )
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        call = Call(kind, dtype, math.prod(x.shape[:-2]), *sizes)
        return self.backend in ("auto", "short") and choose_backend(call).backend == "short"

    def _mix(
        self, s: Shape, q: Tensor, k: Tensor, v: Tensor, out: dict[str, Tensor] | None = None
    ) -> Tensor:
        """Attention of the heads of shape s, (..., tokens, heads * value width)."""
        lead = q.shape[:-3]
        q, k, v = (t.flatten(0, -4) for t in (q, k, v))
        if out is None:
            o = attend(
                q,
                k,
                v,
                causal=s.causal,
                window=self.window,
                scale=s.scale,
                hard=self.hard,
                backend=self.backend,
                graphed=self.stacked,
            )
        else:
            scores = q @ _repeat(k, s.num_heads).mT * s.scale
            weights = weights_of(
                scores,
                mask_of(q.shape[-2], k.shape[-2], s.causal, self.window, q.device),
                self.hard,
            )
            o = weights @ _repeat(v, s.num_heads)
            kept = {"q": q, "k": k, "v": v, "scores": scores, "weights": weights, "heads": o}
            out.update({name: t.unflatten(0, lead) for name, t in kept.items()})
        return o.transpose(1, 2).reshape(*lead, q.shape[-2], s.num_heads * s.v_head_dim)

    def _heads(self, x: Tensor, width: int) -> Tensor:
        return x.unflatten(-1, (-1, width)).transpose(-3, -2)

    def _direct(self, s: Shape, qkv: Tensor, start: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        R, KV = s.head_dim, s.num_kv_heads
        q, k, v = qkv.split((s.num_heads * R, KV * R, KV * s.v_head_dim), -1)
        return self._placed(s, q, k, v, start)

    def _placed(
        self, s: Shape, q: Tensor, k: Tensor, v: Tensor, start: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        return (
            self._place(s, q, "q_norm", start),
            self._place(s, k, "k_norm", start),
            self._heads(v, s.v_head_dim),
        )

    def _apart(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same by three products: compiled, their gradients need not be moved into one tensor;
        the weights' are small."""
        q, k, v = (linear(x, weight, bias) for weight, bias in zip(*self._maps(), strict=True))
        return self._placed(self.shape, q, k, v, 0)

    def _maps(self) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        """The maps to queries, keys and values, and their biases."""
        s = self.shape
        sizes = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim, s.num_kv_heads * s.v_head_dim
        return self.qkv.weight.split(sizes), (
            None,
            None,
            None,
        ) if self.qkv.bias is None else self.qkv.bias.split(sizes)

    def _place(self, s: Shape, t: Tensor, norm: str, start: int) -> Tensor:
        """Queries or keys by head, normalised and rotated; the first stands at position `start`."""
        heads = self._heads(t, s.head_dim)
        if (
            s.qk_norm != "none"
        ):  # before the rotation: a gain after it would make the scores depend on absolute positions
            heads = getattr(self, norm)(heads).to(
                t.dtype
            )  # under autocast a norm answers in float32
        return self._rotate(s, heads, start)

    def _rotate(self, s: Shape, t: Tensor, start: int) -> Tensor:
        width, theta = s.qk_rope_head_dim, s.rope_theta
        known = (
            self.turns is not None
            and start == 0
            and self.turns[0].shape == (t.shape[-2], width // 2)
            and theta == self.shape.rope_theta
        )
        return rotate(t, width, theta, start, self.turns if known else None)

    def _latent(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._latent_q(x), *self._grow(*self._compress(x))

    def _latent_q(self, x: Tensor, start: int = 0) -> Tensor:
        s = self.shape
        q = self._heads(self.q(self.q_norm(self.q_down(x)) if s.q_lora_rank else x), s.head_dim)
        return self._even(self._rotate(s, q, start))

    def _even(self, t: Tensor) -> Tensor:
        """Queries or keys of heads with a latent, normed where that is wanted; without gains it
        does not matter that they are rotated."""
        return (
            t if self.shape.qk_norm == "none" else F.rms_norm(t, t.shape[-1:], eps=1e-6).to(t.dtype)
        )

    def _compress(self, x: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """The latent, and the rotated key that all heads share."""
        s = self.shape
        latent, shared = self.kv_down(x).split((s.kv_lora_rank, s.qk_rope_head_dim), -1)
        return self.kv_norm(latent), self._rotate(s, shared, start)

    def _grow(self, latent: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """Every head's keys and values."""
        s = self.shape
        rope, nope = s.qk_rope_head_dim, s.head_dim - s.qk_rope_head_dim
        k, v = self._heads(self.kv(latent), nope + s.v_head_dim).split((nope, s.v_head_dim), -1)
        if rope:
            k = torch.cat((k, shared.unsqueeze(-3).expand(*k.shape[:-1], rope)), -1)
        return self._even(k), v

    # ---- with a cache: x (batch, tokens, dim) follows the tokens in it

    def _cached(self, x: Tensor, cache: LayerCache) -> Tensor:
        s, start, absorb = self.shape, cache.length, cache.absorb and x.shape[-2] == 1
        if cache.kind == "keys":
            q, k, v = self._direct(s, self.qkv(x), start)
            return self._look(q, *cache.append(k, v))
        if cache.kind == "latent":
            (rows,) = cache.append(torch.cat(self._compress(x, start), -1))
            return self._from_latent(self._latent_q(x, start), rows, absorb)
        (seen,) = cache.append(x, ordered=s.qk_rope_head_dim > 0)
        first = cache.length - seen.shape[-2]
        if s.latent:
            return self._from_latent(
                self._latent_q(x, start), torch.cat(self._compress(seen, first), -1), absorb
            )
        return self._from_input(x, start, seen, first, absorb)

    def _from_latent(self, q: Tensor, rows: Tensor, absorb: bool) -> Tensor:
        s = self.shape
        if not absorb or s.qk_norm != "none":  # a norm stands between the latent and the scores
            return self._look(q, *self._grow(*rows.split((s.kv_lora_rank, s.qk_rope_head_dim), -1)))
        nope = s.head_dim - s.qk_rope_head_dim
        grow_k, grow_v = self.kv.weight.unflatten(0, (s.num_heads, nope + s.v_head_dim)).split(
            (nope, s.v_head_dim), 1
        )
        return self._absorbed(q, rows, grow_k, grow_v)

    def _from_input(self, x: Tensor, start: int, seen: Tensor, first: int, absorb: bool) -> Tensor:
        s = self.shape
        H, R, V, KV = s.num_heads, s.head_dim, s.v_head_dim, s.num_kv_heads
        weights, biases = self._maps()
        q = self._place(s, linear(x, weights[0], biases[0]), "q_norm", start)
        if (
            absorb and s.qk_norm == "none" and not s.qk_rope_head_dim
        ):  # a key's bias adds one number to all scores of a query
            o = self._absorbed(
                q, seen, weights[1].unflatten(0, (KV, R)), weights[2].unflatten(0, (KV, V))
            )
            return (
                o
                if biases[2] is None
                else o + biases[2].view(KV, 1, V).expand(KV, H // KV, V).flatten()
            )
        k = self._place(s, linear(seen, weights[1], biases[1]), "k_norm", first)
        return self._look(q, k, self._heads(linear(seen, weights[2], biases[2]), V))

    def _look(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One query sees all that is kept, so its heads are as many queries to their KV head: no
        mask, no repeated keys."""
        s = self.shape
        if q.shape[-2] > 1:
            return self._mix(s, q, k, v)
        return self._ask(q.reshape(len(q), s.num_kv_heads, -1, s.head_dim), k, v).reshape(
            len(q), 1, -1
        )

    def _ask(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A handful of queries, unmasked."""
        best = decode_backend(q.device.type, q.dtype, q.shape[-1], v.shape[-1], self.hard)
        return attend(
            q,
            k,
            v,
            scale=self.shape.scale,
            hard=self.hard,
            backend=best if self.backend == "auto" else self.backend,
        )

    def _absorbed(
        self, q_BH1R: Tensor, rows_BNC: Tensor, grow_k_KRC: Tensor, grow_v_KVC: Tensor
    ) -> Tensor:
        """One query against what keys and values grow from, C numbers and a rotated rest: W_K goes
        to the query, W_V to the result."""
        KV, R, C = grow_k_KRC.shape
        q_BKGR, rest = q_BH1R.reshape(len(q_BH1R), KV, -1, q_BH1R.shape[-1]).split(
            (R, q_BH1R.shape[-1] - R), -1
        )
        q_BHC = torch.cat((torch.einsum("bkgr,krc->bkgc", q_BKGR, grow_k_KRC), rest), -1).flatten(
            1, 2
        )
        rows_B1NC = rows_BNC.unsqueeze(
            1
        )  # also the values: as wide as the keys, so that no backend pads and copies them
        o_BHC = self._ask(q_BHC.unsqueeze(1), rows_B1NC, rows_B1NC)[:, 0, :, :C]
        return torch.einsum("bkgc,kvc->bkgv", o_BHC.unflatten(1, (KV, -1)), grow_v_KVC).reshape(
            len(o_BHC), 1, -1
        )
