"""Runs of headwise converted: the same function where algebra says so, the same shape always."""

import json

import pytest
import torch

from headwise import Shape, UsageError
from headwise.converting.convert import convert
from headwise.diagnose.checkpoints import open_checkpoint
from headwise.lm.checkpoint import load_decoder
from headwise.model.transformer import build
from headwise.tensor_files import read_tensors, write_tensors

GPT = Shape(dim=24, depth=2, num_heads=4, head_dim=6, v_head_dim=5, vocab_size=31, causal=True,
            norm="layer", positions="additive", num_positions=32, activation="gelu", qkv_bias=True,
            out_bias=True, ffn_bias=True)  # fmt: skip
LLAMA = Shape(dim=24, depth=2, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=31, causal=True,
              activation="swiglu", ffn_dim=40, qk_rope_head_dim=8)  # fmt: skip
NORMED = LLAMA.replace(qk_norm="head")
SHAPES = {"gpt": GPT, "llama": LLAMA, "normed": NORMED, "one": LLAMA.replace(num_kv_heads=1)}
IDS = torch.randint(31, (19 * 17,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder and its model by name; no weight is zero or one."""
    found = {}
    for name, shape in SHAPES.items():
        folder = tmp_path_factory.mktemp("runs") / name
        folder.mkdir()
        torch.manual_seed(3)
        model = build(shape)
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(std=0.3) if p.ndim > 1 else p.add_(torch.randn_like(p) * 0.3)
        tensors = {n: p.detach() for n, p in model.named_parameters()}
        about = {"run": json.dumps({"shape": shape.spec(), "steps": 7})}
        write_tensors(folder / "weights.safetensors", tensors, about)
        found[name] = folder, model.eval()
    return found


def logits(model):
    with torch.inference_mode():
        return model(torch.tensor(IDS[:51]).view(3, 17))[0]


@pytest.mark.parametrize(
    ("name", "sizes", "tolerance"),
    [
        ("gpt", {}, 0),
        ("gpt", {"head_dim": 11, "v_head_dim": 7}, 1e-5),
        ("gpt", {"num_heads": 8}, 1e-5),
        ("gpt", {"num_heads": 8, "num_kv_heads": 8, "v_head_dim": 3}, 1e-5),
        ("gpt", {"kv_lora_rank": 25}, 1e-5),
        ("gpt", {"num_heads": 8, "head_dim": 6, "kv_lora_rank": 26}, 1e-5),
        ("llama", {"head_dim": 16}, 1e-5),
        ("llama", {"head_dim": 10, "v_head_dim": 9}, 2e-5),
        ("llama", {"num_heads": 12, "num_kv_heads": 6}, 1e-5),
        ("normed", {"num_heads": 8, "num_kv_heads": 4, "v_head_dim": 13}, 1e-5),
        ("one", {"kv_lora_rank": 25}, 1e-5),  # one key rotates already
    ],
)
def test_conversion_that_is_exact_is_the_same_function(name, sizes, tolerance, runs, tmp_path):
    folder, model = runs[name]
    done = convert(folder, out=tmp_path / "new", **sizes)
    assert done.losses is None
    new = load_decoder(tmp_path / "new")
    assert new.shape == done.target
    away = (logits(new) - logits(model)).abs().max() / logits(model).abs().max()
    assert float(away) <= tolerance
    for field, value in sizes.items():
        assert getattr(new.shape, field) == value
    assert done.costs[1][2] == new.shape.kv_bytes(1)
    # What only moves numbers changes no bit of them.
    if done.exact:
        old = dict(read_tensors(folder / "weights.safetensors")[1])
        made = read_tensors(tmp_path / "new/weights.safetensors")[1]
        numbers = [t["blocks.1.attention.qkv.weight"].unique() for t in (old, made)]
        assert set(numbers[1].tolist()) - {0.0} == set(numbers[0].tolist())


@pytest.mark.parametrize(
    ("name", "sizes", "joined"),
    [
        ("gpt", {"head_dim": 3, "v_head_dim": 2}, 1),
        ("gpt", {"num_kv_heads": 2}, 2),
        ("gpt", {"num_kv_heads": 1, "head_dim": 5}, 4),
        ("gpt", {"kv_lora_rank": 13}, 1),
        ("gpt", {"v_head_dim": 3, "kv_lora_rank": 13}, 1),
        ("llama", {"head_dim": 4, "v_head_dim": 4}, 1),
        ("llama", {"num_kv_heads": 1}, 2),
        ("llama", {"kv_lora_rank": 13}, 1),
        ("llama", {"num_heads": 8, "v_head_dim": 5, "kv_lora_rank": 25, "qk_rope_head_dim": 4}, 1),
        ("normed", {"v_head_dim": 4}, 1),
    ],
)
def test_loss_in_place_is_that_of_the_written_model(name, sizes, joined, runs, tmp_path):
    folder, model = runs[name]
    settings = {"data": IDS, "tokens": 17, "sequences": 10, **sizes}
    done = convert(folder, out=tmp_path / "new", **settings)
    assert not done.exact
    assert done.calibrated
    # Independent of what converts: the written model as our own module, on the last sequences.
    rows = torch.tensor(IDS).view(19, 17)[-5:]

    def loss(decoder):
        with torch.inference_mode():
            out = decoder(rows)[0][:, :-1].flatten(0, 1)
        return float(torch.nn.functional.cross_entropy(out, rows[:, 1:].flatten()))

    new = load_decoder(tmp_path / "new")
    assert done.losses.before == pytest.approx(loss(model), rel=1e-5)
    assert done.losses.measured == pytest.approx(loss(new), rel=1e-5)
    dry = convert(folder, **settings)
    assert dry.out is None
    # Without a folder the loss is of maps on the running model.
    assert dry.losses.measured == pytest.approx(done.losses.measured, abs=2e-5)
    assert dry.losses.predicted == done.losses.predicted
    assert {len(group) for layer in done.layers for group in layer.groups} == {joined}
    alone = sum(layer.loss - done.losses.before for layer in done.layers)
    assert done.losses.predicted == pytest.approx(done.losses.before + alone)
    change = done.losses.measured - done.losses.before
    if abs(change) > 2 * done.losses.error:
        off = (done.losses.predicted - done.losses.measured) / change
        assert done.losses.miss == pytest.approx(off)
    else:
        assert done.losses.miss is None
    said = json.loads((tmp_path / "new/conversion.json").read_text())["losses"]
    assert said["measured"] == done.losses.measured


@pytest.mark.parametrize("data", [None, IDS])
def test_latent_beside_keys_that_turn_alike_is_the_same_function(data, runs, tmp_path):
    """Every pair of the second KV head is a complex multiple of the first one's."""
    folder, model = runs["llama"]
    about, tensors = read_tensors(folder / "weights.safetensors")
    tensors = dict(tensors)
    for i in range(2):
        rows = tensors[f"blocks.{i}.attention.qkv.weight"].clone()
        first, second = rows[32:40].view(2, 4, 24), rows[40:48].view(2, 4, 24)  # halves of pairs
        a, b = (
            torch.tensor([0.3, -1.7, 0.9, 2.0])[:, None],
            torch.tensor([1, 0.2, 0, -3.0])[:, None],
        )
        second[0], second[1] = a * first[0] - b * first[1], b * first[0] + a * first[1]
        tensors[f"blocks.{i}.attention.qkv.weight"] = rows
    (tmp_path / "planted").mkdir()
    write_tensors(tmp_path / "planted/weights.safetensors", tensors, about)
    kept = {"data": data, "tokens": 17, "sequences": 8} if data else {}
    done = convert(tmp_path / "planted", out=tmp_path / "new", kv_lora_rank=25, **kept)
    assert done.pairs_energy == pytest.approx(1, abs=1e-9)
    old, new = (logits(load_decoder(tmp_path / name)) for name in ("planted", "new"))
    assert float((new - old).abs().max() / old.abs().max()) < 1e-5
    assert float((logits(model) - old).abs().max()) > 0.1
    assert not any("dropped" in line for line in done.sentences)
    # Fewer pairs, or heads that differ, are said to lose their positions.
    less = convert(folder, kv_lora_rank=25, qk_rope_head_dim=4)
    assert less.target.head_dim == 12
    assert less.target.kv_bytes(1) == 2 * 2 * (25 + 4)
    assert any("an approximation however wide" in line for line in less.sentences)


def test_shapes_and_run_are_read_back(runs, tmp_path):
    convert(runs["gpt"][0], out=tmp_path / "new", rank=3)
    opened = open_checkpoint(tmp_path / "new")
    assert opened.heads(1).q.shape == (4, 3, 24)
    assert json.loads(opened.source.about["run"])["steps"] == 7
    assert [p.name for p in tmp_path.iterdir()] == ["new"]


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("gpt", {"num_heads": 6}, "num_heads must be a multiple of the 4 there are, got 6"),
        ("gpt", {"num_kv_heads": 3}, "num_kv_heads must divide num_heads 4"),
        ("gpt", {"depth": 3}, "convert changes num_heads"),
        ("gpt", {"head_dim": 0}, "must be a whole number from 1"),
        ("gpt", {"to": "gguf"}, "unknown format 'gguf'"),
        ("gpt", {"to": "hf", "num_kv_heads": 2}, "no Hugging Face family has a config"),
        ("gpt", {"finetune": 3}, "finetune needs data, and a folder"),
        ("gpt", {"data": [1, 2, 3], "rank": 3}, "at least two sequences"),
        ("llama", {"kv_lora_rank": 9, "qk_rope_head_dim": 10}, "at most the 8 coordinates"),
        ("llama", {"kv_lora_rank": 9, "rank": 6}, "head_dim follows from a latent"),
        ("llama", {"qk_rope_head_dim": 4}, "goes with a latent: give kv_lora_rank"),
        ("gpt", {"kv_lora_rank": 9, "v_head_dim": 7}, "ask for wider ones without it"),
        ("llama", {"head_dim": 5}, "rotary positions need an even head_dim"),
        ("normed", {"head_dim": 4}, "queries and keys are normed"),
        ("normed", {"num_kv_heads": 1}, "queries cannot adapt"),
        ("normed", {"kv_lora_rank": 9}, "a latent needs qk_norm none"),
    ],
)
def test_refusal_is_one_line_and_leaves_nothing(name, settings, said, runs, tmp_path):
    settings = {"out": tmp_path / "new", **settings}
    if "finetune" in settings:
        del settings["out"]
    with pytest.raises(UsageError, match=said):
        convert(runs[name][0], **settings)
    assert list(tmp_path.iterdir()) == []


