"""Runs that wait for minutes on a GPU, the most informative first: evidence that the pages of docs/
lack.

    PYTHONPATH=src python dev/gpu_queue.py --out FOLDER --seconds 500 --rows results/fig1/*.jsonl

First comes the recommendation for text (dev/choose_text.py). It takes what time there is, saves
and resumes: the same command again, with its store at hand, until its answer is not "time was up".

Every other entry is one `headwise run` with the seconds it takes on one H200. An entry starts only
if it can end in time. Its rows are written to FOLDER/<name>.jsonl when it ends; what earlier rows
hold (`--rows`) is not made again, so the queue resumes by itself.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Entry:
    """One experiment of the queue: the seconds it takes, what it settles, and its words on the
    command line."""

    name: str
    seconds: int
    settles: str
    words: str


CHOICE = "choose-text"
SEARCH = 1140  # seconds of its search
LEAST = 60  # seconds that are worth beginning it for
FIGURE = "fig1 --preset paper --set protocols=stream"
THIN = "thin_keys --preset paper --set"
QUEUE = (
    Entry(
        "fig1-one-layer-small",
        150,
        "one layer at d^2 and d^2.5: rates above 0.01, the top of the grid so far; four seeds",
        f"{FIGURE} depths=1 widths=1,8 ranks=64,32,8 rates=1,3,10,30 --seeds 4",
    ),
    Entry(
        "fig1-one-layer-large",
        240,
        "the same at d^3: the denominator of every ratio between full and low rank",
        f"{FIGURE} depths=1 widths=64 ranks=64,32 rates=1,3,10,30 --seeds 4",
    ),
    Entry(
        "fig1-three-layers-d2",
        190,
        "whether three layers at d^2 are tuned at 0.01",
        f"{FIGURE} depths=3 widths=1 ranks=64,32,8 rates=0.1,0.3,1,3 --seeds 4",
    ),
    Entry(
        "fig1-three-layers-d2.5",
        310,
        "the same at d^2.5",
        f"{FIGURE} depths=3 widths=8 ranks=64,32,8 rates=0.1,0.3,1,3 --seeds 4",
    ),
    Entry(
        "fig1-five-layers-d2",
        290,
        "why five layers at d^2 do worse than the three they contain",
        f"{FIGURE} depths=5 widths=1 ranks=64,32,8 rates=0.1,0.3,1 --seeds 4",
    ),
    Entry(
        "fig1-five-layers-d2.5",
        510,
        "five layers at d^2.5: four seeds at a rate inside its grid",
        f"{FIGURE} depths=5 widths=8 ranks=64,32,8 rates=0.1,0.3,1 --seeds 4",
    ),
    # Thin keys, about 45 minutes in all: counted from operations at 15 TFLOP/s, not yet timed. A
    # step has 16,384 candidates for every N, so the batch falls with N.
    Entry(
        "thin-keys-lookup-16-64",
        260,
        "selecting one of 16 and 64 keys: the rank it needs, four seeds at tuned rates",
        f"{THIN} tasks=lookup candidates=16,64",
    ),
    Entry(
        "thin-keys-farthest-16-256",
        200,
        "comparing 16, 64 and 256 whole vectors: whether any rank below d is enough",
        f"{THIN} tasks=farthest candidates=16,64,256",
    ),
    Entry(
        "thin-keys-lookup-256",
        210,
        "selecting one of 256 keys: where log2 N and d/4 part",
        f"{THIN} tasks=lookup candidates=256 batch=64",
    ),
    Entry(
        "thin-keys-lookup-1024",
        350,
        "selecting one of 1,024 keys",
        f"{THIN} tasks=lookup candidates=1024 batch=16",
    ),
    Entry(
        "thin-keys-farthest-1024",
        180,
        "comparing 1,024 whole vectors",
        f"{THIN} tasks=farthest candidates=1024 batch=16",
    ),
    Entry(
        "thin-keys-lookup-4096-low",
        480,
        "selecting one of 4,096 keys at ranks 1 to 4, which lie below log2 N",
        f"{THIN} tasks=lookup candidates=4096 batch=4 ranks=1,2,4",
    ),
    Entry(
        "thin-keys-lookup-4096-high",
        450,
        "the same at higher ranks",
        f"{THIN} tasks=lookup candidates=4096 batch=4 ranks=8,32",
    ),
    Entry(
        "thin-keys-farthest-4096",
        520,
        "comparing 4,096 whole vectors",
        f"{THIN} tasks=farthest candidates=4096 batch=4",
    ),
)


def rows_of(store: Path) -> str:
    """The last row of every run in a store, one JSON object per line."""
    files = sorted(store.glob("runs/*/rows.jsonl"))
    return "".join(f"{path.read_text().splitlines()[-1]}\n" for path in files)


def choose_text(out: Path, stores: Path, left: float, more: list[str]) -> str:
    """The search for a shape on text, in what time is left; returns how it stands."""
    folder, store, done = out / CHOICE, stores / CHOICE, out / f"{CHOICE}.jsonl"
    answer = folder / "choice.json"
    if done.exists() or left < LEAST:
        return "done before" if done.exists() else "no time"
    left = min(left - 20, SEARCH)
    words = [sys.executable, str(Path(__file__).parent / "choose_text.py"), *more]
    words += ["--out", str(folder), "--store", str(store), "--seconds", f"{left:.0f}"]
    code = subprocess.call(words)
    if code or not answer.exists():
        return f"exit {code}"
    found = json.loads(answer.read_text())
    if found["ended"] == "time":
        return f"saved after {found['spent']['seconds']:.0f} s more; the same command resumes"
    done.write_text((folder / "rows.jsonl").read_text())
    return f"ended: {found['ended']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the rows")
    parser.add_argument("--seconds", type=float, default=500.0, help="time there is, in all")
    parser.add_argument("--rows", nargs="*", default=[], help="rows made before")
    parser.add_argument("--stores", type=Path, default=Path("gpu-queue-stores"))
    parser.add_argument("--only", default="", help="names that begin so")
    parser.add_argument("--list", action="store_true", help="show the queue and stop")
    parser.add_argument("--tiny", action="store_true", help="the search small enough for a CPU")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    if args.list:
        print(f"{CHOICE:24} {SEARCH:4} s  which shape of ten million parameters is best on text")
    elif CHOICE.startswith(args.only):
        words = ["--tiny"] if args.tiny else []
        said = choose_text(args.out, args.stores, end - time.monotonic(), words)
        print(f"{CHOICE}: {said}", flush=True)
    for entry in QUEUE:
        if args.list:
            print(f"{entry.name:24} {entry.seconds:4} s  {entry.settles}")
            continue
        done = args.out / f"{entry.name}.jsonl"
        left = end - time.monotonic()
        if not entry.name.startswith(args.only) or done.exists() or left < entry.seconds:
            continue
        store, given = args.stores / entry.name, ["--rows", *args.rows] if args.rows else []
        command = [sys.executable, "-m", "headwise", "run", *entry.words.split(), "--no-report"]
        began = time.monotonic()
        code = subprocess.call([*command, "--store", str(store), *given], timeout=left)
        args.out.mkdir(parents=True, exist_ok=True)
        done.write_text(rows_of(store))
        print(f"{entry.name}: exit {code}, {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
