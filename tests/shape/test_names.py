"""Names as people type them."""

import dataclasses
import re
from pathlib import Path

import pytest

from headwise.cli.shapes import shape_of
from headwise.errors import UsageError
from headwise.shape import ALIASES, BY_LAYER, Shape

FIELDS = {f.name for f in dataclasses.fields(Shape)}


def test_names_mean_fields_and_hide_none():
    assert set(ALIASES.values()) <= FIELDS
    assert not set(ALIASES) & FIELDS
    values = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    values |= {"num_key_value_heads": 2, "intermediate_size": 96}
    assert Shape.of(values) == Shape(dim=64, depth=2, num_heads=4, num_kv_heads=2, ffn_dim=96)
    assert Shape.of({"d_model": 64, "layers": 2, "heads": 4, "d_ff": 96, "n_kv_heads": 2}) == (
        Shape.of(values)
    )
    with pytest.raises(TypeError, match="hidden_size"):
        Shape(hidden_size=64, depth=2, num_heads=4)


def test_two_names_of_one_size_are_refused():
    with pytest.raises(UsageError, match=r"^dim and d_model are two names of one size: give one"):
        Shape.of({"dim": 8, "d_model": 8, "depth": 1, "num_heads": 1})
    with pytest.raises(UsageError, match=r"^n_head and heads are two names of one size"):
        shape_of(["dim=8", "depth=1", "n_head=2", "heads=2"])


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ({"n_head": 3}, "head_dim must be given when n_head does not divide hidden_size, got "
         "hidden_size 64, n_head 3"),
        ({"n_head": 4, "kv_heads": 3}, "n_head must be a multiple of kv_heads, got n_head 4, kv_h"),
        ({"n_head": "4"}, "n_head must be a whole number, got '4'"),
        ({"n_head": [4, 3], "d_head": 2, "kv_heads": 4}, "layer 1: n_head must be a multiple of k"),
        ({"n_head": 4, "d_ff": -1}, "d_ff must not be negative, got -1"),
    ],
)  # fmt: skip
def test_errors_are_in_the_words_that_were_typed(typed, message):
    with pytest.raises(UsageError) as caught:
        Shape.of({"hidden_size": 64, "n_layer": 2, **typed})
    assert str(caught.value).startswith(message)


def test_command_line_takes_typed_names_and_lists_by_layer():
    found = shape_of(["d_model=64", "layers=4", "n_head=8,8,4,4", "windows=3,0", "shared_kv=true"])
    expected = Shape(dim=64, depth=4, num_heads=(8, 8, 4, 4), windows=(3, 0), shared_kv=True)
    assert found == expected
    assert shape_of(["dim=64", "depth=2", "num_heads=8", "shared_kv=true,false"]) == Shape(
        dim=64, depth=2, num_heads=8, shared_kv=(True, False)
    )
    for change, message in {
        "num_heads=8,x": "num_heads must be a whole number, got 'x'",
        "n_head=8,": "n_head must be a whole number, got ''",
        "dim=8,8": "dim must be a whole number, got '8,8'",
        "hidden=8": "unknown shape key 'hidden'",
    }.items():
        others = ["depth=2", "dim=64"] if "head" in change else ["depth=2", "num_heads=8"]
        with pytest.raises(UsageError, match=f"^{message}"):
            shape_of([*others, change])


def test_page_lists_every_field_and_name():
    page = (Path(__file__).parents[2] / "docs" / "shapes.md").read_text()
    fields, names = page.split("## Names as people type them")
    rows = [line for line in fields.splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(listed) == sorted(FIELDS)
    by_layer = fields.split("What may differ by layer:")[1].split(". ")[0]
    assert re.findall(r"`(\w+)`", by_layer) == list(BY_LAYER)
    typed = {
        name: row.split("`")[1]
        for row in names.splitlines()
        if row.startswith("| `")
        for name in re.findall(r"`(\w+)`", row.split("|")[2])
    }
    assert typed == {**ALIASES, "layers": "depth"}
