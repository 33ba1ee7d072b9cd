"""The rank paper's last figure: the weight u(q.k) that rank-1 heads need in order to add up to the
nearest of two points.

    headwise run representation              d = 4, 6, 8, odd degrees to 49; seconds

sign(w.y) = E u(q.k) sign(w.k) sign(q.y) over uniform q and k; u is concentrated at q = +-k and
explodes with the dimension. Expected peaks: 2.650e6, 8.330e9, 7.781e12 for d = 4, 6, 8; the
published form has 1.349e8, 6.465e12, 6.029e16.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from headwise.errors import UsageError
from headwise.experiments import base
from headwise.experiments.base import Computed, Experiment, Note
from headwise.experiments.figure_parts import published_values
from headwise.experiments.points import Point as BasePoint
from headwise.experiments.rank_paper.more_answers import of_representation
from headwise.rows import Row
from headwise.show.figure import Line, LineFigure, LinePanel

CAPTION = (
    "The size of the weight over the angle between a head's query and key, odd degrees up to the "
    "given one."
)
NOTE = Note(
    "The published code multiplies the degree-l term by an extra square root of the number of "
    "harmonics of that degree, so that the integral no longer gives the target; the corrected "
    "weights are smaller (at degree 49 by a factor of 50 to 7,700 for d = 4 to 8) and explode all "
    "the same."
)
FORMS = ("published", "corrected")


@dataclass(frozen=True, kw_only=True)
class Settings(base.Settings):
    """Which curves are computed."""

    dims: tuple[int, ...]
    degree: int
    angles: int

    def __post_init__(self) -> None:
        bad = [d for d in self.dims if not 3 <= d <= 100_000]
        if bad or not self.dims:
            raise UsageError(
                f"dims must lie between 3 and 100,000, got {bad[0] if bad else 'none'}"
            )
        if len(set(self.dims)) < len(self.dims):
            raise UsageError(
                f"dims must differ from each other, got {', '.join(map(str, self.dims))}"
            )
        if not 1 <= self.degree <= 400:
            raise UsageError(f"degree must lie between 1 and 400, got {self.degree}")
        if not 2 <= self.angles <= 1_000_000:
            raise UsageError(f"angles must lie between 2 and 1,000,000, got {self.angles}")


PRESETS = {
    "quick": Settings(dims=(4, 6, 8), degree=49, angles=721),
    "paper": Settings(dims=(4, 6, 8), degree=49, angles=10_001),
}


@dataclass(frozen=True)
class Curve(Computed):
    """One curve of the figure."""

    experiment = "representation"
    dim: int
    form: str
    degree: int
    angles: int


def runs(settings: Settings) -> list[Curve]:
    """Every curve, in the published form and in the corrected one."""
    return [
        Curve(d, form, settings.degree, settings.angles) for form in FORMS for d in settings.dims
    ]


def make(curve: Curve, device: str) -> Row:
    """|u| over the angle between query and key."""
    import numpy as np

    from headwise.theory.harmonics import representation

    began = time.monotonic()
    # |u| is even in the angle: half of it is computed and mirrored.
    half = np.linspace(0, math.pi, curve.angles // 2 + 1)
    u = np.abs(representation(curve.dim, np.cos(half), curve.degree, curve.form == "published"))
    if not np.isfinite(u).all():
        raise UsageError(
            f"u(t) passes 1e308 in {curve.dim} dimensions at degree {curve.degree}; take a lower "
            "degree or dimension"
        )
    angle = [*(-half[::-1]).tolist(), *half[1:].tolist()]
    return {
        "id": curve.id,
        "status": "done",
        **asdict(curve),
        "peak": float(u[0]),
        "angle": angle,
        "size": [*u[::-1].tolist(), *u[1:].tolist()],
        "seconds": round(time.monotonic() - began, 3),
    }


@dataclass(frozen=True, kw_only=True)
class Point(BasePoint):
    """One curve and its peak."""

    dim: int
    form: str
    degree: int
    peak: float
    angle: list[float]
    size: list[float]
    published: float | None  # read off the figure
    known: float | None  # by the formula


def _known_peaks() -> dict[int, dict[str, float]]:
    return {
        int(r["dim"]): {key: float(r[key]) for key in r if key.startswith("peak")}
        for r in published_values("feature_representation")
    }


def summary(rows: list[Row]) -> list[Point]:
    """One point per curve: its peak beside the one read off the figure and the one known."""
    peaks, out = _known_peaks(), []
    for r in rows:
        # Known peaks are of degree 49.
        known = peaks.get(r["dim"], {}) if r["degree"] == 49 else {}
        as_published = r["form"] == "published"
        formula = "peak_formula_published" if as_published else "peak_formula_correct"
        out.append(
            Point(
                dim=r["dim"],
                form=r["form"],
                degree=r["degree"],
                peak=r["peak"],
                angle=r["angle"],
                size=r["size"],
                published=known.get("peak_published") if as_published else None,
                known=known.get(formula),
            )
        )
    return out


def headline(points: Sequence[Point]) -> list[str]:
    """The peaks against the figure, and what the correction changes."""
    corrected = {p.dim: p.peak for p in points if p.form == "corrected"}
    return [
        f"d={p.dim}: published form {p.peak:.4g}, {abs(p.peak / p.published - 1):.1%} from the "
        f"figure; corrected {corrected.get(p.dim, math.nan):.4g}"
        for p in points
        if p.published
    ]


def figure(points: Sequence[Point]) -> LineFigure:
    """A panel per form, |u| over the angle."""
    several = len({p.degree for p in points}) > 1
    panels = []
    for form in FORMS:
        lines = []
        of_form = sorted((p for p in points if p.form == form), key=lambda p: p.dim)
        for colour, p in enumerate(of_form):
            label = f"d={p.dim}" + (f", degree {p.degree}" if several else "")
            # It vanishes at right angles, which a log axis does not have.
            sizes = [size if size >= 1 else None for size in p.size]
            lines.append(Line(label=label, colour=colour, style="line", x=p.angle, y=sizes))
        panels.append(LinePanel(title=f"{form} form", lines=lines))
    return LineFigure(
        title="The weight of a rank-1 head in the representation of the nearest of two points",
        x_label="angle between query and key, radians",
        y_label="|u|",
        x_scale="linear",
        panels=panels,
        columns=2,
    )


EXPERIMENT: Experiment[Settings, Point] = Experiment(
    name="representation",
    question=(
        "How large are the weights that a continuum of rank-1 heads needs to find the nearest of "
        "two points?"
    ),
    about="the weight of rank-1 heads that add up to the nearest point",
    presets=PRESETS,
    columns=(
        ("dim", "d"),
        ("form", "form"),
        ("degree", "degree"),
        ("peak", "peak"),
        ("published", "published"),
        ("known", "known"),
    ),
    main_columns=("degree", "peak", "dim", "form"),
    runs=runs,
    make=make,
    summary=summary,
    headline=headline,
    answer=of_representation,
    figure=figure,
    caption=CAPTION,
    notes={"quick": NOTE, "paper": NOTE},
    meanings={
        "dims": "dimensions of the points",
        "degree": "harmonics up to this degree",
        "angles": "points of a curve",
    },
)
