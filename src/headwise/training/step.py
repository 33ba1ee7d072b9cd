"""Where a step's gradients come from: the protocol `Kernels`, and its plain twin through autograd.

An ensemble asks for gradients and outputs, and does not know who makes them:

FusedEncoder   every part of a post-norm encoder's step as kernels, loss included
FusedDecoder   the blocks of pre-norm models as kernels, modules around them
Modules        headwise's modules and PyTorch's autograd: on a CPU, and wherever the others refuse
OwnModule      the same for one module of a user's own (own.py)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from headwise.kernels import has_triton
from headwise.shape import Shape
from headwise.tasks.task import Task
from headwise.training import data
from headwise.training.flat import FlatRows, HeadGroup
from headwise.training.loss_scale import base_scale
from headwise.training.run import Run


class Kernels(Protocol):
    """What an ensemble needs of whoever makes its gradients."""

    fused: ClassVar[bool]  # kernels of our own: AdamW is then one, too
    captured: ClassVar[bool]  # on a GPU a block of steps becomes one CUDA graph
    groups: list[HeadGroup]  # models that go through a block of steps without waiting for others

    def each_group(self, work: Callable[[HeadGroup], None]) -> None:
        """Do `work` for every group, on a GPU beside each other."""

    def around_block(self, block: int) -> contextlib.AbstractContextManager[Any]:
        """What a block of steps, or the evaluation (block -1), is made in."""

    def gradient(
        self, group: HeadGroup, inputs: Tensor, targets: Tensor, losses_M: Tensor, scale_M: Tensor
    ) -> Tensor:
        """Write the losses of a group's models, and return the gradients of their flat rows, times
        each model's loss scale."""
        ...

    def total(self, group: HeadGroup, grads: Tensor) -> Tensor:
        """Per model of the group a number that is not finite if one of its gradients is not."""
        ...

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs of all models (models, batch, tokens, width), without gradients."""
        ...


class KernelFamily(Protocol):
    """A kind of kernels: whether it takes a run, and at what cost."""

    @staticmethod
    def refusal(run: Run, device: torch.device) -> str:
        """What the kernels need that this run or device has not; empty when they take it."""
        ...

    @staticmethod
    def model_bytes(run: Run) -> int:
        """Bytes of one model in training."""
        ...

    @staticmethod
    def make(rows: FlatRows, model: Any, task: Task, batch: int, *, training: bool) -> Kernels:
        """The kernels for an ensemble and one batch size, with their buffers."""
        ...


def gpu_refusal(
    run: Run, device: torch.device, refuse: Callable[[Shape, int, int, str], str]
) -> str:
    """What kernels for GPUs need that this run or device has not, by a function that refuses
    (shape, tokens, batch, precision): of the training batch and of the held-out one."""
    if run.model is not None:
        return "needs headwise's own model, this run brings another"
    if device.type != "cuda":
        return f"needs a GPU, the device is {device.type}"
    if not has_triton():
        return "needs triton, which is not installed"
    for batch in (run.recipe.batch, data.HELD_OUT_BATCH):
        if why := refuse(run.shape, run.task.tokens, batch, run.recipe.precision):
            return why
    return ""


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return torch.autocast(device.type, half) if half else contextlib.nullcontext()


class Modules:
    """Outputs by headwise's modules, gradients by autograd."""

    fused: ClassVar[bool] = False
    captured: ClassVar[bool] = True

    def __init__(self, rows: FlatRows, model: Any, task: Task, batch: int) -> None:
        self.rows, self.model, self.task = rows, model, task
        models = rows.weights.shape[0]
        self.groups = [HeadGroup(slice(0, models), rows.head_groups[0].shape)]
        self.base_scale = base_scale(batch * task.tokens, rows.precision)

    def each_group(self, work: Callable[[HeadGroup], None]) -> None:
        work(self.groups[0])

    def around_block(self, block: int) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def gradient(
        self, group: HeadGroup, inputs: Tensor, targets: Tensor, losses_M: Tensor, scale_M: Tensor
    ) -> Tensor:
        losses = self.task.loss(self._outputs(inputs).float(), targets)
        losses_M.copy_(losses.detach())
        if self.rows.precision != "fp16":
            return self._flat_gradient(losses.sum())
        return self._flat_gradient((losses * scale_M).sum() * self.base_scale) / self.base_scale

    def total(self, group: HeadGroup, grads: Tensor) -> Tensor:
        return grads.sum(1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self._outputs(inputs)

    def _outputs(self, inputs: Tensor) -> Tensor:
        with autocast(self.rows.precision, self.rows.weights.device):
            outputs, _ = self.model(inputs)
        return outputs

    def _flat_gradient(self, loss: Tensor) -> Tensor:
        grads = torch.autograd.grad(loss, list(self.model.parameters()))
        return self.rows.layout.flatten(grads, like=self.rows.weights)
