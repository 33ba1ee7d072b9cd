"""A model of a user's own in the engine: one at a time, with headwise's data, optimiser,
checkpoints, evaluation and rows.

Its weights lie in a flat row as everybody's do (flat.py), without a model axis: parameters of the
module are views of the row. Everything random is a pure function of the run's seed: the factory and
every block of steps (dropout) run with torch's global generators seeded for them, and leave these
as they were. Buffers, such as a BatchNorm's statistics, and parameters that are not trained are
part of a checkpoint. On a GPU its steps are not captured in a CUDA graph: nobody knows whether the
module may be.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headwise.errors import UsageError, one_line
from headwise.seeds import derive
from headwise.training.flat import FlatRows, Layout
from headwise.training.run import Run
from headwise.training.step import Modules, autocast


@contextlib.contextmanager
def seeded(run: Run, *purpose: str | int, device: torch.device | None = None) -> Iterator[None]:
    """Torch's global generators from a seed of the run; afterwards as they were."""
    devices = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(derive(run.seed, *purpose))
        yield


def build(run: Run) -> nn.Module:
    """The module of a run on the CPU, with its initial weights."""
    assert run.model is not None
    name = run.model.spec()["name"]
    with seeded(run, "init"):
        try:
            module = run.model.build(run.shape, run.task)
        except Exception as error:
            raise UsageError(f"model {name} cannot be built: {one_line(error)}") from error
    if not isinstance(module, nn.Module):
        kind = type(module).__name__
        raise UsageError(f"model {name}: build must give an nn.Module, got {kind}")
    for parameter, p in module.named_parameters():
        if p.dtype != torch.float32:
            raise UsageError(
                f"model {name}: parameters must be float32, {parameter} is {_dtype(p)}"
            )
    if not trained(module):
        raise UsageError(f"model {name}: a model needs a parameter that is trained, got none")
    return module


def module_digest(run: Run) -> str:
    """A digest of the module that a run's model builds: of its text, its weights for this seed, and
    its outputs in training and in evaluation.

    Runs of one seed with equal digests train the same model. One that cannot be run has a digest
    of its own; its training says why.
    """
    module = build(run)
    found = hashlib.sha256(repr(module).encode())
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        found.update(f"{name} {tuple(tensor.shape)} {tensor.requires_grad}".encode())
        found.update(tensor.detach().contiguous().numpy().tobytes())
    inputs = run.task.sample(torch.Generator().manual_seed(0), 3, 0)[0]
    try:
        for training in (True, False):
            with seeded(run, "digest"), torch.no_grad():
                outputs = module.train(training)(inputs)
            found.update(outputs.contiguous().numpy().tobytes())
    except Exception:  # a user's module may raise anything
        return run.id
    return found.hexdigest()


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that the optimiser moves; one that is used twice counts once."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def fixed(module: nn.Module) -> dict[str, Tensor]:
    """Buffers, and parameters that are not trained: what a checkpoint holds beside the weights."""
    rest = {name: p for name, p in module.named_parameters() if not p.requires_grad}
    rest |= dict(module.named_buffers())
    return {name: t.detach().cpu().clone() for name, t in rest.items()}


def layout_of(module: nn.Module) -> Layout:
    return Layout.of(trained(module).items(), model_axis=False)


def flat_weights(module: nn.Module) -> Tensor:
    """The parameters as one flat row."""
    layout = layout_of(module)
    row = torch.zeros(layout.length)
    for p, (start, size) in zip(trained(module).values(), layout.spans.values(), strict=True):
        row[start : start + size] = p.detach().flatten()
    return row


def restore(module: nn.Module, buffers: dict[str, Tensor], rows: FlatRows) -> None:
    """Bring a built module to a state: on its device, with these buffers, its trained parameters
    views of the flat row."""
    kept = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with torch.no_grad():
        for name, value in buffers.items():
            kept[name].copy_(value)
    module.to(rows.weights.device)
    for name, p in trained(module).items():
        start, size = rows.layout.spans[name]
        p.data = rows.weights[0, start : start + size].view(p.shape)


def named_weights(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, on the CPU."""
    weights = {name: p.detach().cpu().contiguous() for name, p in trained(module).items()}
    return {**weights, **fixed(module)}


class OwnModule(Modules):
    """Outputs and gradients of one module, which has no model axis (`step.Kernels`)."""

    captured: ClassVar[bool] = False

    def __init__(self, rows: FlatRows, module: nn.Module, run: Run, batch: int) -> None:
        super().__init__(rows, module, run.task, batch)
        assert run.model is not None
        self.run, self.name = run, run.model.spec()["name"]
        self.names = list(trained(module))

    def around_block(self, block: int) -> contextlib.AbstractContextManager[Any]:
        return seeded(self.run, "steps", block, device=self.rows.weights.device)

    def forward(self, inputs: Tensor) -> Tensor:
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            return self._outputs(inputs)
        finally:
            for module, training in modes:  # a part may be meant to stay in evaluation mode
                module.training = training

    def _outputs(self, inputs: Tensor) -> Tensor:
        """(1, batch, tokens, ...) -> (1, batch, tokens, width); what the module may get wrong is
        one line."""
        x, least = inputs[0], self.task.answer_dim
        try:
            with autocast(self.rows.precision, x.device):
                y = self.model(x)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            size = tuple(x.shape)
            raise UsageError(
                f"model {self.name} fails on inputs of shape {size}: {one_line(error)}"
            ) from error
        if not isinstance(y, Tensor):
            raise UsageError(f"model {self.name} must give a tensor, got {type(y).__name__}")
        if y.ndim != 3 or y.shape[:2] != x.shape[:2] or y.shape[2] < least:
            raise UsageError(
                f"model {self.name} must give outputs ({x.shape[0]}, {x.shape[1]}, {least} or "
                f"more) of inputs {tuple(x.shape)}, got {tuple(y.shape)}"
            )
        if y.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise UsageError(f"model {self.name} must give float32 outputs, got {_dtype(y)}")
        return y.unsqueeze(0)

    def _flat_gradient(self, loss: Tensor) -> Tensor:
        if not loss.requires_grad:
            raise UsageError(f"model {self.name}: no parameter reaches the loss")
        params = list(trained(self.model).values())
        grads = torch.autograd.grad(loss, params, allow_unused=True)
        unused = [name for name, g in zip(self.names, grads, strict=True) if g is None]
        if unused:
            raise UsageError(
                f"model {self.name} has parameters that its outputs do not depend on: "
                f"{', '.join(unused)}; leave them out, or set requires_grad False"
            )
        return self.rows.layout.flatten([g for g in grads if g is not None], self.rows.weights)


def _dtype(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")
