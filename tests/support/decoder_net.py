"""What the tests of decoder kernels share: some models, their blocks as kernels, and the same in
float64."""

import dataclasses

import pytest
import torch
from support.gpu import DEVICE, FP32, NAN, near, normal
from support.nets import buffers_of, rows_of
from support.small_runs import after_overflows
from support.tolerance import same

from headwise.kernels import embed_readout
from headwise.model.transformer import build
from headwise.shape import Shape
from headwise.tasks import Regression
from headwise.training import checkpoint, data, engine, ensemble, fused_decoder
from headwise.training.decoder_blocks import TritonBlocks
from headwise.training.flat import OPERANDS, Layout
from headwise.training.fused_decoder import FusedDecoder, blocks_of
from headwise.training.run import Recipe, Run

BOUND = {
    "fp32": 1e-5,
    "tf32": 1.5e-2,
    "fp16": 5e-3,
    "bf16": 4e-2,
}  # of a gradient's norm, for each tensor


GPT = Shape(
    dim=48,
    depth=12,
    num_heads=4,
    activation="gelu",
    norm="layer",
    norm_at="pre",
    causal=True,
    qkv_bias=True,
    out_bias=True,
    ffn_bias=True,
    positions="additive",
    num_positions=82,
    input_dim=20,
    output_dim=1,
)


def blocks_only(heads, **changes):
    """A shape without ends."""
    sizes = {"dim": 48, "depth": 1, "num_heads": heads, "ffn_dim": 64, **changes}
    names = ("activation", "norm", "norm_at", "causal", "qkv_bias", "out_bias", "ffn_bias")
    return Shape(**{name: getattr(GPT, name) for name in names} | sizes)


@dataclasses.dataclass
class Net:
    """Some models, their blocks as kernels, and the same in float64."""

    groups: list  # (count, shape) of each
    tokens: int
    batch: int
    precision: str
    seed: int = 0

    def __post_init__(self):
        self.models = sum(n for n, _ in self.groups)
        module = build(self.groups[0][1], models=self.models, head_groups=self.groups)
        self.layout = Layout.of(module.named_parameters())
        self.places, self.length = self.layout.spans, self.layout.length
        kind = OPERANDS[self.precision]
        self.weights = torch.zeros(self.models, self.length, device=DEVICE)
        self.module = module.double().to(DEVICE)
        for i, (name, p) in enumerate(self.module.named_parameters()):
            at, size = self.places[name]
            drawn = normal(self.seed + i, self.models, size) * (0.3 if p.ndim > 2 else 0.2) + (
                "norm" in name and name.endswith("weight")
            )
            self.weights[:, at : at + size] = drawn.to(kind).float()  # what the operands can hold
            with torch.no_grad():
                p.copy_(self.weights[:, at : at + size].view(p.shape))
        self.half = self.weights if kind == FP32 else self.weights.to(kind)
        dim = self.groups[0][1].dim
        self.x, self.g = (
            normal(100 + j, self.models, self.batch * self.tokens, dim) for j in (0, 1)
        )
        self.g /= self.batch * self.tokens  # as of a mean

    def blocks(self, training=True):
        rows = rows_of(self.groups, self.layout, self.weights, self.half, self.precision)
        made = blocks_of(rows, self.batch, self.tokens, training=training)
        given = {id(t) for t in (self.weights, self.half)}
        if training:
            given.add(id(made.weight_partials))
        for t in buffers_of(made):  # what is read before it is written shows
            if t.is_floating_point() and id(t) not in given:
                t.fill_(NAN)
        return made

    def exact(self):
        """Output, the gradient of the input, and of each parameter."""
        x = self.x.double().unflatten(1, (self.batch, self.tokens)).requires_grad_()
        y = x
        for block in self.module.blocks:
            y, _ = block(y)
        params = {
            name: p for name, p in self.module.named_parameters() if name.startswith("blocks.")
        }
        found = torch.autograd.grad(y, [x, *params.values()], self.g.double().view(y.shape))
        return (
            y.detach().flatten(1, 2),
            found[0].flatten(1, 2),
            dict(zip(params, found[1:], strict=True)),
        )


