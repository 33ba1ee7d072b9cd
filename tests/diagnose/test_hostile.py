"""Damaged and hostile checkpoints: one clear line or a correct result, nothing run, bounded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.planted_heads import gguf, planted, separate, write

from headwise import UsageError
from headwise.cli import main
from headwise.diagnose.checkpoints import open_checkpoint
from headwise.show.inspect_page import write_inspect_page

ROOT = Path(__file__).parents[2]


def test_mutated_checkpoints_are_refused_or_read() -> None:
    code = "import sys; sys.path[:0] = ['src', 'tests']; sys.argv = ['', '500', '7']\n"
    code += "from support.mutated_checkpoints import main; main(500, 7)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["other"] == []
    assert found["long"] == found["markup"] == []
    assert not found["ran"]
    assert found["refused"] > 250
    assert found["read"] > 100
    assert found["grown"] < 400  # MiB


def test_damage_is_named(tmp_path: Path) -> None:
    config, tensors = separate(*planted())
    name = "model.layers.0.self_attn.k_proj.weight"
    for value, said in ((float("nan"), "holds NaN"), (1e200, "numbers beyond 1e\\+30")):
        bad = {**tensors, name: tensors[name].clone()}
        bad[name][3, 5] = value
        with pytest.raises(UsageError, match=f"{name}.*{said}"):
            open_checkpoint(write(tmp_path, config, bad)).heads(0)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-20])
    with pytest.raises(UsageError, match="lies outside the file, or it is truncated"):
        open_checkpoint(tmp_path)
    with pytest.raises(UsageError, match="must hold floating-point numbers"):
        open_checkpoint(write(tmp_path, config, {**tensors, name: tensors[name].long()})).heads(0)


def test_wrong_heads_are_named_with_the_shapes(tmp_path: Path) -> None:
    config, tensors = separate(*planted())
    config["num_attention_heads"], config["head_dim"] = 7, 8
    config["num_key_value_heads"] = 7
    with pytest.raises(UsageError, match="layer 0: 7 heads do not divide the 48 rows of q"):
        open_checkpoint(write(tmp_path, config, tensors)).heads(0)


def test_pickle_with_code_is_not_run(tmp_path: Path) -> None:
    import os

    class Code:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "proof"),)

    torch.save({"a": torch.zeros(2), "b": Code()}, tmp_path / "model.pt")
    with pytest.raises(UsageError, match="holds Python objects besides tensors"):
        open_checkpoint(tmp_path / "model.pt", num_heads=1)
    assert not (tmp_path / "proof").exists()


def test_file_that_is_none_is_refused_in_one_line(tmp_path: Path, capfd) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    os_paths = [tmp_path / "notes.txt", tmp_path / "nothing", tmp_path, Path("/dev/zero")]
    for path in os_paths:
        assert main(["inspect", str(path), "--no-page"]) == 2
        said = capfd.readouterr().err
        assert said.startswith("headwise: error: ")
        assert len(said.splitlines()) == 1


def test_page_escapes_names(tmp_path: Path) -> None:
    from headwise.diagnose.inspection import inspect

    folder = write(tmp_path / "<img src=x>", *separate(*planted()))
    found = inspect(folder)
    write_inspect_page(tmp_path / "page.html", found.to_json(), found.rows, "<b>")
    page = (tmp_path / "page.html").read_text()
    assert "<img" not in page.rpartition("<main>")[2]
    assert "&lt;b&gt;" in page


def test_huge_counts_of_a_gguf_are_refused(tmp_path: Path) -> None:
    path = gguf(tmp_path / "m.gguf", {"general.architecture": "llama"}, {})
    data = bytearray(path.read_bytes())
    for place in (8, 16, 24):
        bad = data.copy()
        bad[place : place + 8] = b"\xff" * 8
        path.write_bytes(bad)
        with pytest.raises(UsageError, match=r"tensors and|no GGUF file"):
            open_checkpoint(path)
