"""Which backend computes which attention, and why not a faster one.

Every backend has one function that takes a `Call` and answers with a `Choice`, or with a sentence:
what it needs, and what this call has. `_order` lists the backends, fastest first, for a device and
a precision; the first that takes the call runs it. `print(explain(shape))`
shows the choice and every refusal.

    short      CPU, few keys: elementwise over batch and heads (kernels/attention_cpu.py)
    heads      GPU, few tokens: whole heads in one program (kernels/attention_short_triton.py)
    cudnn      PyTorch's fused kernels, by their names in torch.nn.attention.SDPBackend
    flash
    efficient
    wide       GPU, rank above 256: products over the tiles seen (kernels/attention_wide.py)
    plain      the formula, scores written out (model/reference.py)
    blocked    the same, a block of queries at a time
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from headwise.errors import UsageError, nearest
from headwise.kernels import has_triton
from headwise.kernels.cards import Card
from headwise.model import reference
from headwise.model.calls import Call, dtype_name
from headwise.model.cards import card_of
from headwise.model.tracing import shown, sure, symbolic
from headwise.shape import Shape

__all__ = ["BACKENDS", "Call", "Choice", "choose_backend", "dtype_name", "explain", "forced"]

BACKENDS = ("short", "heads", "cudnn", "flash", "wide", "efficient", "plain", "blocked")


# ---- the answer


@dataclass(frozen=True)
class Choice:
    """Which backend runs, why, what is padded or repeated for it, and why each faster one does
    not."""

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
        lines += [f"  not {name}: {why}" for name, why in self.refused if name != self.backend]
        return "\n".join(lines)


Attempt = Callable[[Call], Choice | str]  # a choice, or why not


@dataclass(frozen=True, kw_only=True)
class CallOnCard(Call):
    """A call on a card by name, which need not be here."""

    card: Card


def choose_backend(call: Call) -> Choice:
    """The first backend, fastest first, that takes this call; the others say why they do not.

    >>> call = Call("cpu", torch.float32, 2, 6, 6, 100, 100, rank=16, width=16)
    >>> choose_backend(call).backend
    'flash'
    """
    if call.empty:
        return Choice("plain", "an axis is empty: nothing to compute")
    # Hard attention has no fused kernel.
    refused: list[tuple[str, str]] = []
    if call.hard:
        refused.append(("any fused kernel", "none computes hardmax"))
    for name in _order(call):
        answer = _ATTEMPTS[name](call)
        if isinstance(answer, Choice):
            return replace(answer, refused=tuple(refused))
        refused.append(("plain" if name == "plain_short" else name, answer))
    raise AssertionError("blocked takes every call")


def forced(backend: str, call: Call) -> Choice:
    """The backend that was asked for by name, or an error that says why it cannot run this call."""
    if backend not in BACKENDS:
        raise UsageError(f"unknown backend {backend!r}; {nearest(backend, ('auto', *BACKENDS))}")
    if backend == "plain" or call.empty or call.device == "meta":  # no numbers to compute
        return Choice("plain", "asked for")
    if call.hard and backend != "blocked":
        raise UsageError(f"backend {backend} does not compute hardmax; choices: plain, blocked")
    if backend != "efficient":
        call = replace(call, graphed=True)  # by name also where launches make another faster
    answer = _ATTEMPTS[backend](call)
    if backend == "wide" and not _not_wide(call):
        return Choice(backend, "asked for")
    if isinstance(answer, str) and symbolic(call.keys, call.rank):
        # Only sizes stand in the way that are not known yet: the formula takes any.
        few = replace(call, queries=1, keys=1, rank=1, width=1)
        if isinstance(_ATTEMPTS[backend](few), Choice):
            return Choice("plain", "asked for a backend of few sizes, and sizes are symbols")
    if isinstance(answer, str):
        raise UsageError(f"backend {backend} cannot run this call: {answer}")
    return answer


def explain(
    shape: Shape,
    tokens: int = 1024,
    *,
    batch: int = 1,
    device: str = "auto",
    dtype: torch.dtype = torch.float32,
    layer: int = 0,
    hard: bool = False,
    mask: bool = False,
    bias: bool = False,
    dropout: float = 0.0,
    softcap: float = 0.0,
    sinks: bool = False,
) -> Choice:
    """Which backend runs this shape's attention, and why the faster ones do not; print it.

    `device`: auto, cpu, cuda, or a card by name, such as a100, which need not be here. `mask`: with
    a boolean mask or documents; `bias`: with an added mask or ALiBi; dropout, softcap and sinks as
    in `attend`.

    >>> shape = Shape(dim=64, depth=1, num_heads=64, head_dim=1)
    >>> print(explain(shape, tokens=8, device="cpu").backend)
    short
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    card = card_of(device)
    shape = shape.layer(layer)
    call = Call(
        device="cuda" if card else device,
        dtype=dtype,
        batch=batch,
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        queries=tokens,
        keys=tokens,
        rank=shape.head_dim,
        width=shape.v_head_dim,
        causal=shape.causal,
        window=shape.window(0),
        hard=hard,
        mask=mask,
        bias=bias or shape.positions == "alibi",
        dropout=dropout,
        softcap=softcap,
        sinks=sinks or shape.sinks,
    )
    return choose_backend(CallOnCard(**vars(call), card=card) if card else call)


