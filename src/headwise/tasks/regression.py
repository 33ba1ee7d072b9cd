"""Learn a linear function in context (Garg et al. 2022).

A prompt is x_1, y_1, x_2, y_2, ... with y_i = w.x_i, x_i and w standard normal, w new in every
prompt; at every x_i the model answers y_i from the pairs before it. Tokens have the width of x; y
is the first coordinate of its own. The error is (f - y)^2, so that predicting zero scores d =
`dim`.

Training may begin with an easier task: the first `first_dim` coordinates and `first_points` pairs,
one coordinate and two pairs more every `curriculum` steps. Coordinates beyond are zero, pairs
beyond do not count.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import check_whole_numbers
from headwise.tasks.task import Task

NEIGHBORS = 3


@dataclass(frozen=True)
class Regression(Task):
    """y_i = w.x_i for every x_i of a prompt.

    >>> task = Regression(dim=20, points=41)
    >>> [round(task.baseline_profile()["averaging"][k], 1) for k in (0, 20, 40)]
    [20.0, 21.0, 10.5]
    """

    name = "regression"
    dim: int
    points: int
    curriculum: int = 0  # steps a stage lasts; 0: the whole task from the start
    first_dim: int = 5
    first_points: int = 11
    causal = True

    def __post_init__(self) -> None:
        check_whole_numbers(self, 1, "dim", "first_dim", "first_points")
        check_whole_numbers(self, 2, "points")
        check_whole_numbers(self, 0, "curriculum")

    @property
    def tokens(self) -> int:
        """An x and a y per pair."""
        return 2 * self.points

    @property
    def in_dim(self) -> int:
        """Width of x."""
        return self.dim

    @property
    def answer_dim(self) -> int:
        """A prediction is one number."""
        return 1

    @property
    def stage(self) -> int:
        """Steps between two stages of the curriculum."""
        return self.curriculum

    def active(self, step: int | None) -> tuple[int, int]:
        """How many coordinates and pairs are in play at a step of training."""
        if step is None or not self.curriculum:
            return self.dim, self.points
        stage = step // self.curriculum
        return min(self.dim, self.first_dim + stage), min(
            self.points, self.first_points + 2 * stage
        )

    def sample(
        self, generator: torch.Generator, batch: int, step: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Inputs (batch, 2 points, dim); targets (batch, points, 2): the answer, and the weight of
        its error."""
        # The stage of the curriculum zeroes the later coordinates of x and gives later pairs no
        # weight. The weights sum to the number of pairs, so that the mean over all is that of the
        # pairs in play.
        dim, points = self.active(step)
        w_BD = torch.randn(batch, self.dim, generator=generator, device=generator.device)
        x_BPD = torch.randn(
            batch, self.points, self.dim, generator=generator, device=generator.device
        )
        x_BPD[..., dim:] = 0
        y_BP = (x_BPD * w_BD.unsqueeze(1)).sum(-1)
        y_BPD = torch.zeros_like(x_BPD)
        y_BPD[..., 0] = y_BP
        weight_BP = torch.zeros_like(y_BP)
        weight_BP[:, :points] = self.points / points
        return torch.stack((x_BPD, y_BPD), 2).flatten(1, 2), torch.stack((y_BP, weight_BP), -1)

    def _errors(self, outputs: Tensor, targets: Tensor) -> Tensor:
        answers_BP = outputs.flatten(-2)[
            ..., :: 2 * outputs.shape[-1]
        ]  # the first number at every x
        return (answers_BP - targets[..., 0]).square() * targets[..., 1]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Weighted mean of (f - y)^2 over the pairs in play."""
        return self._errors(outputs, targets).flatten(-2).mean(-1)

    def measures(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The error by number of pairs seen."""
        return {"profile": self._errors(outputs, targets).mean(-2)}

    def baseline_profile(self) -> dict[str, list[float]]:
        """Errors after k = 0, 1, ... pairs: zero d; least squares max(d - k, 0); the mean of y_i
        x_i d (d + 1)/k; the mean answer of the three nearest pairs, from 4,096 prompts."""
        # Averaging: w is estimated by the mean of y_i x_i, whose error for k pairs is d (d + 1)/k.
        d, ks = self.dim, range(self.points)
        return {
            "zero": [float(d)] * self.points,
            "least squares": [float(max(d - k, 0)) for k in ks],
            "averaging": [d * (d + 1) / k if k else float(d) for k in ks],
            "3 nearest": list(_nearest_errors(d, self.points)),
        }

    def baselines(self) -> dict[str, float]:
        """The same, the mean over all pairs."""
        return {name: sum(errors) / self.points for name, errors in self.baseline_profile().items()}


@functools.cache
def _nearest_errors(dim: int, points: int) -> tuple[float, ...]:
    task, generator = Regression(dim, points), torch.Generator().manual_seed(0)
    total = torch.zeros(points, dtype=torch.float64)
    for _ in range(16):
        inputs, targets = task.sample(generator, 256)
        x_BPD, y_BP = inputs[:, ::2].double(), targets[..., 0].double()
        # A pair may use only those before it, so the distances to itself and to later ones are
        # infinite.
        far_BPP = torch.cdist(x_BPD, x_BPD)
        far_BPP = far_BPP.masked_fill(
            torch.ones(points, points, dtype=torch.bool).triu(), float("inf")
        )
        total[0] += y_BP[:, 0].square().mean()
        for k in range(1, points):
            near = far_BPP[:, k, :k].topk(min(NEIGHBORS, k), largest=False).indices
            total[k] += (y_BP.gather(1, near).mean(-1) - y_BP[:, k]).square().mean()
    return tuple((total / 16).tolist())
