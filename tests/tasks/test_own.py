"""`tasks.own`: tasks and models from a user's file, and one line for every mistake in it."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.tolerance import same, seeded

from headwise.errors import UsageError
from headwise.files import load_user_file
from headwise.tasks import Farthest
from headwise.tasks.own import is_file_spec, load_model, load_task

TASK = '''
"""Sum of two tokens, modulo a number."""
from dataclasses import dataclass
import torch
from headwise.tasks.task import Classified


@dataclass(frozen=True)
class Sums(Classified):
    modulus: int = 7
    noise: float = 0.0
    sizes: tuple[int, ...] = (1, 2)

    @property
    def tokens(self): return 2

    @property
    def vocab(self): return self.modulus

    @property
    def classes(self): return self.modulus

    def sample(self, generator, batch, step=None):
        x = torch.randint(self.modulus, (batch, 2), generator=generator, device=generator.device)
        return x, x.sum(-1) % self.modulus
'''
MODEL = """
from dataclasses import dataclass
from torch import nn
from headwise.model.own import Model


@dataclass(frozen=True)
class Line(Model):
    bias: bool = True

    def build(self, shape, task):
        return nn.Linear(shape.in_dim, shape.out_dim, bias=self.bias)
"""


@pytest.fixture
def file(tmp_path):
    """Writes a user's file and returns its path."""

    def written(text: str, name: str = "mine.py") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return written


def message(spec: str, load=load_task) -> str:
    with pytest.raises(UsageError) as caught:
        load(spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- what is loaded


def test_file_with_one_class_needs_no_name(file):
    task = load_task(file(TASK))
    assert task.spec() == {"name": "Sums", "modulus": 7, "noise": 0.0, "sizes": (1, 2)}


def test_name_with_arguments_builds_that_class(file):
    path = file(TASK + "\nclass Others(Sums): pass\n")
    assert load_task(f"{path}:Sums(modulus=5)").spec()["modulus"] == 5
    assert load_task(f"{path}:Sums()") == load_task(f"{path}:Sums")
    assert type(load_task(f"{path}:Others")).__name__ == "Others"


def test_whole_numbers_stand_for_others_and_lists_for_tuples(file):
    path = file(TASK)
    task = load_task(f"{path}:Sums(noise=1, sizes=[3, 4])")
    assert task == load_task(f"{path}:Sums(noise=1.0, sizes=(3, 4))")
    assert repr(task.spec()["noise"]) == "1.0"


def test_value_task_is_taken_where_none_is_named(file):
    path = file(TASK + "\nclass B(Sums): pass\nTASK = Sums(modulus=11)\nsmall = Sums(modulus=2)\n")
    assert load_task(path).spec()["modulus"] == 11
    assert load_task(f"{path}:small").spec()["modulus"] == 2


def test_value_may_be_a_built_in_task(file):
    path = file("from headwise.tasks import Farthest\nTASK = Farthest(dim=8, points=4)\n")
    assert load_task(path) == Farthest(dim=8, points=4)
    assert load_task(f"{path}:Farthest(dim=4, points=3)") == Farthest(dim=4, points=3)


def test_bases_that_lack_the_method_are_not_counted(file):
    base = "class Base(Classified):\n    pass\n\n\n@dataclass(frozen=True)\nclass Sums(Base)"
    path = file(TASK.replace("@dataclass(frozen=True)\nclass Sums(Classified)", base))
    assert type(load_task(path)).__name__ == "Sums"


def test_model_is_loaded_like_a_task(file):
    path = file(MODEL)
    assert load_model(path).spec() == {"name": "Line", "bias": True}
    assert load_model(f"{path}:Line(bias=False)").spec()["bias"] is False
    assert message(file(TASK, "t.py"), load_model).endswith(
        "t.py has no model: it needs a class that derives from headwise.Model, or a value MODEL"
    )


def test_arguments_are_never_evaluated(file, tmp_path):
    path, mark = file(TASK), tmp_path / "ran"
    harmful = f"__import__('pathlib').Path('{mark}').touch()"
    assert "modulus must be a plain value" in message(f"{path}:Sums(modulus={harmful})")
    assert not mark.exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("my_task.py", True),
        ("a/b.py:Mine", True),
        ("b.py:Mine(x='.py:')", True),
        ("farthest", False),
        ("b.txt", False),
        ("b.pyc", False),
    ],
)
def test_is_file_spec(text, expected):
    assert is_file_spec(text) is expected


