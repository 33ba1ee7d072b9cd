"""What was decided for a call of `attend`, and the memory of such decisions.

`Operands` is the question, a hashable value without tensors; a `Plan` is the answer; `plans`, one
for the process, keeps the answers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from headwise.errors import UsageError
from headwise.model.backends import Choice, choose_backend, forced
from headwise.model.calls import Call, dtype_name
from headwise.model.extras import Extras, terms_of
from headwise.model.masks import Terms
from headwise.model.reach import Reach
from headwise.model.tracing import sure

TAKEN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Operands(NamedTuple):
    """All of a call of `attend` that decides how it is answered: sizes, dtypes, devices, options.
    Holds no tensors."""

    q: torch.Size
    k: torch.Size
    v: torch.Size
    q_dtype: torch.dtype
    k_dtype: torch.dtype
    v_dtype: torch.dtype
    q_device: torch.device
    k_device: torch.device
    v_device: torch.device
    causal: bool
    window: int
    hard: bool
    backend: str
    graphed: bool
    trained: bool  # whether a gradient is wanted
    block_bytes: int  # reference.BLOCK_BYTES, which the choice depends on
    extras: Extras | None = None  # masks, offset, dropout and all that is not of the usual call

    def check(self) -> None:
        """Refuse operands that break a rule."""
        q, k, v = self.q, self.k, self.v
        if len(q) != 4 or len(k) != 4 or len(v) != 4:
            raise UsageError(
                "attend takes (batch, heads, tokens, width) tensors, or all three without batch, "
                + self.got
            )
        if q[-1] != k[-1] or k[:3] != v[:3] or q[0] != k[0]:
            raise UsageError(
                "q and k must share batch and rank, k and v batch, heads and tokens, " + self.got
            )
        if q[1] % k[1] if k[1] else q[1]:
            raise UsageError(f"query heads must be a multiple of KV heads, got {q[1]} and {k[1]}")
        if self.q_dtype not in TAKEN:
            raise UsageError(
                "attend takes float16, bfloat16, float32 and float64, got "
                f"{dtype_name(self.q_dtype)}"
            )
        dtypes = self.q_dtype, self.k_dtype, self.v_dtype
        devices = self.q_device, self.k_device, self.v_device
        if len(set(dtypes)) > 1 or len(set(devices)) > 1:
            found = ", ".join(
                f"{name} {dtype_name(dtype)} on {device}"
                for name, dtype, device in zip("qkv", dtypes, devices, strict=True)
            )
            raise UsageError(f"q, k and v must share dtype and device, got {found}")
        if self.window < 0:
            raise UsageError(f"window must not be negative, got {self.window}")
        if self.extras is not None:
            self.extras.check(q, k, self.q_device, self.hard)

    @property
    def got(self) -> str:
        """The sizes, as an error shows them."""
        return f"got q {tuple(self.q)}, k {tuple(self.k)}, v {tuple(self.v)}"

    def batched(self) -> Operands:
        """Operands of three axes as a batch of one."""
        q, k, v = (torch.Size((1, *size)) for size in (self.q, self.k, self.v))
        return self._replace(q=q, k=k, v=v)

    def call(self) -> Call:
        """What the choice of a backend needs of them."""
        batch, heads, queries, rank = self.q
        more = {} if self.extras is None else self.extras.of_call()
        return Call(
            device=self.q_device.type,
            dtype=self.q_dtype,
            batch=batch,
            heads=heads,
            kv_heads=self.k[1],
            queries=queries,
            keys=self.k[2],
            rank=rank,
            width=self.v[3],
            causal=self.causal,
            window=self.window,
            hard=self.hard,
            graphed=self.graphed,
            **more,
        )


@dataclass
class Plan:
    """How calls with one set of operands are answered."""

    call: Call
    choice: Choice
    terms: Terms  # of the call, still without tensors
    masked: bool  # whether a fused kernel takes an explicit mask
    causal: bool  # whether it takes its own causal mask
    grouped: bool  # whether query heads share KV heads
    scale: float  # the usual factor of the scores
    # Whether torch takes the chosen kernel by itself: naming one takes longer than small calls
    # last. Found out at the first call, which has the tensors.
    torch_agrees: bool | None = None
    direct: bool = False  # torch agrees, and the tensors go to it as they are
    reach: Reach | None = None  # what is left of the operands; `terms` are of all of them
    unbatched: bool = False  # the operands have three axes: a batch of one is put before them

    @classmethod
    def of(cls, operands: Operands) -> Plan:
        """Check the operands and choose their backend."""
        if len(operands.q) == len(operands.k) == len(operands.v) == 3:
            return replace(cls.of(operands.batched()), unbatched=True)
        operands.check()
        call, backend = operands.call(), operands.backend
        terms, reach = terms_of(call), Reach.of(call)
        call = call if reach is None else reach.call(call)
        choice = choose_backend(call) if backend == "auto" else forced(backend, call)
        grouped = not sure(call.heads == call.kv_heads)
        scale = 1.0 if sure(call.rank == 0) else call.rank**-0.5
        # One query at the last key sees every key: torch's own causal mask would stand it first.
        causal = call.causal and not call.masked and not sure(call.queries == 1)
        return cls(call, choice, terms, call.masked, causal, grouped, scale, reach=reach)


class Plans:
    """The plans of operands seen before.

    Checking operands and choosing a backend takes longer than a small attention: a call of 16
    tokens takes 9 us in torch, 34 us when everything is decided anew, 11 us with the plan kept (one
    CPU core). A plan depends on nothing but its operands, so it never gets old. The cache lives as
    long as the process, holds no tensors, and drops its oldest plan beyond `limit`.
    """

    def __init__(self, limit: int = 4096) -> None:
        self.limit = limit
        self._plans: dict[Operands, Plan] = {}

    def __len__(self) -> int:
        return len(self._plans)

    def find(self, operands: Operands) -> Plan | None:
        """The plan of these operands, None if they are new or their sizes are symbols."""
        try:
            return self._plans.get(operands)
        except TypeError:  # symbols have no hash
            return None

    def get(self, operands: Operands) -> Plan:
        """The plan of these operands, made if they are new."""
        # Dicts keep the order of insertion, so the first key is the oldest plan.
        plan = self.find(operands)
        if plan is None:
            plan = Plan.of(operands)
            if any(isinstance(n, torch.SymInt) for n in (*operands.q, *operands.k, *operands.v)):
                return plan
            while len(self._plans) >= self.limit:
                self._plans.pop(next(iter(self._plans)))
            self._plans[operands] = plan
        return plan

    def clear(self) -> None:
        """Forget all plans."""
        self._plans.clear()


plans = Plans()
