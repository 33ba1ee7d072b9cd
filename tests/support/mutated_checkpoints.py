"""Hundreds of damaged and hostile checkpoints, each opened and inspected; run as a program, which
prints what came of them as JSON."""

import json
import os
import pickle
import random
import resource
import struct
import sys
import tempfile
import warnings
import zipfile
from pathlib import Path

import torch
from support.planted_heads import gguf, planted, separate, write

from headwise import UsageError
from headwise.diagnose.inspection import inspect
from headwise.show.inspect_page import write_inspect_page

MARKUP = "</script><img src=x onerror=alert(1)>"


class Code:
    """What a pickle would run."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.system, (f"touch {self.path}",))


def flipped(data, rng):
    """Some bytes changed, cut off, doubled or zeroed."""
    data = bytearray(data)
    way = rng.randrange(5)
    if way == 0:
        return bytes(data[: rng.randrange(len(data))])
    place = rng.randrange(min(len(data), 600) if way < 3 else len(data))
    if way in (1, 3):
        data[place] ^= 1 << rng.randrange(8)
    elif way == 2:
        data[place : place + 8] = struct.pack("<Q", rng.choice((0, 1, 2**31, 2**63, 2**64 - 1)))
    else:
        data[place:place] = bytes(rng.randrange(1, 40))
    return bytes(data)


NUMBERS = (0, -1, 1, 3, 2**31, 2**62, 10**30, 1.5, True, None, "x", [], {}, float("nan"))


def odd_header(data, rng):
    """A safetensors file whose header says something else."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = rng.choice(sorted(n for n in header if n != "__metadata__"))
    about = header[name]
    way = rng.randrange(6)
    if way == 0:
        about["data_offsets"] = [rng.choice(NUMBERS), rng.choice(NUMBERS)]
    elif way == 1:
        about["shape"] = rng.choice((NUMBERS, [2**40, 2**40], [-1, 5], "x", [0, 29], [29] * 9))
    elif way == 2:
        about["dtype"] = rng.choice((*NUMBERS, "F4", "I64", "F16", MARKUP))
    elif way == 3:  # on top of another one
        about["data_offsets"] = header[sorted(header)[0]]["data_offsets"]
    elif way == 4:
        header[
            rng.choice((MARKUP, "x" * 5000, "", "model.layers.999999.self_attn.q_proj.weight"))
        ] = header.pop(name)
    else:
        header["__metadata__"] = rng.choice(
            ({"run": MARKUP}, {"run": "{}"}, [], {"run": "[" * 9000})
        )
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def odd_config(config, rng):
    config = dict(config)
    key = rng.choice(sorted(config))
    config[key] = rng.choice((*NUMBERS, MARKUP, 7, 64, 100_000))
    return config


def odd_tensors(tensors, rng):
    tensors = {name: t.clone() for name, t in tensors.items()}
    name = rng.choice(sorted(tensors))
    t = tensors[name]
    way = rng.randrange(6)
    if way == 0:
        t[0, 0] = rng.choice((float("nan"), float("inf"), 1e300, 0.0))
    elif way == 1:
        tensors[name] = t[: rng.randrange(1, len(t))]
    elif way == 2:
        tensors[name] = rng.choice((t.flatten(), t[None], t.long(), t * 0, t.T.contiguous()))
    elif way == 3:
        del tensors[name]
    elif way == 4:
        tensors[name.replace("0", rng.choice(("1", MARKUP, "9" * 30)))] = tensors.pop(name)
    else:
        tensors[name] = t * 1e-200
    return tensors


def hostile_pickle(path, tensors, rng, proof):
    """A state dict that would run code, grow, or is none."""
    way = rng.randrange(6)
    if way == 0:
        torch.save({**tensors, "x": Code(proof)}, path)
    elif way == 1:
        path.write_bytes(pickle.dumps({"model": Code(proof)}))
    elif way == 2:  # a bomb: 200 MB of zeros in a few bytes
        torch.save(tensors, path)
        with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data/99", bytes(200 << 20))
    elif way == 3:  # one number that says it is 10^12
        name = sorted(tensors)[0]
        torch.save({**tensors, name: torch.zeros(1).expand(10**6, 10**6)}, path)
    elif way == 4:
        torch.save(rng.choice(([1, 2], 3, {"a": {"b": 1}}, {}, "x", {1: torch.ones(2, 2)})), path)
    else:
        torch.save({n: t.to_sparse() for n, t in tensors.items()}, path)


def cases(count, seed, folder):
    """Paths, made one by one."""
    heads = planted(V=8)
    config, tensors = separate(*heads)
    good = write(folder / "good", config, tensors)
    data = (good / "model.safetensors").read_bytes()
    torch.save(tensors, folder / "good.bin")
    state = (folder / "good.bin").read_bytes()
    about = {"general.architecture": "llama", "llama.attention.head_count": 6,
             "llama.attention.head_count_kv": 3}  # fmt: skip
    blocks = {"attn_q": 0, "attn_k": 1, "attn_v": 2}
    ggufs = gguf(folder / "good.gguf", about, {
        f"blk.0.{n}.weight": heads[i].flatten(0, 1) for n, i in blocks.items()
    }).read_bytes()  # fmt: skip
    for number in range(count):
        rng = random.Random(f"{seed}-{number}")
        place = folder / f"{number}"
        place.mkdir()
        kind = number % 8
        if kind == 0:
            write(place, config, {})
            (place / "model.safetensors").write_bytes(flipped(data, rng))
        elif kind == 1:
            write(place, config, {})
            (place / "model.safetensors").write_bytes(odd_header(data, rng))
        elif kind == 2:
            write(place, odd_config(config, rng), tensors)
        elif kind == 3:
            write(place, config, odd_tensors(tensors, rng))
        elif kind == 4:
            (place / "config.json").write_text(json.dumps(config))
            (place / "pytorch_model.bin").write_bytes(flipped(state, rng))
        elif kind == 5:
            (place / "config.json").write_text(json.dumps(config))
            hostile_pickle(place / "pytorch_model.bin", tensors, rng, folder / "proof")
        elif kind == 6:
            (place / "model.gguf").write_bytes(flipped(ggufs, rng))
        else:
            names = {n: rng.choice(("model.safetensors", "../good/model.safetensors", "/etc/passwd",
                                    "", MARKUP)) for n in tensors}  # fmt: skip
            index = rng.choice(({"weight_map": names}, {"weight_map": 3}, [], {}, "x"))
            write(place, config, tensors)
            (place / "model.safetensors.index.json").write_text(json.dumps(index))
        yield number, place


def main(count, seed):
    """How many were refused, read, or neither; peak memory; whether code ran."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    out = {"refused": 0, "read": 0, "other": [], "long": [], "markup": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number, place in cases(count, seed, folder):
            try:
                found = inspect(place)
                out["read"] += 1
                json.dumps(found.to_json(), allow_nan=False)
                if number % 3:  # a page takes longer than all the rest
                    continue
                write_inspect_page(folder / "page.html", found.to_json(), found.rows)
                page = (folder / "page.html").read_text()
                if MARKUP in page or "<img" in page.partition("<main>")[2]:
                    out["markup"].append(number)
            except UsageError as error:
                out["refused"] += 1
                if "\n" in str(error) or len(str(error)) > 1000:
                    out["long"].append(str(error)[:200])
            except BaseException as error:  # what is asked is that there is none
                out["other"].append(f"{number}: {type(error).__name__}: {error}"[:300])
        out["grown"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) / 2**10
        out["ran"] = (folder / "proof").exists()
    print(json.dumps(out))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