# ---- another process


def test_module_hides_no_other_and_is_loaded_once(file):
    path = file(TASK, "torch.py")
    module = load_user_file(path)
    assert load_user_file(path) is module
    assert module.__name__.startswith("headwise_file_torch_")
    assert sys.modules["torch"] is torch
    assert type(load_task(path)) is type(load_task(path))


def test_edited_file_is_another_module(file):
    before = load_task(file(TASK))
    after = load_task(file(TASK.replace("modulus: int = 7", "modulus: int = 5")))
    assert (before.spec()["modulus"], after.spec()["modulus"]) == (7, 5)


def test_task_is_unpickled_where_its_file_was_never_loaded(file):
    task = load_task(f"{file(TASK)}:Sums(modulus=5)")
    assert pickle.loads(pickle.dumps(task)) == task
    code = (
        "import pickle, sys, torch; task = pickle.load(sys.stdin.buffer); "
        "print(task.spec(), task.sample(torch.Generator().manual_seed(3), 4)[0].tolist())"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(task), capture_output=True, check=True
    )
    expected = f"{task.spec()} {task.sample(seeded(3), 4)[0].tolist()}\n"
    assert found.stdout.decode() == expected


def test_pickle_of_an_edited_file_is_refused(file):
    path = file(TASK)
    data = pickle.dumps(load_task(path))
    Path(path).write_text(TASK + "# edited\n")
    for name in [name for name in sys.modules if name.startswith("headwise_file_mine")]:
        del sys.modules[name]
    with pytest.raises(UsageError, match="was edited while its runs were under way"):
        pickle.loads(data)


def test_model_is_unpickled_too(file):
    model = load_model(file(MODEL))
    assert pickle.loads(pickle.dumps(model)) == model


def test_built_in_tasks_are_pickled_as_ever():
    task = Farthest(dim=8, points=4)
    assert pickle.loads(pickle.dumps(task)) == task
    same(pickle.loads(pickle.dumps(task)).sample(seeded(1), 3)[0], task.sample(seeded(1), 3)[0])


# ---- one line for every mistake

