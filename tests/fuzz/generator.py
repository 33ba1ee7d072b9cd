"""Case number N of a seed: a group by weight, then a case of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from tests.fuzz import code, data, formats, options, stores, tools
from tests.fuzz.cases import Case

Group = Callable[[random.Random], Case]
GROUPS: dict[str, tuple[int, Group]] = {  # name -> weight, and what makes a case
    "shapes": (14, options.shapes),
    "options": (10, options.options),
    "settings": (10, options.settings),
    "places": (5, options.places),
    "nanochat": (3, options.nanochat),
    "configs": (14, formats.configs),
    "rows": (10, formats.rows),
    "tokenizers": (3, formats.tokenizers),
    "nanochat_checkpoints": (5, formats.nanochat_checkpoints),
    "texts": (6, data.texts),
    "images": (8, data.images),
    "sentences": (4, data.sentences),
    "tasks": (8, code.tasks),
    "models": (4, code.models),
    "experiments": (4, code.experiments),
    "plans": (6, tools.plans),
    "inspects": (10, tools.inspects),
}
FROM_STORE: dict[str, tuple[int, Callable[[random.Random, Path], Case]]] = {  # a good one is given
    "stores": (24, stores.stores),
    "decoders": (2, stores.decoders),
    "choices": (8, tools.choices),
    "exports": (8, tools.exports),
    "groups": (12, tools.groups),
}
NAMES = (*GROUPS, *FROM_STORE)


def case_of(seed: int, number: int, template: Path) -> tuple[str, Case]:
    """The group and the case of that number; always the same."""
    rng = random.Random(f"{seed}/{number}")
    weights = [weight for weight, _ in (*GROUPS.values(), *FROM_STORE.values())]
    (name,) = rng.choices(NAMES, weights)
    if name in FROM_STORE:
        return name, FROM_STORE[name][1](rng, template)
    return name, GROUPS[name][1](rng)
