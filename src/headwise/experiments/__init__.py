"""Experiments: one file per figure or table, each ending in `EXPERIMENT = Experiment(...)`.

`base.py` says what an experiment is, `runner.py` makes one. The modules are imported when they are
asked for, and none of them loads torch before something is trained or computed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headwise.errors import UsageError, nearest, one_line
from headwise.experiments.base import Experiment
from headwise.files import USER_FILE, load_user_file

# name -> its module, in the order in which `headwise list` shows them
EXPERIMENTS: dict[str, str] = {
    "fig1": "rank_paper.fig1",
    "learned": "rank_paper.learned",
    "length": "rank_paper.length",
    "positions": "rank_paper.positions",
    "dimension": "rank_paper.dimension",
    "regression": "rank_paper.regression",
    "features": "rank_paper.features",
    "representation": "rank_paper.representation",
    "theory": "rank_paper.theory",
    "conditioning": "leaner_paper.conditioning",
    "map": "leaner_paper.budget_map",
    "leaner": "leaner_paper.leaner",
    "removable": "leaner_paper.removable",
    "nanochat_heads": "nanochat_heads",
    "finetune": "leaner_paper.finetune",
    "thin_keys": "thin_keys",
}
# what other commands and Python leave in a store: shown, not run
PAGES = {"pretrain": "pretrained", "other_runs": "other_runs"}


def find(name: str) -> Experiment[Any, Any]:
    """An experiment by its name, or the `EXPERIMENT` of a Python file."""
    if name in EXPERIMENTS:
        return built_in(EXPERIMENTS[name])
    if not name.endswith(".py"):
        raise UsageError(
            f"unknown experiment {name!r}; {nearest(name, EXPERIMENTS)}, or a Python file"
        )
    return from_file(Path(name))


def from_file(path: Path) -> Experiment[Any, Any]:
    """The experiment in a Python file: its `EXPERIMENT`, or the one Experiment in it."""
    if not path.is_file():
        raise UsageError(f"there is no experiment file at {path}")
    try:
        module = load_user_file(path)
    except UsageError:
        raise
    except (Exception, SystemExit) as e:
        raise UsageError(
            f"{path} cannot be loaded: {type(e).__name__}: {' '.join(str(e).split())}"
        ) from None
    # A file may import experiments under several names, so values count once.
    names = vars(module)
    found = {id(v): v for v in names.values() if isinstance(v, Experiment)}
    named = names.get("EXPERIMENT")
    if named is not None and not isinstance(named, Experiment):
        raise UsageError(f"EXPERIMENT in {path} must be an Experiment, got {named!r:.60}")
    if named is None and len(found) != 1:
        raise UsageError(
            f"{path} needs one value EXPERIMENT = Experiment(...); it has {len(found)} "
            f"experiments. A task of your own goes behind an experiment: headwise run map {path}"
        )
    experiment = next(iter(found.values())) if named is None else named
    if experiment.name in EXPERIMENTS or experiment.name in PAGES:
        raise UsageError(
            f"an experiment of your own needs a name of its own; {experiment.name} in {path} is "
            "one of headwise's"
        )
    return experiment


def built_in(module: str) -> Experiment[Any, Any]:
    """The experiment of one of the modules here."""
    return importlib.import_module(f"headwise.experiments.{module}").EXPERIMENT


# ---- mistakes in a user's own code

MISTAKES = (
    TypeError,
    AttributeError,
    LookupError,
    ValueError,
    ArithmeticError,
    AssertionError,
    NameError,
    RecursionError,
    NotImplementedError,
    SystemExit,
)


@contextlib.contextmanager
def own_mistakes(experiment: str) -> Iterator[None]:
    """What a user's own task, model or experiment raises while it runs is one line with its place.
    An experiment of one's own is also to blame for what headwise cannot use of it."""
    try:
        yield
    except UsageError:
        raise
    except MISTAKES as e:
        place = _user_line(e) or ("" if experiment in EXPERIMENTS else experiment)
        if not place or os.environ.get("HEADWISE_TRACEBACK"):
            raise
        raise UsageError(f"{place}: {one_line(e)} (HEADWISE_TRACEBACK=1 shows where)") from None


def _user_line(error: BaseException) -> str:
    """The last line of a user's file that an error passed through; empty: there is none."""
    lines = [
        f"{Path(frame.f_code.co_filename).name} line {number}"
        for frame, number in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).startswith(USER_FILE)
    ]
    return lines[-1] if lines else ""