DECORATED = "@dataclass(frozen=True)\nclass Sums"
BAD_FILES = {
    "syntax": (TASK + "\nclass (", "", "{} is not Python: line 27: invalid syntax"),
    "zero byte": ("x = 1\0", "", "{} is not Python: line None: source code string cannot"),
    "import": (
        "import nowhere_at_all\n",
        "",
        "{} cannot be loaded: ModuleNotFoundError: No module named 'nowhere_at_all'",
    ),
    "exit": ("raise SystemExit(3)", "", "{} cannot be loaded: SystemExit: 3"),
    "a file that it reads": (
        "open('/nowhere/at/all')",
        "",
        "{} cannot be loaded: FileNotFoundError: [Errno 2] No such file or directory: "
        "'/nowhere/at/all'",
    ),
    "empty": (
        "",
        "",
        "{} has no task: it needs a class that derives from headwise.Task, or a value TASK",
    ),
    "built-in only": ("from headwise.tasks import Farthest", "", "{} has no task: it needs"),
    "no base": (
        "class Mine:\n    pass\n",
        ":Mine",
        "Mine in {} must derive from headwise.Task, got <class ",
    ),
    "several": (
        TASK + "\nclass More(Sums): pass\n",
        "",
        "{0} has 2 tasks, Sums, More: name one, as in {0}:Sums",
    ),
    "wrong value": (TASK + "\nTASK = 3\n", "", "TASK in {} must be a headwise.Task, got 3"),
    "unknown name": (
        TASK,
        ":Sum",
        "{} has no 'Sum'; did you mean Sums? choices: Sums",
    ),
    "empty name": (TASK, ":", "{} has no ''; choices: Sums"),
    "unknown argument": (
        TASK,
        ":Sums(modulo=3)",
        "unknown key 'modulo' of task {}:Sums; did you mean modulus? choices: modulus, noise, "
        "sizes",
    ),
    "missing field": (
        TASK.replace("modulus: int = 7", "modulus: int"),
        "",
        "task {}:Sums needs modulus",
    ),
    "type": (TASK, ":Sums(modulus='a')", "{}:Sums: modulus must be of type int, got 'a'"),
    "truth as a number": (TASK, ":Sums(modulus=True)", "modulus must be of type int, got True"),
    "unnamed argument": (
        TASK,
        ":Sums(8)",
        "arguments must be named, as in (field=value), got '8'",
    ),
    "unclosed": (TASK, ":Sums(modulus=8", "got '{}:Sums(modulus=8'"),
    "two calls": (TASK, ":Sums(modulus=8)()", "arguments must be written (field=value, ...)"),
    "twice": (
        TASK,
        ":Sums(noise=1, noise=2)",
        "each argument must be given once, noise is given twice",
    ),
    "name as a value": (
        TASK,
        ":Sums(modulus=os)",
        "modulus must be a plain value such as 8, 0.5 or 'text', got 'os'",
    ),
    "stars": (TASK, ":Sums(**{{}})", "arguments must be written (field=value, ...)"),
    "value with arguments": (
        TASK + "\nTASK = Sums()\n",
        ":TASK(modulus=3)",
        "TASK in {} is a value and takes no arguments",
    ),
    "no decorator": (
        TASK.replace(DECORATED, "class Sums"),
        "",
        "{}:Sums must be decorated with @dataclass(frozen=True), or its fields modulus, noise, "
        "sizes would not count",
    ),
    "field behind a property": (
        TASK.replace("modulus: int = 7", "tokens: int").replace("    def tokens", "    def other"),
        "",
        "field tokens of {}:Sums needs a default, as in tokens: int = 8, because its base has a "
        "property of that name",
    ),
    "not frozen": (
        TASK.replace(DECORATED, "@dataclass\nclass Sums"),
        "",
        "{} cannot be loaded: TypeError: cannot inherit non-frozen dataclass from a frozen one",
    ),
    "its own refusal": (
        TASK + "\n    def __post_init__(self): raise ValueError('must be\\nprime')\n",
        "",
        "{}:Sums cannot be made: ValueError: must be prime",
    ),
    "unhashable": (
        TASK + "\nTASK = Sums(sizes=[1])\n",
        "",
        "field sizes of task Sums must be a plain value (number, text, True, None or a tuple of "
        "them), got [1]",
    ),
    "not a number": (
        TASK + "\nTASK = Sums(noise=float('nan'))\n",
        "",
        "field noise of task Sums must be a plain value",
    ),
    "a tensor": (
        TASK + "\nTASK = Sums(noise=torch.zeros(3))\n",
        "",
        "field noise of task Sums must be a plain value",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_mistakes_of_a_file_are_one_line(file, name):
    text, behind, expected = BAD_FILES[name]
    path = file(text)
    assert expected.format(path) in message(path + behind.format())


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("def tokens", "def length", "task Sums: tokens is missing: give the class tokens"),
        ("def vocab", "def ids", "either vocab (inputs are token ids) or in_dim"),
        ("def sample", "def draw", "sample is missing: write sample(self, generator, batch, step)"),
        ("(batch, 2)", "(batch, 3)", "ids (batch, tokens) = (1, 2), got (1, 3)"),
    ],
)
def test_task_that_breaks_the_contract_is_refused_when_it_is_loaded(file, old, new, line):
    assert line in message(file(TASK.replace(old, new)))


def test_file_that_is_not_there_is_refused(tmp_path):
    assert message(f"{tmp_path}/none.py") == f"there is no file {tmp_path}/none.py"
    assert "it is not a regular file" in message(str(_folder(tmp_path / "a.py")))
    assert message("farthest") == (
        "a task or model of your own is FILE.py, FILE.py:NAME or FILE.py:NAME(field=value), "
        "got 'farthest'"
    )


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_loading_nothing_loads_no_torch():
    code = "import sys, headwise.tasks.own; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert found.stdout == b"False\n"
