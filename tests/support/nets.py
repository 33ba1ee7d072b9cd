"""Whole networks for tests of the fused step: random weights in flat rows, and the float64 module
that holds the same."""

import types
from typing import NamedTuple

import pytest
import torch
from support.gpu import DEVICE, FP32, FP64, INTERPRETED, NAN, near
from support.tolerance import same, seeded

from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.model.transformer import build
from headwise.shape import Shape
from headwise.tasks import Farthest, Nearest
from headwise.training.flat import OPERANDS, FlatRows, Layout, head_groups
from headwise.training.fused_encoder import FusedEncoder

STEP = {
    "fp32": 1e-5,
    "tf32": 1.5e-2,
    "fp16": 4e-3,
    "bf16": 3e-2,
}  # of a whole network's gradient, of its norm, for each tensor


def case(
    precision,
    dim=16,
    ranks=(),
    *,
    shapes=None,
    tokens=16,
    batch=4,
    depth=1,
    width=1,
    queries=None,
    ffn_dim=64,
    each=1,
    positions="none",
):
    placed = {"positions": positions, "points": tokens, "position_dim": dim}
    shapes = shapes or [
        paper_shape(dim=dim, depth=depth, rank=rank, width=width, ffn_dim=ffn_dim, **placed)
        for rank in ranks
    ]
    settings = types.SimpleNamespace(
        precision=precision, tokens=tokens, batch=batch, queries=queries or tokens
    )
    settings.groups = [(each, shape) for shape in shapes]
    cuts = " ".join(f"{s.num_heads}x{s.head_dim}" for s in shapes)
    name = (
        f"{precision}, dim {shapes[0].dim}, heads {cuts}, {batch}x{tokens} tokens, depth "
        f"{shapes[0].depth}, queries {settings.queries}"
    )
    name += "" if positions == "none" else f", {positions}"
    return pytest.param(settings, id=name)


def odd(count, rank):
    """Heads whose width is not the model's, nor a power of two."""
    sizes = {
        "dim": 16,
        "depth": 1,
        "num_heads": count,
        "head_dim": rank,
        "average": 2,
        "ffn_dim": 64,
        "logit_scale": 0.9,
    }
    return Shape(
        **sizes, norm="scalar", norm_at="post", qkv_bias=True, out_bias=True, ffn_bias=True
    )


def rows_of(groups, layout, weights, half, precision):
    """Flat rows of models by group: (count, shape) of each."""
    shapes = [shape for count, shape in groups for _ in range(count)]
    return FlatRows(head_groups(shapes), layout, weights, half, precision)


def buffers_of(made):
    """Every tensor that some kernels hold, by itself or in parts of theirs, once each."""
    found, seen, rest = {}, set(), [made]
    while rest:
        value = rest.pop()
        if isinstance(value, torch.Tensor):
            found[id(value)] = value
        elif isinstance(value, dict):
            rest += value.values()
        elif isinstance(value, list | tuple):
            rest += value
        elif type(value).__module__.startswith("headwise.training") and id(value) not in seen:
            seen.add(id(value))
            rest += vars(value).values()
    return list(found.values())


def gradient_of(step, x, target, losses, scale=None, then=None):
    """One step of all head groups, each on its stream: losses (written) and gradients; `then` is
    called behind each group's own."""
    scale = torch.ones_like(losses) if scale is None else scale

    def work(group):
        models = group.models
        step.gradient(group, x[models], target[models], losses[models], scale[models])
        if then is not None:
            then(group)

    step.each_group(work)
    return step.grads


class Exact(NamedTuple):
    """What autograd computes in float64."""

    outputs: torch.Tensor
    losses: torch.Tensor
    grads: dict  # by name
    terms: dict  # of each gain: the size of the terms that its gradient is the sum of
    flipped: float  # the share of hidden units that were on in one computation and off in the other


