"""Kernels for GPUs run in Triton's interpreter where there is no GPU. It is chosen once, when
triton is first imported, which may be by any test, or by the collection of doctests; so it is
chosen here, before them all."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
