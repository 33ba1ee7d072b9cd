"""What is drawn: epochs replayed and streamed, seeds, and the held-out set."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from support.small_runs import CPU, make, together

from headwise.model.init import initialise
from headwise.model.transformer import build
from headwise.seeds import derive
from headwise.training.data import HELD_OUT_BATCH, HELD_OUT_SEED, block_steps, draw_block
from headwise.training.run import PROTOCOLS, Run


def sequences(tensor: torch.Tensor) -> set[bytes]:
    return {x.numpy().tobytes() for x in tensor.flatten(0, -3)}


def test_replay_repeats_its_epoch_and_a_stream_never_repeats() -> None:
    stream, replay = make(5, epoch=6, steps=36), make(5, epoch=6, steps=36, protocol="replay")
    blocks = 36 // block_steps(stream.task, stream.recipe)
    per_epoch = blocks // 6
    again = [draw_block(replay, b, CPU) for b in range(blocks)]
    for b, (x, target) in enumerate(again):
        first_x, first_target = again[b % per_epoch]
        assert torch.equal(x, first_x)
        assert torch.equal(target, first_target)
    seen: set[bytes] = set()
    for b in range(blocks):
        fresh = sequences(draw_block(stream, b, CPU)[0])
        assert not seen & fresh
        seen |= fresh
    assert len(seen) == 36 * 16
    assert len(set().union(*(sequences(x) for x, _ in again))) == 6 * 16


def test_replay_within_an_epoch_of_several_blocks_is_all_different() -> None:
    run = make(5, epoch=60, steps=120, protocol="replay")
    per_epoch = 60 // block_steps(run.task, run.recipe)
    assert per_epoch > 1
    first = [sequences(draw_block(run, b, CPU)[0]) for b in range(per_epoch)]
    assert len(set().union(*first)) == 60 * 16
    assert sequences(draw_block(run, per_epoch, CPU)[0]) == first[0]


def test_protocols_share_their_first_epoch_and_part_after_it() -> None:
    stream, replay = together([make(0), make(0, protocol="replay")])
    assert stream["curve"][0] == replay["curve"][0]
    assert stream["curve"][1] != replay["curve"][1]


def test_seeds_differ_in_data_and_weights_and_repeat_both(tmp_path: Path) -> None:
    seen = [
        sequences(draw_block(make(seed), block, CPU)[0]) for seed in range(6) for block in range(3)
    ]
    assert len(set().union(*seen)) == sum(map(len, seen)), "two seeds share sequences"
    runs = [make(seed, lr=0.0) for seed in range(2)]
    together(runs, folder=tmp_path, keep_weights=True)
    a, b = (load_file(tmp_path / run.id / "weights.safetensors") for run in runs)
    assert not torch.equal(a["blocks.0.attention.out.weight"], b["blocks.0.attention.out.weight"])
    one = build(runs[0].shape)
    initialise(one, "library", torch.Generator().manual_seed(derive(0, "init")))
    for name, weight in one.state_dict().items():
        assert torch.equal(a[name], weight), "a rate of 0 moved the weights"


def held_out_batches(run: Run) -> list[tuple[torch.Tensor, torch.Tensor]]:
    count = math.ceil(run.recipe.held_out / HELD_OUT_BATCH)
    draw = ("held out", *filter(None, [run.recipe.evaluated_on]))
    seeds = (derive(HELD_OUT_SEED, *draw, batch) for batch in range(count))
    return [run.task.sample(torch.Generator().manual_seed(seed), HELD_OUT_BATCH) for seed in seeds]


def test_weights_that_are_kept_give_the_recorded_error_on_one_set_for_all_runs(
    tmp_path: Path,
) -> None:
    """Also for runs of other seeds, batch sizes and protocols: the set depends on the task
    alone."""
    runs = [
        make(0, held_out=300),
        make(1, held_out=300, rank=4),
        make(2, held_out=300, batch=9),
        make(3, held_out=300, protocol="replay"),
        make(3, held_out=300, evaluated_on="validation"),
    ]
    rows = together(runs, folder=tmp_path, keep_weights=True)
    for run, row in zip(runs, rows, strict=True):
        path = tmp_path / run.id / "weights.safetensors"
        with safe_open(path, "pt") as f:
            assert Run.of(json.loads(f.metadata()["run"])) == run
        model = build(run.shape)
        model.load_state_dict(load_file(path))
        with torch.no_grad():
            errors = [
                run.task.loss(model(x)[0], target).item() for x, target in held_out_batches(run)
            ]
        assert len(errors) == 3
        assert row["held_out"] == pytest.approx(np.mean(errors), rel=1e-6)
        assert row["held_out_se"] == pytest.approx(np.std(errors, ddof=1) / math.sqrt(3), rel=1e-3)
        assert row["held_out_curve"][-1] == (run.recipe.epochs, row["held_out"])


def test_held_out_set_is_trained_on_by_no_run() -> None:
    run = make(held_out=1000)
    kept = set().union(*(sequences(x) for x, _ in held_out_batches(run)))
    assert len(kept) == math.ceil(1000 / HELD_OUT_BATCH) * HELD_OUT_BATCH
    for seed in (*range(20), HELD_OUT_SEED):
        for protocol in PROTOCOLS:
            assert not kept & sequences(draw_block(make(seed, protocol=protocol), 0, CPU)[0])


def test_validation_draw_shares_no_sequence_and_changes_nothing_else() -> None:
    """The weights are those of the same run evaluated on the common draw, and so are old ids."""
    run, other = make(held_out=1000), make(held_out=1000, evaluated_on="validation")
    common, validation = (
        set().union(*(sequences(x) for x, _ in held_out_batches(one))) for one in (run, other)
    )
    assert not common & validation
    assert "evaluated_on" not in run.spec()["recipe"]
    assert Run.of(json.loads(json.dumps(other.spec()))) == other
    first, second = together([run]), together([other])
    assert first[0]["curve"] == second[0]["curve"]
    assert first[0]["held_out"] != second[0]["held_out"]


def test_held_out_error_is_measured_as_often_as_asked() -> None:
    epochs = [e for e, _ in together([make(evals=3)])[0]["held_out_curve"]]
    assert epochs == [2, 4, 6]
    assert [e for e, _ in together([make(evals=50)])[0]["held_out_curve"]] == [1, 2, 3, 4, 5, 6]
    assert [e for e, _ in together([make(evals=1)])[0]["held_out_curve"]] == [6]
