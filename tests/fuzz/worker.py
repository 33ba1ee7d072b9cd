"""Cases run one after another in one process, each in a folder of its own; what breaks is said.

Reads a case per line (JSON), writes what it found per line. A case has 20 seconds, an address space
of 2 GiB beyond what is there, and must leave everything as it was but what its command writes.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from headwise.cli import main as headwise_main
from headwise.errors import UsageError
from headwise.integrations.nanochat.checkpoints import read as read_nanochat
from headwise.integrations.nanochat.command import main as nanochat_main
from headwise.lm import load_decoder
from headwise.tasks import task_of
from tests.fuzz.cases import Case, from_json, lay_out

SECONDS = 20
GROWTH = 1 << 30  # bytes
MOST_LINES, MOST_COLUMNS = 8, 1000  # of an error; a message is cut to about 1,000
WRITTEN = re.compile(  # what commands may write or replace where it was
    r"store\d?/(report\.html|[\w-]+\.(png|svg|pdf)|headwise\.json|experiments/[\w.-]+\.json"
    r"|rows\.(csv|parquet)|tensorboard/.*"
    r"|groups/\w+/(cancel|attempts\.json|\w+\.beat|log\.\d+)"
    r"|tokens/.*|runs/\w+/(lock|run\.json|source\.json|weights\.safetensors|rows\.jsonl"
    r"|checkpoint\.(safetensors|damaged)))"
)
GROWS = re.compile(r"store\d?/runs/\w+/rows\.jsonl")
GONE = re.compile(r"store\d?/runs/\w+/(checkpoint\.(safetensors|damaged)|lease\.\d+)|(.*/)?\.[^/]+")
OUTPUT = re.compile(r"[\w-]+\.(png|svg|pdf|html)|(headwise-store|row)/.*")
INSIDE = "HEADWISE_TRACEBACK=1"  # main's word for an error that no check foresaw


class Hang(BaseException):
    """A case that took too long."""


def outcome(case: Case, folder: Path, template: Path) -> tuple[list[str], int, str]:
    """What a case broke, its exit code, and the end of what it printed on standard error."""
    if case.store:
        shutil.copytree(template, folder / "store")
    lay_out(case, folder)
    before, children = snapshot(folder), processes()
    temporary = folder.parent / "temporary"
    temporary.mkdir(exist_ok=True)
    reset_peak()
    start = memory("VmRSS")
    code, err, found = run(case, folder, temporary)
    grown = memory("VmHWM") - start
    if grown > GROWTH:
        found.append(f"memory: grew by {grown >> 20:,} MiB")
    if left := processes() - children:
        found.append(f"processes: {len(left)} left behind")
    kept = (p.name for p in temporary.iterdir() if not p.name.startswith("torchinductor"))
    if litter := sorted(kept):
        found.append(f"litter: {litter[:3]} in the folder for temporary files")
        shutil.rmtree(temporary)
    found += changes(before, snapshot(folder), case)
    return found + of_exit(case, code, err), code, err[-1500:]


def run(case: Case, folder: Path, temporary: Path) -> tuple[int, str, list[str]]:
    """Exit code, standard error, and what went wrong on the way."""
    main = {"headwise": headwise_main, "nanochat": nanochat_main, "python": in_python}[case.command]
    found: list[str] = []
    code = -1
    home = Path.cwd()
    with captured() as said, environment({**case.environment, "TMPDIR": str(temporary)}):
        os.chdir(folder)
        try:
            with limits():
                code = main(list(case.words))
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else 1
        except Hang as e:
            found.append(f"hang: more than {SECONDS} s, in {where(e)}")
        except BaseException as e:
            found.append(f"traceback: {type(e).__name__}: {str(e)[:150]!r}, in {where(e)}")
        finally:
            os.chdir(home)
    err, out = said
    if control(out):
        found.append("answer: control characters on the terminal")
    return code, err, found


def in_python(words: Sequence[str]) -> int:
    """What has no command of its own: nanochat's checkpoints, a finished decoder, a task's data."""
    what, name, *rest = words
    try:
        if what == "nanochat":
            read_nanochat(name, *map(int, rest))
        elif what == "decoder":
            load_decoder(name)
        else:
            task = task_of(name, json.loads(rest[0]))
            for step in (0, None):
                task.sample(torch.Generator().manual_seed(0), 3, step)
            task.baselines()
    except UsageError as e:
        # In Python a message is the caller's; what a terminal shows is the commands' concern.
        print(f"python: error: {str(e)[:300]!a}", file=sys.stderr)
        return 2
    return 0


def of_exit(case: Case, code: int, err: str) -> list[str]:
    """What is wrong with an exit code and with what stands on standard error."""
    found = []
    lines = err.splitlines()
    if "Traceback (most recent call last)" in err:
        found.append("traceback: printed")
    if len(lines) > MOST_LINES:
        found.append(f"error: {len(lines)} lines")
    if wide := [len(line) for line in lines if len(line) > MOST_COLUMNS]:
        found.append(f"error: a line of {max(wide)} characters")
    if control(err):
        found.append("error: control characters on the terminal")
    if code == -1:
        return found
    if code not in (0, 1, 2):
        found.append(f"exit: {code}")
    if code == 1 and INSIDE in err:
        found.append(f"exit: {code} by an error that no check foresaw: {lines[-1][:200]}")
    elif code == 2 and not re.search(r"(^|\s)(error|refused): ", err):
        found.append("exit: 2 without a word")
    elif code == 1 and not err and case.words[0] not in ("check", "plan"):
        found.append("exit: 1 without a word")
    wanted = {"bad": (2,), "good": (0,), "any": (0, 1, 2)}[case.expected]
    if code in (0, 1, 2) and code not in wanted:
        found.append(f"exit: {code}, expected {wanted[0]}: {err.strip()[-200:]}")
    return found


def control(text: str) -> bool:
    """Whether a terminal would hear more than lines."""
    return re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", text.replace("\r", "")) is not None


def where(error: BaseException) -> str:
    """The last line of headwise that an error passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/headwise/" in f.filename] or list(frames)
    return f"{ours[-1].filename.rpartition('/headwise/')[2]}:{ours[-1].lineno}" if ours else "?"


