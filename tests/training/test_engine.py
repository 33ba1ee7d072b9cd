"""Training: schedules, the stacked optimiser against torch's own, runs that do not know of each
other, what diverges, data."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from support.small_runs import CPU, SHAPES, WILD, alone, bits, make, together

from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.model.init import initialise
from headwise.model.transformer import build
from headwise.seeds import derive
from headwise.shape import Shape
from headwise.tasks import BiasedNearest, Farthest, Nearest
from headwise.training import ensemble
from headwise.training.checkpoint import begin
from headwise.training.data import HELD_OUT_BATCH, HELD_OUT_SEED, block_steps, draw_block
from headwise.training.engine import train
from headwise.training.ensemble import Ensemble
from headwise.training.run import PROTOCOLS, SCHEDULES, Recipe, Run, ensemble_key

# ---- stacks


def test_runs_that_the_kernels_refuse_do_not_hold_back_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A head of rank 128 is too wide for them; the same width cut in two is not, and would be
    stacked with it."""
    monkeypatch.setattr(ensemble, "most_models", lambda run, device: 64)
    shapes = [
        paper_shape(dim=128, depth=1, rank=rank, width=1, ffn_dim=64, points=16)
        for rank in (128, 64, 32)
    ]
    runs = [
        Run(shape, Farthest(128, 16), Recipe(steps=10, epoch=5, batch=64), seed)
        for shape in shapes
        for seed in range(2)
    ]
    assert len({ensemble_key(run) for run in runs}) == 1
    states = [begin(run) for run in runs]
    by_kernels = ensemble.pack(states, torch.device("cuda"))
    assert [sorted(s.run.shape.head_dim for s in stack) for stack in by_kernels] == [
        [128, 128],
        [32, 32, 64, 64],
    ]
    assert [len(stack) for stack in ensemble.pack(states, CPU)] == [6]


# ---- schedules


def by_epoch(recipe: Recipe) -> np.ndarray:
    rates = recipe.rates().reshape(recipe.epochs, recipe.epoch)
    assert (rates == rates[:, :1]).all(), "the rate changes within an epoch"
    return rates[:, 0]


def test_published_schedule_has_the_published_values() -> None:
    rates = by_epoch(Recipe(steps=100_000, epoch=100, lr=0.01, schedule="published"))
    assert rates[0] == 0
    assert rates[1] == pytest.approx(2.041e-4, rel=5e-4)
    assert rates[500] == pytest.approx(5.413e-3, rel=5e-4)
    assert rates[999] == pytest.approx(2.7e-8, rel=2e-2)
    assert rates.argmax() == 49
    assert rates[49] == rates[50] == 0.01
    assert (np.diff(rates[:50]) > 0).all()
    assert (np.diff(rates[50:]) < 0).all()


def test_published_warm_up_is_a_twentieth_of_the_epochs() -> None:
    rates = by_epoch(Recipe(steps=200_000, epoch=100, lr=0.005, schedule="published"))
    assert rates.argmax() == 99
    assert rates[99] == rates[100] == 0.005
    assert rates[1] == pytest.approx(0.005 / 99)
    assert (
        Recipe(steps=70, epoch=1, schedule="published").rates().argmax() == 2
    )  # three epochs, of 3.5


def test_published_schedule_warms_up_longer_when_asked_to() -> None:
    rates = by_epoch(Recipe(steps=30_000, epoch=100, lr=0.01, schedule="published", warmup=0.17))
    assert rates.argmax() == 50
    assert rates[:51] == pytest.approx(0.01 * np.arange(51) / 50)


def test_cosine_and_constant_schedules() -> None:
    rates = Recipe(steps=200, epoch=100, lr=0.3, warmup=0.1).rates()
    assert rates[:20] == pytest.approx(0.3 * np.arange(1, 21) / 20)
    assert rates[20] == 0.3
    assert rates[110] == pytest.approx(0.15)  # half-way down
    assert 0 < rates[-1] < 1e-4
    assert Recipe(steps=200, epoch=100, lr=0.3, warmup=0.0).rates()[0] == 0.3
    assert (Recipe(steps=7, epoch=1, lr=0.3, schedule="constant").rates() == 0.3).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("steps", "epoch"), [(1, 1), (2, 1), (5, 5), (19, 1), (20, 1), (21, 1)])
@pytest.mark.parametrize("warmup", [0.0, 0.5, 1.0])
def test_rates_are_sane_at_every_length(
    schedule: str, steps: int, epoch: int, warmup: float
) -> None:
    rates = Recipe(steps=steps, epoch=epoch, lr=0.7, schedule=schedule, warmup=warmup).rates()
    assert rates.shape == (steps,)
    assert np.isfinite(rates).all()
    assert (rates >= 0).all()
    assert (rates <= 0.7).all()


# ---- the optimiser


