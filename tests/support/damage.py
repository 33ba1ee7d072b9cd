"""A small store with a file of every kind, a bit of it flipped, and what commands make of it."""

import contextlib
import io
import random
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.commands import TINY, sets
from support.lm_runs import bits, stop

from headwise.cli import main
from headwise.digests import read_signed
from headwise.errors import UsageError
from headwise.lm.checkpoint import load_decoder
from headwise.lm.spec import Pretraining
from headwise.store import Store
from headwise.training.engine import train
from headwise.training.run import Run

# an experiment of one's own with a task of one's own: its page and its code's digest are stored
OWN = """
from dataclasses import dataclass

from headwise import Farthest, Recipe, Run, Shape
from headwise.experiments.base import Experiment, Settings
from headwise.experiments.points import Measured, interval
from headwise.show.figure import Line, LineFigure, LinePanel


@dataclass(frozen=True)
class Own(Farthest):
    name = "own-farthest"


@dataclass(frozen=True, kw_only=True)
class Points(Settings):
    seeds: int = 1


@dataclass(frozen=True, kw_only=True)
class One(Measured):
    what: str


def runs(settings):
    recipe = Recipe(steps=2, epoch=1, batch=4, held_out=8)
    return [Run(Shape(dim=4, depth=1, num_heads=1, ffn_dim=4), Own(4, 3), recipe, 0)]


def summary(rows):
    return [One(what="all", n=len(rows), **interval([row["held_out"] for row in rows]))]


def figure(points):
    line = Line(label="error", colour=0, x=[1], y=[points[0].held_out])
    panel = LinePanel(title="all", lines=[line])
    return LineFigure(title="own", x_label="x", y_label="error", panels=[panel])


EXPERIMENT = Experiment(
    name="own",
    question="Does it run?",
    about="one run",
    presets={"quick": Points()},
    columns=(("what", "what"), ("held_out", "error"), ("n", "n")),
    runs=runs,
    summary=summary,
    headline=lambda points: [f"error {points[0].held_out:.3f}"],
    figure=figure,
)
"""


RATES = (0.01, 0.02)  # of the two decoders


class Stopped(Exception):
    """A kill that leaves the test alive."""


