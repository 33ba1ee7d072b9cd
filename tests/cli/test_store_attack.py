"""A store is data: nothing that a store, a row, a config, a checkpoint or a data set names is ever
imported or run.

Somebody's store holds a canary: code that leaves a file when it runs. Each attack first shows that
its canary is alive: opened the unsafe way, it runs."""

import contextlib
import io
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.commands import CHOOSE, run_words, sets
from support.groups import idle_group, tiny_runs

from headwise import Shape
from headwise.cli import main
from headwise.digests import signed
from headwise.errors import UsageError
from headwise.experiments import pages
from headwise.files import load_module
from headwise.integrations.nanochat import checkpoints as nanochat
from headwise.lm.checkpoint import load_decoder
from headwise.store import Store
from headwise.tasks import Images, Sentences
from headwise.tasks.hub import _load as load_from_hub


class Canary:
    """Code that leaves a file: as a module, and as a pickle."""

    def __init__(self, folder: Path) -> None:
        self.song = folder / "it ran"
        self.code = f"open({str(self.song)!r}, 'w').close()\n"

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, (self.code,)

    def sang(self) -> bool:
        """Whether it ran since this was asked last."""
        found = self.song.exists()
        self.song.unlink(missing_ok=True)
        return found


@pytest.fixture
def canary(tmp_path: Path) -> Canary:
    return Canary(tmp_path)


