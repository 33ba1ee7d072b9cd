"""Randomness without global state: one seed per purpose, and a generator from a seed. Loads torch
only where it is used."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def derive(seed: int, *purpose: str | int) -> int:
    """A seed for one purpose, independent of every other purpose's.

    >>> derive(0, "init") == derive(0, "init") != derive(0, "data", 1)
    True
    """
    text = json.dumps([seed, *purpose])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator_of(device: torch.device, seed: int) -> torch.Generator:
    """A generator on a device that starts from a seed."""
    import torch

    return torch.Generator(device).manual_seed(seed)
