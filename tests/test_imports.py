"""The one-way flow: who may import whom, read from the source; and the public names."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import headwise

ROOT = Path(headwise.__file__).parent
TRAINING = {"torch", "numpy", "safetensors"}

# In the order of the flow: a module may import only what stands above it, and of that only what is
# listed.
ALLOWED: dict[str, set[str]] = {
    "headwise": set(),
    "shape": set(),
    "families": {"shape"},
    "policies": {"shape"},
    "files": set(),
    "progress": set(),
    "stats": set(),
    "kernels": {"files"},
    "backends": {"shape", "kernels"},
    "cache": {"shape"},
    "attention": {"shape", "kernels", "backends", "cache"},
    "models": {"shape", "kernels", "attention", "cache"},
    "generate": {"shape", "cache", "models"},
    "infer": {"shape", "cache", "models", "generate"},
    "tasks": {"shape", "kernels"},
    "theory": {"shape", "attention", "models", "tasks"},
    "runs": {"shape", "models", "tasks"},
    "fused": {"shape", "kernels"},
    "trunk": {"shape", "kernels", "fused"},
    "stack": {"shape", "kernels", "models", "runs", "fused", "trunk"},
    "engine": {
        "headwise",
        "shape",
        "files",
        "progress",
        "models",
        "runs",
        "fused",
        "trunk",
        "stack",
    },
    "tokens": {"shape", "files", "tasks", "runs"},
    "ranks": {"shape", "models"},
    "optimise": {"shape", "ranks", "kernels"},
    "language": {"shape", "tokens", "optimise"},
    "pretrain": {
        "shape",
        "files",
        "progress",
        "models",
        "runs",
        "stack",
        "engine",
        "tokens",
        "ranks",
        "optimise",
        "language",
    },
    "store": {"shape", "files", "runs"},
    "experiments": {
        "shape",
        "files",
        "policies",
        "stats",
        "models",
        "tasks",
        "theory",
        "runs",
        "language",
    },
    "sweep": {"shape", "files", "progress", "runs", "engine", "language", "pretrain", "store"},
    "figures": set(),
    "report": {"headwise", "shape", "files", "progress", "store", "experiments", "figures"},
    "cli": {
        "headwise",
        "shape",
        "policies",
        "files",
        "backends",
        "infer",
        "fused",
        "trunk",
        "engine",
        "language",
        "runs",
        "tokens",
        "ranks",
        "pretrain",
        "store",
        "experiments",
        "sweep",
        "figures",
        "report",
    },
    "__main__": {"cli"},
    "integrations": {"shape", "backends", "attention"},
}
LATE = {
    ("shape", "families")
}  # inside a function, against the flow: a shape that reads a public config
FOR_GPUS = {
    "adamw",
    "heads",
    "layer",
    "points",
    "pre",
    "tiles",
}  # of the kernels: they import triton, so others import them inside functions only
STANDARD_ONLY = {
    "headwise",
    "shape",
    "families",
    "policies",
    "files",
    "progress",
    "stats",
    "sweep",
    "store",
    "experiments",
    "figures",
    "report",
    "cli",
    "__main__",
}
EXTRAS = {  # inside functions only
    "tasks": {"PIL", "datasets"},
    "tokens": {"tokenizers"},
    "experiments": {"numpy", "torch"},
    "store": {"duckdb"},
    "figures": {"matplotlib"},
    "report": {"jinja2", "plotly", "markupsafe"},
    "cli": {"jinja2", "matplotlib", "plotly", "torch"},
    "integrations": {"transformers"},
}


def family(path: Path) -> str:
    """A folder counts as one module."""
    first = path.relative_to(ROOT).parts[0].removesuffix(".py")
    return "headwise" if first == "__init__" else first


FILES = sorted(ROOT.rglob("*.py"))


def imports(source: str) -> list[tuple[str, bool]]:
    """Every (name, at module level); a name is dotted, and what comes from `headwise` itself is
    resolved to its module."""
    tree = ast.parse(source)
    typing_only = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    ]
    skipped = {id(inner) for node in typing_only for inner in ast.walk(node)}
    inside = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
    }
    found: list[tuple[str, bool]] = []
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            assert node.module is not None
            if node.module == "headwise":
                names = [
                    f"headwise.{a.name}" if a.name in ALLOWED else "headwise.headwise"
                    for a in node.names
                ]
            elif node.module == "headwise.kernels":
                names = [f"headwise.kernels.{a.name}" for a in node.names]
            else:
                names = [node.module]
        found += [
            ("headwise.headwise" if name == "headwise" else name, id(node) not in inside)
            for name in names
        ]
    return found


def faults(module: str, source: str, file: str = "") -> list[str]:
    """What a module's source imports against the rules; `file` says which of the kernels it is."""
    wrong, for_gpus = [], module == "kernels" and file in FOR_GPUS
    for name, top in imports(source):
        package, _, rest = name.partition(".")
        if package == "__future__" or package in sys.stdlib_module_names:
            continue
        if package == "headwise":
            other = rest.partition(".")[0]
            late = (module, other) in LATE and not top
            if other != module and other not in ALLOWED[module] and not late:
                wrong.append(f"{module} imports {other}")
            if (
                top
                and not for_gpus
                and other == "kernels"
                and FOR_GPUS.intersection(name.split(".")[2:3])
            ):
                wrong.append(f"{module} imports {name} at start-up, which needs triton")
        elif package in TRAINING:
            if top and module in STANDARD_ONLY:
                wrong.append(f"{module} imports {package} at start-up")
            if not top and module in STANDARD_ONLY and package not in EXTRAS.get(module, set()):
                wrong.append(f"{module} imports {package}")
        elif package == "triton":
            if not for_gpus:
                wrong.append(f"{module} imports triton")
        elif top or package not in EXTRAS.get(module, set()):
            wrong.append(f"{module} imports {package}{' at start-up' if top else ''}")
    return wrong


