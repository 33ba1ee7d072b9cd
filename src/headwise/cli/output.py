"""What commands say: answers on standard output, the rest on standard error, tables that fit the
terminal."""

from __future__ import annotations

import codecs
import io
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headwise.progress import columns_of

if TYPE_CHECKING:
    from headwise.experiments.base import Experiment
    from headwise.experiments.made import Made
    from headwise.experiments.points import Point

# What a terminal without these characters gets instead; of any other the number.
PLAIN = {"±": "+-", "×": "x", "→": "->", "≥": ">=", "≤": "<=", "µ": "u", "…": "...", "–": "-"}
# What would move a terminal's cursor or change its title; rows of somebody's store may hold it.
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
GAP = 2  # columns between two of a table
PROSE = 24  # columns that prose is wrapped to at least
TALL = 40  # lines of a table whose prose is cut instead


# ---- streams


def prepare_streams() -> None:
    """Have standard output and error take every character, and be there: a closed one is nowhere.

    Called once, when a command starts.
    """
    codecs.register_error("headwise", _plain)
    # A file that is opened takes the lowest free number, which a closed stream would leave to data.
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="headwise")


def _plain(error: UnicodeError) -> tuple[str, int]:
    """The characters that an encoding lacks, in ones that every encoding has."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    named = (PLAIN.get(c) or c.encode("ascii", "backslashreplace").decode() for c in lacking)
    return "".join(named), error.end


def say(text: str) -> None:
    """A line on standard error; a terminal gets it wrapped between words."""
    if sys.stderr.isatty():
        width = columns_of(sys.stderr)
        text = "\n".join(line for part in text.split("\n") for line in wrapped(part, width))
    print(text, file=sys.stderr, flush=True)


def width_for(wide: bool) -> int | None:
    """How many columns answers may take: as many as the terminal has. None is any number: for a
    file, a pipe, and where --wide asks for all."""
    return None if wide or not sys.stdout.isatty() else columns_of(sys.stdout)


# ---- tables


def print_table(
    table: Sequence[Sequence[str]], width: int | None = None, main: Sequence[int] = ()
) -> None:
    """A table, its first line the headings. Within `width` it has as many columns as fit: those at
    the places `main` stay longest, the first of them longest of all."""
    table = [[CONTROL.sub(" ", cell) for cell in row] for row in table]
    shown = list(range(len(table[0])))
    if width is not None:
        shown = _fitting(table, width, main)
    cut = [[row[i] for i in shown] for row in table]
    words = [_is_prose(cut, i) for i in range(len(shown))]
    widths = [max(len(row[i]) for row in cut) for i in range(len(shown))]
    if width is not None:
        widths = _narrowed(cut, words, width)
    tall = len(table) > TALL
    for number, row in enumerate(cut):
        if tall and number:
            row = [_cut(cell, w) for cell, w in zip(row, widths, strict=True)]
        for line in _lines(row, widths, words, bottom=number == 0):
            print(line)
    if len(shown) < len(table[0]):
        _print_left_out(table, shown, width)


def _cut(cell: str, width: int) -> str:
    """A cell in one line."""
    return cell if len(cell) <= width else f"{cell[: width - 3]}..."


def _is_prose(table: Sequence[Sequence[str]], i: int) -> bool:
    """Whether a column stands left: the first one, and words."""
    return i == 0 or any(row[i][:1].isalpha() and " " in row[i] for row in table[1:])


def _same(table: Sequence[Sequence[str]], i: int) -> bool:
    """Whether a column says the same in every row."""
    return len(table) > 2 and len({row[i] for row in table[1:]}) == 1


def _least(table: Sequence[Sequence[str]], i: int) -> int:
    """The fewest columns that one of a table does with. Headings are wrapped, and prose."""
    heading = max(map(len, table[0][i].split()), default=0)
    cells = max((len(row[i]) for row in table[1:]), default=0)
    return max(heading, min(cells, PROSE) if _is_prose(table, i) else cells)


def _fitting(table: Sequence[Sequence[str]], width: int, main: Sequence[int]) -> list[int]:
    """Which columns are shown. First go those that say the same in every row, then those that are
    not main ones, from the right, then main ones, the last first."""

    def importance(i: int) -> tuple[bool, int, int]:
        """The smaller the sooner it goes."""
        place = main.index(i) if i in main else len(main)
        return not _same(table, i) or place < 2, -place, -i

    kept = list(range(len(table[0])))
    while len(kept) > 1 and sum(_least(table, i) + GAP for i in kept) - GAP > width:
        kept.remove(min(kept, key=importance))
    return kept


def _narrowed(table: Sequence[Sequence[str]], words: list[bool], width: int) -> list[int]:
    """The widths of columns: as wide as their cells, prose as there is room."""
    least = [_least(table, i) for i in range(len(words))]
    most = [max(len(row[i]) for row in table) for i in range(len(words))]
    room = max(0, width - sum(least) - GAP * (len(least) - 1))
    # Room goes to the cells of prose first, then to headings.
    for of_prose in (True, False):
        wanting = [i for i in range(len(words)) if words[i] == of_prose and least[i] < most[i]]
        while room and wanting:
            i = min(wanting, key=lambda i: least[i])
            least[i] += 1
            room -= 1
            wanting = [i for i in wanting if least[i] < most[i]]
    return [min(w, width) for w in least]


def _lines(row: Sequence[str], widths: list[int], words: list[bool], bottom: bool) -> list[str]:
    """The lines of a row; of the headings the last word stands at the bottom."""
    cells = [textwrap.wrap(c, w) if len(c) > w else [c] for c, w in zip(row, widths, strict=True)]
    height = max(map(len, cells))
    padded = []
    for cell in cells:
        rest = [""] * (height - len(cell))
        padded.append([*rest, *cell] if bottom else [*cell, *rest])
    out = []
    for parts in zip(*padded, strict=True):
        line = (
            part.ljust(w) if left else part.rjust(w)
            for part, w, left in zip(parts, widths, words, strict=True)
        )
        out.append((" " * GAP).join(line).rstrip())
    return out


def _print_left_out(table: Sequence[Sequence[str]], shown: list[int], width: int | None) -> None:
    """Which columns are not shown, with the value of those that are the same in every row."""
    names = [
        table[0][i] + (f" ({table[1][i]})" if _same(table, i) and table[1][i] else "")
        for i in range(len(table[0]))
        if i not in shown
    ]
    more = "1 more column" if len(names) == 1 else f"{len(names)} more columns"
    print_prose(f"--wide shows {more}: {', '.join(names)}", width)


def print_prose(text: str, width: int | None = None, hanging: int = 0) -> None:
    """Sentences, wrapped between words; the lines behind the first stand `hanging` columns in."""
    print("\n".join(wrapped(text, width, hanging)))


def wrapped(text: str, width: int | None, hanging: int = 0) -> list[str]:
    """The lines of a text."""
    text = "\n".join(CONTROL.sub(" ", line) for line in text.split("\n"))
    if width is None or len(text) <= width:
        return [text]
    front = " " * (len(text) - len(text.lstrip()) + hanging)
    return textwrap.wrap(
        text, width, break_long_words=False, break_on_hyphens=False, subsequent_indent=front
    )


# ---- experiments


def print_points(
    experiment: Experiment[Any, Any], points: Sequence[Point], width: int | None = None
) -> None:
    """An experiment's table: a line per point."""
    keys = [key for key, _ in experiment.filled_columns(points)]
    main = [keys.index(key) for key in experiment.main_columns if key in keys]
    print_table(experiment.table(points), width, main)


def print_made(made: Made, show: bool = False, wide: bool = False) -> dict[str, Any]:
    """The table, the claim, the files, and last the answer that the page begins with; returns what
    --json prints."""
    from headwise.experiments.points import plain_point

    width = width_for(wide)
    print_points(made.experiment, made.points, width)
    state = [] if made.state.finished else [made.state.in_words]
    for line in (*state, *made.headline, *([made.note] if made.note else [])):
        print_prose(line, width)
    files = {"figure": made.picture, "report": made.page}
    written = {what: str(path) for what, path in files.items() if path}
    for what, path in written.items():
        print(f"{what}: {path}")
    print_prose(made.answer, width)
    counts = made.counts
    if counts.failed:
        say(f"headwise: {counts.failed} of {len(made.points)} checks do not hold")
    return {
        "experiment": made.experiment.name,
        "preset": made.preset,
        "store": str(made.store.path),
        "runs": counts.runs,
        "made": counts.made,
        **({"missing": counts.missing} if show else {}),
        **({} if made.state.finished else {"later": made.state.later}),
        "taken": counts.taken,
        "points": [plain_point(point) for point in made.points],
        "answer": made.answer,
        **({"failed": counts.failed} if counts.failed else {}),
        **written,
    }
