"""`explore`: a shape, a config or rows -> the page of the explorer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headwise.errors import UsageError, shown
from headwise.experiments.measured import best_shape, measured, page_values
from headwise.planning.costs import At
from headwise.rows import Row
from headwise.shape import Shape
from headwise.show.explorer_page import write_explorer_page
from headwise.store import MARK, Store, read_rows

# A decoder of 368 million parameters, as many are built today.
DECODER = Shape(
    dim=1024,
    depth=24,
    num_heads=16,
    head_dim=64,
    num_kv_heads=8,
    ffn_dim=2816,
    qk_rope_head_dim=64,
    activation="swiglu",
    causal=True,
    vocab_size=32768,
)


def explore(
    start: Shape | str | Path | Mapping[str, Any] | None = None,
    *,
    rows: str | Path | Sequence[str | Path] = (),
    store: str | Path | None = None,
    output: str | Path = "explorer.html",
    context: int | None = None,
    batch: int = 1,
    dtype: str = "bf16",
    name: str = "",
) -> Path:
    """Write the explorer: one page that needs no network, on which a shape is moved by sliders.

    It shows exact costs, what would run the attention, neighbours at equal budget, and with `rows`
    (files) or a `store` the measured map and where the shape lies on it. It starts from a shape, a
    config.json, the best measured shape, or a decoder as many are built today.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> shape = Shape(dim=64, depth=2, num_heads=4, causal=True, vocab_size=256)
    >>> page = explore(shape, output=f"{folder}/explorer.html", context=64)
    >>> page.name, page.stat().st_size < 100_000
    ('explorer.html', True)
    """
    output = Path(output)
    if output.is_dir() or (output.exists() and not output.is_file()):
        raise UsageError(f"output names a file to write, got {shown(str(output))}")
    if not output.parent.is_dir():
        raise UsageError(f"there is no folder {shown(str(output.parent))} to write into")
    found = _rows(rows, store)
    tasks = [] if found is None else measured(found)
    shape = _start(start, tasks)
    values = page_values(shape, tasks, context, batch, dtype)
    At(**values["at"])  # which refuses what cannot be
    write_explorer_page(output, values, name or _name(start))
    return output


def _start(start: Any, tasks: Sequence[dict[str, Any]]) -> Shape:
    """The shape that the page shows first."""
    if isinstance(start, Shape):
        return start
    if start is not None:
        return Shape.from_hf(start)
    return best_shape(tasks[0]) if tasks else DECODER


def _name(start: Any) -> str:
    """What the page is called: after the file or folder of a config."""
    if not isinstance(start, str | Path):
        return ""
    path = Path(start)
    return path.parent.name if path.suffix == ".json" and path.parent.name else path.name


def _rows(rows: str | Path | Sequence[str | Path], store: str | Path | None) -> list[Row] | None:
    """The rows of files and of a store, each run once; None: none were asked for."""
    files = [rows] if isinstance(rows, str | Path) else list(rows)
    if not files and store is None:
        return None
    found = [row for file in files for row in read_rows(Path(file))]
    if store is not None:
        if not (Path(store) / MARK).exists():
            raise UsageError(f"there is no store at {shown(str(store))}")
        found += Store(store, create=False).rows()
    return list({row.get("id", i): row for i, row in enumerate(found)}.values())
