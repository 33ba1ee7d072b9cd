"""Runs of many kinds that are trained in one ensemble."""

from support.small_runs import make

from headwise.training.run import Run

MIXES: dict[str, list[Run]] = {
    "seeds": [make(seed) for seed in range(5)],
    "rates, schedules, protocols, starts": [
        make(0),
        make(0, lr=0.05),
        make(1, schedule="constant", lr=0.001),
        make(2, schedule="published", protocol="replay"),
        make(2, protocol="replay", weight_decay=0.1),
        make(3, init="published", warmup=0.4),
        make(3, init="normal"),
    ],
    "head splits": [make(seed, rank=rank) for rank in (12, 1, 4, 6) for seed in range(2)],
    "averaged splits": [
        make(seed, rank=rank, width=2, depth=2) for rank in (3, 12) for seed in range(3)
    ],
}
