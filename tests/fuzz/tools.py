"""Bad inputs of what reads other things than rows: `plan --like`, `inspect`, `choose` and `export`
on somebody's store, and the groups in it that `list --live`, `cancel` and `worker` read."""

from __future__ import annotations

import functools
import io
import json
import pickle
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from support.mutated_checkpoints import flipped, odd_config, odd_header
from support.planted_heads import planted, separate, write

from headwise.digests import signed
from tests.fuzz.cases import Case, File, Special, special, spoiled_file
from tests.fuzz.formats import FAMILIES, Runs
from tests.fuzz.options import QUICKLY
from tests.fuzz.stores import HOSTILE, spoil_store, store_files
from tests.fuzz.template import CHOICE
from tests.fuzz.values import any_value, document_text, spoiled, spoiled_bytes, text_of, word

# What leads out of a store, where a name is read
OUTSIDE = ("..", "../..", "../../outside", "../outside/0a", "/", "/etc", "", ".", "outside", "\0",
           "a/b", "a" * 300, "<b>x</b>", "\x1b[2J")  # fmt: skip


def forged(value: Any) -> Any:
    """As a forger leaves an object: with the digest of what it now says."""
    return signed(value) if isinstance(value, dict) else value


# ---- plan


def plans(rng: random.Random) -> Case:
    """Neighbours of a model whose config.json is spoiled, and words that limit them."""
    family = rng.choice(sorted(FAMILIES))
    content = document_text(rng, {**FAMILIES[family], "model_type": family})
    if rng.random() < 0.1:
        content = special(rng, "config.json")
    words = ["plan", "--like", rng.choice(("config.json", "config.json", "."))]
    words += rng.choice((["--keep", "params"], ["--keep", "params", "--kv-bytes", "-50%"], []))
    if rng.random() < 0.5:
        words += ["--set", f"{rng.choice(('num_heads', 'depth', 'head_dim', 'dim'))}={word(rng)}"]
    if rng.random() < 0.2:
        words += ["--write", "row", "--row", "1"]
    return Case(tuple(words), {"config.json": content})


# ---- inspect


@functools.cache
def checkpoint() -> dict[str, bytes]:
    """A good checkpoint: a Hugging Face folder's two files, and the weights as a state dict."""
    config, tensors = separate(*planted(V=8))
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "good", config, tensors)
        weights = (Path(folder) / "good" / "model.safetensors").read_bytes()
    state = io.BytesIO()
    torch.save(tensors, state)
    return {
        "config.json": json.dumps(config).encode(),
        "model.safetensors": weights,
        "pytorch_model.bin": state.getvalue(),
    }


MAPPING = b"""num_heads = 6
num_kv_heads = 3
q = "model.layers.{layer}.self_attn.q_proj.weight"
k = "model.layers.{layer}.self_attn.k_proj.weight"
v = "model.layers.{layer}.self_attn.v_proj.weight"
o = "model.layers.{layer}.self_attn.o_proj.weight"
"""


def inspects(rng: random.Random) -> Case:
    """A checkpoint of which a file is spoiled, leads elsewhere, or would run code."""
    good = checkpoint()
    files: dict[str, File] = {name: good[name] for name in ("config.json", "model.safetensors")}
    words = ["inspect", "."]
    how = rng.randrange(8)
    if how == 0:
        files["model.safetensors"] = flipped(good["model.safetensors"], rng)
    elif how == 1:
        files["model.safetensors"] = odd_header(good["model.safetensors"], rng)
    elif how == 2:
        config = json.loads(good["config.json"])
        files["config.json"] = rng.choice(
            (text_of(odd_config(config, rng)), document_text(rng, config), special(rng, "c"))
        )
    elif how == 3:
        del files["model.safetensors"]
        broken = (flipped(good["pytorch_model.bin"], rng), pickle.dumps({"model": Runs()}))
        files["pytorch_model.bin"] = rng.choice(broken)
    elif how == 4:
        part = rng.choice(("../outside/x", "/etc/passwd", "RAN", "x" * 300, "model.safetensors"))
        index = {"weight_map": {"model.layers.0.self_attn.q_proj.weight": part}}
        files["model.safetensors.index.json"] = document_text(rng, index)
    elif how == 5:
        files["map.toml"] = spoiled_file(rng, "map.toml", MAPPING)
        words = ["inspect", "model.safetensors", "--mapping", "map.toml"]
    elif how == 6:
        files["auto.py"], config = HOSTILE, json.loads(good["config.json"])
        files["config.json"] = text_of({**config, "auto_map": {"AutoConfig": "auto.Config"}})
        files["data.json"] = text_of(spoiled(rng, [1, 2, 3, 4]))
        words += ["--data", "data.json"]
    else:
        files["model.safetensors"] = special(rng, "model.safetensors")
    if rng.random() < 0.15:
        words.append(rng.choice((".", "none", "model.safetensors", word(rng))))
    if rng.random() < 0.7:
        words.append("--no-page")
    return Case(tuple(words), files)


