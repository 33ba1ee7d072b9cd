"""Which backend computes which attention, and why not a faster one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from headwise.errors import UsageError, nearest
from headwise.kernels import has_triton
from headwise.shape import Shape

BACKENDS = ("short", "heads", "cudnn", "flash", "wide", "efficient", "plain", "blocked")
BLOCK_BYTES = (
    256 << 20
)  # scores above this are computed in query blocks and recomputed in the backward pass
# tiles of 64 x 64 scores at rank 64 that a fused kernel makes in less time than several launches
# take
FEW = 2048


@dataclass(frozen=True)
class Call:
    """What decides the backend of one attention call."""

    device: str
    dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    rank: int
    width: int
    causal: bool = False
    window: int = 0
    hard: bool = False
    graphed: bool = False  # launches cost nothing, as in a CUDA graph that is replayed

    @property
    def few(self) -> bool:
        """Whether the work is less than the launching of several kernels."""
        tiles = self.batch * self.heads * -(-self.queries // 64) * -(-self.keys // 64)
        work = tiles * max(64, self.rank, self.width) / 64 * (0.5 if self.causal else 1)
        return (
            not self.graphed
            and self.device == "cuda"
            and self.dtype != torch.float64
            and work <= FEW
        )

    @property
    def masked(self) -> bool:
        """Whether it takes an explicit mask: a window, or causal with fewer queries than keys."""
        return 0 < self.window < self.keys or (self.causal and self.queries != self.keys)

    @property
    def half(self) -> bool:
        return self.dtype in (torch.float16, torch.bfloat16)

    @property
    def score_bytes(self) -> int:
        """Bytes of the scores if they are written out."""
        return self.batch * self.heads * self.queries * self.keys * max(4, self.dtype.itemsize)


@dataclass(frozen=True)
class Choice:
    """Which backend runs, why, what is padded or repeated for it, and why each faster one
    cannot."""

    backend: str
    why: str
    pad: tuple[int, int] = (0, 0)  # zeros added to the query/key width and to the value width
    repeat_kv: bool = False
    refused: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.backend}: {self.why}"]
        if any(self.pad):
            lines.append(
                f"  widths are padded with zeros by {self.pad[0]} (query/key) and {self.pad[1]} "
                "(value)"
            )
        if self.repeat_kv:
            lines.append("  keys and values are repeated for every query head")
        return "\n".join(
            lines + [f"  not {name}: {why}" for name, why in self.refused if name != self.backend]
        )


def _up(width: int, multiple: int) -> int:
    return -(-width // multiple) * multiple


_FEW = "so little to do that launching several kernels would take longer than one fused kernel runs"


def _try_short(c: Call) -> Choice | str:
    if c.device != "cpu":
        return f"it is for CPUs, the device is {c.device}"
    if c.masked or c.causal:
        return "it has no mask"
    if not (c.keys <= 8 and c.rank <= 8) and not (c.keys <= 32 and c.rank <= 2):
        return (
            f"it pays up to 8 keys at rank 8 and 32 keys at rank 2, got {c.keys} keys at rank "
            f"{c.rank}"
        )
    return Choice(
        "short",
        "few keys on a CPU: elementwise over batch and heads",
        repeat_kv=c.kv_heads != c.heads,
    )


def _try_heads(c: Call) -> Choice | str:
    if c.device != "cuda":
        return f"it needs a GPU, the device is {c.device}"
    if torch.cuda.is_available() and not has_triton():
        return "triton is not installed"
    if c.masked or c.causal:
        return "it has no mask"
    if c.dtype == torch.float64:
        return "it does not take float64"
    if c.few:
        return _FEW
    if c.queries != c.keys or c.rank != c.width:
        return (
            f"it needs as many queries as keys and values as wide as the rank, got {c.queries}, "
            f"{c.keys} and {c.rank}, {c.width}"
        )
    most = 64 if c.half else 256
    if c.keys > most or c.rank > 64:
        return (
            f"it pays up to {most} tokens and rank 64 in {dtype_name(c.dtype)}, got {c.keys} "
            f"tokens at rank {c.rank}"
        )
    if c.keys > 128 and c.rank > 16:
        return (
            f"beyond 128 tokens it takes at most rank 16 in {dtype_name(c.dtype)}, got {c.keys} "
            f"tokens at rank {c.rank}"
        )
    return Choice(
        "heads",
        "few tokens: whole heads in one program, scores never written out",
        repeat_kv=c.kv_heads != c.heads,
    )


def _try_cudnn(c: Call) -> Choice | str:
    if c.device != "cuda":
        return f"it needs a GPU, the device is {c.device}"
    if not c.half:
        return f"it takes float16 and bfloat16, got {dtype_name(c.dtype)}"
    rank, width = _up(c.rank, 8), _up(c.width, 8)
    limit = (
        256
        if torch.cuda.is_available()
        and torch.cuda.get_device_properties(torch.cuda.current_device()).major == 9
        else 128
    )
    if max(rank, width) > limit:
        where = (
            "on this GPU"
            if torch.cuda.is_available()
            else "before Hopper (256 there), and no GPU is seen here"
        )
        return f"it stops at width {limit} {where}, got {c.rank} and {c.width}"
    if c.keys == 1:
        return "it needs more than one key"
    if c.masked:
        return "a mask of its own is slower there than in the others"
    return Choice("cudnn", "fused, the fastest on Hopper", pad=(rank - c.rank, width - c.width))


def _try_flash(c: Call) -> Choice | str:
    equal = max(c.rank, c.width)
    if c.device == "cpu":
        return Choice(
            "flash",
            "fused on the CPU, scores never written out",
            pad=(equal - c.rank, equal - c.width),
        )
    if c.device != "cuda":
        return f"not known on {c.device}"
    if not c.half:
        return f"it takes float16 and bfloat16, got {dtype_name(c.dtype)}"
    if equal > 256:
        return f"it stops at width 256, got {c.rank} and {c.width}"
    if c.masked:
        return "it has no mask for windows or unequal lengths"
    if equal > 2 * min(c.rank, c.width):
        return (
            f"widths {c.rank} and {c.width} would be padded to {equal}, more than twice the smaller"
        )
    return Choice("flash", "fused, scores never written out", pad=(equal - c.rank, equal - c.width))


def _try_plain_short(c: Call) -> Choice | str:
    if c.few:
        return _FEW
    if c.queries > 64 or c.keys > 64 or c.score_bytes > 16 * BLOCK_BYTES:
        return f"it writes {_size(c.score_bytes)} of scores; fused kernels win beyond 64 tokens"
    return Choice(
        "plain",
        f"few tokens: fused tiles of 64 would be mostly empty; writes {_size(c.score_bytes)} of "
        "scores",
    )


def _try_wide(c: Call) -> Choice | str:
    if max(c.rank, c.width) <= 256:
        return f"fused kernels are faster up to width 256, got {c.rank} and {c.width}"
    if c.few:
        return _FEW
    return Choice(
        "wide",
        "beyond width 256: scores written out, each product one launch over the tiles that are "
        "seen",
    )


def _try_efficient(c: Call) -> Choice | str:
    if c.device != "cuda":
        return f"it needs a GPU, the device is {c.device}"
    if c.dtype == torch.float64:
        return "it does not take float64"
    if max(c.rank, c.width) > 256 and not c.few:
        return f"above width 256 it runs at a tenth of the card's rate, got {c.rank} and {c.width}"
    step = 8 if c.half else 4
    return Choice(
        "efficient",
        "fused, scores never written out",
        pad=(_up(c.rank, step) - c.rank, _up(c.width, step) - c.width),
        repeat_kv=c.kv_heads != c.heads,
    )


def _try_plain(c: Call) -> Choice | str:
    if c.score_bytes > BLOCK_BYTES:
        return f"it would write {_size(c.score_bytes)} of scores, more than {_size(BLOCK_BYTES)}"
    return Choice("plain", f"matrix products with {_size(c.score_bytes)} of scores written out")


def _try_blocked(c: Call) -> Choice | str:
    return Choice(
        "blocked",
        f"query blocks of at most {_size(BLOCK_BYTES)} of scores, recomputed in the backward pass",
    )


def choose_backend(call: Call) -> Choice:
    """The first backend, fastest first, that takes this call; the others say why they do not."""
    attempts: list[tuple[str, Callable[[Call], Choice | str]]] = [
        ("plain", _try_plain),
        ("blocked", _try_blocked),
    ]
    if not call.hard:
        fused: list[tuple[str, Callable[[Call], Choice | str]]] = [
            ("cudnn", _try_cudnn),
            ("flash", _try_flash),
            ("efficient", _try_efficient),
        ]
        short_n = [("short", _try_short)] if call.device == "cpu" else [("plain", _try_plain_short)]
        own = [("heads", _try_heads)] if call.device == "cuda" else []
        wide = [("wide", _try_wide)] if call.device == "cuda" else []
        attempts = (
            own
            + (fused[:2] + short_n if call.half else short_n + fused[:2])
            + wide
            + fused[2:]
            + attempts
        )
    refused: list[tuple[str, str]] = (
        [("any fused kernel", "none computes hardmax")] if call.hard else []
    )
    for name, attempt in attempts:
        answer = attempt(call)
        if isinstance(answer, Choice):
            return Choice(answer.backend, answer.why, answer.pad, answer.repeat_kv, tuple(refused))
        refused.append((name, answer))
    raise AssertionError("blocked takes every call")


def explain(
    shape: Shape,
    tokens: int = 1024,
    *,
    batch: int = 1,
    device: str = "auto",
    dtype: torch.dtype = torch.float32,
    layer: int = 0,
    hard: bool = False,
) -> Choice:
    """Which backend runs this shape's attention, and why the faster ones cannot; print it.

    >>> print(explain(Shape(dim=64, depth=1, num_heads=64, head_dim=1), tokens=8, device="cpu").backend)
    short
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return choose_backend(
        Call(
            device,
            dtype,
            batch,
            shape.num_heads,
            shape.num_kv_heads,
            tokens,
            tokens,
            shape.head_dim,
            shape.v_head_dim,
            shape.causal,
            shape.window(layer),
            hard,
        )
    )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(count: float) -> str:
    for suffix in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return (
                f"{count:.0f} {suffix}" if count >= 10 or suffix == "B" else f"{count:.1f} {suffix}"
            )
        count /= 1024
    return f"{count:.1f} TiB"


def forced(backend: str, call: Call) -> Choice:
    """The backend that was asked for by name, or an error that says why it cannot run this call."""
    attempts = {
        "short": _try_short,
        "heads": _try_heads,
        "cudnn": _try_cudnn,
        "flash": _try_flash,
        "wide": _try_wide,
        "efficient": _try_efficient,
        "plain": _try_plain,
        "blocked": _try_blocked,
    }
    if backend not in attempts:
        raise UsageError(f"unknown backend {backend!r}; {nearest(backend, ('auto', *attempts))}")
    if backend == "plain" or (backend == "wide" and not call.hard):
        return Choice(backend, "asked for")
    if call.hard and backend != "blocked":
        raise UsageError(f"backend {backend} does not compute hardmax; choices: plain, blocked")
    answer = attempts[backend](
        call if backend == "efficient" else replace(call, graphed=True)
    )  # by name also where another is faster
    if isinstance(answer, str):
        raise UsageError(f"backend {backend} cannot run this call: {answer}")
    return answer
