"""Rows of the rank paper's main figure."""

from support.experiment_rows import a_row

from headwise.experiments.rank_paper import fig1
from headwise.experiments.settings import settings_of

FIG1 = fig1.EXPERIMENT


def rated(
    errors: dict[tuple[int, int, float, int], float | None], protocol: str = "stream"
) -> list[fig1.Point]:
    """Points of d^2.5 whose runs by (layers, rank, rate, seed) have these errors."""
    out = []
    for (depth, rank, lr, seed), error in errors.items():
        settings = settings_of(
            FIG1,
            "paper",
            [f"depths={depth}", "widths=8", f"ranks={rank}", f"protocols={protocol}", f"lr={lr}"],
            seed + 1,
        )
        out.append(a_row(fig1.runs(settings)[seed], error, (error or 1) / 2))
    return fig1.summary(out)
