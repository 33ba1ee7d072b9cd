"""The one-way flow: who may import whom, directly and by way of others, read from the source; and
what starts without torch."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import headwise
from headwise.tasks import TASKS

ROOT = Path(headwise.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# In the order of the flow. A folder or a file at the top may import only what stands above it, and
# of that only what is listed, at its top or inside functions.
ALLOWED: dict[str, set[str]] = {
    "headwise": set(),  # the package itself: its version
    "errors": set(),
    "seeds": set(),
    "stats": set(),
    "signals": set(),
    "files": {"errors", "signals"},
    "tensor_files": {"files"},
    "digests": {"files"},
    "rows": {"errors"},
    "configs": {"errors", "files"},
    "shape": {"errors"},
    "policies": {"errors", "shape"},
    "device": {"headwise", "errors", "rows"},
    "progress": set(),
    "kernels": {"files"},
    "model": {"errors", "files", "rows", "shape", "kernels"},
    "integrations": {"errors", "files", "shape", "model"},
    "tasks": {"errors", "files", "rows", "kernels", "model"},
    "theory": {"errors", "rows", "shape", "model", "tasks"},
    "diagnose": {"errors", "files", "configs", "shape", "model"},
    "training": {
        *("errors", "signals", "rows", "seeds", "device", "progress", "shape"),
        *("tensor_files", "kernels", "model", "tasks"),
    },
    "lm": {
        *("errors", "signals", "rows", "seeds", "device", "progress", "shape"),
        *("files", "digests", "tensor_files", "kernels", "model", "tasks"),
    },
    "store": {"errors", "files", "digests", "rows"},
    "tracking": {"errors", "files", "rows", "store"},
    "execute": {
        *("headwise", "errors", "signals", "files", "digests", "rows", "device", "progress"),
        *("shape", "tasks", "training", "lm", "store"),
    },
    "show": {"headwise", "errors", "files", "rows", "progress"},
    "planning": {"errors", "device", "shape", "model", "execute"},
    "experiments": {
        *("errors", "files", "rows", "seeds", "stats", "device", "shape", "policies"),
        *("model", "tasks", "theory", "training", "lm", "store", "execute", "show"),
    },
    "choosing": {
        *("errors", "signals", "rows", "stats", "device", "shape", "planning"),
        *("training", "lm", "store", "execute", "show", "experiments"),
    },
    "explorer": {
        *("errors", "rows", "shape", "planning", "store", "show", "experiments"),
    },
    "converting": {
        *("errors", "files", "rows", "configs", "shape", "tensor_files", "model", "planning"),
        "diagnose",
    },
    "cli": {
        *("headwise", "errors", "files", "signals", "rows", "progress", "device", "configs"),
        *("shape", "policies", "planning"),
        *("tasks", "model", "training", "lm", "store", "execute", "show", "experiments"),
        *("choosing", "tracking", "diagnose", "explorer", "converting"),
    },
    "__main__": {"signals", "cli"},
}
AGAINST = {("shape", "configs")}  # inside a function: a shape that reads a public config
EXTRAS = {  # what is not always installed: inside functions only
    "choosing": {"jinja2"},
    "cli": {"torch"},
    "device": {"torch"},
    "converting": {"transformers"},
    "diagnose": {"transformers", "PIL"},
    "execute": {"torch", "ray", "submitit"},
    "experiments": {"torch", "numpy", "matplotlib", "jinja2"},
    "integrations": {"transformers", "wandb", "mlflow", "trackio"},
    "lm": {"tokenizers"},
    "planning": {"torch", "pandas"},
    "seeds": {"torch"},
    "show": {"jinja2", "markupsafe", "matplotlib"},
    "store": {"duckdb"},
    "tasks": {"PIL", "datasets"},
    "tracking": {"duckdb"},
}
TRAINING = {"torch", "numpy", "safetensors"}  # always installed
WITH_NUMPY = {"planning"}  # numpy at the top of its modules, torch inside functions only
WITH_TORCH = {
    *("kernels", "model", "tasks", "theory", "training", "lm", "integrations", "tensor_files"),
    *("diagnose", "converting"),
}
# These start without torch and numpy, by whatever way they would reach them.
LIGHT = (
    *("errors", "signals", "digests", "files", "policies", "progress", "rows", "seeds", "device"),
    *("shape", "configs", "stats", "store", "tasks", "training.run", "lm.spec", "execute"),
    *("execute.base", "execute.driver", "execute.engine", "execute.live", "execute.local"),
    *("execute.pool", "execute.worker", "cli", "__main__", "show.report", "show.figure"),
    *("experiments", "experiments.runner", "choosing.recommend", "tracking", "tracking.tables"),
    *("planning.limits", "planning.costs", "planning.space", "show.inspect_page"),
    *("explorer", "explorer.explore", "show.explorer_page"),
)
NEEDS_TRITON = {"attention_wide_launch"}  # and every file named *_triton*

# Names that a package imports when they are first used -> the module that has them
LAZY = {
    "headwise": {name: f"headwise.{home}" for name, home in headwise._HOME.items()},
    "headwise.tasks": {name: f"headwise.tasks.{file}" for file, name in TASKS.values()}
    | dict.fromkeys(("Task", "Classified", "SquaredError"), "headwise.tasks.task"),
}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_of(path): path.read_text() for path in FILES}


def folder_of(module: str) -> str:
    """A folder, or a file at the top; the package itself is `headwise`."""
    return module.split(".")[1] if "." in module else "headwise"


@functools.cache
def imports(source: str) -> list[tuple[str, bool]]:
    """Every module that a source imports, and whether at its top; not those for types only."""
    tree = ast.parse(source)
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    inside = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
    }
    found: list[tuple[str, bool]] = []
    for node in ast.walk(tree):
        names: list[str] = []
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            assert node.module is not None
            for alias in node.names:
                part = f"{node.module}.{alias.name}"
                lazy = LAZY.get(node.module, {}).get(alias.name)
                names.append(part if part in SOURCES else lazy or node.module)
        found += [(name, id(node) not in inside) for name in names]
    return found


def needs_triton(module: str) -> bool:
    name = module.rpartition(".")[2]
    return module.startswith("headwise.kernels.") and ("_triton" in name or name in NEEDS_TRITON)


def faults(module: str, source: str) -> list[str]:
    """What a module's source imports against the rules."""
    folder, wrong = folder_of(module), []
    installed = TRAINING if folder in WITH_TORCH else {"numpy"} if folder in WITH_NUMPY else set()
    for name, top in imports(source):
        package = name.partition(".")[0]
        if package == "__future__" or package in sys.stdlib_module_names:
            continue
        if package == "headwise":
            other = folder_of(name)
            allowed = other in ALLOWED[folder] or (not top and (folder, other) in AGAINST)
            if other != folder and not allowed:
                wrong.append(f"{module} imports {other}")
            if top and needs_triton(name) and not needs_triton(module):
                wrong.append(f"{module} imports {name} at its top, which needs triton")
        elif package == "triton":
            if not needs_triton(module):
                wrong.append(f"{module} imports triton")
        elif package in installed:
            continue
        elif top or package not in EXTRAS.get(folder, set()):
            wrong.append(f"{module} imports {package}{' at its top' if top else ''}")
    return wrong


