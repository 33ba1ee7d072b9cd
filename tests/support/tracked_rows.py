"""A store with rows as they are written, without training: a small model, a decoder, a diverged
one, and one that was taken from a file and has no specification."""

from pathlib import Path

from headwise.lm.spec import Pretraining
from headwise.rows import Row
from headwise.shape import Shape
from headwise.store import Store
from headwise.tasks import Farthest
from headwise.training.run import Recipe, Run

PLACE = {
    "seconds": 7.5,
    "device": "cpu",
    "commit": "abc1234",
    "finished": "2026-11-19T12:00:00Z",
    "resumed": False,
}
FINISHED = 1795089600.0  # of it, in seconds since 1970
RECIPE = Recipe(steps=66, epoch=22, evals=2, batch=3, held_out=128)
SHAPE = Shape(dim=6, depth=1, num_heads=2, head_dim=3, ffn_dim=5)
SMALL = Run(SHAPE, Farthest(dim=6, points=5), RECIPE, seed=1)
DIVERGED = Run(SHAPE, Farthest(dim=6, points=5), RECIPE, seed=2)
TAKEN = Run(SHAPE, Farthest(dim=6, points=5), RECIPE, seed=3)
DECODER = Pretraining(
    shape=Shape(dim=6, depth=1, num_heads=1, ffn_dim=5, causal=True, vocab_size=257),
    steps=35,
    batch_tokens=32,
    length=16,
    evals=2,
    eval_tokens=64,
)

# What trackers must show, by the number of steps made: losses are means over epochs of 22 steps
# or, of the decoder, over ten; it is evaluated after 18 and 35.
HISTORY = {
    SMALL.id: {
        22: {"train_loss": 0.9},
        44: {"train_loss": 0.6, "held_out": 0.7},
        66: {"train_loss": 0.5, "held_out": 0.55},
    },
    DIVERGED.id: {22: {"train_loss": 3.0}},
    DECODER.id: {
        10: {"train_loss": 5.0},
        18: {"bits_per_byte": 6.5},
        20: {"train_loss": 4.5},
        30: {"train_loss": 4.25},
        35: {"train_loss": 4.0, "bits_per_byte": 6.25},
    },
}
HISTORY[TAKEN.id] = HISTORY[SMALL.id]


def small_row(run: Run) -> Row:
    """A row of a small model that has not diverged."""
    return {
        "id": run.id,
        "status": "done",
        **run.columns(),
        "held_out": 0.55,
        "held_out_se": 0.01,
        "train_best": 0.5,
        "zero_error": 1.0,
        "curve": [0.9, 0.6, 0.5],
        "held_out_curve": [[2, 0.7], [3, 0.55]],
        "score_angle": [[0.25, 0.5]],
        **PLACE,
    }


def decoder_row() -> Row:
    """The decoder's row: its last point is the mean of five steps."""
    return {
        "id": DECODER.id,
        "status": "done",
        "task": "language",
        **DECODER.columns(),
        "bits_per_byte": 6.25,
        "held_out": 4.33,
        "steps_done": 35,
        "curve": [5.0, 4.5, 4.25, 4.0],
        "curve_every": 10,
        "held_out_curve": [[18, 6.5], [35, 6.25]],
        "mfu": None,
        **PLACE,
    }


def diverged_row() -> Row:
    """The row of a run that was stopped in its second epoch."""
    lost = {"status": "diverged", "held_out": None, "held_out_se": None, "curve": [3.0, None]}
    return {**small_row(DIVERGED), **lost, "held_out_curve": []}


def tracked_store(path: Path) -> Store:
    """A store with the four rows, three of them asked for under the name "mine"."""
    store = Store(path)
    with store.claim([SMALL, DIVERGED]) as first, store.claim([DECODER]) as second:
        assert (len(first), len(second)) == (2, 1)
    for row in (small_row(SMALL), diverged_row(), small_row(TAKEN), decoder_row()):
        store.add(row)
    store.note("mine", {"ids": [SMALL.id, DIVERGED.id, TAKEN.id]})
    return store
