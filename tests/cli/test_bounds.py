"""Sizes without bounds: one line and exit code 2 before memory grows."""

import gzip
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import refused

from headwise.cli import main
from headwise.device import memory_of, pick_device
from headwise.errors import UsageError, bounded, shown
from headwise.execute.memory import check_memory, least_bytes
from headwise.experiments import EXPERIMENTS, built_in, find
from headwise.lm.spec import Pretraining
from headwise.shape import Shape

HUGE = "1" * 400  # more than any float
ENDLESS = "1" * 5000  # more digits than Python reads
SHAPE = "--set dim=64 depth=2 num_heads=2"

SIZES = [
    (f"cost {SHAPE} head_dim=1 dim={HUGE}", "dim must be at most 2,147,483,647 (32 bits), got 111"),
    (f"cost {SHAPE} ffn_dim={ENDLESS}", "ffn_dim must be a whole number, got '111"),
    (f"cost {SHAPE} depth=2147483647", "depth must be at most 100,000 layers, got 2147483647"),
    (f"cost {SHAPE} windows={HUGE}", "windows must be 1 to depth (2) numbers"),
    (f"cost {SHAPE} rope_theta=1e400", "rope_theta must be a positive number up to 3e+38, got inf"),
    (
        "cost --set dim=2147483647 depth=100000 num_heads=1 ffn_dim=0",
        "a shape must have at most 9,223,372,036,854,775,807 parameters (64 bits), got ",
    ),
    (f"cost {SHAPE} --tokens {HUGE}", "argument --tokens: must be at most 9,223,372,036,854,"),
    (f"policies {SHAPE} --policy split --to {HUGE}", "argument --to: must be at most 9,223,"),
    (f"infer {SHAPE} causal=true --tokens {2**40}", "decoding 1,099,511,627,776 tokens needs at"),
    ("run fig1 --seeds 100000000", "seeds must be at most 10,000, got 100000000"),
    ("run features --seeds 100000000", "seeds must be at most 10,000, got 100000000"),
    (f"run fig1 --set points={HUGE}", "points must be at most 2,147,483,647 (32 bits), got 111"),
    ("run fig1 --set points=2147483647", "a run of 12,964 parameters needs at least "),
    (
        f"run fig1 --seeds 9999 --set ranks={','.join(map(str, range(1, 999)))}",
        "an experiment has at most 20,000 runs, these lists and 9,999 seeds combine to ",
    ),
    (f"theory --seed {HUGE}", "seed must be at most 9,223,372,036,854,775,807 (64 bits), got"),
    (f"pretrain --seed {2**63}", "seed must be at most 9,223,372,036,854,775,807 (64 bits), got"),
    (f"pretrain --batch-tokens {2**31 - 2**8}", "a run of 168,384 parameters needs at least "),
    ("pretrain --set vocab_size=2147483647", "a run of 137,439,"),
    (f"nonsense{ENDLESS}", "unknown command 'nonsense1111"),
    (f"run fig1 --preset {ENDLESS}", "unknown preset '1111"),
    (f"list {ENDLESS}", "unknown experiment '1111"),
    (f"cost {ENDLESS}", "[Errno 36] File name too long: '1111"),
]


