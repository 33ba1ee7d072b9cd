"""One recommendation at full length for text at 10 million parameters, within 20 minutes on one
H200: which heads, how many layers, grouped keys or not?

    python dev/choose_text.py --out FOLDER               # python 3.12, torch 2.11, nothing else
    python dev/choose_text.py --out FOLDER --tiny        # the same way in a minute on a CPU

The text is what every machine has: the sources of Python's standard library and of PyTorch, in
order of their names, cut after 40 MB; its digest is in every row, so another machine's rows are
another question's. Runs are resumable: the same command resumes, and says the same as
an undisturbed one. FOLDER gets rows.jsonl, choice.json, choice.txt and, where Plotly and Jinja2 are
there, report.html. Several processes may share a store, and then share the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sysconfig
from pathlib import Path

from headwise.choosing.recommend import choose
from headwise.choosing.trainings import decoder, text
from headwise.policies import Budget, spend_on_ffn
from headwise.shape import Shape
from headwise.store import Store

BYTES = 40_000_000
# layers, heads, KV heads, rank: what varies; the feed-forward brings all to the same parameters
DESIGNS = (
    (6, 3, 3, 128),
    (6, 6, 6, 64),
    (6, 12, 12, 32),
    (6, 6, 2, 64),
    (4, 6, 6, 64),
    (8, 6, 6, 64),
)


def corpus(folder: Path, size: int) -> Path:
    """Sources of Python and PyTorch as one text."""
    path = folder / "python.txt"
    if path.exists():
        return path
    places = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    places[1] = places[1] / "torch"
    folder.mkdir(parents=True, exist_ok=True)
    written = 0
    temporary = folder / "python.part"
    with temporary.open("w", encoding="utf-8") as out:
        for place in places:
            for source in sorted(place.rglob("*.py")):
                if "site-packages" in source.relative_to(place).parts or written > size:
                    continue
                found = source.read_text(encoding="utf-8", errors="ignore")
                out.write(found)
                written += len(found)
    os.replace(temporary, path)
    return path


def shapes(dim: int, params: int) -> list[Shape]:
    """The designs at a width, all of the same number of parameters."""
    out = []
    for depth, heads, kv, rank in DESIGNS:
        rank = rank * dim // 384
        base = decoder("", dim=dim, depth=depth, heads=heads, rank=rank, ffn_dim=dim)
        base = base.replace(num_kv_heads=kv)
        out.append(spend_on_ffn(base, Budget(kind="params", target=params)))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=1140.0, help="time there is, in all")
    parser.add_argument("--store", type=Path, default=Path("choose-text-store"))
    parser.add_argument("--steps", type=int, default=1000, help="of a training; default 1000")
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    args = parser.parse_args()
    if args.tiny:
        source = corpus(args.out, 200_000)
        asked = text(source, steps=20, length=64, batch_tokens=256, eval_tokens=2048, evals=10)
        raced = shapes(48, 150_000)
    else:
        source = corpus(args.out, BYTES)
        asked = text(
            source, steps=args.steps, length=512, batch_tokens=32_768, eval_tokens=1 << 19,
            precision="bf16", evals=10,
        )  # fmt: skip
        raced = shapes(384, 10_000_000)
    found = choose(
        asked,
        shapes=raced,
        rates=(0.001, 0.002, 0.004),
        trials=3,
        seeds=4 if args.tiny else 12,
        seconds=args.seconds,
        store=args.store,
        command="python dev/choose_text.py",
    )
    print(found)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "choice.txt").write_text(f"{found}\n")
    (args.out / "choice.json").write_text(json.dumps(found.to_json(), indent=1) + "\n")
    rows = Store(args.store).rows()
    (args.out / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    if found.page:
        shutil.copy(found.page, args.out / "report.html")


if __name__ == "__main__":
    main()
