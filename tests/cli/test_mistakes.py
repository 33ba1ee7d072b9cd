"""Mistakes on the command line: one line, exit code 2, nothing written."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
from support.commands import HEADWISE, one_line, refused

from headwise.store import Store

MISTAKES: list[tuple[str, str]] = [
    ("rnu fig1", "unknown command 'rnu'; did you mean run? choices: "),
    ("zzz", "unknown command 'zzz'; choices: cancel, chat, check, choose, "),
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
    ("cost --set dim=12 depth=1 num_head=4", "unknown shape key 'num_head'; did you mean num_"),
    ("cost --set dim=12 depth=1 num_heads=4 heads=4", "num_heads and heads are two names of one "),
    ("cost --set dim=12 depth=2 num_heads=4,x", "num_heads must be a whole number, got 'x'"),
    ("cost --set dim=12 depth=2 num_heads=4,4,4", "num_heads by layer must be 1 to depth (2) "),
    ("infer --set dim=12 depth=1 num_heads=4 causal=true sinks=true", "needs sinks=False, this "),
    ("policies --set dim=12 depth=2 num_heads=4,3 --policy widen --to 3", "widen changes the "),
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
    message = refused(
        ["run", "fig1", "--store", str(tmp_path / "store"), "--device", "cuda"], capsys
    )
    assert (
        message
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
    message = refused(["run", "fig1", "--store", str(tmp_path / "file" / "store")], capsys)
    assert message == (
        f"a store is a folder, got {tmp_path / 'file' / 'store'} where {tmp_path / 'file'} is "
        "a file"
    )


def test_draw_refuses_another_kind_of_picture(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in Store(store).rows()))
    message = refused(["draw", "fig1", str(rows), "--output", str(tmp_path / "a.gif")], capsys)
    assert message == "a figure ends in .png, .pdf or .svg, got a.gif"


def test_draw_refuses_a_view_of_which_there_is_nothing(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps(row) + "\n" for row in Store(store).rows() if row["depth"] == 1)
    )
    message = refused(["draw", "fig1", str(rows), "--view", "layers"], capsys)
    assert message == f"the view layers of fig1 has nothing to compare in {rows}"
    assert list(tmp_path.iterdir()) == [rows]


def test_program_itself_says_the_same(tmp_path: Path) -> None:
    for words in (["rnu"], ["run", "fig1", "--set", "ranks=0", "--store", str(tmp_path / "store")]):
        done = subprocess.run(
            [*HEADWISE, *words], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert done.returncode == 2
        assert done.stdout == ""
        one_line(done.stderr)
    assert list(tmp_path.iterdir()) == []