# ---- choose and export, on somebody's store


def choices(rng: random.Random, template: Path) -> Case:
    """The question that a store has an answer to, asked again of a store that was spoiled."""
    good = store_files(template)
    name = "experiments/choose-farthest.json"
    note = {key: value for key, value in json.loads(good[name]).items() if key != "sha256"}
    files: dict[str, File] = {}
    how = rng.random()
    if how < 0.3:
        part = rng.choice(("settings", "page", "choice", "ids"))
        files[name] = text_of(forged({**note, part: spoiled(rng, note[part])}))
    elif how < 0.4:
        files[name] = document_text(rng, note)
    elif how < 0.5:
        key = rng.choice(("settings", "ids", "page", "choice", "later", "command", "preset"))
        files[name] = text_of(forged({**note, key: rng.choice((any_value(rng), *OUTSIDE))}))
    else:
        files |= spoil_store(rng, good)
        files |= _row_of_a_choice(rng, good, note["ids"])
    words = rng.choice((
        CHOICE, CHOICE, [*CHOICE, "--epsilon", word(rng)],
        [*CHOICE[:-1], "4"],
        ["report", "--store", "store"], ["list", "--store", "store"],
    ))  # fmt: skip
    return Case(tuple(words), {f"store/{key}": file for key, file in files.items()}, store=True)


def _row_of_a_choice(rng: random.Random, good: dict[str, bytes], ids: list[str]) -> dict[str, File]:
    """A row of the race as its writer would have changed it."""
    name = f"runs/{rng.choice(ids)}/rows.jsonl"
    row = json.loads(good[name].decode().splitlines()[-1])
    del row["sha256"]
    key = rng.choice(("held_out_curve", "held_out", "seconds", "curve", "status", "lr", "baseline",
                      "params", *sorted(row)))  # fmt: skip
    changed = {**row, key: any_value(rng)} if rng.random() < 0.7 else spoiled(rng, row)
    return {name: text_of(forged(changed)) + b"\n"}


TRACKER = b"""class Mine:
    def __init__(self, destination=""): pass
    def __call__(self, run): print(run.name, run.config, run.history, run.summary)
"""
MISTAKES = ((b"print(", b"raise KeyError("), (b"(self, run)", b"(self)"), (b"class", b"clas"),
            (b"destination", b""), (b"Mine", b"_Mine"))  # fmt: skip


def exports(rng: random.Random, template: Path) -> Case:
    """Rows of a store that was spoiled for a table or a tracker."""
    files = {
        f"store/{name}": file for name, file in spoil_store(rng, store_files(template)).items()
    }
    to = rng.choice(("csv", "csv", "parquet", "parquet", "tensorboard", "mine.py:Mine", "mine.py",
                     word(rng)))  # fmt: skip
    words = ["export", "--to", to, "--store", "store"]
    if rng.random() < 0.3:
        words.append(rng.choice(("out.svg", "fifo", "loop", "no/such/x", "book.txt/x", "é", "")))
    if rng.random() < 0.3:
        words += ["--experiment", rng.choice(("fig1", "mine", "choose-farthest", word(rng)))]
    mine = TRACKER
    if named := to.startswith("mine.py"):
        if rng.random() < 0.7:
            mine = mine.replace(*rng.choice(MISTAKES))
        if rng.random() < 0.1:
            mine = spoiled_bytes(rng, mine)
    files |= {"mine.py": mine, "book.txt": b"words", "loop": Special("link", "loop"),
              "fifo": Special("fifo")}  # fmt: skip
    return Case(tuple(words), files, store=True, code=named)


# ---- groups


