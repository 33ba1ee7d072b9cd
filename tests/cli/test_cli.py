"""The command line as people meet it: one line for a mistake, nothing written, JSON at the end,
pipes, Ctrl-C, full disks."""

import contextlib
import json
import os
import pty
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import HEADWISE, finished, one_line, refused, run_words
from support.processes import started

import headwise
from headwise.cli import COMMANDS, main, parser
from headwise.store import Store

LONG = [
    "dim=8",
    "points=4",
    "ffn_dim=16",
    "ranks=8",
    "depths=1",
    "widths=1,2",
    "lr=0.01",
    "steps=1600",
    "epoch=2",
    "batch=16",
    "held_out=8",
]


def environment(**changes: str) -> dict[str, str]:
    """Ours, with Python's output buffered as it is for everybody."""
    return {**{k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}, **changes}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(tmp_path_factory.mktemp("cli"))


# ---- mistakes: one line, exit code 2, nothing written

SHAPE = ["dim=12", "depth=1", "num_heads=4"]
MISTAKES: list[tuple[str, str]] = [
    ("rnu fig1", "unknown command 'rnu'; did you mean run? choices: "),
    ("zzz", "unknown command 'zzz'; choices: check, cost, "),
    ("--verbose", "unrecognized arguments: --verbose; see headwise --help"),
    ("run", "the following arguments are required: experiment, TASK; see headwise run --help"),
    ("run fig2", "unknown experiment 'fig2'; did you mean fig1? choices: "),
    ("run mine.py", "there is no experiment file at mine.py"),
    ("run fig1 --preset quik", "unknown preset 'quik'; did you mean quick? choices: paper, quick"),
    ("run fig1 --preset", "argument --preset: expected one argument"),
    ("run fig1 --sedes 3", "unrecognized arguments: --sedes 3"),
    ("run fig1 --seed 3", "unrecognized arguments: --seed 3"),
    ("run fig1 --rows none.jsonl", "there is no file of rows at none.jsonl"),
    ("run fig1 extra", "unrecognized arguments: extra"),
    ("run fig1 --set rank=4", "unknown setting 'rank'; did you mean ranks or task? choices: "),
    ("run fig1 --set stpes=100", (
        "unknown setting 'stpes'; did you mean steps or seeds or rates? choices: "
    )),
    ("run fig1 --set steps", "--set takes key=value, got 'steps'"),
    ("run fig1 --set =3", "unknown setting ''; choices: "),
    ("run fig1 --set", "argument --set: expected at least one argument"),
    ("run fig1 --store", "argument --store: expected one argument"),
    ("run fig1 --seeds", "argument --seeds: expected one argument"),
    ("run fig1 --set ranks=0", "ranks must be at least 1, got 0"),
    ("run fig1 --set ranks=16,-2", "ranks must be at least 1, got -2"),
    ("run fig1 --set ranks=3", "rank must divide the width 16, got rank 3"),
    ("run fig1 --set dim=1", "dim must be a whole number of at least 2, got 1"),
    ("run length --set width=0", "width must be a whole number of at least 1, got 0"),
    ((
        "run regression --set shapes=16x3x3"
    ), (
        "heads must divide the width, got 3 heads and width 16 in '16x3x3'"
    )),
    ("run fig1 --set ranks=8,8", "ranks must differ from each other, got 8, 8"),
    ("run fig1 --set ranks=", "ranks must not be empty"),
    ("run fig1 --set depths=,", "depths must not be empty"),
    ("run fig1 --set protocols=", "protocols must not be empty"),
    ("run fig1 --set ranks=8,x", "ranks must be a whole number, got 'x'"),
    ("run fig1 --set steps=abc", "steps must be a whole number, got 'abc'"),
    ("run fig1 --set steps=", "steps must be a whole number, got ''"),
    ("run fig1 --set dim=1.5", "dim must be a whole number, got '1.5'"),
    ("run fig1 --set dim=1 --set ranks=1", "dim must be a whole number of at least 2, got 1"),
    ("run fig1 --set points=1", "points must be a whole number of at least 2, got 1"),
    ("run fig1 --set batch=0", "batch must be a whole number of at least 1, got 0"),
    ("run fig1 --set lr=fast", "lr must be a number, got 'fast'"),
    ("run fig1 --set lr=-1", "lr must be a number from 0 to 3e+38, got -1.0"),
    ("run fig1 --set lr=nan", "lr must be a number from 0 to 3e+38, got nan"),
    (
        "cost --set dim=64 depth=1 num_heads=2 positions=additive num_positions=8 --tokens 9",
        "tokens must not exceed the model's 8 positions, got 9",
    ),
    ("run fig1 --set schedule=cosin", "unknown schedule 'cosin'; did you mean cosine? choices: "),
    ((
        "run fig1 --set protocols=stream,repaly"
    ), (
        "unknown protocol 'repaly'; did you mean replay or stream? choices: "
    )),
    ("run fig1 --set steps=150", "steps must be a multiple of epoch, got steps 150, epoch 100"),
    ("run fig1 --set steps=0", "steps must be a whole number of at least 1, got 0"),
    ("run fig1 --set seeds=0", "seeds must be at least 1, got 0"),
    ("run fig1 --seeds x", "argument --seeds: must be a whole number, got 'x'"),
    ("run fig1 --seeds 0", "argument --seeds: must be at least 1, got 0"),
    ("run fig1 --seeds 1.5", "argument --seeds: must be a whole number, got '1.5'"),
    ("run fig1 --workers 0", "argument --workers: must be at least 1, got 0"),
    ((
        "run fig1 --checkpoint-every soon"
    ), (
        "argument --checkpoint-every: must be a number of seconds, got 'soon'"
    )),
    ((
        "run fig1 --checkpoint-every -1"
    ), (
        "argument --checkpoint-every: must be 0 or more seconds, got -1"
    )),
    ((
        "run fig1 --checkpoint-every nan"
    ), (
        "argument --checkpoint-every: must be 0 or more seconds, got nan"
    )),
    ("run fig1 --device foo", "unknown device 'foo'; choices: auto, cpu, cuda"),
    ("run fig1 --device cudda", "unknown device 'cudda'; did you mean cuda or cpu? choices: "),
    ("run fig1 --device cuda:97", "device cuda:97 is not there: "),
    ("list --older", "--older lists rows of a store: add --store DIR"),
    ("list --store STORE", (
        "there is no store at STORE; make one with: headwise run fig1 --store STORE"
    )),
    ("report --store STORE", "there is no store at STORE; make one with: "),
    ("report --stroe STORE", "unrecognized arguments: --stroe STORE"),
    ("draw", "the following arguments are required: experiment, rows"),
    ("list fig9", "unknown experiment 'fig9'; did you mean fig1? choices: "),
    ("list fig1 --store STORE", (
        "list shows the settings of an experiment or a store, got fig1 and STORE"
    )),
    ("draw fig9 rows.jsonl", "unknown experiment 'fig9'; did you mean fig1? choices: "),
    ("draw fig1 none.jsonl", "there is no file of rows at none.jsonl"),
    ("cost", "a shape needs dim: give a config.json or --set dim=... depth=... num_heads=..."),
    ("cost --set dim=12 depth=1", "a shape needs num_heads: "),
    ("cost none.json", "cannot read 'none.json' (No such file or directory)"),
    ((
        "cost --set dim=12 depth=1 num_heads=4 num_kv_heads=3"
    ), (
        "num_heads must be a multiple of num_kv_heads, got num_heads 4, "
    )),
    ((
        "cost --set dim=12 depth=1 num_heads=4 head_dim=7 qk_rope_head_dim=7"
    ), (
        "head_dim must be even for rotary positions, got 7"
    )),
    ((
        "cost --set dim=12 depth=1 num_heads=4 head_dim=8 qk_rope_head_dim=5"
    ), (
        "qk_rope_head_dim must be even for rotary positions, got 5"
    )),
    ("cost --set dim=12 depth=1 num_heads=4 head_dim=0", "head_dim must be at least 1, got 0"),
    ("cost --set dim=12 depth=1 num_heads=0", "num_heads must be at least 1, got 0"),
    ((
        "cost --set dim=12 depth=1 num_heads=5"
    ), (
        "head_dim must be given when num_heads does not divide dim, got dim 12, num_heads 5"
    )),
    ("cost --set dim=1.5 depth=1 num_heads=4", "dim must be a whole number, got '1.5'"),
    ("cost --set dim=wide depth=1 num_heads=4", "dim must be a whole number, got 'wide'"),
    ((
        "cost --set dim=12 depth=1 num_heads=4 causal=maybe"
    ), (
        "causal must be true or false, got 'maybe'"
    )),
    ((
        "cost --set dim=12 depth=1 num_heads=4 windows=1,x"
    ), (
        "windows must be whole numbers with commas, got '1,x'"
    )),
    ("cost --set dim=12 depth=1 num_heads=4 extras=pooler", "extras must be "),
    ((
        "cost --set dim=12 depth=1 num_heads=4 rope_theta=big"
    ), (
        "rope_theta must be a number, got 'big'"
    )),
    ("cost --set dim=12 depth=1 num_heads=4 norm=batch", "unknown norm 'batch'; "),
    ("cost --set dim=12 depth=1 heads=4", "unknown shape key 'heads'; did you mean num_heads"),
    ("cost --set dim", "--set takes key=value, got 'dim'"),
    ((
        "cost --set dim=12 depth=1 num_heads=4 --tokens 0"
    ), (
        "argument --tokens: must be at least 1, got 0"
    )),
    ((
        "cost --set dim=12 depth=1 num_heads=4 --tokens many"
    ), (
        "argument --tokens: must be a whole number, got 'many'"
    )),
    ((
        "policies --set dim=12 depth=2 num_heads=4"
    ), (
        "the following arguments are required: --policy, --to"
    )),
    ("policies --policy widen --to 3", "a shape needs dim: "),
    ((
        "policies --set dim=12 depth=2 num_heads=4 --policy widn --to 3"
    ), (
        "unknown policy 'widn'; did you mean widen"
    )),
    ((
        "policies --set dim=12 depth=2 num_heads=4 --policy widen --to 3,x"
    ), (
        "argument --to: must be a whole number, got 'x'"
    )),
    ((
        "policies --set dim=12 depth=2 num_heads=4 --policy widen --to 3,"
    ), (
        "argument --to: must be a whole number, got ''"
    )),
    ((
        "policies --set dim=12 depth=2 num_heads=4 --policy split --to 5"
    ), (
        "split cuts the inner width into whole heads, "
    )),
    ((
        "policies --set dim=12 depth=2 num_heads=4 --policy widen --to 3 --budget flop"
    ), (
        "unknown budget 'flop'; did you mean flops? "
    )),
    ((
        "policies --set dim=12 depth=2 num_heads=4 --policy trade --to 3 --within iso"
    ), (
        "unknown way 'iso' to add heads within; "
    )),
    ((
        "policies --set dim=12 depth=2 num_heads=4 --policy widen-iso --to 40"
    ), (
        "40 heads of rank 3 in 2 layers leave no feed-forward at "
    )),
    (
        ("policies --set dim=64 depth=1 num_heads=2 positions=additive num_positions=8 --policy "
        "widen --to 3 --tokens 9"),
        "tokens must not exceed the model's 8 positions, got 9",
    ),
    ("explain --set dim=12 depth=1 num_heads=4 --dtype int8", "unknown dtype 'int8'; "),
    ("explain --set dim=12 depth=1 num_heads=4 --device tpu", "unknown device 'tpu'; "),
    ((
        "explain --set dim=12 depth=1 num_heads=4 --batch 0"
    ), (
        "argument --batch: must be at least 1, got 0"
    )),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), MISTAKES)