def check_blocks(net):
    bound = BOUND[net.precision]
    made, kept = net.blocks(), (net.weights.clone(), net.half.clone(), net.x.clone(), net.g.clone())
    y, dx, grads = net.exact()
    near(made.forward(net.x), y, bound, "output")
    got_dx, rows = made.backward(net.g * made.gain)
    near(got_dx / made.gain, dx, bound, "gradient of the input")
    assert rows.isfinite().all()
    gaps = torch.ones(net.length, dtype=torch.bool)
    for name, (at, size) in net.places.items():
        gaps[at : at + size] = not name.startswith("blocks.")
        if name not in grads:
            continue
        ours, theirs = rows[:, at : at + size].double(), grads[name].flatten(1)
        size_of = theirs.norm(dim=1)
        if name.endswith("qkv.bias"):  # softmax does not see the keys' bias
            ours, theirs = (
                torch.cat((t[:, : size // 3], t[:, 2 * size // 3 :]), 1) for t in (ours, theirs)
            )
        worst = ((ours - theirs).norm(dim=1) / size_of).max().item()
        assert worst <= bound, f"{name}: off by {worst:.3g}, allowed {bound:.3g} of its norm"
    assert (rows[:, gaps.to(DEVICE)] == 0).all(), (
        "something beside the blocks' own gradients is written"
    )
    for before, after in zip(kept, (net.weights, net.half, net.x, net.g), strict=True):
        same(after, before, "what is given")
    return made


def counted(name, monkeypatch):
    """A list that grows when this function of `embed_readout` is called."""
    used, real = [], getattr(embed_readout, name)
    monkeypatch.setattr(embed_readout, name, lambda *args: used.append(1) or real(*args))
    return used


def trained(runs, monkeypatch, fused, kind=TritonBlocks):
    made, forward = [], kind.forward
    with monkeypatch.context() as patch:
        patch.setattr(embed_readout, "possible", lambda x: fused)
        entered, left = (counted(name, patch) for name in ("enter", "leave"))
        if kind is TritonBlocks:  # on an H200 the other kind would take these
            patch.setattr(fused_decoder, "cuda_refusal", lambda *given: "needs another time")
        patch.setattr(data, "HELD_OUT_BATCH", 16)
        family = FusedDecoder if fused else None
        patch.setattr(ensemble, "family_of", lambda run, device: family)
        patch.setattr(kind, "forward", lambda *given: made.append(1) or forward(*given))
        rows = engine.train(runs, device=DEVICE.type, advance=lambda n: None)
    assert bool(made) == bool(entered) == bool(left) == fused
    return rows


def trained_alike(precision, bound, monkeypatch, kind=TritonBlocks):
    task = Regression(3, 2, curriculum=2, first_dim=1, first_points=1)
    recipe = Recipe(
        steps=4,
        epoch=2,
        batch=16,
        held_out=16,
        evals=1,
        lr=0.03,
        schedule="constant",
        init="normal",
        precision=precision,
    )
    shape = GPT.replace(
        dim=16,
        depth=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        v_head_dim=8,
        ffn_dim=64,
        num_positions=4,
        input_dim=3,
    )
    shapes = [shape, shape.replace(num_heads=4, num_kv_heads=4, head_dim=4, v_head_dim=4)]
    runs = [
        Run(s, task, dataclasses.replace(recipe, lr=lr), 3)
        for s, lr in zip(shapes, (0.03, 0.02), strict=True)
    ]
    monkeypatch.setattr(checkpoint, "load", lambda folder, run: after_overflows(run))
    ours = trained(runs, monkeypatch, True, kind)
    exact = [
        dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, precision="fp32"))
        for run in runs
    ]
    for a, b in zip(ours, trained(exact, monkeypatch, False), strict=True):
        assert a["models"] == len(runs)
        assert a["curve"] == pytest.approx(b["curve"], rel=bound)
        assert a["held_out"] == pytest.approx(b["held_out"], rel=bound)
        assert a["held_out_profile"] == pytest.approx(b["held_out_profile"], rel=4 * bound)
        assert abs(b["curve"][1] - b["curve"][0]) > 20 * bound * b["curve"][0], (
            "it learns too little to be compared"
        )
