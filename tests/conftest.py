"""Fixtures for tests of several folders, and the choice of Triton's interpreter.

Kernels for GPUs run in Triton's interpreter where there is no GPU. It is chosen once, when triton is
first imported, which may be by any test, or by the collection of doctests; so it is chosen here,
before them all."""

import os
import socket

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def no_network(monkeypatch):
    """Whatever a task lacks, it never fetches."""

    def refuse(*given, **named):
        raise AssertionError("a task opened a connection")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)


@pytest.fixture
def products_as_on_a_gpu(monkeypatch):
    """Triton's interpreter multiplies with a GPU's arithmetic."""
    from support.gpu import multiply_as_a_gpu

    multiply_as_a_gpu(monkeypatch)