class Net:
    """Random weights in flat rows, representable in the operands' type, and the float64 module that
    holds the same."""

    def __init__(self, settings, seed=1):
        self.settings = settings
        self.models, kind = sum(count for count, _ in settings.groups), OPERANDS[settings.precision]
        shape = settings.groups[0][1]
        self.module = build(shape, models=self.models, head_groups=settings.groups).to(DEVICE, FP64)
        self.params = dict(self.module.named_parameters())
        self.layout = Layout.of(self.params.items())
        self.places, self.length = self.layout.spans, self.layout.length
        self.weights = torch.zeros(self.models, self.length, device=DEVICE)
        generator = seeded(seed)
        for name, p in self.params.items():
            at, size = self.places[name]
            spread = (
                2.0 * p.shape[-1] ** -0.5 if name.endswith("weight") and "norm" not in name else 0.2
            )
            drawn = torch.randn(p.shape, generator=generator) * spread + (
                1.0 if "norm" in name else 0.0
            )
            if name.endswith("qkv.weight"):
                drawn *= 2  # scores of several units
            drawn = drawn.to(kind)
            with torch.no_grad():
                p.copy_(drawn)
            self.weights[:, at : at + size] = drawn.flatten(1).float()
        if settings.precision == "tf32":
            self._steady()
        self.half = self.weights if kind == FP32 else self.weights.to(kind)
        one_query = settings.queries == 1 and settings.tokens > 2
        dim = shape.dim - shape.position_dim
        self.task = (
            Nearest(dim, settings.tokens - 1) if one_query else Farthest(dim, settings.tokens)
        )
        x, target = self.task.sample(generator, self.models * settings.batch)
        self.x = x.to(kind).to(DEVICE, FP32).unflatten(0, (self.models, settings.batch))
        self.target = (
            target[:, -settings.queries :].to(DEVICE).unflatten(0, (self.models, settings.batch))
        )

    @torch.no_grad()
    def _steady(self):
        """Hidden units that are on for every token, or off for every token: the rounding inside a
        product cannot switch them."""
        for i, block in enumerate(self.module.blocks):
            reach = (
                block.feed.up.weight.norm(dim=-1) * block.norm1.weight.abs()
            )  # |w x| is no larger, since |x| is the norm's gain
            block.feed.up.bias.copy_(torch.copysign(1.1 * reach + 0.1, block.feed.up.bias).float())
            at, size = self.places[f"blocks.{i}.feed.up.bias"]
            self.weights[:, at : at + size] = block.feed.up.bias.float()

    def fuse(self, **options):
        s = self.settings
        rows = rows_of(s.groups, self.layout, self.weights, self.half, s.precision)
        step = FusedEncoder(rows, s.batch, s.tokens, **options)
        given = {id(t) for t in (self.weights, self.half)}
        for tensor in buffers_of(step):
            if id(tensor) not in given and tensor.is_floating_point():
                tensor.fill_(NAN)
        if step.training:
            step.grads.zero_()
            for at, size in self.places.values():
                step.grads[:, at : at + size] = NAN
        return step

    def exact(self, signs):
        """One step through autograd.

        A unit whose input is rounding away from zero may be on in one computation and off in the
        other, which the gradient sees whole; so `signs` says which are on.
        """
        hooks, flipped, normed = [], [], {}
        for i, block in enumerate(self.module.blocks):

            def switch(_, inputs, hidden, on=signs[i]):
                flipped.append(((hidden > 0) != on).double().mean().item())
                return torch.where(on, hidden + (1e-9 - hidden).clamp_min(0).detach(), -1.0)

            hooks.append(block.feed.up.register_forward_hook(switch))
            for name in ("norm1", "norm2"):

                def keep(_, inputs, y, name=f"blocks.{i}.{name}.weight"):
                    normed[name] = y

                hooks.append(getattr(block, name).register_forward_hook(keep))
        y, _ = self.module(self.x.double())
        losses = self.task.loss(y, self.target.double())
        found = torch.autograd.grad(losses.sum(), [*self.params.values(), *normed.values()])
        for hook in hooks:
            hook.remove()
        grads = dict(zip(self.params, found, strict=False))
        terms = {
            name: g.norm(dim=-1).flatten(1).sum(1)
            for name, g in zip(normed, found[len(self.params) :], strict=True)
        }
        return Exact(y.detach(), losses.detach(), grads, terms, max(flipped))


