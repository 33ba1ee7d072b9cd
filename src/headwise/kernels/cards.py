"""GPUs by name: what decides which kernel runs on one. Makers' figures, standard library only."""

from __future__ import annotations

from dataclasses import dataclass

# KiB of shared memory that a block may have, by compute capability (CUDA C++ programming guide,
# technical specifications per compute capability).
SHARED_KIB = {
    (8, 0): 163,
    (8, 6): 99,
    (8, 7): 163,
    (8, 9): 99,
    (9, 0): 227,
    (10, 0): 227,
    (10, 3): 227,
    (12, 0): 99,
    (12, 1): 99,
}
LEAST_KIB = 99  # of any card from 8.0 on


@dataclass(frozen=True)
class Card:
    """A GPU: its compute capability, and GiB of its memory."""

    name: str
    capability: tuple[int, int]
    memory_gib: int

    @property
    def shared(self) -> int:
        """Bytes of shared memory that a block may have."""
        return shared_bytes(self.capability)

    @property
    def version(self) -> str:
        """8.9 for (8, 9)."""
        return ".".join(map(str, self.capability))


CARDS = {
    "t4": Card("T4", (7, 5), 15),
    "a100": Card("A100", (8, 0), 80),
    "l4": Card("L4", (8, 9), 22),
    "l40s": Card("L40S", (8, 9), 45),
    "rtx4090": Card("RTX 4090", (8, 9), 24),
    "h100": Card("H100", (9, 0), 80),
    "h200": Card("H200", (9, 0), 141),
    "b200": Card("B200", (10, 0), 180),
    "rtx5090": Card("RTX 5090", (12, 0), 32),
}
OLDEST = (8, 0)
NAMES = tuple(name for name, card in CARDS.items() if card.capability >= OLDEST)


def shared_bytes(capability: tuple[int, int]) -> int:
    """Of a compute capability; of an unknown one what all have.

    >>> shared_bytes((8, 9)), shared_bytes((9, 0))
    (101376, 232448)
    """
    return SHARED_KIB.get(capability, LEAST_KIB) << 10
