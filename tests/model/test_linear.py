"""Projections as other tools see them: `nn.Linear` by type and by name, replaced, quantised, with
hooks, made on the meta device, cut by heads."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.cached import BASE, FAMILY, MODERN, filled, ids, refused
from support.tolerance import close, same, seeded
from torch import nn
from torch.func import functional_call, grad, vmap

from headwise.model.attention import Attention
from headwise.model.cache import Cache
from headwise.model.init import fresh, initialise
from headwise.model.linear import EnsembleLinear, GroupedLinear, as_made, linear_layer
from headwise.model.transformer import Decoder, build
from headwise.shape import Shape

SHAPES = {
    "plain heads": BASE,
    "biases, averaged modules": FAMILY["biases, averaged modules"],
    "latent": FAMILY["latent of queries too"],
    "keys are values": MODERN["keys are values, rotary"],
    "low-rank queries": MODERN["low-rank queries"],
    "gates by head": MODERN["gates by head"],
    "outputs by groups": MODERN["outputs by groups"],
}
SEPARATE = {name: SHAPES[name] for name in ("plain heads", "keys are values", "gates by head")}


class Adapted(nn.Module):
    """What LoRA puts in the place of a layer: the layer, and a product of two thin matrices."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base
        generator = seeded(base.out_features)
        self.down = nn.Parameter(torch.randn(rank, base.in_features, generator=generator))
        self.up = nn.Parameter(torch.randn(base.out_features, rank, generator=generator))

    @property
    def weight(self):  # PEFT shows the base's
        return self.base.weight

    @property
    def bias(self):
        return self.base.bias

    def forward(self, x):
        return self.base(x) + x @ self.down.mT @ self.up.mT


def adapted(model):
    """A copy whose linear maps are all adapted, and one whose weights are the sums."""
    one, other = copy.deepcopy(model), copy.deepcopy(model)
    for name, layer in list(one.named_modules()):
        if type(layer) is nn.Linear:
            parent, _, last = name.rpartition(".")
            new = Adapted(layer).to(layer.weight.dtype)
            setattr(one.get_submodule(parent), last, new)
            with torch.no_grad():
                other.get_submodule(name).weight += new.up @ new.down
    return one, other


# ---- what they are


@pytest.mark.parametrize("name", SHAPES)
def test_projections_of_one_model_are_torchs_linear(name):
    model = build(SHAPES[name])
    kinds = {type(m) for m in model.modules() if list(m.parameters(recurse=False))}
    assert not [kind for kind in kinds if issubclass(kind, EnsembleLinear)]
    for part, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            assert type(layer) is nn.Linear  # quantize_dynamic asks for exactly this type
            assert layer.weight.shape == (layer.out_features, layer.in_features), part
            assert as_made(layer)
    names = {part.rpartition(".")[2] for part, m in model.named_modules() if type(m) is nn.Linear}
    assert {"out", "up", "down"} <= names
    assert isinstance(model.blocks[0].get_submodule("attention.out"), nn.Linear)
    ensemble = build(SHAPES[name], models=2)
    assert not [m for m in ensemble.modules() if isinstance(m, nn.Linear)]
    assert list(ensemble.state_dict()) == list(model.state_dict())


