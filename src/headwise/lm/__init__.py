"""One decoder of any size on one text: what it is (`Pretraining`), its training (`pretrain`), and
the model that a run left (`load_decoder`).

The names are imported when they are first used, so that a specification needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["Pretraining", "load_decoder", "pretrain"]

_HOME = {"Pretraining": "spec", "load_decoder": "checkpoint", "pretrain": "trainer"}

if TYPE_CHECKING:
    from headwise.lm.checkpoint import load_decoder
    from headwise.lm.spec import Pretraining
    from headwise.lm.trainer import pretrain


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'headwise.lm' has no attribute {name!r}")
    return getattr(importlib.import_module(f"headwise.lm.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