def loaded_with(module: str, sources: dict[str, str]) -> set[str]:
    """Every package beside ours that importing a module loads, by way of whatever it imports."""
    found: set[str] = set()
    seen, rest = set(), [module]
    while rest:
        name = rest.pop()
        parents = [name.rsplit(".", i)[0] for i in range(1, name.count(".") + 1)]
        for one in (name, *parents):  # a package's own file is run first
            if one in sources and one not in seen:
                seen.add(one)
                rest += [other for other, top in imports(sources[one]) if top]
        if name.partition(".")[0] != "headwise":
            found.add(name.partition(".")[0])
    return found - set(sys.stdlib_module_names)


def test_flow_places_every_module() -> None:
    assert {folder_of(module) for module in SOURCES} == set(ALLOWED)


def test_flow_has_one_direction() -> None:
    above: set[str] = set()
    for folder, allowed in ALLOWED.items():
        assert allowed <= above, f"{folder} may import what stands below it: {allowed - above}"
        above.add(folder)


@pytest.mark.parametrize("folder", ALLOWED)
def test_folder_imports_only_what_it_may(folder: str) -> None:
    modules = [module for module in SOURCES if folder_of(module) == folder]
    assert [fault for module in modules for fault in faults(module, SOURCES[module])] == []


def test_flow_allows_only_what_is_used() -> None:
    """Each list of what is allowed is exact: an entry that nothing needs fails."""
    used: dict[str, set[str]] = {folder: set() for folder in ALLOWED}
    against: set[tuple[str, str]] = set()
    extras: dict[str, set[str]] = {}
    training: set[str] = set()
    counting: set[str] = set()
    launching: set[str] = set()
    for module, source in SOURCES.items():
        folder = folder_of(module)
        for name, _ in imports(source):
            package = name.partition(".")[0]
            if package == "headwise":
                other = folder_of(name)
                used[folder] |= {other} & ALLOWED[folder]
                if other != folder and other not in ALLOWED[folder]:
                    against.add((folder, other))
            elif package in TRAINING and folder in WITH_TORCH:
                training.add(folder)
            elif package == "numpy" and folder in WITH_NUMPY:
                counting.add(folder)
            elif package == "triton":
                launching.add(module.rpartition(".")[2])
            elif package not in {"__future__", *sys.stdlib_module_names}:
                extras.setdefault(folder, set()).add(package)
    assert used == ALLOWED
    assert against == AGAINST
    assert extras == EXTRAS
    assert training == WITH_TORCH
    assert counting == WITH_NUMPY
    assert {name for name in launching if "_triton" not in name} == NEEDS_TRITON


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("show.figure", "from headwise.shape import Shape"),
        ("show.figure", "import torch"),
        ("show.figure", "def f():\n    import torch"),
        ("show.figure", "import matplotlib"),
        ("shape", "import numpy as np"),
        ("shape", "from headwise.configs import read_config"),
        ("shape", "def f():\n    from headwise.model.transformer import build"),
        ("stats", "from headwise import store"),
        ("training.engine", "from headwise.execute.sweep import sweep"),
        ("training.engine", "from headwise.lm.trainer import pretrain"),
        ("training.engine", "import pandas"),
        ("training.engine", "def f():\n    import duckdb"),
        ("lm.trainer", "def f():\n    from headwise.training.engine import train"),
        ("store", "import duckdb"),
        ("store", "from headwise.training.engine import train"),
        ("experiments.points", "from headwise.cli import main"),
        ("experiments.points", "import numpy"),
        ("tasks.images", "from PIL import Image"),
        ("tasks.images", "def f():\n    import torchvision"),
        ("tasks.hub", "from datasets import load_dataset"),
        ("tasks.hub", "from headwise.training.run import Run"),
        ("lm.corpus", "from tokenizers import Tokenizer"),
        ("tasks.neighbors", "from headwise.kernels.farthest_data_triton import farthest"),
        ("model.layers", "from headwise.kernels import has_triton, adamw_triton as kernel"),
        ("model.layers", "def f():\n    import triton"),
        ("kernels.nvrtc", "import triton.language as tl"),
        ("kernels.nvrtc", "from headwise.kernels import encoder_mlp_triton"),
        ("model.backends", "def f():\n    from headwise.training.fused_encoder import refusal"),
        ("cli.run", "from headwise.show.report import write_report\nimport torch"),
        ("model.cache", "if True:\n    import rich"),
        ("stats", "class A:\n    import torch"),
        ("integrations.transformers", "import transformers"),
        ("integrations.nanochat", "def f():\n    import nanochat"),
        ("cli.lm", "def f():\n    from headwise.integrations.nanochat import use"),
        ("tracking.find", "def f():\n    from headwise.integrations.trackers import wandb"),
        ("integrations.trackers.wandb", "import wandb"),
        ("theory.features", "from headwise import train"),
    ],
)
def test_planted_fault_is_found(module: str, source: str) -> None:
    assert f"headwise.{module}" in SOURCES
    assert faults(f"headwise.{module}", source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kernels.encoder_mlp_triton", "import triton.language as tl"),
        ("kernels.encoder_mlp_triton", "from headwise.kernels.adamw_triton import step"),
        ("training.step", "def f():\n    from headwise.kernels import adamw_triton as kernel"),
        ("tasks.neighbors", "from headwise.kernels import has_triton"),
        ("shape", "def f():\n    from headwise.configs import read_config"),
        ("cli.lm", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
    ],
)
def test_import_within_the_rules_passes(module: str, source: str) -> None:
    assert f"headwise.{module}" in SOURCES
    assert faults(f"headwise.{module}", source) == []


