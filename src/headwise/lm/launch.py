"""The processes of one launch, as torchrun describes them in the environment; no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from headwise.errors import UsageError, shown

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # how processes find each other


@dataclass(frozen=True)
class World:
    """This process among all of them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # on this machine

    @property
    def is_main(self) -> bool:
        """Whether this is the process that reads, writes and prints."""
        return self.rank == 0


def from_env() -> World:
    """The world that torchrun describes in the environment; without all of it, one process."""
    # A pod or a batch system may set some of these for its own ends.
    if any(not os.environ.get(name) for name in NEEDED):
        return World()
    size = _number("WORLD_SIZE", 1, None)
    rank = _number("RANK", 0, size)
    return World(rank, size, _number("LOCAL_RANK", 0, size) if "LOCAL_RANK" in os.environ else 0)


def _number(name: str, least: int, below: int | None) -> int:
    """A whole number of the environment."""
    text = os.environ[name]
    value = int(text) if text.isdecimal() and text.isascii() and len(text) < 10 else -1
    if value < least or (below is not None and value >= below):
        rule = f"of at least {least}" + ("" if below is None else f", below WORLD_SIZE {below}")
        raise UsageError(
            f"{name} in the environment must be a whole number {rule}, got {shown(text)}"
        )
    return value
