"""The public names: these and no others, each with a docstring; importing them costs nothing."""

import importlib
import re
import subprocess
import sys

import pytest

import headwise
from dev.write_api_reference import FILE, reference

PUBLIC = [
    "Attention",
    "Classified",
    "Decoder",
    "Encoder",
    "Farthest",
    "Model",
    "Nearest",
    "Plan",
    "Recipe",
    "Run",
    "Shape",
    "SquaredError",
    "Store",
    "Task",
    "UsageError",
    "attend",
    "choose",
    "convert",
    "explain",
    "explore",
    "inspect",
    "plan",
    "run",
    "train",
]


def test_public_names_are_these() -> None:
    assert headwise.__all__ == PUBLIC
    assert dir(headwise) == sorted([*PUBLIC, "__version__"])


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_can_be_imported_and_says_what_it_is(name: str) -> None:
    thing = getattr(headwise, name)
    assert thing is getattr(importlib.import_module(thing.__module__), name)
    assert thing.__module__.startswith("headwise.")
    assert thing.__doc__


def test_reference_is_what_is_generated() -> None:
    assert FILE.read_text() == reference(), "docs/api.md is out of date: run `make docs`"


def test_reference_has_every_public_name_with_its_arguments() -> None:
    page = FILE.read_text()
    for name in PUBLIC:
        assert re.search(rf"^## headwise\.{name}, a (class|function)$", page, re.M)
    assert "| `qk_rope_head_dim` | int | rotated coordinates of each head" in page
    assert "    kv_bytes_per_token" not in page  # no field is taken for an argument
    assert "| `kv_bytes(tokens = 1, *, batch = 1, bytes_per = 2, inputs = False)` |" in page


def test_unknown_name_of_the_package_is_refused() -> None:
    with pytest.raises(AttributeError, match="module 'headwise' has no attribute 'Heads'"):
        _ = headwise.Heads
    with pytest.raises(ImportError):
        exec("from headwise import Heads", {})


def test_importing_the_package_costs_nothing() -> None:
    code = (
        "import sys; before = set(sys.modules); import headwise; print(*sorted(set(sys.modules) - "
        "before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {name.partition(".")[0] for name in done.stdout.split()} - sys.stdlib_module_names
    assert heavy == {"headwise"}
    assert [name for name in done.stdout.split() if name.startswith("headwise")] == ["headwise"]
