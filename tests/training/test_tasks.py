"""Every kind of task in training: what a shape must fit, many models as each alone, ids."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.data import digits, forget, letters, mnist, refused, written
from support.small_runs import bits
from support.tasks import softmax_losses
from support.tolerance import seeded

from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.model.transformer import build
from headwise.seeds import derive
from headwise.shape import Shape
from headwise.tasks import Farthest, Images, ListOps, Recall, Regression, Text
from headwise.tasks.task import Classified
from headwise.training import data, ensemble, fused_encoder, step
from headwise.training.data import HELD_OUT_BATCH, HELD_OUT_SEED
from headwise.training.engine import train
from headwise.training.ensemble import family_of
from headwise.training.fused_decoder import FusedDecoder
from headwise.training.fused_encoder import FusedEncoder
from headwise.training.run import Recipe, Run, ensemble_key

pytestmark = pytest.mark.usefixtures("no_network")


# ---- runs


def shape_for(task, heads=2, dim=16, **changes):
    """A small model that takes the task: tokens or patches in, classes out."""
    ends = (
        {"vocab_size": task.vocab}
        if task.vocab
        else {"input_dim": task.in_dim, "output_dim": task.answer_dim}
    )
    sizes = {
        "dim": dim,
        "depth": 1,
        "num_heads": heads,
        "head_dim": 16 // heads,
        "ffn_dim": 32,
        "norm": "layer",
    }
    placed = {"positions": "additive", "num_positions": task.tokens, "causal": task.causal}
    return Shape(**sizes | placed | ends | changes)


def together(runs, **options):
    return train(runs, device="cpu", advance=lambda n: None, **options)


TINY = {
    "recall": (Recall(2, 4, 4), {}),
    "text": (Text(16), {}),
    "images": (Images(4), {}),
    "listops": (ListOps(length=24, depth=2, examples=500), {"output_dim": 10}),
}


def tiny(name, heads=2, seed=0, **recipe):
    task, changes = TINY[name]
    settings = {
        "steps": 100,
        "epoch": 20,
        "batch": 16,
        "held_out": 256,
        "evals": 1,
        "lr": 0.01,
        "init": "normal",
    } | recipe
    return Run(shape_for(task, heads, **changes), task, Recipe(**settings), seed)


@pytest.mark.parametrize("name", TINY)
def test_tiny_model_learns_something_of_the_task(name, tmp_path):
    """Better than equal odds on held-out data; the accuracy and the error of its row are those of
    the kept weights."""
    run = tiny(name)
    (row,) = together([run], folder=tmp_path, keep_weights=True)
    assert row["status"] == "done"
    assert row["zero_error"] == pytest.approx(math.log(run.task.classes))
    assert row["held_out"] < row["zero_error"] - 0.02
    assert row["curve"][-1] < row["curve"][0]
    assert 1.1 / run.task.classes < row["held_out_accuracy"] <= 1.0
    assert row["task"] == name
    assert row["task_digest" if "digest" in dataclasses.asdict(run.task) else "task"]
    json.dumps(row, allow_nan=False)
    model = build(run.shape)
    model.load_state_dict(load_file(tmp_path / run.id / "weights.safetensors"))
    losses, right = [], []
    for batch in range(2):  # 256 sequences
        x, target = run.task.sample(
            seeded(derive(HELD_OUT_SEED, "held out", batch)), HELD_OUT_BATCH
        )
        with torch.no_grad():
            outputs = model(x)[0].double().numpy()[..., : run.task.classes]
        logits = {"recall": outputs[:, -2:], "text": outputs}.get(name, outputs.mean(1))
        losses.append(softmax_losses(logits, target.numpy()).mean())
        right.append((logits.argmax(-1) == target.numpy()).mean())
    assert row["held_out"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert row["held_out_accuracy"] == pytest.approx(np.mean(right), abs=1e-6)


@pytest.mark.parametrize("name", TINY)
def test_models_of_several_head_counts_train_as_if_alone(name):
    """Bit by bit, with different seeds and rates beside each other, under both protocols."""
    runs = [tiny(name, heads, seed, steps=20, epoch=10) for heads in (1, 2, 4) for seed in (0, 1)]
    runs += [
        tiny(name, 2, 5, steps=20, epoch=10, lr=0.03),
        tiny(name, 2, 0, steps=20, epoch=10, protocol="replay"),
    ]
    assert len({ensemble_key(run) for run in runs}) == 1
    rows = together(runs)
    assert {row["models"] for row in rows} == {len(runs)}
    assert len({bits(row) for row in rows}) == len(rows)
    for run, row in zip(runs, rows, strict=True):
        assert bits(together([run])[0]) == bits(row)


@pytest.mark.parametrize("task", [Recall(2, 11, 7), Recall(4, 5, 2)], ids=str)
@pytest.mark.parametrize("changes", [{}, {"tied": False}, {"output_dim": 7}], ids=str)
def test_ensemble_of_odd_vocabularies_equals_each_alone_bit_by_bit(task, changes):
    """Tables whose size is no whole number of cache lines."""
    changes = {k: task.classes if k == "output_dim" else v for k, v in changes.items()}
    recipe = Recipe(steps=6, epoch=3, batch=16, held_out=128, evals=1)
    runs = [
        Run(shape_for(task, heads, dim=12, **changes), task, recipe, heads) for heads in (1, 2, 4)
    ]
    assert task.vocab * 12 % 16
    rows = together(runs)
    assert {row["models"] for row in rows} == {3}
    for run, row in zip(runs, rows, strict=True):
        assert bits(together([run])[0]) == bits(row)


def test_run_that_diverges_says_no_accuracy():
    wild, sane = tiny("recall", steps=20, lr=1e6, schedule="constant"), tiny("recall", steps=20)
    lost, row = together([wild, sane])
    assert lost["status"] == "diverged"
    assert "held_out_accuracy" not in lost
    assert bits(row) == bits(together([sane])[0])


VECTORS = "this task's inputs are vectors, so vocab_size 0, got vocab_size "
REFUSED = [
    (Recall(2, 4, 4), {"vocab_size": 0}, (
        "this task's inputs are tokens, so a vocab_size of at least 8, got vocab_size 0"
    )),
    (Recall(2, 4, 4), {"vocab_size": 7}, (
        "this task's inputs are tokens, so a vocab_size of at least 8, got vocab_size 7"
    )),
    (Recall(2, 4, 4), {"vocab_size": 0, "input_dim": 16}, (
        "this task's inputs are tokens, so a vocab_size of at least 8, got vocab_size 0"
    )),
    (Recall(2, 4, 4), {"output_dim": 8}, (
        "output_dim must be the width of the task's answers, 4, got 8"
    )),
    (Recall(2, 4, 4), {"num_positions": 5}, (
        "num_positions must be at least the task's 6 tokens, got 5"
    )),
    (Text(16), {"vocab_size": 27}, (
        "this task's inputs are tokens, so a vocab_size of at least 28, got vocab_size 27"
    )),
    (Text(16), {"output_dim": 27}, (
        "output_dim must be the width of the task's answers, 28, got 27"
    )),
    (Text(16), {"causal": False}, (
        "a shape for this task must be causal, because later tokens hold the answers; got causal "
        "False"
    )),
    (ListOps(), {"vocab_size": 15}, (
        "this task's inputs are tokens, so a vocab_size of at least 16, got vocab_size 15"
    )),
    (ListOps(), {"output_dim": 11}, (
        "output_dim must be the width of the task's answers, 10, got 11"
    )),
    (Images(4), {"vocab_size": 16, "input_dim": 0}, VECTORS + "16"),
    (Images(4), {"input_dim": 15}, (
        "a shape's input_dim must be its task's in_dim, got "
            "input_dim 15, in_dim 16: input_dim=16 takes them"
    )),
    (Images(2), {"input_dim": 0}, ("a shape's dim must be its task's in_dim, got "
            "dim 16, in_dim 4: input_dim=4 takes them")),
    (Images(4), {"output_dim": 9}, "output_dim must be the width of the task's answers, 10, got 9"),
    (Images(4), {"dim": 8, "output_dim": 0}, (
        "outputs must be at least as wide as the task's answers, 10, got 8"
    )),
    (Farthest(16, 5), {"input_dim": 0, "output_dim": 0, "vocab_size": 9}, VECTORS + "9"),
    (Regression(16, 5), {"input_dim": 0, "vocab_size": 9}, VECTORS + "9"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("task", "changes", "message"), REFUSED, ids=[f"{type(t).__name__} {c}" for t, c, _ in REFUSED]
)
def test_shape_that_does_not_fit_the_task_is_refused(task, changes, message):
    shape, recipe = shape_for(task), Recipe(steps=100)
    Run(shape, task, recipe)
    assert refused(Run, shape.replace(**changes), task, recipe) == message


def test_wider_vocabulary_or_a_vector_as_wide_as_the_model_fits():
    Run(shape_for(Recall(2, 4, 4), vocab_size=50), Recall(2, 4, 4), Recipe(steps=100))
    run = Run(
        shape_for(Images(4), input_dim=0, output_dim=0),
        Images(4),
        Recipe(steps=2, epoch=2, batch=16, held_out=16, evals=1),
    )
    assert together([run])[0]["status"] == "done"


def test_specs_of_runs_round_trip_with_what_their_data_were(tmp_path):
    source = written(tmp_path / "a.txt", letters(500))
    tasks = [
        Recall(2, 4, 4, queries=1),
        ListOps(length=24, nested=0.5),
        Text(16),
        Images(8),
        Text(7, source, "byte"),
        Text(7, source, most=9),
    ]
    tasks.append(Images(3, mnist(tmp_path / "m", digits())))
    for task in tasks:
        run = Run(shape_for(task), task, Recipe(steps=100), 3)
        spec = json.loads(json.dumps(run.spec()))
        again = Run.of(spec)
        assert again == run
        assert again.id == run.id
        if "digest" in spec["task"]:
            assert re.fullmatch(r"[0-9a-f]{12}", spec["task"]["digest"])
            spec["task"]["digest"] = "0" * 12
            assert "expected 000000000000" in refused(Run.of, spec)
            del spec["task"]["digest"]
            assert Run.of(spec) == run, "without one it is found"
    assert len({Run(shape_for(task), task, Recipe(steps=100)).id for task in tasks}) == len(tasks)


def test_id_of_a_run_follows_the_text(tmp_path):
    """The same path with another text is another run, so no row of the one is taken for the
    other's."""
    ids = []
    for seed in (0, 1):
        task = Text(7, written(tmp_path / "a.txt", letters(500, seed)))
        ids.append(Run(shape_for(task, vocab_size=26), task, Recipe(steps=100)).id)
        forget()
    assert ids[0] != ids[1]


