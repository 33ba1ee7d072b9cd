"""Whether two versions of headwise train the same numbers: small runs of everything, as JSON rows
without what is measured.

    PYTHONPATH=src python dev/same_numbers.py now.json
    PYTHONPATH=/path/to/another/checkout/src python dev/same_numbers.py before.json
    cmp before.json now.json

The runs go over all tasks, initialisations, data protocols, schedules, precisions and several
shapes: 52 in all, some trained together and some alone. On a CPU every row must be the same bit for
bit. Takes about a minute on one core.
"""

import json
import sys
from pathlib import Path

from headwise import Recipe, Run, Shape, train
from headwise.tasks import (
    BiasedNearest,
    Farthest,
    Images,
    ListOps,
    Masked,
    Nearest,
    Recall,
    Regression,
    Sentences,
    Text,
)

# As in headwise.training.run.MEASURED: what differs when the same run is made again.
MEASURED = (
    "seconds finished memory_bytes models commit headwise torch python device host_cpus resumed"
)

PAPER = {
    "activation": "relu",
    "norm": "scalar",
    "norm_at": "post",
    "qkv_bias": True,
    "out_bias": True,
    "ffn_bias": True,
}
PRE_NORM = {**PAPER, "activation": "gelu", "norm": "layer", "norm_at": "pre"}


def small(steps: int = 40, **changes: object) -> Recipe:
    """A recipe of seconds."""
    return Recipe(
        **{"steps": steps, "batch": 16, "epoch": 20, "held_out": 256, "evals": 2, **changes}
    )


def paper(dim: int = 8, heads: int = 2, rank: int = 4, depth: int = 1, **changes: object) -> Shape:
    """An encoder as in the rank paper."""
    sizes = {"dim": dim, "depth": depth, "num_heads": heads, "head_dim": rank, "ffn_dim": 4 * dim}
    return Shape(**{**PAPER, **sizes, **changes})


def model_for(
    task: object, dim: int = 16, heads: int = 2, rank: int = 8, **changes: object
) -> Shape:
    """A pre-norm model that takes a task's inputs and gives its answers."""
    causal = task.causal or isinstance(task, Recall)
    sizes: dict[str, object] = {
        "dim": dim,
        "depth": 2,
        "num_heads": heads,
        "head_dim": rank,
        "ffn_dim": 2 * dim,
        "causal": causal,
    }
    if task.vocab:
        sizes["vocab_size"] = -(-task.vocab // 16) * 16
    elif task.in_dim != dim:
        sizes["input_dim"] = task.in_dim
    if not (task.vocab and causal):
        sizes["output_dim"] = task.answer_dim
    if not task.squared:
        sizes |= {"positions": "additive", "num_positions": task.tokens}
    return Shape(**{**PRE_NORM, **sizes, **changes})


def groups() -> dict[str, list[Run]]:
    """Runs by name; those of one name are trained by one call."""
    farthest = Farthest(dim=8, points=5)
    out: dict[str, list[Run]] = {}
    for init in ("library", "published", "original", "normal", "spectral", "orthogonal"):
        out[f"init {init}"] = [Run(paper(), farthest, small(init=init), seed) for seed in (0, 1)]
    for protocol in ("stream", "replay", "original"):
        shapes = (paper(), paper(heads=1, rank=8), paper(heads=4, rank=2, depth=2))
        out[f"protocol {protocol}"] = [
            Run(s, farthest, small(protocol=protocol, init="published"), 3) for s in shapes
        ]
    for schedule in ("cosine", "published", "constant"):
        out[f"schedule {schedule}"] = [
            Run(paper(), farthest, small(schedule=schedule, weight_decay=0.1, warmup=0.5), 1)
        ]
    for precision in ("fp32", "bf16", "fp16"):
        out[f"precision {precision}"] = [
            Run(paper(), farthest, small(precision=precision), seed) for seed in (0, 5)
        ]
    tasks = (
        *(Nearest(dim=8, points=5), BiasedNearest(dim=8, points=5), Farthest(dim=16, points=4)),
        *(
            Regression(dim=3, points=6),
            Regression(dim=3, points=6, curriculum=10, first_dim=2, first_points=3),
        ),
        *(Text(12), Text(12, level="byte"), Masked(12), Images(4)),
        *(ListOps(length=24), Recall(4, 12, 6), Sentences(16)),
    )
    for task in tasks:
        name = f"task {task}"
        out[name] = [Run(model_for(task), task, small(20, lr=0.003), seed) for seed in (0, 1)]
    text = Text(12)
    styles: dict[str, dict[str, object]] = {
        "grouped": {"heads": 4, "rank": 4, "num_kv_heads": 2},
        "values": {"v_head_dim": 5},
        "window": {"windows": (5, 0)},
        "rotary": {
            "positions": "none",
            "num_positions": 0,
            "qk_rope_head_dim": 8,
            "qk_norm": "free",
            "norm": "rms",
            "activation": "relu2",
        },
    }
    for name, style in styles.items():
        out[f"style {name}"] = [Run(model_for(text, **style), text, small(20, lr=0.003), 0)]
    return out


def main(path: str) -> None:
    rows = []
    for name, runs in groups().items():
        for run, row in zip(runs, train(runs, device="cpu"), strict=True):
            kept = {key: value for key, value in row.items() if key not in MEASURED.split()}
            rows.append({"group": name, "id": run.id, "spec": run.spec(), **kept})
    Path(path).write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows))
    print(f"{len(rows)} rows, {sum(row['status'] == 'done' for row in rows)} done")


if __name__ == "__main__":
    main(sys.argv[1])
