"""One decoder on a text: against a loop by hand, killed, resumed, shared between processes; every
mistake one line."""

import dataclasses
import functools
import gc
import itertools
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file, save_file
from support.data import refused, written
from support.processes import started
from support.tokenizer import MANY, trained_tokenizer
from support.tolerance import close, seeded
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from headwise.cli import main
from headwise.lm import corpus as lm_corpus
from headwise.lm import trainer
from headwise.lm.corpus import find_text, find_tokenizer, load, rows_at
from headwise.lm.distributed import Ranks
from headwise.lm.optim import rate
from headwise.lm.spec import Pretraining
from headwise.lm.trainer import JUDGED, PEAKS, UNLIKE, Training, peak_of, pretrain, ratio
from headwise.model.init import initialise
from headwise.model.transformer import Decoder
from headwise.seeds import derive
from headwise.shape import Shape
from headwise.store import Store
from headwise.tasks.generated_text import generated_text
from headwise.tasks.text import Text

CPU = torch.device("cpu")
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


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three documents, the last of them and the end of the second held out, an odd number of
    batches."""
    folder = tmp_path_factory.mktemp("book")
    written(folder / "a.txt", generated_text(9_000))
    written(folder / "b.txt", generated_text(5_000, seed=1) + "fin, enfin: é, 走.")
    written(folder / "c.txt", generated_text(700, seed=2))
    return str(folder)


def make(book: str, **changes: Any) -> Pretraining:
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
        {k: v for k, v in row.items() if k not in UNLIKE}, allow_nan=False, sort_keys=True
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
    step = Training.step

    def some(self: Training, flag: bool = False) -> bool:
        if len(self.losses) == steps:
            raise Stopped
        return step(self, flag)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "step", some)
        with pytest.raises(Stopped):
            trained_row(run, folder=folder, checkpoint_every=0)


# ---- against a loop by hand


def by_hand(run: Pretraining) -> tuple[Decoder, list[float]]:
    """The same training with torch's AdamW, one process, whole batches, nothing of ours but model
    and rows."""
    corpus = load(find_text(run.source), None)
    model = Decoder(run.shape)
    initialise(model, "normal", seeded(derive(run.seed, "init")))
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": run.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimiser, losses = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8), []
    for step in range(run.steps):
        for group in optimiser.param_groups:
            group["lr"] = run.lr * rate(run.schedule, step, run.steps, run.warmup, run.warmdown)
        ids = rows_at(corpus, run.length, run.seed, step * run.rows, run.rows)
        logits, _ = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        total = torch.stack(
            [p.grad.norm() for p in model.parameters() if p.grad is not None]
        ).norm()
        if run.clip and total > run.clip:
            for p in model.parameters():
                assert p.grad is not None
                p.grad.mul_(run.clip / total)
        optimiser.step()
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_a_gradient_within_the_bound_is_left_as_it_is(book: str, optimiser: str) -> None:
    far, none, near = (
        trained_row(make(book, optimiser=optimiser, clip=clip)) for clip in (1e9, 0, 1e-3)
    )
    assert far["curve"] == none["curve"]
    assert near["curve"] != none["curve"]


def test_a_training_is_gone_when_it_is_done(book: str) -> None:
    run = make(book)
    corpus = load(find_text(run.source), None)
    training = Training(run, corpus, CPU, Ranks(), 1, "ddp", "")
    training.step()
    there = weakref.ref(training)
    gc.disable()
    try:
        del training
        assert there() is None, "weights and moments would wait for the collector, run after run"
    finally:
        gc.enable()


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute"
)  # torch's own, of what goes from block to block
@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
@pytest.mark.parametrize("compiled", ["model", "blocks"])
def test_compiled_it_is_the_same_training(
    book: str, compiled: str, optimiser: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, graphs = make(book, optimiser=optimiser), []

    def backend(graph: Any, given: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    whole = trained_row(run)
    torch._dynamo.reset()
    monkeypatch.setattr(
        torch,
        "compile",
        functools.partial(torch.compile, backend=aot_autograd(fw_compiler=backend)),
    )
    row = trained_row(run, compiled=compiled)
    alike(row, whole)
    assert row["compiled"] == compiled
    told = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    assert not any("cos" in name for name in told), (
        "rotary positions are made beforehand, not in every kernel that needs them"
    )
    assert len(graphs) == (
        2 if compiled == "model" else 2 * 3
    )  # two layers, two windows, and the loss


@pytest.mark.parametrize(
    "changes", [{}, {"clip": 0.3}, {"schedule": "cosine", "clip": 0, "seed": 3}]
)
def test_a_loop_by_hand_gives_the_same_losses(
    book: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    run = make(book, optimiser="adamw", weight_decay=0.1, **changes)
    row = trained_row(run, folder=tmp_path)
    model, losses = by_hand(run)
    assert row["curve"] == pytest.approx(losses, rel=1e-5)
    assert row["train_last"] == row["curve"][-1]
    kept = load_file(tmp_path / run.id / "weights.safetensors")
    for name, p in model.named_parameters():
        close(kept[name], p.detach(), name)
    with safe_open(tmp_path / run.id / "weights.safetensors", "pt") as f:
        assert Pretraining.of(json.loads(f.metadata()["run"])) == run


@pytest.mark.parametrize("coded", [False, True])
def test_bits_per_byte_and_repeats_by_hand(
    book: str, coded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every held-out id on its own, in float64; ends of documents do not count."""
    monkeypatch.setattr(lm_corpus, "RARE", 500)
    monkeypatch.setattr(trainer, "AT_ONCE", 3 * JUDGED * 11)
    path = trained_tokenizer(tmp_path / "tokenizer.json", 300) if coded else ""
    run = make(book, shape=SHAPE.replace(vocab_size=307), tokenizer=path)
    corpus = load(find_text(book), find_tokenizer(path)[0])
    training = Training(run, corpus, CPU, Ranks(), 1, "ddp", False)
    judged = training.judge()
    model = Decoder(run.shape).double()
    model.load_state_dict(training.model.state_dict())
    nats = size = count = hits = right = hit_nats = 0.0
    seen, most = Counter(itertools.pairwise(corpus.ids[: corpus.cut].tolist())), corpus.cut / 500
    ids, ends = corpus.ids[corpus.cut :].astype(int).tolist(), [0, *corpus.behind.tolist()]
    with torch.no_grad():
        for start in range(0, len(ids) - run.length, run.length):
            window = torch.tensor(ids[start : start + run.length + 1])
            logits, _ = model(window[None, :-1])
            before = set()
            for place, (last, target) in enumerate(itertools.pairwise(window.tolist())):
                cost = -logits[0, place].log_softmax(-1)[target].item()
                if target != corpus.end:
                    nats, count = nats + cost, count + 1
                    if (last, target) in before and seen[last, target] <= most:
                        hits, hit_nats = hits + 1, hit_nats + cost
                        right += logits[0, place].argmax().item() == target
                before.add((last, target))
            size += ends[start + run.length + 1] - ends[start + 1]
    assert judged.sum(0).tolist() == pytest.approx(
        [nats, size, count, hits, right, hit_nats], rel=1e-5
    )
    assert 0 < hits < count
    windows = (len(ids) - 1) // run.length
    assert len(judged) == -(-windows // JUDGED)
    assert windows * run.length - count == 1, "no document ends in the held-out part"
    assert (size == count) is not coded
    assert coded or len(judged) % 2 == 1
    mean, error = ratio(judged[:, 0] / math.log(2), judged[:, 1])
    assert mean == pytest.approx(nats / size / math.log(2), rel=1e-5)
    each = judged[:, 0] / judged[:, 1] / math.log(2)
    assert error == pytest.approx(each.std().item() / math.sqrt(len(each)), rel=0.3)


def test_a_ratio_and_its_error() -> None:
    over, under = torch.tensor([2.0, 3.0, 7.0]), torch.tensor([1.0, 2.0, 3.0])
    mean, error = ratio(over, under)
    assert mean == 2
    assert error == pytest.approx(math.sqrt((0 + 1 + 1) * 3 / 2) / 6)
    assert ratio(over[:1], under[:1]) == (2, None)


def test_at_the_start_every_byte_costs_as_much_as_equal_odds(book: str) -> None:
    """A model whose table is 0 says nothing: log2 of the ids, a byte."""
    run = make(book)
    training = Training(run, load(find_text(book), None), CPU, Ranks(), 1, "ddp", False)
    with torch.no_grad():
        training.named["embedding"].zero_()
    nats, size = training.judge()[:, :2].unbind(1)
    assert ratio(nats / math.log(2), size)[0] == pytest.approx(math.log2(263), rel=1e-6)


def test_it_learns(tmp_path: Path) -> None:
    """Below the odds of single bytes, and with Muon far below those of pairs, as counted."""
    shape = Shape(
        dim=32,
        depth=1,
        num_heads=2,
        qk_rope_head_dim=16,
        qk_norm="free",
        activation="relu2",
        causal=True,
        vocab_size=257,
    )
    text = written(tmp_path / "text.txt", generated_text(100_000))
    found = {}
    for kind, lr in (("muon", 0.02), ("adamw", 0.01)):
        row = trained_row(
            make(
                text,
                shape=shape,
                steps=120,
                batch_tokens=1024,
                length=64,
                lr=lr,
                optimiser=kind,
                evals=2,
            )
        )
        found[kind] = row["bits_per_byte"]
        assert row["curve"][0] == pytest.approx(math.log(257), rel=0.02)
        assert [step for step, _ in row["held_out_curve"]] == [60, 120]
        assert row["held_out_curve"][-1][1] == row["bits_per_byte"] < row["held_out_curve"][0][1]
        assert 0 < row["bits_per_byte_se"] < 0.1
    counted = Text(64, source=text, level="byte").baselines()
    assert found["muon"] < 0.6 * counted["pairs"] / math.log(2), (found, counted)
    assert found["adamw"] < 0.8 * counted["single"] / math.log(2), (found, counted)


def test_bfloat16_is_near_float32(book: str) -> None:
    exact, half = (trained_row(make(book, precision=p)) for p in ("fp32", "bf16"))
    assert exact["id"] != half["id"]
    assert half["curve"] == pytest.approx(exact["curve"], rel=1e-2)
    assert half["curve"] != pytest.approx(exact["curve"], rel=1e-6)


def test_every_kind_of_shape_trains(book: str) -> None:
    for changes in (
        {
            "num_kv_heads": 3,
            "qk_norm": "none",
            "kv_lora_rank": 7,
            "qk_rope_head_dim": 4,
            "q_lora_rank": 5,
        },
        {"norm": "rms-free", "qk_norm": "free", "tied": False, "norm_at": "sandwich"},
        {
            "norm": "layer",
            "qkv_bias": True,
            "out_bias": True,
            "ffn_bias": True,
            "positions": "additive",
            "num_positions": 11,
            "average": 3,
        },
        {"ffn_dim": 0, "norm_at": "parallel", "activation": "relu"},
    ):
        row = trained_row(make(book, shape=SHAPE.replace(**changes), steps=12, lr=0.01))
        assert row["status"] == "done", changes
        assert row["curve"][-1] < row["curve"][0] - 0.5, changes


# ---- what a row says


def test_a_row_says_what_and_how_fast(book: str) -> None:
    run = make(book)
    row = trained_row(run, peak=1e12)
    assert json.loads(json.dumps(row, allow_nan=False)) | {"windows": (7, 0)} == row | {
        "held_out_curve": [list(x) for x in row["held_out_curve"]]
    }
    assert row["params"] == SHAPE.params
    assert row["tokens"] == 6 * 88
    assert row["flops"] == 8 * SHAPE.flops(11, training=True)
    assert row["mfu"] == pytest.approx(
        row["tokens_per_second"] / 11 * SHAPE.flops(11, training=True) / 1e12
    )
    assert 5 * 88 / row["tokens_per_second"] == pytest.approx(
        row["seconds"], abs=6e-4
    )  # the first step is not counted
    assert {"commit", "torch", "device", "finished", "memory_bytes", "digest"} <= set(row)
    assert trained_row(run)["mfu"] is None


def test_a_long_curve_is_averaged(book: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trained_row(make(book))["curve"]
    monkeypatch.setattr(trainer, "CURVE", 4)
    row = trained_row(make(book))
    assert row["curve_every"] == 2
    assert row["curve"] == pytest.approx([(whole[i] + whole[i + 1]) / 2 for i in (0, 2, 4)])


def test_peaks_of_cards() -> None:
    assert peak_of("NVIDIA H100 80GB HBM3", "bf16") == PEAKS["H100"]
    assert peak_of("NVIDIA H100 PCIe", "bf16") == PEAKS["H100 PCIe"]
    assert peak_of("NVIDIA H200", "bf16") == PEAKS["H200"]
    assert peak_of("NVIDIA L40S", "bf16") == PEAKS["L40S"]
    assert peak_of("NVIDIA A100-SXM4-80GB", "bf16") == 312e12
    assert peak_of("NVIDIA H200", "fp32") is None
    assert peak_of("AMD EPYC", "bf16") is None


def test_a_run_is_its_values_not_its_paths(book: str, tmp_path: Path) -> None:
    run = make(book)
    assert Pretraining.of(json.loads(json.dumps(run.spec()))) == run
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for path in Path(book).iterdir():
        (moved / path.name).write_bytes(path.read_bytes())
    assert make(str(moved)).id == run.id
    written(moved / "b.txt", "other words. " * 99)
    assert make(str(moved)).id != run.id
    assert "is not what it was" in refused(make, str(moved), digest=run.digest)
    changes: dict[str, Any] = {
        "steps": 7,
        "batch_tokens": 77,
        "length": 8,
        "optimiser": "adamw",
        "lr": 0.1,
        "schedule": "cosine",
        "warmup": 0.3,
        "warmdown": 0.3,
        "weight_decay": 0.1,
        "clip": 2,
        "precision": "bf16",
        "evals": 2,
        "eval_tokens": 99,
        "seed": 1,
        "shape": SHAPE.replace(depth=3),
    }
    assert set(changes) == {f.name for f in dataclasses.fields(run)} - {
        "source",
        "tokenizer",
        "digest",
    }
    ids = [make(book, **{name: value}).id for name, value in changes.items()]
    assert len({run.id, *ids}) == 1 + len(changes)


def test_a_run_that_diverges_says_so(book: str, tmp_path: Path) -> None:
    row = trained_row(make(book, lr=1e30, clip=0, optimiser="adamw", steps=20), folder=tmp_path)
    assert row["status"] == "diverged"
    assert row["bits_per_byte"] is None
    assert row["train_last"] is None
    assert 1 < row["steps_done"] < 20
    json.dumps(row, allow_nan=False)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_where_it_diverged_does_not_depend_on_when_losses_are_read(
    book: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, step, found = (
        make(book, lr=1e30, clip=0, optimiser="adamw", steps=12),
        Training.step,
        set(),
    )
    for at in range(run.steps):
        monkeypatch.setattr(
            Training, "step", lambda self, flag=False, at=at: step(self, self.steps == at)
        )
        row = trained_row(run, folder=tmp_path / str(at))
        found.add((row["status"], row["steps_done"], tuple(row["curve"])))
    assert len(found) == 1


def test_without_a_folder_no_checkpoint_is_due(book: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the host would wait for every step once the first was due."""
    flags, step = [], Training.step
    monkeypatch.setattr(
        Training, "step", lambda self, flag=False: flags.append(flag) or step(self, flag)
    )
    trained_row(make(book), checkpoint_every=0)
    assert flags
    assert not any(flags)


# ---- the same step however it is computed


@pytest.mark.parametrize("optimiser", ["muon", "adamw"])
def test_parts_of_a_step_are_the_step(book: str, optimiser: str) -> None:
    run = make(book, optimiser=optimiser)
    whole = trained_row(run)
    for parts in (2, 4, 8):
        alike(trained_row(run, accumulate=parts), whole)


TWO = """
import json, os, socket, sys
import torch
from pathlib import Path
from headwise import pretrain as module
from headwise import tokens
from headwise.lm.spec import Pretraining
from headwise.lm.trainer import Training, pretrain
from headwise.lm.distributed import joined, told
from headwise.errors import UsageError
folder, jobs = Path(sys.argv[1]), json.loads(sys.argv[2])
with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(s.getsockname()[1]), WORLD_SIZE="2", TOKENIZERS_PARALLELISM="false")
child = os.fork()
os.environ["RANK"] = os.environ["LOCAL_RANK"] = "1" if child else "0"
ranks, step, rows = told(), Training.step, {}
with joined(ranks, torch.device("cpu")):
    for name, spec, stop, options in jobs:
        def some(self, flag=False):
            if self.steps == stop:
                raise InterruptedError
            return step(self, flag)
        Training.step = some
        run = Pretraining.of(spec)
        try:
            rows[name] = pretrain(run, device="cpu", ranks=ranks, folder=folder / name, cache=folder, quiet=True, **options)
        except InterruptedError:
            rows[name] = "stopped"
        except UsageError as e:
            rows[name] = str(e)
if child:
    assert os.waitpid(child, 0)[1] == 0
else:
    print(json.dumps(rows), flush=True)
"""


def test_two_processes_are_one(book: str, tmp_path: Path) -> None:
    """DDP and FSDP2 with either optimiser and a gradient in parts, odd sizes; and a checkpoint of
    any of them is one of all."""
    runs = {
        optimiser: make(book, optimiser=optimiser, weight_decay=0.1)
        for optimiser in ("muon", "adamw")
    }
    one = {optimiser: trained_row(run) for optimiser, run in runs.items()}
    muon, short = runs["muon"], make(book, batch_tokens=99)
    often = make(book, evals=muon.steps)
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
        ("judged often", often.spec(), 4, {"checkpoint_every": 0}),
        ("from one", muon.spec(), None, {"shard": "fsdp"}),
        ("other", muon.spec(), None, {"shard": "fsdp"}),
        ("odd", short.spec(), None, {}),
    ]
    told = subprocess.run(
        [sys.executable, "-c", TWO, str(tmp_path), json.dumps(jobs)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    rows = json.loads(told.stdout.splitlines()[-1])
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
    assert rows["judged often"] == "stopped"
    assert trained_row(often, folder=tmp_path / "judged often")["resumed"] == 1, (
        "a checkpoint that is due at a judgement is made"
    )
    assert "is of another run: batch_tokens 99 for 88" in rows["other"]
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


def test_ranks_that_forget_to_average_would_be_seen(
    book: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above is sharp: a gradient half as large, as from a world counted wrongly,
    does not pass."""
    run = make(book, optimiser="adamw", clip=0.2)
    whole = trained_row(run)
    nats = trainer._nats
    monkeypatch.setattr(
        trainer, "_nats", lambda logits, targets: nats(logits, targets) * (1 + 1e-4)
    )
    with pytest.raises(AssertionError):
        alike(trained_row(run), whole)


# ---- killed and resumed


@pytest.mark.parametrize("optimiser", ["muon", "adamw"])
def test_stopped_after_any_step_it_goes_on_bit_for_bit(
    book: str, optimiser: str, tmp_path: Path
) -> None:
    run = make(book, optimiser=optimiser, weight_decay=0.1)
    whole = trained_row(run, folder=tmp_path / "whole")
    for steps in range(1, run.steps):
        stop(run, steps, tmp_path / "kept")
    row = trained_row(run, folder=tmp_path / "kept")
    assert row["resumed"] == run.steps - 1
    assert bits(row) == bits(whole)
    assert sorted(p.name for p in (tmp_path / "kept" / run.id).iterdir()) == ["weights.safetensors"]
    a, b = (
        load_file(tmp_path / name / run.id / "weights.safetensors") for name in ("whole", "kept")
    )
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_checkpoint_without_its_moments_would_be_seen(book: str, tmp_path: Path) -> None:
    run = make(book)
    stop(run, 3, tmp_path)
    path = tmp_path / run.id / "checkpoint.safetensors"
    with safe_open(path, "pt") as f:
        told = f.metadata()
    tensors = load_bytes(path.read_bytes())  # not mapped: the file is written over
    save_file(
        {name: t * 0 if name.startswith("mean.") else t for name, t in tensors.items()}, path, told
    )
    assert bits(trained_row(run, folder=tmp_path)) != bits(trained_row(run))


def test_checkpoints_that_cannot_be_used(book: str, tmp_path: Path) -> None:
    """Never overwritten: one line, and the file stays."""
    run, wider = make(book), make(book, shape=SHAPE.replace(dim=24))
    path = tmp_path / run.id / "checkpoint.safetensors"
    stop(run, 2, tmp_path)
    whole = path.read_bytes()
    (tmp_path / wider.id).mkdir()
    (tmp_path / wider.id / path.name).write_bytes(whole)
    told = refused(trained_row, wider, folder=tmp_path)
    assert "is of another run: dim 22 for 24; remove it or use another store" in told
    with safe_open(path, "pt") as f:
        about = f.metadata()
    tensors = load_bytes(path.read_bytes())  # not mapped: the file is written over
    spoilt = {
        "not safetensors": b"x" * 99,
        "cut off": whole[: len(whole) // 2],
        "a tensor less": None,
        "another size": None,
        "format 9": None,
    }
    for what, data in spoilt.items():
        if data is None:
            some = dict(tensors)
            if what == "a tensor less":
                del some["weights.embedding"]
            if what == "another size":
                some["weights.embedding"] = some["weights.embedding"][:-1].clone()
            save_file(some, path, {**about, "format": "9" if what == "format 9" else "1"})
        else:
            path.write_bytes(data)
        before = path.read_bytes()
        told = refused(trained_row, run, folder=tmp_path)
        assert told.startswith(f"the checkpoint {path} cannot be used ("), what
        assert told.endswith("; remove it to start again")
        assert path.read_bytes() == before
    path.write_bytes(whole)
    assert bits(trained_row(run, folder=tmp_path)) == bits(trained_row(run))


KILLS = """
import os, random, signal, sys, time
from headwise.cli import main
import headwise.lm.trainer, headwise.execute.sweep, torch.optim.adamw, safetensors.torch, torch._dynamo
rng, kills = random.Random(int(sys.argv[1])), 0
while kills < int(sys.argv[2]):
    child = os.fork()
    if not child:
        os._exit(main(sys.argv[3:]))
    time.sleep(rng.uniform(0.0, 0.5))
    os.kill(child, signal.SIGKILL)
    if os.waitpid(child, 0)[1] != signal.SIGKILL:
        break  # it was finished before
    kills += 1
sys.exit(main(sys.argv[3:]))
"""


def words_of(store: Path, book: str, *more: str) -> list[str]:
    shape = ["dim=22", "depth=2", "num_heads=3", "head_dim=10", "qk_rope_head_dim=10"]
    sizes = [
        "--steps",
        "150",
        "--batch-tokens",
        "88",
        "--length",
        "11",
        "--evals",
        "2",
        "--checkpoint-every",
        "0",
    ]
    return [
        "pretrain",
        "--device",
        "cpu",
        "--text",
        book,
        "--store",
        str(store),
        "--set",
        *shape,
        *sizes,
        "--json",
        *more,
    ]


def answer(out: str) -> dict[str, Any]:
    return json.loads(out.splitlines()[-1])["row"]


@pytest.fixture(scope="module")
def undisturbed(book: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    store = tmp_path_factory.mktemp("undisturbed")
    assert main(words_of(store, book)) == 0
    (row,) = Store(store).rows()
    return bits(row)


def test_kills_at_random_moments_change_nothing(
    book: str, tmp_path: Path, undisturbed: str
) -> None:
    """kill -9 while it starts, trains, saves; the curve, every held-out number and the files are
    those of a run left alone."""
    command = [sys.executable, "-c", KILLS, "7", "12", *words_of(tmp_path / "store", book)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert told.returncode == 0, told.stderr
    row = answer(told.stdout)
    assert bits(row) == undisturbed
    assert row["resumed"] > 0, "no kill fell between a checkpoint and the end"
    folder = tmp_path / "store" / "runs" / row["id"]
    assert sorted(p.name for p in folder.iterdir()) == [
        "lock",
        "rows.jsonl",
        "run.json",
        "weights.safetensors",
    ]
    assert len(folder.joinpath("rows.jsonl").read_text().splitlines()) == 1


def test_ctrl_c_is_one_line(
    book: str, tmp_path: Path, undisturbed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    with started([sys.executable, "-m", "headwise", *words_of(store, book)]) as process:
        end = time.monotonic() + 60
        while not list(store.glob("runs/*/checkpoint.safetensors")):
            assert time.monotonic() < end
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert err.splitlines()[-1] == "headwise: stopped; the same command goes on where it was"
    assert "Traceback" not in err
    assert main(words_of(store, book)) == 0
    row = answer(capsys.readouterr().out)
    assert row["resumed"] == 1
    assert bits(row) == undisturbed


def test_torchrun_says_everything_once(
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

    def words(store: str) -> list[str]:
        return words_of(tmp_path / store, book, "--steps", "5", "--checkpoint-every", "60")

    told = subprocess.run(
        [*launcher, *words("two")], capture_output=True, text=True, timeout=120, check=False
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.count("bits per byte") == 1
    row = answer(told.stdout)
    assert (row["processes"], row["shard"]) == (2, "ddp")
    assert Store(tmp_path / "two").rows() == [row]
    assert main(words("one")) == 0
    alike(row, answer(capsys.readouterr().out))


# ---- the command


def test_the_command_trains_once(
    book: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of(
        tmp_path / "store", book, "--steps", "5", "--peak-tflops", "1", "--accumulate", "2"
    )
    assert main(words) == 0
    out, err = capsys.readouterr()
    row = answer(out)
    assert Store(tmp_path / "store").rows() == [row]
    assert row["status"] == "done"
    assert (row["vocab_size"], row["causal"], row["precision"]) == (320, True, "fp32")
    assert row["mfu"] > 0
    assert "tokens/s" in err
    assert "% of peak" in err
    assert "held out, bits per byte" in out
    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    assert main(words) == 0
    assert answer(capsys.readouterr().out) == row
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()} == stamps
    assert main(["list", "--store", str(tmp_path / "store"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"][0]["task"] == "language"


def test_the_command_with_a_tokenizer_and_a_divergence(
    book: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trained_tokenizer(tmp_path / "tokenizer.json", 300)
    assert main(words_of(tmp_path / "store", book, "--steps", "2", "--tokenizer", path)) == 0
    row = answer(capsys.readouterr().out)
    assert row["vocab_size"] == 320
    assert row["bits_per_byte"] < row["held_out"] / math.log(2), "an id stands for more than a byte"
    assert row["digest"].count("+") == 1
    assert (
        main(
            words_of(
                tmp_path / "store", book, "--lr", "1e30", "--clip", "0", "--optimiser", "adamw"
            )
        )
        == 1
    )
    assert "diverged after" in capsys.readouterr().out


@pytest.mark.parametrize(("steps", "evals"), [(2, 1), (2, 2), (3, 3)])
def test_a_run_that_cannot_be_judged_has_diverged(
    steps: int, evals: int, book: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The losses are still numbers, the held-out part is not: found at the end, or at a judgement
    before it."""
    words = words_of(tmp_path / "store", book, "--lr", "1e30", "--clip", "0", "--optimiser", "muon")
    assert main([*words, "--steps", str(steps), "--evals", str(evals)]) == 1
    row = answer(capsys.readouterr().out)
    assert (row["status"], row["bits_per_byte"]) == ("diverged", None)
    assert main([*words, "--steps", str(steps), "--evals", str(evals)]) == 1
    assert answer(capsys.readouterr().out) == row, "it is there, and not tried again"


def test_it_is_judged_at_most_once_a_step(
    book: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words_of(tmp_path / "store", book, "--steps", "3", "--evals", str(10**11))) == 0
    assert [step for step, _ in answer(capsys.readouterr().out)["held_out_curve"]] == [1, 2, 3]


def test_changes_of_a_preset_and_a_whole_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [
        "pretrain",
        "--device",
        "cpu",
        "--store",
        str(tmp_path),
        "--steps",
        "1",
        "--batch-tokens",
        "256",
        "--eval-tokens",
        "256",
        "--json",
    ]
    assert main([*common, "--set", "num_heads=4", "head_dim=48"]) == 0
    row = answer(capsys.readouterr().out)
    told = ("qk_rope_head_dim", "qk_norm", "activation")
    assert (row["dim"], row["depth"], row["num_heads"], row["head_dim"]) == (64, 3, 4, 48)
    assert [row[name] for name in told] == [48, "free", "relu2"], "every coordinate is rotated"
    for words, wanted in (
        (["num_heads=2"], [8, "free", "relu2"]),
        (
            ["num_heads=2", "qk_rope_head_dim=0", "qk_norm=none", "activation=gelu"],
            [0, "none", "gelu"],
        ),
        (["num_heads=2", "kv_lora_rank=4"], [4, "none", "relu2"]),
        (["num_heads=2", "positions=additive", "num_positions=256"], [0, "free", "relu2"]),
    ):
        assert main([*common, "--set", "dim=16", "depth=1", *words]) == 0
        out, err = capsys.readouterr()
        row = answer(out)
        assert (row["dim"], row["source"], [row[name] for name in told]) == (16, "", wanted)
        assert ("no positions" in err) == (words[-1] == "activation=gelu")


def test_a_text_that_does_not_do_leaves_no_run_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, short = tmp_path / "s", written(tmp_path / "short.txt", "too short to learn from")
    lossy = json.loads(Path(trained_tokenizer(tmp_path / "t.json", 300)).read_text())
    lossy["model"] = {"type": "WordLevel", "vocab": {"the": 0, "a": 1}, "unk_token": "none"}
    words = written(tmp_path / "words.json", json.dumps(lossy))
    for text, tokenizer, message in (
        (short, "", "must be longer than length"),
        (written(tmp_path / "b.txt", MANY), words, "does not fit this text"),
    ):
        asked = [
            "pretrain",
            "--store",
            str(store),
            "--text",
            text,
            "--tokenizer",
            tokenizer,
            "--steps",
            "1",
            "--eval-tokens",
            "256",
        ]
        assert main(asked) == 2
        assert message in capsys.readouterr().err
        assert not list(store.glob("runs/*"))


def test_what_was_trained_can_be_asked(book: str, tmp_path: Path) -> None:
    run = make(book, steps=2)
    pretrain(run, device="cpu", folder=tmp_path, quiet=True)
    model = trainer.trained(tmp_path / run.id)
    assert model.shape == run.shape
    assert not model.training
    weights = load_file(tmp_path / run.id / "weights.safetensors")
    assert all(value.equal(weights[name]) for name, value in model.state_dict().items())
    assert "holds no weights of a finished run" in refused(trainer.trained, tmp_path / "none")


def test_a_run_that_another_process_holds(
    book: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(book)
    with Store(tmp_path).claim([run]) as held:  # type: ignore[list-item]
        assert held == [run]
        shape = [
            f"{k}={v}"
            for k, v in dataclasses.asdict(SHAPE).items()
            if k in ("dim", "depth", "num_heads", "head_dim", "v_head_dim", "num_kv_heads")
        ]
        more = [
            "qk_rope_head_dim=10",
            "qk_norm=head",
            "ffn_dim=26",
            "activation=swiglu",
            "windows=7,0",
            "vocab_size=263",
        ]
        words = [
            "pretrain",
            "--device",
            "cpu",
            "--text",
            book,
            "--store",
            str(tmp_path),
            "--set",
            *shape,
            *more,
            "--lr",
            "0.003",
        ]
        sizes = ["--steps", "6", "--batch-tokens", "88", "--length", "11", "--evals", "3"]
        assert main([*words, *sizes]) == 2
    assert (
        capsys.readouterr().err
        == f"headwise: error: another process is training run {run.id} in {tmp_path}\n"
    )


MISTAKES = [
    ("--preset quik", "unknown preset 'quik'; did you mean quick? choices: base, quick"),
    ("--text none.txt", "there is no text at none.txt; give a file"),
    ("--text EMPTY", "the text at EMPTY is empty"),
    ("--text BINARY", "BINARY is not text: byte 3 is 0"),
    ("--text SHORT", "the held-out tenth of SHORT must be longer than length 256, got "),
    ("--tokenizer none.json", "the tokenizer none.json cannot be read: No such file or directory"),
    ("--tokenizer EMPTY", "EMPTY is not a tokenizers JSON file: "),
    (
        "--set vocab_size=256",
        "vocab_size must be at least the 257 ids of the tokenizer (bytes), got 256",
    ),
    ("--set causal=false", "a decoder's shape must be causal, "),
    ("--set output_dim=3", "a decoder has tokens in and tokens out"),
    (
        "--set positions=additive num_positions=8",
        "num_positions must be at least length 256, got 8",
    ),
    ("--set dim=64", "a shape needs depth: "),
    ("--set heads=3", "unknown shape key 'heads'; "),
    ("--set head_dim=16 qk_rope_head_dim=32", "qk_rope_head_dim must not exceed head_dim, "),
    (
        "--set head_dim=5",
        "rotary positions need an even head_dim, got 5; give qk_rope_head_dim, 0 for no positions",
    ),
    ("--eval-tokens 10", "eval_tokens must be at least length 256, got 10"),
    ("--shard fsdp", "shard fsdp is for several processes, started by torchrun; got one"),
    ("--optimiser adam", "unknown optimiser 'adam'; did you mean adamw? "),
    ("--schedule cosin", "unknown schedule 'cosin'; did you mean cosine? "),
    ("--precision fp16", "unknown precision 'fp16'; "),
    ("--lr -1", "lr must be a number from 0 to 3e+38, got -1.0"),
    ("--lr fast", "argument --lr: must be a number, got 'fast'"),
    ("--lr nan", "lr must be a number from 0 to 3e+38, got nan"),
    (
        "--warmup 0.7 --warmdown 0.4",
        "warmup and warmdown must not exceed 1 together, got 0.7 and 0.4",
    ),
    ("--steps 0", "argument --steps: must be at least 1, got 0"),
    (
        "--batch-tokens 1000",
        "batch_tokens must be a multiple of length, got batch_tokens 1000, length 256",
    ),
    (
        "--accumulate 3",
        (
            "processes times accumulate must divide the 16 rows of a step, got 1 processes, "
            "accumulate 3"
        ),
    ),
    ("--shard zero", "unknown shard 'zero'; "),
    ("--peak-tflops 0", "peak-tflops must be above 0, got 0"),
    ("--device tpu", "unknown device 'tpu'; "),
    ("none.json", "cannot read 'none.json' (No such file or directory)"),
]


@pytest.mark.parametrize(("line", "message"), MISTAKES)
def test_a_mistake_is_one_line(
    line: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, data in (
        ("EMPTY", b" \n"),
        ("BINARY", b"\x7fEL\0F"),
        ("SHORT", MANY.encode()[:2000]),
    ):
        written(tmp_path / name, data)
    assert main(["pretrain", "--device", "cpu", "--store", "store", *shlex.split(line)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = [x for x in err.splitlines() if not x.startswith("pretrain ")]
    assert len(lines) == 1, err
    assert lines[0].startswith(f"headwise: error: {message}"), err
    if "SHORT" not in line:  # how many ids there are is known when they are made
        assert not (tmp_path / "store").exists()
