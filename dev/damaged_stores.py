"""Flipped bits in a small store of every kind of file: each is harmless or named.

    PYTHONPATH=src python dev/damaged_stores.py 200

A trial copies the store, flips one bit of one file, reads the store, and gives the commands that
list, show and resume. It fails on a traceback, on an exit code other than 0 and 2, on what differs
without a line that names the file, and on a row that is not made again to the same bits. Prints the
counts by kind of file. About a second per trial.
"""

import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.damage import store_of_all_kinds, trial


def main(trials: int, seed: int) -> int:
    """Try that many bits, in turn from every kind of file."""
    rng, counts, failed = random.Random(seed), Counter(), []
    with tempfile.TemporaryDirectory() as folder:
        about = store_of_all_kinds(Path(folder))
        kinds = about.files()
        for number in range(trials):
            kind = sorted(kinds)[number % len(kinds)]
            name = rng.choice(kinds[kind])
            bit = rng.randrange(8 * (about.path / name).stat().st_size)
            try:
                counts[kind, trial(about, Path(folder) / "copy", name, bit)] += 1
            except Exception as e:  # a traceback of the command's is what this looks for
                counts[kind, "failed"] += 1
                failed.append(f"bit {bit} of {name}: {type(e).__name__}: {e}")
                print(failed[-1], file=sys.stderr, flush=True)
    for kind in sorted(kinds):
        outcomes = {what: n for (of, what), n in counts.items() if of == kind}
        print(f"{kind:24} {outcomes}")
    print(f"{trials} trials, {len(failed)} failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
