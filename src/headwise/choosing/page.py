"""The page of a choice: the caterpillar of differences from the leader, every look, the table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from headwise.show.figure import Figure, Line, LineFigure, LinePanel, Range, RangeFigure, RangePanel
from headwise.show.report import Page

if TYPE_CHECKING:
    from headwise.choosing.choice import Choice
    from headwise.choosing.question import Question, Standing
    from headwise.choosing.race import Look

LABELS = ("leads", "cannot be told apart from it", "ruled out")
CAPTION = (
    "Differences from the leader, seed by seed on the same data order and initial-weight stream, "
    "mean with its interval. All intervals of all looks hold together in {sure:.3g} of 100 such "
    "searches. A shape is ruled out when its interval lies above zero; one that diverged has no "
    "mean and is not drawn."
)
LATER = 8  # looks that have a panel of their own, the last ones


def note_of(
    question: Question, at: Standing, command: str, choice: Choice | None
) -> dict[str, Any]:
    """What a store keeps of a choice: what was asked for, and, at its end, its page."""
    about = {
        "command": command,
        "preset": "",
        "settings": question.spec(),
        "ids": list(dict.fromkeys(at.asked)),
        "later": (0, 0) if choice is not None and not at.next else None,
        "made": True,
    }
    if choice is None:
        return about
    return {**about, "page": page_of(choice).to_json(), "choice": choice.to_json()}


def page_of(choice: Choice) -> Page:
    """What the page says."""
    head, *cells = choice.table
    figures: list[Figure] = []
    if choice.race.looks:
        figures = [caterpillar(choice), every_look(choice), means_by_look(choice)]
    return Page(
        question=f"Which of {len(choice.arms)} shapes is best on {choice.task}?",
        about="rates tuned with equal effort, then elimination on paired seeds",
        headline=choice.lines,
        caption=CAPTION.format(sure=100 * (1 - choice.race.rule.delta)),
        figures=figures,
        headings=head,
        cells=cells,
    )


def caterpillar(choice: Choice) -> RangeFigure:
    """Every shape at its last look."""
    ranges = []
    for arm in sorted(choice.arms, key=lambda arm: math.inf if arm.gap is None else arm.gap.mean):
        gap = arm.gap
        if gap is None or gap.low is None or gap.high is None:
            continue
        kind = 1 if arm.out is None else 2
        name = arm.name if arm.out is None else f"{arm.name} (out at {arm.out} seeds)"
        ranges.append(Range(name=name, label=LABELS[kind], colour=kind, mean=gap.mean,
                            low=gap.low, high=gap.high))  # fmt: skip
    leader = choice.race.leader or ""
    first = Range(name=leader, label=LABELS[0], colour=0, mean=0.0, low=0.0, high=0.0)
    panel = RangePanel(
        title="", x_label=f"{choice.unit} above the leader's", ranges=[first, *ranges]
    )
    return RangeFigure(title=f"{choice.task}: every shape at its last look", panels=[panel])


def every_look(choice: Choice) -> RangeFigure:
    """A panel per look."""
    panels = [_panel(choice, look) for look in choice.race.looks[-LATER:]]
    return RangeFigure(title="Every look", panels=panels, columns=2)


def _panel(choice: Choice, look: Look) -> RangePanel:
    first = Range(name=look.leader, label=LABELS[0], colour=0, mean=0.0, low=0.0, high=0.0)
    ranges = [first]
    for gap in look.gaps:
        if math.isfinite(gap.mean):
            kind = 2 if gap.ruled_out else 1
            ranges.append(Range(name=gap.arm, label=LABELS[kind], colour=kind, mean=gap.mean,
                                low=gap.low, high=gap.high))  # fmt: skip
    return RangePanel(
        title=f"{look.seeds} seeds", x_label=f"{choice.unit} above the leader's", ranges=ranges
    )


def means_by_look(choice: Choice) -> LineFigure:
    """The mean loss of every shape from look to look."""
    looks = choice.race.looks
    lines = []
    for colour, arm in enumerate(choice.arms):
        x, y = [], []
        for look in looks:
            gaps = {gap.arm: gap.mean for gap in look.gaps} | {look.leader: 0.0}
            if math.isfinite(gaps.get(arm.name, math.inf)):
                x.append(float(look.seeds))
                y.append(look.loss + gaps[arm.name])
        if x:
            lines.append(Line(label=arm.name, colour=colour, x=x, y=y, style="dashed"))
    return LineFigure(
        title="Mean loss from look to look",
        x_label="seeds",
        y_label=choice.unit,
        panels=[LinePanel(title="", lines=lines)],
        x_scale="linear",
        y_scale="linear",
    )
