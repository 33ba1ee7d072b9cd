"""A campaign: `python -m tests.fuzz --cases 1000 --seed 1`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter

from tests.fuzz.campaign import Workers
from tests.fuzz.cases import to_json
from tests.fuzz.generator import NAMES, case_of
from tests.fuzz.kept import close, keep


def main() -> int:
    """Run the cases, print what they broke by kind, and keep each that broke something."""
    known = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    known.add_argument("--cases", type=int, default=1000)
    known.add_argument("--seed", type=int, default=0)
    known.add_argument("--group", choices=NAMES, help="cases of this group alone")
    known.add_argument("--number", type=int, help="this case alone, with all that it printed")
    known.add_argument("--keep", action="store_true", help="write what fails into the corpus")
    known.add_argument(
        "--close", action="store_true", help="run what is open in the corpus, close what holds"
    )
    args = known.parse_args()
    if args.close:
        with Workers() as workers:
            print("open still:", ", ".join(close(workers)) or "none")
        return 0
    numbers = range(args.cases) if args.number is None else [args.number]
    start, codes, broken = time.monotonic(), Counter[tuple[str, int]](), 0
    with Workers() as workers:
        for number in numbers:
            name, case = case_of(args.seed, number, workers.template / "store")
            if args.group not in (None, name):
                continue
            result = workers.run(case)
            codes[name, result.code] += 1
            if args.number is not None:
                print(json.dumps(to_json(case), indent=1), result.err, sep="\n")
            if result.found:
                broken += 1
                lines = [f"{args.seed}/{number} {name}: {' '.join(case.words)[:160]!r}"]
                print("\n    ".join([*lines, *result.found]), flush=True)
                if args.keep:
                    keep(f"{name}-{args.seed}-{number}", case, result.found)
    for name in sorted({name for name, _ in codes}):
        shown = ", ".join(f"{n} exit {code}" for (g, code), n in sorted(codes.items()) if g == name)
        print(f"{name:>20}  {shown}")
    seconds = time.monotonic() - start
    print(f"{sum(codes.values())} cases, {broken} broke something, {seconds:.0f} s")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
