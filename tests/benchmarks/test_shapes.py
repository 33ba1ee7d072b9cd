"""Random shapes against PyTorch: which they are, and that each becomes a row, errors too."""

import dataclasses
import json

import pytest
import torch

from benchmarks import shapes, shapes_timed
from benchmarks.shapes import COUNTS, all_cases, errors_of, main, read_rows, tables
from benchmarks.shapes_cases import AttentionCase, attention_cases, decoder_cases, ensemble_cases
from headwise.model.reference import mask_of


def test_cases_are_enough_and_stay_what_they_are():
    assert COUNTS["attention"] >= 100
    assert COUNTS["ensemble"] >= 40
    assert COUNTS["decoder"] >= 12
    for maker in (attention_cases, ensemble_cases, decoder_cases):
        few, many = maker(14), maker(17)
        assert [case.name for case in many[:14]] == [case.name for case in few]
        assert len({case.name for case in many}) == 17


def test_cases_of_all_kinds_take_turns():
    cases = all_cases(list(COUNTS), COUNTS, tiny=False)
    assert len(cases) == sum(COUNTS.values())
    kinds = [shapes.kind_of(case) for case in cases[: len(cases) // 4]]
    assert all(kinds.count(kind) >= COUNTS[kind] // 5 for kind in COUNTS)


@pytest.mark.parametrize(
    ("causal", "window", "queries"), [(True, 0, 11), (True, 3, 7), (False, 4, 11), (False, 0, 5)]
)
def test_cases_count_the_scores_that_a_mask_leaves(causal, window, queries):
    case = AttentionCase(2, 3, 3, queries, 11, 5, 7, causal, window, "fp32")
    mask = torch.ones(queries, 11, dtype=torch.bool)
    if causal or window:
        mask = mask_of(queries, 11, causal, window, torch.device("cpu"))
    assert case.pairs == 2 * 3 * int(mask.sum())
    assert case.rounded() == dataclasses.replace(case, queries=128, keys=128, rank=64, width=64)


@pytest.fixture
def rows(tmp_path, capsys, monkeypatch):
    """Of a few small cases, of which one attention fails in one way and one ensemble in all."""
    ours = shapes_timed._ours

    def broken(case):
        if case.rank == 36:
            raise RuntimeError("planted\nfault")
        return ours(case)

    monkeypatch.setattr(shapes_timed, "_ours", broken)
    path = tmp_path / "rows.jsonl"
    words = ["--out", str(path), "--tiny", "--eager", "--device", "cpu"]
    main([*words, "--kinds", "attention", "decoder"])
    first = path.read_text()
    with path.open("a") as file:
        file.write('{"name": "cut o')
    main([*words, "--kinds", "attention", "decoder"])
    assert path.read_text() == first + '{"name": "cut o', "nothing is measured twice"
    main([*words, "--kinds", "attention", "decoder", "--retry", "--only", "36/36"])
    assert len(path.read_text().splitlines()) == len(first.splitlines()) + 2, "a line of its own"
    assert path.with_suffix(".png").stat().st_size > 1000
    assert "complete" in capsys.readouterr().out
    return list({row["name"]: row for row in read_rows(path)}.values())


def test_rows_hold_every_way_its_error_and_where_it_ran(rows):
    broken = [row for row in rows if "error" in row]
    assert [row["error"] for row in broken] == ["RuntimeError: planted"]
    assert "36/36" in broken[0]["name"]
    for row in rows:
        assert {"device", "commit", "torch", "finished", "seconds"} <= set(row)
        if row in broken:
            continue
        others = row["pytorch_ms"] if row["kind"] == "attention" else row["others_ms"]
        assert set(others) == ({"math", "flash"} if row["kind"] == "attention" else
                               {"single", "stacked"})  # fmt: skip
        assert row["best_ms"] == min(others.values())
        assert row["best_ms"] == pytest.approx(row["ratio"] * row["ours_ms"])
        for found in row["accuracy"].values():
            assert max(found if isinstance(found, list) else [found]) < 1e-2
        assert errors_of(row) < 4


def test_tables_begin_with_the_worst_and_name_what_failed():
    def row(name, ratio):
        return {"kind": "attention", "name": name, "ratio": ratio, "ours_ms": 2.0,
                "backend": "wide", "best": "flash", "best_ms": 2 * (ratio or 0)}  # fmt: skip

    lines = tables([row("a", 1.5), row("b", 0.5), {**row("c", None), "error": "Boom: no"}])
    assert "3 cases, 1 without a ratio; geometric mean 0.87, least 0.50, 1 below 1" in lines[1]
    assert [line.split()[1] for line in lines[2:4]] == ["b:", "a:"]
    assert lines[4] == "   -  c: Boom: no"
    assert json.dumps(lines)