# ---- one function per backend: its choice, or what it needs and what the call has


def _beyond(c: Call, *taken: str) -> str:
    """What a kernel that takes no more than `taken` beyond a mask needs, and what this call has."""
    lacking = [name for name in ("dropout", "softcap", "sinks") if name not in taken]
    if not any(getattr(c, name) for name in lacking):
        return ""
    return f"needs attention without {' or '.join(lacking)}, this call has {c.beyond}"


_BIAS = "needs an added mask without a gradient, this call has one that is trained"
_FEW = "needs more work than this call has: several launches take longer than one fused kernel"


def _short(c: Call) -> Choice | str:
    if c.device != "cpu":
        return f"needs a CPU, the device is {c.device}"
    if c.masked or c.causal:
        return "needs attention without a mask, this call has one"
    if beyond := _beyond(c):
        return beyond
    few = sure(c.keys <= 8) and sure(c.rank <= 8)
    if not few and not (sure(c.keys <= 32) and sure(c.rank <= 2)):
        return (
            "needs at most 8 keys at rank 8 or 32 keys at rank 2 to be the fastest, this call has "
            f"{shown(c.keys)} keys at rank {shown(c.rank)}"
        )
    why = "few keys on a CPU: elementwise over batch and heads"
    return Choice("short", why, repeat_kv=c.kv_heads != c.heads)


def _heads(c: Call) -> Choice | str:
    if c.device != "cuda":
        return f"needs a GPU, the device is {c.device}"
    if torch.cuda.is_available() and not has_triton() and not isinstance(c, CallOnCard):
        return "needs triton, which is not installed"
    if c.masked or c.causal:
        return "needs attention without a mask, this call has one"
    if beyond := _beyond(c):
        return beyond
    if c.dtype == torch.float64:
        return "needs 16 or 32 bits, this call has float64"
    if c.few:
        return _FEW
    if not (sure(c.queries == c.keys) and sure(c.rank == c.width)):
        return (
            "needs as many queries as keys and values as wide as the rank, this call has "
            f"{shown(c.queries)} and {shown(c.keys)}, {shown(c.width)} and {shown(c.rank)}"
        )
    most = 64 if c.half else 256
    dtype = dtype_name(c.dtype)
    if not (sure(c.keys <= most) and sure(c.rank <= 64)):
        return (
            f"needs at most {most} tokens and rank 64 in {dtype} to be the fastest, this call has "
            f"{shown(c.keys)} tokens at rank {shown(c.rank)}"
        )
    if not (sure(c.keys <= 128) or sure(c.rank <= 16)):
        return (
            f"needs at most rank 16 beyond 128 tokens in {dtype}, this call has {shown(c.keys)} "
            f"tokens at rank {shown(c.rank)}"
        )
    why = "few tokens: whole heads in one program, scores never written out"
    return Choice("heads", why, repeat_kv=c.kv_heads != c.heads)


def _cudnn(c: Call) -> Choice | str:
    if c.device != "cuda":
        return f"needs a GPU, the device is {c.device}"
    if beyond := _beyond(c):
        return beyond
    if not c.half:
        return f"needs float16 or bfloat16, this call has {dtype_name(c.dtype)}"
    rank, width = _round_up(c.rank, 8), _round_up(c.width, 8)
    limit, gpu = _cudnn_limit(c)
    if not sure(max(rank, width) <= limit):
        return f"needs widths of at most {limit} {gpu}, this call has {_widths(c)}"
    if sure(c.keys == 1):
        return "needs more than one key, this call has 1"
    if c.masked:
        return "needs a call without an explicit mask to be the fastest, this call has one"
    why = "fused, the fastest on Hopper"
    if isinstance(c, CallOnCard) and c.card.capability[0] != 9:
        why = "fused, PyTorch's first choice; not measured on this card"
    return Choice("cudnn", why, pad=(rank - c.rank, width - c.width))


def _cudnn_limit(c: Call) -> tuple[int, str]:
    """The largest head width of cuDNN's attention, and on which GPU that is."""
    if isinstance(c, CallOnCard):
        return 256 if c.card.capability[0] == 9 else 128, f"on this card, {c.card.name}"
    if not torch.cuda.is_available():
        return 128, "before Hopper (256 there), and no GPU is seen here"
    hopper = torch.cuda.get_device_properties(torch.cuda.current_device()).major == 9
    return 256 if hopper else 128, "on this GPU"


