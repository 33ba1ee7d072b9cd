"""A decoder of vectors, as Garg et al. train it: GPT-2 between two linear maps."""

import math
from typing import Any

import pytest
import torch
import transformers
from support.tolerance import STANDARD_ERRORS, close, same, seeded
from torch import Tensor

from headwise.experiments.rank_paper import regression
from headwise.model import INITS
from headwise.model.init import fresh, initialise
from headwise.model.transformer import build
from headwise.shape import Shape
from headwise.tasks import Regression

TASK = Regression(dim=5, points=7, curriculum=3, first_dim=2, first_points=3)
SHAPE = regression.decoder(16, 1, 2, TASK)


def filled(model: Any, seed: int = 0, spread: float = 0.3) -> Any:
    generator = seeded(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0.0, spread, generator=generator)
    return model


class Garg(torch.nn.Module):
    """The model of Garg et al. 2022 out of library parts, with the exact GELU and our norm's
    epsilon."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        config = transformers.GPT2Config(
            n_positions=shape.num_positions,
            n_embd=shape.dim,
            n_layer=shape.depth,
            n_head=shape.num_heads,
            vocab_size=1,
            activation_function="gelu",
            layer_norm_epsilon=1e-6,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
        self.read_in = torch.nn.Linear(shape.input_dim, shape.dim)
        self.backbone = transformers.GPT2Model(config)
        self.read_out = torch.nn.Linear(shape.dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.read_out(self.backbone(inputs_embeds=self.read_in(x)).last_hidden_state)

    def copy(self, weights: dict[str, Tensor]) -> None:
        """Ours, by name; GPT-2's matrices are stored the other way round."""
        theirs = {
            "backbone.wte.weight": torch.zeros(1, weights["positions"].shape[1]),
            "backbone.wpe.weight": weights["positions"],
        }
        for name in ("read_in.weight", "read_in.bias", "read_out.weight", "read_out.bias"):
            theirs[name] = weights[name]
        for end in ("weight", "bias"):
            theirs[f"backbone.ln_f.{end}"] = weights[f"final_norm.{end}"]
        for i in range(len(self.backbone.h)):
            ours, block = f"blocks.{i}.", f"backbone.h.{i}."
            for end in ("weight", "bias"):
                theirs[f"{block}ln_1.{end}"], theirs[f"{block}ln_2.{end}"] = (
                    weights[f"{ours}norm1.{end}"],
                    weights[f"{ours}norm2.{end}"],
                )
            for part, name in (
                ("attn.c_attn", "attention.qkv"),
                ("mlp.c_fc", "feed.up"),
                ("mlp.c_proj", "feed.down"),
            ):
                theirs[f"{block}{part}.weight"] = weights[f"{ours}{name}.weight"].T
                theirs[f"{block}{part}.bias"] = weights[f"{ours}{name}.bias"]
            theirs[f"{block}attn.c_proj.weight"] = weights[f"{ours}attention.out.weight"].T
            theirs[f"{block}attn.c_proj.bias"] = weights[f"{ours}attention.out_bias"].flatten()
        self.load_state_dict(theirs)


@pytest.mark.parametrize(
    ("width", "depth", "heads"), [(14, 1, 1), (12, 2, 3), (48, 2, 16), (10, 3, 5)]
)
def test_decoder_is_gpt2_between_two_linear_maps(width, depth, heads):
    """Values, and the gradient of every weight, of the task's own error."""
    shape = regression.decoder(width, depth, heads, TASK)
    ours, theirs = filled(build(shape)), Garg(shape)
    assert (
        shape.params == sum(p.numel() for p in theirs.parameters()) - width
    )  # its table of one token
    theirs.copy(ours.state_dict())
    x, target = TASK.sample(seeded(1), 11)
    y, _ = ours(x)
    expected = theirs(x)
    assert y.shape == (11, 14, 1)
    close(y, expected)
    mine = dict(
        zip(
            (n for n, _ in ours.named_parameters()),
            torch.autograd.grad(TASK.loss(y, target), list(ours.parameters())),
            strict=True,
        )
    )
    carrier = Garg(shape)
    carrier.copy(mine)
    TASK.loss(expected, target).backward()
    largest = max(g.abs().max().item() for g in mine.values())
    for (name, p), q in zip(theirs.named_parameters(), carrier.parameters(), strict=True):
        if "wte" not in name:
            assert p.grad is not None
            close(q, p.grad, name, largest)