# ---- kernels that know one loss


def test_fused_step_takes_no_task_but_squared_errors(monkeypatch):
    """Of a shape that it takes, only the task decides; the blocks alone leave the loss to the
    task."""
    monkeypatch.setattr(step, "has_triton", lambda: True)
    shape, gpu = paper_shape(16, 1, 16, 1, ffn_dim=64), torch.device("cuda")
    recipe = Recipe(steps=100, batch=256, precision="fp16")
    assert fused_encoder.refusal(shape, 16, 256, "fp16") == ""
    assert family_of(Run(shape, Farthest(16, 16), recipe), gpu) is FusedEncoder
    run = Run(shape, Images(4), recipe)
    assert isinstance(run.task, Classified)
    assert FusedEncoder.refusal(run, gpu).startswith("needs the squared error, this task is ")
    assert FusedDecoder.refusal(run, gpu)
    assert family_of(run, gpu) is None
    for task in (Recall(2, 4, 4), Text(16), ListOps(), Images(4), Regression(16, 8)):
        other = Run(shape_for(task), task, recipe)
        assert not task.squared
        assert FusedEncoder.refusal(other, gpu).startswith("needs the squared error")


BLOCKS = {
    "qkv_bias": True,
    "out_bias": True,
    "ffn_bias": True,
    "activation": "gelu",
    "norm_at": "pre",
}


