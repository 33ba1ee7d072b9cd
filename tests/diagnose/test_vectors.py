"""Images and vectors as data: a vision model of transformers and a run of ours, against their own
states; arrays and pictures that are none."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from headwise import Shape, UsageError
from headwise.diagnose.checkpoints import open_checkpoint
from headwise.diagnose.inspection import inspect
from headwise.diagnose.on_data import measure_on_data
from headwise.diagnose.running import plainly, running
from headwise.diagnose.vectors import samples_of
from headwise.model.transformer import build
from headwise.tensor_files import write_tensors

SHAPE = Shape(dim=24, depth=2, num_heads=3, head_dim=5, input_dim=7, output_dim=2)


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    """A small ViT's folder and model."""
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(2)
    config = ViTConfig(hidden_size=24, num_hidden_layers=2, num_attention_heads=3,
                       intermediate_size=31, image_size=12, patch_size=4)  # fmt: skip
    model = ViTModel(config, add_pooling_layer=False)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    config.architectures = ["ViTModel"]
    folder = tmp_path_factory.mktemp("vision")
    model.save_pretrained(folder)
    return folder, model.eval()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Four images of other sizes, and a file that is none."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(3)
    for i in range(4):
        values = rng.integers(0, 256, (17 + i, 23, 3), dtype=np.uint8)
        Image.fromarray(values).save(folder / f"{i}.png")
    (folder / "notes.txt").write_text("no image")
    return folder


def test_vision_model_runs_as_it_does_by_itself(vision, pictures):
    folder, model = vision
    found = measure_on_data(open_checkpoint(folder), pictures)
    assert (found.sequences, found.tokens, found.loss) == (4, 10, None)
    assert [layer.layer for layer in found.layers] == [0, 1]
    assert found.layers[0].ranks == [1, 2, 4]
    assert all(0 < change < 2 for layer in found.layers for change in layer.losses)
    x = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = model(pixel_values=x).last_hidden_state
    assert torch.allclose(running(open_checkpoint(folder)).run(x, plainly), wanted, atol=1e-5)


def test_pictures_are_resized_shifted_and_scaled(vision, pictures, tmp_path):
    folder, _ = vision
    place = tmp_path / "vit"
    place.mkdir()
    for name in ("config.json", "model.safetensors"):
        (place / name).symlink_to(folder / name)
    mean, std = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]
    settings = {"image_mean": mean, "image_std": std}
    (place / "preprocessor_config.json").write_text(json.dumps(settings))
    wanted = [running(open_checkpoint(at)).wanted for at in (folder, place)]
    seen = [samples_of(pictures, one, 2) for one in wanted]
    assert seen[0].shape == (2, 3, 12, 12)
    assert -1 <= float(seen[0].min()) < -0.6 < 0.6 < float(seen[0].max()) <= 1
    back = (seen[1] * torch.tensor(std).view(3, 1, 1) + torch.tensor(mean).view(3, 1, 1)) * 2 - 1
    assert torch.allclose(back, seen[0], atol=1e-6)


def test_run_on_vectors_is_measured_on_an_array(tmp_path):
    torch.manual_seed(1)
    model = build(SHAPE).eval()
    (tmp_path / "run").mkdir()
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    about = {"run": json.dumps({"shape": SHAPE.spec()})}
    write_tensors(tmp_path / "run/weights.safetensors", tensors, about)
    x = torch.randn(4, 11, 7)
    np.save(tmp_path / "x.npy", x.numpy())
    found = inspect(tmp_path / "run", data=tmp_path / "x.npy")
    assert (found.data.sequences, found.data.tokens) == (4, 11)
    same = inspect(tmp_path / "run", data=x)
    assert same.data == found.data
    with torch.inference_mode():
        states = running(open_checkpoint(tmp_path / "run")).run(x, plainly)
        assert torch.allclose(states, model(x)[0], atol=1e-6)


def test_data_that_are_none_are_one_line(vision, pictures, tmp_path):
    np.save(tmp_path / "small.npy", np.zeros((3, 3, 5, 5), dtype=np.float32))
    np.save(tmp_path / "nan.npy", np.full((3, 3, 12, 12), np.nan))
    np.save(tmp_path / "code.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.png").write_bytes(b"\x89PNG not")
    for name, said in (
        ("small.npy", r"samples x 3 x 12 x 12\), got \(3, 3, 5, 5\)"),
        ("nan.npy", "must be finite"),
        ("code.npy", "is no array of numbers"),
        ("empty", "no images"),
        ("a.png", "is no image"),
        ("none.npy", "cannot read"),
    ):
        with pytest.raises(UsageError, match=said):
            measure_on_data(open_checkpoint(vision[0]), tmp_path / name)
    with pytest.raises(UsageError, match="at least two samples are needed, got 1"):
        measure_on_data(open_checkpoint(vision[0]), pictures / "0.png")