def test_decoder_sizes_follow_the_task():
    shape = regression.decoder(48, 12, 16, Regression(20, 41))
    assert (shape.in_dim, shape.out_dim, shape.num_positions, shape.ffn_dim, shape.head_dim) == (
        20,
        1,
        82,
        192,
        3,
    )
    block = 48 * 144 + 144 + 48 * 48 + 48 + 48 * 192 + 192 + 192 * 48 + 48 + 4 * 48
    assert shape.params == 20 * 48 + 48 + 82 * 48 + 12 * block + 2 * 48 + 48 + 1
    assert regression.decoder(48, 12, 16, Regression(20, 41), ffn_dim=7).ffn_dim == 7
    assert len({run.shape.params for run in regression.runs(regression.PRESETS["paper"])}) == 1, (
        "heads are free"
    )


@pytest.mark.parametrize("models", [None, 3])
def test_answer_sees_nothing_of_what_comes_after_its_x(models):
    """Above all not its own y, which is the next token."""
    lead = () if models is None else (models,)
    model = filled(build(SHAPE, models=models), spread=0.5)
    x, _ = TASK.sample(seeded(2), 5)
    x = x.expand(*lead, *x.shape).clone()
    y, _ = model(x)
    for at in range(14):
        changed = x.clone()
        changed[..., at, :] += 1.0
        z, _ = model(changed)
        same(z[..., :at, :], y[..., :at, :], f"answers before token {at}")
        assert (z[..., at, :] != y[..., at, :]).any(), f"token {at} itself"
        assert at == 13 or (z[..., -1, :] != y[..., -1, :]).any(), (
            f"token {at} is not seen at the end"
        )


@pytest.mark.parametrize(("output_dim", "models"), [(1, 2), (3, 2), (16, 2), (17, 3), (1, None)])
def test_padded_read_out_is_a_linear_map(output_dim, models):
    shape = Shape(dim=11, depth=1, num_heads=1, output_dim=output_dim, ffn_dim=0)
    lead = () if models is None else (models,)
    model = filled(build(shape, models=models)).double()
    y, out = model(
        torch.randn(*lead, 2, 5, 11, generator=seeded(1), dtype=torch.float64), keep=True
    )
    h, weight, bias = (
        model.final_norm(out["layer 0"]["residual"]),
        model.read_out.weight,
        model.read_out.bias,
    )
    close(y, torch.einsum("...bti,...oi->...bto", h, weight) + bias.view(*lead, 1, 1, output_dim))


def test_maps_at_the_ends_start_as_the_library_s():
    """U(+-1/sqrt(fan in)), biases too, under every scheme; and the rest of a model starts as it
    does without them."""
    shape = Shape(
        dim=512,
        depth=1,
        num_heads=2,
        input_dim=64,
        output_dim=256,
        ffn_dim=5,
        positions="additive",
        num_positions=3,
    )
    for scheme in sorted({*INITS} - {"original"}):  # that is for models without them
        model, bare = build(shape), build(shape.replace(input_dim=0, output_dim=0))
        initialise(model, scheme, seeded(3))
        initialise(bare, scheme, seeded(3))
        for part, fan_in in ((model.read_in, 64), (model.read_out, 512)):
            for t in (part.weight, part.bias):
                n, bound = t.numel(), fan_in**-0.5
                assert bound * (1 - 20 / n) <= t.abs().max() <= bound, scheme
                assert abs(t.mean()) < STANDARD_ERRORS * bound / math.sqrt(3 * n), scheme
                assert abs(3 * t.var() / bound**2 - 1) < STANDARD_ERRORS * math.sqrt(0.8 / n), (
                    scheme
                )
        for (name, p), q in zip(
            bare.blocks.named_parameters(), model.blocks.parameters(), strict=True
        ):
            same(p, q, name)
    ensemble = fresh(SHAPE, "normal", [seeded(seed) for seed in (3, 1)])
    for m, seed in enumerate((3, 1)):
        one = build(SHAPE)
        initialise(one, "normal", seeded(seed))
        for (name, p), q in zip(ensemble.named_parameters(), one.parameters(), strict=True):
            same(p[m], q, name)


def test_activation_bytes_of_the_decoder_in_closed_form():
    """What comes in; norm, q k v, output, log-sum-exp; norm, hidden twice for the GELU; the norm
    and map at the end, the error."""
    shape = regression.decoder(64, 1, 4, TASK).replace(num_positions=37)
    layer = (2 * 64 + 2) + 64 + 3 * 64 + 64 + 4 + (2 * 64 + 2) + 64 + 2 * 256
    assert shape.activation_bytes(37, batch=3) == 4 * 37 * 3 * (5 + layer + (2 * 64 + 2) + 64 + 1)