def test_mistake_is_one_line_and_writes_nothing(
    line: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "store"
    words = shlex.split(line.replace("STORE", str(path)))
    if words[:1] == ["run"] and "--store" not in words:
        words[2:2] = ["--store", str(path)]
    assert refused(words, capsys).startswith(message.replace("STORE", str(path)))
    assert list(tmp_path.iterdir()) == []


def test_gpu_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    told = refused(["run", "fig1", "--store", str(tmp_path / "store"), "--device", "cuda"], capsys)
    assert (
        told
        == f"device cuda is not there: torch {torch.__version__} sees no GPU; choices: auto, cpu"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["run", "fig1"], ["list"], ["report"]])
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "headwise.json",
            '{"format": 99}',
            (
                "store STORE has format 99, this headwise reads 1: use a newer headwise, or "
                "another "
                "folder"
            ),
        ),
        ("headwise.json", "{", "STORE is not a headwise store: its headwise.json cannot be read"),
        (
            "thesis.tex",
            "x",
            (
                "STORE is not a headwise store: it has files but no headwise.json; name an empty "
                "or "
                "new folder"
            ),
        ),
        ("", "", "a store is a folder, got STORE where STORE is a file"),
    ],
)
def test_store_that_is_not_ours_is_left_alone(
    words: list[str],
    name: str,
    text: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "store"
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_text(text) if name else path.write_text(text)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    assert refused([*words, "--store", str(path)], capsys) == message.replace("STORE", str(path))
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_store_below_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("precious")
    told = refused(["run", "fig1", "--store", str(tmp_path / "file" / "store")], capsys)
    assert told == (
        f"a store is a folder, got {tmp_path / 'file' / 'store'} where {tmp_path / 'file'} is "
        "a file"
    )


def test_note_that_cannot_be_read_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Store(tmp_path).note("fig1", {})
    (tmp_path / "experiments" / "fig1.json").write_text("{")
    assert refused(["report", "--store", str(tmp_path)], capsys).startswith(
        f"{tmp_path / 'experiments' / 'fig1.json'} cannot be read; "
    )


def test_draw_refuses_another_kind_of_picture(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in Store(store).rows()))
    told = refused(["draw", "fig1", str(rows), "--output", str(tmp_path / "a.gif")], capsys)
    assert told == "a figure ends in .png, .pdf or .svg, got a.gif"


