"""`headwise pretrain`: killed, interrupted, repeated; every mistake one line."""

import dataclasses
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.data import written
from support.lm_runs import SHAPE, bits, make_run
from support.pretrain_command import answer, words_of
from support.processes import started
from support.tokenizer import MANY, trained_tokenizer

from headwise.cli import main
from headwise.store import Store

# ---- killed and resumed


# Every second kill falls while the run starts; the others wait for a checkpoint of this start, so
# that they fall in training, whatever else the machine does.
KILLS = """
import os, random, signal, sys, time
from pathlib import Path
from headwise.cli import main
import headwise.lm.trainer, headwise.execute.sweep
import torch.optim.adamw, safetensors.torch, torch._dynamo

def stamps():
    found = []
    for path in store.glob("runs/*/checkpoint.safetensors"):
        try:
            found.append(path.stat().st_mtime_ns)
        except FileNotFoundError:
            pass
    return found

rng, kills, store = random.Random(int(sys.argv[1])), 0, Path(sys.argv[3])
while kills < int(sys.argv[2]):
    before = stamps()
    child = os.fork()
    if not child:
        os._exit(main(sys.argv[4:]))
    finished = False
    while kills % 2 and stamps() == before and not finished:
        finished = os.waitpid(child, os.WNOHANG) != (0, 0)
        time.sleep(0.001)
    if finished:
        break
    time.sleep(rng.uniform(0.0, 0.1))
    os.kill(child, signal.SIGKILL)
    if os.waitpid(child, 0)[1] != signal.SIGKILL:
        break  # it was finished before
    kills += 1
sys.exit(main(sys.argv[4:]))
"""


@pytest.fixture(scope="module")
def undisturbed(book: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    store = tmp_path_factory.mktemp("undisturbed")
    assert main(words_of(store, book)) == 0
    (row,) = Store(store).rows()
    return bits(row)


def test_pretrain_killed_at_random_moments_is_the_same(
    book: str, tmp_path: Path, undisturbed: str
) -> None:
    """kill -9 while it starts, trains, saves; the curve, every held-out number and the files are
    those of a run left alone."""
    store = tmp_path / "store"
    command = [sys.executable, "-c", KILLS, "7", "12", str(store), *words_of(store, book)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    row = answer(done.stdout)
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


def test_pretrain_interrupted_is_one_line(
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
    assert (process.returncode, out) == (130, "")
    last = r"headwise: interrupted; saved run \w{16} at step \d+; run the same command to resume"
    assert re.fullmatch(last, err.splitlines()[-1])
    assert "Traceback" not in err
    assert main(words_of(store, book)) == 0
    row = answer(capsys.readouterr().out)
    assert row["resumed"] == 1
    assert bits(row) == undisturbed


# ---- the command


def test_pretrain_trains_once(
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


def test_pretrain_with_a_tokenizer_and_a_divergence(
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
def test_pretrain_without_a_finite_evaluation_has_diverged(
    steps: int, evals: int, book: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The losses are still numbers, the held-out part is not: found at the end, or at an evaluation
    before it."""
    words = words_of(tmp_path / "store", book, "--lr", "1e30", "--clip", "0", "--optimiser", "muon")
    assert main([*words, "--steps", str(steps), "--evals", str(evals)]) == 1
    row = answer(capsys.readouterr().out)
    assert (row["status"], row["bits_per_byte"]) == ("diverged", None)
    assert main([*words, "--steps", str(steps), "--evals", str(evals)]) == 1
    assert answer(capsys.readouterr().out) == row, "it is there, and not tried again"


def test_pretrain_evaluates_at_most_once_per_step(
    book: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words_of(tmp_path / "store", book, "--steps", "3", "--evals", str(10**9))) == 0
    assert [step for step, _ in answer(capsys.readouterr().out)["held_out_curve"]] == [1, 2, 3]


def test_pretrain_takes_changes_of_a_preset_and_a_complete_shape(
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
    style = ("qk_rope_head_dim", "qk_norm", "activation")
    assert (row["dim"], row["depth"], row["num_heads"], row["head_dim"]) == (64, 3, 4, 48)
    assert [row[name] for name in style] == [48, "free", "relu2"], "every coordinate is rotated"
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
        assert (row["dim"], row["source"], [row[name] for name in style]) == (16, "", wanted)
        assert ("no positions" in err) == (words[-1] == "activation=gelu")


def test_pretrain_of_a_text_that_is_refused_leaves_no_run(
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


def test_pretrain_refuses_a_run_that_another_process_holds(
    book: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(book)
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
    ("--set haeds=3", "unknown shape key 'haeds'; "),
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
def test_pretrain_mistake_is_one_line(
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
