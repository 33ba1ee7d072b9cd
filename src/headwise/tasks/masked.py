"""Find the characters or bytes of a text that are masked: what an encoder is pre-trained on.

Text, levels and held-out part are those of `Text`; of every sequence the same number of places,
drawn without replacement, shows the mask in place of what stands there, and only these places are
evaluated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import UsageError
from headwise.tasks.ids import BYTE_IDS, MASK
from headwise.tasks.text import Text


@dataclass(frozen=True)
class Masked(Text):
    """What stands under the masks of `length` characters?

    >>> task = Masked(length=40, level="byte")
    >>> task.masks, task.vocab, task.classes
    (6, 259, 256)
    """

    name = "masked"
    share: float = 0.15  # of the places
    causal = False

    def __post_init__(self) -> None:
        if (
            isinstance(self.share, bool)
            or not isinstance(self.share, int | float)
            or not 0 < self.share <= 1
        ):
            raise UsageError(f"share must be a number above 0 and at most 1, got {self.share!r}")
        object.__setattr__(self, "share", float(self.share))
        super().__post_init__()

    @property
    def masks(self) -> int:
        """How many places are masked in every sequence."""
        return max(1, round(self.share * self.length))

    @property
    def classes(self) -> int:
        """The ids of the text without the mask."""
        return super().vocab

    @property
    def vocab(self) -> int:
        """The ids of the text, and the mask; at level byte those that all byte tasks share."""
        return BYTE_IDS if self.level == "byte" else self.classes + 1

    @property
    def mask(self) -> int:
        """The id that is shown at a masked place."""
        return MASK if self.level == "byte" else self.classes

    def sample(
        self, generator: torch.Generator, batch: int, step: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Ids (batch, length) with masks among them; targets (batch, masks, 2): what stands there,
        and where."""
        # The places of the largest random numbers are a draw without replacement.
        ids_BT, _ = super().sample(generator, batch, step)
        order_BT = torch.rand(batch, self.length, generator=generator, device=generator.device)
        place_BK = order_BT.topk(self.masks).indices
        return ids_BT.scatter(1, place_BK, self.mask), torch.stack(
            (ids_BT.gather(1, place_BK), place_BK), -1
        )

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy at the masked places."""
        return super().loss(self._masked(outputs, targets), targets[..., 0])

    def measures(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Accuracy at the masked places."""
        return super().measures(self._masked(outputs, targets), targets[..., 0])

    def _masked(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The outputs at the masked places, (..., batch, masks, classes)."""
        # Targets lack the models' axes of the outputs, so the places are expanded to them.
        place = targets[..., 1].expand(*outputs.shape[:-2], -1).unsqueeze(-1)
        return outputs[..., : self.classes].gather(
            -2, place.expand(*place.shape[:-1], self.classes)
        )

    def baselines(self) -> dict[str, float]:
        """Equal odds, and the odds of single characters as counted in the training part."""
        return {name: error for name, error in super().baselines().items() if name != "pairs"}
