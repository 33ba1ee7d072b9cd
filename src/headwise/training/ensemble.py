"""An ensemble in training: which runs form one, and the step that trains all its models at once.

Every parameter has a leading model axis and lies in flat rows, one row per model (flat.py). Each
model has its own data, rate and loss scale, and nothing of one model enters another's numbers. The
models may cut their width into heads in different ways: equal ones lie side by side as a head
group.

One block of steps is the unit of work: its data are drawn first, then come its steps, on a GPU as
one CUDA graph that reads data, rates and loss scales where they lie. A step is two things: somebody
makes gradients of the flat rows (step.Kernels), and AdamW moves the rows (optim.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwise.model.transformer import build
from headwise.training import data, own
from headwise.training.checkpoint import State
from headwise.training.data import block_steps, draw_block, held_out_batches
from headwise.training.flat import ALIGN, OPERANDS, FlatRows, HeadGroup, Layout, head_groups
from headwise.training.fused_decoder import FusedDecoder
from headwise.training.fused_encoder import FusedEncoder
from headwise.training.loss_scale import LossScales
from headwise.training.optim import AdamW, Moved, Overflow
from headwise.training.run import Run, ensemble_key
from headwise.training.step import KernelFamily, Kernels, Modules

LARGEST = 64  # models
CPU_CACHE = 32 << 20  # bytes of a step's activations and weights on a CPU
GPU_SHARE, GPU_BYTES = 0.4, 56 << 30  # of the free memory, and at most
FAMILIES: tuple[type[KernelFamily], ...] = (FusedEncoder, FusedDecoder)


def family_of(run: Run, device: torch.device) -> type[KernelFamily] | None:
    """The kernels that take a run on a device; None: PyTorch's own, as on every CPU."""
    if run.model is not None or device.type != "cuda":
        return None
    return next((family for family in FAMILIES if not family.refusal(run, device)), None)


def pack(states: Sequence[State], device: torch.device) -> list[list[State]]:
    """States that can be trained together: equal keys, equal steps, the same kernels, no more than
    fit. Equal shapes come side by side."""
    groups: dict[Any, list[State]] = {}
    for state in states:
        key = (ensemble_key(state.run), state.step, family_of(state.run, device))
        groups.setdefault(key, []).append(state)
    ensembles = []
    for group in groups.values():
        group.sort(key=lambda state: state.run.shape.num_heads)
        count = math.ceil(len(group) / most_models(group[0].run, device))
        size = math.ceil(len(group) / count)
        ensembles += [group[i : i + size] for i in range(0, len(group), size)]
    return ensembles


