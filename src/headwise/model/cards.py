"""A device's name as a card that need not be here (kernels/cards.py). Loads no torch."""

from __future__ import annotations

from headwise.errors import UsageError, nearest
from headwise.kernels.cards import CARDS, NAMES, OLDEST, Card


def card_of(device: str) -> Card | None:
    """The card that a device's name is of; None for auto, cpu, cuda and the like.

    >>> card_of("rtx4090").version, card_of("cuda")
    ('8.9', None)
    """
    kind = device.partition(":")[0]
    if kind in ("auto", "cpu", "cuda", "meta", "mps", "xpu"):
        return None
    card = CARDS.get(device.lower())
    if card is None:
        known = ("auto", "cpu", "cuda", *NAMES)
        raise UsageError(f"unknown device {device!r}; {nearest(device.lower(), known)}")
    if card.capability < OLDEST:
        raise UsageError(
            f"device {device} has compute capability {card.version}: fused attention needs 8.0 "
            f"(A100) or newer; choices: auto, cpu, cuda, {', '.join(NAMES)}"
        )
    return card