# ---- what is there before and after


def snapshot(folder: Path) -> dict[str, bytes | str]:
    """Every file of a folder by its bytes; what is no file by what it is."""
    found: dict[str, bytes | str] = {}
    for root, folders, names in os.walk(folder):
        for name in (*names, *folders):
            path = Path(root) / name
            key = str(path.relative_to(folder))
            if path.is_symlink():
                found[key] = f"link {os.readlink(path)}"
            elif path.is_file():
                with suppress(OSError):
                    found[key] = path.read_bytes()
            elif not path.is_dir():
                found[key] = "special"
    return found


def changes(before: dict[str, bytes | str], after: dict[str, bytes | str], case: Case) -> list[str]:
    """Files that were lost, changed or left where nothing may be."""
    # An option may say where to write, as --output FILE or --output=FILE.
    named = {*case.words, *(word.rpartition("=")[2] for word in case.words)}

    def output(name: str) -> bool:
        above = {str(path) for path in (Path(name), *Path(name).parents)}
        return OUTPUT.fullmatch(name) is not None or bool(above & named)

    found = []
    for name, content in before.items():
        left = after.get(name)
        if left is None and not GONE.fullmatch(name):
            found.append(f"lost: {name} is gone")
        elif left is not None and left != content:
            grown = (
                isinstance(left, bytes) and isinstance(content, bytes) and left.startswith(content)
            )
            rows = GROWS.fullmatch(name)
            if not (grown if rows else WRITTEN.fullmatch(name) or OUTPUT.fullmatch(name)):
                found.append(f"lost: {name} is changed")
    for name in after.keys() - before.keys():
        if "RAN" in Path(name).name and not case.code:
            found.append(f"code: {name} was written by data")
        elif not WRITTEN.fullmatch(name) and not output(name):
            found.append(f"litter: {name}")
    return found


def processes() -> set[str]:
    """This process's children."""
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            found |= set((task / "children").read_text().split())
    return found


# ---- memory, time and streams


def memory(name: str) -> int:
    """VmRSS, VmHWM (the largest VmRSS) or VmSize of this process in bytes."""
    with open("/proc/self/status") as f:
        line = next(line for line in f if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def reset_peak() -> None:
    with suppress(OSError), open("/proc/self/clear_refs", "w") as f:
        f.write("5")


@contextmanager
def limits() -> Iterator[None]:
    """A bound on time and memory."""

    def late(number: int, frame: Any) -> None:
        raise Hang

    handler = signal.signal(signal.SIGALRM, late)
    timer = signal.setitimer(signal.ITIMER_REAL, SECONDS, 1)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory("VmSize") + 2 * GROWTH, hard))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


@contextmanager
def captured() -> Iterator[list[str]]:
    """Standard output and error go into files; at the end the list has what is in the error's and
    in the other's."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        sys.stdout.flush()
        sys.stderr.flush()
        streams, kept = (sys.stdout, sys.stderr), (os.dup(1), os.dup(2))
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False, errors="backslashreplace")
        said: list[str] = []
        try:
            yield said
        finally:
            sys.stdout.close()
            sys.stderr.close()
            sys.stdout, sys.stderr = streams
            for saved, place in zip(kept, (1, 2), strict=True):
                os.dup2(saved, place)
                os.close(saved)
            for stream in (err, out):
                stream.seek(0)
                said.append(stream.read(1 << 22).decode(errors="replace"))


@contextmanager
def environment(changes: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    tempfile.tempdir = None
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        tempfile.tempdir = None


def serve(words: Sequence[str]) -> None:
    """Run the cases of standard input; the answers go to the standard output of before."""
    folder, template = Path(words[0]), Path(words[1])
    # A case may close the streams; these are its worker's own.
    cases, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    for number, line in enumerate(cases):
        place = folder / f"{os.getpid()}-{number}"
        place.mkdir(parents=True)
        found, code, err = outcome(from_json(json.loads(line)), place, template)
        if (threads := threading.active_count()) > 20:
            found.append(f"processes: {threads} threads left behind")
        shutil.rmtree(place, ignore_errors=True)
        answers.write(json.dumps({"found": found, "code": code, "err": err}) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(sys.argv[1:])