def signs_of(net, step):
    """Which hidden units are on, from the input that the feed-forward kernel had."""
    on = []
    for i in range(len(net.module.blocks)):
        weight, bias = (net.params[f"blocks.{i}.feed.up.{name}"] for name in ("weight", "bias"))
        h = torch.einsum("mtd,mfd->mtf", step.left[2 * i].x.double(), weight) + bias.unsqueeze(1)
        on.append((h > 0).unflatten(1, (net.settings.batch, net.settings.tokens)))
    return on


def pieces(name, gradient):
    """A gradient as (models, numbers), those of queries, keys and values apart: they differ in
    size."""
    flat = gradient.reshape(gradient.shape[0], -1)
    return dict(zip("qkv", flat.chunk(3, 1), strict=True)) if "qkv" in name else {"": flat}


def check_gradients(net, rows, exact, bound):
    grads, terms = exact.grads, exact.terms
    for name, (at, size) in net.places.items():
        ours, theirs = (pieces(name, t) for t in (rows[:, at : at + size].double(), grads[name]))
        for part, expected in theirs.items():
            error, norm = (ours[part] - expected).norm(dim=1), expected.norm(dim=1)
            if name in terms:
                norm = terms[name]  # they may cancel
            if name.endswith("qkv.bias") and part == "k":
                norm = (
                    grads[name].reshape(net.models, -1).norm(dim=1)
                )  # softmax does not see it: exactly 0
            worst = (error / norm).max().item()
            assert worst <= bound, (
                f"{name} {part}: off by {worst:.3g}, allowed {bound:.3g} of its norm"
            )


def check_step(net):
    """Losses and gradients of one step against autograd, nothing else written; returns the step."""
    bound = STEP[net.settings.precision]
    step, losses = net.fuse(), torch.full((3, net.models), NAN, device=DEVICE)
    kept = net.weights.clone(), net.half.clone(), net.x.clone(), net.target.clone()
    rows = gradient_of(step, net.x, net.target, losses[1])
    exact = net.exact(signs_of(net, step))
    assert exact.flipped <= max(bound, 1e-3)
    near(losses[1], exact.losses, bound, "losses")
    assert losses[0].isnan().all()
    assert losses[2].isnan().all()
    assert rows.isfinite().all(), "a gradient is not written"
    gaps = torch.ones(net.length, dtype=torch.bool)
    for at, size in net.places.values():
        gaps[at : at + size] = False
    assert gaps.any()
    assert (rows[:, gaps.to(DEVICE)] == 0).all(), "the gaps of the rows are written"
    check_gradients(net, rows, exact, bound)
    for before, after in zip(kept, (net.weights, net.half, net.x, net.target), strict=True):
        same(after, before, "what is given")
    return step


def check_again(net):
    """The same step gives the same bits again and again, and the forward pass alone the outputs."""
    step, losses = net.fuse(), torch.full((2, net.models), NAN, device=DEVICE)
    first = gradient_of(step, net.x, net.target, losses[0]).clone()
    for _ in range(1 if INTERPRETED else 50):
        same(gradient_of(step, net.x, net.target, losses[1]), first, "gradients")
    same(losses[1], losses[0], "losses")
    y, *_ = net.exact(signs_of(net, step))
    near(net.fuse(training=False).forward(net.x), y, STEP[net.settings.precision], "outputs")


def check_streams(net):
    """The same step in one line, and with head groups and weights' gradients beside each other,
    again and again, `take` behind each group's own; returns the step."""
    step, losses = net.fuse(), torch.zeros(net.models, device=DEVICE)
    streams, later = step.streams, step.later
    assert len(streams) + 1 == len(net.settings.groups)
    assert len(later) == (0 if step.cuda_mlp else len(net.settings.groups))
    step.streams, step.later = [], {}
    expected = gradient_of(step, net.x, net.target, losses).clone()
    step.streams, step.later = streams, later
    taken, scale = torch.zeros_like(expected), torch.ones_like(losses)

    def take(group):
        taken[group.models] = step.grads[group.models]

    for _ in range(50):
        taken.zero_()
        same(gradient_of(step, net.x, net.target, losses, scale, take), expected, "gradients")
        same(taken, expected, "gradients as they are there")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = gradient_of(step, net.x, net.target, losses, scale, take)
    for _ in range(50):
        grads.zero_(), taken.zero_()
        graph.replay()
        same(grads, expected, "gradients in a graph")
        same(taken, expected, "gradients as they are there, in a graph")
    return step
