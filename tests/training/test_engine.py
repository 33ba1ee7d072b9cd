"""Training through the engine: rows and their order, what diverges, what does not fit the memory,
progress."""

import json
from pathlib import Path

import pytest
import torch
from support.mixes import MIXES
from support.small_runs import CPU, WILD, bits, make, together

from headwise.model.init import initialise
from headwise.model.transformer import build
from headwise.seeds import derive
from headwise.training.data import block_steps, draw_block
from headwise.training.engine import train
from headwise.training.ensemble import Ensemble


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


# ---- rows


def test_rows_come_in_the_order_of_the_runs_and_twins_are_trained_once() -> None:
    runs = [make(1, rank=4), make(0, rank=12), make(1, rank=4), make(0, depth=2)]
    finished: list[str] = []
    rows = together(runs, done=lambda row: finished.append(row["id"]))
    assert [row["id"] for row in rows] == [run.id for run in runs]
    assert sorted(finished) == sorted({run.id for run in runs})


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
    assert lost["models"] == 5, "it was not in one ensemble with the others"
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


# ---- an ensemble that does not fit the memory


def narrow(monkeypatch: pytest.MonkeyPatch, most: int, block: int = 0) -> None:
    """From this block on an ensemble of more than so many models runs out of memory."""
    real = Ensemble.run_block

    def run_block(self: Ensemble, at: int) -> torch.Tensor:
        if len(self.runs) > most and at >= block:
            raise torch.OutOfMemoryError(f"no room for {len(self.runs)}")
        return real(self, at)

    monkeypatch.setattr(Ensemble, "run_block", run_block)


FIVE = [*MIXES["head splits"][:4], make(7, lr=0.05, weight_decay=0.1)]
HALVES = {
    4: ["5 models at once do not fit the memory; now 2 and 3"],
    2: [
        "5 models at once do not fit the memory; now 2 and 3",
        "3 models at once do not fit the memory; now 1 and 2",
    ],
    1: [
        "5 models at once do not fit the memory; now 2 and 3",
        "2 models at once do not fit the memory; now 1 and 1",
        "3 models at once do not fit the memory; now 1 and 2",
        "2 models at once do not fit the memory; now 1 and 1",
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
