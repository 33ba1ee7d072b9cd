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
from headwise.diagnose.layouts import Heads, rotation
from headwise.diagnose.running import Call, Running, Watcher, plainly, rows_of, running
from headwise.errors import UsageError

BATCH = 8  # sequences at once
MOST_ROWS = 1 << 22


class Trial:
    """A checkpoint's model, and sequences to calibrate and to measure on."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        data: str | Path | Sequence[int] | Tensor,
        tokens: int,
        sequences: int,
        unturned: bool = False,
    ) -> None:
        self.model = running(checkpoint)
        # All there are, since what is left over is what is trained on.
        every = rows_of(data, self.model, tokens, MOST_ROWS)
        count = min(sequences, len(every))
        if count < 2 or every.shape[1] < 2:
            raise UsageError("at least two sequences of two tokens are needed, got --sequences "
                             f"{sequences} of {every.shape[1]}")  # fmt: skip
        # Those to measure on are the last ones, those to calibrate on are spread over the rest,
        # which is also what is trained on.
        self.held_out = count // 2
        cut = len(every) - self.held_out
        self.test, self.train = every[cut:], every[:cut]
        pick = torch.linspace(0, cut - 1, count - self.held_out).round().long()
        # What a latent holds does not rotate.
        R = 0 if checkpoint.shape is None else checkpoint.shape.head_dim
        rotations = [rotation(layout, R) for layout in checkpoint.layouts] if unturned else None
        self.sums = watch(self.model, self.train[pick], rotations)
        self.tokens = self.sums[0].length
        if len(self.sums) != checkpoint.depth:
            raise UsageError(f"{checkpoint.depth} layers are known and {len(self.sums)} ran")
        self.states = None if self.model.causal else self._outputs(self.model, plainly)
        self.rows = self._losses(self.model, plainly)
        self.before = float(self.rows.mean())
        self.unit = "nats per token" if self.model.causal else "relative change"

    def moments(self, i: int, heads: Heads, scale: float) -> Moments:
        """Of one layer on the calibration sequences."""
        return self.sums[i].moments(heads, scale)

    # ---- losses

    def _outputs(self, model: Running, watcher: Watcher) -> Tensor:
        return torch.cat([model.run(rows, watcher) for rows in self.test.split(BATCH)])

    def _losses(self, model: Running, watcher: Watcher) -> Tensor:
        """Nats per token of every sequence that is measured on; of an encoder the relative change
        of all of them."""
        if self.states is not None:
            found = self._outputs(model, watcher)
            return ((found - self.states).norm() / self.states.norm().clamp_min(TINY))[None]
        parts = []
        for rows in self.test.split(BATCH):
            logits = model.run(rows, watcher)[:, :-1].mT
            parts.append(F.cross_entropy(logits, rows[:, 1:], reduction="none").double().mean(1))
        losses = torch.cat(parts)
        if not bool(losses.isfinite().all()):
            raise UsageError("the model's loss on these data is not finite")
        return losses

    def losses(self, heads: Mapping[int, NewHeads]) -> Tensor:
        """By sequence, with new heads in these layers."""

        def watcher(call: Call) -> Tensor:
            return attended(call, heads[call.layer]) if call.layer in heads else plainly(call)

        return self._losses(self.model, watcher)

    def loss(self, heads: Sequence[NewHeads]) -> float:
        """With new heads in all layers."""
        return float(self.losses(dict(enumerate(heads))).mean())

    def one_by_one(
        self,
        heads: Sequence[NewHeads],
        same: bool,
        progress: Callable[[int, int], None] | None,
    ) -> list[float]:
        """The loss with new heads in one layer alone, for every layer."""
        found = []
        for i, new in enumerate(heads):
            found.append(self.before if same else float(self.losses({i: new}).mean()))
            if progress is not None:
                progress(i + 1, len(heads))
        return found

    def written(self, folder: Path) -> Tensor:
        """The losses of a written checkpoint, loaded again."""
        return self._losses(running(open_checkpoint(folder)), plainly)

    def error(self, losses: Tensor) -> float | None:
        """The standard error, over sequences, of how far losses are from those of before."""
        if len(losses) < 2:
            return None
        return float((losses - self.rows).std() / math.sqrt(len(losses)))


def attended(call: Call, new: NewHeads) -> Tensor:
    """What a layer with new heads writes, as its old output map reads it."""
    other = new.maps.converted(call)
    if new.latent is not None:
        other = new.latent.converted(other)
    return new.maps.written(plainly(other), call.q.shape[1])