def most_models(run: Run, device: torch.device) -> int:
    """How many models of this kind are trained together at most.

    On a CPU as many as keep a step's activations near the cache, and one alone when its bits would
    depend on its place. On a GPU as many as fit 40 % of the free memory and 56 GiB: a model's step
    was never slower in a larger ensemble. A model of a user's own is always alone.
    """
    on_cpu = device.type == "cpu"
    if run.model is not None or (on_cpu and not _fills_lines(run)):
        return 1
    recipe, tokens = run.recipe, run.task.tokens
    step = run.shape.activation_bytes(tokens, batch=recipe.batch) + 20 * run.shape.params
    if on_cpu:
        return max(1, min(LARGEST, CPU_CACHE // step))
    free, _ = torch.cuda.mem_get_info(device)
    # what an earlier ensemble left to us
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    family = family_of(run, device)
    model = 4 * step if family is None else family.model_bytes(run)
    block = block_steps(run.task, recipe) * recipe.batch * tokens * max(2, run.task.in_dim) * 4
    data = 4 * block  # drawn, and in place
    return max(1, min(LARGEST, int(min(GPU_SHARE * free, GPU_BYTES)) // (model + data)))


def _fills_lines(run: Run) -> bool:
    """Whether one model's activations and gradients fill whole cache lines, so that its neighbours'
    start on one: the matrix library takes another path, with other bits, where they do not, and for
    a matrix of one row or column (the read-out is padded)."""
    with torch.device("meta"):
        matrices = [
            p
            for name, p in build(run.shape).named_parameters()
            if name.endswith("weight") and p.ndim == 2 and "read_out" not in name
        ]
    sizes = [run.recipe.batch * run.task.tokens, *(p.numel() for p in matrices)]
    return not any(size % ALIGN for size in sizes) and all(min(p.shape) > 1 for p in matrices)


class Ensemble:
    """The runs of one ensemble on one device: flat weights and moments, blocks of steps, and the
    evaluation."""

    def __init__(self, states: Sequence[State], device: torch.device) -> None:
        self.runs, self.device = [state.run for state in states], device
        run = self.runs[0]
        self.recipe, self.task = run.recipe, run.task

        weights, mean, square = (
            torch.stack(rows).to(device)
            for rows in zip(*((s.weights, s.mean, s.square) for s in states), strict=True)
        )
        dtype = OPERANDS[self.recipe.precision]
        operands = weights if dtype == torch.float32 else weights.to(dtype)
        self.moved = Moved(weights, mean, square, operands)
        self.model, self.rows = self._model(states)

        self.kernels = self._kernels(self.recipe.batch)
        self.scales = LossScales([s.scale for s in states], self.recipe.precision, device)
        self.steps = block_steps(self.task, self.recipe)  # of a block
        recipes = [run.recipe for run in self.runs]
        self.optimizer = AdamW(self.moved, recipes, self.steps, self.kernels.fused)

        self.losses = torch.zeros(self.steps, len(states), device=device)
        self.block: tuple[Tensor, Tensor] | None = None  # a block's, (steps, models, batch, ...)
        self.graph: torch.cuda.CUDAGraph | None = None

    def _model(self, states: Sequence[State]) -> tuple[nn.Module, FlatRows]:
        """The module of all models, whose parameters are views of the flat rows."""
        weights, operands = self.moved.weights, self.moved.operands
        groups = head_groups(run.shape for run in self.runs)
        run = self.runs[0]
        if run.model is not None:
            module = own.build(run)
            rows = FlatRows(groups, own.layout_of(module), weights, operands, self.recipe.precision)
            own.restore(module, states[0].buffers, rows)
            return module, rows
        with torch.device("meta"):
            counts = [(group.size, group.shape) for group in groups]
            model = build(run.shape, models=len(states), head_groups=counts)
        layout = Layout.of(model.named_parameters())
        for name, p in list(model.named_parameters()):
            start, size = layout.spans[name]
            view = nn.Parameter(weights[:, start : start + size].view(p.shape))
            module_name, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module_name), leaf, view)
        return model, FlatRows(groups, layout, weights, operands, self.recipe.precision)

    def _kernels(self, batch: int, training: bool = True) -> Kernels:
        """Who makes gradients or outputs: our own kernels where they take every run."""
        run = self.runs[0]
        if run.model is not None:
            return own.OwnModule(self.rows, self.model, run, batch)
        families = {family_of(run, self.device) for run in self.runs}
        family = families.pop()
        if families or family is None:
            return Modules(self.rows, self.model, self.task, batch)
        return family.make(self.rows, self.model, self.task, batch, training=training)

    # -- one block of steps

    def run_block(self, block: int) -> Tensor:
        """Train through one block; returns the losses before each update, (steps, models)."""
        self._draw(block)
        self.optimizer.begin_block(block)
        if self.device.type != "cuda" or not self.kernels.captured:
            self._steps(block)
            return self.losses
        if self.graph is None:
            self.graph = self._capture(block)
        self.graph.replay()
        return self.losses

    def _draw(self, block: int) -> None:
        """Every model's data of a block; the buffers stay where they are, since a graph reads
        them."""
        if self.block is None:
            like = draw_block(self.runs[0], block, self.device)
            inputs, targets = (t.new_empty(t.shape[0], len(self.runs), *t.shape[1:]) for t in like)
            self.block = inputs, targets
        inputs, targets = self.block
        for m, run in enumerate(self.runs):
            draw_block(run, block, self.device, (inputs[:, m], targets[:, m]))

    def _steps(self, block: int) -> None:
        """All steps of the block, group by group: no group waits for another within it."""

        def work(group: HeadGroup) -> None:
            for i in range(self.steps):
                self._step(i, group, self._gradient(i, group))

        with self.kernels.around_block(block):
            self.kernels.each_group(work)

    def _gradient(self, i: int, group: HeadGroup) -> Tensor:
        """Losses (written) and gradients of a group's rows, times a model's loss scale."""
        assert self.block is not None
        inputs, targets = self.block
        models = group.models
        losses, scale = self.losses[i, models], self.scales.scale[models]
        return self.kernels.gradient(group, inputs[i, models], targets[i, models], losses, scale)

    def _step(self, i: int, group: HeadGroup, grads: Tensor, moved: Moved | None = None) -> None:
        """Move a group's models; in half precision only those whose gradient is finite."""
        overflow = None
        if self.scales.counted:
            total = self.kernels.total(group, grads)
            self.scales.count(total, group.models)
            overflow = Overflow(total, self.scales.inverse[group.models])
        self.optimizer.step(i, group.models, grads, overflow, moved)

    def _capture(self, block: int) -> torch.cuda.CUDAGraph:
        """The block of steps as one CUDA graph.

        Nothing may be compiled while a graph is captured, so a step is made before on a stream of
        its own: gradients of the first step twice, and AdamW on copies where it is a kernel of
        ours. It leaves weights, moments and counts as they were.
        """
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            grads: dict[int, Tensor] = {}

            def work(group: HeadGroup) -> None:
                grads[group.first] = self._gradient(0, group)

            for _ in range(2):
                self.kernels.each_group(work)
            if self.kernels.fused:
                copies, skipped = self.moved.copy(), self.scales.skipped.clone()
                for group in self.kernels.groups:
                    self._step(0, group, grads[group.first], copies)
                self.scales.skipped.copy_(skipped)
                del copies, skipped
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._steps(block)
        return graph

    # -- evaluation

    def held_out(self) -> Tensor:
        """The error on fresh sequences, batch by batch: (models, batches). The same sequences for
        every run of a task."""
        return self.evaluate()[0]

    def evaluate(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The same, and what else the task says about these answers, by name, models first."""
        errors, measures = [], dict[str, list[Tensor]]()
        for outputs, targets in self._answers():
            errors.append(self.task.loss(outputs, targets))
            for name, value in self.task.measures(outputs, targets).items():
                measures.setdefault(name, []).append(value.double())
        means = {name: torch.stack(values).mean(0).cpu() for name, values in measures.items()}
        return torch.stack(errors, 1).double().cpu(), means

    def _answers(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Outputs and targets of the held-out sequences, batch by batch."""
        models = len(self.runs)
        kernels = self._kernels(data.HELD_OUT_BATCH, training=False)
        recipe = self.recipe
        held_out = (self.task, recipe.held_out, self.device, recipe.evaluated_on)
        for x, target in held_out_batches(*held_out):
            with torch.no_grad(), kernels.around_block(-1):
                outputs = kernels.forward(x.expand(models, *(-1,) * x.ndim))
            yield outputs.float(), target.expand(models, *(-1,) * target.ndim)

    # -- taking apart

    def update(self, states: Sequence[State]) -> None:
        """Bring weights and moments back to the runs' states, on the CPU."""
        weights, mean, square = (t.cpu().clone() for t in self.moved[:3])
        for m, state in enumerate(states):
            state.weights, state.mean, state.square = weights[m], mean[m], square[m]
            if state.run.model is not None:
                state.buffers = own.fixed(self.model)

    def named_weights(self, m: int) -> dict[str, Tensor]:
        """Model m's parameters by name."""
        if self.runs[m].model is not None:
            return own.named_weights(self.model)
        return {name: p.detach()[m].cpu().contiguous() for name, p in self.model.named_parameters()}