def torch_adamw(run: Run) -> tuple[torch.nn.Module, list[float]]:
    """The same run with torch's optimiser, one model, no model axis."""
    r, model = run.recipe, build(run.shape)
    initialise(model, r.init, torch.Generator().manual_seed(derive(run.seed, "init")))
    optimiser = torch.optim.AdamW(
        model.parameters(),
        betas=(r.beta1, r.beta2),
        eps=r.eps,
        weight_decay=r.weight_decay,
        foreach=False,
    )
    losses, per_block = [], block_steps(run.task, r)
    for step, rate in enumerate(r.rates()):
        x, target = draw_block(run, step // per_block, CPU)
        optimiser.param_groups[0]["lr"] = float(rate)
        optimiser.zero_grad()
        loss = run.task.loss(model(x[step % per_block])[0], target[step % per_block])
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return model, [sum(losses[i : i + r.epoch]) / r.epoch for i in range(0, r.steps, r.epoch)]


def test_ensemble_adamw_is_torch_adamw_one_model_at_a_time(tmp_path: Path) -> None:
    settings: list[dict[str, Any]] = [
        {"lr": 0.01},
        {"lr": 0.02, "schedule": "constant", "weight_decay": 0.3},
        {"lr": 0.005, "schedule": "published", "weight_decay": 1.0, "protocol": "replay"},
        {"lr": 0.01, "init": "published"},
    ]
    runs = [make(i, depth=2, rank=4, steps=30, **s) for i, s in enumerate(settings)]
    rows = together(runs, folder=tmp_path, keep_weights=True)
    assert {row["models"] for row in rows} == {len(runs)}
    for run, row in zip(runs, rows, strict=True):
        model, curve = torch_adamw(run)
        assert row["curve"] == pytest.approx(curve, rel=1e-5)
        ours = load_file(tmp_path / run.id / "weights.safetensors")
        theirs = model.state_dict()
        assert set(ours) == set(theirs)
        for name, weight in theirs.items():
            judged = torch.ones_like(weight, dtype=torch.bool)
            if name.endswith("qkv.bias"):
                judged[12:24] = (
                    # softmax does not see the keys' bias: its gradient is rounding, which Adam
                    # scales up
                    False
                )
            torch.testing.assert_close(ours[name][judged], weight[judged], rtol=1e-4, atol=2e-5)


def test_weight_decay_is_seen_by_its_run_alone() -> None:
    plain, decayed = make(0), make(0, weight_decay=0.5)
    rows = together([plain, decayed])
    assert rows[0]["held_out"] != rows[1]["held_out"]
    assert list(map(bits, rows)) == list(map(bits, alone([plain, decayed])))


def test_stock_model_learns_the_same(tmp_path: Path) -> None:
    """Against PyTorch's own attention modules in a loop: the independent path from the first weight
    to the last."""
    from benchmarks.stock import StockEncoder, copy_into_stock

    run = make(3, rank=3, width=2, depth=2, steps=30, lr=0.01)
    one = build(run.shape)
    initialise(one, run.recipe.init, torch.Generator().manual_seed(derive(run.seed, "init")))
    stock = StockEncoder(run.shape)
    copy_into_stock(stock, one.state_dict(), run.shape)
    optimiser = torch.optim.AdamW(stock.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    losses, per_block = [], block_steps(run.task, run.recipe)
    for step, rate in enumerate(run.recipe.rates()):
        x, target = draw_block(run, step // per_block, CPU)
        optimiser.param_groups[0]["lr"] = float(rate)
        optimiser.zero_grad()
        loss = run.task.loss(stock(x[step % per_block]), target[step % per_block])
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    epochs = [sum(losses[i : i + 3]) / 3 for i in range(0, 30, 3)]
    assert together([run])[0]["curve"] == pytest.approx(epochs, rel=1e-5)


# ---- runs do not know of each other

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


@pytest.mark.parametrize("mix", MIXES)
def test_ensemble_trains_each_model_as_alone_bit_for_bit(mix: str) -> None:
    runs = MIXES[mix]
    rows = together(runs)
    assert {row["models"] for row in rows} == {len(runs)}, "they were not stacked"
    assert [row["id"] for row in rows] == [run.id for run in runs]
    assert list(map(bits, rows)) == list(map(bits, alone(runs)))


@pytest.mark.parametrize("name", SHAPES)
def test_ensemble_of_every_kind_of_shape_is_independent(name: str) -> None:
    recipe = Recipe(steps=8, epoch=4, batch=16, held_out=32, lr=0.003)
    runs = [Run(SHAPES[name], Farthest(16, 7), recipe, seed) for seed in range(3)]
    rows = together(runs)
    assert {row["models"] for row in rows} == {3}, "they were not stacked"
    assert list(map(bits, rows)) == list(map(bits, alone(runs)))


@pytest.mark.parametrize("name", SHAPES)
def test_ensemble_of_prime_sizes_is_independent(name: str) -> None:
    """Its matrices end within a cache line, so that a neighbour's product would take another path
    with other bits."""
    shape = Shape.of({**dataclasses.asdict(SHAPES[name]), "dim": 11})
    runs = [
        Run(shape, Farthest(11, 7), Recipe(steps=8, epoch=4, batch=16, held_out=32, lr=0.003), seed)
        for seed in range(3)
    ]
    assert list(map(bits, together(runs))) == list(map(bits, alone(runs)))


def test_ensemble_of_heads_of_one_number_is_independent() -> None:
    shape = Shape(dim=16, depth=1, num_heads=1, head_dim=1, ffn_dim=16)
    runs = [
        Run(shape, Farthest(16, 8), Recipe(steps=8, epoch=4, batch=8, held_out=32), seed)
        for seed in range(3)
    ]
    assert list(map(bits, together(runs))) == list(map(bits, alone(runs)))


@pytest.mark.parametrize(("batch", "points"), [(9, 5), (3, 7), (1, 2), (17, 3)])
def test_ensemble_of_batches_that_fill_no_cache_lines_is_independent(
    batch: int, points: int
) -> None:
    runs = [
        make(seed, rank=rank, batch=batch, points=points) for seed in range(2) for rank in (12, 3)
    ]
    assert batch * points % 16
    assert list(map(bits, together(runs))) == list(map(bits, alone(runs)))


def test_ensemble_on_a_task_with_one_query_token_is_independent() -> None:
    shape = paper_shape(dim=12, rank=4, ffn_dim=11)
    recipe = Recipe(steps=9, epoch=3, batch=16, held_out=32)
    runs = [
        Run(shape, task, recipe, seed)
        for seed in range(2)
        for task in (Nearest(12, 5), BiasedNearest(12, 5, bias=0.5))
    ]
    assert list(map(bits, together(runs))) == list(map(bits, alone(runs)))


def test_rows_come_in_the_order_of_the_runs_and_twins_are_trained_once() -> None:
    runs = [make(1, rank=4), make(0, rank=12), make(1, rank=4), make(0, depth=2)]
    finished: list[str] = []
    rows = together(runs, done=lambda row: finished.append(row["id"]))
    assert [row["id"] for row in rows] == [run.id for run in runs]
    assert sorted(finished) == sorted({run.id for run in runs})


def test_runs_that_cannot_share_an_ensemble_do_not() -> None:
    run = make()
    for other in (
        make(depth=2),
        make(width=2),
        make(batch=32),
        make(points=7),
        make(steps=21),
        make(beta1=0.8),
        make(dim=8, rank=8),
    ):
        assert ensemble_key(run) != ensemble_key(other)
    for other in (
        make(1),
        make(rank=2),
        make(lr=1.0),
        make(schedule="constant"),
        make(protocol="replay"),
        make(weight_decay=0.1),
    ):
        assert ensemble_key(run) == ensemble_key(other)


def test_run_made_again_is_the_same_row() -> None:
    assert bits(together([make(7)])[0]) == bits(together([make(7)])[0])


# ---- divergence

SANE = [
    make(0, steps=60),
    make(1, rank=4, steps=60),
    make(2, lr=0.05, steps=60),
    make(3, protocol="replay", steps=60),
]


@pytest.mark.parametrize("when", WILD)
@pytest.mark.parametrize("place", [0, 2, 4])
def test_run_that_diverges_leaves_the_others_alone(when: str, place: int) -> None:
    wild = WILD[when]
    runs = [*SANE[:place], wild, *SANE[place:]]
    rows = together(runs)
    lost = rows.pop(place)
    assert [bits(row) for row in rows] == [bits(row) for row in together(SANE)]
    assert {row["status"] for row in rows} == {"done"}
    assert lost["status"] == "diverged"
    assert lost["models"] == 5, "it was not stacked with the others"
    assert lost["held_out"] is None
    assert lost["train_last"] is None
    assert lost["epochs_done"] == len(lost["curve"]) < wild.recipe.epochs
    assert lost["epochs_done"] == (2 if when == "in the middle" else 1)
    assert json.loads(json.dumps(lost, allow_nan=False))["id"] == wild.id


def test_ensemble_may_diverge_completely() -> None:
    rows = together([make(seed, lr=1e6, schedule="constant") for seed in (1, 2, 4)])
    assert {row["status"] for row in rows} == {"diverged"}


@pytest.mark.parametrize("lr", [1e6, 1e30, 3e38])
def test_run_that_diverges_in_its_very_last_step_is_seen_by_its_held_out_error(lr: float) -> None:
    wild = make(0, steps=1, epoch=1, lr=lr, schedule="constant")
    rows = together([wild, make(1, steps=1, epoch=1)])
    assert [row["status"] for row in rows] == ["diverged", "done"]
    assert rows[0]["held_out"] is None
    json.dumps(rows, allow_nan=False)


def test_progress_counts_every_step_once_also_of_those_that_diverge() -> None:
    made: list[int] = []
    runs = [*SANE, WILD["in the middle"]]
    train(runs, device="cpu", advance=made.append)
    assert sum(made) == sum(run.recipe.steps for run in runs)


# ---- a stack that does not fit the memory


def narrow(monkeypatch: pytest.MonkeyPatch, most: int, block: int = 0) -> None:
    """From this block on a stack of more than so many models runs out of memory."""
    real = Ensemble.run_block

    def run_block(self: Ensemble, at: int) -> torch.Tensor:
        if len(self.runs) > most and at >= block:
            raise torch.OutOfMemoryError(f"no room for {len(self.runs)}")
        return real(self, at)

    monkeypatch.setattr(Ensemble, "run_block", run_block)


FIVE = [*MIXES["head splits"][:4], make(7, lr=0.05, weight_decay=0.1)]
HALVES = {
    4: ["5 models at once do not fit the memory; going on with 2 and 3"],
    2: [
        "5 models at once do not fit the memory; going on with 2 and 3",
        "3 models at once do not fit the memory; going on with 1 and 2",
    ],
    1: [
        "5 models at once do not fit the memory; going on with 2 and 3",
        "2 models at once do not fit the memory; going on with 1 and 1",
        "3 models at once do not fit the memory; going on with 1 and 2",
        "2 models at once do not fit the memory; going on with 1 and 1",
    ],
}


@pytest.mark.parametrize("most", HALVES)
@pytest.mark.parametrize(
    ("block", "kept"),
    [(0, False), (4, False), (4, True)],
    ids=["at once", "later", "later, with checkpoints"],
)
def test_ensemble_that_does_not_fit_is_halved(
    most: int,
    block: int,
    kept: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = list(map(bits, together(FIVE)))
    narrow(monkeypatch, most, block)
    made: list[int] = []
    finished: list[str] = []
    rows = train(
        FIVE,
        device="cpu",
        advance=made.append,
        folder=tmp_path if kept else None,
        checkpoint_every=0,
        done=lambda row: finished.append(row["id"]),
    )
    assert list(map(bits, rows)) == expected
    assert sorted(finished) == sorted(run.id for run in FIVE), "each once"
    assert max(row["models"] for row in rows) <= most
    assert sum(made) == sum(run.recipe.steps for run in FIVE)
    assert all(row["resumed"] >= 1 for row in rows) == kept
    assert capsys.readouterr().err.splitlines() == [f"headwise: {line}" for line in HALVES[most]]
    assert not list(tmp_path.rglob("checkpoint*"))


def test_ensembles_wait_for_the_halves_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [*MIXES["seeds"], make(0, depth=2), make(1, depth=2)]
    expected = list(map(bits, together(runs)))
    narrow(monkeypatch, 2)
    finished: list[str] = []
    assert list(map(bits, together(runs, done=lambda row: finished.append(row["id"])))) == expected
    assert finished == [run.id for run in runs]


def test_run_that_does_not_fit_is_an_error_and_rows_of_the_others_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = Ensemble.run_block

    def run_block(self: Ensemble, at: int) -> torch.Tensor:
        if any(run.seed == 3 for run in self.runs):
            raise torch.OutOfMemoryError("no room")
        return real(self, at)

    monkeypatch.setattr(Ensemble, "run_block", run_block)
    finished: list[str] = []
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        together(MIXES["seeds"], done=lambda row: finished.append(row["id"]))
    assert finished == [run.id for run in MIXES["seeds"][:3]]
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        together([make(3)])


def test_progress_adds_up_also_when_some_diverge_before_the_memory_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = [*SANE, WILD["at once"]]
    expected = list(map(bits, together(runs)))
    narrow(monkeypatch, 2, block=block_steps(SANE[0].task, SANE[0].recipe) * 4)
    made: list[int] = []
    assert list(map(bits, train(runs, device="cpu", advance=made.append))) == expected
    assert sum(made) == sum(run.recipe.steps for run in runs)


# ---- data


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
    seeds = (derive(HELD_OUT_SEED, "held out", batch) for batch in range(count))
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


def test_held_out_error_is_measured_as_often_as_asked() -> None:
    epochs = [e for e, _ in together([make(evals=3)])[0]["held_out_curve"]]
    assert epochs == [2, 4, 6]
    assert [e for e, _ in together([make(evals=50)])[0]["held_out_curve"]] == [1, 2, 3, 4, 5, 6]
    assert [e for e, _ in together([make(evals=1)])[0]["held_out_curve"]] == [6]
