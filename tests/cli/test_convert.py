"""`headwise convert` from the command line: sentences, tables that fit, JSON, new folders."""

import json

import pytest
import torch

from headwise import Shape
from headwise.cli import main
from headwise.lm.checkpoint import load_decoder
from headwise.model.transformer import build
from headwise.tensor_files import write_tensors

SHAPE = Shape(dim=24, depth=2, num_heads=4, head_dim=6, vocab_size=31, causal=True)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run's folder, and token ids; the command runs beside them."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(3)
    tensors = {name: p.detach() for name, p in build(SHAPE).named_parameters()}
    about = {"run": json.dumps({"shape": SHAPE.spec()})}
    (tmp_path / "run").mkdir()
    write_tensors(tmp_path / "run/weights.safetensors", tensors, about)
    (tmp_path / "ids.json").write_text(json.dumps([(7 * i * i + 3 * i) % 31 for i in range(220)]))
    return tmp_path


@pytest.mark.parametrize("columns", ["80", "200"])
def test_convert_says_and_tabulates(columns, run, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", columns)
    words = ["convert", "run", "--rank", "3", "--to", "kv_heads=2", "--data", "ids.json"]
    assert main([*words, "--tokens", "11"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= int(columns)
    said = " ".join(out.split())
    assert said.startswith("2 KV heads for 4 and queries and keys of rank 3 for 6 and values of")
    assert "Layers changed one at a time and added up predict" in said
    assert "The same by plainer means: weights alone" in said
    assert "KV bytes per token (16 bits) 192 48 -75.0%" in said
    assert "written: run-rank3-kv_heads2 (headwise)" in said
    assert load_decoder("run-rank3-kv_heads2").shape.num_kv_heads == 2


def test_convert_answers_json_and_finetunes(run, capsys):
    words = ["convert", "run", "--to", "head_dim=2", "--data", "ids.json", "--tokens", "11"]
    words += ["--out", "new", "--finetune", "4", "--lr", "0.01", "--no-controls", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["out"] == "new"
    assert found["losses"]["controls"] == {}
    assert [step for step, _ in found["curve"]] == [0, 1, 2, 3, 4]
    assert found["target"]["head_dim"] == 2
    assert found == json.loads((run / "new/conversion.json").read_text())


def test_convert_without_data_says_that_nothing_was_measured(run, capsys):
    assert main(["convert", "run", "--to", "head_dim=2", "--dry-run"]) == 0
    assert "The loss was not measured: --data FILE does." in " ".join(
        capsys.readouterr().out.split()
    )
    assert main(["convert", "run", "--to", "num_heads=8", "--dry-run"]) == 0
    assert "The function is the same." in capsys.readouterr().out
    assert {path.name for path in run.iterdir()} == {"run", "ids.json"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "head_dim"], "--to takes sizes such as num_kv_heads=4, got 'head_dim'"),
        (["--to", "head_dim=-3"], "--to takes sizes"),
        (["--to", "dim=3"], "convert changes num_heads"),
        (["--rank", "3", "--as", "onnx"], "unknown format 'onnx'"),
        (["--rank", "3", "--out", "run"], "'run' is there already"),
        (["--rank", "3", "--out", "no/new"], "there is no folder 'no'"),
        (["--rank", "3", "--out", "new", "--dry-run"], "--dry-run writes nothing"),
        (["--rank", "3", "--finetune", "4"], "finetune needs data"),
        (["--rank", "3", "--data", "none.txt"], "cannot read 'none.txt'"),
    ],
)
def test_mistake_is_one_line_and_leaves_nothing(words, said, run, capsys):
    assert main(["convert", "run", *words]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert said in err
    assert {path.name for path in run.iterdir()} == {"run", "ids.json"}
