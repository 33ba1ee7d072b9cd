"""What data say, against scores, losses and weights written out: our modules, transformers'."""

import json

import pytest
import torch
from safetensors.torch import save_file
from support.public_classes import build as build_public
from support.small_configs import SMALL

from headwise import Shape, UsageError
from headwise.cli import main
from headwise.diagnose.checkpoints import open_checkpoint
from headwise.diagnose.inspection import inspect
from headwise.diagnose.on_data import measure_on_data
from headwise.diagnose.running import plainly, running
from headwise.model.transformer import build

SHAPE = Shape(dim=24, depth=2, num_heads=4, num_kv_heads=2, head_dim=6, v_head_dim=5, vocab_size=31,
              causal=True, qk_norm="head", qk_rope_head_dim=4, windows=(5, 0))  # fmt: skip
IDS = [(7 * i * i + 3 * i) % 31 for i in range(44)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder and its model, whose head 3 of layer 1 writes nothing."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(3)
    model = build(SHAPE)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.normal_(std=0.3)
        model.blocks[1].attention.qkv.weight[-5:] = 0  # the values of the second KV head
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    about = {"run": json.dumps({"shape": SHAPE.spec()})}
    save_file(tensors, folder / "weights.safetensors", about)
    return folder, model.eval()


def test_figures_are_those_of_scores_written_out(run):
    folder, model = run
    found = measure_on_data(open_checkpoint(folder), IDS, tokens=11, sequences=3)
    assert (found.sequences, found.tokens) == (3, 11)
    rows = torch.tensor(IDS[:33]).view(3, 11)
    with torch.inference_mode():
        _, kept = model(rows, keep=True)
    for i, layer in enumerate(found.layers):
        scores = kept[f"layer {i}"]["scores"].double()
        weights, heads = (kept[f"layer {i}"][n].double() for n in ("weights", "heads"))
        s = torch.linalg.svdvals(scores - scores.mean(-1, keepdim=True)).square()
        r90 = ((s.cumsum(-1) < 0.9 * s.sum(-1, keepdim=True)).sum(-1) + 1).double().mean(0)
        assert layer.r90 == pytest.approx(r90.tolist())
        energy = heads.square().sum((-2, -1))
        share = (energy / energy.sum(1, keepdim=True)).mean(0)
        assert layer.share == pytest.approx(share.tolist(), rel=1e-4, abs=1e-9)
        window = 5 if i == 0 else 11
        counts = torch.arange(2, 12).clamp_max(window).double()
        entropy = -torch.xlogy(weights, weights).sum(-1)[..., 1:] / counts.log()
        assert layer.entropy == pytest.approx(entropy.mean((0, 2)).tolist(), rel=1e-4)
        beside = heads.transpose(1, 2).flatten(2)
        k = min(beside.shape[1:])
        s = torch.linalg.svdvals(beside)
        assert layer.k == k
        if i == 0:
            kappa = (s[:, 0] / s[:, k - 1]).log().mean().exp()
            assert layer.kappa == pytest.approx(float(kappa), rel=1e-3)
    assert found.layers[0].dead == []
    assert found.layers[1].dead == [2, 3]
    assert found.layers[1].kappa is None  # two heads of zeros


def test_loss_and_rank_loss_curve_are_those_of_the_model(run):
    folder, model = run
    found = measure_on_data(open_checkpoint(folder), IDS, tokens=11, sequences=4)
    rows = torch.tensor(IDS).view(4, 11)[2:]
    with torch.inference_mode():
        logits = model(rows)[0]
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
    assert found.loss == pytest.approx(float(loss), rel=1e-5)
    assert found.layers[0].ranks == [1, 2, 3]
    away = [abs(value - found.loss) for value in found.layers[0].losses]
    assert all(value > 1e-6 for value in away)


def test_cut_to_full_rank_changes_nothing(run, monkeypatch):
    monkeypatch.setattr("headwise.diagnose.on_data.FRACTIONS", (1.0,))
    found = measure_on_data(open_checkpoint(run[0]), IDS, tokens=22, sequences=2)
    for layer in found.layers:
        assert layer.ranks == [6]
        assert layer.losses == [pytest.approx(found.loss, rel=1e-4)]


@pytest.mark.parametrize("model_type", ["gpt2", "gemma2", "gpt_oss", "bert"])
def test_public_model_runs_as_it_does_by_itself(model_type, tmp_path):
    torch.manual_seed(5)
    values = SMALL[model_type][0]
    config, model = build_public(model_type, "cpu", **values)
    config.architectures = [type(model).__name__]
    model.save_pretrained(tmp_path)
    model = model.eval().float()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    opened = open_checkpoint(tmp_path)
    ids = torch.tensor(IDS[:17])[None]
    with torch.inference_mode():
        out = model(ids)
    wanted = out.logits if hasattr(out, "logits") else out.last_hidden_state
    watched = running(opened)
    assert torch.allclose(watched.run(ids, plainly), wanted, atol=1e-5)
    assert watched.causal == (model_type != "bert")
    found = inspect(tmp_path, data=IDS, tokens=17)
    assert len(found.data.layers) == opened.depth
    assert (found.data.loss is None) == (model_type == "bert")
    said = found.sentences[1 if found.looks_untrained or any(found.untrained) else 0]
    assert said.startswith("Data say: 90 % of a head's scores lie in")
    assert {"data_r90", "qk_r90"} <= found.rows[0].keys()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([1, 2, 31] * 20, "token ids must be from 0 to 30"),
        ([1, 2], "at least two sequences of 128 tokens are needed, got 2 tokens"),
        ([], "got 0"),
        ([1.5] * 300, "must be a list of whole numbers"),
        ("/nowhere.json", "cannot read '/nowhere.json'"),
    ],
)
def test_mistake_in_data_is_one_line(data, said, run):
    with pytest.raises(UsageError, match=said):
        inspect(run[0], data=data)


def test_command_measures_on_data(run, tmp_path, capsys):
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(IDS))
    words = ["inspect", str(run[0]), "--data", str(ids), "--tokens", "11", "--json"]
    assert main([*words, "--page", str(tmp_path / "p.html")]) == 0
    out = capsys.readouterr().out
    assert "loss at rank 1" in out
    assert json.loads(out.splitlines()[-1])["data"]["sequences"] == 4
    assert "What data say" in (tmp_path / "p.html").read_text()
