"""A model of one's own in the place of headwise's: "my architecture, your engine and statistics".
Loads torch only when it builds."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from headwise.errors import UsageError, one_line
from headwise.files import reduce_by_file
from headwise.rows import named_spec

if TYPE_CHECKING:
    from torch import nn

    from headwise.shape import Shape
    from headwise.tasks.task import Task


@dataclass(frozen=True)
class Model:
    """What builds the module of a run: derive from it in a file of your own, as a frozen dataclass,
    and write `build`.

    The module takes a task's inputs, vectors (batch, tokens, width) or ids (batch, tokens), and
    gives outputs (batch, tokens, width) with at least `task.answer_dim` coordinates. Its initial
    weights are those that `build` leaves, drawn from torch's global generator, which is seeded for
    the run. Such runs are trained one by one.
    """

    name: ClassVar[str] = ""  # in rows and run ids; "": the class's own name
    version: ClassVar[int] = 1  # of what it builds; another one gives other run ids

    def spec(self) -> dict[str, Any]:
        """The model as plain values: its name, its version where it is not 1, and its fields."""
        return named_spec(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_by_file(self, protocol)

    def build(self, shape: Shape, task: Task) -> nn.Module:
        """The module for a shape and a task, with its initial weights."""
        raise NotImplementedError

    def params(self, shape: Shape, task: Task) -> int:
        """How many numbers it trains, counted in the module itself."""
        import torch

        # On the meta device nothing is allocated or drawn.
        try:
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own, of layers of no width
                module = self.build(shape, task)
        except Exception:  # a factory that looks at its numbers needs some
            try:
                with torch.random.fork_rng([]):
                    module = self.build(shape, task)
            except Exception as error:
                raise UsageError(
                    f"model {self.spec()['name']} cannot be built: {one_line(error)}"
                ) from error
        if not isinstance(module, torch.nn.Module):
            raise UsageError(
                f"model {self.spec()['name']}: build must give an nn.Module, got "
                f"{type(module).__name__}"
            )
        return sum(p.numel() for p in module.parameters() if p.requires_grad)