@pytest.fixture
def theirs(store: Path, tmp_path: Path, canary: Canary, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Somebody's store beside the folder that commands are given in, with code in it."""
    theirs = Path(shutil.copytree(store, tmp_path / "theirs"))
    nested = theirs / "experiments" / "a" / "b"
    nested.mkdir(parents=True)
    for folder in (theirs, theirs / "experiments", nested):
        (folder / "x.py").write_text(canary.code)
    (tmp_path / "link.py").symlink_to(theirs / "x.py")
    (theirs / "experiments" / "link.py").symlink_to(theirs / "x.py")
    monkeypatch.chdir(tmp_path)
    load_module("canary", theirs / "x.py")
    assert canary.sang()
    return theirs


def note(theirs: Path, name: str = "fig1", **more: Any) -> None:
    """Change a note as its writer would, digest and all."""
    path = theirs / "experiments" / "fig1.json"
    about = {k: v for k, v in json.loads(path.read_text()).items() if k != "sha256"}
    (theirs / "experiments" / f"{name}.json").write_text(json.dumps(signed({**about, **more})))


def row(theirs: Path, **more: Any) -> None:
    """Change every row as its writer would."""
    for path in theirs.glob("runs/*/rows.jsonl"):
        found = {k: v for k, v in json.loads(path.read_text()).items() if k != "sha256"}
        path.write_text(json.dumps(signed({**found, **more})) + "\n")


def spec(theirs: Path, part: str, value: Any) -> None:
    """Change every specification as its writer would."""
    for path in theirs.glob("runs/*/run.json"):
        found = {k: v for k, v in json.loads(path.read_text()).items() if k != "sha256"}
        path.write_text(json.dumps(signed({**found, part: value})))


def group(theirs: Path, **more: Any) -> None:
    """A group as its writer would leave it, in the folder of its ids."""
    runs = [run for run in tiny_runs(3) if run.seed == 2]
    begun = idle_group(theirs, runs)
    path = begun.folder / "group.json"
    about = {k: v for k, v in json.loads(path.read_text()).items() if k != "sha256"}
    about |= {key: value(about) if callable(value) else value for key, value in more.items()}
    path.write_text(json.dumps(signed(about)))


def of_first(part: str, value: Any) -> Callable[[dict[str, Any]], list[Any]]:
    """The group's specifications, with another part in the first."""
    return lambda about: [{**about["runs"][0], part: value}, *about["runs"][1:]]


def choice(theirs: Path, **more: Any) -> None:
    """The note of a choice that names code."""
    settings = {"task": {"name": CODE, "source": CODE}, "model": CODE}
    about = {"command": f"headwise choose {CODE}", "settings": settings, "ids": [CODE], **more}
    path = theirs / "experiments" / "choose-farthest.json"
    path.write_text(json.dumps(signed({"preset": "", "later": None, "made": True, **about})))


CODE = "theirs/x.py"
TEMPLATE = "{{ self.__init__.__globals__.__builtins__.exec('raise SystemExit') }}"
ATTACKS: dict[str, Callable[[Path], None]] = {
    "note, relative source": lambda theirs: note(theirs, source=CODE),
    "note, absolute source": lambda theirs: note(theirs, source=str(theirs.resolve() / "x.py")),
    "note, symlinked source": lambda theirs: note(theirs, source="link.py"),
    "note, nested source": lambda theirs: note(theirs, source="theirs/experiments/a/b/x.py"),
    "note, source with arguments": lambda theirs: note(theirs, source=f"{CODE}:Task(points=8)"),
    "note of an own experiment": lambda theirs: note(theirs, "own", source=CODE, page={}),
    "note named as code": lambda theirs: note(theirs, "x.py"),
    "note named as a path": lambda theirs: note(theirs, "link.py", source="link.py"),
    "note, settings": lambda theirs: note(
        theirs, settings={"task": CODE, "source": CODE, "model": CODE}, preset=CODE
    ),
    "note, command": lambda theirs: note(theirs, command=f"headwise run {CODE}; python {CODE}"),
    "note, template": lambda theirs: note(theirs, command=TEMPLATE, preset=TEMPLATE),
    "note, page": lambda theirs: note(
        theirs, "own", page={"question": TEMPLATE, "figures": [{"kind": CODE}], "source": CODE}
    ),
    "rows, task": lambda theirs: row(theirs, task=CODE, task_source=CODE, source=CODE),
    "rows, model": lambda theirs: row(theirs, model=f"{CODE}:Model", model_source=CODE),
    "rows, command": lambda theirs: row(theirs, command=f"headwise run {CODE}"),
    "specification, task": lambda theirs: spec(theirs, "task", {"name": CODE, "source": CODE}),
    "specification, model": lambda theirs: spec(theirs, "model", {"name": f"{CODE}:Model"}),
    "group, task": lambda theirs: group(theirs, runs=of_first("task", {"name": CODE})),
    "group, model": lambda theirs: group(theirs, runs=of_first("model", {"name": f"{CODE}:M"})),
    "group, digests": lambda theirs: group(theirs, digests={f"{CODE}:Task": "0"}, work=CODE),
    "group, ids": lambda theirs: group(theirs, ids=lambda about: ["../../x", *about["ids"][1:]]),
    "choice": lambda theirs: choice(theirs),
    "choice, page": lambda theirs: choice(theirs, page={"question": TEMPLATE, "figures": [CODE]}),
    "digest of code": lambda theirs: (
        [
            (folder / "source.json").write_text(json.dumps({"task": CODE, "source": CODE}))
            for folder in theirs.glob("runs/*")
        ]
        and None
    ),
}


def shown(theirs: Path, *more: list[str]) -> None:
    """Commands that read a store answer, or refuse it in one line."""
    for words in (["list", "--store", str(theirs)], ["report", "--store", str(theirs)], *more):
        assert main(words) in (0, 2), words


@pytest.mark.parametrize("name", ATTACKS)
def test_store_runs_nothing_whatever_it_names(name: str, theirs: Path, canary: Canary) -> None:
    ATTACKS[name](theirs)
    shown(theirs)
    assert not canary.sang()


def test_store_of_all_attacks_runs_nothing_by_any_command(
    theirs: Path, tmp_path: Path, canary: Canary
) -> None:
    for attack in ATTACKS.values():
        attack(theirs)
    draw = ["draw", "fig1", str(theirs), "--output", "drawn.png"]
    shown(theirs, draw, run_words(theirs, "--seeds", "2", "--no-train"), run_words(theirs))
    live, begun = ["list", "--live", "--store", str(theirs)], theirs / "groups"
    workers = [["worker", str(folder)] for folder in begun.iterdir()]
    export = ["export", "--store", str(theirs), "--to"]
    choose = [*CHOOSE, "--store", str(theirs), "--seeds", "2"]
    cancel = ["cancel", "--store", str(theirs)]
    shown(theirs, live, choose, [*export, "csv"], [*export, "tensorboard"], cancel)
    for words in workers:
        with contextlib.suppress(SystemExit):  # how a worker says that it refuses a group
            assert main(words) in (0, 2)
    assert not (tmp_path / "x").exists()
    held = Store(theirs, create=False)
    held.rows()
    held.query()
    assert not canary.sang()


def test_attack_is_seen_where_a_page_imports_what_a_note_names(
    theirs: Path, canary: Canary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault is what `report` once did."""
    section = pages._section

    def imported(store: Store, name: str, asked: Any) -> Any:
        if "source" in asked:
            load_module("named", asked["source"])
        return section(store, name, asked)

    monkeypatch.setattr(pages, "_section", imported)
    for name in list(ATTACKS)[:4]:
        ATTACKS[name](theirs)
        shown(theirs)
        assert canary.sang(), name


# ---- files that are pickles


def test_pickle_in_the_place_of_a_file_of_a_store_runs_nothing(
    theirs: Path, canary: Canary
) -> None:
    saved = io.BytesIO()
    torch.save({"weights": canary}, saved)
    pickles = [pickle.dumps(canary), saved.getvalue()]
    pickle.loads(pickles[0])
    assert canary.sang()
    torch.load(io.BytesIO(pickles[1]), weights_only=False)
    assert canary.sang()
    folders = sorted(theirs.glob("runs/*"))
    for data in pickles:
        for name in ("rows.jsonl", "run.json", "checkpoint.safetensors", "weights.safetensors"):
            for folder in folders[:2]:
                (folder / name).write_bytes(data)
        for file in ("fig1.json", "own.json", "own.pkl", "own.pt"):
            (theirs / "experiments" / file).write_bytes(data)
        # Two runs are made again, beside those checkpoints.
        shown(theirs, run_words(theirs, "--seeds", "2", "--no-report"))
        with pytest.raises(UsageError, match="holds no weights of a finished run"):
            load_decoder(folders[0])
        assert not canary.sang()


def test_pickle_as_a_checkpoint_of_nanochat_runs_nothing(tmp_path: Path, canary: Canary) -> None:
    config = {"n_layer": 1, "n_head": 1, "n_kv_head": 1, "n_embd": 8, "vocab_size": 32}
    (tmp_path / "meta_000001.json").write_text(json.dumps({"model_config": config}))
    path = tmp_path / "model_000001.pt"
    torch.save({"transformer.h.0.attn.c_k.weight": canary}, path)
    torch.load(path, weights_only=False)
    assert canary.sang()
    for data in (path.read_bytes(), pickle.dumps(canary), b""):
        path.write_bytes(data)
        with pytest.raises(UsageError, match="must be tensors by name"):
            nanochat.read(tmp_path)
    assert not canary.sang()


def test_pickle_in_a_data_set_runs_nothing(tmp_path: Path, canary: Canary) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (folder / name).write_bytes(pickle.dumps({b"data": canary, b"labels": [0]}))
    with pytest.raises(UsageError, match="is not one of CIFAR-10's batches"):
        Images(source=str(folder)).sample(torch.Generator(), 1)
    sentences = tmp_path / "sentences"
    sentences.mkdir()
    (sentences / "sentences.py").write_text(canary.code)
    with pytest.raises(UsageError):
        Sentences(source=str(sentences)).sample(torch.Generator(), 1)
    assert not canary.sang()


def test_data_set_of_the_hub_may_bring_no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(__version__="3.6.0", load_dataset=lambda *words: pytest.fail("it ran"))
    monkeypatch.setitem(sys.modules, "datasets", old)
    load_from_hub.cache_clear()
    with pytest.raises(UsageError, match="needs datasets 4 or newer"):
        load_from_hub("hf:somebody/set")


# ---- configs


def test_config_with_auto_map_runs_nothing(tmp_path: Path, canary: Canary) -> None:
    for name in ("modeling_x.py", "configuration_x.py", "tokenization_x.py"):
        (tmp_path / name).write_text(canary.code)
    config = {
        "model_type": "llama",
        "auto_map": {
            "AutoConfig": "configuration_x.Config",
            "AutoModelForCausalLM": "modeling_x.Model",
        },
        "trust_remote_code": True,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Shape.from_hf(tmp_path).dim == 8
    for command in ("cost", "policies", "explain"):
        assert main([command, str(tmp_path)]) in (0, 2)
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "x"}))
    assert main(["cost", str(tmp_path)]) == 2
    assert not canary.sang()


# ---- the folder that a command is given in


def test_worker_processes_import_nothing_from_the_folder_of_the_command(
    theirs: Path, canary: Canary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new Python looks for its modules in the current folder first, which may be the store."""
    for name in ("multiprocessing", "pickle", "ctypes", "torch", "headwise"):
        (theirs / f"{name}.py").write_text(canary.code + "raise ImportError\n")
    shutil.rmtree(theirs / "experiments")
    monkeypatch.chdir(theirs)
    os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", "import multiprocessing")
    assert canary.sang()
    words = run_words(Path("."), "--seeds", "2", "--no-report", workers=2)
    assert main([*words, *sets(["lr=0.02"])]) == 0
    assert not canary.sang()
