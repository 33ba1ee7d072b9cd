"""What the tests of `headwise.lm` share: a small decoder, its run, and a kill."""

import json
from pathlib import Path
from typing import Any

import pytest

from headwise.lm.spec import Pretraining
from headwise.lm.trainer import Trainer, pretrain
from headwise.rows import MEASURED
from headwise.shape import Shape

# what a row states about how it was made; the same run made otherwise differs in it
EXECUTION = {
    "tokens_per_second",
    "mfu",
    "peak_flops",
    "processes",
    "shard",
    "accumulate",
    "compiled",
    "source",
    "tokenizer",
    "command",
}
SHAPE = Shape(
    dim=22,
    depth=2,
    num_heads=3,
    head_dim=10,
    v_head_dim=6,
    num_kv_heads=1,
    qk_rope_head_dim=10,
    qk_norm="head",
    ffn_dim=26,
    activation="swiglu",
    windows=(7, 0),
    causal=True,
    vocab_size=263,
)


def make_run(book: str, **changes: Any) -> Pretraining:
    settings = {
        "shape": SHAPE,
        "steps": 6,
        "batch_tokens": 88,
        "length": 11,
        "evals": 3,
        "precision": "fp32",
        "source": book,
        **changes,
    }
    return Pretraining(**settings)


def trained_row(run: Pretraining, **options: Any) -> dict[str, Any]:
    return pretrain(run, device="cpu", quiet=True, **options)


def bits(row: dict[str, Any]) -> str:
    return json.dumps(
        {k: v for k, v in row.items() if k not in MEASURED | EXECUTION},
        allow_nan=False,
        sort_keys=True,
    )


def alike(a: dict[str, Any], b: dict[str, Any], rel: float = 1e-6) -> None:
    assert a["curve"] == pytest.approx(b["curve"], rel=rel)
    assert a["bits_per_byte"] == pytest.approx(b["bits_per_byte"], rel=rel)
    assert a["bits_per_byte_se"] == pytest.approx(b["bits_per_byte_se"], rel=1e-3)
    assert a["id"] == b["id"]


class Stopped(Exception):
    """A kill that leaves the test alive."""


def stop(run: Pretraining, steps: int, folder: Path) -> None:
    """Train some steps, with a checkpoint after each."""
    step = Trainer.step

    def some(self: Trainer, flag: bool = False) -> bool:
        if len(self.state.losses) == steps:
            raise Stopped
        return step(self, flag)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", some)
        with pytest.raises(Stopped):
            trained_row(run, folder=folder, checkpoint_every=0)