@pytest.mark.parametrize("output_dim", [0, 28])
def test_text_trains_on_the_blocks_as_on_the_modules(output_dim, monkeypatch):
    """Pre-norm blocks as kernels, without a GPU in Triton's interpreter; the table, which is used
    at both ends, and the loss around them are the modules' own."""
    pytest.importorskip("triton", reason="the kernels are written in triton")
    from support.gpu import DEVICE

    from headwise.training import fused_decoder
    from headwise.training.decoder_blocks import TritonBlocks

    task, forward = Text(32), TritonBlocks.forward
    used, rows = [], []
    recipe = Recipe(
        steps=2, epoch=1, batch=2, held_out=2, evals=1, lr=0.03, schedule="constant", init="normal"
    )
    run = Run(shape_for(task, 2, **BLOCKS, output_dim=output_dim), task, recipe, 3)
    assert fused_decoder.refusal(run.shape, 32, 2, "fp32") == ""
    for blocks in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(data, "HELD_OUT_BATCH", 2)
            family = FusedDecoder if blocks else None
            patch.setattr(ensemble, "family_of", lambda run, device, family=family: family)
            patch.setattr(TritonBlocks, "forward", lambda *given: used.append(1) or forward(*given))
            rows += train([run], device=DEVICE.type, advance=lambda n: None)
        assert bool(used) == blocks
    plain, ours = rows
    assert ours["curve"] == pytest.approx(plain["curve"], rel=1e-5)
    assert ours["held_out"] == pytest.approx(plain["held_out"], rel=1e-5)
    assert ours["held_out_accuracy"] == pytest.approx(plain["held_out_accuracy"], abs=0.02)
    assert abs(plain["held_out"] - plain["curve"][0]) > 0.05, "it learns too little to be compared"