@dataclass(frozen=True)
class Damaged:
    """What is needed to try a store: where it is, what its rows are once everything is made, and
    the commands that use a file."""

    path: Path
    text: Path
    own: Path
    rows: dict[str, str]

    def files(self) -> dict[str, list[Path]]:
        """The store's files by kind."""
        kinds: dict[str, list[Path]] = {}
        for path in sorted(p for p in self.path.rglob("*") if p.is_file() and p.stat().st_size):
            folder = path.relative_to(self.path).parts[0]
            kind = folder if folder in ("experiments", "tokens") else path.name
            kinds.setdefault(kind, []).append(path.relative_to(self.path))
        return kinds

    def run_words(self, store: Path, *more: str) -> list[str]:
        words = ["run", "fig1", "--device", "cpu", "--store", str(store), "--workers", "1"]
        return [*words, "--seeds", "1", "--no-report", *sets(TINY), *more]

    def own_words(self, store: Path) -> list[str]:
        words = ["run", str(self.own), "--device", "cpu", "--store", str(store), "--workers", "1"]
        return [*words, "--no-report"]

    def pretrain_words(self, store: Path, rate: float) -> list[str]:
        words = ["pretrain", "--device", "cpu", "--text", str(self.text), "--store", str(store)]
        sizes = {"steps": 3, "batch-tokens": 32, "length": 8, "evals": 1, "eval-tokens": 64}
        words += [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
        return [*words, "--lr", str(rate), "--set", "dim=8", "depth=1", "num_heads=1"]


def store_of_all_kinds(folder: Path) -> Damaged:
    """A store with finished and unfinished runs of every sort."""
    path, text, own = folder / "store", folder / "book.txt", folder / "own.py"
    rng = random.Random(3)
    text.write_text(" ".join(rng.choices(["one", "two", "three", "four"], k=400)))
    own.write_text(OWN)
    about = Damaged(path, text, own, {})
    commands = [about.run_words(path), about.own_words(path)]
    commands += [about.pretrain_words(path, rate) for rate in RATES]
    for words in commands:
        code, said = answered(words)
        assert code == 0, said
    assert answered(["report", "--store", str(path)])[0] == 0
    rows = {row["id"]: bits(row) for row in Store(path).rows()}

    # One run of either sort is made unfinished again: with a checkpoint, without its row.
    unfinished: dict[bool, Run | Pretraining] = {}
    for spec_path in sorted(path.glob("runs/*/run.json")):
        spec = read_signed(spec_path)
        decoder = "batch_tokens" in spec
        if decoder or spec["task"]["name"] == "farthest":
            unfinished[decoder] = Pretraining.of(spec) if decoder else Run.of(spec)
    for run in unfinished.values():
        folder = path / "runs" / run.id
        for left in ("rows.jsonl", "weights.safetensors"):
            (folder / left).unlink(missing_ok=True)
        if isinstance(run, Pretraining):
            stop(run, 2, path / "runs")
        else:
            _stop(run, folder)
        assert (folder / "checkpoint.safetensors").exists()
    return Damaged(path, text, own, rows)


def _stop(run: Run, folder: Path) -> None:
    """Train until there is a checkpoint."""

    def advance(_: int) -> None:
        if (folder / "checkpoint.safetensors").exists():
            raise Stopped

    with pytest.raises(Stopped):
        train([run], device="cpu", folder=folder.parent, checkpoint_every=0, advance=advance)


# ---- one trial


def answered(words: list[str]) -> tuple[int, str]:
    """A command's exit code, and what it says on standard error."""
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        code = main(words)
    return code, err.getvalue()


def flipped(path: Path, bit: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def commands_of(about: Damaged, store: Path, name: Path) -> list[list[str]]:
    """The commands that read a file of a store, those that show before those that resume."""
    shown = [["list", "--store", str(store)], ["report", "--store", str(store)]]
    fig1 = about.run_words(store)
    decoders = [about.pretrain_words(store, rate) for rate in RATES]
    spec = store / "runs" / name.parts[1] / "run.json" if name.parts[0] == "runs" else None
    text = spec.read_bytes().decode(errors="replace") if spec else ""
    if name.parts[0] == "tokens" or "batch_tokens" in text:
        return [*shown, *decoders]
    if "own" in name.name or "own-farthest" in text:
        return [*shown, about.own_words(store)]
    return [*shown, [*fig1, "--no-train"], fig1]


def trial(about: Damaged, store: Path, name: Path, bit: int) -> str:
    """What a flipped bit in a copy of the store leads to: "harmless" or "named"; anything else is
    an AssertionError."""
    shutil.rmtree(store, ignore_errors=True)
    shutil.copytree(about.path, store)
    words = commands_of(about, store, name)
    before = _state(store)
    flipped(store / name, bit)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            after = _state(store)
        except UsageError as e:
            after = {}
            print(e, file=sys.stderr)
    where = f"bit {bit} of {name}"
    for command in words:
        code, err = answered(command)
        said.write(err)
        assert code in (0, 2), (where, command, code, err)
        assert "Traceback" not in err, (where, err)
    text = said.getvalue()
    path = store / name
    sentences = (
        f"{path} ",
        f"it is kept as {path.with_suffix('.damaged')}",
        f"{path.with_suffix('')}.ids ",  # of a text's ids
        f"{path.with_suffix('')}.json ",
        f"{path.parent} holds no weights",
        f"{store} is not a headwise store: its {name} ",
        f"store {store} has format ",
    )
    named = any(sentence in text for sentence in sentences)
    assert named or after == before, (where, "silently other", text)
    # What was left out is made again, to the same bits; a run is missing only where the command
    # was refused by name.
    if not (named and "headwise: error: " in text):
        rows = {row["id"]: bits(row) for row in Store(store).rows()}
        made = {run_id: row for run_id, row in about.rows.items() if run_id in rows}
        assert rows == made, (where, "other rows")
        assert name.parts[0] != "runs" or name.parts[1] in rows, (where, "not made again")
    return "named" if named else "harmless"


def _state(path: Path) -> dict[str, object]:
    """What a store holds, as Python reads it."""
    store = Store(path, create=False)
    held: dict[str, object] = {row["id"]: bits(row) for row in store.rows()}
    held["experiments"] = store.experiments()
    for weights in sorted(path.glob("runs/*/weights.safetensors")):
        decoder = load_decoder(weights.parent)
        held[f"weights {weights.parent.name}"] = [p.tolist() for p in decoder.parameters()]
    return held