def _flash(c: Call) -> Choice | str:
    rank = c.rank + c.sink_ranks
    widest = max(rank, c.width)
    pad = widest - rank, widest - c.width
    if beyond := _beyond(c, "sinks", "dropout" if c.device == "cuda" else ""):
        return beyond
    if c.bias_trained:
        return _BIAS
    if c.device == "cpu":
        return Choice("flash", "fused on the CPU, scores never written out", pad=pad)
    if c.device != "cuda":
        return f"needs a GPU or a CPU, the device is {c.device}"
    if not c.half:
        return f"needs float16 or bfloat16, this call has {dtype_name(c.dtype)}"
    if not sure(widest <= 256):
        return f"needs widths of at most 256, this call has {_widths(c)}"
    if c.masked:
        return "needs all keys, or causal with as many queries as keys; this call has another mask"
    if widest > 2 * min(rank, c.width):
        return (
            "needs rank and value width within a factor of two, because it pads the smaller; this "
            f"call has {_widths(c)}"
        )
    return Choice("flash", "fused, scores never written out", pad=pad)


def _plain_short(c: Call) -> Choice | str:
    if c.tabled or c.beyond:
        return "needs no mask but causal and window to be the fastest, this call has more"
    if c.few:
        return _FEW
    scores = _size(c.score_bytes)
    few = sure(c.queries <= 64) and sure(c.keys <= 64)
    if not few or not sure(c.score_bytes <= 16 * reference.BLOCK_BYTES):
        return (
            "needs at most 64 tokens to be faster than fused kernels, this call has "
            f"{shown(c.queries)} queries and {shown(c.keys)} keys, {scores} of scores"
        )
    why = f"few tokens: fused tiles of 64 would be mostly empty; writes {scores} of scores"
    return Choice("plain", why)


def _not_wide(c: Call) -> str:
    """Why the kernels of large rank cannot compute this call; empty if they can."""
    if c.tabled:
        return "needs no mask but causal and window, this call has another"
    if c.hides:
        found = f"{shown(c.keys)} and {shown(c.queries)}"
        return f"needs at least as many keys as queries, this call has {found}"
    return _beyond(c)


def _wide(c: Call) -> Choice | str:
    if why := _not_wide(c):
        return why
    if not sure(max(c.rank, c.width) > 256):
        return (
            f"needs a width above 256 to be faster than fused kernels, this call has {_widths(c)}"
        )
    if c.few:
        return _FEW
    why = "beyond width 256: scores written out, each product one launch over the tiles seen"
    return Choice("wide", why)


def _efficient(c: Call) -> Choice | str:
    if c.device != "cuda":
        return f"needs a GPU, the device is {c.device}"
    if c.dtype == torch.float64:
        return "needs 16 or 32 bits, this call has float64"
    if beyond := _beyond(c, "sinks", "dropout"):
        return beyond
    if c.bias_trained:
        return _BIAS
    rank = c.rank + c.sink_ranks
    if not sure(max(rank, c.width) <= 256) and not c.few:
        return (
            "needs widths of at most 256, above it runs at a tenth of the card's rate; this call "
            f"has {_widths(c)}"
        )
    step = 8 if c.half else 4
    pad = _round_up(rank, step) - rank, _round_up(c.width, step) - c.width
    why = "fused, scores never written out"
    return Choice("efficient", why, pad=pad, repeat_kv=c.kv_heads != c.heads)


def _plain(c: Call) -> Choice | str:
    scores, limit = _size(c.score_bytes), _size(reference.BLOCK_BYTES)
    if sure(c.score_bytes > reference.BLOCK_BYTES):
        return f"needs at most {limit} of scores, this call has {scores}"
    return Choice("plain", f"matrix products with {scores} of scores written out")


def _blocked(c: Call) -> Choice | str:
    limit = _size(reference.BLOCK_BYTES)
    why = f"query blocks of at most {limit} of scores, recomputed in the backward pass"
    return Choice("blocked", why)


_ATTEMPTS: dict[str, Attempt] = {
    "short": _short,
    "heads": _heads,
    "cudnn": _cudnn,
    "flash": _flash,
    "wide": _wide,
    "efficient": _efficient,
    "plain": _plain,
    "plain_short": _plain_short,  # plain, where it is the fastest and not the last resort
    "blocked": _blocked,
}


def _order(c: Call) -> tuple[str, ...]:
    """Who is asked, fastest first."""
    last = "efficient", "plain", "blocked"
    if c.hard:
        return "plain", "blocked"
    if c.device == "cpu":
        return ("cudnn", "flash", "short", *last) if c.half else ("short", "cudnn", "flash", *last)
    first = ("cudnn", "flash", "plain_short") if c.half else ("plain_short", "cudnn", "flash")
    return ("heads", *first, "wide", *last) if c.device == "cuda" else (*first, *last)


def _round_up(width: int, multiple: int) -> int:
    return -(-width // multiple) * multiple


def _widths(c: Call) -> str:
    return f"{shown(c.rank)} and {shown(c.width)}"


def _size(count: float) -> str:
    if shown(count) == "some":
        return "some"
    for suffix in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            exact = count >= 10 or suffix == "B"
            return f"{count:.0f} {suffix}" if exact else f"{count:.1f} {suffix}"
        count /= 1024
    return f"{count:.1f} TiB"
