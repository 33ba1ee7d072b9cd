"""Data sets of the Hugging Face hub: `hf:NAME` or `hf:NAME/CONFIG`, loaded by its own library,
which keeps what it has fetched and shows its progress. A folder of csv or parquet files that this
library reads is `hf:` and its path."""

from __future__ import annotations

import functools
from typing import Any

from headwise.errors import UsageError

MARK = "hf:"


def on_hub(source: str) -> bool:
    """Whether a source is a data set of the hub."""
    return source.startswith(MARK)


def part(source: str, *splits: str) -> Any:
    """One part of a data set, a table with `column_names`: the first of `splits` that it has."""
    found = _load(source)
    for split in splits:
        if split in found:
            return found[split]
    raise UsageError(
        f"{source} needs a part named {' or '.join(splits)}, it has {', '.join(map(str, found))}"
    )


def column(source: str, table: Any, *names: str) -> list[Any]:
    """One column of a part, without gaps: the first of `names` that it has."""
    for name in names:
        if name in table.column_names:
            values = list(table[name])
            for row, value in enumerate(values, 1):
                if value is None:
                    raise UsageError(f"the column {name} of {source} has nothing in row {row}")
            return values
    raise UsageError(
        f"{source} needs a column named {' or '.join(names)}, it has "
        f"{', '.join(table.column_names)}"
    )


@functools.lru_cache(4)
def _load(source: str) -> Any:
    try:
        import datasets
    except ModuleNotFoundError:
        raise UsageError(
            f"{source} needs the library datasets: pip install 'headwise[hub]'"
        ) from None
    # Before version 4 a data set could bring a script along, which was run.
    if int(datasets.__version__.split(".")[0]) < 4:
        raise UsageError(
            f"{source} needs datasets 4 or newer, which runs no code of a data set; this is "
            f"{datasets.__version__}: pip install 'headwise[hub]'"
        )
    name = source.removeprefix(MARK)
    if not name:
        raise UsageError(
            f"{MARK} must be followed by a data set's name, as in {MARK}nyu-mll/glue/sst2"
        )
    # A name of two parts is tried as OWNER/NAME first, then as NAME/CONFIG.
    for path, config in _readings(name):
        try:
            return datasets.load_dataset(path, config)
        except FileNotFoundError:  # also a name that the hub does not know
            continue
        except ConnectionError:
            raise UsageError(
                f"the Hugging Face hub cannot be reached for {source}; a folder with the data "
                "needs no network"
            ) from None
        except Exception as e:  # whatever a data set's files and its reader raise
            why = " ".join(str(e).split())[:200]
            raise UsageError(f"{source} cannot be loaded: {type(e).__name__}: {why}") from None
    raise UsageError(
        f"there is no data set {name} on the Hugging Face hub; names are OWNER/NAME, maybe with "
        "/CONFIG behind"
    )


def _readings(name: str) -> list[tuple[str, str | None]]:
    """A path may end in a configuration: a/b/c has one; a/b is a data set, else the configuration b
    of a."""
    front, _, last = name.rpartition("/")
    if not front or name.startswith((".", "/")):
        return [(name, None)]
    return [(front, last)] if "/" in front else [(name, None), (front, last)]
