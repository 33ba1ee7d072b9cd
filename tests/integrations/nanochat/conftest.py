"""nanochat's modules, for tests of its own GPT under the hook."""

import importlib
import importlib.util
import sys
import types

import pytest
import torch


@pytest.fixture
def nano(monkeypatch):
    """nanochat's modules; where its tokenizer's packages are missing an empty one stands in."""
    if importlib.util.find_spec("rustbpe") is None or importlib.util.find_spec("tiktoken") is None:
        stand_in = types.ModuleType("nanochat.tokenizer")
        stand_in.get_tokenizer = None
        monkeypatch.setitem(sys.modules, "nanochat.tokenizer", stand_in)
    names = ("gpt", "engine", "checkpoint_manager", "common", "optim")
    with torch.compiler.set_stance(
        "force_eager"
    ):  # its optimiser compiles itself, which takes longer than all of these tests
        yield types.SimpleNamespace(
            **{name: importlib.import_module(f"nanochat.{name}") for name in names}
        )
