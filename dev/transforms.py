"""The whole table of transforms x forms x backends beside PyTorch's own attention (minutes):

    PYTHONPATH=src:tests:tests/model python dev/transforms.py

One character per backend: . the same answer, X an error where PyTorch has none, D another answer,
- an error where PyTorch has one too, + an answer where PyTorch has none.
"""

import logging
import time
import warnings

from support.transforms import TRANSFORMS, autocast, result
from test_transforms import FORMS, operands

from headwise.model.plans import plans


def mark(found, expected, tolerance):
    """One character of the table."""
    if isinstance(found, Exception):
        return "-" if isinstance(expected, Exception) else "X"
    if isinstance(expected, Exception):
        return "+"
    if [(t.shape, t.dtype) for t in found] != [(t.shape, t.dtype) for t in expected]:
        return "D"
    largest = max(t.abs().max().item() for t in expected)
    errors = ((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))
    return "." if max(errors) <= tolerance * largest else "D"


def main():
    """Print the table, a transform a line."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    for form, (*_, backends) in FORMS.items():
        print(f"{form:20} {' '.join(backends)}")
    for transform in TRANSFORMS:
        cells, start = [], time.time()
        for sizes, ours, theirs, backends in FORMS.values():
            tensors = operands(*sizes)
            expected = result(transform, theirs, tensors)
            cell = ""
            for backend in backends:
                plans.clear()
                found = result(transform, lambda *t, f=ours, b=backend: f(*t, backend=b), tensors)
                cell += mark(found, expected, 2**-7 if transform is autocast else 1e-5)
            cells.append(cell)
        print(f"{transform.__name__:30} {' '.join(cells)}  {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