# ---- by way of others


@pytest.mark.parametrize("module", LIGHT)
def test_module_loads_nothing_heavy_by_any_way(module: str) -> None:
    assert loaded_with(f"headwise.{module}", SOURCES) == set()


def test_kernels_without_triton_load_it_by_no_way() -> None:
    for module in SOURCES:
        assert needs_triton(module) or "triton" not in loaded_with(module, SOURCES), module


@pytest.mark.parametrize(
    ("planted", "source"),
    [
        ("errors", "import torch"),
        ("rows", "from headwise.model.attention import attend"),
        ("rows", "from headwise import attend"),
        ("files", "from headwise.tasks import Farthest"),
        ("files", "class A:\n    import numpy as np"),
    ],
)
def test_planted_fault_is_found_by_way_of_others(planted: str, source: str) -> None:
    name = f"headwise.{planted}"
    sources = {**SOURCES, name: f"{SOURCES[name]}\n{source}\n"}
    assert loaded_with("headwise.store", sources) & {"torch", "numpy"}


HEAVY = {"torch", "numpy", "pandas", "duckdb", "matplotlib", "plotly", "transformers", "ray"}


def run_python(code: str) -> set[str]:
    """What a new process has loaded at the end of a program."""
    code += (
        "\nimport sys\nprint('LOADED', *sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_light_modules_load_no_torch_in_a_process() -> None:
    loaded = run_python("\n".join(f"import headwise.{module}" for module in LIGHT))
    assert not loaded & HEAVY


@pytest.mark.parametrize(
    "words",
    [
        "--help",
        "list",
        "cost --set dim=64 depth=2 num_heads=4",
        "policies --set dim=64 depth=2 num_heads=4 --policy split --to 1,2",
    ],
)
def test_command_loads_no_torch(words: str) -> None:
    code = (
        "from headwise.cli import main\n"
        f"try:\n    assert main({words.split()!r}) == 0\n"
        "except SystemExit as left:\n    assert not left.code"
    )
    assert not run_python(code) & HEAVY


@pytest.mark.parametrize(
    "command",
    [
        *("list --store", "report --store", "draw fig1", "list --live --store"),
        *("cancel --store", "export --to csv --store"),
    ],
)
def test_command_on_a_store_loads_no_torch(command: str, tiny_store: Path) -> None:
    """`draw` and `report` load what draws, and nothing that trains."""
    words = [*command.split(), str(tiny_store)]
    loaded = run_python(f"from headwise.cli import main\nassert main({words!r}) == 0")
    assert "torch" not in loaded


@pytest.mark.parametrize("words", ["--params 30M --kv-bytes 8KiB", "--params 30M --only-pareto"])
def test_plan_loads_numpy_and_no_torch(words: str) -> None:
    code = f"from headwise.cli import main\nassert main({['plan', *words.split()]!r}) == 0"
    assert run_python(code) & HEAVY == {"numpy"}


@pytest.fixture(scope="module")
def tiny_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.commands import finished

    return finished(tmp_path_factory.mktemp("imports"))
