"""What a decoder knows of the text that it has not seen, and whether it recalls what it was shown.

Held-out windows are summed in groups, and standard errors are taken over the groups. Every sum is a
column of `HeldOut`:

    nats          -log p of each target
    sizes         bytes that the targets stand for
    ids           targets; the ends of documents do not count
    repeats       targets that could be recalled from their window (`corpus.repeated`)
    right         of these, how many the model has right
    repeats_nats  of these, -log p
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.lm.corpus import (
    Corpus,
    bigrams,
    held_out_rows,
    held_out_starts,
    recall_rows,
    repeated,
)
from headwise.lm.distributed import all_reduce
from headwise.lm.launch import World
from headwise.lm.spec import Pretraining
from headwise.model.transformer import Decoder
from headwise.rows import Row

GROUP = 8  # held-out windows that are summed together
TOKENS_AT_ONCE = 1 << 15  # held-out tokens of a forward pass
RECALL_PAIRS = 32  # key-value pairs of a row of the recall test, at most
RECALL_ROWS = 256
COLUMNS = (
    "held_out",
    "held_out_se",
    "bits_per_byte",
    "bits_per_byte_se",
    "repeats",
    "repeats_se",
    "repeats_share",
    "repeats_nats",
)
RECALL_COLUMNS = ("recall", "recall_se", "recall_pairs")


@dataclass(frozen=True)
class HeldOut:
    """Sums over groups of held-out windows, (groups,) each."""

    nats: Tensor
    sizes: Tensor
    ids: Tensor
    repeats: Tensor
    right: Tensor
    repeats_nats: Tensor

    @property
    def bits_per_byte(self) -> float | None:
        """The number that texts and tokenizers are compared by; None when it is not finite."""
        bits, _ = ratio(self.nats / math.log(2), self.sizes)
        return bits if math.isfinite(bits) else None

    def columns(self) -> Row:
        """The columns of a row."""
        # Held-out loss per target and per byte; without targets that repeat, their columns stay
        # empty.
        row: Row = dict.fromkeys(COLUMNS)
        row["held_out"], row["held_out_se"] = ratio(self.nats, self.ids)
        bits = self.nats / math.log(2)
        row["bits_per_byte"], row["bits_per_byte_se"] = ratio(bits, self.sizes)
        if self.repeats.sum():
            row["repeats"], row["repeats_se"] = ratio(self.right, self.repeats)
            row["repeats_share"], _ = ratio(self.repeats, self.ids)
            row["repeats_nats"], _ = ratio(self.repeats_nats, self.repeats)
        return row


class Evaluator:
    """Evaluates one decoder; every process calls it, since they share the work and may hold shards
    of the model."""

    def __init__(
        self,
        run: Pretraining,
        corpus: Corpus,
        model: Decoder,
        device: torch.device,
        world: World,
        compiled: bool = False,
    ) -> None:
        self.run = run
        self.corpus = corpus
        self.model = model
        self.device = device
        self.world = world
        self.compiled = compiled
        self.pair_counts: np.ndarray | None = None  # of the training part; counted when needed

    @torch.no_grad()
    def held_out(self) -> HeldOut:
        """The model on the windows of the held-out part, dealt to the processes in turn."""
        run = self.run
        most = max(1, run.eval_tokens // run.length)
        starts = held_out_starts(self.corpus, run.length, most, run.evaluated_on)
        groups = -(-len(starts) // GROUP)
        at_once = max(1, TOKENS_AT_ONCE // (run.length * GROUP))  # groups of a forward pass
        sums = torch.zeros(groups, 6, dtype=torch.float64)
        # With shards every process must make as many calls as the others. One that has no groups
        # left works on the last ones again and drops the result.
        last = (groups - 1) // at_once * at_once
        for first in range(0, groups, at_once * self.world.size):
            own = first + self.world.rank * at_once
            begin = min(own, last)
            found = self._sums(starts[begin * GROUP : (begin + at_once) * GROUP])
            if begin == own:
                sums[begin : begin + at_once] = found
        return HeldOut(*all_reduce(self.world, sums.to(self.device)).cpu().unbind(1))

    def _sums(self, starts: np.ndarray) -> Tensor:
        """(groups, 6) of the windows that begin there."""
        # The model's part: -log p (rows, length) of each target, and whether its likeliest id is
        # right.
        if self.pair_counts is None:
            self.pair_counts = bigrams(self.corpus)
        ids, sizes = held_out_rows(self.corpus, self.run.length, starts)
        inputs = to_device(ids, self.device)
        with self._uncompiled():
            logits = logits_of(self.run, self.model, inputs)
            nats = nats_of(logits, inputs[:, 1:]).double().cpu()
            right = (logits.argmax(-1) == inputs[:, 1:]).cpu()
        # What counts: the ends of documents stand for no bytes, so they are no targets here.
        counted = torch.ones_like(ids[:, 1:], dtype=torch.bool)
        if self.corpus.end is not None:
            counted = ids[:, 1:] != self.corpus.end
        repeats = repeated(self.corpus, self.pair_counts, ids) & counted
        sums = (nats * counted, counted, repeats, repeats & right, nats * repeats)
        # One line per window, in the order of HeldOut's fields, then summed in groups of GROUP
        # windows.
        nats_sum, *others = (values.double().sum(1) for values in sums)
        per_window = torch.stack((nats_sum, sizes.double(), *others), 1)
        return torch.stack([group.sum(0) for group in per_window.split(GROUP)])

    @torch.no_grad()
    def recall(self) -> Row:
        """How often the model, shown pairs of random ids, predicts the second of a pair from the
        first; every process does all of it."""
        # Keys must be distinct, and 4 ids per pair must fit the length.
        pairs = min(RECALL_PAIRS, self.run.length // 4, (self.corpus.vocab - 1) // 2)
        if not pairs:
            return {"recall": None, "recall_se": None, "recall_pairs": 0}
        # The second half asks for each value again, behind its key: inputs at 2 pairs, 2 pairs + 2,
        # ...
        ids = to_device(recall_rows(self.corpus, pairs, RECALL_ROWS, self.run.seed), self.device)
        shares = []
        for rows in ids.split(GROUP * 4):
            with self._uncompiled():
                logits = logits_of(self.run, self.model, rows)
            right = logits[:, 2 * pairs :: 2].argmax(-1) == rows[:, 2 * pairs + 1 :: 2]
            shares.append(right.double().mean(1))
        share = torch.cat(shares)
        error = share.std().item() / math.sqrt(len(share))
        return {"recall": share.mean().item(), "recall_se": error, "recall_pairs": pairs}

    @contextlib.contextmanager
    def _uncompiled(self) -> Iterator[None]:
        """Batches of another size would be compiled anew."""
        if not self.compiled:
            yield
            return
        with torch.compiler.set_stance("force_eager"):
            yield


def to_device(ids: Tensor, device: torch.device) -> Tensor:
    """A copy on a device; the host does not wait for it."""
    if device.type != "cuda":
        return ids
    return ids.pin_memory().to(device, non_blocking=True)


class AsyncNumbers:
    """Numbers on their way from a device. Reading waits for them, not for work that was queued
    behind them."""

    def __init__(self, numbers: Tensor) -> None:
        self.on_host = numbers
        self.copied: torch.Event | None = None
        if numbers.is_cuda:
            self.on_host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self.on_host.copy_(numbers, non_blocking=True)
            self.copied = torch.cuda.current_stream(numbers.device).record_event()

    def read(self) -> list[float]:
        """The numbers, once they are copied."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.on_host.tolist()


def logits_of(run: Pretraining, model: nn.Module, ids: Tensor) -> Tensor:
    """Logits of all ids but the first, in the run's precision."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=run.precision == "bf16"):
        logits, _ = model(ids[:, :-1])
    return logits


def nats_of(logits: Tensor, targets: Tensor) -> Tensor:
    """-log p of each target, in float32."""
    flat = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="none")
    return flat.view(targets.shape)


def ratio(over: Tensor, under: Tensor) -> tuple[float, float | None]:
    """A ratio of sums, and its standard error over the terms (linearised).

    >>> ratio(torch.tensor([2.0, 4.0]), torch.tensor([1.0, 2.0]))
    (2.0, 0.0)
    """
    # The ratio of sums has the residuals over - mean * under; their spread over the groups gives
    # its error.
    total, n = under.sum().item(), len(over)
    mean = (over.sum() / under.sum()).item()
    if n == 1:
        return mean, None
    squares = (over - mean * under).square().sum().item()
    return mean, math.sqrt(squares * n / (n - 1)) / total
