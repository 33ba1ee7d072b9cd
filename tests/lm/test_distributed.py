"""Several processes train what one trains: DDP, FSDP2, and torchrun on the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.lm_runs import alike, make_run, stop, trained_row
from support.pretrain_command import answer, words_of
from support.tolerance import close

from headwise.cli import main
from headwise.lm import trainer
from headwise.store import Store

TWO = """
import json, os, socket, sys
import torch
from pathlib import Path
from headwise.lm.spec import Pretraining
from headwise.lm.trainer import Trainer, pretrain
from headwise.lm.distributed import process_group
from headwise.lm.launch import from_env
from headwise.errors import UsageError
folder, jobs = Path(sys.argv[1]), json.loads(sys.argv[2])
with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(s.getsockname()[1]))
os.environ.update(WORLD_SIZE="2", TOKENIZERS_PARALLELISM="false")
child = os.fork()
os.environ["RANK"] = os.environ["LOCAL_RANK"] = "1" if child else "0"
world, step, rows = from_env(), Trainer.step, {}
with process_group(world, torch.device("cpu")):
    for name, spec, stop, options in jobs:
        def some(self, flag=False):
            if self.steps == stop:
                raise InterruptedError
            return step(self, flag)
        Trainer.step = some
        run = Pretraining.of(spec)
        try:
            place = {"folder": folder / name, "cache": folder}
            rows[name] = pretrain(run, device="cpu", world=world, quiet=True, **place, **options)
        except InterruptedError:
            rows[name] = "stopped"
        except UsageError as e:
            rows[name] = str(e)
if child:
    assert os.waitpid(child, 0)[1] == 0
else:
    print(json.dumps(rows), flush=True)
"""


def test_training_in_two_processes_is_training_in_one(book: str, tmp_path: Path) -> None:
    """DDP and FSDP2 with either optimiser and a gradient in parts, odd sizes; and a checkpoint of
    any of them is one of all."""
    runs = {
        optimiser: make_run(book, optimiser=optimiser, weight_decay=0.1)
        for optimiser in ("muon", "adamw")
    }
    one = {optimiser: trained_row(run) for optimiser, run in runs.items()}
    muon, short = runs["muon"], make_run(book, batch_tokens=99)
    often = make_run(book, evals=muon.steps)
    stop(muon, 3, tmp_path / "from one")
    stop(short, 1, tmp_path / "other")
    os.renames(tmp_path / "other" / short.id, tmp_path / "other" / muon.id)
    jobs: list[Any] = [
        *(
            (f"{o} {shard}", run.spec(), None, {"shard": shard})
            for o, run in runs.items()
            for shard in ("ddp", "fsdp")
        ),
        ("ddp parts", muon.spec(), None, {"shard": "ddp", "accumulate": 2}),
        ("fsdp parts", muon.spec(), None, {"shard": "fsdp", "accumulate": 4}),
        ("to one", muon.spec(), 4, {"shard": "fsdp", "checkpoint_every": 0}),
        ("evaluated often", often.spec(), 4, {"checkpoint_every": 0}),
        ("from one", muon.spec(), None, {"shard": "fsdp"}),
        ("other", muon.spec(), None, {"shard": "fsdp"}),
        ("odd", short.spec(), None, {}),
    ]
    done = subprocess.run(
        [sys.executable, "-c", TWO, str(tmp_path), json.dumps(jobs)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    for name in ("muon ddp", "muon fsdp", "ddp parts", "fsdp parts", "from one"):
        alike(rows[name], one["muon"])
    for name in ("adamw ddp", "adamw fsdp"):
        alike(rows[name], one["adamw"])
    assert [rows[name]["processes"] for name in ("muon ddp", "muon fsdp")] == [2, 2]
    assert rows["from one"]["resumed"] == 1
    assert rows["to one"] == "stopped"
    again = trained_row(muon, folder=tmp_path / "to one")
    assert again["resumed"] == 1
    alike(again, one["muon"])
    assert rows["evaluated often"] == "stopped"
    assert trained_row(often, folder=tmp_path / "evaluated often")["resumed"] == 1, (
        "a checkpoint that is due at an evaluation is made"
    )
    assert rows["other"]["resumed"] == 0, (
        "a checkpoint of another run is put aside by all processes"
    )
    alike(rows["other"], one["muon"])
    assert "is of another run: batch_tokens 99 for 88" in done.stderr
    assert rows["odd"] == (
        "processes times accumulate must divide the 9 rows of a step, got 2 processes, accumulate 1"
    )
    weights = [
        load_file(tmp_path / name / muon.id / "weights.safetensors")
        for name in ("muon ddp", "muon fsdp", "to one")
    ]
    for name, full in weights[0].items():
        close(weights[1][name], full, name)
        close(weights[2][name], full, name)


def test_comparison_of_processes_sees_a_wrong_gradient(
    book: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above is sharp: a gradient half as large, as from a world counted wrongly,
    does not pass."""
    run = make_run(book, optimiser="adamw", clip=0.2)
    reference = trained_row(run)
    nats = trainer.nats_of
    monkeypatch.setattr(
        trainer, "nats_of", lambda logits, targets: nats(logits, targets) * (1 + 1e-4)
    )
    with pytest.raises(AssertionError):
        alike(trained_row(run), reference)


def test_torchrun_reports_once(
    book: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "headwise",
    ]

    def command(store: str) -> list[str]:
        return words_of(tmp_path / store, book, "--steps", "5", "--checkpoint-every", "60")

    done = subprocess.run(
        [*launcher, *command("two")], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("bits per byte") == 1
    row = answer(done.stdout)
    assert (row["processes"], row["shard"]) == (2, "ddp")
    assert Store(tmp_path / "two").rows() == [row]
    assert main(command("one")) == 0
    alike(row, answer(capsys.readouterr().out))