def test_taken_place_is_refused_and_stays(runs, tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new/mine").write_text("mine")
    for place in (tmp_path / "new", runs["gpt"][0], tmp_path / "none/new"):
        with pytest.raises(UsageError, match=r"is there already|there is no folder"):
            convert(runs["gpt"][0], out=place, rank=3)
    assert (tmp_path / "new/mine").read_text() == "mine"


def test_failure_while_writing_leaves_nothing(runs, tmp_path, monkeypatch):
    from headwise.converting import formats

    def fails(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(formats, "write_pieces", fails)
    with pytest.raises(OSError, match="No space"):
        convert(runs["gpt"][0], out=tmp_path / "new", rank=3)
    assert list(tmp_path.iterdir()) == []


def test_finetuning_recovers_on_what_it_is_not_measured_on(runs, tmp_path):
    folder, _ = runs["gpt"]
    ids = [
        i * i % 31 for i in range(17 * 40)
    ]  # repeats itself, so that there is something to learn
    done = convert(folder, out=tmp_path / "new", rank=2, data=ids, tokens=17, sequences=8,
                   finetune=24, lr=0.01, controls=False)  # fmt: skip
    steps, losses = zip(*done.curve, strict=True)
    assert steps == (0, 3, 6, 9, 12, 15, 18, 21, 24)
    assert losses[0] == pytest.approx(done.losses.measured, rel=1e-5)
    assert losses[-1] < 0.7 * losses[0]
    rows = torch.tensor(ids).view(-1, 17)[-4:]
    with torch.inference_mode():
        out = load_decoder(tmp_path / "new")(rows)[0][:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(out, rows[:, 1:].flatten())
    assert losses[-1] == pytest.approx(float(loss), rel=1e-5)
