"""The damaged and hostile checkpoints of `mutated_checkpoints`, each converted; run as a program,
which prints what came of them as JSON."""

import json
import resource
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from support.mutated_checkpoints import cases
from support.planted_heads import dense

from headwise import UsageError
from headwise.converting.convert import convert
from headwise.diagnose.checkpoints import open_checkpoint


def wrong(source, out, sizes):
    """Whether a written checkpoint is not what its source says it must be."""
    old, new = open_checkpoint(source), open_checkpoint(out)
    a, b = old.heads(0), new.heads(0)
    before = dense(a.q, a.k), dense(a.o, a.v)
    after = dense(b.q, b.k), dense(b.o, b.v)
    if "num_heads" in sizes:  # twice as many, the same function
        after = after[0][::2], after[1].unflatten(0, (-1, 2)).sum(1)
        scale = sum(float(t.norm()) for t in before) + 1e-300
        return sum(float((x - y).norm()) for x, y in zip(before, after, strict=True)) > 1e-6 * scale
    return b.q.shape[1] != sizes["head_dim"] or b.v.shape[1] != sizes["v_head_dim"]


def main(count, seed):
    """How many were refused, written rightly, or neither; what lies about; peak memory; whether
    code ran."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    out = {"refused": 0, "written": 0, "wrong": [], "other": [], "long": [], "left": []}
    with tempfile.TemporaryDirectory() as name:
        folder, place = Path(name) / "sources", Path(name) / "results"
        folder.mkdir()
        place.mkdir()
        start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number, source in cases(count, seed, folder):
            sizes = {"num_heads": 12} if number % 3 else {"head_dim": 4, "v_head_dim": 4}
            try:
                convert(source, out=place / "new", **sizes)
                out["written"] += 1
                if wrong(source, place / "new", sizes):
                    out["wrong"].append(number)
                shutil.rmtree(place / "new")
            except UsageError as error:
                out["refused"] += 1
                if "\n" in str(error) or len(str(error)) > 1000:
                    out["long"].append(str(error)[:200])
            except BaseException as error:  # what is asked is that there is none
                out["other"].append(f"{number}: {type(error).__name__}: {error}"[:300])
            if left := list(place.iterdir()):
                out["left"].append(f"{number}: {left[0].name}")
                shutil.rmtree(place)
                place.mkdir()
        out["grown"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) / 2**10
        out["ran"] = (folder / "proof").exists()
    print(json.dumps(out))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
