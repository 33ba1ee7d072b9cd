"""One page from what `headwise inspect` found: maps by layer and head, spectra on
click, sentences, a table with filter and CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headwise import __version__
from headwise.files import write_whole
from headwise.show.pages import embed, environment, part, plotly

# What a map may show: (key, what it is called, form, which end is worth a look, digits).
MEASURES = (
    ("r90", "dimensions for 90 % of the energy"),
    ("effective", "effective rank"),
    ("stable", "stable rank"),
    ("r99", "dimensions for 99 % of the energy"),
    ("r999", "dimensions for 99.9 % of the energy"),
    ("condition", "condition number (log10)"),
    ("symmetric", "symmetric share of the energy"),
    ("angle", "angle to the identity, degrees"),
    ("trace", "trace over sum of singular values"),
    ("nearest", "cosine to the most similar head"),
    ("sharing", "loss where it shares with the nearest KV head"),
    ("norm", "norm"),
)
ON_DATA = (
    ("data_r90", "on data: dimensions for 90 % of the scores"),
    ("data_effective", "on data: effective rank of the scores"),
    ("data_entropy", "on data: entropy of the weights, of the most there can be"),
    ("data_first", "on data: weight on the first token"),
    ("data_largest", "on data: largest score"),
    ("data_share", "on data: share of the layer's output"),
)


def write_inspect_page(
    path: Path, found: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], command: str = ""
) -> None:
    """Write the page of an inspection, as `Inspection.to_json()` and `Inspection.rows` give it."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    page = (
        environment()
        .from_string(part("inspect.html"))
        .render(
            version=__version__,
            name=Path(str(found["path"])).name or str(found["path"]),
            found=found,
            first=found["layers"][0],
            heads=sum(layer["num_heads"] for layer in found["layers"]),
            measures=MEASURES + (ON_DATA if found["data"] else ()),
            columns=columns,
            command=command,
            plotly=plotly(),
            embed=embed,
            data={
                "layers": [_of_page(layer) for layer in found["layers"]],
                "controls": [_of_page(layer) for layer in found["controls"]],
                "controlOf": found["control_index"],
                "columns": columns,
                "rows": [[_short(row.get(column)) for column in columns] for row in rows],
                "data": _short(found["data"]),
                "others": [_other(one) for one in found["changes"]],
                "name": Path(str(found["path"])).name,
            },
        )
    )
    write_whole(path, page)


def _of_page(layer: Mapping[str, Any]) -> dict[str, Any]:
    """What the page draws of one layer, in four digits."""
    kept = ("layer", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "kv_width", "kv_ranks")
    kept += ("pairs", "pairs90", "distances", "effective_at", "bias_share", "qk", "vo")
    return {name: _short(layer[name]) for name in kept}


def _other(one: Mapping[str, Any]) -> dict[str, Any]:
    other = one["other"]
    return {
        "name": Path(str(other["path"])).name or str(other["path"]),
        "layers": [_of_page(layer) for layer in other["layers"]],
        "moved": _short(one["moved"]),
    }


def _short(value: Any) -> Any:
    """The same with numbers in four digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_short(one) for one in value]
    return value