@pytest.mark.parametrize(("line", "message"), SIZES, ids=[line[:48] for line, _ in SIZES])
def test_size_beyond_its_bound_is_refused(
    line: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    said = refused(line.split(), capsys)
    assert said.startswith(message)
    assert len(said) < 700
    assert not (tmp_path / "headwise-store" / "runs").exists()


LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
CONFIGS = [
    ("num_hidden_layers", 300_000_000, "num_hidden_layers must be at most 100,000, got 300000000"),
    ("hidden_size", 10**400, "hidden_size must be at most 2,147,483,647 (32 bits), got 1000"),
    ("rope_theta", 10**400, "rope_theta must be a positive number up to 3e+38, got 1000"),
    ("model_type", "x" * 2_000_000, "unknown model_type 'xxxx"),
    ("hidden_act", ["x" * 2_000_000], "hidden_act ['xxxx"),
]


@pytest.mark.parametrize(("key", "value", "message"), CONFIGS, ids=[key for key, *_ in CONFIGS])
def test_config_beyond_its_bounds_is_refused(
    key: str, value: object, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, key: value}))
    said = refused(["cost", str(tmp_path)], capsys)
    assert said.startswith(message)
    assert len(said) < 500


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000, f'{{"a": {"1" * 5000}}}']
)
def test_json_that_python_cannot_read_is_refused(
    content: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    assert refused(["cost", str(path)], capsys).startswith(f"'{path}' is not JSON: ")
    store = tmp_path / "store"
    store.mkdir()
    (store / "headwise.json").write_text(content)
    said = refused(["list", "--store", str(store)], capsys)
    assert said == f"{store} is not a headwise store: its headwise.json cannot be read"


# ---- files without an end

ENDLESS_FILES = """
import os, resource, sys
from headwise.cli import main
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
print(*(main(line.split()) for line in sys.argv[1:]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""


def test_files_without_an_end_are_refused_before_memory_grows(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "images").mkdir()
    header = gzip.compress(struct.pack(">4B3I", 0, 0, 8, 3, 10**6, 28, 28))
    swelling = header + 700 * gzip.compress(bytes(1 << 20))  # parts behind each other are one file
    (tmp_path / "images" / "train-images-idx3-ubyte.gz").write_bytes(swelling)
    with (tmp_path / "sparse").open("wb") as f:
        f.truncate(4 << 30)
    lines = ["run map images --set source=images"]
    for path in ("/dev/zero", "pipe", "sparse"):
        lines += [f"cost {path}", f"draw fig1 {path}", f"run fig1 --rows {path}"]
        lines += [f"run map text --set source={path}", f"run map sentences --set source={path}"]
        lines += [f"pretrain --text {path}", f"pretrain --tokenizer {path}", f"check {path}"]
    done = subprocess.run(
        [sys.executable, "-c", ENDLESS_FILES, *lines],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=120,
    )
    codes, megabytes = done.stdout.splitlines()
    assert codes.split() == ["2"] * len(lines), done.stderr
    said = done.stderr.splitlines()
    assert len(said) == len(lines)
    assert "unpacks to more than 671,088,640 bytes" in said[0]
    assert int(megabytes) < 1800, "torch takes some 300 of them"


# ---- memory and numbers that nothing foresaw


def test_run_is_refused_by_what_no_run_does_without() -> None:
    cpu = pick_device("cpu")
    for name in ("fig1", "map", "nanochat_heads"):
        experiment = find(name)
        runs = experiment.runs(experiment.preset("quick"))
        check_memory(runs, cpu)
        assert all(16 * run.shape.params < least_bytes(run) < 1 << 30 for run in runs)
    shape = Shape(dim=1 << 20, depth=1000, num_heads=1024, causal=True, vocab_size=257)
    large = Pretraining(shape=shape, steps=1, batch_tokens=16, length=16)
    assert least_bytes(large) > memory_of(cpu)
    with pytest.raises(UsageError, match=r"needs at least [\d,.]+ GiB of memory, cpu has "):
        check_memory([large], cpu)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_preset_is_far_below_the_bound_on_runs(name: str) -> None:
    for settings in built_in(EXPERIMENTS[name]).presets.values():
        settings.check_number()


RAISING = {
    "MemoryError()": "out of memory: headwise.cli.shapes.cost wants too much",
    "MemoryError('2 TiB')": "out of memory: headwise.cli.shapes.cost wants 2 TiB",
    "RuntimeError('can\\'t allocate memory: you tried to allocate 8589934592 bytes')": (
        "out of memory: headwise.cli.shapes.cost wants 8.0 GiB at once"
    ),
    "OverflowError('int too large')": "OverflowError: int too large",
    "UnicodeEncodeError('ascii', 'x', 0, 1, 'no')": "UnicodeEncodeError: 'ascii' codec can't",
    "RecursionError('too deep')": "RecursionError: too deep",
    "ValueError('x' * 2_000_000)": "ValueError: xxxx",
}


@pytest.mark.parametrize("raised", RAISING)
def test_failure_is_one_line_unless_its_traceback_is_asked_for(
    raised: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise eval(raised)

    # A fault of ours is planted where a command looks its shape up.
    monkeypatch.setattr("headwise.cli.shapes.shape_of", fail)
    assert main(["cost"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith(f"headwise: error: {RAISING[raised]}")
    assert said.endswith(" (HEADWISE_TRACEBACK=1 shows where)\n")
    assert len(said) < 500
    monkeypatch.setenv("HEADWISE_TRACEBACK", "1")
    with pytest.raises(type(eval(raised))):
        main(["cost"])


def test_mistake_of_ours_is_not_disguised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise TypeError

    monkeypatch.setattr("headwise.cli.shapes.shape_of", fail)
    with pytest.raises(TypeError):
        main(["cost"])


# ---- values in messages


def test_shown_value_is_cut() -> None:
    assert shown("rank") == "'rank'"
    assert shown([1] * 100).endswith("1...")
    for value in ("x" * 10**7, 10**400, 10**5000, [[1]] * 10**5):
        assert len(shown(value)) <= 83
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    assert shown(nested) == "a list"


def test_message_is_one_line_of_bounded_length() -> None:
    assert str(UsageError("a rule, got 3")) == "a rule, got 3"
    assert bounded("a\nb\x1b[31mc\x00") == "a b [31mc "
    assert bounded(f"got {'x' * 10**6}") == f"got {'x' * 80}..."
    assert len(bounded("many words " * 10**5)) < 1000
