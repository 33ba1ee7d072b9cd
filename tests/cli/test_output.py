"""Help, JSON, and the tables and files that a run leaves."""

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.commands import CHOOSE, HEADWISE, run_words
from support.groups import idle_group, tiny_runs
from support.planted_heads import planted, separate, write

import headwise
from headwise.cli import COMMANDS, main, parser
from headwise.store import Store

SHAPE = ["dim=12", "depth=1", "num_heads=4"]


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
        line = next(line for line in text.splitlines() if line.startswith("example:"))
        example = shlex.split(line.removeprefix("example:"))
        assert example[:2] == ["headwise", name]
        assert parser().parse_args(example[1:]).command == name


def test_help_imports_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *HEADWISE[1:], "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    imported = {
        line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()
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
    store: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
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
        "export": ["export", "--to", "csv", str(tmp_path / "rows.csv"), "--store", str(store)],
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
    begun = Path(shutil.copytree(store, tmp_path / "begun"))
    group = idle_group(begun, tiny_runs(3))
    for beat in group.folder.glob("*.beat"):
        os.utime(beat, (1e9, 1e9))  # its last sign of life
    lines["list of groups"] = ["list", "--store", str(begun), "--live"]
    lines["worker"] = ["worker", str(group.folder)]
    lines["cancel"] = ["cancel", "--store", str(begun), group.id]
    lines["plan"] = [
        "plan",
        "--params",
        "2M",
        "--set",
        "vocab_size=512",
        "head_dim=32",
        "dim=96,128",
    ]
    lines["choose"] = [*CHOOSE, "--seeds", "2", "--store", str(tmp_path / "c"), "--no-report"]
    folder = write(tmp_path / "model", *separate(*planted()))
    lines["inspect"] = ["inspect", str(folder), "--no-page"]
    lines["convert"] = ["convert", str(folder), "--to", "v_head_dim=8", "--dry-run"]
    lines["explore"] = ["explore", "--set", *SHAPE, "--output", str(tmp_path / "explorer.html")]
    lines["generate"] = ["generate", str(tmp_path / "text"), "--tokens", "3"]
    lines["chat"] = ["chat", str(tmp_path / "text"), "--tokens", "3"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("It was\n"))
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
    assert [group["state"] for group in answers["list of groups"]["groups"]] == ["lost"]
    assert answers["worker"]["state"] == "done"
    assert answers["pretrain"]["row"]["bits_per_byte"] > 0
    assert len(answers["generate"]["texts"]) == 1
    assert [turn["you"] for turn in answers["chat"]["turns"]] == ["It was"]
    assert answers["report"]["answers"]["fig1"] == f"{answers['run']['answer']}"
    assert answers["draw"]["answer"] == answers["run"]["answer"]
    assert answers["plan"]["listed"] == answers["plan"]["meeting"] > 0
    assert answers["choose"]["sentence"]
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
        "runs at zero",
        "paper's statistic",
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
    done = subprocess.run(
        [sys.executable, "-c", code, *words, "--store", str(tmp_path / "store")],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert lines[-1] == "0 2 2"
    assert (
        "no figure and no report: jinja2 is not installed (pip install 'headwise[report]'); the "
        f"rows are in {tmp_path / 'store'}" in done.stderr.splitlines()
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("headwise: error:")]
    assert errors == [
        "headwise: error: the report needs jinja2: pip install 'headwise[report]'",
        "headwise: error: the figure needs matplotlib: pip install 'headwise[report]'",
    ]