def test_every_module_is_placed_in_the_flow() -> None:
    assert {family(path) for path in FILES} == set(ALLOWED)


def test_the_flow_has_one_direction() -> None:
    above: set[str] = set()
    for module, allowed in ALLOWED.items():
        assert allowed <= above, f"{module} may import what stands below it: {allowed - above}"
        above.add(module)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_imports_only_what_it_may(path: Path) -> None:
    assert faults(family(path), path.read_text(), path.stem) == []


def test_the_kernels_for_gpus_are_these() -> None:
    with_triton = {
        path.stem
        for path in FILES
        if any(name.partition(".")[0] == "triton" for name, _ in imports(path.read_text()))
    }
    assert with_triton == FOR_GPUS


def test_nothing_is_allowed_that_is_not_used() -> None:
    used: dict[str, set[str]] = {module: set() for module in ALLOWED}
    for path in FILES:
        used[family(path)] |= {
            name.split(".")[1]
            for name, _ in imports(path.read_text())
            if name.startswith("headwise.")
        }
    for module, allowed in ALLOWED.items():
        assert allowed <= used[module], f"{module} no longer needs {allowed - used[module]}"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("figures", "from headwise.shape import Shape"),
        ("figures", "import torch"),
        ("figures", "def f():\n    import torch"),
        ("figures", "import matplotlib"),
        ("shape", "import numpy as np"),
        ("shape", "from headwise.configs import read_config"),
        ("shape", "def f():\n    from headwise.model.transformer import build"),
        ("stats", "from headwise import store"),
        ("engine", "from headwise.execute.sweep import sweep"),
        ("engine", "import pandas"),
        ("engine", "def f():\n    import duckdb"),
        ("store", "import duckdb"),
        ("store", "from headwise.training.engine import train"),
        ("experiments", "from headwise.store import Store"),
        ("tasks", "from headwise.model.transformer import build"),
        ("tasks", "from PIL import Image"),
        ("tasks", "def f():\n    import torchvision"),
        ("tasks", "from datasets import load_dataset"),
        ("tokens", "from tokenizers import Tokenizer"),
        ("engine", "from headwise.lm.trainer import pretrain"),
        ("tasks", "from headwise.kernels.farthest_data_triton import farthest"),
        ("stack", "from headwise.kernels import has_triton, layer as K"),
        ("stack", "def f():\n    import triton"),
        ("kernels", "import triton.language as tl"),
        ("kernels", "from headwise.kernels import heads"),
        ("backends", "def f():\n    from headwise.training.fused_encoder import refusal"),
        ("cli", "from headwise.show.report import write_report\nimport torch"),
        ("models", "if True:\n    import rich"),
        ("stats", "class A:\n    import torch"),
        ("integrations", "import transformers"),
        ("integrations", "def f():\n    import nanochat"),
        ("cli", "def f():\n    from headwise.integrations.nanochat import use"),
    ],
)
def test_a_planted_fault_is_found(module: str, source: str) -> None:
    assert faults(module, source)


@pytest.mark.parametrize(
    ("module", "source", "file"),
    [
        (
            "kernels",
            (
                "import triton.language as tl\nfrom headwise.kernels.attention_short_triton import "
                "inner"
            ),
            "layer",
        ),
        (
            "fused",
            (
                "def f():\n    from headwise.kernels import heads\n    from headwise.kernels "
                "import "
                "layer as K"
            ),
            "fused",
        ),
        (
            "tasks",
            (
                "from headwise.kernels import has_triton\ndef f():\n    from "
                "headwise.kernels.farthest_data_triton import farthest"
            ),
            "neighbors",
        ),
    ],
)
def test_what_is_right_passes(module: str, source: str, file: str) -> None:
    assert faults(module, source, file) == []


def test_the_command_line_starts_with_the_standard_library_and_shape() -> None:
    sources = [path.read_text() for path in (ROOT / "cli").glob("*.py")]
    names = {
        name
        for source in sources
        for name, top in imports(source)
        if top and name.partition(".")[0] not in sys.stdlib_module_names
    }
    assert {name for name in names if not name.startswith("headwise.cli")} == {"headwise.shape"}


# ---- public names

PUBLIC = [
    "Attention",
    "Classified",
    "Decoder",
    "Encoder",
    "Farthest",
    "Model",
    "Nearest",
    "Recipe",
    "Run",
    "Shape",
    "SquaredError",
    "Store",
    "Task",
    "UsageError",
    "attend",
    "explain",
    "train",
]


def test_the_public_names_are_these() -> None:
    assert headwise.__all__ == PUBLIC
    assert dir(headwise) == sorted([*PUBLIC, "__version__"])


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_can_be_imported_and_says_what_it_is(name: str) -> None:
    thing = getattr(headwise, name)
    assert thing is getattr(importlib.import_module(thing.__module__), name)
    assert thing.__module__.startswith("headwise.")
    assert thing.__doc__


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="module 'headwise' has no attribute 'Heads'"):
        _ = headwise.Heads
    with pytest.raises(ImportError):
        exec("from headwise import Heads", {})


def test_importing_the_package_costs_nothing() -> None:
    code = (
        "import sys; before = set(sys.modules); import headwise; print(*sorted(set(sys.modules) - "
        "before))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {name.partition(".")[0] for name in told.stdout.split()} - sys.stdlib_module_names
    assert heavy == {"headwise"}
    assert [name for name in told.stdout.split() if name.startswith("headwise")] == ["headwise"]