def test_draw_refuses_a_view_of_which_there_is_nothing(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps(row) + "\n" for row in Store(store).rows() if row["depth"] == 1)
    )
    told = refused(["draw", "fig1", str(rows), "--view", "layers"], capsys)
    assert told == f"the view layers of fig1 has nothing to compare in {rows}"
    assert list(tmp_path.iterdir()) == [rows]


def test_program_itself_says_the_same(tmp_path: Path) -> None:
    for words in (["rnu"], ["run", "fig1", "--set", "ranks=0", "--store", str(tmp_path / "store")]):
        told = subprocess.run(
            [*HEADWISE, *words], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert told.returncode == 2
        assert told.stdout == ""
        one_line(told.stderr)
    assert list(tmp_path.iterdir()) == []


# ---- disks: real file systems of our own

MOUNT = 'mount -t tmpfs -o "$1" none "$2" && shift 2 && exec "$@"'


def on_disk(options: str, folder: Path, words: list[str]) -> list[str]:
    """A command in a mount namespace of its own, with a small file system at `folder`."""
    return ["unshare", "-rm", "sh", "-c", MOUNT, "sh", options, str(folder), *words]


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        shutil.which("unshare") is None
        or subprocess.run(
            on_disk("size=1m", folder, ["true"]), capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("this system lets nobody mount")
    return folder


def test_full_disk_is_refused_before_anything_is_written(disk: Path) -> None:
    words = [*HEADWISE, *run_words(disk / "store")]
    listing = ["sh", "-c", '"$@"; echo "rc $?"; ls -A "$0"', str(disk), *words]
    told = subprocess.run(
        on_disk("size=8m", disk, listing), capture_output=True, text=True, check=False
    )
    assert told.stdout == "rc 2\n"
    message = one_line(told.stderr)
    assert message.startswith("no disk space: 12 runs need about 64 MiB in ")
    assert message.endswith(", 8 MiB are free")


def test_disk_that_cannot_be_written_is_refused(disk: Path) -> None:
    told = subprocess.run(
        on_disk("size=200m,ro", disk, [*HEADWISE, *run_words(disk / "store")]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 2
    assert told.stdout == ""
    assert (
        one_line(told.stderr)
        == f"the store {disk / 'store'} cannot be written: no permission in {disk}"
    )


FILL = """
import json, os, pathlib, subprocess, sys, time
store, command, again = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
while process.poll() is None and not list(store.glob("runs/*/checkpoint.safetensors")):
    time.sleep(0.01)
filler = store.parent / "filler"
with filler.open("wb", 0) as f:  # somebody else takes the rest
    try:
        while True:
            f.write(bytes(1 << 16))
    except OSError:
        pass
    try:
        while True:
            f.write(bytes(1))
    except OSError:
        pass
out, err = process.communicate(timeout=60)
half = [str(p) for p in store.rglob(".*")]
filler.unlink()
after = subprocess.run(again, capture_output=True, text=True)
rows = [line for p in store.glob("runs/*/rows.jsonl") for line in p.read_text().splitlines()]
told = {"rc": process.returncode, "out": out, "err": err, "half": half}
print(json.dumps({**told, "again": after.returncode, "rows": len(rows)}))
"""


def test_disk_that_fills_up_is_one_line_and_the_run_resumes_with_space(disk: Path) -> None:
    first = [
        *HEADWISE,
        *run_words(
            disk / "store", "--checkpoint-every", "0", "--no-report", "--seeds", "1", changes=LONG
        ),
    ]
    again = [*HEADWISE, *run_words(disk / "store", "--no-report", "--seeds", "1", changes=LONG)]
    words = [sys.executable, "-c", FILL, str(disk / "store"), json.dumps(first), json.dumps(again)]
    told = subprocess.run(
        on_disk("size=80m", disk, words), capture_output=True, text=True, check=False, timeout=120
    )
    assert told.returncode == 0, told.stderr
    answer = json.loads(told.stdout)
    assert answer["rc"] == 1
    assert answer["out"] == ""
    last = answer["err"].splitlines()[-1]
    assert last.startswith("headwise: error: [Errno 28] No space left on device")
    assert "Traceback" not in answer["err"]
    assert answer["half"] == []
    assert (answer["again"], answer["rows"]) == (0, 2)


# ---- what is right


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"headwise {headwise.__version__}\n"
    assert main([]) == 0
    overview = capsys.readouterr().out
    for name in COMMANDS:
        assert name in overview
        with pytest.raises(SystemExit) as caught:
            main([name, "--help"])
        assert caught.value.code == 0
        text = capsys.readouterr().out
        assert "--json" in text
        example = (
            next(line for line in text.splitlines() if line.startswith("example:"))
            .removeprefix("example:")
            .split()
        )
        assert example[:2] == ["headwise", name]
        assert parser().parse_args(example[1:]).command == name


def test_help_imports_nothing_heavy() -> None:
    told = subprocess.run(
        [sys.executable, "-X", "importtime", *HEADWISE[1:], "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    imported = {
        line.rpartition("|")[2].strip().partition(".")[0] for line in told.stderr.splitlines()
    }
    assert "headwise" in imported
    assert not imported & {
        "torch",
        "numpy",
        "safetensors",
        "matplotlib",
        "plotly",
        "jinja2",
        "duckdb",
        "pandas",
        "multiprocessing",
    }


def test_commands_all_answer_in_json(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": 100, **sizes})
    )
    rows, both = tmp_path / "rows.jsonl", tmp_path / "both.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in Store(store).rows()))
    replayed = [
        {**row, "id": f"replayed {row['id']}", "protocol": "replay"} for row in Store(store).rows()
    ]
    both.write_text("".join(json.dumps(row) + "\n" for row in [*Store(store).rows(), *replayed]))
    lines: dict[str, list[str]] = {
        "run": run_words(store, "--seeds", "2"),
        "pretrain": [
            "pretrain",
            "--set",
            *SHAPE,
            "qk_rope_head_dim=0",
            "--steps",
            "2",
            "--eval-tokens",
            "512",
            "--device",
            "cpu",
            "--store",
            str(tmp_path / "text"),
        ],
        "list": ["list"],
        "list of settings": ["list", "fig1"],
        "list of a store": ["list", "--store", str(store)],
        "list of older rows": ["list", "--store", str(store), "--older"],
        "report": ["report", "--store", str(store)],
        "report elsewhere": [
            "report",
            "--store",
            str(store),
            "--output",
            str(tmp_path / "deep" / "page.html"),
        ],
        "theory": ["theory", "--only", "plane", "--store", str(tmp_path / "theory")],
        "draw": ["draw", "fig1", str(rows)],
        "draw twice": ["draw", "fig1", str(rows), str(rows)],
        "draw another view": ["draw", "fig1", str(both), "--view", "depth"],
        "check": ["check", str(Path(__file__).parents[2] / "examples" / "my_task.py")],
        "cost": ["cost", "--set", *SHAPE],
        "cost of a model": ["cost", str(tmp_path / "config.json"), "--tokens", "100"],
        "policies": [
            "policies",
            "--set",
            *SHAPE,
            "--policy",
            "widen-iso",
            "spend-on-ffn",
            "--to",
            "2,6",
            "--tokens",
            "7",
        ],
        "explain": ["explain", "--set", *SHAPE, "--device", "cpu"],
        "explain a GPU": ["explain", "--set", *SHAPE, "--device", "cuda"],
        "infer": [
            "infer",
            "--set",
            *SHAPE,
            "causal=true",
            "--device",
            "cpu",
            "--tokens",
            "20",
            "--steps",
            "3",
            "--batch",
            "1,2",
        ],
    }
    answers: dict[str, Any] = {}
    for name, words in lines.items():
        assert main([*words, "--json"]) == 0, capsys.readouterr().err
        answers[name] = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert isinstance(answers[name], dict)
    assert {words[0] for words in lines.values()} == set(COMMANDS)
    assert (answers["run"]["runs"], answers["run"]["made"], len(answers["run"]["points"])) == (
        8,
        0,
        4,
    )
    assert answers["pretrain"]["row"]["bits_per_byte"] > 0
    assert set(answers["list"]["experiments"]) >= {"fig1"}
    assert len(answers["list of a store"]["rows"]) == 8
    assert answers["list of a store"]["unfinished"] == []
    assert answers["list of a store"]["experiments"] == ["fig1"]
    assert answers["list of older rows"]["rows"] == []
    assert (
        Path(answers["report"]["report"]).read_text()
        == Path(answers["report elsewhere"]["report"]).read_text()
    )
    assert Path(answers["draw"]["figure"]).read_bytes() == (store / "fig1.png").read_bytes()
    assert answers["draw"]["points"] == answers["draw twice"]["points"] == answers["run"]["points"]
    assert answers["cost"]["params"] == sum(answers["cost"]["param_table"].values())
    assert (
        answers["cost of a model"]["kv_bytes"]
        == 100 * answers["cost of a model"]["kv_bytes_per_token"]
        == 100 * 2 * 2 * 2 * 16 * 2
    )
    assert [
        (arm["policy"], arm["to"], arm["num_heads"]) for arm in answers["policies"]["arms"]
    ] == [
        ("widen-iso", 2, 2),
        ("widen-iso", 6, 6),
        ("spend-on-ffn", 2, 4),
        ("spend-on-ffn", 6, 4),
    ]
    assert [arm["residual"] for arm in answers["policies"]["arms"]] == [0] * 4
    assert set(answers["explain"]) == {"backend", "why", "refused"}
    assert answers["explain a GPU"]["step"], "why the fused step does not take it"
    assert [(row["batch"], row["keeps"]) for row in answers["infer"]["rows"]] == [
        (batch, kept) for batch in (1, 2) for kept in ("keys, values", "inputs", "nothing")
    ]
    assert [row["cache_bytes"] for row in answers["infer"]["rows"]] == [
        20 * 96,
        20 * 48,
        0,
        2 * 20 * 96,
        2 * 20 * 48,
        0,
    ]
    assert answers["cost"]["input_bytes_per_token"] * 2 == answers["cost"]["kv_bytes_per_token"]
    assert Path(answers["draw another view"]["figure"]).name == "fig1-depth.png"
    assert answers["list of settings"]["presets"]["paper"]["ranks"] == [64, 32, 16, 8, 4, 2, 1]
    assert answers["theory"]["failed"] == 0
    assert all(check["holds"] for check in answers["theory"]["checks"])


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ("82", "in three kernels on an H100 or H200, else in Triton"),
        ("128", "in Triton; the kernel in CUDA C++ needs at most 96"),
    ],
)
def test_explain_says_what_runs_a_decoders_blocks(
    tokens: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = [
        "dim=48",
        "depth=2",
        "num_heads=2",
        "activation=gelu",
        "norm=layer",
        "norm_at=pre",
        "causal=true",
    ]
    shape += ["qkv_bias=true", "out_bias=true", "ffn_bias=true"]
    assert (
        main(
            [
                "explain",
                "--set",
                *shape,
                "--tokens",
                tokens,
                "--batch",
                "64",
                "--device",
                "cuda",
                "--dtype",
                "float16",
            ]
        )
        == 0
    )
    assert (
        f"a training step in fp16: fused blocks, modules around them; each {said}"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            [],
            (
                "its feed-forward, of several models, one kernel forward and one backward on an "
                "H100 or H200, "
                "else in "
                "Triton"
            ),
        ),
        (
            ["ffn_dim=64"],
            (
                "its feed-forward, of several models, in Triton; the kernel in CUDA C++ needs "
                "fp16, dim 64, ffn_dim in 256s"
            ),
        ),
        (
            ["head_dim=6"],
            (
                "its attention part in Triton; the kernel in CUDA C++ needs dim 64, 16 tokens and "
                "a rank of 1, 2"
            ),
        ),
    ],
)
def test_explain_says_what_runs_a_fused_step(
    changes: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = [
        "dim=64",
        "depth=1",
        "num_heads=8",
        "head_dim=8",
        "norm=scalar",
        "norm_at=post",
        "ffn_dim=2048",
    ]
    shape += ["qkv_bias=true", "out_bias=true", "ffn_bias=true", *changes]
    assert (
        main(
            [
                "explain",
                "--set",
                *shape,
                "--tokens",
                "16",
                "--batch",
                "256",
                "--device",
                "cuda",
                "--dtype",
                "float16",
            ]
        )
        == 0
    )
    assert said in capsys.readouterr().out


def test_run_prints_a_table_and_leaves_rows_figure_and_report(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(p.name for p in store.iterdir())
    assert before == ["experiments", "fig1.png", "headwise.json", "report.html", "runs"]
    assert main(run_words(store, "--seeds", "2")) == 0
    out, err = capsys.readouterr()
    headings = [
        "data",
        "layers",
        "budget",
        "rank",
        "heads",
        "parameters",
        "rate",
        "held-out error",
        "n",
        "diverged",
        "predict zero",
        "paper's statistic",
        "published",
    ]
    assert out.splitlines()[0].split() == " ".join(headings).split()
    assert [line.split()[0] for line in out.splitlines()[1:5]] == ["stream"] * 4
    assert f"figure: {store / 'fig1.png'}" in out
    assert f"report: {store / 'report.html'}" in out
    assert err == f"fig1 (quick): 8 runs, 8 already in {store}\n"
    note = Store(store).experiments()["fig1"]
    assert shlex.split(note["command"]) == ["headwise", *run_words(store, "--seeds", "2")]
    assert len(note["ids"]) == 8
    assert note["settings"]["steps"] == 4


def test_rows_of_other_commits_are_listed(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(store, tmp_path / "copy")
    copy = Store(tmp_path / "copy")
    old = {**copy.rows()[0], "commit": "000000000000"}
    copy.add(old)
    (copy.runs_path / ("f" * 16)).mkdir()
    (copy.runs_path / ("f" * 16) / "run.json").write_text("{}")
    assert main(["list", "--store", str(copy.path), "--older", "--json"]) == 0
    *_, text, last = capsys.readouterr().out.splitlines()
    assert text == "1 rows made by other commits, 1 unfinished runs"
    answer = json.loads(last)
    assert [row["id"] for row in answer["rows"]] == [old["id"]]
    assert answer["unfinished"] == ["f" * 16]


def test_installation_without_extras_trains_and_says_what_is_missing(tmp_path: Path) -> None:
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("matplotlib", "plotly", "jinja2", "duckdb", "pandas"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
from headwise.cli import main
store = sys.argv[-1]
codes = [main(sys.argv[1:]), main(["report", "--store", store])]
with open(f"{store}/rows.jsonl", "w") as f:
    f.write(open(next(__import__("pathlib").Path(store).glob("runs/*/rows.jsonl"))).read())
codes.append(main(["draw", "fig1", f"{store}/rows.jsonl"]))
print(*codes)
"""
    words = [
        w
        for w in run_words(tmp_path / "store", "--seeds", "1")
        if w not in ("--store", str(tmp_path / "store"))
    ]
    told = subprocess.run(
        [sys.executable, "-c", code, *words, "--store", str(tmp_path / "store")],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = told.stdout.splitlines()
    assert lines[-1] == "0 2 2"
    assert (
        "no figure and no report: jinja2 is not installed (pip install 'headwise[report]'); the "
        f"rows are in {tmp_path / 'store'}" in told.stderr.splitlines()
    )
    errors = [line for line in told.stderr.splitlines() if line.startswith("headwise: error:")]
    assert errors == [
        "headwise: error: the report needs jinja2: pip install 'headwise[report]'",
        "headwise: error: the figure needs matplotlib: pip install 'headwise[report]'",
    ]


# ---- an experiment of one's own


OWN = """
import dataclasses

from headwise.experiments import find

EXPERIMENT = dataclasses.replace(
    find("fig1"), name="mine", question="Is <b>mine</b> better?"
)
"""
PROBED = """
import dataclasses

from headwise.experiments import find


def probe(run, weights):
    return {"mine": run.seed + 7}


EXPERIMENT = dataclasses.replace(find("fig1"), name="mine", probe=probe)
"""


def test_experiment_file_is_run_and_hides_no_module(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, path = tmp_path / "json.py", tmp_path / "store"
    mine.write_text(OWN)
    words = run_words(path, "--seeds", "1")
    assert main(["run", str(mine), *words[2:], "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (answer["experiment"], answer["made"]) == ("mine", 4)
    assert sys.modules["json"] is json
    assert "Is &lt;b&gt;mine&lt;/b&gt; better?" in (path / "report.html").read_text()
    assert main(words) == 0  # a second experiment on the same rows
    mine.unlink()
    assert main(["report", "--store", str(path)]) == 0
    page = (path / "report.html").read_text()
    assert "Is &lt;b&gt;mine&lt;/b&gt; better?" in page, "shown from what the store keeps"
    assert "Not shown" not in page
    assert page.count("<section") == 2


def test_experiment_file_with_a_probe_of_its_own_runs_in_several_processes(
    tmp_path: Path,
) -> None:
    mine, path = tmp_path / "mine.py", tmp_path / "store"
    mine.write_text(PROBED)
    words = run_words(path, "--seeds", "2", "--no-report", workers=2)
    assert main(["run", str(mine), *words[2:]]) == 0
    assert {(row["seed"], row["mine"]) for row in Store(path).rows()} == {(0, 7), (1, 8)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def", "MINE cannot be loaded: SyntaxError: "),
        ("1 / 0", "MINE cannot be loaded: ZeroDivisionError: division by zero"),
        ("import nowhere", "MINE cannot be loaded: ModuleNotFoundError: No module named 'nowhere'"),
        (
            "QUESTION = 1",
            "MINE needs one value EXPERIMENT = Experiment(...); it has 0 experiments",
        ),
    ],
)
def test_experiment_file_that_is_none_is_one_line(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(text)
    told = refused(["run", str(mine), "--store", str(tmp_path / "store")], capsys)
    assert told.startswith(message.replace("MINE", str(mine)))
    assert not (tmp_path / "store").exists()


# ---- pipes and terminals


@pytest.mark.parametrize(
    "words",
    [["list"], ["--help"], ["list", "--store", "STORE"], ["cost", "--set", *SHAPE, "--json"]],
)
def test_reader_that_is_gone_is_no_drama(words: list[str], store: Path) -> None:
    line = shlex.join([*HEADWISE, *(str(store) if w == "STORE" else w for w in words)])
    told = subprocess.run(
        ["bash", "-c", f"{line} | head -0; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        check=True,
        env=environment(),
    )
    assert told.stderr == ""
    assert told.stdout == "1\n"


def test_progress_is_plain_lines_without_a_terminal(tmp_path: Path) -> None:
    told = subprocess.run(
        [*HEADWISE, *run_words(tmp_path / "store", "--no-report")],
        capture_output=True,
        text=True,
        check=True,
    )
    first, *_, last = told.stderr.splitlines()
    assert first == f"fig1 (quick): 12 runs, 0 already in {tmp_path / 'store'}"
    assert last.startswith("fig1: 12 runs 100%, ")
    assert last.endswith(" in all")
    assert "\r" not in told.stderr
    assert "\x1b" not in told.stderr


def test_progress_is_a_bar_on_a_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    changes = [*LONG, "steps=400"]
    words = [
        *HEADWISE,
        *run_words(tmp_path / "store", "--no-report", "--seeds", "1", changes=changes),
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the terminal ends with its last writer
            while part := os.read(ours, 4096):
                shown += part
        os.close(ours)
        assert process.wait() == 0
    text = shown.decode()
    assert text.count("\r[") >= 2
    assert "\r[########################] fig1: 2 runs 100%, " in text
    assert text.endswith(" in all\r\n")


# ---- Ctrl-C


def wait_for(what: Callable[[], Any]) -> Any:
    end = time.monotonic() + 60
    while not (found := what()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)
    return found


STOPPED = "headwise: interrupted; run the same command to resume"


def test_ctrl_c_is_one_line_and_the_same_command_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "store"
    words = run_words(path, "--checkpoint-every", "0", "--no-report", "--seeds", "1", changes=LONG)
    with started([*HEADWISE, *words]) as process:
        wait_for(lambda: list(path.glob("runs/*/checkpoint.safetensors")))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out == ""
    assert err.splitlines() == [f"fig1 (quick): 2 runs, 0 already in {path}", STOPPED]
    assert main(run_words(path, "--no-report", "--seeds", "1", changes=LONG)) == 0
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("fig1: 2 runs 100%, ")
    assert last.endswith(" for the rest")
    rows = Store(path).rows()
    assert len(rows) == 2
    assert max(row["resumed"] for row in rows) == 1


@pytest.mark.parametrize("moment", ["while its workers start", "while its workers work"])
def test_ctrl_c_in_a_terminal_reaches_all_processes_and_is_still_one_line(
    moment: str, tmp_path: Path
) -> None:
    path = tmp_path / "store"
    words = run_words(
        path, "--checkpoint-every", "0", "--no-report", "--seeds", "1", changes=LONG, workers=2
    )
    with started([*HEADWISE, *words]) as process:
        wait_for(lambda: (path / "headwise.json").exists())
        if moment == "while its workers work":
            wait_for(lambda: list(path.glob("runs/*/checkpoint.safetensors")))
        else:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            wait_for(
                lambda: len(children.read_text().split()) >= 3
            )  # two workers and multiprocessing's helper
            time.sleep(0.4)  # in the middle of their imports
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out == ""
    assert err.splitlines() == [f"fig1 (quick): 2 runs, 0 already in {path}", STOPPED]