def groups(rng: random.Random, template: Path) -> Case:
    """The groups of somebody's store: what is damaged, what leads elsewhere, what is markup."""
    good = {name: data for name, data in store_files(template).items() if "groups/" in name}
    group = next(iter(good)).split("/")[1]
    files: dict[str, File] = {}
    for _ in range(rng.randint(1, 2)):
        files |= rng.choice((_damaged, _elsewhere, _elsewhere, _said, _linked))(rng, good, group)
    run = ["run", "fig1", *QUICKLY, "--store", "store", "--seeds", "3", "--devices", "cpu:1"]
    words = rng.choice((
        ["list", "--store", "store", "--live"], ["list", "--store", "store", "--live"],
        ["list", "--store", "store", "--live", "--json"],
        ["cancel", "--store", "store"],
        ["cancel", "--store", "store", rng.choice((group, *OUTSIDE[:-3])).replace("\0", "") or "x"],
        ["cancel", "--store", "store", "--on", rng.choice(("slurm", "ray", "local", "x"))],
        ["worker", f"store/groups/{group}"], ["worker", f"store/groups/{group}", "--attempt", "2"],
        [*run, "--no-train"],
    ))  # fmt: skip
    outside: dict[str, File] = {
        "outside/rows.jsonl": b'{"id": "outside"}\n',
        "outside/group.json": good[f"groups/{group}/group.json"],
        "x.py": HOSTILE,
    }
    spoilt = {f"store/{name}": file for name, file in files.items()}
    return Case(tuple(words), {**outside, **spoilt}, store=True)


def _damaged(rng: random.Random, good: dict[str, bytes], group: str) -> dict[str, File]:
    name = rng.choice(sorted(good))
    if name.endswith(".json") and rng.random() < 0.6:
        about = {key: value for key, value in json.loads(good[name]).items() if key != "sha256"}
        return {name: text_of(forged(spoiled(rng, about)))}
    return {name: spoiled_file(rng, name, good[name])}


def _elsewhere(rng: random.Random, good: dict[str, bytes], group: str) -> dict[str, File]:
    """Ids, sources, logs and leases that name what is not the store's, as their writer would."""
    name = f"groups/{group}/group.json"
    about = {key: value for key, value in json.loads(good[name]).items() if key != "sha256"}
    there = rng.choice((*OUTSIDE, any_value(rng)))
    how = rng.randrange(6)
    if how == 0:
        about["ids"] = [there, *about["ids"][1:]]
    elif how == 1:
        about["runs"][0]["task"] = {"name": rng.choice(("x.py", "x", "x:Mine")), "source": "x.py"}
    elif how == 2:
        about["runs"][0]["recipe"]["init"] = f"run:{there}"
    elif how == 3:
        about["work"] = rng.choice((there, "pretrain"))
    elif how == 4:
        about["runs"][0]["model"] = {"name": "x.py:Mine"}
        about["digests"] = {"x.py:Mine": there}
    else:
        run_id = about["ids"][0]
        lease = {"group": rng.choice((there, group)), "token": there}
        return {f"runs/{run_id}/lease.{rng.choice((1, 7, 10**8))}": text_of(lease)}
    return {name: text_of(forged(about))}


def _said(rng: random.Random, good: dict[str, bytes], group: str) -> dict[str, File]:
    """Attempts, beats and logs that say what a terminal should not hear."""
    hostile = rng.choice(
        ("\x1b[2J\x1b]0;x\x07", "<script>x</script>", "x" * 50_000, "\n" * 99, "é")
    )
    how = rng.randrange(3)
    if how == 0:
        handle = {"engine": rng.choice((hostile, "slurm", "ray", "local")), "job": hostile,
                  "group": group, "attempt": rng.choice((1, 10**9, -1, True)), "log": "/etc/passwd",
                  "address": rng.choice((hostile, "ray://127.0.0.1:1", "slurm"))}  # fmt: skip
        return {f"groups/{group}/attempts.json": text_of(forged({"attempts": [handle]}))}
    if how == 1:
        name = next(name for name in good if name.endswith(".beat"))
        beat = json.loads(good[name])
        key = rng.choice(("host", "state", "cause", "pid", "steps", "count", "token"))
        return {name: text_of({**beat, key: rng.choice((hostile, any_value(rng)))})}
    return {f"groups/{group}/log.1": (hostile + "\n").encode("utf-8", "replace") * 3}


def _linked(rng: random.Random, good: dict[str, bytes], group: str) -> dict[str, File]:
    """Links in the place of a group, of its files, or of a run."""
    there = rng.choice(("../../outside", "../../../outside", "/dev/zero", "nowhere", "."))
    how = rng.randrange(4)
    if how == 0:
        other = rng.choice(("0a", "0" * 16, "x" * 200))
        return {f"groups/{other}": Special("link", there)}
    if how == 1:
        return {
            f"groups/{group}/{rng.choice(('cancel', 'log.1', 'x.beat'))}": Special("link", there)
        }
    if how == 2:
        return {f"groups/{group}/group.json": special(rng, "group.json")}
    return {f"groups/{group}/{'d/' * 200}x": b"deep"}
