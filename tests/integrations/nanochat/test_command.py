"""`python -m headwise.integrations.nanochat`: a module run with its own arguments."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.nanochat_model import CHECKOUT, needs_nanochat

from headwise.errors import UsageError
from headwise.integrations import nanochat as bridge
from headwise.integrations.nanochat.command import main

SCRIPT = """
import json, sys
from dataclasses import asdict
from nanochat.gpt import GPT, GPTConfig
import torch
sizes = {"n_head": 2, "n_kv_head": 2, "n_embd": 40, "sequence_len": 8, "vocab_size": 64}
with torch.device("meta"):
    model = GPT(GPTConfig(n_layer=int(sys.argv[2]), **sizes))
model.to_empty(device="cpu")
model.init_weights()
compiled = torch.compile(model, backend="eager", dynamic=False)
loss = compiled(torch.zeros(1, 8, dtype=torch.long), torch.ones(1, 8, dtype=torch.long)).item()
about = {"argv": sys.argv[1:], "name": __name__, "config": asdict(model.config), "loss": loss}
print(json.dumps(about))
"""


@needs_nanochat
def test_command_runs_a_module_with_its_own_arguments(tmp_path: Path):
    (tmp_path / "probe.py").write_text(SCRIPT, encoding="utf-8")
    paths = [str(Path(bridge.__file__).parents[3]), CHECKOUT, os.environ.get("PYTHONPATH", "")]
    words = [
        "--num-heads",
        "6",
        "--head-dim",
        "300",
        "--num-kv-heads",
        "3",
        "--max-logit",
        "150",
        "--",
        "-m",
        "probe",
        "--depth",
        "2",
        "--",
        "x",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "headwise.integrations.nanochat", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert (answer["argv"], answer["name"]) == (["--depth", "2", "--", "x"], "__main__")
    c = answer["config"]
    assert (
        c["n_head"],
        c["head_dim"],
        c["n_kv_head"],
        c["v_head_dim"],
        c["logit_scale"],
        c["n_layer"],
    ) == (6, 300, 3, 300, 0.5, 2)
    assert answer["loss"] == pytest.approx(
        4.1589, abs=0.01
    )  # ln 64: at its start nanochat's logits are small


@needs_nanochat
def test_command_in_this_process(nano, tmp_path, monkeypatch, capsys):
    (tmp_path / "probe_here.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "probe_empty.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    before = sys.argv
    assert main(["--head-dim", "8", "--", "-m", "probe_here", "--depth", "1"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["config"]["head_dim"] == 8
    assert sys.argv is before
    assert main(["--head-dim", "8", "--", "-m", "probe_empty"]) == 2
    assert "error: no GPT was built, so none got head_dim 8" in capsys.readouterr().err
    assert main(["--", "-m", "probe_empty"]) == 0


@pytest.mark.parametrize(
    "words", [[], ["--head-dim", "4"], ["--", "scripts.base_train"], ["--", "-m"]]
)
def test_command_states_what_comes_behind_the_dashes(words, capsys):
    assert main(words) == 2
    assert "error: behind -- comes -m and a module of nanochat's" in capsys.readouterr().err


def test_use_without_nanochat_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "nanochat.gpt", None)
    monkeypatch.setitem(sys.modules, "nanochat", None)
    with (
        pytest.raises(UsageError, match="nanochat must be importable: run this in its checkout"),
        bridge.use(),
    ):
        pass