def test_linear_layer_draws_its_numbers_once():
    torch.manual_seed(3)
    layer, after = linear_layer(5, 7, True), torch.rand(1)
    torch.manual_seed(3)
    same(layer.weight, torch.empty(7, 5).uniform_(-(5**-0.5), 5**-0.5))
    same(after, torch.rand(1))
    assert not layer.bias.any()
    assert linear_layer(5, 7, False).bias is None
    x = torch.randn(2, 5, generator=seeded(1))
    same(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


# ---- replaced, quantised, observed


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_adapted_layers_are_called(name, compiled):
    if compiled and name != "gates by head":
        return
    shape = SHAPES[name].replace(depth=1) if compiled else SHAPES[name]
    one, other = adapted(filled(build(shape)).double())
    run = torch.compile(one, backend="aot_eager", fullgraph=True) if compiled else one
    x = ids(3, 5)
    y = run(x)[0]
    close(y, other(x)[0])
    y.square().sum().backward()
    for part, p in one.named_parameters():
        assert p.grad is not None, part
        assert p.grad.abs().max() > 0 or p.ndim == 1, part
    torch._dynamo.reset()


@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_adapted_layers_are_called_behind_a_cache(name, inputs):
    one, other = adapted(filled(Decoder(SHAPES[name])).double())
    x, cache = ids(2, 7), Cache(one.shape, 2, 7, dtype=torch.float64, inputs=inputs)
    with torch.no_grad():
        found = [one.unembed(one.follow(piece, cache)) for piece in x.split((4, 1, 2), 1)]
        close(torch.cat(found, 1), other(x)[0])


def test_hook_on_a_projection_is_run():
    layer, seen = filled(Attention(Shape(dim=6, depth=1, num_heads=2, out_bias=True))), []
    x = torch.randn(2, 3, 6, generator=seeded(1))
    expected = layer(x)
    for part in (layer.qkv, layer.out):
        part.register_forward_hook(lambda part, given, y: seen.append(tuple(y.shape)))
    close(layer(x), expected)
    assert seen == [(2, 3, 18), (2, 3, 6)]


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own sdpa has it too
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_of_each_sample_are_those_of_the_sample_alone(name):
    layer = filled(Attention(SHAPES[name])).double()
    x = torch.randn(3, 5, 22, generator=seeded(1), dtype=torch.float64)

    def loss(weights, one):
        return functional_call(layer, weights, (one[None],)).square().sum()

    weights = {part: p.detach() for part, p in layer.named_parameters()}
    found = vmap(grad(loss), (None, 0))(weights, x)
    for i in range(3):
        alone = torch.autograd.grad(layer(x[i : i + 1]).square().sum(), list(layer.parameters()))
        for part, wanted in zip(weights, alone, strict=True):
            close(found[part][i], wanted, part)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch's own
def test_dynamic_int8_takes_every_projection():
    from torch.ao.quantization import quantize_dynamic

    model = filled(Decoder(BASE), spread=0.1)
    if "fbgemm" in torch.backends.quantized.supported_engines:
        torch.backends.quantized.engine = "fbgemm"
    small = quantize_dynamic(model, {nn.Linear})
    kinds = {name: type(m).__module__ for name, m in small.named_modules()}
    for i in range(BASE.depth):
        for part in ("attention.qkv", "attention.out", "feed.up", "feed.down"):
            assert "quantized" in kinds[f"blocks.{i}.{part}"], part
    x = ids(3, 7)
    with torch.no_grad():
        y, wanted = small(x)[0], model(x)[0]
    assert 1e-6 < (y - wanted).norm() / wanted.norm() < 0.05


# ---- meta device


@pytest.mark.parametrize("name", SHAPES)
def test_reset_draws_every_parameter_of_a_model_from_the_meta_device(name):
    with torch.device("meta"):
        model = build(SHAPES[name].replace(positions="additive", num_positions=9, tied=False))
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.constant_(p, float("nan"))
    model.reset_parameters()
    drawn = build(model.shape)
    for (part, p), q in zip(model.named_parameters(), drawn.parameters(), strict=True):
        assert p.isfinite().all(), part
        assert p.any() == q.any(), part  # what starts at 0 does
        if q.numel() > 100:
            assert p.std().item() == pytest.approx(q.std().item(), rel=0.3), part
    assert model(ids(2, 5))[0].isfinite().all()


def test_reset_of_each_layer_draws_its_parameters():
    for model in (build(MODERN["outputs by groups"]), build(BASE.replace(norm="layer"), models=2)):
        for part, layer in model.named_modules():
            if list(layer.parameters(recurse=False)):
                filled(layer)
                layer.reset_parameters()
                assert max(p.abs().max() for p in layer.parameters()) <= 1, part


# ---- separate projections


@pytest.mark.parametrize("name", SEPARATE)
def test_separate_projections_are_the_rows_of_the_one(name):
    shape, x = SEPARATE[name], ids(3, 7)
    one, each = filled(Decoder(shape)).double(), Decoder(shape, separate=True).double()
    each.load_state_dict(one.state_dict())
    parts = {n.split(".")[3] for n in each.state_dict() if "attention" in n and "_proj" in n}
    assert parts == {"q_proj", "k_proj"} | (set() if shape.shared_kv else {"v_proj"})
    close(each(x)[0], one(x)[0])
    back = Decoder(shape).double()
    back.load_state_dict(each.state_dict())
    for (part, p), q in zip(back.named_parameters(), one.parameters(), strict=True):
        assert torch.equal(p, q), part
    cache = Cache(shape, 3, 7, dtype=torch.float64)
    with torch.no_grad():
        found = [each.unembed(each.follow(piece, cache)) for piece in x.split((4, 1, 2), 1)]
        close(torch.cat(found, 1), one(x)[0])
    adapted_each, sums = adapted(each)
    close(adapted_each(x)[0], sums(x)[0])


def test_separate_projections_start_as_the_one_does():
    shape = BASE.replace(average=2, qkv_bias=True)
    each = Decoder(shape, separate=True)
    initialise(each, "library", seeded(5))
    one = fresh(shape, "library", [seeded(5)])
    for i, block in enumerate(each.blocks):
        rows = torch.cat([block.get_parameter(f"attention.{n}_proj.weight") for n in "qkv"])
        same(rows, one.get_parameter(f"blocks.{i}.attention.qkv.weight")[0])
    message = (
        "separate needs a single model whose queries, keys and values are products of x, got "
        "models=2, kv_lora_rank=0, q_lora_rank=0"
    )
    refused(message, Attention, shape, models=2, separate=True)


def test_grouped_linear_is_no_linear():
    """A tool that wraps `nn.Linear` would get its product wrong."""
    assert not isinstance(GroupedLinear(12, 5, 3), nn.Linear)


# ---- tensor parallelism


def test_tensor_parallel_layers_are_one_process(tmp_path):
    """Two processes with gloo: outputs and gradients."""
    script = Path(__file__).parent.parent / "support" / "two_processes.py"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    made = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "meeting"), "tensor"],
        capture_output=True, text=True, env=environment, timeout=120, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert made.stdout.count("equal") == 4, made.stdout
