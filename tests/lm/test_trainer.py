"""Training one decoder: against a loop by hand, however a step is carried out, and what its row
states."""

import functools
import gc
import json
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from support.data import written
from support.lm_runs import SHAPE, alike, make_run, trained_row
from support.tolerance import close, seeded
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from headwise.lm import trainer
from headwise.lm.corpus import load, rows_at
from headwise.lm.optim import lr_multiplier
from headwise.lm.peak_flops import PEAKS, peak_flops
from headwise.lm.spec import Pretraining
from headwise.lm.text_files import find_text
from headwise.lm.trainer import Trainer
from headwise.model.init import initialise
from headwise.model.transformer import Decoder
from headwise.seeds import derive
from headwise.shape import Shape
from headwise.tasks.generated_text import generated_text
from headwise.tasks.text import Text

CPU = torch.device("cpu")


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
            group["lr"] = run.lr * lr_multiplier(
                run.schedule, step, run.steps, run.warmup, run.warmdown
            )
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


@pytest.mark.parametrize(
    "changes", [{}, {"clip": 0.3}, {"schedule": "cosine", "clip": 0, "seed": 3}]
)
def test_pretrain_against_a_loop_by_hand(
    book: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    run = make_run(book, optimiser="adamw", weight_decay=0.1, **changes)
    row = trained_row(run, folder=tmp_path)
    model, losses = by_hand(run)
    assert row["curve"] == pytest.approx(losses, rel=1e-5)
    assert row["train_last"] == row["curve"][-1]
    kept = load_file(tmp_path / run.id / "weights.safetensors")
    for name, p in model.named_parameters():
        close(kept[name], p.detach(), name)
    with safe_open(tmp_path / run.id / "weights.safetensors", "pt") as f:
        assert Pretraining.of(json.loads(f.metadata()["run"])) == run


def test_pretrain_learns(tmp_path: Path) -> None:
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
            make_run(
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


def test_pretrain_takes_every_kind_of_shape(book: str) -> None:
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
        row = trained_row(make_run(book, shape=SHAPE.replace(**changes), steps=12, lr=0.01))
        assert row["status"] == "done", changes
        assert row["curve"][-1] < row["curve"][0] - 0.5, changes


def test_precision_bf16_is_near_fp32(book: str) -> None:
    exact, half = (trained_row(make_run(book, precision=p)) for p in ("fp32", "bf16"))
    assert exact["id"] != half["id"]
    assert half["curve"] == pytest.approx(exact["curve"], rel=1e-2)
    assert half["curve"] != pytest.approx(exact["curve"], rel=1e-6)


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_clip_leaves_a_gradient_within_the_bound(book: str, optimiser: str) -> None:
    far, none, near = (
        trained_row(make_run(book, optimiser=optimiser, clip=clip)) for clip in (1e9, 0, 1e-3)
    )
    assert far["curve"] == none["curve"]
    assert near["curve"] != none["curve"]


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute"
)  # torch's own, of what goes from block to block
@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
@pytest.mark.parametrize("compiled", ["model", "blocks"])
def test_compiled_training_is_the_same(
    book: str, compiled: str, optimiser: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, graphs = make_run(book, optimiser=optimiser), []

    def backend(graph: Any, given: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    reference = trained_row(run)
    torch._dynamo.reset()
    monkeypatch.setattr(
        torch,
        "compile",
        functools.partial(torch.compile, backend=aot_autograd(fw_compiler=backend)),
    )
    row = trained_row(run, compiled=compiled)
    alike(row, reference)
    assert row["compiled"] == compiled
    operations = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    assert not any("cos" in name for name in operations), (
        "rotary positions are made beforehand, not in every kernel that needs them"
    )
    assert len(graphs) == (
        2 if compiled == "model" else 2 * 3
    )  # two layers, two windows, and the loss


@pytest.mark.parametrize("optimiser", ["muon", "adamw"])
def test_accumulate_is_the_same_step(book: str, optimiser: str) -> None:
    run = make_run(book, optimiser=optimiser)
    reference = trained_row(run)
    for parts in (2, 4, 8):
        alike(trained_row(run, accumulate=parts), reference)


def test_trainer_is_freed_without_the_collector(book: str) -> None:
    run = make_run(book)
    corpus = load(find_text(run.source), None)
    training = Trainer(run, corpus, CPU)
    training.step()
    there = weakref.ref(training)
    gc.disable()
    try:
        del training
        assert there() is None, "weights and moments would wait for the collector, run after run"
    finally:
        gc.enable()


def test_checkpoint_is_never_due_without_a_folder(
    book: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the host would wait for every step once the first was due."""
    flags, step = [], Trainer.step
    monkeypatch.setattr(
        Trainer, "step", lambda self, flag=False: flags.append(flag) or step(self, flag)
    )
    trained_row(make_run(book), checkpoint_every=0)
    assert flags
    assert not any(flags)


# ---- divergence


def test_divergence_is_a_row(book: str, tmp_path: Path) -> None:
    row = trained_row(make_run(book, lr=1e30, clip=0, optimiser="adamw", steps=20), folder=tmp_path)
    assert row["status"] == "diverged"
    assert row["bits_per_byte"] is None
    assert row["train_last"] is None
    assert 1 < row["steps_done"] < 20
    json.dumps(row, allow_nan=False)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_divergence_does_not_depend_on_when_losses_are_read(
    book: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, step, found = (
        make_run(book, lr=1e30, clip=0, optimiser="adamw", steps=12),
        Trainer.step,
        set(),
    )
    for at in range(run.steps):
        monkeypatch.setattr(
            Trainer, "step", lambda self, flag=False, at=at: step(self, self.steps == at)
        )
        row = trained_row(run, folder=tmp_path / str(at))
        found.add((row["status"], row["steps_done"], tuple(row["curve"])))
    assert len(found) == 1


# ---- rows


def test_row_states_run_and_speed(book: str) -> None:
    run = make_run(book)
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


def test_row_averages_a_long_curve(book: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = trained_row(make_run(book))["curve"]
    monkeypatch.setattr(trainer, "CURVE_POINTS", 4)
    row = trained_row(make_run(book))
    assert row["curve_every"] == 2
    assert row["curve"] == pytest.approx([(reference[i] + reference[i + 1]) / 2 for i in (0, 2, 4)])


def test_peak_flops_of_cards() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", "bf16") == PEAKS["H100"]
    assert peak_flops("NVIDIA H100 PCIe", "bf16") == PEAKS["H100 PCIe"]
    assert peak_flops("NVIDIA H200", "bf16") == PEAKS["H200"]
    assert peak_flops("NVIDIA L40S", "bf16") == PEAKS["L40S"]
    assert peak_flops("NVIDIA A100-SXM4-80GB", "bf16") == 312e12
    assert peak_flops("NVIDIA H200", "fp32") is None
    assert peak_flops("AMD EPYC", "bf16") is None
