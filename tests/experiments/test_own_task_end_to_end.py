"""A task and a model of one's own as people use them: trained, killed, resumed, listed, reported,
drawn; from the command line, a script and a notebook. Every process and every kill is real."""

import contextlib
import io
import json
import linecache
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from support.processes import started
from support.small_runs import bits, quiet

import headwise
from headwise.cli import main
from headwise.execute.sources import SOURCE_FILE, digest, edited
from headwise.execute.sweep import sweep
from headwise.experiments.shapes import shape_for
from headwise.store import Store
from headwise.tasks.own import load_model, load_task

EXAMPLES = Path(__file__).parents[2] / "examples"
SETTINGS = {
    "dim": 8,
    "base": (1, 2, 4, 16),
    "depths": (1,),
    "heads": (1, 2),
    "ranks": (4,),
    "lrs": (0.01,),
    "seeds": 2,
    "steps": 200,
    "epoch": 20,
    "batch": 8,
    "held_out": 128,
    "evals": 2,
}
RECIPE = headwise.Recipe(steps=40, epoch=20, batch=8, held_out=128, evals=2)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current folder, with the examples in it and nothing else."""
    for name in ("my_task.py", "my_model.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(store: str, *more: str, workers: int = 1) -> list[str]:
    changes = [
        f"{key}={','.join(map(str, value)) if isinstance(value, tuple) else value}"
        for key, value in SETTINGS.items()
    ]
    head = ["run", "map", "my_task.py", "--model", "my_model.py", "--device", "cpu"]
    return [*head, "--store", store, "--workers", str(workers), *more, "--set", *changes]


def kill_with_a_checkpoint(command: list[str], store: Path) -> None:
    """Start a command and kill it, and it alone, when some of its runs have checkpoints."""
    with started(command) as process:
        end = time.monotonic() + 60
        while not list(store.glob("runs/*/checkpoint.safetensors")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end, "no checkpoint came"
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL


def rows_of(store: Path | str) -> dict[str, str]:
    return {row["id"]: bits(row) for row in Store(store, create=False).rows()}


def assert_resumed(store: str, undisturbed: str) -> None:
    assert rows_of(store) == rows_of(undisturbed)
    assert max(row["resumed"] for row in Store(store).rows()) >= 1
    for run in Store(store).runs_path.iterdir():
        names = sorted(path.name for path in run.iterdir())
        assert names == ["lock", "rows.jsonl", "run.json", SOURCE_FILE]


def assert_shown(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The page, the list and the figure name the task."""
    count = len(rows_of(store))
    capsys.readouterr()
    Path(store, "report.html").unlink(missing_ok=True)
    assert main(["report", "--store", store]) == 0
    page = Path(store, "report.html").read_text()
    assert re.search("Sorting( with Mixer)?: best", page)
    assert main(["list", "--store", store, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {row["task"].removesuffix(" with Mixer") for row in listed["rows"]} == {"Sorting"}
    assert len(listed["rows"]) == count
    assert listed["unfinished"] == []
    assert main(["draw", "map", store, "--output", "drawn.png"]) == 0
    assert Path("drawn.png").stat().st_size > 5000
    assert re.search("Sorting( with Mixer)?: best", capsys.readouterr().out)


# ---- killed and resumed


def test_own_task_from_the_command_line_by_two_workers(folder, capsys):
    """Killed while two workers train, resumed by one process."""
    command = [sys.executable, "-m", "headwise", *words("killed", workers=2)]
    kill_with_a_checkpoint([*command, "--checkpoint-every", "0"], folder / "killed")
    assert main(words("killed")) == 0
    assert "to resume" in capsys.readouterr().err
    assert main(words("whole", "--no-report")) == 0
    assert_resumed("killed", "whole")
    (folder / "my_task.py").unlink()
    (folder / "my_model.py").unlink()
    assert_shown("killed", capsys)


SCRIPT = """
import headwise

{classes}

made = headwise.run(
    "map", task=Sorting(), model=Mixer(), store="killed", device="cpu", workers=2,
    checkpoint_every=0, **{settings}
)
print(len(made.rows))
"""


def script() -> str:
    """The examples' classes and a call, in a plain script without a main guard."""
    classes = "\n".join((EXAMPLES / name).read_text() for name in ("my_task.py", "my_model.py"))
    return SCRIPT.format(classes=classes, settings=SETTINGS)


def test_own_task_from_a_script(folder, capsys):
    (folder / "script.py").write_text(script())
    command = [sys.executable, "script.py"]
    kill_with_a_checkpoint(command, folder / "killed")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "6\n"
    assert "to resume" in done.stderr
    assert main(words("whole", "--no-report")) == 0
    assert_resumed("killed", "whole")
    assert_shown("killed", capsys)


def test_own_task_from_a_notebook(folder):
    """Classes of a namespace that no other process can import: this one trains, whatever `workers`
    is, and nothing is said of code that lies in no file."""
    cell = {"__name__": "cell"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        exec(script().replace("200", "20"), cell)
    assert printed.getvalue() == "6\n"
    assert len(rows_of("killed")) == 6
    assert not list(folder.glob(f"killed/runs/*/{SOURCE_FILE}"))


def test_own_task_from_standard_input():
    done = subprocess.run(
        [sys.executable, "-"],
        input=script().replace("200", "20"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "6\n"), done.stderr


def runs(task, model=None) -> list[headwise.Run]:
    shape = shape_for(task, dim=8, depth=1, heads=2, rank=4, ffn_dim=16)
    return [headwise.Run(shape, task, RECIPE, seed, model) for seed in (0, 1)]


def test_train_resumes_in_a_folder(tmp_path):
    class Stop(Exception):
        pass

    def stop(_: int) -> None:
        if list(tmp_path.glob("*/checkpoint.safetensors")):
            raise Stop

    chosen = runs(load_task("my_task.py"), load_model("my_model.py"))
    whole = headwise.train(chosen, device="cpu", advance=quiet)
    with pytest.raises(Stop):
        headwise.train(chosen, device="cpu", advance=stop, folder=tmp_path, checkpoint_every=0)
    rows = headwise.train(chosen, device="cpu", advance=quiet, folder=tmp_path)
    assert list(map(bits, rows)) == list(map(bits, whole))
    assert rows[0]["resumed"] == 1


def test_class_inside_a_function_is_trained_in_this_process(tmp_path):
    class Sorting(type(load_task("my_task.py"))):  # type: ignore[misc]
        pass

    store = Store(tmp_path / "store")
    assert len(sweep(runs(Sorting()), store, device="cpu", workers=2)) == 2


# ---- an edited file


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_edited_task_is_noticed(folder, capsys):
    """Its rows are taken, since their ids are the same, and one line says so; a new version trains
    them again."""
    small = ("--no-report", "--set", "steps=20", "seeds=1", "heads=1")

    def run() -> str:
        capsys.readouterr()
        assert main([*words("store"), *small]) == 0
        return capsys.readouterr().err

    line = (
        r"the code of task Sorting changed since 1 of these runs were begun; .* raise its version"
    )
    assert "changed since" not in run()
    before = rows_of("store")
    edit(folder / "my_task.py", '"""Zero; and', '# a note\n        """Nought; and')
    assert "changed since" not in run()
    edit(folder / "my_task.py", "numbers.sort(1).values\n", "numbers.sort(1).values.flip(1)\n")
    assert re.search(line, run())
    assert rows_of("store") == before
    edit(folder / "my_task.py", "    in_dim = 1\n", "    in_dim = 1\n    version = 2\n")
    assert "changed since" not in run()
    assert len(rows_of("store")) == 2 * len(before)


CELL = """
from dataclasses import dataclass
import torch, headwise

SIGN = 1

@dataclass(frozen=True)
class Celled(headwise.SquaredError):
    tokens: int = 4
    in_dim = 1
    answer_dim = 1

    def sample(self, generator, batch, step=None):
        numbers = torch.randn((batch, 4, 1), generator=generator, device=generator.device)
        return numbers, SIGN * numbers
"""


def celled(text: str, name: str) -> type:
    """The class of a notebook's cell: a notebook puts the text of its cells into `linecache`."""
    if name:
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    module = ModuleType("notebook")
    sys.modules["notebook"] = module
    exec(compile(text, name or "<string>", "exec"), module.__dict__)
    found: type = module.Celled
    return found


def test_edited_cell_is_noticed_and_code_from_nowhere_said(tmp_path, capsys):
    store = Store(tmp_path / "store")

    def said(text: str, name: str) -> list[str]:
        wanted = runs(celled(text, name)())
        lines = edited(store, wanted)
        sweep(wanted, store, device="cpu", workers=1)
        return lines

    changed = CELL.replace("SIGN = 1", "SIGN = -1")
    assert said(CELL, "cell 1") == []
    assert said(CELL + "# a note\n", "cell 2") == []
    (line,) = said(changed, "cell 3")
    assert line.startswith("the code of task Celled changed since 2 of these runs were begun")
    (line,) = said(changed, "")
    assert line.startswith("the code of task Celled is in no file")


MINE = """
from dataclasses import dataclass
import headwise

{text}

@dataclass(frozen=True)
class Mine(headwise.Model):
    def build(self, shape, task):
        return made(shape)

print(2)
"""


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("def made(shape): return  3  # by hand", True),
        ("def made(shape):\n    'It makes.'\n    return 3", True),
        ("def made(shape): return 3\ndef other(): return 4", True),
        ("def made(shape): return 4", False),
        ("LAYERS = 3\ndef made(shape): return LAYERS", False),
    ],
)
def test_digest_follows_what_a_class_uses(text, same, folder, capsys):
    def of(text: str) -> str:
        Path("mine.py").write_text(MINE.format(text=text))
        return digest(type(load_model("mine.py")))

    assert (of("def made(shape): return 3") == of(text)) is same


# ---- ten broken tasks, run


WHOLE = (EXAMPLES / "my_task.py").read_text()
BROKEN = {
    "no Python": ("import torch\n", "import torch torch\n", "is not Python: line"),
    "import": ("import torch\n", "import torhc\n", "cannot be loaded: ModuleNotFoundError"),
    "no task": ("(headwise.SquaredError)", "", "has no task: it needs a class that derives"),
    "no decorator": ("@dataclass(frozen=True)\n", "", "must be decorated with @dataclass(frozen"),
    "a built-in name": ("    in_dim = 1\n", "    in_dim = 1\n    name = 'text'\n", "built-in task"),
    "version": ("    in_dim = 1\n", "    in_dim = 1\n    version = 0\n", "version must be a whole"),
    "no width": ("    in_dim = 1\n", "", "in_dim"),
    "no sample": ("def sample", "def draw", "sample is missing: write sample(self, generator"),
    "raises": ("return numbers, ", "return number, ", "NameError"),
    "one tensor": ("return numbers, numbers", "return numbers", "must return two tensors"),
    "length": ("(batch, self.tokens, 1)", "(batch, 9, 1)", "must be vectors"),
    "float64": ("return numbers, ", "return numbers.double(), ", "float32, got float64"),
    "infinite": ("sort(1).values\n", "sort(1).values / 0\n", "targets must be finite"),
    "targets": ("sort(1).values\n", "sort(1).values[..., 0, 0]\n", "targets"),
    "no loss": ("SquaredError", "Task", "loss is missing: write loss(self, outputs, targets)"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_task_is_one_line_and_leaves_nothing(fault, folder, capsys):
    old, new, line = BROKEN[fault]
    assert old in WHOLE
    (folder / "my_task.py").write_text(WHOLE.replace(old, new))
    assert main(words("store")) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("headwise: error: ")
    assert line in err
    assert sorted(os.listdir(folder)) == ["my_model.py", "my_task.py"]
