"""How far a reader has to go to follow the first command: `headwise run fig1`, in small, under a
profiler.

    PYTHONPATH=src python dev/path_profile.py              # four numbers
    PYTHONPATH=src python dev/path_profile.py --path       # and the way: file, function, file, ...
    PYTHONPATH=/path/to/another/checkout python dev/path_profile.py

The command trains four models of width 16 for two steps, in one process, on the CPU, and draws its
figure and page. Every function of the package is noted at its first call. What is counted:

files       files of the package with at least one function that ran
functions   functions that ran (code objects, lambdas among them; not what runs because a module is
            imported)
lines       lines of those functions, nested ones once
switches    in the order of the first calls: how often the next function is in another file. This is
            how often someone who reads along turns to another file.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import sys
import tempfile
import threading
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType

COMMAND = (
    "run fig1 --device cpu --workers 1 --seeds 1 "
    "--set steps=2 depths=1 widths=1,2 ranks=16,8 held_out=64 evals=1 epoch=1 lr=0.01"
)
BODIES = ("<module>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")


class Way:
    """The functions of one package in the order of their first calls."""

    def __init__(self, root: Path) -> None:
        self.root = str(root) + os.sep
        self.codes: dict[CodeType, None] = {}
        self.importing = threading.local()

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if code.co_name == "_find_and_load" and "importlib" in code.co_filename:
            depth: int = getattr(self.importing, "depth", 0)
            self.importing.depth = depth + (event == "call") - (event == "return")
        if getattr(self.importing, "depth", 0):
            return
        if event == "call" and code not in self.codes and code.co_filename.startswith(self.root):
            is_function = bool(code.co_flags & CO_OPTIMIZED)  # the body of a class is none
            if is_function and code.co_name not in BODIES:
                self.codes[code] = None

    def files(self) -> list[str]:
        return [code.co_filename.removeprefix(self.root) for code in self.codes]

    def lines(self) -> int:
        seen: set[tuple[str, int]] = set()
        for code in self.codes:
            numbers = [line for _, _, line in code.co_lines() if line]
            last = max([*numbers, code.co_firstlineno])
            seen |= {(code.co_filename, n) for n in range(code.co_firstlineno, last + 1)}
        return len(seen)


def profile(words: list[str]) -> Way:
    """Run one command of headwise; the way it took."""
    import headwise
    from headwise.cli import main

    way = Way(Path(headwise.__file__).parent)
    threading.setprofile(way)
    sys.setprofile(way)
    try:
        code = main(words)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    if code:
        raise SystemExit(f"the command failed with exit code {code}: headwise {' '.join(words)}")
    return way


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--path", action="store_true", help="print the functions in order as well")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as store, contextlib.redirect_stdout(io.StringIO()):
        way = profile([*COMMAND.split(), "--store", store])
    files = way.files()
    if options.path:
        for before, file, code in zip(["", *files], files, way.codes, strict=False):
            if file != before:
                print(file)
            print(f"    {code.co_qualname}")
    switches = sum(a != b for a, b in itertools.pairwise(files))
    print(f"files {len(set(files))}")
    print(f"functions {len(files)}")
    print(f"lines {way.lines()}")
    print(f"switches {switches}")


if __name__ == "__main__":
    main()
