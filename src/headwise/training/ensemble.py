"""A stack of models in training: flat weights and moments with a model axis, and the step that
moves them all."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.errors import UsageError
from headwise.kernels import has_triton
from headwise.model.init import fresh
from headwise.model.transformer import build
from headwise.seeds import derive, generator_of
from headwise.shape import Shape
from headwise.training import fused_decoder, fused_encoder
from headwise.training.data import block_steps, draw_block
from headwise.training.fused_decoder import Blocks
from headwise.training.fused_encoder import STORED, Fused, adamw, gain_of
from headwise.training.run import Recipe, Run

# floats: a model's numbers start on a 64-byte line, so that products take the same path at any
# place in a stack
ALIGN = 16
SMALLEST = 2.0**-10  # times which gradients are carried at least, after overflows of half precision
HALVINGS = 5  # at most, for the overflows of one epoch
CLEAN = 20  # epochs without an overflow after which gradients are carried twice as large again
HELD_OUT_SEED = 0x48454C44  # one held-out set a task, the same for every run
HELD_OUT_BATCH = 128  # sequences of it at a time; a multiple of ALIGN, whatever the run trains on


@dataclass
class State:
    """One run between two epochs: everything that is needed to go on."""

    run: Run
    weights: Tensor  # (parameters,), each parameter padded to ALIGN
    mean: Tensor
    square: Tensor
    epoch: int = 0
    curve: list[float] = dataclasses.field(default_factory=list)
    held_out_curve: list[tuple[int, float | None]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    resumed: int = 0
    skipped: int = 0  # steps not made, because a gradient overflowed half precision
    shrink: float = (
        1.0  # a power of two that gradients are carried times since then, in half precision
    )
    clean: int = 0  # epochs since the last overflow, while shrink is below 1
    # an epoch overflowed from end to end with gradients as small as may be, or so did every step
    # there was
    stuck: bool = False

    def count(self, overflows: int) -> None:
        """Take in how many steps of an epoch overflowed: gradients are half as large from now on
        for each, within HALVINGS and SMALLEST, and twice as large after CLEAN epochs without."""
        recipe = self.run.recipe
        self.skipped += overflows
        self.stuck = overflows == recipe.epoch and (
            self.shrink == SMALLEST or self.skipped == recipe.steps
        )
        self.clean = 0 if overflows or self.shrink == 1 else self.clean + 1
        if overflows:
            self.shrink = max(self.shrink * 2.0 ** -min(overflows, HALVINGS), SMALLEST)
        elif self.clean == CLEAN:
            self.shrink, self.clean = 2 * self.shrink, 0


def _layout(shape_of: Sequence[Tensor]) -> tuple[list[tuple[int, int]], int]:
    """Where each parameter of one model lies in its flat row: (start, length), and the row's
    length."""
    places, at = [], 0
    for p in shape_of:
        length = p[0].numel()
        places.append((at, length))
        at += -(-length // ALIGN) * ALIGN
    return places, at


class Stack:
    """The runs of one stack on one device: flat weights and moments, and the step."""

    def __init__(self, states: list[State], device: torch.device) -> None:
        self.runs, self.device = [s.run for s in states], device
        self.recipe, self.task = self.runs[0].recipe, self.runs[0].task
        with torch.device("meta"):
            splits = [
                (len(list(same)), shape)
                for shape, same in itertools.groupby(run.shape for run in self.runs)
            ]
            self.model = build(self.runs[0].shape, models=len(states), head_groups=splits)
        self.places, _ = _layout(list(self.model.parameters()))
        self.weights, self.mean, self.square = (
            torch.stack([getattr(s, name) for s in states]).to(device)
            for name in ("weights", "mean", "square")
        )
        self._bind()
        self.params = list(self.model.parameters())
        self.steps = block_steps(self.task, self.recipe)
        self.rates = torch.zeros(
            self.steps, 3, len(states), 1, device=device
        )  # step size, 1/sqrt(1 - b2^t), decay
        self.losses = torch.zeros(self.steps, len(states), device=device)
        self.skipped = torch.zeros(len(states), device=device)  # steps, since it was last read
        self.inputs: Tensor | None = None
        self.targets: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        tables = np.stack([_rate_table(run.recipe) for run in self.runs], -1)[..., None]
        self.tables = torch.from_numpy(tables).to(device)  # (all steps, 3, models, 1)
        names = [name for name, _ in self.model.named_parameters()]
        self.ends = [name for name in names if not name.startswith("blocks.")]
        kind = STORED[self.recipe.precision]
        self.half = self.weights if kind == torch.float32 else self.weights.to(kind)
        self.layout = splits, dict(zip(names, self.places, strict=True)), self.weights, self.half
        self.kernels = self._kernels(self.recipe.batch)
        ones = torch.ones(len(states), device=device)
        self.shrink, self.undo = (
            self.kernels.shrink if isinstance(self.kernels, Fused) else ones,
            ones.clone(),
        )
        self.carry(states)

    def settle(self, states: list[State]) -> None:
        """After an epoch: count the steps that overflowed, and carry gradients as that says."""
        before = [s.shrink for s in states]
        for state, overflows in zip(states, self.skipped.int().tolist(), strict=True):
            state.count(overflows)
        self.skipped.zero_()
        if before != [s.shrink for s in states]:
            self.carry(states)

    def carry(self, states: list[State]) -> None:
        """From the next block on gradients are times what the states say, and AdamW undoes it; a
        graph reads both where they are. Only in half precision, where alone overflows are counted,
        they are not 1."""
        self.shrink.copy_(torch.tensor([s.shrink for s in states]))
        self.undo.copy_(torch.tensor([1 / s.shrink for s in states]))

    def _bind(self) -> None:
        """Make the module's parameters views of the flat rows."""
        views = {
            name: torch.nn.Parameter(self.weights[:, at : at + length].view(p.shape))
            for (name, p), (at, length) in zip(
                self.model.named_parameters(), self.places, strict=True
            )
        }
        for name, view in views.items():
            module, _, leaf = name.rpartition(".")
            setattr(self.model.get_submodule(module), leaf, view)

    def _kernels(self, batch: int, training: bool = True) -> Fused | Blocks | None:
        """The step, or its blocks, as kernels of our own, where there is a GPU and they take the
        shapes."""
        for kind, refuse in ((Fused, fused_refusal), (fused_decoder.blocks, trunk_refusal)):
            if not any(refuse(run, self.device) for run in self.runs):
                return kind(
                    *self.layout, batch, self.task.tokens, self.recipe.precision, training=training
                )
        return None

    # -- one block of steps

    def run_block(self, block: int) -> Tensor:
        """Train through one block; returns the losses before each update, (steps, models)."""
        for m, run in enumerate(self.runs):
            self._load(m, run, block)
        self.rates.copy_(self.tables[block * self.steps : (block + 1) * self.steps])
        if self.device.type == "cuda":
            if self.graph is None:
                self._capture()
            assert self.graph is not None
            self.graph.replay()
        else:
            self._steps()
        return self.losses

    def _load(self, m: int, run: Run, block: int) -> None:
        """Model m's data of a block; the buffers stay where they are, since a graph reads them."""
        if self.inputs is None or self.targets is None:
            like = draw_block(run, block, self.device)
            self.inputs, self.targets = (
                t.new_empty(t.shape[0], len(self.runs), *t.shape[1:]) for t in like
            )
        draw_block(run, block, self.device, (self.inputs[:, m], self.targets[:, m]))

    def _steps(self) -> None:
        if isinstance(
            self.kernels, Fused
        ):  # a split goes through all steps on its own; some take three times as long as others
            self.kernels.each(self._way)
            return
        for i in range(self.steps):
            self._step(i)

    def _way(self, now: slice, shape: Shape) -> None:
        """All steps of the models of one split, as kernels."""
        kernels, x, targets = self.kernels, self.inputs, self.targets
        assert isinstance(kernels, Fused)
        assert x is not None
        assert targets is not None
        for i in range(self.steps):
            kernels.learn(now, shape, x[i, now], targets[i, now], self.losses[i, now])
            self._move(i, now, kernels.grads, self.weights, self.mean, self.square, self.half)

    def _gradient(self, i: int) -> Tensor:
        """Losses (written) and gradients, times a model's `shrink`."""
        assert self.inputs is not None
        assert self.targets is not None
        if isinstance(self.kernels, Fused):
            return self.kernels.gradient(self.inputs[i], self.targets[i], self.losses[i])
        if isinstance(self.kernels, Blocks):
            return self._around(self.kernels, self.inputs[i], self.targets[i], self.losses[i])
        with _autocast(self.recipe.precision, self.device):
            outputs, _ = self.model(self.inputs[i])
        losses_M = self.task.loss(outputs.float(), self.targets[i])
        self.losses[i].copy_(losses_M.detach())
        gain = gain_of(self.recipe.batch * self.task.tokens, self.recipe.precision)
        carried = (
            losses_M.sum()
            if self.recipe.precision != "fp16"
            else (losses_M * self.shrink).sum() * gain
        )
        grads = torch.autograd.grad(carried, self.params)
        flat = _flatten(grads, self.places, self.weights)
        return flat if gain == 1 else flat / gain

    def _around(self, blocks: Blocks, inputs: Tensor, targets: Tensor, losses_M: Tensor) -> Tensor:
        """The same with the blocks as kernels and what is around them as modules."""
        given = dict(self.model.named_parameters())
        before = self.model.embed(inputs)
        after = blocks.forward(before.detach().flatten(1, -2)).view(before.shape).requires_grad_()
        losses = self.task.loss(self.model.unembed(after).float(), targets)
        losses_M.copy_(losses.detach())
        ends = [given[name] for name in self.ends]
        last = torch.autograd.grad(
            (losses * self.shrink).sum() * blocks.gain, [after, *ends], allow_unused=True
        )
        first, grads = blocks.backward(last[0].flatten(1, -2))
        through = before.requires_grad and torch.autograd.grad(
            before, ends, first.view(before.shape), allow_unused=True
        )
        for j, name in enumerate(self.ends):
            at, length = self.layout[1][name]
            found, *more = [
                g for g in (last[j + 1], through[j] if through else None) if g is not None
            ]
            torch.div(sum(more, found).flatten(1), blocks.gain, out=grads[:, at : at + length])
        return grads

    def _step(self, i: int) -> None:
        r, grad = self.recipe, self._gradient(i)
        if self.kernels is not None:
            self._move(i, slice(None), grad, self.weights, self.mean, self.square, self.half)
            return
        size_M1, correct_M1, decay_M1 = self.rates[i]
        total_M = self._totals(grad, slice(None))
        before = None
        if total_M is not None:
            grad, before = (
                grad * self.undo.unsqueeze(1),
                [t.clone() for t in (self.weights, self.mean, self.square)],
            )
        self.mean.lerp_(grad, 1 - r.beta1)
        self.square.mul_(r.beta2).addcmul_(grad, grad, value=1 - r.beta2)
        update = self.mean / (self.square.sqrt().mul_(correct_M1).add_(r.eps))
        if any(run.recipe.weight_decay for run in self.runs):
            self.weights.mul_(decay_M1)
        self.weights.sub_(update.mul_(size_M1))
        if total_M is not None and before is not None:
            good_M1 = total_M.isfinite().unsqueeze(1)
            for now, old in zip((self.weights, self.mean, self.square), before, strict=True):
                now.copy_(torch.where(good_M1, now, old))

    def _totals(self, grad: Tensor, now: slice) -> Tensor | None:
        """In half precision, of each model's gradient a sum, which is not finite if it overflowed
        and then must move nothing."""
        if self.recipe.precision != "fp16":
            return None
        total_M = self.kernels.totals(now) if isinstance(self.kernels, Fused) else grad[now].sum(1)
        self.skipped[now] += ~total_M.isfinite()
        return total_M

    def _move(
        self,
        i: int,
        now: slice,
        grad: Tensor,
        weights: Tensor,
        mean: Tensor,
        square: Tensor,
        half: Tensor,
    ) -> None:
        """AdamW of some models as a kernel."""
        r, total = self.recipe, self._totals(grad, now)
        check = None if total is None else (total, self.undo[now])
        adamw(weights, mean, square, grad, half, self.rates[i], r.beta1, r.beta2, r.eps, check, now)

    def _capture(self) -> None:
        """The whole block of steps as one CUDA graph; a step is tried first, so that kernels are
        compiled before."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                grad = self._gradient(0)
            if self.kernels is not None:  # compiled on copies
                weights, mean, square, skipped = (
                    t.clone() for t in (self.weights, self.mean, self.square, self.skipped)
                )
                half = weights if self.half is self.weights else self.half.clone()
                for now in (
                    [now for now, _ in self.kernels.ranges()]
                    if isinstance(self.kernels, Fused)
                    else [slice(None)]
                ):
                    self._move(0, now, grad, weights, mean, square, half)
                self.skipped.copy_(skipped)
                del weights, mean, square, half
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._steps()

    # -- measuring and taking apart

    def held_out(self) -> Tensor:
        """The error on fresh sequences, batch by batch: (models, batches). The same sequences for
        every run of a task."""
        return self.judged()[0]

    def judged(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The same, and what else the task says about these answers, by name, models first."""
        errors, total = [], dict[str, list[Tensor]]()
        for outputs, targets in self._answers():
            errors.append(self.task.loss(outputs, targets))
            for name, part in self.task.measures(outputs, targets).items():
                total.setdefault(name, []).append(part.double())
        return torch.stack(errors, 1).double().cpu(), {
            name: torch.stack(parts).mean(0).cpu() for name, parts in total.items()
        }

    def _answers(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Outputs and targets of the held-out sequences, batch by batch."""
        count = math.ceil(self.recipe.held_out / HELD_OUT_BATCH)
        kernels = self._kernels(HELD_OUT_BATCH, training=False)
        for batch in range(count):
            generator = generator_of(self.device, derive(HELD_OUT_SEED, "held out", batch))
            x, target = self.task.sample(generator, HELD_OUT_BATCH)
            wide = (len(self.runs), *(-1,) * x.ndim)
            with torch.no_grad():
                if isinstance(kernels, Fused):
                    outputs = kernels.forward(x.expand(wide))
                elif isinstance(kernels, Blocks):
                    before = self.model.embed(x.expand(wide))
                    outputs = self.model.unembed(
                        kernels.forward(before.flatten(1, -2)).view(before.shape)
                    )
                else:
                    with _autocast(self.recipe.precision, self.device):
                        outputs, _ = self.model(x.expand(wide))
            yield outputs.float(), target.expand(len(self.runs), *(-1,) * target.ndim)

    def parts(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Weights and moments of each run, on the CPU."""
        yield from zip(
            self.weights.cpu().clone(),
            self.mean.cpu().clone(),
            self.square.cpu().clone(),
            strict=True,
        )

    def named_weights(self, m: int) -> dict[str, Tensor]:
        """Model m's parameters by name."""
        return {name: p.detach()[m].cpu().contiguous() for name, p in self.model.named_parameters()}


def fused_refusal(run: Run, device: torch.device) -> str:
    """Why a run's step is not made of our own kernels; empty when it is."""
    if not run.task.squared:
        return "its loss is the squared error"
    return _refusal(run, device, fused_encoder.refusal)


def trunk_refusal(run: Run, device: torch.device) -> str:
    """Why a run's blocks are not; empty when they are."""
    return _refusal(run, device, fused_decoder.refusal)


def _refusal(run: Run, device: torch.device, refuse: Callable[[Shape, int, int, str], str]) -> str:
    if device.type != "cuda":
        return f"they are for GPUs, the device is {device.type}"
    if not has_triton():
        return "triton is not installed"
    reasons = (
        refuse(run.shape, run.task.tokens, batch, run.recipe.precision)
        for batch in (run.recipe.batch, HELD_OUT_BATCH)
    )
    return next((why for why in reasons if why), "")


def _flatten(grads: Sequence[Tensor], places: list[tuple[int, int]], like: Tensor) -> Tensor:
    """Gradients in the layout of the flat rows, zeros in the gaps."""
    pieces, models, end = [], like.shape[0], like.shape[1]
    ends = [at for at, _ in places[1:]] + [end]
    for grad, (at, length), stop in zip(grads, places, ends, strict=True):
        pieces.append(grad.reshape(models, -1))
        if stop > at + length:
            pieces.append(like.new_zeros(models, stop - at - length))
    return torch.cat(pieces, 1)


def _rate_table(recipe: Recipe) -> Any:
    """(steps, 3) float32: lr/(1 - b1^t), 1/sqrt(1 - b2^t), 1 - lr * weight decay, computed in
    float64."""
    t = np.arange(1, recipe.steps + 1)
    lr = recipe.rates()
    table = (
        lr / (1 - recipe.beta1**t),
        1 / np.sqrt(1 - recipe.beta2**t),
        1 - lr * recipe.weight_decay,
    )
    with np.errstate(over="ignore"):  # an absurd rate diverges, as it should
        return np.stack(table, 1).astype(np.float32)


def _autocast(precision: str, device: torch.device) -> Any:
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return torch.autocast(device.type, half) if half else contextlib.nullcontext()


def begin(run: Run, given: Mapping[str, Tensor] | None = None) -> State:
    """A run before its first step; of the weights `given` it takes those of its parameters' names
    and sizes, and draws the rest."""
    scheme = "normal" if run.recipe.parent else run.recipe.init
    model = fresh(
        run.shape,
        scheme,
        [run.seed],
        lambda seed: generator_of(torch.device("cpu"), derive(seed, "init")),
    )
    if given is not None:
        _take(model, given, run)
    params = list(model.parameters())
    places, length = _layout(params)
    weights = torch.zeros(length)
    for p, (at, size) in zip(params, places, strict=True):
        weights[at : at + size] = p.detach().flatten()
    return State(run, weights, torch.zeros(length), torch.zeros(length))


def _take(model: torch.nn.Module, given: Mapping[str, Tensor], run: Run) -> None:
    fitting = {
        name: p
        for name, p in model.named_parameters()
        if name in given and given[name].shape == p.shape[1:]
    }
    if not any(name.startswith("blocks.") for name in fitting):
        shape = run.shape
        raise UsageError(
            f"none of the blocks of run {run.recipe.parent} fits a model of width {shape.dim}, "
            f"{shape.num_heads} heads of rank "
            f"{shape.head_dim}, feed-forward {shape.ffn_dim}; init {run.recipe.init} needs a run "
            "of the same sizes"
        )
    with torch.no_grad():
        for name, p in fitting.items():
            p[0].copy_(given[name])
