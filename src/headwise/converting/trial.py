"""A model on data: moments of its layers from the first half of the sequences, losses with new
heads in the place of old ones on the second half."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.converting.formats import NewHeads
from headwise.converting.moments import Moments, watch
from headwise.diagnose.checkpoints import Checkpoint, open_checkpoint
from headwise.diagnose.forms import TINY
from headwise.diagnose.layouts import Heads
from headwise.diagnose.running import Call, Running, Watcher, ids_of, plainly, running
from headwise.errors import UsageError

BATCH = 8  # sequences at once


class Trial:
    """A checkpoint's model, and sequences to calibrate and to measure on."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        data: str | Path | Sequence[int] | Tensor,
        tokens: int,
        sequences: int,
    ) -> None:
        self.model = running(checkpoint)
        self.tokens = min(tokens, self.model.most_tokens or tokens)
        ids = ids_of(data, self.model)
        count = min(sequences, len(ids) // self.tokens)
        if count < 2 or self.tokens < 2:
            raise UsageError(
                f"at least two sequences of {self.tokens} tokens are needed, got {len(ids):,} "
                "tokens"
            )
        # Those to measure on are the last ones, those to calibrate on are spread over the rest,
        # which is also what is trained on.
        self.held_out = count // 2
        cut = len(ids) // self.tokens - self.held_out
        every = ids[: len(ids) // self.tokens * self.tokens].view(-1, self.tokens)
        self.test, self.train = every[cut:], every[:cut]
        pick = torch.linspace(0, cut - 1, count - self.held_out).round().long()
        self.sums = watch(self.model, self.train[pick])
        if len(self.sums) != checkpoint.depth:
            raise UsageError(f"{checkpoint.depth} layers are known and {len(self.sums)} ran")
        self.states = None if self.model.causal else self._outputs(self.model, plainly)
        self.before = self._loss(self.model, plainly)
        self.unit = "nats per token" if self.model.causal else "relative change"

    def moments(self, i: int, heads: Heads, scale: float) -> Moments:
        """Of one layer on the calibration sequences."""
        return self.sums[i].moments(heads, scale)

    # ---- losses

    def _outputs(self, model: Running, watcher: Watcher) -> Tensor:
        return torch.cat([model.run(rows, watcher) for rows in self.test.split(BATCH)])

    def _loss(self, model: Running, watcher: Watcher) -> float:
        if self.states is not None:
            found = self._outputs(model, watcher)
            return float((found - self.states).norm() / self.states.norm().clamp_min(TINY))
        nats = 0.0
        for rows in self.test.split(BATCH):
            logits = model.run(rows, watcher)[:, :-1].flatten(0, 1)
            nats += float(F.cross_entropy(logits, rows[:, 1:].flatten(), reduction="sum"))
        loss = nats / self.test[:, 1:].numel()
        if not math.isfinite(loss):
            raise UsageError("the model's loss on these data is not finite")
        return loss

    def loss(self, heads: Sequence[NewHeads] | Mapping[int, NewHeads]) -> float:
        """With new heads in all of these layers."""
        new = heads if isinstance(heads, Mapping) else dict(enumerate(heads))

        def watcher(call: Call) -> Tensor:
            return attended(call, new[call.layer]) if call.layer in new else plainly(call)

        return self._loss(self.model, watcher)

    def one_by_one(
        self,
        heads: Sequence[NewHeads],
        same: bool,
        progress: Callable[[int, int], None] | None,
    ) -> list[float]:
        """The loss with new heads in one layer alone, for every layer."""
        found = []
        for i, new in enumerate(heads):
            found.append(self.before if same else self.loss({i: new}))
            if progress is not None:
                progress(i + 1, len(heads))
        return found

    def written(self, folder: Path) -> float:
        """The loss of a written checkpoint, loaded again."""
        return self._loss(running(open_checkpoint(folder)), plainly)


def attended(call: Call, new: NewHeads) -> Tensor:
    """What a layer with new heads writes, as its old output map reads it."""
    other = new.maps.converted(call)
    if new.latent is not None:
        other = new.latent.converted(other)
    return new.maps.written(plainly(other), call.q.shape[1])
