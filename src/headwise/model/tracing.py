"""What PyTorch is doing to a call while it runs: symbols in place of sizes, transforms around it.

Compilers and exporters put symbols where sizes are. Whoever asks whether a symbol is smaller than a
number makes the answer a condition of the compiled program. So the choice of a backend asks only
what is sure, and takes what serves any size where it is not.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def sure(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes holds, whatever its symbols stand for; without symbols, whether
    it holds."""
    if not torch.compiler.is_compiling() and isinstance(condition, (bool, torch.Tensor)):
        return bool(condition)  # torch.jit.trace has tensors for sizes
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def alike(a: int, b: int) -> bool:
    """Whether two sizes are equal. Symbols that are equal while the program is made are taken to be
    equal for good; others may be anything."""
    if sure(a == b):
        return True
    hints = (getattr(getattr(n, "node", None), "hint", n) for n in (a, b))
    if not torch.compiler.is_dynamo_compiling() and len({*hints}) > 1:
        return False
    return a == b


def symbolic(*sizes: float) -> bool:
    """Whether symbols may stand for some of these sizes."""
    if torch.compiler.is_compiling():
        return True
    return not all(isinstance(size, (int, float)) for size in sizes)


def shown(size: float) -> str:
    """A size for a sentence, without asking what a symbol stands for."""
    return "some" if symbolic(size) else str(size)


def formula_wanted() -> bool:
    """Whether a kernel of ours gives way to the formula, which every transform of PyTorch takes:
    under torch.func (vmap, grad, jvp and what is made of them), forward derivatives and
    torch.jit.trace."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return forward_ad._current_level >= 0 or torch.jit.is_tracing()


def hooks_allowed() -> bool:
    """Whether saved tensors may be left out and made again; torch.func does not allow it."""
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None


def autocast_dtype(device: str) -> torch.dtype | None:
    """What autocast computes in on this kind of device, None where it is off."""
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)
